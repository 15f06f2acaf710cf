"""The expression language: reading, printing, values and derivatives."""

from __future__ import annotations

import ctypes
import math
import pickle

import mlx.core as mx
import numpy as np
import pytest
from cplusplus import compiled, pointer
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zmlx import msl
from zmlx.expr import (
    FUNCTIONS,
    Block,
    Expr,
    call,
    gradient,
    literal,
    name,
    parse,
    parse_block,
)

settings.register_profile("expressions", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("expressions")


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


# Reading and printing


@pytest.mark.parametrize(
    ("text", "metal"),
    [
        ("x * tanh(log1p(exp(x)))", "x * tanh(log1p(exp(x)))"),
        ("2", "2.0f"),
        ("1e-5 + .5 + 2. + 0x1p-3 + 1.5f", "1e-5f + .5f + 2.f + 0x1p-3f + 1.5f"),
        ("0x10", "16.0f"),
        ("((x)) + (y * x)", "x + y * x"),
        ("(x + y) * x", "(x + y) * x"),
        ("x - (y - x)", "x - (y - x)"),
        ("x - y - x", "x - y - x"),
        ("x / (y * x)", "x / (y * x)"),
        ("-x * y", "-x * y"),
        ("-(x * y)", "-(x * y)"),
        ("- -x", "-(-x)"),
        ("x - -y", "x - -y"),
        ("+x", "x"),
        ("-x ** 2", "-zmlx_square(x)"),
        ("x ** 3", "zmlx_cube(x)"),
        ("pow(x, 2.0)", "zmlx_square(x)"),
        ("x ** -y ** x", "pow(x, -pow(y, x))"),
        ("x % y", "zmlx_remainder(x, y)"),
        ("x > 0 ? x : y > 0 ? y : 0", "x > 0.0f ? x : y > 0.0f ? y : 0.0f"),
        ("(x > 0 ? x : y) + 1", "(x > 0.0f ? x : y) + 1.0f"),
        ("x if x > 0 else y", "x > 0.0f ? x : y"),
        ("where(x > 0, x, y)", "x > 0.0f ? x : y"),
        ("select(x, y, x > 0)", "x > 0.0f ? y : x"),
        ("not x > 0 and y > 0 or x < 1", "!(x > 0.0f) && y > 0.0f || x < 1.0f"),
        ("(x > 0 || y > 0) && x < 1", "(x > 0.0f || y > 0.0f) && x < 1.0f"),
        ("x ? 1 : y", "x != 0.0f ? 1.0f : y"),
        ("x * (x > 0)", "x * (x > 0.0f ? 1.0f : 0.0f)"),
        ("relu(x)", "zmlx_maximum(x, 0.0f)"),
        ("clip(x, 0, 6)", "zmlx_minimum(zmlx_maximum(x, 0.0f), 6.0f)"),
        ("reciprocal(x + 1)", "1.0f / (x + 1.0f)"),
        ("abs(x) + round(x)", "fabs(x) + rint(x)"),
        ("metal::exp(x) + metal::precise::log(x)", "exp(x) + log(x)"),
        ("pi * x + inf", "3.141592653589793f * x + INFINITY"),
        ("x > y ? true : false", "x > y && true || !(x > y) && false"),
        ("x +\n  y", "x + y"),
    ],
)
def test_metal_text(text, metal):
    e = parse(text)
    assert e.metal() == metal
    assert parse(metal) == e


@pytest.mark.parametrize("f", CALLS, ids=lambda f: f.name)
def test_every_function_reads_back_from_its_metal_text(f):
    e = call(f.name, *map(name, f.parameters.split()))
    assert parse(e.metal()) == e
    assert f.metal.startswith("zmlx_") == (f.metal in msl.function_names())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x + z", "unknown name 'z' at column 5: the names are x, y.\n  x + z\n      ^"),
        ("  ", "an empty expression at column 1."),
        (
            "sgmoid(x)",
            "unknown function 'sgmoid' at column 1: did you mean sigmoid.\n  sgmoid(x)\n",
        ),
        ("fmax(x, y)", "unknown function 'fmax' at column 1"),
        ("x + max(x)", "max takes 2 arguments but got 1 at column 5.\n  x + max(x)\n      ^"),
        ("exp()", "exp takes 1 argument but got 0 at column 1."),
        ("x y", "expected the end but found 'y' at column 3."),
        ("x +", "expected a value but found the end at column 4."),
        ("(x", "expected ')' to close a parenthesis but found the end at column 3."),
        ("x < y < 1", "a second comparison at column 7: write a < b && b < c, or parentheses."),
        ("x // y", "unexpected '//' at column 3: write floor(a / b)."),
        ("x & y", "unexpected '&' at column 3: write && between conditions."),
        ("x ^ 2", "unexpected '^' at column 3: write pow(a, b) or a ** b."),
        ("x[0]", "unexpected '[' at column 2: a name stands for one element"),
        ("x = 2", "expected the end but found '=' at column 3: definitions go into lets"),
        ("1.5h", "'1.5h' is no float literal at column 1."),
        ("1.2.3", "'1.2.3' is no float literal at column 1."),
        ("x * 1e40", "'1e40' is outside the range of float at column 5."),
        ("1e-60", "'1e-60' is outside the range of float at column 1."),
        ("fast::exp(x)", "unknown name 'fast' at column 1"),
        ("float(x)", "expected a value but found 'float' at column 1."),
        ("x ? y", "expected ':' of the conditional but found the end at column 6."),
        ("x +\n y @ 2", "unexpected '@' at line 2, column 4.\n   y @ 2\n     ^"),
    ],
)
def test_errors_show_the_column(text, message):
    with pytest.raises(ValueError, match=r"^\[expression\] ") as raised:
        parse(text, ["x", "y"])
    assert message in str(raised.value)


