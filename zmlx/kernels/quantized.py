"""Attention over keys and values that `mx.quantize` packed, expanded in registers.

    out = decode_attention(q, dequantize(k), dequantize(v))

Bytes: K and V in 4 or 8 bits a value, with a scale and a bias per group, once per group of heads
that share them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ..arguments import INDICES, Argument, check_array, check_integer
from ..registry import Case, Op, Option, register
from ..remembered import Remembered, Way
from ..targets import cpu
from ..transforms import Arrays
from .attention import check_options
from .decode import decode_attention_reference
from .decode_cache import NAMES, QUANTIZED, Cache
from .decode_launch import (
    OPTIONS,
    PAPER,
    SHAPELESS,
    SINKS,
    attending,
    check_indices,
    draw_lengths,
    numbers_of,
    unpacked,
)


def quantized_attention_reference(
    q: mx.array, k: mx.array, k_scales: mx.array, k_biases: mx.array, v: mx.array,
    v_scales: mx.array, v_biases: mx.array, lengths: mx.array | None = None,
    sinks: mx.array | None = None, *, bits: int = 8, scale: float | None = None,
    causal: bool = False, window: int | None = None, softcap: float | None = None, xp: Any = mx,
) -> Any:  # fmt: skip
    """quantized_attention in plain MLX."""
    return decode_attention_reference(
        q, unpacked(k, k_scales, k_biases, bits, xp), unpacked(v, v_scales, v_biases, bits, xp),
        lengths, sinks, scale=scale, causal=causal, window=window, softcap=softcap, xp=xp,
    )  # fmt: skip


def _bytes(words: mx.array) -> mx.array:
    return words.view(mx.uint8)


def _traced_bytes(words: mx.array) -> mx.array:
    # MLX's view has no gradient, not even the zeros of an integer.
    return mx.stop_gradient(words).view(mx.uint8)


def _quantized(
    q: mx.array, k: mx.array, k_scales: mx.array, k_biases: mx.array, v: mx.array,
    v_scales: mx.array, v_biases: mx.array, lengths: mx.array | None, sinks: mx.array | None,
    bits: int, scale: float | None, causal: bool, window: int | None, softcap: float | None,
) -> Way:  # fmt: skip
    op = NAMES[QUANTIZED]
    check_array(op, "q", q)
    if q.ndim != 4:
        raise ValueError(f"[{op}] 'q' must have 4 axes but got {tuple(q.shape)}.")
    bits = check_integer(op, "bits", bits)
    if bits not in (4, 8):
        raise ValueError(f"[{op}] 'bits' must be 4 or 8 but got {bits}.")
    b, h, _, d = q.shape
    if d % 32:  # a group of `mx.quantize` has no fewer values
        raise ValueError(
            f"[{op}] 'q' must have a last axis that is a multiple of 32 but got {tuple(q.shape)}."
        )
    groups = []
    for name, words, some in (
        ("k", k, (k_scales, k_biases)),
        ("v", v, (v_scales, v_biases)),
    ):
        check_array(op, name, words, (mx.uint32,))
        kv, s = k.shape[1:3] if k.ndim == 4 else (0, 0)
        wide = d * bits // 32 if name == "k" else words.shape[-1] if words.ndim else 0
        if words.ndim != 4 or tuple(words.shape) != (b, kv, s, wide) or not kv or h % kv:
            raise ValueError(
                f"[{op}] '{name}' must have shape ({b}, K, S, {wide}) where K divides {h} but got "
                f"{tuple(words.shape)}."
            )
        values = words.shape[-1] * 32 // bits
        for part, x in zip(("scales", "biases"), some, strict=True):
            check_array(op, f"{name}_{part}", x)
            count = x.shape[-1] if x.ndim else 0
            if tuple(x.shape[:-1]) != (b, kv, s) or count == 0 or values % count:
                raise ValueError(
                    f"[{op}] '{name}_{part}' must have shape ({b}, {kv}, {s}, G) where G divides "
                    f"{values} but got {tuple(x.shape)}."
                )
            groups.append(values // count)
            if groups[-1] % 32:
                raise ValueError(
                    f"[{op}] '{name}_{part}' must have a multiple of 32 values in a group but got "
                    f"{groups[-1]}."
                )
    if len(set(groups)) != 1:
        raise ValueError(
            f"[{op}] 'v_scales' must have k's group size {groups[0]} but got {groups}."
        )
    window = check_options(op, q, scale, causal, window, softcap, sinks)
    flags: dict[str, Any] = {"causal": causal, "lengths": lengths is not None}
    factor, after = numbers_of(flags, scale, d, window, softcap)
    arrays: Arrays = (q, k, k_scales, k_biases, v, v_scales, v_biases)
    if lengths is not None:
        check_indices(op, "lengths", lengths, (b,))
        arrays = (*arrays, lengths)
    form = Cache(QUANTIZED, bits, **flags)
    run = attending(form, arrays, v.shape[-1] * 32 // bits, sinks is not None, bits, groups[0])
    as_bytes = _traced_bytes if cpu.maybe_tracing((k, v)) else _bytes

    def way(
        q: mx.array, k: mx.array, k_scales: mx.array, k_biases: mx.array, v: mx.array,
        v_scales: mx.array, v_biases: mx.array, lengths: mx.array | None, sinks: mx.array | None,
    ) -> Any:  # fmt: skip
        middle = () if lengths is None else (lengths,)
        cached = (as_bytes(k), k_scales, k_biases, as_bytes(v), v_scales, v_biases)
        return run((q, *cached, factor, *middle, *after), sinks)

    return way


_QUANTIZED = Remembered(_quantized)


def quantized_attention(
    q: mx.array,
    k: mx.array,
    k_scales: mx.array,
    k_biases: mx.array,
    v: mx.array,
    v_scales: mx.array,
    v_biases: mx.array,
    lengths: mx.array | None = None,
    sinks: mx.array | None = None,
    *,
    bits: int = 8,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> mx.array:
    """`decode_attention` over keys and values that `mx.quantize` packed, which are not expanded.

    Args:
        q: (B, H, L, D) in float32, float16 or bfloat16; D is a multiple of 32.
        k, k_scales, k_biases: `mx.quantize(keys, group_size, bits)` of keys (B, K, S, D).
        v, v_scales, v_biases: the same of values (B, K, S, V), with the same group size. D and V
            are at most 8192.
        bits: 4 or 8.
        lengths, sinks, scale, causal, window, softcap: as in `decode_attention`.

    Returns:
        (B, H, L, V) in q's dtype. Gradients are those of plain MLX, for q, scales, biases and
        sinks.
    """
    arrays = (q, k, k_scales, k_biases, v, v_scales, v_biases, lengths, sinks)
    return _QUANTIZED(arrays, (bits, scale, causal, window, softcap))  # type: ignore[no-any-return]


def _pack(bits: int, part: int) -> Any:
    """Draws what `mx.quantize` packs: words, scales or biases."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], sizes: Any) -> Any:
        if part == 0:
            return rng.integers(0, 2**32, shape, dtype=np.uint32)
        return rng.uniform(0.5, 1.5, shape) / 2**bits * (8 if part == 1 else -(2.0**bits) * 4)

    return draw


