"""Fused optimizers: MLX's trajectories, MLX's state, few launches."""

import importlib
import inspect
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as mlx_optimizers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from parameter_trees import SHAPES, leaves, run, tree

import zmlx
from zmlx import launch, optimizers
from zmlx.arguments import FLOATING
from zmlx.kernels import optimizer_steps as steps
from zmlx.testing import assert_matches, to_numpy

CONFIGURATIONS = {
    "adamw": ("AdamW", {"learning_rate": 1e-2}),
    "adamw corrected": ("AdamW", {"learning_rate": 1e-2, "bias_correction": True}),
    "adamw large decay": ("AdamW", {"learning_rate": 1e-2, "weight_decay": 0.5}),
    "adam": ("Adam", {"learning_rate": 3e-3, "betas": [0.8, 0.95], "eps": 1e-6}),
    "adam corrected": ("Adam", {"learning_rate": 3e-3, "bias_correction": True}),
    "lion": ("Lion", {"learning_rate": 1e-3}),
    "lion decay": ("Lion", {"learning_rate": 1e-3, "weight_decay": 0.1}),
    "sgd": ("SGD", {"learning_rate": 1e-2}),
    "sgd decay": ("SGD", {"learning_rate": 1e-2, "weight_decay": 0.1}),
    "sgd momentum": ("SGD", {"learning_rate": 1e-2, "momentum": 0.9, "dampening": 0.1}),
    "sgd nesterov": (
        "SGD",
        {"learning_rate": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ),
}
EVERY = pytest.mark.parametrize("name, options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)


def oracle(name, options, parameters, gradients):
    """The same steps in NumPy's float64."""
    namespace = zmlx.testing.oracle_namespace()
    p = [to_numpy(x) for x in leaves(parameters)]
    m = [np.zeros_like(x) for x in p]
    v = [np.zeros_like(x) for x in p]
    for t, step in enumerate(gradients, 1):
        for i, g in enumerate(to_numpy(x) for x in leaves(step)):
            some = {k: x for k, x in options.items() if k != "bias_correction"}
            if name in ("Adam", "AdamW"):
                some.setdefault("weight_decay", 0.01 if name == "AdamW" else 0.0)
                number = t if options.get("bias_correction") else None
                p[i], m[i], v[i] = steps.adamw_reference(
                    p[i], g, m[i], v[i], step=number, xp=namespace, **some
                )
            elif name == "Lion":
                p[i], m[i] = steps.lion_reference(p[i], g, m[i], xp=namespace, **some)
            else:
                some.setdefault("momentum", 0.0)
                p[i], v[i] = steps.sgd_reference(p[i], g, v[i], xp=namespace, **some)
    return p


def test_every_other_name_is_mlx_s_own():
    for name in ("cosine_decay", "join_schedules", "MultiOptimizer", "clip_grad_norm", "Adafactor"):
        assert getattr(optimizers, name) is getattr(mlx_optimizers, name)
        assert name in dir(optimizers)
    assert optimizers.AdamW is not mlx_optimizers.AdamW
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        optimizers.nothing_of_the_kind  # noqa: B018


def test_the_optimizers_are_those_of_mlx():
    """What lists the classes of the module finds no base of ours among them."""

    def names(module):
        members = inspect.getmembers(module, inspect.isclass)
        return [name for name, c in members if issubclass(c, mlx_optimizers.Optimizer)]

    assert names(optimizers) == names(mlx_optimizers)


def test_every_form_of_import_that_mlx_s_have():
    for name in ("optimizers", "optimizers.optimizers", "optimizers.schedulers"):
        ours, theirs = {}, {}
        exec(f"from zmlx.{name} import *", ours)
        exec(f"from mlx.{name} import *", theirs)
        assert theirs.keys() <= ours.keys()
        if "AdamW" in theirs:
            assert ours["AdamW"] is optimizers.AdamW
    schedulers = importlib.import_module("zmlx.optimizers.schedulers")
    assert schedulers is importlib.import_module("mlx.optimizers.schedulers")


@pytest.mark.on_cpu
@EVERY
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_trajectory_of_100_steps_is_that_of_mlx(name, options, dtype):
    parameters = tree(0, dtype)
    gradients = [tree(1 + t % 7, dtype, scale=0.1 * (1 + t % 3)) for t in range(100)]
    ours = getattr(optimizers, name)(**options)
    theirs = getattr(mlx_optimizers, name)(**options)
    got, base = run(ours, parameters, gradients), run(theirs, parameters, gradients)
    want = oracle(name, options, parameters, gradients)
    assert ours.statistics["plain"] == 0
    assert ours.statistics["fused"] == 100 * len(SHAPES)
    for a, b, w in zip(leaves(got), leaves(base), want, strict=True):
        assert a.dtype == dtype
        assert_matches(a, w, to_numpy(b))
    keys = [k for k, _ in tree_flatten(theirs.state)]
    assert [k for k, _ in tree_flatten(ours.state)] == keys
    assert ours.step.item() == theirs.step.item() == 100


@pytest.mark.on_cpu
@EVERY
def test_the_geometry_of_a_gpu_gives_the_same(name, options):
    parameters = tree(0)
    gradients = [tree(t) for t in range(1, 4)]
    want = run(getattr(optimizers, name)(**options), parameters, gradients)
    with launch.geometry("gpu"):
        got = run(getattr(optimizers, name)(**options), parameters, gradients)
    for a, b in zip(leaves(got), leaves(want), strict=True):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("moments", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "Lion", "SGD"])
def test_moments_have_their_own_dtype(name, fused, moments):
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(optimizers, name)(1e-2, moment_dtype=moments, fused=fused, **options)
    parameters = run(optimizer, tree(0, mx.bfloat16), [tree(t, mx.float32) for t in (1, 2)])
    assert {x.dtype for x in leaves(parameters)} == {mx.bfloat16}
    state = dict(tree_flatten(optimizer.state))
    assert {x.dtype for k, x in state.items() if k not in ("step", "learning_rate")} == {moments}
    count = {True: "fused", False: "plain"}[fused]
    assert optimizer.statistics[count] == 2 * len(SHAPES)


def test_float32_moments_follow_small_gradients_that_bfloat16_loses():
    """β₂ = 0.999 moves a bfloat16 moment by less than its rounding."""
    gradients = [tree(1, mx.bfloat16)] * 60
    wide = optimizers.AdamW(1e-3, moment_dtype=mx.float32)
    run(wide, tree(0, mx.bfloat16), gradients)
    want = (1 - 0.999**60) * to_numpy(gradients[0]["rest"][1]["f"]) ** 2
    got = to_numpy(wide.state["rest"][1]["f"]["v"])
    np.testing.assert_allclose(got, want, rtol=1e-4)


@EVERY
def test_infinite_and_missing_values_spread_as_in_mlx(name, options):
    """A term that an option leaves out is not 0 · inf."""
    values = np.array([0, -0.0, 1, -2.5, np.inf, -np.inf, np.nan, 3e38, 1e-30], dtype=np.float32)
    p, g = (mx.array(x.ravel()) for x in np.meshgrid(values, values))
    gradients = [{"w": g}, {"w": g}, {"w": g[::-1]}]
    ours = run(getattr(optimizers, name)(**options), {"w": p}, gradients)["w"]
    theirs = run(getattr(mlx_optimizers, name)(**options), {"w": p}, gradients)["w"]
    some = ~np.isfinite(np.array(theirs))
    assert some.any()
    np.testing.assert_array_equal(np.array(ours)[some], np.array(theirs)[some])
    assert np.isfinite(np.array(ours)[~some]).all()


# ---- launches -----------------------------------------------------------------------------------


@pytest.mark.on_cpu
def test_four_parameters_share_a_launch_of_31_buffers():
    assert steps.ADAMW_TREE.sets_per_launch == 4
    assert steps.LION_TREE.sets_per_launch == steps.SGD_TREE.sets_per_launch == 5
    shapes = {str(i): (10 + i,) for i in range(9)}
    optimizer = optimizers.AdamW(1e-3)
    optimizer.apply_gradients(tree(1, shapes=shapes), tree(0, shapes=shapes))
    assert optimizer.statistics == {"fused": 9, "plain": 0, "launches": 3}
    for kernel in (steps.ADAMW_TREE, steps.LION_TREE, steps.SGD_TREE):
        spec = kernel._kernel(kernel.sets_per_launch).spec
        assert len(spec.input_names) + len(spec.output_names) <= 31


def compiles():
    counts = zmlx.metal.statistics()
    return counts["compiles"] + counts["cache_hits"]


@pytest.mark.on_cpu
def test_schedules_and_other_sizes_compile_nothing_new():
    def steps_of(shapes, rate, **options):
        optimizer = optimizers.AdamW(rate, bias_correction=True, **options)
        run(optimizer, tree(0, shapes=shapes), [tree(t, shapes=shapes) for t in range(1, 5)])
        return optimizer

    steps_of({"a": (31,), "b": (64, 3), "c": (100,)}, 1e-3)
    before = compiles()
    schedule = mlx_optimizers.cosine_decay(1e-2, 4)
    optimizer = steps_of({"a": (12, 7), "b": (8,), "c": (5000,)}, schedule, betas=(0.5, 0.6),
                         eps=1e-3, weight_decay=0.3)  # fmt: skip
    assert compiles() == before
    assert optimizer.statistics["fused"] == 12
    np.testing.assert_allclose(optimizer.learning_rate.item(), schedule(3).item(), rtol=1e-6)


def test_the_schedule_and_the_step_advance_once():
    seen = []

    def rate(step):
        seen.append(step.item())
        return mx.array(1e-3) / (1 + step)

    optimizer = optimizers.AdamW(rate, bias_correction=True)
    run(optimizer, tree(0), [tree(t) for t in range(3)])
    assert seen == [0, 0, 1, 2]
    assert optimizer.step.item() == 3


@pytest.mark.on_cpu("alone")
def test_the_step_works_in_place():
    optimizer = optimizers.AdamW(1e-3)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300))
    optimizer.init(model.trainable_parameters())
    x = mx.ones((4, 300))
    step = nn.value_and_grad(model, lambda x: mx.square(model(x)).mean())
    mx.eval(model.parameters(), optimizer.state)
    before = zmlx.metal.statistics()["donations"]
    for _ in range(3):
        _, gradients = step(x)
        optimizer.update(model, gradients)
        del gradients
        mx.eval(model.parameters(), optimizer.state)
    # Four parameters with two moments each. The backward holds parameters until it has run.
    assert zmlx.metal.statistics()["donations"] - before == 3 * 12