def test_a_name_cannot_be_a_function_or_a_word_of_metal():
    with pytest.raises(ValueError, match="'exp' must be a name but is a function"):
        parse("x", ["x", "exp"])
    with pytest.raises(ValueError, match="'float' must be a name but is a word of the language"):
        parse("x", ["float"])
    with pytest.raises(ValueError, match="'exp' is a function at column 1"):
        parse("exp")


def test_given_names_hide_constants():
    assert parse("pi", ["pi"]) == name("pi")


def test_nested_parentheses_past_the_stack_are_an_error():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse("(" * 100_000 + "x" + ")" * 100_000)


def test_a_long_sum_needs_no_deep_stack():
    e = parse(" + ".join(["x"] * 20_000))
    assert value(e, x=1.5) == 30_000
    assert parse(e.metal()) == e
    assert value(e.derivative("x"), x=1.5) == 20_000
    assert mlx_value(e, x=[1.5]) == [30_000]


def test_equal_expressions_are_equal_and_hash_alike():
    assert parse("x*(y + 1)") == parse("x * (y + 1.0f)")
    assert len({parse("x*y"), parse("x * y"), parse("y * x")}) == 2
    assert pickle.loads(pickle.dumps(parse("x ? exp(y) : 1"))) == parse("x ? exp(y) : 1")


def test_an_expression_is_immutable():
    with pytest.raises(AttributeError, match="immutable"):
        parse("x").text = "y"


def test_names_and_functions():
    e = parse("b * exp(a) + gelu(b) - 2 * c")
    assert e.names() == ("b", "a", "c")
    assert e.functions() == ("exp", "gelu")


# Values

_POINTS = np.array([-2.5, -1.5, -1, -0.75, -0.25, 0, 0.25, 0.75, 1, 1.5, 2.5, 40])


