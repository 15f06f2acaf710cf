"""The Metal functions that zmlx kernels share, as one header text.

Plain C-like Metal that also compiles as CUDA and as C++: floats, integers and structs of them, no
address space, no overload, no include. Float functions and random numbers have no loop, and selects
instead of branches, so that an elementwise loop vectorises.

NaN and infinities come out as from MLX's operation of the same meaning. Each error stated was
measured with an exp below 1 ulp, and a test holds it; `ulp of x` is a unit in the
last place of the argument, where the result itself cancels.
"""

from __future__ import annotations

import re
from functools import lru_cache

#: The whole header. A section is a comment and one function; `header_for` picks the sections.
HEADER = """\
// ZMLX_FAIL reports a value that only the kernel sees; the CPU target defines it to record it.
#ifndef ZMLX_FAIL
#define ZMLX_FAIL(argument, value)
#endif

// exp(x) of an x that is at most 88, infinite or NaN; the CPU target defines a faster one.
#ifndef ZMLX_EXP_BOUNDED
#define ZMLX_EXP_BOUNDED(x) exp(x)
#endif

// x * x; at most 0.5 ulp.
inline float zmlx_square(float x) {
    return x * x;
}

// x * x * x; at most 1.5 ulp.
inline float zmlx_cube(float x) {
    return x * x * x;
}

// The larger of a and b, or NaN if either is; exact. A constant b costs one comparison.
inline float zmlx_maximum(float a, float b) {
    float larger = a <= b ? b : a;
    return b != b ? b : larger;
}

// The smaller of a and b, or NaN if either is; exact. A constant b costs one comparison.
inline float zmlx_minimum(float a, float b) {
    float smaller = a >= b ? b : a;
    return b != b ? b : smaller;
}

// a modulo b with the sign of b; at most 0.5 ulp.
inline float zmlx_remainder(float a, float b) {
    float r = fmod(a, b);
    return r != 0.0f && (r < 0.0f) != (b < 0.0f) ? r + b : r;
}

// exp(x) - 1; at most 1.5 ulp. With i the integer nearest to x / ln 2 and f = x - i ln 2,
// exp(x) - 1 = 2^i (expm1(f) + 1) - 1, computed on half of 2^i so that i = 128 does not overflow.
// The coefficients are minimax in relative error: Lawson-weighted least squares on Chebyshev nodes
// of |f| <= ln 2 / 2, rounded to float from the lowest up with the others refitted each time.
inline float zmlx_expm1(float x) {
    float c = x > -20.0f ? x : -20.0f;
    c = c < 89.0f ? c : 89.0f;
    float i = rint(c * 1.44269504f);
    float f = fma(i, -0.693145752f, c);
    f = fma(i, -1.42860677e-6f, f);
    float p = 1.97624874e-4f;
    p = fma(p, f, 1.39323272e-3f);
    p = fma(p, f, 8.33354518e-3f);
    p = fma(p, f, 4.16664928e-2f);
    p = fma(p, f, 1.66666657e-1f);
    p = fma(p, f, 0.5f);
    p = fma(p * f, f, f);
    float s = as_type<float>((int(i) + 126) << 23);
    float r = fma(s, p, s - 0.5f);
    return fabs(x) > 0.0f ? r + r : x;
}

// The error function; at most 1.1 ulp. x + x P(x^2) below 0.93, 1 - exp(Q(|x|)) up to 4, and ±1.
// P and Q are minimax in relative error, fitted to erf and log(erfc) as for expm1.
inline float zmlx_erf(float x) {
    float z = x * x;
    float p = 7.99664201e-5f;
    p = fma(p, z, -8.04976909e-4f);
    p = fma(p, z, 5.19240508e-3f);
    p = fma(p, z, -2.68557314e-2f);
    p = fma(p, z, 1.12836264e-1f);
    p = fma(p, z, -3.76126289e-1f);
    p = fma(p, z, 1.28379166e-1f);
    float near = fma(p, x, x);
    float a = fabs(x);
    a = a < 4.0f ? a : 4.0f;
    float q = -2.08229428e-5f;
    q = fma(q, a, 4.31338762e-4f);
    q = fma(q, a, -4.15604468e-3f);
    q = fma(q, a, 2.50802040e-2f);
    q = fma(q, a, -1.08219944e-1f);
    q = fma(q, a, -6.33401096e-1f);
    q = fma(q, a, -1.12948835f);
    q = fma(q, a, 1.69203922e-4f);
    float far = 1.0f - exp(q);
    far = x < 0.0f ? -far : far;
    return fabs(x) > 0.93f ? far : near;
}

// 1 / (1 + exp(-x)); at most 2.5 ulp, down to x = -87.
inline float zmlx_sigmoid(float x) {
    return 1.0f / (1.0f + exp(-x));
}

// x sigmoid(x); at most 3 ulp, down to x = -88.
inline float zmlx_silu(float x) {
    return x / (1.0f + exp(-x));
}

// log(1 + x) for x in [0, 1], which exp(-|x|) is; at most 2 ulp. With s = x / (2 + x) it is
// 2 atanh(s) = 2 s + s^3 P(s^2), P minimax in relative error.
inline float zmlx_log1p_unit(float x) {
    float s = x / (2.0f + x);
    float z = s * s;
    float p = 0.243009344f;
    p = fma(p, z, 0.214276582f);
    p = fma(p, z, 0.286168844f);
    p = fma(p, z, 0.39998877f);
    p = fma(p, z, 0.666666746f);
    return fma(p * z, s, s + s);
}

// log(1 + exp(x)); at most 3 ulp.
inline float zmlx_softplus(float x) {
    return (x > 0.0f ? x : 0.0f) + zmlx_log1p_unit(exp(-fabs(x)));
}

// log(sigmoid(x)); at most 3 ulp.
inline float zmlx_log_sigmoid(float x) {
    return (x < 0.0f ? x : 0.0f) - zmlx_log1p_unit(exp(-fabs(x)));
}

// log(exp(a) + exp(b)); at most 4 ulp of the largest of the result, a and b.
inline float zmlx_logaddexp(float a, float b) {
    float high = zmlx_maximum(a, b);
    float low = zmlx_minimum(a, b);
    return low == -INFINITY || high == INFINITY ? high : high + zmlx_log1p_unit(exp(low - high));
}

// The normal distribution function, (1 + erf(x / sqrt 2)) / 2; at most 0.7 ulp of 1. The smaller
// tail is exp(P(|x|)), P minimax in the error of the tail as for expm1, and falling beyond.
inline float zmlx_ndtr(float x) {
    float a = fabs(x);
    float p = -1.95517987e-6f;
    p = fma(p, a, 2.71958397e-5f);
    p = fma(p, a, -1.28674947e-4f);
    p = fma(p, a, -9.55851647e-5f);
    p = fma(p, a, 4.89652669e-3f);
    p = fma(p, a, -3.63876894e-2f);
    p = fma(p, a, -3.18298936e-1f);
    p = fma(p, a, -7.97885299e-1f);
    p = fma(p, a, -6.93147182e-1f);
    float tail = exp(p);
    return x > 0.0f ? 1.0f - tail : tail;
}

// x (1 + erf(x / sqrt 2)) / 2; at most 1.7 ulp of x.
inline float zmlx_gelu(float x) {
    return x * zmlx_ndtr(x);
}

// x (1 + tanh(u / 2)) / 2 = x sigmoid(u), u = sqrt(8 / pi) (x + 0.044715 x^3); at most 2 ulp of x.
inline float zmlx_gelu_tanh(float x) {
    float u = 0.0713548163f * (x * x * x) + 1.59576912f * x;
    return x / (1.0f + exp(-u));
}

// x tanh(softplus(x)) = x n / (n + 2), n = exp(x) (exp(x) + 2); at most 4 ulp, down to x = -87.
inline float zmlx_mish(float x) {
    float e = exp(x > 20.0f ? 20.0f : x);
    float n = e * (e + 2.0f);
    return x * (n / (n + 2.0f));
}

// Four random words.
struct zmlx_words {
    uint a;
    uint b;
    uint c;
    uint d;
};
// A round of Philox on four words, each the low half of its member: the product that gives one word
// its high half and another its low half is formed once, in lanes of 64 bits.
struct zmlx_philox_state {
    uint64_t a;
    uint64_t b;
    uint64_t c;
    uint64_t d;
};
inline zmlx_philox_state zmlx_philox_round(zmlx_philox_state s, uint k0, uint k1) {
    uint64_t p = (s.a & 0xFFFFFFFFu) * 0xD2511F53u;
    uint64_t q = (s.c & 0xFFFFFFFFu) * 0xCD9E8D57u;
    zmlx_philox_state r = {(q >> 32) ^ s.b ^ k0, q, (p >> 32) ^ s.d ^ k1, p};
    return r;
}

// Philox4x32-10 (Salmon et al. 2011) of the counter (counter, 0), four words, lowest first.
inline zmlx_words zmlx_philox(uint64_t counter, uint64_t key) {
    uint k0 = uint(key);
    uint k1 = uint(key >> 32);
    zmlx_philox_state s = {counter, counter >> 32, 0u, 0u};
    s = zmlx_philox_round(s, k0, k1);
    s = zmlx_philox_round(s, k0 + 0x9E3779B9u, k1 + 0xBB67AE85u);
    s = zmlx_philox_round(s, k0 + 0x3C6EF372u, k1 + 0x76CF5D0Au);
    s = zmlx_philox_round(s, k0 + 0xDAA66D2Bu, k1 + 0x32370B8Fu);
    s = zmlx_philox_round(s, k0 + 0x78DDE6E4u, k1 + 0xED9EBA14u);
    s = zmlx_philox_round(s, k0 + 0x1715609Du, k1 + 0xA9066899u);
    s = zmlx_philox_round(s, k0 + 0xB54CDA56u, k1 + 0x646E171Eu);
    s = zmlx_philox_round(s, k0 + 0x5384540Fu, k1 + 0x1FD5C5A3u);
    s = zmlx_philox_round(s, k0 + 0xF1BBCDC8u, k1 + 0xDB3D7428u);
    s = zmlx_philox_round(s, k0 + 0x8FF34781u, k1 + 0x96A522ADu);
    zmlx_words w = {uint(s.a), uint(s.b), uint(s.c), uint(s.d)};
    return w;
}

// A word with its halves exchanged.
inline uint zmlx_exchanged(uint word) {
    return word << 16 | word >> 16;
}

// A number in [0, 1) from the high 24 bits of a random word.
inline float zmlx_uniform(uint word) {
    return float(word >> 8) * 5.9604644775390625e-8f;
}

// Number `index` of a stream whose first eight numbers come from `counter`: four of its words, and
// four of the same with their halves exchanged.
inline float zmlx_draw(uint64_t counter, uint64_t index, uint64_t key) {
    zmlx_words w = zmlx_philox(counter + index / 8, key);
    uint low = index % 2 == 0 ? w.a : w.b;
    uint high = index % 2 == 0 ? w.c : w.d;
    uint word = index % 4 < 2 ? low : high;
    return zmlx_uniform(index % 8 < 4 ? word : zmlx_exchanged(word));
}

// a / b rounded down, as Python's //; undefined for b = 0.
inline int zmlx_int_divide(int a, int b) {
    return a / b - int(a % b != 0 && (a < 0) != (b < 0));
}

// a modulo b with the sign of b, as Python's %; undefined for b = 0.
inline int zmlx_int_remainder(int a, int b) {
    int r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

// a to the power n >= 0.
inline int zmlx_int_power(int a, int n) {
    int r = 1;
    while (n > 0) {
        r *= n % 2 == 1 ? a : 1;
        a *= n > 1 ? a : 1;
        n /= 2;
    }
    return r;
}
"""

_SECTIONS: tuple[tuple[str, str], ...] = tuple(
    (match.group(1) or match.group(2), section)
    for section in HEADER.rstrip("\n").split("\n\n")
    if (match := re.search(r"^inline \w+ (\w+)\(|^#define (\w+)\(", section, re.MULTILINE))
)
_NAMES = re.compile(r"\b(?:" + "|".join(name for name, _ in _SECTIONS) + r")\b", re.ASCII)


def function_names() -> tuple[str, ...]:
    """The functions of the header, in its order."""
    return tuple(name for name, _ in _SECTIONS if name.startswith("zmlx_"))


def sections() -> tuple[tuple[str, str], ...]:
    """The name and the text of each section, in the header's order."""
    return _SECTIONS


@lru_cache(maxsize=4096)
def header_for(text: str) -> str:
    """The sections that `text` names, with what they need themselves, in the header's order."""
    needed = set(_NAMES.findall(text))
    for name, section in reversed(_SECTIONS):
        if name in needed:
            needed.update(_NAMES.findall(section))
    return "\n\n".join(section for name, section in _SECTIONS if name in needed) + "\n" * bool(
        needed
    )
