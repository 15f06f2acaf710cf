"""Integers, parts of floats, limits, atomics, MLX's indexing and complex numbers of the prelude."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from prelude_text import build, call, compilers, errors, exported, prelude

pytestmark = [
    pytest.mark.skipif(not compilers(), reason="needs g++ or clang++"),
    # NumPy's references meet signalling NaN, of which the random floats have some.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
every_compiler = pytest.mark.parametrize("compiler", compilers())

# ---- integers -----------------------------------------------------------------------------------

INTEGERS = {
    "char": np.int8,
    "uchar": np.uint8,
    "short": np.int16,
    "ushort": np.uint16,
    "int": np.int32,
    "uint": np.uint32,
    "long": np.int64,
    "ulong": np.uint64,
}


class Width:
    """Python's integers seen through a type of so many bits."""

    def __init__(self, dtype: type):
        self.bits = np.dtype(dtype).itemsize * 8
        self.signed = np.issubdtype(dtype, np.signedinteger)
        self.low = -(1 << self.bits - 1) if self.signed else 0
        self.high = self.low + (1 << self.bits) - 1

    def wrap(self, x: int) -> int:
        return (x - self.low) % (1 << self.bits) + self.low

    def saturate(self, x: int) -> int:
        return min(max(x, self.low), self.high)

    def text(self, x: int) -> str:
        return format(x % (1 << self.bits), f"0{self.bits}b")

    def number(self, text: str) -> int:
        return self.wrap(int(text, 2))


def leading_zeros(w: Width, x: int) -> int:
    return w.bits - len(w.text(x).lstrip("0"))


def trailing_zeros(w: Width, x: int) -> int:
    return w.bits - len(w.text(x).rstrip("0"))


def rotated(w: Width, x: int, by: int) -> int:
    by %= w.bits
    return w.number(w.text(x)[by:] + w.text(x)[:by])


#: Function: its arguments, and the result by its definition on Python's integers.
DEFINITIONS = {
    "popcount": (1, lambda w, x: w.text(x).count("1")),
    "clz": (1, leading_zeros),
    "ctz": (1, trailing_zeros),
    "reverse_bits": (1, lambda w, x: w.number(w.text(x)[::-1])),
    "abs": (1, lambda w, x: w.wrap(abs(x))),
    "rotate": (2, rotated),
    "absdiff": (2, lambda w, x, y: abs(x - y)),
    "addsat": (2, lambda w, x, y: w.saturate(x + y)),
    "subsat": (2, lambda w, x, y: w.saturate(x - y)),
    "mulhi": (2, lambda w, x, y: x * y >> w.bits),
    "hadd": (2, lambda w, x, y: (x + y) >> 1),
    "rhadd": (2, lambda w, x, y: (x + y + 1) >> 1),
    "max": (2, lambda w, x, y: max(x, y)),
    "min": (2, lambda w, x, y: min(x, y)),
    "madhi": (3, lambda w, x, y, z: w.wrap((x * y >> w.bits) + z)),
    "madsat": (3, lambda w, x, y, z: w.saturate(x * y + z)),
    "max3": (3, lambda w, x, y, z: max(x, y, z)),
    "min3": (3, lambda w, x, y, z: min(x, y, z)),
    "median3": (3, lambda w, x, y, z: sorted([x, y, z])[1]),
}
LETTERS = "xyz"
#: Those whose result has no sign.
UNSIGNED = {"absdiff"}


def integer_loops() -> str:
    rows = []
    for kind in INTEGERS:
        for name, (count, _) in DEFINITIONS.items():
            pointers = "".join(f"const {kind}* {letter}, " for letter in LETTERS[:count])
            values = ", ".join(f"{letter}[i]" for letter in LETTERS[:count])
            result = f"u{kind.lstrip('u')}" if name in UNSIGNED else kind
            rows.append(
                f"export void {name}_{kind}({pointers}{result}* out, long n) "
                f"{{ for (long i = 0; i < n; ++i) out[i] = {name}({values}); }}"
            )
    return exported("\n".join(rows))


