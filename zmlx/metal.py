"""Kernels from Metal source: `kernel(...)` is to zmlx what `mx.fast.metal_kernel` is to MLX, and
runs on every target.

    >>> double = zmlx.metal.kernel(
    ...     name="double", input_names=["x"], output_names=["y"],
    ...     source="uint i = thread_position_in_grid.x; y[i] = x[i] + x[i];")
    >>> double(mx.array([1.0, 2.0]))
    array([2, 4], dtype=float32)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache, partial
from math import prod
from threading import Lock
from typing import Any

import mlx.core as mx

from . import launch
from .arguments import IDENTIFIER, check_flag, check_names, dtype_name, python_number
from .expr.parse import METAL_WORDS
from .requests import (
    Template,
    Triple,
    check_launch,
    key_of,
    names_in_order,
    shapes_of,
    template_of,
    triple,
)
from .targets import cpu, cuda, metal
from .transforms import Record, Reference, Rule, custom_function, is_strict

_MATH_MODES = ("safe", "relaxed", "fast")
_LAUNCHES_KEPT = 256
_NUMBERS = (float, int, bool)
_SURROGATE = re.compile("[\ud800-\udfff]")  # which no compiler can read


@dataclass(frozen=True)
class KernelSpec:
    """Everything that determines a kernel's text.

    `body` is the source of `mx.fast.metal_kernel`: the inside of the kernel function; `header` goes
    before it. Two specifications with the same fields are the same kernel.
    """

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    body: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False
    math_mode: str = "safe"

    def __post_init__(self) -> None:
        def bad(argument: str, must: str, got: Any) -> ValueError:
            return ValueError(f"[kernel] '{argument}' must {must} but got {got!a}.")

        # MLX puts a word before it, so that it may begin with a digit.
        name = self.name
        if not isinstance(name, str) or not name or not IDENTIFIER.fullmatch(f"_{name}"):
            raise bad("name", "be an identifier", name)
        for argument in ("input_names", "output_names"):
            for name in check_names("kernel", argument, getattr(self, argument)):
                if name in METAL_WORDS:
                    raise bad(argument, "not be words of Metal", name)
        if set(self.input_names) & set(self.output_names):
            names = self.input_names + self.output_names
            raise bad("output_names", "not repeat a name", list(names))
        if not self.output_names:
            raise bad("output_names", "name at least one output", [])
        for argument, text in (("source", self.body), ("header", self.header)):
            if not isinstance(text, str):
                raise bad(argument, "be a str", text)
            if (half := _SURROGATE.search(text)) is not None:
                raise bad(argument, "hold no surrogates", half.group())
        if not self.body.strip():
            raise bad("source", "not be empty", self.body)
        if self.math_mode not in _MATH_MODES:
            raise bad("math_mode", f"be one of {', '.join(_MATH_MODES)}", self.math_mode)

    def canonical(self) -> str:
        """The specification as one line of JSON with sorted keys: what is hashed."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @cached_property
    def full_name(self) -> str:
        """The name with the first 12 hex digits of the SHA-256 of the canonical specification."""
        digest = hashlib.sha256(self.canonical().encode()).hexdigest()
        return f"{self.name}_{digest[:12]}"

    def source(
        self,
        target: str = "metal",
        *inputs: mx.array,
        template: Any = (),
        grid: Triple = (1, 1, 1),
        threadgroup: Triple = (1, 1, 1),
        output_dtypes: Sequence[mx.Dtype] | None = None,
    ) -> str:
        """The complete text that runs on `target` ("metal", "cuda" or "cpu") for a launch on
        `inputs` (one-dimensional float32 arrays unless given)."""
        if target not in ("metal", "cuda", "cpu"):
            raise ValueError(f"[source] 'target' must be metal, cuda or cpu but got {target!r}.")
        arrays = inputs or tuple(mx.zeros((1024,)) for _ in self.input_names)
        grid = triple(self.name, "grid", grid)
        threadgroup = triple(self.name, "threadgroup", threadgroup)
        dtypes = tuple(output_dtypes or [mx.float32] * len(self.output_names))
        shapes = ((1024,),) * len(self.output_names)
        call = (arrays, template_of(self.name, template), grid, threadgroup, shapes, dtypes)
        return metal.text(self, *call) if target == "metal" else cpu.text(self, target, *call)


@lru_cache(maxsize=1024)
def _scalar(kind: str, text: str) -> mx.array:
    if kind == "bool":
        return mx.array(text == "True", dtype=mx.bool_)
    if kind == "int":
        value = int(text)
        return mx.array(value, dtype=mx.int32 if -(2**31) <= value < 2**31 else mx.int64)
    return mx.array(float(text), dtype=mx.float32)


