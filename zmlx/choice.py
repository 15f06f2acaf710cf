"""Which implementation a layer runs: zmlx's kernel or MLX's op.

The catalogue's functions always run their kernel. `zmlx.nn` and `zmlx.patch` choose, by a pure
function of the op, the target, the shape, the dtype and a table of measurements:

- what the caller prefers (`zmlx.prefer`), where the kernel can run at all;
- zmlx where MLX has no fused form of the op on that target, or where the kernel saves memory;
- else whichever was measured faster at the nearest shape of that target and dtype: with its
  gradient where the array is being traced, as in training, unless only the forward was measured;
- MLX where nothing was measured.

The table comes with the package, with forward times of a CPU, and `python -m zmlx tune` replaces
it by the user's machine's, of both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import mlx.core as mx

from . import cache, launch
from .targets import cpu

GPUS = ("metal", "cuda")
EVERYWHERE = ("metal", "cuda", "cpu")

#: Targets on which MLX has a fused form: a primitive of its own, or one kernel of `mx.compile`.
#: An op that is not here has none anywhere.
MLX_FUSES: dict[str, tuple[str, ...]] = {
    "rms_norm": GPUS,
    "layer_norm": GPUS,
    "cross_entropy": GPUS,
    "scaled_dot_product_attention": GPUS,
    "rope": GPUS,
    "softmax": EVERYWHERE,
    **dict.fromkeys(
        (
            "celu",
            "elu",
            "gelu",
            "gelu_quick",
            "gelu_tanh",
            "hardswish",
            "hardtanh",
            "leaky_relu",
            "log_sigmoid",
            "mish",
            "relu",
            "relu2",
            "selu",
            "sigmoid",
            "silu",
            "softplus",
            "softsign",
            "tanh",
            "geglu",
            "geglu_tanh",
            "glu",
            "reglu",
            "swiglu",
            "swiglu_clamped",
        ),
        EVERYWHERE,
    ),
}

#: Ops whose kernel needs less memory than MLX's, and what it does not hold.
SAVES_MEMORY = {
    "dropout": "the mask is not stored",
    "linear_cross_entropy": "the logits are not stored",
}

#: Pointwise ops, which `mx.compile` fuses with what is around them; a kernel would be a barrier.
POINTWISE = frozenset(op for op, on in MLX_FUSES.items() if on is EVERYWHERE and op != "softmax")

#: What is measured: an op, and an op with the gradients of all its arrays.
MODES = ("forward", "both")

_FLOATS = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Measurement:
    """Median seconds of both implementations at one shape and mode, taken in turns."""

    op: str
    target: str
    dtype: str
    rows: int
    width: int
    zmlx: float
    mlx: float
    mode: str = "forward"


@dataclass(frozen=True)
class Choice:
    """What runs ("zmlx" or "mlx"), and why."""

    runs: str
    why: str

    def __str__(self) -> str:
        return f"{self.runs} ({self.why})"


def decide(
    op: str,
    target: str,
    rows: int,
    width: int,
    dtype: str,
    table: Iterable[Measurement] = (),
    preference: str = "auto",
    training: bool = False,
) -> Choice:
    """The choice for `rows` rows of `width` elements: a function of its arguments alone."""
    if dtype not in _FLOATS.values():
        return Choice("mlx", f"no kernel takes {dtype}")
    if preference != "auto":
        return Choice(preference, "preferred")
    if target not in MLX_FUSES.get(op, ()):
        return Choice("zmlx", f"MLX has no fused form on {target}")
    if op in SAVES_MEMORY:
        return Choice("zmlx", SAVES_MEMORY[op])
    measured = [m for m in table if (m.op, m.target, m.dtype) == (op, target, dtype)]
    modes = {m.mode for m in measured}
    mode = "both" if training and "both" in modes else "forward"
    measured = [m for m in measured if m.mode == mode]
    if not measured:
        return Choice("mlx", f"not measured on {target}")
    nearest = min(measured, key=lambda m: (_distance(m, rows, width), m.rows, m.width))
    ratio = nearest.mlx / nearest.zmlx
    shape = f"{nearest.rows}x{nearest.width}" + (" with its gradient" if mode == "both" else "")
    if ratio >= 1:
        return Choice("zmlx", f"{ratio:.2f} times as fast at {shape}")
    return Choice("mlx", f"{1 / ratio:.2f} times as fast at {shape}")


def _distance(m: Measurement, rows: int, width: int) -> float:
    """Between shapes, in powers of two."""
    sizes = ((m.rows, rows), (m.width, width))
    return sum(abs(math.log2(max(a, 1)) - math.log2(max(b, 1))) for a, b in sizes)


# ---- the table ----------------------------------------------------------------------------------

_SHIPPED = Path(__file__).with_name("measured.json")


def table_path() -> Path:
    """Where `python -m zmlx tune` writes."""
    return cache.directory("tune") / "measured.json"


@lru_cache(maxsize=1)
def table() -> tuple[Measurement, ...]:
    """This machine's measurements, where there are any for an op and target; else the package's."""
    shipped = _rows(_SHIPPED.read_bytes()) if _SHIPPED.exists() else ()
    data = cache.read(table_path()) if table_path().exists() else None
    own = () if data is None else _rows(data)
    replaced = {(m.op, m.target, m.dtype) for m in own}
    kept = tuple(m for m in shipped if (m.op, m.target, m.dtype) not in replaced)
    return own + kept


def write(measurements: Iterable[Measurement]) -> Path:
    """Makes these this machine's table, beside what it holds of other ops, targets and dtypes."""
    new = tuple(measurements)
    replaced = {(m.op, m.target, m.dtype) for m in new}
    data = cache.read(table_path()) if table_path().exists() else None
    old = () if data is None else _rows(data)
    rows = [asdict(m) for m in old if (m.op, m.target, m.dtype) not in replaced]
    rows += [asdict(m) for m in new]
    cache.write(table_path(), json.dumps({"version": 1, "rows": rows}).encode())
    forget()
    return table_path()


