"""A patched model computes what it did, and unpatched is what it was."""

import copy
import pickle

import mlx.core as mx
import mlx.nn as mnn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache
from small_models import LEFT_OUT, build, names

import zmlx
from zmlx import patching
from zmlx.patching.plans import plan_of

FAMILIES = (
    "llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmo2",
    "phi3",
)  # fmt: skip
ROUTED = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
PROMPT = mx.array([[5, 9, 3, 77, 21, 4, 99, 100, 17, 8, 2, 64]])
EPS = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


@pytest.fixture(autouse=True)
def kernels_run():
    """Everything that is patched runs its kernel, whatever was measured here."""
    with zmlx.prefer("zmlx"):
        yield


def quantized(model):
    def fits(_, module):
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0

    mnn.quantize(model, group_size=32, bits=4, class_predicate=fits)
    return model


def greedy(model, tokens=16):
    cache = make_prompt_cache(model)
    y, found = PROMPT, []
    for _ in range(tokens):
        y = model(y, cache=cache)[:, -1:].argmax(axis=-1)
        found.append(y.item())
    return found


def classes(model):
    return [(path, id(module), type(module)) for path, module in model.named_modules()]


@pytest.mark.parametrize("weights", ["float", "quantized"])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_the_same_in_float32(name, weights):
    model = build(name)
    if weights == "quantized":
        quantized(model)
    before = greedy(model)
    report = zmlx.patch(model)
    assert {"norm", "residual_norm"} - {"residual_norm" if name == "olmo2" else ""} <= set(
        report.kinds()
    )
    assert {"mlp", "gated"} & set(report.kinds())
    assert greedy(model) == before


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_in_half_precision_are_as_near_to_float32(name, dtype):
    """The bound of the operations, on the whole model: twice MLX's own error and 4 roundings.

    Every expert has every token: a choice between experts turns on the last bit where two are
    nearly equal, so that no bound would hold."""
    routed = {"num_experts_per_tok": 8, "topk_group": 2} if name in ROUTED else {}
    model = build(name, dtype, **routed)
    if routed:
        quantized(model)  # MLX multiplies gathered matrices on the CPU in float32 alone
    plain = model(PROMPT).astype(mx.float32)
    zmlx.patch(model)
    ours = model(PROMPT).astype(mx.float32)
    zmlx.unpatch(model)
    model.set_dtype(mx.float32)
    reference = model(PROMPT)
    allowed = 2 * mx.abs(plain - reference).max() + 4 * EPS[dtype] * mx.abs(reference).max()
    assert mx.abs(ours - reference).max().item() <= allowed.item()


@pytest.mark.parametrize("name", FAMILIES)
def test_unpatch_restores_the_very_objects(name):
    model = build(name)
    model.layers[0].freeze()
    before, logits = classes(model), model(PROMPT)
    parameters = dict(tree_flatten(model.parameters()))
    trainable = [path for path, _ in tree_flatten(model.trainable_parameters())]
    zmlx.patch(model)
    assert classes(model) != before
    assert [path for path, _ in tree_flatten(model.trainable_parameters())] == trainable
    assert zmlx.unpatch(model) > 0
    assert classes(model) == before
    assert zmlx.unpatch(model) == 0
    assert all(a is parameters[path] for path, a in tree_flatten(model.parameters()))
    assert all("_zmlx" not in key for _, m in model.named_modules() for key in vars(m))
    assert mx.array_equal(model(PROMPT), logits)


def test_patching_twice_changes_nothing():
    model = build("mixtral")
    first = zmlx.patch(model)
    after = classes(model)
    second = zmlx.patch(model)
    assert classes(model) == after
    assert [r.path for r in second.replaced] == [r.path for r in first.replaced]
    assert not any(r.new for r in second.replaced)
    assert all(r.new for r in first.replaced)


def test_a_saved_patched_model_loads_unpatched_and_back(tmp_path):
    file = str(tmp_path / "weights.safetensors")
    model = build("qwen3")
    logits = model(PROMPT)
    zmlx.patch(model)
    model.save_weights(file)
    other = build("qwen3", vocab_size=128)
    other.update(mnn.utils.tree_map(mx.zeros_like, other.parameters()))
    other.load_weights(file)
    assert mx.array_equal(other(PROMPT), logits)
    other.update(mnn.utils.tree_map(mx.zeros_like, other.parameters()))
    zmlx.patch(other)
    other.load_weights(file)
    assert mx.array_equal(other(PROMPT), model(PROMPT))


