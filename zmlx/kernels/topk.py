"""The k largest elements in order, for any k.

    topk    x[i₁] ≥ x[i₂] ≥ … ≥ x[iₖ] and the indices; of equal elements the first comes first

A row is cut into tiles. A thread walks over its tile and keeps the best k so far in order; a block
of elements of which none beats the last one kept costs one comparison each, and a row that rises
all the way costs k moves each. Then pairs of neighbouring runs are merged, and cut off at k, until
one is left: a launch for each doubling, in which every thread finds by bisection where its stretch
of the result begins (the merge path of Odeh, Green, Mwassi, Shmueli & Birk 2012). So no k and no
row is too long, and equal elements stay in order, since the left run wins.

Where k is large for the length of a tile, a CPU sorts instead: it counts the elements by their top
11 bits, which says below which none is among the k largest, and sorts the others by their digits,
from the last one on, so that equal elements stay in order too (Seward 1954).

Bytes: x is read once; runs of at most k elements are written and read once per doubling. Sorting
takes 16 bytes of scratch memory for each element of the 16 tiles at most that are in work. The
gradient writes dx once: dy at the indices, 0 elsewhere.
"""

from __future__ import annotations

from functools import lru_cache, partial, update_wrapper
from math import prod
from typing import Any, cast

import mlx.core as mx

from .. import launch
from ..arguments import Argument, check_integer
from ..body import BodyKernel, Plan
from ..metal import KernelSpec, scalar
from ..registry import Case, Op, Option, register
from ..remembered import Remembered, Way
from ..requests import Template
from ..targets import cpu
from .axes import NUMBERS, named_axes


def topk_reference(x: mx.array, k: int = 3, axis: int | None = -1, *, xp: Any = mx) -> Any:
    """topk in plain MLX, or NumPy's arithmetic."""
    if axis is None:
        x, axis = xp.reshape(x, (-1,)), 0
    rows = xp.swapaxes(x, axis, -1)
    if xp is mx:
        values, at = _plain(rows, k)
    else:
        at = xp.argsort(-xp.stop_gradient(rows), axis=-1)[..., :k]
        picked = [xp.take_along_axis(rows, at[..., n : n + 1], axis=-1) for n in range(k)]
        values = xp.concatenate(picked, axis=-1)
    return xp.swapaxes(values, axis, -1), xp.swapaxes(at, axis, -1)


