"""Attention of few queries over many keys: decoding, paged and quantised caches.

    out = softmax(scale · q kᵀ) v

as `scaled_dot_product_attention`, with q (B, H, L, D) of few queries. The keys are split in spans
that are worked on at once and then combined; see `decode_kernels.py`.

Bytes: K and V once per group of heads that share them, where they lie: a slice of a larger cache, a
pool of blocks, or 4 or 8 bits a value, which are expanded in registers.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..arguments import INDICES, Argument
from ..registry import Case, Op, register
from ..remembered import Remembered, Way
from ..transforms import Arrays
from .attention import check_heads, check_options
from .decode_cache import NAMES, PLAIN, Cache
from .decode_launch import (
    OPTIONS,
    PAPER,
    SHAPELESS,
    SINKS,
    attending,
    check_indices,
    decode_scores,
    draw_lengths,
    numbers_of,
    same_dtype,
    weighted,
)


def decode_attention_reference(
    q: mx.array, k: mx.array, v: mx.array, lengths: mx.array | None = None,
    sinks: mx.array | None = None, *, scale: float | None = None, causal: bool = False,
    window: int | None = None, softcap: float | None = None, xp: Any = mx,
) -> Any:  # fmt: skip
    """decode_attention in plain MLX."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if lengths is not None:  # what lies past the last key has no part in it, not even as NaN
        v = xp.where(xp.arange(v.shape[2])[:, None] < lengths[:, None, None, None], v, 0.0)
    return weighted(decode_scores(q, k, lengths, scale, causal, window, softcap, xp), v, sinks, xp)


def _decode(
    q: mx.array, k: mx.array, v: mx.array, lengths: mx.array | None, sinks: mx.array | None,
    scale: float | None, causal: bool, window: int | None, softcap: float | None,
) -> Way:  # fmt: skip
    op = NAMES[PLAIN]
    check_heads(op, q, k, v)
    same_dtype(op, q, k=k, v=v)
    window = check_options(op, q, scale, causal, window, softcap, sinks)
    flags: dict[str, Any] = {"causal": causal, "lengths": lengths is not None}
    factor, after = numbers_of(flags, scale, q.shape[-1], window, softcap)
    arrays: Arrays = (q, k, v)
    if lengths is not None:
        check_indices(op, "lengths", lengths, (q.shape[0],))
        arrays = (*arrays, lengths)
    run = attending(Cache(PLAIN, **flags), arrays, v.shape[-1], sinks is not None)
    if lengths is None:
        return lambda q, k, v, lengths, sinks: run((q, k, v, factor, *after), sinks)
    return lambda q, k, v, lengths, sinks: run((q, k, v, factor, lengths, *after), sinks)


_DECODE = Remembered(_decode)


def decode_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    lengths: mx.array | None = None,
    sinks: mx.array | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> mx.array:
    """`scaled_dot_product_attention` for few queries over many keys.

    Args:
        q: (B, H, L, D) in float32, float16 or bfloat16, the last L positions. D and V are at most
            8192.
        k, v: (B, K, S, D) and (B, K, S, V) of the same dtype; K divides H. They are read where they
            lie, so that slices of a cache are not copied.
        lengths: (B,) integers in [0, S], the keys that each batch has. Default: S.
        sinks, scale, causal, window, softcap: as in `scaled_dot_product_attention`; the last query
            is at the last of a batch's keys.

    Returns:
        (B, H, L, V) in q's dtype. A batch without a key is NaN, or 0 with sinks. A length that is
        out of range makes its batch NaN; on the CPU the evaluation raises. Gradients are those of
        plain MLX.

    Flash decoding (Dao, Haziza, Massa, Sizov 2023, pytorch.org/blog/flash-decoding).
    """
    return _DECODE((q, k, v, lengths, sinks), (scale, causal, window, softcap))  # type: ignore[no-any-return]


def _case(b: int, h: int, k: int, queries: int, keys: int, d: int, v: int, why: str = "",
          optional: bool = True, **options: Any) -> Case:  # fmt: skip
    sizes = {"H": h, "K": k, "L": queries, "S": keys, "D": d, "V": v}
    return Case((b,), sizes, why, options, optional)


register(
    Op(
        name="decode_attention",
        family="attention",
        summary="attention of few queries over many keys",
        formula="softmax(scale · q kᵀ) v over the first keys of each batch",
        function=decode_attention,
        reference=decode_attention_reference,
        arguments=(
            Argument("q", "(*, H, L, D)", differentiable=False),
            Argument("k", "(*, K, S, D)", differentiable=False),
            Argument("v", "(*, K, S, V)", differentiable=False),
            Argument("lengths", "(*)", INDICES, False, True, "in [0, S]"),
            SINKS,
        ),
        options=OPTIONS,
        outputs=("(*, H, L, V)",),
        paper=PAPER,
        samples={"lengths": draw_lengths},
        cases=(
            _case(1, 1, 1, 1, 1, 1, 1, "one of everything"),
            _case(2, 4, 2, 2, 9, 8, 8, "two heads share keys"),
            _case(1, 2, 1, 1, 70, 40, 24, "one past a tile of keys"),
            _case(1, 12, 1, 1, 33, 33, 65, "more rows than a group has"),
            _case(2, 2, 2, 3, 300, 64, 64, "several spans on a GPU, causal", causal=True),
            _case(3, 2, 1, 1, 20, 16, 16, "every batch whole", False),
            _case(0, 2, 1, 1, 9, 8, 8, "no rows"),
        ),
        long_cases=(_case(1, 2, 1, 1, 2100, 64, 64, "several spans"),),
        benchmarks=(
            _case(1, 32, 8, 1, 16384, 128, 128, "", False),
            _case(1, 8, 8, 1, 16384, 64, 64, "", False),
        ),
        refuses=SHAPELESS,
    )
)
