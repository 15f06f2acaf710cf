"""What `jit` refuses, and that it shows the line."""

from __future__ import annotations

import functools
import math
import re

import mlx.core as mx
import pytest
from jit_functions import function_from_text, inner

from zmlx.jit_compiler import compile_function, jit


def _global_array(x):
    return x + ARRAY


ARRAY = mx.array(1.0)


def _plain(x):
    return x


def _no_return(x):
    if x > 0:
        return x


def _unassigned(x):
    if x > 0:
        y = x
    return y


def _unassigned_after_loop(x, n: int):
    for i in range(n):
        y = x * i
    return y


def _endless(x):
    while x < 10:
        x += 1.0
    return x


def _endless_counter(x):
    n = 0
    while n < 10:
        if x > 0:
            n += 1
    return n


def _other_counter(x):
    n, m = 0, 0
    while n < 10:
        n = m + 1
        x += n
    return x


def _product_counter(x):
    n = 1
    while n < 10:
        n = n * 2
        x += n
    return x


def _over_list(x):
    for v in [1, 2]:
        x += v
    return x


def _float_range(x):
    for i in range(x):
        x += i
    return x


def _subscript(x):
    return x[0]


def _with(x):
    with open("f"):
        return x


def _attribute(x):
    x.y = 2
    return x


def _defaults(x, eps=1e-5):
    return x + eps


def _star(*x):
    return x[0]


def _string(x):
    return x if x else "no"


def _widths(x):
    if x > 0:
        return x, x
    return x


def _unknown(x):
    return x + missing  # noqa: F821


def _calls_plain(x):
    return _plain(x)


def _recursive(x):
    return _recursive(x)


def _keyword(x):
    return mx.clip(x, 0, a_max=1)


def _arity(x):
    return math.exp(x, x)


def _reduction(x):
    return mx.max(x)


def _bits(x):
    return x & 1


def _declared(x):
    n: int = x * 2
    return n


def _argument(n: int, x):
    n = n * 0.5
    return n + x


def _returned(x) -> int:
    return x * 0.5


def _too_big(n: int):
    return n + 3000000000


def _overflow(n: int):
    return n * 2**31


def _too_big_to_compare(n: int):
    return n < 2**31


def _too_big_to_assign(x):
    n = 2**31 + 1
    return x * n


def _too_big_for_float(x):
    return x * 10**39


def _power_of_a_variable(n: int):
    return n & (2**n - 1)


def _list_value(x):
    a = [x, x + 1]
    return a


def _shape(x):
    return x.shape


def _method_of_array(x):
    return x.sum()


def _generator(x):
    yield x


def _division(x):
    return x + 1 // 0


def _lambda(x):
    f = lambda: x  # noqa: E731
    return f()


def _tuple_value(x):
    return inner(x, x) + 1


def _bare(x):
    x + 1
    return x


def _loop_else(x):
    for _ in range(3):
        x += 1
    else:
        x = 0
    return x


def _float_loop_variable(x):
    for i in range(3):
        i = i * 0.5
        x += i
    return x


def _nan_free(x):
    assert x > 0
    return x


def _empty(x):
    return ()


def _one_for_none(x) -> tuple[()]:
    return x


def _shift(n: int):
    return n + (1 << 40)


def _tower(x):
    return x + 9**9**9


def _huge_shift(x):
    return x + (1 << 2**30)


def _many_digits(x):
    return x + MANY_DIGITS


MANY_DIGITS = 10**5000


def _no_logarithm(x):
    return x + math.log()


def _three_logarithms(x):
    return math.log(x, x, x)


def scaled(function):
    @functools.wraps(function)
    def wrapper(x):
        return 3 * function(x)

    return wrapper


@scaled
def _decorated(x):
    return x


@functools.cache
def _cached(x):
    return x


def _inner_function(x):
    def inner(y):
        return y

    return inner(x)


def _deleted(x):
    y = x
    del y
    return x


def _text_of_no_float(x):
    return x + float("infinite")


