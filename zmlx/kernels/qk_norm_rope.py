"""RMS norm of each head of queries and keys, and their rotary embedding, in one launch.

    n = x · rsqrt(mean(x²) + eps) · weight,   y = rope(n)          for x = q and for x = k

as in Qwen3 and Gemma 3 (Henry et al. 2020; Dehghani et al. 2023; Su et al. 2021).

Bytes: the forward reads q and k and writes both results; the backward reads q, k and the cotangents
and writes the gradients. Nothing is kept between them: a row's rstd is computed again in the sweep
that the backward makes anyway. The gradients of the weights are sums over chunks of positions in
the same launch, which depend on the number of positions alone, and then over chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from .. import launch
from ..arguments import Argument, check, check_not_negative
from ..body import BodyKernel, Plan, constant
from ..broadcasting import sum_chunks
from ..metal import KernelSpec, scalar
from ..registry import COUNTS_ELEMENTS, Case, Op, Option, register
from ..remembered import Remembered, Way
from ..transforms import Arrays
from .qk_norm_rope_kernels import BACKWARD, FORWARD, ROW_HEADER, SUMS
from .rope import rope_reference
from .rope_arguments import MOST_DIMS, as_offset, as_option, check_rows, turning
from .rope_kernels import Rotation, table_in_mlx, turned, turned_at_any_shape

#: Chunks of positions that partial sums of weight gradients are made of, at most.
_CHUNKS = 256


def qk_norm_rope_reference(
    q: mx.array,
    k: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    *,
    eps: float = 1e-6,
    xp: Any = mx,
    **options: Any,
) -> Any:
    """qk_norm_rope in plain MLX."""

    def one(x: Any, weight: Any) -> Any:
        normed = x * xp.rsqrt(xp.mean(x * x, axis=-1, keepdims=True) + eps) * weight
        return rope_reference(normed, **options, xp=xp)

    return one(q, q_weight), one(k, k_weight)


# ---- kernels ------------------------------------------------------------------------------------

_ARGUMENTS = (
    Argument("q", "(*, H, L, D)"),
    Argument("k", "(*, K, L, D)"),
    Argument("q_weight", "(D,)"),
    Argument("k_weight", "(D,)"),
)
_ONE = scalar(1.0)


@dataclass(frozen=True)
class _Launch:
    """Lanes, positions a thread has at a time, chunks, and positions a chunk."""

    lanes: int
    block: int
    chunks: int
    chunk: int

    @classmethod
    def of(cls, rotation: Rotation, chosen: launch.Settings, places: int, *, sums: bool) -> _Launch:
        lanes = launch.pick(chosen, LANES=1 if launch.is_cpu(chosen) else 32)["LANES"]
        if not sums:
            block, run = rotation.runs(chosen, places)
            return cls(lanes, block, -(-places // run), run)
        block = rotation.block(chosen)
        chunk = max(1, -(-places // _CHUNKS))
        return cls(lanes, block, max(1, -(-places // chunk)), chunk)

    def plan(
        self, rotation: Rotation, q: mx.array, k: mx.array, positions: mx.array,
        types: Arrays | tuple[mx.Dtype, ...], shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
    ) -> Plan:  # fmt: skip
        """The launch, with outputs of these shapes and dtypes."""
        d, pairs = q.shape[-1], -(-rotation.half // self.lanes)
        some = (*rotation.strides(q), *rotation.strides(k))
        return Plan(
            (
                *(("q_t", types[0]), ("k_t", types[1]), ("D", d)),
                *rotation.template(self.block, self.lanes),
                ("U", max(1, min(16, 1 << (pairs.bit_length() - 1)))),
                ("RESTS", max(1, -(-(d - 2 * rotation.half) // self.lanes))),
            ),
            launch.Geometry((), (self.lanes * self.chunks, 1, 1), (self.lanes, 1, 1)),
            tuple(shapes),
            tuple(dtypes),
            (constant((*rotation.sizes(q, positions), self.chunk, *some), mx.uint32),),
        )


def _types(q: mx.array, k: mx.array, wq: mx.array, wk: mx.array) -> tuple[mx.Dtype, mx.Dtype]:
    return mx.result_type(q, wq), mx.result_type(k, wk)


@cache
def _forward(rotation: Rotation) -> BodyKernel:
    """q, k, weights, eps, the rotation's → both results."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        q, k, wq, wk, _, positions = inputs[:6]
        places = rotation.sizes(q, positions)[0]
        check_rows("qk_norm_rope", "q", q)
        check_rows("qk_norm_rope", "k", k)
        types = _types(q, k, wq, wk)
        return _Launch.of(rotation, chosen, places, sums=False).plan(
            rotation, q, k, positions, types, (tuple(q.shape), tuple(k.shape)), types
        )

    def plain(turn: Any) -> Any:
        def reference(
            q: mx.array, k: mx.array, wq: mx.array, wk: mx.array, eps: mx.array, *rest: mx.array
        ) -> Arrays:
            def one(x: mx.array, weight: mx.array) -> mx.array:
                dtype = mx.result_type(x, weight)
                x = x.astype(mx.float32)
                rstd = mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)
                table = table_in_mlx(rotation, x, rest)
                return turn(rotation, x * rstd * weight, *table).astype(dtype)  # type: ignore[no-any-return]

            return one(q, wq), one(k, wk)

        return reference

    return BodyKernel(
        KernelSpec(
            "qk_norm_rope",
            ("q", "k", "q_weight", "k_weight", "eps", *rotation.inputs, "sizes"),
            ("q_out", "k_out"),
            rotation.text(FORWARD),
            ROW_HEADER,
        ),
        plan,
        plain(turned),
        dynamic=plain(turned_at_any_shape),
        vjp=lambda *rule: _vjp(rotation, *rule),
    )


