"""The benchmark harness: it measures what it says, and says what it measured."""

import argparse
import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from zmlx import metal, registry
from zmlx.arguments import Argument
from zmlx.bench import (
    bars,
    compare,
    measure,
    memory,
    model,
    model_worker,
    overhead,
    page,
    plot,
    report,
    rows,
    run,
    selftest,
)
from zmlx.bench import summary as summaries
from zmlx.bench import text as texts
from zmlx.bench.anchors import Anchors
from zmlx.bench.measure import Variant
from zmlx.bench.result import ModelRow, Overhead, Result, Row, Timing
from zmlx.bench.summary import Summary, paired, summary
from zmlx.bench.variants import (
    BUILT_IN,
    COMPILED,
    EAGER,
    GPU_GEOMETRY,
    MODES,
    TORCH,
    TORCH_COMPILED,
    ZMLX,
    mlx_ways,
)
from zmlx.bench.work import Work, work
from zmlx.cli import bench as command
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
        "v", lambda given: events.append(f"call {given}"), lambda: events.append("before") or 7
    )
    variant.seconds(lambda: events.append("between"))
    assert events == ["before", "between", "call 7"]


def test_only_hopelessly_slow_variants_sit_rounds_out():
    variants = [stub("fast", [], 0.001), stub("slow", [], 0.009), stub("hopeless", [], 1.0)]
    times = measure.measure(variants, rounds=20, budget=2.0)
    known = {n: sum(not math.isnan(t) for t in ts) for n, ts in times.items()}
    assert known["fast"] == known["slow"] == 20
    assert measure.FEWEST <= known["hopeless"] < 20


def test_a_hopelessly_slow_variant_warms_up_once():
    calls = []
    variants = [stub("fast", calls, 0.001), stub("slow", calls, 0.009), stub("hopeless", calls)]
    times = measure.measure(variants, rounds=20, budget=2.0)
    warm = [n for n, _ in calls][: -sum(not math.isnan(t) for ts in times.values() for t in ts)]
    assert warm.count("fast") == warm.count("slow") >= measure.WARM_UPS
    assert warm.count("hopeless") == 1


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


def test_self_test_passes(anchors):
    # Other processes can spoil a timing; a defect spoils it every time.
    for _ in range(3):
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
        rows, "matmul_variant", lambda _: Variant("matmul", lambda _: mx.eval(a @ a))
    )
    monkeypatch.setattr(rows, "MATMUL_FLOPS", 10**15)
    arguments = (Argument("x"), Argument("w", "(D, D)"))
    op = Product(
        "product", "family", "", "", lambda x, w: x @ w, lambda x, w, xp=mx: x @ w, arguments,
        flops="2 * rows * D * D",
    )  # fmt: skip
    plan = rows.Plan((ZMLX, EAGER), rounds=3, extras=False)
    row = rows.run_row(op, Case((32,), {"D": 64}), mx.float32, "both", plan, anchors)
    assert row.flops == 3 * 2 * 32 * 64 * 64  # a product forward, two for the gradients
    assert "matmul" in row.anchor_rate
    assert "of matmul" in "\n".join(report.row_lines(row))
    assert not row.error


def test_the_share_is_of_the_copy_or_of_the_matrix_product():
    seconds = {ZMLX: [2.0], "copy": [1.0], "matmul": [1.0]}
    moved = {"copy": 100, "matmul": 100}
    share = {
        flops: rows._with_ratios(made(ratios={}), seconds, Work(40, flops), moved, None).share
        for flops in (0, 60)
    }
    assert (share[0].median, share[60].median) == (0.2, 0.3)


# ---- results ------------------------------------------------------------------------------------


def firm(value, spread=0.01, count=20):
    return Summary(value, value * (1 - spread), value * (1 + spread), count)


