"""Mixture of experts: routing, dispatch, combine and the experts, as one layer and in parts."""

import weakref
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zmlx
from zmlx import launch
from zmlx.kernels import expert_ffn, moe_combine, moe_dispatch, moe_rows_text, moe_sort, topk_gating
from zmlx.kernels.moe_sort import moe_sort_reference
from zmlx.testing import assert_matches, to_numpy

GEOMETRIES = pytest.mark.parametrize("geometry", ["cpu", "gpu"])


def normal(*shape, seed=0, dtype=mx.float32):
    return mx.array(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def layer(x, logits, gate, up, down, top_k=2, **options):
    """A mixture of experts made of the kernels."""
    weights, indices = topk_gating(logits, top_k=top_k, **options)
    routing = moe_sort(indices, num_experts=logits.shape[-1])
    rows = moe_dispatch(x, routing.positions, routing.order)
    rows = expert_ffn(rows, gate, up, down, routing.offsets)
    return moe_combine(rows, weights, routing.positions, routing.order)


def plain_layer(x, logits, gate, up, down, top_k=2, xp=mx):
    """The same: every expert for every token, times its weight or 0."""
    score = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
    order = xp.argsort(-logits, axis=-1)[..., :top_k]
    chosen = xp.any(order[..., None] == xp.arange(logits.shape[-1]), axis=-2)
    score = xp.where(chosen, score, 0.0)
    weights = score / xp.sum(score, axis=-1, keepdims=True)
    g = xp.matmul(x, xp.swapaxes(gate, -1, -2))
    u = xp.matmul(x, xp.swapaxes(up, -1, -2))
    y = xp.matmul(g / (1 + xp.exp(-g)) * u, xp.swapaxes(down, -1, -2))
    return xp.sum(xp.swapaxes(weights, 0, 1)[..., None] * y, axis=0)


def problem(tokens=37, d=24, h=40, experts=6):
    shapes = (tokens, d), (tokens, experts), (experts, h, d), (experts, h, d), (experts, d, h)
    return [normal(*s, seed=i) * (1.0 if i < 2 else s[-1] ** -0.5) for i, s in enumerate(shapes)]


# ---- the layer ----------------------------------------------------------------------------------


@GEOMETRIES
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_layer_and_gradients_are_those_of_all_experts_masked(geometry, top_k):
    values = problem()
    cotangent = normal(37, 24, seed=9)

    def run(function):
        return mx.vjp(lambda *v: [function(*v, top_k=top_k)], values, [cotangent])

    with launch.geometry(geometry):
        (out,), got = run(layer)
    (want,), expected = run(plain_layer)
    wide = [to_numpy(v) for v in values]
    assert_matches(out, plain_layer(*wide, top_k=top_k, xp=np), to_numpy(want))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=2e-5, atol=2e-5)


def test_layer_in_a_compiled_training_step():
    values = problem()

    def loss(*v):
        return mx.square(layer(*v)).mean()

    got = mx.compile(mx.grad(loss, argnums=(0, 1, 2, 3, 4)))(*values)
    for a, b in zip(got, mx.grad(loss, argnums=(0, 1, 2, 3, 4))(*values), strict=True):
        np.testing.assert_allclose(to_numpy(a), to_numpy(b), rtol=1e-6, atol=1e-8)


def test_permuted_tokens_give_permuted_results():
    values = problem()
    order = mx.array(np.random.default_rng(5).permutation(37))
    out = layer(*values)
    moved = layer(values[0][order], values[1][order], *values[2:])
    np.testing.assert_allclose(to_numpy(moved), to_numpy(out[order]), rtol=1e-5, atol=1e-6)


def test_permuted_experts_give_the_same_results():
    x, logits, *weights = problem()
    order = mx.array([3, 1, 5, 0, 2, 4])
    out = layer(x, logits, *weights)
    moved = layer(x, logits[:, order], *[w[order] for w in weights])
    np.testing.assert_allclose(to_numpy(moved), to_numpy(out), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 40])
