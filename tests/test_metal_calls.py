"""Calls of a kernel of one's own that are like an earlier one, which is looked at once."""

import mlx.core as mx
import pytest

from zmlx import metal

DOUBLE = {
    "name": "double",
    "input_names": ["x"],
    "output_names": ["y"],
    "source": "uint i = thread_position_in_grid.x; y[i] = x[i] + x[i];",
}


@pytest.mark.on_cpu
def test_a_call_like_an_earlier_one_is_not_looked_at_again(monkeypatch):
    kernel, x = metal.kernel(**{**DOUBLE, "name": "double_again"}), mx.ones((4,))
    asked = {"template": {"N": 2}, "grid": 4, "output_shapes": [(4,)], "init_value": 0.0}
    kernel(x, **asked)
    before = kernel.statistics
    looked_at = []
    look = metal.MetalKernel._looked_at
    monkeypatch.setattr(
        metal.MetalKernel, "_looked_at", lambda self, *a: looked_at.append(a) or look(self, *a)
    )
    assert kernel(x + 1, **asked).tolist() == [4, 4, 4, 4]
    assert kernel(x, **{**asked, "template": {"N": 2}}).tolist() == [2, 2, 2, 2]
    assert not looked_at
    assert kernel.statistics == {**before, "calls": before["calls"] + 2}
    # What differs in type alone is another call, and so is one that is traced.
    kernel(x, **{**asked, "template": {"N": True}})
    mx.compile(lambda x: kernel(x, **asked))(x)
    assert len(looked_at) == 2
    for bad in ({"grid": -1}, {"template": {"N": "two"}}, {"threadgroup": 2048}):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
                kernel(x, **{**asked, **bad})


@pytest.mark.on_cpu
def test_numbers_of_each_type_are_inputs_of_their_own():
    kernel = metal.kernel(
        name="size_of", input_names=["x", "n"], output_names=["y"],
        source="y[thread_position_in_grid.x] = n > 9 ? n : sizeof(n) * 100 + n;",
    )  # fmt: skip
    for _ in range(2):
        found = [kernel(mx.ones((1,)), n).item() for n in (1, 1.0, True, 2**40, -0.0)]
        assert found == [401, 401, 101, 2**40, 400]


@pytest.mark.on_cpu
def test_calls_are_forgotten_with_their_launches(monkeypatch):
    monkeypatch.setattr(metal, "_LAUNCHES_KEPT", 4)
    kernel = metal.kernel(**{**DOUBLE, "name": "double_few"})
    for n in [*range(1, 8), 1, 2]:
        assert kernel(mx.ones((n,))).tolist() == [2] * n
        assert kernel.statistics["configurations"] <= 4
        assert sum(map(len, kernel._calls.values())) <= 4