def _quantized_case(b: int, h: int, k: int, queries: int, keys: int, d: int, why: str = "",
                    optional: bool = True, bits: int = 8, **options: Any) -> Case:  # fmt: skip
    sizes = {"H": h, "K": k, "L": queries, "S": keys, "D": d, "W": d * bits // 32, "G": d // 32}
    return Case((b,), sizes, why, {"bits": bits, **options} if bits != 8 else options, optional)


register(
    Op(
        name="quantized_attention",
        family="attention",
        summary="attention over quantised keys and values",
        formula="decode_attention over what mx.quantize packed",
        function=quantized_attention,
        reference=quantized_attention_reference,
        arguments=(
            Argument("q", "(*, H, L, D)", differentiable=False),
            Argument("k", "(*, K, S, W)", (mx.uint32,), False),
            Argument("k_scales", "(*, K, S, G)", differentiable=False),
            Argument("k_biases", "(*, K, S, G)", differentiable=False),
            Argument("v", "(*, K, S, W)", (mx.uint32,), False),
            Argument("v_scales", "(*, K, S, G)", differentiable=False),
            Argument("v_biases", "(*, K, S, G)", differentiable=False),
            Argument("lengths", "(*)", INDICES, False, True, "in [0, S]"),
            SINKS,
        ),
        options=(Option("bits", 8), *OPTIONS),
        outputs=("(*, H, L, D)",),
        paper=PAPER,
        samples={
            "lengths": draw_lengths,
            **{n: _pack(8, 0) for n in ("k", "v")},
            **{
                f"{n}_{p}": _pack(8, i)
                for n in ("k", "v")
                for i, p in ((1, "scales"), (2, "biases"))
            },
        },
        cases=(
            _quantized_case(1, 1, 1, 1, 1, 32, "one key"),
            _quantized_case(2, 4, 2, 2, 11, 64, "two heads share keys"),
            _quantized_case(1, 2, 1, 1, 70, 64, "4 bits, one past a tile of keys", bits=4),
            _quantized_case(1, 12, 1, 1, 33, 128, "more rows than a group has"),
            _quantized_case(
                2, 2, 2, 3, 300, 64, "several spans on a GPU, causal", bits=4, causal=True
            ),
            _quantized_case(3, 2, 1, 1, 20, 32, "every batch whole", False),
            _quantized_case(0, 2, 1, 1, 9, 32, "no rows"),
        ),
        long_cases=(_quantized_case(1, 2, 1, 1, 2100, 64, "several spans"),),
        benchmarks=(
            _quantized_case(1, 32, 8, 1, 16384, 128, "", False),
            _quantized_case(1, 32, 8, 1, 16384, 128, "", False, bits=4),
            _quantized_case(1, 8, 8, 1, 16384, 64, "", False),
            _quantized_case(1, 8, 8, 1, 16384, 64, "", False, bits=4),
        ),
        refuses=SHAPELESS,
    )
)
