"""Check every op against float64 on this machine's own target: run this first on a new machine.

Kernels are also compiled for CUDA where NVRTC is, and read as strictly as Metal's compiler does
where ziglang is; both need no GPU. What was executed, compiled and read is said apart, by op.
"""

from __future__ import annotations

import argparse
import json
import os
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
    # MLX's products on a GPU round float32 to 10 bits unless this is said before the first one.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    from zmlx import launch, registry
    from zmlx.cli import runs_here

    try:
        ops = registry.select(arguments.ops)
    except KeyError as error:
        print(f"[check] {error.args[0]}", file=sys.stderr)
        return 2
    try:
        import autograd.scipy.special  # noqa: F401  (the oracle's float64 functions and gradients)
    except ImportError as error:
        print(f"[check] the float64 oracle is missing ({error}).", file=sys.stderr)
        print("Remedy: pip install 'autograd[scipy]'", file=sys.stderr)
        return 2
    target = launch.settings().target or "reference"
    if not runs_here("check", target):
        return 2
    if not arguments.json:
        print(f"target {target}, {len(ops)} ops in {', '.join(DTYPES)}, against float64")
    missing = _missing()
    rows = []
    for op in ops:
        rows.append({**_check(op), **_other_targets(op, missing)})
        if not arguments.json:
            print(_line(rows[-1]), flush=True)
    failed = sum(len(row[key]) for row in rows for key in ("failures", "refused"))
    targets = _targets(target, missing)
    if arguments.json:
        report = {**_machine(), "target": target, "targets": targets, "ops": rows, "failed": failed}
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(f"  {name:<9} {state}" for name, state in targets.items()))
        print(f"{sum(row['checks'] for row in rows)} checks, {failed} failed")
    return 1 if failed else 0


#: The architectures that kernels are compiled for without a GPU.
_ARCHITECTURES = ("sm_80", "sm_90a")


def _missing() -> dict[str, str]:
    """Why kernels cannot be compiled for CUDA, or read as Metal, here; empty where they can."""
    from importlib.util import find_spec

    from zmlx.targets import cpu, nvrtc

    found = {}
    # The core writes the CUDA text.
    if reason := nvrtc.unavailable() or cpu.unavailable():
        found["cuda"] = reason
    if find_spec("ziglang") is None:
        found["metal"] = "the strict front end needs clang: pip install ziglang"
    return found


def _targets(target: str | None, missing: dict[str, str]) -> dict[str, str]:
    states = {
        "metal": "not tried: " + missing["metal"] if "metal" in missing else
        "read by the strict front end, not executed",
        "cuda": "not tried: " + missing["cuda"] if "cuda" in missing else
        f"compiled for {' and '.join(_ARCHITECTURES)}, not executed",
        "cpu": "not tried",
    }  # fmt: skip
    return {**states, target or "reference": "executed, against float64"}


def _machine() -> dict[str, Any]:
    """Versions and devices, so that a report says where it comes from."""
    import platform

    import mlx.core as mx

    from zmlx.cli.doctor import versions

    device = mx.default_device()
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "device": {"default": str(device), **mx.device_info(device)},
    }


def _other_targets(op: Any, missing: dict[str, str]) -> dict[str, Any]:
    """How many of the op's kernels were compiled and read, and those that were refused."""
    from zmlx import strict
    from zmlx.strict import catalogue
    from zmlx.targets import cuda

    row: dict[str, Any] = {"compiled for cuda": 0, "read as metal": 0, "refused": []}
    if len(missing) == 2:
        return row
    launches = catalogue.launches([op.name])
    if "cuda" not in missing:
        for launch in launches:
            name = launch.spec.name
            try:
                for architecture in _ARCHITECTURES:
                    given: Any = (*launch.arguments(), architecture)
                    cuda.compiled(*given)
            except RuntimeError as error:
                row["refused"].append(f"{name} for {architecture}: {error}")
            else:
                row["compiled for cuda"] += 1
    if "metal" not in missing:
        texts = [launch.text() for launch in launches]
        for launch, problems in zip(launches, strict.check_many(texts), strict=True):
            row["refused"] += [f"{launch.spec.name}, read as Metal: {p}" for p in problems]
            row["read as metal"] += not problems
    return row


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
    wrong = row["failures"] + row["refused"]
    state = f"{len(wrong)} failed" if wrong else "ok"
    others = f"{row['compiled for cuda']:>3} compiled  {row['read as metal']:>3} read"
    text = (
        f"  {row['op']:<20} {row['checks']:>4} checks  {others}  {row['seconds']:>6.1f} s  {state}"
    )
    return "\n".join([text, *(f"      {failure}" for failure in wrong[:5])])