def forget() -> None:
    """Reads the table again at the next choice."""
    table.cache_clear()
    _chosen.cache_clear()


def _rows(data: bytes) -> tuple[Measurement, ...]:
    """The rows of a table; one that this version cannot read holds none."""
    try:
        record = json.loads(data)
        if record["version"] != 1:
            return ()
        return tuple(Measurement(**row) for row in record["rows"])
    except (ValueError, KeyError, TypeError):
        return ()


# ---- preference ---------------------------------------------------------------------------------

PREFERENCES = ("auto", "zmlx", "mlx")
_preference = "auto"


class prefer:
    """Makes layers and patched models run zmlx's kernels ("zmlx"), MLX's ops ("mlx") or what was
    measured ("auto", the default), from now on and in all threads; as a context, inside it.

        zmlx.prefer("mlx")
        with zmlx.prefer("zmlx"):
            y = model(x)

    The functions of `zmlx.kernels` do not choose and are not affected.
    """

    def __init__(self, which: str) -> None:
        global _preference
        if which not in PREFERENCES:
            raise ValueError(
                f"[prefer] 'which' must be one of {', '.join(PREFERENCES)} but got {which!r}."
            )
        self._before = _preference
        _preference = which

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _preference
        _preference = self._before


# ---- choosing -----------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _cpu_unavailable() -> str | None:
    return cpu.unavailable()


@lru_cache(maxsize=1)
def catalogue() -> frozenset[str]:
    """Names of the ops that have a kernel."""
    from .registry import ops

    return frozenset(op.name for op in ops())


@lru_cache(maxsize=8192)
def _chosen(
    op: str,
    target: str,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    preference: str,
    training: bool,
) -> Choice:
    if target == "reference":
        return Choice("mlx", "the target is plain MLX")
    if op not in catalogue():
        return Choice("mlx", "zmlx has no kernel for it")
    if target == "cpu" and preference != "zmlx" and (reason := _cpu_unavailable()):
        return Choice("mlx", reason)
    width = shape[-1] if shape else 1
    name = _FLOATS.get(dtype, str(dtype).rpartition(".")[2])
    rows = math.prod(shape[:-1])
    return decide(op, target, rows, width, name, table(), preference, training)


def choice(op: str, shape: tuple[int, ...], dtype: mx.Dtype, *, training: bool = False) -> Choice:
    """What runs op on an array of this shape and dtype under the settings in force; `training`:
    with its gradient."""
    return _chosen(op, launch.settings().target or "cpu", shape, dtype, _preference, training)


def use_kernel(op: str, x: mx.array, *others: mx.array | None) -> bool:
    """Whether a layer runs zmlx's kernel of op on x and others, such as its parameters.

    An array that is being traced counts as training: MLX does not say whether the trace is for a
    gradient or for `mx.compile`. A pointwise op that a GPU traces is left to MLX unless
    preferred otherwise, since `mx.compile` fuses it with its neighbours. What is no array is left
    to MLX too, which takes numbers here and there, and so are others that are no floats of a
    kernel's.
    """
    if not isinstance(x, mx.array):
        return False
    for other in others:
        if isinstance(other, mx.array) and other.dtype not in _FLOATS:
            return False
    traced = cpu.maybe_tracing((x,)) != 0
    if choice(op, tuple(x.shape), x.dtype, training=traced).runs == "mlx":
        return False
    if op in POINTWISE and _preference == "auto" and launch.settings().target in GPUS:
        return not traced
    return True


def by_target(op: str, shape: tuple[int, ...], dtype: mx.Dtype) -> Mapping[str, Choice]:
    """The automatic choice on every target, for reports."""
    name = _FLOATS.get(dtype, str(dtype).rpartition(".")[2])
    rows, width = math.prod(shape[:-1]), shape[-1] if shape else 1
    return {t: decide(op, t, rows, width, name, table()) for t in EVERYWHERE}
