"""How attention of few queries is launched: spans of keys at once, then combined."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from .. import launch
from ..arguments import INDICES, Argument, check_array, dtype_name
from ..body import BodyKernel, Plan, constant
from ..metal import scalar
from ..registry import Option
from ..targets import cpu
from ..transforms import Arrays, refuses_any_shape
from .activations import exp
from .attention_plain import DROPPED, product, softmax_of
from .attention_text import KEEPS, NO_MASK
from .decode_cache import NAMES, PAGED, QUANTIZED, Cache
from .decode_kernels import combine, spans

#: Rows that a group works on at once, at most.
_MOST_ROWS = 8
#: Values of a row, at most: a thread of a CPU keeps a tile of rows on its stack.
WIDEST = 8192
#: Keys of a span and of a tile, on a CPU and on a GPU.
_CPU_SPAN, _GPU_SPAN = 1024, 256
#: Of a span on a CPU whose heads lie side by side: one head after the other comes to the same pages
#: of memory, which the CPU still has the addresses of.
_PAGED_SPAN = 256
_CPU_KEYS, _GPU_KEYS = 32, 8
#: Of a tile of packed values on a CPU, which are a quarter of the bytes or less.
_PACKED_KEYS = 64


def _rows(queries: int, heads: int, kv_heads: int) -> tuple[int, int]:
    """Rows of a group, and how many groups share the keys of a head."""
    rows = max(1, queries * (heads // max(1, kv_heads)))
    chunks = -(-rows // _MOST_ROWS)
    return -(-rows // chunks), chunks


def _keys(form: Cache, named: dict[str, mx.array]) -> tuple[int, int]:
    """Heads of keys, and keys that a batch has room for."""
    k = named["k"]
    if form.kind == PAGED:
        return k.shape[2], named["block_table"].shape[1] * k.shape[1]
    return k.shape[1], k.shape[2]


def runs_on_cpu() -> bool:
    """Whether the settings in force have the geometry of a CPU."""
    return launch.is_cpu(launch.settings())


@cache
def _spans(form: Cache, bits: int, group_size: int, on_cpu: bool) -> BodyKernel:
    def span_for(kv_heads: int) -> int:
        if not on_cpu:
            return _GPU_SPAN
        return _PAGED_SPAN if form.kind == PAGED and kv_heads > 1 else _CPU_SPAN

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        named = dict(zip(form.inputs, inputs, strict=False))
        q, k, v = named["q"], named["k"], named["v"]
        b, h, queries, d = q.shape
        size = k.shape[1] if form.kind == PAGED else 0
        values = v.shape[-1] * 8 // bits if bits else v.shape[-1]
        for name, width in (("q", d), ("v_cache" if form.kind == PAGED else "v", values)):
            if width > WIDEST:
                raise ValueError(
                    f"[{NAMES[form.kind]}] '{name}' must have rows of at most {WIDEST} values but "
                    f"got {width}."
                )
        kv_heads, keys = _keys(form, named)
        rows, chunks = _rows(queries, h, kv_heads)
        span = span_for(kv_heads)
        splits = max(1, -(-keys // span))
        threads = 1 if on_cpu else 32
        at_once = _GPU_KEYS if not on_cpu else _PACKED_KEYS if bits else _CPU_KEYS
        template = (
            *(() if bits else (("T", k.dtype),)),
            ("D", d), ("DV", values), ("ROWS", rows), ("TPR", threads), ("BITS", bits),
            ("GROUP", group_size), ("KEYS", at_once), ("SIZE", size),
        )  # fmt: skip
        total = (b, kv_heads, queries * h // max(1, kv_heads), splits)
        return Plan(
            template,
            launch.Geometry((), (kv_heads * chunks * threads, splits, b), (threads, 1, 1)),
            ((*total, values), total, total),
            (mx.float32,) * 3,
            (constant((queries, keys, h, kv_heads, span), mx.int32),),
        )

    def in_mlx(*inputs: mx.array) -> Arrays:
        named = dict(zip(form.inputs, inputs, strict=False))
        q, (k, v) = named["q"].astype(mx.float32), _dense(form, named, bits, mx)
        kv_heads, keys = _keys(form, named)
        span = span_for(kv_heads)
        splits = max(1, -(-keys // span))
        z = decode_scores(
            q, k, named.get("lengths"), named["scale"], form.causal, named.get("window"),
            named.get("softcap"), mx, _mask(form, named),
        )  # fmt: skip
        # A span is an axis; what is missing from the last one has no weight.
        b, h, queries, _ = q.shape
        rows = h // kv_heads * queries
        z = z.reshape(b, kv_heads, rows, keys)
        # No mx.pad: in MLX 0.32.2 the gradient of its vmap is wrong.
        missing = splits * span - keys
        z = mx.concatenate([z, mx.full((b, kv_heads, rows, missing), -mx.inf)], axis=-1)
        v = mx.concatenate([v, mx.zeros((b, kv_heads, missing, v.shape[-1]), v.dtype)], axis=2)
        z = mx.unflatten(z, -1, (splits, span))
        peak = mx.stop_gradient(mx.maximum(mx.max(z, axis=-1, keepdims=True), DROPPED))
        e = exp(z - peak)
        found = e.swapaxes(2, 3) @ mx.unflatten(v, 2, (splits, span))
        total = e.sum(axis=-1)
        if form.lengths:
            total = mx.where(_bad(form, named)[:, None, None, None], mx.nan, total)
        return found.swapaxes(2, 3), peak.squeeze(-1), total

    return BodyKernel(
        spans(form), plan, in_mlx, dynamic=refuses_any_shape(NAMES[form.kind]), values=_values(form)
    )


def _reach(form: Cache, named: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
    """The first key that a window of each batch reaches, and the end of its keys: (B, 1), or (1, 1)
    where all batches are whole."""
    given = named["lengths"] if form.lengths else mx.array([_keys(form, named)[1]])
    end = mx.expand_dims(given.astype(mx.int64), 1)
    if not form.window:
        return mx.zeros_like(end), end
    # The first query has all keys alike where its window has none.
    position, window = end - named["q"].shape[2], named["window"].astype(mx.int64)
    none = position + (0 if form.causal else window - 1) < 0
    return mx.where(none, 0, mx.maximum(position - window + 1, 0)), end


def _bad(form: Cache, named: dict[str, mx.array]) -> mx.array:
    """Whether a batch's length is out of range, or a block that it has."""
    lengths, k = named["lengths"].astype(mx.int64), named["k"]
    if form.kind != PAGED:
        return mx.logical_or(lengths < 0, lengths > k.shape[2])
    table = named["block_table"].astype(mx.int64)
    size, count = k.shape[1], table.shape[1]
    wrong = mx.logical_or(table < 0, table >= k.shape[0])
    first, end = _reach(form, named)
    start = size * mx.arange(count)
    wrong = mx.logical_and(wrong, mx.logical_and(start + size > first, start < end))
    beyond = mx.logical_or(lengths < 0, lengths > count * size)
    return mx.logical_or(beyond, wrong.any(axis=1))


