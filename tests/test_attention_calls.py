"""Calls of scaled_dot_product_attention that were looked at before."""

import weakref

import mlx.core as mx
import pytest
from attention_oracle import arrays, assert_right, assert_right_gradients, qkv

from zmlx.kernels import scaled_dot_product_attention as attention


@pytest.mark.parametrize("queries", [37, 3])
@pytest.mark.parametrize("keeps", [None, True, False])
def test_a_repeated_call_goes_by_its_own_arrays(queries, keeps):
    for seed in range(3):
        (scores,) = arrays((queries, 70), seed=seed + 7)
        mask = scores > 0 if keeps else scores if keeps is False else None
        values = [*qkv(queries=queries, seed=seed), mask, mx.array([0.5, float(seed)])]
        assert_right(attention(*values), values)


@pytest.mark.parametrize("queries", [37, 3])
def test_each_option_of_a_repeated_call_counts(queries):
    values = qkv(queries=queries)
    several = [{}, {"scale": 0.3}, {"scale": 0.4}, {"causal": True}, {"window": 9}, {"window": 40},
               {"softcap": 1.0}, {"softcap": 2.0}, {"return_lse": True}]  # fmt: skip
    for _ in range(2):
        for options in several:
            assert_right(attention(*values, **options), values, **options)


@pytest.mark.parametrize("queries", [37, 3])
def test_a_repeated_call_takes_masks_of_each_dtype_and_shape(queries):
    values = qkv(queries=queries)
    for _ in range(2):
        for shape in ((queries, 70), (1, 70), (70,), (1, 1, queries, 1), (1, 2, queries, 70)):
            (scores,) = arrays(shape, seed=3)
            for mask in (scores > 0, scores, scores.astype(mx.float16)):
                assert_right(attention(*values, mask), [*values, mask])


@pytest.mark.parametrize(("name", "good", "bad"), [
    ("causal", True, 1), ("window", 1, True), ("window", 1, 1.0), ("softcap", 1.0, True),
    ("return_lse", False, 0), ("scale", 1.0, True), ("scale", 1.0, mx.array(1.0)),
])  # fmt: skip
def test_an_option_that_equals_a_good_one_is_refused(name, good, bad):
    values = qkv()
    attention(*values, **{name: good})
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"\[scaled_dot_product_attention\] '{name}' must be"):
            attention(*values, **{name: bad})


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16], ids=str)
@pytest.mark.parametrize("queries", [37, 3])
def test_a_call_keeps_none_of_its_arrays(queries, dtype):
    values = [*qkv(queries=queries), mx.zeros((queries, 70)), mx.zeros((2,))]
    values[0] = values[0].astype(dtype)
    for _ in range(2):
        mx.eval(attention(*values))
    alive = [weakref.ref(x) for x in values]
    del values
    assert [x() for x in alive] == [None] * len(alive)


@pytest.mark.parametrize("queries", [37, 3])
def test_a_call_of_mixed_dtypes_leaves_no_memory(queries):
    """What an array was cast to is not kept, either."""

    def run(keys):
        q, k, v = qkv(queries=queries, keys=keys, d=256)
        mx.eval(attention(q.astype(mx.float16), k, v))

    run(70)
    before = mx.get_active_memory()
    run(71)
    assert mx.get_active_memory() - before < 4096  # constants of a launch; q has 6144 bytes or more


@pytest.mark.parametrize("queries", [37, 3])
def test_a_repeated_call_has_gradients(queries):
    """What is found for arrays is not what a gradient needs, nor the other way round."""
    q, k, v = qkv(queries=queries)
    (cotangent,) = arrays((1, 2, queries, 8), seed=5)
    for _ in range(2):
        assert_right(attention(q, k, v), [q, k, v])
        assert_right_gradients(attention, [q, k, v], (0, 1, 2), [cotangent])
