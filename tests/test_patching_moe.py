"""Patched mixtures choose the same experts and return what they did."""

import mlx.core as mx
import mlx.nn as mnn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear, _gather_sort, _scatter_unsort
from ops.sweep import DTYPES, in_dtypes
from small_models import build
from test_patching import ROUTED, greedy, quantized

import zmlx
from zmlx.patching.plans import plan_of
from zmlx.patching.steps import Mix

pytestmark = pytest.mark.usefixtures("kernels_run")

#: Enough tokens that they are sorted by expert.
LONG = mx.random.randint(0, 128, (2, 20), key=mx.random.key(6))


def routed(name, dtype=mx.float32, **given):
    """A small model; its routers have a bias that groups are the same for."""
    model = build(name, dtype, **given)
    for _, module in model.named_modules():
        for bias in {"e_score_correction_bias", "expert_bias"} & set(module):
            module[bias] = mx.abs(module[bias])
    return model


#: Additions in a row before a logit: 4 layers, of each the sums of 64 in the projections of
#: attention, of 64 and 32 in the experts, and the means of two norms; and the head's.
TERMS = 4 * (2 * 64 + 64 + 32 + 2 * 64) + 64


def near(a, b, terms=TERMS, floor=0.0):
    """Whether the two are as near as two orders of that many additions: each rounds by half a unit
    of what is added up, b's largest or `floor`, and random errors grow as the root of their number;
    4 standard deviations of both."""
    largest = max(mx.abs(b).max().item(), floor)
    return mx.abs(a - b).max().item() <= 4 * 2**-23 * terms**0.5 * largest


@pytest.mark.on_cpu
@pytest.mark.parametrize("weights", ["float", "quantised"])
@pytest.mark.parametrize("name", ROUTED)
def test_routers_and_experts_are_found_and_say_the_same(name, weights):
    model = routed(name)
    if weights == "quantised":
        quantized(model)
    tokens, logits = greedy(model), model(LONG)
    report = zmlx.patch(model, only=["router", "experts"])
    # Its router is a module of its own, so that the sum of what experts return is one more.
    layers, sums = (3, 3) if name == "deepseek_v3" else (4, 0)
    assert report.kinds() == {"router": layers, "experts": layers + sums}
    fused = weights == "float" and name != "gpt_oss"  # which has biases and a unit of its own
    assert {r.op for r in report.replaced} == {
        "topk_gating", "expert_ffn" if fused else "moe_dispatch"
    }  # fmt: skip
    assert greedy(model) == tokens
    assert near(model(LONG), logits)
    assert zmlx.unpatch(model) == 2 * layers + sums
    assert mx.array_equal(model(LONG), logits)


#: Models whose routers are spelled in other ways, how many layers have one, and whether it is a
#: module of its own, so that the sum of what experts return is replaced apart from it.
SPELLED = {
    "qwen2_moe": (4, False),  # a shared expert with a gate of its own
    "kimi_linear": (3, False),  # a bias in the block, and a divisor of sum + 1e-20
    "lfm2_moe": (3, False),  # a bias in the block, and a divisor of sum + 1e-6
    "minimax": (4, False),  # logits of an array in float32, weights in its own dtype
    "ernie4_5_moe": (4, False),  # a divisor of at least 1e-12
    "mistral4": (3, False),  # groups without a bias
    "glm4_moe_lite": (3, True),  # a bias in the gate, and a divisor of sum + 1e-20
    "deepseek_v2": (3, True),  # groups by their largest score
    "bailing_moe": (3, True),  # a gate with a projection as its child
    "bailing_moe_v3": (3, True),  # a product in float32, closed groups of -inf
    "olmoe": (4, False),  # tokens in one row
    "granitemoe": (4, True),  # softmax of the chosen logits, in float32
}


