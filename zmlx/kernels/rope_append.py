"""Rotary position embedding of new keys, and their place in a cache, in one launch.

    k_cache[b, :, offset_b + l] = rope(k)[b, :, l],   v_cache[b, :, offset_b + l] = v[b, :, l]

with step l of batch b at position offset_b + l, and all other positions kept; queries are turned in
the same launch.

Bytes: reads and writes q, k and v. Results are new arrays, so that the positions kept are copied;
on the CPU they stay where they are if nobody else holds the caches when the result is evaluated. So
it is with the cotangents of the caches, which the backward makes their gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from .. import launch
from ..arguments import Argument, check_array
from ..body import BodyKernel, Plan, constant
from ..metal import KernelSpec, scalar
from ..registry import Case, Op, Option, register
from ..remembered import Remembered, Way
from ..transforms import Arrays, refuses_any_shape
from .rope import rope_reference
from .rope_append_backward import gradients
from .rope_append_kernels import BODY, QUERIES, ROW_HEADER, is_new, starts
from .rope_arguments import check_offset, check_rows, first_position, turning
from .rope_kernels import Rotation, table_in_mlx, turned

_OP = "rope_append"
_ONE = scalar(1.0)


def rope_append_reference(
    k: mx.array,
    v: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    q: mx.array | None = None,
    *,
    offset: int = 2,
    xp: Any = mx,
    **options: Any,
) -> Any:
    """rope_append in plain MLX."""

    def put(x: Any, into: Any) -> Any:
        end = offset + x.shape[-2]
        return xp.concatenate([into[..., :offset, :], x, into[..., end:, :]], axis=-2)

    new = rope_reference(k, offset=offset, **options, xp=xp)
    caches = put(new, k_cache), put(v, v_cache)
    return caches if q is None else (*caches, rope_reference(q, offset=offset, **options, xp=xp))


# ---- kernels ------------------------------------------------------------------------------------


@cache
def _append(rotation: Rotation, queries: bool) -> BodyKernel:
    """k, v, caches (, q), the rotation's → caches (, q)."""

    def plan(chosen: launch.Settings, inputs: Arrays) -> Plan:
        k, v, k_cache, v_cache = inputs[:4]
        positions = inputs[4 + queries]
        sizes = rotation.sizes(k, positions)
        batches, heads, _, d = rotation.shape(k)
        room = rotation.shape(k_cache)[2]
        lanes = launch.pick(chosen, LANES=1 if launch.is_cpu(chosen) else 32)["LANES"]
        block, run = rotation.block(chosen), 256 if launch.is_cpu(chosen) else 4
        blocks, runs = -(-sizes[0] // block), -(-room // run)
        strides = (*rotation.strides(k_cache)[2:], *rotation.strides(k)[2:])
        some = (k_cache, v_cache, *inputs[4 : 4 + queries])
        query = rotation.strides(inputs[4]) if queries else ()
        return Plan(
            (
                *(("K", k_cache.dtype), ("V", v_cache.dtype)),
                *((("Q", inputs[4].dtype),) if queries else ()),
                *(("D", d), ("DV", v.shape[-1])),
                *rotation.template(block, lanes),
            ),
            launch.Geometry((), (lanes * (blocks + batches * runs), 1, 1), (lanes, 1, 1)),
            tuple(tuple(a.shape) for a in some),
            tuple(a.dtype for a in some),
            (
                constant(
                    (*sizes, heads, room, blocks, run, max(runs, 1), *strides,
                     *query[:1], *query[2:]),
                    mx.uint32,
                ),
            ),
            ((2, 0), (3, 1)),
        )  # fmt: skip

    def reference(k: mx.array, v: mx.array, kc: mx.array, vc: mx.array, *rest: mx.array) -> Arrays:
        arguments = rest[queries:]
        length, axis = rotation.shape(k)[2], 1 if rotation.heads_last else 2
        start, fits = starts(rotation, arguments[0], k, kc)
        new = is_new(rotation, start, k, kc)
        index = mx.clip(mx.arange(kc.shape[axis]) - start, 0, max(length - 1, 0)).reshape(new.shape)

        def put(x: mx.array, into: mx.array) -> mx.array:
            if length:
                x = x.astype(into.dtype)
                x = mx.take_along_axis(x, mx.broadcast_to(index, into.shape), axis=axis)
                into = mx.where(new, x, into)
            return mx.where(fits, into, mx.array(mx.nan, dtype=into.dtype))

        table = table_in_mlx(rotation, k, arguments)
        outputs = [put(turned(rotation, k, *table), kc), put(v, vc)]
        if queries:
            outputs.append(turned(rotation, rest[0], *table).astype(rest[0].dtype))
        return tuple(outputs)

    def values(k: mx.array, v: mx.array, kc: mx.array, vc: mx.array, *rest: mx.array) -> None:
        room, length = rotation.shape(kc)[2], rotation.shape(k)[2]
        for start in np.array(rest[queries]).reshape(-1).tolist():
            _check_room(start, room, length)

    return BodyKernel(
        KernelSpec(
            _OP,
            (*("k", "v", "k_cache", "v_cache"), *("q",) * queries, *rotation.inputs, "sizes"),
            ("k_out", "v_out", *("q_out",) * queries),
            rotation.text(BODY.replace("QUERIES\n", QUERIES if queries else "")),
            ROW_HEADER,
        ),
        plan,
        reference,
        vjp=lambda primals, cotangents, _, wanted: gradients(rotation, primals, cotangents, wanted),
        dynamic=refuses_any_shape(_OP, "append outside of it"),
        values=values,
    )


# ---- op -----------------------------------------------------------------------------------------


def _check_room(offset: int, room: int, length: int) -> None:
    if not 0 <= offset <= room - length:
        raise ValueError(
            f"[{_OP}] 'offset' must be in [0, {room - length}] for {length} steps in a cache of "
            f"{room} but got {offset}."
        )


#: An offset in place of an int.
_ANY = first_position(0)


def _rope_append(
    k: mx.array,
    v: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    q: mx.array | None,
    freqs: mx.array | None,
    start: mx.array | None,
    dims: int | None,
    traditional: bool,
    base: float | None,
    scale: float,
    layout: str,
) -> Way:
    """Positions of the cache, steps, and the launch, whose offset is an int where `start` is
    None."""

    def bad(argument: str, must: str, got: Any) -> ValueError:
        return ValueError(f"[{_OP}] '{argument}' must {must} but got {got}.")

    asked = turning(
        _OP, "k", k, dims, traditional=traditional, base=base, scale=scale,
        offset=_ANY if start is None else start, freqs=freqs, positions=None, sections=None,
        interleave_sections=False, layout=layout,
    )  # fmt: skip
    if k.ndim != 4:
        raise bad("k", "have 4 axes", tuple(k.shape))
    axis = 1 if layout == "BLHD" else 2
    for name, x, like, free in (
        ("v", v, k, (3,)),
        ("k_cache", k_cache, k, (axis,)),
        ("v_cache", v_cache, v, (axis,)),
        ("q", q, k, (3 - axis,)),
    ):
        if x is None and name == "q":
            continue
        check_array(_OP, name, x)
        assert x is not None
        wanted = ["any" if i in free else str(n) for i, n in enumerate(like.shape)]
        if x.ndim != 4 or any(
            m != n
            for i, (m, n) in enumerate(zip(x.shape, like.shape, strict=True))
            if i not in free
        ):
            raise bad(name, f"have shape ({', '.join(wanted)})", tuple(x.shape))
    room, length = k_cache.shape[axis], k.shape[axis]
    if room < length:
        raise bad("k_cache", f"have at least {length} positions, as 'k' has steps", room)
    if v_cache.shape[axis] != room:
        raise bad("v_cache", f"have {room} positions, as 'k_cache'", v_cache.shape[axis])
    check_rows(_OP, "k_cache", k_cache)
    kernel, arrays = _append(asked.rotation, q is not None), asked.arrays

    def append(
        k: mx.array,
        v: mx.array,
        k_cache: mx.array,
        v_cache: mx.array,
        q: mx.array | None,
        freqs: mx.array | None,
        start: mx.array,
    ) -> Any:
        given = () if q is None else (q,)
        return kernel(k, v, k_cache, v_cache, *given, *arrays(freqs, None, start), _ONE)

    return lambda *_: (room, length, append)


_ROPE_APPEND = Remembered(_rope_append)


def rope_append(
    k: mx.array,
    v: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    offset: int | mx.array,
    dims: int | None = None,
    *,
    q: mx.array | None = None,
    traditional: bool = False,
    base: float | None = None,
    scale: float = 1.0,
    freqs: mx.array | None = None,
    layout: str = "BHLD",
) -> tuple[mx.array, ...]:
    """Turns new keys as `rope`, and writes them and their values into a cache at `offset`.

    Args:
        k: (B, H, L, D) in float32, float16 or bfloat16.
        v: (B, H, L, V): as k, but for the last axis.
        k_cache: (B, H, S, D), with S ≥ L positions, of any floating dtype.
        v_cache: (B, H, S, V).
        offset: where the first new step goes, and its position: an int, or an array of () or (B,)
            of any integer dtype, from 0 to S - L. What is out of that range makes the caches
            of its batch NaN; on the CPU the evaluation raises.
        q: (B, G, L, D) queries of the same steps, with any number G of heads, turned too.
        dims, traditional, base, scale, freqs: as for `rope`.
        layout: "BHLD", as above, or "BLHD": of all these arrays axes 1 and 2 change places.

    Returns:
        The caches with the new steps, and q turned if it is given. On the CPU they take over the
        memory of the caches given, if nothing else holds those when they are evaluated: assign the
        results to the same names, so that appending costs what is appended. Gradients for k, v, the
        caches, q and freqs.
    """

    start = offset if isinstance(offset, mx.array) else None
    room, length, append = _ROPE_APPEND(
        (k, v, k_cache, v_cache, q, freqs, start), (dims, traditional, base, scale, layout)
    )
    if start is None:
        number = check_offset(_OP, offset, length)
        _check_room(number, room, length)
        start = first_position(number)
    return append(k, v, k_cache, v_cache, q, freqs, start)  # type: ignore[no-any-return]


def _keywords(
    k: mx.array,
    v: mx.array,
    k_cache: mx.array,
    v_cache: mx.array,
    q: mx.array | None = None,
    *,
    offset: int = 2,
    **options: Any,
) -> tuple[mx.array, ...]:
    """rope_append with its arrays first, as entries call it."""
    return rope_append(k, v, k_cache, v_cache, offset, q=q, **options)


def _case(lead: tuple[int, ...], new: int, room: int, d: int, why: str, **options: Any) -> Case:
    return Case(lead, {"L": new, "S": room, "D": d, "V": options.pop("v", d)}, why, options)


register(
    Op(
        name=_OP,
        family="rope",
        summary="rope of new keys, and keys and values into a cache",
        formula="k_cache[offset + l] = rope(k)[l], v_cache[offset + l] = v[l], the rest kept",
        function=_keywords,
        reference=rope_append_reference,
        arguments=(
            Argument("k", "(*, L, D)"),
            Argument("v", "(*, L, V)"),
            Argument("k_cache", "(*, S, D)"),
            Argument("v_cache", "(*, S, V)"),
            Argument("q", "(*, L, D)", optional=True),
        ),
        options=(
            Option("offset", 2, (0, 3)),
            Option("traditional", False, (True,), passed="text"),
            Option("scale", 1.0, (0.25,)),
        ),
        outputs=("(*, S, D)", "(*, S, V)", "(*, L, D)"),
        paper="Su et al. 2021, arXiv:2104.09864",
        cases=(
            _case((1, 1), 1, 1, 2, "a full cache of one position", offset=0),
            _case((2, 3), 5, 9, 6, "new steps in the middle", v=5),
            _case((2, 1), 3, 9, 6, "another length", v=5),
            _case((2, 2), 9, 40, 62, "one pair short of a simdgroup", offset=31),
            _case((1, 2), 33, 300, 66, "several blocks, and runs of positions kept", offset=100),
            _case((2, 3), 4, 8, 11, "not all elements turn", dims=6, traditional=True),
            _case((1, 5), 1, 17, 128, "one step"),
            _case((0, 2), 3, 8, 8, "no rows"),
        ),
        long_cases=(_case((1, 1), 2, 5, 4098, "a head longer than any model's"),),
        benchmarks=(_case((8, 8), 1, 1024, 128, "decode", offset=1000),),
        refuses={"shapeless compile": "append outside of it"},
    )
)