def test_arrays_that_somebody_holds_are_not_overwritten():
    parameters, gradients = tree(0), tree(1)
    optimizer = optimizers.AdamW(0.1)
    optimizer.init(parameters)
    kept = [to_numpy(x) for x in leaves(parameters)]
    moments = optimizer.state["first"]["b"]["m"]
    mx.eval(optimizer.apply_gradients(gradients, parameters), optimizer.state)
    for x, before in zip(leaves(parameters), kept, strict=True):
        np.testing.assert_array_equal(to_numpy(x), before)
    assert moments.tolist() == [0, 0, 0]


# ---- MLX's own path ------------------------------------------------------------------------------


def test_a_subclass_with_its_own_step_is_asked():
    class Halved(optimizers.AdamW):
        def apply_single(self, gradient, parameter, state):
            return super().apply_single(gradient / 2, parameter, state)

    class Reference(mlx_optimizers.AdamW):
        def apply_single(self, gradient, parameter, state):
            return super().apply_single(gradient / 2, parameter, state)

    ours, theirs = Halved(1e-2), Reference(1e-2)
    got, want = (run(o, tree(0), [tree(1)]) for o in (ours, theirs))
    assert ours.statistics["fused"] == 0
    assert ours.statistics["plain"] == len(SHAPES)
    for a, b in zip(leaves(got), leaves(want), strict=True):
        np.testing.assert_array_equal(to_numpy(a), to_numpy(b))


