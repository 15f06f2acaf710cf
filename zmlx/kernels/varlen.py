"""Attention over sequences that lie one after another.

    out[i] = softmax(scale · q[i] kᵀ) v over the keys of i's own sequence

q is (H, T, D) with the sequences cu_seqlens[s] … cu_seqlens[s + 1] of T, and so are k and v. The
kernels are those of `scaled_dot_product_attention`; a query's range of keys, which also says what
causal and window leave, is computed on the device. A tile takes the sequences in it one after the
other, each over the keys between the first and the last range of its own queries.

Bytes: as `scaled_dot_product_attention`, and 28 bytes per position.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np

from .. import launch
from ..arguments import INDICES, Argument, check_array, check_flag
from ..body import BodyKernel, Plan, constant
from ..metal import KernelSpec, scalar
from ..msl import header_for
from ..registry import Case, Op, Option, register
from ..remembered import Remembered, Way
from ..targets import cpu
from ..transforms import Arrays, refuses_any_shape
from .attention import check_options
from .attention_launch import attending
from .attention_plain import DROPPED, product, softmax_of
from .attention_text import Form

_OP = "varlen_attention"

#: Of each query: its keys from and to, and 1 where none is left, which makes them all of its
#: sequence's, or 2 where the sequences are none, which makes all scores NaN; and the end of its
#: sequence. Of each key: the queries that may have it, and the end of its sequence.
_SPANS = """\
const int i = int(thread_position_in_grid.x);
const int sequences = int(sizes[0]);
const int queries = int(sizes[1]);
const int keys = int(sizes[2]);
const bool causal = int(rule[0]) != 0;
const int window = int(rule[1]);
int64_t wrong_q = int64_t(cu_seqlens_q[0]), wrong_k = int64_t(cu_seqlens_k[0]);
bool good_q = wrong_q == 0, good_k = wrong_k == 0;
int q0 = 0, q1 = 0, k0 = 0, k1 = 0;
for (int s = 0; s < sequences && good_q && good_k; ++s) {
    const int64_t a = int64_t(cu_seqlens_q[s]), b = int64_t(cu_seqlens_q[s + 1]);
    const int64_t c = int64_t(cu_seqlens_k[s]), d = int64_t(cu_seqlens_k[s + 1]);
    if (b < a || b > queries || (s + 1 == sequences && b != queries)) {
        wrong_q = b;
        good_q = false;
    } else if (d < c || d > keys || (s + 1 == sequences && d != keys)) {
        wrong_k = d;
        good_k = false;
    } else if (i < queries ? i >= a && i < b : i - queries >= c && i - queries < d) {
        q0 = int(a);
        q1 = int(b);
        k0 = int(c);
        k1 = int(d);
    }
}
const bool good = good_q && good_k;
if (!good_q && i == 0) {
    ZMLX_FAIL("cu_seqlens_q", wrong_q);
} else if (!good_k && i == 0) {
    ZMLX_FAIL("cu_seqlens_k", wrong_k);
}
const int offset = (k1 - k0) - (q1 - q0);
if (i < queries) {
    const int position = i - q0 + offset;
    int low = k0, high = k1;
    if (window > 0) {
        low = max(low, k0 + position - window + 1);
        high = min(high, k0 + position + window);
    }
    if (causal) {
        high = min(high, k0 + position + 1);
    }
    const bool none = high <= low;
    spans[4 * i] = good ? (none ? k0 : low) : 0;
    spans[4 * i + 1] = good ? (none ? k1 : high) : keys;
    spans[4 * i + 2] = good ? (none ? 1 : 0) : 2;
    spans[4 * i + 3] = good ? q1 : queries;
} else if (i < queries + keys) {
    const int own = i - queries, local = own - k0;
    int low = q0, high = q1;
    // Queries before the first key may be left without any, and then have all.
    if (offset >= 0 && causal) {
        low = max(low, q0 + local - offset);
    }
    if (offset >= 0 && window > 0) {
        low = max(low, q0 + local - offset - window + 1);
        high = min(high, q0 + local - offset + window);
    }
    key_spans[3 * own] = good ? low : 0;
    key_spans[3 * own + 1] = good ? max(low, high) : queries;
    key_spans[3 * own + 2] = good ? k1 : keys;
}
"""


def _plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
    q, k, cu_q = inputs[:3]
    queries, keys = q.shape[1], k.shape[1]
    group = 1 if launch.is_cpu(chosen) else 256
    return Plan(
        (),
        launch.Geometry((), (queries + keys, 1, 1), (group, 1, 1)),
        ((queries, 4), (keys, 3)),
        (mx.int32, mx.int32),
        (constant((cu_q.shape[0] - 1, queries, keys), mx.int32),),
    )


def _ranges(
    cu_q: Any, cu_k: Any, queries: int, keys: int, causal: Any, window: Any, xp: Any
) -> tuple[Any, Any, Any, Any]:
    """Of each query: begin and end of its sequence's keys, and the range that is left."""
    cu_q, cu_k = xp.stop_gradient(cu_q), xp.stop_gradient(cu_k)
    i = xp.arange(queries)
    s = (i[:, None] >= cu_q[None, 1:]).sum(axis=1)
    q0, q1, k0, k1 = cu_q[s], cu_q[s + 1], cu_k[s], cu_k[s + 1]
    position = i - q0 + (k1 - k0) - (q1 - q0)
    low, high = k0, k1
    if window is not None:
        low = xp.maximum(low, k0 + position - window + 1)
        high = xp.minimum(high, k0 + position + window)
    if causal:
        high = xp.minimum(high, k0 + position + 1)
    return k0, k1, low, high


