"""Every simd_ and quad_ function against a model that goes lane by lane, for every type and with
any set of lanes taking part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from metal_source import Metal, in_every_schedule, run

from zmlx import msl
from zmlx.codegen import BLOCK_HEADER

FULL = 0xFFFFFFFF
MASKS = (FULL, 0x1, 0x80000000, 0xAAAAAAAA, 0x0000FFFF, 0x7FFFFFFE, 0x12345678)
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
INTEGERS = (mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64)

Lanes = dict[int, Any]  # values by lane, of the lanes that take part


def rounded(value: Any, dtype: mx.Dtype) -> Any:
    """`value` as that dtype holds it; bfloat16 as the float32 of the same value."""
    if dtype == mx.bfloat16:
        bits = np.float32(value).view(np.uint32)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return np.uint32(bits).view(np.float32)
    return numpy_type(dtype)(value)


def numpy_type(dtype: mx.Dtype) -> Any:
    if dtype == mx.bfloat16:
        return np.float32
    return np.dtype(str(dtype).removeprefix("mlx.core.").replace("bool", "bool_")).type


def fold(values: Lanes, width: int, operation: Callable[[Any, Any], Any]) -> Any:
    """Halves of a whole group fold onto each other; part of one folds in the order of lanes."""
    held = [values[lane] for lane in sorted(values)]
    if len(held) < width:
        result = held[0]
        for value in held[1:]:
            result = operation(result, value)
        return result
    while len(held) > 1:
        half = len(held) // 2
        held = [operation(held[i], held[i + half]) for i in range(half)]
    return held[0]


def blocks(values: Lanes, width: int) -> list[Lanes]:
    """The lanes by simdgroup (32) or quad (4)."""
    found = [
        {lane: v for lane, v in values.items() if lane // width == block}
        for block in range(32 // width)
    ]
    return [block for block in found if block]


def operations(dtype: mx.Dtype) -> dict[str, Callable[[Any, Any], Any]]:
    """Each step rounds to the dtype; the narrow floating types are taken as floats."""
    dtype = mx.float32 if dtype in FLOATS else dtype

    def wrap(f: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda a, b: rounded(f(a, b), dtype)

    return {"sum": wrap(np.add), "product": wrap(np.multiply), "min": wrap(min), "max": wrap(max)}


BITWISE: dict[str, Callable[[Any, Any], Any]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}


def reductions(values: Lanes, width: int, dtype: mx.Dtype) -> list[dict[int, Any]]:
    """Results by lane of sum, product, min, max, the four scans and, for integers, and/or/xor."""
    table = operations(dtype)
    chosen = list(table.values()) + (list(BITWISE.values()) if dtype in INTEGERS else [])
    results: list[dict[int, Any]] = [{} for _ in range(len(chosen) + 4)]
    for block in blocks(values, width):
        for result, operation in zip(results, chosen, strict=False):
            total = rounded(fold(block, width, operation), dtype)
            result.update(dict.fromkeys(block, total))
        scans = results[len(chosen) :]
        for k, (name, start) in enumerate((("sum", 0), ("product", 1))):
            before = numpy_type(dtype)(start)
            for lane in sorted(block):
                after = table[name](before, block[lane])
                scans[2 * k][lane] = rounded(after, dtype)
                scans[2 * k + 1][lane] = rounded(before, dtype)
                before = after
    return results


def reduction_names(dtype: mx.Dtype) -> list[str]:
    names = ["sum", "product", "min", "max"] + (list(BITWISE) if dtype in INTEGERS else [])
    scans = ("inclusive_sum", "exclusive_sum", "inclusive_product", "exclusive_product")
    return names + [f"prefix_{scan}" for scan in scans]


def small_values(dtype: mx.Dtype, count: int) -> mx.array:
    """Values whose sums are inexact in the floating types and wrap in the small integers."""
    rng = np.random.default_rng(7)
    if dtype in FLOATS:
        return mx.array(rng.uniform(0.5, 1.5, count).astype(np.float32)).astype(dtype)
    return mx.array(rng.integers(1, 100, count)).astype(dtype)


@pytest.mark.parametrize("kind", ["simd", "quad"])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_reductions_and_scans_of_active_lanes(dtype: mx.Dtype, kind: str) -> None:
    names = reduction_names(dtype)
    source = "uint lane = thread_index_in_simdgroup, mask = masks[threadgroup_position_in_grid.x];"
    source += "T v = x[lane]; device T* o = out + thread_position_in_grid.x;"
    source += "if (mask >> lane & 1) {"
    for k, name in enumerate(names):
        source += f"o[{k} * threads_per_grid.x] = {kind}_{name}(v);\n"
    source += "}"
    x = small_values(dtype, 32)
    kernel = Metal(
        source,
        {"x": x, "masks": mx.array(MASKS, mx.uint32)},
        ((len(names), len(MASKS), 32), dtype),
        grid=32 * len(MASKS),
        group=32,
        template={"T": dtype},
        init=0,
    )
    result = in_every_schedule(kernel)
    held = np.array(x.astype(mx.float32) if dtype in FLOATS else x)
    for m, mask in enumerate(MASKS):
        active = {lane: held[lane] for lane in range(32) if mask >> lane & 1}
        with np.errstate(over="ignore"):
            expected = reductions(active, 32 if kind == "simd" else 4, dtype)
        for k, name in enumerate(names):
            for lane, value in expected[k].items():
                got = result[k, m, lane]
                assert got == value, (name, hex(mask), lane, got, value)


SHUFFLES = {
    "shuffle": "(v, ushort(index[lane]))",
    "broadcast": "(v, ushort({edge} - 1))",
    "broadcast_first": "(v)",
    "shuffle_xor": "(v, 3)",
    "shuffle_up": "(v, 2)",
    "shuffle_down": "(v, 3)",
    "shuffle_rotate_up": "(v, 3)",
    "shuffle_rotate_down": "(v, 1)",
    "shuffle_and_fill_up": "(v, w, 3)",
    "shuffle_and_fill_down": "(v, w, 1)",
    "shuffle_and_fill_up ": "(v, w, 1, 2)",
    "shuffle_and_fill_down ": "(v, w, 1, {half})",
}


def source_lane(name: str, lane: int, width: int, index: int, first: int) -> tuple[int, bool]:
    """The lane that is read, and whether it is read from the filling data."""
    base, own = lane // width * width, lane % width
    modulo = {"shuffle_and_fill_up ": 2, "shuffle_and_fill_down ": width // 2}.get(name, width)
    part, place = lane // modulo * modulo, lane % modulo
    up = {"shuffle_and_fill_up": 3, "shuffle_and_fill_up ": 1}.get(name)
    down = {"shuffle_and_fill_down": 1, "shuffle_and_fill_down ": 1}.get(name)
    if up is not None:
        return part + (place - up) % modulo, place - up < 0
    if down is not None:
        return part + (place + down) % modulo, place + down >= modulo
    return {
        "shuffle": base + index % width,
        "broadcast": base + width - 1,
        "broadcast_first": first,
        "shuffle_xor": lane ^ 3,
        "shuffle_up": lane - 2 if own >= 2 else lane,
        "shuffle_down": lane + 3 if own + 3 < width else lane,
        "shuffle_rotate_up": base + (own - 3) % width,
        "shuffle_rotate_down": base + (own + 1) % width,
    }[name], False


VECTORS = {"float2": mx.float32, "float3": mx.float32, "float4": mx.float32, "half4": mx.float16}
VECTORS |= {"int2": mx.int32, "uchar4": mx.uint8, "bfloat2": mx.bfloat16, "ulong4": mx.uint64}


@pytest.mark.parametrize("kind", ["simd", "quad"])
@pytest.mark.parametrize("mask", [FULL, 0x0FF0F0FF])
@pytest.mark.parametrize("type_name", ["bool", *map(str, FLOATS + INTEGERS), *VECTORS])
def test_shuffles_move_values_between_active_lanes(type_name: str, mask: int, kind: str) -> None:
    width = 32 if kind == "simd" else 4
    plain = type_name.removeprefix("mlx.core.")
    dtype = VECTORS.get(plain) or getattr(mx, plain.replace("bool", "bool_"))
    lanes = int(plain[-1]) if plain in VECTORS else 1
    rng = np.random.default_rng(11)
    end = 2 if dtype == mx.bool_ else 100
    values = mx.array(rng.integers(0, end, (2, 32, lanes))).astype(dtype)
    index = rng.integers(0, width, 32)
    source = "uint lane = thread_index_in_simdgroup;"
    if lanes == 1:
        source += "T v = x[lane], w = x[lane + 32];"
        store = "o[{k} * 32] = r;"
    else:
        vector = f"{plain}({', '.join(f'x[{{at}} * {lanes} + {c}]' for c in range(lanes))})"
        source += f"T v = {vector.format(at='lane')}, w = {vector.format(at='(lane + 32)')};"
        store = "".join(f"o[{{k}} * {32 * lanes} + {c}] = r[{c}];" for c in range(lanes))
    element = plain.rstrip("234") if plain in VECTORS else "T"
    if lanes > 1:
        source = f"typedef {plain} T;" + source
    source += f"device {element}* o = out + lane * {lanes};"
    source += f"if ({mask}u >> lane & 1) {{"
    for k, (name, call) in enumerate(SHUFFLES.items()):
        call = call.format(edge=width, half=width // 2)
        source += f"{{ T r = {kind}_{name.strip()}{call};\n" + store.format(k=k) + "}"
    source += "}"
    result = run(
        source,
        {"x": values, "index": mx.array(index, mx.uint32)},
        ((len(SHUFFLES), 32, lanes), dtype),
        grid=32,
        group=32,
        template={"T": dtype} if lanes == 1 else {},
        init=0,
    )
    held = np.array(values.astype(mx.float32) if dtype == mx.bfloat16 else values)
    for k, name in enumerate(SHUFFLES):
        for lane in (lane for lane in range(32) if mask >> lane & 1):
            block = range(lane // width * width, lane // width * width + width)
            first = next(q for q in block if mask >> q & 1)
            source_at, filled = source_lane(name, lane, width, int(index[lane]), first)
            if mask >> source_at & 1:  # else Metal leaves the value undefined
                expected = held[int(filled), source_at]
                assert (result[k, lane] == expected).all(), (name, lane, result[k, lane], expected)


@pytest.mark.parametrize("kind", ["simd", "quad"])
def test_votes_see_active_lanes_only(kind: str) -> None:
    width = 32 if kind == "simd" else 4
    source = f"""
        uint lane = thread_index_in_simdgroup;
        uint m = threadgroup_position_in_grid.x;
        bool p = yes[m] >> lane & 1;
        device uint* o = out + thread_position_in_grid.x * 9;
        if (active[m] >> lane & 1) {{
            {kind}_vote v = {kind}_ballot(p);
            o[0] = uint({kind}_vote::vote_t(v));
            o[1] = v.all(); o[2] = v.any();
            o[3] = {kind}_all(p); o[4] = {kind}_any(p);
            o[5] = uint({kind}_vote::vote_t({kind}_active_threads_mask()));
            o[6] = {kind}_is_first();
            o[7] = {kind}_is_helper_thread();
            o[8] = {kind}_vote(3).any();
        }}
    """
    active = [FULL, FULL, FULL, 0xAAAAAAAA, 0xAAAAAAAA, 0x0000FFF0]
    yes = [FULL, 0, 0x00F0000F, 0xAAAAAAAA, 0x00AA0000, 0x0000F00F]
    result = run(
        source,
        {"active": mx.array(active, mx.uint32), "yes": mx.array(yes, mx.uint32)},
        ((len(active), 32, 9), mx.uint32),
        grid=32 * len(active),
        group=32,
        init=0,
    )
    for m, (on, said) in enumerate(zip(active, yes, strict=True)):
        for lane in (lane for lane in range(32) if on >> lane & 1):
            shift = lane // width * width
            whole = (1 << width) - 1
            a, y = on >> shift & whole, said >> shift & whole
            first = (a & -a).bit_length() - 1 == lane % width
            votes = a & y
            expected = [votes, votes == whole, votes != 0, votes == a, votes != 0, a, first, 0, 1]
            assert result[m, lane].tolist() == [int(v) for v in expected], (m, lane)


def test_a_short_last_simdgroup_votes_for_the_lanes_it_has() -> None:
    source = "out[thread_position_in_grid.x] = simd_ballot(true).all() ? simd_sum(1u) : 0;"
    result = run(source, output=(45, mx.uint32), grid=45, group=45)
    assert result.tolist() == [32] * 32 + [13] * 13


def test_votes_miss_the_lanes_that_returned() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        if (i >= 40) return;
        out[i] = simd_ballot(true).all() + 2 * simd_all(true) + 4 * simd_vote(1 << 10).any();
    """
    result = run(source, output=(45, mx.uint32), grid=45, group=45, init=0)
    assert result.tolist() == [1 + 2 + 4] * 32 + [2 + 4] * 8 + [0] * 5


