"""A hand-written body as a differentiable function of arrays.

`BodyKernel` is to Metal text what `PatternKernel` is to a pattern: it plans a launch when a
signature (shapes and dtypes) is first seen, keeps what it prepared, so that a repeated call costs
about a microsecond, and attaches the vjp and the reference that transforms need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from . import checks, launch, metal
from .arguments import Argument, check
from .requests import Template
from .targets import cpu
from .transforms import Reference, Rule


@dataclass(frozen=True)
class Plan:
    """A launch: template arguments, grid, shapes and dtypes of the outputs, launch constants, and
    pairs (input, output) that may share memory on the CPU where nobody else holds the input. A
    body that donates finds the two pointers equal."""

    template: Template
    geometry: launch.Geometry
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]
    constants: tuple[mx.array, ...] = ()
    donate: tuple[tuple[int, int], ...] = ()


@lru_cache(maxsize=4096)
def constant(values: tuple[int, ...], dtype: mx.Dtype = mx.int32) -> mx.array:
    """A launch constant: an array of integers, or of one a 0-d array."""
    array = mx.array(values[0] if len(values) == 1 else list(values), dtype=dtype)
    mx.eval(array)
    return array


class BodyKernel:
    """A body with a plan, checks, a vjp and a reference.

    Args:
        spec: the text; its name up to a "__" names the op in errors. Its inputs are those of the
            call and then the constants of the plan.
        plan: the launch for these inputs in these settings. It may depend on nothing but shapes and
            dtypes, which are what a prepared launch is found by.
        reference: the outputs in plain MLX, of the same inputs.
        vjp: the rule of `zmlx.transforms`; None derives it from the reference.
        dynamic: takes the place of the reference in a trace with dynamic shapes.
        arguments: declarations of the inputs of that name, checked when a signature is first seen.
        values: raises for values that only the device knows; called with `ZMLX_CHECK=1`.
    """

    def __init__(
        self,
        spec: metal.KernelSpec,
        plan: Callable[[launch.Settings, tuple[mx.array, ...]], Plan],
        reference: Reference,
        *,
        vjp: Rule | None = None,
        dynamic: Reference | None = None,
        arguments: Sequence[Argument] = (),
        values: Callable[..., None] | None = None,
    ) -> None:
        self.spec = spec
        self.name = spec.name.partition("__")[0]
        self.plan = plan
        self.reference = reference
        self.vjp = vjp
        self.dynamic = dynamic or reference
        self.values = values
        by_name = {a.name: a for a in arguments}
        self._declared = [(i, by_name[n]) for i, n in enumerate(spec.input_names) if n in by_name]
        self._launches: dict[launch.Settings, dict[bytes, Any]] = {}

    def __repr__(self) -> str:
        return f"BodyKernel({self.spec.full_name})"

    def __call__(self, *inputs: mx.array) -> Any:
        """Launches on arrays: an array, or a tuple of several outputs."""
        settings = launch.settings()
        launches = self._launches.get(settings)
        if launches is None:
            launches = self._launches[settings] = {}
        checked = checks.ENABLED and self.values is not None
        if settings.target == "cpu" and not checked:
            result = cpu.run(launches, inputs)
            if result is not None:
                return result
        check(self.name, [a for _, a in self._declared], [inputs[i] for i, _ in self._declared])
        if checked and self.values is not None and cpu.have_values(inputs):
            self.values(*inputs)
        any_shape = cpu.any_shape(inputs)
        if settings.target == "reference" or any_shape:
            outputs = (self.dynamic if any_shape else self.reference)(*inputs)
            return outputs[0] if len(outputs) == 1 else outputs
        key = cpu.signature(inputs)
        prepared = launches.get(key)
        if prepared is None:
            if len(launches) >= launch.SHAPES_KEPT:
                launches.clear()
            prepared = launches[key] = self._prepare(settings, inputs)
        return metal.call(self.name, settings.target, prepared, inputs, self.reference, self.vjp)

    def _prepare(self, settings: launch.Settings, inputs: tuple[mx.array, ...]) -> Any:
        plan = self.plan(settings, inputs)
        return metal.prepare(
            self.spec,
            settings.target,
            inputs,
            plan.template,
            plan.geometry.grid,
            plan.geometry.threadgroup,
            plan.shapes,
            plan.dtypes,
            None,
            plan.constants,
            donate=plan.donate,
        )
