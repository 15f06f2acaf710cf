"""A codegen pattern as a differentiable function of arrays.

`PatternKernel` is what the catalogue, the helpers and `jit` launch. It takes arrays of any leading
axes, finds rows and row length, asks `zmlx.launch` for a geometry, and keeps what it prepared per
signature (shapes and dtypes), so that a repeated call costs about a microsecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import mlx.core as mx

from . import checks, launch, metal
from .arguments import Argument, check, check_array, number_for, python_number
from .codegen import Columnwise, Elementwise, Fold, Rowwise, Scan
from .interpret import Pattern, cast, evaluate
from .targets import cpu
from .transforms import Reference, Rule


class Number(tuple[str, ...]):
    """Names of inputs: the dtype of a number that is computed from them is their promotion, or
    float32 where all of them are bool."""


#: The dtype of an output: a dtype, or the names of the inputs whose promotion it is.
DtypeRule = mx.Dtype | tuple[str, ...]

#: Kinds of operands whose array is 0-d.
_SINGLE = ("scalar", "random")


@lru_cache(maxsize=4096)
def _constant(value: int, dtype: mx.Dtype) -> mx.array:
    return mx.array(value, dtype=dtype)


def _is_number(value: Any) -> bool:
    return not isinstance(value, mx.array) and python_number(value) is not None


class PatternKernel:
    """A pattern with a name, dtypes, checks and a vjp.

    Args:
        name: prefix of the kernel's name; its part before a "/" names the op in errors.
        pattern: from `zmlx.codegen`.
        dtypes: a rule per output array.
        header: functions that the expressions name.
        arguments: declared arguments, checked by name when a new signature is first seen; a
            mapping from the names of the pattern where those are not the arguments' own.
        vjp: the rule of `zmlx.transforms`; None derives it from the pattern in plain MLX.
        training: a kernel of the same inputs whose first outputs are this one's and whose further
            outputs its vjp wants (row statistics); it runs instead of this one under a transform.
            Its vjp uses the cotangents of all outputs: those of the statistics are zeros until the
            gradient is differentiated again.
        long: takes the place of this kernel for rows that do not fit in registers.
        reference: the outputs in plain MLX, for expressions that `zmlx.expr` does not know.
        chunks: fixes the number of row chunks of column outputs (default: `launch.row_chunks`).
        paced: as in `metal.prepare`.
    """

    def __init__(
        self,
        name: str,
        pattern: Pattern | Fold | Scan,
        dtypes: Sequence[DtypeRule],
        *,
        header: str = "",
        arguments: Sequence[Argument] | Mapping[str, Argument] = (),
        vjp: Rule | None = None,
        training: PatternKernel | None = None,
        long: PatternKernel | None = None,
        reference: Reference | None = None,
        chunks: int | None = None,
        paced: bool = False,
    ) -> None:
        self.name = name.partition("/")[0]
        self.pattern = pattern
        self.dtypes = tuple(dtypes)
        self.arguments = (
            dict(arguments) if isinstance(arguments, Mapping) else {a.name: a for a in arguments}
        )
        self.vjp = vjp
        self.training = training
        self.long = long
        self.reference = reference
        self._chunks = chunks
        self._paced = paced
        self._inputs = tuple(
            n.removesuffix("_in") for n in pattern.input_names[: -len(pattern.constants)]
        )
        self.spec = metal.KernelSpec(
            name.replace("/", "__"),
            pattern.input_names,
            pattern.output_names,
            pattern.source(),
            header + pattern.header,
        )
        self._scalars = {x.array or x.name for x in pattern.inputs if x.kind in _SINGLE}
        for x in pattern.inputs:
            if x.kind not in _SINGLE and (x.array or x.name) in self._scalars:
                raise ValueError(
                    f"[{self.name}] '{x.array or x.name}' must be a scalar or have elements but "
                    "got operands of both kinds."
                )
        self._launches: dict[launch.Settings, dict[bytes, Any]] = {}

    def __repr__(self) -> str:
        return f"PatternKernel({self.spec.full_name})"

    def __deepcopy__(self, memo: Any) -> PatternKernel:
        """Itself, since nothing of a kernel changes: a model that holds one can be copied."""
        return self

    def __call__(self, *inputs: Any) -> Any:
        """Launches on arrays (numbers for scalars alone): an array, or a tuple of several
        outputs."""
        if checks.ENABLED and all(isinstance(x, mx.array) for x in inputs):
            self._check(inputs)
            if cpu.have_values(inputs):
                checks.check_values(self.name, self.pattern, inputs)
        settings = launch.settings()
        launches = self._launches.get(settings)
        if launches is None:
            launches = self._launches[settings] = {}
        if settings.target == "cpu":
            result = cpu.run(launches, inputs)
            if result is not None:
                return result
        return self._call(settings, launches, inputs)

    def _call(
        self, settings: launch.Settings, launches: dict[bytes, Any], inputs: tuple[mx.array, ...]
    ) -> Any:
        if any(_is_number(x) for x in inputs) and len(inputs) == len(self._inputs):
            return self(*map(self._array, self._inputs, inputs))
        self._check(inputs)
        if self._has_0d_elements(inputs):
            return self._lifted(inputs)
        if self.long is not None and self._like(inputs)[1] > launch.LONGEST_KEPT_ROW:
            return self.long(*inputs)
        if settings.target == "reference" or cpu.any_shape(inputs):
            outputs = self.evaluate(*inputs)
            return outputs[0] if len(outputs) == 1 else outputs
        if self.training is not None and cpu.maybe_tracing(inputs):
            outputs = self.training(*inputs)[: len(self.dtypes)]
            return outputs[0] if len(outputs) == 1 else outputs
        key = cpu.signature(inputs)
        prepared = launches.get(key)
        if prepared is None:
            if len(launches) >= launch.SHAPES_KEPT:
                launches.clear()
            prepared = launches[key] = self._prepare(settings, inputs)
        return metal.call(self.name, settings.target, prepared, inputs, self.evaluate, self.vjp)

    def _array(self, name: str, value: Any) -> Any:
        """A number as the scalar `name`, a float where that is one; else `value`, unless it is a
        number for an argument that is none."""
        argument = self.arguments.get(name)
        number = number_for(self.name, name, value, argument.dtypes if argument else ())
        if number is None:
            return value
        if name not in self._scalars:
            check_array(self.name, argument.name if argument else name, value)
        return metal.scalar(number)

    def _has_0d_elements(self, inputs: tuple[mx.array, ...]) -> bool:
        by_name = dict(zip(self._inputs, inputs, strict=True))
        return any(
            x.kind not in _SINGLE and by_name[x.array or x.name].ndim == 0
            for x in self.pattern.inputs
        )

    def _lifted(self, inputs: tuple[mx.array, ...]) -> Any:
        """The call with a leading axis of one, since Metal gets a 0-d array by reference and the
        body indexes it."""
        kinds = {x.array or x.name: x.kind for x in self.pattern.inputs}
        outputs = self(
            *[x if kinds[n] in (*_SINGLE, "column") else x[None]
              for n, x in zip(self._inputs, inputs, strict=True)]
        )  # fmt: skip
        several = isinstance(outputs, tuple)
        sums = [isinstance(self.pattern, Columnwise) or y.kind == "column"
                for y in {y.array or y.name: y for y in self.pattern.outputs}.values()]  # fmt: skip
        flat = tuple(
            # A value a row of no leading axes has none that was added.
            y if total or y.ndim == 0 else y.squeeze(0)
            for y, total in zip(outputs if several else (outputs,), sums, strict=True)
        )
        return flat if several else flat[0]

    def _check(self, inputs: tuple[mx.array, ...]) -> None:
        if len(inputs) != len(self._inputs):
            raise TypeError(
                f"[{self.name}] takes {len(self._inputs)} arrays but got {len(inputs)}."
            )
        known = [(self.arguments[n], x) for n, x in zip(self._inputs, inputs, strict=True)
                 if n in self.arguments]  # fmt: skip
        check(self.name, [a for a, _ in known], [x for _, x in known])
        for name, x in zip(self._inputs, inputs, strict=True):
            if not isinstance(x, mx.array):
                raise TypeError(
                    f"[{self.name}] '{name}' must be an mx.array but got {type(x).__name__}."
                )
        if isinstance(self.pattern, (Fold, Scan)):
            axes = 3 if self.pattern.columns else 2
            if inputs[0].ndim != axes:
                raise ValueError(
                    f"[{self.name}] '{self._inputs[0]}' must have {axes} axes but got "
                    f"{inputs[0].ndim}."
                )

    def _like(self, inputs: Sequence[mx.array]) -> tuple[tuple[int, ...], int]:
        """Leading axes and row length."""
        by_name = dict(zip(self._inputs, inputs, strict=True))
        for x in self.pattern.inputs:
            if x.kind in ("row", "full") and not x.index:
                name = x.array or x.name
                shape = tuple(by_name[name].shape)
                width = shape[-1] if shape else 1
                if width % x.parts:
                    raise ValueError(
                        f"[{self.name}] '{name}' must have a last axis divisible by {x.parts} but "
                        f"got {shape}."
                    )
                return shape[:-1], width // x.parts
        raise ValueError(f"[{self.name}] the pattern must have a row or full operand but has none.")

    def output_dtypes(self, inputs: Sequence[mx.array]) -> tuple[mx.Dtype, ...]:
        """The dtypes of the outputs for these inputs."""
        by_name = dict(zip(self._inputs, inputs, strict=True))
        dtypes = []
        for rule in self.dtypes:
            if isinstance(rule, tuple):
                dtype = by_name[rule[0]].dtype
                for name in rule[1:]:
                    dtype = mx.result_type(dtype, by_name[name].dtype)
                if isinstance(rule, Number) and dtype == mx.bool_:
                    dtype = mx.float32
                dtypes.append(dtype)
            else:
                dtypes.append(rule)
        return tuple(dtypes)

    def _row_chunks(self, rows: int) -> tuple[int, int]:
        if self._chunks is None:
            return launch.row_chunks(rows)
        return self._chunks, max(1, -(-rows // self._chunks))

    def configuration(
        self, settings: launch.Settings, inputs: Sequence[mx.array]
    ) -> tuple[launch.Geometry, tuple[tuple[int, ...], ...], tuple[mx.array, ...]]:
        """Geometry, output shapes and launch constants for these inputs."""
        pattern = self.pattern
        if isinstance(pattern, (Fold, Scan)):
            return self._axis_configuration(settings, pattern, inputs)
        lead, d = self._like(inputs)
        rows = prod(lead)
        # A block of random numbers is a multiple of the eight that share a counter.
        least = 8 if any(x.kind == "random" for x in pattern.inputs) else 1
        if isinstance(pattern, Elementwise):
            shape = tuple(inputs[self._first_full()].shape)
            size = self._size(shape)
            wide = mx.uint64 if size >= 2**32 else mx.uint32
            geometry = launch.elementwise(settings, size, least=least)
            return geometry, (shape,) * len(self.dtypes), (_constant(size, wide),)
        if max(rows, d) >= 2**32:
            raise ValueError(
                f"[{self.name}] rows and row length must be below 2^32 but got {rows} and {d}."
            )
        self._size((*lead, d))
        if isinstance(pattern, Rowwise) and pattern.capped and d > launch.LONGEST_KEPT_ROW:
            raise ValueError(
                f"[{self.name}] rows must have at most {launch.LONGEST_KEPT_ROW} elements where "
                f"they are kept or summed but got {d}."
            )
        constants = [_constant(rows, mx.uint32), _constant(d, mx.uint32)]
        chunks = 1
        if isinstance(pattern, Columnwise):
            chunks, chunk = self._row_chunks(rows)
            constants.append(_constant(chunk, mx.uint32))
            geometry = launch.columnwise(settings, chunks, d)
        elif pattern.columns:
            chunks, chunk = self._row_chunks(rows)
            constants.append(_constant(chunk, mx.uint32))
            geometry = launch.rowwise_chunks(settings, chunks, d, least=least)
        else:
            geometry = launch.rowwise(settings, rows, d, capped=pattern.capped, least=least)
        shapes: dict[str, tuple[int, ...]] = {}
        for y in pattern.outputs:
            if isinstance(pattern, Columnwise) or y.kind == "column":
                shape = (chunks, d)
            elif y.kind == "per_row":
                shape = lead
            else:
                shape = (*lead, d * y.parts)
            shapes.setdefault(y.array or y.name, shape)
        return geometry, tuple(shapes.values()), tuple(constants)

    def _axis_configuration(
        self, settings: launch.Settings, pattern: Fold | Scan, inputs: Sequence[mx.array]
    ) -> tuple[launch.Geometry, tuple[tuple[int, ...], ...], tuple[mx.array, ...]]:
        shape = tuple(inputs[0].shape)
        if max(shape) >= 2**31:
            raise ValueError(f"[{self.name}] axes must be shorter than 2^31 but got {shape}.")
        self._size(shape)
        scans = isinstance(pattern, Scan)
        parts_of = (
            launch.scan_parts
            if isinstance(pattern, Scan) or pattern.for_scan
            else launch.fold_parts
        )
        parts, chunk = parts_of(shape, pattern.columns)
        if not pattern.cut:
            parts, chunk = 1, shape[-2 if pattern.columns else -1]
        items = shape[0] * parts
        if pattern.columns:
            states = len(pattern.monoid.states)
            geometry = launch.fold_columns(settings, items, shape[2], states=states, scans=scans)
        elif isinstance(pattern, Fold) and pattern.short:
            geometry = launch.fold_short_rows(settings, items)
        else:
            geometry = (
                launch.scan_rows(
                    settings,
                    items,
                    chunk,
                    reverse=pattern.reverse,
                    narrow=inputs[0].dtype.size == 2,
                )
                if isinstance(pattern, Scan)
                else launch.fold_rows(settings, items, chunk)
            )
        output = shape if scans else (shape[0], *((parts,) if pattern.cut else ()), *shape[2:])
        constants = tuple(_constant(n, mx.uint32) for n in (*shape, parts, chunk))
        return geometry, (output,) * len(self.dtypes), constants

    def _size(self, shape: tuple[int, ...]) -> int:
        """How many elements there are; their bytes, in any dtype, are a number of 64 bits."""
        size = prod(shape)
        if size >= 2**60:
            raise ValueError(f"[{self.name}] arrays must be smaller than 2^60 but got {shape}.")
        return size

    def _first_full(self) -> int:
        name = next(x.array or x.name for x in self.pattern.inputs if x.kind == "full")
        return self._inputs.index(name)

    def template(
        self, geometry: launch.Geometry, inputs: Sequence[mx.array]
    ) -> tuple[tuple[str, Any], ...]:
        """The template arguments of the launch: output dtypes, then geometry."""
        arrays = dict(zip(self.pattern.output_names, self.output_dtypes(inputs), strict=True))
        stores = isinstance(self.pattern, Columnwise)  # others leave sums as they are, in float
        dtypes = [(f"{y.name}_t", arrays[(y.array or y.name) + "_out"])
                  for y in self.pattern.outputs if stores or y.kind != "column"]  # fmt: skip
        return (*dtypes, *geometry.template)

    def _prepare(self, settings: launch.Settings, inputs: tuple[mx.array, ...]) -> Any:
        geometry, shapes, constants = self.configuration(settings, inputs)
        return metal.prepare(
            self.spec,
            settings.target,
            inputs,
            self.template(geometry, inputs),
            geometry.grid,
            geometry.threadgroup,
            shapes,
            self.output_dtypes(inputs),
            None,
            constants,
            paced=self._paced,
        )

    def evaluate(self, *inputs: mx.array) -> tuple[mx.array, ...]:
        """The outputs in plain MLX."""
        if self.reference is not None:
            dtypes = self.output_dtypes(inputs)
            outputs = self.reference(*inputs)
            return tuple(cast(y, d) for y, d in zip(outputs, dtypes, strict=True))
        assert not isinstance(self.pattern, (Fold, Scan)), "which come with a reference"
        chunks = 1
        if not isinstance(self.pattern, Elementwise):
            chunks = self._row_chunks(prod(self._like(inputs)[0]))[0]
        return evaluate(self.pattern, inputs, self.output_dtypes(inputs), chunks)
