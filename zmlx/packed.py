"""An elementwise pattern over the arrays of a tree, several of them per launch.

    update = PackedKernel("adamw", pattern, like=("p", "m", "v"))
    for p, m, v in update([(p, g, m, v), …], numbers): …

Arrays are grouped by their dtypes, and by whether they have fewer than eight elements, since Metal
gets those in another address space. A group goes in launches of as many sets as fit into Metal's 31
buffers. Kernels differ by dtypes and the number of sets, never by sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import mlx.core as mx

from . import launch
from .body import BodyKernel, Plan, constant
from .codegen import Elementwise, Packed, PackedInto, PackedSum
from .interpret import evaluate, expression_value
from .metal import KernelSpec

#: MLX's limit, inputs and outputs together.
MOST_BUFFERS = 31
#: Below this many elements MLX hands an array to Metal in the constant address space.
_SMALL = 8

Arrays = tuple[mx.array, ...]


def groups(sets: Sequence[Arrays]) -> list[list[int]]:
    """Indices of the sets that may share a launch; those without elements are in none."""
    found: dict[Any, list[int]] = {}
    for i, arrays in enumerate(sets):
        size = arrays[0].size
        if size:
            key = (*(a.dtype for a in arrays), size < _SMALL)
            found.setdefault(key, []).append(i)
    return list(found.values())


def _lifted(arrays: Sequence[mx.array]) -> list[mx.array]:
    """0-d arrays as (1,), since Metal gets the others by reference."""
    return [a if a.ndim else a.reshape(1) for a in arrays]


class PackedKernel:
    """`each` over any number of sets of arrays.

    `width` is the number of a set's inputs, `scalars` that of the numbers, `sets_per_launch` how
    many sets a launch takes.

    Args:
        name: prefix of the kernels' names, and the op in errors.
        each: the pattern; its "full" inputs are the arrays of a set, its scalars the elements of
            the array `numbers`.
        like: for every output the input that it has the shape and dtype of, and on the CPU the
            memory where nobody else holds that input.
        header: functions that the expressions name.
    """

    def __init__(self, name: str, each: Elementwise, like: Sequence[str], header: str = "") -> None:
        self.name = name
        self.each = each
        self.header = header
        one = Packed(each, 1)
        self.scalars = len(one.scalars)
        self._like = tuple(one.arrays.index(x) for x in like)
        self.width = len(one.arrays)
        self.sets_per_launch = (MOST_BUFFERS - 2) // (self.width + len(self._like))
        self._kernels: dict[int, BodyKernel] = {}
        self.statistics = {"arrays": 0, "launches": 0}

    def __repr__(self) -> str:
        return f"PackedKernel({self.name}: {self.sets_per_launch} sets per launch)"

    def __call__(self, sets: Sequence[Arrays], numbers: mx.array) -> list[Arrays]:
        """The outputs of every set; `numbers` is a float32 array of the scalars."""
        done: list[Arrays] = [tuple(arrays[i] for i in self._like) for arrays in sets]
        for members in groups(sets):
            for first in range(0, len(members), self.sets_per_launch):
                some = members[first : first + self.sets_per_launch]
                outputs = self._launch([sets[i] for i in some], numbers)
                for i, output in zip(some, outputs, strict=True):
                    done[i] = output
        return done

    def _launch(self, sets: Sequence[Arrays], numbers: mx.array) -> list[Arrays]:
        count = len(sets)
        self.statistics["arrays"] += count
        self.statistics["launches"] += 1
        flat = [a for arrays in sets for a in _lifted(arrays)]
        outputs = self._kernel(count)(*flat, numbers)
        flat_outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        width = len(self._like)
        done = [flat_outputs[k * width : (k + 1) * width] for k in range(count)]
        return [
            outs if arrays[0].ndim else tuple(o.reshape(()) for o in outs)
            for arrays, outs in zip(sets, done, strict=True)
        ]

    def _kernel(self, count: int) -> BodyKernel:
        kernel = self._kernels.get(count)
        if kernel is None:
            pattern = Packed(self.each, count)
            spec = KernelSpec(
                f"{self.name}__packed{count}", pattern.input_names, pattern.output_names,
                pattern.source(), self.header,
            )  # fmt: skip
            kernel = self._kernels[count] = BodyKernel(spec, self._plan, self._reference)
        return kernel

    def _plan(self, settings: launch.Settings, inputs: Arrays) -> Plan:
        width = self.width
        sets = [inputs[i : i + width] for i in range(0, len(inputs) - 1, width)]
        sizes = [prod(arrays[0].shape) for arrays in sets]
        geometry, starts = launch.packed(settings, sizes)
        outputs = [arrays[i] for arrays in sets for i in self._like]
        dtypes = [(f"{y.name}_t", sets[0][i].dtype)
                  for y, i in zip(self.each.outputs, self._like, strict=True)]  # fmt: skip
        return Plan(
            template=(*dtypes, *geometry.template),
            geometry=geometry,
            shapes=tuple(tuple(y.shape) for y in outputs),
            dtypes=tuple(y.dtype for y in outputs),
            constants=(constant((*starts, *sizes), mx.uint64),),
            donate=tuple(
                (k * width + i, k * len(self._like) + j)
                for k in range(len(sets))
                for j, i in enumerate(self._like)
            ),
        )

    def _reference(self, *inputs: mx.array) -> Arrays:
        """The outputs in plain MLX."""
        *arrays, numbers = inputs
        scalars = [numbers[k] for k in range(self.scalars)]
        outputs: list[mx.array] = []
        for first in range(0, len(arrays), self.width):
            some = iter(arrays[first : first + self.width])
            rest = iter(scalars)
            ordered = [next(some) if x.kind == "full" else next(rest) for x in self.each.inputs]
            dtypes = [arrays[first + i].dtype for i in self._like]
            outputs += evaluate(self.each, ordered, dtypes)
        return tuple(outputs)


class PackedSumKernel:
    """The sum of `expr`, an expression of x, over all elements of all arrays, in float32.

    Every block of 16384 elements has its own sum, and those are added, so that the result does not
    depend on the number of threads.
    """

    def __init__(self, name: str, expr: str) -> None:
        self.name = name
        self.expr = expr
        self.arrays_per_launch = MOST_BUFFERS - 2
        self._kernels: dict[int, BodyKernel] = {}
        self.statistics = {"arrays": 0, "launches": 0}

    def __call__(self, arrays: Sequence[mx.array]) -> mx.array:
        """A 0-d float32 array."""
        parts: list[mx.array] = []
        for members in groups([(x,) for x in arrays]):
            for first in range(0, len(members), self.arrays_per_launch):
                some = [arrays[i] for i in members[first : first + self.arrays_per_launch]]
                self.statistics["arrays"] += len(some)
                self.statistics["launches"] += 1
                parts.append(self._kernel(len(some))(*_lifted(some)))
        if not parts:
            return mx.array(0.0)
        return (parts[0] if len(parts) == 1 else mx.concatenate(parts)).sum()

    def _kernel(self, count: int) -> BodyKernel:
        kernel = self._kernels.get(count)
        if kernel is None:
            pattern = PackedSum(self.expr, count)
            spec = KernelSpec(
                f"{self.name}__packed{count}", pattern.input_names, pattern.output_names,
                pattern.source(), pattern.header,
            )  # fmt: skip
            kernel = self._kernels[count] = BodyKernel(spec, self._plan, self._reference)
        return kernel

    def _plan(self, settings: launch.Settings, inputs: Arrays) -> Plan:
        sizes = [prod(x.shape) for x in inputs]
        geometry, starts = launch.packed_sums(settings, sizes)
        groups = geometry.grid[0] // geometry.threadgroup[0]
        return Plan(
            template=geometry.template,
            geometry=geometry,
            shapes=((groups,),),
            dtypes=(mx.float32,),
            constants=(constant((*starts, *sizes), mx.uint64),),
        )

    def _reference(self, *arrays: mx.array) -> Arrays:
        """The sum in plain MLX, as if all of it were in the first block."""
        geometry, _ = launch.packed_sums(launch.settings(), [prod(x.shape) for x in arrays])
        rest = mx.zeros((geometry.grid[0] // geometry.threadgroup[0] - 1,))
        values = (expression_value(self.expr, {"x": x.astype(mx.float32)}) for x in arrays)
        total = mx.stack([value.sum() for value in values]).sum(keepdims=True)
        return (mx.concatenate([total, rest]),)


#: Elements; arrays in a common one begin at multiples of 64 bytes from its start.
_ALIGNED = 32


class PackedIntoKernel:
    """`expr`, an expression of x and number, of every element of every array.

    The results of a launch are parts of one array, so that a launch takes 28 arrays instead of the
    14 that could each have one of their own. The memory of an input is not used again.
    """

    def __init__(self, name: str, expr: str) -> None:
        self.name = name
        self.expr = expr
        self.arrays_per_launch = MOST_BUFFERS - 3
        self._kernels: dict[int, BodyKernel] = {}
        self.statistics = {"arrays": 0, "launches": 0}

    def __call__(self, arrays: Sequence[mx.array], number: mx.array) -> list[mx.array]:
        """One array for each, of its shape and dtype; `number` is a float32 array of one."""
        done = list(arrays)
        for members in groups([(x,) for x in arrays]):
            for first in range(0, len(members), self.arrays_per_launch):
                some = members[first : first + self.arrays_per_launch]
                self.statistics["arrays"] += len(some)
                self.statistics["launches"] += 1
                inputs = _lifted([arrays[i] for i in some])
                packed = self._kernel(len(some))(*inputs, number)
                for i, place in zip(some, _places(inputs), strict=True):
                    x = arrays[i]
                    done[i] = packed[place : place + x.size].reshape(x.shape)
        return done

    def _kernel(self, count: int) -> BodyKernel:
        kernel = self._kernels.get(count)
        if kernel is None:
            pattern = PackedInto(self.expr, count)
            spec = KernelSpec(
                f"{self.name}__packed{count}", pattern.input_names, pattern.output_names,
                pattern.source(),
            )  # fmt: skip
            kernel = self._kernels[count] = BodyKernel(spec, self._plan, self._reference)
        return kernel

    def _plan(self, settings: launch.Settings, inputs: Arrays) -> Plan:
        arrays = inputs[:-1]
        sizes = [x.size for x in arrays]
        geometry, starts = launch.packed(settings, sizes)
        template = tuple((name, n) for name, n in geometry.template if name == "N")
        return Plan(
            template=(("y_t", arrays[0].dtype), *template),
            geometry=geometry,
            shapes=((_length(arrays),),),
            dtypes=(arrays[0].dtype,),
            constants=(constant((*starts, *sizes, *_places(arrays)), mx.uint64),),
        )

    def _reference(self, *inputs: mx.array) -> Arrays:
        """The common array in plain MLX."""
        *arrays, number = inputs
        parts = []
        for x in arrays:
            flat = x.reshape(-1).astype(mx.float32)
            y = expression_value(self.expr, {"x": flat, "number": number[0]}).astype(x.dtype)
            parts.append(mx.pad(y, (0, -x.size % _ALIGNED)))
        return (mx.concatenate(parts),)


def _places(arrays: Sequence[mx.array]) -> list[int]:
    """Where the arrays begin in a common one."""
    lengths = (-(-x.size // _ALIGNED) * _ALIGNED for x in arrays)
    return list(accumulate(lengths, initial=0))[:-1]


def _length(arrays: Sequence[mx.array]) -> int:
    return sum(-(-x.size // _ALIGNED) * _ALIGNED for x in arrays)
