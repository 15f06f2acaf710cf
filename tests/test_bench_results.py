"""What the benchmark makes of its results: files, comparisons, bars, the page, the command."""

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from bench_results import ENVIRONMENT, firm, made, model_row, outcome

from zmlx import registry, testing
from zmlx.bench import (
    bars,
    compare,
    environment,
    overhead,
    page,
    plot,
    report,
    rows,
    run,
)
from zmlx.bench import text as texts
from zmlx.bench.result import Overhead, Result, Timing
from zmlx.bench.variants import (
    COMPILED,
    EAGER,
    GPU_GEOMETRY,
    NAMES,
    TORCH,
    TORCH_COMPILED,
    UNFUSED,
    ZMLX,
)
from zmlx.cli import bench as command
from zmlx.registry import Case

# ---- results ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("text", ["", '{"a": 1', "[1, 2]", '{"format": 1}', "\xff"])
def test_a_file_that_holds_no_results_is_named(text, tmp_path):
    path = tmp_path / "result.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"result\.json' must hold results of format 1 but got"):
        Result.read(path)


def test_a_file_with_damaged_rows_is_named(tmp_path):
    path = tmp_path / "result.json"
    outcome(made()).write(path)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "rows": [{"op": "rms_norm"}]}))
    with pytest.raises(ValueError, match=r"result\.json' must hold .* other fields: 'anchor'"):
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


def test_an_update_says_what_was_measured_again_and_when(tmp_path):
    def later(date, *rows, **more):
        return replace(outcome(*rows, **more), environment={**ENVIRONMENT, "date": date})

    found = outcome(made(op="softmax"), made()).updated(later("2025-02-02", made()))
    found = found.updated(later("2025-03-03", overheads=(Overhead("import", 4.0, "ms"),)))
    found.write(tmp_path / "results.json")
    text = page.page(Result.read(tmp_path / "results.json"))
    assert f"Measured on {ENVIRONMENT['date']}." in text
    assert "Measured again on 2025-02-02: rms_norm.\n" in text
    assert "Measured again on 2025-03-03: overheads.\n" in text
    found = found.updated(later("2025-04-04", made(), made(dtype="float16")))
    text = page.page(found.updated(later("2025-05-05", made())))
    assert "2025-02-02" not in text  # nothing of it is left
    assert "Measured again on 2025-04-04: rms_norm.\n" in text
    assert "Measured again on 2025-05-05: rms_norm.\n" in text
    swept = replace(later("2025-06-06"), sweep=(made(), made(dtype="float16")))
    assert "Measured again on 2025-04-04: rms_norm.\n" in page.page(found.updated(swept))


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


def test_compare_lists_rows_that_are_gone_of_a_whole_run_and_counts_them_of_another():
    old, new = outcome(made("a"), made("b"), made("c")), outcome(made("a"))
    assert sum("gone" in line for line in compare.lines(old, new)) == 2
    few = compare.lines(old, new, whole=False)
    assert not any("gone" in line for line in few)
    assert few[-1] == "  not measured now: 2 of its rows"


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
def test_second_process_compiles_nothing(monkeypatch):
    monkeypatch.setattr(overhead, "_REPEATS", 1)
    monkeypatch.setattr(overhead, "_IMPORTS", 1)
    # As other tests build it: from nothing, the fast one takes minutes.
    monkeypatch.setattr(overhead.zig, "_MODE", "Debug")
    monkeypatch.setattr(overhead.zig, "_TURNS", 1)
    found = {o.name: o for o in overhead.overheads()}
    assert found["kernels that a second process compiles"].value == 0
    assert all(o.value > 0 for o in found.values() if o.unit in ("s", "ms"))


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


@pytest.mark.parametrize("bar", [BAR, RATIO, replace(RATIO, memory=True)])
def test_a_bar_on_a_row_without_zmlx_says_so(bar):
    row = made()
    others = {name: timing for name, timing in row.timings.items() if name != ZMLX}
    verdict = judge(bar, replace(row, timings=others, ratios={}, share=None))
    assert texts.outcome(verdict) == "not judged: zmlx was not measured"


