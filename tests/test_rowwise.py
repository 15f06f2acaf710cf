"""zmlx.rowwise: reductions and maps of rows from expressions."""

import contextlib
import math
import pickle

import mlx.core as mx
import numpy as np
import pytest
from samples import X, Y, close

import zmlx
from zmlx import launch


def test_rowwise_reduce():
    norm = zmlx.rowwise.reduce("sum", "x * x", finalize="sqrt(total / D)")
    close(norm(X), mx.sqrt((X * X).mean(-1)))
    close(
        mx.grad(lambda x: norm(x).sum())(X),
        mx.grad(lambda x: mx.sqrt((x * x).mean(-1)).sum())(X),
    )
    for op in ("max", "min", "prod", "sum"):
        close(zmlx.rowwise.reduce(op)(X), getattr(mx, op)(X, axis=-1), 1e-4)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("op", ["max", "min", "prod", "sum"])
def test_a_row_with_nan_reduces_to_nan(op, kind):
    reduce = zmlx.rowwise.reduce(op)
    for width in (1, 3, 70, 1000):
        # In every place of the row in turn, and in none.
        places = np.linspace(0, width - 1, min(width, 40)).astype(int)
        x = np.ones((len(places) + 1, width), dtype=np.float32)
        x[np.arange(len(places)), places] = np.nan
        with launch.geometry(kind):
            y = np.array(reduce(mx.array(x)))
        np.testing.assert_array_equal(np.isnan(y), [True] * len(places) + [False])


@pytest.mark.parametrize(
    ("op", "start"), [("max", -math.inf), ("min", math.inf), ("prod", 1.0), ("sum", 0.0)]
)
def test_an_empty_row_reduces_to_where_the_reduction_starts(op, start):
    reduce, empty = zmlx.rowwise.reduce(op), mx.zeros((2, 0))
    assert reduce(empty).tolist() == [start, start]
    with zmlx.target("reference"):
        assert reduce(empty).tolist() == [start, start]
    assert mx.grad(lambda x: reduce(x).sum())(empty).shape == (2, 0)


def test_rowwise_map_reduce_with_every_kind_of_input():
    f = zmlx.rowwise.map_reduce(
        {"m": ("max", "x"), "s": ("sum", "exp(x - m)")},
        {"y": "w * exp(x - m) / s * scale", "lse": "m + log(s) + shift"},
        inputs={"x": "row", "w": "column", "shift": "per_row", "scale": "scalar"},
    )
    shift = mx.arange(3).astype(mx.float32)
    y, lse = f(X, Y[0], shift, 2.0)
    close(y, Y[0] * mx.softmax(X, axis=-1) * 2.0)
    close(lse, mx.logsumexp(X, axis=-1) + shift)


@pytest.mark.parametrize("target", [None, "reference"])
def test_the_row_length_and_the_index_are_floats(target):
    """As unsigned integers they wrap below zero and beyond 2^32, and cut off quotients."""
    i, d = np.arange(4, dtype=np.float32), np.float32(4)
    outputs = {
        "-j": -i, "j - D": i - d, "j - D < 0": i < d, "j / D": i / d, "j % D": i,
        "m + D * D": d * d, "m * x + h * j - total / D": i / d + 1.5,
    }  # fmt: skip
    names = {f"y{k}": text for k, text in enumerate(outputs)} | {"D": "1 / D", "j": "1 - j"}
    f = zmlx.rowwise.map_reduce(
        {"m": ("max", "x"), "total": ("sum", "-j")}, names, lets="h = 1 / D"
    )  # fmt: skip
    long = zmlx.rowwise.map_reduce({"m": ("max", "j * j")}, "m")
    with zmlx.target(target) if target else contextlib.nullcontext():
        *got, inverse, away = f(mx.zeros((3, 4)))
        for y, want in zip(got, outputs.values(), strict=True):
            np.testing.assert_array_equal(np.array(y)[0], want)
        assert inverse.tolist() == [0.25] * 3
        assert away[0].tolist() == [1, 0, -1, -2]
        assert long(mx.zeros((1, 70000))).tolist() == [np.float32(69999) ** 2]
    # The gradient is that of the same numbers.
    loss = zmlx.rowwise.map_reduce({"s": ("sum", "x * x * (j - D) / D")}, "s")
    dx = mx.grad(lambda x: loss(x).sum())(mx.ones((3, 4)))
    np.testing.assert_allclose(np.array(dx)[1], 2 * (i - d) / d)


