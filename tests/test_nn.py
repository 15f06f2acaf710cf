"""Layers are drop-in for mlx.nn's, and run what the table says."""

import importlib
import inspect
import math
import subprocess
import sys
import time

import mlx.core as mx
import mlx.nn as mnn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

import zmlx
import zmlx.nn as nn
from zmlx import choice
from zmlx.__main__ import main
from zmlx.choice import Measurement, decide

#: mlx.nn's layers that zmlx has, with arguments of the constructor.
LAYERS = [
    ("RMSNorm", (24,), {}),
    ("RMSNorm", (24,), {"eps": 1e-3}),
    ("LayerNorm", (24,), {}),
    ("LayerNorm", (24,), {"bias": False}),
    ("LayerNorm", (24,), {"affine": False, "eps": 1e-3}),
    ("GroupNorm", (4, 24), {}),
    ("GroupNorm", (4, 24), {"affine": False, "pytorch_compatible": True}),
    ("Dropout", (0.25,), {}),
    ("RoPE", (24,), {}),
    ("RoPE", (16,), {"traditional": True, "base": 500.0, "scale": 0.5}),
    ("CELU", (0.5,), {}),
    ("ELU", (0.5,), {}),
    ("GELU", (), {}),
    ("GELU", ("precise",), {}),
    ("GELU", ("tanh",), {}),
    ("GELU", ("fast",), {}),
    ("GLU", (), {}),
    ("GLU", (1,), {}),
    ("LeakyReLU", (0.2,), {}),
    *((name, (), {}) for name in (
        "HardTanh", "Hardswish", "LogSigmoid", "Mish", "ReLU", "ReLU2", "SELU", "SiLU", "Sigmoid",
        "Softmax", "Softplus", "Softsign", "Tanh",
    )),
]  # fmt: skip
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
EPS = {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


@pytest.fixture(autouse=True)
def seed():
    mx.random.seed(11)


def both(name, arguments, keywords):
    ours, theirs = (getattr(module, name)(*arguments, **keywords) for module in (nn, mnn))
    parameters = tree_map(lambda p: p + 0.3 * mx.random.normal(p.shape), theirs.parameters())
    theirs.update(parameters)
    ours.update(parameters)
    ours.eval()
    theirs.eval()
    return ours, theirs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "arguments", "keywords"), LAYERS)
def test_layers_compute_what_mlx_computes(name, arguments, keywords, dtype):
    ours, theirs = both(name, arguments, keywords)
    x = (2 * mx.random.normal((2, 6, 24))).astype(dtype)
    ours.set_dtype(dtype)
    theirs.set_dtype(dtype)
    base = theirs(x)
    theirs.set_dtype(mx.float32)
    reference = theirs(x.astype(mx.float32))
    with zmlx.prefer("zmlx"):
        y = ours(x)
    assert (y.shape, y.dtype) == (base.shape, base.dtype)
    own = mx.abs(base - reference).max().item()
    # In float32 the reference is MLX's own, whose exp on the CPU is off by up to 63 units.
    units = 128 if dtype == mx.float32 else 4
    bound = 2 * own + units * EPS[dtype] * mx.abs(reference).max().item()
    assert mx.abs(y - reference).max().item() <= bound


@pytest.mark.parametrize("x", [0.5, 2, np.ones((2, 24), np.float32), [1.0]], ids=type)
@pytest.mark.parametrize("name, arguments, keywords", LAYERS)
def test_what_is_no_array_is_left_to_mlx(name, arguments, keywords, x):
    def outcome(layer):
        try:
            return np.array(layer(x)).tolist()
        except Exception as error:
            return type(error)

    ours, theirs = both(name, arguments, keywords)
    with zmlx.prefer("zmlx"):
        assert outcome(ours) == outcome(theirs)


