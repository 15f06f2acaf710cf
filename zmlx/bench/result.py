"""What a run found, as data: rows, overheads, and the machine; written and read as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .summary import Summary

FORMAT = 1

#: What two runs must share for their rows to stand in one result.
_SAME = ("cpu", "cpus", "threads", "compiler", "python", "versions", "target", "blas")


@dataclass(frozen=True)
class Timing:
    """A variant in a row: seconds, and bytes at the worst moment beyond what was there before, by
    MLX's counter and by the process's resident size."""

    seconds: Summary
    mlx_peak: int | None = None
    process_peak: int | None = None


@dataclass(frozen=True)
class Row:
    """An op at one shape, dtype and mode.

    Attributes:
        op, family, shape, dtype, mode: what was measured; the shape is that of the first argument.
        detail: options, and optional arguments that are given here and not in other rows.
        bytes, flops: the least work, see `work`.
        results: bytes of what the call leaves: outputs and gradients, as the mode has it.
        anchor: seconds of "copy", "non-temporal", "read", "matmul" and "fma" in the same rounds,
            and `anchor_rate` their bytes (or operations) per second.
        timings: by variant.
        ratios: how many times longer another variant took than zmlx, by variant.
        share: zmlx's rate over the rate of the copy (or of the matrix product).
        from_cache: bytes per second of zmlx on the same op with all arrays in cache.
        notes: by variant: why it did not run, or by how much its result is off.
        error: why the row is no measurement; empty if it is one.
    """

    op: str
    family: str
    shape: str
    dtype: str
    mode: str
    detail: str = ""
    bytes: int = 0
    flops: int = 0
    results: int = 0
    anchor: Mapping[str, Summary] = field(default_factory=dict)
    anchor_rate: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, Timing] = field(default_factory=dict)
    ratios: Mapping[str, Summary] = field(default_factory=dict)
    share: Summary | None = None
    from_cache: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What identifies the row in another run."""
        return self.op, self.shape, self.dtype, self.mode, self.detail


