"""Launches that every MLX transform can take.

On the CPU and on CUDA the launched primitive answers the transforms itself: its vjp is the kernel's
rule, and its jvp, vmap and missing rules are those of the reference in plain MLX. On Metal the
launch is MLX's CustomKernel, which knows no transform, so that a rule is attached with
`mx.custom_function`.
`strict()` makes the others take Metal's route, so that tests can tell what it cannot do.

A rule takes (primals, cotangents, outputs, wanted): the kernel's inputs, one cotangent per output,
the outputs, and the indices of the inputs whose gradient is asked for. It returns one entry per
input, or the bare entry of a single one: an array of that input's shape and dtype, or None for an
input that was not asked for or has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx

from .arguments import dtype_name

Arrays = tuple[mx.array, ...]
Reference = Callable[..., Arrays]
Rule = Callable[[Arrays, Arrays, Arrays, Sequence[int]], mx.array | Sequence[mx.array | None]]

_strict: ContextVar[bool] = ContextVar("zmlx_strict", default=False)


@contextmanager
def strict() -> Iterator[None]:
    """Kernels on the CPU and on CUDA refuse what MLX's CustomKernel refuses."""
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def is_strict() -> bool:
    """Whether `strict()` is in force."""
    return _strict.get()


def complete(
    name: str,
    gradients: mx.array | Sequence[mx.array | None],
    primals: Arrays,
    wanted: Sequence[int],
) -> list[mx.array]:
    """One gradient per wanted input: checked, because MLX checks neither count nor shape nor dtype
    of what a rule returns, and zeros for None. A rule of one input may return the bare array."""
    if isinstance(gradients, mx.array):
        gradients = (gradients,)
    if not isinstance(gradients, (tuple, list)):
        raise TypeError(
            f"[{name}] the vjp rule must return a tuple of gradients but got "
            f"{type(gradients).__name__}."
        )
    if len(gradients) != len(primals):
        raise ValueError(
            f"[{name}] the vjp rule must return {len(primals)} gradients but got {len(gradients)}."
        )
    done = []
    for i in wanted:
        gradient, primal = gradients[i], primals[i]
        if gradient is None:
            gradient = mx.zeros_like(primal)
        if not isinstance(gradient, mx.array):
            raise TypeError(
                f"[{name}] the vjp rule must return an mx.array or None for input {i} but got "
                f"{type(gradient).__name__}."
            )
        if gradient.shape != primal.shape or gradient.dtype != primal.dtype:
            raise ValueError(
                f"[{name}] the vjp rule must return {dtype_name(primal.dtype)} {primal.shape} for "
                f"input {i} but got {dtype_name(gradient.dtype)} {gradient.shape}."
            )
        done.append(gradient)
    return done


def refuses_any_shape(op: str, remedy: str = "compile with shapes") -> Callable[..., Any]:
    """What a shapeless compile finds of an op whose results have a shape that MLX cannot infer."""

    def refuse(*inputs: mx.array) -> Any:
        raise ValueError(f"[{op}] cannot infer output shapes in a shapeless compile; {remedy}.")

    return refuse


def mapped(
    function: Callable[..., Sequence[mx.array]],
    inputs: Sequence[mx.array],
    axes: Sequence[int | None],
) -> Sequence[mx.array]:
    """Outputs of `function` mapped over axis 0, of inputs that are mapped over `axes`."""
    empty = any(a is not None and x.shape[a] == 0 for x, a in zip(inputs, axes, strict=True))
    if empty:
        # Some of MLX's ops, such as argmax, refuse what has no elements: maps one, and drops it.
        inputs = [x if a is None else _one(x, a) for x, a in zip(inputs, axes, strict=True)]
    outputs: Sequence[mx.array] = mx.vmap(function, in_axes=tuple(axes))(*inputs)
    return [y[:0] for y in outputs] if empty else outputs


def _one(x: mx.array, axis: int) -> mx.array:
    """An array of no elements with one of zeros along `axis`."""
    shape = [*x.shape]
    shape[axis] = 1
    return mx.concatenate([x, mx.zeros(shape, x.dtype)], axis=axis)


_PACKAGE = Path(__file__).parent


def _raise_again(error: Exception) -> NoReturn:
    """Raises `error`, with where the user's own function raised it: MLX's binding, which it passes,
    keeps the text and the nearest of its types, and no traceback."""
    place, entry = "", error.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        if _PACKAGE not in Path(code.co_filename).parents:
            place = f"{code.co_filename}, line {entry.tb_lineno}, in {code.co_name}"
        entry = entry.tb_next
    if not place:
        raise error
    kinds: tuple[type[Exception], ...] = (ValueError, IndexError)
    kind = next((k for k in kinds if isinstance(error, k)), RuntimeError)
    text = str(error)
    if kind is RuntimeError and type(error) is not RuntimeError:
        text = f"{type(error).__name__}: {text}"
    raise kind(f"{text} ({place})") from error


class Record:
    """What a primitive of the core asks when a transform reaches it."""

    __slots__ = ("name", "reference", "rule")

    def __init__(self, name: str, reference: Reference, rule: Rule | None) -> None:
        self.name = name
        self.reference = reference
        self.rule = rule

    def vjp(
        self, primals: Arrays, cotangents: Arrays, argnums: Sequence[int], outputs: Arrays
    ) -> Sequence[mx.array]:
        """Gradients of the wanted inputs."""
        rule = self.rule or derived_rule(self.reference)
        try:
            gradients = rule(primals, cotangents, outputs, argnums)
            return complete(self.name, gradients, primals, argnums)
        except Exception as error:
            _raise_again(error)

    def jvp(self, primals: Arrays, tangents: Arrays, argnums: Sequence[int]) -> Sequence[mx.array]:
        """Tangents of the outputs."""
        some = [primals[i] for i in argnums]
        try:
            return mx.jvp(_of(self.reference, primals, argnums), some, list(tangents))[1]
        except Exception as error:
            _raise_again(error)

    def vmap(self, inputs: Arrays, axes: Sequence[int]) -> tuple[Arrays, tuple[int, ...]]:
        """Outputs mapped over axis 0."""
        in_axes = [None if a < 0 else a for a in axes]
        try:
            outputs = mapped(lambda *xs: list(self.reference(*xs)), inputs, in_axes)
        except Exception as error:
            _raise_again(error)
        return tuple(outputs), (0,) * len(outputs)