def made(op="rms_norm", share=0.9, ratios=None, *, seconds=0.003, **fields):
    ratios = {COMPILED: 2.0, TORCH_COMPILED: 1.1} if ratios is None else ratios
    timings = {
        ZMLX: Timing(firm(seconds), 1 << 20, 2 << 20),
        **{n: Timing(firm(r * seconds), 1 << 20, 2 << 20) for n, r in ratios.items()},
    }
    values = {
        "op": op, "family": "norms", "shape": "4096x4096", "dtype": "float32", "mode": "forward",
        "bytes": 1 << 27, "anchor": {"copy": firm(0.005)}, "anchor_rate": {"copy": 4.6e10},
        "timings": timings, "ratios": {n: firm(r) for n, r in ratios.items()},
        "share": firm(share), "from_cache": 9e10,
    }  # fmt: skip
    return Row(**{**values, **fields})


ENVIRONMENT = {
    "date": "2025-01-01 00:00 UTC", "cpu": "a CPU", "cpus": 2, "threads": 2, "target": "cpu",
    "last_level_cache": 1 << 25, "system": "Linux", "huge_pages": "madvise", "compiler": "g++ 12",
    "python": "3.11", "versions": {"mlx": "0.32.4"}, "blas": "OpenBLAS", "load_before": 0.1,
    "mlx_cache_limit": 8 << 30,
}  # fmt: skip


def outcome(*items, overheads=(), sweep=()):
    return Result(ENVIRONMENT, {"copy": firm(4.6e10)}, items, overheads, sweep)


def test_results_survive_the_file(tmp_path):
    row = made(notes={TORCH: "did not run"}, error="too fast")
    result = outcome(row, overheads=(Overhead("import", 3.0, "ms", 50),), sweep=(made(),))
    path = tmp_path / "result.json"
    result.write(path)
    back = Result.read(path)
    assert back.rows[0].key == row.key
    assert back.rows[0].notes == row.notes
    assert back.rows[0].timings[ZMLX].seconds.median == row.timings[ZMLX].seconds.median
    assert back.overheads == result.overheads
    assert back.sweep[0].share == made().share
    assert back.environment == ENVIRONMENT


def test_a_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="format"):
        Result.read(path)


def test_an_update_replaces_what_was_measured_again_and_keeps_the_rest():
    old = outcome(made(op="softmax"), made(bytes=1), overheads=(Overhead("import", 3.0, "ms"),))
    new = outcome(made(bytes=2), overheads=(Overhead("import", 4.0, "ms"),))
    found = old.updated(new)
    assert {row.op: row.bytes for row in found.rows} == {
        "softmax": made(op="softmax").bytes,
        "rms_norm": 2,
    }
    assert [o.value for o in found.overheads] == [4.0]


def test_an_update_from_another_machine_is_refused():
    new = Result({**ENVIRONMENT, "cpu": "another"}, {}, ())
    with pytest.raises(ValueError, match="must come from cpu another but got a CPU"):
        outcome(made()).updated(new)


def changes(old, new):
    return {c.row.op: c.verdict for c in compare.compare(outcome(*old), outcome(*new))}


def test_compare_tells_faster_slower_and_same():
    old = [made("a"), made("b"), made("c"), made("gone")]
    new = [made("a", 0.99), made("b", 0.8), made("c", 0.91), made("new")]
    assert changes(old, new) == {
        "a": "faster", "b": "slower", "c": "same", "new": "new", "gone": "gone",
    }  # fmt: skip


def test_compare_respects_the_noise():
    noisy = made("a", share=0.9)
    noisy = replace(noisy, share=firm(0.9, spread=0.2))
    assert changes([noisy], [made("a", 0.8)]) == {"a": "same"}


def test_compare_does_not_blame_a_kernel_for_a_slower_machine():
    old, new = made("a", seconds=0.003), made("a", seconds=0.006)
    assert changes([old], [new]) == {"a": "same"}


def test_compare_names_another_machine():
    other = replace(outcome(made()), environment={**ENVIRONMENT, "cpu": "another CPU"})
    assert "another machine: cpu" in "\n".join(compare.lines(other, outcome(made())))


def test_joined_interval_is_wider_than_either():
    joined = compare.quotient(firm(0.8, 0.03), firm(0.4, 0.04))
    assert joined.median == pytest.approx(2)
    assert joined.low == pytest.approx(2 * (1 - 0.05), rel=0.01)
    assert joined.high == pytest.approx(2 * (1 + 0.05), rel=0.01)


# ---- overheads ----------------------------------------------------------------------------------


