"""Text that nobody would write is refused with its place; nothing crashes and nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", range(2))
def test_damaged_kernels_are_rewritten_or_refused(seed: int, tmp_path: Path) -> None:
    latest = tmp_path / "latest"
    command = [sys.executable, str(Path(__file__).with_name("fuzz_worker.py"))]
    done = subprocess.run(
        [*command, str(seed), "1500", str(latest)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:], latest.read_text())
    assert done.stdout == ""