def test_numbers_are_written_out():
    assert [texts.mebibytes(n) for n in (None, 12_939_428, 1048261427)] == ["?", "12.3", "1000"]
    assert [texts.milliseconds(s) for s in (0.0123456, 2.6139)] == ["12.3 ms", "2614 ms"]


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


def test_what_misses_a_bar_by_little_does_not_look_as_if_it_held_it():
    share = judge(BAR, made(share=0.7996))
    assert texts.got(share).startswith("79.96% [")
    assert texts.outcome(share).startswith("missed by 0.04 points")
    ratio = judge(RATIO, made(ratios={COMPILED: 0.949, TORCH_COMPILED: 3.0}))
    assert texts.got(ratio).startswith("0.949x [")
    assert texts.outcome(ratio).startswith("missed by 0.1%")
    held = judge(BAR, made(share=0.804))
    assert texts.got(held).startswith("80% [")
    time, memory = bars.model_verdicts([model_row(0.9498, 0.504, count=20)])
    assert time.got.startswith("0.9498x [")
    assert memory.got == "50.4%, 50.4%"


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


def test_a_plot_leaves_out_what_is_no_measurement(tmp_path):
    broken = [replace(row, error="did not run") for row in sweep_of("rms_norm")]
    half = [*sweep_of("softmax"), made("softmax", mode="both", error="did not run")]
    (written,) = plot.write(outcome(sweep=(*broken, *half)), tmp_path / "sizes.svg")
    assert written.name == "sizes-softmax.svg"
    assert "elements, forward" in written.read_text()
    assert "elements, both" not in written.read_text()


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


@pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.name) for op in registry.ops() if op.benchmarks[0].follows]
)
def test_sizes_that_follow_the_rows_do_so_in_a_sweep(op):
    op.function(*testing.draw(op, next(run.sweep(op)), mx.float32))


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(arguments)


def call(*arguments):
    return command.run(parsed(*arguments))


@pytest.mark.parametrize(
    "arguments, measured",
    [
        ((), set(NAMES) - {GPU_GEOMETRY}),
        (("--geometry", "gpu"), set(NAMES)),
        (("--variant", GPU_GEOMETRY), {GPU_GEOMETRY}),
        (("--variant", ZMLX, "--geometry", "gpu"), {ZMLX, GPU_GEOMETRY}),
    ],
)
def test_the_variants_that_are_asked_for_are_measured(arguments, measured):
    assert set(command._plan(parsed(*arguments)).variants) == measured


def test_a_variant_that_there_is_not_is_refused_with_those_that_there_are(capsys):
    assert call("rms_norm", "--variant", ZMLX, "--variant", UNFUSED) == 2
    error = capsys.readouterr().err
    assert error.endswith("for these ops here but got 'zmlx unfused'.\n")
    assert "'mlx built-in'" in error


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
        ("rms_norm", "--json", "."),
        ("rms_norm", "--plot", "no-such-folder/picture.svg"),
        ("--page", "."),
        ("model", "--rounds", "0"),
        ("model", "--dtype", "float32"),
        ("overhead", "--shape", "4"),
        ("overhead", "--rounds", "3"),
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
    printed = capsys.readouterr().out
    assert "compared with the run" in printed
    assert "gone" not in printed


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


@pytest.mark.parametrize("others", [["softmax"], ["--rounds", "3"], ["--self-test"]])
def test_a_page_is_printed_alone(others, tmp_path):
    path = tmp_path / "results.json"
    path.write_text("{}")
    command = [sys.executable, "-m", "zmlx", "bench", "--page", str(path), *others]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "[bench] '--page' must be given alone." in done.stderr


def test_the_environment_names_the_compiler_that_is_used(monkeypatch, tmp_path):
    compiler = tmp_path / "other"
    compiler.write_text("#!/bin/sh\necho other 1.0\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("ZMLX_CXX", str(compiler))
    assert environment.environment(2, 0, "none")["compiler"] == "other 1.0"
