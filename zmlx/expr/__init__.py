"""The expression language that elementwise and rowwise kernels are written in.

    parse("x * tanh(softplus(x))").metal()           'x * tanh(zmlx_softplus(x))'
    parse("x * x").derivative("x").metal()           'x + x'
    parse_block("t = x * x; y = t * exp(t)")         lets

`functions` is the table of what may be called, `parse` reads text, `nodes` holds expressions and
prints them as Metal, `derive` and `simplify` differentiate, `evaluate` computes in plain MLX.
"""

from .block import Block
from .derive import Gradient, derivative, differential, gradient, shared
from .evaluate import evaluate
from .functions import ALIASES, CONSTANTS, EXPANSIONS, FUNCTIONS, Function
from .nodes import Expr, call, literal, name
from .parse import names_in, parse, parse_block

__all__ = [
    "ALIASES",
    "CONSTANTS",
    "EXPANSIONS",
    "FUNCTIONS",
    "Block",
    "Expr",
    "Function",
    "Gradient",
    "call",
    "derivative",
    "differential",
    "evaluate",
    "gradient",
    "literal",
    "name",
    "names_in",
    "parse",
    "parse_block",
    "shared",
]
