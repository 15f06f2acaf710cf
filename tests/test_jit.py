"""jit: the Metal text, run as C++, against the Python function that it was made from."""

from __future__ import annotations

import ctypes
import math
import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cplusplus import compiled, pointer

from zmlx import msl
from zmlx.jit_compiler import JitFunction, compile_function, jit

HALF = 0.5
TABLE_SIZE = 3


@jit
def polynomial(x):
    y = 1
    y += x
    y *= x
    y -= 2 * x**3
    y /= 1 + x**2
    return y


@jit
def early_return(x, y):
    if x > y:
        return math.exp(-x)
    if 0 < x <= 1:
        return x * y
    return abs(y) - x


@jit
def elif_chain(x):
    if x < -1:
        y = -1.0
    elif x < 0:
        y = x * x
    elif x == 0:
        y = 7
    else:
        y = math.sqrt(x)
    return y + HALF


@jit
def conditional(x, y):
    return x if x > y else (y if y > 0 else -x * y)


@jit
def logic(x, y):
    a = x > 0 and not y > 0
    b = a or (x < -1 or y < x)
    return 2.0 if b else (1.0 if a != b else 0.5)


@jit
def operands_of_and_or(x, y):
    return (x or 3.0) + (x and y)


@jit
def chained(x, y):
    return 1.0 if -1 < x < y < 2 else (2.0 if x == x != y else 0.0)


@jit
def newton(a, n: int):
    x = a * a + 1.0
    target = x
    for _ in range(n):
        x -= (x * x - target) / (2.0 * x)
    return x


@jit
def range_with_steps(x):
    total = 0.0
    for i in range(10, -3, -4):
        total += i * x
    for i in range(1, 8, 3):
        total -= i / (1 + x * x)
    return total + i


@jit
def range_at_run_time(x, start: int, stop: int, step: int):
    total = x
    for i in range(start, stop, step):
        total = total * 0.5 + i
        i = 100
    return total


