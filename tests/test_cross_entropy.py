"""cross_entropy: options together, reductions, targets out of range, extreme logits."""

import os
import subprocess
import sys
import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_gradients import WAYS, assert_plain_gradients

import zmlx
from zmlx import metal
from zmlx.kernels import cross_entropy, linear_cross_entropy
from zmlx.kernels.cross_entropy import cross_entropy_reference
from zmlx.targets import cpu
from zmlx.testing import assert_matches, oracle_namespace, to_numpy

XP = oracle_namespace()
RNG = np.random.default_rng(0)

OPTIONS = st.fixed_dictionaries(
    {
        "ignore_index": st.sampled_from([None, 0, 2, -100]),
        "label_smoothing": st.sampled_from([0.0, 0.1, 0.75, 1.0]),
        "z_loss": st.sampled_from([0.0, 1e-3, 0.5]),
        "softcap": st.sampled_from([None, 0.7, 30.0]),
        "reduction": st.sampled_from(["none", "mean", "sum"]),
        "return_lse": st.booleans(),
    }
)


def problem(seed, rows, classes, dtype=mx.float32):
    rng = np.random.default_rng(seed)
    logits = mx.array(3 * rng.standard_normal((rows, classes))).astype(dtype)
    targets = mx.array(rng.integers(0, classes, rows).astype(np.int32))
    weights = mx.array(rng.uniform(0.2, 3.0, classes).astype(np.float32))
    return logits, targets, weights


def oracle(logits, targets, weights, options, kind):
    """Outputs in NumPy's `kind`, and the gradients for cotangents of the outputs."""
    from autograd import make_vjp
    from autograd.builtins import tuple as traced_tuple

    hard = not mx.issubdtype(targets.dtype, mx.floating)
    x, t = to_numpy(logits).astype(kind), to_numpy(targets)
    t = t if hard else t.astype(kind)
    w = None if weights is None else to_numpy(weights).astype(kind)

    def of(some):
        target = t if hard else some[1]
        out = cross_entropy_reference(some[0], target, w, xp=XP, **options)
        return traced_tuple(out if isinstance(out, tuple) else (out,))

    vjp, outputs = make_vjp(of, 0)((x,) if hard else (x, t))
    return outputs, vjp


def check(logits, targets, weights, options):
    outputs, vjp = oracle(logits, targets, weights, options, np.float64)
    bases, base_vjp = oracle(logits, targets, weights, options, np.float32)
    which = [logits] if not mx.issubdtype(targets.dtype, mx.floating) else [logits, targets]

    def of(*some):
        out = cross_entropy(some[0], some[1] if len(some) > 1 else targets, weights, **options)
        return list(out) if isinstance(out, tuple) else [out]

    got = of(*which)
    rng = np.random.default_rng(1)
    cotangents = [mx.array(rng.standard_normal(o.shape)).astype(o.dtype) for o in got]
    gradients = mx.vjp(of, which, cotangents)[1]
    for a, b, base in zip(got, outputs, bases, strict=True):
        assert_matches(a, b, base)
    given64 = tuple(to_numpy(c) for c in cotangents)
    given32 = tuple(c.astype(np.asarray(b).dtype) for c, b in zip(given64, bases, strict=True))
    for a, b, base in zip(gradients, vjp(given64), base_vjp(given32), strict=True):
        assert_matches(a, b, base)


@given(OPTIONS, st.booleans(), st.integers(0, 99), st.sampled_from([(4, 3), (7, 70), (3, 515)]))
def test_any_options_together_match_float64(options, weighted, seed, shape):
    logits, targets, weights = problem(seed, *shape)
    if options["ignore_index"] is not None and (to_numpy(targets) == options["ignore_index"]).all():
        targets = mx.array((to_numpy(targets) + 1) % shape[1])
    check(logits, targets, weights if weighted else None, options)


