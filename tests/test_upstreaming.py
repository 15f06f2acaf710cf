"""What UPSTREAMING.md offers to MLX runs without zmlx on a Mac, and through `zmlx.install` here."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "upstreaming"
FILES = sorted(FOLDER.glob("*.py"))

#: Runs pytest over the folder as on a Mac; the kernels run on this machine's target.
INSTALLED = """
import sys, pytest, zmlx
with zmlx.install():
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-rA", sys.argv[1]]))
"""


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_nothing_offered_knows_zmlx(path):
    assert "zmlx" not in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_all_that_is_offered_runs_through_install(path):
    if not path.name.startswith("test_"):
        assert (FOLDER / f"test_{path.name}").exists()
        return
    done = run(INSTALLED, str(path))
    assert done.returncode == 0, done.stdout[-3000:]
    tests = [n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
    for name in tests:
        if name.startswith("test_"):
            assert f"::{name}" in done.stdout, name
    assert "SKIPPED" not in done.stdout


def test_the_page_names_every_file():
    page = (ROOT / "UPSTREAMING.md").read_text()
    assert [p.name for p in FILES if p.name not in page] == []
