"""The parts of a text that `#if` leaves out, which are none of Metal's business."""

from __future__ import annotations

import re
from itertools import pairwise

from . import clang

#: The directives that bring a header.
INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|import)\b[^\n]*", re.MULTILINE)
_COMMENT = r"//(?:[^\\\n]|\\.)* | /\*.*?(?:\*/|\Z)"
_CONDITION = re.compile(
    rf"""^[ \t]*\#[ \t]*(?:if(?:n?def)?|el(?:se|if(?:n?def)?)|endif)\b
           (?:{_COMMENT} | [^\\\n] | \\.)*
      | {_COMMENT} | "(?:\\.|[^"\\\n])*" """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
_OPENS = re.compile(r"[ \t]*#[ \t]*(if|endif\b)?")
# Metal's library is not there as files. Of its tensors nothing is declared.
_HAS_HEADER = re.compile(r"__has_include\s*\(\s*<(?:metal_(?!\w*tensor)\w+|simd/simd\.h)>\s*\)")


def taken(text: str, version: int) -> str:
    """The text with blanks for what the preprocessor leaves out, and 1 for each `__has_include` of
    a header of Metal's library."""
    text = _HAS_HEADER.sub("1", text)
    directives = [m.span() for m in _CONDITION.finditer(text) if m.group().lstrip()[0] == "#"]
    words = [_OPENS.match(text, at)[1] for at, _ in directives]  # type: ignore[index]
    # An #if without an #endif leaves out the kernel, and is what clang has to name.
    if not directives or words.count("if") > words.count("endif"):
        return text
    # Each part gets a mark, which is there behind the preprocessor if the part is.
    bounds = [0, *(at for span in directives for at in span), len(text)]
    parts = [text[a:b] for a, b in pairwise(bounds)]
    marked = [f"\nzk_part_{n}\n{part}" if n % 2 == 0 else part for n, part in enumerate(parts)]
    left = clang.preprocessed(INCLUDE.sub("", "".join(marked)), version)
    kept = {int(n) for n in re.findall(r"\bzk_part_(\d+)\b", left)}
    return "".join(
        part if n % 2 or n in kept else re.sub(r"[^\n]", " ", part) for n, part in enumerate(parts)
    )
