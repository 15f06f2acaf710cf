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
from math import prod
from typing import Any

import mlx.core as mx

from .. import launch
from ..arguments import Argument, check, check_number
from ..autograd import sum_chunks
from ..body import BodyKernel, Plan, constant
from ..metal import KernelSpec, scalar
from ..registry import Case, Op, Option, register
from ..transforms import Arrays
from .rope import rope_reference, turning
from .rope_kernels import (
    ARRAYS,
    HEADER,
    PACES,
    START_OF_BODY,
    TABLE,
    Rotation,
    table_in_mlx,
    turned,
    turned_at_any_shape,
)

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

_ROW_HEADER = (
    HEADER
    + """\

// The sum over the LANES threads of a row, which are a simdgroup or one thread.
template <int LANES>
float zmlx_lanes_sum(float value) {
    for (ushort step = LANES / 2; step > 0; step /= 2) {
        value += simd_shuffle_xor(value, step);
    }
    return value;
}

// Norms the row x and turns it. U sums a thread, in a fixed order, make a loop that vectorises.
template <typename T, int D, int HALF, int PAIRS, int LANES, int U, bool TRADITIONAL,
          typename X, typename W, typename Y>
void zmlx_norm_turn(X x, W weight, Y y, const thread float* cosine, const thread float* sine,
                    float eps, uint lane) {
    float parts[U] = {0};
    for (uint i = 0; i < D / (U * LANES); ++i) {
        for (uint u = 0; u < U; ++u) {
            const float value = float(x[(i * U + u) * LANES + lane]);
            parts[u] += value * value;
        }
    }
    float squares = 0.0f;
    for (uint j = D / (U * LANES) * (U * LANES) + lane; j < D; j += LANES) {
        squares += float(x[j]) * float(x[j]);
    }
    for (uint u = 0; u < U; ++u) {
        squares += parts[u];
    }
    const float rstd = rsqrt(zmlx_lanes_sum<LANES>(squares) / float(D) + eps);
    for (uint i = 0; i < PAIRS; ++i) {
        const uint pair = i * LANES + lane;
        if (PAIRS * LANES == HALF || pair < HALF) {
            const uint one = TRADITIONAL ? 2 * pair : pair;
            const uint two = TRADITIONAL ? 2 * pair + 1 : pair + HALF;
            const float n1 = float(x[one]) * rstd * float(weight[one]);
            const float n2 = float(x[two]) * rstd * float(weight[two]);
            y[one] = T(n1 * cosine[i] - n2 * sine[i]);
            y[two] = T(n1 * sine[i] + n2 * cosine[i]);
        }
    }
    for (uint j = 2 * HALF + lane; j < D; j += LANES) {
        y[j] = T(float(x[j]) * rstd * float(weight[j]));
    }
}

// dx of a row, and its part of dweight: sums[i] of first elements of pairs, sums[PAIRS + i] of
// second ones, then of those that do not turn. `sine` is that of the forward.
template <typename T, int D, int HALF, int PAIRS, int LANES, int U, bool TRADITIONAL,
          typename X, typename W, typename G, typename Y>
void zmlx_norm_turn_back(X x, W weight, G dy, Y dx, const thread float* cosine,
                         const thread float* sine, float eps, uint lane, thread float* sums) {
    float squares_parts[U] = {0}, along_parts[U] = {0};
    float squares = 0.0f, along = 0.0f;
    for (uint i = 0; i < PAIRS / U; ++i) {
        for (uint u = 0; u < U; ++u) {
            const uint pair = (i * U + u) * LANES + lane;
            const bool live = PAIRS * LANES == HALF || pair < HALF;
            const uint at = live ? pair : 0;
            const uint one = TRADITIONAL ? 2 * at : at;
            const uint two = TRADITIONAL ? 2 * at + 1 : at + HALF;
            const float x1 = live ? float(x[one]) : 0.0f, x2 = live ? float(x[two]) : 0.0f;
            const float c = cosine[i * U + u], s = sine[i * U + u];
            const float g1 = float(dy[one]), g2 = float(dy[two]);
            squares_parts[u] += x1 * x1 + x2 * x2;
            along_parts[u] += x1 * float(weight[one]) * (g1 * c + g2 * s)
                + x2 * float(weight[two]) * (g2 * c - g1 * s);
        }
    }
    for (uint i = PAIRS / U * U; i < PAIRS; ++i) {
        const uint pair = i * LANES + lane;
        const bool live = PAIRS * LANES == HALF || pair < HALF;
        const uint at = live ? pair : 0;
        const uint one = TRADITIONAL ? 2 * at : at;
        const uint two = TRADITIONAL ? 2 * at + 1 : at + HALF;
        const float x1 = live ? float(x[one]) : 0.0f, x2 = live ? float(x[two]) : 0.0f;
        const float g1 = float(dy[one]), g2 = float(dy[two]);
        squares += x1 * x1 + x2 * x2;
        along += x1 * float(weight[one]) * (g1 * cosine[i] + g2 * sine[i])
            + x2 * float(weight[two]) * (g2 * cosine[i] - g1 * sine[i]);
    }
    for (uint j = 2 * HALF + lane; j < D; j += LANES) {
        const float value = float(x[j]);
        squares += value * value;
        along += value * float(weight[j]) * float(dy[j]);
    }
    for (uint u = 0; u < U; ++u) {
        squares += squares_parts[u];
        along += along_parts[u];
    }
    const float rstd = rsqrt(zmlx_lanes_sum<LANES>(squares) / float(D) + eps);
    const float pull = rstd * rstd * zmlx_lanes_sum<LANES>(along) / float(D);
    for (uint i = 0; i < PAIRS; ++i) {
        const uint pair = i * LANES + lane;
        if (PAIRS * LANES == HALF || pair < HALF) {
            const uint one = TRADITIONAL ? 2 * pair : pair;
            const uint two = TRADITIONAL ? 2 * pair + 1 : pair + HALF;
            const float x1 = float(x[one]), x2 = float(x[two]);
            const float g1 = float(dy[one]), g2 = float(dy[two]);
            const float z1 = g1 * cosine[i] + g2 * sine[i];
            const float z2 = g2 * cosine[i] - g1 * sine[i];
            dx[one] = T(rstd * (z1 * float(weight[one]) - x1 * pull));
            dx[two] = T(rstd * (z2 * float(weight[two]) - x2 * pull));
            sums[i] += z1 * x1 * rstd;
            sums[PAIRS + i] += z2 * x2 * rstd;
        }
    }
    for (uint i = 0; i < (D - 2 * HALF + LANES - 1) / LANES; ++i) {
        const uint j = 2 * HALF + i * LANES + lane;
        if (j < D) {
            const float value = float(x[j]);
            dx[j] = T(rstd * (float(dy[j]) * float(weight[j]) - value * pull));
            sums[2 * PAIRS + i] += float(dy[j]) * value * rstd;
        }
    }
}
"""
)

