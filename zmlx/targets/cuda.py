"""The CUDA target: the Metal text as CUDA, compiled by NVRTC, kept on disk, launched by MLX.

The C++ core rewrites the text (see `native/cuda_dialect.h`). A launch adds macros: how CUDA's grid
covers Metal's, how many threads a group has, the ranks of arrays whose shapes the kernel names.
Equal texts with equal macros are compiled once per architecture, ever.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

from .. import cache
from . import cpu, nvrtc

if TYPE_CHECKING:
    from ..metal import KernelSpec
    from ..transforms import Record

Triple = tuple[int, int, int]

#: Values of ZK_GEOMETRY in prelude/cuda/platform.h.
EXACT, LINE, LINEAR = 0, 1, 2

#: CUDA's limits for groups along y and z and for a group's threads along z, and MLX's for threads
#: along x.
_MOST_GROUPS, _MOST_DEEP, _MOST_THREADS = 65535, 64, 2**31 - 1
#: MLX hands shapes of up to so many dimensions to a kernel.
_MOST_DIMENSIONS = 10
#: Metal's limit.
_MOST_SHARED_BYTES = 32768


def unavailable() -> str | None:
    """Why kernels cannot run on CUDA here, with the remedy, or None where they can."""
    if not (hasattr(mx, "cuda") and mx.cuda.is_available()):
        return (
            "the CUDA target needs an NVIDIA GPU and MLX's CUDA back end, which exists for Linux: "
            "pip install 'mlx[cuda13]'"
        )
    return nvrtc.unavailable() or cpu.unavailable()


#: MLX's own, whatever `zmlx.install` puts in its place.
_device_info = mx.device_info


@functools.cache
def architecture() -> str:
    """The GPU as NVRTC names it. From Hopper on, code for this very chip may use all of it."""
    info = _device_info(mx.gpu)
    major, minor = info["compute_capability_major"], info["compute_capability_minor"]
    return f"sm_{major}{minor}" + ("a" if int(major) >= 9 else "")


@dataclass(frozen=True)
class Geometry:
    """How CUDA covers a grid of Metal's: `grid` in threads and `block`, as MLX takes them, and the
    numbers that the kernel gets after all other arguments."""

    kind: int
    grid: Triple
    block: Triple
    numbers: tuple[int, ...]
    full_simd: bool
    simd_rows: bool


def geometry(name: str, grid: Triple, threadgroup: Triple) -> Geometry:
    """The geometry of a launch of `grid` threads in groups of `threadgroup`."""
    x, y, z = (min(n, t) for n, t in zip(grid, threadgroup, strict=True))
    group = (x, y, z)
    groups = [-(-n // t) for n, t in zip(grid, group, strict=True)]
    divides = all(n % t == 0 for n, t in zip(grid, group, strict=True))
    # Rows of whole simdgroups stay whole in groups that are cut off.
    rows = x % 32 == 0 and grid[0] % 32 == 0
    full = rows or (divides and prod(group) % 32 == 0)
    if divides and max(groups[1:]) <= _MOST_GROUPS and z <= _MOST_DEEP:
        return Geometry(EXACT, grid, group, (), full, rows)
    if grid[1:] == (1, 1):
        return Geometry(LINE, grid, group, (grid[0],), full, rows)
    threads, count = prod(group), prod(groups)
    across = min(count, _MOST_THREADS // threads)
    down = -(-count // across)
    if down > _MOST_GROUPS or across * down >= 2**32:
        raise ValueError(f"[{name}] 'grid' must have fewer than 2^32 groups but got {count}.")
    return Geometry(
        LINEAR, (across * threads, down, 1), (threads, 1, 1), (*grid, *group), full, rows
    )


class Compiled(NamedTuple):
    """A kernel for one kind of launch: its symbol, its cubin, and the whole numbers that follow its
    arrays."""

    name: str
    cubin: bytes
    numbers: tuple[int, ...]
    geometry: Geometry
    needs_contiguous: bool


@dataclass
class _Statistics:
    compiles: int = 0
    cache_hits: int = 0


_statistics = _Statistics()


def statistics() -> dict[str, int]:
    """What this process compiled, and what it found on disk instead."""
    return {"compiles": _statistics.compiles, "cache_hits": _statistics.cache_hits}


def compiled(
    spec: KernelSpec,
    arrays: tuple[mx.array, ...],
    template: tuple[tuple[str, Any], ...],
    grid: Triple,
    threadgroup: Triple,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[mx.Dtype, ...],
    arch: str,
) -> Compiled:
    """A kernel for a launch on these arrays, compiled or found; it needs no GPU.

    Raises:
        RuntimeError: with the lines of the user's source that do not compile.
    """
    text = cpu.text(spec, "cuda", arrays, template, grid, threadgroup, shapes, dtypes)
    place = geometry(spec.name, grid, threadgroup)
    flags, numbers = _arguments(spec, text, place, arrays)
    match = re.search(r'extern "C" __global__ void \S+ (\w+)\(', text)
    assert match is not None, text
    return Compiled(
        match.group(1),
        _cubin(spec, text, arch, flags),
        numbers,
        place,
        # The strides that the kernel sees are those of a contiguous array.
        spec.ensure_row_contiguous or re.search(r"zk_layout\d+\.strides", text) is not None,
    )


def _arguments(
    spec: KernelSpec, text: str, place: Geometry, arrays: tuple[mx.array, ...]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """NVRTC's options for a launch, and the numbers that follow its arrays."""
    flags = _flags(spec, text, place)
    numbers: list[int] = []
    for index in map(int, re.findall(r"ZK_DIMS\(ZK_RANK_(\d+)", text.rpartition('extern "C"')[2])):
        shape = arrays[index].shape
        if len(shape) > _MOST_DIMENSIONS:
            raise ValueError(
                f"[{spec.name}] '{spec.input_names[index]}' must have at most {_MOST_DIMENSIONS} "
                f"dimensions but got {len(shape)}."
            )
        flags.append(f"-DZK_RANK_{index}={len(shape)}")
        numbers += shape
    return tuple(flags), (*numbers, *place.numbers)


