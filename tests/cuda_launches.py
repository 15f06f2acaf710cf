"""Launches for the tests of the CUDA target: single ones, those of the language's tests, those of
mlx-lm; compiled, as PTX, or acted out on the host."""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cuda_on_host import launch as launch_on_host

import zmlx
from zmlx import metal
from zmlx.language import SECTIONS
from zmlx.language.attributes import SCALARS, VECTORS, WIDTH
from zmlx.launch import geometry
from zmlx.targets import cpu, cuda, nvrtc
from zmlx.transforms import strict

ARCHITECTURES = ("sm_80", "sm_90a")

needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))

#: What `cuda.compiled` and `cpu.text` take: specification, arrays, template, grid, threadgroup,
#: shapes and dtypes of the outputs.
Launch = tuple[Any, ...]


def spec_of(
    source: str,
    inputs: tuple[str, ...] = ("x",),
    outputs: tuple[str, ...] = ("y",),
    header: str = "",
    **options: Any,
) -> metal.KernelSpec:
    return metal.KernelSpec("k", inputs, outputs, source, header, **options)


def launch_of(
    source: str,
    n: int = 64,
    group: Any = 32,
    *,
    grid: Any = None,
    arrays: Any = None,
    dtype: mx.Dtype = mx.float32,
    template: Any = (),
    **options: Any,
) -> Launch:
    """A kernel from x to y, of n elements each."""
    arrays = (mx.zeros((n,), dtype),) if arrays is None else arrays
    grid = (n, 1, 1) if grid is None else grid
    group = (group, 1, 1) if isinstance(group, int) else group
    return spec_of(source, **options), arrays, template, grid, group, ((n,),), (dtype,)


def text_of(launch: Launch) -> str:
    return cpu.text(launch[0], "cuda", *launch[1:])


def flags_of(launch: Launch) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """NVRTC's options and the kernel's numbers."""
    spec, arrays, _, grid, group, _, _ = launch
    return cuda._arguments(spec, text_of(launch), cuda.geometry(spec.name, grid, group), arrays)


def ptx_of(launch: Launch, arch: str = "compute_90") -> str:
    program = nvrtc.compile(text_of(launch), arch, flags_of(launch)[0], kind="PTX")
    return program.image.decode(errors="replace")


def compile_all(
    launches: Iterable[Launch], architectures: Iterable[str] = ARCHITECTURES
) -> list[str]:
    """Compiles launches, as many at once as there are cores; the errors."""
    errors = []

    def one(job: tuple[Launch, str]) -> None:
        launch, arch = job
        try:
            cuda.compiled(*launch, arch)
        except RuntimeError as error:
            errors.append(f"{launch[0].name} for {arch}: {error}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, itertools.product(launches, architectures)))
    return errors


class Recorded(Exception):
    """Stops a test of the language once its kernel is known."""


NATIVE = Path(__file__).parent / "native"
#: Tests of the language whose lanes part in ways that CUDA leaves open, or that take long.
LONG = {"test_attributes", "test_collectives", "test_cooperative", "test_divergence",
        "test_expressions"}  # fmt: skip
#: Tests whose kernels are not meant to run, or are written elsewhere.
OTHER = {"test_refusals", "test_language"}


def language_modules(*, long: bool) -> list[str]:
    """The modules of the language's tests: their kernels are made by `metal_source`."""
    paths = NATIVE.glob("test_*.py")
    names = {path.stem for path in paths if "metal_source" in path.read_text()} - OTHER
    return sorted(names if long else names - LONG)


def language_kernels(*modules: str) -> list[Launch]:
    """Launches of the kernels that the tests of the language execute on the CPU."""
    sys.path.insert(0, str(NATIVE))
    source = importlib.import_module("metal_source")
    launches = []

    class Recorder:
        def __init__(self, text, inputs=None, output=(1, mx.float32), grid=1, group=1,
                     template=None, header="", atomic=False, init=None, name=None):  # fmt: skip
            inputs, (shape, dtype) = inputs or {}, output
            spec = metal.KernelSpec(
                name or "test", tuple(inputs), ("out",), text, header, True, atomic
            )
            arrays = tuple(v if isinstance(v, mx.array) else mx.array(v) for v in inputs.values())
            shape = (shape,) if isinstance(shape, int) else tuple(shape)
            launches.append((spec, arrays, tuple((template or {}).items()), source.triple(grid),
                             source.triple(group), (shape,), (dtype,)))  # fmt: skip

        def __call__(self):
            raise Recorded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "Metal", Recorder)
        for name in modules:
            module = importlib.import_module(name)
            if hasattr(module, "Metal"):
                patch.setattr(module, "Metal", Recorder)
            for test in (f for n, f in vars(module).items() if n.startswith("test_")):
                run_until_recorded(test)
    return launches


