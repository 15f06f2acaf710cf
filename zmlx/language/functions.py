"""Functions of Metal's library. Errors over all floats are tested where the prelude is; here each
function is in its place, with its names and types."""

from __future__ import annotations

from typing import Any

import numpy as np

from .row import INDEX, Row, X

#: Of functions that round: a few units of the last place.
_FLOAT = 1e-6
#: Metal's fast functions are good to about 2^-11 at worst in these ranges; ours are as the others.
_FAST = 1e-3

_SMALL = np.array([0.5, -0.25, 0.125, 0.0, 0.75, -0.5, 0.9375, -0.875], np.float32)
_HOLES = np.array([np.nan, 2.0, -1.0, np.nan, 7.0, 0.25, 100.0, np.nan], np.float32)
_POSITIVE = np.array([1.5, 2.0, 3.25, 0.5, 7.0, 0.25, 100.0, 8.0], np.float32)


def _row(call: str, expected: Any, x: np.ndarray = X, within: float = _FLOAT) -> Row:
    return Row(f"r = {call};", expected, x=x, within=within)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


_P, _S = _wide(_POSITIVE), _wide(_SMALL)

MATH = {
    "acos": _row("acos(x[i])", np.arccos(_S), _SMALL),
    "acosh": _row("acosh(x[i] + 1)", np.arccosh(_P + 1), _POSITIVE),
    "asin": _row("asin(x[i])", np.arcsin(_S), _SMALL),
    "asinh": _row("asinh(x[i])", np.arcsinh(_wide(X))),
    "atan": _row("atan(x[i])", np.arctan(_wide(X))),
    "atan2": _row("atan2(x[i], 2.0f)", np.arctan2(_wide(X), 2)),
    "atanh": _row("atanh(x[i])", np.arctanh(_S), _SMALL),
    "ceil": _row("ceil(x[i])", np.ceil(X), within=0),
    "copysign": _row("copysign(3.0f, x[i])", np.copysign(3, X), within=0),
    "cos": _row("cos(x[i])", np.cos(_P), _POSITIVE),
    "cosh": _row("cosh(x[i])", np.cosh(_S), _SMALL),
    "cospi": _row("cospi(x[i])", np.cos(np.pi * _S), _SMALL),
    "divide": _row("divide(x[i], 3.0f)", _wide(X) / 3),
    "exp": _row("exp(x[i])", np.exp(_S), _SMALL),
    "exp2": _row("exp2(x[i])", np.exp2(_S), _SMALL),
    "exp10": _row("exp10(x[i])", 10**_S, _SMALL),
    "fabs, abs": _row("fabs(x[i]) + abs(x[i]) * 2", 3 * np.abs(X), within=0),
    "fdim": _row("fdim(x[i], 2.0f)", np.maximum(X - 2, 0), within=0),
    "floor": _row("floor(x[i])", np.floor(X), within=0),
    "fma": _row("fma(x[i], x[i], 1.0f)", X * X + 1, within=0),
    "fma of halves rounds once": Row(
        "half a = 0x1.04p0 + (i >> 3), b = 0x1.08p0, c = 0x1p-24;\n"
        "r = fma(a, b, c); r += 2 * fma(half2(a), half2(b), half2(0, c)).y;\n"
        "r += fma(a, 2, half(1));",
        3 * 1.0478515625 + 3.03125, on_cuda=False),
    "fmax, fmin": _row("fmax(x[i], 1.0f) - fmin(x[i], 1.0f)", np.abs(X - 1), within=0),
    "fmax of NaN": _row("fmax(NAN, x[i]) + max(x[i], 0.0f)", X + np.maximum(X, 0), within=0),
    "fmod": _row("fmod(x[i], 2.0f)", np.fmod(X, 2), within=0),
    "fract": _row("fract(x[i])", X - np.floor(X), within=0),
    "fract is below 1, and NaN of NaN": Row(
        "half h = -0x1p-13h / (i + 1); r = (fract(h) < 1) + 2 * (fract(-0x1p-30f / (i + 1)) < 1)\n"
        " + 4 * (fract(half2(0, h)).y == 0x1.ffcp-1h) + 8 * isnan(fract(i > 9 ? 1 : NAN));",
        15, on_cuda=False),
    "frexp": Row("int e; float m = frexp(x[i], e); r = m * 100 + e;",
                 np.frexp(X)[0] * 100 + np.frexp(X)[1]),
    "ilogb": _row("ilogb(x[i])", np.floor(np.log2(_P)), _POSITIVE, 0),
    "ldexp": _row("ldexp(x[i], 3)", X * 8, within=0),
    "log": _row("log(x[i])", np.log(_P), _POSITIVE),
    "log2": _row("log2(x[i])", np.log2(_P), _POSITIVE),
    "log10": _row("log10(x[i])", np.log10(_P), _POSITIVE),
    "max3, min3, median3": _row(
        "max3(x[i], 1.0f, 2.0f) * 100 + min3(x[i], 1.0f, 2.0f) * 10 + median3(x[i], 1.0f, 2.0f)",
        np.maximum(X, 2) * 100 + np.minimum(X, 1) * 10 + np.clip(X, 1, 2)),
    "fmax3, fmin3, fmedian3": _row(
        "fmax3(x[i], 1.0f, 2.0f) * 100 + fmin3(x[i], 1.0f, 2.0f) * 10 + fmedian3(x[i], 1.0f, 2.0f)",
        np.maximum(X, 2) * 100 + np.minimum(X, 1) * 10 + np.clip(X, 1, 2)),
    "modf": Row("float w; float f = modf(x[i], w); r = f * 10 + w;",
                np.modf(X)[0] * 10 + np.modf(X)[1]),
    "nextafter": _row("nextafter(x[i], INFINITY) > x[i]", 1, within=0),
    "pow, powr": _row("pow(x[i], 1.5f) + powr(x[i], 0.5f)", _P**1.5 + _P**0.5, _POSITIVE),
    "rint": _row("rint(x[i])", np.rint(X), within=0),
    "round": _row("round(x[i])", np.copysign(np.floor(np.abs(X) + 0.5), X), within=0),
    "rsqrt": _row("rsqrt(x[i])", 1 / np.sqrt(_P), _POSITIVE),
    "sin": _row("sin(x[i])", np.sin(_P), _POSITIVE),
    "sincos": Row("float c; float s = sincos(x[i], c); r = s + 10 * c;",
                  np.sin(_P) + 10 * np.cos(_P), x=_POSITIVE, within=_FLOAT),
    "sinh": _row("sinh(x[i])", np.sinh(_S), _SMALL),
    "sinpi": _row("sinpi(x[i])", np.sin(np.pi * _S), _SMALL),
    "sqrt": _row("sqrt(x[i])", np.sqrt(_P), _POSITIVE),
    "tan": _row("tan(x[i])", np.tan(_S), _SMALL),
    "tanh": _row("tanh(x[i])", np.tanh(_wide(X))),
    "tanpi": _row("tanpi(x[i] / 4)", np.tan(np.pi * _S / 4), _SMALL),
    "trunc": _row("trunc(x[i])", np.trunc(X), within=0),
    "of half": Row("half h = x[i]; half y = sqrt(h) + exp(half(0)) + max(h, 1.0h); r = y;",
                   np.float16(np.float16(np.sqrt(np.float16(_POSITIVE))) + np.float16(1))
                   + np.float16(np.maximum(_POSITIVE, 1)), x=_POSITIVE, within=2e-3),
    "of bfloat": Row("bfloat b = bfloat(x[i]); r = float(abs(b)) + float(floor(bfloat(1.5f)));",
                     np.abs(X) + 1),
    "of bfloat, which MLX makes floats": Row(
        "bfloat a = bfloat(1.0f), b = bfloat(1.0078125f); r = nextafter(a, b) + mix(a, b, b)\n"
        " + smoothstep(bfloat(0.0f), bfloat(4.0f), b);",
        1 + 1.0078125**2 - 1.0078125 + 1 + (1.0078125 / 4)**2 * (3 - 1.0078125 / 2),
        within=_FLOAT, on_cuda=False),
    "of vectors": Row(
        "float4 v = exp2(float4(i, 1, 2, 3)); float2 w = pow(float2(2, 3), 2.0f); "
        "half3 h = abs(half3(-1));\n"
        "r = v.x + v.w + w.y + h.z;", 2.0**INDEX + 8 + 9 + 1, within=_FLOAT),
}  # fmt: skip

