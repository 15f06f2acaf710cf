"""What a user installs and reads first: names, dependencies, import, README commands."""

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import zmlx
from zmlx import native

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
TEXTS = [
    path
    for pattern in ("*.md", "*.toml", ".ci/*", "docs/**/*.md", "zig/**/*.md", "**/*.py", "**/*.cc")
    for path in ROOT.glob(pattern)
    if path.is_file() and not {".venv", ".ci-venv", "build"} & set(path.relative_to(ROOT).parts)
]


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_changelog_begins_with_the_version():
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert heading is not None
    assert heading[1] == zmlx.__version__


def test_nothing_tells_a_user_to_install_another_projects_package():
    """`zmlx` on PyPI is not this project; the distribution is `zmlx-kernels`."""
    wrong = re.compile(r"pip install\b[^\n&;|]*[\s'\"]zmlx(?![\w-])")
    found = [str(path) for path in TEXTS if wrong.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_no_back_end_is_a_plain_dependency():
    """mlx-cpu and mlx-cuda-* both write mlx/lib/libmlx.so: a plain dependency on one would
    silently replace the back end of a user who has another."""
    plain = re.search(r"^dependencies = \[(.*?)\]", PYPROJECT, re.M | re.S)
    assert plain is not None
    names = re.findall(r'"([\w-]+)', plain[1])
    assert names == ["mlx", "numpy"]


def test_the_oldest_mlx_is_the_same_for_pip_and_for_the_core():
    bound = re.search(r'"mlx>=([\d.]+)"', PYPROJECT)
    assert bound is not None
    assert tuple(map(int, bound[1].split("."))) == native.OLDEST_MLX


def test_zig_is_pinned_in_one_place():
    pins = [path.name for path in TEXTS if re.search(r"ziglang\s*==", path.read_text("utf-8"))]
    assert pins == ["pyproject.toml"]


def test_every_import_of_the_package_is_declared():
    """An undeclared import works on the developer's machine and fails on the user's."""
    declared = {
        "mlx": "mlx",
        "numpy": "numpy",
        "autograd": "autograd",
        "scipy_openblas32": "scipy-openblas32",
        "mlx_lm": "mlx-lm",
    }
    optional = {"torch"}  # a baseline of the benchmark, used where it is installed
    imported = set()
    for path in (ROOT / "zmlx").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"zmlx"} - optional
    assert foreign <= declared.keys()
    for module in foreign:
        assert re.search(rf'"{declared[module]}\b', PYPROJECT), module


@pytest.fixture
def without_back_end(tmp_path):
    """A folder whose `mlx` fails as the Linux wheel does when no back end is installed."""
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").touch()
    (tmp_path / "mlx" / "core.py").write_text(
        "raise ImportError('libmlx.so: cannot open shared object file')"
    )
    return tmp_path


NO_BACK_END = """
    import importlib.metadata as metadata
    def version(name):
        if name == "mlx":
            return "0.32.4"
        raise metadata.PackageNotFoundError(name)
    metadata.version = version
"""


@pytest.mark.parametrize(
    "use",
    [
        "import zmlx; zmlx.kernels",
        "from zmlx import use_openblas",
        "import zmlx.testing",
        "from zmlx.metal import kernel",
        "from zmlx.kernels import rms_norm",
        "from zmlx.__main__ import main; sys.exit(main(['doctor']))",
    ],
)
def test_without_a_back_end_every_way_in_says_what_to_install(use, without_back_end):
    code = f"{NO_BACK_END}\n    import sys\n    {use}"
    done = python(code, PYTHONPATH=str(without_back_end))
    assert done.returncode == 1
    assert "installed without a back end (libmlx.so" in done.stderr
    if sys.platform.startswith("linux"):
        assert "pip install 'mlx[cpu]'" in done.stderr


def test_without_a_back_end_the_command_line_says_so_in_a_line(without_back_end):
    done = subprocess.run(
        [sys.executable, "-m", "zmlx", "doctor"],
        env={**os.environ, "PYTHONPATH": str(without_back_end)},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("[zmlx] MLX does not load: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("installed", "complaint"),
    [
        ({"mlx": "0.32.4", "mlx-cpu": "0.32.4"}, None),
        ({"mlx": "0.32.4", "mlx-cpu": "0.32.2"}, "must have the same version"),
        (
            {"mlx": "0.32.4", "mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"},
            "overwrite each other's libmlx.so",
        ),
    ],
)
def test_back_ends_that_do_not_fit_are_named(installed, complaint, monkeypatch):
    from importlib import metadata

    from zmlx import backend

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    if complaint is None:
        assert backend.conflict() is None
    else:
        assert complaint in backend.conflict()
        assert "Remedy: pip " in backend.conflict()


def test_import_loads_no_other_package():
    """Nor the parts of zmlx: each is loaded by its first use."""
    code = """
        import sys
        import mlx.core
        before = set(sys.modules)
        import zmlx
        new = {name for name in sys.modules if name not in before}
        print(sorted({name.split(".")[0] for name in new} - set(sys.stdlib_module_names)))
        print(sum(name.startswith("zmlx.") for name in new))
    """
    packages, parts = python(code).stdout.splitlines()
    assert packages == "['zmlx']"
    assert int(parts) <= 5


def test_ci_runs_the_readmes_commands():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    demo, tests = re.findall(r"```sh\n(.*?)\n```", readme, re.S)
    assert demo.endswith(' && pip install ".[cpu]" && python -m zmlx demo')
    *_, install, run = tests.split(" && ")
    assert install == 'pip install -e ".[cpu,dev,lm]"'
    assert 'environment main -e ".[cpu,dev,lm]"' in script
    assert script.rstrip().endswith(f"in_environment main {run}")


def test_the_ci_script_is_valid_bash():
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)