def test_a_shared_activation_is_not_patched_in_other_models():
    """mlx-lm's expert layers have one activation module as their default argument."""
    one, other = build("mixtral"), build("mixtral")
    shared = one.layers[0].block_sparse_moe.switch_mlp.activation
    assert shared is other.layers[0].block_sparse_moe.switch_mlp.activation
    zmlx.patch(one)
    assert plan_of(other.layers[0].block_sparse_moe.switch_mlp.activation) is None
    assert plan_of(one.layers[0].block_sparse_moe.switch_mlp.activation) is not None
    zmlx.unpatch(one)
    assert one.layers[0].block_sparse_moe.switch_mlp.activation is shared


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_moe"])
def test_gradients_of_a_patched_model(name):
    model = build(name)

    def gradients():
        def loss(model):
            return mnn.losses.cross_entropy(model(PROMPT[:, :-1]), PROMPT[:, 1:]).mean()

        return tree_flatten(mnn.value_and_grad(model, loss)(model)[1])

    before = gradients()
    zmlx.patch(model, mode="training")
    after = gradients()
    for (path, a), (other, b) in zip(before, after, strict=True):
        assert path == other
        # The rounding of a few hundred float32 operations.
        assert mx.abs(a - b).max().item() <= 2e-5 * max(mx.abs(a).max().item(), 1e-3), path


def test_only_and_exclude_choose_by_kind_and_path():
    model = build("llama")
    assert set(zmlx.patch(model, only="norm").kinds()) == {"norm"}
    zmlx.unpatch(model)
    assert set(zmlx.patch(model, exclude=["norm", "residual_norm"]).kinds()) == {
        "mlp",
        "rope",
        "attention",
    }
    zmlx.unpatch(model)
    report = zmlx.patch(model, only="model.layers.1")
    assert report.replaced
    assert all(r.path.startswith("model.layers.1") for r in report.replaced)
    zmlx.unpatch(model)
    report = zmlx.patch(model, only="norm", exclude="model.layers.*")
    assert [r.path for r in report.replaced] == ["model.norm"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "serving"}, "'mode' must be one of inference, training but got 'serving'"),
        ({"only": "norms"}, "'only' must name kinds .* but got 'norms'"),
        ({"exclude": ["mlp", "layers.77"]}, "'exclude' must name kinds .* but got 'layers.77'"),
    ],
)
def test_wrong_options_leave_the_model_alone(arguments, message):
    model = build("llama")
    before = classes(model)
    with pytest.raises(ValueError, match=rf"\[patch\] {message}"):
        zmlx.patch(model, **arguments)
    assert classes(model) == before


def test_a_model_of_another_framework_is_an_error():
    class Other:
        __module__ = "torch.nn"

    with pytest.raises(TypeError, match=r"must be an mlx.nn.Module but got torch.nn.Other"):
        zmlx.patch(Other())
    with pytest.raises(TypeError, match=r"must be an mlx.nn.Module but got dict"):
        zmlx.unpatch({})


class Odd(mnn.Module):
    """Looks like a norm, and is none."""

    def __init__(self, dims):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = 1e-5

    def __call__(self, x):
        return mx.fast.rms_norm(x, self.weight, self.eps) * 1.5


class Moody(mnn.Module):
    """Computes another thing for another dtype."""

    def __init__(self, dims):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = 1e-5

    def __call__(self, x):
        y = mx.fast.rms_norm(x, self.weight, self.eps)
        return y * 2 if x.dtype == mx.float16 else y


class Branching(mnn.Module):
    """Needs a value, which a trace does not have."""

    def __init__(self, dims):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = 1e-5

    def __call__(self, x):
        if x.max().item() > 1e3:
            return x
        return mx.fast.rms_norm(x, self.weight, self.eps)


class Stopped(mnn.Module):
    """Has the graph of a norm, but not its gradient."""

    def __init__(self, dims):
        super().__init__()
        self.weight = mx.ones((dims,))
        self.eps = 1e-5

    def __call__(self, x):
        return mx.fast.rms_norm(mx.stop_gradient(x), self.weight, self.eps)


@pytest.mark.parametrize("cls", [Odd, Branching])
def test_what_only_looks_like_a_norm_is_skipped_with_a_reason(cls):
    model = mnn.Sequential(cls(8), mnn.RMSNorm(8))
    report = zmlx.patch(model)
    assert [r.path for r in report.replaced] == ["layers.1"]
    assert [(s.path, s.why) for s in report.skipped] == [
        ("layers.0", "its graph equals no norm and no activation")
    ]


