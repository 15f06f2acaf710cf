"""Folders of their own for what `mx.compile` compiles in each process of a run of tests.

On a CPU, MLX keeps the libraries that it compiles in one folder of all processes. One that finds a
library there which another is just writing ends, since MLX raises where C++ may not. So each worker
has its folder, which begins with links to all that earlier runs finished.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

_ALL = Path(tempfile.gettempdir(), f"zmlx-tests-{os.getuid()}")


def _link(source, target):
    """Links the files below `source` that `target` does not have."""
    for path in source.glob("mlx/*/*/*"):
        to = target / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists():
            with suppress(FileExistsError):  # by another worker
                os.link(path, to)


def begin(worker):
    """Puts the folder for temporary files of this process, which MLX's is in, below one's own."""
    own = Path(tempfile.mkdtemp(prefix=f"{worker}-", dir=_folder()))
    _link(_ALL / "finished", own)
    os.environ["TMPDIR"] = str(own)
    tempfile.tempdir = None
    return own


def end(own):
    """Hands on what the worker compiled."""
    _link(own, _ALL / "finished")


def _folder():
    _ALL.mkdir(mode=0o700, exist_ok=True)
    return _ALL