@pytest.mark.parametrize(("name", "arguments", "keywords"), LAYERS)
def test_layers_look_like_mlxs(name, arguments, keywords):
    ours, theirs = both(name, arguments, keywords)
    assert isinstance(ours, type(theirs))
    assert [k for k, _ in tree_flatten(ours.parameters())] == [
        k for k, _ in tree_flatten(theirs.parameters())
    ]
    shown = repr(theirs)[:-1]
    assert repr(ours) in [f"{shown}{', ' * (shown[-1] != '(')}runs={r})" for r in ("zmlx", "mlx")]
    assert inspect.signature(type(ours).__init__) == inspect.signature(type(theirs).__init__)
    assert inspect.getdoc(type(ours))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("RMSNorm", (8, -1.0)),
        ("LayerNorm", (8, 0.0)),
        ("GroupNorm", (3, 8)),
        ("GroupNorm", (0, 8)),
        ("Dropout", (1.0,)),
        ("GELU", ("rough",)),
        ("MultiHeadAttention", (10, 3)),
    ],
)
def test_constructors_raise_mlxs_errors(name, arguments):
    with pytest.raises(ValueError) as theirs:  # noqa: PT011  (the message is compared below)
        getattr(mnn, name)(*arguments)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        getattr(nn, name)(*arguments)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.GatedMLP(8, 16, gate="xglu"), r"\[GatedMLP\] 'gate' must be one of .* xglu"),
        (lambda: nn.GeGLU(8, 16, approx="fast"), r"\[GeGLU\] 'approx' must be one of .* 'fast'"),
        (lambda: nn.Attention(32, 4, 3), r"\[Attention\] 'n_kv_heads' must divide 4 heads .* 3"),
        (lambda: nn.Attention(30, 4), r"'dims' must be divisible by 4 heads but got 30"),
        (lambda: zmlx.prefer("cuda"), r"\[prefer\] 'which' must be one of auto, zmlx, mlx"),
    ],
)
def test_our_own_constructors_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sizes_of_attention_are_ints():
    for layer in (nn.Attention, nn.PagedAttention):
        for name in ("n_heads", "n_kv_heads", "head_dim"):
            for value in (4.0, True, "4"):
                sizes = {"n_heads": 4, "n_kv_heads": 4, "head_dim": 8, name: value}
                if layer is nn.Attention:
                    sizes["dims"] = 32
                with pytest.raises(TypeError, match=rf"'{name}' must be an int but got"):
                    layer(**sizes)


def test_only_modules_are_converted():
    with pytest.raises(TypeError, match=r"\[convert\] 'module' must be an mlx.nn.Module but got"):
        nn.convert([])


class Tree(mnn.Module):
    def __init__(self):
        super().__init__()
        self.first = mnn.Linear(24, 24)
        self.stack = [mnn.LayerNorm(24), mnn.GELU(), {"inner": mnn.RMSNorm(24)}]
        self.norm = mnn.GroupNorm(4, 24)
        self.attention = mnn.MultiHeadAttention(24, 4)

    def __call__(self, x):
        y = self.stack[2]["inner"](self.stack[1](self.stack[0](self.first(x))))
        y = self.norm(y)
        return self.attention(y, y, y)


def test_a_tree_converts_in_one_call_and_its_checkpoint_loads_both_ways(tmp_path):
    file = str(tmp_path / "tree.safetensors")
    x = mx.random.normal((2, 6, 24))
    theirs, ours = Tree(), nn.convert(Tree())
    assert type(ours.stack[2]["inner"]) is nn.RMSNorm
    assert type(ours.attention) is nn.MultiHeadAttention
    theirs.save_weights(file)
    ours.load_weights(file)
    assert mx.allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-5).item()
    ours.save_weights(file)
    again = Tree()
    again.load_weights(file)
    assert mx.array_equal(again(x), theirs(x))
    with pytest.raises(ValueError, match=r"Missing|not in model|Expected"):
        nn.RMSNorm(7).load_weights(file)


def test_names_that_zmlx_has_no_kernel_for_are_mlxs_own():
    assert nn.Linear is mnn.Linear
    assert nn.losses.mse_loss is mnn.losses.mse_loss
    assert nn.value_and_grad is mnn.value_and_grad
    with pytest.raises(AttributeError):
        nn.NoSuchLayer  # noqa: B018
    assert {"Linear", "RMSNorm", "silu"} <= set(dir(nn))


def test_star_imports_bind_what_mlxs_do():
    for name in ("nn", "nn.losses"):
        ours, theirs = {}, {}
        exec(f"from zmlx.{name} import *", ours)
        exec(f"from mlx.{name} import *", theirs)
        assert theirs.keys() <= ours.keys()
    assert ours["cross_entropy"] is nn.losses.cross_entropy


def test_submodules_of_mlxs_are_imported_under_zmlx():
    ours = importlib.import_module("zmlx.nn.losses")
    assert ours is nn.losses
    assert ours.cross_entropy is not mnn.losses.cross_entropy
    for name in ("init", "utils", "layers", "layers.linear"):
        assert importlib.import_module(f"zmlx.nn.{name}") is sys.modules[f"mlx.nn.{name}"]
    from zmlx.nn.utils import value_and_grad

    assert value_and_grad is mnn.value_and_grad