class ByHand(mnn.Module):
    """A norm in float32, its weight too."""

    def __init__(self, centred, square, over):
        super().__init__()
        self.scale, self.eps = mx.random.uniform(0.5, 2, (24,), key=mx.random.key(3)), 1e-6
        self.centred, self.square, self.over = centred, square, over

    def __call__(self, x):
        y = x.astype(mx.float32)
        y = y - mx.mean(y, axis=-1, keepdims=True) if self.centred else y
        v = mx.mean(self.square(y), -1, keepdims=True) + self.eps
        y = y / mx.sqrt(v) if self.over else y * mx.rsqrt(v)
        return (y * self.scale.astype(mx.float32)).astype(x.dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("over", [False, True], ids=["rsqrt", "divided"])
@pytest.mark.parametrize(
    "square", [mx.square, lambda y: y * y, lambda y: y**2], ids=["square", "product", "power"]
)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_norms_by_hand_with_the_weight_in_float32_are_replaced(centred, square, over, dtype):
    """To one rounding of the output: the sums differ in order."""
    model = mnn.Sequential(ByHand(centred, square, over))
    model.layers[0].scale = model.layers[0].scale.astype(dtype)
    x = mx.random.normal((2, 5, 24), key=mx.random.key(4)).astype(dtype)
    before = model(x)
    report = zmlx.patch(model)
    assert [r.op for r in report.replaced] == ["layer_norm" if centred else "rms_norm"]
    after = model(x)
    assert after.dtype == before.dtype
    eps = EPS.get(dtype, 2.0**-21)
    assert mx.allclose(after, before, rtol=eps, atol=eps).item()


class Renamed(mnn.Module):
    """PyTorch's group norm by hand, under other names."""

    def __init__(self):
        super().__init__()
        self.gain, self.shift, self.parts, self.tiny = mx.ones(12), mx.zeros(12), 3, 1e-3

    def __call__(self, x):
        batch, *rest, width = x.shape
        y = x.reshape(batch, -1, self.parts, width // self.parts)
        y = y.transpose(0, 2, 1, 3).reshape(batch, self.parts, -1)
        y = mx.fast.layer_norm(y, eps=self.tiny, weight=None, bias=None)
        y = y.reshape(batch, self.parts, -1, width // self.parts)
        return self.gain * y.transpose(0, 2, 1, 3).reshape(batch, *rest, width) + self.shift


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: mnn.GroupNorm(4, 12),
        lambda: mnn.GroupNorm(4, 12, affine=False),
        lambda: mnn.GroupNorm(3, 12, eps=1e-3, pytorch_compatible=True),
        Renamed,
    ],
    ids=["interleaved", "without parameters", "as PyTorch", "by hand"],
)
def test_group_norms_are_replaced(make, mode):
    model = mnn.Sequential(mnn.Conv2d(2, 12, 3), make())
    x = mx.random.normal((2, 6, 5, 2), key=mx.random.key(1))
    grad = mnn.value_and_grad(model, lambda x: (model(x) * mx.cos(mx.arange(12))).sum())
    (before, d_before), out = grad(x), model(x)
    report = zmlx.patch(model, mode=mode)
    assert [(r.path, r.op) for r in report.replaced] == [("layers.1", "group_norm")]
    after, d_after = grad(x)
    assert mx.allclose(before, after, rtol=1e-4)
    for (name, a), (_, b) in zip(tree_flatten(d_before), tree_flatten(d_after), strict=True):
        assert mx.allclose(a, b, rtol=1e-3, atol=1e-4), name
    zmlx.unpatch(model)
    assert mx.array_equal(model(x), out)


def test_a_graph_is_trusted_only_for_the_dtypes_it_was_compared_in():
    model = mnn.Sequential(Moody(8))
    x = mx.random.normal((3, 8))
    before = [model(x.astype(d)) for d in (mx.float32, mx.float16, mx.bfloat16)]
    assert zmlx.patch(model).kinds() == {"norm": 1}
    after = [model(x.astype(d)) for d in (mx.float32, mx.float16, mx.bfloat16)]
    for a, b in zip(before, after, strict=True):
        assert mx.allclose(a, b, rtol=1e-2).item()


def test_a_stopped_gradient_is_found_by_the_probe():
    assert zmlx.patch(mnn.Sequential(Stopped(8))).kinds() == {"norm": 1}
    report = zmlx.patch(mnn.Sequential(Stopped(8)), mode="training")
    assert not report.replaced
    assert report.skipped[0].why.startswith("its gradient differs")


def test_a_block_that_looks_into_its_cache_is_left_alone():
    class Block(mnn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.other = mnn.RMSNorm(8), mnn.Linear(8, 8)

        def __call__(self, x, cache=None):
            y = x + (self.other(x) if cache is None else cache.other)
            return self.norm(y)

    report = zmlx.patch(Block())
    assert report.kinds() == {"norm": 1}
    assert report.skipped[0].why.startswith("its call cannot be captured")


def test_dropout_is_replaced_for_training_only():
    model = mnn.Sequential(mnn.Linear(8, 8), mnn.Dropout(0.25))
    assert not zmlx.patch(model).replaced
    assert zmlx.patch(model, mode="training").kinds() == {"dropout": 1}
    x = mx.ones((1000, 8))
    model.layers[1].train()
    y = np.array(model.layers[1](x))
    assert set(np.unique(y)) == {0.0, np.float32(1 / 0.75)}
    assert abs((y == 0).mean() - 0.25) < 0.02
    model.eval()
    assert mx.array_equal(model.layers[1](x), x)


class DroppedMLP(mnn.Module):
    """A gated network that drops what is between its projections."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = mnn.Linear(8, 16), mnn.Linear(8, 16), mnn.Linear(16, 8)
        self.dropout = mnn.Dropout(0.5)

    def __call__(self, x):
        return self.down(self.dropout(mnn.silu(self.gate(x)) * self.up(x)))


class DroppedBlock(mnn.Module):
    """A block that drops what it adds."""

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = mnn.Linear(8, 8), mnn.Linear(8, 8)
        self.norm1, self.norm2 = mnn.RMSNorm(8), mnn.RMSNorm(8)
        self.dropout = mnn.Dropout(0.5)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


@pytest.mark.parametrize("training", [False, True], ids=["evaluating", "training"])
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("cls", [DroppedMLP, DroppedBlock])
def test_a_model_drops_in_training_in_whatever_mode_it_was_patched(cls, mode, training):
    model = cls()
    x = mx.random.normal((2, 3, 8), key=mx.random.key(1))
    model.eval()
    before = model(x)
    model.train(training)
    report = zmlx.patch(model, mode=mode)
    assert ("", "it computes another thing in training") in [
        (s.path, s.why) for s in report.skipped
    ]
    assert all(m.training is training for m in model.modules())
    model.eval()
    # The rounding of a few products of rows of 16.
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-6)
    model.train()
    assert not mx.allclose(model(x), model(x), rtol=1e-2)


class MLPOfMode(mnn.Module):
    """Has another unit in training."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = mnn.Linear(8, 16), mnn.Linear(8, 16), mnn.Linear(16, 8)

    def __call__(self, x):
        unit = mnn.gelu if self.training else mnn.silu
        return self.down(unit(self.gate(x)) * self.up(x))


class UnitOfMode(mnn.Module):
    """A gated unit that is another one in training."""

    def __call__(self, gate, up):
        return (mnn.gelu if self.training else mnn.silu)(gate) * up


class MLPWithUnit(mnn.Module):
    """Its unit is a child."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = mnn.Linear(8, 16), mnn.Linear(8, 16), mnn.Linear(16, 8)
        self.unit = UnitOfMode()

    def __call__(self, x):
        return self.down(self.unit(self.gate(x), self.up(x)))


@pytest.mark.parametrize("cls", [MLPOfMode, MLPWithUnit])
@pytest.mark.parametrize("training", [False, True])
def test_what_differs_in_training_runs_as_it_is_written(cls, training):
    """Beside one of the same class in the other mode, whose plan is not its own."""
    model = mnn.Sequential(cls(), cls())
    x = mx.random.normal((2, 3, 8), key=mx.random.key(1))
    before = []
    for mode in (False, True):
        model.train(mode)
        before.append(model(x))
    model.layers[0].train(training)
    model.layers[1].train(not training)
    zmlx.patch(model)
    for mode in (False, True):
        model.train(mode)
        assert mx.array_equal(model(x), before[mode])


def test_patching_leaves_the_random_numbers_as_they_are():
    model = DroppedMLP()
    mx.random.seed((7 << 32) + 5)
    expected = mx.random.normal((4,))
    mx.random.seed((7 << 32) + 5)
    zmlx.patch(model, mode="training")
    assert mx.array_equal(mx.random.normal((4,)), expected)


def test_the_layers_say_what_runs():
    model = build("llama")
    zmlx.patch(model)
    assert repr(model.layers[0].input_layernorm) == "RMSNorm(64, eps=1e-05, rms_norm=zmlx)"
    with zmlx.prefer("mlx"):
        assert repr(model.layers[0].input_layernorm) == "RMSNorm(64, eps=1e-05, rms_norm=mlx)"


def test_preferring_mlx_runs_the_models_own_operations():
    model = build("gemma3_text")
    logits = model(PROMPT)
    zmlx.patch(model)
    with zmlx.prefer("mlx"):
        assert mx.allclose(model(PROMPT), logits, rtol=1e-5, atol=1e-6).item()


def test_a_copy_of_a_patched_model_is_patched_and_can_be_unpatched_alone():
    model = build("llama")
    zmlx.patch(model)
    twin = copy.deepcopy(model)
    assert zmlx.unpatch(twin) > 0
    assert plan_of(model.layers[0].mlp) is not None
    assert mx.allclose(twin(PROMPT), model(PROMPT), rtol=1e-4, atol=1e-5).item()


def test_a_patched_model_can_be_quantised_and_compiled():
    model = build("qwen3")
    zmlx.patch(model)
    quantized(model)
    logits = model(PROMPT)
    assert mx.allclose(mx.compile(model)(PROMPT), logits, rtol=1e-4, atol=1e-5).item()
    zmlx.unpatch(model)
    assert mx.allclose(model(PROMPT), logits, rtol=1e-4, atol=1e-5).item()


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_patched_model_is_pickled_as_the_model_that_it_was(protocol):
    model = build("llama")
    logits = model(PROMPT)
    zmlx.patch(model)
    loaded = pickle.loads(pickle.dumps(model, protocol))
    assert mx.array_equal(loaded(PROMPT), logits)
    assert [type(m) for m in loaded.modules()] == [type(m) for m in build("llama").modules()]
    assert plan_of(model.model.norm) is not None


class Remembering(mnn.Module):
    """Computes a norm, and keeps a number of each call."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.calls = mx.ones((8,)), 1e-5, 0

    def __call__(self, x):
        self.calls += 1
        return mx.fast.rms_norm(x, self.weight, self.eps)


class RememberingMLP(MLPWithUnit):
    """Computes a gated network, and keeps what is between its projections."""

    def __call__(self, x):
        self.hidden = mnn.silu(self.gate(x)) * self.up(x)
        return self.down(self.hidden)


def test_what_keeps_something_of_its_calls_runs_as_it_is_written():
    norm, mlp = Remembering(), RememberingMLP()
    report = zmlx.patch(mnn.Sequential(norm, mlp))
    assert norm.calls == 0
    assert "hidden" not in mlp
    assert not {"norm", "mlp"} & set(report.kinds())
    assert ("layers.1", "its call sets hidden") in [(s.path, s.why) for s in report.skipped]
    x = mx.ones((2, 8))
    assert mlp(norm(norm(x))).shape == (2, 8)
    assert norm.calls == 2
    assert mlp.hidden.shape == (2, 16)


class BatchNormed(mnn.Module):
    """A block whose other child has statistics that change in training."""

    def __init__(self):
        super().__init__()
        self.other, self.norm = mnn.BatchNorm(8), mnn.LayerNorm(8)

    def __call__(self, x):
        return self.norm(x + self.other(x))


def test_patching_leaves_the_statistics_of_a_batch_norm_as_they_are():
    model = BatchNormed()
    x = mx.random.normal((4, 8), key=mx.random.key(1))
    model(x)
    model.eval()
    before, mean = model(x), mx.array(model.other.running_mean)
    assert "residual_norm" in zmlx.patch(model, mode="training").kinds()
    assert mx.array_equal(model.other.running_mean, mean)
    # The rounding of a norm of 8.
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-6)


class StoppedWeight(mnn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = mx.ones((8,)), 1e-5

    def __call__(self, x):
        return mx.fast.rms_norm(x, mx.stop_gradient(self.weight), self.eps)


class StoppedBlock(mnn.Module):
    """A block with such a norm after its sum."""

    def __init__(self):
        super().__init__()
        self.other, self.norm = mnn.Linear(8, 8), StoppedWeight()

    def __call__(self, x):
        return self.norm(x + self.other(x))


@pytest.mark.parametrize("cls", [StoppedWeight, StoppedBlock])
def test_a_stopped_gradient_of_a_weight_is_found_by_the_probe(cls):
    report = zmlx.patch(mnn.Sequential(cls()), mode="training")
    assert not report.replaced
    assert report.skipped[0].why.startswith("its gradient differs")


class MLPInDict(mnn.Module):
    def __init__(self):
        super().__init__()
        self.parts = {"in": [mnn.Linear(8, 16), mnn.Linear(8, 16)], 2: mnn.Linear(16, 8)}

    def __call__(self, x):
        gate, up = self.parts["in"]
        return self.parts[2](mnn.silu(gate(x)) * up(x))


def test_children_in_dicts_are_found():
    model = MLPInDict()
    x = mx.random.normal((2, 3, 8), key=mx.random.key(1))
    before = model(x)
    assert zmlx.patch(model, mode="training").kinds() == {"mlp": 1}
    # The rounding of a few products of rows of 16.
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-6)


class SpreadAttention(mnn.Module):
    """Attends in methods without self."""

    def __init__(self):
        super().__init__()
        self.scale, self.o_proj = 0.5, mnn.Linear(8, 8)

    @staticmethod
    def once(x, scale):
        return scaled_dot_product_attention(x, x, x, None, scale, None)

    @classmethod
    def twice(cls, x, scale):
        return scaled_dot_product_attention(x, x, x, None, scale, None) + cls.once(x, scale)

    def __call__(self, x):
        return self.o_proj(self.once(x, self.scale) + self.twice(x, self.scale))


def test_attention_in_a_static_or_class_method_is_replaced():
    model = mnn.Sequential(SpreadAttention())
    x = mx.random.normal((1, 2, 3, 8), key=mx.random.key(1))
    before = model(x)
    assert zmlx.patch(model).kinds() == {"attention": 1}
    # The rounding of a few products of rows of 8.
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-6)