@pytest.mark.parametrize("f", CALLS, ids=lambda f: f.name)
def test_evaluate_agrees_with_numpy(f):
    names = f.parameters.split()
    grid = dict(zip(names, np.meshgrid(*[_POINTS] * len(names)), strict=True))
    e = call(f.name, *map(name, names))
    want = value(e, **grid)
    # MLX's exp, sin and erf have float32 accuracy in float64 too, on the CPU.
    np.testing.assert_allclose(mlx_value(e, **grid), want, rtol=4e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32, mx.float64])
def test_evaluate_keeps_the_dtype(dtype):
    x = mx.array([1.0, 2.0], dtype=dtype)
    for text in ("x + 1", "exp(x)", "x > 1 ? 1 : 0", "2 * pi * x ** 2", "sigmoid(x)"):
        assert parse(text).evaluate({"x": x}).dtype == dtype, text


def test_evaluate_promotes_as_mlx():
    x, w = mx.array([1.0], dtype=mx.bfloat16), mx.array([2.0])
    assert parse("x * w + 1").evaluate({"x": x, "w": w}).dtype == mx.float32


def test_conditions_count_as_one_and_zero():
    mask, x = mx.array([True, False]), mx.array([3.0, 4.0])
    assert parse("mask + mask").evaluate({"mask": mask}).tolist() == [2, 0]
    assert parse("mask ? x : -x").evaluate({"mask": mask, "x": x}).tolist() == [3, -4]
    assert parse("(x > 3) + (x > 2)").evaluate({"x": x}).tolist() == [1, 2]
    assert parse("x > 3").evaluate({"x": x}).dtype == mx.bool_


def test_integers_keep_their_bits_and_are_not_divided():
    i = mx.array([2**24 + 1, 7])
    assert parse("i + i").evaluate({"i": i}).tolist() == [2**25 + 2, 14]
    with pytest.raises(ValueError, match=r"'/' must have a floating operand, but in 'i / i'"):
        parse("i / i").evaluate({"i": i})


def test_a_missing_array_is_named():
    with pytest.raises(ValueError, match="'arrays' must hold 'y' but does not"):
        parse("x + y").evaluate({"x": mx.array(1.0)})


# Derivatives of the table

#: Kinks, ties, poles and infinities beside ordinary points.
_EDGES = np.array([-np.inf, -100, -2, -1, -0.5, -0.0, 0.5, 1, 2, 3, 100, np.inf, np.nan])


@pytest.mark.parametrize(
    "f", [f for f in FUNCTIONS.values() if f.derivatives], ids=lambda f: f.name
)
def test_derivatives_are_mlx_s_wherever_those_are_finite(f):
    names = f.parameters.split()
    grid = dict(zip(names, (a.ravel() for a in np.meshgrid(*[_EDGES] * len(names))), strict=True))
    e = call(f.name, *map(name, names))
    for of in names:
        want = mlx_gradient(e, of, **grid)
        ours = np.broadcast_to(value(e.derivative(of), **grid), want.shape)
        known = np.isfinite(want)
        np.testing.assert_allclose(ours[known], want[known], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "at", "want"),
    [
        ("max(x, 1)", 1, 0),
        ("max(1, x)", 1, 1),
        ("min(x, 1)", 1, 0),
        ("relu(x)", 0, 0),
        ("abs(x)", 0, 0),
        ("clip(x, 0, 1)", 0, 0),
        ("clip(x, 0, 1)", 1, 0),
        ("x > 0 ? x : 2 * x", 0, 2),
        ("sqrt(x)", 0, math.inf),
    ],
)
def test_ties_follow_mlx(text, at, want):
    e = parse(text)
    assert value(e.derivative("x"), x=at) == want
    assert mlx_gradient(e, "x", x=at) == want


@pytest.mark.parametrize(
    "text", ["x > 0 ? log(x) : 0", "x > 0 ? sqrt(x) * 2 : 0", "max(sqrt(x), 1)"]
)
def test_an_arm_not_taken_makes_no_nan(text):
    """MLX's own gradient is NaN here, from 0 * inf."""
    e = parse(text)
    assert value(e.derivative("x"), x=0.0) == 0
    lets, (dx,) = gradient([e], ["x"], ["g"])
    assert value(lets.inline(dx), x=0.0, g=3.0) == 0


