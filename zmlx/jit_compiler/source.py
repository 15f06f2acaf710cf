"""The text of a Python function, and errors that show its lines."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any, NoReturn


class Source:
    """The text of a function, for errors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # What a decorator of `functools.wraps` hides: its text is the one that `inspect` finds.
        plain = inspect.unwrap(function) if callable(function) else function
        if not hasattr(function, "__name__") or not hasattr(plain, "__code__"):
            what = "the class " + function.__name__ if isinstance(function, type) else ""
            raise TypeError(
                "[jit] 'function' must be a Python function but got "
                f"{what or type(function).__name__}."
            )
        self.name = function.__name__
        try:
            lines, self.first = inspect.getsourcelines(plain)
        except (OSError, TypeError):
            raise ValueError(
                f"[jit] the source of {self.name!r} must be in a file (or a notebook cell), because"
                " it is compiled from its text."
            ) from None
        self.file = inspect.getsourcefile(plain) or "?"
        self.lines = "".join(lines).expandtabs().splitlines()
        try:
            tree = _parsed(self.lines)
        except SyntaxError:
            tree = ast.Pass()
        # A lambda may stand in the line of a `def`.
        if not isinstance(tree, ast.FunctionDef) or self.name == "<lambda>":
            raise ValueError(
                f"[jit] {self.name!r} at {self.file}, line {self.first}, must be a plain `def` but "
                "is something else."
            )
        self.tree = tree
        if plain is not function:
            self._refuse_wrapper()

    def _refuse_wrapper(self) -> NoReturn:
        """The error for a function that wraps the one of this text."""
        hint = "the text of the function is compiled, not what is made of it"
        if not self.tree.decorator_list:
            self.fail(self.tree, f"{self.name!r} wraps another function", hint)
        # The last one stands above the `def`, so it was applied before jit.
        decorator = self.tree.decorator_list[-1]
        what = f"the decorator {ast.unparse(decorator)!r} of {self.name!r} must not be below jit"
        self.fail(decorator, what, hint)

    def fail(self, node: ast.AST, what: str, hint: str = "") -> NoReturn:
        """Raises the error `what` at `node`, with a remedy."""
        line = getattr(node, "lineno", self.tree.lineno)
        column = getattr(node, "col_offset", self.tree.col_offset)
        text = self.lines[line - 1]
        raise ValueError(
            f"[jit] {what} at {self.file}, line {self.first + line - 1}, column {column + 1}"
            f"{': ' + hint if hint else ''}.\n"
            f"  {text}\n  {' ' * column}^"
        )


def _parsed(lines: list[str]) -> ast.stmt:
    """The first statement of these lines, which may be indented. A comment, or a line of a string,
    may stand left of it."""
    text = "\n".join(lines)
    if not lines[0].startswith(" "):
        return ast.parse(text).body[0]
    block = ast.parse("if 1:\n" + text).body[0]
    assert isinstance(block, ast.If)
    return ast.increment_lineno(block.body[0], -1)
