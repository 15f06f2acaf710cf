"""What `zmlx bench --update` refuses before it measures: what would be lost of the file's rows."""

import argparse
import re
from dataclasses import replace

import mlx.core as mx
import pytest
from bench_results import ENVIRONMENT, made, model_row, outcome

from zmlx import registry
from zmlx.bench import run, torch_variants, update
from zmlx.bench.result import Result
from zmlx.bench.variants import COMPILED, GPU_GEOMETRY, NAMES, TORCH, UNFUSED, ZMLX
from zmlx.cli import bench as command


def call(*arguments):
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(arguments))


@pytest.mark.parametrize(
    "there, message",
    [
        (
            {"mlx": "0.32.4", "torch": "2.13.0+cpu"},
            "must come from no torch but got torch 2.13.0+cpu. Remedy: pip install torch==2.13.0",
        ),
        (
            {"mlx": "0.32.1"},
            "must come from mlx 0.32.4 but got mlx 0.32.1. Remedy: pip install mlx==0.32.1",
        ),
        ({}, "must come from mlx 0.32.4 but got no mlx. Remedy: pip uninstall mlx"),
    ],
)
def test_an_update_with_other_versions_names_them_and_the_remedy(there, message):
    old = Result({**ENVIRONMENT, "versions": there}, {}, ())
    with pytest.raises(ValueError, match=f"{re.escape(message)}$"):
        old.check_same(ENVIRONMENT)


def refused_update(tmp_path, monkeypatch, old, *arguments, installed=True):
    """What an update says before anything is measured, with torch installed or not."""
    monkeypatch.setattr(torch_variants, "is_installed", lambda: installed)
    monkeypatch.setattr(update, "is_installed", lambda: installed)
    monkeypatch.setattr(update, "here", lambda: ENVIRONMENT)
    monkeypatch.setattr(run, "run", lambda *_: pytest.fail("something was measured"))
    path = tmp_path / "results.json"
    old.write(path)
    assert call(*arguments, "--json", str(path), "--update") == 2
    assert Result.read(path).rows[0].timings.keys() == old.rows[0].timings.keys()


@pytest.mark.on_cpu
def test_an_update_that_would_lose_a_way_is_refused_with_the_remedy(tmp_path, monkeypatch, capsys):
    first = run.shape_of(registry.get("rms_norm"), registry.get("rms_norm").benchmarks[0])
    old = outcome(made(shape=first))
    only = ("rms_norm", "--shape", first, "--dtype", "float32", "--mode", "forward")
    refused_update(tmp_path, monkeypatch, old, *only, installed=False)
    error = capsys.readouterr().err
    assert "must measure a row in every way that it has but got no 'torch compile' of" in error
    assert f"rms_norm {first} float32 forward. Remedy: pip install torch\n" in error
    refused_update(tmp_path, monkeypatch, old, *only, "--variant", ZMLX)
    assert "Remedy: --variant 'mlx compile'; --variant 'torch compile'\n" in capsys.readouterr().err
    wide = replace(old, rows=(made(shape=first, ratios={GPU_GEOMETRY: 2.0}),))
    refused_update(tmp_path, monkeypatch, wide, *only)
    assert "Remedy: --geometry gpu\n" in capsys.readouterr().err


def test_an_update_measures_what_the_rows_have_and_what_is_new(monkeypatch):
    op = registry.get("rms_norm")
    task = run.Task(op, op.benchmarks[0], mx.float32, "forward")
    monkeypatch.setattr(update, "here", lambda: ENVIRONMENT)
    for row in (
        made(shape=run.shape_of(op, task.case), ratios={COMPILED: 2.0}),
        made(shape="3x5", ratios={TORCH: 2.0}),  # another row
        made(shape=run.shape_of(op, task.case), ratios={UNFUSED: 2.0}),  # which there is no more
    ):
        update.check(outcome(row), [task], [], (ZMLX, COMPILED))


def test_an_update_of_the_model_needs_mlx_lm(monkeypatch):
    old = replace(outcome(made()), models=(model_row(),))
    monkeypatch.setattr(update, "here", lambda: ENVIRONMENT)
    monkeypatch.setattr(update, "find_spec", lambda name: None)
    update.check(old, [], [], NAMES)
    with pytest.raises(ValueError, match=r"no mlx-lm\. Remedy: pip install mlx-lm"):
        update.check(old, [], [], NAMES, model=True)