def test_cold_compile_is_that_of_the_slowest_kernel():
    runs = [{"kernels": {"cpu": {"a": 0.05, "b": s}, "gpu": {"a": 0.3}}} for s in (0.09, 0.08, 0.5)]
    one_thread, gpu = overhead._compiles(runs)
    assert one_thread.value == pytest.approx(90)
    assert one_thread.note.startswith("b;")
    assert (one_thread.passed, gpu.passed) == (True, False)


def test_a_call_reports_only_what_it_takes_beyond_mlx():
    found = {"zmlx": 5e-6, "mlx": 3e-6, "beyond": 2e-6, "zmlx_evaluated": 0.0, "mlx_evaluated": 0.0}
    call = overhead._call(found)
    assert call.value == pytest.approx(2)
    assert call.passed


def test_the_geometry_of_a_gpu_is_judged_by_the_slowest_reduction():
    row = overhead._geometry({"rms_norm": 12.0, "softmax": 31.0})
    assert (row.value, row.passed) == (31.0, False)
    assert "rms_norm 12.0" in row.note


def test_a_call_through_install_reports_what_it_takes_beyond_mlx():
    row = overhead._install({"zmlx": 5e-6, "mlx": 1e-6, "beyond": 4e-6})
    assert row.value == pytest.approx(4)
    assert row.passed


@pytest.mark.slow  # builds the core and compiles every kernel in fresh processes
def test_second_process_compiles_nothing():
    found = {o.name: o for o in overhead.overheads()}
    assert found["kernels that a second process compiles"].value == 0
    assert all(o.value > 0 for o in found.values() if o.unit in ("s", "ms"))


# ---- a model in training ------------------------------------------------------------------------

TINY = model.Size(
    layers=1, width=32, hidden=64, heads=4, kv_heads=2, tokens=16,
    vocabularies=((64, model.MODES), (128, model.MODES[2:])),
)  # fmt: skip


def test_training_moves_the_weights_and_says_what_each_part_took():
    way = model.Way("patched", openblas=False, patched=True)
    training = model_worker.Training(way, TINY, 64)
    before = mx.array(training._model.lm_head.weight)
    assert set(training.forward()) == {model.MODES[0]}
    said = training.step()
    assert said[model.MODES[1]]["seconds"] < said[model.MODES[2]]["seconds"]
    assert all(part["mlx_peak"] > before.nbytes for part in said.values())
    assert not mx.array_equal(training._model.lm_head.weight, before)


