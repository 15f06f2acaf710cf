"""Attention without an array of scores.

    out = softmax(scale · q kᵀ + mask) v

q is (B, H, L, D), k is (B, K, S, D), v is (B, K, S, V), where H is a multiple of K: query head h
reads head h div (H / K) of k and v. With a softcap c the scores are c · tanh(scale · q kᵀ / c)
before the mask. A sink is a score per head that takes part in the softmax and has no value.

Bytes: the forward reads q, k and v once per tile of 64 (CPU) or 32 (GPU) queries and writes out and
8 bytes per query; the backward reads q, k, v, out, dout and writes dq, dk, dv, with dq in float32
before its dtype. Nothing has the size of the scores but a mask that is given, and its gradient.
See `attention_kernels.py` for the method. Few queries over more keys, which is decoding, take the
forward of `decode_attention` (`decode_kernels.py`): its bytes are k and v, once per group of heads.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..arguments import (
    BOOLEAN,
    FLOATING,
    Argument,
    check_array,
    check_finite,
    check_flag,
    check_integer,
    check_positive,
)
from ..metal import scalar
from ..registry import Case, Op, Option, register
from ..remembered import Remembered, Way
from ..transforms import Arrays
from .attention_launch import attending
from .attention_plain import scaled_dot_product_attention_reference
from .attention_text import ADDED, KEEPS, NO_MASK, Form

_OP = "scaled_dot_product_attention"

_Q = Argument("q", "(*, H, L, D)")
_K = Argument("k", "(*, K, S, D)")
_V = Argument("v", "(*, K, S, V)")
_MASK = Argument("mask", "(*, H, L, S)", FLOATING + BOOLEAN, optional=True)
_SINKS = Argument("sinks", "(H,)", optional=True)


def check_heads(op: str, q: mx.array, k: mx.array, v: mx.array) -> None:
    """Raises unless q (B, H, L, D), k (B, K, S, D) and v (B, K, S, V) go together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_array(op, name, x)
        if x.ndim != 4:
            raise ValueError(f"[{op}] '{name}' must have 4 axes but got {tuple(x.shape)}.")
    b, h, _, d = q.shape
    batches, kv, s, width = k.shape
    if batches != b or width != d:
        raise ValueError(f"[{op}] 'k' must have shape ({b}, K, S, {d}) but got {tuple(k.shape)}.")
    if (kv == 0 and h) or (kv and h % kv):
        raise ValueError(
            f"[{op}] 'k' must have a number of heads that divides the {h} of 'q' but got {kv}."
        )
    if tuple(v.shape[:3]) != (b, kv, s):
        raise ValueError(
            f"[{op}] 'v' must have shape ({b}, {kv}, {s}, V) but got {tuple(v.shape)}."
        )


def check_options(
    op: str, q: mx.array, scale: Any, causal: Any, window: Any, softcap: Any, sinks: Any
) -> int | None:
    """The window as an int. Raises for options that are no such thing, and for queries
    (…, H, L, D) without a D."""
    heads, _, d = q.shape[-3:]
    if d == 0:
        raise ValueError(
            f"[{op}] 'q' must have a last axis of at least 1 but got {tuple(q.shape)}."
        )
    if scale is not None:
        check_finite(op, "scale", scale)
    check_flag(op, "causal", causal)
    size = None if window is None else check_integer(op, "window", window)
    if size is not None and not 1 <= size < 2**30:
        raise ValueError(f"[{op}] 'window' must be in [1, 2^30) but got {size}.")
    if softcap is not None:
        check_positive(op, "softcap", softcap)
    if sinks is not None:
        check_array(op, "sinks", sinks)
        if tuple(sinks.shape) != (heads,):
            raise ValueError(
                f"[{op}] 'sinks' must have shape ({heads},) but got {tuple(sinks.shape)}."
            )
    return size


def _check_mask(q: mx.array, k: mx.array, mask: mx.array) -> None:
    check_array(_OP, "mask", mask, FLOATING + BOOLEAN)
    full = (*q.shape[:3], k.shape[2])
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(shape) > 4 or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise ValueError(f"[{_OP}] 'mask' must broadcast to {full} but got {tuple(mask.shape)}.")


def _attention(
    q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, sinks: mx.array | None,
    scale: float | None, causal: bool, window: int | None, softcap: float | None, return_lse: bool,
) -> Way:  # fmt: skip
    check_heads(_OP, q, k, v)
    window = check_options(_OP, q, scale, causal, window, softcap, sinks)
    check_flag(_OP, "return_lse", return_lse)
    kind = NO_MASK
    missing: tuple[int, ...] = ()
    if mask is not None:
        _check_mask(q, k, mask)
        kind = KEEPS if mask.dtype == mx.bool_ else ADDED
        missing = tuple(range(4 - mask.ndim))
    factor = scalar(float(q.shape[-1] ** -0.5 if scale is None else scale))
    after: Arrays = () if window is None else (scalar(window),)
    if softcap is not None:
        after = (*after, scalar(float(softcap)))
    dtype = None if q.dtype == k.dtype == v.dtype else mx.result_type(q, k, v)
    form = Form(kind, causal, window is not None, softcap is not None, sinks is not None)
    given = tuple([x for x in (mask, sinks) if x is not None])
    run = attending(form, (q if dtype is None else q.astype(dtype), k, v, *given), return_lse)
    if dtype is None and mask is None and sinks is None:
        return lambda q, k, v, mask, sinks: run(q, k, v, factor, *after)

    def inputs_of(
        q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None, sinks: mx.array | None
    ) -> Arrays:
        if dtype is not None:
            q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
        given: Arrays = ()
        if mask is not None:
            given = (mx.expand_dims(mask, missing) if missing else mask,)
        if sinks is not None:
            given = (*given, sinks)
        return (q, k, v, factor, *given, *after)

    return lambda *arrays: run(*inputs_of(*arrays))