REFUSED = [
    (_global_array, "x + ARRAY", "'ARRAY' must be an int, a float or a bool but is of type array"),
    (_no_return, "def _no_return", "'_no_return' may end without a return"),
    (_unassigned, "return y", "'y' may be read before it is assigned"),
    (_unassigned_after_loop, "return y", "'y' may be read before it is assigned"),
    (_endless, "while x < 10", "this 'while' might not end"),
    (_endless_counter, "while n < 10", "this 'while' might not end"),
    (_other_counter, "while n < 10", "this 'while' might not end"),
    (_product_counter, "while n < 10", "this 'while' might not end"),
    (_over_list, "for v in [1, 2]", "a 'for' loop must be over range"),
    (_float_range, "for i in range(x)", "a bound of range must be an int but is a float"),
    (_subscript, "return x[0]", "a 'Subscript' expression is not supported"),
    (_with, 'with open("f")', "a 'with' statement is not supported"),
    (_attribute, "x.y = 2", "only a plain name can be assigned"),
    (_defaults, "eps=1e-5", "default values are not supported"),
    (_star, "def _star", "*arguments are not supported"),
    (_string, 'else "no"', "the constant 'no' is not supported"),
    (_widths, "return x\n", "1 values are returned but elsewhere 2"),
    (_unknown, "missing", "unknown name 'missing'"),
    (_calls_plain, "_plain(x)", "'_plain' is not supported at"),
    (_recursive, "return _recursive(x)", "recursion is not supported"),
    (_keyword, "a_max=1", "only positional arguments are supported"),
    (_arity, "math.exp(x, x)", "math.exp takes 1 argument but got 2"),
    (_reduction, "mx.max(x)", "'mx.max' is not supported"),
    (_bits, "x & 1", "& needs ints but got a float"),
    (_declared, "n: int = x * 2", "'n' is declared int but is assigned a float"),
    (_argument, "n = n * 0.5", "'n' is declared int but is assigned a float"),
    (_returned, "return x * 0.5", "int is declared but a float is returned"),
    (_too_big, "3000000000", "3000000000 is outside the range of a 32-bit int"),
    (_overflow, "2**31", "2147483648 is outside the range of a 32-bit int"),
    (_too_big_to_compare, "n < 2**31", "2147483648 is outside the range of a 32-bit int"),
    (_too_big_to_assign, "n = 2**31 + 1", "2147483649 is outside the range of a 32-bit int"),
    (_too_big_for_float, "10**39", "an int of 130 bits is outside the range of float"),
    (_power_of_a_variable, "2**n", "1 << n is 2 ** n"),
    (_list_value, "a = [x", "'a' cannot take 2 values"),
    (_shape, "x.shape", "'x' is one number and has no 'shape'"),
    (_method_of_array, "x.sum()", "'x' is one number and has no 'sum'"),
    (_generator, "yield x", "a 'Yield' expression is not supported"),
    (_division, "1 // 0", "1 // 0 is not possible"),
    (_lambda, "lambda", "a 'Lambda' expression is not supported"),
    (_tuple_value, "inner(x, x)", "2 outputs cannot stand for one value"),
    (_bare, "x + 1", "a value that nothing takes is not supported"),
    (_loop_else, "x = 0", "'else' after a loop is not supported"),
    (_float_loop_variable, "for i in range(3)", "the loop variable 'i' must stay an int"),
    (_empty, "return ()", "a return without a value is not supported"),
    (_one_for_none, "return x", "1 values are returned but elsewhere 0"),
    (_shift, "1 << 40", "1099511627776 is outside the range of a 32-bit int"),
    (_tower, "9**9**9", "9 ** 387420489 is outside the range of a 32-bit int"),
    (_huge_shift, "2**30", "1 << 1073741824 is outside the range of a 32-bit int"),
    (_many_digits, "MANY_DIGITS", "an int of 16610 bits is outside the range of a 32-bit int"),
    (_no_logarithm, "math.log()", "math.log takes 1 or 2 arguments but got 0"),
    (_three_logarithms, "math.log(x, x, x)", "math.log takes 1 or 2 arguments but got 3"),
    (_decorated, "@scaled", "the decorator 'scaled' of '_decorated' must not be below jit"),
    (_cached, "@functools.cache", "the decorator 'functools.cache' of '_cached' must not be"),
    (_inner_function, "def inner(y)", "a 'def' statement is not supported"),
    (_deleted, "del y", "a 'del' statement is not supported"),
    (_text_of_no_float, '"infinite"', "'infinite' is no float"),
    (_nan_free, "assert x > 0", "a 'assert' statement is not supported"),
]


@pytest.fixture
def from_text(tmp_path):
    return lambda text: function_from_text(text, tmp_path)


