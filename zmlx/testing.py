"""Checks of kernels against float64, for zmlx's own tests and for yours.

    >>> zmlx.testing.assert_matches(out, reference64, rounding=4)

`assert_matches` takes any result and reference. `check_forward` and `check_gradient` take an entry
of `zmlx.registry`, which need not be registered: it says how a kernel of yours is called, what it
is in plain arithmetic, and for which shapes it is to be tried.

The oracle of an op is its reference run in NumPy's float64, and the gradient of that (MLX's own
float64 `exp`, `erf` and `sin` are accurate to float32 only). The rule is

    |out - ref| ≤ 2·max|base - ref| + rounding·eps(dtype)·max|ref|

where base is the same reference run in NumPy's float32, with infinities and NaN in the same places.
For a gradient of fewer than 16 elements, base is off by the most of six draws of cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from .arguments import Argument, dtype_name
from .registry import Case, Op

EPS = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7, mx.float64: 2.0**-52}


def to_numpy(x: mx.array) -> np.ndarray[Any, Any]:
    """A NumPy copy; floating arrays become float64."""
    if x.dtype in (mx.float16, mx.bfloat16):
        x = x.astype(mx.float32)
    return np.array(x, dtype=np.float64 if mx.issubdtype(x.dtype, mx.floating) else None)


def _real(name: str, value: Any) -> np.ndarray[Any, Any]:
    """An array of MLX, NumPy or numbers as NumPy's; float64 unless it is of integers."""
    array = to_numpy(value) if isinstance(value, mx.array) else np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"[assert_matches] '{name}' must be real but got {array.dtype}.")
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def assert_matches(
    out: mx.array,
    reference: Any,
    base: Any = None,
    *,
    rounding: float = 4.0,
    name: str = "result",
) -> None:
    """Raises with the worst elements where `out` breaks the rule of this module, or where NaN and
    infinities differ; without `base`, its term is 0. `reference` and `base` are arrays of MLX or
    NumPy, or numbers; integers must be equal to a reference of integers."""
    if not isinstance(out, mx.array):
        raise TypeError(f"[assert_matches] 'out' must be an mx.array but got {type(out).__name__}.")
    got, want = _real("out", out), _real("reference", reference)
    if got.dtype.kind in "iu" and want.dtype.kind in "iu" and got.shape == want.shape:
        # Above 2^53 float64 would take neighbours for equal.
        differs = got != want
        if differs.any():
            at = tuple(int(n) for n in np.argwhere(differs)[0])
            raise AssertionError(
                f"{name} ({dtype_name(out.dtype)}): {int(differs.sum())} of {differs.size} elements"
                f" differ, first {at}: {got[at]} expected {want[at]}"
            )
        return
    got, want = got.astype(np.float64), want.astype(np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"{name} has shape {got.shape}, expected {want.shape}")
    if got.size == 0:
        return
    finite = np.isfinite(want)
    limit = float(np.max(np.abs(want[finite]), initial=0.0))
    # What overflows the dtype is an infinity there.
    top = {mx.float16: 65504.0}.get(out.dtype, 3.4e38)
    odd = ~finite & ~((np.isnan(want) & np.isnan(got)) | (want == got))
    bound = rounding * EPS.get(out.dtype, 0.0) * min(limit, top)
    with np.errstate(invalid="ignore"):
        if base is not None:
            near = _real("base", base)
            if near.shape != want.shape:
                raise ValueError(
                    f"[assert_matches] 'base' must have shape {want.shape} but got {near.shape}."
                )
            off = np.abs(near - want)[finite]
            bound += 2.0 * float(np.max(off[np.isfinite(off)], initial=0.0))
        error = np.where(finite, np.abs(got - want), 0.0)
    error = np.where(finite & np.isnan(got), np.inf, error)
    bad = odd | (error > bound)
    if bad.any():
        order = np.argsort(-np.where(odd, np.inf, error).ravel())[:5]
        worst = [
            f"{tuple(int(n) for n in np.unravel_index(i, got.shape))}: {got.ravel()[i]:.9g} "
            f"expected {want.ravel()[i]:.9g}"
            for i in order
        ]
        raise AssertionError(
            f"{name} ({dtype_name(out.dtype)}): {int(bad.sum())} of {bad.size} elements are off by "
            f"more than {bound:.3g}, at worst {'; '.join(worst)}"
        )