@pytest.mark.on_cpu
def test_dtypes_without_a_kernel_take_the_step_of_mlx():
    parameters = {
        "c": mx.ones((3,), mx.complex64), "f": mx.ones((9,)), "i": mx.ones((4,), mx.int32),
        "mixed": mx.ones((9,), mx.bfloat16),
    }  # fmt: skip
    gradients = tree_map(lambda x: x * 2, parameters) | {"mixed": mx.ones((9,))}
    ours, theirs = optimizers.SGD(0.1, momentum=0.9), mlx_optimizers.SGD(0.1, momentum=0.9)
    got, want = (run(o, parameters, [gradients]) for o in (ours, theirs))
    assert ours.statistics == {"fused": 1, "plain": 3, "launches": 1}
    for key, value in want.items():
        assert got[key].dtype == value.dtype
        np.testing.assert_allclose(np.array(got[key]), np.array(value), rtol=1e-6)


def test_the_reference_target_and_fused_false_take_the_step_of_mlx():
    for options, target in (({"fused": False}, "cpu"), ({}, "reference")):
        with zmlx.target(target):
            optimizer = optimizers.AdamW(1e-2, **options)
            run(optimizer, tree(0), [tree(1)])
        assert optimizer.statistics["fused"] == 0


@pytest.mark.parametrize("fused", [1, 0, "yes"])
def test_fused_is_a_flag(fused):
    with pytest.raises(TypeError, match="'fused' must be None, True or False but got"):
        optimizers.AdamW(1e-2, fused=fused)


