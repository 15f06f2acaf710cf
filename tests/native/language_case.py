"""Small cases of the Metal language: a body (and header) whose output is known.

Every case runs in three ways: groups of one thread (a plain loop that the compiler sees through),
larger groups without a meeting (nested loops), and larger groups whose threads meet (fibers).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from metal_source import run

INDEX = np.arange(8)
X = np.array([1.5, -2.0, 3.25, 0.0, 7.0, -0.5, 100.0, 8.0], np.float32)

WAYS = {"one thread": 1, "loop": 8, "fibers": 8}

# Stores `r` however the body is left.
FRAME = """
    struct Store {
        device float* to;
        thread float& from;
        ~Store() { *to = from; }
    };
    uint i = thread_position_in_grid.x;
    float r = -9;
    Store store{out + i, r};
"""


@dataclass(frozen=True)
class Case:
    """`body` sets `float r` from the thread's index `i` and the input `x`."""

    body: str
    expected: Any
    header: str = ""
    template: dict[str, Any] = field(default_factory=dict)
    x: Any = None

    def check(self, way: str) -> None:
        """Runs the case in one of `WAYS` and compares its output."""
        meet = "threadgroup_barrier(mem_flags::mem_none);\n" if way == "fibers" else ""
        small = self.x is not None  # MLX passes arrays of less than 8 elements as constants
        inputs = {"c": mx.array(self.x)} if small else {"x": mx.array(X)}
        threads = len(self.x) if small else 8
        result = run(
            FRAME + meet + self.body,
            inputs,
            (threads, mx.float32),
            threads,
            WAYS[way],
            self.template,
            self.header,
        )
        expected = np.broadcast_to(np.float32(self.expected), result.shape)
        np.testing.assert_array_equal(result, expected)


def in_all_ways(groups: dict[str, dict[str, Case]]) -> Callable[[Any], Any]:
    """Parametrizes a test over `case` and `way`."""
    cases = {f"{group}: {name}": c for group, named in groups.items() for name, c in named.items()}
    each_case = pytest.mark.parametrize("case", cases.values(), ids=cases)
    each_way = pytest.mark.parametrize("way", WAYS)
    return lambda test: each_way(each_case(test))
