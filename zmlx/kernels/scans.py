"""Scans along an axis.

    cumsum     y[i] = Σ x[m], m ≤ i         cumprod    y[i] = Π x[m], m ≤ i

or over m < i (exclusive), m ≥ i (reverse), m > i.

Bytes: x is read and y written once, along any axis; where there are only a few long rows, x is read
twice, since parts of a row go on from the totals of those before. The gradient of a cumsum is the
cumsum of dy in the other direction. That of a cumprod is

    dx[k] = Π x[m] (m before k) · S[k],    S[k] = Σ dy[i] · Π x[m] (m after k, up to i)

where S is a linear recurrence from the end. Nothing is divided by x, so that zeros are no
exception, and the work is that of two scans.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import mlx.core as mx

from ..arguments import Argument, check_flag
from ..codegen import Output, Scan
from ..launch import scan_parts, settings
from ..pattern import PatternKernel
from ..registry import COUNTS_ELEMENTS, Case, Op, Option, register
from ..remembered import Remembered, Way
from ..targets import cpu
from ..transforms import Arrays, custom_function
from .axes import NUMBERS, Plan, element, named_axes, planned
from .folds import parts_of
from .reductions import over_last


def cumsum_reference(
    x: mx.array,
    axis: int | None = -1,
    *,
    reverse: bool = False,
    inclusive: bool = True,
    xp: Any = mx,
) -> Any:
    """cumsum in plain MLX."""
    if axis is None:
        x, axis = xp.reshape(x, (-1,)), 0
    if xp is mx:
        return mx.cumsum(x, axis=axis, reverse=reverse, inclusive=inclusive)
    back: list[Any] = [slice(None)] * x.ndim
    back[axis] = slice(None, None, -1)
    x = x[tuple(back)] if reverse else x
    y = xp.cumsum(x if inclusive else _moved(x, axis, 1, False, xp.zeros_like, xp), axis=axis)
    return y[tuple(back)] if reverse else y


def cumprod_reference(
    x: mx.array,
    axis: int | None = -1,
    *,
    reverse: bool = False,
    inclusive: bool = True,
    xp: Any = mx,
) -> Any:
    """cumprod in plain MLX, whose own gradient is one for NumPy too."""
    return _by_doubling(x, axis, reverse, inclusive, lambda a, b: a * b, xp.ones_like, xp)


def _by_doubling(
    x: Any, axis: int | None, reverse: bool, inclusive: bool, merge: Any, neutral: Any, xp: Any
) -> Any:
    """Hillis & Steele 1986: at every step y[i] takes in what stands twice as far before it."""
    if axis is None:
        x, axis = xp.reshape(x, (-1,)), 0
    y, step = x if inclusive else _moved(x, axis, 1, reverse, neutral, xp), 1
    while step < x.shape[axis]:
        y, step = merge(y, _moved(y, axis, step, reverse, neutral, xp)), 2 * step
    return y


def _moved(y: Any, axis: int, by: int, reverse: bool, neutral: Any, xp: Any) -> Any:
    """y, each element `by` places later (earlier if `reverse`), and neutral ones before."""
    n = y.shape[axis]
    by = min(by, n)
    index: list[Any] = [slice(None)] * y.ndim
    index[axis] = slice(by, None) if reverse else slice(0, n - by)
    fill: list[Any] = [slice(None)] * y.ndim
    fill[axis] = slice(0, by)
    parts = (y[tuple(index)], neutral(y[tuple(fill)]))
    return xp.concatenate(parts if reverse else parts[::-1], axis=axis)


# ---- kernels ------------------------------------------------------------------------------------

_STATE = {"sum": "total", "prod": "total", "linear": "b"}


@cache
def _kernel(
    name: str, op: str, type_: str, columns: bool, reverse: bool, inclusive: bool, cut: bool,
    dtype: mx.Dtype | None,
) -> PatternKernel:  # fmt: skip
    """The scan of x in `dtype`, or that of x."""
    pattern = Scan(op, (Output("y", "total"),), type_, columns, reverse, not inclusive, cut=cut)
    axis = -2 if columns else -1

    def reference(x: mx.array, *states: mx.array) -> Arrays:
        # MLX's cumprod has no jvp, and its gradient none where x is 0.
        plain = cumsum_reference if op == "sum" else cumprod_reference
        wide = x.astype(mx.float32) if type_ == "float" else x
        return (plain(wide, axis, reverse=reverse, inclusive=inclusive),)

    rule = ("x",) if dtype is None else dtype
    return PatternKernel(f"{name}/scan", pattern, (rule,), reference=reference)


def _scanning(
    name: str, op: str, type_: str, p: Plan, reverse: bool, inclusive: bool,
    dtype: mx.Dtype | None = None,
) -> Callable[[mx.array], mx.array]:  # fmt: skip
    """How arrays of any shape, computed in `type_`, are scanned over the axes of the plan."""
    cut = scan_parts(p.view, p.columns)[0] > 1
    kernel = _kernel(name, op, type_, p.columns, reverse, inclusive, cut, dtype)
    if not cut:
        return lambda x: kernel(p.seen(x)).reshape(x.shape)
    parts = parts_of(name, op, type_, p.columns, True)

    def run(x: mx.array) -> mx.array:
        seen = p.seen(x)
        return kernel(seen, parts(seen)).reshape(x.shape)  # type: ignore[no-any-return]

    return run


@cache
def _slope(columns: bool, reverse: bool, inclusive: bool) -> PatternKernel:
    """dx of a cumprod from x, dy and the exclusive product, by the recurrence h = a·h + b, which
    runs against the cumprod."""
    pattern = Scan(
        "linear",
        (Output("dx", "before * (dy + b)" if inclusive else "before * b"),),
        "float",
        columns,
        not reverse,
        True,
        others=("dy", "before"),
        lift=("x", "x * dy" if inclusive else "dy"),
    )
    axis = -2 if columns else -1

    def reference(x: mx.array, dy: mx.array, before: mx.array) -> Arrays:
        def forward(x: mx.array) -> mx.array:
            wide = x.astype(mx.float32)
            return cumprod_reference(wide, axis, reverse=reverse, inclusive=inclusive)  # type: ignore[no-any-return]

        return (mx.vjp(forward, [x], [dy.astype(mx.float32)])[1][0],)

    return PatternKernel("cumprod/dx", pattern, (("x",),), reference=reference)


# ---- ops ----------------------------------------------------------------------------------------


def _cumulative(
    name: str, op: str, x: mx.array, axis: int | None, reverse: bool, inclusive: bool
) -> Way:
    axes = named_axes(name, x, axis, several=False)
    check_flag(name, "reverse", reverse)
    check_flag(name, "inclusive", inclusive)
    if axis is None or (op == "sum" and x.dtype == mx.bool_):
        return _prepared(name, op, x, axis, reverse, inclusive)
    if settings().target == "reference" or cpu.any_shape((x,)):
        plain = mx.cumsum if op == "sum" else mx.cumprod
        dtype = x.dtype
        wide = mx.float32 if dtype in (mx.float16, mx.bfloat16) else dtype
        return lambda x: plain(
            x.astype(wide), axis=axes[0], reverse=reverse, inclusive=inclusive
        ).astype(dtype)
    if x.size == 0:
        return lambda x: x
    p, type_ = planned(name, x, axes), element(x.dtype)
    run = _scanning(name, op, type_, p, reverse, inclusive)
    if not (cpu.maybe_tracing((x,)) and mx.issubdtype(x.dtype, mx.floating)):
        return run

    def rule(primals: Arrays, cotangents: Arrays, outputs: Arrays, wanted: Any) -> Arrays:
        (x,), (dy,) = primals, cotangents
        if op == "sum":
            return (_cumulative(name, op, dy, axes[0], not reverse, inclusive)(dy),)
        before = _scanning(name, op, type_, p, reverse, False, mx.float32)(x)
        kernel = _slope(p.columns, reverse, inclusive)
        return (kernel(p.seen(x), p.seen(dy), p.seen(before)).reshape(x.shape),)

    return custom_function(name, run, rule)


def _prepared(
    name: str, op: str, x: mx.array, axis: int | None, reverse: bool, inclusive: bool
) -> Way:
    """`_cumulative` of x flattened, where that is asked for, and of bool in int32."""

    def first(x: mx.array) -> mx.array:
        x = x.flatten() if axis is None else x
        return x.astype(mx.int32) if op == "sum" and x.dtype == mx.bool_ else x

    scan = _cumulative(name, op, first(x), 0 if axis is None else axis, reverse, inclusive)
    return lambda x: scan(first(x))


_CUMSUM = Remembered(partial(_cumulative, "cumsum", "sum"))
_CUMPROD = Remembered(partial(_cumulative, "cumprod", "prod"))


def cumsum(
    x: mx.array, axis: int | None = None, *, reverse: bool = False, inclusive: bool = True
) -> mx.array:
    """The running sum along an axis, as `mx.cumsum`.

        y[i] = Σ x[m], m ≤ i

    Args:
        x: any shape, in float32, float16, bfloat16, bool or any integer. Half precision is added in
            float32.
        axis: the axis, or None for x flattened.
        reverse: sum from the end: m ≥ i.
        inclusive: whether the element itself is in its sum; if not, m < i.

    Returns:
        An array of x's shape, or of its size for axis None, and dtype; of bool in int32. Integers
        wrap. Gradient for x.
    """
    return _CUMSUM((x,), (axis, reverse, inclusive))  # type: ignore[no-any-return]


def cumprod(
    x: mx.array, axis: int | None = None, *, reverse: bool = False, inclusive: bool = True
) -> mx.array:
    """The running product along an axis, as `mx.cumprod`.

        y[i] = Π x[m], m ≤ i

    Args:
        x: any shape, in float32, float16, bfloat16, bool or any integer. Half precision is
            multiplied in float32.
        axis: the axis, or None for x flattened.
        reverse: multiply from the end: m ≥ i.
        inclusive: whether the element itself is in its product; if not, m < i.

    Returns:
        An array of x's shape, or of its size for axis None, and dtype. Integers wrap. Gradient for
        x, right where x has zeros too.
    """
    return _CUMPROD((x,), (axis, reverse, inclusive))  # type: ignore[no-any-return]


def _near_one(rng: Any, shape: tuple[int, ...], sizes: Any) -> Any:
    """Factors whose products neither vanish nor overflow, with a zero in some rows."""
    x = rng.choice([-1.0, 1.0], shape) * (1 + 0.02 * rng.standard_normal(shape))
    flat = x.reshape(-1)
    flat[3::601] = 0.0
    return x


for _name, _op, _function, _reference, _baseline, _sign in (
    ("cumsum", "sum", cumsum, cumsum_reference, mx.cumsum, "Σ"),
    ("cumprod", "prod", cumprod, cumprod_reference, mx.cumprod, "Π"),
):
    register(
        Op(
            name=_name,
            family="scans",
            summary=f"running {'sum' if _op == 'sum' else 'product'} along an axis",
            formula=f"y[i] = {_sign} x[m], m ≤ i",
            function=over_last(_function),
            reference=_reference,
            arguments=(Argument("x", "(...)", NUMBERS),),
            options=(
                Option("axis", -1, (0, None), passed="text"),
                Option("reverse", False, (True,), passed="text"),
                Option("inclusive", True, (False,), passed="text"),
            ),
            outputs=("(...)",),
            baseline=over_last(_baseline),
            reads_backward=() if _op == "sum" else ("x",),
            needs=COUNTS_ELEMENTS,
            torch=f"torch.{_name}(x, axis)",
            benchmarks=(
                Case((4096,), {"D": 4096}),
                Case((4096,), {"D": 4096}, options={"axis": 0}),
                Case((4,), {"D": 1 << 22}),
            ),
            samples={"x": _near_one} if _op == "prod" else {},
        )
    )