def test_a_gpu_takes_the_step_of_mlx_unless_asked():
    with zmlx.target("metal"):
        assert not optimizers.AdamW(1e-2)._takes_kernel()
        assert optimizers.AdamW(1e-2, fused=True)._takes_kernel()


# ---- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first, second", [(optimizers, mlx_optimizers),
                                           (mlx_optimizers, optimizers)])  # fmt: skip
def test_checkpoints_go_with_either(first, second, tmp_path):
    gradients = [tree(t) for t in range(1, 7)]
    want = run(first.AdamW(1e-2), tree(0), gradients)
    start = first.AdamW(1e-2)
    parameters = run(start, tree(0), gradients[:3])
    path = str(tmp_path / "state.safetensors")
    # MLX saves no empty arrays.
    state = {k: v for k, v in tree_flatten(start.state) if v.size}
    mx.save_safetensors(path, state)
    rest = second.AdamW(0.5)
    loaded = tree_unflatten(list(mx.load(path).items()))
    loaded["rest"][0]["e"] = {"m": mx.zeros((0, 4)), "v": mx.zeros((0, 4))}
    rest.state = loaded
    got = run(rest, parameters, gradients[3:])
    assert rest.step.item() == 6
    for a, b in zip(leaves(got), leaves(want), strict=True):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=2e-6, atol=2e-6)


@pytest.mark.on_cpu
def test_a_compiled_step_takes_the_kernel_and_keeps_its_state():
    def train(optimizer, compiled):
        mx.random.seed(3)
        model = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 2))
        x = mx.random.normal((32, 9))
        optimizer.init(model.trainable_parameters())
        state = [model.state, optimizer.state]
        of = nn.value_and_grad(model, lambda x: mx.square(model(x)).mean())

        def step(x):
            loss, gradients = of(x)
            optimizer.update(model, gradients)
            return loss

        run = partial(mx.compile, inputs=state, outputs=state)(step) if compiled else step
        losses = []
        for _ in range(6):
            losses.append(run(x).item())
            mx.eval(state)
        return losses

    schedule = mlx_optimizers.linear_schedule(1e-2, 1e-3, 5)
    make = partial(optimizers.AdamW, schedule, bias_correction=True, max_norm=1.0)
    ours, plain = make(), make(fused=False)
    losses = train(ours, True)
    assert ours.statistics["fused"] == 4  # one trace
    # MLX's 1 - β₂ᵗ in float32 is off by 6e-5 at the first step.
    np.testing.assert_allclose(losses, train(plain, False), rtol=1e-4)
    assert ours.step.item() == 6
    assert losses[-1] < losses[0]


@EVERY
def test_they_may_take_the_place_of_those_of_mlx(name, options, monkeypatch):
    """For a script that is not ours: mlx.optimizers.AdamW = zmlx.optimizers.AdamW."""
    for each in ("Adam", "AdamW", "Lion", "SGD"):
        monkeypatch.setattr(mlx_optimizers, each, getattr(optimizers, each))
    for fused in (True, False):
        run(getattr(mlx_optimizers, name)(**options, fused=fused), tree(0), [tree(1)])


