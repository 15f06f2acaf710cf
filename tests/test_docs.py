"""Pages are current, and what they show runs."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zmlx import kernels
from zmlx.cli import language
from zmlx.cli.page import page
from zmlx.registry import ops

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "UPSTREAMING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_catalogue_page_is_current():
    """Otherwise: python -m zmlx list --page > docs/catalogue.md"""
    assert (ROOT / "docs" / "catalogue.md").read_text() == page()


@pytest.mark.parametrize("op", tuple(ops()), ids=lambda o: o.name)
def test_the_catalogue_page_is_of_what_a_user_calls(op):
    """And not of the entry's function, which tests and benchmarks call."""
    parameters = inspect.signature(getattr(kernels, op.name)).parameters
    text = page().partition(f"### `{op.name}`\n")[2].partition("\n### ")[0]
    call = re.search(rf"^{op.name}\((.*)\)$", text, re.MULTILINE)[1]
    names = re.findall(r"(?:^|, )(\*{0,2}\w+)(?=: )", call)
    assert names == list(parameters)
    for name, cell in re.findall(r"^\| `(\w+)` \| \| (.*) \| \|$", text, re.MULTILINE):
        default = parameters[name].default
        assert cell == ("required" if default is inspect._empty else f"default `{default}`")


def test_the_page_of_the_language_is_current():
    """Otherwise: python -m zmlx language --page > docs/language.md"""
    assert (ROOT / "docs" / "language.md").read_text() == language.page()


@pytest.mark.parametrize(
    "path", [p for p in PAGES if p.name != "catalogue.md"], ids=lambda p: p.name
)
def test_python_blocks_run_in_order(path, tmp_path):
    """As a program of their own, since some change what the whole process does."""
    blocks = BLOCK.findall(path.read_text())
    if blocks:
        script = tmp_path / f"{path.stem}.py"
        script.write_text("\n".join(blocks))
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def anchors(page):
    """What GitHub calls the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_inside_the_repository_lead_somewhere(path):
    for link in re.findall(r"\]\(([^):]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
