"""How a jitted function is defined and called, beside what its body may hold."""

import math

import mlx.core as mx
import numpy as np
import pytest

import zmlx
from zmlx import jit

X = mx.array([0.5, -1.0, 2.0])
SCALE, COUNT, ON = np.float32(1.5), np.int64(2), np.bool_(True)


@jit
def only_by_name(x, /, y, *, z: int):
    return x * y + z


@jit
def constants(x):
    return x * SCALE + COUNT if ON else x


@jit
def least(n: int):
    return max(n, -2147483648)


def test_arguments_may_be_given_by_name():
    want = X * 2 + 3
    for got in (only_by_name(X, 2.0, z=3), only_by_name(X, y=2.0, z=3), only_by_name(X, 2.0, 3)):
        assert mx.array_equal(got, want)
    assert only_by_name(0.5, y=2.0, z=3) == 4.0
    assert mx.array_equal(mx.grad(lambda x: only_by_name(x, y=X, z=3).sum())(X), X)
    with pytest.raises(TypeError, match=r"\[only_by_name\] .*unexpected keyword argument 'w'"):
        only_by_name(X, 2.0, z=3, w=3)
    scaled = zmlx.expression("x * s", inputs=("x", "s"))
    assert mx.array_equal(scaled(X, s=2), 2 * X)
    assert mx.array_equal(scaled(s=2, x=X), 2 * X)
    for wrong in ({"t": 2}, {"s": 2, "x": X}, {}):
        with pytest.raises(TypeError, match=r"\[expression\] takes"):
            scaled(X, **wrong)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_plain_number_leaves_half_precision(dtype):
    x = X.astype(dtype)
    got = only_by_name(x, 0.3, z=3)
    assert got.dtype == dtype
    assert mx.array_equal(got, (x.astype(mx.float32) * 0.3 + 3).astype(dtype))
    assert mx.grad(lambda x: only_by_name(x, 0.3, z=3).sum())(x).dtype == dtype
    assert only_by_name(x, mx.array(0.3), 3).dtype == mx.float32
    assert only_by_name(0.3, 2.0, z=mx.array([3])).dtype == mx.float32


def test_names_that_metal_lacks_are_python_s_in_errors_and_calls():
    @jit
    def f(half, __LINE__):
        return half * __LINE__

    assert list(f.inputs) == ["half_", "v__LINE__"]
    assert mx.array_equal(f(X, __LINE__=2.0), 2 * X)
    with pytest.raises(ValueError, match=r"\[f\] '__LINE__' must have dtype .* but got int32"):
        f(X, mx.array([1, 2, 3]))
    with pytest.raises(TypeError, match=r"\(half, __LINE__\)"):
        f(X)


def test_constants_from_outside_may_be_numpys():
    assert mx.array_equal(constants(X), X * 1.5 + 2)


def test_the_least_int_is_a_constant():
    assert least(mx.array([-(2**31), -5, 7], dtype=mx.int32)).tolist() == [-(2**31), -5, 7]


def large(x):
    return x * int(1e10)


def infinite(x):
    return x * int(math.inf)


@pytest.mark.parametrize("function, message", [
    (large, "10000000000 is outside the range of a 32-bit int"),
    (infinite, "inf is no int"),
])  # fmt: skip
def test_a_constant_that_is_no_int_of_32_bits_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        jit(function)


@pytest.mark.parametrize("make, message", [
    (lambda: jit("x * 2"), "'function' must be a Python function but got str"),
    (lambda: jit(3), "'function' must be a Python function but got int"),
    (lambda: jit(bound=2.5)(large), "'bound' must be an int but got float"),
    (lambda: jit(bound=True)(large), "'bound' must be an int but got bool"),
    (lambda: jit(bound=0)(large), "'bound' must be positive"),
])  # fmt: skip
def test_a_wrong_use_of_the_decorator(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
