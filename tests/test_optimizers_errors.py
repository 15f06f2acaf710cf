"""What optimizers refuse, and that a step that is refused changes nothing."""

import subprocess
import sys

import mlx.core as mx
import pytest

import zmlx
from zmlx import optimizers


@pytest.mark.parametrize(
    "gradients, message",
    [
        ({"a": mx.ones((4,))}, r"'gradients' must have shape \(3,\) at a but got \(4,\)"),
        ({"b": mx.ones((3,))}, r"'parameters' must hold every .* but got none at b"),
        ({"a": 1.0}, r"'gradients' must be a tree of mx.array but got float at a"),
        ({"new": mx.ones((2,))}, r"'state' must hold .*call init.* but got none at new"),
    ],
)
def test_a_tree_that_does_not_fit(gradients, message):
    optimizer = optimizers.AdamW(1e-3)
    parameters = {"a": mx.ones((3,)), "new": mx.ones((2,))}
    optimizer.init({"a": parameters["a"]})
    with pytest.raises((ValueError, TypeError), match=r"\[AdamW\] " + message):
        optimizer.apply_gradients(gradients, parameters)
    assert optimizer.step.item() == 0


_A = mx.ones((3,))


@pytest.mark.parametrize(
    "gradients, parameters, message",
    [
        ({"a": _A}, _A, r"'parameters' must have the tree of the gradients but got array\."),
        ({"a": {"b": _A}}, {"a": _A}, r"'parameters' must have the tree .* but got array at a\."),
        (_A, _A, r"'state' must hold m but got \['step', 'learning_rate'\]\."),
        (1.0, _A, r"'gradients' must be a tree of mx.array but got float\."),
        (_A, mx.ones((4,)), r"'gradients' must have shape \(4,\) but got \(3,\)\."),
    ],
)
def test_an_array_in_the_place_of_a_tree(gradients, parameters, message):
    optimizer = optimizers.AdamW(1e-3)
    with pytest.raises((ValueError, TypeError), match=r"\[AdamW\] " + message):
        optimizer.apply_gradients(gradients, parameters)
    assert optimizer.step.item() == 0


def test_a_gradient_below_a_moment_is_refused():
    optimizer = optimizers.AdamW(1e-3)
    optimizer.init({"a": _A})
    with pytest.raises(ValueError, match=r"'state' must have the tree .* but got array at a\.m\."):
        optimizer.apply_gradients({"a": {"m": {"b": _A}}}, {"a": {"m": {"b": _A}}})


def test_a_state_that_does_not_fit():
    one = {"a": _A}
    optimizer = optimizers.AdamW(1e-3)
    optimizer.init(one)
    optimizer.state["a"]["m"] = 0.0
    with pytest.raises(TypeError, match=r"'state' must be a tree .* but got float at a\.m"):
        optimizer.apply_gradients(one, one)
    assert optimizer.step.item() == 0
    for state, message in (
        ({}, r"'state' must hold learning_rate but got \[\]"),
        ({"learning_rate": mx.array(0.1)}, r"'state' must hold step but got \['learning_rate'\]"),
        ([], r"'state' must be a dict but got list"),
    ):
        optimizer.state = state
        with pytest.raises((ValueError, TypeError), match=r"\[AdamW\] " + message):
            optimizer.apply_gradients(one, one)


def test_a_schedule_needs_no_rate_in_the_state():
    optimizer = optimizers.SGD(lambda step: mx.array(0.5))
    optimizer.state = {"step": mx.array(0, mx.uint64)}
    assert optimizer.apply_gradients({"a": _A}, {"a": _A})["a"].tolist() == [0.5] * 3


@pytest.mark.parametrize("fused", [True, False])
def test_a_mask_that_raises_leaves_the_state(fused):
    def mask(path, parameter):
        if path == "b":
            raise ZeroDivisionError
        return True

    both = {"a": _A, "b": _A}
    optimizer = optimizers.AdamW(0.1, weight_decay_mask=mask, fused=fused)
    optimizer.init(both)
    with pytest.raises(ZeroDivisionError):
        optimizer.apply_gradients(both, both)
    assert optimizer.step.item() == 0
    assert not any(mx.any(x).item() for key in both for x in optimizer.state[key].values())