# ---- backward -----------------------------------------------------------------------------------


@cache
def _backward(rotation: Rotation, sums: bool) -> BodyKernel:
    """q, k, weights, cotangents, eps, the rotation's → dq, dk, and with `sums` the partial sums of
    the gradients of both weights."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        q, k, _, _, _, _, _, positions = inputs[:8]
        places = rotation.sizes(q, positions)[0]
        found = _Launch.of(rotation, chosen, places, sums=sums)
        partial = ((found.chunks, q.shape[-1]),) * (2 * sums)
        return found.plan(
            rotation, q, k, positions, (q.dtype, k.dtype),
            (tuple(q.shape), tuple(k.shape), *partial),
            (q.dtype, k.dtype, *(mx.float32,) * len(partial)),
        )  # fmt: skip

    def reference(
        q: mx.array, k: mx.array, wq: mx.array, wk: mx.array, gq: mx.array, gk: mx.array,
        *rest: mx.array,
    ) -> Arrays:  # fmt: skip
        def of(*some: mx.array) -> list[mx.array]:
            return list(_forward(rotation).reference(*some, *rest))

        arrays = [a.astype(mx.float32) for a in (q, k, wq, wk)]
        found = mx.vjp(of, arrays, [gq.astype(mx.float32), gk.astype(mx.float32)])[1]
        outputs = [found[0].astype(q.dtype), found[1].astype(k.dtype)]
        if sums:
            places = rotation.sizes(q, rest[1])[0]
            chunk = max(1, -(-places // _CHUNKS))
            empty = mx.zeros((max(1, -(-places // chunk)) - 1, q.shape[-1]), mx.float32)
            outputs += [mx.concatenate([dw[None], empty]) for dw in found[2:]]
        return tuple(outputs)

    return BodyKernel(
        KernelSpec(
            "qk_norm_rope__sums" if sums else "qk_norm_rope__dx",
            (*("q", "k", "q_weight", "k_weight", "dq_out", "dk_out", "eps"),
             *rotation.inputs, "sizes"),
            ("dq", "dk", *("dq_weight", "dk_weight") * sums),
            rotation.text(BACKWARD + SUMS * sums),
            ROW_HEADER,
        ),
        plan,
        reference,
    )  # fmt: skip


def _vjp(
    rotation: Rotation,
    primals: Arrays,
    cotangents: Arrays,
    outputs: Arrays,
    wanted: Sequence[int],
) -> list[mx.array | None]:
    sums = 2 in wanted or 3 in wanted
    results = _backward(rotation, sums)(*primals[:4], *cotangents, *primals[4:])
    found: list[mx.array | None] = [*results[:2], *[None] * (len(primals) - 2)]
    if sums:
        found[2], found[3] = (sum_chunks(results[i], primals[i]) for i in (2, 3))
    return found


# ---- op -----------------------------------------------------------------------------------------


def _qk_norm_rope(
    q: mx.array,
    k: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    freqs: mx.array | None,
    positions: mx.array | None,
    start: Any,
    dims: int | None,
    eps: float,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: Any,
    sections: Sequence[int] | None,
    interleave_sections: bool,
    layout: str,
) -> Way:
    """How both are normed and turn, by a `start` or, where that is None, an offset that says
    nothing."""
    op = "qk_norm_rope"
    asked = turning(
        op, "q", q, dims, traditional=traditional, base=base, scale=scale,
        offset=offset if start is None else start, freqs=freqs, positions=positions,
        sections=sections, interleave_sections=interleave_sections, layout=layout,
    )  # fmt: skip
    if q.ndim != 4:
        raise ValueError(f"[{op}] 'q' must have 4 axes but got {tuple(q.shape)}.")
    if q.shape[-1] > MOST_DIMS:  # the sums for the weights are on the stack, too
        raise ValueError(
            f"[{op}] 'q' must have a last axis of at most {MOST_DIMS} but got {tuple(q.shape)}."
        )
    # The axis of heads may differ, so that it is left out of what must agree.
    check(op, _DECLARED[asked.rotation.heads_last], (q, k, q_weight, k_weight))
    added = scalar(check_not_negative(op, "eps", eps))
    kernel, arrays = _forward(asked.rotation), asked.arrays

    def way(
        q: mx.array,
        k: mx.array,
        q_weight: mx.array,
        k_weight: mx.array,
        freqs: mx.array | None,
        positions: mx.array | None,
        start: Any,
    ) -> Any:
        if freqs is not None:
            freqs = mx.stop_gradient(freqs)
        rotation = arrays(freqs, positions, start)
        return kernel(q, k, q_weight, k_weight, added, *rotation, _ONE)

    return way


_QK_NORM_ROPE = Remembered(_qk_norm_rope)


def qk_norm_rope(
    q: mx.array,
    k: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    dims: int | None = None,
    *,
    eps: float = 1e-6,
    traditional: bool = False,
    base: float | None = None,
    scale: float = 1.0,
    offset: int | mx.array = 0,
    freqs: mx.array | None = None,
    positions: mx.array | None = None,
    sections: Sequence[int] | None = None,
    interleave_sections: bool = False,
    layout: str = "BHLD",
) -> tuple[mx.array, mx.array]:
    """`rope(rms_norm(q, q_weight))` and `rope(rms_norm(k, k_weight))` in one launch.

        n = x · rsqrt(mean(x²) + eps) · weight,   y = rope(n)

    Args:
        q: (B, H, L, D), or (B, L, H, D) for the layout "BLHD", in float32, float16 or bfloat16;
            computed in float32, and rounded once. D is at most 131072.
        k: (B, K, L, D), with any number K of heads; may have another dtype.
        q_weight, k_weight: (D,).
        eps: added to the mean of the squares.
        dims, traditional, base, scale, offset, freqs, positions, sections, interleave_sections,
            layout: as for `rope`. The frequencies are constants here, without a gradient.

    Returns:
        Arrays of the shapes of q and k, each in the promoted dtype of it and its weight. Gradients
        for q, k and both weights; those of the weights are summed in float32, in a fixed order.
    """
    start = as_offset(offset) if positions is None else None
    return _QK_NORM_ROPE(  # type: ignore[no-any-return]
        (q, k, q_weight, k_weight, freqs, positions, start),
        (
            dims, eps, traditional, base, scale, offset if start is None else 0,
            as_option(sections), interleave_sections, layout,
        ),
    )  # fmt: skip


_DECLARED = {
    last: tuple(
        Argument(n, f"(B, L, {h}, D)" if last else f"(B, {h}, L, D)")
        for n, h in (("q", "H"), ("k", "K"))
    )
    + _ARGUMENTS[2:]
    for last in (False, True)
}


def _case(heads: int, groups: int, steps: int, d: int, why: str, batch: int = 2, **o: Any) -> Case:
    return Case((batch,), {"H": heads, "K": groups, "L": steps, "D": d}, why, o)


register(
    Op(
        name="qk_norm_rope",
        family="rope",
        summary="rms_norm of the heads of q and k, then rope",
        formula="rope(x · rsqrt(mean(x²) + eps) · weight) for q and k",
        function=qk_norm_rope,
        reference=qk_norm_rope_reference,
        arguments=_ARGUMENTS,
        options=(
            Option("eps", 1e-6, (1e-2,)),
            Option("traditional", False, (True,), passed="text"),
            Option("scale", 1.0, (0.25,)),
            Option("base", None, (500.0,)),
            Option("offset", 0, (7,)),
            Option("dims", None, (4,), passed="text"),
            Option("layout", "BHLD", passed="text"),
        ),
        outputs=("(*, H, L, D)", "(*, K, L, D)"),
        paper="Henry et al. 2020, arXiv:2010.04245; Su et al. 2021, arXiv:2104.09864",
        reads_backward=("q", "k", "q_weight", "k_weight"),
        needs=COUNTS_ELEMENTS,
        torch="(lambda turn: (turn(F.rms_norm(q, q.shape[-1:], q_weight, eps)),"
        " turn(F.rms_norm(k, k.shape[-1:], k_weight, eps))))((lambda t: lambda x: torch.cat("
        "(x[..., : x.shape[-1] // 2] * t.cos() - x[..., x.shape[-1] // 2 :] * t.sin(),"
        " x[..., : x.shape[-1] // 2] * t.sin() + x[..., x.shape[-1] // 2 :] * t.cos()), -1)"
        ".to(x.dtype))(torch.arange(q.shape[-2])[:, None]"
        " / 10000.0 ** (torch.arange(q.shape[-1] // 2) * (2.0 / q.shape[-1]))))",
        cases=(
            _case(1, 1, 1, 2, "one pair", 1, eps=0.5),
            _case(4, 2, 5, 6, "two queries to a key"),
            _case(4, 1, 7, 6, "another length, one key"),
            _case(2, 2, 9, 62, "one pair short of a simdgroup", offset=3),
            _case(3, 1, 33, 66, "one pair past a simdgroup, a last block that is not full", 1),
            _case(4, 2, 17, 128, "a model's head", 1),
            _case(2, 1, 4, 11, "not all elements turn", dims=6, traditional=True),
            _case(3, 3, 5, 80, "not all elements turn", dims=32),
            _case(2, 2, 3, 8, "heads last", layout="BLHD"),
            _case(1, 1, 300, 8, "chunks of more than one position"),
            _case(2, 1, 3, 8, "no rows", 0),
        ),
        long_cases=(_case(1, 1, 2, 4098, "a head longer than any model's", 1),),
        benchmarks=(
            _case(32, 8, 2048, 128, "prefill", 1),
            _case(32, 8, 1, 128, "decode", 8),
        ),
    )
)