def test_patched_and_plain_training_are_the_same_computation():
    losses = []
    for patched in (False, True):
        training = model_worker.Training(model.Way("", False, patched), TINY, 64)
        training.step()
        losses.append(training._loss(training._model, *training._batch)[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # float32 over a dozen roundings


def parts(*seconds, mode=model.MODES[2]):
    """What a worker says of a mode, by round."""
    return {mode: [{"seconds": s, "mlx_peak": i, "process_peak": None}
                   for i, s in enumerate(seconds)]}  # fmt: skip


def test_a_row_pairs_rounds_and_keeps_the_highest_peak():
    found = {"MLX": parts(30.0), "MLX + OpenBLAS": parts(2.0, 6.0), "ours": parts(1.0, 2.0)}
    (row,) = model._rows(TINY, 64, model.MODES[2:], found)
    assert (row.ratios["MLX"].median, row.ratios["MLX"].count) == (30, 1)
    assert row.ratios["MLX + OpenBLAS"].median == 2.5
    assert (row.timings["ours"].mlx_peak, row.timings["ours"].process_peak) == (1, None)


def model_row(ratio=3.0, share=0.4, vocabulary=32768, *, process=None, count=7):
    peaks = {"MLX": 1.0, "MLX + OpenBLAS": 1.0, "patched + OpenBLAS": share}
    resident = peaks if process is None else {**peaks, "patched + OpenBLAS": process}
    timings = {
        name: Timing(
            firm(2.0, count=1 if name == "MLX" else count),
            int(peaks[name] * 2**30),
            int(resident[name] * 2**30),
        )
        for name in peaks
    }
    ratios = {"MLX": firm(20.0, count=1), "MLX + OpenBLAS": firm(ratio, count=count)}
    return ModelRow("llama", vocabulary, 2048, model.MODES[2], timings, ratios)


def passed(row):
    return [v.passed for v in bars.model_verdicts([row])]


def test_a_patched_model_is_held_to_its_time_and_with_a_large_vocabulary_to_half_the_memory():
    assert passed(model_row()) == [True, True]
    assert passed(model_row(share=0.51)) == [True, False]
    assert passed(model_row(share=0.4, process=0.6)) == [True, False]
    assert passed(model_row(vocabulary=4096, share=0.9)) == [True]
    assert passed(model_row(0.94, count=20)) == [False, True]


def test_a_model_that_is_hardly_faster_needs_all_rounds():
    assert passed(model_row(1.2)) == [None, True]
    assert passed(model_row(1.2, count=20)) == [True, True]


def test_rows_of_models_survive_the_file_and_an_update(tmp_path):
    path = tmp_path / "result.json"
    result = replace(outcome(made()), models=(model_row(), model_row(vocabulary=4096)))
    result.write(path)
    back = Result.read(path)
    for got_row, row in zip(back.models, result.models, strict=True):
        assert got_row.key == row.key
        assert got_row.ratios["MLX"].median == row.ratios["MLX"].median
        assert {n: t.mlx_peak for n, t in got_row.timings.items()} == {
            n: t.mlx_peak for n, t in row.timings.items()
        }
    new = replace(outcome(), models=(model_row(2.0),))
    ratios = [row.ratios["MLX + OpenBLAS"].median for row in back.updated(new).models]
    assert ratios == [2.0, 3.0]


def test_a_model_stands_in_the_report_and_on_the_page():
    result = replace(outcome(made()), models=(model_row(share=0.6),))
    lines = "\n".join((*report.model_lines(model_row()), *report.end_lines(result)))
    text = page.page(result)
    for said in (lines, text):
        for fact in ("patched + OpenBLAS", "1,024", "(once)", "3.00x", "60%"):
            assert fact in said
    assert "MISSED" in lines
    assert "**missed**" in text


def test_quick_is_an_eighth_of_the_sequence():
    parser = argparse.ArgumentParser()
    command.configure(parser)
    assert command._model_plan(parser.parse_args(["model"])) == (model.ROUNDS, model.Size())
    rounds, size = command._model_plan(parser.parse_args(["model", "--quick"]))
    assert (rounds, size.tokens) == (2, 256)


@pytest.mark.slow  # six processes that import mlx-lm
def test_every_way_answers_from_a_process_of_its_own():
    told = []
    found = list(model.model_rows(2, TINY, told.append))
    assert [(row.vocabulary, row.mode) for row in found] == [
        *((64, mode) for mode in model.MODES), (128, model.MODES[2]),
    ]  # fmt: skip
    for row in found:
        assert set(row.timings) == {way.name for way in model.ways()}
        for way in model.ways():
            assert row.timings[way.name].seconds.count == (1 if way.once else 2)
    assert len(told) == 2 * 3


def test_a_process_that_fails_is_an_error_with_its_words():
    with pytest.raises(RuntimeError, match=r"model, patched, failed:(.|\n)*TypeError"):
        model._Worker(model.Way("patched", False, True), replace(TINY, layers="two"), 64)


# ---- bars ---------------------------------------------------------------------------------------

BAR = bars.Bar(("norms",), "4096x4096", ("float32",), ("forward",), 0.8)
RATIO = replace(BAR, least=0.95, than=(COMPILED, TORCH_COMPILED))


def judge(bar, row):
    (verdict,) = bars.verdicts([row], [bar])
    return verdict


def test_bars_are_held_or_missed_by_the_median():
    assert judge(BAR, made(share=0.81)).passed is True
    assert judge(BAR, made(share=0.79)).passed is False
    assert judge(RATIO, made(ratios={COMPILED: 3.0, TORCH_COMPILED: 0.94})).passed is False
    assert judge(RATIO, made(ratios={COMPILED: 0.96, TORCH_COMPILED: 3.0})).passed is True


def test_a_ratio_is_to_the_fastest_of_those_named():
    assert judge(RATIO, made(ratios={COMPILED: 2.0, TORCH_COMPILED: 1.5})).than == TORCH_COMPILED


def test_bars_need_their_rounds():
    few = replace(made(), share=firm(0.9, count=19))
    assert judge(BAR, few).passed is None
    assert "20 are needed" in judge(BAR, few).unjudged
    slow = {COMPILED: firm(30.0, count=5), TORCH_COMPILED: firm(31.0, count=5)}
    assert judge(RATIO, replace(made(), ratios=slow)).passed is True


def test_bars_are_not_judged_on_errors_and_missing_variants():
    assert judge(BAR, made(error="too fast")).passed is None
    absent = judge(RATIO, made(ratios={}, notes={COMPILED: "did not run: no g++"}))
    assert absent.passed is None
    assert "no g++" in absent.unjudged


def test_a_bar_on_memory_counts_what_is_left_after_the_results():
    """By the worse of the two counters, and not judged where memory was not measured."""
    bar = replace(BAR, least=8.0, than=(COMPILED,), memory=True)

    def peaks(ours, theirs):
        timings = {ZMLX: Timing(firm(0.1), *ours), COMPILED: Timing(firm(0.1), *theirs)}
        return made(results=100, timings=timings)

    assert judge(bar, peaks((110, 110), (190, 180))).passed is True
    assert judge(bar, peaks((110, 110), (190, 179))).passed is False
    assert judge(bar, peaks((None, None), (190, 190))).passed is None
    verdict = judge(bar, peaks((110, 120), (190, 190)))
    assert texts.wanted(verdict) == "≤ 0.125 of the memory of mlx compile, beyond results"
    assert texts.got(verdict) == "0.111 to 0.222 by the two counters"
    assert texts.outcome(verdict) == "missed by 78%"


def test_a_bar_may_take_fewer_rounds():
    few = {COMPILED: firm(1.0, count=3), TORCH_COMPILED: firm(1.0, count=3)}
    row = replace(made(), ratios=few)
    assert judge(RATIO, row).passed is None
    assert judge(replace(RATIO, rounds=3), row).passed is True


def test_every_bar_covers_a_row_of_the_catalogue():
    """A bar whose op, family or shape is misspelt would be held by nobody and missed by nobody."""
    known = set()
    for op in registry.ops():
        shapes = {run.shape_of(op, case) for case in run.default_cases(op)}
        known |= {(name, shape) for name in (op.name, op.family) for shape in shapes}
    for bar in bars.BARS:
        assert all((who, bar.shape) in known for who in (*bar.who, *bar.but)), bar


def test_a_bar_on_a_family_may_leave_an_op_out():
    row = made(share=0.7)
    assert not replace(BAR, but=(row.op,)).covers(row)
    assert replace(BAR, but=("another",)).covers(row)


def test_what_bounds_a_row_comes_from_its_rate_in_cache():
    rate = made().bytes / 0.003
    assert bars.bound(made(from_cache=1.1 * rate)).startswith("arithmetic")
    assert bars.bound(made(from_cache=3 * rate)).startswith("memory")


# ---- page, plot, command line -------------------------------------------------------------------


def test_page_shows_losses_like_wins_and_says_by_how_much_a_bar_is_missed():
    slow = made("rms_norm", share=0.5, ratios={COMPILED: 0.4, TORCH_COMPILED: 0.3})
    broken = made("l2_norm", error="zmlx reaches 900 GB/s")
    text = page.page(outcome(slow, broken, overheads=(Overhead("import", 60.0, "ms", 50),)))
    assert "0.40x" in text
    assert "0.30x" in text
    assert "| rms_norm 4096x4096 float32 forward | ≥ 80% of copy | 50% [50, 50] |" in text
    assert "missed by 30 points; bound by" in text
    assert "no measurement: zmlx reaches 900 GB/s" in text
    assert "≤ 50, **missed**" in text
    for fact in ("a CPU", "0.32.4", "2025-01-01", "OpenBLAS"):
        assert fact in text


def test_page_tables_have_equal_columns():
    text = page.page(outcome(made(), made(error="x"), made(ratios={TORCH: 2.0})))
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4  # machine, bars, times, memory
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1


def sweep_of(op):
    return [made(op, shape=f"{4**i}x4096", seconds=1e-5 * 4**i) for i in range(4)]


def test_plot_is_an_svg_per_op_with_the_roofline(tmp_path):
    result = outcome(sweep=(*sweep_of("rms_norm"), *sweep_of("softmax")))
    written = plot.write(result, tmp_path / "sizes.svg")
    assert [p.name for p in written] == ["sizes-rms_norm.svg", "sizes-softmax.svg"]
    for path in written:
        ElementTree.fromstring(path.read_text())
        assert "copy of the same bytes" in path.read_text()
        assert COMPILED in path.read_text()


def test_a_shape_names_one_size():
    op = registry.get("cross_entropy")
    assert run.at_shape(op, (3, 5, 7)) == replace(op.benchmarks[0], lead=(3, 5), sizes={"V": 7})
    with pytest.raises(ValueError, match="--shape"):
        run.at_shape(replace(op, benchmarks=(Case((4,), {"V": 8, "D": 2}),)), (4, 8))


def test_sweep_grows_to_the_benchmark_shape():
    op = registry.get("rms_norm")
    leads = [case.lead[0] for case in run.sweep(op)]
    assert leads == sorted(leads)
    assert (leads[0], leads[-1]) == (1, op.benchmarks[0].lead[0])


def call(*arguments):
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(arguments))


def test_unknown_op_is_refused_with_the_names(capsys):
    assert call("rms_nrom") == 2
    assert "rms_norm" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("rms_norm", "--plot", "picture.png"),
        ("rms_norm", "--rounds", "0"),
        ("rms_norm", "--variant", "numpy"),
        ("rms_norm", "--compare", "no-such-file.json"),
        ("--page", "no-such-file.json"),
        ("rms_norm", "--update"),
        ("rms_norm", "--json", "no-such-folder/results.json"),
        ("model", "--rounds", "0"),
    ],
)
def test_wrong_usage_ends_with_2(arguments, capsys):
    assert call(*arguments) == 2
    assert capsys.readouterr().err