def _spans_in_mlx(*inputs: mx.array) -> Arrays:
    q, k, cu_q, cu_k, rule = inputs
    queries, keys = q.shape[1], k.shape[1]
    cu_q, cu_k = (mx.stop_gradient(x).astype(mx.int64) for x in (cu_q, cu_k))
    bad = mx.array(False)
    for cu, most in ((cu_q, queries), (cu_k, keys)):
        for wrong in (cu[0] != 0, cu[-1] != most, (cu[1:] < cu[:-1]).any()):
            bad = mx.logical_or(bad, wrong)
    cu_q, cu_k = cu_q.astype(mx.int32), cu_k.astype(mx.int32)
    causal, window = rule[0] != 0, mx.where(rule[1] > 0, rule[1], 2**30)
    k0, k1, low, high = _ranges(cu_q, cu_k, queries, keys, False, window, mx)
    i = mx.arange(queries)
    s = (i[:, None] >= cu_q[None, 1:]).sum(axis=1)
    last = i - cu_q[s] + k1 - (cu_q[s + 1] - cu_q[s]) + 1
    high = mx.where(causal, mx.minimum(high, last), high)
    none = high <= low
    spans = mx.stack([mx.where(none, k0, low), mx.where(none, k1, high), none, cu_q[s + 1]], axis=1)
    spans = mx.where(bad, mx.array([0, keys, 2, queries]), spans)
    # All queries of the sequence: only the kernel's own walk is shorter for knowing better.
    t = (mx.arange(keys)[:, None] >= cu_k[None, 1:]).sum(axis=1)
    key_spans = mx.stack([cu_q[t], cu_q[t + 1], cu_k[t + 1]], axis=1)
    key_spans = mx.where(bad, mx.array([0, queries, keys]), key_spans)
    return spans.astype(mx.int32), key_spans.astype(mx.int32)


def _values(*inputs: mx.array) -> None:
    for name, cu, x in (("q", inputs[2], inputs[0]), ("k", inputs[3], inputs[1])):
        values = np.array(cu).astype(np.int64)
        ends = [0, *values[1:-1].tolist(), x.shape[1]]
        bad = [int(v) for v, e in zip(values[[0, -1]], (0, x.shape[1]), strict=True) if v != e]
        bad += [int(b) for a, b in pairwise(ends) if b < a]
        if bad:
            raise ValueError(f"[{_OP}] 'cu_seqlens_{name}' must be in range but got {bad[0]}.")


_spans = BodyKernel(
    KernelSpec(
        f"{_OP}__spans",
        ("q", "k", "cu_seqlens_q", "cu_seqlens_k", "rule", "sizes"),
        ("spans", "key_spans"),
        _SPANS,
        header_for("ZMLX_FAIL"),
    ),
    _plan,
    _spans_in_mlx,
    dynamic=refuses_any_shape(_OP),
    values=_values,
)


