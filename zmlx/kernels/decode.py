"""Attention of few queries over many keys: decoding, paged and quantised caches.

    out = softmax(scale · q kᵀ) v

as `scaled_dot_product_attention`, with q (B, H, L, D) of few queries. The keys are split in spans
that are worked on at once and then combined; see `decode_kernels.py`.

Bytes: K and V once per group of heads that share them, where they lie: a slice of a larger cache, a
pool of blocks, or 4 or 8 bits a value, which are expanded in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from .. import launch
from ..arguments import FLOATING, INDICES, Argument, check_array, dtype_name
from ..body import BodyKernel, Plan, constant
from ..metal import scalar
from ..registry import Case, Op, Option, register
from ..transforms import Arrays
from .activations import exp
from .attention import DROPPED as _DROPPED
from .attention import check_heads, check_options, product, softmax_of
from .decode_kernels import NAMES, PAGED, PLAIN, QUANTIZED, Cache, combine, spans

#: Rows that a group works on at once, at most.
_MOST_ROWS = 8
#: Keys of a span and of a tile, on a CPU and on a GPU.
_CPU_SPAN, _GPU_SPAN = 1024, 256
_CPU_KEYS, _GPU_KEYS = 32, 8


def _rows(queries: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """Rows of a group, and how many groups share the keys of a head."""
    rows = max(1, queries * (heads // max(1, kv_heads)))
    chunks = -(-rows // _MOST_ROWS)
    return -(-rows // chunks), chunks


@cache
def _spans(form: Cache, bits: int, group_size: int) -> BodyKernel:
    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        named = dict(zip(form.inputs, inputs, strict=False))
        q, k, v = named["q"], named["k"], named["v"]
        b, h, queries, d = q.shape
        size = 0
        values = v.shape[-1] * 8 // bits if bits else v.shape[-1]
        if form.kind == PAGED:
            size, kv_heads = k.shape[1:3]
            keys = named["block_table"].shape[1] * size
        else:
            kv_heads, keys = k.shape[1:3]
        on_cpu = launch.is_cpu(chosen)
        rows, chunks = _rows(queries, h, kv_heads)
        span = _CPU_SPAN if on_cpu else _GPU_SPAN
        splits = max(1, -(-keys // span))
        threads = 1 if on_cpu else 32
        template = (
            ("D", d), ("DV", values), ("ROWS", rows), ("TPR", threads), ("BITS", bits),
            ("GROUP", group_size), ("KEYS", _CPU_KEYS if on_cpu else _GPU_KEYS), ("SIZE", size),
        )  # fmt: skip
        total = (b, kv_heads, queries * h // max(1, kv_heads), splits)
        return Plan(
            template,
            launch.Geometry((), (splits * threads, kv_heads * chunks, b), (threads, 1, 1)),
            ((*total, values), total, total),
            (mx.float32,) * 3,
            (constant((queries, keys, h, kv_heads, span), mx.int32),),
        )

    def in_mlx(*inputs: mx.array) -> Arrays:
        named = dict(zip(form.inputs, inputs, strict=False))
        q, (k, v) = named["q"].astype(mx.float32), _dense(form, named, bits, mx)
        b, kv_heads, rows, splits, _ = plan(launch.settings(), inputs).shapes[0]
        z = _scores(
            q, k, named.get("lengths"), named["scale"], form.causal, named.get("window"),
            named.get("softcap"), mx,
        )  # fmt: skip
        # A span is an axis; what is missing from the last one has no weight.
        span = _CPU_SPAN if launch.is_cpu(launch.settings()) else _GPU_SPAN
        z = z.reshape(b, kv_heads, rows, z.shape[-1])
        z = mx.pad(z, [(0, 0)] * 3 + [(0, splits * span - z.shape[-1])], constant_values=-mx.inf)
        v = mx.pad(v, [(0, 0)] * 2 + [(0, splits * span - v.shape[2]), (0, 0)])
        z = mx.unflatten(z, -1, (splits, span))
        peak = mx.stop_gradient(mx.maximum(mx.max(z, axis=-1, keepdims=True), _DROPPED))
        e = exp(z - peak)
        found = e.swapaxes(2, 3) @ mx.unflatten(v, 2, (splits, span))
        return found.swapaxes(2, 3), peak.squeeze(-1), e.sum(axis=-1)

    return BodyKernel(
        spans(form), plan, in_mlx, dynamic=_refuse(NAMES[form.kind]), values=_values(form)
    )


def _refuse(name: str) -> Any:
    def refuse(*inputs: mx.array) -> Arrays:
        raise ValueError(
            f"[{name}] cannot infer output shapes in a shapeless compile; compile with shapes."
        )

    return refuse


def _values(form: Cache) -> Any:
    """The check of what only the device knows."""
    if form.kind != PAGED and not form.lengths:
        return None

    def check(*inputs: mx.array) -> None:
        named = dict(zip(form.inputs, inputs, strict=False))
        lengths = np.array(named["lengths"]).astype(np.int64)
        paged = form.kind == PAGED
        size = named["k"].shape[1] if paged else 1
        most = named["block_table"].shape[1] * size if paged else named["k"].shape[2]
        name = "context_lens" if paged else "lengths"
        for n in lengths:
            if not 0 <= n <= most:
                raise ValueError(f"[{NAMES[form.kind]}] '{name}' must be in range but got {n}.")
        if paged:
            table = np.array(named["block_table"]).astype(np.int64)
            for row, n in zip(table, lengths, strict=True):
                for block in row[: -(-int(n) // size)]:
                    if not 0 <= block < named["k"].shape[0]:
                        raise ValueError(
                            f"[{NAMES[PAGED]}] 'block_table' must be in range but got {block}."
                        )

    return check


@cache
def _combine(name: str, sinks: bool, dtype: mx.Dtype) -> BodyKernel:
    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        b, kv_heads, rows, splits, d = inputs[0].shape
        heads = inputs[3].shape[0] if sinks else 1
        threads = 1 if launch.is_cpu(chosen) else 32
        queries = b * kv_heads * rows // max(1, b * heads) if sinks else 1
        return Plan(
            (("T", dtype), ("DV", d), ("TPR", threads)),
            launch.Geometry((), (threads, b * kv_heads * rows, 1), (threads, 1, 1)),
            ((b, kv_heads, rows, d),),
            (dtype,),
            (constant((splits, max(1, queries), heads), mx.int32),),
        )

    def in_mlx(*inputs: mx.array) -> Arrays:
        found, peak, weight, *sink = inputs
        most = mx.max(peak, axis=-1, keepdims=True)
        if sinks:
            one = sink[0].astype(mx.float32)
            queries = found.shape[1] * found.shape[2] // one.shape[0]
            one = mx.repeat(one, queries).reshape(*found.shape[1:3], 1)
            most = mx.maximum(most, one)
        most = mx.stop_gradient(most)
        by = exp(peak - most)
        total = (by * weight).sum(axis=-1, keepdims=True)
        if sinks:
            total = total + exp(one - most)
        return (((by[..., None] * found).sum(axis=-2) / total).astype(dtype),)

    return BodyKernel(combine(name, sinks), plan, in_mlx, dynamic=_refuse(name))


def _attend(
    form: Cache, inputs: Sequence[mx.array], sinks: mx.array | None, bits: int = 0, group: int = 0
) -> mx.array:
    q = inputs[0]
    found = _spans(form, bits, group)(*inputs)
    some = () if sinks is None else (sinks,)
    out = _combine(NAMES[form.kind], sinks is not None, q.dtype)(*found, *some)
    return out.reshape(*q.shape[:3], out.shape[-1])  # type: ignore[no-any-return]


# ---- in plain MLX -------------------------------------------------------------------------------


def _scores(
    q: Any, k: Any, lengths: Any, scale: Any, causal: bool, window: Any, softcap: Any, xp: Any
) -> Any:
    """Scores of the last queries of `lengths` keys; -inf where there is no key."""
    z = product(scale * q, xp.swapaxes(k, -1, -2), xp)
    if softcap is not None:
        z = softcap * xp.tanh(z / softcap)
    key = xp.arange(k.shape[2])
    length = k.shape[2] if lengths is None else lengths[:, None, None, None]
    position = length - q.shape[2] + xp.arange(q.shape[2])[:, None]
    keep = key <= position if causal else key == key
    if window is not None:
        keep = keep & (key > position - window) & (key < position + window)
    if causal or window is not None:
        z = xp.where(keep, z, _DROPPED)
    return z if lengths is None else xp.where(key < length, z, -xp.inf)


def _softmax_of(z: Any, v: Any, sinks: Any, xp: Any) -> Any:
    e, _, total = softmax_of(z, sinks, xp)
    return product(e / total, v, xp)


def _unpacked(words: Any, scales: Any, biases: Any, bits: int, xp: Any) -> Any:
    """What `mx.quantize` packed."""
    shifts = xp.arange(0, 32, bits).astype(words.dtype)
    values = (
        (words[..., None] >> shifts) & words.dtype.type(2**bits - 1)
        if xp is not mx
        else (mx.right_shift(words[..., None], shifts) & (2**bits - 1))
    )
    d = words.shape[-1] * 32 // bits
    values = values.reshape((*words.shape[:-1], d)).astype(scales.dtype)
    group = d // scales.shape[-1]
    return values * xp.repeat(scales, group, axis=-1) + xp.repeat(biases, group, axis=-1)


def _paged_dense(cache: Any, table: Any) -> Any:
    """The keys of each batch, (B, K, S, D)."""
    blocks = cache[table]
    b, n, size, kv_heads, d = blocks.shape
    return blocks.reshape((b, n * size, kv_heads, d)).transpose((0, 2, 1, 3))


def _dense(form: Cache, named: dict[str, mx.array], bits: int, xp: Any) -> tuple[Any, Any]:
    """Keys and values in float32 as arrays of their own."""
    k, v = named["k"], named["v"]
    if form.kind == PAGED:
        k, v = (_paged_dense(x, named["block_table"]) for x in (k, v))
    if form.kind == QUANTIZED:
        k, v = (
            _unpacked(
                named[n].view(mx.uint32),
                named[f"{n}_scales"].astype(mx.float32),
                named[f"{n}_biases"].astype(mx.float32),
                bits,
                xp,
            )
            for n in ("k", "v")
        )
    return k.astype(mx.float32), v.astype(mx.float32)


def decode_attention_reference(
    q: mx.array, k: mx.array, v: mx.array, lengths: mx.array | None = None,
    sinks: mx.array | None = None, *, scale: float | None = None, causal: bool = False,
    window: int | None = None, softcap: float | None = None, xp: Any = mx,
) -> Any:  # fmt: skip
    """decode_attention in plain MLX."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if lengths is not None:  # what lies past the last key has no part in it, not even as NaN
        v = xp.where(xp.arange(v.shape[2])[:, None] < lengths[:, None, None, None], v, 0.0)
    return _softmax_of(_scores(q, k, lengths, scale, causal, window, softcap, xp), v, sinks, xp)


