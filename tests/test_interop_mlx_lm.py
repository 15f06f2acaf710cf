"""Every Metal kernel that mlx-lm ships, run here by `zmlx.install`, against plain MLX.

Errors are the largest difference over the largest magnitude. float32 results may differ in the
order of sums; in 16 bits one rounding of the result and one of an intermediate value are allowed.
"""

import importlib
import os
import re
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import zmlx
from zmlx import metal, strict
from zmlx.interop import InstalledKernel

pytest.importorskip("mlx_lm")

ROUNDING = {mx.float32: 1e-5, mx.float16: 2 * 2.0**-10, mx.bfloat16: 2 * 2.0**-7}
SIXTEEN_BIT = pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)


@pytest.fixture(scope="module", autouse=True)
def prepared():
    """Metal claimed, and mlx-lm imported anew, since it makes its kernels when it is imported; the
    arguments of every launch that is prepared."""
    prepare, found = metal.prepare, []

    def recording(spec, target, arrays, template, grid, group, shapes, dtypes, *rest):
        like = [mx.zeros(x.shape, x.dtype) for x in arrays]  # outlive a trace
        found.append((spec, like, template, grid, group, shapes, dtypes))
        return prepare(spec, target, arrays, template, grid, group, shapes, dtypes, *rest)

    kept = {name: m for name, m in sys.modules.items() if re.match(r"mlx_lm(\.|$)", name)}
    for name in kept:
        del sys.modules[name]
    metal.prepare = recording
    with zmlx.install(claim_metal=True):
        yield found
    metal.prepare = prepare
    for name in [name for name in sys.modules if re.match(r"mlx_lm(\.|$)", name)]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.fixture(autouse=True)
def seeded():
    mx.random.seed(7)


def lm(name):
    return importlib.import_module(f"mlx_lm.{name}")


def normal(*shape, dtype=mx.float32, scale=1.0):
    return (mx.random.normal(shape) * scale).astype(dtype)


def assert_close(got, want, tolerance):
    a, b = (np.array(x.astype(mx.float32), dtype=np.float64) for x in (got, want))
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def rms(x, eps, weight=None):
    x = x.astype(mx.float32)
    y = x * mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return y if weight is None else y * weight


# ---- mlx_lm/kernels ------------------------------------------------------------------------------
def heads_of(qkvg, hq, hk, d, scale):
    """q and k of qk_norm, rounded as the kernel documents."""
    parts = qkvg[..., : (hq + hk) * d].reshape(*qkvg.shape[:-1], hq + hk, d)
    y = rms(parts, 1e-5).astype(qkvg.dtype)
    q = (y[..., :hq, :].astype(mx.float32) * scale).astype(qkvg.dtype)
    return q, y[..., hq:, :]


@SIXTEEN_BIT
@pytest.mark.parametrize("head_dim", [64, 80])
def test_qk_norm(dtype, head_dim):
    qkvg = normal(2, 3, 2 * (4 + 2) * head_dim, dtype=dtype)
    got = lm("kernels.qk_norm").qk_norm(
        qkvg, n_heads=4, n_kv_heads=2, head_dim=head_dim, eps=1e-5, query_scale=0.125
    )
    for a, b in zip(got, heads_of(qkvg, 4, 2, head_dim, 0.125), strict=True):
        assert_close(a, b, ROUNDING[dtype])


@pytest.mark.parametrize("offset", [5, mx.array([0, 11])], ids=["int", "per-row"])
@SIXTEEN_BIT
def test_qk_norm_rope(dtype, offset):
    qkvg = normal(2, 3, 2 * (4 + 2) * 64, dtype=dtype)
    got = lm("kernels.qk_norm_rope").qk_norm_rope(
        qkvg, n_heads=4, n_kv_heads=2, head_dim=64, eps=1e-5, query_scale=0.125,
        rope_base=10000.0, offset=offset,
    )  # fmt: skip
    for a, b in zip(got, heads_of(qkvg, 4, 2, 64, 0.125), strict=True):
        rotated = mx.fast.rope(
            b.swapaxes(1, 2).astype(mx.float32), 64, traditional=True, base=10000.0, scale=1.0,
            offset=offset,
        )  # fmt: skip
        # The angles are of the order of the position, and float32 keeps seven digits of them.
        assert_close(a, rotated.swapaxes(1, 2), max(ROUNDING[dtype], 5e-5))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("width", [96, 1100])
