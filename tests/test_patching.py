"""A patched model computes what it did, and unpatched is what it was."""

import copy
import pickle

import mlx.core as mx
import mlx.nn as mnn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from ops.sweep import DTYPES, in_dtypes
from small_models import LEFT_OUT, build, names

import zmlx
from zmlx import kernels, patching
from zmlx.patching.capture import Graphs
from zmlx.patching.match import Matcher
from zmlx.patching.plans import plan_of

pytestmark = pytest.mark.usefixtures("kernels_run")

FAMILIES = (
    "llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmo2",
    "phi3",
)  # fmt: skip
ROUTED = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
PROMPT = mx.array([[5, 9, 3, 77, 21, 4, 99, 100, 17, 8, 2, 64]])
EPS = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


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


def continued(model, bits, chunks=(1, 3, 1)):
    """Logits of chunks of tokens after a prompt whose keys and values are quantised then."""
    cache = make_prompt_cache(model)
    model(PROMPT, cache=cache)
    cache = [c.to_quantized(group_size=32, bits=bits) for c in cache]
    return [model(mx.array([[7, 1, 3]])[:, :n], cache=cache) for n in chunks]


@pytest.mark.on_cpu
@pytest.mark.parametrize("bits", [4, 8, 6])
def test_quantised_caches_decode(bits):
    model = build("llama", head_dim=32)
    before = continued(model, bits)
    zmlx.patch(model)
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        run = kernels.quantized_attention
        patch.setattr(
            kernels, "quantized_attention", lambda *a, **o: calls.append(o["bits"]) or run(*a, **o)
        )
        after = continued(model, bits)
    # Of 6 bits MLX packs values across words, which stays MLX's business.
    assert set(calls) == ({bits} if bits != 6 else set())
    for a, b in zip(after, before, strict=True):
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-4 * mx.abs(b).max().item())


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


@pytest.mark.parametrize("name, dtype", in_dtypes(FAMILIES, DTYPES[1:]))
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


@pytest.mark.parametrize("first", ["norm", "gated", "router", "model.layers.0"])
def test_patching_in_steps_replaces_what_one_call_does(first):
    model = build("mixtral")
    whole = [(r.path, r.kind, r.op) for r in zmlx.patch(model, mode="training").replaced]
    zmlx.unpatch(model)
    zmlx.patch(model, only=first)
    report = zmlx.patch(model, mode="training")
    assert [(r.path, r.kind, r.op) for r in report.replaced] == whole
    assert not report.skipped


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
    ("options", "activations", "norms"),
    [
        ({"only": "layers.0"}, ["layers.0.act"], ["layers.0.norm"]),
        ({"only": "layers.1"}, ["layers.1.act"], ["layers.1.norm"]),
        # The norm is one module with two paths, of which one is excluded.
        ({"exclude": "layers.0"}, ["layers.1.act"], []),
        ({"exclude": "layers.1"}, ["layers.0.act"], []),
        ({"exclude": "norm"}, ["layers.0.act", "layers.1.act"], []),
    ],
)
def test_paths_choose_among_the_places_of_a_shared_module(options, activations, norms):
    act, norm = mnn.GELU(), mnn.LayerNorm(24)
    model = mnn.Sequential(*(mnn.Module() for _ in range(2)))
    for layer in model.layers:
        layer.act, layer.norm = act, norm
    replaced = zmlx.patch(model, **options).replaced
    assert [r.path for r in replaced if r.kind == "activation"] == activations
    assert [r.path for r in replaced if r.kind == "norm"] == norms
    patched = {path for path, m in model.named_modules() if plan_of(m) is not None}
    everywhere = ["layers.0.norm", "layers.1.norm"] if norms else []
    assert patched == {*activations, *everywhere}


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


@pytest.mark.parametrize("option", ["only", "exclude"])
@pytest.mark.parametrize("value", [3, [3]], ids=str)
def test_kinds_and_paths_are_strings(option, value):
    message = rf"\[patch\] '{option}' must be kinds or paths but got int"
    with pytest.raises(TypeError, match=message):
        zmlx.patch(build("llama"), **{option: value})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rounds": 0}, ValueError, "'rounds' must be at least 1 but got 0"),
        ({"rounds": 1.5}, TypeError, "'rounds' must be an int but got float"),
        ({"mode": "training", "loss": 3}, TypeError, "'loss' must be a function but got int"),
    ],
)
def test_wrong_options_of_smart_patch(options, error, message):
    model = build("llama")
    with pytest.raises(error, match=rf"\[smart_patch\] {message}"):
        zmlx.smart_patch(model, PROMPT, **options)
    assert zmlx.unpatch(model) == 0


def test_a_model_of_another_framework_is_an_error():
    class Other:
        __module__ = "torch.nn"

    with pytest.raises(TypeError, match=r"must be an mlx.nn.Module but got torch.nn.Other"):
        zmlx.patch(Other())
    with pytest.raises(TypeError, match=r"must be an mlx.nn.Module but got dict"):
        zmlx.unpatch({})


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


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("protocol", [2, 5])
def test_a_patched_model_is_pickled_as_the_model_that_it_was(protocol, mode):
    model = build("llama")
    logits = model(PROMPT)
    zmlx.patch(model, mode=mode)
    pickled = pickle.dumps(model, protocol)
    assert b"zmlx." not in pickled
    loaded = pickle.loads(pickled)
    assert zmlx.unpatch(loaded) == 0
    assert mx.array_equal(loaded(PROMPT), logits)
    assert [type(m) for m in loaded.modules()] == [type(m) for m in build("llama").modules()]
    assert plan_of(model.model.norm) is not None


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


def test_smart_patch_compares_the_modules_once(monkeypatch):
    found = []
    whole = Matcher._same_in_all
    monkeypatch.setattr(
        Matcher, "_same_in_all", lambda self, module: found.append(module) or whole(self, module)
    )
    zmlx.patch(build("llama"))
    once = len(found)
    zmlx.smart_patch(build("llama"), PROMPT, rounds=1)
    assert len(found) == 2 * once


def test_a_unit_is_looked_for_first_where_it_was_found(monkeypatch):
    found = []
    whole = Graphs.capture
    monkeypatch.setattr(
        Graphs, "capture", lambda self, *given: found.append(given) or whole(self, *given)
    )
    model = mnn.Sequential(mnn.Linear(24, 48), mnn.GELU(), mnn.Linear(48, 24))
    assert "mlp" in zmlx.patch(model).kinds()
    # All units for one mode, size, dtype and number of axes; one unit for the hundred others.
    assert len(found) < 800


def test_smart_patch_takes_what_to_exclude_from_an_iterator():
    report = zmlx.smart_patch(build("llama"), PROMPT, rounds=1, exclude=iter(["residual_norm"]))
    assert "residual_norm" not in report.kinds()
    assert "residual_norm" not in {kind for kind, _ in report.kept + report.dropped}
    with pytest.raises(TypeError, match="'exclude' must be kinds or paths but got int"):
        zmlx.smart_patch(build("llama"), PROMPT, rounds=1, exclude=5)


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
    assert len(LEFT_OUT) <= 6
    assert len(LEFT_OUT) <= 0.2 * len(every)