@dataclass(frozen=True)
class Overhead:
    """A time that is not an op's: `value` in `unit`, and at most `bar` by the project's word."""

    name: str
    value: float
    unit: str
    bar: float | None = None
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the bar is held; None without one."""
        return None if self.bar is None else self.value <= self.bar


@dataclass(frozen=True)
class ModelRow:
    """A language model at one vocabulary and mode.

    Attributes:
        model: what it is.
        vocabulary, tokens: entries, and tokens of a call.
        mode: which part of a training step.
        timings: by way, in the report's order, the patched model last; memory is that of the whole
            process, with weights and the optimizer's state.
        ratios: how many times longer another way took than the patched model.
    """

    model: str
    vocabulary: int
    tokens: int
    mode: str
    timings: Mapping[str, Timing]
    ratios: Mapping[str, Summary]

    @property
    def key(self) -> tuple[str, int, int, str]:
        """What identifies the row in another run."""
        return self.model, self.vocabulary, self.tokens, self.mode


@dataclass(frozen=True)
class Result:
    """A whole run."""

    environment: Mapping[str, Any]
    anchors: Mapping[str, Summary]
    rows: tuple[Row, ...]
    overheads: tuple[Overhead, ...] = ()
    sweep: tuple[Row, ...] = ()
    models: tuple[ModelRow, ...] = ()

    def write(self, path: Path) -> None:
        """Writes JSON, one row per line."""
        document = {"format": FORMAT, **asdict(self)}
        lines = []
        for name, value in document.items():
            if isinstance(value, tuple):
                items = ",\n  ".join(json.dumps(_rounded(item)) for item in value)
                lines.append(f' "{name}": [\n  {items}\n ]' if value else f' "{name}": []')
            else:
                lines.append(f' "{name}": {json.dumps(_rounded(value))}')
        # A run that is cut off leaves the last complete file.
        part = path.with_name(path.name + ".part")
        part.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        os.replace(part, path)

    def check_same(self, environment: Mapping[str, Any]) -> None:
        """Raises ValueError where the environment is that of another machine or of other versions,
        so that what is measured there does not belong into these results."""
        for name in _SAME:
            there, here = self.environment[name], environment[name]
            if there != here:
                wanted, got, remedy = f"{name} {here}", there, ""
                if name == "versions":
                    wanted, got, remedy = _other_versions(there, here)
                raise ValueError(
                    f"[bench] results to update must come from {wanted} but got {got}.{remedy}"
                )

    def updated(self, new: Result) -> Result:
        """These results with what `new` measured again or in addition, in the catalogue's order,
        and its date; the environment and the anchors of the run stay those of most rows.

        Raises:
            ValueError: for results of another machine or of other versions.
        """
        self.check_same(new.environment)

        def merged(old: tuple[Row, ...], rows: tuple[Row, ...]) -> tuple[Row, ...]:
            by_key = {row.key: row for row in (*old, *rows)}
            return tuple(sorted(by_key.values(), key=lambda row: (row.family, row.op)))

        overheads = {o.name: o for o in (*self.overheads, *new.overheads)}
        ops = dict.fromkeys(row.op for row in (*new.rows, *new.sweep))
        others = [name for name in ("overheads", "models") if getattr(new, name)]
        # Rows and the sweep of a plot may be of the same shape, and only one of them measured.
        older = set()
        for earlier, later in ((self.rows, new.rows), (self.sweep, new.sweep)):
            measured = {row.key for row in later}
            older |= {row.op for row in earlier if row.key not in measured}
        replaced = ops.keys() - older
        again = [
            (date, [name for name in names if name not in replaced])
            for date, names in self.environment.get("again", ())
        ]
        again.append((new.environment["date"], [*ops, *others]))
        return replace(
            self,
            environment={**self.environment, "again": [x for x in again if x[1]]},
            rows=merged(self.rows, new.rows),
            overheads=tuple(overheads.values()),
            sweep=merged(self.sweep, new.sweep),
            models=tuple({row.key: row for row in (*self.models, *new.models)}.values()),
        )

    @classmethod
    def read(cls, path: Path) -> Result:
        """What `write` wrote.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it holds anything else.
        """
        wanted = f"[bench] '{path}' must hold results of format {FORMAT} but got"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{wanted} no JSON: {error}.") from None
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        if found != FORMAT:
            raise ValueError(f"{wanted} {found}.")
        try:
            return cls(
                document["environment"],
                _summaries(document["anchors"]),
                tuple(_row(r) for r in document["rows"]),
                tuple(Overhead(**o) for o in document["overheads"]),
                tuple(_row(r) for r in document["sweep"]),
                tuple(_model_row(r) for r in document.get("models", ())),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{wanted} other fields: {error}.") from error


def _other_versions(there: Mapping[str, str], here: Mapping[str, str]) -> tuple[str, str, str]:
    """The packages that differ, as they are here and as they are there, and what makes them alike
    (without the label of a build, as in 2.13.0+cpu, which an index may not have)."""
    names = [n for n in {**there, **here} if there.get(n) != here.get(n)]
    wanted = [f"{n}=={there[n].partition('+')[0]}" for n in names if n in there]
    surplus = [n for n in names if n not in there]
    remedies = [("install", wanted), ("uninstall", surplus)]
    commands = [f"pip {verb} {' '.join(some)}" for verb, some in remedies if some]

    def listed(versions: Mapping[str, str]) -> str:
        return ", ".join(f"{n} {versions[n]}" if n in versions else f"no {n}" for n in names)

    return listed(here), listed(there), f" Remedy: {'; '.join(commands)}"


def _rounded(value: Any) -> Any:
    """Five significant digits: more would be noise in every line of a diff."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value


def _summaries(values: Mapping[str, Any]) -> dict[str, Summary]:
    return {name: Summary(**v) for name, v in values.items()}


def _timings(values: Mapping[str, Any]) -> dict[str, Timing]:
    return {
        name: Timing(Summary(**t["seconds"]), t["mlx_peak"], t["process_peak"])
        for name, t in values.items()
    }


def _model_row(values: Mapping[str, Any]) -> ModelRow:
    own = {"timings": _timings(values["timings"]), "ratios": _summaries(values["ratios"])}
    return ModelRow(**{**values, **own})


def _row(values: Mapping[str, Any]) -> Row:
    return Row(
        **{
            **values,
            "anchor": _summaries(values["anchor"]),
            "ratios": _summaries(values["ratios"]),
            "timings": _timings(values["timings"]),
            "share": values["share"] and Summary(**values["share"]),
        }
    )
