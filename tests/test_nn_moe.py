"""The layers of mixtures against mlx-lm's and against plain MLX."""

import mlx.core as mx
import mlx.nn as mnn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import zmlx
import zmlx.nn as nn
from zmlx.launch import gpu_target
from zmlx.testing import assert_matches, to_numpy

switch = pytest.importorskip("mlx_lm.models.switch_layers")

#: Below and above the number of choices from which tokens are sorted.
TOKENS = (3, 50)


def pair(bias=False, activation=None):
    """Our experts and mlx-lm's, with the same weights."""
    mx.random.seed(5)
    theirs = switch.SwitchGLU(64, 96, 8, **({"activation": activation} if activation else {}),
                              bias=bias)  # fmt: skip
    if bias:
        for p in (theirs.gate_proj, theirs.up_proj, theirs.down_proj):
            p.bias = 0.1 * mx.random.normal(p.bias.shape)
    ours = nn.SwitchGLU(64, 96, 8, activation, bias)
    ours.load_weights(list(tree_flatten(theirs.parameters())))
    return ours, theirs


def inputs(tokens, lead=()):
    x = mx.random.normal((*lead, tokens, 64), key=mx.random.key(1))
    return x, mx.random.randint(0, 8, (*lead, tokens, 2), key=mx.random.key(2)).astype(mx.uint32)


def near(a, b, passes=1):
    """Whether two results are as near as sums in two orders: at most 64 products, and at most 96
    more. Each addition rounds by half a unit, and random errors grow as the root of their number; 4
    standard deviations of both. MLX's exp on the CPU is off by up to 63 units more."""
    units = 4 * (passes * (64 + 96)) ** 0.5 + passes * 63
    off = mx.abs(a - b).max().item()
    return a.shape == b.shape and off <= units * 2**-23 * mx.abs(b).max().item()


def wide_experts(experts, x, indices, dtype, lift):
    """What float experts return, and the gradients of its sum of squares for the weights, the
    biases and x, in NumPy's dtype. `lift`: 1 where there are biases, else 0."""
    rows, chosen = x.reshape(-1, x.shape[-1]).astype(dtype), indices.reshape(-1, indices.shape[-1])
    names = ("gate_proj", "up_proj", "down_proj")
    w = [to_numpy(experts[n].weight).astype(dtype) for n in names]
    b = [to_numpy(experts[n].bias).astype(dtype) if lift else np.zeros(v.shape[:2], dtype)
         for n, v in zip(names, w, strict=True)]  # fmt: skip
    dw, db, dx = [np.zeros_like(v) for v in w], [np.zeros_like(v) for v in b], np.zeros_like(rows)
    out = np.zeros((*chosen.shape, w[2].shape[1]), dtype)
    for e in range(len(w[0])):
        token, slot = np.nonzero(chosen == e)
        h = rows[token]
        g, u = h @ w[0][e].T + b[0][e], h @ w[1][e].T + b[1][e]
        s = 1 / (1 + np.exp(-g))
        a = g * s * u
        out[token, slot] = y = a @ w[2][e].T + b[2][e]
        dy = 2 * y
        da = dy @ w[2][e]
        dg, du = da * u * s * (1 + g * (1 - s)), da * g * s
        for k, (d, inner) in enumerate(((dg, h), (du, h), (dy, a))):
            dw[k][e], db[k][e] = d.T @ inner, d.sum(axis=0)
        np.add.at(dx, token, dg @ w[0][e] + du @ w[1][e])
    found = {f"0.{n}.weight": d for n, d in zip(names, dw, strict=True)}
    if lift:
        found.update({f"0.{n}.bias": d for n, d in zip(names, db, strict=True)})
    return out.reshape(*indices.shape, -1), {**found, "1": dx.reshape(x.shape)}


