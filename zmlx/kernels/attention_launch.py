"""How the kernels of attention are launched, and the gradient that they make together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx

from .. import launch, tiles
from ..autograd import nary_from_expr
from ..body import BodyKernel, Plan, constant
from ..codegen import Operand, Output, Pass, Reduce, Rowwise
from ..pattern import PatternKernel
from ..targets import cpu
from ..transforms import Arrays, Rule, custom_function
from .attention_backward import backward_keys, backward_mask, backward_queries
from .attention_kernels import forward
from .attention_plain import backward_in_mlx, forward_in_mlx
from .attention_text import ADDED, Form
from .decode_cache import PLAIN, Cache
from .decode_launch import WIDEST
from .decode_launch import attending as decoding

_OP = "scaled_dot_product_attention"
#: Groups of the backward on a CPU, at least, where heads are few.
_CPU_GROUPS = 16
#: As many queries over more keys are decoding: on a CPU 16 take at most half of the time of a tile
#: of 64, and one a tenth to a twentieth. On a GPU MLX decodes up to 8.
_CPU_FEW, _GPU_FEW = 16, 8


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
    tiling = _tiling(chosen, form, inputs)
    threads = tiling.threads
    template = (("T", q.dtype), ("D", q.shape[-1]), ("DV", v.shape[-1]), *tiling.template)
    return Plan(
        template,
        launch.Geometry(tiling.template, (grid[0] * threads, grid[1], grid[2]), (threads, 1, 1)),
        tuple(shape for shape, _ in outputs),
        tuple(dtype for _, dtype in outputs),
        (_sizes(form, inputs),),
    )


def _tiling(chosen: launch.Settings, form: Form, inputs: Arrays) -> tiles.Tiling:
    q, k, v = inputs[:3]
    longest = max(q.shape[2], k.shape[2])
    tiling = tiles.tiling(chosen, q.shape[-1], v.shape[-1], longest=longest)
    if tiling is None:
        op = "varlen_attention" if form.spans else _OP
        raise ValueError(
            f"[{op}] 'v' must have a last axis that makes at most 2048 with q's, 1024 on a GPU, "
            f"both rounded up to a multiple of 8, but got {v.shape[-1]} and {q.shape[-1]}."
        )
    return tiling


def fits(width: int, value_width: int) -> bool:
    """Whether the tiles of the kernels have room for queries and values of these widths."""
    return _fits(launch.settings(), width, value_width)


@cache
def _fits(chosen: launch.Settings, width: int, value_width: int) -> bool:
    return tiles.tiling(chosen, width, value_width, longest=1) is not None


def _count(n: int, tile: int) -> int:
    return -(-n // tile)


@cache
def _forward(form: Form, statistics: bool, on_cpu: bool) -> BodyKernel:
    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        q, v = inputs[0], inputs[2]
        grid = (_count(q.shape[2], _tiling(chosen, form, inputs).lanes), q.shape[1], q.shape[0])
        shape = tuple(q.shape[:3])
        outputs = [((*shape, v.shape[-1]), q.dtype)]
        if statistics:
            outputs += [(shape, mx.float32)] * 2
        return _plan(chosen, form, inputs, grid, outputs)

    def in_mlx(*inputs: mx.array, dynamic: bool = False) -> Arrays:
        return forward_in_mlx(form, inputs, dynamic)[: 3 if statistics else 1]

    return BodyKernel(
        forward(form, statistics, on_cpu),
        plan,
        in_mlx,
        dynamic=partial(in_mlx, dynamic=True),
        vjp=_rule(form) if statistics else None,
    )


def _chunks(chosen: launch.Settings, form: Form, inputs: Arrays) -> int:
    """Groups that share the keys of a head in the backward: by tiles, or, where dq is summed along
    with dk and dv, as few as keep a CPU busy."""
    k = inputs[1]
    count = max(1, _count(k.shape[2], _tiling(chosen, form, inputs).lanes))
    if launch.is_cpu(chosen):
        return min(count, max(1, _CPU_GROUPS // max(1, k.shape[0] * k.shape[1])))
    return count


@cache
def _backward_keys(form: Form, dq_chunks: int, on_cpu: bool) -> BodyKernel:
    """The gradients of k and v, and that of q in chunks, if any."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        q, k, v = inputs[:3]
        chunks = dq_chunks or _chunks(chosen, form, inputs)
        outputs = [(tuple(k.shape), q.dtype), (tuple(v.shape), q.dtype)]
        if dq_chunks:
            outputs.append(((chunks, *q.shape), mx.float32))
        return _plan(chosen, form, inputs, (chunks, k.shape[1], k.shape[0]), outputs)

    def in_mlx(*inputs: mx.array, dynamic: bool = False) -> Arrays:
        dq, dk, dv, _ = backward_in_mlx(form, inputs, dynamic)
        dk, dv = dk.astype(inputs[1].dtype), dv.astype(inputs[2].dtype)
        if not dq_chunks:
            return dk, dv
        zeros = [mx.zeros_like(dq)] * (dq_chunks - 1)
        return dk, dv, mx.stack([dq, *zeros])

    return BodyKernel(
        backward_keys(form, dq_chunks > 0, on_cpu),
        plan,
        in_mlx,
        dynamic=partial(in_mlx, dynamic=True),
    )