@given(OPTIONS, st.booleans(), st.integers(0, 99))
def test_probabilities_match_float64_in_both_gradients(options, weighted, seed):
    logits, _, weights = problem(seed, 5, 37)
    targets = mx.softmax(mx.array(np.random.default_rng(seed).standard_normal((5, 37))), axis=-1)
    check(logits, targets.astype(mx.float32), weights if weighted else None,
          {**options, "ignore_index": None})  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0}])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_the_gradients_of_probabilities(weighted, options):
    """The gradient of the logits takes the sum of a row's probabilities."""
    logits, _, weights = problem(3, 4, 7)
    targets = mx.random.uniform(shape=(4, 7), key=mx.random.key(3))

    def second(function):
        def loss(x, t):
            return function(x, t, weights if weighted else None, reduction="sum", **options)

        def norm(x, t):
            return sum((g * g).sum() for g in mx.grad(loss, (0, 1))(x, t))

        return mx.grad(norm, (0, 1))(logits, targets)

    both = zip(second(cross_entropy), second(cross_entropy_reference), strict=True)
    for got, want in both:
        np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_probabilities_equal_mlx(smoothing):
    logits, _, _ = problem(3, 6, 50)
    targets = mx.softmax(mx.array(RNG.standard_normal((6, 50)).astype(np.float32)), axis=-1)
    ours = cross_entropy(logits, targets, label_smoothing=smoothing, reduction="none")
    theirs = nn.losses.cross_entropy(logits, targets, label_smoothing=smoothing)
    np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=2e-5)


@given(
    st.sampled_from([-100, 1]),
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
    st.sampled_from(["none", "mean", "sum"]),
    st.integers(0, 99),
)
def test_equals_torch(ignore, smoothing, weighted, reduction, seed):
    torch = pytest.importorskip("torch")
    logits, targets, weights = problem(seed, 9, 11)
    targets[2:4] = ignore
    x = torch.tensor(np.array(logits), requires_grad=True)
    w = torch.tensor(np.array(weights)) if weighted else None
    t = torch.tensor(np.array(targets)).long()
    options = {"ignore_index": ignore, "label_smoothing": smoothing, "reduction": reduction}
    want = torch.nn.functional.cross_entropy(x, t, weight=w, **options)
    want.sum().backward()

    def loss(z):
        return cross_entropy(z, targets, weights if weighted else None, **options).sum()

    got = cross_entropy(logits, targets, weights if weighted else None, **options)
    np.testing.assert_allclose(np.array(got), want.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.array(mx.grad(loss)(logits)), x.grad.numpy(), atol=2e-6)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignore", [None, 3])
def test_the_gradient_of_a_reduction_is_scaled_by_its_cotangent(reduction, ignore):
    logits, targets, _ = problem(4, 8, 6)

    def loss(z, factor):
        return (factor * cross_entropy(z, targets, ignore_index=ignore, reduction=reduction)).sum()

    once, thrice = (mx.grad(loss)(logits, f) for f in (1.0, 3.0))
    np.testing.assert_allclose(np.array(thrice), 3 * np.array(once), rtol=1e-6)
    rows = to_numpy(targets) == ignore
    assert (np.array(once)[rows] == 0).all()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_shapeless_gradient_takes_other_rows(reduction, weighted):
    class_weights = mx.arange(1.0, 8.0) if weighted else None

    def loss(logits, targets):
        return cross_entropy(logits, targets, class_weights, reduction=reduction).square().sum()

    gradient = mx.compile(mx.grad(loss), shapeless=True)
    for lead in ((2, 3), (4, 5)):
        logits = mx.arange(lead[0] * lead[1] * 7.0).reshape(*lead, 7).cos()
        targets = mx.arange(lead[0] * lead[1]).reshape(lead) % 7
        want = np.array(mx.grad(loss)(logits, targets))
        np.testing.assert_allclose(gradient(logits, targets), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("core", [True, False], ids=["core", "no core"])
def test_a_shapeless_compile_reads_the_weights_that_there_are(core, monkeypatch):
    if not core:  # as on a Mac
        monkeypatch.setattr(cpu, "_core_if_any", lambda: None)

    def loss(logits, targets, class_weights):
        return cross_entropy(logits, targets, class_weights, reduction="none")

    with zmlx.target("reference"):
        compiled = mx.compile(loss, shapeless=True)
        for classes in (5, 3, 9):
            targets = mx.array([0, 2, classes - 1, classes, 70])
            logits = mx.arange(5.0 * classes).reshape(5, classes).cos()
            class_weights = mx.arange(1.0, classes + 1)
            got = compiled(logits, targets, class_weights)
            want = nn.losses.cross_entropy(logits[:3], targets[:3]) * class_weights[targets[:3]]
            np.testing.assert_allclose(got[:3], want, rtol=1e-5)
            assert mx.isnan(got[3:]).all()


def test_axis_moves_the_classes():
    logits = mx.array(RNG.standard_normal((3, 7, 4, 2)).astype(np.float32))
    targets = mx.array(RNG.integers(0, 7, (3, 4, 2)))
    for axis in (1, -3):
        got = cross_entropy(logits, targets, axis=axis, reduction="none")
        want = nn.losses.cross_entropy(logits, targets, axis=axis)
        np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-5)
    soft = mx.softmax(logits, axis=1)
    got = cross_entropy(logits, soft, axis=1, reduction="none")
    want = nn.losses.cross_entropy(logits, soft, axis=1)
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-5)
    with pytest.raises(ValueError, match=r"\[cross_entropy\] 'axis' must"):
        cross_entropy(logits, targets, axis=4)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64])