def test_a_class_that_was_changed_since_it_was_patched_is_read_again(monkeypatch):
    model = mnn.Sequential(SpreadAttention())
    x = mx.random.normal((1, 2, 3, 8), key=mx.random.key(1))
    zmlx.patch(model)
    zmlx.unpatch(model)

    def once(x, scale):
        return 3 * scaled_dot_product_attention(x, x, x, None, scale, None)

    monkeypatch.setattr(SpreadAttention, "once", staticmethod(once))
    before = model(x)
    zmlx.patch(model)
    assert mx.allclose(model(x), before, rtol=1e-5, atol=1e-6)


def test_smart_patch_keeps_what_is_faster_and_says_so():
    model = build("llama")
    report = zmlx.smart_patch(model, PROMPT, rounds=3)
    measured = {kind for kind, _ in report.kept + report.dropped}
    assert measured == {"norm", "residual_norm", "mlp", "rope", "attention"}
    assert set(report.kinds()) == {kind for kind, _ in report.kept}
    assert all(speed >= 1 for _, speed in report.kept)
    assert all(speed < 1 for _, speed in report.dropped)
    for kind, speed in report.kept + report.dropped:
        assert f"{kind}: {speed:.2f} times the speed" in str(report)


def test_smart_patch_for_training_times_the_loss_with_its_gradients():
    model = build("llama")
    called = []

    def loss(model, tokens):
        called.append(bool(patching.plan_of(model.model.norm) or patching.head_of(model)))
        return model(tokens).square().mean()

    kinds = ["norm", "loss"]
    report = zmlx.smart_patch(model, PROMPT, mode="training", rounds=1, loss=loss, only=kinds)
    assert {kind for kind, _ in report.kept + report.dropped} == set(kinds)
    # For each kind, patched and not: a call that compiles, one that warms up, one that counts.
    assert (called.count(True), called.count(False)) == (6, 6)