@pytest.mark.parametrize(
    ("function", "line", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", "")
)
def test_what_is_not_supported_is_refused_with_its_line(function, line, message):
    with pytest.raises(ValueError, match=r"^\[jit\] ") as raised:
        compile_function(function)
    text = str(raised.value) + "\n"
    assert message in text
    assert re.search(r" at .*test_jit_refusals\.py, line \d+, column \d+[.:]", text)
    assert line in text
    assert text.count("[jit]") == 1
    # The caret stands under the construct.
    first, shown, caret = text.splitlines()[0], *text.splitlines()[1:3]
    assert caret.index("^") - 2 + 1 == int(re.search(r"column (\d+)", first).group(1))
    assert shown[caret.index("^")] != " "


def test_a_function_without_source_is_refused():
    scope: dict[str, object] = {}
    exec("def f(x):\n    return x", scope)
    with pytest.raises(ValueError, match="the source of 'f' must be in a file"):
        compile_function(scope["f"])


def test_a_lambda_is_refused():
    with pytest.raises(ValueError, match="must be a plain `def`"):
        compile_function(lambda x: x)

    def in_a_line(x): return compile_function(lambda y: y)  # fmt: skip

    with pytest.raises(ValueError, match=r"'<lambda>' at .*, line .*must be a plain `def`"):
        in_a_line(1.0)


@pytest.mark.parametrize("what", [int, len, jit(_plain), functools.partial(_plain), 3])
def test_what_is_no_python_function_is_refused(what):
    with pytest.raises(TypeError, match=r"^\[jit\] 'function' must be a Python function but got"):
        jit(what)


def test_a_method_is_refused_and_a_static_one_is_a_function():
    with pytest.raises(ValueError, match=r"a method is not supported at .*: make it a function"):

        class Refused:
            @jit
            def f(self, x):
                return x

    class Taken:
        @staticmethod
        @jit
        def f(x):
            return 2 * x

    assert Taken().f(mx.array([1.0])).tolist() == [2]


@pytest.mark.parametrize("value", [[1.0, 2.0], "1", None])
def test_what_is_neither_a_number_nor_an_array_is_refused(value):
    with pytest.raises(TypeError, match=r"^\[_plain\] 'x' must be an mx.array but got "):
        jit(_plain)(value)


def test_recursion_is_refused_where_the_function_has_no_name_yet():
    with pytest.raises(ValueError, match=r"recursion is not supported at .* column 40"):

        @jit
        def f(n: int):
            return 1 if n < 2 else n * f(n - 1)


def test_the_line_of_an_indented_function_is_its_own():
    def local(x):
        y = x
        return y @ x

    with pytest.raises(ValueError, match="@ is not supported") as raised:
        compile_function(local)
    line = local.__code__.co_firstlineno + 2
    assert f"line {line}, column 16." in str(raised.value)
    assert "          return y @ x\n                 ^" in str(raised.value)


def test_a_function_that_wraps_another_is_refused():
    with pytest.raises(ValueError, match=r"'_plain' wraps another function at .*_refusals\.py"):
        compile_function(scaled(_plain))


def test_a_decorator_above_jit_is_not_jit_s():
    calls = []

    def counted(function):
        calls.append(function.name)
        return function

    @counted
    @jit(bound=3)
    def f(x):
        return x

    assert calls == ["f"]
    assert f(mx.array([2.0])).tolist() == [2]


def test_a_loop_that_a_break_leaves_needs_a_return_after_it():
    with pytest.raises(ValueError, match="'f' may end without a return"):

        @jit(bound=9)
        def f(x):
            while True:
                if x > 0:
                    break
                return x


@pytest.mark.parametrize("types", [3, 0, "x", [("x", "int")]])
def test_types_that_are_no_dict_are_refused(types):
    message = rf"^\[jit\] 'types' must be a dict .* but got {type(types).__name__}\.$"
    with pytest.raises(TypeError, match=message):
        compile_function(_plain, types=types)


def test_what_is_nested_too_deeply_is_refused_with_its_line(from_text):
    deep = from_text("\n\ndef deep(x):\n    return " + "x ** " * 2000 + "x\n")
    with pytest.raises(ValueError, match=r"^\[jit\] 'deep' at .*\.py, line 3 is nested too deeply"):
        compile_function(deep)