#: Kinds of geometry with a grid and a group of theirs.
GEOMETRIES = [
    (cuda.EXACT, (64, 1, 1), (32, 1, 1)),
    (cuda.EXACT, (12, 6, 4), (4, 3, 2)),
    (cuda.EXACT, (5, 7, 1), (256, 1, 1)),
    (cuda.LINE, (100, 1, 1), (32, 1, 1)),
    (cuda.LINE, (33, 1, 1), (32, 1, 1)),
    (cuda.LINEAR, (7, 5, 1), (4, 2, 1)),
    (cuda.LINEAR, (9, 4, 5), (4, 4, 2)),
    (cuda.LINEAR, (1, 70, 3), (1, 33, 2)),
    (cuda.LINEAR, (33, 3, 2), (8, 2, 2)),
]


def launch_of_attributes(grid: cuda.Triple, group: cuda.Triple) -> Launch:
    """Every thread writes all its attributes: what `zmlx.language.attributes.model` computes."""
    source = (
        f"uint3 p = thread_position_in_grid; uint at = ((p.z * NY + p.y) * NX + p.x) * {WIDTH};\n"
        + "".join(f"y[at++] = {name};\n" for name in SCALARS)
        + "".join(f"y[at++] = {name}.{axis};\n" for name in VECTORS for axis in "xyz")
    )
    sizes = tuple(mx.array(n, mx.int32) for n in grid[:2])
    shape = (grid[0] * grid[1] * grid[2], WIDTH)
    return spec_of(source, ("NX", "NY")), sizes, (), grid, group, (shape,), (mx.uint32,)


def product_of_tiles(dtype: mx.Dtype) -> tuple[Launch, np.ndarray]:
    """A product of 8x8 matrices of small whole numbers, and its value: Apple's layout in registers,
    CUDA's in the matrix units of the narrow types."""
    rng = np.random.default_rng(0)
    a, b = (mx.array(rng.integers(-4, 5, (8, 8)).astype(np.float32)).astype(dtype) for _ in "ab")
    source = """
        simdgroup_matrix<T, 8, 8> m, n;
        simdgroup_float8x8 p = make_filled_simdgroup_matrix<float, 8, 8>(1);
        simdgroup_load(m, a); simdgroup_load(n, b, 8, ulong2(0), true);
        simdgroup_multiply_accumulate(p, m, n, p);
        simdgroup_store(p, y);
    """
    launch = (spec_of(source, ("a", "b")), (a, b), (("T", dtype),), (32, 1, 1), (32, 1, 1),
              ((8, 8),), (mx.float32,))  # fmt: skip
    return launch, np.array(a.astype(mx.float32)) @ np.array(b.astype(mx.float32)).T + 1


def table_of_the_language() -> dict[str, Launch]:
    """A launch of every row of the table."""
    return {
        f"{section}: {name}": row.arguments()
        for section, rows in SECTIONS.items()
        for name, row in rows.items()
    }