@pytest.fixture(scope="module")
def integers():
    return build(prelude("integers") + integer_loops(), "-O1")[0]


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_integer_functions_follow_their_definition(integers, name, kind):
    dtype = INTEGERS[kind]
    width, (count, definition) = Width(dtype), DEFINITIONS[name]
    edges = [width.low, width.low + 1, -1 % (1 << 8) if not width.signed else -1, 0, 1, width.high]
    rng = np.random.default_rng(0)
    grids = np.meshgrid(*[np.array(edges, dtype)] * count)
    random = rng.integers(width.low, width.high, (count, 200), dtype=dtype, endpoint=True)
    inputs = [np.concatenate([g.ravel(), r]) for g, r in zip(grids, random, strict=True)]
    result = INTEGERS[f"u{kind.lstrip('u')}"] if name in UNSIGNED else dtype
    out = np.empty(inputs[0].shape, result)
    call(getattr(integers, f"{name}_{kind}"), *inputs, out, count=out.size)
    expected = [definition(width, *map(int, values)) for values in zip(*inputs, strict=True)]
    assert out.tolist() == expected


BITS = """
static_assert(extract_bits(0xabcdu, 4, 8) == 0xbc && extract_bits(-1, 3, 5) == -1);
static_assert(extract_bits(0x70, 4, 3) == -1 && extract_bits(5u, 0, 32) == 5);
static_assert(extract_bits(5, 9, 0) == 0);
static_assert(insert_bits(0u, 0xffu, 4, 8) == 0xff0);
static_assert(insert_bits(-1, 0, 0, 31) == INT_MIN);
static_assert(insert_bits(7u, 9u, 0, 32) == 9 && insert_bits(7u, 9u, 3, 0) == 7);
static_assert(mul24(0x01000003, 5) == 15 && mul24(-3, 5) == -15 && mad24(2u, 3u, 4u) == 10);
"""


@every_compiler
def test_bit_fields(compiler):
    assert errors(prelude("integers") + BITS, compiler) == ""


# ---- floats in parts ----------------------------------------------------------------------------

PARTS = exported("""
#define LOOP(e) { for (long i = 0; i < n; ++i) e; }
export void frexp_(const float* x, float* m, int* e, long n) LOOP(m[i] = frexp(x[i], e[i]))
export void modf_(const float* x, float* f, float* w, long n) LOOP(f[i] = modf(x[i], w[i]))
export void ldexp_(const float* x, const int* k, float* y, long n) LOOP(y[i] = ldexp(x[i], k[i]))
export void ilogb_(const float* x, int* y, long n) LOOP(y[i] = ilogb(x[i]))
#define NEXT(name, T) \\
  export void name(const T* x, const T* z, T* y, long n) LOOP(y[i] = nextafter(x[i], z[i]))
NEXT(nextafter_, float)
NEXT(half_nextafter_, half)
""")


@pytest.fixture(scope="module")
def parts():
    return build(prelude("parts", "numbers") + PARTS, "-O3", "-march=native")[0]


def any_floats(count: int, seed: int = 0) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint64)
    edges = [0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1, -1, 2, 1.25, -7.75]
    return np.concatenate([np.array(edges, np.float32), bits.astype(np.uint32).view(np.float32)])


def test_frexp_and_ldexp_are_exact(parts):
    x = any_floats(100_000)
    m, e, y = np.empty_like(x), np.empty(x.size, np.int32), np.empty_like(x)
    call(parts.frexp_, x, m, e)
    expected, exponent = np.frexp(x)
    np.testing.assert_array_equal(m, expected)
    np.testing.assert_array_equal(e, exponent)
    call(parts.ldexp_, m, e, y)
    np.testing.assert_array_equal(y, x)
    k = np.random.default_rng(1).integers(-400, 400, x.size).astype(np.int32)
    call(parts.ldexp_, x, k, y)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y, np.ldexp(x.astype(np.float64), k).astype(np.float32))


def test_modf_gives_both_parts_the_sign_of_x(parts):
    x = any_floats(100_000)
    fraction, whole = np.empty_like(x), np.empty_like(x)
    call(parts.modf_, x, fraction, whole)
    for result, expected in zip((fraction, whole), np.modf(x), strict=True):
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(np.signbit(result), np.signbit(expected))


