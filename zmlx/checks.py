"""`ZMLX_CHECK=1`: values that only a kernel sees are looked at before it is launched.

Without it a kernel gives NaN where it meets such a value, and on the CPU the evaluation raises.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .codegen import Pattern, Rowwise
from .interpret import constants, expression_value


def _enabled() -> bool:
    chosen = os.environ.get("ZMLX_CHECK") or "0"
    if chosen not in ("0", "1"):
        raise ValueError(f"[zmlx] 'ZMLX_CHECK' must be 0 or 1 but got {chosen}.")
    return chosen == "1"


ENABLED = _enabled()


def check_values(op: str, pattern: Pattern, inputs: Sequence[mx.array]) -> None:
    """Raises `[op] 'argument' must …` for the first row that a check of the pattern refuses."""
    if not isinstance(pattern, Rowwise) or not pattern.checks:
        return
    values = constants(pattern, inputs)
    for check in pattern.checks:
        bad = np.array(expression_value(check.condition, values))
        if bad.any():
            value = np.array(expression_value(check.value, values))
            first = np.broadcast_to(value, bad.shape)[bad].reshape(-1)[0]
            raise ValueError(f"[{op}] '{check.argument}' must be in range but got {first}.")