@cache
def _backward_queries(form: Form, on_cpu: bool) -> BodyKernel:
    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        q = inputs[0]
        grid = (_count(q.shape[2], _tiling(chosen, form, inputs).lanes), q.shape[1], q.shape[0])
        return _plan(chosen, form, inputs, grid, [(tuple(q.shape), q.dtype)])

    def in_mlx(*inputs: mx.array, dynamic: bool = False) -> Arrays:
        return (backward_in_mlx(form, inputs, dynamic)[0].astype(inputs[0].dtype),)

    return BodyKernel(
        backward_queries(form, on_cpu), plan, in_mlx, dynamic=partial(in_mlx, dynamic=True)
    )


@cache
def _backward_mask(form: Form, tiling: tiles.Tiling, on_cpu: bool) -> BodyKernel:
    """The gradient of an added mask; what was broadcast along queries or keys is summed but for a
    tile of them."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        b, h, queries, keys = form.named(inputs)["mask"].shape
        grid = (_count(queries, tiling.lanes), _count(keys, tiling.rows), b * h)
        shape = (
            b, h, tiling.lanes if queries == 1 else queries, tiling.rows if keys == 1 else keys
        )  # fmt: skip
        one = _plan(chosen, form, inputs, grid, [(shape, mx.float32)])
        given = constant((b, h, queries, keys, inputs[0].shape[0]), mx.int64)
        return Plan(one.template, one.geometry, one.shapes, one.dtypes, (*one.constants, given))

    def in_mlx(*inputs: mx.array, dynamic: bool = False) -> Arrays:
        ds = backward_in_mlx(form, inputs, dynamic)[3]
        mask = form.named(inputs)["mask"]
        axes = [a for a in range(4) if mask.shape[a] == 1]
        ds = ds.sum(axis=axes, keepdims=True) if axes else ds
        for axis, n in ((2, tiling.lanes), (3, tiling.rows)):
            if axis in axes:
                shape = [*ds.shape]
                shape[axis] = n - 1
                ds = mx.concatenate([ds, mx.zeros(shape)], axis=axis)
        return (ds,)

    return BodyKernel(
        backward_mask(form, on_cpu), plan, in_mlx, dynamic=partial(in_mlx, dynamic=True)
    )


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

#: A query without scores, whose weight is 0, has no gradient.
_SINK_TERM = nary_from_expr(
    "weight == 0 ? 0 : -exp(sink - peak) / (weight == 0 ? 1 : weight) * delta",
    ("sink", "peak", "weight", "delta"),
    name=f"{_OP}_dsink",
)
_LSE = nary_from_expr(
    "weight == 0 ? -inf : peak + log(weight == 0 ? 1 : weight)",
    ("peak", "weight"),
    name=f"{_OP}_lse",
)


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
        chosen = launch.settings()
        on_cpu = launch.is_cpu(chosen)
        if want & {"k", "v"}:
            dq_chunks = _chunks(chosen, form, primals) if on_cpu and "q" in want else 0
            found["k"], found["v"], *rest = _backward_keys(form, dq_chunks, on_cpu)(*inputs)
            if rest:
                chunks = rest[0]
                dq = chunks.squeeze(0) if chunks.shape[0] == 1 else chunks.sum(axis=0)
                found["q"] = dq.astype(named["q"].dtype)
        if "q" in want and "q" not in found:
            found["q"] = _backward_queries(form, on_cpu)(*inputs)
        if "mask" in want and form.mask == ADDED:
            mask = named["mask"]
            tiling = _tiling(chosen, form, primals)
            dmask = _backward_mask(form, tiling, on_cpu)(*inputs)
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


def _few(form: Form, arrays: Arrays, on_cpu: bool) -> bool:
    """Whether queries are so few, and the last of a cache, that the keys are what takes time."""
    q, k, v = arrays[:3]
    queries = q.shape[-2]
    few = queries < k.shape[-2] and queries <= (_CPU_FEW if on_cpu else _GPU_FEW)
    return few and not form.spans and max(q.shape[-1], v.shape[-1]) <= WIDEST


def _decoding(form: Form, arrays: Arrays, statistics: bool) -> Callable[..., Any]:
    """out, or (out, peak, weight), by the kernels that split the keys."""
    cache = Cache(
        PLAIN, mask=form.mask, causal=form.causal, window=form.window, softcap=form.softcap
    )
    run = decoding(cache, arrays, arrays[2].shape[-1], form.sinks, statistics=statistics)
    if not form.sinks:
        return lambda *inputs: run(inputs, None)
    at = form.inputs.index("sinks")
    return lambda *inputs: run((*inputs[:at], *inputs[at + 1 :]), inputs[at])


def _in_mlx(form: Form, *inputs: mx.array) -> Arrays:
    return forward_in_mlx(form, inputs)


def attending(form: Form, arrays: Arrays, return_lse: bool) -> Callable[..., Any]:
    """How attention is computed of arrays of these shapes and dtypes, q, k and v the first of them:
    a function of the inputs that the form names, of four axes, which returns out, or (out, lse).
    """
    q, v = arrays[0], arrays[2]
    traced = cpu.maybe_tracing(arrays)
    any_shape = bool(traced) and cpu.any_shape(arrays)
    lead, width, dtype = tuple(q.shape[:-1]), v.shape[-1], q.dtype
    if q.size == 0 and not any_shape:
        if form.spans:  # a batch of one
            lead = (1, *lead)
        if return_lse:
            return lambda *inputs: (mx.zeros((*lead, width), dtype), mx.zeros(lead))
        return lambda *inputs: mx.zeros((*lead, width), dtype)
    chosen = launch.settings()
    on_cpu, plain = launch.is_cpu(chosen), chosen.target == "reference"
    statistics = bool(plain or return_lse or traced)
    run: Any
    if plain or any_shape or not _few(form, arrays, on_cpu):
        run = _forward(form, statistics, on_cpu)
    else:
        run = _decoding(form, arrays, statistics)
        if statistics:
            # Tiles, which these heads may be too wide for, are what the rule goes by.
            rule = _rule(form) if fits(q.shape[-1], width) else None
            run = custom_function(_OP, run, rule, partial(_in_mlx, form))
    if not statistics:
        return run  # type: ignore[no-any-return]

    def with_statistics(*inputs: mx.array) -> Any:
        out, peak, weight = run(*inputs)
        return (out, _LSE(peak, weight)) if return_lse else out

    return with_statistics