def test_nextafter_steps_by_one_value_of_its_own_type(parts):
    x, z = any_floats(100_000), any_floats(100_000, 1)[::-1].copy()
    y = np.empty_like(x)
    call(parts.nextafter_, x, z, y)
    np.testing.assert_array_equal(y, np.nextafter(x, z))
    with np.errstate(over="ignore"):
        h, g = x.astype(np.float16), z.astype(np.float16)
    y = np.empty_like(h)
    call(parts.half_nextafter_, h, g, y)
    np.testing.assert_array_equal(y, np.nextafter(h, g))


def test_ilogb_is_the_exponent(parts):
    x = any_floats(100_000)
    y = np.empty(x.size, np.int32)
    call(parts.ilogb_, x, y)
    finite = np.isfinite(x) & (x != 0)
    np.testing.assert_array_equal(y[finite], np.frexp(x[finite])[1] - 1)
    assert y[:5].tolist() == [-(2**31), -(2**31), 2**31 - 1, 2**31 - 1, 2**31 - 1]


LIMITS = """
using metal::numeric_limits;
static_assert(numeric_limits<char>::min() == -128 && numeric_limits<ushort>::max() == 65535);
static_assert(numeric_limits<long>::min() == LONG_MIN);
static_assert(numeric_limits<ulong>::max() == ULONG_MAX && numeric_limits<bool>::max());
static_assert(numeric_limits<int>::digits == 31 && numeric_limits<int>::lowest() == INT_MIN);
static_assert(numeric_limits<half>::max() == 65504.0f);
static_assert(numeric_limits<half>::denorm_min() == 0x1p-24f);
static_assert(numeric_limits<bfloat>::epsilon() == 0x1p-7f);
static_assert(numeric_limits<bfloat>::denorm_min() == 0x1p-133f);
static_assert(numeric_limits<float>::lowest() == -FLT_MAX && numeric_limits<float>::digits == 24);
static_assert(Limits<half>::max == INFINITY && Limits<float>::min == -INFINITY);
static_assert(Limits<int>::min == INT_MIN && Limits<float>::finite_max == FLT_MAX);
static_assert(Limits<bfloat16_t>::finite_min == -0x1.fep127f);
static_assert(Limits<complex64_t>::max.imag == INFINITY);
static_assert(is_same_v<make_unsigned_t<long>, ulong> && is_same_v<decay_t<const int&>, int>);
static_assert(is_integral_v<const short> && !is_integral_v<half> && is_floating_point_v<bfloat>);
static_assert(is_convertible_v<half, float> && !is_convertible_v<float, bfloat>);
static_assert(is_same_v<conditional_t<true, int, float>, int>);
static_assert(is_same_v<enable_if_t<true, half>, half>);
static_assert(is_same_v<ConditionalType<false, int, half>::type, half>);
static_assert(WorkPerThread<half>::n == 4 && REDUCE_N_READS == 4 && RMS_LOOPED_LIMIT == 4096);
static_assert(CHAR_BIT == 8 && M_PI_H > 3.14f);
void log() { mlx::os_log("a", "b").log_debug("%d", 3); }
"""


@every_compiler
def test_limits_traits_and_constants(compiler):
    text = prelude("limits", "mlx_limits", "traits", "mlx_utils", "complex") + LIMITS
    assert errors(text, compiler) == ""


# ---- atomics ------------------------------------------------------------------------------------

ATOMICS = exported("""
export void count(device atomic<float>* sum, device atomic_uint* hits, device atomic_int* largest,
                  device atomic_ulong* bits, long n) {
  for (long i = 0; i < n; ++i) {
    atomic_fetch_add_explicit(sum, 0.5f, memory_order_relaxed);
    atomic_fetch_add_explicit(hits + i % 4, 1, memory_order_relaxed);
    atomic_fetch_max_explicit(largest, int(i), memory_order_relaxed);
    atomic_fetch_or_explicit(bits, 1ul << i % 64, memory_order_relaxed);
    atomic_thread_fence(mem_flags::mem_device, memory_order_relaxed);
  }
}
constant memory_order relaxed = memory_order_relaxed;
export float each(device atomic_int* a, device atomic_bool* b, device atomic_float* f) {
  atomic_store_explicit(a, 5, relaxed);
  int before = atomic_exchange_explicit(a, 12, relaxed);
  before = before * 100 + atomic_fetch_sub_explicit(a, 2, relaxed);
  before = before * 100 + atomic_fetch_and_explicit(a, 6, relaxed);
  before = before * 100 + atomic_fetch_xor_explicit(a, 3, relaxed);
  before = before * 100 + atomic_fetch_min_explicit(a, -1, relaxed);
  int expected = 7;
  while (!atomic_compare_exchange_weak_explicit(a, &expected, 4, relaxed, relaxed)) {}
  atomic_store_explicit(b, true, relaxed);
  atomic_fetch_sub_explicit(f, 1.5f, relaxed);
  return before + atomic_load_explicit(f, relaxed) + atomic_load_explicit(b, relaxed);
}
""")