def test_a_let_of_the_whole_row_may_come_before_every_walk():
    kinds = {"x": "row", "s": "scalar"}
    reductions = {"m": ("sum", "x * h")}
    f = zmlx.rowwise.map_reduce(reductions, "m + h", inputs=kinds, lets="h = 2 * s / D")
    close(f(X, 3.0), 6 * X.mean(-1) + 6 / 70)
    scaled = zmlx.rowwise.map_reduce({}, "x * h", lets="h = 1 / D")
    close(scaled(X), X / 70)


def test_lets_that_name_several_lets_are_ordered_in_time():
    lets = "t0 = x; t1 = 2 * x"
    lets += "".join(f"; t{i} = 0.5 * t{i - 1} + 0.5 * t{i - 2}" for i in range(2, 60))
    close(zmlx.rowwise.map_reduce({"m": ("sum", "t59")}, "m", lets=lets)(X), X.sum(-1) * 5 / 3)


def test_kept_values_change_nothing():
    reductions = {"m": ("max", "x"), "s": ("sum", "e")}
    plain = zmlx.rowwise.map_reduce(reductions, "e / s", lets="e = exp(x - m)")
    kept = zmlx.rowwise.map_reduce(reductions, "e / s", lets="e = exp(x - m)", keep=("e",))
    close(plain(X), kept(X), 1e-7)
    # Too long to be kept.
    long = mx.broadcast_to(X[:, :1], (3, launch.LONGEST_KEPT_ROW + 1))
    close(plain(long), kept(long), 1e-7)


def test_only_what_differs_along_a_row_is_kept():
    make, lets = zmlx.rowwise.map_reduce, "t = a * 2; u = x * t"
    make({"a": ("sum", "x")}, "u * t", lets=lets, keep=("u",))
    with pytest.raises(ValueError, match="'keep' must name elements but got 't', which is one"):
        make({"a": ("sum", "x")}, "u * t", lets=lets, keep=("t",))
    with pytest.raises(TypeError, match=r"'inputs' must be a sequence of names but got \{'x'\}"):
        make({}, "x", inputs={"x"})


@pytest.mark.parametrize("make, call, message", [
    (lambda: zmlx.rowwise.reduce("sum", "x * y", inputs=("x", "y")), (X, X[:, :9]),
     r"\[reduce\] 'y' must have shape \(3, 70\) but got \(3, 9\)"),
    (lambda: zmlx.rowwise.reduce("sum", "x * y", inputs=("x", "y")), (X, X[0]),
     r"\[reduce\] 'y' must have shape \(3, 70\) but got \(70,\)"),
    (lambda: zmlx.rowwise.reduce("sum", "x * y", inputs={"x": "row", "y": "column"}), (X, X[:, 0]),
     r"'y' must have shape \(70,\) but got \(3,\)"),
    (lambda: zmlx.rowwise.reduce("sum", "x * y", inputs={"x": "row", "y": "per_row"}), (X, X[0]),
     r"'y' must have shape \(3,\) but got \(70,\)"),
    (lambda: zmlx.rowwise.reduce("sum", "x * y", inputs={"x": "row", "y": "scalar"}), (X, X[0]),
     r"'y' must have shape \(\) but got \(70,\)"),
    (lambda: zmlx.rowwise.reduce("sum"), (mx.array(2.0),), r"'x' must have shape \(\*, D\)"),
    (lambda: zmlx.rowwise.reduce("sum"), (mx.arange(6),), "'x' must have dtype .* but got int"),
])  # fmt: skip
def test_a_row_kernel_checks_shapes_and_dtypes(make, call, message):
    # Without the check it would read past the smaller array, or cut off a mean of integers.
    with pytest.raises(ValueError, match=message):
        make()(*call)


def test_a_row_kernel_can_be_pickled_once_it_ran():
    norm = zmlx.rowwise.reduce("sum", "x * x", finalize="sqrt(total / D)")
    scaled = zmlx.rowwise.map_reduce(
        {"total": ("sum", "e")},
        {"y": "e / total * w", "total_again": "total", "is_large": "total > 3"},
        inputs={"x": "row", "w": "column"},
        lets="e = exp(x)",
        keep=("e",),
    )
    for function, arrays in ((norm, (X,)), (scaled, (X, X[0]))):
        want = function(*arrays)
        got = pickle.loads(pickle.dumps(function))(*arrays)
        for a, b in zip(got, want, strict=True):
            assert mx.array_equal(a, b)