def test_all_tokens_to_one_expert(tokens):
    x, logits, *weights = problem(tokens)
    logits = mx.where(mx.arange(6) == 4, 50.0, logits)
    gate, up, down = (w[4] for w in weights)
    g = x @ gate.T
    want = (g * mx.sigmoid(g) * (x @ up.T)) @ down.T
    out = layer(x, logits, *weights, top_k=1)
    np.testing.assert_allclose(to_numpy(out), to_numpy(want), rtol=1e-4, atol=1e-5)
    dgate = mx.grad(lambda w: mx.square(layer(x, logits, w, *weights[1:], top_k=1)).sum())(
        weights[0]
    )
    assert not mx.any(dgate[mx.array([0, 1, 2, 3, 5])]).item()
    assert mx.any(dgate[4]).item()


def test_it_is_the_switch_layer_of_mlx_lm():
    switch = pytest.importorskip("mlx_lm.models.switch_layers")
    mx.random.seed(1)
    theirs = switch.SwitchGLU(32, 48, 8)
    x, indices = normal(50, 32), mx.random.randint(0, 8, (50, 2))
    routing = moe_sort(indices, num_experts=8)
    projections = [getattr(theirs, f"{name}_proj").weight for name in ("gate", "up", "down")]
    rows = expert_ffn(
        moe_dispatch(x, routing.positions, routing.order), *projections, routing.offsets
    )
    want = theirs(x, indices)
    np.testing.assert_allclose(
        to_numpy(rows[routing.positions]), to_numpy(want), rtol=1e-5, atol=1e-6
    )


# ---- the router ---------------------------------------------------------------------------------