_ATTENTION = Remembered(_attention)


def scaled_dot_product_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(scale · q kᵀ + mask) v in memory linear in the lengths, forward and backward.

    Args:
        q: (B, H, L, D) in float32, float16 or bfloat16; computed in float32.
        k: (B, K, S, D); K divides H, and query head h reads head h div (H / K).
        v: (B, K, S, V); D and V, rounded up to multiples of 8, make at most 2048, 1024 on a GPU.
            Up to 16 queries over more keys, 8 on a GPU, read k, v and the mask where they lie;
            then D and V are each at most 8192, and what is beyond the tiles has MLX's gradients.
        mask: broadcasts to (B, H, L, S): bool (True keeps the score) or floating (added).
        sinks: (H,), a score per head that takes part in the softmax without a value.
        scale: a number. Default: 1 / sqrt(D).
        causal: query i keeps key j only if j ≤ i + S - L, as in MLX.
        window: query i keeps key j only if |i + S - L - j| < window; with `causal` these are the
            last `window` keys.
        softcap: c > 0 makes the scores c · tanh(scores / c), before the mask.
        return_lse: also the logarithm of the sum of the exponentials of the scores, the sink's
            among them, as float32 (B, H, L): -inf where there are no keys, or all scores are
            -inf; about -3.4e38 where `causal`, `window` or a bool mask leave a query none.

    Returns:
        (B, H, L, V) in the dtype that q, k and v promote to, or (out, lse). A query without a key
        within `causal` and `window`, or all of whose keys there a bool mask drops, attends to them
        all alike, as in MLX, or with a sink to nothing; one whose keys all have a mask of -inf is
        NaN. Where S is 0 that is so of all, or all is 0 with sinks. Scores that a condition drops
        have the gradient 0. Gradients for q, k, v, an added mask and sinks; lse may be
        differentiated too.

    Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691. Sinks: Xiao et al. 2023,
    arXiv:2309.17453, learned as in gpt-oss.
    """
    return _ATTENTION((q, k, v, mask, sinks), (scale, causal, window, softcap, return_lse))


def _baseline(
    q: mx.array, k: mx.array, v: mx.array, mask: mx.array | None = None,
    sinks: mx.array | None = None, *, scale: float | None = None, causal: bool = False,
    **options: Any,
) -> mx.array:  # fmt: skip
    if any(value for value in options.values()):
        raise ValueError("mx.fast.scaled_dot_product_attention has no such option")
    return mx.fast.scaled_dot_product_attention(
        q, k, v, scale=q.shape[-1] ** -0.5 if scale is None else scale,
        mask="causal" if causal else mask, sinks=sinks,
    )  # fmt: skip


def _case(b: int, h: int, k: int, queries: int, keys: int, d: int, v: int, why: str = "",
          optional: bool = True, keeps: bool = False, **options: Any) -> Case:  # fmt: skip
    sizes = {"H": h, "K": k, "L": queries, "S": keys, "D": d, "V": v}
    return Case((b,), sizes, why, options, optional, {"mask": mx.bool_} if keeps else {})


register(
    Op(
        name=_OP,
        family="attention",
        summary="attention without an array of scores, forward and backward",
        formula="softmax(scale · q kᵀ + mask) v, with sinks in the sum of the softmax",
        function=scaled_dot_product_attention,
        reference=scaled_dot_product_attention_reference,
        arguments=(_Q, _K, _V, _MASK, _SINKS),
        options=(
            Option("scale", None, (0.3,)),
            Option("causal", False, (True,), passed="text"),
            Option("window", None, (1, 3)),
            Option("softcap", None, (2.0,)),
            Option("return_lse", False, (True,), passed="text"),
        ),
        outputs=("(*, H, L, V)",),
        baseline=_baseline,
        paper="https://arxiv.org/abs/2307.08691",
        reads_backward=("q", "k", "v", "output"),
        cases=(
            _case(1, 1, 1, 1, 1, 1, 1, "one of everything"),
            _case(2, 4, 2, 5, 9, 8, 8, "two heads share keys, more keys than queries"),
            _case(1, 4, 2, 33, 31, 8, 24, "one past a tile of lanes, V larger than D"),
            _case(1, 2, 2, 13, 70, 16, 16, "causal, one past a tile of rows", causal=True),
            _case(1, 3, 1, 66, 65, 12, 20, "window, three heads share keys", window=9),
            _case(2, 2, 1, 9, 4, 6, 3, "causal, queries without a key", False, causal=True),
            _case(
                1,
                2,
                2,
                40,
                40,
                80,
                72,
                "several options",
                keeps=True,
                causal=True,
                window=17,
                softcap=3.0,
            ),
            _case(2, 8, 4, 35, 37, 16, 8, "bool mask", keeps=True),
            _case(0, 2, 1, 5, 9, 8, 8, "no rows"),
        ),
        long_cases=(
            _case(1, 2, 1, 200, 333, 64, 128, "several tiles", False),
            _case(1, 2, 1, 333, 333, 128, 64, "several tiles, causal", causal=True),
        ),
        benchmarks=(
            _case(1, 8, 8, 2048, 2048, 64, 64, "", False),
            _case(1, 8, 8, 2048, 2048, 64, 64, "", False, causal=True),
            _case(1, 16, 4, 1024, 1024, 128, 128, "", False, causal=True),
        ),
        flops="2 * rows * H * (L * (S - L) + L * (L + 1) // 2 if causal else L * S) * (D + V)",
        torch="F.scaled_dot_product_attention("
        "q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True)",
    )
)
