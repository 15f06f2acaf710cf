"""Parameters of the tests that every registered op goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import pytest

from zmlx.arguments import dtype_name
from zmlx.registry import Case, Op, ops

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
OPS = tuple(ops())
#: Ops with a gradient.
DIFFERENTIABLE = tuple(op for op in OPS if op.differentiable)


def label(op: Op, case: Case, dtype: mx.Dtype, extra: str = "") -> str:
    lead = "x".join(map(str, case.lead)) or "scalar"
    sizes = ",".join(f"{k}={v}" for k, v in case.sizes.items())
    options = ",".join(f"{k}={v}" for k, v in case.options.items())
    return "-".join(p for p in (op.name, lead, sizes, options, dtype_name(dtype), extra) if p)


def outputs(result: Any) -> tuple[Any, ...]:
    """The outputs of a call, of which there may be one or several."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def option_cases(op: Op) -> Iterable[Case]:
    """One case per value of every option, on a shape with a tail."""
    base = op.cases[min(1, len(op.cases) - 1)]
    for option in op.options:
        for value in option.values:
            yield Case(base.lead, base.sizes, option.name, {option.name: value})


def over_ops(cases: Callable[[Op], Iterable[Case]], dtypes: Iterable[mx.Dtype] = DTYPES) -> Any:
    """Parametrises a test over (op, case, dtype)."""
    rows = [(op, case, dtype) for op in OPS for case in cases(op) for dtype in dtypes]
    return pytest.mark.parametrize(
        "op, case, dtype", [pytest.param(*row, id=label(*row)) for row in rows]
    )
