"""Compare a model of mlx-lm with itself patched: tokens, speed, memory, and a verdict."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT = "The history of computing began long before there were machines to do it. In"


@dataclass
class Result:
    """What one variant did: tokens, tokens per second of each round, bytes at the peak."""

    tokens: list[int]
    prompt: list[float]
    decode: list[float]
    peak: int


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("model", help="a folder with an mlx-lm model, or a name on the hub")
    parser.add_argument("--prompt", default=PROMPT, help="the text to go on from")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode (default 64)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each (default 3)")
    parser.add_argument("--report", action="store_true", help="also print what was replaced")


def run(arguments: argparse.Namespace) -> int:
    """Validates; returns 0 for the same tokens, 1 for others, 2 if it cannot start."""
    for name in ("tokens", "rounds"):
        if getattr(arguments, name) < 1:
            print(
                f"[validate] '--{name}' must be at least 1 but got {getattr(arguments, name)}.",
                file=sys.stderr,
            )
            return 2
    try:
        from mlx_lm import load
    except ImportError as error:
        print(f"[validate] mlx-lm is missing ({error}).", file=sys.stderr)
        print("Remedy: pip install mlx-lm", file=sys.stderr)
        return 2
    from zmlx.cli import runs_here

    name = arguments.model
    local = Path(name).expanduser()
    if not local.exists() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        print(
            f"[validate] 'model' must be a folder or a hub name such as org/model but got {name}.",
            file=sys.stderr,
        )
        return 2
    if local.exists() and not (local / "config.json").exists():
        print(f"[validate] {name} has no config.json.", file=sys.stderr)
        return 2
    if not runs_here("validate"):
        return 2
    try:
        model, tokenizer = load(str(local) if local.exists() else name)[:2]
    except Exception as error:  # whatever a broken folder or a missing network makes it raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"[validate] {name} does not load: {first}", file=sys.stderr)
        return 2
    prompt = tokenizer.encode(arguments.prompt)
    if not prompt:
        print("[validate] '--prompt' must have at least one token.", file=sys.stderr)
        return 2
    plain, patched, report = compare(model, prompt, arguments.tokens, arguments.rounds)
    if arguments.report:
        print(f"{report}\n")
    print(table(plain, patched, len(prompt)))
    print(verdict(plain, patched, report))
    return 0 if plain.tokens == patched.tokens else 1


def compare(model: Any, prompt: list[int], tokens: int, rounds: int) -> tuple[Result, Result, Any]:
    """Both variants in turns, after a round of each that is not timed; the model ends unpatched."""
    import zmlx

    plain, patched = Result([], [], [], 0), Result([], [], [], 0)
    report = None
    for i in range(rounds + 1):
        for result in (plain, patched) if i % 2 else (patched, plain):
            if result is patched:
                report = zmlx.patch(model)
            try:
                _generate(model, prompt, tokens, result, timed=i > 0)
            finally:
                zmlx.unpatch(model)
    return plain, patched, report


def _generate(model: Any, prompt: list[int], tokens: int, result: Result, timed: bool) -> None:
    """Greedy tokens of one run."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    mx.clear_cache()
    mx.reset_peak_memory()
    cache = make_prompt_cache(model)
    start = time.perf_counter()
    y = model(mx.array([prompt]), cache=cache)[:, -1:].argmax(axis=-1)
    found = [y.item()]
    middle = time.perf_counter()
    while len(found) < tokens:
        y = model(y, cache=cache)[:, -1:].argmax(axis=-1)
        found.append(y.item())
    end = time.perf_counter()
    result.tokens = found
    result.peak = max(result.peak, mx.get_peak_memory())
    if timed:
        result.prompt.append(len(prompt) / (middle - start))
        if tokens > 1:
            result.decode.append((tokens - 1) / (end - middle))


def same_tokens(plain: Result, patched: Result) -> int:
    """How many tokens are the same before the first that differs."""
    pairs = zip(plain.tokens, patched.tokens, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(plain.tokens))


def table(plain: Result, patched: Result, prompt: int) -> str:
    """The comparison."""
    lines = [f"{'':<10}{'prompt tok/s':>14}{'decode tok/s':>14}{'peak MB':>10}"]
    for name, r in (("unpatched", plain), ("patched", patched)):
        decode = f"{statistics.median(r.decode):.1f}" if r.decode else "–"
        lines.append(
            f"{name:<10}{statistics.median(r.prompt):>14.1f}{decode:>14}{r.peak / 1e6:>10.1f}"
        )
    same, count = same_tokens(plain, patched), len(plain.tokens)
    lines.append(f"prompt of {prompt} tokens; {same} of {count} greedy tokens are the same")
    return "\n".join(lines)


def verdict(plain: Result, patched: Result, report: Any) -> str:
    """One line."""
    if not report.replaced:
        return "nothing was replaced"
    same, count = same_tokens(plain, patched), len(plain.tokens)
    if same < count:
        return (
            f"other tokens from the {same + 1}. on: in half precision near ties may turn; "
            "compare logits, or validate in float32"
        )
    rates = (plain.decode or plain.prompt, patched.decode or patched.prompt)
    ratio = statistics.median(rates[1]) / statistics.median(rates[0])
    return f"same tokens, {max(ratio, 1 / ratio):.2f} times as {'fast' if ratio >= 1 else 'slow'}"
