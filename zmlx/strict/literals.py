"""Literals of bfloat, which clang lacks, and those of float with values that no bfloat is.

clang says nothing of a conversion that keeps a constant, so that `bfloat a = 1.5f` would pass. Nor
is such a value a half, but for constants, which need no cast to it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from .tokens import Outline, Token

_BFLOAT = re.compile(r"(\d[\d.']*([eE][+-]?\d+)?|\.\d+|0[xX].*[pP][+-]?\d+)(bf|BF)")
_LITERAL = re.compile(
    r"((?:\d[\d']*\.[\d']*|\.\d[\d']*|\d[\d']*(?=[eE]))(?:[eE][+-]?\d+)?"
    r"|0[xX].*[pP][+-]?\d+)[fF]?"
)
_LARGEST = 3.4028234e38  # of floats


def literals(outline: Outline) -> Iterator[tuple[Token, str]]:
    """The literals of a text and of its macros, and what stands for each."""
    place = -1
    for token in outline.all:
        place += not token.directive
        if token.kind != "number":
            continue
        if _BFLOAT.fullmatch(token.text):  # `h` is a suffix in OpenCL too
            yield token, f"bfloat({token.text[:-2]}f)"
        match = _LITERAL.fullmatch(token.text)
        if match is None:
            continue
        digits = match[1].replace("'", "")
        value = float.fromhex(digits) if digits[:2] in ("0x", "0X") else float(digits)
        if value <= _LARGEST:
            bit = 1 << 13 if token.directive or _is_constant(outline, place) else 1
            yield token, f"{_with_bit(value, bit).hex()}f"


def _is_constant(outline: Outline, i: int) -> bool:
    """Whether token i is outside of functions, or in the statement of a constant."""
    begin, scope = outline.statement(i)[0], outline.scope_at(i)
    while scope.kind == "initializer" and scope.parent is not None:
        begin, scope = min(begin, scope.head), scope.parent
    words = {outline[k] for k in range(begin, i)}
    return scope.function is None or bool(words & {"constexpr", "constant", "static_assert"})


def _with_bit(value: float, bit: int) -> float:
    """The float with the bits of the value, of the smallest normal half for zero, and this one."""
    (bits,) = struct.unpack("I", struct.pack("f", value or 2.0**-14))
    (found,) = struct.unpack("f", struct.pack("I", bits | bit))
    return float(found)
