"""Expressions in NumPy's float64, and in plain MLX, for tests of the language."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from zmlx.expr import FUNCTIONS, Expr


def _erf(x):
    return np.vectorize(math.erf, otypes=[float])(x)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _softplus(x):
    return np.logaddexp(x, 0)


#: Every function of the language in NumPy's float64, written apart from the table under test.
NUMPY = {
    "?:": np.where,
    "||": np.logical_or,
    "&&": np.logical_and,
    "!": np.logical_not,
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "neg": np.negative,
    "%": np.remainder,
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "ceil": np.ceil,
    "cos": np.cos,
    "cosh": np.cosh,
    "cube": lambda x: x * x * x,
    "erf": _erf,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "fma": lambda x, y, z: x * y + z,
    "fmod": np.fmod,
    "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "hypot": np.hypot,
    "isfinite": np.isfinite,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "log_sigmoid": lambda x: -_softplus(-x),
    "logaddexp": np.logaddexp,
    "max": np.maximum,
    "min": np.minimum,
    "mish": lambda x: x * np.tanh(_softplus(x)),
    "ndtr": lambda x: (1 + _erf(x / math.sqrt(2))) / 2,
    "pow": np.power,
    "round": np.rint,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": _sigmoid,
    "sign": lambda x: np.where(np.isnan(x), 0, np.sign(x)),
    "silu": lambda x: x * _sigmoid(x),
    "sin": np.sin,
    "sinh": np.sinh,
    "softplus": _softplus,
    "sqrt": np.sqrt,
    "square": np.square,
    "tan": np.tan,
    "tanh": np.tanh,
    "trunc": np.trunc,
}

CALLS = [f for f in FUNCTIONS.values() if f.precedence == 0]


def values(e: Expr, **names: object) -> dict[Expr, np.ndarray]:
    """The float64 value of every node of `e`."""
    found: dict[Expr, np.ndarray] = {}
    words = {"true": True, "false": False, "INFINITY": np.inf, "NAN": np.nan}
    with np.errstate(all="ignore"):
        for node in e.nodes():
            if node.head == "name":
                found[node] = np.asarray(names[node.text], dtype=np.float64)
            elif node.head == "literal":
                value = words[node.text] if node.text in words else float(node.text)
                found[node] = np.asarray(value)
            else:
                found[node] = NUMPY[node.head](*(found[a] for a in node.args))
    return found


def value(e: Expr, **names: object) -> np.ndarray:
    return values(e, **names)[e]


def mlx_value(e: Expr, **names: object) -> np.ndarray:
    arrays = {n: mx.array(np.asarray(v, dtype=np.float64), mx.float64) for n, v in names.items()}
    return np.array(e.evaluate(arrays))


def mlx_gradient(e: Expr, of: str, **names: object) -> np.ndarray:
    arrays = {n: mx.array(np.asarray(v, dtype=np.float64), mx.float64) for n, v in names.items()}

    def total(x: mx.array) -> mx.array:
        return e.evaluate({**arrays, of: x}).sum()

    return np.array(mx.grad(total)(arrays[of]))
