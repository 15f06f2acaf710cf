"""Parameters of the tests that every registered op goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from zmlx.arguments import dtype_name
from zmlx.registry import Case, Op, ops
from zmlx.testing import differentiated, draw, gradients

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
OPS = tuple(ops())
#: Ops with a gradient.
DIFFERENTIABLE = tuple(op for op in OPS if op.differentiable)

SLOW = pytest.mark.slow


def label(op: Op, case: Case, dtype: mx.Dtype, extra: str = "") -> str:
    lead = "x".join(map(str, case.lead)) or "scalar"
    sizes = ",".join(f"{k}={v}" for k, v in case.sizes.items())
    options = ",".join(f"{k}={v}" for k, v in case.options.items())
    return "-".join(p for p in (op.name, lead, sizes, options, dtype_name(dtype), extra) if p)


def outputs(result: Any) -> tuple[Any, ...]:
    """The outputs of a call, of which there may be one or several."""
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def with_gradients(
    op: Op, values: Sequence[mx.array | None], function: Callable[..., Any] | None = None
) -> tuple[mx.array, ...]:
    """The outputs of an op, or of another function of its arguments, and their gradients for random
    cotangents."""
    function = function or op.function
    results = outputs(function(*values))
    which = differentiated(op, values)
    if not which:
        return results
    rng = np.random.default_rng(1)
    cotangents = [mx.array(rng.standard_normal(y.shape)).astype(y.dtype) for y in results]
    return (*results, *gradients(function, values, which, cotangents))


def case_with_gradients(op: Op, case: Case, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    """As `with_gradients`, of a case."""
    return with_gradients(op, draw(op, case, dtype), partial(op.function, **case.options))


def option_cases(op: Op) -> Iterable[Case]:
    """One case per value of every option, on a shape with a tail."""
    base = op.cases[min(1, len(op.cases) - 1)]
    for option in op.options:
        for value in option.values:
            yield Case(base.lead, base.sizes, option.name, {option.name: value})


def turns(rows: Sequence[Any], turn: int, every: int) -> list[Any]:
    """Parameters of which one in `every` runs by default, which ones moves on with `turn`, and the
    others are slow: rows are shapes and dtypes, and each of both is in a row that runs."""
    return [
        row if (i + turn) % every == 0 else pytest.param(*row.values, id=row.id, marks=SLOW)
        for i, row in enumerate(rows)
    ]


def in_dtypes(names: Iterable[str], dtypes: Sequence[mx.Dtype]) -> list[Any]:
    """(name, dtype), of which every other one runs by default."""
    return [
        row
        for turn, name in enumerate(names)
        for row in turns(
            [pytest.param(name, d, id=f"{name}-{dtype_name(d)}") for d in dtypes], turn, 2
        )
    ]


def over_ops(
    cases: Callable[[Op], Iterable[Case]],
    dtypes: Sequence[mx.Dtype] = DTYPES,
    every: int | None = None,
    first: int = 0,
) -> Any:
    """Parametrises a test over (op, case, dtype). One in `every` runs by default: as many as there
    are dtypes unless given, so that a case runs in one dtype, which is another one for the next
    case and for the next op; with twice as many, half of the cases do, and with `first` as many as
    there are dtypes, the other half."""
    rows = []
    for turn, op in enumerate(OPS):
        for i, case in enumerate(cases(op)):
            some = [pytest.param(op, case, dtype, id=label(op, case, dtype)) for dtype in dtypes]
            rows += turns(some, i + turn + first, every or len(dtypes))
    return pytest.mark.parametrize("op, case, dtype", rows)