@pytest.mark.on_cpu
def test_multi_optimizer():
    def of(module):
        return mlx_optimizers.MultiOptimizer(
            [module.Lion(1e-2), module.SGD(1e-2, momentum=0.9)], [lambda path, _: "first" in path]
        )

    ours, theirs = of(optimizers), of(mlx_optimizers)
    got, want = (run(o, tree(0), [tree(1), tree(2)]) for o in (ours, theirs))
    assert [o.statistics["fused"] for o in ours.optimizers] == [6, 8]
    assert dict(tree_flatten(got)).keys() == dict(tree_flatten(want)).keys()
    for (_, a), (_, b) in zip(sorted(tree_flatten(got)), sorted(tree_flatten(want)), strict=True):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-6, atol=1e-6)


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["AdamW", "Lion", "SGD"])
def test_the_mask_says_what_decays(name, fused):
    def mask(path, parameter):
        seen.add(path)
        return parameter.ndim > 1

    seen = set()
    options = {"weight_decay": 0.5, "fused": fused}
    masked = getattr(optimizers, name)(1e-1, weight_decay_mask=mask, **options)
    got = run(masked, tree(0), [tree(1)])
    decayed = run(getattr(optimizers, name)(1e-1, **options), tree(0), [tree(1)])
    kept = run(getattr(optimizers, name)(1e-1, **options | {"weight_decay": 0.0}), tree(0),
               [tree(1)])  # fmt: skip
    assert seen == {k for k, _ in tree_flatten(got)}
    for (key, a), b, c in zip(tree_flatten(got), leaves(decayed), leaves(kept), strict=True):
        want = b if key.endswith((".d", ".e", ".f")) else c
        np.testing.assert_allclose(to_numpy(a), to_numpy(want), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name, corrected", [("AdamW", True), ("AdamW", False), ("Lion", None)])
def test_a_rate_in_half_precision_decays(name, corrected):
    """1 - λ η in bfloat16 is 1 for a small λ η."""
    options = {"weight_decay": 0.1} | ({} if corrected is None else {"bias_correction": corrected})
    rate = mx.array(1e-2).astype(mx.bfloat16)
    p, g = {"w": mx.full((9,), 100.0)}, {"w": mx.full((9,), 1e-20)}
    got, want = (
        run(getattr(optimizers, name)(r, fused=True, **options), p, [g] * 3)["w"]
        for r in (rate, rate.astype(mx.float32))
    )
    assert mx.array_equal(got, want)
    assert mx.all(got < 99.8).item()


@pytest.mark.parametrize(
    "name, option, value",
    [
        ("SGD", "momentum", 0.5),
        ("SGD", "dampening", 0.5),
        ("SGD", "weight_decay", 0.5),
        ("AdamW", "eps", 0.5),
        ("AdamW", "weight_decay", 0.5),
        ("Lion", "weight_decay", 0.5),
    ],
)
def test_an_array_that_is_changed_in_place_is_read_anew(name, option, value):
    options = {"momentum": 0.9} if name == "SGD" else {}
    held = mx.array(value)
    ours = getattr(optimizers, name)(0.1, fused=True, **options | {option: held})
    theirs = getattr(mlx_optimizers, name)(0.1, **options | {option: value})
    got = want = {"w": mx.ones((9,))}
    for _ in range(3):
        got, want = (
            run(o, p, [{"w": mx.full((9,), 2.0)}]) for o, p in ((ours, got), (theirs, want))
        )
        np.testing.assert_allclose(np.array(got["w"]), np.array(want["w"]), rtol=1e-6)
        held *= 0.5
        setattr(theirs, option, getattr(theirs, option) * 0.5)


@pytest.mark.parametrize("option", ["eps", "weight_decay"])
def test_an_option_may_be_an_input_of_a_compiled_step(option):
    optimizer = optimizers.AdamW(0.1, fused=True)
    p, g = {"w": mx.ones((9,))}, {"w": mx.full((9,), 2.0)}
    optimizer.init(p)

    @partial(mx.compile, inputs=optimizer.state, outputs=optimizer.state)
    def step(p, value):
        setattr(optimizer, option, value)
        return optimizer.apply_gradients(g, p)

    theirs = mlx_optimizers.AdamW(0.1)
    got = want = p
    for value in (0.5, 0.25):
        got = step(got, mx.array(value))
        setattr(theirs, option, value)
        want = theirs.apply_gradients(g, want)
        np.testing.assert_allclose(np.array(got["w"]), np.array(want["w"]), rtol=1e-6)
    assert optimizer.step.item() == 2


@pytest.mark.on_cpu
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=11),
    dtypes=st.lists(st.sampled_from(FLOATING), min_size=1, max_size=3),
    gpu=st.booleans(),
)
def test_any_tree(sizes, dtypes, gpu):
    rng = np.random.default_rng(len(sizes))
    parameters, gradients = (
        {str(i): mx.array(rng.standard_normal(n)).astype(dtypes[i % len(dtypes)])
         for i, n in enumerate(sizes)} for _ in range(2)
    )  # fmt: skip
    optimizer = optimizers.AdamW(1e-2)
    with launch.geometry("gpu" if gpu else "cpu"):
        got = run(optimizer, parameters, [gradients])
    want = oracle("AdamW", {"learning_rate": 1e-2}, parameters, [gradients])
    assert optimizer.statistics["fused"] == len(sizes)
    for key, w in zip(parameters, want, strict=True):
        assert_matches(got[key], w, name=key)