def _within(p: Any, v: Any, k0: Any, k1: Any, xp: Any) -> Any:
    """p @ v, in which what is not finite in a sequence reaches its own queries alone."""
    out = product(p, xp.where(xp.abs(v) < np.inf, v, 0.0), xp)
    for odd, found in ((np.inf, v == np.inf), (-np.inf, v == -np.inf), (np.nan, v != v)):
        count = xp.cumsum(xp.where(found, 1.0, 0.0), axis=2)
        count = xp.concatenate([xp.zeros_like(count[:, :, :1]), count], axis=2)
        reached = count[:, :, k1] > count[:, :, k0]
        reached = xp.repeat(reached, p.shape[1] // max(1, v.shape[1]), axis=1)
        out = xp.where(reached, out + odd, out)
    return out


def varlen_attention_reference(
    q: mx.array, k: mx.array, v: mx.array, cu_seqlens_q: mx.array, cu_seqlens_k: mx.array,
    sinks: mx.array | None = None, *, scale: float | None = None, causal: bool = False,
    window: int | None = None, softcap: float | None = None, return_lse: bool = False,
    xp: Any = mx,
) -> Any:  # fmt: skip
    """varlen_attention in plain MLX."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    queries, keys = q.shape[1], k.shape[1]
    k0, k1, low, high = (
        x[:, None] for x in _ranges(cu_seqlens_q, cu_seqlens_k, queries, keys, causal, window, xp)
    )
    z = product(scale * q[None], xp.swapaxes(k, -1, -2)[None], xp)
    if softcap is not None:
        z = softcap * xp.tanh(z / softcap)
    key = xp.arange(keys)
    z = xp.where(xp.logical_and(key >= low, key < high), z, DROPPED)
    z = xp.where(xp.logical_and(key >= k0, key < k1), z, -xp.inf)
    e, peak, total = softmax_of(z, sinks, xp)
    out = _within(e / total, v[None], k0[:, 0], k1[:, 0], xp)[0]
    return (out, (peak + xp.log(total))[0, ..., 0]) if return_lse else out


def _varlen(
    q: mx.array, k: mx.array, v: mx.array, cu_seqlens_q: mx.array, cu_seqlens_k: mx.array,
    sinks: mx.array | None, scale: float | None, causal: bool, window: int | None,
    softcap: float | None, return_lse: bool,
) -> Way:  # fmt: skip
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_array(_OP, name, x)
        if x.ndim != 3:
            raise ValueError(f"[{_OP}] '{name}' must have 3 axes but got {tuple(x.shape)}.")
    heads, _, d = q.shape
    kv, keys, width = k.shape
    if width != d:
        raise ValueError(f"[{_OP}] 'k' must have shape (K, S, {d}) but got {tuple(k.shape)}.")
    if (kv == 0 and heads) or (kv and heads % kv):
        raise ValueError(
            f"[{_OP}] 'k' must have a number of heads that divides the {heads} of 'q' but got {kv}."
        )
    if tuple(v.shape[:2]) != (kv, keys):
        raise ValueError(f"[{_OP}] 'v' must have shape ({kv}, {keys}, V) but got {tuple(v.shape)}.")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_array(_OP, name, cu, INDICES)
        if cu.ndim != 1 or cu.shape[0] < 2:
            raise ValueError(
                f"[{_OP}] '{name}' must have shape (sequences + 1,) but got {tuple(cu.shape)}."
            )
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"[{_OP}] 'cu_seqlens_k' must have shape {tuple(cu_seqlens_q.shape)} but got "
            f"{tuple(cu_seqlens_k.shape)}."
        )
    window = check_options(_OP, q, scale, causal, window, softcap, sinks)
    check_flag(_OP, "return_lse", return_lse)
    dtype = None if q.dtype == k.dtype == v.dtype else mx.result_type(q, k, v)
    rule = constant((int(causal), 0 if window is None else window), mx.int32)
    factor = scalar(float(d**-0.5 if scale is None else scale))
    cap = () if softcap is None else (scalar(float(softcap)),)
    arrays: Arrays = (q if dtype is None else q.astype(dtype), k, v, cu_seqlens_q, cu_seqlens_k)
    if sinks is not None:
        arrays = (*arrays, sinks)
    is_traced = cpu.maybe_tracing(arrays)
    form = Form(softcap=softcap is not None, sinks=sinks is not None, spans=True)
    run = attending(form, arrays, return_lse)

    def way(
        q: mx.array, k: mx.array, v: mx.array, cu_q: mx.array, cu_k: mx.array,
        sinks: mx.array | None,
    ) -> Any:  # fmt: skip
        if dtype is not None:
            q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
        # Shapes alone matter of q and k here; a gradient has no business with integers.
        some = (mx.stop_gradient(q), mx.stop_gradient(k)) if is_traced else (q, k)
        spans = _spans(*some, cu_q, cu_k, rule)
        before = () if sinks is None else (sinks,)
        result = run(q[None], k[None], v[None], factor, *before, *cap, *spans)
        # Not x[0]: MLX's gradient of that divides by 0 under a vmap over nothing.
        return tuple(x.squeeze(0) for x in result) if return_lse else result.squeeze(0)

    return way


_VARLEN = Remembered(_varlen)


def varlen_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    cu_seqlens_q: mx.array,
    cu_seqlens_k: mx.array,
    sinks: mx.array | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """`scaled_dot_product_attention` of each of several sequences that lie one after another.

    Args:
        q: (H, T, D) in float32, float16 or bfloat16; sequence s has the rows cu_seqlens_q[s] to
            cu_seqlens_q[s + 1].
        k, v: (K, S, D) and (K, S, V); K divides H.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) integers from 0, not decreasing, to T and S.
        sinks, scale, causal, window, softcap, return_lse: as in `scaled_dot_product_attention`, of
            each sequence by itself.

    Returns:
        (H, T, V) in the dtype that q, k and v promote to, or (out, lse) with lse (H, T). The
        queries of a sequence without keys are NaN, or 0 with sinks. `cu_seqlens` that are no such
        thing make everything NaN; on the CPU the evaluation raises. Gradients for
        q, k, v and sinks.

    As flash-attention's variable-length interface (Dao et al. 2022, arXiv:2205.14135).
    """
    arrays = (q, k, v, cu_seqlens_q, cu_seqlens_k, sinks)
    return _VARLEN(arrays, (scale, causal, window, softcap, return_lse))


def _cuts(size: str) -> Any:
    """Draws the ends of sequences; none is without keys, which would make NaN of its queries and,
    in the oracle's gradient, of all values."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...], sizes: Any) -> Any:
        most, count = sizes[size], shape[0] - 2
        if size == "S":
            inner: Any = rng.choice(np.arange(1, most), count, replace=False) if count else []
        else:
            inner = rng.integers(0, most + 1, count)
        return np.array([0, *np.sort(inner), most], dtype=np.int32)

    return draw


