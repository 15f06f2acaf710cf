"""Names of inputs, outputs, lets and reductions that mean something else to a kernel."""

import contextlib
import linecache
import math
import pickle

import mlx.core as mx
import numpy as np
import pytest

import zmlx
from zmlx.autograd import binary_from_expr, nary_from_expr, unary_from_expr


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(
        np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32)), tolerance, tolerance
    )


X = mx.array(np.random.default_rng(0).uniform(0.2, 0.8, (3, 70)).astype(np.float32))
Y = mx.array(np.random.default_rng(1).uniform(0.2, 0.8, (3, 70)).astype(np.float32))


NAMES = [("size", "row"), ("D", "j"), ("x", "x_in"), ("N", "rows"), ("dy", "y"), ("dout", "out"),
         ("d_x", "x"), ("x", "result_in"), *((name, "d") for name in ("t", "key", "left",
         "right", "next", "part", "rest", "sum", "total", "out", "_t"))]  # fmt: skip


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_inputs_may_have_names_that_the_kernel_uses_itself(names):
    f = zmlx.expression(f"{names[0]} * sin({names[1]})", inputs=names)
    source = f"def f({names[0]}, {names[1]}):\n    return {names[0]} * math.sin({names[1]})\n"
    jitted = jit_of(source)
    for x, y in ((X, Y), (X, Y[0])):
        for g in (f, jitted):
            close(g(x, y), x * mx.sin(y))
            got = mx.grad(lambda x, y, g=g: g(x, y).sum(), argnums=(0, 1))(x, y)
            want = mx.grad(lambda x, y: (x * mx.sin(y)).sum(), argnums=(0, 1))(x, y)
            for a, b in zip(got, want, strict=True):
                close(a, b, 1e-4)


def jit_of(source):
    """A jitted function from text, which `inspect` finds as it finds a notebook's cell."""
    name = f"<cell {hash(source)}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    scope = {"math": math}
    exec(compile(source, name, "exec"), scope)
    return zmlx.jit(scope["f"])


OTHERWISE = ("NAN", "INFINITY", "M_PI_F", "M_E_F", "FLT_MAX", "INT_MAX", "CHAR_BIT", "HUGE_VALF",
             "METAL_FUNC", "MLX_MTL_PRAGMA_UNROLL", "ZMLX_STEP_LOOP", "ZMLX_ROWS_LOOP", "__LINE__",
             "__FILE__", "__asm__", "size_t", "grid_size", "zmlx_row_reduce", "pi", "inf",
             "nan")  # fmt: skip


def test_names_may_be_those_of_macros_and_constants():
    """Some would reach the compiler as what they are defined as, others be their number."""
    values = [X * (i + 1) for i in range(len(OTHERWISE))]
    f = zmlx.expression(" + ".join(f"{n} * {n}" for n in OTHERWISE), inputs=OTHERWISE)
    assert f.inputs == OTHERWISE
    want = sum(x * x for x in values)
    for function in (f, pickle.loads(pickle.dumps(f)), mx.vmap(f)):
        close(function(*values), want)
    close(f(**dict(zip(OTHERWISE, values, strict=True))), want)
    with zmlx.target("reference"):
        close(f(*values), want)
    got = mx.grad(lambda *v: f(*v).sum(), argnums=tuple(range(len(values))))(*values)
    for dx, x in zip(got, values, strict=True):
        close(dx, 2 * x)
    with pytest.raises(ValueError, match=r"\[expression\] 'NAN' must have dtype"):
        f(X.astype(mx.int32), *values[1:])


def test_lets_and_row_operands_may_have_the_names_of_macros_and_constants():
    doubled = zmlx.elementwise.map("FLT_MAX * x + pi", ("x",), lets="FLT_MAX = x * x; pi = 2 * x")
    close(doubled(X), X**3 + 2 * X)
    first, second = OTHERWISE[::2], OTHERWISE[1::2]
    kinds = dict.fromkeys(first, "row") | dict.fromkeys(second, "scalar")
    f = zmlx.rowwise.map_reduce(
        {"EOF": ("sum", " + ".join(kinds))}, {"FP_NAN": "EOF * nan + _Bool"},
        inputs=kinds, lets="_Bool = NAN > 0.5",
    )  # fmt: skip
    total = (len(first) * X + len(second)).sum(-1, keepdims=True)
    for target in (None, "reference"):
        with zmlx.target(target) if target else contextlib.nullcontext():
            close(f(*[X] * len(first), *[1.0] * len(second)), total * X + (X > 0.5))


