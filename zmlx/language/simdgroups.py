"""Functions of simdgroups and quads, each on the lanes that take part: those with an odd third bit
are elsewhere, as after a branch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from .row import Row

_LANES = 32
#: What a lane holds, and whether it takes part.
_VALUE = [lane * 7 % 5 + 1 for lane in range(_LANES)]
_ACTIVE = [lane for lane in range(_LANES) if not lane & 4 or lane in (5, 6)]
_BODY = "int v = int(i * 7 % 5) + 1;\nif (!(i & 4) || i == 5 || i == 6) {{ r = {}; }}"


def _row(call: str, width: int, result: Callable[[int, list[int]], Any]) -> Row:
    """`result(lane, others)` of the active lanes of each simdgroup or quad; a function that leaves
    a lane's result open there gives None, and the lane's value is not looked at."""
    expected = np.full(_LANES, -9, np.float32)
    looked = []
    for lane in _ACTIVE:
        others = [k for k in _ACTIVE if k // width == lane // width]
        value = result(lane, others)
        if value is None:
            looked.append(lane)
        else:
            expected[lane] = value
    body = _BODY.format(call)
    if looked:
        body += "\nif (" + " || ".join(f"i == {lane}" for lane in looked) + ") r = -9;"
    return Row(body, expected, threads=_LANES, together=True)


def _fold(operation: Callable[[int, int], int]) -> Callable[[int, list[int]], int]:
    return lambda lane, others: reduce(operation, [_VALUE[k] for k in others])


def _scan(operation: Callable[[int, int], int], start: int, own: bool) -> Any:
    def result(lane: int, others: list[int]) -> int:
        before = [_VALUE[k] for k in others if k < lane or (own and k == lane)]
        return reduce(operation, before, start)

    return result


def _from(source: Callable[[int], int]) -> Callable[[int, list[int]], int | None]:
    """The value of another lane; undefined where that one does not take part."""
    return lambda lane, others: _VALUE[source(lane)] if source(lane) in others else None


def _filled(place: Callable[[int], int], width: int) -> Any:
    """As `_from`, with the value + 100 of the lane itself shifted in from outside."""

    def result(lane: int, others: list[int]) -> int | None:
        own = place(lane % width)
        at = lane // width * width + own % width
        if at not in others:
            return None
        return _VALUE[at] + (0 if 0 <= own < width else 100)

    return result


def _half_of_mask(chosen: Callable[[int], bool], width: int) -> Any:
    """Bits 0 to 15 of a mask of lanes in the lower lanes, 16 to 31 in the upper ones: a float holds
    24."""

    def result(lane: int, others: list[int]) -> int:
        mask = sum(1 << k % width for k in others if chosen(k))
        return mask >> (0 if lane < 16 else 16) & 0xFFFF

    return result


def _first(lane: int, others: list[int]) -> int:
    return others[0]


def _functions(kind: str, width: int) -> dict[str, Row]:
    def up(lane: int) -> int:
        return lane - 1 if lane % width else lane

    def down(lane: int) -> int:
        return lane + 1 if lane % width < width - 1 else lane

    def turned(by: int) -> Callable[[int], int]:
        return lambda lane: lane // width * width + (lane + by) % width

    def base(lane: int) -> int:
        return lane // width * width

    mask = f"uint({kind}_vote::vote_t({kind}_{{}}))"
    table: dict[str, tuple[str, Callable[[int, list[int]], Any]]] = {
        "sum": ("(v)", _fold(operator.add)),
        "product": ("(i < 8 ? v : 1)", lambda lane, o: reduce(
            operator.mul, [_VALUE[k] if k < 8 else 1 for k in o])),
        "min": ("(v)", _fold(min)),
        "max": ("(v)", _fold(max)),
        "and": ("(v)", _fold(lambda a, b: a & b)),
        "or": ("(v)", _fold(lambda a, b: a | b)),
        "xor": ("(v)", _fold(lambda a, b: a ^ b)),
        "prefix_inclusive_sum": ("(v)", _scan(operator.add, 0, True)),
        "prefix_exclusive_sum": ("(v)", _scan(operator.add, 0, False)),
        "prefix_inclusive_product": ("(i < 8 ? v : 1)", lambda lane, o: reduce(
            operator.mul, [_VALUE[k] for k in o if k <= lane and k < 8], 1)),
        "prefix_exclusive_product": ("(i < 8 ? v : 1)", lambda lane, o: reduce(
            operator.mul, [_VALUE[k] for k in o if k < lane and k < 8], 1)),
        "broadcast": ("(v, 1)", _from(lambda lane: base(lane) + 1)),
        "broadcast_first": ("(v)", lambda lane, o: _VALUE[_first(lane, o)]),
        "shuffle": (f"(v, ushort((i * 3 + 1) % {width}))",
                    _from(lambda lane: base(lane) + (lane * 3 + 1) % width)),
        "shuffle_xor": ("(v, 1)", _from(lambda lane: lane ^ 1)),
        "shuffle_up": ("(v, 1)", _from(up)),
        "shuffle_down": ("(v, 1)", _from(down)),
        "shuffle_rotate_up": ("(v, 1)", _from(turned(-1))),
        "shuffle_rotate_down": ("(v, 1)", _from(turned(1))),
        "shuffle_and_fill_up": ("(v, v + 100, 1)", _filled(lambda p: p - 1, width)),
        "shuffle_and_fill_down": ("(v, v + 100, 1)", _filled(lambda p: p + 1, width)),
        "all": ("(v > 0)", lambda lane, o: True),
        "any": ("(v > 4)", lambda lane, o: any(_VALUE[k] > 4 for k in o)),
        "is_first": ("()", lambda lane, o: lane == _first(lane, o)),
    }  # fmt: skip
    rows = {f"{kind}_{n}": _row(f"{kind}_{n}{call}", width, f) for n, (call, f) in table.items()}
    for name, call, chosen in (
        ("ballot", "ballot(v > 3)", lambda k: _VALUE[k] > 3),
        ("active_threads_mask", "active_threads_mask()", lambda k: True),
    ):
        half = f"float({mask.format(call)} >> (i < 16 ? 0 : 16) & 0xffff)"
        rows[f"{kind}_{name}"] = _row(half, width, _half_of_mask(chosen, width))
    rows[f"{kind}_vote"] = _row(
        f"{kind}_ballot(v > 0).all() + 2 * {kind}_ballot(v > 0).any()",
        width,
        lambda lane, o: (len(o) == width) + 2,
    )
    return rows


SIMD = _functions("simd", 32)
QUAD = _functions("quad", 4)

_MOVED = {
    "float": ("float(v) + 0.5f", 0.5), "half": ("half(v) + 0.5h", 0.5),
    "bfloat": ("bfloat(float(v) + 0.5f)", 0.5), "char": ("char(v)", 0), "uchar": ("uchar(v)", 0),
    "short": ("short(v)", 0), "ushort": ("ushort(v)", 0), "uint": ("uint(v)", 0),
}  # fmt: skip


def _shuffled(held: Callable[[int], Any], fill: int) -> np.ndarray:
    """Of every lane: the value of lane ^ 3, of the next, of the one before, and filled from below,
    in decimal places."""
    v = np.array([held(value) for value in _VALUE], np.float32)
    lanes = np.arange(_LANES)
    below = v[np.maximum(lanes - 1, 0)]
    total: np.ndarray = v[lanes ^ 3] + 10 * v[np.minimum(lanes + 1, 31)] + 100 * below
    total += 1000 * np.where(lanes > 0, below, fill)
    return total.astype(np.float32)


TYPES = {
    **{
        f"of {kind}": Row(
            f"int v = int(i * 7 % 5) + 1;\n{kind} w = {make};\n"
            "r = float(simd_shuffle_xor(w, 3)) + 100 * float(simd_max(w));",
            np.array([_VALUE[lane ^ 3] + more for lane in range(32)]) + 100 * (5 + more),
            threads=32,
            together=True,
        )
        for kind, (make, more) in _MOVED.items()
    },
    **{
        f"of {kind}, by MLX's shuffles": Row(
            f"int v = int(i * 7 % 5) + 1;\n{kind} w = {make};\n"
            f"{kind} a = simd_shuffle(w, ushort(i ^ 3)), b = simd_shuffle_down(w, 1);\n"
            f"{kind} c = simd_shuffle_up(w, 1), d = simd_shuffle_and_fill_up(w, {kind}({fill}), "
            f"1);\n"
            f"r = {value('a')} + 10 * {value('b')} + 100 * {value('c')} + 1000 * {value('d')};",
            _shuffled(held, fill_value),
            threads=32,
            together=True,
        )
        for kind, make, fill, value, held, fill_value in (
            ("long", "v", "7", "float({})".format, lambda v: v, 7),
            ("ulong", "v", "7", "float({})".format, lambda v: v, 7),
            ("bool", "v > 2", "true", "float({})".format, lambda v: v > 2, 1),
            ("complex64_t", "complex64_t(v, 1)", "7, 1", "{}.real".format, lambda v: v, 7),
        )
    },
    "of vectors, by component": Row(
        "half4 h = simd_shuffle_down(half4(i, 1, 2, 3), 1); float2 s = simd_sum(float2(i, 1));\n"
        "r = h.x + h.w * 100 + s.y * 1000;",
        np.array([min(lane + 1, 31) + 300 + 32000 for lane in range(32)]),
        threads=32,
        together=True,
    ),
    "of a type in brackets": Row(
        "uint v = i * 7 % 5 + 1;\n"
        "if (i < 10) { r = simd_sum<float>(v); } else { r = simd_sum<float>(v) + simd_max(v); }\n"
        "r += 1000 * metal::simd_shuffle_xor<uint>(v, 1) + 1e4f * quad_sum<half>(half(v));",
        np.array(
            [
                (sum(_VALUE[:10]) if lane < 10 else sum(_VALUE[10:]) + 5)
                + 1000 * _VALUE[lane ^ 1]
                + 10000 * sum(_VALUE[lane // 4 * 4 :][:4])
                for lane in range(_LANES)
            ]
        ),
        threads=32,
        together=True,
        on_cuda=False,
    ),
    "a last simdgroup that is short": Row(
        "r = simd_sum(1) + 100 * simd_any(i == 44);",
        np.array([32] * 32 + [113] * 13),
        threads=45,
        together=True,
    ),
    "votes of one that is short": Row(
        "simd_vote yes = simd_ballot(true), last(1 << 20), few(simd_vote::vote_t(0x1fff));\n"
        "r = yes.all() + 2 * simd_vote(simd_vote::vote_t(yes)).all() + 4 * few.all()\n"
        "  + 8 * last.any() + 16 * quad_ballot(true).all() + 32 * quad_vote(8).any();",
        np.array([1 + 2 + 8 + 16 + 32] * 32 + [1 + 2 + 4 + 16 + 32] * 12 + [1 + 2 + 4 + 16]),
        threads=45,
        together=True,
        on_cuda=False,
    ),
    "lanes that returned": Row(
        "out[i] = 0; if (i >= 20) return; out[i] = simd_sum(1);",
        np.array([20] * 20 + [0] * 12, np.float32),
        threads=32,
        together=True,
        stores=True,
    ),
}
