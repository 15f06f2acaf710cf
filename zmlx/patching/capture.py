"""What a function computes, as a graph that can be compared.

`Graphs.capture` traces a function of arrays with `mx.export_function` and turns its graph into
numbers: two expressions have the same number exactly if they apply the same primitives with the
same arguments to the same inputs and constants, operands of commutative primitives in either order.
A maximum is none: at a tie its gradient goes to the second operand.
Functions that `mx.compile` compiled are traced through. `mx.stop_gradient` leaves no trace, so
that equal graphs may still differ in their gradient.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from .reasons import UnmatchedError

#: Primitives whose operands may change places.
COMMUTATIVE = frozenset(("Add", "Multiply", "LogicalAnd", "LogicalOr", "Equal", "NotEqual"))

#: A float as Python prints it.
_FLOAT = re.compile(r"(?<![\w.])\d+(?:\.\d+(?:e-?\d+)?|e-?\d+)")


class Graphs:
    """Expressions by number; equal expressions share one."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._expressions: list[Any] = []

    def __getitem__(self, number: int) -> Any:
        """("input", i), ("constant", dtype, shape, bytes), or (primitive, its arguments as text,
        numbers of its operands, which of its outputs)."""
        return self._expressions[number]

    def _number(self, expression: Any) -> int:
        found = self._numbers.get(expression)
        if found is None:
            found = self._numbers[expression] = len(self._expressions)
            self._expressions.append(expression)
        return found

    def input(self, index: int) -> int:
        """The number of a function's i-th input."""
        return self._number(("input", index))

    def below(self, numbers: Iterable[int]) -> Iterator[int]:
        """These expressions and all that they are made of."""
        left, seen = list(numbers), set()
        while left:
            number = left.pop()
            if number not in seen:
                seen.add(number)
                yield number
                if self[number][0] not in ("input", "constant"):
                    left += self[number][2]

    def scalars(self, numbers: Iterable[int], dtype: mx.Dtype = mx.float32) -> set[float]:
        """The scalars of a floating dtype in these expressions."""
        found = (self[number] for number in self.below(numbers))
        return {
            float(mx.array(list(e[3]), mx.uint8).view(dtype).item())  # type: ignore[arg-type]
            for e in found
            if e[0] == "constant" and e[2] == () and e[1] == str(dtype)
        }

    def arguments(self, numbers: Iterable[int]) -> set[float]:
        """The floats among the arguments of the primitives in these expressions."""
        found = (self[number] for number in self.below(numbers))
        texts = (e[1] for e in found if e[0] not in ("input", "constant"))
        return {float(text) for t in texts for text in _FLOAT.findall(t)}

    def capture(
        self,
        function: Callable[..., Sequence[mx.array]],
        inputs: Sequence[mx.array],
    ) -> list[int]:
        """The numbers of the arrays that `function` returns for `inputs`. Raises what the function
        raises, also where it needs a value, and `UnmatchedError` where it changes an input in
        place. Nothing is computed."""
        records: list[dict[str, Any]] = []

        def traced(*given: mx.array) -> list[mx.array]:
            before = list(map(copy.copy, given))
            results = list(function(*given))
            return [*results, *before, *given]

        mx.export_function(records.append, traced, *inputs)
        constants: dict[str, mx.array] = {}
        numbers: dict[str, int] = {}
        outputs: list[str] = []

        def number(name: str) -> int:
            if name not in numbers:
                numbers[name] = self._number(_constant(constants[name]))
            return numbers[name]

        for record in records:
            kind = record["type"]
            if kind == "inputs":
                for i, (name, _, _) in enumerate(record["inputs"]):
                    numbers[name] = self.input(i)
            elif kind == "constants":
                constants.update(record["constants"])
            elif kind == "outputs":
                outputs = [name for name, _, _ in record["outputs"]]
            elif kind == "primitive":
                operands = tuple(number(name) for name, _, _ in record["inputs"])
                if record["name"] in COMMUTATIVE:
                    operands = tuple(sorted(operands))
                arguments = repr(record["arguments"])
                for i, (name, _, _) in enumerate(record["outputs"]):
                    node = (record["name"], arguments, operands, i)
                    numbers[name] = self._number(node)
        last = len(outputs) - len(inputs)
        if outputs[last - len(inputs) : last] != outputs[last:]:
            raise UnmatchedError("its call changes an array in place")
        return [number(name) for name in outputs[: last - len(inputs)]]


def _constant(array: mx.array) -> Any:
    # Some 50 times as fast as to let MLX view it as bytes.
    data = memoryview(array).tobytes()  # type: ignore[arg-type]
    return ("constant", str(array.dtype), tuple(array.shape), data)
