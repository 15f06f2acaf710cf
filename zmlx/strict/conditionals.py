"""The parts of a text that `#if` leaves out, which are none of Metal's business."""

from __future__ import annotations

import re
from itertools import pairwise

from . import clang

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*(?:include|import)\b[^\n]*", re.MULTILINE)
_CONDITION = re.compile(
    r"""^[ \t]*\#[ \t]*(?:if|ifdef|ifndef|elif|else|endif)\b(?:[^\\\n]|\\.)*
      | //[^\n]* | /\*.*?(?:\*/|\Z) | "(?:\\.|[^"\\\n])*" """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)


def taken(text: str, version: int) -> str:
    """The text with blanks for what the preprocessor leaves out."""
    directives = [m.span() for m in _CONDITION.finditer(text) if m.group().lstrip()[0] == "#"]
    if not directives:
        return text
    # Each part gets a mark, which is there behind the preprocessor if the part is.
    bounds = [0, *(at for span in directives for at in span), len(text)]
    parts = [text[a:b] for a, b in pairwise(bounds)]
    marked = [f"\nzk_part_{n}\n{part}" if n % 2 == 0 else part for n, part in enumerate(parts)]
    left = clang.preprocessed(_INCLUDE.sub("", "".join(marked)), version)
    kept = {int(n) for n in re.findall(r"\bzk_part_(\d+)\b", left)}
    return "".join(
        part if n % 2 or n in kept else re.sub(r"[^\n]", " ", part) for n, part in enumerate(parts)
    )