@pytest.mark.on_cpu
@pytest.mark.parametrize(
    "dtype", [mx.float32, pytest.param(mx.bfloat16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", SPELLED)
def test_routers_in_other_spellings(name, dtype):
    layers, apart = SPELLED[name]
    # Every expert has every token: a choice between near equals would turn on the last bit.
    every = {"num_experts_per_tok": 8, "num_experts_per_token": 8, "moe_k": 8, "topk_group": 2}
    model = quantized(routed(name, dtype, **(every if dtype == mx.bfloat16 else {})))
    tokens, logits = greedy(model), model(LONG)
    report = zmlx.patch(model, only=["router", "experts"])
    assert report.kinds() == {"router": layers, "experts": layers * (1 + apart)}
    if dtype == mx.float32:
        assert greedy(model) == tokens
        assert near(model(LONG), logits)
    else:
        ours = model(LONG).astype(mx.float32)
        assert zmlx.unpatch(model) == layers * (2 + apart)
        model.set_dtype(mx.float32)
        wide = model(LONG)
        plain = mx.abs(logits.astype(mx.float32) - wide).max()
        allowed = 2 * plain + 4 * 2.0**-7 * mx.abs(wide).max()
        assert (mx.abs(ours - wide).max() <= allowed).item()


@pytest.mark.on_cpu
@pytest.mark.parametrize("name", [*ROUTED, "qwen2_moe", "kimi_linear", "bailing_moe"])
def test_gradients_of_sorted_tokens(name):
    model = routed(name)

    def gradients():
        def loss(model):
            return mnn.losses.cross_entropy(model(LONG[:, :-1]), LONG[:, 1:]).mean()

        return tree_flatten(mnn.value_and_grad(model, loss)(model)[1])

    before = gradients()
    report = zmlx.patch(model, mode="training", only=["router", "experts"])
    assert set(report.kinds()) == {"router", "experts"}
    # There and back, and 40 tokens that are added up. A gradient that nearly cancels is as far off
    # as what cancels in it, which may be a thousandth of the largest.
    floor = 1e-3 * max(mx.abs(a).max().item() for _, a in before)
    for (path, a), (_, b) in zip(before, gradients(), strict=True):
        assert near(b, a, 2 * TERMS + 40, floor), path


@pytest.mark.parametrize("name, dtype", in_dtypes(ROUTED, DTYPES[1:]))
def test_half_precision_is_probed_in_its_own_dtype(name, dtype):
    """MLX multiplies float experts on the CPU in float32 alone, so that there is nothing to
    compare them with; quantised ones are replaced."""
    for weights, kinds in (("float", {"router"}), ("quantised", {"router", "experts"})):
        model = routed(name, dtype)
        if weights == "quantised":
            quantized(model)
        report = zmlx.patch(model, only=["router", "experts"])
        assert set(report.kinds()) == kinds
        why = {s.why for s in report.skipped if s.module == "SwitchGLU"}
        assert all("probe failed: [GatherMM" in w for w in why)
        assert bool(why) == (weights == "float")
        sums = {s.why for s in report.skipped if s.module == "DeepseekV3MoE"}
        assert sums == ({"what it adds up is not replaced"} if why and "v3" in name else set())


def test_a_negative_bias_and_groups_run_the_models_own_router():
    """A closed group's experts score 0 in mlx-lm, which is more than a negative score."""
    model = routed("deepseek_v3")
    gate = model.layers[1].mlp.gate
    x = mx.random.normal((3, 64))
    bias = mx.abs(gate.e_score_correction_bias)
    for given in (bias, bias - 5):
        gate.e_score_correction_bias = given
        indices, weights = gate(x)
        zmlx.patch(model, only="router")
        mine, own = gate(x)
        zmlx.unpatch(model)
        order, other = mx.argsort(indices), mx.argsort(mine)
        assert mx.array_equal(
            mx.take_along_axis(indices, order, 1), mx.take_along_axis(mine, other, 1)
        )
        assert near(mx.take_along_axis(weights, order, 1), mx.take_along_axis(own, other, 1))


def test_experts_that_change_after_patching_are_taken_as_they_are():
    from mlx_lm.tuner.lora import LoRASwitchLinear

    model = routed("mixtral")
    zmlx.patch(model, only=["router", "experts"])
    quantized(model)
    experts = model.layers[0].block_sparse_moe.switch_mlp
    experts.up_proj = LoRASwitchLinear.from_base(experts.up_proj)
    experts.up_proj.lora_b = 0.1 * mx.random.normal(experts.up_proj.lora_b.shape)
    patched = model(LONG)
    zmlx.unpatch(model)
    assert near(patched, model(LONG))


def test_quantised_experts_with_adapters_are_replaced():
    """Where groups are longer than what other experts are compared on, and of two lengths."""
    from mlx_lm.tuner.lora import LoRASwitchLinear

    experts = SwitchGLU(64, 128, 8)
    experts.gate_proj = experts.gate_proj.to_quantized(32, 4)
    experts.up_proj = experts.up_proj.to_quantized(32, 4)
    experts.down_proj = experts.down_proj.to_quantized(64, 4)
    for name in ("gate_proj", "down_proj"):
        experts[name] = LoRASwitchLinear.from_base(experts[name])
        experts[name].lora_b = 0.1 * mx.random.normal(experts[name].lora_b.shape)
    x = mx.random.normal((50, 64))
    indices = mx.random.randint(0, 8, (50, 2)).astype(mx.uint32)
    want = experts(x, indices)
    assert "experts" in zmlx.patch(experts).kinds()
    assert near(experts(x, indices), want)


def test_experts_without_their_router_and_routers_without_their_experts():
    for kind in ("router", "experts"):
        model = routed("qwen3_moe")
        logits = model(LONG)
        assert set(zmlx.patch(model, only=kind).kinds()) == {kind}
        assert near(model(LONG), logits)


class Block(mnn.Module):
    """A mixture that routes as `weigh` says, and adds what `beside` returns."""

    def __init__(self, weigh, experts=None, shared=False):
        super().__init__()
        self.gate = mnn.Linear(64, 8, bias=False)
        self.switch_mlp = experts or SwitchGLU(64, 32, 8)
        if shared:
            self.shared = mnn.Linear(64, 64)
        self._weigh = weigh

    def __call__(self, x):
        indices, weights = self._weigh(self.gate(x))
        y = (self.switch_mlp(x, indices) * weights[..., None]).sum(axis=-2)
        return y + self.shared(x) if "shared" in self else y


def top3(scores):
    return mx.argpartition(-scores, kth=2, axis=-1)[..., :3]


def by_softmax(g):
    return top3(g), mx.softmax(mx.take_along_axis(g, top3(g), axis=-1), axis=-1)


def by_sigmoid(g):
    s = mx.sigmoid(g)
    return top3(s), mx.take_along_axis(s, top3(s), axis=-1)


def warm(g):
    return top3(g), mx.softmax(mx.take_along_axis(g, top3(g), axis=-1) / 2, axis=-1)


def worst(g):
    indices = mx.argpartition(g, kth=2, axis=-1)[..., :3]
    return indices, mx.softmax(mx.take_along_axis(g, indices, axis=-1), axis=-1)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("weigh", [by_softmax, by_sigmoid])
def test_blocks_that_no_model_has_are_found_by_structure(weigh, shared):
    block = Block(weigh, shared=shared)
    for x in (mx.random.normal((2, 3, 64)), mx.random.normal((50, 64))):
        want = block(x)
        assert zmlx.patch(block).kinds() == {"router": 1, "experts": 1, "gated": 1}
        assert isinstance(plan_of(block).steps[1].path, str)
        assert near(block(x), want)
        zmlx.unpatch(block)


class Biased(Block):
    """A mixture with a bias of its own, which counts for the choice or (`weighed`) for both."""

    def __init__(self, weighed):
        super().__init__(None)
        self.correction = mx.abs(mx.random.normal((8,)))
        self.other = mx.abs(mx.random.normal((8,)))
        self._weighed = weighed

    def __call__(self, x):
        scores = mx.sigmoid(self.gate(x))
        biased = scores + self.correction
        weights = mx.take_along_axis(biased if self._weighed else scores, top3(biased), axis=-1)
        return (self.switch_mlp(x, top3(biased)) * weights[..., None]).sum(axis=-2)


def test_a_bias_in_the_block_is_read_at_each_call():
    block = Biased(False)
    x = mx.random.normal((2, 3, 64))
    block.other = block.correction[::-1]
    report = zmlx.patch(block)
    assert report.kinds() == {"router": 1, "experts": 1, "gated": 1}
    step = next(s for s in plan_of(block).steps if isinstance(s, Mix))
    assert step.bias == "correction"
    block.correction = block.correction[::-1]
    patched = block(x)
    zmlx.unpatch(block)
    assert near(patched, block(x))


def test_a_bias_that_counts_for_the_weights_is_left_alone():
    report = zmlx.patch(Biased(True))
    assert report.kinds() == {"experts": 1, "gated": 1}
    assert report.skipped[0].why == "its routing, or what it adds to it, equals no known one"


@pytest.mark.parametrize("weigh", [warm, worst])
def test_another_routing_is_left_alone_with_a_reason(weigh):
    block = Block(weigh)
    report = zmlx.patch(block)
    assert report.kinds() == {"experts": 1, "gated": 1}
    assert [(s.path, s.why) for s in report.skipped] == [
        ("", "its routing, or what it adds to it, equals no known one")
    ]


def by_length(g):
    return by_sigmoid(g) if g.shape[-2] > 50 else by_softmax(g)


def test_a_routing_that_goes_by_the_length_of_a_prompt_is_left_alone():
    report = zmlx.patch(Block(by_length))
    assert report.kinds() == {"experts": 1, "gated": 1}
    assert [(s.path, s.why) for s in report.skipped] == [
        ("", "it computes another thing for a long prompt")
    ]


class Doubled(SwitchGLU):
    """Not the experts that its structure promises."""

    def __call__(self, x, indices):
        return 2 * super().__call__(x, indices)


class Crossed(SwitchGLU):
    """Computes another thing where tokens are many."""

    def __call__(self, x, indices):
        y = super().__call__(x, indices)
        return y if indices.size < 64 else 2 * y


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Doubled, "its call equals no gated experts"),
        (Crossed, "it computes another thing for a long prompt"),
    ],
)
def test_other_experts_are_left_alone_with_a_reason(cls, why):
    block = Block(by_softmax, cls(64, 32, 8))
    x = mx.random.normal((50, 64))
    want = block(x)
    report = zmlx.patch(block)
    assert report.kinds() == {"router": 1, "gated": 1}
    assert [(s.path, s.why) for s in report.skipped] == [("switch_mlp", why)]
    assert near(block(x), want)