def test_smart_patch_for_training_takes_gradients_of_what_learns():
    model = build("llama")
    model.freeze()
    with pytest.raises(ValueError, match=r"\[smart_patch\] 'model' must have trainable"):
        zmlx.smart_patch(model, PROMPT, mode="training")
    with pytest.raises(ValueError, match=r"\[smart_patch\] 'loss' must come with mode"):
        zmlx.smart_patch(model, PROMPT, loss=zmlx.lm_loss)


@pytest.mark.parametrize("name", ["llama", "mlp"])
def test_smart_patch_for_training_knows_a_loss(name):
    """That of the next token for a language model, whose head it can replace; else one that needs
    every output."""
    model = build(name) if name == "llama" else mnn.Sequential(mnn.Linear(8, 8), mnn.LayerNorm(8))
    sample = PROMPT if name == "llama" else mx.ones((2, 8))
    report = zmlx.smart_patch(model, sample, mode="training", rounds=1, only=["norm", "loss"])
    measured = {kind for kind, _ in report.kept + report.dropped}
    assert measured == ({"norm", "loss"} if name == "llama" else {"norm"})


# ---- the head and the loss ----------------------------------------------------------------------

BATCH = mx.concatenate([PROMPT, PROMPT[:, ::-1]])
LENGTHS = mx.array([[0, 7], [2, 11]])


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llama", "lm_head"),
        ("gemma", "model.embed_tokens"),
        ("gemma2", "model.embed_tokens"),
        ("qwen3_moe", "lm_head"),
    ],
)
def test_the_loss_of_a_patched_model_is_mlx_lms(name, path):
    from mlx_lm.tuner.trainer import default_loss

    model = build(name)
    (before, tokens), gradients = mnn.value_and_grad(model, default_loss)(model, BATCH, LENGTHS)
    report = zmlx.patch(model, mode="training")
    assert [r.path for r in report.replaced if r.kind == "loss"] == [path]
    (after, count), ours = mnn.value_and_grad(model, zmlx.lm_loss)(model, BATCH, LENGTHS)
    assert count.item() == tokens.item()
    assert after.item() == pytest.approx(before.item(), rel=1e-5)
    for (key, a), (_, b) in zip(tree_flatten(gradients), tree_flatten(ours), strict=True):
        assert mx.abs(a - b).max().item() <= 2e-5 * max(mx.abs(a).max().item(), 1e-3), key
    zmlx.unpatch(model)
    assert zmlx.lm_loss(model, BATCH, LENGTHS)[0].item() == pytest.approx(before.item(), rel=1e-5)


