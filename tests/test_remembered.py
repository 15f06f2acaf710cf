"""Ops whose calls are looked at once."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from zmlx import kernels, launch, native
from zmlx.remembered import Remembered


class Counted(Remembered):
    """With a place for what a test adds."""

    __slots__ = ("seen",)


@pytest.fixture
def counted():
    seen = []

    def find(x, y, *options):
        seen.append(options)
        if options and type(options[0]) is not int:
            raise TypeError(f"[op] 'n' must be an int but got {options[0]!r}.")
        return lambda x, y: x + (options[0] if options else 0)

    op = Counted(find)
    op.seen = seen
    return op


@pytest.mark.on_cpu
def test_a_call_is_looked_at_once_for_shapes_dtypes_and_options(counted):
    x = mx.array([1.0, 2.0])
    for _ in range(3):
        assert counted((x, None), (2,)).tolist() == [3.0, 4.0]
        assert counted((x * 2, None), (2,)).tolist() == [4.0, 6.0]
    assert len(counted.seen) == 1
    for arrays, options in [
        ((x, None), (3,)),
        ((x, x), (2,)),
        ((mx.zeros(3), None), (2,)),
        ((x.astype(mx.float16), None), (2,)),
        ((x[None], None), (2,)),
        ((x, None), ()),
    ]:
        before = len(counted.seen)
        counted(arrays, options)
        counted(arrays, options)
        assert len(counted.seen) == before + 1


@pytest.mark.on_cpu
@pytest.mark.parametrize("equal", [True, 1.0, np.int64(1), mx.array(1), "1", (1,), None])
def test_what_equals_an_option_is_not_taken_for_it(counted, equal):
    x = mx.array([1.0])
    counted((x, None), (1,))
    for _ in range(2):
        with pytest.raises(TypeError, match=r"\[op\] 'n' must be an int but got"):
            counted((x, None), (equal,))


@pytest.mark.on_cpu
@pytest.mark.parametrize("options", [(-0.0,), (0.0,), (2**80,), ((1, (2.5, "x")),), (mx.float32,)])
def test_options_are_told_apart_by_their_bits(options):
    core = native.load()
    key = core.call_key((), options)
    others = [(0.0,), (-0.0,), (0,), (False,), ((1, (2.5, "y")),), (mx.float16,)]
    assert (key is None) == (options == (2**80,))
    for other in others:
        same = repr(other) == repr(options)
        assert key is None or (core.call_key((), other) == key) == same


@pytest.mark.on_cpu
def test_options_do_not_run_into_each_other():
    key = native.load().call_key
    x = mx.zeros((2, 3))
    keys = [
        key((x,), ("ab", "c")),
        key((x,), ("a", "bc")),
        key((x,), (("ab", "c"),)),
        key((x,), ("abc",)),
        key((x, None), ("abc",)),
        key((None, x), ("abc",)),
        key((x, x), ("abc",)),
        key((x,), ()),
        key((x,), ((),)),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key((1.0,), ()) is None
    assert key((x,), (object(),)) is None


@pytest.mark.on_cpu
def test_lists_are_keys_by_what_they_hold():
    key = native.load().call_key
    axes = [0, 1]
    assert key((), (axes,)) == key((), ([0, 1],)) != key((), ((0, 1),))
    before = key((), (axes,))
    axes.append(2)
    assert key((), (axes,)) != before
    assert native.load().known({before: "way"}, (), ([0, 1],)) == "way"


@pytest.mark.on_cpu
def test_many_axes_are_no_options():
    long = mx.zeros((1,) * 257)
    assert native.load().call_key((mx.zeros((1,)),), ("",)) != native.load().call_key((long,), ())
    assert native.load().call_key((long,), ())[1:5] == (257).to_bytes(4, "little")


@pytest.mark.on_cpu
def test_traced_calls_and_other_settings_are_looked_at_anew(counted):
    x = mx.array([1.0])

    def total(x):
        return counted((x, None), (1,)).sum()

    total(x)
    for _ in range(2):
        before = len(counted.seen)
        mx.grad(total)(x)
        assert len(counted.seen) == before + 1
    for context in (launch.geometry("gpu"), launch.target("reference")):
        before = len(counted.seen)
        with context:
            total(x)
        assert len(counted.seen) == before + 1
    before = len(counted.seen)
    total(x)
    assert len(counted.seen) == before


@pytest.mark.on_cpu
def test_no_more_ways_are_kept_than_launches(counted, monkeypatch):
    monkeypatch.setattr(launch, "SHAPES_KEPT", 4)
    for n in range(1, 20):
        counted((mx.zeros(n), None))
    (ways,) = counted._ways.values()
    assert len(ways) <= 4


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "var", "std", "argmax", "argmin"])
def test_a_bad_call_raises_after_a_good_one_that_equals_it(name):
    op, x = getattr(kernels, name), mx.array([[1.0, 3.0], [2.0, 0.0]])
    good = op(x, 1, False)
    deep = ()
    for _ in range(300_000):  # deeper than a stack
        deep = (deep,)
    bad = [(True, False), (1.0, False), (1, 0), (1, 0.0), ("1", False), ("\ud800", False)]
    for axis, keepdims in (*bad, (deep, False)):
        with pytest.raises(TypeError, match=rf"\[{name}\] '(axis|keepdims)' must be"):
            op(x, axis, keepdims)
    assert mx.array_equal(op(x, 1, False), good)
    assert mx.array_equal(op(x, -1, False), good)