#: Numbers of one type in each, since 1 and 1.0 are the same key.
_floats: dict[Any, mx.array] = {}
_integers: dict[Any, mx.array] = {}


def _kept(known: dict[Any, mx.array], value: float, dtype: mx.Dtype) -> mx.array:
    found = known.get(value)
    if found is None:
        if len(known) >= 1024:
            known.clear()
        found = known[value] = mx.array(value, dtype=dtype)
    return found


def scalar(value: Any) -> mx.array:
    """A 0-d array of a number of Python or NumPy: bool, int32 (int64 beyond), or float32.

    It is cached, since a new array costs more than the launch. Zeros and NaN go by their text,
    because as keys 0.0 equals -0.0 and NaN nothing.
    """
    if isinstance(value, mx.array):
        return value
    if type(value) is float and value != 0.0 and value == value:
        return _kept(_floats, value, mx.float32)
    if type(value) is int and -(2**31) <= value < 2**31:
        return _kept(_integers, value, mx.int32)
    number = python_number(value)
    if number is None or (isinstance(number, int) and not -(2**63) <= number < 2**63):
        raise ValueError(f"[zmlx] 'value' must be a number of 64 bits but got {value!r}.")
    return _scalar(type(number).__name__, repr(number))


class MetalKernel:
    """A kernel that runs on the current target. Made by `kernel(...)`."""

    def __init__(
        self, spec: KernelSpec, vjp: Rule | None = None, reference: Reference | None = None
    ) -> None:
        self.spec = spec
        self.vjp = vjp
        self.reference = reference
        self._launches: OrderedDict[Any, Any] = OrderedDict()
        # Those of the CPU again, by a call's arguments as they are given.
        self._calls: dict[Any, dict[bytes, Any]] = {}
        self._count = 0

    def __repr__(self) -> str:
        inputs, outputs = ", ".join(self.spec.input_names), ", ".join(self.spec.output_names)
        return f"MetalKernel({self.spec.full_name}: {inputs} -> {outputs})"

    def __deepcopy__(self, memo: Any) -> MetalKernel:
        """Itself, since nothing of a kernel changes: a model that holds one can be copied."""
        return self

    def __reduce__(self) -> Any:
        """What a kernel has prepared stays in its process."""
        return type(self), (self.spec, self.vjp, self.reference)

    @property
    def statistics(self) -> dict[str, int]:
        """Calls, and launch configurations (shapes, dtypes, template, geometry) still cached."""
        return {"calls": self._count, "configurations": len(self._launches)}

    def __call__(
        self,
        *inputs: Any,
        template: Any = (),
        grid: int | Sequence[int] | None = None,
        threadgroup: int | Sequence[int] | None = None,
        output_shapes: Sequence[Sequence[int]] | None = None,
        output_dtypes: Sequence[mx.Dtype] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
    ) -> Any:
        """Launches the kernel; one output comes back as an array, several as a tuple.

        Args:
            inputs: arrays, or Python numbers that become 0-d arrays.
            template: names to dtypes, ints or bools.
            grid: threads per dimension. Default: one thread per element of the first output.
            threadgroup: threads per group. Default: 256 threads along x (less for small grids).
            output_shapes: default: the shape of the first input for every output.
            output_dtypes: default: the dtype of the first input for every output.
            init_value: what every output is filled with before the launch, as a float32: one of
                integers only takes an integer that a float32 holds exactly.
            verbose: print the complete Metal text.
        """
        calls = key = None
        if not verbose and (settings := launch.settings()).target == "cpu":
            calls = self._calls.setdefault(settings, {})
            given = tuple([scalar(x) if x.__class__ in _NUMBERS else x for x in inputs])
            pairs = tuple(template.items()) if template.__class__ is dict else template
            options = (pairs, grid, threadgroup, output_shapes, output_dtypes, init_value)
            key = cpu.known(calls, given, options)
            if key is not None and key.__class__ is not bytes:
                self._count += 1
                return cpu.launch(key, given)
        arrays, configuration = self._looked_at(
            inputs, template, grid, threadgroup, output_shapes, output_dtypes, init_value
        )
        if verbose:
            template, dtypes = configuration[0], configuration[4]
            print(self.spec.source("metal", *arrays, template=template, output_dtypes=dtypes))
        return self._launch(arrays, configuration, calls, key)

    def _looked_at(
        self,
        inputs: tuple[Any, ...],
        template: Any,
        grid: Any,
        threadgroup: Any,
        output_shapes: Any,
        output_dtypes: Any,
        init_value: Any,
    ) -> tuple[tuple[mx.array, ...], tuple[Any, ...]]:
        """The arrays of a call and what it asks for, in its final form or refused."""
        spec = self.spec
        if len(inputs) != len(spec.input_names):
            raise ValueError(
                f"[{spec.name}] 'inputs' must be {len(spec.input_names)} arrays "
                f"({', '.join(spec.input_names)}) but got {len(inputs)}."
            )
        for name, x in zip(spec.input_names, inputs, strict=True):
            if not isinstance(x, mx.array) and python_number(x) is None:
                raise TypeError(
                    f"[{spec.name}] '{name}' must be an array or a number but got "
                    f"{type(x).__name__}."
                )
        arrays = tuple(scalar(x) for x in inputs)
        if output_shapes is None or output_dtypes is None:
            if not arrays:
                raise ValueError(
                    f"[{spec.name}] 'output_shapes' and 'output_dtypes' must be given for a kernel "
                    "without inputs but got None."
                )
            if output_shapes is None:
                output_shapes = [arrays[0].shape] * len(spec.output_names)
            if output_dtypes is None:
                output_dtypes = [arrays[0].dtype] * len(spec.output_names)
        for argument, values in (
            ("output_shapes", output_shapes),
            ("output_dtypes", output_dtypes),
        ):
            if not isinstance(values, Sequence) or isinstance(values, str):
                raise TypeError(
                    f"[{spec.name}] '{argument}' must be a sequence with one entry per output but "
                    f"got {values!r}."
                )
            if len(values) != len(spec.output_names):
                raise ValueError(
                    f"[{spec.name}] '{argument}' must have {len(spec.output_names)} entries but "
                    f"got {len(values)}."
                )
        shapes = shapes_of(spec.name, output_shapes)
        if grid is None:
            grid = prod(shapes[0])
        grid3 = triple(spec.name, "grid", grid)
        group3 = triple(
            spec.name, "threadgroup", (256, 1, 1) if threadgroup is None else threadgroup
        )
        if not 1 <= group3[0] * group3[1] * group3[2] <= 1024:
            raise ValueError(
                f"[{spec.name}] 'threadgroup' must have 1 to 1024 threads but got {group3}."
            )
        return arrays, (
            template_of(spec.name, template),
            grid3,
            group3,
            shapes,
            tuple(output_dtypes),
            init_value,
        )

    def _launch(
        self,
        arrays: tuple[mx.array, ...],
        configuration: tuple[Any, ...],
        calls: dict[bytes, Any] | None,
        asked: bytes | None,
    ) -> Any:
        self._count += 1
        settings = launch.settings()
        shapes, dtypes = configuration[3:5]
        reference = None
        if self.reference is not None:
            reference = partial(_outputs, self.spec, self.reference, shapes, dtypes)
            dynamic = cpu.any_shape(arrays)
            if dynamic or settings.target == "reference":
                shapes = None if dynamic else shapes
                outputs = _outputs(self.spec, self.reference, shapes, dtypes, *arrays)
                return outputs[0] if len(outputs) == 1 else outputs
        key = (
            settings,
            tuple((x.shape, x.dtype) for x in arrays),
            key_of(configuration[0], configuration[5]),
            configuration[1:5],
        )
        prepared = self._launches.get(key)
        if prepared is None:
            check_launch(self.spec, arrays, *configuration)
            prepared = prepare(self.spec, settings.target, arrays, *configuration)
            self._launches[key] = prepared
            while len(self._launches) > _LAUNCHES_KEPT:
                self._launches.popitem(last=False)
                self._calls.clear()
        if calls is not None and asked is not None:
            if len(calls) >= launch.SHAPES_KEPT:
                calls.clear()
            calls[asked] = prepared
        return call(self.spec.name, settings.target, prepared, arrays, reference, self.vjp)


