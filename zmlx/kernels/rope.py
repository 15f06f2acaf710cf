"""Rotary position embedding.

    y1 = x1 · cos θ - x2 · sin θ,   y2 = x1 · sin θ + x2 · cos θ               (Su et al. 2021)
    θ  = scale · position / freqs[i],   freqs[i] = base^(2i / dims) unless given

for each pair i of the first `dims` elements of a head. M-RoPE (Wang et al. 2024, Qwen2-VL) has
several axes of positions, of which each turns its section of the pairs.

Bytes: the forward reads x and writes y; the backward turns dy the other way, by the same kernel. No
table of cosines is read: a thread computes those of a position once and uses them for all heads.
The gradient of freqs is one more launch, which reads x and dy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

import mlx.core as mx

from .. import launch
from ..arguments import INDICES, Argument, check_array, check_number
from ..autograd import sum_chunks
from ..body import BodyKernel, Plan, constant
from ..metal import KernelSpec, scalar
from ..registry import Case, Op, Option, register
from ..transforms import Arrays
from .rope_kernels import (
    ARRAYS,
    AXES,
    EACH,
    HEADER,
    PACES,
    START,
    START_OF_BODY,
    STARTS,
    STEPS,
    TABLE,
    Rotation,
    axes_of,
    paces,
    table_in_mlx,
    turned,
    turned_at_any_shape,
)

LAYOUTS = ("BHLD", "BLHD")
POSITIONS = (*INDICES, mx.float32)


def rope_reference(
    x: mx.array,
    freqs: mx.array | None = None,
    positions: mx.array | None = None,
    *,
    dims: int | None = None,
    traditional: bool = False,
    base: float | None = None,
    scale: float = 1.0,
    offset: int = 0,
    layout: str = "BHLD",
    xp: Any = mx,
) -> Any:
    """rope in plain MLX."""
    d = x.shape[-1] if dims is None else dims
    heads_last = layout == "BLHD"
    steps = x.shape[1 if heads_last else -2]
    kind = xp.float32 if xp is mx else x.dtype
    wave = 10000.0 if base is None else base
    inverse = xp.array([wave ** (-2 * i / d) for i in range(d // 2)], dtype=kind)
    if freqs is not None:
        inverse = 1.0 / freqs
    places = xp.arange(steps) + offset if positions is None else positions
    theta = (xp.array(places, dtype=kind) * scale)[:, None] * inverse
    if heads_last:
        theta = theta.reshape(steps, *[1] * (x.ndim - 3), d // 2)
    cosine, sine = xp.cos(theta), xp.sin(theta)
    if traditional:
        a, b = x[..., 0:d:2], x[..., 1:d:2]
        y = xp.stack([a * cosine - b * sine, a * sine + b * cosine], axis=-1)
        y = y.reshape((*x.shape[:-1], d))
    else:
        a, b = x[..., : d // 2], x[..., d // 2 : d]
        y = xp.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=-1)
    y = xp.concatenate([y, x[..., d:]], axis=-1) if d < x.shape[-1] else y
    return y.astype(x.dtype) if xp is mx else y


# ---- kernels ------------------------------------------------------------------------------------

_BODY = (
    START_OF_BODY
    + """\
    const uint heads = sizes[5];
    const size_t row_batch = sizes[6];
    const size_t row_step = sizes[7];
    const size_t row_head = sizes[8];
    const uint share = sizes[9];