def oracle_namespace(dtype: type = np.float64) -> Any:
    """The functions that references may use, of NumPy and differentiable by `autograd`. What is
    made of numbers alone has `dtype`."""
    import autograd.numpy as anp
    from autograd.scipy.special import erf, logsumexp
    from autograd.tracer import getval

    def where(condition: Any, x: Any, y: Any) -> Any:
        if isinstance(x, float) and isinstance(y, float):
            x = dtype(x)
        return anp.where(condition, x, y)

    def one_hot_pick(x: Any, indices: Any, axis: int = -1) -> Any:
        hot = np.asarray(indices) == np.arange(x.shape[axis])
        return anp.sum(anp.where(hot, x, 0.0), axis=axis, keepdims=True)

    names = {name: getattr(anp, name) for name in dir(anp) if not name.startswith("_")}
    names.update(
        erf=erf,
        logsumexp=logsumexp,
        where=where,
        zeros=lambda shape: np.zeros(shape, dtype),
        rsqrt=lambda x: 1.0 / anp.sqrt(x),
        sigmoid=lambda x: 0.5 * (1.0 + anp.tanh(0.5 * x)),
        take_along_axis=one_hot_pick,
        square=lambda x: x * x,
        # MLX passes the gradient of a tie to the second argument, autograd half of it to each.
        maximum=lambda x, y: anp.where((x > y) | (x != x), x, y),
        minimum=lambda x, y: anp.where((x < y) | (x != x), x, y),
        stop_gradient=getval,
        # Stable, so that ties keep the order of their indices, as in MLX.
        argsort=lambda x, axis=-1: np.argsort(getval(x), axis=axis, kind="stable"),
    )
    return SimpleNamespace(**names)


def draw(
    op: Op, case: Case, dtype: mx.Dtype, seed: int = 0, *, optional: bool = True
) -> list[mx.array | None]:
    """Arguments of `op` for a case: normal numbers unless the entry says otherwise."""
    rng = np.random.default_rng(seed)
    values: list[mx.array | None] = []
    for argument in op.arguments:
        if argument.optional and not (optional and case.optional):
            values.append(None)
            continue
        shape = resolve(argument.shape, case)
        sample = case.samples.get(argument.name) or op.samples.get(argument.name)
        value = sample(rng, shape, case.sizes) if sample else rng.standard_normal(shape)
        wanted = case.dtypes.get(argument.name, dtype_of(argument, dtype))
        if wanted == mx.bool_:
            value = np.asarray(value) > 0
        values.append(mx.array(np.asarray(value)).astype(wanted))
    return values


def dtype_of(argument: Argument, dtype: mx.Dtype) -> mx.Dtype:
    """`dtype` where the argument may have it, else the first that it may have."""
    return dtype if dtype in argument.dtypes else argument.dtypes[0]


def differentiated(op: Op, values: Sequence[mx.array | None]) -> list[int]:
    """Indices of the arguments that are given and have a gradient."""
    return [
        i
        for i in op.differentiable
        if (value := values[i]) is not None and mx.issubdtype(value.dtype, mx.floating)
    ]


def resolve(shape: str, case: Case) -> tuple[int, ...]:
    """The sizes behind a symbolic shape; "(...)" is the leading axes and every symbol."""
    from .arguments import dimensions

    sizes: list[int] = []
    axes = dimensions(shape)
    for factor, symbol in axes:
        if symbol == "*":
            sizes.extend(case.lead)
        elif symbol == "...":
            sizes.extend((*case.lead, *case.sizes.values()))
        else:
            sizes.append(factor * case.sizes[symbol] if symbol else factor)
    return tuple(sizes)


def gradients(
    function: Callable[..., Any],
    values: Sequence[Any],
    which: Sequence[int],
    cotangents: Sequence[Any],
) -> list[mx.array]:
    """Vector-Jacobian products of `function` for the arguments `which`, in MLX."""

    def of(*some: mx.array) -> list[mx.array]:
        full = list(values)
        for i, value in zip(which, some, strict=True):
            full[i] = value
        result = function(*full)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    return mx.vjp(of, [values[i] for i in which], list(cotangents))[1]


def _oracle(
    op: Op, values: Sequence[mx.array | None], options: Mapping[str, Any], dtype: type
) -> tuple[Callable[..., tuple[Any, ...]], list[Any], list[int]]:
    """The reference in NumPy's `dtype` as a function of the differentiable arguments, the values of
    those, and their indices."""
    from autograd.tracer import getval

    xp = oracle_namespace(dtype)
    which = differentiated(op, values)
    fixed: list[Any] = []
    for v in values:
        x = None if v is None else to_numpy(v)
        fixed.append(x.astype(dtype) if x is not None and x.dtype == np.float64 else x)

    def function(*some: Any) -> tuple[Any, ...]:
        full = list(fixed)
        for i, value in zip(which, some, strict=True):
            full[i] = value
        result = op.reference(*full, **options, xp=xp)
        results = result if isinstance(result, tuple) else (result,)
        if any(x is not None and x.dtype == dtype for x in fixed):
            for kind in (np.asarray(getval(r)).dtype for r in results):
                # In float64 the error of the base, and with it the bound, would be too small.
                assert kind.kind != "f" or kind == dtype, (
                    f"{op.name}: the reference must compute in {np.dtype(dtype)} but gave {kind}"
                )
        return results

    return function, [fixed[i] for i in which], which