@SIXTEEN_BIT
def test_norm_add_norm(dtype, width, weighted):
    module = lm("kernels.norm_add_norm")
    branch, stream = normal(5, width, dtype=dtype), normal(5, width)
    alpha, beta, post = normal(width), normal(width), normal(width, dtype=dtype)
    norm = nn.RMSNorm(width, eps=1e-6)
    norm.weight = normal(width)
    common = {
        "alpha": alpha, "beta": beta, "post_weight": post if weighted else None, "post_eps": 1e-5
    }  # fmt: skip
    new, normed = module.norm_add_norm(branch, stream, next_norm=norm, **common)
    scaled = (branch * post if weighted else branch).astype(mx.float32)
    want = alpha * stream + beta * rms(scaled, 1e-5).astype(dtype).astype(mx.float32)
    assert_close(new, want, ROUNDING[dtype])
    assert_close(normed, rms(new, 1e-6, norm.weight), ROUNDING[dtype])
    alone, nothing = module.norm_add_norm(branch, stream, next_norm=None, **common)
    assert nothing is None
    assert mx.array_equal(alone, new)
    # The kernel promises equal values.
    assert mx.array_equal(module.pre_norm(new, norm, dtype=dtype), normed)


@SIXTEEN_BIT
def test_rms_norm_sigmoid_gate_with_strides(dtype):
    x = normal(2, 5, 3, 72, dtype=dtype).swapaxes(1, 2)
    gate = normal(2, 5, 3 * 72, dtype=dtype)
    got = lm("kernels.rms_norm_sigmoid_gate").rms_norm_sigmoid_gate(x, gate, eps=1e-5)
    y = rms(x, 1e-5).swapaxes(1, 2).reshape(2, 5, -1)
    assert_close(got, y * mx.sigmoid(gate.astype(mx.float32)), ROUNDING[dtype])


def test_expert_routing():
    logits, bias = normal(9, 72), normal(72, scale=0.1)
    ids, weights = lm("kernels.expert_routing").expert_routing(
        logits, bias, top_k=4, multiplier=0.7, score_eps=1e-9, route_scale=2.5
    )
    score = mx.sigmoid(logits * 0.7)
    want = mx.argsort(-(score + bias), axis=-1)[:, :4]
    assert mx.array_equal(ids, want.astype(mx.uint32))
    picked = mx.take_along_axis(score, want, axis=-1)
    assert_close(weights, picked / (picked.sum(axis=-1, keepdims=True) + 1e-9) * 2.5, 1e-5)


@pytest.mark.parametrize("width", [64, 1100])
@SIXTEEN_BIT
def test_post_expert_norm_combine(dtype, width):
    experts, weights = normal(3, 5, 4, width, dtype=dtype), normal(3, 5, 4)
    scale = normal(width)
    got = lm("kernels.post_expert_norm_combine").post_expert_norm_combine(
        experts, weights, norm_weight=scale, eps=1e-5
    )
    total = mx.zeros((3, 5, width))
    for k in range(4):
        v = rms(experts[..., k, :].astype(mx.float32) * scale, 1e-5)
        weight = weights[..., k : k + 1].astype(dtype).astype(mx.float32)
        total = (total + v * weight).astype(dtype).astype(mx.float32)
    assert_close(got, total, ROUNDING[dtype])


# ---- models --------------------------------------------------------------------------------------
@pytest.mark.parametrize("inverted", [True, False])
@SIXTEEN_BIT
def test_bitlinear(dtype, inverted):
    layer = lm("models.bitlinear_layers").BitLinear(
        128, 64, bias=True, invert_weight_scales=inverted
    )
    layer.weight = mx.random.randint(0, 256, (16, 128)).astype(mx.uint8)
    # Codes are 0, 1 and 2.
    codes = mx.minimum((layer.weight[None] >> mx.array([0, 2, 4, 6])[:, None, None]) & 3, 2)
    layer.weight = (codes << mx.array([0, 2, 4, 6])[:, None, None]).sum(axis=0).astype(mx.uint8)
    layer.weight_scale = mx.array([0.5], dtype=dtype)
    layer.bias = normal(64, dtype=dtype)
    x = normal(2, 3, 128, dtype=dtype)
    ternary = codes.reshape(64, 128).astype(mx.float32) - 1
    want = x.astype(mx.float32) @ ternary.T * (2.0 if inverted else 0.5)
    assert_close(layer(x), want + layer.bias, ROUNDING[dtype])


