"""Declarations in front of a kernel: functions, overloads and types, and what they are named."""

from __future__ import annotations

import mlx.core as mx
from metal_source import run


def value(source: str, header: str = "") -> float:
    """What a kernel of one thread stores."""
    return run(source, output=(1, mx.float32), header=header).item()


def test_a_pragma_before_a_function_is_no_part_of_its_name() -> None:
    header = """
        _Pragma("unused") float once(float a) { return a; }
        _Pragma("unused") float twice(float a) { return 2 * a; }
    """
    assert value("out[0] = once(1) + twice(2);", header) == 5
