"""Blocks in the ways that ports of models write them, and the reasons of those left alone."""

import sys
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as mnn
import pytest

import zmlx

pytestmark = pytest.mark.usefixtures("kernels_run")


def drawn(*shape, seed=0, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


class Named(mnn.Module):
    """Its children are called by the names of their arguments."""

    class Mix(mnn.Module):
        def __init__(self):
            super().__init__()
            self.project = mnn.Linear(24, 24)

        def __call__(self, hidden_states, mask=None):
            return self.project(hidden_states)

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = mnn.RMSNorm(24), mnn.RMSNorm(24)
        self.mix, self.feed = self.Mix(), mnn.Linear(24, 24)

    def __call__(self, x, mask=None):
        h = x + self.mix(mask=mask, hidden_states=self.norm1(x))
        return h + self.feed(self.norm2(h))


def test_a_child_may_be_called_by_name():
    model, x = Named(), drawn(2, 3, 24)
    before = model(x)
    assert zmlx.patch(model, mode="training").kinds() == {"residual_norm": 1, "norm": 2}
    assert mx.allclose(model(x), before, atol=1e-5).item()


class Plain(mnn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = mnn.Linear(24, 32), mnn.Linear(24, 32)
        self.down = mnn.Linear(32, 24)

    def __call__(self, hidden_states):
        return self.down(mnn.silu(self.gate(hidden_states)) * self.up(hidden_states))


class Scaled(Plain):
    """An MLP with an argument more."""

    def __call__(self, hidden_states, scale=1.0):
        return scale * super().__call__(hidden_states)


class ScaledInside(Plain):
    def __call__(self, x, *, scale=1.0, limit=None):
        gate = self.gate(x) if limit is None else mx.minimum(self.gate(x), limit)
        return self.down(mnn.silu(gate) * self.up(x) * scale)


class Heads(Plain):
    """Attention of two projections, in products and a softmax."""

    def __init__(self):
        super().__init__()
        self.up, self.down = mnn.Identity(), mnn.Linear(24, 24)
        self.gate = mnn.Linear(24, 72)

    def __call__(self, x, mask=None):
        q, k, v = mx.split(self.gate(x), 3, axis=-1)
        weights = mx.exp(q @ k.swapaxes(-1, -2))
        return self.down((weights / weights.sum(axis=-1, keepdims=True)) @ v)


class PlainSum(mnn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm = mnn.Linear(24, 24), mnn.LayerNorm(24)

    def __call__(self, hidden_states, residual, mask=None):
        return self.norm(self.dense(hidden_states) + residual)


class PlainUnit(mnn.Module):
    def __call__(self, gate, up):
        return mnn.silu(gate) * up


@contextmanager
def calls_of(cls):
    """The calls of a class's own code meanwhile."""
    found = []

    def seen(frame, event, _):
        if event == "call" and frame.f_code is cls.__call__.__code__:
            found.append(frame)

    sys.setprofile(seen)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (Plain, ("hidden_states",)),
        (PlainSum, ("hidden_states", "residual")),
        (PlainUnit, ("gate", "up")),
    ],
)
def test_a_replacement_runs_whether_its_arrays_come_by_place_or_by_name(cls, names):
    model = mnn.Sequential(cls())
    module, arrays = model.layers[0], [drawn(2, 3, 24, seed=i) for i in range(len(names))]
    want = module(*arrays)
    assert zmlx.patch(model).kinds()
    module = model.layers[0]
    by_name = dict(zip(names, arrays, strict=True))
    last = {names[-1]: arrays[-1]}
    with calls_of(cls) as calls:
        results = [
            module(*arrays),
            module(**by_name),
            module(**dict(reversed(by_name.items()))),
            module(*arrays[:-1], **last),
        ]
    assert not calls
    assert all(mx.allclose(got, want, atol=1e-5).item() for got in results)
    with pytest.raises(TypeError):
        module(*arrays, **last)
    with pytest.raises(TypeError):
        module(**by_name, other=1)
    with pytest.raises(TypeError):
        module()


@pytest.mark.parametrize("cls", [Scaled, ScaledInside])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_an_mlp_may_take_more_that_has_a_default(cls, mode):
    model, x = mnn.Sequential(cls()), drawn(2, 3, 24)
    want, scaled = model(x), model.layers[0](x, scale=0.5)
    assert zmlx.patch(model, mode=mode).kinds() == {"mlp": 1}
    with calls_of(cls) as own:
        assert mx.allclose(model(x), want, atol=1e-5)
    assert not own
    with calls_of(cls) as own:
        assert mx.array_equal(model.layers[0](x, scale=0.5), scaled)
        assert mx.array_equal(model.layers[0](x, scale=1.0), want)
    assert len(own) == 2


def test_what_takes_a_mask_and_is_no_mlp_has_no_reason():
    report = zmlx.patch(mnn.Sequential(Heads()))
    assert not report.replaced
    assert not report.skipped


def test_a_gated_unit_takes_a_number():
    model = mnn.Sequential(PlainUnit())
    assert zmlx.patch(model).kinds() == {"gated": 1}
    x = drawn(2, 3, 24)
    assert mx.array_equal(model.layers[0](x, 2.0), mnn.silu(x) * 2.0)
    assert mx.allclose(model.layers[0](2.0, x), mnn.silu(mx.array(2.0)) * x)


class Scaled(mnn.Module):
    """A feed-forward network with a learned number."""

    def __init__(self, unit, start):
        super().__init__()
        self.up, self.down = mnn.Linear(24, 32), mnn.Linear(32, 24)
        self.beta, self._unit = mx.array(start), unit

    def __call__(self, x):
        return self.down(self._unit(self.up(x), self.beta))


UNLIKE = "what it does between its projections equals no gated unit"
BY_VALUE = "its call cannot be captured"


@pytest.mark.parametrize(
    ("unit", "start", "why"),
    [
        (lambda h, beta: h * mx.sigmoid(beta * h), 1.0, UNLIKE),
        (lambda h, beta: beta * mnn.gelu(h), 1.0, UNLIKE),
        (lambda h, beta: mnn.silu(h) + beta, 0.0, UNLIKE),
        (lambda h, beta: mnn.silu(h) * beta[0].item(), [1.0], BY_VALUE),
        (lambda h, beta: mnn.silu(h) if beta.item() else mnn.gelu(h), False, BY_VALUE),
    ],
    ids=["in a sigmoid", "a factor", "a shift", "by number", "a switch"],
)
def test_a_learned_number_that_changes_nothing_yet_is_no_constant(unit, start, why):
    report = zmlx.patch(mnn.Sequential(Scaled(unit, start)))
    assert not report.replaced
    assert [s.why.partition(":")[0] for s in report.skipped] == [why]


class Twofold(mnn.Module):
    """Has two children with one path."""

    def __init__(self):
        super().__init__()
        self.ins = {1: mnn.Linear(24, 32), "1": mnn.Linear(24, 32)}
        self.down = mnn.Linear(32, 24)

    def __call__(self, x):
        return self.down(mnn.silu(self.ins[1](x)) * self.ins["1"](x))


def test_children_with_one_path_are_not_mixed_up():
    model, x = Twofold(), drawn(2, 3, 24)
    before = model(x)
    report = zmlx.patch(model)
    assert [s.why for s in report.skipped] == ["its child 'ins.1' is not found by that path"]
    assert mx.array_equal(model(x), before)


class Dotted(mnn.Module):
    """Has children whose names look like paths."""

    def __init__(self):
        super().__init__()
        self["gate.a"], self.up = mnn.Linear(24, 32), mnn.Linear(24, 32)
        self.down, self["norm.a"] = mnn.Linear(32, 24), mnn.RMSNorm(24)

    def __call__(self, x):
        return self.down(mnn.silu(self["gate.a"](x)) * self.up(x))


class DottedSum(Dotted):
    def __call__(self, x, mask=None):
        return self["norm.a"](x + self.down(self.up(x)))


@pytest.mark.parametrize("cls", [Dotted, DottedSum])
def test_children_whose_names_have_a_dot_do_no_harm(cls):
    model, x = cls(), drawn(2, 3, 24)
    before = model(x)
    report = zmlx.patch(model)
    assert {r.path for r in report.replaced} <= {"", "norm.a"}
    assert mx.allclose(model(x), before, atol=1e-5)


class Output(mnn.Module):
    """The end of a block after the norm, which gets what its sum is with."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm = mnn.Linear(40, 24), mnn.LayerNorm(24)
        self.norm.weight, self.norm.bias = drawn(24, seed=1), drawn(24, seed=2)

    def __call__(self, hidden_states, residual, *, scale=None):
        h = self.dense(hidden_states)
        return self.norm(h + residual) if scale is None else self.norm(h * scale + residual)


class Plain(Output):
    def __call__(self, hidden_states, residual, mask=None):
        return self.norm(self.dense(hidden_states) + residual)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_sum_with_a_second_array_is_found(dtype):
    model = Plain()
    model.set_dtype(dtype)
    x, residual = drawn(2, 5, 40, seed=3, dtype=dtype), drawn(2, 5, 24, seed=4, dtype=dtype)
    cotangent = drawn(2, 5, 24, seed=5, dtype=dtype)

    def gradients():
        return mx.vjp(model, [x, residual], [cotangent])

    before = gradients()
    report = zmlx.patch(model, mode="training")
    assert report.kinds() == {"residual_norm": 1, "norm": 1}
    (block,) = [r for r in report.replaced if r.kind == "residual_norm"]
    assert "add_layer_norm" in str(block)
    eps = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 8e-2}[dtype]
    for ours, theirs in zip(gradients(), before, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            assert mx.allclose(a, b, rtol=eps, atol=4 * eps).item()
    zmlx.unpatch(model)
    assert mx.array_equal(model(x, residual), before[0][0])


@pytest.mark.parametrize(
    "residual",
    [drawn(24, seed=4), drawn(1, 1, 24, seed=4), 2.0, drawn(2, 5, 1, seed=4),
     drawn(2, 5, 24, seed=4, dtype=mx.bfloat16)],
    ids=["vector", "row", "number", "column", "bfloat16"],
)  # fmt: skip
def test_another_second_array_is_added_as_it_is(residual):
    model, x = Plain(), drawn(2, 5, 40, seed=3)
    before = model(x, residual)
    assert "residual_norm" in zmlx.patch(model).kinds()
    assert mx.allclose(model(x, residual), before, atol=1e-5).item()
    assert mx.allclose(model(x, residual=residual), before, atol=1e-5).item()
    with pytest.raises(TypeError, match="residual"):
        model(x)


def test_a_sum_that_goes_by_an_argument_is_left_alone():
    assert "residual_norm" not in zmlx.patch(Output()).kinds()


class Turned(mnn.Module):
    """Needs a pair of arrays."""

    def __init__(self):
        super().__init__()
        self.project = mnn.Linear(24, 24)

    def __call__(self, x, positions):
        cos, sin = positions
        return self.project(x) * cos + sin


class Turning(mnn.Module):
    """Has children of another width, too."""

    def __init__(self):
        super().__init__()
        self.small, self.norm1, self.norm2 = mnn.RMSNorm(8), mnn.RMSNorm(24), mnn.RMSNorm(24)
        self.mix, self.feed = Turned(), mnn.Linear(24, 24)

    def __call__(self, x, positions):
        h = x + self.mix(self.norm1(x), positions)
        return h + self.feed(self.norm2(h))


def test_the_reason_names_what_was_not_given_and_the_child_that_needs_it():
    model, x = Turning(), drawn(2, 3, 24)
    positions = mx.ones((3, 24)), mx.zeros((3, 24))
    before = model(x, positions)
    report = zmlx.patch(model)
    assert report.kinds() == {"norm": 3}
    why = {skipped.path: skipped.why for skipped in report.skipped}
    assert why[""].startswith("its call cannot be captured with None for positions: mix: ")
    assert mx.allclose(model(x, positions), before, atol=1e-5).item()


class Table(mnn.Module):
    """Returns two arrays, and is no router."""

    def __init__(self):
        super().__init__()
        self.frequencies = mx.arange(4.0)

    def __call__(self, x):
        turned = mx.outer(mx.arange(x.shape[0]), self.frequencies)
        return mx.cos(turned), mx.sin(turned)


class Convolving(mnn.Module):
    """Its weights of three axes are no experts'."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = mnn.LayerNorm(24), mnn.LayerNorm(24)
        self.convolution = mnn.Conv1d(24, 24, 3, padding=1)

    def __call__(self, x):
        return self.out(x + 0.5 * self.convolution(self.norm(x)))


@pytest.mark.parametrize("model", [Table(), Convolving()], ids=["table", "convolution"])
def test_what_has_no_experts_is_not_said_to_route(model):
    assert not [s for s in zmlx.patch(model).skipped if "rout" in s.why or "expert" in s.why]


class Halves(mnn.Module):
    """A gated unit of one array."""

    def __init__(self, unit):
        super().__init__()
        self._unit = unit

    def __call__(self, x):
        return self._unit(*mx.split(x, 2, axis=-1))


class Slices(mnn.Module):
    def __call__(self, x):
        half = x.shape[-1] // 2
        return mnn.gelu(x[..., :half]) * x[..., half:]


@pytest.mark.parametrize(
    ("module", "op"),
    [
        (Halves(lambda a, b: mnn.silu(a) * b), "swiglu"),
        (Halves(lambda a, b: a * mnn.silu(b)), "swiglu"),
        (Halves(lambda a, b: mx.maximum(b, 0) * a), "reglu"),
        (mnn.GLU(), "glu"),
        (Slices(), "geglu"),
    ],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_a_gated_unit_of_one_array_is_found(module, op, dtype):
    model = mnn.Sequential(module)
    x, dy = drawn(3, 7, 34, seed=1, dtype=dtype), drawn(3, 7, 17, seed=2, dtype=dtype)
    before = mx.vjp(model, [x], [dy])
    report = zmlx.patch(model, mode="training")
    assert [(r.kind, r.op) for r in report.replaced] == [("gated", op)]
    eps = {mx.float32: 1e-5, mx.float16: 1e-2, mx.bfloat16: 8e-2}[dtype]
    for (ours,), (theirs,) in zip(mx.vjp(model, [x], [dy]), before, strict=True):
        assert ours.dtype == theirs.dtype
        assert mx.allclose(ours, theirs, rtol=eps, atol=4 * eps).item()
    with pytest.raises(ValueError, match=r"split|divide|shape"):
        mx.eval(model(drawn(3, 7)))
    zmlx.unpatch(model)
    assert model.layers[0] is module


def test_a_unit_over_another_axis_runs_where_that_is_the_last():
    model = mnn.Sequential(mnn.GLU(axis=1))
    arrays = drawn(6, 8), drawn(3, 4, 5), drawn(3, 4, 6)
    before = [model(x) for x in arrays]
    assert zmlx.patch(model).kinds() == {"gated": 1}
    for x, want in zip(arrays, before, strict=True):
        assert mx.allclose(model(x), want, atol=1e-6).item()
