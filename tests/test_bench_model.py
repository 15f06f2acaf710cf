"""The benchmark of a model in training: its processes, its rows, and the bars of its rows."""

import argparse
from dataclasses import replace

import mlx.core as mx
import pytest
from bench_results import made, model_row, outcome

from zmlx.bench import bars, model, model_worker, page, report
from zmlx.bench.result import Result
from zmlx.cli import bench as command

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
