"""Dropout: the generator, the statistics of its masks, and who sees the same mask."""

import ctypes
import platform
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import zmlx
from zmlx import launch, metal, msl, philox
from zmlx.kernels import (
    add_layer_norm,
    dropout,
    dropout_add_layer_norm,
    dropout_add_rms_norm,
    layer_norm,
    layer_norm_dropout,
    rms_norm_dropout,
)

#: counter, key and words of the authors' own test file (Random123, kat_vectors).
VECTORS = (
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def words(*values):
    return tuple(mx.array(v, dtype=mx.uint64) for v in values)


def mask(shape, p=0.5, **options):
    """1 where an element is kept."""
    return np.array(dropout(mx.ones(shape), p, **options)) != 0


@pytest.mark.parametrize("counter, key, expected", VECTORS)
def test_philox_gives_the_published_words(counter, key, expected):
    got = philox.philox(words(*counter), words(*key))
    assert tuple(int(w) for w in got) == expected


def test_the_kernel_draws_the_words_of_the_plain_arrays():
    kernel = metal.kernel(
        name="philox", input_names=["counter", "key"], output_names=["out"],
        header=msl.header_for("zmlx_philox"),
        source="""
            uint i = thread_position_in_grid.x;
            zmlx_words w = zmlx_philox(counter[i], key[i]);
            out[4 * i] = w.a;
            out[4 * i + 1] = w.b;
            out[4 * i + 2] = w.c;
            out[4 * i + 3] = w.d;
        """,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    counter, key = (rng.integers(0, 2**64, 1000, dtype=np.uint64) for _ in range(2))
    counter[:2], key[:2] = (0, 2**64 - 1), (0, 2**64 - 1)
    got = kernel(
        mx.array(counter), mx.array(key), grid=(1000, 1, 1),
        output_shapes=[(4000,)], output_dtypes=[mx.uint32],
    )  # fmt: skip
    low = np.uint64(2**32 - 1)
    parts = [counter & low, counter >> np.uint64(32), 0 * counter, 0 * counter]
    want = philox.philox(
        tuple(map(mx.array, parts)), (mx.array(key & low), mx.array(key >> np.uint64(32)))
    )
    np.testing.assert_array_equal(np.array(got).reshape(1000, 4), np.array(mx.stack(want, -1)))


LEVELS = ["x86-64", "x86-64-v3", "native"] if platform.machine() == "x86_64" else ["native"]


@pytest.mark.parametrize("level", LEVELS)
def test_the_vectors_of_every_processor_draw_the_same_numbers(level, tmp_path):
    prelude = Path(zmlx.__file__).parent / "native" / "prelude" / "random.h"
    source, library = tmp_path / "draw.cc", tmp_path / "draw.so"
    source.write_text(
        "#include <cstdint>\nnamespace metal { using uint = unsigned; using ulong = uint64_t; }\n"
        "using namespace metal;\n"
        + prelude.read_text()
        + """
        extern "C" void draw(float* out, uint count, uint64_t first, uint64_t key) {
            ZMLX_UNIFORMS(out, count, first, key);
        }"""
    )
    command = ["g++", "-std=c++20", "-O2", f"-march={level}", "-w", "-shared", "-fPIC"]
    done = subprocess.run([*command, "-o", library, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    draw = ctypes.CDLL(str(library)).draw
    first, key = 2**32 - 5, 2**40 + 3
    for count in (8, 24, 32, 64, 128, 256, 1000):
        got = np.empty(count, np.float32)
        pointer = got.ctypes.data_as(ctypes.c_void_p)
        draw(pointer, ctypes.c_uint(count), ctypes.c_uint64(first), ctypes.c_uint64(key))
        start = mx.array([first, key], mx.uint64)
        want = philox.uniform(mx.arange(count), start[0], start[1])
        np.testing.assert_array_equal(got, np.array(want))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_keep_rate_is_within_five_sigma(p):
    n = 10**7
    kept = mask((n,), p, seed=1).sum()
    assert abs(kept - n * (1 - p)) < 5 * (n * p * (1 - p)) ** 0.5


def test_the_mean_of_what_is_kept_is_that_of_the_input():
    y = np.array(dropout(mx.ones((10**6,)), 0.25, seed=2))
    np.testing.assert_array_equal(np.unique(y), np.float32([0, 4 / 3]))
    assert abs(y.mean() - 1) < 5 * (0.25 / 0.75 / 10**6) ** 0.5


def correlation(a, b):
    """In standard deviations of independent masks."""
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / (a * a).sum() ** 0.5 / (b * b).sum() ** 0.5 * a.size**0.5


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8, 10, 16, 31, 32, 33, 64, 1024, 2048, 4096])
def test_elements_do_not_correlate_at_any_lag(lag):
    drawn = mask((10**6,), 0.1, seed=3).astype(float)
    assert abs(correlation(drawn[:-lag], drawn[lag:])) < 5


@pytest.mark.parametrize("p", [2.0**-12, 1 / 256, 0.5 + 2.0**-17, 1 - 2.0**-12])
def test_numbers_of_one_word_drop_together_by_chance_only(p):
    """Elements i and i + 4 of eight take one word, with its halves exchanged."""
    n = 2**23
    kept = mask((n,), p, seed=10).reshape(-1, 2, 4)
    rare = kept if p > 0.5 else ~kept
    chance = min(p, 1 - p)
    for half in (0, 1):
        count = rare[:, half].sum()
        assert abs(count - n / 2 * chance) < 5 * (n / 2 * chance) ** 0.5
    both = (rare[:, 0] & rare[:, 1]).sum()
    assert abs(both - n / 2 * chance**2) < 5 * (n / 2 * chance**2) ** 0.5 + 1


def test_rows_do_not_correlate():
    drawn = mask((64, 4096), seed=4).astype(float)
    for i in range(64):
        for k in range(i):
            assert abs(correlation(drawn[i], drawn[k])) < 6


@pytest.mark.parametrize("step", [1, 2, 2**16, 2**32])
def test_seeds_give_independent_masks(step):
    first, second = (mask((10**6,), seed=s).astype(float) for s in (5, 5 + step))
    for lag in range(8):
        assert abs(correlation(first[lag:], second[: 10**6 - lag])) < 5
        assert abs(correlation(second[lag:], first[: 10**6 - lag])) < 5


def test_gaps_between_drops_are_geometric():
    """A generator with a short period or a lattice shows first in the distances between drops."""
    p = 0.1
    gaps = np.diff(np.flatnonzero(~mask((10**6,), p, seed=6)))
    expected = gaps.size * p * (1 - p) ** np.arange(60)
    counts = np.bincount(gaps, minlength=61)[1:61]
    chi2 = ((counts - expected) ** 2 / expected).sum()
    # 60 degrees of freedom: mean 60, standard deviation sqrt(120).
    assert abs(chi2 - 60) < 5 * 120**0.5


def test_offset_continues_the_stream():
    whole = mask((1000,), seed=7)
    np.testing.assert_array_equal(whole[400:], mask((600,), seed=7, offset=50))


def test_a_counter_past_32_bits_is_another_one():
    assert (mask((1000,), seed=7) != mask((1000,), seed=7, offset=2**32)).any()
    assert (mask((1000,), seed=7) != mask((1000,), seed=7 + 2**32)).any()


def test_the_backward_drops_what_the_forward_dropped():
    x = mx.random.normal((37, 129))
    (y,), (dx,) = mx.vjp(lambda x: [dropout(x, 0.4, seed=8)], [x], [mx.ones_like(x)])
    np.testing.assert_array_equal(np.array(y) == 0, np.array(dx) == 0)
    np.testing.assert_array_equal(np.unique(np.array(dx)), np.float32([0, 1 / np.float32(0.6)]))


@pytest.mark.parametrize("shape", [(3, 7), (5, 4096), (2049,)])
def test_both_geometries_draw_the_same_mask(shape):
    cpu = mask(shape, seed=9)
    with launch.geometry("gpu"):
        np.testing.assert_array_equal(cpu, mask(shape, seed=9))


def test_p_of_zero_keeps_everything():
    x = mx.random.normal((1000,))
    np.testing.assert_array_equal(np.array(dropout(x, 0.0, seed=1)), np.array(x))


def test_p_near_one_keeps_little_and_is_finite():
    y = np.array(dropout(mx.ones((10**6,)), 0.9999, seed=1))
    assert 0 < (y != 0).sum() < 200
    assert np.isfinite(y).all()
    assert not np.array(dropout(mx.ones((1000,)), 1 - 1e-12, seed=1)).any()


@pytest.mark.parametrize("p", [-0.1, 1.0, 2.0, float("nan")])
def test_p_out_of_range(p):
    with pytest.raises(ValueError, match=r"\[dropout\] 'p' must be in \[0, 1\) but got"):
        dropout(mx.ones((4,)), p, seed=1)


@pytest.mark.parametrize("name", ["seed", "offset"])
def test_a_seed_or_offset_that_is_none(name):
    options = {"seed": 1, name: -1}
    with pytest.raises(ValueError, match=rf"\[dropout\] '{name}' must be in \[0, 2\^63\) but got"):
        dropout(mx.ones((4,)), 0.5, **options)
    options[name] = 1.5
    with pytest.raises(TypeError, match=rf"\[dropout\] '{name}' must be an int or an mx.array"):
        dropout(mx.ones((4,)), 0.5, **options)
    options[name] = mx.array([1, 2])
    with pytest.raises(ValueError, match=rf"\[dropout\] '{name}' must have shape"):
        dropout(mx.ones((4,)), 0.5, **options)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.int64, mx.uint64])