def test_what_the_modules_of_layers_lack_is_mlxs_own():
    assert nn.activations.relu6 is mnn.relu6
    assert nn.dropout.Dropout2d is mnn.Dropout2d
    assert nn.normalization.BatchNorm is mnn.BatchNorm
    with pytest.raises(ImportError):
        importlib.import_module("zmlx.nn.no_such_module")


def test_dropout_follows_mlxs_seed_and_mode():
    layer, x = nn.Dropout(0.25), mx.ones((100, 64))
    mx.random.seed(1)
    one, two = layer(x), layer(x)
    mx.random.seed(1)
    assert mx.array_equal(layer(x), one)
    assert not mx.array_equal(one, two)
    assert abs((one == 0).mean().item() - 0.25) < 0.03
    assert mx.array_equal(layer.eval()(x), x)


def test_a_compiled_dropout_draws_anew():
    layer, x = nn.Dropout(0.5), mx.ones((64, 64))
    step = mx.compile(lambda x: layer(x), inputs=[mx.random.state], outputs=[mx.random.state])
    assert not mx.array_equal(step(x), step(x))


@pytest.mark.parametrize("gate", ["swiglu", "geglu", "geglu_tanh", "reglu", "glu"])
def test_gated_mlps(gate):
    layer, x = nn.GatedMLP(16, 24, bias=True, gate=gate), mx.random.normal((3, 5, 16))
    act = {"swiglu": mnn.silu, "geglu": mnn.gelu, "geglu_tanh": mnn.gelu_approx,
           "reglu": mnn.relu, "glu": mx.sigmoid}[gate]  # fmt: skip
    expected = layer.down_proj(act(layer.gate_proj(x)) * layer.up_proj(x))
    for which in ("zmlx", "mlx"):
        with zmlx.prefer(which):
            assert mx.allclose(layer(x), expected, rtol=1e-4, atol=1e-5).item()
    assert isinstance(nn.SwiGLU(8, 16), nn.GatedMLP)
    assert nn.GeGLU(8, 16, approx="tanh")._gate == "geglu_tanh"


# ---- losses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "mean"},
        {"reduction": "sum"},
        {"label_smoothing": 0.1},
        {"weights": mx.array([0.5, 1.0, 2.0])},
        {"weights": mx.array([0.5, 1.0, 2.0]), "reduction": "mean"},
    ],
)
def test_cross_entropy_is_mlxs(options):
    logits, targets = mx.random.normal((3, 11)), mx.array([4, 0, 10])
    expected = mnn.losses.cross_entropy(logits, targets, **options)
    assert mx.allclose(nn.losses.cross_entropy(logits, targets, **options), expected).item()
    soft = mx.softmax(mx.random.normal((3, 11)))
    expected = mnn.losses.cross_entropy(logits, soft, **options)
    assert mx.allclose(nn.losses.cross_entropy(logits, soft, **options), expected).item()


def test_a_mean_of_many_losses_in_half_precision_keeps_its_digits():
    logits, targets = mx.zeros((8192, 10), mx.bfloat16), mx.zeros((8192,), mx.int32)
    for reduction, expected in (("mean", math.log(10)), ("sum", 8192 * math.log(10))):
        loss = nn.losses.cross_entropy(logits, targets, reduction=reduction)
        assert loss.dtype == mx.bfloat16
        assert abs(loss.item() / expected - 1) < 2**-8


def test_cross_entropy_over_another_axis_and_wrong_options():
    logits, targets = mx.random.normal((11, 3)), mx.array([4, 0, 10])
    expected = mnn.losses.cross_entropy(logits, targets, axis=0)
    assert mx.allclose(nn.losses.cross_entropy(logits, targets, axis=0), expected).item()
    with pytest.raises(ValueError, match="Invalid reduction"):
        nn.losses.cross_entropy(logits.T, targets, reduction="product")
    with pytest.raises(ValueError, match="does not match logits shape"):
        nn.losses.cross_entropy(logits, targets)
    with pytest.raises(ValueError, match="Weights with shape"):
        nn.losses.cross_entropy(logits.T, targets, weights=mx.ones((2,)))


