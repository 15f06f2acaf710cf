"""Nodes under gradients, jvp, vmap, compilation and export."""

from __future__ import annotations

import signal
from typing import Any

import mlx.core as mx
import pytest
from core_kernels import SQUARE, core, kernel, prepare, square, x16


def test_gradients_of_any_order_come_from_the_record() -> None:
    loss = lambda x: square(x).sum()  # noqa: E731
    assert mx.array_equal(mx.grad(loss)(x16), 2 * x16)
    assert mx.array_equal(mx.grad(lambda x: mx.grad(loss)(x).sum())(x16), mx.full((16,), 2.0))
    assert mx.array_equal(mx.compile(mx.grad(loss))(x16), 2 * x16)
    assert mx.array_equal(mx.grad(mx.compile(loss))(x16), 2 * x16)
    assert mx.array_equal(mx.grad(lambda x: mx.checkpoint(square)(x).sum())(x16), 2 * x16)


def test_jvp_and_vmap_come_from_the_record() -> None:
    outputs, tangents = mx.jvp(square, [x16], [mx.full((16,), 3.0)])
    assert mx.array_equal(outputs[0], x16 * x16)
    assert mx.array_equal(tangents[0], 6 * x16)
    batch = mx.random.normal((3, 16))
    assert mx.array_equal(mx.vmap(square)(batch), batch * batch)
    assert mx.array_equal(mx.vmap(square, in_axes=1, out_axes=1)(batch), batch * batch)
    gradient = mx.vmap(mx.grad(lambda x: square(x).sum()))
    assert mx.array_equal(gradient(batch), 2 * batch)
    assert mx.array_equal(mx.grad(lambda b: mx.vmap(square)(b).sum())(batch), 2 * batch)


def test_compiled_functions_run_the_kernel_at_every_call() -> None:
    launch = prepare(kernel("square", SQUARE), (x16,))
    compiled = mx.compile(lambda x: core.launch(launch, (x + 1,)) * 2)
    for step in range(3):
        x = x16 + step
        assert mx.array_equal(compiled(x), (x + 1) * (x + 1) * 2)


def test_without_a_record_transforms_raise_and_say_what_to_give() -> None:
    launch = prepare(kernel("bare", SQUARE), (x16,))
    bare = lambda x: core.launch(launch, (x,))  # noqa: E731
    for transform, name, given in (
        (lambda: mx.grad(lambda x: bare(x).sum())(x16), "vjp", "'vjp' or 'reference'"),
        (lambda: mx.jvp(bare, [x16], [x16]), "jvp", "'reference'"),
        (lambda: mx.vmap(bare)(mx.zeros((2, 16))), "vmap", "'reference'"),
    ):
        message = rf"\[Primitive::{name}\] Not implemented for CustomKernel bare: wrap .* a {given}"
        with pytest.raises(ValueError, match=message):
            transform()
    with pytest.raises(ValueError, match=r"bare cannot infer output shapes: .* a 'reference'"):
        mx.eval(mx.compile(bare, shapeless=True)(x16))


def answer_with(gradients: Any) -> Any:
    class Answer:
        def vjp(self, *_: Any) -> Any:
            return gradients() if callable(gradients) else gradients

    record = Answer()
    launch = prepare(kernel("square", SQUARE), (x16,))
    return mx.grad(lambda x: core.launch(launch, (x,), record).sum())(x16)


@pytest.mark.parametrize(
    ("gradients", "error", "message"),
    [
        ((), ValueError, r"\[square\] 'vjp' must return 1 gradients but got 0"),
        ((x16, x16), ValueError, "must return 1 gradients but got 2"),
        ((x16[:4],), ValueError, r"shape \(16\) and dtype float32 but got \(4\)"),
        ((x16.astype(mx.float16),), ValueError, "but got .* float16"),
        ((None,), ValueError, "must hold mx.array objects but got NoneType"),
        (None, RuntimeError, "TypeError"),
        (lambda: [][1], IndexError, "out of range"),
        (lambda: int("?"), ValueError, "invalid literal"),
        (lambda: 1 / 0, RuntimeError, "ZeroDivisionError: division by zero"),
    ],
)
def test_wrong_answers_of_a_record_raise(gradients: Any, error: Any, message: str) -> None:
    # MLX itself would take the cotangent for a missing gradient, and any shape for right.
    with pytest.raises(error, match=message):
        answer_with(gradients)
    assert mx.array_equal(square(x16), x16 * x16)


def interrupted() -> None:
    raise KeyboardInterrupt


class _Unsaid(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


def interrupted_in_its_message() -> None:
    raise _Unsaid


@pytest.mark.parametrize("answer", [interrupted, interrupted_in_its_message])
def test_an_interrupt_of_a_record_interrupts(answer: Any) -> None:
    """Where a training loop is when somebody presses Ctrl-C: no error that it may survive."""

    def survive() -> None:
        try:
            answer_with(answer)
        except RuntimeError:
            for _ in range(1000):  # Python looks for signals between its instructions
                pass

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            survive()
    finally:
        signal.signal(signal.SIGINT, before)


def test_wrong_numbers_of_tangents_and_batched_outputs_raise() -> None:
    class Wrong:
        def jvp(self, primals: Any, tangents: Any, argnums: Any) -> Any:
            return ()

        def vmap(self, inputs: Any, axes: Any) -> Any:
            return inputs, ()

    launch = prepare(kernel("square", SQUARE), (x16,))
    function = lambda x: core.launch(launch, (x,), Wrong())  # noqa: E731
    with pytest.raises(ValueError, match="'jvp' must return 1 tangents but got 0"):
        mx.jvp(function, [x16], [x16])
    with pytest.raises(ValueError, match="'vmap' must return 1 axes but got 0"):
        mx.vmap(function)(mx.zeros((2, 16)))


def test_export_shows_the_metal_text() -> None:
    def primitives(function: Any) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        mx.export_function(events.append, function, x16)
        return [e for e in events if e["type"] == "primitive"]

    made = kernel("scale", "uint i = thread_position_in_grid.x; o[i] = x[i] * a;", ("x", "a"))
    launch = prepare(made, (x16,), constants=(mx.array(3.0),))
    (node,) = primitives(lambda x: core.launch(launch, (x,)))
    assert node["name"] == "CustomKernel"
    assert len(node["inputs"]) == 2
    assert "const constant float& a [[buffer(1)]]" in node["arguments"][1]
    assert node["arguments"][2:8] == [16, 1, 1, 1, 1, 1]

    ones = kernel("ones", "o[thread_position_in_grid.x] = 1;", ())
    filled = core.prepare(ones, (), (), (16, 1, 1), (1, 1, 1), ((16,),), (mx.float32,), None, ())
    assert primitives(lambda x: x + core.launch(filled, ()))[0]["name"] == "CustomKernel"

    gradient = mx.grad(lambda x: square(square(x)).sum())
    names = [node["name"] for node in primitives(gradient)]
    assert "CustomKernel" in names
    assert "Multiply" in names
