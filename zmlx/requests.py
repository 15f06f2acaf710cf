"""What a call of a kernel asks for, in its final form or refused: template, grid, threadgroup,
shapes, dtypes and the value before the launch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from math import copysign, inf, prod
from operator import index
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .arguments import check_names, dtype_name, float32, python_number
from .expr.parse import METAL_WORDS

if TYPE_CHECKING:
    from .metal import KernelSpec

Triple = tuple[int, int, int]
Template = tuple[tuple[str, Any], ...]

#: The largest size that MLX holds.
_MOST = 2**31 - 1


def names_in_order(op: str, argument: str, names: Any) -> tuple[str, ...]:
    """`names` as `check_names` takes them, unless they are a set, which has no order, or a dict,
    whose values would be lost."""
    if isinstance(names, (AbstractSet, Mapping)):
        raise TypeError(f"[{op}] '{argument}' must be a sequence of names but got {names!a}.")
    return check_names(op, argument, names)


def template_of(op: str, template: Any) -> Template:
    """Pairs of name and value, from a dict or from pairs; NumPy's numbers become Python's."""
    try:
        items = [(n, v) for n, v in (template.items() if isinstance(template, dict) else template)]
    except (TypeError, ValueError):
        raise TypeError(
            f"[{op}] 'template' must be a dict or pairs of name and value but got {template!r}."
        ) from None
    checked = []
    for name, value in items:
        number = value if isinstance(value, mx.Dtype) else python_number(value)
        if not isinstance(number, (bool, int, mx.Dtype)):
            raise TypeError(
                f"[{op}] 'template' must hold dtypes, ints and bools but got {name}={value!r}."
            )
        checked.append((name, number))
    return tuple(checked)


_NEITHER: Any = ((), (), None)


def key_of(template: Template, init_value: Any) -> Any:
    """Both as a key: 1 and True are equal, and 0.0 and -0.0, but not as arguments of a kernel."""
    if init_value is None and not template:
        return _NEITHER
    kinds = tuple([value.__class__ for _, value in template])
    if init_value is None:
        return template, kinds, None
    if init_value.__class__ is float and init_value == init_value:
        return template, kinds, (float, init_value, copysign(1.0, init_value))
    number = python_number(init_value)
    return template, kinds, init_value if number is None else (number.__class__, repr(number))


def triple(op: str, argument: str, value: Any) -> Triple:
    """A size or up to three as three, 1 where none is given."""
    some = tuple(value) if isinstance(value, Iterable) else (value,)
    try:
        sizes = tuple(map(index, some)) + (1,) * (3 - len(some))
    except TypeError:
        sizes = ()
    if len(sizes) != 3 or min(sizes) < 0 or not some:
        raise ValueError(f"[{op}] '{argument}' must be up to three sizes ≥ 0 but got {value!r}.")
    _check_sizes(op, argument, sizes)
    return sizes


def _check_sizes(op: str, argument: str, sizes: Iterable[int]) -> None:
    for size in sizes:
        if size > _MOST:
            raise ValueError(f"[{op}] '{argument}' must have sizes below 2^31 but got {size}.")


def shapes_of(op: str, values: Any) -> tuple[tuple[int, ...], ...]:
    """Output shapes as tuples of ints."""
    try:
        shapes = tuple(tuple(map(index, shape)) for shape in values)
    except TypeError:
        shapes = ((-1,),)
    if any(n < 0 for shape in shapes for n in shape):
        raise ValueError(
            f"[{op}] 'output_shapes' must be a sequence of shapes of sizes ≥ 0 but got {values!r}."
        )
    for shape in shapes:
        _check_sizes(op, "output_shapes", shape)
    return shapes


def check_launch(
    spec: KernelSpec,
    arrays: tuple[mx.array, ...],
    template: Template,
    grid: Triple,
    threadgroup: Triple,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[mx.Dtype, ...],
    init_value: float | None,
) -> None:
    """Raises for a launch that no compiler would take, or whose outputs would be left undefined."""
    names = check_names(spec.name, "template", [n for n, _ in template])
    for name in names:
        if name in METAL_WORDS or name in spec.input_names + spec.output_names:
            raise ValueError(
                f"[{spec.name}] 'template' must have names that are neither words of Metal nor "
                f"inputs or outputs but got {name!r}."
            )
    of_arrays = zip(spec.input_names, [x.dtype for x in arrays], strict=True)
    for name, dtype in (*of_arrays, *zip(spec.output_names, dtypes, strict=True)):
        if not isinstance(dtype, mx.Dtype):
            raise TypeError(
                f"[{spec.name}] 'output_dtypes' must hold dtypes of MLX but got {dtype!r}."
            )
        if dtype == mx.float64:
            raise ValueError(
                f"[{spec.name}] '{name}' must have a dtype that Metal knows but got float64."
            )
    if init_value is not None:
        _check_init_value(spec.name, init_value, dtypes)
    check_grid(spec.name, grid, shapes, init_value)


def check_grid(
    op: str, grid: Triple, shapes: tuple[tuple[int, ...], ...], init_value: float | None
) -> None:
    """Raises where no thread would write outputs that have elements."""
    if init_value is None and 0 in grid and any(prod(shape) for shape in shapes):
        raise ValueError(
            f"[{op}] 'grid' must not be empty where an output has elements, unless "
            f"'init_value' says what they are, but got {grid}."
        )


def _check_init_value(op: str, value: Any, dtypes: tuple[mx.Dtype, ...]) -> None:
    number = python_number(value)
    if number is None:
        raise TypeError(f"[{op}] 'init_value' must be a number but got {type(value).__name__}.")
    if mx.finfo(mx.float32).max < abs(number) < inf:
        raise ValueError(f"[{op}] 'init_value' must be in float32's range but got {value!r}.")
    for dtype in dtypes:
        if not mx.issubdtype(dtype, mx.integer):
            continue
        limits = mx.iinfo(dtype)
        if number != number or number % 1 or not limits.min <= number <= limits.max:
            raise ValueError(
                f"[{op}] 'init_value' must be of dtype {dtype_name(dtype)} but got {value!r}."
            )
        # It is a float in Metal, and here.
        if float32(number) != number:
            raise ValueError(
                f"[{op}] 'init_value' must be a number that a float32 holds exactly but got "
                f"{value!r}."
            )
