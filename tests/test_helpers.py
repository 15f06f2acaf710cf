"""Kernels from expressions and from Python functions, launched."""

import copy
import math
import pickle
from contextlib import nullcontext

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from samples import X, Y, close

import zmlx
from zmlx import metal
from zmlx.autograd import binary_from_expr, differentiable, nary_from_expr, unary_from_expr
from zmlx.expr import FUNCTIONS, parse

UNARY = sorted(n for n, f in FUNCTIONS.items() if f.arity == 1 and f.precedence == 0)


@pytest.mark.parametrize("text", ["sign(x) * x", "floor(x) * x", "x % 0.7", "x > 0 ? x : -x"])
def test_a_shapeless_gradient_takes_another_shape(text):
    function = zmlx.expression(text)

    def loss(x):
        return function(x).square().sum()

    gradient = mx.compile(mx.grad(loss), shapeless=True)
    for shape in ((2, 3), (40, 50)):
        x = mx.arange(shape[0] * shape[1] * 1.0).reshape(shape).sin()
        close(gradient(x), mx.grad(loss)(x), 1e-5)


@pytest.mark.parametrize("name", UNARY)
def test_every_function_and_its_derivative(name):
    text = f"{name}(x)"
    function, plain = zmlx.elementwise.unary(text), parse(text)
    x = X + 1 if name == "acosh" else X
    got, want = function(x), plain.evaluate({"x": x})
    assert mx.isfinite(want).all()
    close(got, want)
    if not plain.is_condition:
        close(
            mx.grad(lambda x: (function(x) * Y).sum())(x),
            mx.grad(lambda x: (plain.evaluate({"x": x}) * Y).sum())(x),
            1e-4,
        )


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_output_has_the_dtype_of_the_inputs(dtype):
    assert zmlx.expression("x * sigmoid(x)")(X.astype(dtype)).dtype == dtype


def test_several_outputs_use_every_cotangent():
    f = zmlx.elementwise.map(
        {"p": "t + y", "q": "t * y", "r": "x > y"}, ("x", "y"), lets="t = x * x"
    )
    p, q, r = f(X, Y)
    close(p, X * X + Y)
    close(q, X * X * Y)
    assert r.dtype == mx.bool_
    got = mx.grad(lambda x: (2 * f(x, Y)[0] + 3 * f(x, Y)[1]).sum())(X)
    close(got, 4 * X + 6 * X * Y)


def test_a_given_derivative_is_used():
    f = unary_from_expr("x * x", derivative="7")
    close(mx.grad(lambda x: f(x).sum())(X), mx.full(X.shape, 7.0))
    g = binary_from_expr("x * y", derivatives=("2", "3"))
    dx, dy = mx.grad(lambda x, y: g(x, y).sum(), argnums=(0, 1))(X, Y)
    close(dx, mx.full(X.shape, 2.0))
    close(dy, mx.full(X.shape, 3.0))
    h = nary_from_expr("a * b", ("a", "b"), gradients={"a": "dy * 5", "b": "dy * a"})
    close(mx.grad(lambda a: h(a, Y).sum())(X), mx.full(X.shape, 5.0))


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_a_given_derivative_is_used_under_every_transform(target):
    f = unary_from_expr("floor(x)", derivative="1 + x")
    g = nary_from_expr(
        "a * b", ("a", "b"), gradients={"a": "clip(dy * b, -1, 1)", "b": "3 * dy * a"}
    )
    b, dy = Y[0], mx.random.normal(X.shape)
    with zmlx.target(target):
        close(f(X), mx.floor(X))
        close(mx.grad(lambda x: f(x).sum())(X), 1 + X)
        close(mx.compile(mx.grad(lambda x: f(x).sum()))(X), 1 + X)
        close(mx.vmap(mx.grad(lambda x: f(x).sum()))(X), 1 + X)
        close(mx.grad(lambda x: mx.vmap(f)(x).sum())(X), 1 + X)
        close(mx.grad(lambda x: mx.vmap(mx.vmap(f, in_axes=1))(x[None]).sum())(X), 1 + X)
        close(mx.jvp(f, [X], [dy])[1][0], dy * (1 + X))
        close(mx.vmap(lambda x, t: mx.jvp(f, [x], [t])[1][0])(X, dy), dy * (1 + X))
        close(mx.grad(lambda x: mx.grad(lambda x: f(x).sum())(x).sum())(X), mx.ones(X.shape))
        for call in (g, mx.vmap(g, in_axes=(0, None)), mx.vmap(g, in_axes=(1, 0), out_axes=1)):
            da, db = mx.grad(lambda a, b, h=call: (h(a, b) * dy).sum(), argnums=(0, 1))(X, b)
            close(da, mx.clip(dy * b, -1, 1))
            close(db, (3 * dy * X).sum(axis=0))
        # Of the rule as it is at a cotangent of 0.
        close(mx.jvp(g, [X, b], [dy, b])[1][0], dy * b + 3 * X * b)