def test_seed_and_offset_may_be_arrays(dtype):
    want = mask((1000,), seed=3, offset=5)
    got = mask((1000,), seed=mx.array(3, dtype=dtype), offset=mx.array(5, dtype=dtype))
    np.testing.assert_array_equal(want, got)


def test_a_new_seed_offset_or_p_compiles_nothing():
    x = mx.ones((100,))
    mx.eval(dropout(x, 0.1, seed=1))
    before = metal.statistics()["compiles"]
    mx.eval([dropout(x, p, seed=s, offset=s) for p in (0.2, 0.3) for s in (2, 2**40)])
    assert metal.statistics()["compiles"] == before


@pytest.mark.parametrize("seeds, offsets", [((1, 2, 3), None), (None, (0, 5, 9)), ((4, 5, 6),) * 2],
                         ids=["seed", "offset", "both"])  # fmt: skip
def test_vmap_over_seed_and_offset(seeds, offsets):
    """x is not mapped, so that nothing but them tells how many results there are."""
    x = mx.random.normal((4, 6), key=mx.random.key(0))
    axes = (0 if seeds else None, 0 if offsets else None)
    every = tuple(mx.array(some or 7) for some in (seeds, offsets))
    for op in (dropout, lambda x, p, **o: dropout_add_rms_norm(x, x, None, p, **o)[1]):
        got = mx.vmap(lambda s, o, op=op: op(x, 0.5, seed=s, offset=o), in_axes=axes)(*every)
        wants = [
            op(x, 0.5, seed=seeds[i] if seeds else 7, offset=offsets[i] if offsets else 7)
            for i in range(3)
        ]
        np.testing.assert_allclose(np.array(got), np.array(mx.stack(wants)), rtol=1e-6)