"""
    + PACES
    + ARRAYS
    + """\
    const uint first = thread_position_in_grid.y * BLOCK;
    const uint count = min(uint(BLOCK), places - first);
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
                sums[i] += across[i] * float(positions[spot] + (COUNTS ? int(step[b]) : 0));
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
def _turn(rotation: Rotation, forward: bool) -> BodyKernel:
    """x, positions, frequencies (, axes), scale, direction → y."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        x = inputs[0]
        strides = rotation.strides(x)
        sizes = rotation.sizes(x, inputs[1])
        _check_size(x)
        lanes = _lanes(chosen, rotation.half)
        block = launch.pick(chosen, BLOCK=rotation.block(chosen))["BLOCK"]
        blocks = -(-sizes[0] // block)
        # As few threads as fill a GPU: a thread that has more heads computes fewer cosines.
        share = strides[0] if launch.is_cpu(chosen) else 4
        group = 1 if launch.is_cpu(chosen) else min(256 // lanes, max(blocks, 1))
        return Plan(
            (
                *(("T", x.dtype), ("D", x.shape[-1]), ("TOGETHER", 2 - strides[0] % 2)),
                *rotation.template(block, lanes),
            ),
            launch.Geometry(
                (), (lanes, blocks, -(-strides[0] // max(share, 1))), (lanes, group, 1)
            ),
            (tuple(x.shape),),
            (x.dtype,),
            (constant((*sizes, *strides, share), mx.uint32),),
        )

    def plain(turn: Any) -> Any:
        def reference(x: mx.array, *arguments: mx.array) -> Arrays:
            return (turn(rotation, x, *table_in_mlx(rotation, x, arguments)).astype(x.dtype),)

        return reference

    def vjp(
        primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> list[mx.array | None]:
        x, *rest = primals
        found: list[mx.array | None] = [None] * len(primals)
        if 0 in wanted:
            found[0] = _turn(rotation, not forward)(cotangents[0], *rest[:-1], _SIGNS[not forward])
        if rotation.given and 2 in wanted:
            partial = _freqs_gradient(rotation)(x, cotangents[0], *rest)
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


_SIGNS = {True: scalar(1.0), False: scalar(-1.0)}


@cache
def _freqs_gradient(rotation: Rotation) -> BodyKernel:
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


def _check_size(x: mx.array) -> None:
    if prod(x.shape[:-1]) >= 2**32:
        raise ValueError(f"[rope] 'x' must have fewer than 2^32 rows but got {tuple(x.shape)}.")


# ---- op -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _start(value: int) -> mx.array:
    return mx.array([value], dtype=mx.int32)


@dataclass(frozen=True)
class Turning:
    """A rotation with its arrays, checked: what the ops of the family share."""

    rotation: Rotation
    arrays: Arrays


def turning(
    op: str,
    name: str,
    x: mx.array,
    dims: int | None,
    *,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: int | mx.array,
    freqs: mx.array | None,
    positions: mx.array | None,
    sections: Sequence[int] | None,
    interleave_sections: bool,
    layout: str,
) -> Turning:
    """The rotation of the array x, which the op calls `name`; else `[op] 'argument' must …`."""

    def bad(argument: str, must: str, got: Any) -> ValueError:
        return ValueError(f"[{op}] '{argument}' must {must} but got {got}.")

    check_array(op, name, x)
    if x.ndim < 3:
        raise bad(name, "have shape (B, *, L, D)", tuple(x.shape))
    if layout not in LAYOUTS:
        raise bad("layout", f"be one of {', '.join(LAYOUTS)}", repr(layout))
    batches, d = x.shape[0], x.shape[-1]
    steps = x.shape[-2] if layout == "BHLD" else x.shape[1]
    if dims is None:
        dims = d
    if not isinstance(dims, int) or isinstance(dims, bool):
        raise TypeError(f"[{op}] 'dims' must be an int but got {type(dims).__name__}.")
    if dims % 2 or not 2 <= dims <= d:
        raise bad("dims", f"be even and in [2, {d}]", dims)
    if not isinstance(traditional, bool):
        raise TypeError(
            f"[{op}] 'traditional' must be True or False but got {type(traditional).__name__}."
        )
    half = dims // 2

    if freqs is None:
        base = 10000.0 if base is None else check_number(op, "base", base)
        if not base > 0:
            raise bad("base", "be positive", base)
        frequencies = paces(half, base)
    else:
        check_array(op, "freqs", freqs)
        if tuple(freqs.shape) != (half,):
            raise bad("freqs", f"have shape ({half},)", tuple(freqs.shape))
        if base is not None:
            raise bad("base", "be None where freqs are given", base)
        frequencies = freqs

    axes: Arrays = ()
    if sections is not None:
        sections = tuple(sections)
        if not all(isinstance(n, int) and n >= 0 for n in sections) or sum(sections) != half:
            raise bad("sections", f"be sizes ≥ 0 that sum to {half}", sections)
        if positions is None:
            raise bad("positions", f"have shape ({len(sections)}, {batches}, {steps})", None)
        axes = (axes_of(sections, interleave_sections),)
    elif interleave_sections:
        raise bad("interleave_sections", "be False without sections", interleave_sections)

    if positions is not None:
        if isinstance(offset, mx.array) or offset != 0:
            raise bad("offset", "be 0 where positions are given", offset)
        check_array(op, "positions", positions, POSITIONS)
        shape = tuple(positions.shape)
        if sections is not None:
            count = len(sections)
            if shape == (count, steps):
                positions = positions[:, None]
            elif shape not in ((count, batches, steps), (count, 1, steps)):
                raise bad("positions", f"have shape ({count}, {batches}, {steps})", shape)
            placed = AXES
        elif shape == (steps,):
            placed = STEPS
        elif shape in ((batches, steps), (1, steps)):
            placed = EACH
        else:
            raise bad("positions", f"have shape ({steps},) or ({batches}, {steps})", shape)
        start = positions
    elif isinstance(offset, mx.array):
        check_array(op, "offset", offset, INDICES)
        shape = tuple(offset.shape)
        if shape not in ((), (1,), (batches,)):
            raise bad("offset", f"have shape () or ({batches},)", shape)
        placed = STARTS if shape == (batches,) and batches > 1 else START
        start = offset.reshape(1) if shape == () else offset
    else:
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise TypeError(
                f"[{op}] 'offset' must be an int or an mx.array but got {type(offset).__name__}."
            )
        if not -(2**31) <= offset < 2**31 - steps:
            raise bad("offset", "be a position of 32 bits", offset)
        placed, start = START, _start(offset)
    rotation = Rotation(half, traditional, freqs is not None, placed, layout == "BLHD")
    factor = scalar(check_number(op, "scale", scale))
    return Turning(rotation, (start, frequencies, *axes, factor))


def rope(
    x: mx.array,
    dims: int | None = None,
    *,
    traditional: bool = False,
    base: float | None = None,
    scale: float = 1.0,
    offset: int | mx.array = 0,
    freqs: mx.array | None = None,
    positions: mx.array | None = None,
    sections: Sequence[int] | None = None,
    interleave_sections: bool = False,
    layout: str = "BHLD",
) -> mx.array:
    """Rotary position embedding, as `mx.fast.rope`.

        y1 = x1 · cos θ - x2 · sin θ,   y2 = x1 · sin θ + x2 · cos θ
        θ  = scale · position / freqs[i],   freqs[i] = base^(2i / dims) unless given

    New lengths, positions, frequencies, bases and scales compile nothing.

    Args:
        x: (B, *, L, D), or (B, L, *, D) for the layout "BLHD", in float32, float16 or bfloat16;
            computed in float32.
        dims: how many of the D elements turn; the rest is copied. Even. Default: D.
        traditional: pair i is (2i, 2i + 1); else it is (i, i + dims / 2).
        base: of the frequencies. Default: 10000, unless freqs are given.
        scale: multiplies the positions.
        offset: the position of the first step: an int, or an array of (), or (B,) for one per
            batch, in int32, uint32 or int64.
        freqs: (dims / 2,), wavelengths over 2π, in place of base; see `rope_freqs`.
        positions: the position of each step instead: (L,) or (B, L), or for sections (A, B, L) or
            (A, L), in int32, uint32, int64 or float32. They count up to 2²⁴ exactly.
        sections: M-RoPE: how many pairs turn by each of the A axes of positions, as Qwen2-VL's
            `mrope_section`; they sum to dims / 2.
        interleave_sections: axis k > 0 turns every A-th pair from k on, as in Qwen3-VL, and not
            neighbouring pairs.
        layout: "BHLD" or "BLHD", where the steps lie.

    Returns:
        An array of x's shape and dtype. Gradients for x and freqs.
    """
    turn = turning(
        "rope", "x", x, dims, traditional=traditional, base=base, scale=scale, offset=offset,
        freqs=freqs, positions=positions, sections=sections,
        interleave_sections=interleave_sections, layout=layout,
    )  # fmt: skip
    return _turn(turn.rotation, True)(x, *turn.arrays, _SIGNS[True])  # type: ignore[no-any-return]


def _keywords(
    x: mx.array,
    freqs: mx.array | None = None,
    positions: mx.array | None = None,
    *,
    dims: int | None = None,
    **options: Any,
) -> mx.array:
    """rope with its arrays first, as entries call it."""
    return rope(x, dims, freqs=freqs, positions=positions, **options)


def _built_in(
    x: mx.array,
    freqs: mx.array | None = None,
    *,
    dims: int | None = None,
    traditional: bool = False,
    base: float | None = None,
    scale: float = 1.0,
    offset: int = 0,
    layout: str = "BHLD",
) -> mx.array:
    """MLX's own, which knows no positions and one layout."""
    assert layout == "BHLD"
    wave = (10000.0 if base is None else base) if freqs is None else None
    return mx.fast.rope(
        x, dims or x.shape[-1], traditional=traditional, base=wave, scale=scale, offset=offset,
        freqs=freqs,
    )  # fmt: skip


