"""A patched model's loss is mlx-lm's, with and without its logits."""

import copy

import mlx.core as mx
import mlx.nn as mnn
import pytest
from mlx.utils import tree_flatten
from small_models import build

import zmlx
from zmlx.patching.head import head_of

pytestmark = pytest.mark.usefixtures("kernels_run")

PROMPT = mx.array([[5, 9, 3, 77, 21, 4, 99, 100, 17, 8, 2, 64]])
BATCH = mx.concatenate([PROMPT, PROMPT[:, ::-1]])
LENGTHS = mx.array([[0, 7], [2, 11]])


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("llama", "lm_head"),
        ("gemma", "model.embed_tokens"),
        ("gemma2", "model.embed_tokens"),
        ("qwen3_moe", "lm_head"),
        ("cohere", "model.embed_tokens"),  # scaled
        ("granite", "lm_head"),  # divided
        ("muse_glimmer", "lm_head"),  # scaled, then capped
        ("minicpm", "lm_head"),  # a head that gets scaled states
        ("gptj", "lm_head"),  # a bias, and tokens by keyword
        ("gemma4", "language_model.lm_head"),  # a model in a model
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
    pairs = list(zip(tree_flatten(gradients), tree_flatten(ours), strict=True))
    # The gradient of a scale before a norm is 0 but for the rounding of what cancels in it.
    rounding = 2**-20 * max(mx.abs(a).max().item() for (_, a), _ in pairs)
    for (key, a), (_, b) in pairs:
        if key.endswith(".layers.3.layer_scalar"):
            assert max(mx.abs(a).max().item(), mx.abs(b).max().item()) <= rounding, key
            continue
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


class Capped(mnn.Module):
    """A body and a head, with a softcap and dropout between them."""

    def __init__(self, rate):
        super().__init__()
        self.body, self.head = mnn.Embedding(128, 32), mnn.Linear(32, 128)
        self.dropout, self.cap = mnn.Dropout(rate), 2.0

    def __call__(self, tokens):
        return mx.tanh(self.head(self.dropout(self.body(tokens))) / self.cap) * self.cap


@pytest.mark.parametrize("training", [False, True])
def test_a_head_behind_dropout_is_left_alone_in_whatever_mode(training):
    model = Capped(0.5)
    model.train(training)
    report = zmlx.patch(model, mode="training", exclude="dropout")
    assert "loss" not in report.kinds()
    assert any(s.why.startswith("no head and loss") for s in report.skipped)


class Scaled(mnn.Module):
    """A head with a bias on more than a body, its logits scaled and capped."""

    def __init__(self, scale):
        super().__init__()
        self.embedding, self.norm = mnn.Embedding(128, 32), mnn.RMSNorm(32)
        self.head, self.scale = mnn.Linear(32, 128), scale

    def __call__(self, tokens):
        return 3.0 * mx.tanh(self.head(self.norm(self.embedding(tokens))) * self.scale / 3.0)


def test_a_bias_is_scaled_with_its_logits():
    from mlx_lm.tuner.trainer import default_loss

    mx.random.seed(0)
    model = Scaled(0.3)
    model.head.bias = mx.random.normal((128,))
    before, _ = default_loss(model, BATCH, LENGTHS)
    assert "loss" in zmlx.patch(model, mode="training").kinds()
    assert head_of(model) is not None
    assert zmlx.lm_loss(model, BATCH, LENGTHS)[0].item() == pytest.approx(before.item(), rel=1e-5)