def test_a_compiled_step_takes_the_seed_as_an_input():
    step = mx.compile(lambda x, seed: dropout(x, 0.5, seed=seed))
    x = mx.ones((1000,))
    for s in (1, 2):
        got = step(x, mx.array(s))
        np.testing.assert_array_equal(np.array(got), np.array(dropout(x, 0.5, seed=s)))


# ---- norms --------------------------------------------------------------------------------------


def test_layer_norm_dropout_is_dropout_of_layer_norm():
    x, w, b = mx.random.normal((9, 64)), mx.random.normal((64,)), mx.random.normal((64,))
    got = layer_norm_dropout(x, w, b, 0.3, seed=4, offset=9)
    want = dropout(layer_norm(x, w, b), 0.3, seed=4, offset=9)
    np.testing.assert_array_equal(np.array(got) == 0, np.array(want) == 0)
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-5, atol=1e-6)


def test_dropout_add_layer_norm_is_its_three_parts():
    x, r, w, b = (mx.random.normal(s) for s in [(9, 64), (9, 64), (64,), (64,)])
    got = dropout_add_layer_norm(x, r, w, b, 0.3, seed=4, offset=9)
    want = add_layer_norm(dropout(x, 0.3, seed=4, offset=9), r, w, b)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-5, atol=1e-6)


def test_rows_of_an_odd_width_share_no_counter():
    x = mx.ones((2000, 5))
    kept = np.array(rms_norm_dropout(x, None, 0.5, seed=3)) != 0
    for i in range(5):
        for k in range(5):
            assert abs(correlation(kept[:-1, i].astype(float), kept[1:, k].astype(float))) < 5


@pytest.mark.parametrize("width", [9, 16, 23])
def test_an_offset_of_eights_per_row_continues_the_stream_of_a_norm(width):
    x = mx.random.normal((12, width), key=mx.random.key(0))
    whole = rms_norm_dropout(x, p=0.5, seed=3)
    rest = rms_norm_dropout(x[5:], p=0.5, seed=3, offset=5 * -(-width // 8))
    assert mx.array_equal(whole[5:], rest)
    same = mx.array_equal(whole != 0, dropout(x, 0.5, seed=3) != 0).item()
    assert same == (width % 8 == 0)


def test_what_is_dropped_of_x_has_no_gradient_and_the_residual_has_one():
    x, r = mx.random.normal((9, 65)), mx.random.normal((9, 65))

    def loss(x, r):
        y, total = dropout_add_rms_norm(x, r, None, 0.5, seed=6)
        return (y * mx.cos(mx.arange(y.size)).reshape(y.shape)).sum() + (total * total).sum()

    dx, dr = (np.array(g) for g in mx.grad(loss, argnums=(0, 1))(x, r))
    dropped = np.array(dropout_add_rms_norm(x, mx.zeros_like(r), None, 0.5, seed=6)[1]) == 0
    assert not dx[dropped].any()
    np.testing.assert_allclose(dx[~dropped], 2 * dr[~dropped], rtol=1e-5)