def test_a_given_derivative_is_not_lost_in_a_shapeless_compile():
    f = unary_from_expr("floor(x)", derivative="1", name="through")
    with pytest.raises(ValueError, match=r"\[through\] a function with given derivatives must not"):
        mx.compile(mx.grad(lambda x: f(x).sum()), shapeless=True)(X)


def test_transforms_of_an_expression():
    f = zmlx.expression("x * tanh(y)")
    close(mx.vmap(f, in_axes=(0, None))(X, Y[0]), X * mx.tanh(Y[0]))
    close(mx.jvp(lambda x: f(x, Y), [X], [Y])[1][0], Y * mx.tanh(Y))
    compiled = mx.compile(lambda x, y: f(x, y), shapeless=True)
    close(compiled(X, Y), X * mx.tanh(Y))
    close(compiled(X[:2], Y[:2]), X[:2] * mx.tanh(Y[:2]))


@pytest.mark.parametrize("text, message", [
    ("x * tanhh(x)", "unknown function 'tanhh'"),
    ("x +", "column"),
    ("2 * 3", "at least one input"),
])  # fmt: skip
def test_a_bad_expression_shows_the_users_line(text, message):
    with pytest.raises(ValueError, match=message):
        zmlx.expression(text)


@pytest.mark.parametrize("text, inputs", [
    ("x if m > 0 else y", ("x", "m", "y")),
    ("m > 0 ? x : y", ("m", "x", "y")),
    ("select(x, y, c > 0)", ("x", "y", "c")),
])  # fmt: skip
def test_inputs_stand_in_order_of_appearance(text, inputs):
    assert zmlx.expression(text).inputs == inputs


def test_a_condition_has_no_cotangent():
    gradients = {"x": "dy * 2 + dc"}
    with pytest.raises(ValueError, match=r"\[expression\] .*dc"):
        nary_from_expr({"y": "2 * x", "c": "x > 0"}, ("x",), gradients=gradients)
    with pytest.raises(ValueError, match=r"\[expression\] .*dy"):
        nary_from_expr("x > 0", ("x",), gradients={"x": "dy"})


@pytest.mark.parametrize("inputs, message", [
    ((), "'inputs' must have at least one name but got"),
    (5, "'inputs' must be a sequence of names but got 5"),
    ({"x"}, "'inputs' must be a sequence of names but got {'x'}"),
    ({"x": "y"}, "'inputs' must be a sequence of names but got {'x': 'y'}"),
])  # fmt: skip
def test_bad_inputs_of_an_expression(inputs, message):
    for make in (zmlx.expression, zmlx.elementwise.map):
        with pytest.raises((TypeError, ValueError), match=message):
            make("x", inputs=inputs)


@pytest.mark.parametrize(
    "text, points",
    [
        ("hypot(x, 0.75 * x)", [2e38, 1e20, 3.0, 1e-20]),
        ("gelu_tanh(x)", [-3e38, -2e19, 1.5, 2e19, 3e38]),
    ],
)
def test_derivatives_of_the_reference_do_not_overflow(text, points):
    f, x = zmlx.expression(text), mx.array(points)
    want = mx.grad(lambda x: f(x).sum())(x)
    assert mx.isfinite(want).all()
    close(mx.jvp(f, [x], [mx.ones_like(x)])[1][0], want)
    with zmlx.target("reference"):
        close(mx.grad(lambda x: f(x).sum())(x), want)
    assert zmlx.expression("hypot(x, y)")(mx.array([0.0]), mx.array([0.0])).item() == 0