@pytest.fixture
def delta():
    """q, k, v, g, beta, state of two sequences of seven steps, 2 key and 4 value heads."""
    q, k = normal(2, 7, 2, 128), normal(2, 7, 2, 128)
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, state = normal(2, 7, 4, 16), normal(2, 4, 16, 128)
    return q, k, v, mx.sigmoid(normal(2, 7, 4)), mx.sigmoid(normal(2, 7, 4)), state


@pytest.mark.parametrize("which", ["kernel", "kernel_unpacked", "kernel_xtree"])
def test_gated_delta(delta, which):
    module = lm("models.gated_delta")
    got = getattr(module, f"gated_delta_{which}")(*delta)
    for a, b in zip(got, module.gated_delta_ops(*delta), strict=True):
        assert_close(a, b, 1e-5)


def test_gated_delta_packed_is_bitwise_the_explicit_tree(delta):
    module = lm("models.gated_delta")
    for a, b in zip(
        module.gated_delta_kernel(*delta), module.gated_delta_kernel_xtree(*delta), strict=True
    ):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("vectorized", [True, False])
def test_gated_delta_with_masks_and_vector_gates(delta, vectorized, masked):
    module = lm("models.gated_delta")
    q, k, v, g, beta, state = delta
    if vectorized:
        g = mx.sigmoid(normal(2, 7, 4, 128))
    mask = mx.arange(7)[None] < mx.array([[7], [4]]) if masked else None
    y, after = module.gated_delta_kernel(q, k, v, g, beta, state, mask)
    want_y, want_after = module.gated_delta_ops(q, k, v, g, beta, state, mask)
    assert_close(after, want_after, 1e-5)
    if mask is not None:  # past the end the kernel writes zeros
        want_y = mx.where(mask[..., None, None], want_y, 0)
    assert_close(y, want_y, 1e-5)


def test_gated_delta_update_chooses_the_kernel(delta):
    module = lm("models.gated_delta")
    q, k, v, _, _, state = delta
    a, b, a_log, bias = normal(2, 7, 4), normal(2, 7, 4), normal(4), normal(4)
    got = module.gated_delta_update(q, k, v, a, b, a_log, bias, state)
    want = module.gated_delta_update(q, k, v, a, b, a_log, bias, state, use_kernel=False)
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, 1e-5)


@SIXTEEN_BIT
def test_ssm(dtype):
    module = lm("models.ssm")
    x, b, c = (
        normal(2, 1, 4, 8, dtype=dtype),
        normal(2, 1, 2, 64, dtype=dtype),
        normal(2, 1, 2, 64, dtype=dtype),
    )
    a_log, d, dt, bias = normal(4), normal(4), normal(2, 1, 4), normal(4)
    state = normal(2, 4, 8, 64)
    arguments = (x, a_log, b, c, d, dt, bias, state, (0.001, 100.0))
    for got, want in zip(
        module.ssm_update_kernel(*arguments), module.ssm_attn(*arguments), strict=True
    ):
        assert_close(got, want, ROUNDING[got.dtype])


def test_rwkv7():
    module = lm("models.rwkv7")
    r, w, k, v, a, b = (normal(2, 5, 3, 64, scale=0.3) for _ in range(6))
    w, state = mx.sigmoid(w), normal(2, 3, 64, 64)
    got, after = module.wkv7_kernel(r, w, k, v, a, b, state)
    steps = []
    for t in range(5):
        y, state = module._wkv7_step_ops(*(x[:, t] for x in (r, w, k, v, a, b)), state)
        steps.append(y.squeeze(-1))
    assert_close(got, mx.stack(steps, axis=1), 1e-5)
    assert_close(after, state, 1e-5)


@SIXTEEN_BIT
def test_kimi_k3_residual_mix(dtype):
    module = lm("models.kimi_k3")
    blocks = module.ResidualBlocks(1e-5)
    for _ in range(3):
        blocks.append(normal(2, 3, 200, dtype=dtype))
    partial, weight = normal(2, 3, 200, dtype=dtype), normal(200, scale=0.1)
    got = module._attn_res_mix(blocks, partial, weight, 1e-5)
    want = module._attn_res_mix(blocks, partial, weight, 1e-5, use_kernel=False)
    assert_close(got, want, ROUNDING[dtype])


