"""Lanes are right on every width of registers: one, or as many as they need."""

import platform

import numpy as np
import pytest
from prelude_text import build, call, compilers, exported, prelude

pytestmark = pytest.mark.skipif(not compilers(), reason="needs g++ or clang++")

# Registers of 64 bytes at most, of 32, and of 16.
PROCESSORS = ["native", "x86-64-v3", "x86-64-v2"] if platform.machine() == "x86_64" else ["native"]

TEXT = exported("""
template <class T>
void read(const T* x, float* y, long n) {
  for (long i = 0; i + LANES <= n; ++i) zmlx_write<LANES>(y + i * LANES, zmlx_read<LANES>(x + i));
}
export void floats(const float* x, float* y, long n) { read(x, y, n); }
export void halves(const half* x, float* y, long n) { read(x, y, n); }
export void bfloats(const bfloat* x, float* y, long n) { read(x, y, n); }
export void integers(const int* x, float* y, long n) { read(x, y, n); }

export void products(const float* x, float* y, long n) {
  for (long i = 0; i + LANES + 2 <= n; ++i) {
    const auto a = zmlx_read<LANES>(x + i), b = zmlx_read<LANES>(x + i + 1);
    zmlx_write<LANES>(y + i * LANES, zmlx_fma<LANES>(a, b, zmlx_splat<LANES>(x[i + LANES + 1])));
  }
}
export void pairs(const float* x, float* y, long n) {
  for (long i = 0; i + 2 * LANES <= n; ++i) {
    const auto a = zmlx_read<LANES>(x + i), b = zmlx_read<LANES>(x + i + LANES);
    zmlx_write<LANES>(y + i * LANES, zmlx_pair_sums<LANES>(a, b));
  }
}
export void eights(const uchar* x, float* y, long n) {
  for (long i = 0; i + LANES <= n; ++i, y += 2 * LANES) {
    zmlx_write<LANES>(y, zmlx_codes<8, LANES>(x + i, 0));
    zmlx_write<LANES>(y + LANES, zmlx_dequantized<8, LANES>(x + i, 0, 0.5f, -3.0f));
  }
}
export void fours(const uchar* x, float* y, long n) {
  for (long i = 0; i + LANES <= n; ++i) {
    for (int place = 0; place < 2; ++place, y += 2 * LANES) {
      zmlx_write<LANES>(y, zmlx_codes<4, LANES>(x + i, place));
      zmlx_write<LANES>(y + LANES, zmlx_dequantized<4, LANES>(x + i, place, 0.5f, -3.0f));
    }
  }
}
""")


@pytest.mark.parametrize("compiler", compilers())
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("n", [4, 8, 16])
def test_lanes_on_the_registers_of_every_processor(n, processor, compiler):
    flags = ("-O2", f"-march={processor}", f"-DLANES={n}")
    lanes = build(prelude("numbers", "lanes") + TEXT, *flags, compiler=compiler)[0]

    def made(function, x, *shape):
        y = np.full((*shape, n), np.nan, np.float32)
        call(function, x, y)
        return y

    def windows(x, count=n):
        return np.lib.stride_tricks.sliding_window_view(x, count)

    rng = np.random.default_rng(0)
    # Small whole numbers, so that no sum or product of theirs is rounded.
    x = rng.integers(-100, 100, 200)
    for function, dtype in (
        (lanes.floats, np.float32), (lanes.halves, np.float16), (lanes.integers, np.int32),
    ):  # fmt: skip
        given = x.astype(dtype)
        np.testing.assert_array_equal(made(function, given, 201 - n), windows(given))
    upper = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(made(lanes.bfloats, upper, 201 - n), windows(x))

    floats = x.astype(np.float32)
    a, b, c = windows(x)[:-2], windows(x)[1:-1], x[n + 1 :, None]
    np.testing.assert_array_equal(made(lanes.products, floats, 199 - n), a * b + c)
    both = windows(x, 2 * n)
    np.testing.assert_array_equal(
        made(lanes.pairs, floats, len(both)), both[:, ::2] + both[:, 1::2]
    )

    packed = rng.integers(0, 256, 200).astype(np.uint8)
    codes = windows(packed.astype(np.float32))
    want = np.stack([codes - 128, codes * 0.5 - 3], 1)
    np.testing.assert_array_equal(made(lanes.eights, packed, *want.shape[:2]), want)
    halves = np.stack([windows(packed & 15), windows(packed >> 4)], 1).astype(np.float32)
    want = np.stack([halves - 8, halves * 0.5 - 3], 2)
    np.testing.assert_array_equal(made(lanes.fours, packed, *want.shape[:3]), want)