def test_reductions_of_vectors_go_by_component() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        float4 v = float4(x[i], x[i + 32], x[i + 64], x[i + 96]);
        float4 sum = simd_sum(v), most = simd_max(v), run = simd_prefix_inclusive_sum(v);
        half2 least = simd_min(half2(v.xy));
        uint4 bits = simd_or(uint4(v));
        for (uint c = 0; c < 4; ++c) {
            out[(0 + c) * 32 + i] = sum[c];
            out[(4 + c) * 32 + i] = most[c];
            out[(8 + c) * 32 + i] = run[c];
            out[(14 + c) * 32 + i] = bits[c];
        }
        out[12 * 32 + i] = least.x;
        out[13 * 32 + i] = least.y;
    """
    x = np.random.default_rng(3).integers(0, 50, (4, 32)).astype(np.float32)
    result = run(source, {"x": mx.array(x.ravel())}, ((18, 32), mx.float32), grid=32, group=32)
    np.testing.assert_array_equal(result[0:4], np.repeat(x.sum(1, keepdims=True), 32, 1))
    np.testing.assert_array_equal(result[4:8], np.repeat(x.max(1, keepdims=True), 32, 1))
    np.testing.assert_array_equal(result[8:12], np.cumsum(x, 1))
    np.testing.assert_array_equal(result[12:14], np.repeat(x[:2].min(1, keepdims=True), 32, 1))
    bits = np.bitwise_or.reduce(x.astype(np.uint32), 1)
    np.testing.assert_array_equal(result[14:18], np.repeat(bits[:, None], 32, 1))


def test_vectors_of_narrow_numbers_are_summed_in_float() -> None:
    source = """
        uint i = thread_position_in_grid.x;
        half3 h = half3(i ? 1 : 2048, 1, 2);
        bfloat2 b = bfloat2(i ? 1 : 256, 1);
        out[i] = simd_sum(h).x;
        out[i + 32] = simd_prefix_inclusive_sum(h).x;
        out[i + 64] = simd_sum(b).x;
        out[i + 96] = quad_prefix_inclusive_sum(packed_half3(h)).x;
    """
    result = run(source, output=((4, 32), mx.float32), grid=32, group=32)
    along = np.float16(np.arange(2048, 2080))
    np.testing.assert_array_equal(result[0], [2080] * 32)
    np.testing.assert_array_equal(result[1], along)
    np.testing.assert_array_equal(result[2], [288] * 32)
    np.testing.assert_array_equal(result[3], [*along[:4], *[1, 2, 3, 4] * 7])


def test_a_product_beside_numbers_that_are_drawn() -> None:
    source = """
        float u[8];
        ZMLX_UNIFORMS(u, 8, 0, 7);
        out[thread_position_in_grid.x] = simd_product(2.0f) + 0 * u[0];
    """
    header = msl.header_for("zmlx_draw") + BLOCK_HEADER
    result = run(source, output=(2, mx.float32), grid=2, group=2, header=header)
    assert result.tolist() == [4, 4]


def test_minimum_and_maximum_pass_over_nan() -> None:
    x = np.arange(32, dtype=np.float32)
    x[[0, 5, 31]] = np.nan
    source = (
        "uint i = thread_position_in_grid.x; out[i] = simd_max(x[i]); out[32 + i] = simd_min(x[i]);"
    )
    result = run(source, {"x": mx.array(x)}, ((2, 32), mx.float32), grid=32, group=32)
    np.testing.assert_array_equal(result, [[30] * 32, [1] * 32])


@pytest.mark.parametrize("kind", ["simd", "quad"])
def test_one_thread_alone_is_a_simdgroup_with_lane_0(kind: str) -> None:
    """The same text in groups of one thread, where every function folds away, and in groups of
    two with the second one gone, where the runtime does the work."""
    source = f"""
        if (thread_position_in_threadgroup.x > 0) return;
        float v = 3, w = 5;
        uint at = 0;
        device float* o = out + threadgroup_position_in_grid.x * 32;
        o[at++] = {kind}_sum(v); o[at++] = {kind}_product(v); o[at++] = {kind}_min(v);
        o[at++] = {kind}_max(v); o[at++] = {kind}_and(6); o[at++] = {kind}_or(6);
        o[at++] = {kind}_xor(6); o[at++] = {kind}_broadcast(v, 0); o[at++] = {kind}_shuffle(v, 0);
        o[at++] = {kind}_broadcast_first(v); o[at++] = {kind}_shuffle_xor(v, 0);
        o[at++] = {kind}_shuffle_xor(v, 1); o[at++] = {kind}_shuffle_up(v, 1);
        o[at++] = {kind}_shuffle_down(v, 0); o[at++] = {kind}_shuffle_down(v, 99);
        o[at++] = {kind}_shuffle_rotate_up(v, 0); o[at++] = {kind}_shuffle_rotate_down(v, 0);
        o[at++] = {kind}_shuffle_and_fill_up(v, w, 0);
        o[at++] = {kind}_shuffle_and_fill_up(v, w, 4, 4);
        o[at++] = {kind}_shuffle_and_fill_down(v, w, 0);
        o[at++] = {kind}_shuffle_and_fill_down(v, w, 2, 2);
        o[at++] = {kind}_prefix_inclusive_sum(v); o[at++] = {kind}_prefix_exclusive_sum(v);
        o[at++] = {kind}_prefix_inclusive_product(v); o[at++] = {kind}_prefix_exclusive_product(v);
        o[at++] = {kind}_all(true); o[at++] = {kind}_any(false); o[at++] = {kind}_is_first();
        o[at++] = uint({kind}_vote::vote_t({kind}_ballot(true)));
        o[at++] = uint({kind}_vote::vote_t({kind}_active_threads_mask()));
        simdgroup_barrier(mem_flags::mem_none);
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        o[at++] = 7;
    """
    alone = run(source, output=((1, 32), mx.float32), grid=1, group=1, init=0)
    among = run(source, output=((1, 32), mx.float32), grid=2, group=2, init=0)
    np.testing.assert_array_equal(alone, among)
    assert alone[0, 30] == 7


@pytest.mark.parametrize("inside", ["", "struct S {"])
@pytest.mark.parametrize("condition", ["sizeof(T) < 8", "(N) < 4", "N < 4 && sizeof(T) < 8"])
def test_a_template_whose_list_compares(inside: str, condition: str) -> None:
    header = f"""
        {inside}
        template <typename T, int N = 2, metal::enable_if_t<{condition}, bool> = true>
        T total(T v) {{ return simd_sum(v); }}
        {inside and "};"}
    """
    call = "S s; out[i] = s.total(x[i]);" if inside else "out[i] = total(x[i]);"
    x = np.arange(32, dtype=np.float32)
    source = "uint i = thread_position_in_grid.x; " + call
    result = run(source, {"x": x}, (32, mx.float32), 32, 32, header=header)
    np.testing.assert_array_equal(result, np.full(32, x.sum()))


@pytest.mark.parametrize("group", [1, 32])
def test_a_type_in_brackets_is_the_operands(group: int) -> None:
    source = """
        uint i = thread_position_in_grid.x;
        half h = half(i);
        float most = 0;
        if (i % 2) {
            most = simd_max<int>(int(i)) + simd_sum<float>(h * 2);
        } else {
            most = total<float>(h) + simd_max<float>(simd_shuffle<uint>(i, ushort(0)));
        }
        float simd_sum = most, rest = simd_sum < 3 ? 0 : simd_sum;  // a variable, and no list
        out[i] = simd_sum < 3 && rest > (2) ? 0 : simd_sum;
    """
    header = "template <typename T> T total(T v) { return metal::simd_sum<T>(v); }"
    result = run(source, output=(32, mx.float32), grid=32, group=group, header=header)
    alone = [3 * i if i % 2 else 2 * i for i in range(32)]
    assert result.tolist() == (alone if group == 1 else [240, 31 + 512] * 16)