def _flags(spec: KernelSpec, text: str, place: Geometry) -> list[str]:
    threads = 1 << max(5, (prod(place.block) - 1).bit_length())
    flags = [f"-DZK_GEOMETRY={place.kind}", f"-DZK_THREADS={threads}"]
    if "zk_flow<" in text:
        flags += [f"-DZK_FULL_SIMD={place.full_simd:d}", f"-DZK_SIMD_ROWS={place.simd_rows:d}"]
    if "ZK_NO_CONTRACTION" in text:
        flags.append("--fmad=false")
    if spec.math_mode == "fast":
        flags += ["-DZK_FAST_MATH", "--ftz=true", "--prec-div=false", "--prec-sqrt=false"]
    return flags


@functools.lru_cache(maxsize=1024)
def _cubin(spec: KernelSpec, text: str, arch: str, flags: tuple[str, ...]) -> bytes:
    """The cubin, from the user's cache if it is there."""
    key = "\0".join([text, arch, *nvrtc.FLAGS, *flags, *map(str, nvrtc.version())])
    path = cache.directory("cuda") / (hashlib.sha256(key.encode()).hexdigest() + ".cubin")
    found = cache.read(path)
    if found is not None:
        _statistics.cache_hits += 1
        return found
    try:
        program = nvrtc.compile(text, arch, flags)
    except nvrtc.CompileError as error:
        raise RuntimeError(explain(spec, str(error))) from None
    _check_memory(spec, program.log)
    _statistics.compiles += 1
    cache.keep(path, program.image)
    return program.image


def _check_memory(spec: KernelSpec, log: str) -> None:
    used = re.search(r"(\d+) bytes smem", log)
    if used is not None and int(used.group(1)) > _MOST_SHARED_BYTES:
        raise RuntimeError(
            f"[kernel {spec.name}] threadgroup variables hold at most {_MOST_SHARED_BYTES} bytes "
            f"but got {used.group(1)}."
        )


_MESSAGE = re.compile(r"^(\w+)\((\d+)\): (?:catastrophic )?error: (.*)$")
_CONTEXT = re.compile(r"at line (\d+) of (source|header)$")
#: Letters beyond ASCII, of which CUDA has none: the bytes of one are spelled in its place.
_SPELLED = re.compile("x(?:[cd].|e.x[89ab].|f[0-4]x[89ab].x[89ab].)x[89ab][0-9a-f]")


