"""What the project promises about speed on the CPU, and whether a run holds it.

A bar is judged on the median of at least `ROUNDS` paired rounds, fewer where all of them hold it
twice over, as they do against a way that is ten times slower, and where a call takes seconds, in
which short disturbances even out. "Not slower" is a ratio of at least 0.95.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .measure import FEWEST, ROUNDS
from .result import ModelRow, Row
from .summary import Summary
from .variants import BUILT_IN, COMPILED, EAGER, TORCH, TORCH_COMPILED, UNFUSED, ZMLX

NOT_SLOWER = 0.95


@dataclass(frozen=True)
class Bar:
    """A promise about rows.

    Attributes:
        who: ops and families.
        shape, dtypes, modes: which of their rows.
        least: the least share of the copy, or the least ratio to the fastest of `than`.
        than: variants; empty for a share of the copy.
        but: ops of the families that it is not about.
        rounds: timings that it takes.
        memory: what is compared is not the time but the peak memory beyond the results.
    """

    who: tuple[str, ...]
    shape: str
    dtypes: tuple[str, ...]
    modes: tuple[str, ...]
    least: float
    than: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    rounds: int = ROUNDS
    memory: bool = False

    def covers(self, row: Row) -> bool:
        """Whether the bar is about this row."""
        return (
            bool({row.op, row.family} & set(self.who))
            and row.op not in self.but
            and row.shape == self.shape
            and row.dtype in self.dtypes
            and row.mode in self.modes
        )


_BOTH = ("float32", "bfloat16")
_LARGE = "4096x4096"
_PREFILL = "1x32x2048x128"
_ATTENTION = "scaled_dot_product_attention"
_HEADS = "1x8x2048x64"
_HIDDEN = "2x2048x512"
_ROWWISE = ("activations", "gated", "norms", "softmax")
_REDUCTIONS = ("sum", "mean", "max", "min", "var", "std", "argmax", "argmin")

BARS = (
    Bar(("rms_norm", "swiglu", "softmax"), "2048x4096", ("float32",), ("forward",), 3.0,
        (EAGER, COMPILED, BUILT_IN)),
    Bar(("rms_norm", "swiglu", "softmax"), "2048x4096", ("float32",), ("forward",), NOT_SLOWER,
        (TORCH_COMPILED,)),
    Bar(("activations", "gated", "norms"), _LARGE, _BOTH, ("forward",), 0.80),
    Bar(("softmax",), _LARGE, _BOTH, ("forward",), 0.70),
    Bar(_ROWWISE, _LARGE, _BOTH, ("backward",), 0.60),
    Bar(_ROWWISE, _LARGE, _BOTH, ("forward", "backward"), NOT_SLOWER, (TORCH_COMPILED,)),
    Bar(_ROWWISE, _LARGE, _BOTH, ("forward", "backward"), NOT_SLOWER, (COMPILED,)),
    Bar(("dropout",), _LARGE, _BOTH, ("forward", "backward"), 0.80),
    Bar(("dropout",), _LARGE, _BOTH, ("forward", "backward"), NOT_SLOWER, (TORCH_COMPILED,)),
    Bar(("dropout",), _LARGE, _BOTH, ("forward", "backward"), NOT_SLOWER, (COMPILED,)),
    Bar(_REDUCTIONS, _LARGE, _BOTH, ("forward",), 0.80),
    Bar(("scans",), _LARGE, _BOTH, ("forward",), 0.60),
    Bar((*_REDUCTIONS, "scans"), _LARGE, _BOTH, ("forward",), NOT_SLOWER, (TORCH_COMPILED,)),
    Bar((*_REDUCTIONS, "scans"), _LARGE, _BOTH, ("forward",), NOT_SLOWER, (COMPILED,)),
    Bar(("cross_entropy",), "512x32000", _BOTH, ("forward", "backward"), 0.70),
    Bar(("cross_entropy",), "512x32000", _BOTH, ("forward", "backward"), NOT_SLOWER,
        (TORCH_COMPILED,)),
    Bar(("cross_entropy",), "512x32000", _BOTH, ("forward", "backward"), NOT_SLOWER, (COMPILED,)),
    Bar(("linear_cross_entropy",), _HIDDEN, ("float32",), ("both",), 1 / 1.4, (UNFUSED,),
        rounds=FEWEST),
    Bar(("linear_cross_entropy",), _HIDDEN, ("float32",), ("both",), 8.0, (UNFUSED,), memory=True),
    Bar(("topk",), "512x4096", _BOTH, ("forward",), NOT_SLOWER, (TORCH_COMPILED,)),
    Bar(("topk",), "512x4096", _BOTH, ("forward",), NOT_SLOWER, (COMPILED,)),
    Bar(("topk",), "16x151936", _BOTH, ("forward",), NOT_SLOWER, (TORCH_COMPILED,)),
    Bar(("topk",), "16x151936", _BOTH, ("forward",), NOT_SLOWER, (COMPILED,)),
    Bar(("rope",), _PREFILL, _BOTH, ("forward", "backward"), 0.80, but=("qk_norm_rope",)),
    Bar(("rope",), _PREFILL, _BOTH, ("forward", "backward"), NOT_SLOWER, (TORCH_COMPILED,)),
    Bar(("rope",), _PREFILL, _BOTH, ("forward", "backward"), NOT_SLOWER, (COMPILED,)),
    Bar((_ATTENTION,), _HEADS, ("float32",), ("forward",), 0.5, (TORCH,)),
    Bar((_ATTENTION,), _HEADS, ("float32",), ("both",), 1.0, (TORCH,)),
    Bar((_ATTENTION,), _HEADS, ("float32",), ("forward", "both"), 5.0, (EAGER,)),
    Bar(("decode_attention", "quantized_attention"), "1x32x1x128", _BOTH, ("forward",), 0.60),
    Bar(("decode_attention", "quantized_attention"), "1x8x1x64", _BOTH, ("forward",), 0.60),
    Bar(("paged_attention",), "4x32x1x128", _BOTH, ("forward",), 0.60),
    Bar(("topk_gating",), "16384x128", _BOTH, ("forward",), 0.60),
    Bar(("moe_dispatch",), "2048x2048", _BOTH, ("forward",), 0.60),
    Bar(("moe_combine",), "16384x2048", _BOTH, ("forward",), 0.60),
    Bar(("expert_ffn",), "1024x512", ("float32",), ("forward", "both"), NOT_SLOWER, (BUILT_IN,)),
    Bar(("expert_ffn",), "512x512", ("float32",), ("forward", "both"), NOT_SLOWER, (BUILT_IN,)),
    Bar(("adamw",), _LARGE, ("float32",), ("forward",), 0.80),
    Bar(("adamw",), _LARGE, ("float32",), ("forward",), NOT_SLOWER, (COMPILED,)),
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """A bar on a row: what was measured, against which variant, and why it is not judged."""

    bar: Bar
    row: Row
    measured: Summary | None
    than: str
    unjudged: str = ""

    @property
    def passed(self) -> bool | None:
        """None where the bar is not judged."""
        if self.measured is None or self.unjudged:
            return None
        return self.measured.median >= self.bar.least


def verdicts(rows: Sequence[Row], bars: Sequence[Bar] = BARS) -> Iterator[Verdict]:
    """Every bar on every row that it covers."""
    for bar in bars:
        for row in rows:
            if bar.covers(row):
                yield _verdict(bar, row)


def _verdict(bar: Bar, row: Row) -> Verdict:
    if row.error:
        return Verdict(bar, row, None, "", row.error)
    if ZMLX not in row.timings:
        return Verdict(bar, row, None, "", f"{ZMLX} was not measured")
    than, measured = "copy", row.share
    ratios = _memory_ratios(row) if bar.memory else row.ratios
    if bar.than:
        known = [n for n in bar.than if n in ratios]
        if not known:
            why = next((row.notes[n] for n in bar.than if n in row.notes), "was not measured")
            return Verdict(bar, row, None, bar.than[0], f"{bar.than[0]} {why}")
        than = min(known, key=lambda n: ratios[n].median)
        measured = ratios[than]
    # What is hopelessly slow sits out rounds, and needs no more of them.
    clear = bool(bar.than) and measured is not None and measured.low >= 2 * bar.least
    if measured is not None and measured.count < bar.rounds and not (clear or bar.memory):
        return Verdict(
            bar, row, measured, than, f"{measured.count} rounds, {bar.rounds} are needed"
        )
    return Verdict(bar, row, measured, than)


def _memory_ratios(row: Row) -> dict[str, Summary]:
    """How many times more than zmlx another way takes beyond the results, by the counter that makes
    it less; no ratio where a way was not measured."""
    ratios: dict[str, Summary] = {}
    if (ours := row.timings.get(ZMLX)) is None:
        return ratios
    for name, timing in row.timings.items():
        pairs = ((timing.mlx_peak, ours.mlx_peak), (timing.process_peak, ours.process_peak))
        beyond = [
            (other - row.results) / max(own - row.results, 1)
            for other, own in pairs
            if other is not None and own is not None
        ]
        if name != ZMLX and beyond:
            ratios[name] = Summary(min(beyond), min(beyond), max(beyond), 1)
    return ratios


#: What a training step of a model with `LARGE_VOCABULARY` may take of the memory without the patch.
HALF = 0.5
LARGE_VOCABULARY = 32768


@dataclass(frozen=True)
class ModelVerdict:
    """A bar on a model: what is asked, what was measured, and whether it is held; None where the
    rounds are too few to say."""

    row: ModelRow
    wanted: str
    got: str
    passed: bool | None


def model_verdicts(rows: Sequence[ModelRow]) -> Iterator[ModelVerdict]:
    """A patched model is not slower than the same model without the patch, the way before it; with
    a large vocabulary a whole step takes at most half the memory, by either counter."""
    for row in rows:
        *_, base, ours = row.timings
        ratio = row.ratios[base]
        digits = digits_short_of(NOT_SLOWER, ratio.median, 2)
        few = ratio.count < ROUNDS and ratio.low < 2 * NOT_SLOWER
        yield ModelVerdict(
            row,
            f"≥ {NOT_SLOWER:g}x as fast as {base}",
            f"{ratio.median:.{digits}f}x [{ratio.low:.{digits}f}, {ratio.high:.{digits}f}]"
            + (f", {ratio.count} rounds where {ROUNDS} are needed" if few else ""),
            None if few else ratio.median >= NOT_SLOWER,
        )
        if row.vocabulary >= LARGE_VOCABULARY and "AdamW" in row.mode:
            a, b = row.timings[ours], row.timings[base]
            pairs = ((a.mlx_peak, b.mlx_peak), (a.process_peak, b.process_peak))
            shares = [x / y for x, y in pairs if x is not None and y is not None]
            yield ModelVerdict(
                row,
                f"≤ {HALF:.0%} of the peak memory of {base}",
                ", ".join(f"{x:.{digits_short_of(-HALF, -x, 2) - 2}%}" for x in shares),
                max(shares) <= HALF,
            )


def digits_short_of(bar: float, value: float, digits: int) -> int:
    """As many decimals, but at least `digits`, as a number below a bar needs to look below it."""
    while value < bar and f"{value:.{digits}f}" == f"{bar:.{digits}f}":
        digits += 1
    return digits


def bound(row: Row) -> str:
    """What keeps a row below the copy."""
    ours = row.timings.get("zmlx")
    if ours is None or row.from_cache is None:
        return "unknown"
    rate = row.bytes / ours.seconds.median
    cached = f"{row.from_cache / 1e9:.0f} GB/s with all arrays in cache"
    if row.from_cache < 1.25 * rate:
        return f"arithmetic: {cached}"
    return f"memory traffic beyond the counted bytes, or waiting: {cached}"
