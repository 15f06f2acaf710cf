"""Values of every op against its reference in float64. By default a case has either its values
checked or its gradients, in one dtype."""

import mlx.core as mx
import pytest

from zmlx.launch import gpu_target
from zmlx.testing import check_forward, check_gradient

from .sweep import DTYPES, OPS, option_cases, over_ops


def rows(op):
    return [c for c in op.cases if c.why != "no rows"]


@over_ops(rows, every=6, first=3)
def test_forward_matches_float64(op, case, dtype):
    check_forward(op, case, dtype)


@over_ops(lambda op: [c for c in op.cases if c.why == "no rows"])
def test_no_rows_have_the_shape_of_the_reference(op, case, dtype):
    check_forward(op, case, dtype)


@over_ops(rows, every=6)
def test_gradients_match_float64(op, case, dtype):
    check_gradient(op, case, dtype)


@over_ops(option_cases, [mx.float32, mx.bfloat16], every=4)
def test_options_match_float64(op, case, dtype):
    if gpu_target() and op.name == "linear_cross_entropy" and "return_lse" in case.options:
        pytest.skip("products on a GPU round the logits to their dtype, and the result is float32")
    check_forward(op, case, dtype)
    check_gradient(op, case, dtype)


@pytest.mark.parametrize(
    "op", [o for o in OPS if any(a.optional for a in o.arguments)], ids=lambda o: o.name
)
def test_optional_arguments_may_be_left_out(op):
    case = op.cases[1]
    check_forward(op, case, mx.float32, optional=False)
    check_gradient(op, case, mx.float32, optional=False)


@pytest.mark.slow
@pytest.mark.parametrize("turn, op", list(enumerate(OPS)), ids=lambda x: getattr(x, "name", ""))
def test_long_rows_match_float64(turn, op):
    """A dtype each, since the shorter rows have all."""
    for i, case in enumerate(op.long_cases):
        dtype = DTYPES[(turn + i) % len(DTYPES)]
        check_forward(op, case, dtype)
        check_gradient(op, case, dtype)


@over_ops(lambda op: op.long_cases[-1:], [mx.float32], every=2)
def test_a_row_too_long_for_registers_matches_float64(op, case, dtype):
    check_forward(op, case, dtype)
    check_gradient(op, case, dtype)