class Methods(mnn.Module):
    """A model with more than one way to call it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = mnn.Embedding(128, 32), mnn.RMSNorm(32)
        self.head = mnn.Linear(32, 128)

    def embed(self, tokens):
        return self.embedding(tokens)

    def forward(self, tokens):
        return self.head(2 + self.norm(self.embed(tokens)))

    def __call__(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


class Around(mnn.Module):
    """Calls a model within it, by one of its methods or by two."""

    def __init__(self, *methods):
        super().__init__()
        self.inner, self.mix, self.methods = Methods(), mnn.Linear(32, 32), ",".join(methods)

    def __call__(self, tokens):
        for method in self.methods.split(","):
            result = getattr(self.inner, method)(tokens)
            if method == "embed":
                self.mix(result)
        return result


@pytest.mark.parametrize(
    ("methods", "found"),
    [(["__call__"], 1), (["embed", "__call__"], 1), (["forward"], 0), (["embed", "forward"], 0)],
)
def test_a_model_in_a_model_is_called_by_the_method_that_it_is_called_by(methods, found):
    from mlx_lm.tuner.trainer import default_loss

    mx.random.seed(0)
    model = Around(*methods)
    before, _ = default_loss(model, BATCH, LENGTHS)
    assert zmlx.patch(model, mode="training").kinds().get("loss", 0) == found
    assert zmlx.lm_loss(model, BATCH, LENGTHS)[0].item() == pytest.approx(before.item(), rel=1e-5)


@pytest.mark.parametrize("use", ["scale", "cap"])
@pytest.mark.parametrize("value", [1.0, 2.0])
def test_a_scale_that_is_learned_keeps_its_gradient(use, value):
    """A graph shows an array of one number, once it is evaluated, as it does a number."""
    from mlx_lm.tuner.trainer import default_loss

    class Learned(mnn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = mnn.Embedding(128, 32), mnn.Linear(32, 128)
            self.number = mx.array(value)

        def __call__(self, tokens):
            logits = self.head(self.embedding(tokens))
            if use == "cap":
                return mx.tanh(logits / self.number) * self.number
            return logits * self.number

    mx.random.seed(0)
    model = Learned()
    model.head.bias = mx.random.normal((128,))
    mx.eval(model.parameters())
    _, expected = mnn.value_and_grad(model, default_loss)(model, BATCH, LENGTHS)
    assert "loss" not in zmlx.patch(model, mode="training").kinds()
    _, found = mnn.value_and_grad(model, zmlx.lm_loss)(model, BATCH, LENGTHS)
    assert abs(expected["number"].item()) > 0.01
    assert found["number"].item() == pytest.approx(expected["number"].item(), abs=1e-5)


LATER = {
    "cohere": lambda model: setattr(model.args, "logit_scale", 4.0),
    "cohere2": lambda model: setattr(model.model.args, "logit_scale", 4.0),
    "muse_glimmer": lambda model: setattr(model.args, "final_logit_softcapping", 0.3),
    "llama": lambda model: setattr(model.args, "tie_word_embeddings", True),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", LATER)
def test_a_configuration_that_is_changed_has_the_loss_of_what_it_became(name, compiled):
    from mlx_lm.tuner.trainer import default_loss

    model = build(name)
    before = default_loss(model, BATCH, LENGTHS)[0].item()
    assert "loss" in zmlx.patch(model, mode="training").kinds()
    LATER[name](model)
    after = default_loss(model, BATCH, LENGTHS)[0].item()
    assert after != pytest.approx(before, rel=1e-5)

    def loss(batch):
        return zmlx.lm_loss(model, batch, LENGTHS)[0]

    ours = (mx.compile(loss) if compiled else loss)(BATCH)
    assert ours.item() == pytest.approx(after, rel=1e-5)


def test_a_model_in_a_model_that_is_changed_has_the_loss_of_what_it_became():
    from mlx_lm.tuner.trainer import default_loss

    model = build("gemma4")
    zmlx.patch(model, mode="training")
    assert head_of(model) is not None
    model.language_model.final_logit_softcapping = 0.5
    after, _ = default_loss(model, BATCH, LENGTHS)
    assert zmlx.lm_loss(model, BATCH, LENGTHS)[0].item() == pytest.approx(after.item(), rel=1e-5)


CHANGES = {
    "cap": lambda model: setattr(model, "cap", 0.1),
    "rate": lambda model: setattr(model.dropout, "_p_1", 0.5),
    "another head": lambda model: setattr(model, "head", mnn.Linear(32, 128)),
}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_changed_has_the_loss_of_what_it_became(change, copied):
    from mlx_lm.tuner.trainer import default_loss

    def loss_of(model, loss):
        mx.random.seed(3)
        return loss(model, BATCH, LENGTHS)[0].item()

    mx.random.seed(0)
    model = Capped(0.0)
    before = loss_of(model, default_loss)
    assert "loss" in zmlx.patch(model, mode="training", exclude="dropout").kinds()
    model = copy.deepcopy(model) if copied else model
    assert head_of(model) is not None
    assert loss_of(model, zmlx.lm_loss) == pytest.approx(before, rel=1e-5)
    CHANGES[change](model)
    after = loss_of(model, default_loss)
    assert after != pytest.approx(before, rel=1e-4)
    assert loss_of(model, zmlx.lm_loss) == pytest.approx(after, rel=1e-5)


def test_a_head_that_is_quantised_has_its_logits():
    model = build("llama")
    mnn.quantize(model, group_size=32, bits=4)
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