def test_linear_cross_entropy_is_cross_entropy_of_a_linear_layer():
    layer, x, targets = mnn.Linear(8, 11), mx.random.normal((2, 3, 8)), mx.array([[1, 2, 3]] * 2)

    def ours(x, weight, bias):
        return nn.losses.linear_cross_entropy(x, weight, targets, bias, reduction="mean")

    def theirs(x, weight, bias):
        return mnn.losses.cross_entropy(x @ weight.T + bias, targets, reduction="mean")

    arguments = (x, layer.weight, layer.bias)
    assert mx.allclose(ours(*arguments), theirs(*arguments)).item()
    every = (0, 1, 2)
    for a, b in zip(
        mx.grad(ours, every)(*arguments), mx.grad(theirs, every)(*arguments), strict=True
    ):
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-6).item()


# ---- the choice ---------------------------------------------------------------------------------

FASTER = Measurement("silu", "cpu", "float32", 128, 1024, zmlx=1e-5, mlx=3e-5)
SLOWER = Measurement("silu", "cpu", "float32", 1, 1024, zmlx=3e-5, mlx=1e-5)


@pytest.mark.parametrize(
    ("op", "target", "rows", "table", "expected"),
    [
        ("rms_norm", "cpu", 8, (), "zmlx (MLX has no fused form on cpu)"),
        ("rms_norm", "metal", 8, (), "mlx (not measured on metal)"),
        ("add_rms_norm", "metal", 8, (), "zmlx (MLX has no fused form on metal)"),
        ("dropout", "cuda", 8, (), "zmlx (MLX has no fused form on cuda)"),
        ("silu", "cpu", 8, (), "mlx (not measured on cpu)"),
        ("silu", "cpu", 100, (FASTER, SLOWER), "zmlx (3.00 times as fast at 128x1024)"),
        ("silu", "cpu", 2, (FASTER, SLOWER), "mlx (3.00 times as fast at 1x1024)"),
        ("silu", "metal", 100, (FASTER,), "mlx (not measured on metal)"),
    ],
)
def test_the_choice_is_a_function_of_the_table(op, target, rows, table, expected):
    assert str(decide(op, target, rows, 1024, "float32", table)) == expected
    assert decide(op, target, rows, 1024, "float32", table, "mlx").runs == "mlx"
    assert decide(op, target, rows, 1024, "float64", table, "zmlx").runs == "mlx"


def test_a_preference_holds_inside_its_context():
    layer = nn.SiLU()
    with zmlx.prefer("zmlx"):
        assert repr(layer) == "SiLU(runs=zmlx)"
        with zmlx.prefer("mlx"):
            assert repr(layer) == "SiLU(runs=mlx)"
        assert repr(layer) == "SiLU(runs=zmlx)"


def test_what_runs_is_what_was_chosen(monkeypatch):
    """The kernel is launched if and only if the choice says so."""
    from zmlx.nn import functional

    launched = []
    real = functional.kernels.rms_norm
    monkeypatch.setattr(functional.kernels, "rms_norm", lambda *a: launched.append(1) or real(*a))
    layer, x = nn.RMSNorm(8), mx.ones((2, 8))
    for which, count in (("zmlx", 1), ("mlx", 0)):
        launched.clear()
        with zmlx.prefer(which):
            mx.eval(layer(x))
        assert len(launched) == count


@pytest.mark.on_cpu
def test_the_machines_table_replaces_the_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "table_path", lambda: tmp_path / "measured.json")
    choice.forget()
    try:
        shipped = choice.choice("swiglu", (128, 1024), mx.float32)
        choice.write([Measurement("swiglu", "cpu", "float32", 128, 1024, zmlx=4e-5, mlx=1e-5)])
        assert str(choice.choice("swiglu", (128, 1024), mx.float32)) == (
            "mlx (4.00 times as fast at 128x1024)"
        )
        choice.write([Measurement("silu", "cpu", "float32", 1, 8, zmlx=4e-5, mlx=1e-5)])
        assert choice.choice("swiglu", (128, 1024), mx.float32).runs == "mlx"
        (tmp_path / "measured.json").write_bytes(b"damaged")
        choice.forget()
        assert choice.choice("swiglu", (128, 1024), mx.float32) == shipped
    finally:
        choice.forget()


def test_float64_and_integers_go_to_mlx():
    with zmlx.prefer("zmlx"), mx.stream(mx.cpu):
        x = mx.array(np.ones((2, 8)), dtype=mx.float64)
        assert nn.silu(x).dtype == mx.float64
        assert nn.relu(mx.array([-1, 2])).tolist() == [0, 2]


TABLE = [
    Measurement("swiglu", "cpu", "float32", 128, 1024, zmlx=1.0, mlx=2.0),
    Measurement("swiglu", "cpu", "float32", 128, 1024, zmlx=3.0, mlx=1.0, mode="both"),
]