def test_targets_of_any_index_dtype(dtype):
    logits, targets, weights = problem(5, 6, 9)
    want = cross_entropy(logits, targets, weights)
    assert cross_entropy(logits, targets.astype(dtype), weights).item() == want.item()


@pytest.mark.parametrize("dtype", [mx.int8, mx.uint8, mx.int16, mx.uint64, mx.bool_, mx.float32])
def test_other_target_dtypes_are_refused(dtype):
    logits, targets, _ = problem(5, 6, 9)
    with pytest.raises(ValueError, match=r"\[cross_entropy\] 'targets' must have dtype int32"):
        cross_entropy(logits, targets.astype(dtype))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}], ids=str)
@pytest.mark.parametrize("linear", [False, True])
def test_a_target_out_of_range_has_a_gradient_of_nan_in_plain_mlx(linear, options):
    logits, _, _ = problem(3, 5, 5)
    targets = mx.array([0, 5, -1, -100, 4])

    def loss(logits):
        options_ = {"reduction": "none", "ignore_index": -100, **options}
        if linear:
            return linear_cross_entropy(logits, mx.eye(5), targets, **options_)
        return cross_entropy(logits, targets, **options_)

    with zmlx.target("reference"):
        value, gradient = loss(logits), mx.grad(lambda x: loss(x).sum())(logits)
    bad = [False, True, True, False, False]
    assert np.isnan(np.array(value)).tolist() == bad
    assert np.isnan(np.array(gradient)).all(axis=1).tolist() == bad
    assert np.isfinite(np.array(gradient)[~np.array(bad)]).all()
    assert not np.array(gradient)[3].any()


@pytest.mark.on_cpu
@pytest.mark.parametrize("linear", [False, True])
def test_no_target_is_ignored_unless_asked(linear):
    """Not even the least integer, which stands for no index in the kernels."""
    logits, targets, _ = problem(3, 4, 5)
    targets = targets.astype(mx.int64)
    targets[0] = mx.array(-(2**63), mx.int64)

    def losses():
        if linear:
            return linear_cross_entropy(logits, mx.eye(5), targets, reduction="none")
        return cross_entropy(logits, targets, reduction="none")

    with pytest.raises(RuntimeError, match=f"'targets' must be in range but got {-(2**63)}"):
        mx.eval(losses())
    with zmlx.target("reference"):
        got = losses()
    assert np.isfinite(np.array(got)).tolist() == [False, True, True, True][: got.size]
    with pytest.raises(ValueError, match=r"'ignore_index' must be in \(-2\^62, 2\^62\) but got"):
        cross_entropy(logits, targets, ignore_index=-(2**63))


