"""Attention without an array of scores.

    out = softmax(scale · q kᵀ + mask) v

q is (B, H, L, D), k is (B, K, S, D), v is (B, K, S, V), where H is a multiple of K: query head h
reads head h div (H / K) of k and v. With a softcap c the scores are c · tanh(scale · q kᵀ / c)
before the mask. A sink is a score per head that takes part in the softmax and has no value.

Bytes: the forward reads q, k and v once per tile of 64 (CPU) or 32 (GPU) queries and writes out and
8 bytes per query; the backward reads q, k, v, out, dout and writes dq, dk, dv, with dq in float32
before its dtype. Nothing has the size of the scores but a mask that is given, and its gradient.
See `attention_kernels.py` for the method.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from .. import launch, tiles
from ..arguments import BOOLEAN, FLOATING, Argument, check_array, check_number
from ..autograd import nary_from_expr
from ..body import BodyKernel, Plan, constant
from ..codegen import Operand, Output, Pass, Reduce, Rowwise
from ..metal import scalar
from ..pattern import PatternKernel
from ..registry import Case, Op, Option, register
from ..targets import cpu
from ..transforms import Arrays, Rule
from .attention_kernels import (
    ADDED,
    KEEPS,
    NO_MASK,
    Form,
    backward_keys,
    backward_mask,
    backward_queries,
    forward,
)

_OP = "scaled_dot_product_attention"
#: The score of a key that a condition drops: finite, so that a query that has lost all its keys
#: attends to all of them alike, as in MLX.
DROPPED = -3.4028234663852886e38
#: Groups of the backward on a CPU, at least, where heads are few.
_CPU_GROUPS = 16


# ---- in plain MLX -------------------------------------------------------------------------------


def product(x: Any, y: Any, xp: Any) -> Any:
    """x @ y, where a head of y serves several of x."""
    heads = y.shape[1]
    group = x.shape[1] // heads if heads else 1
    if group == 1:
        return x @ y
    if xp is mx:  # sizes that a shapeless compile may change are not named
        return mx.flatten(mx.unflatten(x, 1, (-1, group)) @ mx.expand_dims(y, 2), 1, 2)
    split = x.reshape((x.shape[0], heads, group, *x.shape[2:])) @ y[:, :, None]
    return split.reshape((x.shape[0], x.shape[1], *split.shape[3:]))


def _scores(
    q: Any, k: Any, mask: Any, scale: Any, causal: bool, window: Any, softcap: Any, xp: Any,
    spans: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Scores, whether each is there (None: all), and the derivative by the product (None: 1)."""
    z = product(scale * q, xp.swapaxes(k, -1, -2), xp)
    slope = None
    if softcap is not None:
        t = xp.tanh(z / softcap)
        z, slope = softcap * t, 1.0 - t * t
    keep = None
    if mask is not None and mask.dtype in (mx.bool_, bool):
        keep = mask
    elif mask is not None:
        z = z + mask
    if causal or window is not None or spans is not None:
        # Positions and lengths from the elements, which a shapeless compile may change.
        ones_q, ones_k = (
            xp.max(xp.ones_like(xp.stop_gradient(x)), axis=(1, 3), keepdims=True) for x in (q, k)
        )
        ones_k = xp.swapaxes(ones_k, -1, -2)
        key = xp.cumsum(ones_k, axis=-1)
        if spans is None:
            last = xp.sum(ones_k, axis=-1, keepdims=True) - xp.sum(ones_q, axis=-2, keepdims=True)
            position = xp.cumsum(ones_q, axis=-2) + last
            rule = key < position + (1 if causal else window)
            if window is not None:
                rule = rule & (key > position - window)
        else:
            some = spans.astype(mx.float32)
            rule = (key > some[:, :1]) & (key <= some[:, 1:2])
            z = xp.where(rule, xp.where(some[:, 2:] != 0, DROPPED, z), -xp.inf)
            return z, rule & (some[:, 2:] == 0), slope
        keep = rule if keep is None else keep & rule
    if keep is not None:
        z = xp.where(keep, z, DROPPED)
    return z, keep, slope