def test_derivatives_read_as_one_would_write_them():
    assert parse("x * x").derivative("x").metal() == "x + x"
    assert parse("x ** 4").derivative("x").metal() == "4.0f * zmlx_cube(x)"
    assert parse("3 * x + y").derivative("x").metal() == "3.0f"
    assert parse("-exp(-x)").derivative("x").metal() == "exp(-x)"
    assert parse("x / y").derivative("y").metal() == "-(x / y / y)"
    assert parse("relu(x)").derivative("x").metal() == "x > 0.0f ? 1.0f : 0.0f"
    assert parse("y > 0 ? 1 : 2").derivative("y").metal() == "0.0f"


def test_constants_are_folded_only_where_float_is_exact():
    assert parse("0.1 * x + 0.2 * x").derivative("x").metal() == "0.1f + 0.2f"
    assert parse("0.5 * x + 0.25 * x").derivative("x").metal() == "0.75f"


# Random expressions

_NAMES = st.sampled_from(["x", "y"]).map(name)
_LITERALS = st.sampled_from(["0", "1", "2", "0.5", "3", "1.25", "1e-1"]).map(literal)


def _trees(functions: list[str], leaves: int) -> st.SearchStrategy[Expr]:
    def node(children: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
        def of(f: str) -> st.SearchStrategy[Expr]:
            return st.tuples(*[children] * FUNCTIONS[f].arity).map(lambda args: call(f, *args))

        return st.sampled_from(functions).flatmap(of)

    return st.recursive(_NAMES | _LITERALS, node, max_leaves=leaves)


_ANY = _trees(list(FUNCTIONS), 20)
_EXACT_NAMES = """
?: || && ! == != < <= > >= + - * / neg abs ceil cube floor fma isfinite isinf isnan max
min round sign sqrt square trunc
"""
_EXACT = _trees(
    _EXACT_NAMES.split(),
    20,
)
_SMOOTH_NAMES = """
+ - * / neg ?: < atan atan2 cosh erf exp expm1 fma gelu gelu_tanh hypot log log1p logaddexp
log_sigmoid max mish min ndtr pow rsqrt sigmoid silu sin softplus sqrt square tanh
"""
_SMOOTH = _trees(
    _SMOOTH_NAMES.split(),
    7,
)
_X = st.sampled_from([-2.3, -1.7, -0.6, -0.2, 0.3, 0.7, 1.1, 1.9, 2.6])
_Y = st.sampled_from([-2.1, -1.3, -0.4, 0.23, 0.83, 1.7, 2.9])


@given(_ANY)
def test_metal_text_reads_back(e):
    assert parse(e.metal()) == e


@given(_EXACT)
def test_evaluate_is_float64_arithmetic(e):
    assume(e.names())
    x, y = (a.ravel() for a in np.meshgrid(_EDGES, _EDGES))
    want = np.broadcast_to(value(e, x=x, y=y), x.shape)
    np.testing.assert_array_equal(np.broadcast_to(mlx_value(e, x=x, y=y), x.shape), want)


@given(_SMOOTH, _X, _Y)
@settings(max_examples=400)
def test_derivative_is_the_limit_of_differences(e, x, y):
    assume(not e.is_condition)
    ours = value(e.derivative("x"), x=x, y=y)
    assume(np.isfinite(ours))
    sizes = [abs(v) for v in values(e, x=x, y=y).values()]
    assume(max(sizes) < 1e2)

    def difference(h: float) -> float:
        return float((value(e, x=x + h, y=y) - value(e, x=x - h, y=y)) / (2 * h))

    # Two steps that disagree mean a kink or a pole near x, or an ill-conditioned expression.
    near, far = difference(1e-5), difference(2e-5)
    tolerance = 1e-6 * max(1.0, abs(far))
    assume(abs(near - far) < tolerance)
    assert abs(ours - near) < 20 * tolerance


@given(_SMOOTH, _X, _Y)
@settings(max_examples=400)
def test_derivative_is_mlx_s(e, x, y):
    d = e.derivative("x")
    sizes = [abs(float(v)) for tree in (e, d) for v in values(tree, x=x, y=y).values()]
    assume(all(v == 0 or 1e-2 < v < 1e2 for v in sizes))
    want = mlx_gradient(e, "x", x=x, y=y)
    assume(np.isfinite(want))
    assert abs(value(d, x=x, y=y) - want) < 1e-4 * max(1.0, *sizes)


@given(st.lists(_SMOOTH, min_size=1, max_size=3), _X, _Y)
def test_reverse_mode_agrees_with_forward_mode(outputs, x, y):
    cotangents = [f"g{i}" for i in range(len(outputs))]
    point = {"x": x, "y": y, **{g: 0.5 + i for i, g in enumerate(cotangents)}}
    lets, gradients = gradient(outputs, ["x", "y"], cotangents)
    for of, found in zip("xy", gradients, strict=True):
        terms = [e.derivative(of) for e in outputs]
        sizes = [abs(v) for t in terms for v in values(t, x=x, y=y).values()]
        assume(all(v == 0 or 1e-3 < v < 1e3 for v in sizes))
        want = sum(point[g] * value(t, x=x, y=y) for g, t in zip(cotangents, terms, strict=True))
        ours = value(lets.inline(found), **point)
        # Forward mode sees that the slope of x - x is 0; MLX, as reverse mode, multiplies it.
        assume(
            np.isfinite(ours) or all(np.isfinite(mlx_gradient(e, of, x=x, y=y)) for e in outputs)
        )
        assert abs(ours - want) <= 1e-9 * max(1.0, *sizes)


# Lets


def test_lets_are_read_in_order():
    block = parse_block("t = x*x; y = t*exp(t)", ["x"])
    assert [n for n, _ in block.lets] == ["t", "y"]
    assert block.names() == ("x",)
    assert block.functions() == ("exp",)
    assert block.metal() == "const float t = x * x;\nconst float y = t * exp(t);\n"
    assert parse_block(block.metal()) == block
    assert block.inline(name("y")) == parse("x*x * exp(x*x)")
    x = mx.array([0.5, 2.0])
    found = block.evaluate({"x": x})
    assert mx.allclose(found["y"], x * x * mx.exp(x * x)).item()


def test_lets_may_stand_on_lines_of_their_own():
    block = parse_block("float t = x +\n  1\nbool c = (t\n > 2)\n\ny = c ? t : 0;\n")
    assert block.metal() == (
        "const float t = x + 1.0f;\nconst bool c = t > 2.0f;\n"
        "const float y = c != 0.0f ? t : 0.0f;\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t = 1; t = 2", "'t' is defined twice at column 8."),
        ("x = 1", "'x' is an input already at column 1."),
        ("t = t + 1", "unknown name 't' at column 5: the names are x."),
        ("exp = 1", "'exp' is a function at column 1: choose another name."),
        ("t = x x", "expected ';' or a new line but found 'x' at column 7."),
        ("t", "expected '=' after t but found the end at column 2."),
        ("", "an empty block at column 1."),
        (
            "t = x\nu = t + v",
            "unknown name 'v' at line 2, column 9: the names are x, t.\n  u = t + v",
        ),
    ],
)
def test_errors_in_lets_show_the_column(text, message):
    with pytest.raises(ValueError, match=r"^\[expression\] ") as raised:
        parse_block(text, ["x"])
    assert message in str(raised.value)