@GEOMETRIES
@given(data=st.data())
def test_any_router(geometry, data):
    groups = data.draw(st.integers(1, 5), "groups")
    experts = groups * data.draw(st.integers(1, 40), "width")
    kept = data.draw(st.integers(1, groups), "kept")
    top_k = data.draw(st.integers(1, experts // groups * kept), "top_k")
    options = {
        "scores": data.draw(st.sampled_from(["softmax", "sigmoid"])),
        "normalize": data.draw(st.booleans()),
        "scale": data.draw(st.sampled_from([1.0, 2.5])),
        "n_groups": groups,
        "topk_groups": kept,
        "group_score": data.draw(st.sampled_from(["top2", "max"])),
    }
    # Multiples of 1/4 tie often.
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = mx.array(np.round(rng.standard_normal((5, experts)) * 4) / 4)
    logits = logits.astype(mx.float32)
    bias = None
    if data.draw(st.booleans(), "biased"):
        bias = mx.array(rng.permutation(experts) * 3.0).astype(mx.float32)
    with launch.geometry(geometry):
        weights, indices = topk_gating(logits, bias, top_k=top_k, **options)
    picked = np.array(indices)
    assert all(len(set(row)) == top_k for row in picked)
    assert picked.max() < experts
    assert len({e // (experts // groups) for e in picked[0]}) <= kept
    if bias is not None or groups == 1:
        reference = zmlx.registry.get("topk_gating").reference
        want = reference(logits, bias, top_k=top_k, **options)
        np.testing.assert_array_equal(picked, np.array(want[1]))
        np.testing.assert_allclose(to_numpy(weights), to_numpy(want[0]), rtol=1e-5, atol=1e-7)
    if options["normalize"]:
        np.testing.assert_allclose(to_numpy(weights).sum(-1), options["scale"], rtol=1e-5)


@GEOMETRIES
def test_ties_go_to_the_lower_expert(geometry):
    with launch.geometry(geometry):
        _, indices = topk_gating(mx.zeros((3, 70)), top_k=5)
        _, signed = topk_gating(mx.array([[-0.0, 0.0, -0.0, -1.0]]), top_k=3)
    assert indices.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert signed.tolist() == [[0, 1, 2]]


@GEOMETRIES
@pytest.mark.parametrize("top_k, experts", [(1, 5), (2, 60), (8, 128), (11, 70), (17, 40)])
def test_several_rows_of_a_thread_are_chosen_from_apart(geometry, top_k, experts):
    """35 rows are two whole blocks of 16 and a partial one; ties, infinities and NaN in all."""
    rng = np.random.default_rng(top_k)
    logits = np.round(rng.standard_normal((35, experts)) * 4) / 4
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[::3, 1] = np.nan
    missing = np.isnan(logits)
    # By what is missing, then by the value, then by the expert: `lexsort` is stable.
    order = np.lexsort((np.where(missing, 0, -logits), missing), axis=-1)
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        with launch.geometry(geometry):
            weights, indices = topk_gating(mx.array(logits).astype(dtype), top_k=top_k)
        np.testing.assert_array_equal(np.array(indices), order[:, :top_k])
        spoiled = np.isnan(to_numpy(weights)).all(axis=-1)
        np.testing.assert_array_equal(spoiled, np.isnan(logits).any(axis=-1))


@GEOMETRIES
def test_logits_that_differ_in_the_last_bits_are_told_apart(geometry):
    """The keys that a CPU sorts have room for fewer bits, which must not decide."""
    rng = np.random.default_rng(3)
    steps = np.stack([rng.permutation(100) for _ in range(20)])
    with launch.geometry(geometry):
        _, indices = topk_gating(mx.array((1 + steps * 2.0**-23).astype(np.float32)), top_k=7)
    np.testing.assert_array_equal(np.array(indices), np.argsort(-steps, axis=-1)[:, :7])


@GEOMETRIES
def test_infinite_and_missing_logits(geometry):
    inf, nan = float("inf"), float("nan")
    logits = mx.array([[-inf, 1.0, -inf, 0.0], [nan, 1.0, 2.0, 0.0], [nan, nan, nan, nan]])
    with launch.geometry(geometry):
        weights, indices = topk_gating(logits, top_k=3)
        scores, _ = topk_gating(logits, top_k=3, scores="sigmoid")
    assert indices.tolist() == [[1, 3, 0], [2, 1, 3], [0, 1, 2]]
    assert weights[0, 2].item() == 0
    assert np.isnan(to_numpy(weights)).all(axis=-1).tolist() == [False, True, True]
    assert np.isnan(to_numpy(scores)).any(axis=-1).tolist() == [False, False, True]


def test_a_shift_of_the_logits_changes_nothing_with_softmax():
    logits = normal(20, 33)
    weights, indices = topk_gating(logits, top_k=4, normalize=False)
    moved, same = topk_gating(logits + 8.0, top_k=4, normalize=False)
    assert indices.tolist() == same.tolist()
    np.testing.assert_allclose(to_numpy(moved), to_numpy(weights), rtol=1e-5)


def test_normalized_weights_are_finite_where_the_scores_vanish():
    """A bias may choose experts whose softmax is 0 in float32."""
    logits = mx.array([[200.0, 0.0, 1.0, 0.0]])
    weights, indices = topk_gating(logits, mx.array([-9.0, 5.0, 4.0, 0.0]), top_k=2)
    assert indices.tolist() == [[1, 2]]
    np.testing.assert_allclose(to_numpy(weights), [[0.26894142, 0.73105858]], rtol=1e-6)


@GEOMETRIES
def test_normalized_weights_of_vanishing_sigmoids_are_their_ratios(geometry):
    """Scores below the least float32, and experts beside them that are not chosen."""
    rows = [
        [-200.0, -201.0, -300.0, -1e4],
        [-88.5, -89.0, -104.0, -110.0],
        [2.0, 1.0, -200.0, -210.0],
    ]
    logits, dweights = mx.array(rows), normal(3, 3)
    gate = partial(topk_gating, top_k=3, scores="sigmoid", scale=2.0)
    with launch.geometry(geometry):
        weights, indices = gate(logits)
        dlogits = mx.vjp(lambda x: gate(x)[0], [logits], [dweights])[1][0]
    assert indices.tolist() == [[0, 1, 2]] * 3
    x = np.array(rows)[:, :3]
    scores = 1 / (1 + np.exp(-x))
    w = scores / scores.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(to_numpy(weights), 2 * w, rtol=1e-6, atol=1e-30)
    dw = 2 * to_numpy(dweights)
    dx = w * (1 - scores) * (dw - (dw * w).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(to_numpy(dlogits)[:, :3], dx, rtol=1e-5, atol=1e-6)
    assert not np.any(to_numpy(dlogits)[:, 3])
    with zmlx.target("reference"):
        again = gate(logits)[0]
    np.testing.assert_allclose(to_numpy(again), 2 * w, rtol=2e-5, atol=1e-30)


@GEOMETRIES
def test_a_group_with_infinities_of_both_signs_opens_no_further_one(geometry):
    inf = mx.inf
    gate = partial(topk_gating, mx.zeros((1, 6)), top_k=2, n_groups=3, topk_groups=1)
    with launch.geometry(geometry):
        for bias in ([inf, -inf, 0, 0, 0, 0], [inf, -inf] + 4 * [-inf]):
            assert gate(mx.array(bias))[1].tolist() == [[2, 3]]


def test_more_experts_than_fit_a_stack_are_refused():
    most = 1 << 16
    logits = mx.zeros((1, most + 1))
    with pytest.raises(ValueError, match=rf"'logits' must have at most {most} .* got {most + 1}"):
        topk_gating(logits, top_k=1)
    x = normal(3, most)
    _, indices = topk_gating(x, top_k=1, normalize=False)
    assert indices[:, 0].tolist() == mx.argmax(x, axis=-1).tolist()


def test_groups_of_no_rows_in_plain_mlx():
    gate = partial(topk_gating, top_k=2, n_groups=4, topk_groups=2)
    with zmlx.target("reference"):
        assert [x.shape for x in gate(mx.zeros((0, 8)))] == [(0, 2)] * 2
    assert [x.shape for x in mx.vmap(gate)(mx.zeros((3, 0, 8)))] == [(3, 0, 2)] * 2


def test_the_bias_chooses_and_has_no_gradient():
    logits, bias = normal(6, 10), normal(10, seed=1)
    dbias = mx.grad(lambda b: topk_gating(logits, b, top_k=3)[0].max(axis=-1).sum())(bias)
    assert not mx.any(dbias).item()
    weights, indices = topk_gating(logits, bias * 100, top_k=2, normalize=False)
    assert indices.tolist() == [np.argsort(-to_numpy(bias))[:2].tolist()] * 6
    want = mx.take_along_axis(mx.softmax(logits, axis=-1), indices, axis=-1)
    np.testing.assert_allclose(to_numpy(weights), to_numpy(want), rtol=1e-5)


def test_it_is_the_router_of_deepseek_v3():
    deepseek = pytest.importorskip("mlx_lm.models.deepseek_v3")
    logits, bias = normal(50, 64), normal(64, seed=1) * 0.1
    want, scores = deepseek.group_expert_select(logits, bias, 6, 8, 3, 2.5, True)
    weights, indices = topk_gating(logits, bias, top_k=6, scores="sigmoid", scale=2.5, n_groups=8,
                                   topk_groups=3)  # fmt: skip
    order = mx.argsort(want, axis=-1)
    ours = mx.argsort(indices, axis=-1)
    assert mx.array_equal(
        mx.take_along_axis(want, order, -1), mx.take_along_axis(indices, ours, -1)
    )
    np.testing.assert_allclose(
        to_numpy(mx.take_along_axis(weights, ours, -1)),
        to_numpy(mx.take_along_axis(scores, order, -1)), rtol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": 0}, r"'top_k' must be in \[1, 12\].* but got 0"),
        ({"top_k": 13}, r"'top_k' must be in \[1, 12\].* but got 13"),
        ({"top_k": 5, "n_groups": 3, "topk_groups": 1}, r"'top_k' must be in \[1, 4\]"),
        ({"top_k": 1, "n_groups": 5}, r"'n_groups' must divide the 12 experts but got 5"),
        ({"top_k": 1, "n_groups": 3, "topk_groups": 4}, r"'topk_groups' must be in \[1, 3\]"),
        ({"top_k": 1, "scores": "relu"}, r"'scores' must be one of softmax, sigmoid"),
        ({"top_k": 1, "group_score": "sum"}, r"'group_score' must be one of top2, max"),
    ],
)
def test_options_of_the_router_are_checked(options, message):
    with pytest.raises(ValueError, match=r"\[topk_gating\] " + message):
        topk_gating(mx.zeros((2, 12)), **options)


# ---- sorting ------------------------------------------------------------------------------------


@GEOMETRIES
@given(
    tokens=st.integers(0, 300), top_k=st.integers(1, 9), experts=st.integers(1, 200),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_any_sort(geometry, tokens, top_k, experts, seed):
    indices = np.random.default_rng(seed).integers(0, experts, (tokens, top_k))
    with launch.geometry(geometry):
        routing = moe_sort(mx.array(indices), num_experts=experts)
    flat = indices.reshape(-1)
    np.testing.assert_array_equal(np.array(routing.order), np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(
        np.array(routing.positions).reshape(-1)[np.array(routing.order)], np.arange(flat.size)
    )
    counts = np.bincount(flat, minlength=experts)
    np.testing.assert_array_equal(np.array(routing.counts), counts)
    np.testing.assert_array_equal(np.array(routing.offsets), np.cumsum([0, *counts]))


def test_the_sort_is_one_launch():
    indices = mx.array(np.random.default_rng(0).integers(0, 8, (64, 2)))
    mx.eval(indices, *moe_sort(indices, num_experts=8))
    before = zmlx.metal.statistics()["launches"]
    mx.eval(*moe_sort(indices, num_experts=8))
    assert zmlx.metal.statistics()["launches"] == before + 1


def test_another_number_of_experts_compiles_nothing():
    indices = mx.array(np.random.default_rng(0).integers(0, 8, (64, 2)))
    mx.eval(*moe_sort(indices, num_experts=8))
    before = zmlx.metal.statistics()
    mx.eval(*moe_sort(indices, num_experts=77))
    after = zmlx.metal.statistics()
    assert after["compiles"] + after["cache_hits"] == before["compiles"] + before["cache_hits"]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("experts, top_k", [(128, 8), (60, 8), (8, 2)])
def test_rows_together_are_the_rows_alone(experts, top_k, dtype):
    """A CPU takes 16 rows at once; of 37 the last 5 are not a whole block. NaN stays in its row."""
    logits = normal(37, experts, seed=3, dtype=dtype)
    rows, columns = mx.arange(37)[:, None], mx.arange(experts)
    logits = mx.where((rows % 16 == 3) & (columns == 5), mx.nan, logits)
    logits = mx.where((rows % 16 == 4) & (columns % 3 == 0), 1.0, logits).astype(dtype)
    together = topk_gating(logits, top_k=top_k)
    for row in range(37):
        alone = topk_gating(logits[row], top_k=top_k)
        for ours, theirs in zip(together, alone, strict=True):
            np.testing.assert_array_equal(to_numpy(ours[row]), to_numpy(theirs))
    assert np.isnan(to_numpy(together[0])).any(axis=-1).nonzero()[0].tolist() == [3, 19, 35]


@GEOMETRIES
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dispatch_copies_every_bit(geometry, dtype):
    """NaN keeps its payload, in whole lines of the cache and behind them."""
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 256, (6, 83 * dtype.size), dtype=np.uint8)
    bits.reshape(-1)[100 : 100 + 64] = 0xFF
    x = mx.array(bits).view(dtype)
    order = rng.permutation(18)
    positions = mx.array(order.argsort().reshape(6, 3))
    with launch.geometry(geometry):
        rows = moe_dispatch(x, positions, mx.array(order)).view(mx.uint8)
    np.testing.assert_array_equal(np.array(rows), bits[order // 3])


def test_rows_ask_for_the_next_row_and_its_place():
    walk = moe_rows_text.SPREAD.split("@COPY@")[1]
    assert walk.count("ZMLX_PREFETCH_WALK(soon + j);") == 2
    assert walk.count("ZMLX_PREFETCH_WALK(to + D_ + j);") == 2


# ---- values out of range ------------------------------------------------------------------------


@pytest.mark.on_cpu
@GEOMETRIES
@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_an_expert_out_of_range_raises_at_eval(geometry, bad):
    with launch.geometry(geometry):
        routing = moe_sort(mx.array([[0, 1], [bad, 2]]), num_experts=4)
        with pytest.raises(RuntimeError, match=rf"\[moe_sort\] 'indices' must .* but got {bad}\."):
            mx.eval(routing.order)


@pytest.mark.parametrize("experts", [2**31 - 1, 2**40])
def test_too_many_experts_are_refused(experts):
    with pytest.raises(ValueError, match=r"\[moe_sort\] 'num_experts' must be below 2\^31 - 1"):
        moe_sort(mx.array([[0, 1]]), num_experts=experts)


@pytest.mark.on_cpu
@pytest.mark.parametrize("columns", [5, 40])
@pytest.mark.parametrize("name", ["order", "positions"])
def test_a_row_out_of_range_raises_at_eval(name, columns):
    x, order = normal(2, columns), mx.array([0, 9, 2, 3])
    if name == "order":
        out = moe_dispatch(x, mx.array([[0, 1], [2, 3]]), order)
    else:
        rows, weights = normal(4, columns), normal(2, 2)
        out = moe_combine(rows, weights, order.reshape(2, 2), mx.array([0, 1, 2, 3]))
    with pytest.raises(RuntimeError, match=rf"'{name}' must be in range but got 9\."):
        mx.eval(out)


@pytest.mark.parametrize("bad", [-1, 4, 9])
def test_a_row_out_of_range_is_nan_in_plain_mlx(bad):
    x, rows, weights = normal(2, 5), normal(4, 5), normal(2, 2)
    good, wrong = mx.array([0, 1, 2, 3]), mx.array([0, bad, 2, 3])
    with zmlx.target("reference"):
        sent = moe_dispatch(x, good.reshape(2, 2), wrong)
        summed = moe_combine(rows, weights, wrong.reshape(2, 2), good)
        dx = mx.grad(lambda x: moe_dispatch(x, wrong.reshape(2, 2), good).sum())(x)
    assert np.isnan(np.array(sent)).all(axis=1).tolist() == [False, True, False, False]
    assert np.isnan(np.array(summed)).all(axis=1).tolist() == [True, False]
    assert np.isfinite(np.array(dx)).all()


def test_a_repeated_call_is_right_for_other_values():
    for seed in range(3):
        keys = mx.random.split(mx.random.key(seed), 3)
        indices = mx.random.randint(0, 3, (5, 2), key=keys[0])
        x = mx.random.normal((5, 8), key=keys[1])
        weights = mx.random.uniform(shape=(5, 2), key=keys[2])
        for experts in (3, 4):
            r = moe_sort(indices, num_experts=experts)
            for got, want in zip(r, moe_sort_reference(indices, num_experts=experts), strict=True):
                assert mx.array_equal(got, want)
        rows = moe_dispatch(x, r.positions, r.order)
        assert mx.array_equal(rows, x[r.order // 2])
        y = moe_combine(rows, weights, r.positions, r.order)
        want = (rows[r.positions] * weights[..., None]).sum(axis=-2)
        np.testing.assert_allclose(to_numpy(y), to_numpy(want), rtol=1e-5, atol=1e-6)


def test_a_bad_call_raises_after_a_good_one():
    indices, x = mx.array([[0, 1], [1, 0]]), mx.ones((2, 4))
    for _ in range(2):
        order, positions, *_ = moe_sort(indices, num_experts=2)
        rows = moe_dispatch(x, positions, order)
        moe_combine(rows, mx.ones((2, 2)), positions, order)
        for number in (2.0, "2", 0):
            with pytest.raises((TypeError, ValueError), match=r"\[moe_sort\] 'num_experts' must"):
                moe_sort(indices, num_experts=number)
        with pytest.raises(ValueError, match=r"\[moe_dispatch\] 'order' must have an element"):
            moe_dispatch(x, positions, order[:3])
        with pytest.raises(ValueError, match=r"\[moe_combine\] 'weights' must have an element"):
            moe_combine(rows, mx.ones((2, 3)), positions, order)
        with pytest.raises(TypeError, match=r"\[moe_combine\] 'order' must be an mx.array"):
            moe_combine(rows, mx.ones((2, 2)), positions, None)


def test_no_array_of_a_call_is_kept():
    indices, x = mx.array([[0, 1], [1, 0], [1, 1]]), mx.ones((3, 4))
    weights = mx.ones((3, 2))
    r = moe_sort(indices, num_experts=2)
    rows = moe_dispatch(x, r.positions, r.order)
    mx.eval(moe_combine(rows, weights, r.positions, r.order))
    kept = [weakref.ref(y) for y in (indices, x, weights, rows, *r)]
    del indices, x, weights, rows, r
    assert [y() for y in kept] == [None] * len(kept)
