"""The one table of what an expression may call, operators included.

A row says how a function is spelled in Metal, what it is in MLX, and its derivative in each
argument, the last two in the expression language itself. Ties and edges follow MLX's autograd:
max, min, clip and relu pass the gradient of a tie to the second argument; abs and sign have the
derivative 0 at 0; rounding functions have the derivative 0 everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Function:
    """A row of the table.

    name         how the language spells it
    parameters   names of the arguments, as the other columns use them
    metal        the Metal function or operator
    mlx          a function of `mlx.core` or of `zmlx.expr.evaluate`, or an expression in the
                 parameters
    derivatives  one expression per parameter; none for a function whose result is a condition
    remark       domain, edges and errors worth knowing
    condition    the result is true or false
    logical      the arguments are conditions
    precedence   of an operator in Metal, larger binds tighter; 0 for a call
    """

    name: str
    parameters: str
    metal: str
    mlx: str
    derivatives: tuple[str, ...] = ()
    remark: str = ""
    condition: bool = False
    logical: bool = False
    precedence: int = 0

    @property
    def arity(self) -> int:
        """The number of arguments."""
        return len(self.parameters.split())


_F = Function

# Parts of derivatives. gelu_tanh is x sigmoid(u); with p = exp(-|u|) and q = 1 / (1 + p) the value
# of sigmoid(u) is q or p q, its derivative p q²; |u| is written with arms, since abs has the
# derivative 0 at 0, and these none of its kinks. mish is x n / (n + 2), n = e (e + 2), e = exp(x).
# Where an exponential is 0 it is multiplied by x before x has a power or a factor that overflows.
_U = "(1.5957691216057308 * (x + 0.044715 * cube(x)))"
_P = f"exp(-({_U} < 0 ? -{_U} : {_U}))"
_Q = f"(1 / (1 + {_P}))"
_R = f"(x * ({_P} * square({_Q})))"
_E = "exp(min(x, 20))"
_N = f"({_E} * ({_E} + 2))"

_OPERATORS = (
    _F("?:", "c x y", "?:", "where", remark="c is a condition", precedence=1),
    _F("||", "x y", "||", "logical_or", condition=True, logical=True, precedence=2),
    _F("&&", "x y", "&&", "logical_and", condition=True, logical=True, precedence=3),
    _F("==", "x y", "==", "equal", condition=True, precedence=4),
    # MLX's, mapped over its second operand alone, has the mapped axis in another place.
    _F("!=", "x y", "!=", "!(x == y)", condition=True, precedence=4),
    _F("<", "x y", "<", "less", condition=True, precedence=5),
    _F("<=", "x y", "<=", "less_equal", condition=True, precedence=5),
    _F(">", "x y", ">", "greater", condition=True, precedence=5),
    _F(">=", "x y", ">=", "greater_equal", condition=True, precedence=5),
    _F("+", "x y", "+", "add", ("1", "1"), precedence=6),
    _F("-", "x y", "-", "subtract", ("1", "-1"), precedence=6),
    _F("*", "x y", "*", "multiply", ("y", "x"), precedence=7),
    _F("/", "x y", "/", "divide", ("1 / y", "-(x / y) / y"), precedence=7),
    _F("neg", "x", "-", "negative", ("-1",), precedence=8),
    _F("!", "x", "!", "logical_not", condition=True, logical=True, precedence=8),
)

_CALLS = (
    _F("%", "x y", "zmlx_remainder", "remainder", ("1", "-floor(x / y)"),
       "sign of the divisor, as in Python; x % 0 is NaN"),
    _F("abs", "x", "fabs", "abs", ("sign(x)",)),
    _F("acos", "x", "acos", "arccos", ("-rsqrt(1 - square(x))",), "|x| <= 1, else NaN"),
    _F("acosh", "x", "acosh", "arccosh", ("rsqrt(square(x) - 1)",), "x >= 1, else NaN"),
    _F("asin", "x", "asin", "arcsin", ("rsqrt(1 - square(x))",), "|x| <= 1, else NaN"),
    _F("asinh", "x", "asinh", "arcsinh", ("rsqrt(square(x) + 1)",)),
    _F("atan", "x", "atan", "arctan", ("1 / (square(x) + 1)",)),
    _F("atan2", "x y", "atan2", "arctan2",
       ("y / (square(x) + square(y))", "-x / (square(x) + square(y))"),
       "atan2(y, x): the angle of the point (x, y)"),
    _F("atanh", "x", "atanh", "arctanh", ("1 / (1 - square(x))",), "|x| < 1; infinite at ±1"),
    _F("ceil", "x", "ceil", "ceil", ("0",)),
    _F("cos", "x", "cos", "cos", ("-sin(x)",), "NaN beyond 2^50 on the CPU"),
    _F("cosh", "x", "cosh", "cosh", ("sinh(x)",)),
    _F("cube", "x", "zmlx_cube", "x * x * x", ("3 * square(x)",), "what x ** 3 becomes"),
    _F("erf", "x", "zmlx_erf", "erf", ("1.1283791670955126 * exp(-square(x))",)),
    _F("exp", "x", "exp", "exp", ("exp(x)",)),
    _F("exp2", "x", "exp2", "pow(2, x)", ("0.6931471805599453 * exp2(x)",)),
    _F("expm1", "x", "zmlx_expm1", "expm1", ("exp(x)",), "exp(x) - 1, accurate near 0"),
    _F("floor", "x", "floor", "floor", ("0",)),
    _F("fma", "x y z", "fma", "x * y + z", ("y", "x", "1"), "one rounding in a kernel"),
    _F("fmod", "x y", "fmod", "x < 0 ? -(-x % abs(y)) : x % abs(y)", ("1", "-trunc(x / y)"),
       "sign of the dividend, as in C"),
    _F("gelu", "x", "zmlx_gelu", "x * (1 + erf(x * 0.7071067811865476)) / 2",
       ("ndtr(x) + x * 0.3989422804014327 * exp(-0.5 * square(x))",)),
    _F("gelu_tanh", "x", "zmlx_gelu_tanh",
       # Beyond 10 tanh is 1 or -1, and the derivative of a cube that overflows would be NaN.
       "0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * clip(x, -10, 10) ** 3)))",
       (f"{_Q} * ({_U} < 0 ? {_P} : 1)"
        f" + 1.5957691216057308 * ({_R} + 0.134145 * ({_R} * x * x))",)),
    _F("hypot", "x y", "hypot", "hypot", ("x / hypot(x, y)", "y / hypot(x, y)"),
       "no overflow on the way"),
    _F("isfinite", "x", "isfinite", "isfinite", condition=True),
    _F("isinf", "x", "isinf", "isinf", condition=True),
    _F("isnan", "x", "isnan", "isnan", condition=True),
    _F("log", "x", "log", "log", ("1 / x",), "-inf at 0, NaN below"),
    _F("log10", "x", "log10", "log10", ("0.4342944819032518 / x",), "-inf at 0, NaN below"),
    _F("log1p", "x", "log1p", "log1p", ("1 / (1 + x)",), "-inf at -1, NaN below"),
    _F("log2", "x", "log2", "log2", ("1.4426950408889634 / x",), "-inf at 0, NaN below"),
    _F("log_sigmoid", "x", "zmlx_log_sigmoid", "-softplus(-x)", ("sigmoid(-x)",)),
    _F("logaddexp", "x y", "zmlx_logaddexp", "logaddexp", ("sigmoid(x - y)", "sigmoid(y - x)")),
    _F("max", "x y", "zmlx_maximum", "maximum", ("x > y ? 1 : 0", "x <= y ? 1 : 0"),
       "NaN if either is, unlike Metal's max"),
    _F("min", "x y", "zmlx_minimum", "minimum", ("x < y ? 1 : 0", "x >= y ? 1 : 0"),
       "NaN if either is, unlike Metal's min"),
    _F("mish", "x", "zmlx_mish", "x * tanh(softplus(x))",
       (f"{_N} / ({_N} + 2)"
        f" + 4 * (min(x, 20) * {_E}) * ({_E} + 1) / square({_N} + 2)",)),
    _F("ndtr", "x", "zmlx_ndtr", "(1 + erf(x * 0.7071067811865476)) / 2",
       ("0.3989422804014327 * exp(-0.5 * square(x))",), "the normal distribution function"),
    _F("pow", "x y", "pow", "power",
       ("y == 0 ? 0 : y * pow(x, y - 1)", "pow(x, y) == 0 ? 0 : log(x) * pow(x, y)"),
       "NaN for x < 0 and a y that is no integer; x ** 2 and x ** 3 become square and cube"),
    _F("round", "x", "rint", "round", ("0",), "halves to even, unlike Metal's round"),
    _F("rsqrt", "x", "rsqrt", "rsqrt", ("-0.5 * rsqrt(x) / x",), "inf at 0, NaN below"),
    _F("sigmoid", "x", "zmlx_sigmoid", "sigmoid", ("sigmoid(x) * sigmoid(-x)",)),
    # MLX's has a gradient of the shape that was compiled, which a shapeless compile reads beyond.
    _F("sign", "x", "sign", "x > 0 ? 1 : x < 0 ? -1 : 0", ("0",), "0 at 0 and at NaN"),
    _F("silu", "x", "zmlx_silu", "x * sigmoid(x)",
       ("sigmoid(x) * (1 + x * (1 - sigmoid(x)))",), "NaN at -inf, as x * sigmoid(x) is"),
    _F("sin", "x", "sin", "sin", ("cos(x)",), "NaN beyond 2^50 on the CPU"),
    _F("sinh", "x", "sinh", "sinh", ("cosh(x)",)),
    _F("softplus", "x", "zmlx_softplus", "logaddexp(x, 0)", ("sigmoid(x)",), "x for large x"),
    _F("sqrt", "x", "sqrt", "sqrt", ("0.5 / sqrt(x)",), "NaN below 0; infinite slope at 0"),
    _F("square", "x", "zmlx_square", "square", ("2 * x",), "what x ** 2 becomes"),
    _F("tan", "x", "tan", "tan", ("1 + square(tan(x))",), "NaN beyond 2^50 on the CPU"),
    _F("tanh", "x", "tanh", "tanh", ("square(1 / cosh(x))",)),
    _F("trunc", "x", "trunc", "trunc", ("0",), "towards 0"),
)  # fmt: skip

#: Every function and operator by name.
FUNCTIONS: dict[str, Function] = {f.name: f for f in (*_OPERATORS, *_CALLS)}

#: Other spellings of a function: MLX's, Metal's and its own Metal name, and a macro that means it.
ALIASES: dict[str, str] = {
    "ZMLX_EXP_BOUNDED": "exp",
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "gelu_approx": "gelu_tanh",
    "maximum": "max",
    "minimum": "min",
    "power": "pow",
    "remainder": "%",
} | {f.metal: f.name for f in _CALLS}

#: Functions that are only a way to write others: parameters and meaning. `where` and `select` are
#: the conditional operator, with their arguments in their own order.
EXPANSIONS: dict[str, tuple[str, str]] = {
    "clamp": ("x low high", "min(max(x, low), high)"),
    "clip": ("x low high", "min(max(x, low), high)"),
    "reciprocal": ("x", "1 / x"),
    "relu": ("x", "max(x, 0)"),
}

#: Named numbers: literals, so that a kernel needs no macro for them, except INFINITY and NAN.
CONSTANTS: dict[str, str] = {
    "pi": "3.141592653589793",
    "M_PI_F": "3.141592653589793",
    "M_E_F": "2.718281828459045",
    "M_LN2_F": "0.6931471805599453",
    "M_SQRT2_F": "1.4142135623730951",
    "M_SQRT1_2_F": "0.7071067811865476",
    "inf": "INFINITY",
    "INFINITY": "INFINITY",
    "nan": "NAN",
    "NAN": "NAN",
}
