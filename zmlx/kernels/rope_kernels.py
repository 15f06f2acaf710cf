"""What the kernels of the RoPE family share: which position turns which pair, and by what angle.

Pair i of a head at position p is turned by the angle

    θ = scale · p · base^(-2i / dims)         or         θ = scale · p / freqs[i]

The angle is computed in turns, θ / 2π = p · (high + low) with the factor in two floats, of which
the whole part is dropped exactly by `fma`. So positions of 10⁶ cost no digits, where the product in
one float is off by a tenth of a radian, and sine and cosine see at most half a turn.

A thread handles BLOCK positions: it computes each cosine and sine once, in an array of its own, and
then walks over the heads. LANES threads share a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import pi, prod
from typing import NamedTuple

import mlx.core as mx

from .. import launch

#: How the array of positions lies: one start, a start per batch, a position per step, per batch and
#: step, or per axis, batch and step (M-RoPE).
START, STARTS, STEPS, EACH, AXES = "start", "starts", "steps", "each", "axes"

HEADER = """\
// cos and sin of 2π (position + rest) (high + low), each off by about 2^-23: what is left of whole
// turns, and of quarters of them, is exact. The polynomials are minimax on an eighth of a turn.
struct zmlx_turn {
    float cosine;
    float sine;
};
inline zmlx_turn zmlx_turn_by(float position, float rest, float high, float low) {
    const float turns = position * high;
    const float part = fma(position, high, -rint(turns)) + (position * low + rest * high);
    const float quarters = rint(4.0f * part);
    const float eighth = fma(quarters, -0.25f, part);
    const float a = fma(eighth, 6.28318548f, eighth * -1.74845553e-7f);
    const float z = a * a;
    float p = -1.95152827e-4f;
    p = fma(p, z, 8.33216076e-3f);
    p = fma(p, z, -0.166666546f);
    const float s = fma(a * z, p, a);
    float q = 2.44331561e-5f;
    q = fma(q, z, -1.38873162e-3f);
    q = fma(q, z, 4.16666457e-2f);
    const float c = fma(z * z, q, fma(z, -0.5f, 1.0f));
    const int quarter = int(quarters);
    const float other = quarter % 2 == 0 ? c : s;
    const float same = quarter % 2 == 0 ? s : c;
    zmlx_turn turn = {(quarter + 1) & 2 ? -other : other, quarter & 2 ? -same : same};
    return turn;
}

// 1 / (2π frequency) = high + low; an infinite frequency turns nothing.
struct zmlx_pace {
    float high;
    float low;
};
inline zmlx_pace zmlx_pace_of(float frequency) {
    const float inverse = 1.0f / frequency;
    const float rest = isinf(frequency) ? 0.0f : fma(-frequency, inverse, 1.0f) * inverse;
    const float high = inverse * 0.159154937f;
    const float low = fma(inverse, 0.159154937f, -high) + inverse * 6.42063833e-9f;
    zmlx_pace pace = {high, low + rest * 0.159154937f};
    return pace;
}
"""

#: Runs that the positions are cut into, where that leaves enough of them in each.
_RUNS = 16

#: The factors of a thread's pairs.
PACES = """\
    float high[PAIRS], low[PAIRS];
    for (uint i = 0; i < PAIRS; ++i) {
        const uint pair = min(uint(i * LANES) + lane, uint(HALF - 1));
        if (GIVEN) {
            const zmlx_pace pace = zmlx_pace_of(float(frequencies[pair]));
            high[i] = pace.high;
            low[i] = pace.low;
        } else {
            high[i] = float(frequencies[pair]);
            low[i] = float(frequencies[FURTHER + pair]);
        }
    }
"""

#: Of the `count` positions from `first` on: the numbers of their batch and step, and the cosines
#: and sines of the thread's pairs.
TABLE = """\
        for (uint b = 0; b < count; ++b) {
            batch[b] = (first + b) / length;
            step[b] = (first + b) % length;
            for (uint i = 0; i < PAIRS; ++i) {
                const uint pair = min(uint(i * LANES) + lane, uint(HALF - 1));
                const size_t spot = AXIS * axis_stride + batch[b] * batch_stride
                    + step[b] * step_stride;
                const float position = COUNTS ? float(int64_t(positions[spot]) + step[b])
                                              : float(positions[spot]);
                const float scaled = position * scale;
                const zmlx_turn turn =
                    zmlx_turn_by(scaled, fma(position, scale, -scaled), high[i], low[i]);
                cosines[b * PAIRS + i] = turn.cosine;
                sines[b * PAIRS + i] = turn.sine * direction;
            }
        }
"""

#: Declarations before them. `sizes` is what `Rotation.sizes` makes.
START_OF_BODY = """\
    const uint lane = thread_position_in_threadgroup.x;
    const uint places = sizes[0];
    const uint length = sizes[1];
    const size_t axis_stride = sizes[2];
    const size_t batch_stride = sizes[3];
    const size_t step_stride = sizes[4];