def test_a_condition_under_another_name_is_one():
    for name in ("size", "NAN"):
        f = zmlx.rowwise.map_reduce({"m": ("max", "x")}, name, lets=f"{name} = x == m")
        assert f(X).dtype == mx.bool_


def test_an_output_whose_cotangent_would_be_a_word_of_metal_or_python():
    f = nary_from_expr({"o": "x * x", "ouble": "2 * x", "el": "x * x"}, ("x",))

    def gradient(x):
        return mx.grad(lambda x: sum(y.sum() for y in f(x)))(x)

    close(gradient(X), 4 * X + 2)
    close(mx.grad(lambda x: gradient(x).sum())(X), 4 * mx.ones_like(X))


def test_outputs_and_lets_may_have_names_that_the_gradient_of_others_would_have():
    f = zmlx.elementwise.map({"h": "x * x", "h_next": "2 * x"}, ("x",))
    close(mx.grad(lambda x: sum(y.sum() for y in f(x)))(X), 2 * X + 2)
    g = zmlx.elementwise.map("d * d * t", ("x", "t"), lets="d = x - t")
    got = mx.grad(lambda x, t: g(x, t).sum(), argnums=(0, 1))(X, Y)
    want = mx.grad(lambda x, t: ((x - t) ** 2 * t).sum(), argnums=(0, 1))(X, Y)
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-4)


@pytest.mark.parametrize("name", ["t0", "t0_in", "t0_next", "t1_t", "t_0"])
def test_an_input_may_have_a_name_that_parts_of_its_gradient_would_have(name):
    f = zmlx.expression(f"exp({name}) * sin({name})")
    got = mx.grad(lambda x: f(x).sum())(X)
    close(got, mx.exp(X) * (mx.sin(X) + mx.cos(X)), 1e-4)


@pytest.mark.parametrize("names", [("x", "x_number"), ("x", "x_number_in"), ("d_a", "a_number")])
def test_inputs_may_have_names_that_the_numbers_of_rows_would_have(names):
    f = zmlx.expression(f"{names[0]} * sin({names[1]})", inputs=names)
    jitted = jit_of(f"def f({', '.join(names)}):\n    return {names[0]} * math.sin({names[1]})\n")
    x, y = X[:, None], mx.stack([X, Y], axis=1)
    want = mx.grad(lambda x, y: (x * mx.sin(y)).sum(), argnums=(0, 1))(x, y)
    for g in (f, jitted):
        got = mx.grad(lambda x, y, g=g: g(x, y).sum(), argnums=(0, 1))(x, y)
        for a, b in zip(got, want, strict=True):
            close(a, b, 1e-4)


@pytest.mark.parametrize("inputs, lets", [(("x", "y", "dy_"), ""), (("x", "y"), "dy_ = 2 * x"),
                                          (("x", "y"), "y_ = x; dy__ = x")])  # fmt: skip
def test_the_cotangent_of_a_single_expression_is_dy_whatever_else_has_a_name(inputs, lets):
    gradients = {"x": "dy * y", "y": "dy * x", "dy_": "0 * dy"}
    f = nary_from_expr(
        "x * y", inputs, lets=lets, gradients={n: gradients[n] for n in inputs}
    )  # fmt: skip
    got = mx.grad(lambda x: f(x, *[Y, 100 * Y][: len(inputs) - 1]).sum())(X)
    close(got, Y)


@pytest.mark.parametrize("derivative", ["x) + (x", "2 * dy", "x; y = 2"])
def test_a_derivative_is_an_expression_by_itself(derivative):
    with pytest.raises(ValueError, match=r"\[expression\] .* at column"):
        unary_from_expr("x * x", derivative=derivative)
    with pytest.raises(ValueError, match=r"\[expression\] .* at column"):
        binary_from_expr("x * y", derivatives=("y", derivative))


def test_lets_outputs_and_reductions_may_have_such_names_too():
    f = zmlx.elementwise.map(
        {"size": "row * y", "rows": "row > y"}, ("x", "y"), lets="D = 2 * x; row = x * D"
    )
    size, rows = f(X, Y[0])
    close(size, 2 * X * X * Y[0])
    assert mx.array_equal(rows, Y[0] < 2 * X * X)
    g = zmlx.rowwise.map_reduce({"row": ("sum", "size")}, {"rows": "size / row"}, inputs=("size",))
    close(g(X), X / X.sum(-1, keepdims=True))
    with pytest.raises(ValueError, match="'size' must have dtype"):
        g(X.astype(mx.int32))