def test_deepseek_sinkhorn():
    module = lm("models.deepseek_v41")
    comb, eps = mx.softmax(normal(2, 150, 4, 4), axis=-1), mx.array([1e-6])
    got = module._sinkhorn(comb, iters=20, eps=eps)
    want = comb / (comb.sum(axis=-2, keepdims=True) + eps)
    for _ in range(19):
        want = want / (want.sum(axis=-1, keepdims=True) + eps)
        want = want / (want.sum(axis=-2, keepdims=True) + eps)
    assert_close(got, want, 1e-5)


# ---- losses --------------------------------------------------------------------------------------
def plain_kl(q, p):
    q = q - mx.logsumexp(q, axis=-1, keepdims=True)
    p = p - mx.logsumexp(p, axis=-1, keepdims=True)
    return (mx.exp(p) * (p - q)).sum(axis=-1)


def plain_js(q, p):
    q = q - mx.logsumexp(q, axis=-1, keepdims=True)
    p = p - mx.logsumexp(p, axis=-1, keepdims=True)
    m = mx.logaddexp(q, p) - np.log(2)
    return 0.5 * ((mx.exp(p) * (p - m)).sum(axis=-1) + (mx.exp(q) * (q - m)).sum(axis=-1))


@pytest.mark.parametrize("name", ["kl", "js"])
@pytest.mark.parametrize("vocabulary", [1000, 5003])
@SIXTEEN_BIT
def test_divergence_losses_and_their_gradients(dtype, vocabulary, name):
    loss = getattr(lm("tuner.losses"), f"{name}_div_loss")
    plain = {"kl": plain_kl, "js": plain_js}[name]
    q, p = normal(2, 3, vocabulary, dtype=dtype), normal(2, 3, vocabulary, dtype=dtype)
    weights = mx.random.uniform(shape=(2, 3))
    got, gradient = mx.value_and_grad(lambda x: (loss(x, p) * weights).sum())(q)
    wide = (q.astype(mx.float32), p.astype(mx.float32))
    want, expected = mx.value_and_grad(lambda x: (plain(x, wide[1]) * weights).sum())(wide[0])
    assert_close(loss(q, p), plain(*wide), ROUNDING[dtype])
    assert_close(got, want, ROUNDING[dtype])
    # The gradient reads the loss rounded to the dtype.
    assert_close(gradient, expected, max(ROUNDING[dtype], 2e-5))


@pytest.mark.parametrize("name", ["kl", "js"])
def test_divergence_losses_lack_a_barrier(name):
    """Lane 0 overwrites what simdgroups that come later still read: another order shows it."""
    if zmlx.launch.gpu_target() is not None:
        pytest.skip("the order of threads is the CPU's to choose")
    loss = getattr(lm("tuner.losses"), f"{name}_div_loss")
    q, p = normal(2, 2000), normal(2, 2000)
    core = zmlx.native.load()
    core.set_schedule(1)  # depth first
    try:
        raced = loss(q, p)
        mx.eval(raced)
    finally:
        core.set_schedule(0)
    assert not mx.allclose(raced, loss(q, p), rtol=1e-3).item()


# ---- all of them ---------------------------------------------------------------------------------
def constructed():
    """Names of the kernels that the modules tested above made."""
    return {
        value.name
        for name, module in sys.modules.items()
        if name.startswith("mlx_lm.")
        for value in vars(module).values()
        if isinstance(value, InstalledKernel)
    }


def test_every_kernel_of_mlx_lm_ran(prepared):
    if "PYTEST_XDIST_WORKER" in os.environ:
        # A worker has run only some of the tests above: the claim is about all of them.
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", __file__]
        assert subprocess.run(command, env=env, check=False).returncode == 0
        return
    assert {spec.name for spec, *_ in prepared} == constructed()
    assert len(constructed()) == 23


def test_every_kernel_of_mlx_lm_is_valid_metal(prepared):
    pytest.importorskip("ziglang")
    texts = [strict.metal_text(*arguments) for arguments in prepared]
    for (spec, *_), problems in zip(prepared, strict.check_many(texts), strict=True):
        assert not problems, (spec.name, *map(str, problems))