_QUALIFIED = {
    "cos": np.cos(_S), "exp": np.exp(_S), "exp2": np.exp2(_S), "exp10": 10**_S,
    "sin": np.sin(_S), "tan": np.tan(_S), "tanh": np.tanh(_S), "asin": np.arcsin(_S),
    "acos": np.arccos(_S), "atan": np.arctan(_S), "sinh": np.sinh(_S), "cosh": np.cosh(_S),
    "abs": np.abs(_S), "floor": np.floor(_S), "ceil": np.ceil(_S), "rint": np.rint(_S),
    "round": np.copysign(np.floor(np.abs(_S) + 0.5), _S), "trunc": np.trunc(_S),
}  # fmt: skip
_QUALIFIED_POSITIVE = {
    "log": np.log(_P), "log2": np.log2(_P), "log10": np.log10(_P), "sqrt": np.sqrt(_P),
    "rsqrt": 1 / np.sqrt(_P),
}  # fmt: skip


def _qualified(space: str, within: float) -> dict[str, Row]:
    def total(names: dict[str, Any]) -> tuple[str, Any]:
        call = " + ".join(f"{space}::{name}(x[i])" for name in names)
        return call, sum(names.values())

    return {
        f"{space}:: {', '.join(names)}": _row(*total(names), x, within)
        for names, x in ((_QUALIFIED, _SMALL), (_QUALIFIED_POSITIVE, _POSITIVE))
    } | {
        f"{space}:: pow, atan2, divide, fmax, fma": _row(
            f"{space}::pow(x[i], 2.0f) + {space}::atan2(x[i], 1.0f) + {space}::divide(x[i], 4.0f)"
            f" + {space}::fmax(x[i], 1.0f) + metal::fma(x[i], x[i], 0.0f)",
            _P**2 + np.arctan2(_P, 1) + _P / 4 + np.maximum(_P, 1) + _P**2, _POSITIVE, within),
    }  # fmt: skip


