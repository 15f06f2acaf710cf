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
from typing import Any

import mlx.core as mx

from ..arguments import Argument
from ..registry import Case, Op, Option, register
from ..remembered import Remembered, Way
from .rope_arguments import as_offset, as_option, turning
from .rope_turn import SIGNS, turn


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


def _rope(
    x: mx.array,
    freqs: mx.array | None,
    positions: mx.array | None,
    start: Any,
    dims: int | None,
    traditional: bool,
    base: float | None,
    scale: float,
    offset: Any,
    sections: Sequence[int] | None,
    interleave_sections: bool,
    layout: str,
) -> Way:
    """How x turns, by a `start` or, where that is None, an offset that says nothing."""
    asked = turning(
        "rope", "x", x, dims, traditional=traditional, base=base, scale=scale,
        offset=offset if start is None else start, freqs=freqs, positions=positions,
        sections=sections, interleave_sections=interleave_sections, layout=layout,
    )  # fmt: skip
    kernel, arrays, sign = turn(asked.rotation, True), asked.arrays, SIGNS[True]
    return lambda x, freqs, positions, start: kernel(x, *arrays(freqs, positions, start), sign)


_ROPE = Remembered(_rope)


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
        dims: how many of the D elements turn, at most 131072; the rest is copied. Even. Default: D.
        traditional: pair i is (2i, 2i + 1); else it is (i, i + dims / 2).
        base: of the frequencies. Default: 10000, unless freqs are given.
        scale: multiplies the positions.
        offset: the position of the first step: an int of 64 bits, or an array of (), or (B,) for
            one per batch, of any integer dtype. A step's position is their sum, rounded to
            float32: exact up to 2²⁴. Beyond about 2²⁷ angles lose digits: at 2⁴⁰ all but two, and
            an angle from 2⁴⁸ on does not turn.
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
    start = as_offset(offset) if positions is None else None
    return _ROPE(  # type: ignore[no-any-return]
        (x, freqs, positions, start),
        (
            dims, traditional, base, scale, offset if start is None else 0,
            as_option(sections), interleave_sections, layout,
        ),
    )  # fmt: skip


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
