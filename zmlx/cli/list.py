"""List the ops of the catalogue by family, with formula and what can be differentiated."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from typing import Any


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("family", nargs="?", help="only this family")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--page", action="store_true", help="print docs/catalogue.md")


def run(arguments: argparse.Namespace) -> int:
    """Prints the catalogue and returns the exit status."""
    from zmlx import registry

    if arguments.page and (arguments.family is not None or arguments.json):
        print("[list] '--page' must be given alone: it is of all families.", file=sys.stderr)
        return 2
    if arguments.page:
        from .page import page

        print(page(), end="")
        return 0
    families = sorted({op.family for op in registry.ops()})
    if arguments.family is not None and arguments.family not in families:
        print(
            f"[list] 'family' must be one of {', '.join(families)} but got {arguments.family}.",
            file=sys.stderr,
        )
        return 2
    rows = [
        {
            "name": op.name,
            "family": op.family,
            "summary": op.summary,
            "formula": op.formula,
            "arguments": {argument.name: argument.shape for argument in op.arguments},
            **_options(op),
            "gradients": [op.arguments[index].name for index in op.differentiable],
        }
        for op in registry.ops(arguments.family)
    ]
    if arguments.json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
        return 0
    family = None
    for row in rows:
        if row["family"] != family:
            family = row["family"]
            print(family)
        gradients = "∂" if row["gradients"] else " "
        print(f"  {row['name']:<20} {gradients}  {row['formula']}")
    print(f"\n{len(rows)} ops; ∂: has a gradient. `python -m zmlx show OP` prints a kernel.")
    return 0


def keywords(op: Any) -> dict[str, Any]:
    """The parameters of the public function that are no arrays, with their defaults."""
    arrays = {argument.name for argument in op.arguments}
    return {
        name: parameter.default
        for name, parameter in inspect.signature(op.public).parameters.items()
        if name not in arrays
    }


def _options(op: Any) -> dict[str, Any]:
    """The keywords that are no arrays: defaults of the public function, and names without one."""
    every = keywords(op)
    required = [name for name, value in every.items() if value is inspect.Parameter.empty]
    return {
        "options": {name: value for name, value in every.items() if name not in required},
        "required": required,
    }
