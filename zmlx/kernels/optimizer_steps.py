"""Steps of optimizers, as `mlx.optimizers` takes them.

    adamw   m' = β₁ m + (1 - β₁) g          v' = β₂ v + (1 - β₂) g²
            p' = (1 - λ η) p - η c₁ m' / (√v' c₂ + ε)
            c₁ = 1 / (1 - β₁ᵗ), c₂ = 1 / √(1 - β₂ᵗ), or both 1         (Loshchilov & Hutter 2019)
    lion    c = β₁ m + (1 - β₁) g           m' = β₂ m + (1 - β₂) g
            p' = (1 - λ η) p - η sign(c)                                (Chen et al. 2023)
    sgd     h = g + λ p, or g without decay v' = μ v + (1 - τ) h
            p' = p - η v', with Nesterov p - η (h + μ v')

Bytes: adamw reads four arrays and writes three, lion and sgd read three and write two. Arithmetic
is in float32; each output has the dtype of its input. η, β, ε, λ, t are inputs of the kernels.

The functions here take one parameter. `zmlx.optimizers` runs the same patterns over whole trees,
several parameters per launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial
from typing import Any

import mlx.core as mx

from ..arguments import (
    Argument,
    check_finite,
    check_flag,
    check_not_negative,
    check_number,
    check_size,
)
from ..codegen import Elementwise, Let, Operand, Output
from ..metal import scalar
from ..packed import PackedKernel
from ..pattern import PatternKernel
from ..registry import Case, Op, Option, register, register_call


def adamw_reference(
    p: mx.array,
    g: mx.array,
    m: mx.array,
    v: mx.array,
    *,
    learning_rate: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    step: int | None = None,
    xp: Any = mx,
) -> Any:
    """adamw in plain MLX."""
    b1, b2 = betas
    mean = b1 * m + (1 - b1) * g
    square = b2 * v + (1 - b2) * xp.square(g)
    c1, c2 = _corrections(betas, step)
    moved = learning_rate * c1 * mean / (xp.sqrt(square) * c2 + eps)
    return p * (1 - learning_rate * weight_decay) - moved, mean, square


def lion_reference(
    p: mx.array,
    g: mx.array,
    m: mx.array,
    *,
    learning_rate: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    xp: Any = mx,
) -> Any:
    """lion in plain MLX."""
    b1, b2 = betas
    # Without a gradient: that of MLX's sign is wrong in a shapeless compile.
    sign = xp.sign(xp.stop_gradient(b1 * m + (1 - b1) * g))
    kept = p * (1 - learning_rate * weight_decay)
    return kept - learning_rate * sign, b2 * m + (1 - b2) * g


def sgd_reference(
    p: mx.array,
    g: mx.array,
    v: mx.array,
    *,
    learning_rate: float = 1e-2,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    xp: Any = mx,
) -> Any:
    """sgd in plain MLX."""
    h = g + weight_decay * p if weight_decay != 0 else g
    speed = momentum * v + (1 - dampening) * h
    return p - learning_rate * (h + momentum * speed if nesterov else speed), speed


def _corrections(betas: tuple[float, float], step: int | None) -> tuple[float, float]:
    if step is None:
        return 1.0, 1.0
    return 1 / (1 - betas[0] ** step), 1 / (1 - betas[1] ** step) ** 0.5


# ---- kernels ------------------------------------------------------------------------------------


def _full(*names: str) -> tuple[Operand, ...]:
    return tuple(Operand(name, "full") for name in names)


def _numbers(*names: str) -> tuple[Operand, ...]:
    return tuple(Operand(name, "scalar") for name in names)


def _outputs(**values: str) -> tuple[Output, ...]:
    return tuple(Output(f"new_{name}", value, "full") for name, value in values.items())


#: `scale` scales the gradient, `kept` is 1 - λ η, `rate` η c₁, `root` c₂.
ADAMW = Elementwise(
    (
        *_full("p", "g", "m", "v"),
        *_numbers("scale", "rate", "kept", "root", "beta1", "rest1", "beta2", "rest2", "eps"),
    ),
    _outputs(p="p * kept - rate * mean / (sqrt(square_mean) * root + eps)",
             m="mean", v="square_mean"),
    (
        Let("clipped", "g * scale"),
        Let("mean", "beta1 * m + rest1 * clipped"),
        Let("square_mean", "beta2 * v + rest2 * (clipped * clipped)"),
    ),
)  # fmt: skip
LION = Elementwise(
    (
        *_full("p", "g", "m"),
        *_numbers("scale", "rate", "kept", "beta1", "rest1", "beta2", "rest2"),
    ),
    _outputs(p="p * kept - rate * sign(beta1 * m + rest1 * clipped)",
             m="beta2 * m + rest2 * clipped"),
    (Let("clipped", "g * scale"),),
)  # fmt: skip


#: The gradient with its penalty. Without decay an infinite parameter is no 0 · inf.
_DECAYED = "decay != 0 ? g * scale + decay * p : g * scale"


def _sgd(step: str) -> Elementwise:
    return Elementwise(
        (*_full("p", "g", "v"), *_numbers("scale", "rate", "decay", "momentum", "rest")),
        _outputs(p=f"p - rate * ({step})", v="speed"),
        (Let("h", _DECAYED), Let("speed", "momentum * v + rest * h")),
    )


SGD = _sgd("speed")
SGD_NESTEROV = _sgd("h + momentum * speed")
SGD_WITHOUT_MOMENTUM = Elementwise(
    (*_full("p", "g"), *_numbers("scale", "rate", "decay")),
    _outputs(p=f"p - rate * ({_DECAYED})"),
)

#: The steps over the arrays of a tree.
ADAMW_TREE = PackedKernel("adamw", ADAMW, ("p", "m", "v"))
LION_TREE = PackedKernel("lion", LION, ("p", "m"))
SGD_TREE = PackedKernel("sgd", SGD, ("p", "v"))
SGD_NESTEROV_TREE = PackedKernel("sgd_nesterov", SGD_NESTEROV, ("p", "v"))
SGD_WITHOUT_MOMENTUM_TREE = PackedKernel("sgd_without_momentum", SGD_WITHOUT_MOMENTUM, ("p",))


def _launch_tree(tree: PackedKernel, dtype: mx.Dtype) -> None:
    """One launch with as many sets as fit, one with a single set, one with small arrays; with
    moments in the parameter's dtype and in float32."""
    for moments in (dtype, mx.float32):
        for size, sets in ((40, tree.sets_per_launch), (40, 1), (3, 2)):
            arrays = [mx.zeros((size,), dtype)] * 2 + [mx.zeros((size,), moments)] * (
                tree.width - 2
            )
            tree([tuple(arrays[: tree.width])] * sets, mx.zeros((tree.scalars,)))


