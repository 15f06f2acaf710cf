"""The kernels that ops of the catalogue launch, found by calling the ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any
from unittest import mock

import mlx.core as mx

from zmlx import broadcasting, launch, metal, registry
from zmlx.arguments import dimensions, dtype_name
from zmlx.kernels import loss_reductions
from zmlx.kernels.rope_kernels import EACH, START, STEPS, Rotation
from zmlx.kernels.rope_turn import turn
from zmlx.pattern import PatternKernel
from zmlx.transforms import custom_function

#: What Zig has functions for, and the optional arguments that they take.
OPS = {
    "softmax": (),
    "rms_norm": ("weight",),
    "layer_norm": ("weight", "bias"),
    "swiglu": ("gate_bias", "up_bias"),
    "cross_entropy": (),
}
#: Of a row, so that kernels for long ones are met too.
LENGTHS = (8, launch.LONGEST_KEPT_ROW + 1)


def kernels() -> Iterator[tuple[str, PatternKernel]]:
    """Each kernel under "op+given/part", where `given` are the optional arguments of the call. What
    the CPU launches instead of a GPU's is under "op+given@cpu/part"."""
    found: dict[str, PatternKernel] = {}
    for name, optional in OPS.items():
        for count in range(len(optional) + 1):
            for given in combinations(optional, count):
                for length in LENGTHS:
                    for target in ("metal", "cpu"):
                        for kernel in _launched(registry.get(name), given, length, target):
                            if kernel.name != name:
                                continue
                            part = kernel.spec.name.partition("__")[2] or "forward"
                            key = name + "".join(f"+{n}" for n in given)
                            if found.get(f"{key}/{part}", kernel) is not kernel:
                                assert target == "cpu"
                                key += "@cpu"
                            assert found.setdefault(f"{key}/{part}", kernel) is kernel, key
    found["sum_chunks"] = broadcasting._CHUNK_SUM
    found["loss_sum"] = loss_reductions._SUM
    found["loss_mean"] = loss_reductions._MEAN
    found["loss_weighted_mean"] = loss_reductions._WEIGHTED_MEAN
    yield from found.items()


def _launched(
    op: registry.Op, given: tuple[str, ...], length: int, target: str
) -> list[PatternKernel]:
    """What the op and its gradients launch, without compiling anything."""
    launched: list[PatternKernel] = []

    def prepare(self: PatternKernel, settings: Any, inputs: Any) -> Any:
        launched.append(self)
        return self.configuration(settings, inputs)[1], self.output_dtypes(inputs)

    def call(name: str, target: Any, prepared: Any, arrays: Any, reference: Any, rule: Any) -> Any:
        def raw(*inputs: mx.array) -> Any:
            outputs = tuple(mx.zeros(s, d) for s, d in zip(*prepared, strict=True))
            return outputs[0] if len(outputs) == 1 else outputs

        return custom_function(name, raw, rule, reference)(*arrays)

    arguments = [a for a in op.arguments if not a.optional or a.name in given]
    arrays = []
    for a in arguments:
        sizes = [factor * length if factor else 2 for factor, _ in dimensions(a.shape)]
        arrays.append(mx.zeros(sizes, a.dtypes[0]))
    wanted = [i for i, a in enumerate(arguments) if a.differentiable]

    def function(*some: mx.array) -> Any:
        full = list(arrays)
        for i, x in zip(wanted, some, strict=True):
            full[i] = x
        return op.function(**{a.name: x for a, x in zip(arguments, full, strict=True)})

    def run(tracing: int, body: Callable[[], Any]) -> Any:
        with (
            launch.target(target),
            mock.patch("zmlx.targets.cpu.run", return_value=None),
            mock.patch.object(PatternKernel, "_prepare", prepare),
            mock.patch.object(metal, "call", call),
            mock.patch("zmlx.pattern.cpu.maybe_tracing", return_value=tracing),
        ):
            return body()

    primals = [arrays[i] for i in wanted]
    outputs = run(0, lambda: function(*primals))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    run(1, lambda: mx.vjp(function, primals, [mx.zeros_like(y) for y in outputs]))
    for kernel in launched:
        kernel._launches.clear()
    return launched


def rope_spec() -> metal.KernelSpec:
    """The body of rope where it has positions of one axis; what else changes is no text."""
    rotations = [
        Rotation(4, True, False, START, False),
        Rotation(8, False, True, EACH, True),
        Rotation(2, False, False, STEPS, False),
    ]
    first, *others = {turn(r, forward).spec for r in rotations for forward in (True, False)}
    assert not others
    return first


def dtype_rule(rule: Any) -> dict[str, Any]:
    """A dtype rule as Zig has it."""
    if isinstance(rule, tuple):
        return {"promotion": list(rule)}
    return {"dtype": dtype_name(rule).removesuffix("_")}


def arguments(name: str) -> list[dict[str, Any]]:
    """The declared arguments of an op."""
    return [
        {
            "name": a.name,
            "axes": [
                {"factor": factor, "symbol": symbol} for factor, symbol in dimensions(a.shape)
            ],
            "dtypes": [dtype_name(d).removesuffix("_") for d in a.dtypes],
            "optional": a.optional,
        }
        for a in registry.get(name).arguments
    ]