def _outputs(
    spec: KernelSpec,
    reference: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...] | None,
    dtypes: tuple[mx.Dtype, ...],
    *arrays: mx.array,
) -> tuple[mx.array, ...]:
    """What `reference` gives on `arrays`, or an error where the kernel's outputs are others; the
    shapes are None where they are not known yet."""
    # Copies: what it changes in place may be the caller's, or a number that is kept for all calls.
    given = reference(*map(mx.array, arrays))
    outputs = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    for y in outputs:
        if not isinstance(y, mx.array):
            raise TypeError(
                f"[{spec.name}] the reference must return an mx.array for each output but got "
                f"{type(y).__name__}."
            )
    if len(outputs) != len(dtypes):
        raise ValueError(
            f"[{spec.name}] the reference must return {len(dtypes)} outputs but got {len(outputs)}."
        )
    wanted = shapes or [y.shape for y in outputs]
    for name, y, shape, dtype in zip(spec.output_names, outputs, wanted, dtypes, strict=True):
        if y.dtype != dtype or tuple(y.shape) != tuple(shape):
            raise ValueError(
                f"[{spec.name}] the reference must return {dtype_name(dtype)} {tuple(shape)} for "
                f"'{name}' but got {dtype_name(y.dtype)} {tuple(y.shape)}."
            )
    return outputs