def paged_attention_reference(
    q: mx.array, k_cache: mx.array, v_cache: mx.array, block_table: mx.array,
    context_lens: mx.array, sinks: mx.array | None = None, *, scale: float | None = None,
    causal: bool = False, window: int | None = None, softcap: float | None = None, xp: Any = mx,
) -> Any:  # fmt: skip
    """paged_attention in plain MLX."""
    k, v = _paged_dense(k_cache, block_table), _paged_dense(v_cache, block_table)
    return decode_attention_reference(
        q, k, v, context_lens, sinks, scale=scale, causal=causal, window=window, softcap=softcap,
        xp=xp,
    )  # fmt: skip


def quantized_attention_reference(
    q: mx.array, k: mx.array, k_scales: mx.array, k_biases: mx.array, v: mx.array,
    v_scales: mx.array, v_biases: mx.array, lengths: mx.array | None = None,
    sinks: mx.array | None = None, *, bits: int = 8, scale: float | None = None,
    causal: bool = False, window: int | None = None, softcap: float | None = None, xp: Any = mx,
) -> Any:  # fmt: skip
    """quantized_attention in plain MLX."""
    return decode_attention_reference(
        q, _unpacked(k, k_scales, k_biases, bits, xp), _unpacked(v, v_scales, v_biases, bits, xp),
        lengths, sinks, scale=scale, causal=causal, window=window, softcap=softcap, xp=xp,
    )  # fmt: skip