def test_a_name_cannot_be_used_before_its_let():
    with pytest.raises(ValueError, match="'t' is an input already at column 8"):
        parse_block("y = t; t = x")
    with pytest.raises(ValueError, match="'t' is used in its definition at column 5"):
        parse_block("t = t + 1")


def test_gradient_of_a_block_keeps_the_names_of_its_lets():
    block = parse_block("t = x*x; y = t*exp(t)")
    lets, (dx,) = block.gradient([name("y")], ["x"], ["g"])
    names = [n for n, _ in lets.lets]
    assert names == ["t", "t0", "t1"]
    x, g = 0.7, 1.3
    t = x * x
    want = g * (1 + t) * math.exp(t) * 2 * x
    assert value(lets.inline(dx), x=x, g=g) == pytest.approx(want, rel=1e-12)


def test_gradient_sums_over_outputs_and_gives_zero_for_an_unused_input():
    lets, (dx, dw) = gradient([parse("x * 2"), parse("x * 3")], ["x", "w"], ["g", "h"])
    assert value(lets.inline(dx), g=5, h=7) == 31
    assert dw.metal() == "0.0f"


def test_gradient_wants_a_cotangent_for_every_output():
    with pytest.raises(ValueError, match="'cotangents' must name 2 outputs but has 1"):
        gradient([parse("x"), parse("y")], ["x"], ["g"])


