"""The experts of a mixture: any rows and weights, in blocks and row by row."""

import sys
import weakref

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zmlx
from zmlx import launch, registry
from zmlx.kernels import expert_ffn, moe_blocks, moe_experts
from zmlx.kernels.moe_blocks import block_size
from zmlx.testing import to_numpy

EXPERT_FFN = registry.get("expert_ffn")


def normal(*shape, seed=0, dtype=mx.float32):
    return mx.array(np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


@pytest.fixture
def in_blocks(monkeypatch):
    """Rows in blocks of an expert, as with OpenBLAS."""
    monkeypatch.setattr(moe_blocks, "is_openblas_used", lambda: True)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case", [c for c in (*EXPERT_FFN.cases, *EXPERT_FFN.long_cases) if c.sizes["R"]], ids=str
)
def test_blocks_match_float64(in_blocks, case, dtype):
    zmlx.testing.check_forward(EXPERT_FFN, case, dtype)
    zmlx.testing.check_gradient(EXPERT_FFN, case, dtype)


@pytest.mark.on_cpu
def test_half_precision_widens_no_weights_without_rows():
    w = normal(64, 96, 128, dtype=mx.bfloat16)
    down = w.swapaxes(-1, -2)
    mx.eval(w)
    offsets = mx.array([0] * 7 + [1] * 33 + [2] * 25)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    out = expert_ffn(normal(2, 128, dtype=mx.bfloat16), w, w, down, offsets)
    mx.eval(out)
    # One weight of all experts, widened, is twice as much as `w`; three of two rows are less.
    assert mx.get_peak_memory() - before < w.nbytes / 2


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
@given(
    rows=st.integers(1, 200), experts=st.integers(1, 20), d=st.integers(1, 20),
    h=st.integers(1, 20), seed=st.integers(0, 9),
)  # fmt: skip
def test_any_experts(blocks, rows, experts, d, h, seed):
    rng = np.random.default_rng(seed)
    offsets = np.sort(np.concatenate([[0, rows], rng.integers(0, rows + 1, experts - 1)]))
    shapes = (rows, d), (experts, h, d), (experts, h, d), (experts, d, h)
    values = [rng.standard_normal(s) for s in shapes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_blocks, "is_openblas_used", lambda: blocks)
        out = expert_ffn(*(mx.array(v).astype(mx.float32) for v in values), mx.array(offsets))
    for e in range(experts):
        x = values[0][offsets[e] : offsets[e + 1]]
        g = x @ values[1][e].T
        want = (g / (1 + np.exp(-g)) * (x @ values[2][e].T)) @ values[3][e].T
        np.testing.assert_allclose(
            to_numpy(out)[offsets[e] : offsets[e + 1]], want, rtol=1e-4,
            atol=1e-5 * np.abs(want).max(initial=1.0),
        )  # fmt: skip


def test_blocks_hold_about_a_quarter_of_an_experts_rows(in_blocks):
    assert [block_size(r, 8) for r in (1, 8, 32, 80, 1000, 10**6)] == [1, 1, 4, 8, 32, 128]


@pytest.mark.skipif(sys.platform != "linux", reason="only MLX on Linux runs on the reference BLAS")
def test_the_reference_blas_gets_no_blocks(monkeypatch):
    monkeypatch.setattr(moe_blocks, "is_openblas_used", lambda: False)
    assert {block_size(r, 8) for r in (1, 80, 10**6)} == {1}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_quantised_experts(bits, dtype):
    x, *weights = normal(20, 64, dtype=dtype), *(normal(5, 64, 64, seed=s) / 8 for s in (1, 2, 3))
    quantized = [mx.quantize(w.astype(dtype), group_size=32, bits=bits) for w in weights]
    offsets = mx.array([0, 3, 3, 11, 19, 20])
    out = expert_ffn(x, *quantized, offsets, group_size=32, bits=bits)
    exact = [mx.dequantize(*q, group_size=32, bits=bits).astype(mx.float32) for q in quantized]
    want = expert_ffn(x.astype(mx.float32), *exact, offsets)
    assert out.dtype == dtype
    # Hidden rows are rounded to the dtype between the products.
    tolerance = 1e-5 if dtype == mx.float32 else 2e-2
    np.testing.assert_allclose(
        to_numpy(out), to_numpy(want), rtol=tolerance,
        atol=tolerance * np.abs(to_numpy(want)).max(),
    )  # fmt: skip


