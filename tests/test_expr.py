"""The expression language: values and derivatives."""

from __future__ import annotations

import ctypes
import math

import mlx.core as mx
import numpy as np
import pytest
from cplusplus import compiled, pointer
from expr_oracle import CALLS, NUMPY, mlx_gradient, mlx_value, value, values
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import zmlx
from zmlx import msl
from zmlx.expr import (
    FUNCTIONS,
    Expr,
    call,
    gradient,
    literal,
    name,
    parse,
)
from zmlx.expr.simplify import simplified

#: MLX has float64 on the CPU alone.
pytestmark = pytest.mark.on_cpu

#: An example takes no compiler.
MANY = settings(max_examples=20 * settings().max_examples)


# Values

_POINTS = np.array([-2.5, -1.5, -1, -0.75, -0.25, 0, 0.25, 0.75, 1, 1.5, 2.5, 40])


@pytest.mark.parametrize("f", CALLS, ids=lambda f: f.name)
def test_evaluate_agrees_with_numpy(f):
    names = f.parameters.split()
    grid = dict(zip(names, np.meshgrid(*[_POINTS] * len(names)), strict=True))
    e = call(f.name, *map(name, names))
    want = value(e, **grid)
    # MLX's exp, sin and erf have float32 accuracy in float64 too, on the CPU.
    np.testing.assert_allclose(mlx_value(e, **grid), want, rtol=4e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32, mx.float64])
def test_evaluate_keeps_the_dtype(dtype):
    x = mx.array([1.0, 2.0], dtype=dtype)
    for text in ("x + 1", "exp(x)", "x > 1 ? 1 : 0", "2 * pi * x ** 2", "sigmoid(x)"):
        assert parse(text).evaluate({"x": x}).dtype == dtype, text


def test_evaluate_promotes_as_mlx():
    x, w = mx.array([1.0], dtype=mx.bfloat16), mx.array([2.0])
    assert parse("x * w + 1").evaluate({"x": x, "w": w}).dtype == mx.float32


def test_conditions_count_as_one_and_zero():
    mask, x = mx.array([True, False]), mx.array([3.0, 4.0])
    assert parse("mask + mask").evaluate({"mask": mask}).tolist() == [2, 0]
    assert parse("mask ? x : -x").evaluate({"mask": mask, "x": x}).tolist() == [3, -4]
    assert parse("(x > 3) + (x > 2)").evaluate({"x": x}).tolist() == [1, 2]
    assert parse("x > 3").evaluate({"x": x}).dtype == mx.bool_


def test_integers_keep_their_bits_and_are_not_divided():
    i = mx.array([2**24 + 1, 7])
    assert parse("i + i").evaluate({"i": i}).tolist() == [2**25 + 2, 14]
    with pytest.raises(ValueError, match=r"'/' must have a floating operand, but in 'i / i'"):
        parse("i / i").evaluate({"i": i})


def test_a_missing_array_is_named():
    with pytest.raises(ValueError, match="'arrays' must hold 'y' but does not"):
        parse("x + y").evaluate({"x": mx.array(1.0)})


# Derivatives of the table

#: Kinks, ties, poles and infinities beside ordinary points.
_EDGES = np.array([-np.inf, -100, -2, -1, -0.5, -0.0, 0.5, 1, 2, 3, 100, np.inf, np.nan])


@pytest.mark.parametrize(
    "f", [f for f in FUNCTIONS.values() if f.derivatives], ids=lambda f: f.name
)
def test_derivatives_are_mlx_s_wherever_those_are_finite(f):
    names = f.parameters.split()
    grid = dict(zip(names, (a.ravel() for a in np.meshgrid(*[_EDGES] * len(names))), strict=True))
    e = call(f.name, *map(name, names))
    for of in names:
        want = mlx_gradient(e, of, **grid)
        ours = np.broadcast_to(value(e.derivative(of), **grid), want.shape)
        known = np.isfinite(want)
        np.testing.assert_allclose(ours[known], want[known], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "at", "want"),
    [
        ("max(x, 1)", 1, 0),
        ("max(1, x)", 1, 1),
        ("min(x, 1)", 1, 0),
        ("relu(x)", 0, 0),
        ("abs(x)", 0, 0),
        ("clip(x, 0, 1)", 0, 0),
        ("clip(x, 0, 1)", 1, 0),
        ("x > 0 ? x : 2 * x", 0, 2),
        ("sqrt(x)", 0, math.inf),
    ],
)
def test_ties_follow_mlx(text, at, want):
    e = parse(text)
    assert value(e.derivative("x"), x=at) == want
    assert mlx_gradient(e, "x", x=at) == want


@pytest.mark.parametrize(
    "text", ["x > 0 ? log(x) : 0", "x > 0 ? sqrt(x) * 2 : 0", "max(sqrt(x), 1)"]
)
def test_an_arm_not_taken_makes_no_nan(text):
    """MLX's own gradient is NaN here, from 0 * inf."""
    e = parse(text)
    assert value(e.derivative("x"), x=0.0) == 0
    lets, (dx,) = gradient([e], ["x"], ["g"])
    assert value(lets.inline(dx), x=0.0, g=3.0) == 0


