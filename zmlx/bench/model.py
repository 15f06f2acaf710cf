"""A patched language model beside MLX's: time, tokens per second and peak memory of training.

The model is mlx-lm's own llama with random weights: 8 layers, 512 wide, 8 heads of which 4 have
keys and values, a sequence of 2048 tokens, float32. With 4096 entries in the vocabulary the layers
take most of the time (the head is 5 % of the operations), with 32768 the logits of a sequence take
as much memory as all weights: that is a training step's worst moment.

    MLX                  as its wheel comes, on the reference BLAS
    MLX + OpenBLAS       the same code with `zmlx.use_openblas()`
    patched + OpenBLAS   `zmlx.patch(model, mode="training")`, `zmlx.lm_loss`, zmlx's AdamW

Each way has a process of its own, because a process has one BLAS and one high-water mark; they take
turns round by round. Unlike the rows of ops, MLX and the system's allocator are as they come, as
in training. Plain MLX on Linux, which is some ten times slower, is timed once.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from .. import launch
from .result import ModelRow, Timing
from .summary import paired, summary

#: Rounds by default; a bar that all of them hold twice over needs no more.
ROUNDS = 7

MODES = ("forward", "forward+backward", "forward+backward+AdamW")


@dataclass(frozen=True)
class Size:
    """A llama: layers, width, of the feed-forward network too, heads, heads of keys and values,
    tokens of the one sequence, and which parts are timed at which vocabulary."""

    layers: int = 8
    width: int = 512
    hidden: int = 1408
    heads: int = 8
    kv_heads: int = 4
    tokens: int = 2048
    vocabularies: tuple[tuple[int, tuple[str, ...]], ...] = ((4096, MODES), (32768, MODES[2:]))

    def __str__(self) -> str:
        return (
            f"llama, {self.layers} layers, {self.width} wide, {self.heads} heads, "
            f"{self.kv_heads} kv heads"
        )


@dataclass(frozen=True)
class Way:
    """How a row is computed, and whether it is timed only once."""

    name: str
    openblas: bool
    patched: bool
    once: bool = False


def ways() -> tuple[Way, ...]:
    """What runs here; the last two differ in the patch alone."""
    if sys.platform.startswith("linux") and launch.settings().target == "cpu":
        return (
            Way("MLX", openblas=False, patched=False, once=True),
            Way("MLX + OpenBLAS", openblas=True, patched=False),
            Way("patched + OpenBLAS", openblas=True, patched=True),
        )
    return Way("MLX", openblas=False, patched=False), Way("patched", openblas=False, patched=True)


def model_rows(
    rounds: int = ROUNDS,
    size: Size | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Iterator[ModelRow]:
    """The rows of each vocabulary as soon as it is measured.

    Args:
        rounds: timings of each way, after one that warms up.
        size: the model.
        told: gets a line after every round.

    Raises:
        RuntimeError: a process failed.
    """
    size = size or Size()
    for vocabulary, modes in size.vocabularies:
        found = _measured(size, vocabulary, modes, rounds, told)
        yield from _rows(size, vocabulary, modes, found)


_Found = dict[str, dict[str, list[dict[str, Any]]]]


def _measured(
    size: Size, vocabulary: int, modes: Sequence[str], rounds: int, told: Callable[[str], None]
) -> _Found:
    """By way and mode, what the worker said in every round; None for rounds sat out."""
    found: _Found = {way.name: {mode: [] for mode in modes} for way in ways()}
    # A step says when its gradients are there: that is the time of forward and backward.
    calls = [*(["forward"] if MODES[0] in modes else []), "step"]
    with ExitStack() as stack:
        workers = {way: stack.enter_context(_Worker(way, size, vocabulary)) for way in ways()}
        for i in range(-1, rounds):
            due = [way for way in workers if not way.once or i == 0]
            for way in due if i % 2 else due[::-1]:
                for call in calls:
                    said = workers[way].ask(call)
                    for mode in modes if i >= 0 else ():
                        if mode in said:
                            found[way.name][mode].append(said[mode])
            told(
                f"vocabulary {vocabulary}: " + (f"round {i + 1} of {rounds}" if i >= 0 else "warm")
            )
    return found


class _Worker:
    """A process that holds one model and times what it is asked for."""

    def __init__(self, way: Way, size: Size, vocabulary: int) -> None:
        self._name = way.name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zmlx.bench.model_worker"],
            env=dict(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ask(json.dumps({"way": asdict(way), "size": asdict(size), "vocabulary": vocabulary}))

    def ask(self, line: str) -> dict[str, Any]:
        """The answer to one line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            answer = ""
        else:
            answer = self._process.stdout.readline()
        if not answer:
            errors = self._process.communicate()[1]
            raise RuntimeError(f"[bench] model, {self._name}, failed:\n{errors}")
        said: dict[str, Any] = json.loads(answer)
        return said

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        # The end of its input ends it.
        self._process.communicate()


def _rows(size: Size, vocabulary: int, modes: Sequence[str], found: _Found) -> Iterator[ModelRow]:
    *others, ours = found
    for mode in modes:
        times = {name: [said["seconds"] for said in found[name][mode]] for name in found}
        yield ModelRow(
            model=str(size),
            vocabulary=vocabulary,
            tokens=size.tokens,
            mode=mode,
            timings={
                name: Timing(
                    summary(times[name]),
                    max(said["mlx_peak"] for said in found[name][mode]),
                    _largest([said["process_peak"] for said in found[name][mode]]),
                )
                for name in found
            },
            ratios={
                name: paired(_padded(times[name], times[ours]), times[ours]) for name in others
            },
        )


def _padded(times: list[float], like: list[float]) -> list[float]:
    """NaN for the rounds that were sat out."""
    return times + [math.nan] * (len(like) - len(times))


def _largest(peaks: list[int | None]) -> int | None:
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known else None