def test_a_parameter_that_changed_its_shape():
    optimizer = optimizers.Lion(1e-3)
    optimizer.init({"a": mx.ones((3,))})
    with pytest.raises(ValueError, match=r"\[Lion\] 'state m' must have shape \(5,\) at a"):
        optimizer.apply_gradients({"a": mx.ones((5,))}, {"a": mx.ones((5,))})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"moment_dtype": mx.int32}, r"'moment_dtype' must be None"),
        ({"max_norm": -1.0}, r"'max_norm' must be at least 0 but got -1.0"),
        ({"weight_decay_mask": 3}, r"'weight_decay_mask' must be a function"),
        ({"fused": "yes"}, r"'fused' must be None, True or False"),
        ({"betas": (0.9, 1.0)}, r"'betas' must be two numbers in \[0, 1\)"),
        ({"betas": {0.9, 0.99}}, r"'betas' must be a sequence of two numbers but got set"),
        ({"betas": {0.9: 1, 0.99: 2}}, r"'betas' must be a sequence of two numbers but got dict"),
        ({"eps": mx.array(1j)}, r"'eps' must be a real number but got complex64"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises((ValueError, TypeError), match=r"\[AdamW\] " + message):
        optimizers.AdamW(1e-3, **options)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("AdamW", {"weight_decay": "0.1"}, r"'weight_decay' must be a number but got str"),
        ("AdamW", {"eps": None}, r"'eps' must be a number but got NoneType"),
        ("AdamW", {"learning_rate": "1e-3"}, r"'learning_rate' must be a number but got str"),
        ("Adam", {"bias_correction": "no"}, r"'bias_correction' must be True or False but got str"),
        # MLX's step leaves a decay out that is not positive, and NaN is not.
        ("Lion", {"weight_decay": float("nan")}, r"'weight_decay' must be at least 0 but got nan"),
        ("SGD", {"weight_decay": -0.1}, r"'weight_decay' must be at least 0 but got -0.1"),
        ("AdamW", {"weight_decay": float("inf")}, r"'weight_decay' must be finite but got inf"),
        ("Adam", {"eps": -1e-8}, r"'eps' must be at least 0 but got -1e-08"),
        ("AdamW", {"eps": float("inf")}, r"'eps' must be finite but got inf"),
        ("Lion", {"learning_rate": float("inf")}, r"'learning_rate' must be finite but got inf"),
        ("SGD", {"learning_rate": float("nan")}, r"'learning_rate' must be finite but got nan"),
        ("SGD", {"momentum": float("inf")}, r"'momentum' must be finite but got inf"),
        ("Adam", {"betas": (float("nan"), 0.9)}, r"'betas' must be two numbers in \[0, 1\)"),
        ("Lion", {"betas": (-0.1, 0.9)}, r"'betas' must be two numbers in \[0, 1\)"),
        ("SGD", {"momentum": "0.9"}, r"'momentum' must be a number but got str"),
        ("SGD", {"momentum": 0.9, "nesterov": "no"}, r"'nesterov' must be True or False"),
        ("SGD", {"momentum": 0.9, "dampening": mx.ones((2,))}, r"'dampening' must be a number"),
    ],
)
def test_numbers_and_flags_are_checked(name, options, message):
    with pytest.raises((ValueError, TypeError), match=rf"\[{name}\] " + message):
        getattr(optimizers, name)(**{"learning_rate": 1e-3, **options})


@pytest.mark.parametrize(
    "name, options",
    [
        ("AdamW", {"learning_rate": 0, "weight_decay": 0, "betas": (0, 0), "eps": 0}),
        ("SGD", {"learning_rate": -0.1}),  # goes up the gradient
        ("SGD", {"momentum": -1, "dampening": -1}),  # MLX leaves both out
        ("Lion", {"learning_rate": mx.array(float("nan"))}),  # known to the device only
        ("Adam", {"learning_rate": lambda step: 0.0}),
    ],
)
def test_what_mlx_has_a_use_for_is_accepted(name, options):
    x = {"a": mx.ones((3,))}
    getattr(optimizers, name)(**{"learning_rate": 1e-3, **options}).apply_gradients(x, x)


def test_numbers_may_be_arrays_of_no_axes():
    p, g = mx.ones((3,)), mx.array([1.0, -2.0, 3.0])
    options = {"learning_rate": 0.1, "momentum": 0.5, "weight_decay": 0.25}
    arrays = {name: mx.array(value) for name, value in options.items()}
    found, want = (
        optimizers.SGD(**o).apply_gradients({"a": g}, {"a": p})["a"] for o in (arrays, options)
    )
    assert mx.array_equal(found, want)


@pytest.mark.parametrize("rate", [mx.array(1 + 2j), lambda step: mx.array(1 + 2j)])
def test_a_rate_has_no_imaginary_part(rate):
    message = r"\[SGD\] 'learning_rate' must be a real number but got complex64"
    with pytest.raises(ValueError, match=message):
        optimizers.SGD(rate)
    optimizer = optimizers.SGD(0.1)
    optimizer.learning_rate = mx.array(1 + 2j)
    with pytest.raises(ValueError, match=message):
        optimizer.apply_gradients({"a": _A}, {"a": _A})
    assert optimizer.step.item() == 0