@every_compiler
def test_atomics_lose_no_update_between_threads(compiler):
    lib, _ = build(prelude("atomics") + ATOMICS, "-O2", compiler=compiler)
    total, hits = np.zeros(1, np.float32), np.zeros(4, np.uint32)
    largest, bits = np.zeros(1, np.int32), np.zeros(1, np.uint64)
    n, workers = 100_000, 4
    threads = [
        threading.Thread(
            target=call, args=(lib.count, total, hits, largest, bits), kwargs={"count": n}
        )
        for _ in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total[0] == 0.5 * n * workers
    assert hits.tolist() == [n * workers // 4] * 4
    assert largest[0] == n - 1
    assert bits[0] == 2**64 - 1


@every_compiler
def test_atomic_functions_return_the_value_before(compiler):
    lib, _ = build(prelude("atomics") + ATOMICS, "-O2", compiler=compiler)
    a, b, f = np.zeros(1, np.int32), np.zeros(1, np.bool_), np.full(1, 2.0, np.float32)
    lib.each.restype = ctypes.c_float
    result = lib.each(*[ctypes.c_void_p(v.ctypes.data) for v in (a, b, f)])
    assert result == np.float32(512100201 + 0.5 + 1)
    assert (a[0], b[0], f[0]) == (4, True, 0.5)


# ---- MLX's indexing -----------------------------------------------------------------------------

INDEXING = exported("""
export void locate(const int* shape, const int64_t* strides, const int64_t* other, long* out,
                   long ndim) {
  int n = int(ndim), rows = 1, size = 1;
  for (int d = 0; d < n; ++d) size *= shape[d];
  for (int d = 0; d + 2 < n; ++d) rows *= shape[d];
  LoopedElemToLoc<3> by_one(n);
  LoopedElemToLoc<2, long> by_seven(n);
  LoopedElemToLoc<1, long, false> innermost(n);
  int i = 0, reached = 0;
  for (int z = 0; z < rows; ++z) {
    for (int y = 0; y < shape[n - 2]; ++y) {
      for (int x = 0; x < shape[n - 1]; ++x, ++i) {
        uint3 at = {uint(x), uint(y), uint(z)};
        *out++ = elem_to_loc<long>(i, shape, strides, n);
        *out++ = elem_to_loc(at, shape, strides, n);
        *out++ = elem_to_loc_2_nd(at, shape, other, strides, n).y;
        *out++ = elem_to_loc_3_nd<int>(at, shape, other, other, strides, n).z;
        *out++ = by_one.location();
        by_one.next(shape, strides);
        if (i == reached && i + 7 < size) { by_seven.next(7, shape, strides); reached += 7; }
        *out++ = i + 7 >= size || reached != i + 7 ? -1 : by_seven.location();
      }
    }
  }
  *out++ = elem_to_loc_1<long>(3, strides[0]);
  *out++ = elem_to_loc_2<long>(uint2(3, 2), strides);
  *out++ = elem_to_loc_3(uint3(3, 2, 1), strides);
}
""")


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (2, 1, 3, 5), (2, 3, 2, 2, 3)])
def test_indexing_helpers_find_every_element(shape):
    lib, _ = build(prelude("mlx_indexing") + INDEXING, "-O1")
    rng = np.random.default_rng(0)
    strides, other = rng.integers(0, 1000, (2, len(shape)))
    size = int(np.prod(shape))
    out = np.empty(6 * size + 3, np.int64)
    arrays = np.array(shape, np.int32), strides.astype(np.int64), other.astype(np.int64), out
    call(lib.locate, *arrays, count=len(shape))
    expected = np.array([np.dot(np.unravel_index(i, shape), strides) for i in range(size)])
    table = out[: 6 * size].reshape(size, 6)
    for column in range(5):
        np.testing.assert_array_equal(table[:, column], expected)
    stepped = np.flatnonzero(table[:, 5] >= 0)
    assert stepped.tolist() == list(range(0, size - 7, 7))
    np.testing.assert_array_equal(table[stepped, 5], expected[stepped + 7])
    s = strides.tolist()
    assert out[-3] == 3 * s[0]
    assert out[-2] == 3 * s[1] + 2 * s[0]
    if len(shape) > 2:
        assert out[-1] == 3 * s[2] + 2 * s[1] + s[0]


