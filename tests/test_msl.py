"""The shared Metal header, compiled as C++ and compared with float64 and with MLX."""

from __future__ import annotations

import ctypes
import math
import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cplusplus import compiled, pointer

from zmlx import msl

_SIGNATURES = dict(re.findall(r"^inline float (\w+)\((float [^)]*)\)", msl.HEADER, re.MULTILINE))
_STATED = {
    name: (float(bound), of)
    for bound, of, name in re.findall(
        r"at most ([\d.]+) ulp(?: of (x|1))?(?:[^\n]|\n//)*\ninline float (\w+)", msl.HEADER
    )
}

_INTEGER = re.findall(r"^inline int (\w+)\(", msl.HEADER, re.MULTILINE)

#: The random numbers, which tests/test_dropout.py compares with published ones, and a call of each.
RANDOM = {
    "zmlx_philox_round": "zmlx_philox_round({0u, 0u, 0u, 0u}, 1u, uint(x)).a",
    "zmlx_philox": "zmlx_philox(0u, uint(x)).a",
    "zmlx_uniform": "zmlx_uniform(uint(x))",
    "zmlx_exchanged": "zmlx_exchanged(uint(x))",
    "zmlx_draw": "zmlx_draw(0u, 1u, uint(x))",
}

_erf, _erfc = np.vectorize(math.erf), np.vectorize(math.erfc)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _mish(x):
    e = np.exp(np.minimum(x, 40))
    return x * (e * (e + 2) / (e * (e + 2) + 2))