for _tree in (ADAMW_TREE, LION_TREE, SGD_TREE, SGD_NESTEROV_TREE, SGD_WITHOUT_MOMENTUM_TREE):
    register_call(f"{_tree.name} of a tree", partial(_launch_tree, _tree))

_P, _G, _M, _V = (Argument(name, "(...)") for name in ("p", "g", "m", "v"))
_ADAMW = PatternKernel("adamw", ADAMW, (("p",), ("m",), ("v",)), arguments=(_P, _G, _M, _V))
_LION = PatternKernel("lion", LION, (("p",), ("m",)), arguments=(_P, _G, _M))
_SGD = PatternKernel("sgd", SGD, (("p",), ("v",)), arguments=(_P, _G, _V))
_SGD_NESTEROV = PatternKernel(
    "sgd/nesterov", SGD_NESTEROV, (("p",), ("v",)), arguments=(_P, _G, _V)
)


# ---- ops ----------------------------------------------------------------------------------------


def check_betas(op: str, betas: Any) -> tuple[float, float]:
    """Two numbers in [0, 1), or an error."""
    if isinstance(betas, (Mapping, Set)):
        kind = type(betas).__name__
        raise TypeError(f"[{op}] 'betas' must be a sequence of two numbers but got {kind}.")
    try:
        values = tuple(check_number(op, "betas", b) for b in tuple(betas))
    except TypeError:
        values = ()
    if len(values) != 2 or not all(0 <= b < 1 for b in values):
        raise ValueError(f"[{op}] 'betas' must be two numbers in [0, 1) but got {betas}.")
    return values[0], values[1]


