"""Results of the benchmark that nobody measured, for the tests of what is made of them."""

from zmlx.bench import model
from zmlx.bench.result import ModelRow, Result, Row, Timing
from zmlx.bench.summary import Summary
from zmlx.bench.variants import (
    COMPILED,
    TORCH_COMPILED,
    ZMLX,
)


def firm(value, spread=0.01, count=20):
    return Summary(value, value * (1 - spread), value * (1 + spread), count)


def made(op="rms_norm", share=0.9, ratios=None, *, seconds=0.003, **fields):
    ratios = {COMPILED: 2.0, TORCH_COMPILED: 1.1} if ratios is None else ratios
    timings = {
        ZMLX: Timing(firm(seconds), 1 << 20, 2 << 20),
        **{n: Timing(firm(r * seconds), 1 << 20, 2 << 20) for n, r in ratios.items()},
    }
    values = {
        "op": op, "family": "norms", "shape": "4096x4096", "dtype": "float32", "mode": "forward",
        "bytes": 1 << 27, "anchor": {"copy": firm(0.005)}, "anchor_rate": {"copy": 4.6e10},
        "timings": timings, "ratios": {n: firm(r) for n, r in ratios.items()},
        "share": firm(share), "from_cache": 9e10,
    }  # fmt: skip
    return Row(**{**values, **fields})


ENVIRONMENT = {
    "date": "2025-01-01 00:00 UTC", "cpu": "a CPU", "cpus": 2, "threads": 2, "target": "cpu",
    "last_level_cache": 1 << 25, "system": "Linux", "huge_pages": "madvise", "compiler": "g++ 12",
    "python": "3.11", "versions": {"mlx": "0.32.4"}, "blas": "OpenBLAS", "load_before": 0.1,
    "mlx_cache_limit": 8 << 30,
}  # fmt: skip


def outcome(*items, overheads=(), sweep=()):
    return Result(ENVIRONMENT, {"copy": firm(4.6e10)}, items, overheads, sweep)


def model_row(ratio=3.0, share=0.4, vocabulary=32768, *, process=None, count=7):
    peaks = {"MLX": 1.0, "MLX + OpenBLAS": 1.0, "patched + OpenBLAS": share}
    resident = peaks if process is None else {**peaks, "patched + OpenBLAS": process}
    timings = {
        name: Timing(
            firm(2.0, count=1 if name == "MLX" else count),
            int(peaks[name] * 2**30),
            int(resident[name] * 2**30),
        )
        for name in peaks
    }
    ratios = {"MLX": firm(20.0, count=1), "MLX + OpenBLAS": firm(ratio, count=count)}
    return ModelRow("llama", vocabulary, 2048, model.MODES[2], timings, ratios)