@jit
def integers(n: int, m: int):
    k = n // (m * m + 1)
    k = k * 3 - n % 7 + (-n) % 5
    k += (n << 2) ^ (m & 6) | (n >> 1)
    k -= abs(m) + max(n, m, -2) * min(n, 4) + n**3
    return ~k, n / (m * m + 1), -((n // 3) ** 2)


@jit
def bools(flag: bool, x):
    count = flag + (x > 0) + True
    both = flag and x > 0
    return count, both, x * flag, flag == (x > 0), flag ^ (x > 0)


@jit
def type_grows(x):
    total = 0
    for i in range(4):
        total = total + i
        if i == 2:
            total = total * x
    return total


@jit
def swap(x, y):
    for _ in range(3):
        x, y = y, x + y
    a = b = x * y
    return a - y, b


@jit
def breaks(x, n: int):
    total = 0.0
    for i in range(n):
        if i == 3:
            continue
        total += x
        if total > 2.5:
            break
        for j in range(5):
            if j > i:
                break
            total += 0.125
    return total


@jit
def return_in_loop(x):
    y = x
    for i in range(20):
        y = y * 0.75 + 0.1
        if y < 0.5:
            return y + i
    return -y


@jit
def counted_while(x, n: int):
    total = x
    while n < 10 and total < 50:
        total += n * x
        n += 2
    return total, n


@jit(bound=40)
def bounded_while(x):
    y = abs(x) + 0.01
    while y < 5:
        y *= 1.5
    return y


@jit
def inner(u, v):
    return u * v, u - v


@jit
def square_plus(u):
    return u * u + 1


@jit
def nested(x, y):
    p, q = inner(square_plus(x), y * 2)
    if p > 0:
        p = square_plus(p - q)
    return p / square_plus(q)


@jit
def library(x):
    a = math.sin(x) + math.log1p(x * x) + math.erf(x) - math.atan2(x, 2)
    b = math.hypot(x, 1.5) + math.fabs(x) + math.cosh(x) * math.expm1(x)
    c = math.floor(x) + math.ceil(x) + round(x) + int(x) + math.log(x * x + 2, 3)
    return a * b + c * math.pi if math.isfinite(x) else math.inf


@jit
def operations_of_mlx(x, y):
    a = mx.sigmoid(x) - mx.maximum(x, y) + mx.where(x > 0, x, 2 * x) * mx.clip(y, -1, 1)
    b = nn.silu(x) + nn.gelu(y) * nn.softplus(x) + nn.relu(y) + mx.logaddexp(x, y)
    return a * b + mx.floor(x) + mx.round(y) + mx.square(x) * mx.rsqrt(1 + mx.abs(y))


@jit
def remainders(x, y):
    return x % y + x // y, math.fmod(x, y)


@jit
def powers(x):
    return (x * x + 0.1) ** 0.5 + x**2 - pow(x, 3) + 2**x


@jit
def kinks(x, y):
    return max(x, y) * min(x, 1.0) + abs(x - y) + max(x, 0)


@jit
def dead_code(x):
    if x > 0:
        return x * x + x * x
        return x
    for i in range(2 * 3 + 2**2):
        if i > 8:
            break
            x = x + 100
        x = x + i
    return x
    return x * x


@jit
def underscores(half, sign, x_d_y, out):
    exp = half * sign
    exp_ = exp + x_d_y
    return math.exp(exp) + exp_ * out


@jit
def smooth_loop(x, y, n: int):
    s = 0.0
    v = x
    for i in range(n):
        v = math.tanh(v * y + i * 0.1)
        if v > 0.3:
            s += v * v
        else:
            s -= math.sin(v) / (i + 1)
    return s, v * y


def early_exit(x, y):
    while x < 10.0 and y > 0:
        x = x * 2 + 1
        y -= 0.3
    return x * y


early_exit = jit(bound=100)(early_exit)

JITTED = [f for f in list(globals().values()) if isinstance(f, JitFunction)]
#: Those that plain Python can run.
FUNCTIONS = [f for f in JITTED if f is not operations_of_mlx]
_FLOATS = [-3.1, -1.7, -1.0, -0.55, 0.0, 0.21, 0.8, 1.0, 1.45, 2.3]
_INTS = [-7, -2, 0, 1, 3, 6]
_C = {"float": ctypes.c_float, "int": ctypes.c_int, "bool": ctypes.c_bool}
_NUMPY = {"float": np.float32, "int": np.int32, "bool": np.bool_}


def points(f, seed=0):
    """One array of values per input: a grid for up to two inputs, else a sample of it."""
    axes = {"float": _FLOATS, "int": _INTS, "bool": [False, True]}
    grid = [a.ravel() for a in np.meshgrid(*[axes[t] for t in f.inputs.values()])]
    keep = np.random.default_rng(seed).permutation(grid[0].size)[:300]
    chosen = [a[keep] for a in grid]
    if f is range_at_run_time:
        chosen[3] = np.where(chosen[3] == 0, 2, chosen[3])
    if f is remainders:
        chosen[1] = np.where(chosen[1] == 0, 0.7, chosen[1])
    return chosen


def rows(f, seed=0):
    cast = {"float": float, "int": int, "bool": bool}
    types = f.inputs.values()
    return [
        tuple(cast[t](v) for t, v in zip(types, row, strict=True))
        for row in zip(*points(f, seed), strict=True)
    ]


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def kernel(f, derivative):
    """`source` or `derivative_source` as the body of an elementwise kernel, and its name."""
    text = f.derivative if derivative else f.value
    body = f.derivative_source if derivative else f.source
    inputs = "".join(f", const {t}* {n}_array" for n, t in f.inputs.items())
    outputs = "".join(f", {t}* {n}_result" for n, t in text.results.items())
    lines = [
        f'extern "C" void run_{text.call}(long size{inputs}{outputs}) {{',
        "for (long element = 0; element < size; ++element) {",
        *(f"{t} {n} = {n}_array[element];" for n, t in f.inputs.items()),
        body,
        *(f"{n}_result[element] = {n};" for n in text.results),
        "}}\n",
    ]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a function as a kernel; those of `JITTED` are compiled together."""
    folder = tmp_path_factory.mktemp("jit")

    def build(functions):
        texts = {t: None for f in functions for k in (f.value, f.derivative) for t in k.functions}
        own = "\n".join(texts)
        runs = {kernel(f, d): None for f in functions for d in (False, True)}
        return compiled(msl.header_for(own) + own + "".join(runs), folder)

    together = build(JITTED)

    def call(f, derivative=False):
        text = f.derivative if derivative else f.value
        library = together if f in JITTED else build([f])
        arrays = [
            np.ascontiguousarray(p, dtype=_NUMPY[t])
            for p, t in zip(points(f), f.inputs.values(), strict=True)
        ]
        results = {n: np.empty(arrays[0].shape, _NUMPY[t]) for n, t in text.results.items()}
        getattr(library, f"run_{text.call}")(
            ctypes.c_long(arrays[0].size), *map(pointer, arrays), *map(pointer, results.values())
        )
        return results

    return call


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.name)
def test_metal_text_computes_what_python_computes(f, run):
    results = run(f)
    want = np.array([as_tuple(f.function(*row)) for row in rows(f)], dtype=np.float64).T
    assert len(results) == len(want)
    for (n, ours), exact in zip(results.items(), want, strict=True):
        if f.outputs[n] == "float":
            np.testing.assert_allclose(ours, exact, rtol=2e-5, atol=2e-5)
        else:
            np.testing.assert_array_equal(ours, exact)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.name)
def test_reference_computes_what_python_computes(f):
    arrays = [
        mx.array(p.astype(_NUMPY[t])) for p, t in zip(points(f), f.inputs.values(), strict=True)
    ]
    outputs = f.trace_reference(*arrays)
    want = np.array([as_tuple(f.function(*row)) for row in rows(f)], dtype=np.float64).T
    for ours, exact, t in zip(outputs, want, f.outputs.values(), strict=True):
        assert ours.dtype == {"float": mx.float32, "int": mx.int32, "bool": mx.bool_}[t]
        if t == "float":
            np.testing.assert_allclose(np.array(ours), exact, rtol=2e-5, atol=2e-5)
        else:
            np.testing.assert_array_equal(np.array(ours), exact)


def _floats(types):
    return [n for n, t in types.items() if t == "float"]


@pytest.mark.parametrize(
    "f", [f for f in FUNCTIONS if f.derivative is not f.value], ids=lambda f: f.name
)
def test_derivatives_are_the_limits_of_differences(f, run):
    results = run(f, derivative=True)
    values = run(f)
    for n in f.outputs:
        np.testing.assert_allclose(results[n], values[n], rtol=1e-6, atol=1e-6)
    checked = 0
    for k, row in enumerate(rows(f)):
        for i, x in enumerate(f.inputs):
            if f.inputs[x] != "float":
                continue

            def shifted(h, i=i, row=row):
                moved = (*row[:i], row[i] + h, *row[i + 1 :])
                return np.array(as_tuple(f.function(*moved)), dtype=np.float64)

            near = (shifted(1e-5) - shifted(-1e-5)) / 2e-5
            left, right = shifted(0) - shifted(-1e-5), shifted(1e-5) - shifted(0)
            for j, y in enumerate(f.outputs):
                # Left and right slopes differ at a kink, where the derivative is a convention, and
                # both are huge at a jump.
                kink = abs(right[j] - left[j]) > 1e-7 * max(1, abs(near[j])) or abs(left[j]) > 0.01
                if f.outputs[y] == "float" and not kink:
                    ours = results[f"{y}_d_{x}"][k]
                    assert ours == pytest.approx(near[j], rel=1e-3, abs=2e-4), (row, x, y)
                    checked += 1
    assert checked > 5


def test_ties_follow_mlx(run):
    k = [i for i, row in enumerate(rows(kinks)) if row == (1.0, 1.0)]
    found = run(kinks, derivative=True)
    # max passes a tie to its second argument, as min does, and |x - y| is flat.
    assert found["out_d_x"][k] == 0 + 0 + 0 + 1
    assert found["out_d_y"][k] == 1


def test_an_arm_not_taken_makes_no_nan(run):
    @jit
    def safe(x):
        return math.log(x) if x > 0 else x

    found = run(safe, derivative=True)
    x = points(safe)[0]
    want = np.where(x > 0, 1 / np.where(x > 0, x, 1), 1)
    np.testing.assert_allclose(found["out_d_x"], want, rtol=1e-6)


def test_reference_works_under_mlx_transforms():
    x = mx.array([-2.0, -0.5, 0.4, 1.5])
    y = mx.array([0.3, 1.2, -0.7, 2.0])
    for f in (early_return, swap, nested, breaks_static):
        values = f.trace_reference(x, y)[0]
        one = mx.compile(lambda *a, f=f: f.trace_reference(*a)[0])(x, y)
        many = mx.vmap(lambda *a, f=f: f.trace_reference(*a)[0])(x, y)
        assert mx.allclose(one, values, rtol=1e-5)
        assert mx.allclose(many, values, rtol=1e-5)


@jit
def breaks_static(x, y):
    total = y
    for i in range(6):
        if i == 1:
            continue
        total += x * i
        if total > 2:
            break
    return total


def test_reference_gradient_is_the_kernel_s(run):
    arrays = [mx.array(p.astype(np.float32)) for p in points(nested)]
    got = mx.grad(lambda *a: nested.trace_reference(*a)[0].sum(), argnums=(0, 1))(*arrays)
    want = run(nested, derivative=True)
    np.testing.assert_allclose(np.array(got[0]), want["out_d_x"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.array(got[1]), want["out_d_y"], rtol=1e-4, atol=1e-4)


def test_a_bounded_while_is_traceable():
    x = mx.array([0.3, 4.0, -2.0])
    out = mx.compile(lambda x: bounded_while.trace_reference(x)[0])(x)
    assert mx.allclose(out, bounded_while.trace_reference(x)[0])


def test_a_range_that_depends_on_the_data_says_why_it_cannot_be_traced():
    with pytest.raises(ValueError, match=r"must run outside mx\.compile and mx\.vmap"):
        mx.compile(lambda a, n: newton.trace_reference(a, n)[0])(mx.array([2.0]), mx.array([3]))


def test_a_while_that_meets_its_bound_gives_nan(run):
    @jit(bound=3)
    def slow(x, n: int):
        while x < 100:
            x += 1.0
            n += 1
        return x, n, x > n

    found = run(slow, derivative=True)
    assert np.isnan(found["out0"]).all()
    assert np.isnan(found["out0_d_x"]).all()
    assert (found["out1"] == -(2**31)).all()
    x, n, flag = slow.trace_reference(mx.array([99.5, 0.0]), mx.array([1, 1]))
    assert x[0].item() == 100.5
    assert math.isnan(x[1].item())
    assert n.tolist() == [2, -(2**31)]
    assert flag.tolist() == [True, False]


def test_types_can_be_given_for_the_inputs():
    def twice(x):
        return x + x

    assert compile_function(twice).outputs == {"out": "float"}
    assert compile_function(twice, types={"x": "int"}).outputs == {"out": "int"}
    with pytest.raises(ValueError, match="'types' must name inputs but got 'y'"):
        compile_function(twice, types={"y": "int"})


def test_numbers_from_outside_are_constants():
    scale = 0.25

    @jit
    def scaled(x):
        return x * scale + TABLE_SIZE

    assert "x * 0.25f + 3.0f" in scaled.header


def test_the_header_has_what_the_functions_call():
    assert "float zmlx_sigmoid(" in operations_of_mlx.value.header
    assert "float zmlx_gelu(" in operations_of_mlx.value.header
    assert "int zmlx_int_divide(" in integers.header
    assert square_plus.value.functions[0] in nested.header
    assert "#define ZMLX_FAIL" not in nested.header


def test_operations_of_mlx_are_those_of_mlx(run):
    arrays = [mx.array(p.astype(np.float32)) for p in points(operations_of_mlx)]
    outputs = operations_of_mlx.trace_reference(*arrays)
    found = run(operations_of_mlx, derivative=True)
    np.testing.assert_allclose(found["out"], np.array(outputs[0]), rtol=1e-4, atol=1e-4)
    total = lambda *a: operations_of_mlx.trace_reference(*a)[0].sum()  # noqa: E731
    for n, want in zip("xy", mx.grad(total, argnums=(0, 1))(*arrays), strict=True):
        np.testing.assert_allclose(found[f"out_d_{n}"], np.array(want), rtol=1e-4, atol=1e-4)


def test_operations_of_mlx_keep_ints():
    @jit
    def f(x, n: int):
        return mx.clip(x, 0, 6) + mx.reciprocal(x), mx.abs(n), mx.maximum(n, 2), mx.isnan(x)

    assert list(f.outputs.values()) == ["float", "int", "int", "bool"]
    x, n = mx.array([7.5, -0.5, math.nan]), mx.array([-3, 4, 1])
    y, size, most, bad = f.trace_reference(x, n)
    assert mx.allclose(y[:2], mx.clip(x, 0, 6)[:2] + 1 / x[:2])
    assert (size.tolist(), most.tolist()) == ([3, 4, 1], [2, 4, 2])
    assert bad.tolist() == [False, False, True]


def test_variables_are_declared_at_the_top():
    body = smooth_loop.value.functions[-1]
    assert body.index("float s = 0.0f;") < body.index("for (")
    assert not re.search(r"^ {8,}(float|int|bool) \w+ =", body, re.MULTILINE)


def test_texts_are_deterministic_and_named_by_content():
    again = compile_function(nested.function)
    assert again.value == nested.value
    assert again.derivative == nested.derivative
    assert compile_function(swap.function).value.call != nested.value.call
    assert re.fullmatch(r"jit_nested_[0-9a-f]{8}", nested.value.call)


def test_calling_with_numbers_runs_python_and_with_arrays_mlx():
    assert square_plus(3.0) == 10
    assert inner(2, 3) == (6, -1)
    assert square_plus(mx.array([3.0])).tolist() == [10]


def test_integer_inputs_stay_integers_past_24_bits(run):
    @jit
    def successor(n: int):
        return n * 10_000_000 + 1

    assert run(successor)["out"].tolist() == [n * 10_000_000 + 1 for n in points(successor)[0]]


# What is refused, with the line


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


def _returned(x) -> int:
    return x * 0.5


def _too_big(x):
    return x + 3000000000


def _overflow(x):
    return x * 2**31


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


REFUSED = [
    (_global_array, "x + ARRAY", "'ARRAY' must be an int, a float or a bool but is of type array"),
    (_no_return, "def _no_return", "'_no_return' may end without a return"),
    (_unassigned, "return y", "'y' may be read before it is assigned"),
    (_unassigned_after_loop, "return y", "'y' may be read before it is assigned"),
    (_endless, "while x < 10", "this 'while' might not end"),
    (_endless_counter, "while n < 10", "this 'while' might not end"),
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
    (_returned, "return x * 0.5", "int is declared but a float is returned"),
    (_too_big, "3000000000", "3000000000 is outside the range of a 32-bit int"),
    (_overflow, "2**31", "2147483648 is outside the range of a 32-bit int"),
    (_division, "1 // 0", "1 // 0 is not possible"),
    (_lambda, "lambda", "a 'Lambda' expression is not supported"),
    (_tuple_value, "inner(x, x)", "2 outputs cannot stand for one value"),
    (_bare, "x + 1", "a value that nothing takes is not supported"),
    (_loop_else, "x = 0", "'else' after a loop is not supported"),
    (_float_loop_variable, "for i in range(3)", "the loop variable 'i' must stay an int"),
    (_nan_free, "assert x > 0", "a 'assert' statement is not supported"),
]


@pytest.mark.parametrize(
    ("function", "line", "message"), REFUSED, ids=lambda v: getattr(v, "__name__", "")
)
def test_what_is_not_supported_is_refused_with_its_line(function, line, message):
    with pytest.raises(ValueError, match=r"^\[jit\] ") as raised:
        compile_function(function)
    text = str(raised.value) + "\n"
    assert message in text
    assert re.search(r" at .*test_jit\.py, line \d+, column \d+[.:]", text)
    assert line in text
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


def test_the_line_of_an_indented_function_is_its_own():
    def local(x):
        y = x
        return y @ x

    with pytest.raises(ValueError, match="@ is not supported") as raised:
        compile_function(local)
    line = local.__code__.co_firstlineno + 2
    assert f"line {line}, column 16." in str(raised.value)
    assert "          return y @ x\n                 ^" in str(raised.value)
