"""What an op has to do at least: bytes that cross the memory bus, and operations where it is a
matrix product. Both come from the registry entry and the arrays themselves.

    forward     arguments and outputs
    backward    what the entry's backward reads, row statistics, cotangents and gradients
    both        the two together, with the statistics written once more

Scratch arrays, second readings and a library's intermediates are not counted: a way that needs them
reaches a smaller part of the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from ..registry import Case, Op

_STATISTIC = 4  # bytes: they are float32

#: In `reads_backward`, stands for the outputs of the op.
OUTPUT = "output"


@dataclass(frozen=True)
class Work:
    """Bytes that move, floating-point operations or 0, and bytes of the results."""

    bytes: int
    flops: int
    results: int = 0


def work(
    op: Op,
    case: Case,
    values: Sequence[mx.array | None],
    outputs: Sequence[mx.array],
    mode: str,
) -> Work:
    """The least work of a mode, for these arguments (None: not given) and outputs."""
    rows = prod(case.lead)
    written = sum(o.nbytes for o in outputs)
    given = [0 if v is None else v.nbytes for v in values]
    forward = sum(given) + written
    statistics = _STATISTIC * op.statistics * rows
    sizes = dict(zip((a.name for a in op.arguments), given, strict=True)) | {OUTPUT: written}
    read = sum(sizes[name] for name in op.reads_backward)
    gradients = sum(given[i] for i in op.differentiable)
    backward = read + statistics + written + gradients
    multiple = {"forward": 1, "backward": 2, "both": 3}[mode]
    flops = multiple * _flops(op, case, rows)
    if mode == "forward":
        return Work(forward, flops, written)
    if mode == "backward":
        return Work(backward, flops, gradients)
    return Work(forward + statistics + backward, flops, written + gradients)


def _flops(op: Op, case: Case, rows: int) -> int:
    """The entry's count for a forward; a product's two gradients are two products."""
    options = {o.name: o.default for o in op.options} | dict(case.options)
    return int(eval(op.flops, {"rows": rows, **options, **case.sizes})) if op.flops else 0
