"""A sequence of lets: named expressions, each of which may name those before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from .nodes import Expr

if TYPE_CHECKING:
    import mlx.core as mx

    from .derive import Gradient


@dataclass(frozen=True)
class Block:
    """Pairs (name, expression) in order."""

    lets: tuple[tuple[str, Expr], ...] = ()

    def names(self) -> tuple[str, ...]:
        """The free names, in the order of the lets that have them."""
        found: dict[str, None] = {}
        defined: set[str] = set()
        for name, e in self.lets:
            found.update((n, None) for n in e.names() if n not in defined)
            defined.add(name)
        return tuple(found)

    def functions(self) -> tuple[str, ...]:
        """The functions that are called, sorted."""
        return tuple(sorted({f for _, e in self.lets for f in e.functions()}))

    def metal(self) -> str:
        """One declaration a line, `const float t = …;`; `bool` for a condition."""
        return "".join(
            f"const {'bool' if e.is_condition else 'float'} {name} = {e.metal()};\n"
            for name, e in self.lets
        )

    def inline(self, e: Expr) -> Expr:
        """`e` with the lets written out. The nodes are shared, the text may be long."""
        values: dict[str, Expr] = {}
        for name, value in self.lets:
            values[name] = value.substitute(values)
        return e.substitute(values)

    def typed(self, e: Expr) -> Expr:
        """`e` with the lets that are conditions named as such; the parser takes them for floats."""
        return e.substitute(self._conditions) if self._conditions else e

    @cached_property
    def _conditions(self) -> dict[str, Expr]:
        found: dict[str, Expr] = {}
        for let, value in self.lets:
            if value.substitute(found).is_condition:
                found[let] = Expr("condition", (), let)
        return found

    def evaluate(self, arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The value of every let in plain MLX ops."""
        found: dict[str, mx.array] = {}
        for name, e in self.lets:
            needed = {n: found[n] if n in found else arrays[n] for n in e.names()}
            found[name] = e.evaluate(needed)
        return found

    def gradient(
        self, outputs: Sequence[Expr], inputs: Sequence[str], cotangents: Sequence[str]
    ) -> Gradient:
        """The reverse-mode gradient of `outputs`, which may name the lets; see `gradient`."""
        from .derive import gradient

        return gradient(outputs, inputs, cotangents, self)
