"""The gradient of `rope_append`: new steps taken out of the caches' cotangents, and zeros there.

    dk[b, :, l] = rope⁻¹(dk_cache[b, :, offset_b + l]),   dv[b, :, l] = dv_cache[b, :, offset_b + l]

and the gradient of a cache is its cotangent with zeros at the new steps. Where an offset is out of
range the results are NaN whatever the arguments, so that all gradients are 0. The gradient of
frequencies is `rope`'s, of k with the new steps' cotangents and of q with its own.

Bytes: reads and writes k and v; cotangents become the gradients of the caches, on the CPU where
they are if nobody else holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from .. import launch
from ..body import BodyKernel, Plan, constant
from ..broadcasting import sum_chunks
from ..metal import KernelSpec
from ..transforms import Arrays
from .rope_append_kernels import KEPT, ROW_HEADER, TAKEN, is_new, starts
from .rope_kernels import Rotation, table_in_mlx, turned
from .rope_turn import SIGNS, freqs_gradient, turn


@cache
def _taken(rotation: Rotation) -> BodyKernel:
    """k, v, cotangents of the caches, the rotation's → dk, dv; k and v tell shapes and dtypes."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        k, v, dk_cache = inputs[:3]
        sizes = rotation.sizes(k, inputs[4])
        heads, room = rotation.shape(k)[1], rotation.shape(dk_cache)[2]
        lanes = launch.pick(chosen, LANES=1 if launch.is_cpu(chosen) else 32)["LANES"]
        block = rotation.block(chosen)
        strides = (*rotation.strides(dk_cache)[2:], *rotation.strides(k)[2:])
        return Plan(
            (
                *(("K", k.dtype), ("V", v.dtype), ("D", k.shape[-1]), ("DV", v.shape[-1])),
                *rotation.template(block, lanes),
            ),
            launch.Geometry((), (lanes * -(-sizes[0] // block), 1, 1), (lanes, 1, 1)),
            (tuple(k.shape), tuple(v.shape)),
            (k.dtype, v.dtype),
            (constant((*sizes, heads, room, *strides), mx.uint32),),
        )

    def reference(
        k: mx.array, v: mx.array, dkc: mx.array, dvc: mx.array, *rest: mx.array
    ) -> Arrays:
        axis = 1 if rotation.heads_last else 2
        length, room = k.shape[axis], dkc.shape[axis]
        if not length:
            return k, v
        start, fits = starts(rotation, rest[0], k, dkc)
        shape = [k.shape[0], 1, 1, 1]
        shape[axis] = length
        index = mx.clip(start + mx.arange(length), 0, room - 1).reshape(shape)

        def take(dcache: mx.array, d: int) -> mx.array:
            index_of = mx.broadcast_to(index, (*k.shape[:-1], d))
            rows = mx.take_along_axis(dcache.astype(mx.float32), index_of, axis=axis)
            return mx.where(fits, rows, 0.0)

        dk = turned(rotation, take(dkc, k.shape[-1]), *table_in_mlx(rotation, k, rest))
        return dk.astype(k.dtype), take(dvc, v.shape[-1]).astype(v.dtype)

    return BodyKernel(
        KernelSpec(
            "rope_append__taken",
            ("k", "v", "dk_cache", "dv_cache", *rotation.inputs, "sizes"),
            ("dk", "dv"),
            rotation.text(TAKEN),
            ROW_HEADER,
        ),
        plan,
        reference,
    )


@cache
def _kept(rotation: Rotation) -> BodyKernel:
    """x, which tells the new steps, the cotangent of a cache, positions → the cache's gradient."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        x, dcache, positions = inputs
        batches, heads, room, d = rotation.shape(dcache)
        _, length, _, batch_stride, _ = rotation.sizes(x, positions)
        lanes = launch.pick(chosen, LANES=1 if launch.is_cpu(chosen) else 32)["LANES"]
        run = 256 if launch.is_cpu(chosen) else 4
        runs = -(-room // run)
        sizes = (length, batch_stride, heads, room, run, max(runs, 1))
        return Plan(
            (("T", dcache.dtype), ("D", d), ("LANES", lanes)),
            launch.Geometry((), (lanes * batches * runs, 1, 1), (lanes, 1, 1)),
            (tuple(dcache.shape),),
            (dcache.dtype,),
            (constant((*sizes, *rotation.strides(dcache)[2:]), mx.uint32),),
            ((1, 0),),
        )

    def reference(x: mx.array, dcache: mx.array, positions: mx.array) -> Arrays:
        start, fits = starts(rotation, positions, x, dcache)
        new = is_new(rotation, start, x, dcache)
        return (mx.where(mx.logical_or(new, ~fits), mx.array(0, dtype=dcache.dtype), dcache),)

    return BodyKernel(
        KernelSpec(
            "rope_append__kept", ("x", "dcache", "positions", "sizes"), ("dx",), KEPT, ROW_HEADER
        ),
        plan,
        reference,
    )


def gradients(
    rotation: Rotation, primals: Arrays, cotangents: Arrays, wanted: Sequence[int]
) -> list[mx.array | None]:
    """The rule of `rope_append`, whose inputs end with positions, frequencies, …, direction."""
    queries = len(cotangents) == 3
    k, v = primals[:2]
    place = 5 + queries
    positions, freqs, *rest, _ = primals[place - 1 :]
    back = (positions, freqs, *rest, SIGNS[False])
    found: list[mx.array | None] = [None] * len(primals)
    if 0 in wanted or 1 in wanted:
        found[0], found[1] = _taken(rotation)(k, v, *cotangents[:2], *back)
    for i, x in ((2, k), (3, v)):
        if i in wanted:
            found[i] = _kept(rotation)(x, cotangents[i - 2], positions)
    if queries and 4 in wanted:
        found[4] = turn(rotation, False)(cotangents[2], *back)
    if rotation.given and place in wanted:
        # An infinite wavelength turns nothing.
        still = mx.full(freqs.shape, mx.inf, dtype=freqs.dtype)
        dk, _ = _taken(rotation)(k, v, *cotangents[:2], positions, still, *rest, SIGNS[True])
        forward = (positions, freqs, *rest, SIGNS[True])
        sums = [freqs_gradient(rotation)(k, dk, *forward)]
        if queries:
            sums.append(freqs_gradient(rotation)(primals[4], cotangents[2], *forward))
        found[place] = sum_chunks(mx.concatenate(sums), freqs)
    return found