def test_quantised_weights_are_checked():
    x, offsets = normal(4, 64), mx.array([0, 2, 4])
    good = mx.quantize(normal(2, 64, 64), group_size=32, bits=4)
    narrow = mx.quantize(normal(2, 64, 32), group_size=32, bits=4)
    with pytest.raises(TypeError, match=r"\[expert_ffn\] 'up' must be \(weight, scales, biases\)"):
        expert_ffn(x, good, normal(2, 64, 64), good, offsets, group_size=32)
    with pytest.raises(ValueError, match=r"\[expert_ffn\] 'gate' must have shape \(2, 64, 64\)"):
        expert_ffn(x, narrow, good, good, offsets, group_size=32)
    with pytest.raises(ValueError, match=r"'bits' must be"):
        expert_ffn(x, good, good, good, offsets, group_size=32, bits=7)
    with pytest.raises(ValueError, match=r"'gate' must have a scale and a bias for every 64 of"):
        expert_ffn(x, good, good, good, offsets)
    with pytest.raises(ValueError, match=r"'offsets' must have shape \(3,\) but got \(2,\)"):
        expert_ffn(x, good, good, good, offsets[:2], group_size=32)
    one = [part[0] for part in good]
    with pytest.raises(ValueError, match=r"'up' must have a weight of three axes but got \(64,"):
        expert_ffn(x, good, one, good, offsets, group_size=32)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_quantised_experts_give_the_dtype_of_the_rows(dtype):
    x, offsets = normal(4, 64, dtype=dtype), mx.array([0, 2, 4])
    weight = mx.quantize(normal(2, 64, 64), group_size=32, bits=4)
    assert weight[1].dtype == mx.float32
    out, dx = mx.value_and_grad(
        lambda x: expert_ffn(x, weight, weight, weight, offsets, group_size=32).sum()
    )(x)
    assert out.dtype == dx.dtype == dtype


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_no_experts_and_rows_of_no_width(target):
    with zmlx.target(target):
        with pytest.raises(ValueError, match=r"'gate' must have at least one expert but got 0"):
            expert_ffn(
                mx.ones((2, 3)), mx.ones((0, 4, 3)), mx.ones((0, 4, 3)), mx.ones((0, 3, 4)),
                mx.array([0]),
            )  # fmt: skip
        y = expert_ffn(
            mx.ones((2, 0)), mx.ones((1, 4, 0)), mx.ones((1, 4, 0)), mx.ones((1, 0, 4)),
            mx.array([0, 2]),
        )  # fmt: skip
    assert y.shape == (2, 0)


# ---- offsets out of range ------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", [[0, 5, 3, 8], [1, 3, 5, 8], [0, 3, 5, 9], [-1, 3, 5, 8]])
def test_offsets_that_do_not_ascend_raise_at_eval(offsets):
    w = normal(3, 6, 4)
    out = expert_ffn(normal(8, 4), w, w, w.swapaxes(-1, -2), mx.array(offsets))
    with pytest.raises(RuntimeError, match=r"'offsets' must be in range"):
        mx.eval(out)


def test_kernels_of_as_many_numbers_of_rows_are_kept_as_of_shapes():
    assert moe_blocks._owners.cache_info().maxsize == launch.SHAPES_KEPT


def test_rows_without_an_expert_are_nan():
    w = normal(3, 6, 4)
    out = expert_ffn(normal(8, 4), w, w, w.swapaxes(-1, -2), mx.array([0, 2, 2, 5]))
    assert np.isnan(to_numpy(out)).all(axis=-1).tolist() == [False] * 5 + [True] * 3


def test_rows_as_matrices_have_the_strides_of_rows():
    """MLX's sorted products on a GPU go by them, even of an axis of one."""
    x = mx.random.normal((5, 7))
    assert memoryview(x[:, None]).strides == (28, 4, 4)  # which is read wrongly there
    assert memoryview(moe_experts.matrices(x)).strides == (28, 28, 4)
    assert moe_experts.matrices(x[:0]).shape == (0, 1, 7)