def test_gradient_of_a_chain_grows_linearly():
    def lines(depth: int) -> int:
        text = "t1 = x"
        for i in range(1, depth):
            text += f"; t{i + 1} = t{i} * sigmoid(t{i}) + (t{i} > 0 ? tanh(t{i}) : exp(t{i}))"
        block = parse_block(text)
        lets, (dx,) = block.gradient([name(f"t{depth}")], ["x"], ["g"])
        return len(lets.metal()) + len(dx.metal())

    assert lines(80) < 2.5 * lines(40)


def test_gradient_lets_are_used_more_than_once_and_none_twice():
    e = parse("gelu(x * w) * silu(x * w)")
    lets, gradients = gradient([e], ["x", "w"], ["g"])
    written = [f for _, f in lets.lets] + list(gradients)
    for n, f in lets.lets:
        uses = sum(node.args.count(name(n)) for other in written for node in other.nodes())
        uses += list(gradients).count(name(n))
        assert uses > 1, n
        assert all(f not in other.nodes() for other in written if other is not f)


def test_texts_are_deterministic():
    e = parse("gelu(x * w) * silu(x * w) + logaddexp(x, w)")
    assert gradient([e], ["x", "w"], ["g"]) == gradient([e], ["x", "w"], ["g"])
    assert isinstance(gradient([e], ["x"], ["g"]).lets, Block)


# The Metal text, run


def test_metal_text_computes_what_evaluate_computes(tmp_path):
    cases = [call(f.name, *map(name, f.parameters.split())) for f in CALLS]
    cases += [e.derivative("x") for e in cases]
    cases += [parse("x > y ? x : -y"), parse("(x > 0) + (y > 0) * 2 - !(x < 1 && y != 0)")]
    body = "".join(f"case {i}: return {e.metal()};\n" for i, e in enumerate(cases))
    text = (
        msl.header_for(body)
        + f"""
static float one(int which, float x, float y, float z, float c) {{
    (void)x; (void)y; (void)z; (void)c;
    switch (which) {{ {body} }}
    return 0.0f;
}}
extern "C" void run(int which, long n, float* out, const float* x, const float* y) {{
    for (long i = 0; i < n; ++i) out[i] = one(which, x[i], y[i], 0.5f, 1.0f);
}}"""
    )
    run = compiled(text, tmp_path).run
    grid = np.float32([-3, -1.5, -0.7, -0.1, 0.2, 0.9, 1.3, 2.5, 6])
    x, y = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(grid, grid))
    for i, e in enumerate(cases):
        out = np.empty_like(x)
        run(i, ctypes.c_long(x.size), pointer(out), pointer(x), pointer(y))
        want = np.broadcast_to(value(e, x=x, y=y, z=0.5, c=1), x.shape)
        np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6, err_msg=e.metal())


def test_the_table_has_a_row_of_everything_that_numpy_checks():
    assert set(NUMPY) == set(FUNCTIONS)