@pytest.mark.on_cpu
@pytest.mark.parametrize("runs", ["zmlx", "mlx"])
@pytest.mark.parametrize("quantized", [False, True], ids=["float", "quantised"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_experts_compute_what_mlx_lms_do(tokens, bias, quantized, runs):
    for activation in (None, switch.SwiGLU(), lambda up, gate: mnn.gelu(gate) * up):
        ours, theirs = pair(bias, activation)
        if quantized:
            mnn.quantize(ours, group_size=32, bits=4)
            mnn.quantize(theirs, group_size=32, bits=4)
        for lead in ((), (2,)):
            x, indices = inputs(tokens, lead)
            with zmlx.prefer(runs):
                assert near(ours(x, indices), theirs(x, indices))


@pytest.mark.parametrize("quantized", [False, True], ids=["float", "quantised"])
def test_checkpoints_of_experts_load_both_ways(tmp_path, quantized):
    file = str(tmp_path / "experts.safetensors")
    ours, theirs = pair(bias=True)
    if quantized:
        mnn.quantize(ours, group_size=32, bits=4)
        mnn.quantize(theirs, group_size=32, bits=4)
    theirs.save_weights(file)
    ours.update(mnn.utils.tree_map(mx.zeros_like, ours.parameters()))
    ours.load_weights(file)
    x, indices = inputs(5)
    assert near(ours(x, indices), theirs(x, indices))
    ours.save_weights(file)
    theirs.update(mnn.utils.tree_map(mx.zeros_like, theirs.parameters()))
    theirs.load_weights(file)
    assert near(ours(x, indices), theirs(x, indices))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_gradients_of_experts(tokens, bias):
    """Against NumPy's float64, with its float32 as the base."""
    if gpu_target() == "cuda" and tokens == TOKENS[0]:
        pytest.skip("the driver refuses the gradient of MLX 0.32.4's gather_mm of few rows")
    ours, _ = pair(bias)
    x, indices = inputs(tokens)

    def loss(parameters, x):
        ours.update(parameters)
        return mx.square(ours(x, indices)).sum()

    parameters = ours.parameters()
    with zmlx.prefer("zmlx"):
        out = ours(x, indices)
        mine = dict(tree_flatten(list(mx.grad(loss, argnums=(0, 1))(parameters, x))))
    ours.update(parameters)
    given = ours, np.array(x), np.array(indices)
    (want, gradients), (base, rounded) = (
        wide_experts(*given, dtype, bias) for dtype in (np.float64, np.float32)
    )
    assert_matches(out, want, base)
    assert mine.keys() == gradients.keys()
    for key, value in mine.items():
        assert_matches(value, gradients[key], rounded[key], name=key)


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_experts_in_half_precision_run_where_mlx_has_no_product(tokens, dtype):
    ours, theirs = pair()
    x, indices = inputs(tokens)
    want = theirs(x, indices)
    ours.set_dtype(dtype)
    got = ours(x.astype(dtype), indices)
    assert got.dtype == dtype
    eps = 2.0**-10 if dtype == mx.float16 else 2.0**-7
    # Weights, tokens and the result are rounded once each; sums average it out.
    assert mx.abs(got - want).max().item() <= 4 * eps * mx.abs(want).max().item()


@pytest.mark.parametrize("tokens", TOKENS)
def test_an_index_out_of_range_is_nan_and_touches_no_other(tokens):
    ours, theirs = pair()
    x, indices = inputs(tokens)
    want = theirs(x, indices)
    for bad in (mx.array(-1, mx.int32), mx.array(8, mx.int32)):
        broken = indices.astype(mx.int32)
        broken[1, 0] = bad
        got = ours(x, broken)
        assert mx.isnan(got[1, 0]).all().item()
        got[1, 0] = want[1, 0]
        assert near(got, want)


def reference(x, moe, choose, weigh):
    """Every expert for every token, times its weight or 0, in plain MLX."""
    logits = moe.gate(x)
    chosen, weights = choose(logits), weigh(logits)
    experts = moe.switch_mlp
    total = 0
    for e in range(logits.shape[-1]):
        up, gate, down = (getattr(experts, f"{n}_proj").weight[e] for n in ("up", "gate", "down"))
        y = (mnn.silu(x @ gate.T) * (x @ up.T)) @ down.T
        total = total + mx.where((chosen == e).any(-1), weights[..., e], 0)[..., None] * y
    return total


@pytest.mark.parametrize("runs", ["zmlx", "mlx"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_mixture_is_the_weighted_sum_of_what_was_chosen(scores, normalize, tokens, runs):
    mx.random.seed(2)
    moe = nn.MoE(64, 96, 8, 3, scores=scores, normalize=normalize, scale=1.5, correction=True)
    moe.e_score_correction_bias = mx.random.normal((8,))
    x, _ = inputs(tokens, (2,))

    def score(logits):
        return mx.softmax(logits, axis=-1) if scores == "softmax" else mx.sigmoid(logits)

    def choose(logits):
        choice = score(logits) + moe.e_score_correction_bias
        return mx.stop_gradient(mx.argsort(-choice, axis=-1)[..., :3])

    def weigh(logits):
        s = score(logits)
        if not normalize:
            return 1.5 * s
        picked = mx.take_along_axis(s, choose(logits), axis=-1)
        return 1.5 * s / picked.sum(axis=-1, keepdims=True)

    with zmlx.prefer(runs):
        assert near(moe(x), reference(x, moe, choose, weigh))
        ours = mx.grad(lambda x: mx.square(moe(x)).sum())(x)
    theirs = mx.grad(lambda x: mx.square(reference(x, moe, choose, weigh)).sum())(x)
    assert near(ours, theirs, 2)  # there and back


def test_only_what_the_router_chose_runs():
    """An expert of NaN weights that nobody chooses changes nothing."""
    moe = nn.MoE(64, 96, 8, 2, correction=True)
    moe.e_score_correction_bias = mx.array([0.0] * 7 + [-1e3])
    for tokens in TOKENS:
        x, _ = inputs(tokens)
        for name in ("gate_proj", "up_proj", "down_proj"):
            moe.switch_mlp[name].weight[7] = mx.array(mx.nan)
        assert mx.isfinite(moe(x)).all().item()
        moe.e_score_correction_bias[7] = 1e3
        assert mx.isnan(moe(x)).all().item()
        moe.e_score_correction_bias[7] = -1e3


def test_a_block_of_qwen3_moe_and_our_mixture_share_checkpoints(tmp_path):
    from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock
    from small_models import build

    file = str(tmp_path / "moe.safetensors")
    block = build("qwen3_moe").layers[0].mlp
    assert isinstance(block, Qwen3MoeSparseMoeBlock)
    ours = nn.MoE(64, 32, 8, 2)
    block.save_weights(file)
    ours.load_weights(file)
    for tokens in TOKENS:
        x, _ = inputs(tokens, (2,))
        assert near(ours(x), block(x))
    ours.save_weights(file)
    block.load_weights(file)
    mnn.quantize(ours, group_size=32, bits=8)
    mnn.quantize(block, group_size=32, bits=8)
    assert near(ours(x), block(x))


def test_a_mixture_learns_in_a_compiled_step():
    from functools import partial

    import mlx.optimizers as optim

    mx.random.seed(0)
    moe = nn.MoE(64, 32, 4, 2)
    x, _ = inputs(50)
    optimizer = optim.SGD(0.05)
    state = [moe.state, optimizer.state]

    @partial(mx.compile, inputs=state, outputs=state)
    def step():
        loss, gradients = mnn.value_and_grad(moe, lambda m: mx.square(m(x) - x).mean())(moe)
        optimizer.update(moe, gradients)
        return loss

    first = step().item()
    for _ in range(20):
        last = step().item()
    assert last < first


def test_reprs_say_what_there_is_and_what_runs():
    assert repr(nn.SwitchGLU(8, 16, 4)).startswith("SwitchGLU(runs=zmlx")
    assert "num_experts=4, top_k=2, scores=sigmoid, runs=zmlx" in repr(
        nn.MoE(8, 16, 4, scores="sigmoid")
    )
    layer = nn.SwitchLinear(32, 16, 4)
    assert repr(layer) == "SwitchLinear(input_dims=32, output_dims=16, num_experts=4, bias=True)"
    assert repr(layer.to_quantized(32, 4)) == (
        "QuantizedSwitchLinear(input_dims=32, output_dims=16, num_experts=4, bias=True, "
        "group_size=32, bits=4, mode=affine)"
    )
    experts = nn.SwitchGLU(64, 64, 4)
    mnn.quantize(experts, mode="mxfp4")
    assert repr(experts).startswith("SwitchGLU(runs=zmlx")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: nn.SwitchGLU(8, 16, 0), ValueError, r"\[SwitchGLU\] 'num_experts' must .* got 0"),
        (lambda: nn.SwitchLinear(0, 1, 1), ValueError, r"\[SwitchLinear\] 'input_dims' .* got 0"),
        (lambda: nn.SwitchGLU(8, 16, 2, "silu"), TypeError, r"'activation' must .* but got str"),
        (lambda: nn.MoE(8, 16, 4, 5), ValueError, r"\[MoE\] 'top_k' must be in \[1, 4\]"),
        (lambda: nn.MoE(8, 16, 4, scores="x"), ValueError, r"\[MoE\] 'scores' must be one of"),
        (lambda: nn.MoE(8, 16, 4, n_groups=3), ValueError, r"\[MoE\] 'n_groups' must divide"),
        (lambda: nn.MoE(8, 16, 4)(mx.zeros((2, 9))), ValueError, r"\[MoE\] 'x' must have shape"),
        (
            lambda: nn.SwitchGLU(8, 16, 4)(mx.zeros((2, 9)), mx.zeros((2, 1), mx.int32)),
            ValueError, r"\[SwitchGLU\] 'x' must have shape \(\*, 8\) but got \(2, 9\)",
        ),
        (
            lambda: nn.SwitchGLU(8, 16, 4)(mx.zeros((2, 8)), mx.zeros((3, 1), mx.int32)),
            ValueError, r"\[SwitchGLU\] 'indices' must have shape \(2, k\) but got \(3, 1\)",
        ),
        (
            lambda: nn.SwitchGLU(8, 16, 4)(mx.zeros((2, 8)), mx.zeros((2, 1))),
            ValueError, r"\[SwitchGLU\] 'indices' must have dtype .* but got float32",
        ),
    ],
)  # fmt: skip
def test_bad_input_raises_before_anything_runs(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_checked_values_raise(monkeypatch):
    monkeypatch.setattr(zmlx.checks, "ENABLED", True)
    with pytest.raises(ValueError, match=r"\[SwitchGLU\] 'indices' must be in \[0, 4\) but got 9"):
        nn.SwitchGLU(8, 16, 4)(mx.zeros((1, 8)), mx.array([[9]]))


@pytest.mark.on_cpu
def test_checked_values_do_not_keep_a_layer_from_being_traced(monkeypatch):
    layer, x, indices = nn.SwitchGLU(8, 16, 4), mx.ones((3, 8)), mx.zeros((3, 2), mx.int32)
    want = layer(x, indices)
    monkeypatch.setattr(zmlx.checks, "ENABLED", True)
    assert mx.allclose(mx.compile(layer)(x, indices), want).item()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("make", [nn.MoE, nn.SwitchGLU])
def test_no_tokens_have_gradients(make, bias):
    layer = make(8, 16, 4, bias=bias)
    indices = [mx.zeros((0, 2), mx.int32)] if make is nn.SwitchGLU else []
    loss = mnn.value_and_grad(layer, lambda x: layer(x, *indices).sum())
    value, gradients = loss(mx.zeros((0, 8)))
    assert value.item() == 0
    assert not any(mx.any(g).item() for _, g in tree_flatten(gradients))


def test_a_shapeless_compile_does_not_keep_that_there_were_no_tokens():
    layer = nn.SwitchGLU(8, 16, 4)
    with pytest.raises(ValueError, match="cannot infer output shapes"):
        mx.compile(layer, shapeless=True)(mx.zeros((0, 8)), mx.zeros((0, 2), mx.int32))


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_a_patched_mixture_runs_as_before(dtype):
    mixture = nn.MoE(32, 48, 4, 2)
    mixture.set_dtype(dtype)
    x = mx.random.normal((2, 6, 32), key=mx.random.key(1)).astype(dtype)
    before = mixture(x)
    zmlx.patch(mixture)
    assert mixture.switch_mlp.experts().fused
    eps = 2.0**-23 if dtype == mx.float32 else 2.0**-7
    # MLX's exp on the CPU is off by up to 63 units, and half precision rounds a few times.
    units = 256 if dtype == mx.float32 else 4
    assert mx.abs(mixture(x) - before).max().item() <= units * eps * mx.abs(before).max().item()