def _case(lead: tuple[int, ...], steps: int, d: int, why: str, **options: Any) -> Case:
    half = options.get("dims", d) // 2
    given = options.pop("given", True)
    return Case(lead, {"L": steps, "D": d, "F": half}, why, options, optional=given)


register(
    Op(
        name="rope",
        family="rope",
        summary="rotary position embedding",
        formula="pairs turned by scale · position / freqs",
        function=_keywords,
        reference=rope_reference,
        arguments=(
            Argument("x", "(*, L, D)"),
            Argument("freqs", "(F,)", optional=True),
            Argument("positions", "(L,)", (mx.int32,), differentiable=False, optional=True),
        ),
        options=(
            Option("traditional", False, (True,), passed="text"),
            Option("scale", 1.0, (0.25,)),
            Option("base", None),
            Option("offset", 0),
            Option("dims", None, passed="text"),
            Option("layout", "BHLD", passed="text"),
        ),
        outputs=("(*, L, D)",),
        baseline=_built_in,
        paper="Su et al. 2021, arXiv:2104.09864; M-RoPE: Wang et al. 2024, arXiv:2409.12191",
        torch="(lambda t: torch.cat("
        "(x[..., : x.shape[-1] // 2] * t.cos() - x[..., x.shape[-1] // 2 :] * t.sin(),"
        " x[..., : x.shape[-1] // 2] * t.sin() + x[..., x.shape[-1] // 2 :] * t.cos()), -1)"
        ".to(x.dtype))(torch.arange(x.shape[-2])[:, None]"
        " / 10000.0 ** (torch.arange(x.shape[-1] // 2) * (2.0 / x.shape[-1])))",
        cases=(
            _case((1,), 1, 2, "one pair"),
            _case((2, 3), 5, 6, "three pairs, explicit positions"),
            _case((2, 1), 7, 6, "another length"),
            _case((2, 2), 9, 62, "one lane short of a simdgroup", given=False, offset=100),
            _case((1, 2), 33, 66, "one pair past a simdgroup, a last block that is not full"),
            _case((1, 5), 17, 128, "more heads than a thread has", given=False, base=5e5),
            _case((2, 3), 4, 11, "not all elements turn", dims=6, traditional=True),
            _case((1, 3), 5, 80, "not all elements turn", dims=32, given=False),
            _case((2, 4), 3, 8, "heads last", layout="BLHD", given=False),
            _case((2, 3), 3, 8, "heads last, as many steps", layout="BLHD", traditional=True),
            _case((2,), 6, 8, "no axis of heads, neighbours", traditional=True, given=False),
            _case((2, 2, 2), 3, 8, "two axes of heads", scale=0.5),
            Case((0, 2), {"L": 3, "D": 8, "F": 4}, "no rows"),
        ),
        long_cases=(_case((1,), 2, 4098, "a head longer than any model's"),),
        benchmarks=(
            _case((1, 32), 2048, 128, "prefill", given=False),
            _case((8, 32), 1, 128, "decode", given=False),
        ),
        samples={
            "freqs": lambda rng, shape, sizes: 10.0 ** rng.uniform(0.0, 3.0, shape),
            "positions": lambda rng, shape, sizes: rng.integers(0, 64, shape),
        },
    )
)