@pytest.mark.parametrize(
    ("table", "training", "expected"),
    [
        (TABLE, False, "zmlx (2.00 times as fast at 128x1024)"),
        (TABLE, True, "mlx (3.00 times as fast at 128x1024 with its gradient)"),
        (TABLE[:1], True, "zmlx (2.00 times as fast at 128x1024)"),  # all that is known
        (TABLE[1:], False, "mlx (not measured on cpu)"),  # a gradient says nothing of inference
    ],
)
def test_training_goes_by_what_was_measured_with_the_gradient(table, training, expected):
    chosen = decide("swiglu", "cpu", 128, 1024, "float32", table, training=training)
    assert str(chosen) == expected


@pytest.mark.on_cpu
def test_a_layer_runs_another_way_where_its_gradient_is_slower(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "table_path", lambda: tmp_path / "measured.json")
    made = []

    def spied(*a, real=choice.choice, **k):
        made.append(real(*a, **k))
        return made[-1]

    monkeypatch.setattr(choice, "choice", spied)
    choice.forget()
    try:
        choice.write(TABLE)
        x = mx.ones((128, 1024))
        gated = nn.functional.gated["swiglu"]
        gated(x, x)
        mx.grad(lambda x: gated(x, x).sum())(x)
        assert [one.runs for one in made] == ["zmlx", "mlx"]
    finally:
        choice.forget()


def test_a_gradient_is_timed_with_the_forward(monkeypatch):
    from zmlx.cli import tune
    from zmlx.nn.functional import IMPLEMENTATIONS, Implementations

    gradients = []

    @mx.custom_function
    def slow_backward(x):
        return mx.exp(x)

    @slow_backward.vjp
    def _(x, cotangent, y):
        time.sleep(0.02)
        gradients.append(x.shape)
        return cotangent * y

    monkeypatch.setitem(IMPLEMENTATIONS, "slow", Implementations(mx.exp, slow_backward))
    alone = tune.measure("slow", "cpu", "float32", 4, 8, "forward")
    assert not gradients
    both = tune.measure("slow", "cpu", "float32", 4, 8, "both")
    assert set(gradients) == {(4, 8)}
    assert (alone.mode, both.mode) == ("forward", "both")
    assert both.mlx >= 0.02


def test_tune_measures_what_layers_choose():
    code = "from zmlx.__main__ import main; import sys; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "tune", "relu", "--dtype", "float32", "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + 2 * 4  # four shapes, without and with the gradient
    assert [line.split()[3] for line in lines[1:]] == ["forward", "both"] * 4
    assert "wrote" not in done.stdout
    wrong = subprocess.run(
        [sys.executable, "-c", code, "tune", "matmul"], capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2
    assert "[tune] 'OP' must be one of" in wrong.stderr


def test_tune_measures_nothing_where_no_table_is_kept(monkeypatch, capsys):
    monkeypatch.setenv("ZMLX_CACHE", "0")
    assert main(["tune", "relu"]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert "[tune] the table must be kept for other processes but the cache is not" in error


def test_a_patched_model_is_not_converted():
    model = mnn.Sequential(mnn.Linear(16, 16), mnn.RMSNorm(16))
    zmlx.patch(model)
    with pytest.raises(ValueError, match=r"\[convert\] 'module' must not be patched .* 1 patched"):
        nn.convert(model)
    zmlx.unpatch(model)
    assert isinstance(nn.convert(model).layers[1], nn.RMSNorm)


def test_the_table_that_comes_along_has_every_op_that_is_chosen():
    rows = choice._rows(choice._SHIPPED.read_bytes())
    assert {m.op for m in rows} == set(nn.functional.IMPLEMENTATIONS)
    assert (
        len({(m.op, m.dtype, m.rows, m.width) for m in rows})
        == len(rows)
        == 12 * len(nn.functional.IMPLEMENTATIONS)
    )


def test_hard_tanh_is_timed_and_chosen_like_other_activations():
    assert "hardtanh" in nn.functional.IMPLEMENTATIONS
    slow = Measurement("hardtanh", "cpu", "float32", 1, 64, zmlx=2.0, mlx=1.0)
    fast = Measurement("hardtanh", "cpu", "float32", 1, 64, zmlx=1.0, mlx=2.0)
    assert decide("hardtanh", "cpu", 1, 64, "float32", [slow]).runs == "mlx"
    assert decide("hardtanh", "cpu", 1, 64, "float32", [fast]).runs == "zmlx"
