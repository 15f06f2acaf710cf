"""The kernels of `rope`: rows turned, and the gradient of the frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from .. import launch
from ..body import BodyKernel, Plan, constant
from ..broadcasting import sum_chunks
from ..metal import KernelSpec, scalar
from ..transforms import Arrays
from .rope_arguments import check_rows
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

_BODY = (
    START_OF_BODY
    + """\
    const uint heads = sizes[5];
    const size_t row_batch = sizes[6];
    const size_t row_step = sizes[7];
    const size_t row_head = sizes[8];
    const uint share = sizes[9];
    const uint run = sizes[10];
"""
    + PACES
    + ARRAYS
    + """\
    const uint first = thread_position_in_grid.y * run;
    const uint count = min(run, places - first);
    {
"""
    + TABLE
    + """\
    }
    const uint from = thread_position_in_grid.z * share;
    const uint upto = min(heads, from + share);
    const size_t apart = row_head * D;
    for (uint head = from; head < upto; head += TOGETHER) {
        for (uint b = 0; b < count; ++b) {
            const size_t row = batch[b] * row_batch + step[b] * row_step + head * row_head;
            auto source = x + row * D;
            auto target = y + row * D;
            const thread float* cosine = cosines + b * PAIRS;
            const thread float* sine = sines + b * PAIRS;
            for (uint i = 0; i < PAIRS; ++i) {
                const uint pair = i * LANES + lane;
                if (PAIRS * LANES == HALF || pair < HALF) {
                    const uint one = TRADITIONAL ? 2 * pair : pair;
                    const uint two = TRADITIONAL ? 2 * pair + 1 : pair + HALF;
                    for (uint g = 0; g < TOGETHER; ++g) {
                        const float x1 = float(source[g * apart + one]);
                        const float x2 = float(source[g * apart + two]);
                        target[g * apart + one] = T(x1 * cosine[i] - x2 * sine[i]);
                        target[g * apart + two] = T(x1 * sine[i] + x2 * cosine[i]);
                    }
                }
            }
            for (uint g = 0; g < TOGETHER; ++g) {
                for (uint j = 2 * HALF + lane; j < D; j += LANES) {
                    target[g * apart + j] = source[g * apart + j];
                }
            }
        }
    }
"""
)

# dθ of a pair is dy2 · y1 - dy1 · y2.
_FREQS_BODY = (
    START_OF_BODY
    + """\
    const uint heads = sizes[5];
    const size_t row_batch = sizes[6];
    const size_t row_step = sizes[7];
    const size_t row_head = sizes[8];
    const uint chunk = sizes[9];
    const uint slot = thread_position_in_grid.y;
"""
    + PACES
    + ARRAYS
    + """\
    float sums[PAIRS] = {0};
    const uint stop = min(places, (slot + 1) * chunk);
    for (uint first = slot * chunk; first < stop; first += BLOCK) {
        const uint count = min(uint(BLOCK), stop - first);
"""
    + TABLE
    + """\
        for (uint b = 0; b < count; ++b) {
            float across[PAIRS] = {0};
            for (uint head = 0; head < heads; ++head) {
                const size_t row = batch[b] * row_batch + step[b] * row_step + head * row_head;
                auto source = x + row * D;
                auto slope = dy + row * D;
                const thread float* cosine = cosines + b * PAIRS;
                const thread float* sine = sines + b * PAIRS;
                for (uint i = 0; i < PAIRS; ++i) {
                    const uint pair = min(uint(i * LANES) + lane, uint(HALF - 1));
                    const uint one = TRADITIONAL ? 2 * pair : pair;
                    const uint two = TRADITIONAL ? 2 * pair + 1 : pair + HALF;
                    const float x1 = float(source[one]);
                    const float x2 = float(source[two]);
                    across[i] += float(slope[two]) * (x1 * cosine[i] - x2 * sine[i])
                        - float(slope[one]) * (x1 * sine[i] + x2 * cosine[i]);
                }
            }
            for (uint i = 0; i < PAIRS; ++i) {
                const uint pair = min(uint(i * LANES) + lane, uint(HALF - 1));
                const size_t spot = AXIS * axis_stride + batch[b] * batch_stride
                    + step[b] * step_stride;
                const float position = COUNTS ? float(int64_t(positions[spot]) + step[b])
                                              : float(positions[spot]);
                sums[i] += across[i] * position;
            }
        }
    }
    for (uint i = 0; i < PAIRS; ++i) {
        const uint pair = i * LANES + lane;
        if (pair < HALF) {
            const float inverse = 1.0f / float(frequencies[pair]);
            dfreqs[slot * HALF + pair] = -direction * scale * inverse * inverse * sums[i];
        }
    }