def drawn(seed, dtype=mx.float32):
    """Rows, weights and offsets of three experts, of which the second ends anywhere."""
    keys = mx.random.split(mx.random.key(seed), 4)
    shapes = ((12, 32), (3, 64, 32), (3, 64, 32), (3, 32, 64))
    arrays = [
        mx.random.normal(shape, key=k).astype(dtype) for k, shape in zip(keys, shapes, strict=True)
    ]
    return *arrays, mx.array([0, 3 + seed, 9 + seed, 12])


@pytest.mark.parametrize("blocks", [1, 4])
def test_a_repeated_call_is_right_for_other_values(blocks, monkeypatch):
    monkeypatch.setattr(moe_experts, "block_size", lambda rows, experts: blocks)
    for seed in range(3):
        arrays = drawn(seed)
        y, want = expert_ffn(*arrays), moe_experts.expert_ffn_reference(*arrays)
        np.testing.assert_allclose(to_numpy(y), to_numpy(want), rtol=1e-4, atol=1e-2)


@pytest.mark.on_cpu
def test_a_repeated_call_takes_blocks_for_the_blas_that_there_is_then(monkeypatch):
    asked = []

    def counted(rows, experts):
        asked.append(rows)
        return 1

    monkeypatch.setattr(moe_experts, "block_size", counted)
    for _ in range(3):
        expert_ffn(*drawn(0))
    assert len(asked) == 3


def test_a_repeated_call_of_quantised_weights_is_right_for_others():
    for seed in range(3):
        x, gate, up, down, offsets = drawn(seed)
        for bits in (4, 8):
            packed = [mx.quantize(w, group_size=32, bits=bits) for w in (gate, up, down)]
            wide = [mx.dequantize(*w, group_size=32, bits=bits) for w in packed]
            y = expert_ffn(x, *packed, offsets, group_size=32, bits=bits)
            want = moe_experts.expert_ffn_reference(x, *wide, offsets)
            np.testing.assert_allclose(to_numpy(y), to_numpy(want), rtol=1e-4, atol=1e-2)


def test_a_bad_call_raises_after_a_good_one():
    x, gate, up, down, offsets = drawn(0)
    packed = [mx.quantize(w, group_size=32, bits=4) for w in (gate, up, down)]
    for _ in range(2):
        expert_ffn(x, gate, up, down, offsets)
        expert_ffn(x, *packed, offsets, group_size=32, bits=4)
        for arrays, options, message in (
            ((x, gate, up, down, offsets), {"bits": 4}, r"'bits' must be None"),
            ((x, gate, up, gate, offsets), {}, r"'down' must have shape"),
            ((x, gate, up, down, offsets[:3]), {}, r"'offsets' must have shape"),
            ((x, *packed, offsets), {"group_size": 32, "bits": 4.0}, r"'bits' must be an int"),
            ((x, *packed, offsets), {"group_size": 64}, r"'gate' must have a scale and a bias"),
            ((x, *packed[:2], down, offsets), {"group_size": 32}, r"'down' must be \(weight"),
            ((x, *packed[:2], packed[2][:2], offsets), {}, r"'down' must be \(weight"),
            ((x, packed[0], (*packed[1][:2], None), packed[2], offsets), {}, r"'up' must be an mx"),
        ):
            with pytest.raises((TypeError, ValueError), match=rf"\[expert_ffn\] {message}"):
                expert_ffn(*arrays, **options)


def test_no_array_of_a_call_is_kept():
    arrays = list(drawn(0))
    packed = [mx.quantize(w, group_size=32, bits=4) for w in arrays[1:4]]
    mx.eval(expert_ffn(*arrays), expert_ffn(arrays[0], *packed, arrays[4], group_size=32, bits=4))
    kept = [weakref.ref(y) for y in (*arrays, *(y for w in packed for y in w))]
    del arrays, packed
    assert [y() for y in kept] == [None] * len(kept)