class Scaled(SwitchGLU):
    """Experts with a learned factor before the last projection."""

    def __init__(self, *given):
        super().__init__(*given)
        self.alpha = mx.array(1.0)

    def __call__(self, x, indices):
        x, i, many = mx.expand_dims(x, (-2, -3)), indices, indices.size >= 64
        if many:
            x, i, back = _gather_sort(x, indices)
        gate = self.gate_proj(x, i, sorted_indices=many)
        h = mnn.silu(gate) * self.up_proj(x, i, sorted_indices=many) * self.alpha
        y = self.down_proj(h, i, sorted_indices=many)
        return (_scatter_unsort(y, back, indices.shape) if many else y).squeeze(-2)


def test_a_learned_factor_in_experts_is_no_constant():
    model = mnn.Sequential(Block(by_softmax, Scaled(64, 32, 8)))
    report = zmlx.patch(model)
    assert "experts" not in report.kinds()
    why = "what it does between its projections equals no gated unit"
    assert [s.why for s in report.skipped if s.module == "Scaled"] == [why]


class Blind(SwitchGLU):
    """Has the graph of experts, but not their gradient."""

    def __call__(self, x, indices):
        return super().__call__(mx.stop_gradient(x), indices)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_stopped_gradient_is_found_by_the_probe(mode):
    model = mnn.Sequential(Block(by_softmax, Blind(64, 32, 8)))
    report = zmlx.patch(model, mode=mode, exclude="loss")
    assert "experts" not in report.kinds()
    assert next(s.why for s in report.skipped if s.module == "Blind").startswith("its gradient")


