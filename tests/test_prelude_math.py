"""Metal's math functions on the CPU: stated bounds, edges, and loops that vectorise."""

from __future__ import annotations

import platform
import re
from functools import lru_cache

import numpy as np
import pytest
from prelude_text import EXPORT, build, call, compilers, prelude

pytestmark = pytest.mark.skipif(not compilers(), reason="needs g++ or clang++")

INTEL = platform.machine() in ("x86_64", "AMD64")
OPTIMISED = "-O3 -ffp-contract=fast " + ("-march=native" if INTEL else "-mcpu=native")
VARIANTS = {
    "g++": ("g++", OPTIMISED, 1),
    "g++ without AVX-512": ("g++", "-O3 -ffp-contract=fast -march=x86-64-v3", 8),
    "g++ cooperative": ("g++", "-O1 -ffp-contract=off -DZK_COOPERATIVE -march=native", 8),
    "clang++": ("clang++", OPTIMISED, 8),
}
if not INTEL:
    del VARIANTS["g++ without AVX-512"]
VARIANTS = {name: v for name, v in VARIANTS.items() if v[0] in compilers()}


def of_half_turns(function):
    """A function of (sin πx, cos πx), of |x|, with 2x reduced exactly and no negative zeros."""

    def reference(x):
        x = np.abs(x)
        n = np.rint(2 * x)
        r, quarter = (x - n / 2) * np.pi, np.fmod(n, 4)
        quarter = np.where(np.isfinite(x), quarter, 0).astype(int)
        s, c = np.sin(r), np.cos(r)
        turned = np.choose(quarter, [s, c, -s, -c]), np.choose(quarter, [c, -s, -c, s])
        return function(turned[0] + 0.0, turned[1] + 0.0)

    return reference


def sinpi(x):
    return np.copysign(1, x) * of_half_turns(lambda s, c: s)(x)


def tanpi(x):
    return np.copysign(1, x) * of_half_turns(lambda s, c: s / c)(x)


cospi = of_half_turns(lambda s, c: c)

# Function: (bound in ulp, reference in float64, intervals that matter besides all floats, the
# largest |x| that the bound covers).
EVERYWHERE = np.inf


def flushed_exp(x):
    """exp, with 0 for results below the least normal float."""
    y = np.exp(x)
    return np.where(y < 2.0**-126, 0.0, y)


