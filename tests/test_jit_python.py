"""jit: what Python means by a name, a text, an int and an operator, on both targets."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

import zmlx
from zmlx.jit_compiler import jit

INTS = [-(2**31), -123456, -7, -1, 0, 1, 6, 2**31 - 1]


@pytest.fixture(params=["cpu", "reference"], autouse=True)
def target(request):
    with zmlx.target(request.param):
        yield request.param


def check(f, *columns):
    """`f` on arrays gives what its Python function gives on their elements."""
    outputs = f(*map(mx.array, columns))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    want = [f.function(*row) for row in zip(*columns, strict=True)]
    want = [w if isinstance(w, tuple) else (w,) for w in want]
    for y, w in zip(outputs, zip(*want, strict=True), strict=True):
        np.testing.assert_allclose(np.array(y), np.array(w), rtol=1e-6)


def test_a_shift_beyond_all_bits_leaves_the_sign():
    @jit
    def f(n: int, k: int):
        return n >> k, n >> 35, n >> 31, n >> 3

    for k in (0, 5, 31, 32, 35, 2**31 - 1):
        check(f, INTS, [k] * len(INTS))


def test_a_float_may_be_made_of_a_text():
    @jit
    def f(x):
        least, most = float("inf"), float("-inf")
        for i in range(3):
            least, most = min(least, x * i), max(most, x * i)
        return least, most, float("nan"), float(" 1_0e-1 ") * x

    check(f, [0.5, -1.5, 3.0])


def test_constants_may_be_large_where_the_result_is_not():
    @jit
    def f(n: int, x):
        a, b = n & (2**31 - 1), max(n, -(2**31))
        c, d = x * 10**10 + 2**40, x / 2**33 + 2**33 / x
        return a, b, c, d, 2**35 / 2**33, 10**12 - 10**12 + 3, x < 10000000000

    check(f, INTS, [0.5, -1.5, 3.0, 1e10, 1e9, 2e10, -4.0, 7.0])


def test_a_global_int_may_be_large_where_the_result_is_not():
    @jit
    def f(n: int):
        return n & (LARGE - 1)

    check(f, INTS)


LARGE = 2**31


def test_minus_one_divides_the_smallest_int():
    @jit
    def f(n: int, d: int):
        return n // d, n % d

    check(f, [7, -7, 7, -7], [-1, -1, 2, -2])
    f(mx.array([-(2**31)]), mx.array([-1]))  # overflows, as `-n` does, and no more


def test_an_int_may_be_divided_by_0_in_the_arm_that_is_not_taken():
    @jit
    def f(n: int, d: int):
        if d:
            return n // d, n % d
        return n, 0

    check(f, [7, -7, 7, -7, 6, 5, -(2**31)], [2, 2, -2, -2, -2, 0, 3])


def test_the_fabs_of_an_int_is_a_float():
    @jit
    def f(n: int):
        return math.fabs(n) * 100000, math.fabs(n) ** 3

    check(f, INTS)


def test_what_is_cut_to_an_int_has_no_slope():
    @jit
    def f(x):
        n = int(x)
        return x * (n // 2) + n % 3 - round(x) * bool(x)

    def gradient(x):
        return mx.grad(lambda x: f(x).sum())(x)

    def squared(x):
        return mx.grad(lambda x: (f(x) * f(x)).sum())(x).sum()

    x, want = mx.array([1.25, 2.5, -3.75]), [0, 1, -2]
    assert gradient(x).tolist() == want
    assert mx.compile(gradient, shapeless=True)(x).tolist() == want
    assert mx.vmap(mx.grad(f))(x).tolist() == want
    assert mx.jvp(f, [x], [mx.ones_like(x)])[1][0].tolist() == want
    assert mx.grad(squared)(x).tolist() == [2 * w * w for w in want]


@jit
def leaky(x, slope):
    if x > 0:
        return x
    return x * slope


def test_a_call_in_a_branch_may_take_less_than_every_element():
    @jit
    def f(x, s):
        y = x
        if x > 1:
            y = x * leaky(s, 0.1)
        return y

    x, s, want = mx.array([0.5, 2.0, -3.0]), mx.array(-0.5), [1, -0.05, 1]
    np.testing.assert_allclose(f(x, s), x * mx.array(want))
    np.testing.assert_allclose(mx.compile(lambda x: f(x, s), shapeless=True)(x), x * mx.array(want))
    np.testing.assert_allclose(mx.jvp(lambda x: f(x, s), [x], [mx.ones_like(x)])[1][0], want)
    assert mx.grad(lambda s: f(x, s).sum())(s).item() == pytest.approx(0.2)


def test_an_output_of_less_than_every_element_follows_the_shape():
    @jit
    def f(x, s):
        return x * s, 2.0 * s

    of_shapeless = mx.compile(lambda x, s: f(x, s), shapeless=True)
    for n in (4, 7):
        assert [y.shape for y in of_shapeless(mx.ones((n,)), mx.array(0.5))] == [(n,)] * 2
    for n in (4, 7):
        rows = mx.ones((n, 1))
        assert [y.shape for y in of_shapeless(mx.ones((n, 8)), rows)] == [(n, 8)] * 2


def test_float_floor_division_by_zero_is_mlx_s():
    @jit
    def f(x, y):
        return x // y, x // 0.0

    x = mx.array([1.0, -1.5, 3.0])
    y = mx.array([0.0, 0.0, 2.0])
    got, by_zero = f(x, y)
    assert got.tolist() == mx.floor_divide(x, y).tolist() == [np.inf, -np.inf, 1]
    assert by_zero.tolist() == [np.inf, -np.inf, np.inf]
    assert not mx.any(mx.grad(lambda x: f(x, mx.array(2.0))[0].sum())(x))


def test_names_that_look_like_derivatives():
    @jit
    def f(x, d_x, d):
        a_d = x * x
        a = d_x * d_x
        d_2 = d * x
        a_d_d_x = d_2 * d_2
        return a_d + a + a_d_d_x

    arrays = [mx.array([v]) for v in (2.0, 5.0, 3.0)]
    assert f(*arrays).item() == 4 + 25 + 36
    found = mx.grad(lambda *a: f(*a).sum(), argnums=(0, 1, 2))(*arrays)
    assert [g.item() for g in found] == [4 + 36, 10, 24]


def test_a_name_beyond_ascii():
    @jit
    def größe(x):
        return x * x

    x = mx.array([3.0])
    assert größe(x).item() == 9
    assert mx.grad(lambda x: größe(x).sum())(x).item() == 6


# fmt: off
def test_a_line_may_stand_left_of_an_indented_function():
    @jit
    def f(x):
        y = 2 * x
#       y = 3 * x
        """A text