def _case(heads: int, queries: int, keys: int, d: int, v: int, cuts: int, why: str = "",
          optional: bool = True, **options: Any) -> Case:  # fmt: skip
    sizes = {"T": queries, "S": keys, "D": d, "V": v, "C": cuts}
    return Case((heads,), sizes, why, options, optional)


register(
    Op(
        name=_OP,
        family="attention",
        summary="attention of sequences that lie one after another",
        formula="softmax(scale · q kᵀ + mask) v within each sequence",
        function=varlen_attention,
        reference=varlen_attention_reference,
        arguments=(
            Argument("q", "(*, T, D)"),
            Argument("k", "(*, S, D)"),
            Argument("v", "(*, S, V)"),
            Argument("cu_seqlens_q", "(C,)", INDICES, False, False, "not decreasing, 0 to T"),
            Argument("cu_seqlens_k", "(C,)", INDICES, False, False, "not decreasing, 0 to S"),
            Argument("sinks", "(*)", optional=True),
        ),
        options=(
            Option("scale", None, (0.3,)),
            Option("causal", False, (True,), passed="text"),
            Option("window", None, (3,)),
            Option("softcap", None, (2.0,)),
            Option("return_lse", False, (True,), passed="text"),
        ),
        outputs=("(*, T, V)",),
        paper="https://arxiv.org/abs/2205.14135",
        reads_backward=("q", "k", "v", "output"),
        samples={"cu_seqlens_q": _cuts("T"), "cu_seqlens_k": _cuts("S")},
        cases=(
            _case(1, 1, 1, 1, 1, 2, "one of everything"),
            _case(2, 9, 7, 8, 8, 3, "two sequences"),
            _case(3, 33, 31, 40, 24, 4, "one past a tile of lanes"),
            _case(2, 130, 140, 16, 16, 9, "several tiles, causal", causal=True),
            _case(3, 66, 65, 12, 20, 6, "window", window=9),
            _case(2, 70, 66, 8, 8, 5, "several options", causal=True, window=7, softcap=3.0),
            _case(2, 40, 40, 80, 72, 2, "one sequence", False, causal=True),
            _case(0, 9, 7, 8, 8, 3, "no rows"),
        ),
        long_cases=(_case(2, 333, 300, 64, 32, 4, "several tiles, causal", causal=True),),
        benchmarks=(_case(8, 4096, 4096, 64, 64, 9, "", False, causal=True),),
        refuses={"shapeless compile": "compile with shapes"},
    )
)