_START = (
    START_OF_BODY
    + """\
    const uint chunk = sizes[5];
    const uint slot = threadgroup_position_in_grid.x;
"""
    + PACES
    + ARRAYS
)

_LOOP = (
    """\
    const uint stop = min(places, (slot + 1) * chunk);
    for (uint first = slot * chunk; first < stop; first += BLOCK) {
        const uint count = min(uint(BLOCK), stop - first);
"""
    + TABLE
)

#: What is done with the rows of q; those of k follow with other names and sizes.
_FORWARD_ROWS = """\
        for (uint head = 0; head < sizes[6]; ++head) {
            for (uint b = 0; b < count; ++b) {
                const size_t row = size_t(batch[b]) * sizes[7] + size_t(step[b]) * sizes[8]
                    + size_t(head) * sizes[9];
                zmlx_norm_turn<q_t, D, HALF, PAIRS, LANES, U, TRADITIONAL>(
                    q + row * D, q_weight, q_out + row * D, cosines + b * PAIRS,
                    sines + b * PAIRS, eps, lane);
            }
        }
"""

_BACKWARD_ROWS = """\
        for (uint head = 0; head < sizes[6]; ++head) {
            for (uint b = 0; b < count; ++b) {
                const size_t row = size_t(batch[b]) * sizes[7] + size_t(step[b]) * sizes[8]
                    + size_t(head) * sizes[9];
                zmlx_norm_turn_back<q_t, D, HALF, PAIRS, LANES, U, TRADITIONAL>(
                    q + row * D, q_weight, dq_out + row * D, dq + row * D, cosines + b * PAIRS,
                    sines + b * PAIRS, eps, lane, q_sums);
            }
        }
"""

