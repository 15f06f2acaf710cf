"""What the core refuses, and the life of its nodes: failures, threads, memory."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from core_kernels import SQUARE, Square, core, kernel, prepare, square, x16


def test_a_result_that_no_memory_holds_raises() -> None:
    launch = prepare(kernel("square", SQUARE), (x16,), shapes=((2**30, 2**20),), grid=(1, 1, 1))
    huge = core.launch(launch, (x16,))
    with pytest.raises(RuntimeError, match=r"Unable to allocate \d+ bytes"):
        mx.eval(huge)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": (x16, x16)}, r"\[square\] 'inputs' must hold 1 array \(x\) but got 2"),
        ({"shapes": ((4,), (4,))}, r"'output_shapes' must hold 1 shape \(o\) but got 2"),
        ({"dtypes": ()}, r"'output_dtypes' must hold 1 dtype \(o\) but got 0"),
        ({"shapes": ((-1,),)}, "'output_shapes' must not be negative"),
        ({"grid": (16, -1, 1)}, r"'grid' must not be negative but got \(16, -1, 1\)"),
        ({"grid": (16, 1)}, "'grid' must hold 3 integers but got 2"),
        ({"group": (0, 1, 1)}, r"'threadgroup' must be positive but got \(0, 1, 1\)"),
        ({"group": (1024, 2, 1)}, "at most 1024 threads"),
        ({"grid": (2**31, 1, 1)}, "'grid' must be from"),
        ({"donate": ((1, 0),)}, "'donate' must pair an input's index"),
        ({"donate": ((0, 0),), "init": 0}, "'donate' must be empty with 'init_value'"),
    ],
)
def test_prepare_names_the_argument_that_is_wrong(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"shapes": ((16,),), "dtypes": (mx.float32,), "grid": (16, 1, 1)}
    arguments |= change
    inputs = arguments.pop("inputs", (x16,))
    with pytest.raises(ValueError, match=message):
        core.prepare(
            kernel("square", SQUARE),
            inputs,
            (),
            arguments["grid"],
            arguments.get("group", (1, 1, 1)),
            arguments["shapes"],
            arguments["dtypes"],
            arguments.get("init"),
            (),
            arguments.get("donate"),
        )


def test_only_arrays_of_the_prepared_shapes_and_dtypes_are_launched() -> None:
    launch = prepare(kernel("square", SQUARE), (x16,))
    for inputs in ((x16[:8],), (x16.astype(mx.int32),), (x16, x16), ()):
        with pytest.raises(ValueError, match=r"\[square\] 'inputs' must have the shapes"):
            core.launch(launch, inputs)
    for thing in (None, 1.5, np.zeros(16), object(), mx.float32):
        with pytest.raises(TypeError, match=r"'inputs' must hold mx\.array objects but got"):
            core.launch(launch, (thing,))
    with pytest.raises(ValueError, match="incorrect name"):
        core.launch(kernel("square", SQUARE), (x16,))
    with pytest.raises(TypeError, match="takes 2 to 4 arguments but got 1"):
        core.launch(launch)


def test_a_kernel_failure_raises_at_eval_and_leaves_the_process_well() -> None:
    source = """
    uint i = thread_position_in_grid.x;
    if (x[i] > 3) { ZMLX_FAIL("x", i); }
    o[i] = 1;
    """
    launch = prepare(kernel("strict", source), (x16,))
    for _ in range(3):
        result = core.launch(launch, (x16,))
        with pytest.raises(RuntimeError, match=r"\[strict\] 'x' .* got"):
            mx.eval(result)
        assert mx.array_equal(square(x16), x16 * x16)
    small = mx.zeros((16,))
    assert core.launch(launch, (small,)).tolist() == [1] * 16


def test_a_prefetch_is_a_hint_that_any_address_will_do_for() -> None:
    source = """
    uint i = thread_position_in_grid.x;
    ZMLX_PREFETCH(x + (size_t(i) << 40));
    ZMLX_PREFETCH_FAR(x - (size_t(i) << 40));
    o[i] = x[i] + 1;
    """
    launch = prepare(kernel("hint", source), (x16,))
    assert mx.array_equal(core.launch(launch, (x16,)), x16 + 1)


def test_many_failures_block_nothing() -> None:
    """MLX goes on counting a task whose enqueuing an earlier error has stopped."""
    fails = prepare(kernel("strict", 'if (x[0] == 0) { ZMLX_FAIL("x", 0); } o[0] = 1;'), (x16,))
    for _ in range(300):
        y = core.launch(fails, (mx.zeros((16,)),))
        with pytest.raises(RuntimeError, match="strict"):
            mx.eval(mx.exp(mx.exp(mx.exp(y))))
    y = x16
    for _ in range(2000):
        y = mx.tanh(y)
    mx.eval(y)


def test_many_unevaluated_nodes() -> None:
    y = mx.zeros((1,))
    launch = prepare(kernel("increment", "o[0] = x[0] + 1;"), (y,))
    for _ in range(20_000):
        y = core.launch(launch, (y,))
    assert y.item() == 20_000


def test_streams_and_threads() -> None:
    launch = prepare(kernel("square", SQUARE), (x16,))
    stream = mx.new_stream(mx.cpu)
    assert mx.array_equal(core.launch(launch, (x16,), None, stream), x16 * x16)
    with pytest.raises(TypeError, match=r"'stream' must be an mx\.Stream"):
        core.launch(launch, (x16,), None, "cpu")

    wrong = []

    def work(value: int) -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(30):
                x = mx.full((16,), float(value))
                y = core.launch(launch, (x,), square)
                mx.async_eval(y)
                if not mx.array_equal(y, x * x):
                    wrong.append(value)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert not wrong
    assert not any(worker.is_alive() for worker in workers)


def test_records_die_with_their_nodes_without_a_deadlock() -> None:
    # Nodes are let go of by whatever thread evaluates; the record waits for the next call.
    class Counted(Square):
        pass

    launch = prepare(kernel("square", SQUARE), (x16,))
    record = Counted()
    alive = weakref.ref(record)
    rounds = []

    def work(record: Square) -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            for i in range(50):
                mx.eval([core.launch(launch, (x16,), record) for _ in range(20)])
                rounds.append(i)

    worker = threading.Thread(target=work, args=(record,))
    worker.start()
    while worker.is_alive():
        core.launch(launch, (x16,), record)
    mx.eval(core.launch(launch, (x16,), record))
    assert len(rounds) == 50
    del record, worker
    gc.collect()
    for _ in range(100):
        core.statistics()
        if alive() is None:
            break
        time.sleep(0.01)
    assert alive() is None


def test_a_large_output_starts_where_no_load_has_to_wait_for_a_store() -> None:
    """On a line of 64 bytes, and just before an input in the low 12 bits of their addresses. An
    allocator that puts arrays behind each other has the output a few bytes after the input."""

    def address(a: mx.array) -> int:
        return np.array(a, copy=False).ctypes.data

    total = kernel("total", "uint i = thread_position_in_grid.x; o[i] = x[i] + y[i];", ("x", "y"))
    for size in (1 << 14, (1 << 14) + 3, 1 << 18):
        block = mx.random.normal((2, size + 1024))
        mx.eval(block)
        # A contiguous view lies at any multiple of four bytes.
        for first in range(0, 1024, 93):
            views = [block[row, first : first + size] for row in range(2)]
            mx.eval(views)
            o = core.launch(prepare(total, tuple(views)), tuple(views))
            assert np.array_equal(np.array(o), np.array(views[0]) + np.array(views[1]))
            behind = [(address(o) - address(view) - 1) % 4096 + 1 for view in views]
            assert address(o) % 64 == 0
            assert max(behind) > 4096 - 64
            assert min(behind) >= 2048 - 64


def test_memory_is_taken_over_only_where_declared_and_safe() -> None:
    made = kernel("square", SQUARE)
    plain, donating = prepare(made, (x16,)), prepare(made, (x16,), donate=((0, 0),))

    def donations(launch: Any, x: Any) -> int:
        before = core.statistics()["donations"]
        # Not inside the assertion, which pytest rewrites to hold on to every part of it.
        result = core.launch(launch, (x(),))
        assert mx.array_equal(result, (x16 + 1) * (x16 + 1))
        return core.statistics()["donations"] - before

    held = x16 + 1
    mx.eval(held)
    assert donations(donating, lambda: x16 + 1) == 1
    assert donations(plain, lambda: x16 + 1) == 0
    assert donations(donating, lambda: held) == 0
    assert mx.array_equal(held, x16 + 1)


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE.exists(), reason="this system has no huge pages to ask for")
def test_large_outputs_ask_for_huge_pages() -> None:
    """Their pages are new at every launch: 4 KiB at a time that takes longer than the kernel."""
    large = mx.zeros((16 << 20,), mx.uint8)
    y = core.launch(prepare(kernel("square", SQUARE), (large,)), (large,))
    mx.eval(y)
    middle = np.asarray(y).ctypes.data + (8 << 20)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if area := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(area[1], 16) <= middle < int(area[2], 16)
        elif inside and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    raise AssertionError("the output is in no area of memory")