def _plain(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Over the last axis. MLX sorts upwards and keeps the order of equal elements, so that a sort
    of the reversed row, reversed again, has them in order too. NaN counts as the largest."""
    d = x.shape[-1]
    at = d - 1 - mx.argsort(mx.stop_gradient(x[..., ::-1]), axis=-1)[..., ::-1][..., :k]
    at = at.astype(mx.uint32)
    return mx.take_along_axis(x, at, axis=-1), at


# ---- kernels ------------------------------------------------------------------------------------

_HEADER = """\
// Whether `a`, which comes later, goes before `b`: NaN is the largest.
template <typename E>
inline bool zmlx_beats(E a, E b) {
    return (a > b) | ((a != a) & (b == b));
}
"""

_KEYS = """\
// Numbers that rise where elements come later: NaN is first, and the zeros are equal.
inline uint zmlx_key(int v) {
    return ~(uint(v) ^ 0x80000000u);
}
inline uint zmlx_key(uint v) {
    return ~v;
}
inline uint zmlx_key(float v) {
    const uint bits = as_type<uint>(v);
    const uint down = bits ^ (((bits >> 31) - 1u) & 0x7FFFFFFFu);
    return v != v ? 0u : v == 0.0f ? 0x7FFFFFFFu : down;
}
inline uint64_t zmlx_key(uint64_t v) {
    return ~v;
}
inline uint64_t zmlx_key(int64_t v) {
    return ~(uint64_t(v) ^ (uint64_t(1) << 63));
}
"""

_TILES = KernelSpec(
    name="topk_tiles",
    input_names=("x", "rows", "length", "tiles", "k", "span"),
    output_names=("values", "at"),
    header=_HEADER,
    body="""
        const uint item = thread_position_in_grid.x
            + thread_position_in_grid.y * threads_per_grid.x;
        if (item >= uint(rows) * uint(tiles)) {
            return;
        }
        const uint first = item % uint(tiles) * uint(span);
        const uint count = min(uint(span), uint(length) - first);
        const uint most = min(uint(k), uint(span));
        auto tile = x + size_t(item / uint(tiles)) * uint(length) + first;
        auto best = values + size_t(item) * most;
        auto place = at + size_t(item) * most;
        uint held = 0;
        for (uint i = 0; i < count; i += BLOCK) {
            const uint block = min(uint(BLOCK), count - i);
            auto elements = tile + i;
            if (held == most) {
                const E last = E(best[most - 1]);
                uint better = 0;
                if (block == BLOCK) {
                    for (uint u = 0; u < BLOCK; ++u) {
                        better += zmlx_beats(E(elements[u]), last) ? 1u : 0u;
                    }
                } else {
                    better = 1;
                }
                if (better == 0) {
                    continue;
                }
            }
            for (uint u = 0; u < block; ++u) {
                const E v = E(elements[u]);
                if (held == most && !zmlx_beats(v, E(best[most - 1]))) {
                    continue;
                }
                held = held < most ? held + 1 : held;
                uint p = held - 1;
                while (p > 0 && zmlx_beats(v, E(best[p - 1]))) {
                    best[p] = best[p - 1];
                    place[p] = place[p - 1];
                    p -= 1;
                }
                best[p] = T(v);
                place[p] = first + i + u;
            }
        }
        for (uint p = held; p < most; ++p) {
            best[p] = T(0);
            place[p] = 0;
        }
    """,
)

_SORTED = KernelSpec(
    name="topk_sorted",
    input_names=("x", "rows", "length", "tiles", "k", "span"),
    output_names=("values", "at", "keys", "places"),
    header=_HEADER + _KEYS,
    body="""
        const uint items = uint(rows) * uint(tiles);
        const uint room = uint(span);
        const uint most = min(uint(k), room);
        // Room for a tile twice, which passes of the sort go between.
        auto key = keys + size_t(thread_position_in_grid.x) * (2 * room);
        auto place = places + size_t(thread_position_in_grid.x) * (2 * room);
        for (uint item = thread_position_in_grid.x; item < items; item += threads_per_grid.x) {
            const uint first = item % uint(tiles) * room;
            const uint count = min(room, uint(length) - first);
            auto tile = x + size_t(item / uint(tiles)) * uint(length) + first;
            for (uint i = 0; i < count; ++i) {
                key[i] = zmlx_key(E(tile[i]));
            }
            // All elements of the bins up to `last`, the first that makes them k, are candidates.
            uint bins[2048] = {0};
            for (uint i = 0; i < count; ++i) {
                bins[uint(key[i] >> (BITS - 11))] += 1;
            }
            uint last = 0;
            for (uint before = bins[0]; before < min(most, count); before += bins[last]) {
                last += 1;
            }
            uint held = 0;
            for (uint i = 0; i < count; ++i) {
                const KEY own = key[i];
                key[held] = own;
                place[held] = i;
                held += uint(own >> (BITS - 11)) <= last ? 1u : 0u;
            }
            uint from = 0;
            for (uint shift = 0; shift < BITS; shift += 8) {
                uint ends[256] = {0};
                for (uint i = 0; i < held; ++i) {
                    ends[uint(key[from + i] >> shift) & 255u] += 1;
                }
                if (ends[uint(key[from] >> shift) & 255u] == held) {
                    continue;
                }
                uint sum = 0;
                for (uint b = 0; b < 256; ++b) {
                    const uint size = ends[b];
                    ends[b] = sum;
                    sum += size;
                }
                const uint to = room - from;
                for (uint i = 0; i < held; ++i) {
                    const KEY own = key[from + i];
                    const uint b = uint(own >> shift) & 255u;
                    const uint target = to + ends[b];
                    ends[b] += 1;
                    key[target] = own;
                    place[target] = place[from + i];
                }
                from = to;
            }
            const size_t out = size_t(item) * most;
            for (uint p = 0; p < most; ++p) {
                const uint i = p < held ? place[from + p] : 0u;
                values[out + p] = p < held ? T(tile[i]) : T(0);
                at[out + p] = p < held ? first + i : 0u;
            }
        }
    """,
)

_MERGE = KernelSpec(
    name="topk_merge",
    input_names=("x", "x_at", "rows", "length", "runs", "kept", "span", "k"),
    output_names=("values", "at"),
    header=_HEADER,
    body="""
        const uint stretches = (uint(k) + STRETCH - 1) / STRETCH;
        const uint pairs = (uint(runs) + 1) / 2;
        const uint item = thread_position_in_grid.x
            + thread_position_in_grid.y * threads_per_grid.x;
        const uint pair = item / stretches % pairs;
        const uint row = item / stretches / pairs;
        if (row >= uint(rows)) {
            return;
        }
        // Runs of so many places, of which fewer hold elements at the end of a row.
        const uint places = uint(kept);
        const size_t from = (size_t(row) * uint(runs) + 2 * pair) * places;
        auto a = x + from;
        auto b = a + places;
        auto a_at = x_at + from;
        auto b_at = a_at + places;
        const uint begin = 2 * pair * uint(span);
        const uint a_count = min(places, uint(length) - begin);
        const bool alone = 2 * pair + 1 == uint(runs);
        const uint b_count = alone ? 0u : min(places, uint(length) - begin - uint(span));
        const uint count = min(uint(k), a_count + b_count);
        const uint start = item % stretches * STRETCH;
        // How many of the first `start` elements of the result come from a.
        uint low = start > b_count ? start - b_count : 0u;
        uint high = min(start, a_count);
        while (low < high) {
            const uint middle = (low + high) / 2;
            if (zmlx_beats(E(b[start - 1 - middle]), E(a[middle]))) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        uint i = low;
        uint j = start - low;
        const size_t to = (size_t(row) * pairs + pair) * uint(k);
        const uint stop = min(start + STRETCH, uint(k));
        for (uint p = start; p < stop; ++p) {
            if (p >= count) {
                values[to + p] = T(0);
                at[to + p] = 0;
            } else {
                bool right = i >= a_count;
                if (!right && j < b_count) {
                    right = zmlx_beats(E(b[j]), E(a[i]));
                }
                values[to + p] = right ? T(b[j]) : T(a[i]);
                at[to + p] = right ? b_at[j] : a_at[i];
                j += right ? 1 : 0;
                i += right ? 0 : 1;
            }
        }
    """,
)

_COMPARED = {
    **dict.fromkeys((mx.bool_, mx.int8, mx.int16, mx.int32), mx.int32),
    **dict.fromkeys((mx.uint8, mx.uint16, mx.uint32), mx.uint32),
    mx.int64: mx.int64,
    mx.uint64: mx.uint64,
}
_BLOCK = 64


def _grid(threads: int, group: int) -> launch.Geometry:
    """That many threads, along x and then y."""
    x = min(threads, 1 << 24)
    return launch.Geometry((), (x, -(-threads // x), 1), (min(group, x), 1, 1))


@lru_cache(launch.SHAPES_KEPT)
def _launches(
    settings: launch.Settings, shape: tuple[int, ...], dtype: mx.Dtype, k: int
) -> tuple[BodyKernel, ...]:
    """What (…, D) takes to (rows, 1, k), twice: a launch on x, and those on what the one before
    found. x keeps its shape: MLX's reshape of a transposed array copies it, in ten times the time
    that a launch takes to."""
    rows, d = prod(shape[:-1]), shape[-1]
    tile, stretch, group, slots = launch.topk(settings, k, rows, d)
    compared = _COMPARED.get(dtype, mx.float32)
    runs, kept = -(-d // tile), min(k, tile)

    def launched(
        spec: KernelSpec,
        threads: int,
        template: Template,
        shape: tuple[int, ...],
        numbers: tuple[int, ...],
        scratch: tuple[tuple[tuple[int, ...], mx.Dtype], ...] = (),
    ) -> BodyKernel:
        outputs = ((shape, dtype), (shape, mx.uint32), *scratch)
        plan = Plan(
            template=(("T", dtype), ("E", compared), *template),
            geometry=_grid(threads, group),
            shapes=tuple(s for s, _ in outputs),
            dtypes=tuple(t for _, t in outputs),
            constants=tuple(scalar(n) for n in numbers),
        )
        # MLX maps what a custom function launched along with it, and then takes the results of its
        # own rule.
        return BodyKernel(spec, lambda *_: plan, lambda *_: tuple(mx.zeros(*y) for y in outputs))

    numbers = (rows, d, runs, k, tile)
    if slots:
        key = mx.uint64 if compared.size == 8 else mx.uint32
        room = (slots, 2, tile)
        first = launched(
            _SORTED, slots, (("KEY", key), ("BITS", 8 * key.size)), (rows, runs, kept), numbers,
            ((room, key), (room, mx.uint32)),
        )  # fmt: skip
    else:
        first = launched(_TILES, rows * runs, (("BLOCK", _BLOCK),), (rows, runs, kept), numbers)
    found = [first]
    span = tile
    while runs > 1:
        pairs, longer = -(-runs // 2), min(k, 2 * kept)
        threads = rows * pairs * -(-longer // stretch)
        given = (rows, d, runs, kept, span, longer)
        found.append(
            launched(_MERGE, threads, (("STRETCH", stretch),), (rows, pairs, longer), given)
        )
        runs, kept, span = pairs, longer, 2 * span
    return tuple(found)


def _over_last(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Over the last axis of an array of any shape."""
    shape = (*x.shape[:-1], k)
    if 0 in shape:
        return mx.zeros(shape, x.dtype), mx.zeros(shape, mx.uint32)
    found: tuple[mx.array, ...] = (x,)
    for run in _launches(launch.settings(), x.shape, x.dtype, k):
        found = run(*found)[:2]
    values, at = found
    return values.reshape(shape), at.reshape(shape)


def _traced(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The same as a function that transforms may take."""

    @mx.custom_function
    def run(x: mx.array) -> Any:
        return _over_last(x, k)

    def one(values: Any) -> mx.array:
        return values if isinstance(values, mx.array) else values[0]

    @run.vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> mx.array:
        x = one(primals)
        at = mx.stop_gradient(outputs[1])
        return mx.put_along_axis(mx.zeros_like(x), at, cotangents[0], axis=-1)

    @run.jvp
    def _(primals: Any, tangents: Any) -> Any:
        # Plain, since another transform may take this, which MLX's rule does not tell it about.
        at = mx.stop_gradient(_plain(one(primals), k)[1])
        return mx.take_along_axis(one(tangents), at, axis=-1), mx.zeros_like(at)

    @run.vmap
    def _(inputs: Any, axes: Any) -> Any:
        axis = axes if isinstance(axes, int) else axes[0]
        return _traced(mx.moveaxis(one(inputs), axis, 0), k), (0, 0)

    values, at = cast(Any, run)(x)
    return values, at


# ---- op -----------------------------------------------------------------------------------------


def _topk(x: mx.array, k: int, axis: int | None) -> Way:
    axes = named_axes("topk", x, axis, several=False)
    shape = tuple(x.shape) if axis is not None else (x.size,)
    along = axes[0] if axis is not None else 0
    count = check_integer("topk", "k", k)
    d = shape[along]
    if not 1 <= count <= d:
        raise ValueError(f"[topk] 'k' must be in [1, {d}] but got {k}.")
    if d >= 2**31:
        raise ValueError(f"[topk] 'x' must have an axis shorter than 2^31 but got {d}.")
    if launch.settings().target == "reference" or cpu.any_shape((x,)):
        over_last = _plain
    else:
        over_last = _traced if cpu.maybe_tracing((x,)) else _over_last

    def run(x: mx.array) -> tuple[mx.array, mx.array]:
        if axis is None:
            x = x.flatten()
        if along == len(shape) - 1:
            return over_last(x, count)
        values, at = over_last(mx.moveaxis(x, along, -1), count)
        return mx.moveaxis(values, -1, along), mx.moveaxis(at, -1, along)

    return run


_TOPK = Remembered(_topk)


def topk(x: mx.array, k: int, axis: int | None = -1) -> tuple[mx.array, mx.array]:
    """The k largest elements along an axis, in descending order, and where they are.

    Args:
        x: any shape, in float32, float16, bfloat16, bool or any integer.
        k: how many, from 1 to the length of the axis.
        axis: the axis, or None for x flattened. Another than the last is copied to the end first.

    Returns:
        The values, in x's dtype, and their indices in uint32; both have x's shape with k in place
        of the axis. Equal elements are in the order of their indices. NaN counts as larger than
        every number, as in `mx.sort`. Gradient for x, through the values.
    """
    return _TOPK((x,), (k, axis))  # type: ignore[no-any-return]


register(
    Op(
        name="topk",
        family="reductions",
        summary="the k largest elements in order, and their indices",
        formula="x[i₁] ≥ x[i₂] ≥ … ≥ x[iₖ]",
        function=update_wrapper(partial(topk, k=3), topk),
        reference=topk_reference,
        arguments=(Argument("x", "(...)", NUMBERS),),
        options=(
            Option("k", 3, (1, 4, 5), passed="input"),
            Option("axis", -1, (None,), passed="text"),
        ),
        outputs=("(*, k)", "(*, k)"),
        paper="Odeh et al. 2012, Merge Path, doi:10.1109/IPDPSW.2012.202",
        reads_backward=(),
        torch="torch.topk(x, k)",
        cases=(
            Case((3,), {"D": 1}, "one element", {"k": 1}),
            Case((2, 3), {"D": 5}, "shorter than a block, two leading axes"),
            Case((7,), {"D": 65}, "one past a tile of a GPU", {"k": 7}),
            Case((2,), {"D": 129}, "three tiles, all elements", {"k": 129}),
            Case((9,), {"D": 515}, "a tail of 3", {"k": 100}),
            Case((300,), {"D": 33}, "more rows than a group holds", {"k": 33}),
            Case((3,), {"D": 4097}, "one past a power of two", {"k": 40}),
            Case((20,), {"D": 300}, "more rows than threads that sort", {"k": 257}),
            Case((), {"D": 40}, "no leading axis", {"k": 10}),
            Case((0,), {"D": 16}, "no rows"),
        ),
        long_cases=(
            Case((2,), {"D": 40001}, "several tiles of a CPU", {"k": 50}),
            Case((2,), {"D": 65600}, "two tiles that are sorted", {"k": 600}),
        ),
        benchmarks=(
            Case((512,), {"D": 4096}, options={"k": 8}),
            Case((512,), {"D": 4096}, options={"k": 1024}),
            Case((16,), {"D": 151936}, options={"k": 50}),
            Case((16,), {"D": 151936}, options={"k": 1024}),
        ),
        refuses={"shapeless compile": "compile without shapeless=True"},
    )
)