NAMESPACES = {
    **_qualified("precise", _FLOAT * 4),
    **_qualified("fast", _FAST),
    "metal::": _row("metal::exp(x[i]) + ::metal::max(x[i], 0.0f)", np.exp(_S) + np.maximum(_S, 0),
                    _SMALL),
    "metal::precise::, metal::fast::": _row(
        "metal::precise::exp(x[i]) + metal::fast::exp(x[i])", 2 * np.exp(_S), _SMALL, _FAST),
}  # fmt: skip

COMMON = {
    "clamp": _row("clamp(x[i], 0.0f, 5.0f) + clamp(int(i), 2, 4)", np.clip(X, 0, 5)
                  + np.clip(INDEX, 2, 4), within=0),
    "max, min": _row("max(x[i], 1.0f) + min(x[i], 1.0f) + max(i, 3u) + min(int(i), 3)",
                     X + 1 + INDEX + 3, within=0),
    "max, min, clamp of NaN and a constant": _row(
        "max(x[i], 0.5f) * 4 + min(1.0f, x[i]) + float(uchar(clamp(x[i], 3.0f, 255.0f)))",
        np.fmax(_HOLES, 0.5) * 4 + np.fmin(1, _HOLES) + np.clip(np.fmax(_HOLES, 3), 3, 255),
        _HOLES, 0),
    "mix": _row("mix(x[i], 2.0f, 0.25f)", X * 0.75 + 0.5, within=_FLOAT),
    "saturate": _row("saturate(x[i])", np.clip(X, 0, 1), within=0),
    "sign": _row("sign(x[i])", np.sign(X), within=0),
    "smoothstep": _row("smoothstep(0.0f, 4.0f, x[i])",
                       np.clip(X / 4, 0, 1) ** 2 * (3 - 2 * np.clip(X / 4, 0, 1))),
    "step": _row("step(1.5f, x[i])", X >= 1.5, within=0),
}  # fmt: skip