def _pull(
    op: Op, values: Sequence[mx.array | None], options: Mapping[str, Any], dtype: type
) -> Callable[[Sequence[mx.array]], Sequence[Any]]:
    """The reference's vector-Jacobian product in NumPy's `dtype`, as a function of cotangents."""
    from autograd import make_vjp
    from autograd.builtins import tuple as traced_tuple

    function, points, _ = _oracle(op, values, options, dtype)
    vjp, results = make_vjp(lambda some: traced_tuple(function(*some)), 0)(tuple(points))
    kinds = [np.asarray(r).dtype for r in results]

    def pull(cotangents: Sequence[mx.array]) -> Sequence[Any]:
        pairs = zip(cotangents, kinds, strict=True)
        return vjp(tuple(to_numpy(c).astype(kind) for c, kind in pairs))  # type: ignore[no-any-return]

    return pull


def _rounding(op: Op, got: mx.array, eps: float) -> float:
    """Multiples of the result's own eps that are `op.rounding` of `eps`, if that is larger."""
    return op.rounding * max(1.0, eps / EPS.get(got.dtype, 1.0))


def check_forward(
    op: Op,
    case: Case,
    dtype: mx.Dtype,
    *,
    seed: int = 0,
    optional: bool = True,
    eps: float = 0.0,
) -> None:
    """The op on a case against its float64 oracle. Its floats must come in `dtype`, in one that the
    case gives an argument, or in a wider one, since the bound follows their dtype: `assert_matches`
    is for an op that narrows them on purpose. `eps` is the least that the bound is a multiple of.
    """
    values = draw(op, case, dtype, seed, optional=optional)
    out = op.function(*values, **case.options)
    outputs = out if isinstance(out, tuple) else (out,)
    for k, got in enumerate(outputs):
        floats = mx.issubdtype(got.dtype, mx.floating)
        known = got.dtype == dtype or got.dtype in case.dtypes.values()
        if floats and not known and got.dtype.size <= dtype.size:
            raise AssertionError(
                f"{op.name} output {k} is {dtype_name(got.dtype)} for {dtype_name(dtype)} arguments"
            )
    wants, bases = (
        function(*points)
        for function, points, _ in (
            _oracle(op, values, case.options, kind) for kind in (np.float64, np.float32)
        )
    )
    for k, (got, want, base) in enumerate(zip(outputs, wants, bases, strict=True)):
        rounding = _rounding(op, got, eps)
        assert_matches(got, want, base, rounding=rounding, name=f"{op.name} output {k}")


#: Of a gradient of fewer elements, such as a sum over rows, one draw of cotangents says little of
#: how far off float32 is: the base is off by the most of so many draws.
_FEW, _DRAWS = 16, 6


def check_gradient(
    op: Op,
    case: Case,
    dtype: mx.Dtype,
    *,
    seed: int = 0,
    optional: bool = True,
    eps: float = 0.0,
) -> None:
    """Gradients of every differentiable argument against the float64 oracle, with random
    cotangents; `eps` as in `check_forward`."""
    values = draw(op, case, dtype, seed, optional=optional)
    rng = np.random.default_rng(seed + 1)
    out = op.function(*values, **case.options)
    outputs = out if isinstance(out, tuple) else (out,)

    def drawn() -> list[mx.array]:
        return [mx.array(rng.standard_normal(o.shape)).astype(o.dtype) for o in outputs]

    cotangents = drawn()
    which = differentiated(op, values)
    if not which:
        return
    pulls = [_pull(op, values, case.options, kind) for kind in (np.float64, np.float32)]
    wants, bases = ([pull(cotangents)] for pull in pulls)
    if any(want.size < _FEW for want in wants[0]):
        more = [drawn() for _ in range(_DRAWS - 1)]
        for found, pull in zip((wants, bases), pulls, strict=True):
            found += map(pull, more)
    got = gradients(lambda *xs: op.function(*xs, **case.options), values, which, cotangents)
    for n, (i, gradient) in enumerate(zip(which, got, strict=True)):
        name = f"{op.name} gradient of {op.arguments[i].name}"
        value = values[i]
        assert value is not None
        assert gradient.dtype == value.dtype, name
        want, base = wants[0][n], bases[0][n]
        if want.size < _FEW:
            with np.errstate(invalid="ignore"):
                offs = np.array([b[n] - w[n] for w, b in zip(wants, bases, strict=True)])
            base = want + np.max(np.abs(offs[np.isfinite(offs)]), initial=0.0)
        assert_matches(gradient, want, base, rounding=_rounding(op, gradient, eps), name=name)
