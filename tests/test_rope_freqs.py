"""Frequencies of scaled contexts: equality with mlx-lm's classes, what they mean, errors."""

import re

import mlx.core as mx
import numpy as np
import pytest

from zmlx.kernels import rope, rope_freqs

LLAMA = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {
    "type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(32)],
    "long_factor": [1.0 + 2.0 * i for i in range(32)],
    "original_max_position_embeddings": 4096,
}
PART = {"type": "proportional", "partial_rotary_factor": 0.25, "factor": 8.0}


def factor_of(module):
    return getattr(module, "mscale", getattr(module, "_scale", 1.0))


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 2.5},
        {"type": "mrope", "mrope_section": [8, 12, 12]},
        LLAMA,
        {"type": "llama3", "factor": 8.0},
        YARN,
        {**YARN, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 24},
        {**YARN, "mscale": 0.7},
        {**YARN, "mscale_all_dim": 0.7},
        {**YARN, "type": "deepseek_yarn", "factor": 0.5},
        {**YARN, "original_max_position_embeddings": 2},
        LONG,
        PART,
        {"type": "proportional", "partial_rotary_factor": 0.3},
    ],
    ids=lambda s: "none" if s is None else s.get("type", s.get("rope_type")),
)
def test_it_turns_as_mlx_lm(scaling):
    utils = pytest.importorskip("mlx_lm.models.rope_utils")
    theirs = utils.initialize_rope(64, 500000.0, False, scaling, max_position_embeddings=131072)
    freqs, factor = rope_freqs(64, scaling, base=500000.0, max_position_embeddings=131072)
    if hasattr(theirs, "_freqs"):
        np.testing.assert_allclose(freqs, theirs._freqs, rtol=3e-6)
    assert factor == pytest.approx(factor_of(theirs))
    x = mx.array(np.random.default_rng(0).standard_normal((1, 2, 9, 64)), dtype=mx.float32)
    np.testing.assert_allclose(rope(factor * x, freqs=freqs, offset=70), theirs(x, offset=70),
                               atol=1e-3)  # fmt: skip


def test_dynamic_turns_as_mlx_lm():
    utils = pytest.importorskip("mlx_lm.models.rope_utils")
    scaling = {"type": "dynamic", "factor": 2.0}
    theirs = utils.initialize_rope(16, 10000.0, False, scaling, max_position_embeddings=32)
    x = mx.array(np.random.default_rng(0).standard_normal((1, 2, 9, 16)), dtype=mx.float32)
    for offset in (0, 70):
        freqs, _ = rope_freqs(16, scaling, max_position_embeddings=32, length=9 + offset)
        np.testing.assert_allclose(rope(x, freqs=freqs, offset=offset), theirs(x, offset=offset),
                                   atol=1e-4)  # fmt: skip


def test_the_length_chooses_the_factors_of_longrope():
    plain = np.array(rope_freqs(64)[0])
    for length, name in ((4096, "short"), (4097, "long"), (None, "long")):
        got, factor = rope_freqs(64, LONG, length=length, max_position_embeddings=131072)
        np.testing.assert_allclose(got, plain * LONG[f"{name}_factor"], rtol=1e-6)
        assert factor == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5)
    scaling = {**LONG, "short_mscale": 1.25, "long_mscale": 1.5}
    assert rope_freqs(64, scaling, length=5)[1] == 1.25
    assert rope_freqs(64, scaling)[1] == 1.5
    for entry in ({"factor": 32.0}, {"attention_factor": (17 / 12) ** 0.5}):
        assert rope_freqs(64, {**LONG, **entry})[1] == pytest.approx((1 + 5 / 12) ** 0.5)


