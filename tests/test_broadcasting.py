"""How operands of expressions and jitted functions broadcast."""

import linecache
from contextlib import nullcontext

import mlx.core as mx
import numpy as np
import pytest

import zmlx
from zmlx import broadcasting, metal, transforms


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(
        np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32)), tolerance, tolerance
    )


SHAPES = [((3, 70), (3, 70)), ((3, 70), (70,)), ((3, 70), ()), ((3, 1), (1, 70)), ((70,), (3, 70)),
          ((2, 1, 5), (3, 1)), ((1,), (4,)), ((), ()), ((0, 5), (5,)), ((3, 70), (3, 1)),
          ((2, 3, 1), (2, 3, 33)), ((2, 3, 70), (3, 1)), ((1, 70), (1, 1)), ((0, 70), (0, 1)),
          ((1, 3, 1), (3, 70)), ((5, 1), (70,)), ((4, 3, 70), (4, 1, 70)), ((4, 3, 70), (3, 70)),
          ((2, 3, 4, 33), (2, 1, 4, 33)), ((1, 3, 1, 33), (2, 3, 4, 33)), ((4, 1, 1), (4, 3, 70)),
          ((2, 1, 70), (1, 3, 70)), ((4, 3, 4), (4, 1, 4)), ((0, 3, 9), (0, 1, 9)),
          ((4, 0, 9), (4, 1, 9))]  # fmt: skip


@pytest.mark.parametrize("a, b", SHAPES, ids=str)
def test_operands_broadcast_and_gradients_are_summed_back(a, b):
    x, y = mx.random.normal(a), mx.random.normal(b)
    function = zmlx.elementwise.binary("x * x * y + y")

    def plain(x, y):
        return x * x * y + y

    close(function(x, y), plain(x, y))
    got = mx.grad(lambda x, y: function(x, y).sum(), argnums=(0, 1))(x, y)
    want = mx.grad(lambda x, y: plain(x, y).sum(), argnums=(0, 1))(x, y)
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        close(g, w, 1e-4)


@zmlx.jit
def tilted(x, y):
    return x * x * y + y


EVERY = {"expression": zmlx.elementwise.binary("x * x * y + y"), "jit": tilted}


@pytest.mark.parametrize("function", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    "shapes",
    [((6, 70), (6, 1)), ((2, 3, 70), (2, 1, 70)), ((2, 3, 70), (3, 70)),
     ((2, 3, 2, 33), (2, 1, 2, 33))],
    ids=["per row", "per batch", "per place", "apart"],
)  # fmt: skip
def test_values_and_rows_are_read_as_such(function, dtype, shapes):
    """A value per row, and a row for several: not broadcast to the whole array first; through every
    transform."""
    x, y = (mx.random.normal(s, key=mx.random.key(0)).astype(dtype) for s in shapes)
    mx.eval(x, y)
    before = metal.statistics()["contiguous_copies"]
    out = function(x, y)
    mx.eval(out)
    assert metal.statistics()["contiguous_copies"] == before
    tolerance = {mx.float32: 1e-5, mx.float16: 4e-3, mx.bfloat16: 3e-2}[dtype]

    def plain(x, y):
        return x * x * y + y

    def same(got, want):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        close(got.astype(mx.float32), want.astype(mx.float32), tolerance * 20)

    wide = [a.astype(mx.float32) for a in (x, y)]
    same(out, plain(*wide).astype(dtype))
    same(function(y, x), plain(wide[1], wide[0]).astype(dtype))

    def slopes(f):
        return lambda *xs: mx.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))(*xs)

    def twice(f):
        return lambda *xs: mx.grad(lambda x, y: slopes(f)(x, y)[1].sum(), argnums=(0, 1))(*xs)

    for change in (
        lambda f: lambda *xs: [f(*xs)],
        slopes,
        twice,
        lambda f: lambda *xs: mx.jvp(f, xs, xs)[1],
        lambda f: lambda *xs: [mx.vmap(f)(*(mx.stack([a, a + 1]) for a in xs))],
        lambda f: lambda *xs: [mx.vmap(f, in_axes=(None, 0))(xs[0], mx.stack([xs[1], xs[1]]))],
    ):
        ours, theirs = change(function)(x, y), change(plain)(*wide)
        for got, want in zip(ours, theirs, strict=True):
            same(got, want.astype(dtype))
    if x.ndim != 2:
        return
    compiled = mx.compile(lambda x, y: slopes(function)(x, y), shapeless=True)
    for rows, d in ((6, 70), (4, 50)):
        for got, want in zip(
            compiled(x[:rows, :d], y[:rows]), slopes(plain)(*(w[:rows, :d] for w in wide)),
            strict=True,
        ):  # fmt: skip
            same(got, want.astype(dtype))