@pytest.mark.parametrize("tokens", [4, 100])
def test_experts_return_what_their_weights_promote_to(tokens):
    x, indices = mx.ones((tokens, 64), mx.float16), mx.zeros((tokens, 2), mx.uint32)
    model = SwitchGLU(64, 32, 8)
    want = model(x, indices)
    assert zmlx.patch(model).kinds()["experts"] == 1
    got = model(x, indices)
    assert got.dtype == want.dtype == zmlx.nn.SwitchGLU(64, 32, 8)(x, indices).dtype
    # The rounding of products of rows of 64.
    assert mx.allclose(got, want, rtol=1e-4, atol=1e-5).item()


@pytest.mark.parametrize("later", [False, True], ids=["before", "after patching"])
@pytest.mark.parametrize("choices", [0, 2])
@pytest.mark.parametrize("tokens", [4, 100])
def test_experts_may_return_rows_of_another_width(tokens, choices, later):
    x = mx.random.normal((tokens, 64), key=mx.random.key(1))
    indices = mx.zeros((tokens, choices), mx.uint32)
    model, down = SwitchGLU(64, 32, 8), SwitchLinear(32, 48, 8, bias=False)
    if later:
        zmlx.patch(model)
    model.down_proj = down
    if not later:
        assert {r.op for r in zmlx.patch(model).replaced} == {"moe_dispatch", "swiglu"}
    assert plan_of(model) is not None
    got, summed = model(x, indices), lambda x: model(x, indices).sum()
    gradient = mx.grad(summed)(x)
    zmlx.unpatch(model)
    want = model(x, indices)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    # The rounding of products of rows of 64.
    assert mx.allclose(got, want, rtol=1e-4, atol=1e-5).item()
    if choices:
        assert mx.allclose(gradient, mx.grad(summed)(x), rtol=1e-4, atol=1e-5).item()