UNARY = {
    "exp": (1.1, flushed_exp, [(-87.3, 89)], EVERYWHERE),
    "ZMLX_EXP_BOUNDED": (1.1, flushed_exp, [(-87.3, 88)], EVERYWHERE),
    "exp2": (1.0, np.exp2, [(-151, 128)], EVERYWHERE),
    "exp10": (1.2, lambda x: np.power(10.0, x), [(-46, 39)], EVERYWHERE),
    "log": (1.0, np.log, [(0.5, 2)], EVERYWHERE),
    "log2": (1.6, np.log2, [(0.5, 2)], EVERYWHERE),
    "log10": (1.6, np.log10, [(0.5, 2)], EVERYWHERE),
    "tanh": (1.5, np.tanh, [(-1, 1), (-10, 10)], EVERYWHERE),
    "sinh": (1.7, np.sinh, [(-2, 2), (-90, 90)], EVERYWHERE),
    "cosh": (1.5, np.cosh, [(-2, 2), (-90, 90)], EVERYWHERE),
    "asinh": (2.1, np.arcsinh, [(-10, 10)], EVERYWHERE),
    "acosh": (3.0, np.arccosh, [(1, 1.01), (1, 10)], EVERYWHERE),
    "atanh": (2.5, np.arctanh, [(-1, 1)], EVERYWHERE),
    "sin": (1.7, np.sin, [(-10, 10), (-1e5, 1e5)], 2.0**50),
    "cos": (1.7, np.cos, [(-10, 10), (-1e5, 1e5)], 2.0**50),
    "tan": (3.8, np.tan, [(-10, 10), (-1e5, 1e5)], 2.0**50),
    "sinpi": (1.7, sinpi, [(-10, 10)], 2.0**50),
    "cospi": (1.7, cospi, [(-10, 10)], 2.0**50),
    "tanpi": (3.8, tanpi, [(-10, 10)], 2.0**50),
    "asin": (2.6, np.arcsin, [(-1, 1)], EVERYWHERE),
    "acos": (1.5, np.arccos, [(-1, 1)], EVERYWHERE),
    "atan": (2.1, np.arctan, [(-10, 10)], EVERYWHERE),
    "sqrt": (0.5, np.sqrt, [(0, 10)], EVERYWHERE),
    "rsqrt": (1.6, lambda x: 1 / np.sqrt(x), [(0, 10)], EVERYWHERE),
    "log1p": (4.0, np.log1p, [(-1, 2)], EVERYWHERE),
    "floor": (0, np.floor, [(-10, 10)], EVERYWHERE),
    "ceil": (0, np.ceil, [(-10, 10)], EVERYWHERE),
    "trunc": (0, np.trunc, [(-10, 10)], EVERYWHERE),
    "rint": (0, np.rint, [(-10, 10)], EVERYWHERE),
    "round": (0, lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), [(-10, 10)], EVERYWHERE),
    "fabs": (0, np.abs, [], EVERYWHERE),
}
#: The largest finite x that a bound covers.
HIGHEST = {"ZMLX_EXP_BOUNDED": 88.0}
BINARY = {"pow": (1.0, np.power), "atan2": (2.1, np.arctan2), "hypot": (0.51, np.hypot)}
OTHERS = {
    "fmax": np.fmax,
    "fmin": np.fmin,
    "fmod": np.fmod,
    "copysign": np.copysign,
    "divide": lambda x, y: x.astype(np.float32) / y.astype(np.float32),
    "fdim": lambda x, y: np.where(x <= y, 0, x - y),
    "step": lambda edge, x: np.where(x < edge, 0.0, 1.0),
}
NOT_VECTORISED = {"fmod"}


def _loop(name: str, parameters: str, statement: str, before: str = "", after: str = "") -> str:
    loop = f"for (long i = 0; i < n; ++i) {{ {statement} }}"
    return f'extern "C" {EXPORT} void {name}_({parameters}, long n) {{ {before} {loop} {after} }}'


def _loops() -> str:
    """A line for each function, so that the report of the vectoriser names it by its line."""
    one, two = "const float* x, float* y", "const float* x, const float* z, float* y"
    silu = "float v = x[i]; y[i] = {}(v / (1.0f + exp(-v)));"
    extreme = "float m = {};", "*y = m;"
    return "\n".join(
        [
            *[_loop(name, one, f"y[i] = {name}(x[i]);") for name in UNARY],
            *[_loop(name, two, f"y[i] = {name}(x[i], z[i]);") for name in [*BINARY, *OTHERS]],
            _loop("largest", one, "m = max(m, x[i]);", extreme[0].format("-INFINITY"), extreme[1]),
            _loop("smallest", one, "m = min(m, x[i]);", extreme[0].format("INFINITY"), extreme[1]),
            _loop("sincos", "const float* x, float* y, float* z", "y[i] = sincos(x[i], z[i]);"),
            _loop(
                "half_fma", "const half* x, const half* z, half* y", "y[i] = fma(x[i], z[i], y[i]);"
            ),
            _loop("half_silu", "const half* x, half* y", silu.format("half")),
            _loop("bfloat_silu", "const bfloat* x, bfloat* y", silu.format("bfloat")),
        ]
    )


TEXT = prelude("exponential", "power", "trigonometry", "mlx_math", "numbers") + _loops()