def run_until_recorded(test: Callable[..., None]) -> None:
    """Calls a test with each combination of its parameters."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0]
            names = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
            rows = [v if len(names) > 1 else (v,) for v in mark.args[1]]
            axes.append([dict(zip(names, row, strict=True)) for row in rows])
    for combination in itertools.product(*axes):
        values = {k: v for axis in combination for k, v in axis.items()}
        if set(values) != set(inspect.signature(test).parameters):
            return  # it takes fixtures
        try:
            test(**values)
        except Recorded:
            continue


def taken_by_cpu(launch: Launch) -> bool:
    """Whether the CPU compiles the text, and its limits allow it."""
    try:
        cpu.prepare(*launch, 0.0, ())
    except RuntimeError:
        return False
    return True


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """Without repeats of text, template arguments and dtypes."""
    return list({(x[0].body, x[0].header, x[2], x[6]): x for x in launches}.values())


def but_for_sizes(launches: Iterable[Launch]) -> list[Launch]:
    """Without repeats of all that shapes the text: its body, dtypes, what is scalar or small (in
    constant memory), the kind of grid, and template arguments but for integers above 1."""

    def key(launch: Launch) -> tuple[Any, ...]:
        spec, arrays, template, grid, group, _, dtypes = launch
        named = [(k, min(v, 2) if isinstance(v, int) else v) for k, v in template]
        taken = [(x.dtype, x.ndim == 0, x.size < 8) for x in arrays]
        kind = cuda.geometry(spec.name, grid, group).kind
        return spec.body, spec.header, tuple(taken), tuple(named), kind, dtypes

    return list({key(launch): launch for launch in reversed(list(launches))}.values())


def mlx_lm_launches(dtype: mx.Dtype) -> Iterator[Launch]:
    """The kernels of mlx-lm as it calls them."""
    pytest.importorskip("mlx_lm")
    from mlx_lm_kernels import calls

    for c in calls(dtype):
        spec = metal.KernelSpec(c.name, c.input_names, c.output_names, c.source, c.header)
        yield (spec, c.inputs, c.template, c.grid, c.threadgroup, c.output_shapes, c.output_dtypes)


def run_on_cpu(launch: Launch) -> list[np.ndarray]:
    """The outputs of a launch on the CPU target; what it does not write is 0."""
    outputs = cpu.launch(cpu.prepare(*launch, 0.0, ()), launch[1])
    return [to_numpy(x) for x in (outputs if isinstance(outputs, tuple) else (outputs,))]


def run_on_device(launch: Launch) -> list[np.ndarray]:
    """The outputs of a launch on a GPU; what it does not write is 0."""
    outputs = cuda.launch(cuda.prepare(*launch, 0.0, ()), launch[1])
    return [to_numpy(x) for x in (outputs if isinstance(outputs, tuple) else (outputs,))]


def assert_outputs(found: Iterable[np.ndarray], launch: Launch, least: float = 0.0) -> None:
    """Raises where outputs differ from those of the CPU target by more than a rounding, and more
    than `least`."""
    for got, want in zip(found, run_on_cpu(launch), strict=True):
        if want.dtype == np.uint16:  # bfloat16
            got, want = ((x.astype(np.uint32) << 16).view(np.float32) for x in (got, want))
        wide = np.complex128 if np.iscomplexobj(want) else np.float64
        finite = want[np.isfinite(want)].astype(wide)
        scale = np.abs(finite).max(initial=0.0)
        eps = 2**-7 if mx.bfloat16 in launch[6] else 2**-10 if mx.float16 in launch[6] else 2**-20
        np.testing.assert_allclose(got.astype(wide), want, rtol=eps, atol=max(eps * scale, least))


def placed(x: np.ndarray, first: int) -> np.ndarray:
    """A copy that starts so many elements after a multiple of 64 bytes."""
    room = np.empty(x.nbytes + first * x.itemsize + 64, np.uint8)
    start = -room.ctypes.data % 64 + first * x.itemsize
    copy = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def run_on_host(launch: Launch, folder: Path, first: int = 0) -> list[np.ndarray]:
    """The outputs of a launch that is acted out on the host, with its arrays so many elements after
    where vectors may start."""
    spec, arrays, _, grid, group, shapes, dtypes = launch
    flags, numbers = flags_of(launch)
    place = cuda.geometry(spec.name, grid, group)
    inputs = [placed(to_numpy(x), first) for x in arrays]
    outputs = [
        placed(np.zeros(s, to_numpy(mx.zeros((1,), d)).dtype), first)
        for s, d in zip(shapes, dtypes, strict=True)
    ]
    launch_on_host(
        text_of(launch), flags, [*inputs, *outputs], numbers, place.grid, place.block, folder
    )
    return outputs


_blocks = itertools.count()


@contextmanager
def standing_in(name: str) -> Iterator[None]:
    """A block in whose settings kernels keep launches of their own: those that a stand-in for CUDA
    prepared are nothing for another one, nor for the next block of its own."""
    with geometry("gpu", **{name: next(_blocks)}):
        yield


@contextmanager
def launches_with_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """What is launched on CUDA inside, in the geometry of a GPU, with the values it is given; the
    CPU computes the outputs."""
    launches: list[Launch] = []

    def prepare(spec, arrays, template, grid, group, shapes, dtypes, init_value, constants):
        kernel = spec, template, grid, group, shapes, dtypes, constants
        made = (spec, arrays, template, grid, group, shapes, dtypes, init_value, constants)
        return kernel, cpu.prepare(*made)

    def launch(prepared, arrays):
        (spec, template, grid, group, shapes, dtypes, constants), on_cpu = prepared
        mx.eval(arrays)
        if 0 not in grid:
            launches.append((spec, (*arrays, *constants), template, grid, group, shapes, dtypes))
        return cpu.launch(on_cpu, arrays)

    with monkeypatch.context() as patch, standing_in("values"), zmlx.target("cuda"), strict():
        patch.setattr(cuda, "unavailable", lambda: None)
        patch.setattr(cuda, "prepare", prepare)
        patch.setattr(cuda, "launch", launch)
        yield launches


def to_numpy(x: mx.array) -> np.ndarray:
    """A NumPy copy; a bfloat16 as its 16 bits."""
    return np.array(x.view(mx.uint16)) if x.dtype == mx.bfloat16 else np.array(x)
