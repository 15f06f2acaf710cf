"""Layers whose projections `mlx.nn.quantize` or mlx-lm's tuner replaced, against mlx-lm's with the
same replacements."""

import copy

import mlx.core as mx
import mlx.nn as mnn
import pytest
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

import zmlx
import zmlx.nn as nn
from zmlx import launch
from zmlx.choice import Choice
from zmlx.nn import choosing

pytest.importorskip("mlx_lm")
from mlx_lm.models import llama, qwen3_moe, switch_layers
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

#: Below and above the number of choices from which tokens are sorted.
TOKENS = (3, 50)
MODES = {
    "affine": {"group_size": 32, "bits": 4},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Model(mnn.Module):
    """What mlx-lm's tuner takes: layers."""

    def __init__(self, layer):
        super().__init__()
        self.layers = [layer]

    def __call__(self, *arguments):
        return self.layers[0](*arguments)


def tuned(layer, mode=None, dora=False, dtype=mx.float32, **more):
    """A model of the layer, quantised if a mode is given, then with adapters that do something."""
    model = Model(layer)
    model.set_dtype(dtype)
    if mode is not None:
        mnn.quantize(model, **MODES[mode])
    model.freeze()
    config = {"rank": 4, "scale": 2.0, "dropout": 0.0, **more}
    linear_to_lora_layers(model, 1, config, use_dora=dora)

    def drawn(path, value):
        if "lora_" not in path:
            return value
        key = mx.random.key(sum(map(ord, path)))
        return 0.1 * mx.random.normal(value.shape, value.dtype, key=key)

    model.update(tree_map_with_path(drawn, model.parameters()))
    return model


def outcome(model, *arguments):
    """What it returns, the gradients of its adapters and of its first argument."""

    def loss(x):
        return mx.sin(model(x, *arguments[1:]).astype(mx.float32)).sum()

    _, gradients = mnn.value_and_grad(model, loss)(arguments[0])
    found = {"out": model(*arguments), "x": mx.grad(loss)(arguments[0])}
    return {**found, **dict(tree_flatten(gradients))}


def assert_alike(ours, theirs, *arguments):
    """MLX's exp on the CPU is off by up to 63 units, there and back, and sums are in other
    orders; in half precision a result is rounded a few times on its way."""
    x = arguments[0]
    bound = 4 * 2.0**-7 if x.dtype == mx.bfloat16 else 256 * 2.0**-23
    for model in (ours, theirs):
        model.eval()
    mine, want = outcome(ours, *arguments), outcome(theirs, *arguments)
    assert mine.keys() == want.keys()
    assert any("lora_a" in key for key in mine)
    for key, value in want.items():
        assert (mine[key].shape, mine[key].dtype) == (value.shape, value.dtype), key
        largest = mx.abs(value).max().item()
        assert largest > 0, key
        assert mx.abs(mine[key] - value).max().item() <= bound * largest, key


def tokens_and_choices(tokens, dtype=mx.float32):
    x = mx.random.normal((tokens, 64), key=mx.random.key(1)).astype(dtype)
    return x, mx.random.randint(0, 8, (tokens, 2), key=mx.random.key(2)).astype(mx.uint32)


def experts():
    """Our experts and mlx-lm's, with the same weights."""
    mx.random.seed(5)
    theirs = switch_layers.SwitchGLU(64, 96, 8)
    ours = nn.SwitchGLU(64, 96, 8)
    ours.load_weights(list(tree_flatten(theirs.parameters())))
    return ours, theirs


@pytest.mark.on_cpu
@pytest.mark.parametrize("runs", ["zmlx", "mlx"])
@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("names", [PROJECTIONS, *((name,) for name in PROJECTIONS)])
@pytest.mark.parametrize("tokens", TOKENS)
def test_experts_with_adapters_are_those_of_mlx_lm(tokens, names, mode, runs):
    ours, theirs = (tuned(layer, mode, keys=names) for layer in experts())
    for name in PROJECTIONS:
        assert isinstance(ours.layers[0][name], LoRASwitchLinear) == (name in names)
    with zmlx.prefer(runs):
        assert_alike(ours, theirs, *tokens_and_choices(tokens))


@pytest.mark.on_cpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("mode", [None, *MODES])
def test_adapters_of_experts_are_fused_into_layers_of_their_kind(mode, dequantize, bias):
    mx.random.seed(5)
    layer = nn.SwitchLinear(64, 96, 8, bias=bias)
    if bias:
        layer.bias = mx.random.normal((8, 96))
    model = Model(layer)
    if mode is not None:
        mnn.quantize(model, **MODES[mode])
    base = model.layers[0]
    adapted = copy.deepcopy(base.to_lora(r=4, scale=2.0))
    adapted.lora_b = 0.1 * mx.random.normal(adapted.lora_b.shape)
    fused = adapted.fuse(dequantize)
    quantised = mode is not None and not dequantize
    assert type(fused) is (nn.QuantizedSwitchLinear if quantised else nn.SwitchLinear)
    if quantised:
        kept = ("group_size", "bits", "mode")
        assert [getattr(fused, name) for name in kept] == [getattr(base, name) for name in kept]
        plain, before = fused.dequantized(), base.dequantized()
    else:
        plain, before = fused, base if mode is None else base.dequantized()
    product = adapted.scale * adapted.lora_b @ adapted.lora_a
    want = before.weight + product.astype(before.weight.dtype)
    # 4 bits of what lies within a group; mxfp's steps grow with the number, to a quarter of it.
    bound = 0.3 * mx.abs(want).max().item() if quantised else 0.0
    assert plain.weight.dtype == want.dtype
    assert mx.abs(plain.weight - want).max().item() <= bound
    assert ("bias" in fused) == bias
    if bias:
        assert mx.array_equal(fused.bias, layer.bias)
    if mode is None:
        x = mx.random.normal((5, 1, 1, 64))
        indices = mx.random.randint(0, 8, (5, 2)).astype(mx.uint32)
        assert mx.allclose(fused(x, indices), adapted(x, indices), rtol=1e-4, atol=1e-4)


@pytest.mark.on_cpu
@pytest.mark.parametrize("mode", MODES)
def test_quantised_experts_in_half_precision_take_adapters(mode):
    x, indices = tokens_and_choices(50, mx.bfloat16)
    ours, theirs = (tuned(layer, mode, dtype=mx.bfloat16) for layer in experts())
    assert_alike(ours, theirs, x, indices)


@pytest.mark.on_cpu
@pytest.mark.parametrize("mode", [None, "affine"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_mixture_with_adapters_is_a_block_of_mlx_lm(tokens, mode):
    from small_models import build

    block = build("qwen3_moe").layers[0].mlp
    assert isinstance(block, qwen3_moe.Qwen3MoeSparseMoeBlock)
    mixture = nn.MoE(64, 32, 8, 2)
    mixture.load_weights(list(tree_flatten(block.parameters())))
    ours, theirs = (tuned(layer, mode) for layer in (mixture, block))
    x, _ = tokens_and_choices(tokens)
    assert_alike(ours, theirs, x[None])


LLAMA = llama.ModelArgs(
    model_type="llama", hidden_size=64, num_hidden_layers=1, intermediate_size=96,
    num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=8,
)  # fmt: skip

#: Layers of ours, MLX's or mlx-lm's of the same parameters, and how often they get their array.
LAYERS = {
    "Attention": (lambda: nn.Attention(64, 4, 2), lambda: llama.Attention(LLAMA), 1),
    "SwiGLU": (lambda: nn.SwiGLU(64, 96), lambda: llama.MLP(LLAMA), 1),
    "MultiHeadAttention": (
        lambda: nn.MultiHeadAttention(64, 4), lambda: mnn.MultiHeadAttention(64, 4), 3,
    ),
}  # fmt: skip


@pytest.mark.on_cpu
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_adapters_are_those_of_mlx(name, dora, mode, dtype):
    mx.random.seed(5)
    mine, other, count = LAYERS[name]
    ours, theirs = mine(), other()
    ours.load_weights(list(tree_flatten(theirs.parameters())))
    ours, theirs = (tuned(layer, mode, dora, dtype) for layer in (ours, theirs))
    x = mx.random.normal((2, 5, 64)).astype(dtype)
    with zmlx.prefer("zmlx"):
        assert_alike(ours, theirs, *(x,) * count)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("adapter", [None, LoRALinear, DoRALinear])
@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize(
    ("make", "op", "width"),
    [
        (lambda: nn.Attention(128, 4, 2), "scaled_dot_product_attention", 32),
        (lambda: nn.MultiHeadAttention(128, 4), "scaled_dot_product_attention", 32),
        (lambda: nn.SwiGLU(128, 192), "swiglu", 192),
        (lambda: nn.GeGLU(128, 192), "geglu", 192),
        (lambda: nn.SwitchGLU(128, 192, 4), "moe_dispatch", 128),
        (lambda: nn.MoE(128, 192, 4), "topk_gating", 4),
    ],
)
def test_reprs_ask_about_what_layers_do(monkeypatch, make, op, width, mode, adapter, dtype):
    """Weights may be packed, in another layer, or of no floating dtype at all."""
    layer = make()
    layer.set_dtype(dtype)
    if mode is not None:
        mnn.quantize(layer, **MODES[mode])
    if adapter is not None:
        switch = dict.fromkeys((nn.SwitchLinear, nn.QuantizedSwitchLinear), LoRASwitchLinear)
        of = {mnn.Linear: adapter, mnn.QuantizedLinear: adapter, **switch}
        found = [(path, m) for path, m in layer.named_modules() if type(m) in of]
        layer.update_modules(
            tree_unflatten([(path, of[type(m)].from_base(m)) for path, m in found])
        )
    asked = []

    def choice(*question):
        asked.append(question)
        return Choice("mlx", "")

    monkeypatch.setattr(choosing, "choice", choice)
    assert "runs=mlx" in repr(layer).splitlines()[0]
    if isinstance(layer, nn.SwitchGLU) and mode is adapter is None:
        op = "expert_ffn"
    if op == "topk_gating" or mode not in (None, "affine"):
        dtype = mx.float32
    assert (op, (choosing.TYPICAL_ROWS, width), dtype) in asked


def test_a_repr_says_that_mlx_runs_heads_that_no_tile_has_room_for():
    with zmlx.prefer("zmlx"):
        for width, runs in ((64, "zmlx"), (1032, "mlx")):
            for layer in (nn.MultiHeadAttention(width, 1), nn.Attention(width, 1)):
                with launch.geometry("cpu"):
                    assert f"runs={runs}" in repr(layer).splitlines()[0]


def test_the_tuner_refuses_dora_of_experts_as_it_does_mlx_lms():
    for layer in experts():
        with pytest.raises(ValueError, match="SwitchLinear"):
            tuned(layer, dora=True)


# ---- scales of experts --------------------------------------------------------------------------


def scaled_experts():
    """Our experts and mlx-lm's in nvfp4, each expert with a scale of its own."""
    for layer in experts():
        for name in PROJECTIONS:
            # Of experts as large as these a scale of eight bits says too little.
            layer[name].weight = layer[name].weight * mx.arange(1, 9)[:, None, None]
            layer[name] = layer[name].to_quantized(16, 4, "nvfp4", global_scale=True)
        yield layer


def test_scales_of_experts_are_those_of_mlx_lm():
    ours, theirs = (dict(tree_flatten(layer.parameters())) for layer in scaled_experts())
    assert ours.keys() == theirs.keys()
    assert {f"{name}.global_scale" for name in PROJECTIONS} <= ours.keys()
    for name, value in theirs.items():
        assert mx.array_equal(ours[name], value).item(), name


@pytest.mark.parametrize("tokens", TOKENS)
def test_products_go_by_the_scales_of_experts(tokens):
    """MLX has such products on a GPU alone."""
    ours, theirs = scaled_experts()
    x, indices = tokens_and_choices(tokens)
    if launch.gpu_target() is None:
        for layer in (ours, theirs):
            with pytest.raises(ValueError, match="Global scale is only supported on the GPU"):
                layer(x, indices)
        return
    want = theirs(x, indices)
    assert mx.abs(ours(x, indices) - want).max().item() <= 2**-15 * mx.abs(want).max().item()


def test_only_nvfp4_has_scales_of_experts():
    with pytest.raises(ValueError, match=r"'global_scale' must be False .* but got True and mxfp4"):
        nn.SwitchLinear(64, 32, 4).to_quantized(32, 4, "mxfp4", global_scale=True)