def _mask(form: Cache, named: dict[str, mx.array]) -> mx.array | None:
    if form.mask == NO_MASK:
        return None
    return named["mask"].astype(mx.bool_ if form.mask == KEEPS else mx.float32)


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
            firsts = np.array(_reach(form, named)[0])[:, 0]
            for row, first, n in zip(table, firsts, lengths, strict=True):
                for block in row[int(first) // size : -(-int(n) // size)]:
                    if not 0 <= block < named["k"].shape[0]:
                        raise ValueError(
                            f"[{NAMES[PAGED]}] 'block_table' must be in range but got {block}."
                        )

    return check


@cache
def _combine(name: str, sinks: bool, dtype: mx.Dtype, queries: int, statistics: bool) -> BodyKernel:
    """out (B, H, L, V) of L `queries`, and the peak and the total of their scores, if asked for."""

    def shape_of(found: mx.array) -> tuple[int, int, int]:
        b, kv_heads, rows = found.shape[:3]
        return b, kv_heads * rows // queries, queries

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        b, kv_heads, rows, splits, d = inputs[0].shape
        shape = shape_of(inputs[0])
        threads = 1 if launch.is_cpu(chosen) else 32
        return Plan(
            (("T", dtype), ("DV", d), ("TPR", threads)),
            launch.Geometry((), (threads, b * kv_heads * rows, 1), (threads, 1, 1)),
            ((*shape, d), *[shape] * (2 * statistics)),
            (dtype, *[mx.float32] * (2 * statistics)),
            (constant((splits, queries, shape[1]), mx.int32),),
        )

    def in_mlx(*inputs: mx.array) -> Arrays:
        found, peak, weight, *sink = inputs
        shape = shape_of(found)
        most = mx.max(peak, axis=-1, keepdims=True)
        if sinks:
            one = sink[0].astype(mx.float32)
            one = mx.repeat(one, queries).reshape(*found.shape[1:3], 1)
            most = mx.maximum(most, one)
        most = mx.stop_gradient(most)
        by = exp(peak - most)
        total = (by * weight).sum(axis=-1, keepdims=True)
        if sinks:
            total = total + exp(one - most)
        # A query without scores is NaN, and has the gradient 0.
        none = total == 0.0
        out = (by[..., None] * found).sum(axis=-2) / mx.where(none, 1.0, total)
        out = mx.where(none, mx.nan, out).astype(dtype).reshape(*shape, found.shape[-1])
        return (out, most.reshape(shape), total.reshape(shape))[: 3 if statistics else 1]

    return BodyKernel(
        combine(name, sinks, statistics), plan, in_mlx, dynamic=refuses_any_shape(name)
    )


def attending(
    form: Cache,
    arrays: Arrays,
    width: int,
    sinks: bool,
    bits: int = 0,
    group: int = 0,
    statistics: bool = False,
) -> Callable[..., Any]:
    """How the op is computed of arrays of these shapes and dtypes, q the first of them: a function
    of the inputs that the form names, and of the sinks, if any. It returns out, of rows of `width`
    values, or with `statistics` also the peak and the total of each query's scores."""
    q = arrays[0]
    shape, dtype = (*q.shape[:3], width), q.dtype
    if q.size == 0 and not cpu.any_shape(arrays):
        return lambda inputs, sinks: mx.zeros(shape, dtype)
    in_spans = _spans(form, bits, group, runs_on_cpu())
    combined = _combine(NAMES[form.kind], sinks, dtype, q.shape[2], statistics)
    if sinks:
        return lambda inputs, sinks: combined(*in_spans(*inputs), sinks)
    return lambda inputs, sinks: combined(*in_spans(*inputs))


# ---- in plain MLX -------------------------------------------------------------------------------


def decode_scores(
    q: Any, k: Any, lengths: Any, scale: Any, causal: bool, window: Any, softcap: Any, xp: Any,
    mask: Any = None,
) -> Any:  # fmt: skip
    """Scores of the last queries of `lengths` keys; -inf where there is no key."""
    z = product(scale * q, xp.swapaxes(k, -1, -2), xp)
    if softcap is not None:
        z = softcap * xp.tanh(z / softcap)
    if mask is not None:
        z = xp.where(mask, z, DROPPED) if mask.dtype == mx.bool_ else z + mask
    key = xp.arange(k.shape[2])
    # Signed, since a query may lie before the first key.
    length = k.shape[2] if lengths is None else lengths[:, None, None, None].astype(xp.int64)
    position = length - q.shape[2] + xp.arange(q.shape[2])[:, None]
    near = key <= position if causal else key == key
    none = position < (0 if causal or window is None else 1 - window)
    if window is not None:
        near = xp.logical_and(
            near, xp.logical_and(key > position - window, key < position + window)
        )
    if causal or window is not None:
        z = xp.where(none, DROPPED, xp.where(near, z, -xp.inf))
    return z if lengths is None else xp.where(key < length, z, -xp.inf)


def weighted(z: Any, v: Any, sinks: Any, xp: Any) -> Any:
    """softmax(z) v, with sinks in the softmax."""
    e, _, total = softmax_of(z, sinks, xp)
    return product(e, v, xp) / total


def unpacked(words: Any, scales: Any, biases: Any, bits: int, xp: Any) -> Any:
    """What `mx.quantize` packed."""
    # No shifts: under vmap, MLX's bitwise operations do not broadcast what is not mapped.
    units = xp.array([1 << place for place in range(0, 32, bits)], dtype=words.dtype)
    values = words[..., None] // units % xp.array(1 << bits, dtype=words.dtype)
    d, groups = words.shape[-1] * 32 // bits, scales.shape[-1]
    values = values.reshape((*words.shape[:-1], groups, d // groups)).astype(scales.dtype)
    values = values * scales[..., None] + biases[..., None]
    return values.reshape((*words.shape[:-1], d))


def paged_dense(cache: Any, table: Any) -> Any:
    """The keys of each batch, (B, K, S, D)."""
    blocks = cache[table]
    b, n, size, kv_heads, d = blocks.shape
    return blocks.reshape((b, n * size, kv_heads, d)).transpose((0, 2, 1, 3))


def _dense(form: Cache, named: dict[str, mx.array], bits: int, xp: Any) -> tuple[Any, Any]:
    """Keys and values in float32 as arrays of their own."""
    k, v = named["k"], named["v"]
    if form.kind == PAGED:
        if not k.shape[0]:  # of which MLX takes nothing; a batch that reads it is NaN
            k, v = (mx.zeros((1, *x.shape[1:]), x.dtype) for x in (k, v))
        # What the kernel does not read may be any number; MLX's take checks none.
        table = mx.clip(named["block_table"], 0, max(0, k.shape[0] - 1))
        k, v = (paged_dense(x, table) for x in (k, v))
    if form.kind == QUANTIZED:
        k, v = (
            unpacked(
                named[n].view(mx.uint32),
                named[f"{n}_scales"].astype(mx.float32),
                named[f"{n}_biases"].astype(mx.float32),
                bits,
                xp,
            )
            for n in ("k", "v")
        )
    k, v = k.astype(mx.float32), v.astype(mx.float32)
    if form.lengths or form.window:  # what no query has has no part in gradients, not even as NaN
        first, end = (mx.expand_dims(x, (2, 3)) for x in _reach(form, named))
        key = mx.arange(k.shape[2])[:, None]
        own = mx.logical_and(key >= first, key < end)
        k, v = mx.where(own, k, 0.0), mx.where(own, v, 0.0)
    return k, v


# ---- what the ops share --------------------------------------------------------------------------


def numbers_of(
    form: dict[str, Any], scale: float | None, d: int, window: int | None, softcap: float | None
) -> tuple[mx.array, Arrays]:
    """The scale, and what comes after the lengths; sets the form's flags of that."""
    form["window"], form["softcap"] = window is not None, softcap is not None
    after = [] if window is None else [scalar(window)]
    if softcap is not None:
        after.append(scalar(float(softcap)))
    return scalar(float(d**-0.5 if scale is None else scale)), tuple(after)


def check_indices(op: str, name: str, x: Any, shape: tuple[int | None, ...]) -> None:
    """Raises unless `x` has integers in a shape of which None may be any size."""
    check_array(op, name, x, INDICES)
    given = tuple(x.shape)
    fits = given == shape or (
        len(given) == len(shape) and all(n in (None, m) for n, m in zip(shape, given, strict=True))
    )
    if not fits:
        text = ", ".join("N" if n is None else str(n) for n in shape)
        text += "," if len(shape) == 1 else ""
        raise ValueError(f"[{op}] '{name}' must have shape ({text}) but got {given}.")


def same_dtype(op: str, q: mx.array, **others: mx.array) -> None:
    """Raises unless all have q's dtype."""
    dtype = q.dtype
    for name, x in others.items():
        if x.dtype != dtype:
            raise ValueError(
                f"[{op}] '{name}' must have q's dtype {dtype_name(dtype)} but got "
                f"{dtype_name(x.dtype)}."
            )


SINKS = Argument("sinks", "(H,)", differentiable=False, optional=True)
OPTIONS = (
    Option("scale", None, (0.3,)),
    Option("causal", False, (True,), passed="text"),
    Option("window", None, (3,)),
    Option("softcap", None, (2.0,)),
)
SHAPELESS = {"shapeless compile": "compile with shapes"}
PAPER = "https://pytorch.org/blog/flash-decoding/"


def draw_lengths(rng: np.random.Generator, shape: tuple[int, ...], sizes: Any) -> Any:
    """Draws lengths that leave no query without a key."""
    return rng.integers(min(sizes["S"], sizes["L"]), sizes["S"] + 1, shape)