# ---- ops ----------------------------------------------------------------------------------------


def _options(
    form: dict[str, Any], scale: float | None, d: int, window: int | None, softcap: float | None
) -> tuple[list[mx.array], list[mx.array]]:
    """What goes before and after the lengths, and the form's flags."""
    form["window"], form["softcap"] = window is not None, softcap is not None
    after = [] if window is None else [scalar(window)]
    if softcap is not None:
        after.append(scalar(float(softcap)))
    return [scalar(float(d**-0.5 if scale is None else scale))], after


def _check_indices(op: str, name: str, x: Any, shape: tuple[int | None, ...]) -> None:
    check_array(op, name, x, INDICES)
    fits = x.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, x.shape, strict=True))
    if not fits:
        text = ", ".join("N" if n is None else str(n) for n in shape)
        text += "," if len(shape) == 1 else ""
        raise ValueError(f"[{op}] '{name}' must have shape ({text}) but got {tuple(x.shape)}.")


def _same_dtype(op: str, q: mx.array, **others: mx.array) -> None:
    for name, x in others.items():
        if x.dtype != q.dtype:
            raise ValueError(
                f"[{op}] '{name}' must have q's dtype {dtype_name(q.dtype)} but got "
                f"{dtype_name(x.dtype)}."
            )


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
        q: (B, H, L, D) in float32, float16 or bfloat16, the last L positions.
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
    op = NAMES[PLAIN]
    check_heads(op, q, k, v)
    _same_dtype(op, q, k=k, v=v)
    check_options(op, q.shape[1], scale, causal, window, softcap, sinks)
    flags: dict[str, Any] = {"causal": causal}
    before, after = _options(flags, scale, q.shape[-1], window, softcap)
    middle = []
    if lengths is not None:
        _check_indices(op, "lengths", lengths, (q.shape[0],))
        middle, flags["lengths"] = [lengths], True
    form = Cache(PLAIN, **flags)
    return _attend(form, (q, k, v, *before, *middle, *after), sinks)


