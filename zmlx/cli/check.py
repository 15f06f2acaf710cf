"""Check every op against float64 on this machine's own target: run this first on a new machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

DTYPES = ("float32", "float16", "bfloat16")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("ops", nargs="*", metavar="OP", help="ops or families (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs the checks; returns 0 if all pass, 1 if one fails, 2 if it cannot start."""
    from zmlx import launch, registry

    names = set(arguments.ops)
    known = {name for op in registry.ops() for name in (op.name, op.family)}
    if names - known:
        print(f"[check] no op or family is called {min(names - known)!r}.", file=sys.stderr)
        return 2
    try:
        import autograd.scipy.special  # noqa: F401  (the oracle's float64 functions and gradients)
    except ImportError as error:
        print(f"[check] the float64 oracle is missing ({error}).", file=sys.stderr)
        print("Remedy: pip install 'autograd[scipy]'", file=sys.stderr)
        return 2
    ops = [op for op in registry.ops() if not names or {op.name, op.family} & names]
    target = launch.settings().target
    if not arguments.json:
        print(f"target {target}, {len(ops)} ops in {', '.join(DTYPES)}, against float64")
    rows = []
    for op in ops:
        rows.append(_check(op))
        if not arguments.json:
            print(_line(rows[-1]), flush=True)
    failed = sum(len(row["failures"]) for row in rows)
    if arguments.json:
        print(json.dumps({"target": target, "ops": rows, "failed": failed}, indent=1))
    else:
        print(f"{sum(row['checks'] for row in rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _check(op: Any) -> dict[str, Any]:
    import mlx.core as mx

    from zmlx import testing

    start, checks, failures = time.perf_counter(), 0, []
    for case in op.cases:
        for dtype in DTYPES:
            for test in (testing.check_forward, testing.check_gradient):
                checks += 1
                try:
                    test(op, case, getattr(mx, dtype))
                except (AssertionError, RuntimeError, ValueError, TypeError) as error:
                    shape = f"{case.lead} {dict(case.sizes)} {dtype}"
                    failures.append(f"{test.__name__} {shape}: {error}")
    seconds = round(time.perf_counter() - start, 2)
    return {"op": op.name, "checks": checks, "failures": failures, "seconds": seconds}


def _line(row: dict[str, Any]) -> str:
    state = f"{len(row['failures'])} failed" if row["failures"] else "ok"
    text = f"  {row['op']:<20} {row['checks']:>4} checks  {row['seconds']:>6.1f} s  {state}"
    return "\n".join([text, *(f"      {failure}" for failure in row["failures"][:5])])
