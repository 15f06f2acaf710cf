"""The CPU prelude exports what Metal's library and MLX export, with Metal's types and values."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from prelude_text import (
    PRELUDE,
    build,
    call,
    compilers,
    errors,
    every_section,
    exported,
    prelude,
    run_compiler,
    sections,
)

pytestmark = [
    pytest.mark.skipif(not compilers(), reason="needs g++ or clang++"),
    # NumPy's references meet signalling NaN, of which the random floats have some.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
every_compiler = pytest.mark.parametrize("compiler", compilers())


# ---- sections -----------------------------------------------------------------------------------


def test_no_section_includes_a_header():
    for file in PRELUDE.glob("*.h"):
        assert "#include" not in file.read_text(), file.name


def test_section_clauses_name_sections():
    for name, clauses in sections().items():
        assert set(clauses) <= {"section", "needs", "after", "tokens", "file"}, name
        for other in clauses.get("needs", []) + clauses.get("after", []):
            assert other in sections(), f"{name} names {other}"


@every_compiler
def test_every_section_compiles_with_what_it_needs_alone(compiler):
    flags = ["-c", "-O0", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    for name in every_section():
        done, _ = run_compiler(prelude(name), *flags, compiler=compiler, output=".o")
        assert done.returncode == 0, f"{name}: {done.stderr[:2000]}"


@every_compiler
def test_all_sections_compile_together(compiler):
    assert errors(prelude(*every_section()), compiler) == ""


# ---- names --------------------------------------------------------------------------------------


@every_compiler
@pytest.mark.parametrize(
    "statement, message",
    [
        ("auto f = metal::erf(1.0f);", "erf"),
        ("auto f = metal::expm1(1.0f);", "expm1"),
        ("auto f = metal::log1p(1.0f);", "log1p"),
        ("auto f = metal::degrees(1.0f);", "degrees"),
        ("bfloat b = 1.0f;", ""),
        ("bfloat b = bfloat(1.0f); b += 1.0f;", ""),
        ("bfloat4 b = 1.0f;", ""),
        ("half h = bfloat(1.0f);", ""),
        ("half4 h = float4(1.0f);", ""),
        ("auto m = max(1, 2u);", ""),
        ("auto m = median3(1, 2u, 3);", ""),
        ("enum { B = 7 }; auto m = max(B, 2u);", ""),
        ("float4 v = float3(1.0f);", ""),
        ("auto v = int4(3) * 2.5f;", "a floating scalar beside a vector of integers must be conv"),
        ("half h = 1; uint2 v = 1; v -= h;", "a floating scalar beside a vector of integers"),
        ("bool4 m = int4(3) < 2.5f;", "a floating scalar beside a vector of integers"),
        ("int4 v = 1; v <<= float4(1);", ""),
        ("float3 v = float3(1.0f, 2.0f);", ""),
        ("atomic<half> a;", "atomic<T> exists for int, uint, bool, ulong and float"),
        ("simdgroup_float8x8 m;", "threadgroups of at least 32 threads"),
        ("threadgroup float x[4];", "threadgroup"),
    ],
)
def test_what_metal_rejects_is_an_error(statement, message, compiler):
    said = errors(prelude(*every_section()) + f"void f() {{ {statement} }}", compiler)
    assert "error" in said
    assert message in said


def mlx_headers() -> str:
    folder = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"
    if not folder.is_dir():
        pytest.skip("this MLX has no headers")
    names = ["utils", "bf16", "bf16_math", "complex", "defines", "logging"]
    text = "\n".join((folder / f"{name}.h").read_text() for name in names)
    return re.sub(r"//.*|/\*.*?\*/|^#define [^\n]*\\\n(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.M)


#: Not for kernels of users: MLX's own instantiations, and a helper of its matrix multiplications.
INTERNAL = {"instantiate_kernel", "MTL_CONST", "schedule_row_tile"}


def test_every_name_that_mlx_adds_is_there():
    text = mlx_headers()
    # Declarations at the outermost level: what stands between braces goes first.
    flat, depth = "", 0
    for piece in re.split(r"([{}])", text):
        depth += {"{": 1, "}": -1}.get(piece, 0)
        flat += piece if depth == 0 and piece not in "{}" else " ; " if piece == "}" else ""
    names = set(re.findall(r"^#define (\w+)", text, re.M))
    names |= set(re.findall(r"(?:struct|using|typedef [\w ]+) (\w+)\s*(?:[;=<]|$)", flat, re.M))
    names |= set(re.findall(r"constexpr (?:constant )?\w+ (\w+) =", flat))
    names |= set(re.findall(r"(?:inline|METAL_FUNC) [\w<>, ]+?\s(\w+)\(", flat))
    assert {"ceildiv", "elem_to_loc_3_nd", "LoopedElemToLoc", "complex64_t", "Limits"} <= names
    names = {n for n in names if not n.startswith("instantiate_")} - INTERNAL - {"metal", "mlx"}
    probe = "\n".join(
        f"#ifndef {name}\nnamespace zk_probe_{name} {{ using ::{name}; }}\n#endif"
        for name in sorted(names)
    )
    assert errors(prelude(*every_section(), "simd_one") + probe) == ""


def test_every_token_of_a_section_is_a_name_of_it():
    for name in every_section():
        tokens = [t for t in sections()[name].get("tokens", []) if t != "*"]
        text = prelude(name)
        for token in tokens:
            known = re.search(rf"\b{token.rstrip('(')}\b", text) or re.search(r"##\w+|\w+##", text)
            assert known, f"{token} calls for {name}, which does not have it"


# ---- half and bfloat ----------------------------------------------------------------------------

NUMBERS = exported("""
#define CONVERSION(NAME, A, B)                              \\
  export void NAME(const A* x, B* y, long n) {             \\
    for (long i = 0; i < n; ++i) y[i] = B(x[i]);           \\
  }