def paged_attention(
    q: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    block_table: mx.array,
    context_lens: mx.array,
    sinks: mx.array | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
) -> mx.array:
    """`decode_attention` over keys and values that lie in blocks.

    Args:
        q: (B, H, L, D) in float32, float16 or bfloat16.
        k_cache, v_cache: (blocks, block size, K, D) and (blocks, block size, K, V), q's dtype.
        block_table: (B, N) integers: block n of a batch has its keys n · block size and on.
            Entries past the context are not read.
        context_lens: (B,) integers in [0, N · block size], the keys of each batch.
        sinks, scale, causal, window, softcap: as in `decode_attention`.

    Returns:
        (B, H, L, V) in q's dtype. A block or a length that is out of range makes its batch NaN; on
        the CPU the evaluation raises.

    Kwon et al. 2023, arXiv:2309.06180.
    """
    op = NAMES[PAGED]
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_array(op, name, x, FLOATING)
        if x.ndim != 4:
            raise ValueError(f"[{op}] '{name}' must have 4 axes but got {tuple(x.shape)}.")
    _same_dtype(op, q, k_cache=k_cache, v_cache=v_cache)
    b, h, _, d = q.shape
    kv = k_cache.shape[2]
    if k_cache.shape[3] != d or k_cache.shape[1] == 0 or kv == 0 or h % kv:
        raise ValueError(
            f"[{op}] 'k_cache' must have shape (blocks, size, K, {d}) where K divides {h} but got "
            f"{tuple(k_cache.shape)}."
        )
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"[{op}] 'v_cache' must have shape {tuple(k_cache.shape[:3])} and V but got "
            f"{tuple(v_cache.shape)}."
        )
    _check_indices(op, "block_table", block_table, (b, None))
    _check_indices(op, "context_lens", context_lens, (b,))
    check_options(op, h, scale, causal, window, softcap, sinks)
    flags: dict[str, Any] = {"causal": causal, "lengths": True}
    before, after = _options(flags, scale, d, window, softcap)
    inputs = (q, k_cache, v_cache, *before, block_table, context_lens, *after)
    return _attend(Cache(PAGED, **flags), inputs, sinks)


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
        q: (B, H, L, D) in float32, float16 or bfloat16.
        k, k_scales, k_biases: `mx.quantize(keys, group_size, bits)` of keys (B, K, S, D).
        v, v_scales, v_biases: the same of values (B, K, S, V), with the same group size.
        bits: 4 or 8.
        lengths, sinks, scale, causal, window, softcap: as in `decode_attention`.

    Returns:
        (B, H, L, V) in q's dtype.
    """
    op = NAMES[QUANTIZED]
    check_array(op, "q", q)
    if q.ndim != 4:
        raise ValueError(f"[{op}] 'q' must have 4 axes but got {tuple(q.shape)}.")
    if bits not in (4, 8):
        raise ValueError(f"[{op}] 'bits' must be 4 or 8 but got {bits}.")
    b, h, _, d = q.shape
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
    if len(set(groups)) != 1:
        raise ValueError(
            f"[{op}] 'v_scales' must have k's group size {groups[0]} but got {groups}."
        )
    check_options(op, h, scale, causal, window, softcap, sinks)
    flags: dict[str, Any] = {"causal": causal}
    before, after = _options(flags, scale, d, window, softcap)
    middle = []
    if lengths is not None:
        _check_indices(op, "lengths", lengths, (b,))
        middle, flags["lengths"] = [lengths], True
    inputs = (
        q, k.view(mx.uint8), k_scales, k_biases, v.view(mx.uint8), v_scales, v_biases,
        *before, *middle, *after,
    )  # fmt: skip
    return _attend(Cache(QUANTIZED, bits, **flags), inputs, sinks, bits, groups[0])


_SINKS = Argument("sinks", "(H,)", differentiable=False, optional=True)
_OPTIONS = (
    Option("scale", None, (0.3,)),
    Option("causal", False, (True,), passed="text"),
    Option("window", None, (3,)),
    Option("softcap", None, (2.0,)),
)
_SHAPELESS = {"shapeless compile": "compile with shapes"}
_PAPER = "https://pytorch.org/blog/flash-decoding/"


def _lengths(rng: np.random.Generator, shape: tuple[int, ...], sizes: Any) -> Any:
    return rng.integers(min(sizes["S"], sizes["L"]), sizes["S"] + 1, shape)


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
            _SINKS,
        ),
        options=_OPTIONS,
        outputs=("(*, H, L, V)",),
        paper=_PAPER,
        samples={"lengths": _lengths},
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
        refuses=_SHAPELESS,
    )
)


def _paged_case(b: int, h: int, k: int, queries: int, blocks: int, size: int, d: int, why: str = "",
                optional: bool = True, **options: Any) -> Case:  # fmt: skip
    sizes = {"H": h, "K": k, "L": queries, "N": blocks, "P": 2 * blocks + 1, "Z": size, "D": d}
    return Case((b,), sizes, why, options, optional)


register(
    Op(
        name="paged_attention",
        family="attention",
        summary="attention over keys and values in blocks",
        formula="decode_attention over the blocks that a table names",
        function=paged_attention,
        reference=paged_attention_reference,
        arguments=(
            Argument("q", "(*, H, L, D)", differentiable=False),
            Argument("k_cache", "(P, Z, K, D)", differentiable=False),
            Argument("v_cache", "(P, Z, K, D)", differentiable=False),
            Argument("block_table", "(*, N)", INDICES, False, False, "in [0, blocks)"),
            Argument("context_lens", "(*)", INDICES, False, False, "in [0, N · block size]"),
            _SINKS,
        ),
        options=_OPTIONS,
        outputs=("(*, H, L, D)",),
        paper="https://arxiv.org/abs/2309.06180",
        samples={
            "block_table": lambda rng, shape, sizes: rng.integers(0, sizes["P"], shape),
            "context_lens": lambda rng, shape, sizes: rng.integers(
                sizes["L"], sizes["N"] * sizes["Z"] + 1, shape
            ),
        },
        cases=(
            _paged_case(1, 1, 1, 1, 1, 1, 1, "one of everything"),
            _paged_case(2, 4, 2, 2, 3, 3, 8, "two heads share keys"),
            _paged_case(1, 2, 1, 1, 9, 8, 40, "one past a tile of keys"),
            _paged_case(3, 12, 1, 1, 2, 16, 33, "more rows than a group has"),
            _paged_case(2, 2, 2, 3, 10, 32, 64, "several spans on a GPU, causal", causal=True),
            _paged_case(3, 2, 1, 1, 2, 5, 16, "no sinks", False),
            _paged_case(0, 2, 1, 1, 2, 4, 8, "no rows"),
        ),
        long_cases=(_paged_case(1, 2, 1, 1, 66, 32, 64, "several spans"),),
        benchmarks=(_paged_case(4, 32, 8, 1, 256, 16, 128, "", False),),
        refuses=_SHAPELESS,
    )
)


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
            _SINKS,
        ),
        options=(Option("bits", 8), *_OPTIONS),
        outputs=("(*, H, L, D)",),
        paper=_PAPER,
        samples={
            "lengths": _lengths,
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
        ),
        refuses=_SHAPELESS,
    )
)