def adamw(
    p: mx.array,
    g: mx.array,
    m: mx.array,
    v: mx.array,
    *,
    learning_rate: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    step: int | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """One step of AdamW on one parameter; with `weight_decay=0`, of Adam.

    Args:
        p, g, m, v: parameter, gradient, first and second moment: one shape, each in float32,
            float16 or bfloat16.
        learning_rate, betas, eps, weight_decay: as in `mlx.optimizers.AdamW`, finite numbers. A
            negative rate goes up the gradient; eps and decay are at least 0.
        step: the number of this step, from 1 on, for bias correction; None: no correction.

    Returns:
        New parameter and moments, each in the dtype of the old. Gradients for p, g, m, v.
    """
    b1, b2 = check_betas("adamw", betas)
    step = None if step is None else check_size("adamw", "step", step)
    check_finite("adamw", "learning_rate", learning_rate)
    _check_not_negative("adamw", eps=eps, weight_decay=weight_decay)
    c1, c2 = _corrections((b1, b2), step)
    numbers = (1.0, learning_rate * c1, 1 - learning_rate * weight_decay, c2,
               b1, 1 - b1, b2, 1 - b2, eps)  # fmt: skip
    return _ADAMW(p, g, m, v, *map(_scalar, numbers))  # type: ignore[no-any-return]


def lion(
    p: mx.array,
    g: mx.array,
    m: mx.array,
    *,
    learning_rate: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
) -> tuple[mx.array, mx.array]:
    """One step of Lion on one parameter.

    Args:
        p, g, m: parameter, gradient, momentum: one shape, each in float32, float16 or bfloat16.
        learning_rate, betas, weight_decay: as in `mlx.optimizers.Lion`, finite numbers. A negative
            rate goes up the gradient; the decay is at least 0.

    Returns:
        New parameter and momentum, each in the dtype of the old. Gradients for p, g, m; that of the
        sign is 0.
    """
    b1, b2 = check_betas("lion", betas)
    check_finite("lion", "learning_rate", learning_rate)
    _check_not_negative("lion", weight_decay=weight_decay)
    numbers = (1.0, learning_rate, 1 - learning_rate * weight_decay, b1, 1 - b1, b2, 1 - b2)
    return _LION(p, g, m, *map(_scalar, numbers))  # type: ignore[no-any-return]


def sgd(
    p: mx.array,
    g: mx.array,
    v: mx.array,
    *,
    learning_rate: float = 1e-2,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
) -> tuple[mx.array, mx.array]:
    """One step of SGD with momentum on one parameter.

    Args:
        p, g, v: parameter, gradient, velocity: one shape, each in float32, float16 or bfloat16.
        learning_rate, momentum, weight_decay, dampening, nesterov: as in `mlx.optimizers.SGD`,
            finite numbers. A negative rate goes up the gradient; the others are at least 0.

    Returns:
        New parameter and velocity, each in the dtype of the old. Gradients for p, g, v.
    """
    check_finite("sgd", "learning_rate", learning_rate)
    _check_not_negative("sgd", momentum=momentum, weight_decay=weight_decay, dampening=dampening)
    check_flag("sgd", "nesterov", nesterov)
    numbers = (1.0, learning_rate, weight_decay, momentum, 1 - dampening)
    kernel = _SGD_NESTEROV if nesterov else _SGD
    return kernel(p, g, v, *map(_scalar, numbers))  # type: ignore[no-any-return]


def _check_not_negative(op: str, **numbers: Any) -> None:
    """Raises for numbers below 0: MLX's Lion leaves such a decay out, its SGD such a momentum and
    dampening, and PyTorch refuses a decay, a momentum and an eps."""
    for name, value in numbers.items():
        check_not_negative(op, name, value)


def _scalar(value: float) -> mx.array:
    return scalar(float(value))


_CASES = (
    Case((), {"D": 1}, "one element"),
    Case((2, 3), {"D": 5}, "three axes"),
    Case((7,), {"D": 31}, "a thread with a tail"),
    Case((9,), {"D": 1024}, "several threads, the last one full"),
    Case((3,), {"D": 1365}, "several threads, the last one with a tail"),
    Case((0,), {"D": 16}, "no rows"),
)
_RATE = Option("learning_rate", 1e-2, (0.3,))
_DECAY = Option("weight_decay", 0.01, (0.0, 0.3))
_BENCHMARKS = (Case((4096,), {"D": 4096}), Case((2048,), {"D": 4096}))

register(
    Op(
        name="adamw",
        family="optimizers",
        summary="a step of AdamW or Adam",
        formula="p (1 - λη) - η c₁ m' / (√v' c₂ + ε)",
        function=adamw,
        reference=adamw_reference,
        arguments=(_P, _G, _M, _V),
        options=(_RATE, Option("betas", (0.9, 0.999), ((0.5, 0.9), (0.0, 0.0))),
                 Option("eps", 1e-8, (1e-3,)), _DECAY, Option("step", None, (1, 100))),
        outputs=("(...)", "(...)", "(...)"),
        paper="Loshchilov & Hutter 2019, arXiv:1711.05101; Kingma & Ba 2015, arXiv:1412.6980",
        cases=_CASES,
        benchmarks=_BENCHMARKS,
        samples={"v": lambda rng, shape, sizes: rng.uniform(0.1, 1.0, shape)},
    )
)  # fmt: skip
register(
    Op(
        name="lion",
        family="optimizers",
        summary="a step of Lion",
        formula="p (1 - λη) - η sign(β₁ m + (1 - β₁) g)",
        function=lion,
        reference=lion_reference,
        arguments=(_P, _G, _M),
        options=(_RATE, Option("betas", (0.9, 0.99), ((0.5, 0.9),)), _DECAY),
        outputs=("(...)", "(...)"),
        paper="Chen et al. 2023, arXiv:2302.06675",
        cases=_CASES,
        benchmarks=_BENCHMARKS,
    )
)
register(
    Op(
        name="sgd",
        family="optimizers",
        summary="a step of SGD with momentum",
        formula="p - η v', v' = μ v + (1 - τ)(g + λ p)",
        function=sgd,
        reference=sgd_reference,
        arguments=(_P, _G, _V),
        options=(_RATE, Option("momentum", 0.9, (0.5,)), _DECAY, Option("dampening", 0.0, (0.5,)),
                 Option("nesterov", False, (True,))),
        outputs=("(...)", "(...)"),
        paper="Sutskever et al. 2013, ICML 28:1139",
        cases=_CASES,
        benchmarks=_BENCHMARKS,
    )
)  # fmt: skip
