"""What `patch` did: replaced, skipped, and what will run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Replaced:
    """A module that runs a plan: where, which kind and op, and what runs ("zmlx" or "mlx")."""

    path: str
    kind: str
    op: str
    runs: str
    why: str
    new: bool = True


@dataclass(frozen=True)
class Skipped:
    """A candidate that was left alone."""

    path: str
    module: str
    why: str


@dataclass
class Report:
    """The result of `zmlx.patch`; `str` of it is a table.

    Attributes:
        mode: "inference" or "training".
        replaced: the patched modules; `new` is False for those that were patched before.
        skipped: candidates that were left alone, each with the reason.
        dropped: kinds that `smart_patch` took out again: (kind, times as fast as unpatched).
        kept: kinds that it timed and left in, likewise.
    """

    mode: str
    replaced: list[Replaced] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    dropped: list[tuple[str, float]] = field(default_factory=list)
    kept: list[tuple[str, float]] = field(default_factory=list)

    def kinds(self) -> dict[str, int]:
        """How many modules of each kind were replaced."""
        return dict(Counter(r.kind for r in self.replaced))

    def __str__(self) -> str:
        new = sum(r.new for r in self.replaced)
        lines = [
            f"{len(self.replaced)} modules replaced for {self.mode}"
            + (f" ({len(self.replaced) - new} of them before)" if new < len(self.replaced) else "")
        ]
        groups: dict[tuple[str, str, str, str], list[str]] = {}
        for r in self.replaced:
            groups.setdefault((r.kind, r.op, r.runs, r.why), []).append(r.path)
        for (kind, op, runs, why), paths in groups.items():
            lines.append(f"  {kind:<14} {op:<18} {len(paths):>4}×  runs {runs}: {why}")
            lines.append(f"{'':<17}{_some(paths)}")
        reasons: dict[tuple[str, str], list[str]] = {}
        for s in self.skipped:
            reasons.setdefault((s.module, s.why), []).append(s.path)
        if reasons:
            lines.append(f"{len(self.skipped)} skipped")
        for (module, why), paths in reasons.items():
            lines.append(f"  {module:<14} {len(paths):>4}×  {why}: {_some(paths)}")
        for kind, speed in self.kept:
            lines.append(f"  kept {kind}: {speed:.2f} times the speed")
        for kind, speed in self.dropped:
            lines.append(f"  taken out again {kind}: {speed:.2f} times the speed")
        return "\n".join(lines)


def _some(paths: list[str]) -> str:
    shown = [p or "the model itself" for p in paths]
    return ", ".join(shown if len(shown) <= 3 else [*shown[:2], f"… {shown[-1]}"])