"""

ARRAYS = """\
    uint batch[BLOCK], step[BLOCK];
    float cosines[BLOCK * PAIRS], sines[BLOCK * PAIRS];
"""


class Rotation(NamedTuple):
    """What is static of a rotation.

    Attributes:
        half: number of pairs that turn.
        traditional: pairs are neighbours (2i, 2i + 1), and not (i, i + half).
        given: the frequencies are an argument, and not a table of `paces`.
        placed: how the positions lie.
        heads_last: arrays are (B, L, H, D), and not (B, H, L, D).
    """

    half: int
    traditional: bool
    given: bool
    placed: str
    heads_last: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """The kernel's inputs that the rotation adds."""
        axes = ("axes",) if self.placed == AXES else ()
        return ("positions", "frequencies", *axes, "scale", "direction")

    def text(self, body: str) -> str:
        """`body` for how the positions lie."""
        return body.replace("AXIS", "size_t(axes[pair])" if self.placed == AXES else "0")

    def template(self, block: int, lanes: int) -> tuple[tuple[str, int | bool], ...]:
        """Template arguments, for `block` positions a thread and `lanes` threads a position."""
        return (
            ("HALF", self.half),
            ("PAIRS", -(-self.half // lanes)),
            ("LANES", lanes),
            ("BLOCK", block),
            ("TRADITIONAL", self.traditional),
            ("GIVEN", self.given),
            ("FURTHER", 0 if self.given else self.half),
            ("COUNTS", self.placed in (START, STARTS)),
        )

    def shape(self, x: mx.array) -> tuple[int, int, int, int]:
        """(batches, heads, steps, D) of an array with any number of axes of heads."""
        batch, *middle, d = x.shape
        if self.heads_last:
            return batch, prod(middle[1:]), middle[0], d
        return batch, prod(middle[:-1]), middle[-1], d

    def sizes(self, x: mx.array, positions: mx.array) -> tuple[int, ...]:
        """What `START_OF_BODY` reads."""
        batches, _, steps, _ = self.shape(x)
        # A batch of one serves all.
        shared = self.placed in (EACH, AXES) and positions.shape[-2] == 1
        strides = {
            START: (0, 0, 0),
            STARTS: (0, 1, 0),
            STEPS: (0, 0, 1),
            EACH: (0, 0 if shared else steps, 1),
            AXES: (steps * (1 if shared else batches), 0 if shared else steps, 1),
        }[self.placed]
        return (batches * steps, steps, *strides)

    def strides(self, x: mx.array) -> tuple[int, int, int, int]:
        """Heads, and the rows from a batch, a step and a head of x to the next."""
        _, heads, steps, _ = self.shape(x)
        step, head = (heads, 1) if self.heads_last else (1, steps)
        return heads, heads * steps, step, head

    def block(self, chosen: launch.Settings) -> int:
        """Positions that a thread handles at a time."""
        if not launch.is_cpu(chosen):
            return 1
        # Rows of the same position lie together, or those of the same head; the table fits in the
        # nearest cache.
        return 1 if self.heads_last else max(1, min(16, 1024 // self.half))

    def runs(self, chosen: launch.Settings, places: int) -> tuple[int, int]:
        """Positions that a thread of a launch without sums has room for, and that it handles."""
        block = least = self.block(chosen)
        if least > 1:
            # Rows of a head follow each other for long; the table stays in the second cache.
            block = max(1, min(128, 8192 // self.half))
        block = launch.pick(chosen, BLOCK=block)["BLOCK"]
        return block, min(block, max(least, -(-places // _RUNS)))


@lru_cache(maxsize=256)
def paces(half: int, base: float) -> mx.array:
    """The factors base^(-i / half) / 2π in two floats, one after the other."""
    exact = [base ** (-i / half) / (2.0 * pi) for i in range(half)]
    high = [float(v) for v in mx.array(exact, dtype=mx.float32).tolist()]  # type: ignore[union-attr, arg-type]
    table = mx.array([*high, *(e - h for e, h in zip(exact, high, strict=True))], dtype=mx.float32)
    mx.eval(table)
    return table


@lru_cache(maxsize=256)
def axes_of(sections: tuple[int, ...], interleaved: bool) -> mx.array:
    """The axis of positions that turns each pair."""
    if interleaved:
        # Axis k > 0 has sections[k] pairs, every len(sections)-th from k on; axis 0 has the rest.
        count = len(sections)
        axes = [
            i % count if i % count and i < sections[i % count] * count else 0
            for i in range(sum(sections))
        ]
    else:
        axes = [k for k, n in enumerate(sections) for _ in range(n)]
    table = mx.array(axes, dtype=mx.int32)
    mx.eval(table)
    return table


# ---- in plain MLX -------------------------------------------------------------------------------


def angles(positions: mx.array, inverse: mx.array, axes: Sequence[mx.array] = ()) -> mx.array:
    """θ of every position (…) and pair: (…, half); positions (A, …) of several axes."""
    positions = mx.expand_dims(positions.astype(mx.float32), -1)
    for table in axes:
        numbers = mx.arange(positions.shape[0]).reshape(-1, *[1] * (positions.ndim - 1))
        positions = mx.where(numbers == table, positions, 0.0).sum(axis=0)
    return positions * inverse


def table_in_mlx(
    rotation: Rotation, x: mx.array, arguments: tuple[mx.array, ...]
) -> tuple[mx.array, mx.array]:
    """cos and sin in float32, that broadcast to (…, half) rows of x; `arguments` are those that
    `Rotation.inputs` names."""
    positions, frequencies, *axes, scale, direction = arguments
    h = rotation.half
    if rotation.given:
        inverse = 1.0 / frequencies.astype(mx.float32)
    else:
        inverse = frequencies.reshape(2, h).sum(axis=0) * (2.0 * pi)
    middle = x.ndim - 3
    if rotation.placed == START:
        positions = positions.astype(mx.int64) + steps_of(rotation, x)
    elif rotation.placed == STARTS:
        positions = mx.expand_dims(positions.astype(mx.int64), tuple(range(1, x.ndim - 1)))
        positions = positions + steps_of(rotation, x)
    elif rotation.heads_last:
        positions = mx.expand_dims(positions, tuple(range(-middle, 0)))
    elif rotation.placed != STEPS:
        positions = mx.expand_dims(positions, tuple(range(-1 - middle, -1)))
    theta = angles(positions, inverse, axes) * scale
    return mx.cos(theta), mx.sin(theta) * direction


def steps_of(rotation: Rotation, x: mx.array) -> mx.array:
    """The number of each step, of x's axes from that of the steps on without the last, one long but
    for the steps: from the elements, since their number may change in a shapeless compile. None of
    the axes before: MLX's fused kernels take an axis of one beside one of no rows for one row."""
    axis = 1 if rotation.heads_last else x.ndim - 2
    others = tuple(a for a in range(x.ndim) if a != axis)
    ones = mx.any(mx.logical_or(x == x, mx.array(True)), axis=others, keepdims=True).astype(
        mx.int32
    )
    return mx.cumsum(ones, axis=axis, inclusive=False).squeeze((*range(axis), -1))


def turned(rotation: Rotation, x: mx.array, cosine: mx.array, sine: mx.array) -> mx.array:
    """Rows of x turned, in float32."""
    h = rotation.half
    x = x.astype(mx.float32)
    if rotation.traditional:
        a, b = x[..., 0 : 2 * h : 2], x[..., 1 : 2 * h : 2]
        y = mx.stack([a * cosine - b * sine, a * sine + b * cosine], axis=-1)
        y = y.reshape(*x.shape[:-1], 2 * h)
    else:
        a, b = x[..., :h], x[..., h : 2 * h]
        y = mx.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=-1)
    return y if x.shape[-1] == 2 * h else mx.concatenate([y, x[..., 2 * h :]], axis=-1)


@lru_cache(maxsize=64)
def _matrices(rotation: Rotation, d: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """For a shapeless compile: the matrix that gives each element its partner, the one that spreads
    the angles of pairs over elements, the partner's sign, and which elements turn."""
    h = rotation.half
    of = [(2 * i, 2 * i + 1) if rotation.traditional else (i, i + h) for i in range(h)]
    partner = [[0.0] * d for _ in range(d)]
    spread = [[0.0] * d for _ in range(h)]
    sign = [0.0] * d
    for i, (a, b) in enumerate(of):
        partner[b][a] = partner[a][b] = spread[i][a] = spread[i][b] = 1.0
        sign[a], sign[b] = -1.0, 1.0
    arrays = (mx.array(partner), mx.array(spread), mx.array(sign), mx.array(sign) != 0)
    mx.eval(arrays)
    return arrays


def turned_at_any_shape(
    rotation: Rotation, x: mx.array, cosine: mx.array, sine: mx.array
) -> mx.array:
    """`turned` without a slice, which a shapeless compile cannot take: partners come from a product
    with a permutation, those that are not finite as a code, since 0 · inf is NaN."""
    partner, spread, sign, turns = _matrices(rotation, x.shape[-1])
    x = x.astype(mx.float32)
    finite = mx.isfinite(x)
    odd = mx.stop_gradient(
        mx.where(finite, 0.0, mx.where(x == mx.inf, 1.0, mx.where(x == -mx.inf, 2.0, 3.0)))
    )
    code = odd @ partner
    strange = mx.where(code == 1.0, mx.inf, mx.where(code == 2.0, -mx.inf, mx.nan))
    other = mx.where(code == 0.0, mx.where(finite, x, 0.0) @ partner, strange)
    return mx.where(turns, x * (cosine @ spread) + other * ((sine @ spread) * sign), x)