GEOMETRIC = {
    "cross": Row("r = dot(cross(float3(1, i, 0), float3(0, 1, 2)), float3(1, 10, 100));",
                 2 * INDEX - 20 + 100),
    "dot": Row("r = dot(float4(i, 1, 2, 3), float4(2)) + dot(half2(1, 2), half2(i));",
               2 * INDEX + 12 + 3 * INDEX),
    "length, length_squared": Row(
        "r = length(float2(3, 4)) + length_squared(float3(i, 1, 2)) + length(float4(i, 0, 0, 0));",
        5 + INDEX**2 + 5 + INDEX, within=_FLOAT),
    "distance, distance_squared": Row(
        "r = distance(float2(3, i), float2(0, i)) + distance_squared(float3(i), float3(1));",
        3 + 3 * (INDEX - 1.0) ** 2, within=_FLOAT),
    "normalize": Row("float2 v = normalize(float2(3, 4) * (i + 1)); r = v.x + v.y * 10;", 8.6,
                     within=_FLOAT),
    "reflect": Row("float2 v = reflect(float2(1, -float(i)), float2(0, 1)); r = v.x + v.y;",
                   1 + INDEX),
    "refract": Row("float2 v = refract(float2(0, -1), float2(0, 1), 0.5f); r = v.y + i;",
                   INDEX - 1, within=_FLOAT),
    "faceforward": Row(
        "float2 v = faceforward(float2(0, 1), float2(0, float(i) - 3.5f), float2(0, 1)); r = v.y;",
        np.where(INDEX < 3.5, 1, -1)),
}  # fmt: skip

RELATIONAL = {
    "isnan, isinf, isfinite, isnormal": Row(
        "float v = i == 0 ? NAN : i == 1 ? INFINITY : i == 2 ? 1e-40f : x[i];\n"
        "r = isnan(v) + 2 * isinf(v) + 4 * isfinite(v) + 8 * isnormal(v + (i == 2));",
        [1, 2, 12, 4, 12, 12, 12, 12]),
    "isnormal of half": Row(
        "half v = 0x1p-14h / (i + 1); r = isnormal(v) + 2 * isnormal(half2(0, -v)).y\n"
        " + 4 * isnormal(half(-INFINITY)) + 8 * isnormal(HALF_MAX);",
        np.where(INDEX == 0, 3, 0) + 8, on_cuda=False),
    "isordered, isunordered": Row(
        "r = isordered(x[i], NAN) + 2 * isunordered(x[i], NAN) + 4 * isordered(x[i], 1.0f);", 6),
    "signbit": _row("signbit(x[i])", X < 0, within=0),
    "any, all": Row("bool3 b(i > 2, i > 4, i > 6); r = any(b) + 2 * all(b);",
                    1.0 * (INDEX > 2) + 2 * (INDEX > 6)),
    "any, all of a scalar": Row("r = any(i > 2) + 2 * all(x[i] != 0);",
                                1.0 * (INDEX > 2) + 2 * (X != 0), on_cuda=False),
    "not": Row("bool2 b = !bool2(i > 2, true); r = b.x + 2 * b.y;", INDEX <= 2),
    "select": Row("float2 v = select(float2(1, 2), float2(i), bool2(i > 3, true)); r = v.x + v.y\n"
                  " + select(10, 20, i > 5);",
                  np.where(INDEX > 3, INDEX, 1) + INDEX + np.where(INDEX > 5, 20, 10)),
    "select with a scalar first": Row(
        "float2 v = select(0.0f, float2(i, 3), float2(i, 3) > 2); r = v.x + v.y;",
        np.where(INDEX > 2, INDEX, 0) + 3, on_cuda=False),
    "comparisons of vectors": Row(
        "int3 v(i, 1, 2); bool3 b = v >= int3(2); r = b.x + 2 * b.y + 4 * b.z + 8 * all(v != 5);",
        1.0 * (INDEX >= 2) + 4 + 8 * (INDEX != 5)),
}  # fmt: skip

