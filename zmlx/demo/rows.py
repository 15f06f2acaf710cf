"""The rows of the demo: which configurations run on this machine, and how one is run."""

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import mlx.core as mx

from zmlx.demo.train import Settings, Step


@dataclass(frozen=True)
class Row:
    """One configuration: its name, what it uses, and the colour of its curve."""

    name: str
    openblas: bool
    kernels: bool
    color: str


MLX = Row("MLX", openblas=False, kernels=False, color="#7f7f7f")
MLX_OPENBLAS = Row("MLX + OpenBLAS", openblas=True, kernels=False, color="#0072b2")
ZMLX = Row("zmlx", openblas=False, kernels=True, color="#d55e00")
ZMLX_OPENBLAS = Row("zmlx + OpenBLAS", openblas=True, kernels=True, color="#d55e00")


def rows_here() -> tuple[Row, ...]:
    """Returns the rows for this machine, the last two being the pair that differs in kernels.

    On the CPU under Linux, MLX's wheel links the reference BLAS, which would drown every other
    difference; there the pair runs on OpenBLAS and plain MLX is a third row. On a GPU and on
    macOS matrix products are fast already.
    """
    if platform.system() == "Linux" and mx.default_device() == mx.Device(mx.cpu):
        return MLX, MLX_OPENBLAS, ZMLX_OPENBLAS
    return MLX, ZMLX


@dataclass
class Result:
    """What one row reported: its steps so far, peak memory in bytes and generated text."""

    row: Row
    steps: list[Step] = field(default_factory=list)
    parameters: int = 0
    mlx_peak: int = 0
    process_peak: int = 0
    text: str = ""

    @property
    def step_seconds(self) -> float:
        """Median time of a step; the first step compiles and warms up and is left out."""
        return median(step.seconds for step in self.steps[1:] or self.steps)


class RowFailedError(RuntimeError):
    """A row cannot run here or stopped with an error; the message says why."""


def run_row(row: Row, settings: Settings, on_step: Callable[[Result], None]) -> Result:
    """Runs a row in a process of its own and returns what it reported.

    Args:
        row: The row that the settings belong to.
        settings: What to train.
        on_step: Called after every step with the result so far.

    Raises:
        RowFailedError: The row cannot run on this machine, or its process failed.
    """
    result = Result(row)
    command = [sys.executable, "-m", "zmlx.demo.train", settings.to_json()]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _record(json.loads(line), result)
                if result.steps:
                    on_step(result)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise RowFailedError(
            f"the row '{row.name}' stopped with exit status {process.returncode}; "
            "its error is above"
        )
    return result


def _record(event: dict[str, object], result: Result) -> None:
    match event:
        case {"event": "start", "parameters": int(parameters)}:
            result.parameters = parameters
        case {"event": "step", "loss": float(loss), "seconds": float(seconds)}:
            result.steps.append(Step(loss, seconds))
        case {"event": "end", "mlx_peak": int(mlx_peak), "process_peak": int(process_peak)}:
            result.mlx_peak, result.process_peak = mlx_peak, process_peak
        case {"event": "sample", "text": str(text)}:
            result.text = text
        case {"event": "unavailable", "reason": reason}:
            raise RowFailedError(f"the row '{result.row.name}' cannot run here: {reason}")
        case _:
            raise RowFailedError(f"the row '{result.row.name}' reported {event}")