whose second line is here."""
        ...
        return y + 1

    assert f(mx.array([3.0])).item() == 7
    with pytest.raises(ValueError, match="unknown name 'missing'") as raised:

        @jit
        def g(x):
# a comment
            return missing(x)  # noqa: F821

    assert "  return missing(x)  # noqa: F821\n                     ^" in str(raised.value)
# fmt: on


def test_a_loop_that_only_a_return_leaves(target):
    @jit(bound=50)
    def f(x):
        while True:
            x = 2 * x
            for i in range(3):
                if i > 1:
                    break
            if x > 10:
                return x

    x = mx.array([1.0, 3.0, 40.0])
    assert f(x).tolist() == [16, 12, 80]
    assert mx.grad(lambda x: f(x).sum())(x).tolist() == [16, 4, 2]
    assert mx.isnan(f(mx.array(-1.0))).item()


def test_an_annotation_may_be_a_text():
    @jit
    def f(x: "mx.array", n: "int") -> "mx.array":  # noqa: UP037
        return x * n

    check(f, [1.5, 2.0], [2, 3])


@jit
def reassigned(n: int, x):
    k = n
    odd = k % 2
    k = k * x
    return odd, k


@jit
def renamed(n: int, x):
    odd = n % 2
    product = n * x
    return odd, product, n > 16777216


def test_a_variable_has_one_type_throughout():
    """The page says so: an int that another line makes a float is exact up to 2^24 alone."""
    n = mx.array([7, 16777217])
    odd, product = reassigned(n, 2.0)
    assert (odd.dtype, product.dtype) == (mx.float32, mx.float32)
    assert odd.tolist() == [1.0, 0.0]
    odd, product, larger = renamed(n, 2.0)
    assert odd.tolist() == [1, 1]
    assert larger.tolist() == [False, True]
    assert (odd.dtype, product.dtype) == (mx.int32, mx.float32)
    assert "one type throughout" in (zmlx.jit_compiler.__doc__ or "")