def test_bad_arguments_of_an_expression():
    f = zmlx.elementwise.binary("x * y", name="times")
    with pytest.raises(
        ValueError, match=r"\[times\] 'y' must broadcast with \(3, 70\) but got \(4,\)"
    ):
        f(X, mx.zeros((4,)))
    with pytest.raises(ValueError, match=r"\[times\] 'x' must have dtype .* but got int32"):
        f(X.astype(mx.int32), Y)
    with pytest.raises(TypeError, match=r"\[times\] takes 2 arrays"):
        f(X)


@pytest.mark.parametrize("number", [10**400, -(10**400)], ids=["above", "below"])
def test_a_number_beyond_a_float_is_refused_by_name(number):
    with pytest.raises(ValueError, match=r"\[times\] 'y' must be in the range of a float but got"):
        zmlx.elementwise.binary("x * y", name="times")(X, number)
    with pytest.raises(ValueError, match=r"\[silu\] 'x' must be in the range of a float but got"):
        zmlx.kernels.silu(number)


def test_differentiable_takes_functions():
    double = zmlx.expression("2 * x")
    for arguments, argument in (((3, double), "forward"), ((double, 3), "vjp")):
        with pytest.raises(TypeError, match=rf"'{argument}' must be a function but got int"):
            differentiable(*arguments)
    with pytest.raises(TypeError, match=r"\[f\] 'reference' must be a function but got int"):
        differentiable(double, double, reference=3, name="f")


def test_the_reference_of_differentiable_may_return_a_bare_array():
    f = differentiable(zmlx.expression("2 * x"), lambda p, c, o, w: c, reference=lambda x: 2 * x)
    with zmlx.target("reference"):
        assert f(X[:1]).shape == (1, 70)


def test_a_let_that_is_a_condition_is_one_as_an_output():
    lets = "near = x < 0.5; both = near && y < 0.5; same = both"
    outputs = {"a": "near", "b": "same", "c": "near + x", "d": "where(same, x, y)"}
    f = zmlx.elementwise.map(outputs, ("x", "y"), lets=lets)
    near, both = mx.less(X, 0.5), mx.logical_and(mx.less(X, 0.5), mx.less(Y, 0.5))
    for function in (f, pickle.loads(pickle.dumps(f))):
        a, b, c, d = function(X, Y)
        assert (a.dtype, b.dtype, c.dtype, d.dtype) == (mx.bool_,) * 2 + (mx.float32,) * 2
        assert mx.array_equal(a, near)
        assert mx.array_equal(b, both)
        close(c, near + X)
        close(d, mx.where(both, X, Y))
    close(mx.grad(lambda y: sum(o.astype(mx.float32).sum() for o in f(X, y)))(Y), 1.0 - both)
    g = zmlx.rowwise.map_reduce({"m": ("max", "x")}, {"t": "top", "n": "few"},
                                lets="top = x == m; few = m < 0.9")  # fmt: skip
    top, few = g(X)
    assert (top.dtype, few.dtype) == (mx.bool_, mx.bool_)
    assert mx.array_equal(top, X.max(axis=-1, keepdims=True) == X)
    assert mx.array_equal(few, X.max(axis=-1) < 0.9)


def test_differentiable_composes_launches():
    double = zmlx.expression("2 * x")

    def twice(x):
        return double(double(x))

    f = differentiable(twice, lambda p, c, o, w: (5 * c[0],), reference=lambda x: (4 * x,))
    close(f(X), 4 * X)
    close(mx.grad(lambda x: f(x).sum())(X), mx.full(X.shape, 5.0))
    close(mx.compile(f, shapeless=True)(X), 4 * X)