# ---- complex numbers ----------------------------------------------------------------------------

COMPLEX = exported("""
export void complex_(const complex64_t* x, const complex64_t* z, complex64_t* y, long n) {
  for (long i = 0; i < n; ++i) {
    complex64_t a = x[i], b = z[i], sum = a;
    sum += b;
    y[i] = sum - 2.0f; y[n + i] = a - b; y[2 * n + i] = a * b; y[3 * n + i] = a / b;
    y[4 * n + i] = -a + 1; y[5 * n + i] = a % b; y[6 * n + i] = log1p(a); y[7 * n + i] = 1.0f / b;
    bool ordered = a == a && a >= a && b <= b && !(a < a);
    y[8 * n + i] = complex64_t(float(a > b), float(ordered));
    y[9 * n + i] = complex64_t(float(a), float(cast_to<bool>(a)));
  }
}
static_assert(sizeof(complex64_t) == 8 && sizeof(complex32_t) == 4);
constexpr complex32_t one_two(half(1.0f), half(2.0f)), three_four(half(3.0f), half(4.0f));
static_assert((one_two * three_four).real == -5.0f);
constexpr complex64_t minus(1.0f, -0.0f), plus(1.0f, 0.0f);
constexpr bool has_sign(complex64_t z) { return as_type<uint>(z.imag) >> 31; }
static_assert(has_sign(minus + 1) && has_sign(half(1.0f) + minus));
static_assert(has_sign(minus - 1u) && has_sign(1.0f - plus));
void convert() {
  complex64_t c = 1;
  c = half(2.0f);
  half h = half(c); bfloat b = bfloat(c); complex32_t d = c; float2 v = c;
  c = v;
}
""")


@every_compiler
def test_complex_arithmetic(compiler):
    lib, _ = build(prelude("complex") + COMPLEX, "-O2", compiler=compiler)
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, 1000, 2)).astype(np.float32).view(np.complex64)[..., 0]
    y = np.empty((10, 1000), np.complex64)
    call(lib.complex_, x, z, y)
    a, b = x.astype(np.complex128), z.astype(np.complex128)
    larger = (a.real > b.real) + 1j
    remainder = np.mod(a.real, b.real) + 1j * np.mod(a.imag, b.imag)
    expected = [a + b - 2, a - b, a * b, a / b, 1 - a, remainder, np.log1p(a), 1 / b, larger]
    for row, wanted in enumerate([*expected, a.real + 1j]):
        np.testing.assert_allclose(y[row], wanted, rtol=2e-5, atol=2e-5, err_msg=f"row {row}")


# ---- failures -----------------------------------------------------------------------------------

FAILURES = exported("""
export void fail(zk_failure* failure, long value) {
  zk_failing = failure;
  ZMLX_FAIL("targets", value);
  ZMLX_FAIL("later", 1);
}
""")


class Failure(ctypes.Structure):
    """zk_failure of abi.h."""

    _fields_ = (("set", ctypes.c_int), ("text", ctypes.c_char * 500))


@every_compiler
@pytest.mark.parametrize("value", [0, 7, -5, 2**63 - 1, -(2**63)])
def test_the_first_failure_is_recorded(value, compiler):
    lib, _ = build(prelude("failure") + FAILURES, "-O1", compiler=compiler)
    failure = Failure()
    lib.fail(ctypes.byref(failure), ctypes.c_long(value))
    assert failure.set == 2
    assert failure.text.decode() == f"'targets' must be in range but got {value}."
