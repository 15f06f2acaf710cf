"""The expression language: reading, printing, names and lets."""

from __future__ import annotations

import math
import pickle

import mlx.core as mx
import pytest
from expr_oracle import CALLS, mlx_value, value

import zmlx
from zmlx import msl
from zmlx.expr import (
    Block,
    call,
    gradient,
    name,
    parse,
    parse_block,
)

# Reading and printing


@pytest.mark.parametrize(
    ("text", "metal"),
    [
        ("x * tanh(log1p(exp(x)))", "x * tanh(log1p(exp(x)))"),
        ("2", "2.0f"),
        ("1e-5 + .5 + 2. + 0x1p-3 + 1.5f", "1e-5f + .5f + 2.f + 0x1p-3f + 1.5f"),
        ("0x10", "16.0f"),
        ("0e999999999 + 0x.8p0 + 0x1p-149", "0.0f + 0x.8p0f + 0x1p-149f"),
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
        ("x * 1e999999999", "'1e999999999' is outside the range of float at column 5."),
        ("x * 1e-999999999", "'1e-999999999' is outside the range of float at column 5."),
        ("x * 0x1p99999", "'0x1p99999' is outside the range of float at column 5."),
        ("x * 0x1p-1080", "'0x1p-1080' is outside the range of float at column 5."),
        pytest.param(
            "x * 0." + "1" * 5000, "a number of more than 1000 characters at column 5.", id="long"
        ),
        ("x * 0x1.2.3p1", "'0x1.2.3p1' is no float literal at column 5."),
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
    for word in ("wchar_t", "char16_t", "char32_t"):
        with pytest.raises(ValueError, match=f"'{word}' must be a name but is a word"):
            zmlx.expression(f"{word} + 1", inputs=(word,))
    with pytest.raises(ValueError, match="'exp' is a function at column 1"):
        parse("exp")


def test_given_names_hide_constants():
    assert parse("pi", ["pi"]) == name("pi")
    for names in (None, ["x"]):
        assert parse_block("pi = 2 * x; y = pi", names).lets[1] == ("y", name("pi"))


def test_nested_parentheses_past_the_stack_are_an_error():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse("(" * 100_000 + "x" + ")" * 100_000)


def test_a_long_sum_needs_no_deep_stack():
    e = parse(" + ".join(["x"] * 20_000))
    assert value(e, x=1.5) == 30_000
    assert parse(e.metal()) == e
    assert value(e.derivative("x"), x=1.5) == 20_000
    assert mlx_value(e, x=[1.5]) == [30_000]


def test_a_deep_power_has_a_gradient():
    e = parse("**".join(["x"] + ["1"] * 250))
    assert value(e.derivative("x"), x=1.5) == 1
    lets, (dx,) = gradient([e], ["x"], ["g"])
    assert value(lets.inline(dx), x=1.5, g=3) == 3


def test_conditionals_may_lie_in_one_another_through_lets():
    lets = "t0 = x" + "".join(f"; t{i + 1} = t{i} > 0 ? t{i} * w : 0" for i in range(300))
    block, (dx,) = parse_block(lets).gradient([name("t300")], ["x"], ["g"])
    assert value(block.inline(dx), x=1.5, w=1, g=3) == 3


def test_equal_expressions_are_equal_and_hash_alike():
    assert parse("x*(y + 1)") == parse("x * (y + 1.0f)")
    assert len({parse("x*y"), parse("x * y"), parse("y * x")}) == 2


def test_a_pickled_expression_is_the_same():
    for e in (parse("x ? exp(y) : 1"), parse("NAN * nan + pi", ["NAN", "pi"]),
              parse_block("c = x > 1").typed(parse("c * 2", ["c"]))):  # fmt: skip
        assert pickle.loads(pickle.dumps(e)) is e
    long = parse(" + ".join(f"{i} * x" for i in range(5000)))
    assert pickle.loads(pickle.dumps(long)) is long


def test_renaming_keeps_conditions():
    e = call("&&", name("c", condition=True), name("x"))
    renamed = e.rename({"c": "d", "x": "y"})
    assert renamed.metal() == "d && y != 0.0f"
    assert renamed.args[0].is_condition


def test_an_expression_is_immutable():
    with pytest.raises(AttributeError, match="immutable"):
        parse("x").text = "y"


def test_names_and_functions():
    e = parse("b * exp(a) + gelu(b) - 2 * c")
    assert e.names() == ("b", "a", "c")
    assert e.functions() == ("exp", "gelu")


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
