"""A step of `overhead` in a process of its own: `python -m zmlx.bench.overhead_worker STEP`.

The result is the last line of the output, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import mlx.core as mx

from .. import interop, kernels, launch, metal, native, registry
from .rows import pose
from .variants import ZMLX, mlx_ways

_CALLS = 500
_ROUNDS = 41
_FACTOR_ROUNDS = 12

#: What is compiled for the clock: each way to write a kernel, and the heaviest of them.
_COMPILED = (
    "silu", "swiglu", "softmax", "rms_norm", "layer_norm", "dropout_add_layer_norm",
    "cross_entropy", "rope", "sum", "cumsum", "topk_gating", "adamw",
    "scaled_dot_product_attention",
)  # fmt: skip

#: Constants of the launch by geometry.
_GEOMETRIES: dict[str, dict[str, int]] = {"cpu": {}, "gpu": {"TPR": 256}}


def load() -> dict[str, Any]:
    """Builds (if need be) and loads the core."""
    start = time.perf_counter()
    native.load()
    return {"seconds": time.perf_counter() - start}


def compile_all() -> dict[str, Any]:
    """Runs `_COMPILED` forward and backward on a few rows, in both geometries. A call's compile
    time is its first run less its second, over the kernels that the first one compiled."""
    native.load()
    found: dict[str, dict[str, float]] = {"cpu": {}, "gpu": {}}
    compiled = 0
    for op in map(registry.get, _COMPILED):
        case = op.benchmarks[0]
        rows = len(case.lead) == len(case.sizes) == 1
        case = replace(case, lead=(4,)) if rows else op.cases[1]
        with launch.target("reference"):  # nothing is compiled before the clock runs
            problem, _ = pose(op, case, mx.float32)
        for geometry, seconds in found.items():
            with launch.geometry(geometry):
                for mode in ("forward", "both"):
                    run = mlx_ways(problem, mode, (ZMLX,))[ZMLX]().variant
                    before = metal.statistics()["compiles"]
                    first = run.seconds(lambda: None)
                    count = metal.statistics()["compiles"] - before
                    second = run.seconds(lambda: None)
                    compiled += count
                    if count:
                        seconds[f"{op.name} {mode}"] = (first - second) / count
    return {"kernels": found, "compiled": compiled}


def call() -> dict[str, float]:
    """Seconds of a call of rms_norm and of mx.fast.rms_norm, without and with evaluation."""
    x, weight = mx.random.normal((1, 4096)), mx.ones((4096,))
    mx.eval(x, weight)

    def ours() -> Any:
        return kernels.rms_norm(x, weight, 1e-5)

    def theirs() -> Any:
        return mx.fast.rms_norm(x, weight, 1e-5)

    a, b = _interleaved(ours, theirs)
    c, d = _interleaved(lambda: mx.eval(ours()), lambda: mx.eval(theirs()))
    return {
        "zmlx": median(a),
        "mlx": median(b),
        "beyond": median(x - y for x, y in zip(a, b, strict=True)),
        "zmlx_evaluated": median(c),
        "mlx_evaluated": median(d),
    }


def geometry() -> dict[str, float]:
    """By row reduction: how many times longer it takes with 256 threads a row than with one."""
    x, weight = mx.random.normal((256, 4096)), mx.ones((4096,))
    mx.eval(x, weight)
    reductions: dict[str, Callable[[], Any]] = {
        "rms_norm": lambda: kernels.rms_norm(x, weight, 1e-5),
        "layer_norm": lambda: kernels.layer_norm(x, weight, weight, 1e-5),
        "softmax": lambda: kernels.softmax(x),
        "logsumexp": lambda: kernels.logsumexp(x),
    }
    return {name: _factor(run) for name, run in reductions.items()}


def _factor(run: Callable[[], Any]) -> float:
    seconds: dict[str, list[float]] = {kind: [] for kind in _GEOMETRIES}
    for _ in range(_FACTOR_ROUNDS):
        for kind, found in seconds.items():
            with launch.geometry(kind, **_GEOMETRIES[kind]):
                start = time.perf_counter()
                mx.eval(run())
                found.append(time.perf_counter() - start)
    # The first round compiles.
    return median(g / c for g, c in zip(seconds["gpu"][1:], seconds["cpu"][1:], strict=True))


def install() -> dict[str, float]:
    """Seconds of a call of a Metal kernel through install(), and of MLX's own x * scale."""
    source = "uint i = thread_position_in_grid.x; y[i] = x[i] * scale;"
    names: dict[str, Any] = {
        "name": "scaled", "input_names": ["x", "scale"], "output_names": ["y"], "source": source
    }  # fmt: skip
    with interop.install():
        ours: Any = mx.fast.metal_kernel(**names)
    x, scale = mx.ones((64,)), mx.array(2.0)
    given: dict[str, Any] = {
        "inputs": [x, scale], "template": [("T", mx.float32)], "grid": (64, 1, 1),
        "threadgroup": (64, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.float32],
    }  # fmt: skip
    a, b = _interleaved(lambda: ours(**given), lambda: x * scale)
    return {
        "zmlx": median(a),
        "mlx": median(b),
        "beyond": median(x - y for x, y in zip(a, b, strict=True)),
    }


def _interleaved(*calls: Callable[[], Any]) -> list[list[float]]:
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        for run, found in zip(calls, seconds, strict=True):
            start = time.perf_counter()
            for _ in range(_CALLS):
                run()
            found.append((time.perf_counter() - start) / _CALLS)
    return seconds


STEPS: dict[str, Callable[[], dict[str, Any]]] = {
    "load": load,
    "compile": compile_all,
    "call": call,
    "geometry": geometry,
    "install": install,
}

if __name__ == "__main__":
    print(json.dumps(STEPS[sys.argv[1]]()))
