"""Bad arguments raise `[op] 'argument' must … but got …` before anything runs."""

import re
from math import inf, isinf, nan

import mlx.core as mx
import numpy as np
import pytest

import zmlx
from zmlx import kernels
from zmlx.arguments import dimensions
from zmlx.launch import gpu_target
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


@pytest.mark.parametrize("value", [1.5, True, np.float32(1.5)], ids=repr)
@pytest.mark.parametrize("op, index", EACH)
def test_a_number_is_no_array(op, index, value):
    """Not even one without axes, which expressions and their arguments may be."""
    values = draw(op, op.cases[1], mx.float32)
    values[index] = value
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


def is_float(option):
    """Whether the option is a number with a fraction, by its values or by what it is."""
    return option.name == "base" or float in map(type, (option.default, *option.values))


@pytest.mark.parametrize("op, option", [p for p in OPTIONS if is_float(p.values[1])])
@pytest.mark.parametrize("value", [nan, inf, -inf, 1e39, -1e39], ids=str)
def test_an_option_that_is_not_finite_as_a_float32(op, option, value):
    if op.name == "hardtanh" and isinf(value):
        return  # no bound
    values = draw(op, op.cases[1], mx.float32)
    pattern = rf"\[{op.name}\] '{option.name}' must .* but got {re.escape(str(value))}\."
    with pytest.raises(ValueError, match=pattern):
        op.function(*values, **{**op.cases[1].options, option.name: value})


X = mx.array([[-2.0, 0.5, 3.0]])
HEADS = mx.ones((1, 2, 3, 8))
LOGITS = mx.zeros((2, 4))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: kernels.rope(HEADS, base=1e-300), "[rope] 'base' must be positive and finite"),
        (lambda: kernels.celu(X, alpha=1e-300), "[celu] 'alpha' must not be 0"),
        (lambda: kernels.celu(X, alpha=0), "[celu] 'alpha' must not be 0"),
        (lambda: kernels.js_div(X, X, beta=1e-300), "[js_div] 'beta' must be between 0 and 1"),
        (lambda: kernels.js_div(X, X, beta=1 - 1e-12), "[js_div] 'beta' must be between 0 and 1"),
        (
            lambda: kernels.scaled_dot_product_attention(HEADS, HEADS, HEADS, softcap=1e-300),
            "[scaled_dot_product_attention] 'softcap' must be positive and finite",
        ),
        (
            lambda: kernels.rope_freqs(8, {"type": "linear", "factor": 1e39}),
            "[rope_freqs] 'scaling' must have a number more than 0 as 'factor'",
        ),
    ],
)
def test_a_number_that_has_no_use_as_a_float32(call, message):
    with pytest.raises(ValueError, match=re.escape(message) + ".* but got"):
        call()


def test_a_number_of_an_expression_is_infinite_only_where_it_is_given_so():
    smaller = zmlx.expression("min(x, y)", name="smaller")
    assert smaller(X, inf).tolist() == X.tolist()
    message = r"\[smaller\] 'y' must be in the range of a float32 but got 1e\+39\."
    with pytest.raises(ValueError, match=message):
        smaller(X, 1e39)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda **o: kernels.swiglu_clamped(X, X, **o), "limit"),
        (lambda **o: kernels.adamw(X, X, X, X, **o), "weight_decay"),
        (lambda **o: kernels.lion(X, X, X, **o), "weight_decay"),
        (lambda **o: kernels.sgd(X, X, X, **o), "weight_decay"),
        (lambda **o: kernels.sgd(X, X, X, **o), "momentum"),
        (lambda **o: kernels.sgd(X, X, X, **o), "dampening"),
    ],
)
def test_an_option_below_zero(call, name):
    with pytest.raises(ValueError, match=rf"'{name}' must be at least 0 but got -0\.5\."):
        call(**{name: -0.5})


@pytest.mark.parametrize("step", [kernels.sgd, kernels.lion])
def test_a_negative_rate_goes_up_the_gradient(step):
    zeros, ones = mx.zeros((3,)), mx.ones((3,))
    assert step(zeros, ones, zeros, learning_rate=-0.5)[0].tolist() == [0.5] * 3