def softmax_of(z: Any, sinks: Any, xp: Any) -> tuple[Any, Any, Any]:
    """exp(z - peak), the peak and the total."""
    peak = xp.max(z, axis=-1, keepdims=True)
    if sinks is not None:
        sinks = sinks[:, None, None]
        peak = xp.maximum(peak, sinks)
    peak = xp.stop_gradient(peak)
    e = xp.exp(z - peak)
    total = xp.sum(e, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + xp.exp(sinks - peak)
    return e, peak, total


def scaled_dot_product_attention_reference(
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
    xp: Any = mx,
) -> Any:
    """scaled_dot_product_attention in plain MLX."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    z, _, _ = _scores(q, k, mask, scale, causal, window, softcap, xp)
    e, peak, total = softmax_of(z, sinks, xp)
    out = product(e / total, v, xp)
    if return_lse:
        return out, (peak + xp.log(total))[..., 0]
    return out


def _float32(form: Form, inputs: Arrays) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Inputs by name in float32, and what `_scores` takes of them."""
    named = form.named(inputs)
    some = {n: x.astype(mx.float32) for n, x in named.items() if n in ("q", "k", "v", "sinks")}
    mask = named.get("mask")
    if mask is not None:
        mask = mask.astype(mx.bool_ if form.mask == KEEPS else mx.float32)
    options = {
        "mask": mask,
        "scale": named["scale"],
        "causal": form.causal and not form.spans,
        "window": None if form.spans else named.get("window"),
        "softcap": named.get("softcap"),
        "spans": named.get("spans"),
    }
    return some, options


def _forward_in_mlx(form: Form, inputs: Arrays) -> Arrays:
    some, options = _float32(form, inputs)
    z, _, _ = _scores(some["q"], some["k"], xp=mx, **options)
    e, peak, total = softmax_of(z, some.get("sinks"), mx)
    out = product(e / total, some["v"], mx)
    return out.astype(inputs[0].dtype), peak.squeeze(-1), total.squeeze(-1)


def _backward_in_mlx(form: Form, inputs: Arrays) -> tuple[mx.array, ...]:
    """dq, dk, dv in float32 and the gradient of the scores."""
    some, options = _float32(form, inputs)
    dout, _, _, delta = inputs[-4:]
    q, k, v, dout = some["q"], some["k"], some["v"], dout.astype(mx.float32)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = mx.repeat(k, group, axis=1), mx.repeat(v, group, axis=1)
    z, keep, slope = _scores(q, k, xp=mx, **options)
    e, _, total = softmax_of(z, some.get("sinks"), mx)
    p = e / total
    ds = p * (dout @ v.swapaxes(-1, -2) - delta[..., None])
    if keep is not None:
        ds = mx.where(keep, ds, 0.0)
    dz = ds if slope is None else ds * slope
    dz = dz * options["scale"]
    dk, dv = dz.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
    if group > 1:
        dk, dv = (mx.unflatten(x, 1, (x.shape[1] // group, group)).sum(axis=2) for x in (dk, dv))
    return dz @ k, dk, dv, ds


# ---- kernels ------------------------------------------------------------------------------------


def _sizes(form: Form, inputs: Arrays) -> mx.array:
    """Lengths, heads, and the strides of the mask, 0 along axes that it does not have."""
    named = form.named(inputs)
    q, k, mask = named["q"], named["k"], named.get("mask")
    strides = [0, 0, 0, 0]
    if mask is not None:
        step = 1
        for axis in (3, 2, 1, 0):
            strides[axis] = step if mask.shape[axis] > 1 else 0
            step *= mask.shape[axis]
    return constant((q.shape[2], k.shape[2], q.shape[1], k.shape[1], *strides), mx.int64)


def _plan(
    chosen: launch.Settings,
    form: Form,
    inputs: Arrays,
    grid: tuple[int, int, int],
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> Plan:
    """A launch of `grid` groups."""
    q, v = inputs[0], inputs[2]
    tiling = _tiling(chosen, q, v)
    threads = tiling.threads
    template = (("T", q.dtype), ("D", q.shape[-1]), ("DV", v.shape[-1]), *tiling.template)
    return Plan(
        template,
        launch.Geometry(tiling.template, (grid[0] * threads, grid[1], grid[2]), (threads, 1, 1)),
        tuple(shape for shape, _ in outputs),
        tuple(dtype for _, dtype in outputs),
        (_sizes(form, inputs),),
    )


def _tiling(chosen: launch.Settings, q: mx.array, v: mx.array) -> tiles.Tiling:
    tiling = tiles.tiling(chosen, q.shape[-1], v.shape[-1])
    if tiling is None:
        raise ValueError(
            f"[{_OP}] 'v' must have a last axis that makes at most 2048 with q's, 1024 on a GPU, "
            f"but got {v.shape[-1]} and {q.shape[-1]}."
        )
    return tiling


def _count(n: int, tile: int) -> int:
    return -(-n // tile)


@cache
def _forward(form: Form, statistics: bool, on_cpu: bool) -> BodyKernel:
    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        q, v = inputs[0], inputs[2]
        grid = (_count(q.shape[2], _tiling(chosen, q, v).lanes), q.shape[1], q.shape[0])
        shape = tuple(q.shape[:3])
        outputs = [((*shape, v.shape[-1]), q.dtype)]
        if statistics:
            outputs += [(shape, mx.float32)] * 2
        return _plan(chosen, form, inputs, grid, outputs)

    def in_mlx(*inputs: mx.array) -> Arrays:
        return _forward_in_mlx(form, inputs)[: 3 if statistics else 1]

    return BodyKernel(
        forward(form, statistics, on_cpu),
        plan,
        in_mlx,
        vjp=_rule(form) if statistics else None,
    )


def _chunks(chosen: launch.Settings, q: mx.array, k: mx.array, lanes: int) -> int:
    """Groups that share the keys of a head in the backward: by tiles, or, where dq is summed along
    with dk and dv, as few as keep a CPU busy."""
    count = max(1, _count(k.shape[2], lanes))
    if launch.is_cpu(chosen):
        return min(count, max(1, _CPU_GROUPS // max(1, k.shape[0] * k.shape[1])))
    return count


@cache
def _backward_keys(form: Form, with_dq: bool, on_cpu: bool) -> BodyKernel:
    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        q, k, v = inputs[:3]
        chunks = _chunks(chosen, q, k, _tiling(chosen, q, v).lanes)
        outputs = [(tuple(k.shape), q.dtype), (tuple(v.shape), q.dtype)]
        if with_dq:
            outputs.append(((chunks, *q.shape), mx.float32))
        return _plan(chosen, form, inputs, (chunks, k.shape[1], k.shape[0]), outputs)

    def in_mlx(*inputs: mx.array) -> Arrays:
        dq, dk, dv, _ = _backward_in_mlx(form, inputs)
        dk, dv = dk.astype(inputs[1].dtype), dv.astype(inputs[2].dtype)
        if not with_dq:
            return dk, dv
        q, k, v = inputs[:3]
        chosen = launch.settings()
        chunks = _chunks(chosen, q, k, _tiling(chosen, q, v).lanes)
        zeros = [mx.zeros_like(dq)] * (chunks - 1)
        return dk, dv, mx.stack([dq, *zeros])

    return BodyKernel(backward_keys(form, with_dq, on_cpu), plan, in_mlx)


@cache
def _backward_queries(form: Form, on_cpu: bool) -> BodyKernel:
    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        q, v = inputs[0], inputs[2]
        grid = (_count(q.shape[2], _tiling(chosen, q, v).lanes), q.shape[1], q.shape[0])
        return _plan(chosen, form, inputs, grid, [(tuple(q.shape), q.dtype)])

    def in_mlx(*inputs: mx.array) -> Arrays:
        return (_backward_in_mlx(form, inputs)[0].astype(inputs[0].dtype),)

    return BodyKernel(backward_queries(form, on_cpu), plan, in_mlx)


@cache
def _backward_mask(form: Form, on_cpu: bool) -> BodyKernel:
    """The gradient of an added mask; what was broadcast along queries or keys is summed but for a
    tile of them."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        mask = form.named(inputs)["mask"]
        tiling = _tiling(chosen, inputs[0], inputs[2])
        b, h, queries, keys = mask.shape
        grid = (_count(queries, tiling.lanes), _count(keys, tiling.rows), b * h)
        shape = (
            b, h, tiling.lanes if queries == 1 else queries, tiling.rows if keys == 1 else keys
        )  # fmt: skip
        one = _plan(chosen, form, inputs, grid, [(shape, mx.float32)])
        given = constant((b, h, queries, keys, inputs[0].shape[0]), mx.int64)
        return Plan(one.template, one.geometry, one.shapes, one.dtypes, (*one.constants, given))

    def in_mlx(*inputs: mx.array) -> Arrays:
        ds = _backward_in_mlx(form, inputs)[3]
        mask = form.named(inputs)["mask"]
        chosen = launch.settings()
        tiling = _tiling(chosen, inputs[0], inputs[2])
        axes = [a for a in range(4) if mask.shape[a] == 1]
        ds = ds.sum(axis=axes, keepdims=True) if axes else ds
        for axis, n in ((2, tiling.lanes), (3, tiling.rows)):
            if axis in axes:
                shape = [*ds.shape]
                shape[axis] = n - 1
                ds = mx.concatenate([ds, mx.zeros(shape)], axis=axis)
        return (ds,)

    return BodyKernel(backward_mask(form, on_cpu), plan, in_mlx)


#: δ = Σ dO · O, less what the total's gradient adds to every score's.
_DELTA = PatternKernel(
    f"{_OP}/delta",
    Rowwise(
        inputs=(
            Operand("y"),
            Operand("dy"),
            Operand("weight", "per_row"),
            Operand("dweight", "per_row"),
        ),
        passes=(Pass((Reduce("dot", "sum", "y * dy"),)),),
        outputs=(Output("delta", "dot - dweight * weight", "per_row"),),
    ),
    (mx.float32,),
)  # fmt: skip

_SINK_TERM = nary_from_expr(
    "-exp(sink - peak) / weight * delta", ("sink", "peak", "weight", "delta"), name=f"{_OP}_dsink"
)
_LSE = nary_from_expr("peak + log(weight)", ("peak", "weight"), name=f"{_OP}_lse")


def _on_cpu() -> bool:
    return launch.is_cpu(launch.settings())


def _rule(form: Form) -> Rule:
    """The vjp of the forward that keeps its statistics. A peak is a constant, since it cancels."""

    def vjp(
        primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> list[mx.array | None]:
        named = form.named(primals)
        names = form.inputs
        want = {names[i] for i in wanted}
        out, peak, weight = outputs
        dout, _, dweight = cotangents
        delta = _DELTA(out, dout, weight, dweight)
        inputs = (*primals, dout, peak, weight, delta)
        found: dict[str, mx.array] = {}
        on_cpu = _on_cpu()
        if want & {"k", "v"}:
            both = on_cpu and "q" in want
            found["k"], found["v"], *rest = _backward_keys(form, both, on_cpu)(*inputs)
            if rest:
                chunks = rest[0]
                dq = chunks.squeeze(0) if chunks.shape[0] == 1 else chunks.sum(axis=0)
                found["q"] = dq.astype(named["q"].dtype)
        if "q" in want and "q" not in found:
            found["q"] = _backward_queries(form, on_cpu)(*inputs)
        if "mask" in want and form.mask == ADDED:
            mask = named["mask"]
            dmask = _backward_mask(form, on_cpu)(*inputs)
            axes = [a for a in (2, 3) if mask.shape[a] != dmask.shape[a]]
            dmask = dmask.sum(axis=axes, keepdims=True) if axes else dmask
            found["mask"] = dmask.astype(mask.dtype)
        if "sinks" in want:
            sinks = named["sinks"]
            rows = mx.broadcast_to(sinks.astype(mx.float32)[:, None], peak.shape)
            term = _SINK_TERM(rows, peak, weight, delta)
            found["sinks"] = term.sum(axis=(0, 2)).astype(sinks.dtype)
        return [found.get(name) if name in want else None for name in names]

    return vjp


# ---- op -----------------------------------------------------------------------------------------

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
    kv, s = k.shape[1:3]
    if k.shape[0] != b or k.shape[3] != d:
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
    op: str, heads: int, scale: Any, causal: Any, window: Any, softcap: Any, sinks: Any
) -> None:
    """Raises for options that are no such thing."""
    if scale is not None:
        check_number(op, "scale", scale)
    if not isinstance(causal, bool):
        raise TypeError(f"[{op}] 'causal' must be True or False but got {type(causal).__name__}.")
    if window is not None:
        if not isinstance(window, int) or isinstance(window, bool):
            raise TypeError(f"[{op}] 'window' must be an integer but got {type(window).__name__}.")
        if not 1 <= window < 2**30:
            raise ValueError(f"[{op}] 'window' must be in [1, 2^30) but got {window}.")
    if softcap is not None and not check_number(op, "softcap", softcap) > 0:
        raise ValueError(f"[{op}] 'softcap' must be positive but got {softcap}.")
    if sinks is not None:
        check_array(op, "sinks", sinks)
        if tuple(sinks.shape) != (heads,):
            raise ValueError(
                f"[{op}] 'sinks' must have shape ({heads},) but got {tuple(sinks.shape)}."
            )


def _mask_of(q: mx.array, k: mx.array, mask: mx.array) -> mx.array:
    """The mask with four axes, or an error."""
    check_array(_OP, "mask", mask, FLOATING + BOOLEAN)
    full = (*q.shape[:3], k.shape[2])
    shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    if len(shape) > 4 or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise ValueError(f"[{_OP}] 'mask' must broadcast to {full} but got {tuple(mask.shape)}.")
    mask = mask.reshape(shape) if mask.ndim < 4 else mask
    return mask.view(mx.uint8) if mask.dtype == mx.bool_ else mask


def attend(form: Form, inputs: Arrays, return_lse: bool) -> Any:
    """out, or (out, lse), of the inputs that the form names."""
    q, v = inputs[0], inputs[2]
    if q.size == 0:
        out = mx.zeros((*q.shape[:3], v.shape[-1]), q.dtype)
        return (out, mx.zeros(q.shape[:3])) if return_lse else out
    on_cpu = _on_cpu()
    traced = launch.settings().target == "reference" or cpu.maybe_tracing(inputs)
    if not (traced or return_lse):
        return _forward(form, False, on_cpu)(*inputs)
    out, peak, weight = _forward(form, True, on_cpu)(*inputs)
    return (out, _LSE(peak, weight)) if return_lse else out


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
        v: (B, K, S, V).
        mask: broadcasts to (B, H, L, S): bool (True keeps the score) or floating (added). It is
            read where it lies.
        sinks: (H,), a score per head that takes part in the softmax without a value.
        scale: a number. Default: 1 / sqrt(D).
        causal: query i keeps key j only if j ≤ i + S - L, as in MLX.
        window: query i keeps key j only if |i + S - L - j| < window; with `causal` these are the
            last `window` keys.
        softcap: c > 0 makes the scores c · tanh(scores / c), before the mask.
        return_lse: also the logarithm of the sum of the exponentials of the scores, the sink's
            among them, as float32 (B, H, L).

    Returns:
        (B, H, L, V) in the dtype that q, k and v promote to, or (out, lse). A query whose keys are
        all dropped by conditions (bool mask, causal, window) attends to all keys alike, as in MLX,
        or with a sink to nothing; one whose keys all have a mask of -inf is NaN. Scores that a
        condition drops have the gradient 0. Gradients for q, k, v, an added mask and sinks; lse may
        be differentiated too.

    Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691. Sinks: Xiao et al. 2023,
    arXiv:2309.17453, learned as in gpt-oss.
    """
    check_heads(_OP, q, k, v)
    check_options(_OP, q.shape[1], scale, causal, window, softcap, sinks)
    if not q.dtype == k.dtype == v.dtype:
        dtype = mx.result_type(q, k, v)
        q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
    inputs = [q, k, v, scalar(float(q.shape[-1] ** -0.5 if scale is None else scale))]
    kind = NO_MASK
    if mask is not None:
        given = mask
        mask = _mask_of(q, k, mask)
        kind = KEEPS if given.dtype == mx.bool_ else ADDED
        inputs.append(mask)
    if sinks is not None:
        inputs.append(sinks)
    if window is not None:
        inputs.append(scalar(window))
    if softcap is not None:
        inputs.append(scalar(float(softcap)))
    form = Form(kind, causal, window is not None, softcap is not None, sinks is not None)
    return attend(form, tuple(inputs), return_lse)


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
            _case(1, 4, 2, 33, 31, 40, 24, "one past a tile of lanes, V smaller than D"),
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
        flops="2 * rows * H * L * S * (D + V)",
    )
)
