"""The result of compiling a function, and the decorator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property
from numbers import Number
from typing import TYPE_CHECKING, Any, overload

from ..arguments import check_integer
from . import emit
from .frontend import Frontend
from .ir import Program

if TYPE_CHECKING:
    import mlx.core as mx


class JitFunction:
    """A scalar Python function as Metal.

    Attributes:
        name: the Python name.
        function: the Python function.
        inputs: names and types (float, int, bool) of the inputs, as the Metal text spells them.
        outputs: names and types of the outputs: `out`, or `out0`, `out1`, ….
        value: the Metal function, `value.call(inputs…)`, with what it needs in `value.header`.
        derivative: the same with the derivative of every float output y in every float input x,
            `y_d_x`, after the outputs. Without a float input or output it is `value`.
    """

    def __init__(self, function: Callable[..., Any], program: Program) -> None:
        self.function = function
        self.__name__ = self.name = program.name
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self.__qualname__ = function.__qualname__
        self.program = program
        self.inputs = program.inputs
        self.outputs = program.outputs
        self.value = emit.value_text(program)
        floats = "float" in self.inputs.values() and "float" in self.outputs.values()
        self.derivative = emit.derivative_text(program) if floats else self.value

    def __reduce__(self) -> str:
        """The name under which its module has it, as for any function."""
        return self.__qualname__

    def __repr__(self) -> str:
        inputs = ", ".join(f"{n}: {t}" for n, t in self.inputs.items())
        return f"jit {self.name}({inputs}) -> ({', '.join(self.outputs.values())})"

    @property
    def header(self) -> str:
        """The Metal functions that `source` needs."""
        return self.value.header

    @property
    def source(self) -> str:
        """Metal statements that define the outputs from variables named as the inputs."""
        return statements(self.value, self.inputs)

    @property
    def derivative_source(self) -> str:
        """Metal statements that define outputs and derivatives; needs `derivative.header`."""
        return statements(self.derivative, self.inputs)

    def trace_reference(self, *arrays: mx.array) -> tuple[mx.array, ...]:
        """The outputs in plain MLX ops; see `zmlx.jit_compiler.reference`."""
        from .reference import trace

        return trace(self.program, arrays)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The Python function on numbers; on arrays, which broadcast, one kernel.

        A float argument takes float32, float16 or bfloat16, an int one int32, a bool one bool. A
        float result has the promoted dtype of the float arguments that are arrays, or float32
        without any. Gradients by forward mode.
        """
        given = (*arguments, *named.values())
        if all(isinstance(a, Number) and not hasattr(a, "dtype") for a in given):
            return self.function(*arguments, **named)
        if named:
            try:
                bound = inspect.signature(self.function).bind(*arguments, **named)
            except TypeError as error:
                raise TypeError(f"[{self.name}] {error}.") from None
            arguments = tuple(bound.arguments.values())
        return self._launch(*arguments)

    @cached_property
    def _launch(self) -> Callable[..., Any]:
        from .launch import Launch

        return Launch(self)


def statements(text: emit.Text, inputs: Mapping[str, str]) -> str:
    """Metal statements that call `text` on `inputs` and define its results by name."""
    call = f"{text.call}({', '.join(inputs)})"
    if len(text.results) == 1:
        return f"const {text.type} {next(iter(text.results))} = {call};\n"
    result = "result"
    while result in inputs:
        result += "_"
    lines = [f"const {text.type} {result} = {call};\n"]
    lines += [f"const {t} {n} = {result}.{n};\n" for n, t in text.results.items()]
    return "".join(lines)


def compile_function(
    function: Callable[..., Any],
    *,
    types: Mapping[str, str] | None = None,
    bound: int | None = None,
) -> JitFunction:
    """Compiles a scalar Python function from its source.

    Args:
        function: a `def` of assignments, `if`, `for … in range(…)`, `while` and `return`, on
            numbers; see `zmlx.jit_compiler`.
        types: "float", "int" or "bool" per input; default: its annotation, or float.
        bound: the most rounds of a `while` that does not count; an element that needs more gives
            NaN (an int output -2147483648, a bool output false).

    Raises ValueError with file, line and column for anything that it does not support.
    """
    if types is not None and not isinstance(types, Mapping):
        raise TypeError(
            f"[jit] 'types' must be a dict from inputs to types but got {type(types).__name__}."
        )
    if bound is not None and not 0 < check_integer("jit", "bound", bound) < 2**31:
        raise ValueError(f"[jit] 'bound' must be positive and below 2^31 but got {bound}.")
    try:
        return JitFunction(function, Frontend(function, types or {}, bound).program())
    except RecursionError:
        code = inspect.unwrap(function).__code__
        raise ValueError(
            f"[jit] {function.__name__!r} at {code.co_filename}, line {code.co_firstlineno} is"
            " nested too deeply: assign parts of a long expression to variables."
        ) from None


@overload
def jit(function: Callable[..., Any], /) -> JitFunction: ...
@overload
def jit(*, bound: int | None = None) -> Callable[[Callable[..., Any]], JitFunction]: ...
def jit(function: Callable[..., Any] | None = None, /, *, bound: int | None = None) -> Any:
    """Decorator: compiles a scalar Python function to one elementwise Metal kernel.

    See `compile_function` for `bound` and for what it raises.
    """
    if function is None:
        return lambda f: compile_function(f, bound=bound)
    return compile_function(function, bound=bound)