class Calling(SwitchGLU):
    """Has a call of its own."""

    def __call__(self, x, indices):
        return super().__call__(x, indices)


def test_experts_whose_class_gets_another_call_run_it_in_a_block(monkeypatch):
    block, own = Block(by_softmax, Calling(64, 32, 8)), Calling.__call__
    x = mx.random.normal((50, 64), key=mx.random.key(1))
    before = block(x)
    assert zmlx.patch(block).kinds() == {"router": 1, "experts": 1, "gated": 1}
    monkeypatch.setattr(Calling, "__call__", lambda self, x, i: 2 * own(self, x, i))
    assert near(block(x), 2 * before)


class Strict(mnn.Module):
    """A router that stays in its dtype."""

    def __init__(self):
        super().__init__()
        self.weight = mx.random.normal((8, 64), key=mx.random.key(1))

    def set_dtype(self, *_):
        raise TypeError("it has a dtype")

    def __call__(self, x):
        g = x @ self.weight.T
        return top3(g), mx.softmax(mx.take_along_axis(g, top3(g), axis=-1), axis=-1)


class Sums(mnn.Module):
    """Returns two numbers."""

    def __init__(self):
        super().__init__()
        self.weight = mx.ones((8, 64))

    def __call__(self, x):
        return (x @ self.weight.T).sum(), x.argmax()


@pytest.mark.parametrize(("cls", "kinds"), [(Strict, {"router": 1}), (Sums, {})])
def test_what_is_hardly_a_router_does_no_harm(cls, kinds):
    assert zmlx.patch(mnn.Sequential(cls())).kinds() == kinds


def test_experts_may_become_fewer():
    x, indices = mx.ones((100, 64)), mx.zeros((100, 2), mx.uint32)
    model = SwitchGLU(64, 32, 8)
    zmlx.patch(model)
    for part in (model.gate_proj, model.up_proj, model.down_proj):
        part.weight = part.weight[:4]
    got = model(x, indices)
    zmlx.unpatch(model)
    assert mx.allclose(got, model(x, indices), rtol=1e-4, atol=1e-5).item()