def test_probabilities_and_ignore_index_do_not_go_together():
    logits, _, _ = problem(5, 6, 9)
    with pytest.raises(ValueError, match=r"\[cross_entropy\] 'ignore_index' must be None"):
        cross_entropy(logits, mx.softmax(logits, axis=-1), ignore_index=1)


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 1.5},
        {"label_smoothing": -0.1},
        {"z_loss": -1.0},
        {"softcap": 0.0},
        {"softcap": float("inf")},
        {"softcap": 1e300},
        {"softcap": 1e-300},
        {"ignore_index": 2**63},
        {"reduction": "average"},
    ],
)
def test_an_option_out_of_range_is_refused(options):
    logits, targets, _ = problem(5, 6, 9)
    with pytest.raises(ValueError, match=rf"\[cross_entropy\] '{next(iter(options))}' must"):
        cross_entropy(logits, targets, **options)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_over_no_rows_is_nan_and_their_sum_is_0(weighted):
    logits, targets, weights = problem(6, 4, 5)
    targets = mx.full(targets.shape, -100)
    weights = weights if weighted else None
    assert np.isnan(cross_entropy(logits, targets, weights, ignore_index=-100).item())
    assert cross_entropy(logits, targets, weights, ignore_index=-100, reduction="sum").item() == 0
    empty = mx.zeros((0, 5)), mx.zeros((0,), dtype=mx.int32)
    assert np.isnan(cross_entropy(*empty).item())


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_rows_without_classes(target):
    logits, targets = mx.zeros((3, 0)), mx.full((3,), -100)
    with zmlx.target(target):
        loss, lse = cross_entropy(logits, logits, reduction="none", return_lse=True)
        assert loss.tolist() == [0, 0, 0]
        assert lse.tolist() == [-np.inf] * 3
        assert cross_entropy(logits, logits, z_loss=0.1).item() == np.inf
        ignored = cross_entropy(logits, targets, ignore_index=-100, reduction="none")
        assert ignored.tolist() == [0, 0, 0]
        assert mx.grad(lambda x: cross_entropy(x, x))(logits).shape == (3, 0)
        with pytest.raises(ValueError, match=r"'targets' must have shape \(3,\) but got \(2,\)"):
            cross_entropy(logits, targets[:2])
    if target == "reference":
        with zmlx.target(target):
            assert np.isnan(np.array(cross_entropy(logits, targets, reduction="none"))).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_ignored_rows_have_the_gradient_0_in_plain_mlx_too(linear, weighted, reduction, way):
    """That of a mean over no rows would be infinite."""
    logits, targets, weights = problem(6, 4, 5)
    targets = mx.full(targets.shape, -100)
    options = {"ignore_index": -100, "reduction": reduction, "z_loss": 0.1, "label_smoothing": 0.1}

    def function(logits, matrix):
        some = weights if weighted else None
        if linear:
            return linear_cross_entropy(logits, matrix, targets, None, some, **options)
        return cross_entropy(logits, targets, some, **options)

    for found in assert_plain_gradients(function, [logits, mx.eye(5)], [0, 1][: 1 + linear], way):
        assert not np.array(found).any()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bad", [9, -1, 2**31 - 1])
def test_a_target_out_of_range_raises_at_evaluation(bad, weighted):
    logits, targets, weights = problem(7, 4, 9)
    targets[1] = bad
    loss = cross_entropy(logits, targets, weights if weighted else None, label_smoothing=0.1)
    with pytest.raises(RuntimeError, match=rf"\[cross_entropy\] 'targets' must .* but got {bad}\."):
        mx.eval(loss)