def _s(x):
    return 1 / (1 + np.exp(-x))


#: Texts that write a sigmoid with exp, and their slopes.
SIGMOIDS = {
    "1 / (1 + exp(-x))": lambda x: _s(x) * _s(-x),
    "1 / (exp(-x) + 1)": lambda x: _s(x) * _s(-x),
    "x / (1 + exp(-x))": lambda x: _s(x) * (1 + x * _s(-x)),
    "log(1 + exp(x))": _s,
    "log1p(exp(x))": _s,
    "x * tanh(log1p(exp(x)))": lambda x: (
        np.tanh(np.logaddexp(x, 0)) + x * _s(x) / np.cosh(np.logaddexp(x, 0)) ** 2
    ),
    "2 / (1 + exp(-2 * x)) - 1": lambda x: 1 / np.cosh(x) ** 2,
}


@pytest.mark.parametrize("text", SIGMOIDS)
def test_slopes_of_sigmoids_written_with_exp_are_finite(text):
    """exp(x) / (1 + exp(x)), as they are by the chain rule, is NaN where exp(x) is infinite."""
    e = parse(text)
    lets, (dx,) = gradient([e], ["x"], ["g"])
    for x in (-200.0, -89.0, -3.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 3.0, 89.0, 200.0):
        want = SIGMOIDS[text](x)
        arrays = {"x": mx.array(x, mx.float32), "g": mx.array(1.0, mx.float32)}
        for slope in (e.derivative("x"), lets.inline(dx)):
            got = slope.evaluate(arrays).item()
            assert got == pytest.approx(want, rel=1e-5, abs=1e-36), (slope, x)


def test_a_slope_of_a_sigmoid_keeps_its_other_factors():
    e = simplified("*", parse("exp(x) * exp(x)"), parse("y * (x / (1 + exp(x)))"))
    assert e.metal() == "exp(x) * (y * (x * zmlx_sigmoid(x)))"


def test_derivatives_read_as_one_would_write_them():
    assert parse("x * x").derivative("x").metal() == "x + x"
    assert parse("x ** 4").derivative("x").metal() == "4.0f * zmlx_cube(x)"
    assert parse("3 * x + y").derivative("x").metal() == "3.0f"
    assert parse("-exp(-x)").derivative("x").metal() == "exp(-x)"
    assert parse("x / y").derivative("y").metal() == "-(x / y / y)"
    assert parse("relu(x)").derivative("x").metal() == "x > 0.0f ? 1.0f : 0.0f"
    assert parse("y > 0 ? 1 : 2").derivative("y").metal() == "0.0f"


def test_constants_are_folded_only_where_float_is_exact():
    assert parse("0.1 * x + 0.2 * x").derivative("x").metal() == "0.1f + 0.2f"
    assert parse("0.5 * x + 0.25 * x").derivative("x").metal() == "0.75f"


# Random expressions

_NAMES = st.sampled_from(["x", "y"]).map(name)
_LITERALS = st.sampled_from(["0", "1", "2", "0.5", "3", "1.25", "1e-1"]).map(literal)


