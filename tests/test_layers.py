"""Lower layers never import higher ones, and nothing heavy is imported with the package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zmlx

ROOT = Path(zmlx.__file__).parent

#: From the bottom up; a module may import what stands before it.
LAYERS = (
    "version", "backend", "cache", "expr", "msl", "philox", "codegen", "arguments", "launch",
    "tiles", "native", "blas", "targets", "remembered", "transforms", "interpret", "checks",
    "requests", "metal", "pattern", "body", "packed", "broadcasting", "autograd", "elementwise",
    "rowwise", "jit_compiler", "registry", "kernels", "testing", "strict", "language", "claims",
    "interop", "choice", "stand_in", "nn", "optimizers", "patching", "chart", "bench", "demo",
    "cli", "__main__",
)  # fmt: skip


def imports(path: Path) -> set[str]:
    """Top-level zmlx modules that a file imports, at any depth of its code."""
    package = ("zmlx", *path.relative_to(ROOT).parts[:-1])
    found = set()
    tree = ast.parse(path.read_text())
    # Names for a type checker are not imported.
    tree.body = [
        n
        for n in tree.body
        if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = [*base, *(node.module.split(".") if node.module else [])]
            names = [[*module, a.name] for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".") for a in node.names]
        else:
            continue
        found.update(n[1] for n in names if n[0] == "zmlx" and len(n) > 1)
    return found & set(LAYERS)


@pytest.mark.parametrize("module", LAYERS)
def test_imports_go_down(module):
    files = [ROOT / f"{module}.py", *(ROOT / module).rglob("*.py")]
    height = LAYERS.index(module)
    for path in files:
        if path.exists():
            higher = {n for n in imports(path) if LAYERS.index(n) > height}
            # An op's entry names the catalogue that fills the registry.
            if module == "registry":
                higher.discard("kernels")
            assert not higher, f"{path.name} imports {higher}"


def test_every_module_has_a_layer():
    modules = {p.stem for p in ROOT.glob("*.py")} | {p.parent.name for p in ROOT.glob("*/*.py")}
    assert modules - {"__init__"} <= set(LAYERS)


def test_import_is_light():
    code = (
        "import sys, mlx.core; before = set(sys.modules); import zmlx; "
        "print(sorted(m for m in set(sys.modules) - before if not m.startswith('zmlx')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"numpy", "torch", "autograd", "hypothesis"} & set(ast.literal_eval(out.stdout))
