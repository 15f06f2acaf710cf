"""The rows of a mixture's experts in blocks of one expert each.

Rows are sorted by expert already; what is computed here, from the experts' offsets alone, is the
block and the place of every row. Nothing waits for the counts: the number of blocks has a bound
that shapes give.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

from .. import launch, msl
from ..blas import is_openblas_used
from ..body import BodyKernel, Plan, constant
from ..metal import KernelSpec
from ..transforms import Arrays, refuses_any_shape

#: T threads of one group, each of which checks all offsets and writes the rows of some experts.
_OWNERS_BODY = """\
    const uint t = thread_position_in_threadgroup.x;
    bool valid = int64_t(offsets[0]) == 0;
    int64_t bad = int64_t(offsets[0]);
    for (uint e = 0; e < experts; ++e) {
        const int64_t next = int64_t(offsets[e + 1]);
        const bool good = next >= int64_t(offsets[e]) && next <= int64_t(rows);
        bad = valid && !good ? next : bad;
        valid = valid && good;
    }
    if (!valid && t == 0) {
        ZMLX_FAIL("offsets", bad);
    }
    for (uint e = t; e <= experts; e += T) {
        const uint first = valid ? uint(offsets[e]) : 0u;
        const uint after = e < experts ? (valid ? uint(offsets[e + 1]) : 0u) : rows;
        checked[e] = int(first);
        for (uint r = first; r < after; ++r) {
            owners[r] = min(e, experts - 1);
            owned[r] = e < experts;
        }
    }
"""

_OWNERS = KernelSpec(
    "expert_ffn__owners", ("offsets", "experts", "rows"), ("checked", "owners", "owned"),
    _OWNERS_BODY, msl.header_for("ZMLX_FAIL"),
)  # fmt: skip


def _check_values(rows: int, offsets: mx.array) -> None:
    values = [int(v) for v in offsets.tolist()]  # type: ignore[union-attr, arg-type]
    for before, value in pairwise([0, *values]):
        if value < before or value > rows or (value and value is values[0]):
            raise ValueError(f"[expert_ffn] 'offsets' must be in range but got {value}.")


@lru_cache(maxsize=launch.SHAPES_KEPT)
def _owners(rows: int) -> BodyKernel:
    """Offsets that are safe to index with, the expert of each row, and whether it has one. Where
    the offsets do not ascend from 0 to at most `rows`, they are zeros, and no row has an expert."""

    def plan(settings: launch.Settings, inputs: Arrays) -> Plan:
        experts = inputs[0].size - 1
        threads = 1 if launch.is_cpu(settings) else 256
        return Plan(
            template=(("T", threads),),
            geometry=launch.Geometry((), (threads, 1, 1), (threads, 1, 1)),
            shapes=((experts + 1,), (rows,), (rows,)),
            dtypes=(mx.int32, mx.uint32, mx.bool_),
            constants=(constant((experts,), mx.uint32), constant((rows,), mx.uint32)),
        )

    def reference(offsets: mx.array) -> Arrays:
        last = offsets.size - 2
        owners = mx.searchsorted(offsets[1:], mx.arange(rows, dtype=offsets.dtype), side="right")
        clamped = mx.minimum(owners, last).astype(mx.uint32)
        return offsets.astype(mx.int32), clamped, owners <= last

    return BodyKernel(
        _OWNERS,
        plan,
        reference,
        dynamic=refuses_any_shape("expert_ffn"),
        values=lambda offsets: _check_values(rows, offsets),
    )


class Blocks(NamedTuple):
    """Rows in blocks of one expert each: the expert of each block, the row that each place of a
    block holds (and whether it holds one), the place of each row, whether it has an expert, and
    where each expert's places begin and end. A block of one row has the row's own place."""

    size: int
    experts: mx.array
    source: mx.array | None
    filled: mx.array | None
    places: mx.array | None
    owned: mx.array
    begin: mx.array
    end: mx.array

    def segments(self) -> mx.array:
        """Beginnings and ends as `mx.segmented_mm` takes them."""
        return mx.stack([self.begin, self.end], axis=-1).astype(mx.uint32)


@lru_cache(maxsize=256)
def places_to(count: int) -> mx.array:
    """0, 1, … count - 1, evaluated."""
    array = mx.arange(count, dtype=mx.int32)
    mx.eval(array)
    return array


#: Rows of a product on the CPU: enough for the BLAS to reuse a weight, and not so many that filling
#: up blocks costs more. Measured; see `expert_ffn`.
_MOST_ROWS, _LEAST_ROWS = 128, 8


def block_size(rows: int, experts: int) -> int:
    """Rows per block, a power of two: about a quarter of an expert's rows, or 8 of them, which take
    the BLAS as long as one: reading the weight. The reference BLAS has no use for blocks."""
    if sys.platform.startswith("linux") and not is_openblas_used():
        return 1
    mean = -(-rows // experts)
    wanted = max(-(-mean // 4), min(mean, _LEAST_ROWS))
    return min(_MOST_ROWS, 1 << (wanted - 1).bit_length())


def blocks_of(offsets: mx.array, rows: int, size: int) -> Blocks:
    """The layout of so many rows, an expert's from one offset to the next, in blocks of `size`."""
    experts = offsets.size - 1
    offsets, of_row, owned = _owners(rows)(mx.stop_gradient(offsets))
    if size == 1:
        return Blocks(size, of_row, None, None, None, owned, offsets[:-1], offsets[1:])
    used = (offsets[1:] - offsets[:-1] + (size - 1)) // size
    after = mx.cumsum(used)
    before = after - used
    count = (rows + experts * (size - 1)) // size
    of_block = mx.minimum(mx.searchsorted(after, places_to(count), side="right"), experts - 1)
    places = before[of_row] * size + (places_to(rows) - offsets[of_row])
    first = offsets[of_block] + (places_to(count) - before[of_block]) * size
    source = first[:, None] + places_to(size)
    filled = source < offsets[1:][of_block][:, None]
    return Blocks(
        size,
        of_block.astype(mx.uint32),
        mx.clip(source, 0, rows - 1),
        filled,
        mx.where(owned, places, 0),
        owned,
        before * size,
        after * size,
    )
