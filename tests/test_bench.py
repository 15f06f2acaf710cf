"""The benchmark harness: it measures what it says, and says what it measured."""

import math
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec

import mlx.core as mx
import numpy as np
import pytest
from bench_results import made

from zmlx import metal, registry, testing
from zmlx.arguments import Argument
from zmlx.bench import anchors as anchors_of
from zmlx.bench import (
    measure,
    memory,
    report,
    rows,
    run,
    selftest,
)
from zmlx.bench import summary as summaries
from zmlx.bench.anchors import Anchors
from zmlx.bench.measure import Variant
from zmlx.bench.result import Timing
from zmlx.bench.summary import Summary, paired, summary
from zmlx.bench.variants import (
    BUILT_IN,
    COMPILED,
    EAGER,
    GPU_GEOMETRY,
    MODES,
    SMALL,
    TORCH,
    TORCH_COMPILED,
    ZMLX,
    mlx_names,
    mlx_ways,
)
from zmlx.bench.work import Work, work
from zmlx.registry import Case, Op

# ---- medians and intervals ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "rank"),
    [
        (1, 0),  # nothing to leave out
        (5, 0),  # no interval covers 95 %: all values
        (6, 0),  # the least count at which smallest to largest covers it
        (9, 1),
        (20, 5),  # tables of order statistics: 6th to 15th, 95.9 %
        (30, 9),
    ],
)
def test_interval_is_that_of_the_order_statistics(count, rank):
    found = summary([float(i) for i in range(count)])
    assert (found.low, found.high) == (rank, count - 1 - rank)
    assert found.median == (count - 1) / 2
    assert found.count == count


def test_interval_covers_the_true_median_as_often_as_it_says():
    rng = np.random.default_rng(0)
    draws = np.exp(rng.standard_normal((2000, 20)))  # skewed; its median is 1
    covered = [s.low <= 1 <= s.high for s in (summary(list(d)) for d in draws)]
    assert summaries.COVERAGE - 0.015 < np.mean(covered) < 0.98


def test_paired_ratio_ignores_what_disturbs_a_round():
    quiet = [1.0] * 10
    disturbance = [1, 9, 1, 5, 30, 1, 1, 2, 1, 70]
    ours = [q * d for q, d in zip(quiet, disturbance, strict=True)]
    theirs = [3 * q * d for q, d in zip(quiet, disturbance, strict=True)]
    found = paired(theirs, ours)
    assert found.median == found.low == found.high == 3


def test_rounds_left_out_do_not_count():
    found = paired([2.0, math.nan, 2.0], [1.0, 1.0, 1.0])
    assert found == Summary(2.0, 2.0, 2.0, 2)


# ---- measuring ----------------------------------------------------------------------------------


def stub(name, calls, seconds=1.0):
    def call(given):
        calls.append((name, given))
        return seconds

    return Variant(name, call, before=lambda: f"before {name}", self_timed=True)