def test_a_body_gets_what_the_model_gives_it_besides_tokens():
    """That of phi asks for its cache, which the model hands on without one."""
    from mlx_lm.tuner.trainer import default_loss

    model = build("phi")
    before, _ = default_loss(model, BATCH, LENGTHS)
    assert "loss" in zmlx.patch(model, mode="training").kinds()
    assert zmlx.lm_loss(model, BATCH, LENGTHS)[0].item() == pytest.approx(before.item(), rel=1e-5)


def test_a_head_that_is_quantised_has_its_logits():
    model = quantized(build("llama"))
    report = zmlx.patch(model, mode="training")
    assert "loss" not in report.kinds()
    assert any("its head is no plain linear layer" in s.why for s in report.skipped)
    assert mx.isfinite(zmlx.lm_loss(model, BATCH, LENGTHS)[0]).item()


def test_a_head_that_gets_a_lora_layer_later_is_taken_as_it_is():
    from mlx_lm.tuner.lora import LoRALinear

    model = build("llama")
    zmlx.patch(model, mode="training")
    plain = zmlx.lm_loss(model, BATCH, LENGTHS)[0]
    model.lm_head = LoRALinear.from_base(model.lm_head)
    model.lm_head.lora_b = mx.random.normal(model.lm_head.lora_b.shape)
    assert abs((zmlx.lm_loss(model, BATCH, LENGTHS)[0] - plain).item()) > 1e-3


# ---- every model of mlx-lm ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in names() if n not in LEFT_OUT])
def test_every_model_of_mlx_lm_computes_the_same(name):
    model = build(name)
    before, logits = classes(model), model(PROMPT)
    assert mx.isfinite(logits).all().item()
    report = zmlx.patch(model)
    assert report.replaced
    error = mx.abs(model(PROMPT) - logits).max().item()
    # The rounding of some hundred float32 operations, in other orders.
    assert error <= 1e-5 * mx.abs(logits).max().item()
    zmlx.unpatch(model)
    assert classes(model) == before
    assert mx.array_equal(model(PROMPT), logits)


def test_most_models_of_mlx_lm_are_compared():
    every = names()
    assert set(LEFT_OUT) <= set(every)
    assert len(LEFT_OUT) <= 9
    assert len(LEFT_OUT) <= 0.2 * len(every)