def _trees(functions: list[str], leaves: int) -> st.SearchStrategy[Expr]:
    def node(children: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        def of(f: str) -> st.SearchStrategy[Expr]:
            return st.tuples(*[children] * FUNCTIONS[f].arity).map(lambda args: call(f, *args))

        return st.sampled_from(functions).flatmap(of)

    return st.recursive(_NAMES | _LITERALS, node, max_leaves=leaves)


_ANY = _trees(list(FUNCTIONS), 20)
_EXACT_NAMES = """
?: || && ! == != < <= > >= + - * / neg abs ceil cube floor fma isfinite isinf isnan max
min round sign sqrt square trunc
"""
_EXACT = _trees(
    _EXACT_NAMES.split(),
    20,
)
_SMOOTH_NAMES = """
+ - * / neg ?: < atan atan2 cosh erf exp expm1 fma gelu gelu_tanh hypot log log1p logaddexp
log_sigmoid max mish min ndtr pow rsqrt sigmoid silu sin softplus sqrt square tanh
"""
_SMOOTH = _trees(
    _SMOOTH_NAMES.split(),
    7,
)
_X = st.sampled_from([-2.3, -1.7, -0.6, -0.2, 0.3, 0.7, 1.1, 1.9, 2.6])
_Y = st.sampled_from([-2.1, -1.3, -0.4, 0.23, 0.83, 1.7, 2.9])


@MANY
@given(_ANY)
def test_metal_text_reads_back(e):
    assert parse(e.metal()) == e


@MANY
@given(_EXACT)
def test_evaluate_is_float64_arithmetic(e):
    assume(e.names())
    x, y = (a.ravel() for a in np.meshgrid(_EDGES, _EDGES))
    want = np.broadcast_to(value(e, x=x, y=y), x.shape)
    np.testing.assert_array_equal(np.broadcast_to(mlx_value(e, x=x, y=y), x.shape), want)


@MANY
@given(_SMOOTH, _X, _Y)
def test_derivative_is_the_limit_of_differences(e, x, y):
    assume(not e.is_condition)
    ours = value(e.derivative("x"), x=x, y=y)
    assume(np.isfinite(ours))
    sizes = [abs(v) for v in values(e, x=x, y=y).values()]
    assume(max(sizes) < 1e2)

    def difference(h: float) -> float:
        return float((value(e, x=x + h, y=y) - value(e, x=x - h, y=y)) / (2 * h))

    # Two steps that disagree mean a kink or a pole near x, or an ill-conditioned expression.
    near, far = difference(1e-5), difference(2e-5)
    tolerance = 1e-6 * max(1.0, abs(far))
    assume(abs(near - far) < tolerance)
    assert abs(ours - near) < 20 * tolerance


@MANY
@given(_SMOOTH, _X, _Y)
def test_derivative_is_mlx_s(e, x, y):
    d = e.derivative("x")
    sizes = [abs(float(v)) for tree in (e, d) for v in values(tree, x=x, y=y).values()]
    assume(all(v == 0 or 1e-2 < v < 1e2 for v in sizes))
    want = mlx_gradient(e, "x", x=x, y=y)
    assume(np.isfinite(want))
    assert abs(value(d, x=x, y=y) - want) < 1e-4 * max(1.0, *sizes)


@MANY
@given(st.lists(_SMOOTH, min_size=1, max_size=3), _X, _Y)
def test_reverse_mode_agrees_with_forward_mode(outputs, x, y):
    cotangents = [f"g{i}" for i in range(len(outputs))]
    point = {"x": x, "y": y, **{g: 0.5 + i for i, g in enumerate(cotangents)}}
    lets, gradients = gradient(outputs, ["x", "y"], cotangents)
    for of, found in zip("xy", gradients, strict=True):
        terms = [e.derivative(of) for e in outputs]
        sizes = [abs(v) for t in terms for v in values(t, x=x, y=y).values()]
        assume(all(v == 0 or 1e-3 < v < 1e3 for v in sizes))
        want = sum(point[g] * value(t, x=x, y=y) for g, t in zip(cotangents, terms, strict=True))
        ours = value(lets.inline(found), **point)
        # Forward mode sees that the slope of x - x is 0; MLX, as reverse mode, multiplies it.
        assume(
            np.isfinite(ours) or all(np.isfinite(mlx_gradient(e, of, x=x, y=y)) for e in outputs)
        )
        assert abs(ours - want) <= 1e-9 * max(1.0, *sizes)


# The Metal text, run


def test_metal_text_computes_what_evaluate_computes(tmp_path):
    cases = [call(f.name, *map(name, f.parameters.split())) for f in CALLS]
    cases += [e.derivative("x") for e in cases]
    cases += [parse("x > y ? x : -y"), parse("(x > 0) + (y > 0) * 2 - !(x < 1 && y != 0)")]
    body = "".join(f"case {i}: return {e.metal()};\n" for i, e in enumerate(cases))
    text = (
        msl.header_for(body)
        + f"""
static float one(int which, float x, float y, float z, float c) {{
    (void)x; (void)y; (void)z; (void)c;
    switch (which) {{ {body} }}
    return 0.0f;
}}
extern "C" void run(int which, long n, float* out, const float* x, const float* y) {{
    for (long i = 0; i < n; ++i) out[i] = one(which, x[i], y[i], 0.5f, 1.0f);
}}"""
    )
    run = compiled(text, tmp_path).run
    grid = np.float32([-3, -1.5, -0.7, -0.1, 0.2, 0.9, 1.3, 2.5, 6])
    x, y = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(grid, grid))
    for i, e in enumerate(cases):
        out = np.empty_like(x)
        run(i, ctypes.c_long(x.size), pointer(out), pointer(x), pointer(y))
        want = np.broadcast_to(value(e, x=x, y=y, z=0.5, c=1), x.shape)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6, err_msg=e.metal())


def test_the_table_has_a_row_of_everything_that_numpy_checks():
    assert set(NUMPY) == set(FUNCTIONS)


def test_slopes_of_tanh_and_sigmoid_keep_their_digits():
    x = np.array([-12.0, -5.0, 0.5, 8.0, 9.0, 12.0])
    for text, slope in (
        ("tanh(x)", 1 / np.cosh(x) ** 2),
        ("sigmoid(x)", 1 / (2 * np.cosh(x / 2)) ** 2),
    ):
        f = zmlx.expression(text)
        got = mx.grad(lambda v, f=f: f(v).sum())(mx.array(x, mx.float32))
        np.testing.assert_allclose(np.array(got), slope, rtol=1e-6)