def test_every_variant_runs_in_every_round_and_in_every_place():
    calls = []
    names = ("a", "b", "c")
    times = measure.measure([stub(n, calls) for n in names], rounds=6)
    order = [n for n, _ in calls]
    warm, timed = order[:-18], order[-18:]
    assert measure.WARM_UPS <= warm.count("a") <= measure.LONGEST_WARM_UP
    assert warm.count("a") == warm.count("b") == warm.count("c")
    in_rounds = [timed[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(r) == list(names) for r in in_rounds)
    for place in range(3):
        assert {r[place] for r in in_rounds} == set(names)
    assert len({tuple(r) for r in in_rounds}) > 3  # not the same neighbours all the time
    assert {n: len(t) for n, t in times.items()} == {"a": 6, "b": 6, "c": 6}


def test_caches_are_filled_after_the_preparation_and_before_the_clock():
    events = []
    variant = Variant(
        "v",
        lambda given: events.append(f"call {given}"),
        lambda: events.append("before") or 7,
        lambda: events.append("ready"),
    )
    variant.seconds(lambda: events.append("between"))
    assert events == ["before", "between", "ready", "call 7"]
    events.clear()
    replace(variant, anchor=True).seconds(lambda: events.append("between"))
    assert events == ["before", "call 7"]


def test_each_library_makes_a_small_call_of_its_own_ahead_of_the_clock(monkeypatch):
    op = registry.get("silu")
    problem, _ = rows.pose(op, op.cases[0], mx.float32)
    called = []
    function = op.function
    monkeypatch.setattr(
        registry,
        "get",
        lambda name: replace(op, function=lambda x: called.append(x.size) or function(x)),
    )
    ways = [make() for mode in MODES for make in mlx_ways(problem, mode, mlx_names(op)).values()]
    for way in ways:
        way.variant.ready()
    assert called == [SMALL] * len(ways)


def test_only_hopelessly_slow_variants_sit_rounds_out():
    variants = [stub("fast", [], 0.001), stub("slow", [], 0.009), stub("hopeless", [], 1.0)]
    times = measure.measure(variants, rounds=20, budget=2.0)
    known = {n: sum(not math.isnan(t) for t in ts) for n, ts in times.items()}
    assert known["fast"] == known["slow"] == 20
    assert measure.FEWEST <= known["hopeless"] < 20


def test_the_budget_counts_what_runs_before_a_hopelessly_slow_variant():
    ahead = replace(stub("ahead", [], 0.05), before=lambda: time.sleep(0.05))
    variants = [stub("fast", [], 0.001), stub("slow", [], 0.05), ahead]
    times = measure.measure(variants, rounds=20, budget=1.0)
    known = {n: sum(not math.isnan(t) for t in ts) for n, ts in times.items()}
    assert known["slow"] == 20
    assert measure.FEWEST <= known["ahead"] < 20


def test_a_hopelessly_slow_variant_of_seconds_is_timed_once():
    variants = [stub("fast", [], 0.001), stub("slow", [], 2.0)]
    times = measure.measure(variants, rounds=20, budget=5.0)
    assert not math.isnan(times["slow"][0])
    assert all(map(math.isnan, times["slow"][1:]))
    assert not any(map(math.isnan, times["fast"]))


def test_nothing_is_hopelessly_slow_beside_an_anchor():
    variants = [stub("bound", [], 0.001), stub("slow", [], 1.0)]
    variants[0] = replace(variants[0], anchor=True)
    times = measure.measure(variants, rounds=20, budget=2.0)
    assert not any(map(math.isnan, times["slow"]))


def test_an_anchor_may_sit_rounds_out_and_needs_no_filled_caches():
    filled = []
    variants = [
        replace(stub("bound", [], 0.001), anchor=True, every=4),
        stub("way", [], 0.001),
    ]
    times = measure.measure(variants, rounds=20, between=lambda: filled.append(1))
    known = {n: sum(not math.isnan(t) for t in ts) for n, ts in times.items()}
    assert known == {"bound": 5, "way": 20}
    assert len(filled) == 20 + measure.WARM_UPS


def test_a_hopelessly_slow_variant_warms_up_once():
    calls = []
    variants = [stub("fast", calls, 0.001), stub("slow", calls, 0.009), stub("hopeless", calls)]
    times = measure.measure(variants, rounds=20, budget=2.0)
    warm = [n for n, _ in calls][: -sum(not math.isnan(t) for ts in times.values() for t in ts)]
    assert warm.count("fast") == warm.count("slow") >= measure.WARM_UPS
    assert warm.count("hopeless") == 1


@pytest.mark.parametrize("warm_up", [True, False])
def test_peak_memory_takes_one_call_and_one_to_warm_up(warm_up):
    calls = []
    memory.peak(calls.append, lambda: None, uses_mlx=True, warm_up=warm_up)
    assert len(calls) == 1 + warm_up


def test_peak_memory_is_what_the_call_takes():
    x = mx.zeros((8 << 20,), mx.uint8)
    mx.eval(x)
    with memory.pages(kept=True):
        found = memory.peak(lambda _: mx.eval(x + 1), lambda: None, uses_mlx=True)
    assert found.mlx is not None
    assert 8 << 20 <= found.mlx <= 9 << 20
    if found.process is not None:
        assert 7 << 20 <= found.process <= 12 << 20


def test_cache_limit_is_raised_inside_and_restored_outside():
    before = mx.set_cache_limit(1 << 20)
    try:
        with memory.pages(kept=True):
            inside = mx.set_cache_limit(memory.CACHE_LIMIT)
        assert inside == memory.CACHE_LIMIT
        assert mx.set_cache_limit(1 << 20) == 1 << 20
    finally:
        mx.set_cache_limit(before)


# ---- anchors and work ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def anchors():
    return Anchors(threads=2, cache=1 << 20)


def test_anchors_walk_all_of_their_arrays(anchors):
    to, source = anchors.views
    source[:] = 3.0
    to[:] = 0.0
    for variant in anchors.variants():
        assert variant.seconds(lambda: None) > 0
    # Partial cache lines at either end are left out.
    assert np.count_nonzero(to == 3.0) >= 4 * anchors.cache // 4


def test_copy_counts_reads_and_writes(anchors):
    moved = anchors.bytes
    assert moved["copy"] == moved["non-temporal"] == 2 * moved["read"] == 8 * anchors.cache


def test_copy_kernel_copies(anchors):
    x = mx.arange(5000, dtype=mx.float32)
    run.copy_kernel(x).call(None)


@pytest.mark.parametrize("written", [0.0, 0.25, 0.5, 1.0])
def test_caches_are_filled_with_as_much_that_waits_as_a_call_writes(anchors, monkeypatch, written):
    read, copied = set(), set()

    def walk(_, kind, size, at=0):
        assert kind in (0, 2)
        lines = range(at // 64, at // 64 + size // 64)
        assert len(lines) == 0 or lines[-1] < 4 * anchors.cache // 64
        read.update(lines)
        if kind == 0:
            copied.update(lines)

    monkeypatch.setattr(Anchors, "_walk", walk)
    anchors.fill_caches(written)
    # What is copied is in the caches twice, as it is read and as it is written.
    lines = 2 * anchors.cache // 64
    assert len(read) + len(copied) == pytest.approx(lines, rel=0.01)
    assert len(copied) == pytest.approx(lines * min(written, 0.5), rel=0.01)


RMS_BYTES = {
    "forward": 4 * (2 * 6 * 40 + 40),  # x, weight, y
    # x, weight, rstd, dy, dx, dweight
    "backward": 4 * (3 * 6 * 40 + 2 * 40 + 6),
}
RMS_BYTES["both"] = RMS_BYTES["forward"] + RMS_BYTES["backward"] + 4 * 6


@pytest.mark.parametrize("mode", MODES)
def test_bytes_of_rms_norm(mode):
    op, case = registry.get("rms_norm"), Case((2, 3), {"D": 40})
    problem, outputs = rows.pose(op, case, mx.float32)
    assert work(op, case, problem.values, outputs, mode).bytes == RMS_BYTES[mode]


def test_the_paged_benchmark_reads_all_that_it_counts():
    op = registry.get("paged_attention")
    case = rows.at_rows(op.benchmarks[0], 1)
    _, _, _, table, lengths, _ = testing.draw(op, case, mx.float32)
    assert sorted(table.flatten().tolist()) == list(range(case.sizes["P"]))
    assert lengths.tolist() == [case.sizes["N"] * case.sizes["Z"]]


def test_a_backward_that_reads_the_output_counts_it():
    op = replace(registry.get("softmax"), reads_backward=("output",))
    case = Case((4,), {"D": 32})
    problem, outputs = rows.pose(op, case, mx.bfloat16)
    assert work(op, case, problem.values, outputs, "backward").bytes == 3 * 2 * 4 * 32


# ---- ways ---------------------------------------------------------------------------------------

OPS = [pytest.param(op, id=op.name) for op in registry.ops()]


def small(op):
    """The benchmark on few rows, or a test's shape where its sizes depend on one another."""
    case = op.benchmarks[0]
    if len(case.lead) == len(case.sizes) == 1:
        return replace(case, lead=(6,), sizes=dict.fromkeys(case.sizes, 40))
    return replace(op.cases[1], optional=case.optional)


def ways(op, names):
    mode = "both" if op.differentiable else "forward"
    problem, _ = rows.pose(op, small(op), mx.float32)
    return rows._ways(problem, "float32", mode, rows.Plan(names), threads=1)


@pytest.mark.parametrize("op", OPS)
def test_all_libraries_compute_the_same(op):
    """Above all: the entry's torch expression and MLX's own op are those of the op."""
    made, notes = ways(op, (ZMLX, EAGER, BUILT_IN, TORCH))
    assert not notes
    assert {ZMLX, EAGER} <= set(made)
    assert (BUILT_IN in made) == (op.baseline is not None)
    assert (TORCH in made) == (bool(op.torch) and find_spec("torch") is not None)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_computes_the_same_in_mlx(mode):
    problem, _ = rows.pose(registry.get("rms_norm"), Case((6,), {"D": 40}), mx.float32)
    names = (ZMLX, GPU_GEOMETRY, EAGER, COMPILED, BUILT_IN)
    made, notes = rows._ways(problem, "float32", mode, rows.Plan(names), threads=1)
    assert not notes
    assert set(made) == set(names)


def test_optional_arguments_are_left_out_where_the_case_says_so():
    op = registry.get("swiglu")
    for optional, count in ((True, 4), (False, 2)):
        case = Case((3,), {"D": 8}, optional=optional)
        problem, outputs = rows.pose(op, case, mx.float32)
        assert sum(v is not None for v in problem.values) == len(problem.which) == count
        biases = 2 * 4 * 8 if optional else 0
        found = work(op, case, problem.values, outputs, "forward").bytes
        assert found == 3 * 4 * 3 * 8 + biases
    assert "with gate_bias" in rows.detail(op, replace(op.benchmarks[0], optional=True))
    assert rows.detail(registry.get("rms_norm"), Case((3,), {"D": 8})) == ""


@pytest.mark.slow  # torch compiles each op with g++
@pytest.mark.parametrize("op", OPS)
def test_torch_compile_computes_the_same(op):
    pytest.importorskip("torch")
    made, notes = ways(op, (TORCH_COMPILED,))
    assert not notes
    assert (TORCH_COMPILED in made) == bool(op.torch)


def test_backward_times_the_backward_alone():
    """Forward launches belong to the preparation, backward launches to the call."""
    problem, _ = rows.pose(registry.get("softmax"), Case((6,), {"D": 40}), mx.float32)
    variant = mlx_ways(problem, "backward", (ZMLX,))[ZMLX]().variant
    start = metal.statistics()["launches"]
    given = variant.before()
    prepared = metal.statistics()["launches"]
    variant.call(given)
    assert (prepared - start, metal.statistics()["launches"] - prepared) == (1, 1)


# ---- rows ---------------------------------------------------------------------------------------


def test_self_test_passes():
    # Other processes can spoil a timing; a defect spoils it every time. One thread copies, as one
    # evaluates the ops: of two, the slower counts, which beside other work is half as fast.
    anchors = Anchors(threads=1, cache=8 << 20)
    for _ in range(5):
        failed = [c for c in selftest.checks(anchors, rounds=7) if not c.passed]
        if not failed:
            return
    assert not failed


def failing(x):
    raise RuntimeError("[op] 'x' must be better")


def entry(function, reference=lambda x, xp=mx: x + 1):
    return Op("name", "family", "", "", function, reference, (Argument("x"),))


def test_a_way_that_fails_is_told_and_the_others_are_measured(anchors):
    plan = rows.Plan((ZMLX, EAGER), rounds=3, extras=False)
    row = rows.run_row(entry(failing), Case((4,), {"D": 8}), mx.float32, "forward", plan, anchors)
    assert "must be better" in row.notes[ZMLX]
    assert row.error
    assert set(row.timings) == {EAGER}


def test_a_row_without_a_timing_is_an_error(anchors):
    plan = rows.Plan((BUILT_IN,), rounds=3, extras=False)
    op = replace(entry(lambda x: x + 1), baseline=failing)
    row = rows.run_row(op, Case((4,), {"D": 8}), mx.float32, "forward", plan, anchors)
    assert not row.timings
    assert "mlx built-in did not run: RuntimeError: [op] 'x' must be better" in row.error


@pytest.mark.parametrize(
    "text, told",
    [
        ("/tmp/a_b/c4.main.so: file too short\nmore", "c4.main.so: file too short"),
        ("cannot open '/home/me/x.py' or /etc/y", "cannot open 'x.py' or y"),
        ("GB/s of 1/2, and a/b/c", "GB/s of 1/2, and a/b/c"),
        ("", ""),
    ],
)
def test_a_reason_names_files_without_their_folders(text, told):
    assert rows._reason(ImportError(text)) == f"ImportError: {told}"


def test_a_nan_agrees_with_nothing(anchors):
    plan = rows.Plan((ZMLX,), rounds=3, extras=False)
    op = entry(lambda x: x * math.nan)
    row = rows.run_row(op, Case((4,), {"D": 8}), mx.float32, "forward", plan, anchors)
    assert "off by" in row.error


def test_a_reference_that_is_itself_off_in_float32_blames_nobody_else(anchors):
    plan = rows.Plan((ZMLX, EAGER), rounds=3, extras=False)
    op = entry(lambda x: x + 0, lambda x, xp=mx: (x + 1e8) - 1e8)
    for mode in ("forward", "both"):
        row = rows.run_row(op, Case((4,), {"D": 8}), mx.float32, mode, plan, anchors)
        assert not row.error
        assert "off by" in row.notes[EAGER]


def test_another_way_that_is_too_fast_is_told_and_not_compared(anchors):
    plan = rows.Plan((ZMLX, EAGER), rounds=3, extras=False)
    # Sixteen passes, which are no faster than a copy however slow the copy was.
    op = entry(lambda x: sum([x] + 16 * [0]), lambda x, xp=mx: x)
    row = rows.run_row(op, Case((4096,), {"D": 1024}), mx.float32, "forward", plan, anchors)
    assert "times the best of copy" in row.notes[EAGER]
    assert EAGER not in row.ratios
    assert ZMLX in row.timings
    assert not row.error


def test_a_row_has_all_that_the_report_needs(anchors):
    plan = rows.Plan((ZMLX, EAGER, TORCH), rounds=6)
    op = registry.get("rms_norm")
    row = rows.run_row(op, Case((64,), {"D": 256}), mx.float32, "both", plan, anchors)
    assert row.shape == "64x256"
    assert row.share is not None
    assert row.share.count == 6
    assert row.from_cache is not None
    assert row.from_cache > 0
    assert set(row.anchor_rate) == {"copy", "non-temporal", "read"}
    assert row.timings[ZMLX].mlx_peak is not None
    text = "\n".join(report.row_lines(row))
    for name in row.ratios:
        assert name in text


@dataclass(frozen=True)
class Product(Op):
    """An op whose entry counts operations."""

    flops: str = ""


def test_an_op_that_counts_operations_is_held_against_a_matrix_product(anchors, monkeypatch):
    a = mx.ones((128, 128))  # the real one takes seconds on the reference BLAS
    monkeypatch.setattr(
        anchors_of, "matmul_variant",
        lambda _: Variant("matmul", lambda _: mx.eval(a @ a), anchor=True),
    )  # fmt: skip
    monkeypatch.setitem(rows.FLOPS, "matmul", 10**15)
    arguments = (Argument("x"), Argument("w", "(D, D)"))
    op = Product(
        "product", "family", "", "", lambda x, w: x @ w, lambda x, w, xp=mx: x @ w, arguments,
        flops="2 * rows * D * D",
    )  # fmt: skip
    plan = rows.Plan((ZMLX, EAGER), rounds=3, extras=False)
    row = rows.run_row(op, Case((32,), {"D": 64}), mx.float32, "both", plan, anchors)
    assert row.flops == 3 * 2 * 32 * 64 * 64  # a product forward, two for the gradients
    assert {"matmul", "fma"} <= set(row.anchor_rate)
    assert "of matmul" in "\n".join(report.row_lines(row))
    assert not row.error


def test_a_causal_mask_halves_the_operations():
    op = registry.get("scaled_dot_product_attention")
    dense, causal = (work(op, case, (None,) * 5, (), "forward").flops for case in op.benchmarks[:2])
    size = op.benchmarks[0].sizes["L"]
    assert causal * 2 * size == dense * (size + 1)


@pytest.mark.parametrize("dtype, told", [("float32", {TORCH, ZMLX}), ("bfloat16", {ZMLX})])
def test_matrix_units_may_be_faster_than_float32(dtype, told):
    """As torch has them for half precision; bytes are the same for everyone."""
    timings = {n: Timing(Summary(1.0, 1.0, 1.0, 20)) for n in (ZMLX, TORCH)}
    rates = {"copy": 1e9, "matmul": 100.0, "fma": 120.0}
    assert set(rows._too_fast(Work(1, 1000), timings, rates, dtype)) == told
    assert set(rows._too_fast(Work(10**10, 0), timings, rates, dtype)) == {ZMLX, TORCH}


def test_the_rate_from_cache_takes_sizes_that_follow_the_rows():
    op = registry.get("moe_dispatch")
    case = Case((512,), {"D": 64, "K": 2, "R": 1024}, follows=("R",))
    rate = rows._from_cache(op, case, mx.float32, "forward", 1 << 20, 1 << 20, 0.1)
    assert rate is not None
    fixed = replace(case, follows=())
    assert rows._from_cache(op, fixed, mx.float32, "forward", 1 << 20, 1 << 20, 0.1) is None


def test_the_share_is_of_the_copy_or_of_the_matrix_product():
    seconds = {ZMLX: [2.0], "copy": [1.0], "matmul": [1.0]}
    moved = {"copy": 100, "matmul": 100}
    share = {
        flops: rows._with_ratios(made(ratios={}), seconds, Work(40, flops), moved, None).share
        for flops in (0, 60)
    }
    assert (share[0].median, share[60].median) == (0.2, 0.3)