CONVERSION(half_to_float, half, float)
CONVERSION(float_to_half, float, half)
CONVERSION(bfloat_to_float, bfloat, float)
CONVERSION(float_to_bfloat, float, bfloat)
#define ARITHMETIC(T)                                                        \\
  export void T##_arithmetic(const T* x, const T* z, T* y, long n) {         \\
    for (long i = 0; i < n; ++i) {                                           \\
      y[i] = x[i] + z[i], y[n + i] = x[i] - z[i], y[2 * n + i] = x[i] * z[i]; \\
      y[3 * n + i] = x[i] / z[i];                                            \\
    }                                                                        \\
  }
ARITHMETIC(half)
ARITHMETIC(bfloat)
export void half_fma(const half* x, const half* z, half* y, long n) {
  for (long i = 0; i < n; ++i) y[i] = fma(x[i], z[i], y[i]);
}
""")


@pytest.fixture(scope="module", params=compilers())
def numbers(request):
    return build(prelude("numbers") + NUMBERS, "-O3", "-march=native", compiler=request.param)[0]


EVERY_HALF = np.arange(65536, dtype=np.uint16)


def test_all_halves_convert_exactly(numbers):
    y, expected = np.empty(65536, np.float32), EVERY_HALF.view(np.float16).astype(np.float32)
    call(numbers.half_to_float, EVERY_HALF, y)
    np.testing.assert_array_equal(y.view(np.uint32) >> 31, EVERY_HALF >> 15)
    np.testing.assert_array_equal(y, expected)


def test_all_bfloats_convert_exactly(numbers):
    y = np.empty(65536, np.float32)
    call(numbers.bfloat_to_float, EVERY_HALF, y)
    np.testing.assert_array_equal(y.view(np.uint32), EVERY_HALF.astype(np.uint32) << 16)


def near_every(kept_bits: int) -> np.ndarray:
    """Floats at, between and just beside all values of a 16-bit type, and two million others."""
    values = EVERY_HALF.astype(np.uint32)
    if kept_bits == 16:
        exact = values << 16
    else:
        exact = values.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    step = 1 << (32 - kept_bits) if kept_bits == 16 else 1 << 13
    beside = [exact + np.uint32((step // 2 + d) % 2**32) for d in (-1, 0, 1)]
    bits = np.random.default_rng(0).integers(0, 2**32, 2_000_000, dtype=np.uint64)
    return np.concatenate([exact, *beside, bits.astype(np.uint32)]).view(np.float32)


def bfloat_of(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype(np.uint16)


def test_floats_round_to_the_nearest_even_half(numbers):
    x = near_every(11)
    y = np.empty(x.size, np.uint16)
    call(numbers.float_to_half, x, y)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    nan = np.isnan(x)
    np.testing.assert_array_equal(y[~nan], expected[~nan])
    assert np.isnan(y[nan].view(np.float16)).all()


def test_floats_round_to_the_nearest_even_bfloat(numbers):
    x = near_every(16)
    y = np.empty(x.size, np.uint16)
    call(numbers.float_to_bfloat, x, y)
    np.testing.assert_array_equal(y, bfloat_of(x))


def test_nan_keeps_its_upper_bits_and_becomes_quiet(numbers):
    x, y = np.empty(65536, np.float32), np.empty(65536, np.uint16)
    for kind, quiet, infinity in (("half", 0x0200, 0x7C00), ("bfloat", 0x0040, 0x7F80)):
        call(getattr(numbers, f"{kind}_to_float"), EVERY_HALF, x)
        call(getattr(numbers, f"float_to_{kind}"), x, y)
        nan = infinity < (EVERY_HALF & 0x7FFF)
        np.testing.assert_array_equal(y, np.where(nan, EVERY_HALF | quiet, EVERY_HALF))


STEPS = exported("""
template <class A, class B>
void convert(const A* x, B* y, long n, bool live) {
  for (long i = 0; i < n; i += STEP) {
    const auto from = ZMLX_READ_STEP(STEP, x + i);
    auto to = ZMLX_WRITE_STEP(STEP, y + i, live);
    ZMLX_STEP_LOOP
    for (uint u = 0; u < STEP; ++u) ZMLX_SET(to, u, B, float(from[u]));
  }
}
export void half_to_float(const half* x, float* y, long n) { convert(x, y, n, true); }
export void float_to_half(const float* x, half* y, long n) { convert(x, y, n, true); }
export void bfloat_to_float(const bfloat* x, float* y, long n) { convert(x, y, n, true); }
export void float_to_bfloat(const float* x, bfloat* y, long n) { convert(x, y, n, true); }
export void dropped(const float* x, half* y, long n) { convert(x, y, n, false); }
export void dropped_bfloat(const float* x, bfloat* y, long n) { convert(x, y, n, false); }
""")


# Those with AVX-512, with F16C alone, and with neither.
@pytest.mark.skipif(platform.machine() != "x86_64", reason="others have no such instructions")
@pytest.mark.parametrize("processor", ["native", "haswell", "x86-64"])
@pytest.mark.parametrize("step", [8, 16, 64])
def test_steps_are_converted_as_single_elements_are(processor, step):
    text = prelude("numbers", "steps") + STEPS
    steps = build(text, "-O3", f"-march={processor}", f"-DSTEP={step}")[0]
    y, exact = np.empty(65536, np.float32), EVERY_HALF.view(np.float16).astype(np.float32)
    call(steps.half_to_float, EVERY_HALF, y)
    np.testing.assert_array_equal(y.view(np.uint32) >> 31, EVERY_HALF >> 15)
    np.testing.assert_array_equal(y, exact)
    x = near_every(11)[: 2**20]
    rounded = np.empty(x.size, np.uint16)
    call(steps.float_to_half, x, rounded)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(rounded.view(np.float16), expected)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(rounded[number], expected.view(np.uint16)[number])
    call(steps.bfloat_to_float, EVERY_HALF, y)
    np.testing.assert_array_equal(y.view(np.uint32), EVERY_HALF.astype(np.uint32) << 16)
    x = near_every(16)[-(2**21) :]
    rounded = np.empty(x.size, np.uint16)
    call(steps.float_to_bfloat, x, rounded)
    np.testing.assert_array_equal(rounded, bfloat_of(x))
    # Elements that are not converted in registers are stored one by one, live or not.
    if processor == "haswell":
        untouched = np.zeros(x.size, np.uint16)
        call(steps.dropped, x, untouched)
        assert not untouched.any()
        if step < 16:
            call(steps.dropped_bfloat, x, untouched)
            assert not untouched.any()


FOLD = exported("""
export void fold(const float* x, float* y, long n) {
  float part[STEP];
  ZMLX_STEP_LOOP
  for (uint u = 0; u < STEP; ++u) part[u] = INFINITY;
  for (long i = 0; i < n; i += STEP) {
    ZMLX_STEP_LOOP
    for (uint u = 0; u < STEP; ++u) part[u] = part[u] < x[i + u] ? part[u] : x[i + u];
  }
  ZMLX_STEP_LOOP
  for (uint u = 0; u < STEP; ++u) y[u] = part[u];
}
""")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86-64's processors")
@pytest.mark.parametrize("processor, step", [("haswell", 32), ("skylake-avx512", 64)])
def test_the_accumulators_of_a_fold_stay_in_registers(processor, step):
    """On the stack they take twice the time of what is read."""
    text = prelude("numbers", "steps") + FOLD
    # Of one tuning, since g++ 11 takes single elements first for some to have stores aligned.
    flags = "-O3", f"-march={processor}", "-mtune=haswell", "-mprefer-vector-width=512"
    done, assembly = run_compiler(text, "-w", "-S", f"-DSTEP={step}", *flags, output=".s")
    assert done.returncode == 0, done.stderr
    # A loop is a label, and a jump back to it before any other label.
    found = r"^(\.L\d+):\n((?:\t.*\n)*?)\tj[a-z]+\t\1$"
    loops = [body for _, body in re.findall(found, assembly.read_text(), re.MULTILINE)]
    assert any(re.search("vmin.*[yz]mm", body) for body in loops)
    assert not re.findall(r"\tv\w+\t%[yz]mm\d+, .*\)$", "".join(loops), re.MULTILINE)


@pytest.mark.parametrize("kind", ["half", "bfloat"])
def test_arithmetic_rounds_each_operation_once(numbers, kind):
    bits = np.random.default_rng(1).integers(0, 65536, (2, 200_000)).astype(np.uint16)
    y = np.empty(4 * bits.shape[1], np.uint16)
    call(getattr(numbers, f"{kind}_arithmetic"), bits[0], bits[1], y)
    if kind == "half":
        a, b = bits.view(np.float16).astype(np.float64)
    else:
        a, b = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        exact = np.concatenate([a + b, a - b, a * b, a / b])
        # Float has over 2p + 2 bits of either type, so rounding through it is rounding once.
        once = exact.astype(np.float32)
        expected = once.astype(np.float16).view(np.uint16) if kind == "half" else bfloat_of(once)
    nan = np.isnan(exact)
    np.testing.assert_array_equal(y[~nan], expected[~nan])


def test_fma_of_halves_rounds_once(numbers):
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 65536, (3, 1_000_000)).astype(np.uint16)
    # Factors about 1, beside a third number far below, one about 1, and any numbers.
    exponents = rng.integers(13, 17, (3, 600_000)).astype(np.uint16)
    exponents[2, :300_000] //= 2
    bits[:, :600_000] = bits[:, :600_000] & 0x83FF | exponents << 10
    x, z, w = bits.view(np.float16).astype(np.float64)
    y = bits[2].copy()
    call(numbers.half_fma, bits[0], bits[1], y)
    with np.errstate(all="ignore"):
        # What float64 loses of the sum decides no rounding to 11 bits.
        exact = x * z + w
        twice = exact.astype(np.float32).astype(np.float16)
        expected = exact.astype(np.float16)
    nan = np.isnan(exact)
    np.testing.assert_array_equal(y[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(y[nan].view(np.float16)).all()
    assert (twice != expected)[~nan].sum() > 10, "the values tell one rounding from two"


RESULT_TYPES = """
half h; bfloat b; float f; int i; const half ch = 1.0f; bool c;
#define IS(T, e) static_assert(__is_same(decltype(e), T));
IS(half, h + h) IS(float, h * f) IS(half, 2 * h) IS(half, -h) IS(bool, h < f)
IS(bfloat, b + b) IS(float, b * f) IS(bfloat, b - 1)
IS(half, exp(h)) IS(bfloat, max(b, b)) IS(bool, isnan(h)) IS(half, pow(h, 2)) IS(half, pow(2, h))
IS(half, clamp(h, 0, 1)) IS(float, max(f, b)) IS(bfloat, fma(b, b, b))
#define CHOICE(x, y) (zk_value(), c ? (zk_arm(), x) : (zk_arm(), y))
IS(half, CHOICE(h, ch)) IS(float, CHOICE(h, 1.0f)) IS(half, CHOICE(0, h)) IS(bfloat, CHOICE(b, 0))
IS(float, CHOICE(b, 1.0f)) IS(half, CHOICE(zk_zero(), h)) IS(float, CHOICE(1.0f, zk_zero()))
enum E { e };
IS(half, h * e) IS(half, e - h) IS(bfloat, b + e) IS(bfloat, e / b) IS(float, f * e)
#define AS_IN_CPP(x, y) IS(decltype(c ? x : y), CHOICE(x, y))
#define WITH_OTHERS(T) \
  AS_IN_CPP(T(1), bool(1)) AS_IN_CPP(T(1), char(1)) AS_IN_CPP(T(1), int8_t(1)) \
  AS_IN_CPP(T(1), uchar(1)) AS_IN_CPP(T(1), short(1)) AS_IN_CPP(T(1), ushort(1)) \
  AS_IN_CPP(T(1), 1) AS_IN_CPP(T(1), 1u) AS_IN_CPP(T(1), 1l) AS_IN_CPP(T(1), 1ul) \
  AS_IN_CPP(T(1), 1.0f) AS_IN_CPP(T(1), e) IS(half, CHOICE(T(1), h)) IS(bfloat, CHOICE(b, T(1)))
WITH_OTHERS(bool) WITH_OTHERS(char) WITH_OTHERS(int8_t) WITH_OTHERS(uchar) WITH_OTHERS(short)
WITH_OTHERS(ushort) WITH_OTHERS(int) WITH_OTHERS(uint) WITH_OTHERS(long) WITH_OTHERS(ulong)
static_assert(sizeof(half) == 2 && sizeof(bfloat) == 2);
static_assert(__is_trivial(half) && __is_trivial(bfloat));
constexpr half folded = half(1.5f) * half(2.0f);
static_assert(folded == 3.0f);
static_assert(half(1000) / 100000 == 0 && 2049 == half(2048) && !(half(2048) < 2049));
static_assert(bfloat(256) == 257 && 1 + bfloat(256) == 256 && e + half(2049) == 2048);
IS(int&, i += h) IS(int&, i /= b)
void assign() {
  h += 1.0f; h *= h; h++; h = 1;
  b += b; b -= 1; --b;
  int k = h; bool t = h;
  if (b) k += uint(b);
}
"""


@every_compiler
def test_mixed_arithmetic_has_metals_result_types(compiler):
    assert errors(prelude("power", "numbers", "conditional") + RESULT_TYPES, compiler) == ""