def test_page_of_a_result_file(tmp_path, capsys):
    path = tmp_path / "result.json"
    outcome(made()).write(path)
    assert call("--page", str(path)) == 0
    assert capsys.readouterr().out == page.page(Result.read(path))


@pytest.mark.slow  # anchors over four times the last-level cache
def test_a_run_writes_compares_and_plots(tmp_path, capsys):
    path = tmp_path / "new.json"
    options = ("--shape", "64x256", "--rounds", "3", "--mode", "forward", "--dtype", "float32")
    assert (
        call("rms_norm", *options, "--variant", ZMLX, "--variant", EAGER, "--json", str(path)) == 0
    )
    result = Result.read(path)
    assert [row.key for row in result.rows] == [("rms_norm", "64x256", "float32", "forward", "")]
    capsys.readouterr()
    call("rms_norm", *options, "--variant", ZMLX, "--compare", str(path))
    assert "compared with the run" in capsys.readouterr().out


def test_the_page_in_docs_is_that_of_the_committed_results():
    docs = Path(__file__).parent.parent / "docs"
    results = docs / "benchmarks.json"
    if not results.exists():
        pytest.skip("no results are committed")
    assert (docs / "benchmarks.md").read_text() == page.page(Result.read(results))


class Terminal:
    def __init__(self, is_terminal):
        self.text, self._is_terminal = "", is_terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return self._is_terminal


@pytest.mark.parametrize("on_terminal", [False, True])
def test_the_bar_is_for_terminals(on_terminal):
    lines, bar = Terminal(False), Terminal(on_terminal)
    report.Progress(lines, bar)(made(), 1, 2)
    assert "rms_norm" in lines.text
    assert "\x1b" not in lines.text
    assert bool(bar.text) == on_terminal


def test_what_is_larger_than_the_cache_has_no_rate_from_it():
    op, case = registry.get("rms_norm"), Case((4,), {"D": 4096})

    def rate(cache):
        return rows._from_cache(op, case, mx.float32, "forward", 1 << 17, cache, 1.0)

    assert rate(4096) is None
    assert rate(1 << 20) > 0
