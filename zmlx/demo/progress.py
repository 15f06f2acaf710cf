"""Progress of one row: a bar on a terminal, a line every tenth of the way elsewhere."""

import shutil
import sys
import time
from typing import TextIO

from zmlx.demo.rows import Result, Row

_BAR = 24


class Progress:
    """Shows a row's step, loss and speed as they arrive.

    Args:
        row: The row that is shown.
        steps: Steps that the row will run.
        tokens: Tokens per step.
        stream: Where to write, by default the standard output.
    """

    def __init__(self, row: Row, steps: int, tokens: int, stream: TextIO | None = None):
        self._row, self._steps, self._tokens = row, steps, tokens
        self._stream = stream or sys.stdout
        self._bar = self._stream.isatty()
        self._every = max(1, steps // 10)
        self._shown = 0
        self._start = time.monotonic()

    def __call__(self, result: Result) -> None:
        """Shows the result so far, if that is news."""
        done = len(result.steps)
        due = self._bar or done % self._every == 0 or done in (1, self._steps)
        if done == self._shown or not due:
            return
        self._shown = done
        state = (
            f"{done:>4}/{self._steps}  loss {result.steps[-1].loss:.4f}  "
            f"{self._tokens / result.step_seconds:>8,.0f} tokens/s  "
            f"{time.monotonic() - self._start:>5.1f} s"
        )
        if self._bar:
            # A line that wraps could not be taken back.
            columns = shutil.get_terminal_size().columns - 1
            width = max(0, min(_BAR, columns - len(f"{self._row.name:<16}  {state}")))
            full = width * done // self._steps
            bar = "█" * full + "░" * (width - full)
            line = f"{self._row.name:<16} {bar} {state}"[:columns]
            end = "\n" if done == self._steps else ""
            self._stream.write(f"\r\x1b[K{line}{end}")
        else:
            self._stream.write(f"{self._row.name:<16} {state}\n")
        self._stream.flush()