@pytest.mark.parametrize("shape", [(2, 1, 70), (3, 70), (2, 1, 1)])
def test_rows_that_serve_several_in_a_shapeless_compile(shape):
    x, y = mx.random.normal((2, 3, 70)), mx.random.normal(shape)

    def slopes(f):
        return lambda x, y: mx.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))(x, y)

    compiled = mx.compile(slopes(tilted), shapeless=True)
    for got, want in zip(compiled(x, y), slopes(lambda x, y: x * x * y + y)(x, y), strict=True):
        close(got, want, 1e-4)


@pytest.mark.parametrize("target", [None, "reference"])
@pytest.mark.parametrize("function", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize(
    "shapes",
    [(((4, 40), (40,)), ((7, 50), (50,))), (((4, 1), (1, 40)), ((6, 1), (1, 50))),
     (((4, 40), (4, 1)), ((7, 60), (7, 1))), (((4, 40), ()), ((7, 50), ())),
     (((3, 4, 40), (3, 1, 40)), ((5, 6, 50), (5, 1, 50))), (((0, 5), (5,)), ((4, 5), (5,))),
     (((2, 3, 40), (3, 1)), ((4, 5, 6), (5, 1)))],
    ids=str,
)  # fmt: skip
def test_a_shapeless_compile_broadcasts_other_shapes(shapes, function, target):
    def slopes(f):
        return lambda x, y, g: [z for found in mx.vjp(lambda *a: [f(*a)], [x, y], [g])
                                for z in found]  # fmt: skip

    compiled = mx.compile(slopes(function), shapeless=True)
    for a, b in shapes:
        g = mx.random.normal(np.broadcast_shapes(a, b))
        values = mx.random.normal(a), mx.random.normal(b), g
        with zmlx.target(target) if target else nullcontext():
            gots = compiled(*values)
        for got, want in zip(gots, slopes(lambda x, y: x * x * y + y)(*values), strict=True):
            assert got.shape == want.shape
            close(got, want, 1e-4)


_LAST = zmlx.expression("x * x * y + y", inputs=("y", "x"))


@pytest.mark.parametrize("change", [lambda f: f, mx.compile], ids=["grad", "compile"])
@pytest.mark.parametrize(
    "function", [*EVERY.values(), lambda x, y: _LAST(y, x)], ids=[*EVERY, "last"]
)
@pytest.mark.parametrize(
    "shapes",
    [((8, 16), (64, 8, 16)), ((8, 1), (64, 8, 16)), ((3, 4), (64, 3, 4)), ((8, 1), (1, 64)),
     ((1, 8), (64, 1)), ((16,), (64, 16)), ((), (64, 16))],
    ids=str,
)  # fmt: skip
def test_gradients_of_what_is_broadcast_are_rounded_once(shapes, function, change):
    """Each part of these sums is beyond half precision, and the sum of all is not."""
    x, y = mx.full(shapes[0], 2.0, mx.float16), mx.full(shapes[1], 30000.0, mx.float16)
    axis = 0 if shapes[1][0] > 1 else 1
    odd = mx.arange(64).reshape([64 if a == axis else 1 for a in range(y.ndim)]) % 2 == 1
    y = mx.where(odd, -29984.0, y).astype(mx.float16)

    def total(x, y):
        out = function(x, y)
        assert out.dtype == mx.float16
        return out.astype(mx.float32).sum()

    size = mx.broadcast_arrays(x, y)[0].size
    dx, dy = change(mx.grad(total, argnums=(0, 1)))(x, y)
    assert dx.dtype == dy.dtype == mx.float16
    assert (dx == 32 * (size // x.size)).all()
    assert (dy == 5 * (size // y.size)).all()


def test_numbers_of_many_rows_are_not_kept(monkeypatch):
    monkeypatch.setattr(broadcasting, "_KEPT_ROW_NUMBERS", 5)
    x, y = mx.random.normal((2, 3, 70)), mx.random.normal((2, 1, 70))
    before = broadcasting._kept_row_numbers.cache_info().currsize
    close(tilted(x, y), x * x * y + y)
    assert broadcasting._kept_row_numbers.cache_info().currsize == before


@pytest.mark.parametrize("a, b", [((3,), (1, 1, 1, 1)), ((1, 3), (1, 1, 1)), ((5,), (1, 5))])
def test_a_row_broadcasts_with_a_single_element_of_more_axes(a, b):
    x, y = mx.random.normal(a), mx.random.normal(b)
    f = zmlx.elementwise.binary("x * sin(y)")
    assert f(x, y).shape == (x * y).shape
    close(f(x, y), x * mx.sin(y))
    close(f(y, x), y * mx.sin(x))


def test_more_elements_than_64_bits_count():
    x = mx.broadcast_to(mx.array(3.0), (2**30, 2**30, 16))
    with pytest.raises(ValueError, match=r"\[expression\] arrays must be smaller than 2\^60"):
        zmlx.expression("x * x")(x)
    with pytest.raises(ValueError, match=r"\[swiglu\] arrays must be smaller than 2\^60"):
        zmlx.kernels.swiglu(x, x)


def jitted_product(names):
    """`jit` reads the source of a function, which a notebook's cell would have."""
    name, source = "<product>", f"def g({', '.join(names)}):\n    return {' * '.join(names)}\n"
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    scope = {}
    exec(compile(source, name, "exec"), scope)
    return zmlx.jit(scope["g"])


@pytest.mark.parametrize("count", [14, 15, 26])
def test_gradients_of_many_operands_fit_the_buffers_of_their_launches(count):
    names = [f"x{i}" for i in range(count)]
    values = [mx.random.normal((3, 40)) + 4 for _ in names[1:]] + [mx.random.normal((40,)) + 4]
    for function in (zmlx.expression(" * ".join(names), inputs=names), jitted_product(names)):
        got = mx.grad(lambda *v, f=function: f(*v).log().sum(), tuple(range(count)))(*values)
        for dx, x in zip(got, values, strict=True):
            close(dx, 1 / x if x.ndim == 2 else 3 / x, 1e-4)


@pytest.mark.parametrize("function", EVERY.values(), ids=EVERY)
def test_gradients_by_the_route_of_metal(function):
    """MLX's custom functions ask for the gradients of all inputs, also of numbers that say where
    rows are."""
    x, y = mx.random.normal((4, 3, 5)), mx.random.normal((4, 1, 5))

    def slopes(f):
        return mx.grad(lambda x, y: f(x, y).sum(), argnums=(0, 1))(x, y)

    with transforms.strict():
        got = slopes(function)
    for a, b in zip(got, slopes(lambda x, y: x * x * y + y), strict=True):
        close(a, b)


@pytest.mark.on_cpu
def test_a_call_that_was_looked_at_goes_by_no_values_and_keeps_no_array():
    f = zmlx.elementwise.binary("x * y + 1.0")
    x, row = mx.array([[1.0, 2.0], [3.0, 4.0]]), mx.array([10.0, 20.0])
    for factor in (1.0, 2.0, -3.0):
        assert mx.array_equal(f(x * factor, row), x * factor * row + 1)
        assert mx.array_equal(f(x, row * factor), x * (row * factor) + 1)
        assert mx.array_equal(f(x, factor), x * factor + 1)
        assert mx.array_equal(f(factor, x), x * factor + 1)
    kept = mx.zeros((1 << 18,))
    mx.eval(f(kept, kept))
    before = mx.get_active_memory()
    del kept
    assert before - mx.get_active_memory() >= 1 << 20


@pytest.mark.on_cpu
def test_a_number_and_an_array_of_one_are_binary_when_called_again():
    f = zmlx.elementwise.binary("x + y")
    x, one = mx.ones((4, 4), mx.float16), mx.array(1.0)
    for _ in range(2):
        assert f(x, 1.0).dtype == mx.float16
        assert f(x, one).dtype == mx.float32
        assert f(x, True).dtype == mx.float16
        with pytest.raises(ValueError, match=r"\[binary\] 'y' must broadcast with"):
            f(x, mx.ones((3,)))
        with pytest.raises(ValueError, match=r"\[binary\] 'y' must have dtype"):
            f(x, mx.ones((4, 4), mx.int32))
        with pytest.raises(TypeError, match=r"\[binary\]"):
            f(x, "1")