def test_zmlx_check_raises_at_the_call():
    code = (
        "import mlx.core as mx; from zmlx.kernels import cross_entropy\n"
        "cross_entropy(mx.zeros((3, 5)), mx.array([0, 7, 2]), mx.ones((5,)), label_smoothing=0.1)"
    )
    environment = {**os.environ, "ZMLX_CHECK": "1"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert "ValueError: [cross_entropy] 'targets' must be in range but got 7." in out.stderr


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_extreme_logits(dtype):
    inf = float("inf")
    logits = mx.array(
        [[1e4, -1e4, 0.0], [-inf, 0.0, 1.0], [-inf, -inf, -inf], [float("nan")] * 3]
    ).astype(dtype)
    targets = mx.array([0, 2, 1, 0])
    losses, lse = cross_entropy(logits, targets, reduction="none", return_lse=True)
    losses, lse = np.array(losses.astype(mx.float32)), np.array(lse)
    np.testing.assert_allclose(losses[:2], [0.0, np.log1p(np.exp(-1.0))], rtol=2e-2, atol=1e-6)
    assert lse[2] == -inf
    assert np.isnan(lse[3])
    assert np.isnan(losses[2:]).all()
    gradient = mx.grad(lambda x: cross_entropy(x, targets[:2], reduction="sum"))(logits[:2])
    assert np.isfinite(np.array(gradient.astype(mx.float32))).all()
    assert gradient[1, 0].item() == 0


@pytest.mark.parametrize("offset", [1e4, -3e4])
def test_a_loss_keeps_its_digits_far_from_0(offset):
    logits, targets, _ = problem(10, 5, 40)
    logits = mx.round(64 * logits) / 64
    for options in ({}, {"label_smoothing": 0.3}):
        near = cross_entropy(logits, targets, reduction="none", **options)
        far = cross_entropy(logits + offset, targets, reduction="none", **options)
        np.testing.assert_allclose(np.array(far), np.array(near), rtol=1e-6)


def test_gradients_keep_their_digits_far_from_0():
    """Also those of probabilities, which are what the logits lie below the log-sum-exp."""
    logits, targets, _ = problem(10, 5, 40)
    logits = mx.round(64 * logits) / 64
    probabilities = mx.softmax(mx.random.normal((5, 40), key=mx.random.key(0)), axis=-1)
    for wanted, argnums in ((targets, (0,)), (probabilities, (0, 1))):
        near, far = (
            mx.grad(lambda x, t: cross_entropy(x, t, reduction="sum"), argnums)(x, wanted)
            for x in (logits, logits + 30000.0)
        )
        for got, want in zip(far, near, strict=True):
            np.testing.assert_allclose(np.array(got), np.array(want), rtol=5e-6, atol=5e-7)


def test_a_new_number_compiles_nothing():
    logits, targets, weights = problem(8, 6, 40)

    def run(a, b, c, ignore):
        options = {"label_smoothing": a, "z_loss": b, "softcap": c, "ignore_index": ignore}
        mx.eval(mx.grad(lambda x: cross_entropy(x, targets, weights, **options))(logits))

    run(0.1, 1e-3, 20.0, 1)
    before = metal.statistics()["compiles"]
    run(0.2, 2e-3, 30.0, -100)
    assert metal.statistics()["compiles"] == before


ALONE = (
    {},
    {"axis": 0},
    {"label_smoothing": 0.3},
    {"z_loss": 0.1},
    {"softcap": 2.0},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"ignore_index": 1},
    {"ignore_index": 2},
)


@pytest.mark.parametrize("kind", ["classes", "weighted", "probabilities"])
def test_a_repeated_call_is_right_for_other_values_and_options(kind):
    for options in ALONE[:-2] if kind == "probabilities" else ALONE:
        found = []
        for seed in range(3):
            logits, targets, weights = problem(seed, 7, 7)
            targets[1:3] = mx.array([1, 2])
            if kind == "probabilities":
                targets = mx.softmax(mx.random.normal((7, 7), key=mx.random.key(seed)), axis=-1)
            arrays = (logits, targets, weights) if kind == "weighted" else (logits, targets)
            loss = cross_entropy(*arrays, **options)
            plain = cross_entropy_reference(*arrays, **options)
            np.testing.assert_allclose(np.array(loss), np.array(plain), rtol=2e-5, atol=1e-6)
            assert mx.array_equal(cross_entropy(*arrays, **options, return_lse=True)[0], loss)
            assert not options or not mx.array_equal(cross_entropy(*arrays), loss)
            found.append(loss)
        assert not mx.array_equal(found[0], found[1])


def test_a_bad_call_raises_after_a_good_one():
    logits, targets, weights = problem(4, 5, 6)
    for _ in range(2):
        cross_entropy(logits, targets, weights, axis=1, label_smoothing=0.0)
        for options, message in (
            ({"axis": True}, r"'axis' must be an int"),
            ({"axis": 2}, r"'axis' must be in"),
            ({"label_smoothing": False}, r"'label_smoothing' must be"),
            ({"reduction": "max"}, r"'reduction' must be"),
            ({"return_lse": 0}, r"'return_lse' must be"),
            ({"ignore_index": 1.0}, r"'ignore_index' must be"),
        ):
            with pytest.raises((TypeError, ValueError), match=rf"\[cross_entropy\] {message}"):
                cross_entropy(logits, targets, weights, **options)
        with pytest.raises(ValueError, match=r"\[cross_entropy\] 'targets' must have shape"):
            cross_entropy(logits, targets[:3])
        with pytest.raises(TypeError, match=r"\[cross_entropy\] 'targets' must be an mx.array"):
            cross_entropy(logits, targets.tolist())


def test_no_array_of_a_call_is_kept():
    arrays = problem(6, 9, 11)
    kept = [weakref.ref(x) for x in arrays]
    for options in ({}, {"axis": 1, "ignore_index": 2, "reduction": "none"}):
        mx.eval(cross_entropy(*arrays, **options))
    del arrays
    assert [x() for x in kept] == [None] * 3