def _of(
    reference: Reference, primals: Arrays, argnums: Sequence[int]
) -> Callable[..., list[mx.array]]:
    """`reference` as a function of some of its inputs."""

    def function(*some: mx.array) -> list[mx.array]:
        full = list(primals)
        for i, value in zip(argnums, some, strict=True):
            full[i] = value
        return list(reference(*full))

    return function


def derived_rule(reference: Reference) -> Rule:
    """The rule that MLX derives from the reference."""

    def rule(
        primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> list[mx.array | None]:
        # Some of MLX's ops, such as a gather, refuse to be asked for the gradient of integers.
        some = [i for i in wanted if mx.issubdtype(primals[i].dtype, mx.inexact)]
        gradients: list[mx.array | None] = [None] * len(primals)
        found = (
            mx.vjp(_of(reference, primals, some), [primals[i] for i in some], list(cotangents))[1]
            if some
            else []
        )
        for i, gradient in zip(some, found, strict=True):
            gradients[i] = gradient
        return gradients

    return rule


def custom_function(
    name: str, launch: Callable[..., Any], rule: Rule | None, reference: Reference | None = None
) -> Callable[..., Any]:
    """`launch` with `rule`, or the one that the reference gives, attached the way MLX offers to
    everyone; without either, `launch`."""
    if rule is None:
        if reference is None:
            return launch
        rule = derived_rule(reference)
    return _with_rule(name, launch, rule)


def _with_rule(name: str, function: Callable[..., Any], rule: Rule) -> mx.custom_function:
    wrapped = mx.custom_function(function)

    @wrapped.vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        one = isinstance(primals, mx.array)
        primals, cotangents, outputs = map(_several, (primals, cotangents, outputs))
        gradients = _all_gradients(name, rule, primals, cotangents, outputs)
        return gradients[0] if one else gradients

    return wrapped


def declared(name: str, reference: Reference, rule: Rule) -> Reference:
    """`reference` with the derivatives that `rule` gives, under whatever transform reaches it.

    MLX's custom functions lose their rule when they are mapped, unless what maps them returns
    another custom function. Forward mode transposes the rule, which is a gradient's: the rule's own
    gradient in the cotangents, at 0. A shapeless trace has no custom functions.
    """
    wrapped = _with_rule(name, lambda *arrays: tuple(reference(*arrays)), rule)

    @wrapped.jvp
    def _(primals: Any, tangents: Any) -> Any:
        primals, tangents = _several(primals), _several(tangents)
        outputs = tuple(reference(*primals))
        moved = [i for i, t in enumerate(tangents) if t is not None]

        def gradients(*cotangents: mx.array) -> list[mx.array]:
            found = _all_gradients(name, rule, primals, cotangents, outputs)
            return [found[i] for i in moved]

        zeros = [mx.zeros_like(y) for y in outputs]
        return mx.vjp(gradients, zeros, [tangents[i] for i in moved])[1]

    @wrapped.vmap
    def _(inputs: Any, axes: Any) -> Any:
        inputs, axes = _several(inputs), _several(axes)
        outputs = declared(name, *_mapped(name, reference, rule, axes))(*inputs)
        return list(outputs), [0] * len(outputs)

    def function(*inputs: mx.array) -> Arrays:
        return _several(wrapped(*inputs))

    return function


def _mapped(
    name: str, reference: Reference, rule: Rule, axes: Sequence[int | None]
) -> tuple[Reference, Rule]:
    """A reference and its rule, mapped over these axes of the inputs, and 0 of the outputs."""

    def of_all(*inputs: mx.array) -> Arrays:
        return tuple(mapped(lambda *xs: list(reference(*xs)), inputs, axes))

    def rule_of_all(
        primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Sequence[int]
    ) -> list[mx.array]:
        n, m = len(primals), len(outputs)

        def gradients(*arrays: mx.array) -> list[mx.array]:
            xs, dys, ys = arrays[:n], arrays[n : n + m], arrays[n + m :]
            return list(_all_gradients(name, rule, xs, dys, ys))

        arrays = (*primals, *cotangents, *outputs)
        found = mapped(gradients, arrays, (*axes, *(0,) * (2 * m)))
        return [
            g.sum(axis=0) if a is None else mx.moveaxis(g, 0, a)
            for g, a in zip(found, axes, strict=True)
        ]

    return of_all, rule_of_all


def _several(x: Any) -> tuple[Any, ...]:
    """What MLX passes bare where there is only one, as a tuple."""
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _all_gradients(
    name: str, rule: Rule, primals: Arrays, cotangents: Arrays, outputs: Arrays
) -> Arrays:
    """The checked gradients of every input: zeros of one that has none, being of integers."""
    wanted = [i for i, x in enumerate(primals) if mx.issubdtype(x.dtype, mx.inexact)]
    found = complete(name, rule(primals, cotangents, outputs, wanted), primals, wanted)
    gradients = dict(zip(wanted, found, strict=True))
    return tuple(gradients[i] if i in gradients else mx.zeros_like(x)
                 for i, x in enumerate(primals))  # fmt: skip
