"""Does the harness measure what it says? Ops with a known time, through the same path as others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..arguments import Argument
from ..registry import Case, Op
from . import memory
from .anchors import Anchors
from .measure import ROUNDS
from .result import Row
from .rows import Plan, run_row
from .variants import EAGER, ZMLX

#: Seconds that the sleeping op sleeps; its reference sleeps twice as long.
NAP = 0.01

_CASE = Case((2048,), {"D": 4096})


@dataclass(frozen=True)
class Check:
    """A claim about the harness, and what was found."""

    claim: str
    passed: bool
    found: str


def _op(name: str, function: Callable[..., Any], reference: Callable[..., Any]) -> Op:
    return Op(
        name=name,
        family="self-test",
        summary=name,
        formula="x",
        function=function,
        reference=lambda x, xp=mx: reference(x),
        arguments=(Argument("x"),),
    )


def _sleeping(seconds: float) -> Callable[[mx.array], mx.array]:
    def function(x: mx.array) -> mx.array:
        time.sleep(seconds)
        return x

    return function


def checks(anchors: Anchors, rounds: int = ROUNDS) -> Iterator[Check]:
    """Runs the self-test."""
    with memory.pages(kept=True):
        yield from _sleeping_op(anchors, rounds)
        yield from _no_op(anchors, rounds)
        yield from _lazy_op(anchors, rounds)
        yield from _wrong_op(anchors, rounds)


def _row(op: Op, case: Case, anchors: Anchors, rounds: int) -> Row:
    plan = Plan((ZMLX, EAGER), rounds, extras=False)
    return run_row(op, case, mx.float32, "forward", plan, anchors)


def _sleeping_op(anchors: Anchors, rounds: int) -> Iterator[Check]:
    op = _op("sleeping", _sleeping(NAP), _sleeping(2 * NAP))
    row = _row(op, Case((1,), {"D": 16}), anchors, rounds)
    found = row.timings[ZMLX].seconds.median
    yield Check(
        f"an op that sleeps {NAP * 1e3:g} ms takes {NAP * 1e3:g} to {NAP * 1.2e3:g} ms",
        NAP <= found <= 1.2 * NAP,
        f"{found * 1e3:.2f} ms",
    )
    ratio = row.ratios[EAGER].median
    yield Check(
        "one that sleeps twice as long has ratio 2 within 10 %",
        1.8 <= ratio <= 2.2,
        f"{ratio:.2f}",
    )


def _no_op(anchors: Anchors, rounds: int) -> Iterator[Check]:
    row = _row(_op("no_op", lambda x: x, lambda x: x), _CASE, anchors, rounds)
    yield Check("an op that does nothing is an error", "times the best" in row.error, row.error)


def _lazy_op(anchors: Anchors, rounds: int) -> Iterator[Check]:
    row = _row(_op("lazy", lambda x: x + 1, lambda x: x + 1), _CASE, anchors, rounds)
    yield Check(
        "an op that only builds a graph is timed with its evaluation, and is no error",
        not row.error,
        row.error or f"{row.timings[ZMLX].seconds.median * 1e3:.2f} ms",
    )


def _wrong_op(anchors: Anchors, rounds: int) -> Iterator[Check]:
    op = _op("wrong", lambda x: x + 1, lambda x: x + 2)
    row = _row(op, Case((64,), {"D": 64}), anchors, rounds)
    yield Check("an op that computes something else is an error", "off by" in row.error, row.error)
