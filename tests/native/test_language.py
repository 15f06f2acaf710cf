"""Every row of the table of the language computes what it says, in every way that threads run."""

from __future__ import annotations

import mlx.core as mx
import pytest
from metal_source import SCHEDULES, run, schedule

import zmlx
from zmlx import strict
from zmlx.language import REFUSALS, SECTIONS, Row
from zmlx.targets import cpu

ROWS = {
    f"{section}: {name}": row for section, rows in SECTIONS.items() for name, row in rows.items()
}
TOGETHER = {name: row for name, row in ROWS.items() if row.together}
APART = {name: row for name, row in ROWS.items() if not row.together}
#: Groups of one thread are plain loops that the compiler sees through, others are nested loops, and
#: those whose threads meet are fibers.
WAYS = {"one thread": (1, False), "loop": (8, False), "fibers": (8, True)}
#: Every row in one of the ways by default, and in the others where slow tests run.
IN_A_WAY = [
    pytest.param(
        row, way, id=f"{name}-{way}", marks=() if (i + j) % len(WAYS) == 0 else pytest.mark.slow
    )
    for i, (name, row) in enumerate(APART.items())
    for j, way in enumerate(WAYS)
]


@pytest.fixture(autouse=True)
def on_the_cpu():
    with zmlx.target("cpu"):
        yield


@pytest.mark.parametrize("row, way", IN_A_WAY)
def test_threads_on_their_own(row: Row, way: str) -> None:
    group, meet = WAYS[way]
    row.check(group, meet=meet)


@pytest.mark.parametrize("row", TOGETHER.values(), ids=TOGETHER)
def test_threads_that_work_together(row: Row) -> None:
    for order in SCHEDULES:
        with schedule(order):
            row.check()


@pytest.mark.parametrize("group", [1, 32])
@pytest.mark.parametrize("name", REFUSALS)
def test_what_there_is_not_names_line_and_remedy(name: str, group: int) -> None:
    refusal = REFUSALS[name]
    with pytest.raises(RuntimeError) as caught:
        cpu.prepare(*refusal.arguments(group), None, ())
    said = str(caught.value)
    assert said.startswith("[kernel wrong_")
    assert said.partition("] ")[2] == f"{refusal.place()}: {refusal.message}"


def test_every_row_is_metal() -> None:
    """The strict front end takes it too, and would refuse what only the CPU takes."""
    pytest.importorskip("ziglang")
    texts = [strict.metal_text(*row.arguments()) for row in ROWS.values()]
    # Metal has lambdas from 3.2 on.
    found = dict(zip(ROWS, strict.check_many(texts, version=320), strict=True))
    refused = {name: [str(p) for p in problems] for name, problems in found.items() if problems}
    assert not refused


@pytest.mark.parametrize("group", [1, 8, 37])
@pytest.mark.parametrize(
    "call, value",
    [
        ("max(x[i], 0.5f)", 0.5),
        ("min(0.5f, x[i])", 0.5),
        ("clamp(x[i], 3.0f, 255.0f)", 3.0),
        ("clamp(x[i], float(i / 64) + 3.0f, float(i) + 255.0f)", 3.0),
        ("saturate(x[i])", 0.0),
        ("float(max(half(x[i]), half(2)))", 2.0),
    ],
)
def test_nan_loses_against_a_bound_in_vectors_and_after_them(
    call: str, value: float, group: int
) -> None:
    x = mx.array([float("nan")] * 37)
    source = f"uint i = thread_position_in_grid.x; out[i] = {call};"
    found = run(source, {"x": x}, (37, mx.float32), 37, group)
    assert found.tolist() == [value] * 37