def explain(spec: KernelSpec, log: str) -> str:
    """NVRTC's messages with the user's own lines in place of the compiled ones."""
    _check_memory(spec, log)
    errors: list[str] = []
    pending: str | None = None
    for line in log.splitlines():
        message, context = _MESSAGE.match(line), _CONTEXT.search(line)
        if message is not None:
            file, number, text = message.groups()
            pending = text if file == "zmlx" else None
            if pending is None:
                errors.append(_place(spec, file, int(number), text))
        elif context is not None and pending is not None:
            # An error inside the prelude, and the user's line that led to it.
            errors.append(_place(spec, context.group(2), int(context.group(1)), pending))
            pending = None
    return f"[kernel {spec.name}] " + ("\n".join(dict.fromkeys(errors)) or log)


def _place(spec: KernelSpec, file: str, number: int, message: str) -> str:
    lines = (spec.body if file == "source" else spec.header).split("\n")
    line = lines[number - 1].strip() if number <= len(lines) else ""
    message = re.sub(r" \(declared at line \d+ of zmlx\)", "", message)
    # NVRTC has ? in the place of what is not ASCII, which the line shows.
    message = re.sub(r'^(static assertion failed) with ".*\?.*"$', r"\1", message)
    message = _SPELLED.sub(lambda m: bytes.fromhex(m[0].replace("x", "")).decode(), message)
    for generated in ("zk::<unnamed>::", "metal::", "zk_"):
        message = message.replace(generated, "")
    if "must have pointer-to-object type" in message:
        message += "; an array of no dimensions comes as a value, without an index"
    return f"line {number} of the {file}: `{line}`: {message}"


@dataclass(frozen=True)
class _Launch:
    kernel: str
    arguments: dict[str, Any]
    constants: tuple[mx.array, ...]


def prepare(
    spec: KernelSpec,
    arrays: tuple[mx.array, ...],
    template: tuple[tuple[str, Any], ...],
    grid: Triple,
    threadgroup: Triple,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[mx.Dtype, ...],
    init_value: float | None,
    constants: tuple[mx.array, ...],
) -> Any:
    """The compiled launch; a compile error raises here."""
    results = {"output_shapes": list(shapes), "output_dtypes": list(dtypes)}
    if 0 in grid:
        return _Launch(
            spec.name, {**results, "init_value": 0 if init_value is None else init_value}, ()
        )
    kernel = compiled(
        spec, (*arrays, *constants), template, grid, threadgroup, shapes, dtypes, architecture()
    )
    arguments = {
        **results,
        "name": kernel.name,
        "compiled_source": kernel.cubin,
        "scalars": list(kernel.numbers),
        "grid": kernel.geometry.grid,
        "threadgroup": kernel.geometry.block,
        "init_value": init_value,
        "ensure_row_contiguous": kernel.needs_contiguous,
        # The GPU's default stream at the launch, which `mx.stream` sets.
        "stream": mx.gpu,
    }
    return _Launch(spec.full_name, arguments, constants)


def launch(prepared: Any, arrays: tuple[mx.array, ...]) -> Any:
    """One lazy launch; an array, or a tuple of several outputs."""
    outputs = _launch(prepared, arrays)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def has_node(prepared: Any) -> bool:
    """Whether anything is launched: a grid without threads has no node that takes transforms."""
    return "compiled_source" in prepared.arguments


def launch_traced(prepared: Any, arrays: tuple[mx.array, ...], record: Record | None) -> Any:
    """As `launch`, with a node that answers transforms by the record: MLX's own has no answers."""
    return cpu.core().with_record(prepared.kernel, _launch(prepared, arrays), len(arrays), record)


def _launch(prepared: Any, arrays: tuple[mx.array, ...]) -> list[mx.array]:
    arguments, inputs = prepared.arguments, [*arrays, *prepared.constants]
    if has_node(prepared):
        return mx.fast.precompiled_cuda_kernel(inputs=inputs, **arguments)
    # A grid without threads.
    return [
        mx.full(shape, arguments["init_value"], dtype=dtype)
        for shape, dtype in zip(arguments["output_shapes"], arguments["output_dtypes"], strict=True)
    ]
