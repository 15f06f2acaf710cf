"""jit: the Metal text, run as C++, against the Python function that it was made from."""

from __future__ import annotations

import ctypes
import math
import re

import mlx.core as mx
import numpy as np
import pytest
from cplusplus import compiled, pointer
from jit_functions import (
    FUNCTIONS,
    JITTED,
    TABLE_SIZE,
    bounded_while,
    early_return,
    function_from_text,
    inner,
    integers,
    kinks,
    nested,
    newton,
    operations_of_mlx,
    range_at_run_time,
    range_with_steps,
    remainders,
    smooth_loop,
    square_plus,
    swap,
)

from zmlx import msl
from zmlx.jit_compiler import compile_function, jit

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
def bits(a: int, b: int):
    return float((a & b) | (a << 1) ^ (b >> 1))


@pytest.mark.parametrize("mapped", [0, 1])
def test_bitwise_operators_map_over_one_operand_alone(mapped):
    a, b = mx.array([[1, 2, 3], [4, 5, 6]]), mx.array([[7], [2]])
    arrays = [a, b]
    arrays[mapped] = mx.stack([arrays[mapped], arrays[mapped] + 3])
    got = mx.vmap(bits, in_axes=tuple(0 if i == mapped else None for i in range(2)))(*arrays)
    for i in range(2):
        x, y = (np.array(v[i] if j == mapped else v) for j, v in enumerate(arrays))
        np.testing.assert_array_equal(np.array(got[i]), (x & y) | (x << 1) ^ (y >> 1))


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


_INT_ENDS = [
    (0, 2**31 - 1, 10**9), (2**31 - 8, 2**31 - 1, 3), (8 - 2**31, -(2**31), -3),
    (2**31 - 1, -(2**31), -(2**31)), (-(2**31), 2**31 - 1, 2**31 - 1), (0, 10, 3), (10, 0, 3),
    (0, 10, -3), (10, -2, -4), (3, 3, 1), (2**31 - 3, 2**31 - 1, 1), (3 - 2**31, -(2**31), -1),
]  # fmt: skip


@pytest.mark.parametrize("target", ["kernel", "reference"])
def test_a_range_ends_where_the_ints_end(target):
    @jit
    def rounds(start: int, stop: int, step: int):
        count = 0
        last = -7
        for last in range(start, stop, step):  # noqa: B007
            count += 1
        return count, last

    columns = [mx.array(list(c), dtype=mx.int32) for c in zip(*_INT_ENDS, strict=True)]
    found = (rounds if target == "kernel" else rounds.trace_reference)(*columns)
    want = [rounds.function(*row) for row in _INT_ENDS]
    assert list(zip(*(a.tolist() for a in found), strict=True)) == want


def test_an_ordinary_range_has_a_plain_counter():
    # So that a compiler unrolls and vectorises it.
    assert "for (int round0 = 0; round0 < bound1; round0 += 1)" in newton.header
    assert "uint" not in range_with_steps.header


def long_sum(count, of):
    return f"def f(x, n: int):\n    return x + ({' + '.join([of] * count)})\n"


def long_chain(count):
    arms = (f"    elif x < {i}:\n        y = {i} * x\n" for i in range(1, count))
    return "".join(
        [
            "def f(x):\n    if x < 0:\n        y = -x\n",
            *arms,
            "    else:\n        y = 3\n    return y\n",
        ]
    )


@pytest.mark.parametrize("of", ["x", "n"])
def test_a_sum_may_be_long(of, tmp_path):
    f = jit(function_from_text(long_sum(500, of), tmp_path))
    x, n = mx.array([0.5, -2.0]), mx.array([3, -1])
    want = [f.function(*row) for row in zip(x.tolist(), n.tolist(), strict=True)]
    assert f(x, n).tolist() == want
    assert f.trace_reference(x, n)[0].tolist() == want
    slope = 501 if of == "x" else 1
    assert mx.grad(lambda x: f(x, n).sum())(x).tolist() == [slope, slope]


def test_a_chain_of_elif_may_be_long_and_is_flat(tmp_path):
    f = jit(function_from_text(long_chain(500), tmp_path))
    x = mx.array([-1.0, 2.5, 498.5, 600.0])
    want = [f.function(v) for v in x.tolist()]
    assert f(x).tolist() == want
    assert f.trace_reference(x)[0].tolist() == want
    assert mx.grad(lambda x: f(x).sum())(x).tolist() == [-1, 3, 499, 0]
    # Metal's compiler takes 256 braces in each other.
    assert not re.search("^ {12}", f.header, re.MULTILINE)


def test_a_chain_of_floor_divisions_has_a_text_of_its_length(tmp_path):
    """Each writes what it divides twice."""
    text = f"def f(x, y):\n    return x{' // y' * 12} + x // (9 + x // (9 + x * y // (9 + y)))\n"
    f = jit(function_from_text(text, tmp_path))
    assert len(f.header) + len(f.derivative.header) < 10_000
    x, y = mx.array([1e6, -1e6, 2.5]), mx.array([1.25, 1.5, 0.75])
    want = [f.function(*row) for row in zip(x.tolist(), y.tolist(), strict=True)]
    assert f(x, y).tolist() == want
    assert f.trace_reference(x, y)[0].tolist() == want
    assert not mx.grad(lambda x: f(x, y).sum())(x).any()


def test_floor_division_by_infinity_is_that_of_python():
    @jit
    def f(x, y):
        return x // y

    rows = [(x, y) for x in (-2.5, 3.0, 1e30, math.inf) for y in (math.inf, -math.inf, 2.0, -2.0)]
    x, y = (mx.array(list(column)) for column in zip(*rows, strict=True))
    want = [f.function(*row) for row in rows]
    np.testing.assert_array_equal(f(x, y), np.array(want, np.float32))
    np.testing.assert_array_equal(f.trace_reference(x, y)[0], np.array(want, np.float32))
    finite = mx.grad(lambda x: f(x, y).sum())(x)[:12]
    assert not finite.any()


@pytest.mark.parametrize("count", ["n += 2", "n = n + 2", "n = 2 + n", "n = n - -2"])
def test_a_loop_that_counts_needs_no_bound(count, tmp_path):
    text = f"def f(x):\n    n = 0\n    while n < 9 and x > 0:\n        x = x - 1\n        {count}\n"
    f = jit(function_from_text(text + "    return x + n\n", tmp_path))
    x = mx.array([0.5, 3.5, 100.0])
    want = [f.function(v) for v in x.tolist()]
    assert f(x).tolist() == want
    assert f.trace_reference(x)[0].tolist() == want


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