@zmlx.jit
def pieces(x, y):
    total = 0.0
    for i in range(4):
        if x > y:
            total += x * i
        else:
            total -= y
    return total, x * y


def plain_pieces(x, y):
    return mx.where(x > y, 6 * x, -4 * y), x * y


def test_jit_launches_one_kernel_and_its_gradient():
    for got, want in zip(pieces(X, Y[0]), plain_pieces(X, Y[0]), strict=True):
        close(got, want)
    assert pieces(1.0, 2.0) == (-8.0, 2.0)

    def loss(function):
        return lambda x, y: sum((z * z).sum() for z in function(x, y))

    got = mx.grad(loss(pieces), argnums=(0, 1))(X, Y[0])
    want = mx.grad(loss(plain_pieces), argnums=(0, 1))(X, Y[0])
    for g, w in zip(got, want, strict=True):
        close(g, w, 1e-4)
    close(mx.vmap(lambda x: pieces(x, Y[0])[0])(X), plain_pieces(X, Y[0])[0])


@zmlx.jit
def steps(n: int, x: float):
    count = 0
    while n > 1 and count < 200:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        count += 1
    return count, x * count


def test_jit_keeps_integers():
    n = mx.array([1, 6, 27], dtype=mx.int32)
    count, scaled = steps(n, mx.array([1.0, 0.5, 2.0]))
    assert count.dtype == mx.int32
    assert count.tolist() == [0, 8, 111]
    assert scaled.tolist() == [0.0, 4.0, 222.0]
    assert mx.grad(lambda x: steps(n, x)[1].sum())(mx.ones(3)).tolist() == [0.0, 8.0, 111.0]
    with pytest.raises(ValueError, match=r"\[steps\] 'n' must have dtype int32 but got float32"):
        steps(mx.zeros((3,)), mx.zeros((3,)))


def test_a_new_number_compiles_nothing():
    f = zmlx.elementwise.map("x * s", ("x", "s"))
    f(X, 1.0)
    before = metal.statistics()
    for s in range(20):
        f(X, s * 0.37)
    after = metal.statistics()
    assert (after["compiles"], after["cache_hits"]) == (before["compiles"], before["cache_hits"])