def prepare(
    spec: KernelSpec,
    target: str | None,
    arrays: tuple[mx.array, ...],
    template: Template,
    grid: Triple,
    threadgroup: Triple,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[mx.Dtype, ...],
    init_value: float | None = None,
    constants: tuple[mx.array, ...] = (),
    donate: tuple[tuple[int, int], ...] = (),
    paced: bool = False,
) -> Any:
    """A launch of `spec` on `target`, compiled and ready for any arrays of these shapes and
    dtypes; `constants` are passed after the arrays at every launch, and on the CPU an output may
    take the memory of an input that it is paired with in `donate`. `paced` is for kernels of a
    loop over blocks: on the CPU its memory is only asked for when all before it is done, so that
    no more than a block's is in use."""
    where = {"metal": metal, "cuda": cuda, "cpu": cpu}.get(target or "")
    if where is None:
        raise RuntimeError(
            f"[{spec.name}] the target must run kernels but got {target}: a kernel without a "
            "reference in plain MLX cannot run there."
        )
    if where is not cpu and (reason := where.unavailable()):
        raise RuntimeError(f"[{spec.name}] {reason}.")
    some = {"donate": donate, "paced": paced} if where is cpu else {}
    return where.prepare(
        spec, arrays, template, grid, threadgroup, shapes, dtypes, init_value, constants, **some
    )


def call(
    name: str,
    target: str | None,
    prepared: Any,
    arrays: tuple[mx.array, ...],
    reference: Reference | None,
    rule: Rule | None,
) -> Any:
    """Launches what `prepare` made, so that every transform finds what it needs."""
    where = {"metal": metal, "cuda": cuda, "cpu": cpu}[target or ""]
    if not cpu.maybe_tracing(arrays):
        return where.launch(prepared, arrays)
    if where is metal or is_strict() or (where is cuda and not cuda.has_node(prepared)):

        def raw(*inputs: mx.array) -> Any:
            return where.launch(prepared, inputs)

        return custom_function(name, raw, rule, reference)(*arrays)
    record = None
    if reference is not None or rule is not None:
        record = Record(name, reference or _no_reference(name), rule)
    return where.launch_traced(prepared, arrays, record)


def _no_reference(name: str) -> Reference:
    def reference(*inputs: mx.array) -> Any:
        raise ValueError(f"[{name}] has no 'reference' in plain MLX, which this transform needs.")

    return reference


_kernels: dict[KernelSpec, MetalKernel] = {}
_lock = Lock()


def kernel(
    *,
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    math_mode: str = "safe",
    vjp: Rule | None = None,
    reference: Reference | None = None,
) -> MetalKernel:
    """A kernel from Metal source; the same specification gives the same object.

    Args:
        name: a readable prefix; the kernel's full name adds a hash of the specification.
        input_names, output_names: parameters of the kernel function, in this order.
        source: the inside of the kernel function, as for `mx.fast.metal_kernel`.
        header: helper functions before it.
        ensure_row_contiguous: copy inputs that are not row-contiguous before the launch.
        atomic_outputs: outputs are `device atomic<T>*`.
        math_mode: "safe", "relaxed" or "fast", for Metal's compiler.
        vjp: `vjp(primals, cotangents, outputs, wanted)`, see `zmlx.transforms`. A kernel with its
            own vjp or reference is not shared.
        reference: the same function in plain MLX, which `vmap`, `jvp` and second-order gradients
            use, a shapeless compile, and the target "reference"; it returns the output, or a tuple
            of several. There its own derivative counts, not `vjp`: they must be the same.
    """
    for argument, function in (("vjp", vjp), ("reference", reference)):
        if function is not None and not callable(function):
            raise TypeError(
                f"[kernel] '{argument}' must be a function but got {type(function).__name__}."
            )
    spec = KernelSpec(
        name,
        names_in_order("kernel", "input_names", input_names),
        names_in_order("kernel", "output_names", output_names),
        source,
        header,
        check_flag("kernel", "ensure_row_contiguous", ensure_row_contiguous),
        check_flag("kernel", "atomic_outputs", atomic_outputs),
        math_mode,
    )
    if vjp is not None or reference is not None:
        return MetalKernel(spec, vjp, reference)
    with _lock:
        if spec not in _kernels:
            _kernels[spec] = MetalKernel(spec)
        return _kernels[spec]


def statistics() -> dict[str, int]:
    """What the CPU target did in this process: compiles, cache hits, launches, inputs that had to
    be made contiguous."""
    return cpu.statistics()