INTEGER = {
    "abs, absdiff": Row("r = abs(int(i) - 4) + absdiff(3u, i) + abs(char(-5));",
                        np.abs(INDEX - 4) + np.abs(3 - INDEX) + 5),
    "absdiff of signed integers has no sign": Row(
        "int2 v(i, INT_MIN); r = absdiff(char(100), char(-100 - i));\n"
        "r += (absdiff(v, INT_MAX) >> 31).y;",
        200 + INDEX + 1, on_cuda=False),
    "addsat, subsat": Row("r = addsat(uchar(250), uchar(i)) + subsat(uchar(3), uchar(i));",
                          np.minimum(250 + INDEX, 255) + np.maximum(3 - INDEX, 0)),
    "clz, ctz, popcount": Row(
        "r = clz(i) + ctz(i | 8) * 100 + popcount(i) * 10000;",
        [32 - k.bit_length() + 100 * ((k | 8) & -(k | 8)).bit_length() - 100
         + 10000 * bin(k).count("1") for k in range(8)]),
    "reverse_bits, rotate": Row("r = float(reverse_bits(i) >> 29) + float(rotate(i, 4u));",
                                [int(f"{k:03b}"[::-1], 2) + 16 * k for k in range(8)]),
    "extract_bits, insert_bits": Row("r = extract_bits(i * 5, 1, 3) + insert_bits(0u, i, 4, 2) * "
                                     "10;",
                                     (INDEX * 5 >> 1 & 7) + (INDEX & 3) * 160),
    "mulhi, mul24": Row("r = float(mulhi(i << 30, 8u)) + mul24(int(i), "
                        "-3);", (INDEX << 30) % 2**32 * 8 // 2**32
                        - 3 * INDEX),
    "mad24, madhi, madsat": Row(
        "r = mad24(int(i), 2, 3) + madhi(1u << 31, 4u, i) + madsat(uchar(100), uchar(i), "
        "uchar(9));",
        2 * INDEX + 3 + 2 + INDEX + np.minimum(100 * INDEX + 9, 255)),
    "hadd, rhadd": Row("r = hadd(i, 4u) + rhadd(i, 4u) * "
                       "10;", (INDEX + 4) // 2 + (INDEX + 5) // 2 * 10),
    "max3, min3, median3": Row("r = max3(int(i), 2, 4) + min3(int(i), 2, 4) * 10 + median3(i, "
                               "2u, 4u) * 100;",
                               np.maximum(INDEX, 4) + np.minimum(INDEX, 2) * 10
                               + np.clip(INDEX, 2, 4) * 100),
    "bools and enumerators among integers": Row(
        "int n = 9; r = x[min(B, int(i))] + min(B, n) / 2 + max(B, 1) / 2 * 10 + abs(B) / 2 * 100\n"
        " + clamp(n, 0, B) / 2 * 1000 + max(i > 3, 1) + min(true, n) + median3(B, n, 2) / 2;",
        X + 3 + 30 + 300 + 3000 + 1 + 1 + 3, header="enum { B = 7 };", on_cuda=False),
    "of vectors": Row("uint3 v = popcount(uint3(i, 7, 255)); int2 w = clamp(int2(i), 2, 4);\n"
                      "r = v.x + v.y + v.z + w.y * 100;",
                      np.array([bin(k).count("1") for k in range(8)]) + 11
                      + np.clip(INDEX, 2, 4) * 100),
}  # fmt: skip
