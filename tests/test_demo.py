"""The demo: rows that differ in kernels alone learn the same, and the report says so honestly."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from zmlx import kernels
from zmlx.cli.demo import STEPS
from zmlx.demo import report
from zmlx.demo.data import Batches, corpus
from zmlx.demo.model import Size, mlx_operations, zmlx_operations
from zmlx.demo.progress import Progress
from zmlx.demo.rows import MLX, MLX_OPENBLAS, ZMLX_OPENBLAS, Result
from zmlx.demo.train import Settings, Step, build, sample, train

ROOT = Path(__file__).parents[1]
SMALL = Settings(
    openblas=False,
    kernels=False,
    steps=60,
    stop=60,
    batch=4,
    context=32,
    size=Size(layers=2, width=64, heads=2, hidden=96),
)
#: The demo's model and data, and all of its steps.
DEMO = Settings(openblas=True, kernels=False, steps=STEPS, stop=STEPS)


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def losses(settings, operations, perturb=None):
    model = build(settings, operations)
    if perturb is not None:
        perturb(model)
    return np.array([step.loss for step in train(model, operations, settings)])


def scaled(path):
    """What scales the weight at `path` by 1 + 1e-7, which rounding turns into 1 or 1 + 1.2e-7."""

    def perturb(model):
        weight = dict(tree_flatten(model.parameters()))[path]
        model.update(tree_unflatten([(path, weight * (1 + 1e-7))]))

    return perturb


def assert_trains_as_mlx(settings):
    """The project's bar for training: a kernel may differ from MLX by rounding alone, and rounding
    grows with the steps as fast as it does when one weight of plain MLX is off by 1e-7. At first
    the differences are a few units in the loss's last place, and in the end the runs have nothing
    but the task in common, so that the spread of a single run is mostly chance: there is a run for
    every matrix of the first layer."""
    base = losses(settings, mlx_operations())
    weights = tree_flatten(build(settings, mlx_operations()).blocks[0].parameters())
    paths = [f"blocks.0.{path}" for path, weight in weights if weight.ndim == 2]
    assert len(paths) == 5
    spread = np.max(
        [np.abs(losses(settings, mlx_operations(), scaled(path)) - base) for path in paths], axis=0
    )
    # MLX's mean over a batch is itself off by some 1e-6 of the loss, so both take the same mean.
    rows = partial(kernels.cross_entropy, reduction="none")
    ours = replace(zmlx_operations(), cross_entropy=lambda *given: rows(*given).mean())
    ours = np.abs(losses(settings, ours) - base)
    assert (ours[:10] <= 1e-5 * base[:10]).all()
    assert (ours[10:] <= 3 * np.maximum.accumulate(spread)[10:]).all()
    assert base[-1] < base[0] - 1


def test_the_kernels_train_as_mlx():
    assert_trains_as_mlx(SMALL)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="OpenBLAS is for Linux")
def test_the_kernels_train_as_mlx_at_the_demos_size():
    from zmlx import use_openblas

    use_openblas()
    assert_trains_as_mlx(DEMO)


def test_targets_are_the_inputs_one_byte_on():
    inputs, targets = Batches(bytes(range(256)), batch=3, context=16, seed=0).draw()
    assert inputs.shape == targets.shape == (3, 16)
    assert (targets == inputs + 1).all().item()


def test_batches_depend_on_the_seed_alone():
    def draw(seed):
        return Batches(corpus(), batch=2, context=8, seed=seed).draw()[0].tolist()

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_text_shorter_than_a_window_is_an_error():
    with pytest.raises(ValueError, match="'text' must be longer than 'context' but got 8 bytes"):
        Batches(b"8 bytes.", batch=1, context=8, seed=0)


def test_weights_depend_on_the_seed_and_not_on_the_operations():
    ours, theirs = (
        tree_flatten(build(SMALL, operations).parameters())
        for operations in (zmlx_operations(), mlx_operations())
    )
    for (name, one), (_, two) in zip(ours, theirs, strict=True):
        assert mx.array_equal(one, two), name


def test_settings_survive_the_way_to_another_process():
    assert Settings.from_json(SMALL.to_json()) == SMALL


def test_a_sample_has_the_length_and_the_prompt_asked_for():
    settings = replace(SMALL, sample=40)
    text = sample(build(settings, mlx_operations()), settings, prompt=b"def ")
    assert text.startswith("def ")
    assert len(text.encode(errors="replace")) >= 40


def results(kernel_seconds):
    steps = [Step(5.0 - 0.1 * i, 0.1) for i in range(20)]
    faster = [Step(step.loss * (1 + 1e-6), kernel_seconds) for step in steps]
    return [
        Result(MLX, steps[:5], 1, 100, 200),
        Result(MLX_OPENBLAS, steps, 1, 100, 200),
        Result(ZMLX_OPENBLAS, faster, 1, 50, 200),
    ]


@pytest.mark.parametrize(("seconds", "claim"), [(0.05, "2.00×"), (0.2, "0.50×")])
def test_the_kernels_effect_is_the_last_row_over_the_one_before(seconds, claim):
    text = report.summary(results(seconds))
    assert f"{claim} the speed ({'faster' if seconds < 0.1 else 'slower'})" in text
    assert "0.50× the peak memory" in text
    assert "agree to 1e-06" in text


def test_the_table_fits_a_terminal():
    """Of 80 columns, with the longest numbers that are likely."""
    rows = (MLX, MLX_OPENBLAS, ZMLX_OPENBLAS)
    times, peak = (12.3456, 0.1, 0.0987), 9999 * 10**6
    wide = [
        Result(row, [Step(5.7074, seconds)] * 20_000, 1, peak, peak)
        for row, seconds in zip(rows, times, strict=True)
    ]
    lines = report.table(wide, DEMO).splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80


def test_the_first_step_does_not_count_for_the_speed():
    result = Result(MLX, [Step(5.0, 60.0), Step(4.0, 0.1), Step(3.0, 0.2), Step(3.0, 0.3)])
    assert result.step_seconds == 0.2


def test_the_curves_show_every_row_in_both_panels():
    root = ElementTree.fromstring(report.curves(results(0.05)))
    assert len(root.findall(".//{http://www.w3.org/2000/svg}polyline")) == 6


def test_a_terminal_gets_a_bar_and_a_file_gets_lines():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, expected in ((Terminal(), "\r"), (io.StringIO(), "\n")):
        progress, result = Progress(MLX, 20, 1024, stream), Result(MLX)
        for i in range(20):
            result.steps.append(Step(5.0 - i / 10, 0.1))
            progress(result)
        assert expected in stream.getvalue()
        assert ("█" in stream.getvalue()) == stream.isatty()
        assert "20/20  loss 3.1000" in stream.getvalue().splitlines()[-1]
    assert len(stream.getvalue().splitlines()) <= 11


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_a_bar_is_never_wider_than_the_terminal(columns, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", str(columns))
    stream, result = Terminal(), Result(ZMLX_OPENBLAS)
    progress = Progress(ZMLX_OPENBLAS, 200, 1024, stream)
    for _ in range(200):
        result.steps.append(Step(12.5, 0.001))
        progress(result)
    lines = stream.getvalue().removesuffix("\n").split("\r\x1b[K")[1:]
    assert len(lines) == 200
    assert max(map(len, lines)) < columns
    assert ("█" in lines[-1]) == (columns > 30)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="three rows are for Linux")
def test_the_command_prints_three_rows_and_writes_the_curves(tmp_path):
    done = command("-m", "zmlx", "demo", "--steps", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for row in ("MLX", "MLX + OpenBLAS", "zmlx + OpenBLAS"):
        assert f"\n{row} " in done.stdout
    assert "The kernels' own effect" in done.stdout
    ElementTree.parse(tmp_path / "losses.svg")
    record = json.loads((tmp_path / "results.json").read_text())
    assert [len(row["steps"]) for row in record["rows"]] == [2, 2, 2]
    first = [row["steps"][0]["loss"] for row in record["rows"]]
    assert first == pytest.approx([first[0]] * 3, rel=1e-5)


def demo_with(scipy_openblas32, folder):
    (folder / "scipy_openblas32.py").write_text(scipy_openblas32)
    out = str(folder / "out")
    return command(
        "-m", "zmlx", "demo", "--steps", "1", "--out", out, PYTHONPATH=f"{folder}:{ROOT}"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="OpenBLAS is for Linux")
def test_without_openblas_no_row_is_begun(tmp_path):
    done = demo_with("raise ImportError('not installed')", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "pip install scipy-openblas32" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="OpenBLAS is for Linux")
def test_a_row_that_cannot_run_says_why(tmp_path):
    missing = "get_lib_dir = lambda: '/none'\nget_library = lambda fullname: 'blas.so'\n"
    done = demo_with(missing, tmp_path)
    assert done.returncode == 1
    assert "[demo] the row 'MLX + OpenBLAS' cannot run here" in done.stderr
    assert "/none/blas.so" in done.stderr


def test_no_steps_is_an_error():
    done = command("-m", "zmlx", "demo", "--steps", "0")
    assert done.returncode == 2
    assert "[demo] '--steps' must be at least 1 but got 0." in done.stderr


def test_the_number_of_steps_is_said_once():
    done = command("-m", "zmlx", "demo", "--quick", "--steps", "200")
    assert done.returncode == 2
    assert "--steps: not allowed with argument --quick" in done.stderr


def test_the_example_learns(tmp_path):
    text = tmp_path / "text"
    text.write_text("the same words again and again, " * 100)
    done = command("examples/train_lm.py", "--steps", "20", "--text", str(text))
    assert done.returncode == 0, done.stderr
    first, last = (float(line.split()[3]) for line in done.stdout.splitlines())
    assert last < first


@pytest.mark.parametrize("arguments, message", [
    (("train_lm.py", "--steps", "0"), "'--steps' must be at least 1 but got 0."),
    (("lora_finetune.py", "--steps", "0"), "'--steps' must be at least 1 but got 0."),
    (("data_parallel.py", "--steps", "0"), "'--steps' must be at least 1 but got 0."),
    (("generate.py", "--tokens", "0"), "'--tokens' must be at least 1 but got 0."),
    (("generate.py", "--prompt", ""), "'--prompt' must have at least one character."),
])  # fmt: skip
def test_an_example_that_would_do_nothing_says_so(arguments, message):
    if arguments[0] != "train_lm.py":
        pytest.importorskip("mlx_lm")
    done = command(f"examples/{arguments[0]}", *arguments[1:])
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: {message}\n")