#: The function in float64, MLX's operation, and where the stated error begins.
UNARY = {
    "zmlx_square": (lambda x: x * x, mx.square, -math.inf),
    "zmlx_cube": (lambda x: x**3, lambda x: x * x * x, -math.inf),
    "zmlx_expm1": (np.expm1, mx.expm1, -math.inf),
    "zmlx_erf": (_erf, mx.erf, -math.inf),
    "zmlx_sigmoid": (_sigmoid, mx.sigmoid, -87),
    "zmlx_silu": (lambda x: x * _sigmoid(x), nn.silu, -88),
    "zmlx_softplus": (_softplus, nn.softplus, -math.inf),
    "zmlx_log_sigmoid": (lambda x: -_softplus(-x), nn.log_sigmoid, -math.inf),
    "zmlx_ndtr": (
        lambda x: _erfc(-x / math.sqrt(2)) / 2,
        lambda x: (1 + mx.erf(x / math.sqrt(2))) / 2,
        -math.inf,
    ),
    "zmlx_gelu": (lambda x: x * _erfc(-x / math.sqrt(2)) / 2, nn.gelu, -math.inf),
    "zmlx_gelu_tanh": (
        lambda x: x * _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
        nn.gelu_approx,
        -math.inf,
    ),
    "zmlx_mish": (_mish, nn.mish, -87),
}
BINARY = {
    "zmlx_maximum": mx.maximum,
    "zmlx_minimum": mx.minimum,
    "zmlx_remainder": mx.remainder,
    "zmlx_logaddexp": mx.logaddexp,
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    text = msl.HEADER
    for name, arguments in _SIGNATURES.items():
        count = arguments.count("float")
        inputs = "".join(f", const float* x{i}" for i in range(count))
        values = ", ".join(f"x{i}[k]" for i in range(count))
        text += f'extern "C" void run_{name}(long n, float* y{inputs}) {{\n'
        text += f"    for (long k = 0; k < n; ++k) y[k] = {name}({values});\n}}\n"
    for name in _INTEGER:
        text += f'extern "C" int run_{name}(int a, int b) {{ return {name}(a, b); }}\n'
    return compiled(text, tmp_path_factory.mktemp("msl"))


@pytest.fixture(scope="module")
def run(library):
    def call(name: str, *inputs: np.ndarray) -> np.ndarray:
        arrays = [np.ascontiguousarray(x, dtype=np.float32) for x in inputs]
        out = np.empty_like(arrays[0])
        function = getattr(library, "run_" + name)
        function(ctypes.c_long(out.size), pointer(out), *map(pointer, arrays))
        return out

    return call


def _points(seed: int = 0) -> np.ndarray:
    """Every exponent, and densely where the functions bend."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    near = np.concatenate([rng.uniform(-90, 90, 200_000), rng.normal(size=200_000)])
    cuts = np.float32([0, 0.93, 4, 20, 89, 88.722, math.log(2) / 2])
    edges = np.concatenate([np.nextafter(cuts, np.float32(s)) for s in (-99, 99)])
    x = np.concatenate([bits, near.astype(np.float32), edges, -edges])
    return x[np.isfinite(x)]


def _ulps(out: np.ndarray, exact: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.abs(out - exact) / np.spacing(np.abs(scale).astype(np.float32)).astype(np.float64)


def test_every_function_states_its_error():
    exact = {"zmlx_maximum", "zmlx_minimum"}
    assert set(_STATED) | exact == {*UNARY, *BINARY, "zmlx_log1p_unit"} == set(_SIGNATURES)
    assert set(msl.function_names()) == set(_SIGNATURES) | set(_INTEGER) | set(RANDOM)


@pytest.mark.parametrize("name", UNARY)
def test_error_is_at_most_what_the_header_states(run, name):
    exact, _, low = UNARY[name]
    x = _points()
    x = x[x >= low]
    with np.errstate(all="ignore"):
        want = exact(x.astype(np.float64))
        out = run(name, x).astype(np.float64)
        normal = (np.abs(want) > 1.2e-38) & (np.abs(want) < 3.4e38)
        bound, of = _STATED[name]
        error = _ulps(out, want, {"x": x, "1": np.ones_like(x)}.get(of, want))[normal]
    assert error.max() <= bound, f"{error.max()} at {x[normal][error.argmax()]}"
    assert np.isfinite(out[normal]).all()


@pytest.mark.parametrize("name", [n for n, (exact, *_) in UNARY.items() if exact(0.0) == 0.0])
def test_a_zero_has_its_sign(run, name):
    zeros = np.array([0.0, -0.0])
    assert np.array_equal(np.signbit(run(name, zeros)), np.signbit(UNARY[name][0](zeros)))


def test_error_of_log1p_unit_is_at_most_what_the_header_states(run):
    x = np.concatenate([np.geomspace(1e-37, 1, 300000), np.linspace(0, 1, 300001)])
    x = x.astype(np.float32)
    want = np.log1p(x.astype(np.float64))
    error = _ulps(run("zmlx_log1p_unit", x), want, want)[x > 0]
    assert error.max() <= _STATED["zmlx_log1p_unit"][0]


@pytest.mark.parametrize("spread", [5.0, 1e30])
def test_error_of_logaddexp_is_at_most_what_the_header_states(run, spread):
    a = _points()
    with np.errstate(all="ignore"):
        b = a + np.float32(spread) * np.random.default_rng(1).normal(size=a.size).astype(np.float32)
        want = np.logaddexp(a.astype(np.float64), b.astype(np.float64))
        scale = np.maximum(np.abs(want), np.maximum(np.abs(a), np.abs(b)))
        normal = np.isfinite(b) & (scale < 3.4e38)
        error = _ulps(run("zmlx_logaddexp", a, b), want, scale)[normal]
    assert error.max() <= _STATED["zmlx_logaddexp"][0]


def test_error_of_remainder_is_at_most_what_the_header_states(run):
    a, b = _points(1), np.random.default_rng(2).permutation(_points(1))
    with np.errstate(all="ignore"):
        want = np.remainder(a.astype(np.float64), b.astype(np.float64))
        normal = (np.abs(want) > 1.2e-38) & (b != 0)
        error = _ulps(run("zmlx_remainder", a, b), want, want)[normal]
    assert error.max() <= _STATED["zmlx_remainder"][0]


_EDGES = np.float32(
    [0, 1, -1, 20, -20, 90, -90, 1000, -1000, 1e20, -1e20, 1e38, math.inf, -math.inf, math.nan]
)


@pytest.mark.parametrize("name", UNARY)
def test_edges_are_those_of_mlx(run, name):
    want = np.array(UNARY[name][1](mx.array(_EDGES)))
    # 90 is past the overflow of exp, where MLX's silu and mish still hold a value below 1e-37.
    np.testing.assert_allclose(run(name, _EDGES), want, rtol=1e-5, atol=1e-36)


@pytest.mark.parametrize("name", BINARY)
def test_edges_of_pairs_are_those_of_mlx(run, name):
    a, b = (x.ravel() for x in np.meshgrid(_EDGES, _EDGES))
    want = np.array(BINARY[name](mx.array(a), mx.array(b)))
    # MLX flushes denormals on the CPU.
    np.testing.assert_allclose(run(name, a, b), want, rtol=1e-6, atol=2e-38)


def test_softplus_and_sigmoid_do_not_overflow(run):
    x = np.float32([1000, -1000])
    assert run("zmlx_softplus", x).tolist() == [1000, 0]
    assert run("zmlx_sigmoid", x).tolist() == [1, 0]
    assert run("zmlx_silu", x).tolist() == [1000, 0]


def test_integer_arithmetic_is_python_s(library):
    for a in (*range(-9, 10), 2**31 - 1, -(2**31) + 1):
        for b in (-4, -3, -1, 1, 2, 5, 2**31 - 1):
            assert library.run_zmlx_int_divide(a, b) == a // b
            assert library.run_zmlx_int_remainder(a, b) == a % b
    for a in range(-5, 6):
        for n in range(14):
            assert library.run_zmlx_int_power(a, n) == a**n


def test_header_for_takes_only_what_the_text_names():
    assert msl.header_for("y = exp(x);") == ""
    assert re.findall(r"float (zmlx_\w+)\(", msl.header_for("zmlx_silu(x)")) == ["zmlx_silu"]
    assert "zmlx_erf" not in msl.header_for("my_zmlx_erf(zmlx_erf2(x))")


def test_header_for_adds_what_a_function_needs_in_the_order_of_the_header():
    text = msl.header_for("zmlx_gelu(zmlx_logaddexp(x, y))")
    found = re.findall(r"^inline float (\w+)", text, re.MULTILINE)
    assert found == [
        *("zmlx_maximum", "zmlx_minimum", "zmlx_log1p_unit"),
        *("zmlx_logaddexp", "zmlx_ndtr", "zmlx_gelu"),
    ]
    assert text == msl.header_for("zmlx_logaddexp(0, zmlx_gelu(x))")


def test_header_for_every_function_is_the_header():
    assert msl.header_for(" ".join(name for name, _ in msl.sections())) == msl.HEADER


def test_a_kernel_that_reports_failures_gets_the_macro():
    text = msl.header_for('ZMLX_FAIL("targets", t);')
    assert "#ifndef ZMLX_FAIL\n#define ZMLX_FAIL(argument, value)\n#endif\n" in text


@pytest.mark.parametrize("name", msl.function_names())
def test_each_function_compiles_from_its_own_header(name, tmp_path):
    count = _SIGNATURES.get(name, "float, float").count("float")
    call = RANDOM.get(name) or f"{name}({', '.join(['x'] * count)})"
    compiled(msl.header_for(call) + f'extern "C" float f(float x) {{ return {call}; }}', tmp_path)


def test_header_keeps_to_what_every_target_takes():
    code = re.sub(r"//.*", "", msl.HEADER)
    assert not re.search(r"\b(log1p|hypot)\(float", code), "MLX's prelude defines these"
    assert not re.search(r"\b(double|half|for|device|constant|thread|#include)\b", code)
    bare = re.findall(r"(?<![\w.])\d+\.\d*(?:e[-+]?\d+)?(?!\w)", code)
    assert not bare, f"double literals: {bare}"