_STORE = """\
    for (uint i = 0; i < PAIRS; ++i) {
        const uint pair = i * LANES + lane;
        if (pair < HALF) {
            dq_weight[slot * size_t(D) + (TRADITIONAL ? 2 * pair : pair)] = q_sums[i];
            dq_weight[slot * size_t(D) + (TRADITIONAL ? 2 * pair + 1 : pair + HALF)] =
                q_sums[PAIRS + i];
        }
    }
    for (uint i = 0; i < RESTS; ++i) {
        const uint j = 2 * HALF + i * LANES + lane;
        if (j < D) {
            dq_weight[slot * size_t(D) + j] = q_sums[2 * PAIRS + i];
        }
    }
"""


def _of_k(text: str) -> str:
    """Text about q as text about k."""
    for i in (6, 7, 8, 9):
        text = text.replace(f"sizes[{i}]", f"sizes[{i + 4}]")
    for name in ("dq_weight", "q_weight", "dq_out", "q_out", "q_sums", "q_t", "dq"):
        text = text.replace(name, name.replace("q", "k"))
    return text.replace("q + row", "k + row")


_FORWARD = f"{_START}{_LOOP}{_FORWARD_ROWS}{_of_k(_FORWARD_ROWS)}    }}\n"
_BACKWARD = f"""\
{_START}\
    float q_sums[2 * PAIRS + RESTS] = {{0}}, k_sums[2 * PAIRS + RESTS] = {{0}};
{_LOOP}{_BACKWARD_ROWS}{_of_k(_BACKWARD_ROWS)}    }}
"""

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
        block = rotation.block(chosen)
        if not sums:
            return cls(lanes, block, -(-places // block), block)
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
        if prod(q.shape[:-1]) >= 2**32 or prod(k.shape[:-1]) >= 2**32:
            raise ValueError(
                f"[qk_norm_rope] 'q' must have fewer than 2^32 rows but got {tuple(q.shape)}."
            )
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
            rotation.text(_FORWARD),
            _ROW_HEADER,
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
            rotation.text(_BACKWARD + (_STORE + _of_k(_STORE)) * sums),
            _ROW_HEADER,
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
            computed in float32, and rounded once.
        k: (B, K, L, D), with any number K of heads; may have another dtype.
        q_weight, k_weight: (D,).
        eps: added to the mean of the squares.
        dims, traditional, base, scale, offset, freqs, positions, sections, interleave_sections,
            layout: as for `rope`. The frequencies are constants here, without a gradient.

    Returns:
        Arrays of the shapes of q and k, each in the promoted dtype of it and its weight. Gradients
        for q, k and both weights; those of the weights are summed in float32, in a fixed order.
    """
    op = "qk_norm_rope"
    turn = turning(
        op, "q", q, dims, traditional=traditional, base=base, scale=scale, offset=offset,
        freqs=freqs, positions=positions, sections=sections,
        interleave_sections=interleave_sections, layout=layout,
    )  # fmt: skip
    if q.ndim != 4:
        raise ValueError(f"[{op}] 'q' must have 4 axes but got {tuple(q.shape)}.")
    # The axis of heads may differ, so that it is left out of what must agree.
    check(op, _DECLARED[turn.rotation.heads_last], (q, k, q_weight, k_weight))
    start, frequencies, *rest = turn.arrays
    if freqs is not None:
        frequencies = mx.stop_gradient(frequencies)
    return _forward(turn.rotation)(  # type: ignore[no-any-return]
        q, k, q_weight, k_weight, scalar(check_number(op, "eps", eps)), start, frequencies, *rest,
        _ONE,
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