def test_a_factor_of_longrope_goes_before_the_ratio_of_the_lengths():
    """As in transformers; mlx-lm does not read it."""
    for longest in (None, 131072):
        for factor, want in ((16.0, (1 + 4 / 12) ** 0.5), (0.5, 1.0)):
            scaling = {**LONG, "factor": factor}
            got = rope_freqs(64, scaling, max_position_embeddings=longest)[1]
            assert got == pytest.approx(want)
    scaling = {**LONG, "factor": 16.0, "attention_factor": 1.5}
    assert rope_freqs(64, scaling, max_position_embeddings=131072)[1] == 1.5


def test_yarn_keeps_short_waves_and_stretches_long_ones():
    plain = np.array(rope_freqs(128)[0])
    for truncate in (True, False):
        got, factor = rope_freqs(128, {**YARN, "truncate": truncate})
        stretched = np.array(got) / plain
        assert np.all(np.diff(stretched) > -1e-6)
        np.testing.assert_allclose(stretched[[0, -1]], [1, 4], rtol=1e-6)
        assert factor == pytest.approx(0.1 * np.log(4) + 1)
    assert rope_freqs(128, {**YARN, "attention_factor": 1.5})[1] == 1.5


def test_the_base_may_be_part_of_the_parameters():
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 81.0}
    np.testing.assert_allclose(rope_freqs(4, scaling)[0], [2, 18], rtol=1e-6)
    np.testing.assert_allclose(rope_freqs(4, scaling, base=100.0)[0], [2, 20], rtol=1e-6)


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"type": "cubic"}, "have a 'type' of default, mrope, linear"),
        ({"type": "linear"}, "have 'factor' for 'linear' but got ['type']"),
        ({"type": ["linear"]}, "have a 'type' of"),
        ({"type": "linear", "factor": 10**400}, "have a number more than 0 as 'factor'"),
        ({"type": "linear", "factor": "2"}, "have a number more than 0 as 'factor'"),
        ({"type": "linear", "factor": float("nan")}, "have a number more than 0 as 'factor'"),
        ({**LLAMA, "high_freq_factor": 1.0}, "have a number more than 1 as 'high_freq_factor'"),
        ({**YARN, "truncate": 1}, "have True or False as 'truncate'"),
        ({**YARN, "original_max_position_embeddings": 0}, "have a number more than 1 as 'original"),
        ({**LONG, "long_factor": [1.0]}, "have 32 numbers as 'long_factor' for 'longrope' but"),
        ({**LONG, "long_factor": [0] * 32}, "have positive numbers as 'long_factor'"),
        ({**PART, "partial_rotary_factor": 1.5}, "have a number in (0, 1] as 'partial_rotary"),
    ],
)
def test_scalings_that_are_wrong(scaling, message):
    with pytest.raises(ValueError, match=re.escape(f"[rope_freqs] 'scaling' must {message}")):
        rope_freqs(64, scaling)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"dims": 3}, ValueError, "'dims' must be even and positive but got 3."),
        ({"dims": 2**400}, ValueError, "'dims' must be at most 1048576 but got"),
        ({"length": 10**400}, ValueError, "'length' must be below 2^63 but got a larger int"),
        ({"max_position_embeddings": 10**400}, ValueError,
         "'max_position_embeddings' must be below 2^63 but got a larger int"),
        ({"dims": 4.0}, TypeError, "'dims' must be an int but got float."),
        ({"scaling": "yarn"}, TypeError, "'scaling' must be a dict but got str."),
        ({"base": 1.0}, ValueError, "'base' must be more than 1 and finite but got 1.0."),
        ({"length": 0}, ValueError, "'length' must be at least 1 but got 0."),
        ({"scaling": {"type": "dynamic", "factor": 2}}, ValueError,
         "'max_position_embeddings' must be given for 'dynamic' but got None."),
        ({"scaling": {**LONG, "long_factor": 2.0}}, ValueError,
         "'max_position_embeddings' must be given for 'longrope' without 'attention_factor' or "),
    ],
)  # fmt: skip
def test_errors(arguments, error, message):
    with pytest.raises(error, match=re.escape(f"[rope_freqs] {message}")):
        rope_freqs(**{"dims": 4} | arguments)
