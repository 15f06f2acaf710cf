"""linear_cross_entropy: options together, blocks, memory, targets out of range."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zmlx
from zmlx import metal
from zmlx.kernels import cross_entropy, linear_cross_entropy
from zmlx.kernels.linear_cross_entropy import linear_cross_entropy_reference
from zmlx.testing import assert_matches, oracle_namespace, to_numpy

XP = oracle_namespace()


def problem(seed, rows, width, classes, dtype=mx.float32):
    rng = np.random.default_rng(seed)
    hidden = mx.array(rng.standard_normal((rows, width))).astype(dtype)
    weight = mx.array(rng.standard_normal((classes, width)) * width**-0.5).astype(dtype)
    bias = mx.array(rng.standard_normal(classes)).astype(dtype)
    targets = mx.array(rng.integers(0, classes, rows))
    class_weights = mx.array(rng.uniform(0.2, 3.0, classes)).astype(mx.float32)
    return hidden, weight, targets, bias, class_weights


def loss_and_gradients(values, weights, cotangent, **options):
    hidden, weight, targets, bias = values

    def of(h, w, b):
        return [linear_cross_entropy(h, w, targets, b, weights, **options)]

    outputs, gradients = mx.vjp(of, [hidden, weight, bias], [cotangent])
    return outputs[0], gradients


@given(
    st.fixed_dictionaries(
        {
            "ignore_index": st.sampled_from([None, 0, -100]),
            "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
            "z_loss": st.sampled_from([0.0, 0.01]),
            "softcap": st.sampled_from([None, 0.7, 30.0]),
            "reduction": st.sampled_from(["none", "mean", "sum"]),
        }
    ),
    st.booleans(),
    st.sampled_from([None, 1, 7, 64]),
    st.integers(0, 99),
)
def test_any_options_together_match_float64(options, weighted, chunk, seed):
    from autograd import make_vjp
    from autograd.builtins import tuple as traced_tuple

    hidden, weight, targets, bias, weights = problem(seed, 6, 5, 23)
    targets[0] = 3
    numpy = [to_numpy(x) for x in (hidden, weight, bias)]
    w = to_numpy(weights) if weighted else None

    def of(some):
        h, m, b = some
        return linear_cross_entropy_reference(h, m, to_numpy(targets), b, w, xp=XP, **options)

    vjp, want = make_vjp(of, 0)(traced_tuple(numpy))
    cotangent = np.random.default_rng(1).standard_normal(np.shape(want))
    got, gradients = loss_and_gradients(
        (hidden, weight, targets, bias), weights if weighted else None,
        mx.array(cotangent).astype(mx.float32), chunk=chunk, **options,
    )  # fmt: skip
    # Without the float32 run of the reference as a base.
    assert_matches(got, want, rounding=16)
    for a, b in zip(gradients, vjp(to_numpy(mx.array(cotangent).astype(mx.float32))), strict=True):
        assert_matches(a, b, rounding=32)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("rows", [1, 700])
def test_blocks_of_rows_and_classes_change_nothing(dtype, rows):
    """700 rows of 1500 classes are several blocks in both directions."""
    hidden, weight, targets, bias, _ = problem(2, rows, 16, 1500, dtype)
    values = (hidden, weight, targets, bias)
    one = mx.array(1.0).astype(dtype)
    got, gradients = loss_and_gradients(values, None, one)
    wide = [x.astype(mx.float32) for x in (hidden, weight, bias)]

    def plain(h, w, b):
        return [cross_entropy(h @ w.T + b, targets)]

    want, expected = mx.vjp(plain, wide, [mx.array(1.0)])
    assert_matches(got, to_numpy(want[0]), rounding=8)
    for a, b in zip(gradients, expected, strict=True):
        assert a.dtype == dtype
        assert_matches(a, to_numpy(b), rounding=64 if dtype == mx.float32 else 4)


def test_the_log_sum_exp_has_a_gradient():
    hidden, weight, targets, _, _ = problem(3, 7, 6, 50)

    def ours(h, w):
        loss, lse = linear_cross_entropy(h, w, targets, return_lse=True, chunk=16)
        return loss + (lse * mx.arange(7)).sum()

    def plain(h, w):
        loss, lse = cross_entropy(h @ w.T, targets, return_lse=True)
        return loss + (lse * mx.arange(7)).sum()

    for a, b in zip(mx.grad(ours, (0, 1))(hidden, weight),
                    mx.grad(plain, (0, 1))(hidden, weight), strict=True):  # fmt: skip
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_memory_is_a_part_of_what_the_logits_take(compiled, checkpointed):
    rows, width, classes = 1024, 8, 16384
    hidden, weight, targets, _, _ = problem(4, rows, width, classes)
    mx.eval(hidden, weight, targets)

    def peak(loss):
        loss = mx.checkpoint(loss) if checkpointed else loss
        step = mx.value_and_grad(loss, argnums=(0, 1))
        step = mx.compile(step) if compiled else step
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(step(hidden, weight))
        return mx.get_peak_memory() - before - hidden.nbytes - weight.nbytes

    plain = peak(lambda h, w: cross_entropy(h @ w.T, targets))
    ours = peak(lambda h, w: linear_cross_entropy(h, w, targets))
    assert plain > rows * classes * 4
    assert ours < plain / 16  # two blocks of a 64th and what is made of them


def test_a_loss_alone_holds_less_than_the_logits():
    hidden, weight, targets, _, _ = problem(4, 1024, 8, 16384)
    mx.eval(hidden, weight, targets)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(linear_cross_entropy(hidden, weight, targets))
    assert mx.get_peak_memory() - before < 1024 * 16384 * 4 / 8


def test_a_gradient_that_is_not_asked_for_is_not_computed():
    hidden, weight, targets, _, _ = problem(5, 1024, 64, 4096)
    mx.eval(hidden, weight, targets)

    def peak(argnums):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        loss = mx.grad(lambda h, w: linear_cross_entropy(h, w, targets, chunk=1024), argnums)
        mx.eval(loss(hidden, weight))
        return mx.get_peak_memory() - before

    assert peak((0,)) < peak((0, 1)) - weight.nbytes / 2


@pytest.mark.parametrize("mapped", ["targets", "weight"])
def test_several_blocks_of_one_hidden_array(mapped):
    hidden, weight, targets, _, _ = problem(10, 12, 5, 23)
    values = {"hidden": hidden, "weight": weight, "targets": targets}
    batch = mx.stack([values[mapped], values[mapped][::-1]])

    def loss(x):
        return linear_cross_entropy(**(values | {mapped: x}), chunk=4)

    got = mx.vmap(loss)(batch)
    np.testing.assert_allclose(np.array(got), np.array([loss(x).item() for x in batch]), rtol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_transforms_of_several_blocks(reduction):
    hidden, weight, targets, _, _ = problem(10, 12, 5, 23)
    arrays = [hidden, weight]
    along = [mx.cos(x) for x in arrays]

    def of(loss):
        def total(*some):
            return loss(*some).sum()

        return [
            *mx.jvp(lambda *some: [loss(*some)], arrays, along)[1],
            *mx.jvp(lambda *some: list(mx.grad(total, (0, 1))(*some)), arrays, along)[1],
            mx.vmap(loss, in_axes=(0, None))(mx.stack([hidden, -hidden]), weight),
            *mx.vmap(mx.grad(total, (0, 1)))(*[mx.stack([x, -x]) for x in arrays]),
        ]

    got = of(lambda h, w: linear_cross_entropy(h, w, targets, reduction=reduction, chunk=4))
    want = of(lambda h, w: cross_entropy(h @ w.T, targets, reduction=reduction))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [50, -1, 2**31 - 1])
def test_a_target_out_of_range_raises_at_evaluation(bad):
    hidden, weight, targets, bias, _ = problem(6, 5, 4, 50)
    targets[2] = bad
    expected = rf"\[linear_cross_entropy\] 'targets' must .* but got {bad}\."
    with pytest.raises(RuntimeError, match=expected):
        mx.eval(linear_cross_entropy(hidden, weight, targets, bias, chunk=16))


def test_rows_that_are_all_ignored():
    hidden, weight, targets, bias, _ = problem(7, 5, 4, 50)
    targets = mx.full(targets.shape, -100)
    assert np.isnan(linear_cross_entropy(hidden, weight, targets, bias, ignore_index=-100).item())

    def loss(h):
        return linear_cross_entropy(h, weight, targets, bias, ignore_index=-100, reduction="sum")

    assert (np.array(mx.grad(loss)(hidden)) == 0).all()


def test_no_rows():
    hidden, weight, _, _, _ = problem(7, 5, 4, 50)
    none = mx.zeros((0,), dtype=mx.int32)
    assert np.isnan(linear_cross_entropy(hidden[:0], weight, none).item())
    gradient = mx.grad(lambda w: linear_cross_entropy(hidden[:0], w, none, reduction="sum"))(weight)
    assert (np.array(gradient) == 0).all()


def test_hidden_of_no_elements():
    """The logits are the bias, or 0: losses of log V."""
    hidden, weight, targets = mx.zeros((2, 3, 0)), mx.zeros((7, 0)), mx.zeros((2, 3), mx.int32)
    loss = linear_cross_entropy(hidden, weight, targets, reduction="none")
    np.testing.assert_allclose(np.array(loss), np.full((2, 3), np.log(7)), rtol=1e-6)
    bias = mx.arange(7) / 4.0

    def of(function):
        return mx.value_and_grad(function, argnums=(0, 1, 2))(hidden, weight, bias)

    loss, gradients = of(lambda h, w, b: linear_cross_entropy(h, w, targets, b))
    want, wants = of(lambda h, w, b: cross_entropy(h @ w.T + b, targets))
    np.testing.assert_allclose(loss.item(), want.item(), rtol=1e-6)
    for gradient, want in zip(gradients, wants, strict=True):
        np.testing.assert_allclose(np.array(gradient), np.array(want), atol=1e-6)


def test_extreme_logits():
    hidden = mx.array([[1e4, 0.0], [0.0, 1.0]])
    weight = mx.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    loss = linear_cross_entropy(hidden, weight, mx.array([0, 2]), chunk=1, reduction="none")
    np.testing.assert_allclose(np.array(loss), [0.0, np.log(2 + np.e) - 1], rtol=1e-6)


def test_gradients_keep_their_digits_far_from_0():
    hidden, weight, targets, bias, _ = problem(8, 5, 4, 50)
    hidden, weight = mx.round(8 * hidden) / 8, mx.round(8 * weight) / 8  # exact logits
    near, far = (
        mx.grad(lambda b: linear_cross_entropy(hidden, weight, targets, b, chunk=20))(b)
        for b in (mx.zeros_like(bias), mx.full(bias.shape, 30000.0))
    )
    np.testing.assert_allclose(np.array(far), np.array(near), rtol=5e-6, atol=5e-7)


@pytest.mark.parametrize("chunk", [0, -4, 2.5, True, "8"])
def test_a_bad_chunk_is_refused(chunk):
    hidden, weight, targets, _, _ = problem(8, 5, 4, 50)
    with pytest.raises((TypeError, ValueError), match=r"'chunk' must be (an int|at least 1) but"):
        linear_cross_entropy(hidden, weight, targets, chunk=chunk)


@pytest.mark.on_cpu
def test_without_classes_no_target_is_in_range():
    hidden, weight = mx.zeros((3, 4)), mx.zeros((0, 4))
    loss = linear_cross_entropy(hidden, weight, mx.array([0, -1, -1]), ignore_index=-1)
    with pytest.raises(RuntimeError, match=r"\[linear_cross_entropy\] 'targets' must be in range"):
        mx.eval(loss)
    ignored = mx.full((3,), -1, dtype=mx.int32)
    loss = linear_cross_entropy(hidden, weight, ignored, ignore_index=-1, reduction="sum")
    assert loss.item() == 0


@pytest.mark.parametrize("ignored", [0, -100, 2**40])
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_an_index_of_any_width_is_ignored(target, ignored):
    hidden, weight, targets, _, _ = problem(6, 5, 4, 50)
    given = mx.where(mx.arange(targets.size) % 2 == 0, mx.array(ignored, mx.int64), targets)
    with zmlx.target(target):
        got = linear_cross_entropy(hidden, weight, given, ignore_index=ignored, reduction="none")
    want = linear_cross_entropy(hidden, weight, targets, reduction="none")
    want = mx.where(given == ignored, 0.0, want)
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_without_rows_there_is_no_loss(target):
    with zmlx.target(target):
        loss, lse = linear_cross_entropy(
            mx.zeros((2, 0, 4)), mx.zeros((5, 4)), mx.zeros((2, 0), mx.int32), reduction="none",
            return_lse=True,
        )  # fmt: skip
    assert loss.shape == lse.shape == (2, 0)


def test_a_new_number_compiles_nothing():
    hidden, weight, targets, bias, weights = problem(9, 6, 5, 40)

    def run(a, b, c, ignore):
        options = {"label_smoothing": a, "z_loss": b, "softcap": c, "ignore_index": ignore}

        def loss(h, w):
            return linear_cross_entropy(h, w, targets, bias, weights, **options)

        mx.eval(mx.grad(loss, (0, 1))(hidden, weight))

    run(0.1, 1e-3, 20.0, 1)
    before = metal.statistics()["compiles"]
    run(0.2, 2e-3, 30.0, -100)
    assert metal.statistics()["compiles"] == before