@lru_cache
def library(variant: str):
    compiler, flags, _ = VARIANTS[variant]
    report = ["-fopt-info-vec"] if compiler == "g++" else []
    return build(TEXT, *flags.split(), *report, "-nostdlib", "-lm", compiler=compiler)


@lru_cache
def random_floats(count: int) -> np.ndarray:
    """All floats alike: subnormals, infinities and NaN included."""
    bits = np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint64)
    return bits.astype(np.uint32).view(np.float32)


def ulps(result: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Distance in units of the last place of the reference, which is finite in float32."""
    largest = np.finfo(np.float32).max
    finite = np.abs(reference) <= largest
    exponent = np.frexp(np.where(finite, reference, 1))[1]
    unit = np.ldexp(1.0, np.maximum(exponent, -125) - 24)
    with np.errstate(all="ignore"):
        return np.where(finite, np.abs(result - reference) / unit, 0)


def check(name: str, bound: float, result: np.ndarray, reference: np.ndarray, *inputs) -> None:
    error = ulps(result, reference)
    worst = int(np.nanargmax(error))
    at = [x[worst] for x in inputs]
    assert error[worst] <= bound, f"{name}({at}): {error[worst]} ulp"
    # Rounding to float decides which references overflow or vanish.
    with np.errstate(all="ignore"):
        rounded = reference.astype(np.float32)
    for kind in (np.isnan, lambda v: v == np.inf, lambda v: v == -np.inf):
        near = np.abs(np.abs(reference) / 2.0**128 - 1) < 1e-6
        wrong = (kind(result) != kind(rounded)) & ~near
        assert not wrong.any(), f"{name}({[x[wrong][:3] for x in inputs]}) = {result[wrong][:3]}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", UNARY)
def test_error_is_within_its_bound_over_all_floats(name, variant):
    lib, _ = library(variant)
    bound, reference, intervals, reach = UNARY[name]
    count = 1_000_000 // VARIANTS[variant][2]
    rng = np.random.default_rng(1)
    parts = [rng.uniform(*interval, count).astype(np.float32) for interval in intervals]
    x = np.concatenate([random_floats(count), *parts])
    x = x[~(np.abs(x) >= reach) | ~np.isfinite(x)]
    x = x[~(x > HIGHEST.get(name, np.inf)) | ~np.isfinite(x)]
    y = np.empty_like(x)
    call(getattr(lib, name + "_"), x, y)
    with np.errstate(all="ignore"):
        check(name, bound, y, reference(x.astype(np.float64)), x)


MAGNITUDES = [0, np.inf, 1, 2, 0.5, 3, 1.5, 1e30, 1e-40, 16777215, 16777216, 3.4e38, 1.2e-38]
EDGES = np.array([np.nan, *MAGNITUDES, *np.negative(MAGNITUDES)], np.float32)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [*BINARY, *OTHERS])
def test_functions_of_two_arguments(name, variant):
    lib, _ = library(variant)
    bound, reference = BINARY.get(name) or (0.5, OTHERS[name])
    count = 500_000 // VARIANTS[variant][2]
    rng = np.random.default_rng(2)
    edges = [grid.ravel() for grid in np.meshgrid(EDGES, EDGES)]
    base = np.exp(rng.uniform(-5, 5, count)).astype(np.float32)
    random = random_floats(2 * count)
    exponents = rng.uniform(-17, 17, count).astype(np.float32)
    x = np.concatenate([edges[0], np.abs(random[:count]), base, -base])
    z = np.concatenate([edges[1], random[count:], exponents, np.rint(base)])
    y = np.empty_like(x)
    call(getattr(lib, name + "_"), x, z, y)
    with np.errstate(all="ignore"):
        expected = reference(x.astype(np.float64), z.astype(np.float64))
        check(name, bound, y, expected.astype(np.float64), x, z)
        zeros = (expected == 0) & (y == 0) & (name not in ("fmax", "fmin"))
    assert (np.signbit(y) == np.signbit(expected))[zeros].all(), "zeros have the right sign"


@pytest.mark.parametrize("variant", VARIANTS)
def test_odd_functions_keep_the_sign_of_zero(variant):
    lib, _ = library(variant)
    odd = "tanh sinh asinh atanh sin tan sinpi tanpi asin atan sqrt log1p floor trunc rint round"
    x, y = np.array([0.0, -0.0], np.float32), np.empty(2, np.float32)
    for name in odd.split():
        call(getattr(lib, name + "_"), x, y)
        assert y.tolist() == [0, 0], name
        assert np.signbit(y).tolist() == [False, True], name


def test_angles_beyond_the_reduction_are_nan_and_not_wrong():
    lib, _ = library("g++")
    x = np.array([2.0**50, -1e30, np.finfo(np.float32).max], np.float32)
    y = np.empty_like(x)
    for name in ("sin", "cos", "tan"):
        call(getattr(lib, name + "_"), x, y)
        assert np.isnan(y).all(), name


def test_sincos_is_sin_and_cos():
    lib, _ = library("g++")
    x = np.random.default_rng(3).uniform(-1e4, 1e4, 10_000).astype(np.float32)
    sine, cosine, y = np.empty_like(x), np.empty_like(x), np.empty_like(x)
    call(lib.sincos_, x, sine, cosine)
    for name, result in (("sin_", sine), ("cos_", cosine)):
        call(getattr(lib, name), x, y)
        np.testing.assert_array_equal(result, y)


def test_maximum_and_minimum_are_reductions_with_infinities():
    lib, _ = library("g++")
    x = np.random.default_rng(4).normal(size=1001).astype(np.float32)
    y = np.empty(1, np.float32)
    for bound in (None, -np.inf, np.inf):
        if bound is not None:
            x[500] = bound
        call(lib.largest_, x, y)
        assert y[0] == x.max()
        call(lib.smallest_, x, y)
        assert y[0] == x.min()


@pytest.mark.skipif("g++" not in compilers(), reason="the report is g++'s")
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v in ("g++", "g++ without AVX-512")])
def test_loops_over_every_function_vectorise(variant):
    _, report = library(variant)
    done = {int(line.split(":")[1]) for line in report.splitlines() if "loop vectorized" in line}
    scalar = set()
    for number, line in enumerate(TEXT.splitlines(), 1):
        if (match := re.match(r'extern "C" .*void (\w+)_\(', line)) and number not in done:
            scalar.add(match[1])
    assert scalar == NOT_VECTORISED


# The attribute that makes max one instruction must not spread to the comparisons around it.
NAN_TESTS = """
template <class T> inline T relu(T x) { return max(x, T(0)); }
template <class T> inline bool is_nan(T x) { return x != x; }
template <class T> METAL_FUNC bool is_nan_inline(T x) { return x != x; }
#define LOOP(name, e) extern "C" EXPORT void name(const float* x, float* y, long n) \\
  { for (long i = 0; i < n; ++i) { float v = relu(x[i]), w = max(x[i], 0.0f); y[i] = e; } }
LOOP(after, is_nan(x[i]) ? 7.0f : v)
LOOP(inlined, is_nan_inline(x[i]) ? 7.0f : w)
LOOP(direct, x[i] != x[i] ? 7.0f : v + w)
LOOP(library, isnan(x[i]) ? 7.0f : w)
""".replace("EXPORT", EXPORT)


@pytest.mark.parametrize("level", ["-O1", "-O3"])
def test_nan_tests_next_to_max_stay(level):
    lib, _ = build(prelude() + NAN_TESTS, level)
    x = np.array([np.nan, 1, -1] * 40, np.float32)
    for name in ("after", "inlined", "direct", "library"):
        y = np.empty_like(x)
        call(getattr(lib, name), x, y)
        assert (y[::3] == 7).all(), name
        assert (y[1::3] != 7).all(), name