@pytest.mark.parametrize("make, message", [
    (lambda: zmlx.rowwise.map_reduce({"a": ("sum", "x - b"), "b": ("max", "x")}, "a"),
     "'reductions' must need only those before them but got 'a', which needs 'b'"),
    (lambda: zmlx.rowwise.map_reduce(
        {"a": ("sum", "t"), "b": ("max", "x")}, "a", lets="t = x - b"), "'a', which needs 'b'"),
    (lambda: zmlx.rowwise.map_reduce({"x": ("sum", "x")}, "x"), "names of their own but got 'x'"),
    (lambda: zmlx.rowwise.map_reduce({"D": ("sum", "x")}, "D"), "names of their own but got 'D'"),
    (lambda: zmlx.rowwise.reduce("sum", "j", inputs=("j",)), "'inputs' must not be D"),
    (lambda: zmlx.rowwise.map_reduce({"a": "sum"}, "a"), "pairs of op and expression but got a="),
    (lambda: zmlx.rowwise.map_reduce({"m": None}, "m"), "'reductions' must be .* but got m=None"),
    (lambda: zmlx.rowwise.map_reduce({"m": 3}, "m"), "'reductions' must be pairs .* but got m=3"),
    (lambda: zmlx.rowwise.map_reduce({"m": ("sum", 3)}, "m"), "'reductions' must be pairs"),
    (lambda: zmlx.rowwise.map_reduce({"m": ("sum", "x")}, "m", lets=3), "'lets' must be a str"),
    (lambda: zmlx.rowwise.reduce(["sum"]), r"\[reduce\] 'op' must be one of .* got \['sum'\]"),
    (lambda: zmlx.rowwise.reduce("sum", 3), r"\[reduce\] 'expression' must be a str but got 3"),
    (lambda: zmlx.rowwise.reduce("sum", finalize=3), "'finalize' must be a str but got 3"),
    (lambda: zmlx.rowwise.map_reduce({"a": ("sum", "x")}, {}), "'outputs' must be an expression"),
    (lambda: zmlx.rowwise.reduce("sum", "beta", inputs="beta"), "a sequence of names .* 'beta'"),
    (lambda: zmlx.elementwise.map("beta", "beta"), "a sequence of names but got 'beta'"),
    (lambda: zmlx.expression("beta", inputs="beta"), "a sequence of names but got 'beta'"),
    (lambda: zmlx.elementwise.map("x", ("x", "x")), "'inputs' must not repeat a name"),
    (lambda: zmlx.elementwise.binary("a", inputs=("a", "b", "c")), "must be two names"),
    (lambda: zmlx.elementwise.map("1", ()), "'inputs' must have at least one name"),
    (lambda: zmlx.elementwise.map({}, ("x",)), "'outputs' must be an expression"),
    (lambda: zmlx.elementwise.map({"y": 3}, ("x",)), r"\[map\] 'outputs' must be .* {'y': 3}"),
    (lambda: zmlx.elementwise.map("x", ("x",), lets=3), r"\[map\] 'lets' must be a str but got 3"),
    (lambda: zmlx.elementwise.unary(3), r"\[unary\] 'text' must be a str but got 3"),
    (lambda: zmlx.expression(3), r"\[expression\] 'text' must be a str but got 3"),
    (lambda: zmlx.elementwise.unary("x", name="a b"), "'name' must be an identifier but got 'a b'"),
    (lambda: binary_from_expr("x * y", derivatives=("y",)), "'derivatives' must be two"),
    (lambda: binary_from_expr("x * y", derivatives=3), "'derivatives' must be two .* but got 3"),
    (lambda: binary_from_expr("x * y", derivatives=("y", 3)), "'derivatives' must be two"),
    (lambda: binary_from_expr(3), r"\[binary\] 'expression' must be a str but got 3"),
    (lambda: unary_from_expr("x", derivative=3), r"\[unary\] 'derivative' must be a str but got 3"),
    (lambda: nary_from_expr("x * y", ("x", "y"), gradients=3),
     "'gradients' must have one expression for each of x, y but got 3"),
    (lambda: nary_from_expr("x * y", ("x", "y"), gradients="dy"),
     "'gradients' must have one expression for each of x, y but got 'dy'"),
    (lambda: nary_from_expr("x", ("x",), gradients={"x": 3}), "'gradients' must .* got {'x': 3}"),
    (lambda: nary_from_expr({"o": "x"}, ("x",), gradients={"x": "1"}),
     "'outputs' must have names whose cotangents are no other names but got do"),
    (lambda: nary_from_expr("dy * x", ("dy", "x"), gradients={"dy": "dy", "x": "x"}),
     "whose cotangents are no other names but got dy"),
    (lambda: nary_from_expr({"y": "x * x", "dy": "x"}, ("x",), gradients={"x": "dy * x + ddy"}),
     "whose cotangents are no other names but got dy"),
    (lambda: nary_from_expr({"y": "x * x", "dy": "x > 0"}, ("x",), gradients={"x": "dy * x"}),
     "whose cotangents are no other names but got dy"),
    (lambda: zmlx.expression("math.exp(x)"), "write exp"),
])  # fmt: skip
def test_a_wrong_definition_is_refused_before_any_call(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_vmap_of_an_inequality_keeps_the_mapped_axis_in_place():
    f = zmlx.expression("where(0.5 != x, y, 2)", inputs=("x", "y"))
    close(mx.vmap(f)(X, Y), Y)
    differs = zmlx.expression("x != y")
    close(mx.vmap(differs, in_axes=(None, 0))(X[0], X), X[0] != X)

    @zmlx.jit
    def pick(x, y):
        return 2.0 if x != y else y

    close(mx.vmap(pick, in_axes=(None, 0))(X[0], Y), mx.full(Y.shape, 2.0))


def test_a_number_computed_from_bools_is_a_float():
    mask = X > Y
    pick = zmlx.expression("where(m, 1.5, 2)", inputs=("m",))
    assert pick(mask).dtype == mx.float32
    close(pick(mask), mx.where(mask, 1.5, 2.0))
    close(mx.vmap(pick)(mask), mx.where(mask, 1.5, 2.0))
    count = zmlx.rowwise.reduce("sum")
    close(count(mask), mask.sum(-1).astype(mx.float32))
    assert zmlx.expression("!m")(mask).dtype == mx.bool_


def test_numbers_may_come_from_numpy():
    f = zmlx.elementwise.binary("x * y")
    for number in (np.float32(1.5), np.float64(1.5), np.float16(1.5), 1.5):
        close(f(X, number), 1.5 * X)
    for number in (np.int64(2), np.uint8(2), 2):
        close(f(X, number), 2 * X)
    close(f(X, np.bool_(True)), X)
    scaled = zmlx.rowwise.reduce("sum", "x * y", inputs={"x": "row", "y": "scalar"})
    for number in (2, 2.0, np.float64(2), np.int32(2)):
        close(scaled(X, number), 2 * X.sum(-1))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_plain_number_leaves_half_precision(dtype):
    x = X.astype(dtype)
    f = zmlx.expression("a * x * x + b")
    for number in (0.3, np.float64(0.3), np.float32(0.3)):
        got = f(number, x, 1)
        assert got.dtype == dtype
        # The number itself is not rounded to half precision.
        assert mx.array_equal(got, (x.astype(mx.float32).square() * number + 1).astype(dtype))
    of_x = lambda x: f(0.3, x, True)  # noqa: E731
    for made in (
        mx.grad(lambda x: of_x(x).sum())(x),
        mx.vmap(of_x)(x),
        mx.compile(of_x, shapeless=True)(x),
        mx.jvp(of_x, (x,), (x,))[1][0],
    ):
        assert made.dtype == dtype
    assert f(mx.array(0.3), x, 1).dtype == mx.float32
    assert f(0.3, mx.array([True]), 1).dtype == mx.float32


def slope(f, order=1):
    """The derivative of a function of one array, element by element."""
    once = mx.grad(lambda x: f(x).sum())
    return once if order == 1 else slope(once, order - 1)


SMOOTH = sorted(set(UNARY) - {"abs", "acosh", "ceil", "floor", "isfinite", "isinf", "isnan", "log",
    "log10", "log2", "round", "rsqrt", "sign", "sqrt", "trunc"})  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_second_derivatives_are_continuous_at_zero(name):
    # A derivative that is written with abs(x) has a kink there that the function has not.
    f = zmlx.elementwise.unary(f"{name}(x)")
    at, near = slope(f, 2)(mx.array([0.0, -0.0])), slope(f, 2)(mx.array([1e-4, -1e-4]))
    np.testing.assert_allclose(np.array(at), np.array(near), atol=1e-3)


@zmlx.jit
def of_three(x, y):
    return x * x, math.log(x), x * y


_THREE = zmlx.elementwise.map({"a": "x * x", "b": "log(x)", "c": "x * y"}, ("x", "y"))


@pytest.mark.parametrize("target", ["", "reference"])
@pytest.mark.parametrize("function", [_THREE, of_three], ids=["expression", "jit"])
def test_an_output_that_nobody_uses_leaves_the_gradient_alone(function, target):
    """Its cotangent is 0, its slope may be infinite."""
    x, y = mx.array([0.0, 1.0, 2.0]), mx.array([1.0, mx.inf, 3.0])
    wants = ([0, 2, 4], [0, 0, 0]), ([mx.inf, 1, 0.5], [0, 0, 0]), ([1, mx.inf, 3], [0, 1, 2])
    for k, want in enumerate(wants):

        def one(x, y, k=k):
            return function(x, y)[k].sum()

        with zmlx.target(target) if target else nullcontext():
            for of in (mx.grad(one, (0, 1)), mx.vmap(mx.grad(one, (0, 1)))):
                assert [g.tolist() for g in of(x, y)] == [*want]


def test_a_used_output_with_an_infinite_slope_has_no_gradient_by_the_cotangent_0():
    _, (dx,) = mx.vjp(lambda x: [zmlx.expression("log(x)")(x)], [mx.zeros(1)], [mx.zeros(1)])
    assert mx.isnan(dx).all()


def test_a_gradient_of_several_outputs_has_a_derivative_where_cotangents_are_0():
    def first(x):
        return mx.grad(lambda x: sum((z * z).sum() for z in _THREE(x, x)[:2]))(x)

    slopes = mx.vjp(first, [mx.ones(1)], [mx.ones(1)])[1]  # of x⁴ + log(x)² at 1
    close(slopes[0], mx.array([14.0]))


def test_a_gradient_that_nobody_asks_for_is_not_computed():
    x, n = mx.array([-2.0, -0.5, 0.5, 2.0]), mx.array(3.0)
    power = zmlx.expression("x ** n", inputs=("x", "n"))
    # The derivative in n is that of a logarithm, which no negative x has.
    close(slope(lambda x: power(x, n), 2)(x), 6 * x)
    row = mx.full((4,), 3.0)
    close(slope(lambda x: power(x, row), 2)(x[None]), 6 * x[None])
    built = power._kernels[("full", "scalar"), (True, True)].vjp((x, n), (mx.ones(4),), (), [1])
    assert built[0] is None
    assert built[1].shape == ()


class Layer(nn.Module):
    """A module that holds one of each kind of function."""

    def __init__(self):
        super().__init__()
        self.weight = mx.array([2.0])
        self.act = zmlx.expression("x * sigmoid(x)")
        self.norm = zmlx.rowwise.map_reduce({"s": ("sum", "x * x")}, "x * rsqrt(s)")
        self.scaled = scaled_by
        self.kernel = metal.kernel(
            name="twice",
            input_names=["x"],
            output_names=["y"],
            source="uint i = thread_position_in_grid.x; y[i] = 2 * x[i];",
        )

    def __call__(self, x):
        return self.kernel(self.norm(self.scaled(self.act(self.weight * x), 3)))


def test_a_module_that_holds_functions_can_be_copied():
    layer = Layer()
    want = layer(X)
    copied = copy.deepcopy(layer)
    assert mx.array_equal(copied(X), want)
    copied.weight *= 2
    assert layer.weight.item() == 2.0


def test_an_expression_and_a_jitted_function_can_be_pickled():
    f = zmlx.elementwise.map({"a": "t + size", "b": "t > size"}, ("x", "size"), lets="t = x * x")
    for got, want in zip(pickle.loads(pickle.dumps(f))(X, Y), f(X, Y), strict=True):
        assert mx.array_equal(got, want)
    assert pickle.loads(pickle.dumps(scaled_by)) is scaled_by


def test_a_half_precision_gradient_beside_a_row_of_integers():
    x, n = X.astype(mx.float16), mx.arange(70)
    dx = mx.grad(lambda x: scaled_by(x, n).sum())(x)
    assert dx.dtype == mx.float16
    close(dx, mx.broadcast_to(n.astype(mx.float16), X.shape))


@zmlx.jit
def scaled_by(x, n: int):
    return x * n


@pytest.mark.parametrize(
    ("lets", "expr", "want"),
    [
        ("bool t = x", "t + x", [1.5, 2.5, -1.0, 0.0]),
        ("const bool t = x; const float u = t", "u + x", [1.5, 2.5, -1.0, 0.0]),
        ("float t = x > 0", "t", [1.0, 1.0, 0.0, 0.0]),
        ("c = x > 0; bool d = c", "d ? x : 7", [0.5, 1.5, 7.0, 7.0]),
    ],
)
def test_a_let_is_what_its_type_says(lets, expr, want):
    f = zmlx.autograd.nary_from_expr(expr, ("x",), lets=lets)
    assert f(mx.array([0.5, 1.5, -2.0, 0.0])).tolist() == want


def test_a_let_has_one_type():
    with pytest.raises(ValueError, match="expected a name to define but found 'bool'"):
        zmlx.autograd.nary_from_expr("t", ("x",), lets="float bool t = x")