"""
)


def _lanes(chosen: launch.Settings, half: int) -> int:
    """Threads that share a position."""
    wanted = 1 if launch.is_cpu(chosen) else min(32, 1 << (half - 1).bit_length())
    return launch.pick(chosen, LANES=wanted)["LANES"]


@cache
def turn(rotation: Rotation, forward: bool) -> BodyKernel:
    """x, positions, frequencies (, axes), scale, direction → y."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        x = inputs[0]
        strides = rotation.strides(x)
        sizes = rotation.sizes(x, inputs[1])
        check_rows("rope", "x", x)
        lanes = _lanes(chosen, rotation.half)
        block, run = rotation.runs(chosen, sizes[0])
        blocks = -(-sizes[0] // run)
        # As few threads as fill a GPU: a thread that has more heads computes fewer cosines.
        share = strides[0] if launch.is_cpu(chosen) else 4
        group = 1 if launch.is_cpu(chosen) else min(256 // lanes, max(blocks, 1))
        return Plan(
            (
                *(
                    ("T", x.dtype),
                    ("D", x.shape[-1]),
                    ("TOGETHER", 2 - strides[0] % 2),
                ),
                *rotation.template(block, lanes),
            ),
            launch.Geometry(
                (), (lanes, blocks, -(-strides[0] // max(share, 1))), (lanes, group, 1)
            ),
            (tuple(x.shape),),
            (x.dtype,),
            (constant((*sizes, *strides, share, run), mx.uint32),),
        )

    def plain(rows: Any) -> Any:
        def reference(x: mx.array, *arguments: mx.array) -> Arrays:
            return (rows(rotation, x, *table_in_mlx(rotation, x, arguments)).astype(x.dtype),)

        return reference

    def vjp(
        primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> list[mx.array | None]:
        x, *rest = primals
        found: list[mx.array | None] = [None] * len(primals)
        if 0 in wanted:
            found[0] = turn(rotation, not forward)(cotangents[0], *rest[:-1], SIGNS[not forward])
        if rotation.given and 2 in wanted:
            partial = freqs_gradient(rotation)(x, cotangents[0], *rest)
            found[2] = sum_chunks(partial, primals[2])
        return found

    return BodyKernel(
        KernelSpec(
            "rope",
            ("x", *rotation.inputs, "sizes"),
            ("y",),
            rotation.text(_BODY),
            HEADER,
        ),
        plan,
        plain(turned),
        dynamic=plain(turned_at_any_shape),
        vjp=vjp,
    )


SIGNS = {True: scalar(1.0), False: scalar(-1.0)}


@cache
def freqs_gradient(rotation: Rotation) -> BodyKernel:
    """x, dy, positions, frequencies (, axes), scale, direction → (chunks, half) partial sums."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        x = inputs[0]
        sizes = rotation.sizes(x, inputs[2])
        lanes = _lanes(chosen, rotation.half)
        chunks, chunk = launch.row_chunks(sizes[0])
        group = 1 if launch.is_cpu(chosen) else min(256 // lanes, chunks)
        return Plan(
            (("D", x.shape[-1]), *rotation.template(rotation.block(chosen), lanes)),
            launch.Geometry((), (lanes, chunks, 1), (lanes, group, 1)),
            ((chunks, rotation.half),),
            (mx.float32,),
            (constant((*sizes, *rotation.strides(x), chunk), mx.uint32),),
        )

    def reference(x: mx.array, dy: mx.array, *arguments: mx.array) -> Arrays:
        def of(freqs: mx.array) -> list[mx.array]:
            some = (arguments[0], freqs, *arguments[2:])
            return [turned(rotation, x, *table_in_mlx(rotation, x, some))]

        freqs = arguments[1].astype(mx.float32)
        total = mx.vjp(of, [freqs], [dy.astype(mx.float32)])[1][0]
        chunks, _ = launch.row_chunks(rotation.sizes(x, arguments[0])[0])
        rest = mx.zeros((chunks - 1, rotation.half), mx.float32)
        return (mx.concatenate([total[None], rest]),)

    return BodyKernel(
        KernelSpec(
            "rope__dfreqs",
            ("x", "dy", *rotation.inputs, "sizes"),
            ("dfreqs",),
            rotation.text(_FREQS_BODY),
            HEADER,
        ),
        plan,
        reference,
    )