def test_bounds_of_hardtanh_may_be_none_and_may_cross():
    def clipped(low, high):
        return kernels.hardtanh(X, min_val=low, max_val=high).tolist()[0]

    assert clipped(-inf, 1.0) == [-2.0, 0.5, 1.0]
    assert clipped(-1.0, inf) == [-1.0, 0.5, 3.0]
    assert clipped(2.0, 1.0) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("op, option", [p for p in OPTIONS if isinstance(p.values[1].default, str)])
@pytest.mark.parametrize("value", [np.ones(2), mx.ones((2,)), None], ids=["numpy", "mlx", "None"])
def test_what_is_no_text_is_no_choice(op, option, value):
    values = draw(op, op.cases[1], mx.float32)
    pattern = re.escape(f"[{op.name}] '{option.name}' must be one of ") + ".* but got"
    with pytest.raises(ValueError, match=pattern):
        op.function(*values, **{**op.cases[1].options, option.name: value})


def test_an_array_is_no_score_of_a_group():
    with pytest.raises(ValueError, match=r"\[topk_gating\] 'group_score' must be one of"):
        kernels.topk_gating(LOGITS, top_k=1, group_score=np.ones(2))


REDUCTIONS = [kernels.sum, kernels.mean, kernels.max, kernels.min, kernels.var, kernels.std]


@pytest.mark.parametrize(
    "axis",
    ["", b"", bytearray(), {}, {0: 1}, {0}, set(), iter([0])],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda f: f.__name__)
def test_axes_are_a_sequence_of_ints(op, axis):
    pattern = rf"\[{op.__name__}\] 'axis' must be an int, ints or None but got"
    with pytest.raises(TypeError, match=pattern):
        op(LOGITS, axis)


@pytest.mark.parametrize("axis", [[0, 1], range(2), np.array([0, 1]), mx.array([0, 1])], ids=repr)
@pytest.mark.parametrize("op", REDUCTIONS, ids=lambda f: f.__name__)
def test_axes_may_be_any_sequence_that_mlx_takes(op, axis):
    """And an array of MLX's own, which MLX 0.32.2 does not take."""
    x = mx.array([[1.0, 2.0], [4.0, 8.0]])
    assert op(x, axis).item() == pytest.approx(getattr(mx, op.__name__)(x, [0, 1]).item())
    assert op(x, np.array(0)).shape == (2,)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 4}, "'bits' must be None for weights that are not quantised but got 4."),
        ({"bits": "junk"}, "'bits' must be None for weights that are not quantised but got junk."),
        ({"group_size": 64}, "'group_size' must be None for weights that are not quantised but"),
    ],
)
def test_plain_experts_have_no_packing(options, message):
    w, offsets = mx.ones((2, 4, 4)), mx.array([0, 1, 2])
    with pytest.raises(ValueError, match=re.escape(f"[expert_ffn] {message}")):
        kernels.expert_ffn(mx.ones((2, 4)), w, w, w, offsets, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 7}, "'bits' must be 2, 3, 4, 5, 6 or 8 but got 7."),
        ({"bits": np.ones(2)}, "'bits' must be an int but got ndarray."),
        ({"group_size": 16}, "'group_size' must be 32, 64 or 128 but got 16."),
        ({"group_size": 64.0}, "'group_size' must be an int but got float."),
    ],
)
def test_the_packing_of_quantised_experts(options, message):
    w, offsets = mx.quantize(mx.ones((2, 64, 64))), mx.array([0, 1, 2])
    with pytest.raises((TypeError, ValueError), match=re.escape(f"[expert_ffn] {message}")):
        kernels.expert_ffn(mx.ones((2, 64)), w, w, w, offsets, **options)


@pytest.mark.parametrize("dtype", [mx.int32, mx.int64])
@pytest.mark.parametrize("target", [gpu_target() or "cpu", "reference"])
@pytest.mark.parametrize("name", ["seed", "offset"])
def test_an_array_below_zero_is_taken_modulo_2_64(name, target, dtype):
    """As documented: looking at an array would wait for it."""
    x = mx.ones((100,))
    given = {"seed": mx.array(7), name: mx.array(-1, dtype)}
    same = {"seed": mx.array(7), name: mx.array(np.array(2**64 - 1, np.uint64))}
    want = kernels.dropout(x, 0.5, **same)
    with zmlx.target(target):
        assert mx.array_equal(kernels.dropout(x, 0.5, **given), want).item()
