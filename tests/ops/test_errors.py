"""Bad arguments raise `[op] 'argument' must … but got …` before anything runs."""

import re

import mlx.core as mx
import numpy as np
import pytest

from zmlx.arguments import dimensions
from zmlx.testing import draw

from .sweep import OPS, outputs

EACH = [
    pytest.param(op, i, id=f"{op.name}-{a.name}") for op in OPS for i, a in enumerate(op.arguments)
]


def message(op, argument):
    return re.escape(f"[{op.name}] '{argument.name}' must ") + r".* but got .*\."


@pytest.mark.parametrize("op, index", EACH)
def test_wrong_dtype(op, index):
    values = draw(op, op.cases[1], mx.float32)
    values[index] = values[index].astype(mx.complex64)
    with pytest.raises(ValueError, match=message(op, op.arguments[index])):
        op.function(*values)


@pytest.mark.parametrize("op, index", EACH)
def test_not_an_array(op, index):
    values = draw(op, op.cases[1], mx.float32)
    values[index] = np.array(values[index])
    with pytest.raises(TypeError, match=message(op, op.arguments[index])):
        op.function(*values)


def shared_axis(op, index):
    """An axis that the argument shares with one before it; None where it has a size of its own."""
    known = {s for a in op.arguments[:index] for _, s in dimensions(a.shape)}
    axes = [s for _, s in dimensions(op.arguments[index].shape)]
    return next((i for i, s in enumerate(axes) if s in known), None)


@pytest.mark.parametrize("op, index", [p for p in EACH if shared_axis(*p.values) is not None])
def test_a_shape_that_does_not_match_an_argument_before(op, index):
    values = draw(op, op.cases[1], mx.float32)
    axis = shared_axis(op, index)
    values[index] = mx.concatenate([values[index], values[index]], axis=axis)
    with pytest.raises(ValueError, match=message(op, op.arguments[index])):
        op.function(*values)


@pytest.mark.parametrize(
    "op", [o for o in OPS if "D" in o.arguments[0].shape], ids=lambda o: o.name
)
def test_too_few_axes(op):
    values = draw(op, op.cases[1], mx.float32)
    values[0] = mx.array(1.0)
    with pytest.raises(ValueError, match=re.escape(f"[{op.name}] '")):
        op.function(*values)


OPTIONS = [
    pytest.param(op, option, id=f"{op.name}-{option.name}") for op in OPS for option in op.options
]


@pytest.mark.parametrize("op, option", OPTIONS)
@pytest.mark.parametrize("value", [b"1", 1j, {"a": 1}], ids=repr)
def test_an_option_of_a_wrong_type(op, option, value):
    """Whatever its truth, its length or its order; the message names the option."""
    values = draw(op, op.cases[1], mx.float32)
    pattern = re.escape(f"[{op.name}] '{option.name}' must ") + r".* but got .*\."
    with pytest.raises((TypeError, ValueError), match=pattern):
        op.function(*values, **{**op.cases[1].options, option.name: value})


def whole(option):
    """A value of an option of ints; None for others."""
    values = () if type(option.default) is float else (option.default, *option.values)
    return next((v for v in values if type(v) is int), None)


INTEGRAL = [p for p in OPTIONS if whole(p.values[1]) is not None]


@pytest.mark.parametrize("op, option", INTEGRAL)
def test_integers_of_numpy_are_integers(op, option):
    values = draw(op, op.cases[1], mx.float32)
    number = whole(option)
    want, got = (
        outputs(op.function(*values, **{**op.cases[1].options, option.name: n}))
        for n in (number, np.int64(number))
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))


@pytest.mark.parametrize("op, option", INTEGRAL)
@pytest.mark.parametrize("value", [2.0, True], ids=repr)
def test_floats_and_truth_are_no_integers(op, option, value):
    values = draw(op, op.cases[1], mx.float32)
    pattern = re.escape(f"[{op.name}] '{option.name}' must be ") + r".* but got .*\."
    with pytest.raises((TypeError, ValueError), match=pattern):
        op.function(*values, **{**op.cases[1].options, option.name: value})


WITH_EPS = [op for op in OPS if "eps" in {o.name for o in op.options}]


@pytest.mark.parametrize("op", WITH_EPS, ids=lambda o: o.name)
@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")], ids=str)
def test_an_eps_that_leaves_no_number(op, eps):
    values = draw(op, op.cases[1], mx.float32)
    pattern = re.escape(f"[{op.name}] 'eps' must be ") + rf".* but got {eps}\."
    with pytest.raises(ValueError, match=pattern):
        op.function(*values, **{**op.cases[1].options, "eps": eps})


NUMERIC = [p for p in OPTIONS if type(p.values[1].default) is float]


@pytest.mark.parametrize("op, option", NUMERIC)
def test_an_option_beyond_the_range_of_floats(op, option):
    values = draw(op, op.cases[1], mx.float32)
    pattern = re.escape(f"[{op.name}] '{option.name}' must be in the range of a float but got")
    with pytest.raises(ValueError, match=pattern):
        op.function(*values, **{**op.cases[1].options, option.name: 10**400})


@pytest.mark.parametrize("op, option", NUMERIC)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numbers_of_numpy_are_numbers(op, option, kind):
    """float32 is no Python float, and float64 is one whose text is not that of a number."""
    values = draw(op, op.cases[1], mx.float32)
    want, got = (
        outputs(op.function(*values, **{**op.cases[1].options, option.name: number}))
        for number in (0.5, kind(0.5))
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))
