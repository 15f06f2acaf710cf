"""What must be there before rows of a file are measured again. An update replaces a row as a whole:
a way to compute that cannot be measured now would be lost, with its column of the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from ..registry import Op
from .result import Result, Row
from .run import Task, here
from .text import title
from .torch_variants import is_installed, torch_names
from .variants import GPU_GEOMETRY, TORCH, TORCH_COMPILED, mlx_names


def check(
    old: Result,
    tasks: Sequence[Task],
    sweep: Sequence[Task],
    variants: Sequence[str],
    *,
    model: bool = False,
) -> None:
    """Raises ValueError, with the remedy, where a row of `old` that is measured again has a way
    that would not be, and on another machine or with other versions.

    Args:
        old: the results to update.
        tasks: the rows that are measured again or in addition.
        sweep: those of a plot.
        variants: the ways that are measured of each op that has them.
        model: whether the model is trained again.
    """
    lost = {**_lost(old.sweep, sweep, variants), **_lost(old.rows, tasks, variants)}
    if lost:
        row = next(iter(lost.values()))
        names = ", ".join(map(repr, lost))
        raise ValueError(
            f"[bench] '--update' must measure a row in every way that it has but got no {names} "
            f"of {title(row)}. Remedy: {'; '.join(dict.fromkeys(map(_remedy, lost)))}"
        )
    if model and old.models and find_spec("mlx_lm") is None:
        raise ValueError(
            "[bench] '--update' must measure the model again but got no mlx-lm. "
            "Remedy: pip install mlx-lm"
        )
    old.check_same(here())


def _lost(rows: Iterable[Row], tasks: Iterable[Task], variants: Sequence[str]) -> dict[str, Row]:
    """The ways of rows that would not be measured again, with the first row that has each."""
    by_key = {row.key: row for row in rows}
    found: dict[str, Row] = {}
    for task in tasks:
        row = by_key.get(task.key)
        measured = {*mlx_names(task.op), *torch_names(task.op)} & {*variants}
        for name in row.timings if row else ():
            if name in _names(task.op) and name not in measured:
                found.setdefault(name, by_key[task.key])
    return found


def _names(op: Op) -> set[str]:
    """The ways that there are of an op, wherever it runs."""
    return {*mlx_names(op), *((TORCH, TORCH_COMPILED) if op.torch else ())}


def _remedy(name: str) -> str:
    if name in (TORCH, TORCH_COMPILED) and not is_installed():
        return "pip install torch"
    return "--geometry gpu" if name == GPU_GEOMETRY else f"--variant '{name}'"