@pytest.mark.parametrize("fused", [True, False])
def test_a_rate_may_be_an_array_of_one_element(fused):
    one = {"a": _A, "b": mx.array(1.0)}
    first, second = optimizers.SGD(mx.array([0.5]), fused=fused), optimizers.SGD(0.1, fused=fused)
    second.learning_rate = mx.array([0.5])
    for optimizer in (first, second):
        new = optimizer.apply_gradients(one, one)
        assert new["a"].tolist() == [0.5] * 3
        assert new["b"].tolist() == 0.5


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_missing_gradient_of_the_first_step_is_named(name):
    optimizer = getattr(optimizers, name)(1e-3)
    message = rf"\[{name}\] 'gradients' must be a tree of mx.array but got NoneType at b\.0"
    with pytest.raises(TypeError, match=message):
        optimizer.apply_gradients({"a": mx.ones(3), "b": [None]}, {"a": mx.ones(3), "b": [1]})
    assert optimizer.state["step"].item() == 0
    assert "a" not in optimizer.state


def test_a_step_without_a_float_is_refused():
    x = mx.zeros((3,))
    with pytest.raises(ValueError, match=r"\[adamw\] 'step' must be below 2\^63 but got"):
        zmlx.kernels.adamw(x, x, x, x, step=10**400)


@pytest.mark.parametrize("betas", [{0.9, 0.99}, {0.9: 1, 0.99: 2}])
def test_betas_without_an_order_are_refused(betas):
    x = mx.zeros((3,))
    with pytest.raises(TypeError, match=r"\[adamw\] 'betas' must be a sequence of two numbers"):
        zmlx.kernels.adamw(x, x, x, x, betas=betas)


@pytest.mark.parametrize("gradients", [{"a": mx.ones((4,))}, {"a": mx.ones((3,)), "b": mx.ones(2)}])
def test_a_first_step_that_is_refused_leaves_no_state(gradients):
    optimizer = optimizers.AdamW(1e-3)
    parameters = {"a": mx.ones((3,))}
    with pytest.raises(ValueError, match=r"\[AdamW\] '(gradients|parameters)' must"):
        optimizer.apply_gradients(gradients, parameters)
    assert sorted(optimizer.state) == ["learning_rate", "step"]
    new = optimizer.apply_gradients({"a": mx.ones((3,))}, parameters)["a"]
    assert mx.all(new < 1).item()


@pytest.mark.parametrize("fused", [None, False])
def test_a_schedule_may_return_a_number(fused):
    optimizer = optimizers.SGD(lambda step: 0.5, fused=fused)
    assert isinstance(optimizer.learning_rate, mx.array)
    assert (
        optimizer.apply_gradients({"a": mx.ones(2)}, {"a": mx.ones(2)})["a"].tolist() == [0.5] * 2
    )
    assert isinstance(optimizer.learning_rate, mx.array)


@pytest.mark.parametrize("rate", [mx.ones((2,)), None])
def test_a_rate_that_is_no_number_is_refused_before_the_step(rate):
    message = r"\[SGD\] 'learning_rate' must be a number but got (array|NoneType)"
    with pytest.raises(TypeError, match=message):
        optimizers.SGD(lambda step: rate)
    rates = iter([mx.array(0.5), rate, mx.array(0.5)])
    optimizer = optimizers.SGD(lambda step: next(rates), momentum=0.9)
    one = {"a": mx.ones((2,))}
    optimizer.init(one)
    with pytest.raises(TypeError, match=message):
        optimizer.apply_gradients(one, one)
    assert optimizer.step.item() == 0
    assert not mx.any(optimizer.state["a"]["v"]).item()
    assert optimizer.apply_gradients(one, one)["a"].tolist() == [0.5, 0.5]


def test_max_norm_makes_integer_gradients_float32_as_clipping_does():
    one = {"a": mx.ones((4,), mx.int32)}
    clipped, _ = optimizers.clip_by_global_norm(one, 1.0)
    want = optimizers.SGD(0.5).apply_gradients(clipped, {"a": mx.ones((4,))})["a"]
    found = optimizers.SGD(0.5, max_norm=1.0).apply_gradients(one, {"a": mx.ones((4,))})["a"]
    assert mx.array_equal(found, want)


def test_docstrings_are_of_each_class_and_not_needed():
    assert "weight_decay_mask" not in optimizers.Adam.__doc__
    assert "weight_decay_mask" in optimizers.AdamW.__doc__
    run = [sys.executable, "-OO", "-c", "import zmlx.optimizers"]
    assert subprocess.run(run, capture_output=True).returncode == 0


def test_a_momentum_that_became_nan_is_nan_and_no_crash():
    optimizer = zmlx.optimizers.SGD(0.1, momentum=0.9)
    optimizer.momentum = float("nan")
    stepped = optimizer.apply_gradients({"w": mx.ones(9)}, {"w": mx.ones(9)})
    assert mx.isnan(stepped["w"]).all()
