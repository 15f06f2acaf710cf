"""What the demo says at the end: a table, the kernels' own gain, loss curves and a sample."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from pathlib import Path

from zmlx.chart import Panel, Series, figure
from zmlx.demo.rows import Result
from zmlx.demo.train import Settings

FIRST = 10
"""Steps over which the losses of two rows are compared before rounding errors have grown."""


def table(results: Sequence[Result], settings: Settings) -> str:
    """Returns one line per row: time, speed, peak memory and losses."""
    tokens = settings.batch * settings.context
    base = results[0].step_seconds
    lines = [  # of 80 columns at most, as a terminal has them
        f"{'row':<15} {'steps':>5} {'ms/step':>7} {'tokens/s':>9} {'vs MLX':>7} "
        f"{'MLX peak':>8} {'process':>7}  loss from → to"
    ]
    for result in results:
        lines.append(
            f"{result.row.name:<15} {len(result.steps):>5} {1e3 * result.step_seconds:>7.1f} "
            f"{tokens / result.step_seconds:>9,.0f} {base / result.step_seconds:>6.2f}× "
            f"{result.mlx_peak / 1e6:>5.0f} MB {result.process_peak / 1e6:>4.0f} MB  "
            f"{result.steps[0].loss:.3f} → {result.steps[-1].loss:.3f}"
        )
    return "\n".join(lines)


def loss_difference(results: Sequence[Result], steps: int = FIRST) -> float:
    """Returns the largest relative difference of the last two rows' first losses."""
    base, other = results[-2], results[-1]
    return max(
        abs(one.loss - two.loss) / abs(one.loss)
        for one, two in zip(base.steps[:steps], other.steps[:steps], strict=True)
    )


def summary(results: Sequence[Result]) -> str:
    """Returns what the kernels change, as the ratio of the last two rows, win or loss."""
    base, other = results[-2], results[-1]
    ratio = base.step_seconds / other.step_seconds
    word = "faster" if ratio >= 1 else "slower"
    peak = other.mlx_peak / base.mlx_peak
    return (
        f"The kernels' own effect, '{other.row.name}' over '{base.row.name}': {ratio:.2f}× the "
        f"speed ({word}), {peak:.2f}× the peak memory.\n"
        f"Their losses agree to {loss_difference(results):.0e} over the first "
        f"{min(FIRST, len(base.steps))} steps."
    )


def curves(results: Sequence[Result]) -> str:
    """Returns the loss curves as SVG: against the step, and against the training time."""
    by_step, by_time = [], []
    for result in results:
        losses = [step.loss for step in result.steps]
        line = partial(Series, result.row.name, ys=losses, color=result.row.color)
        # Against the step the last two rows lie on each other: the lower one is drawn wide.
        width = 3.6 if result is results[-2] else 1.6
        by_step.append(line(xs=range(1, len(losses) + 1), width=width))
        by_time.append(line(xs=list(accumulate(step.seconds for step in result.steps))))
    return figure(
        "A byte-level language model trained on Python's help topics",
        [
            Panel(by_step, "step", "loss (nats per byte)"),
            Panel(by_time, "training time (s)", "loss (nats per byte)"),
        ],
    )


def write(results: Sequence[Result], settings: Settings, folder: Path) -> list[Path]:
    """Writes ``losses.svg`` and ``results.json`` and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    drawing, data = folder / "losses.svg", folder / "results.json"
    drawing.write_text(curves(results), encoding="utf-8")
    record = {
        "settings": asdict(settings),
        "rows": [asdict(result) for result in results],
    }
    data.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return [drawing, data]
