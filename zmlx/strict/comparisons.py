"""The comparisons of a text: those of vectors give boolN in Metal, and integers in OpenCL."""

from __future__ import annotations

from collections.abc import Iterator

from .tokens import Outline

_EQUALITY = ("==", "!=")
_RELATION = ("<", ">", "<=", ">=")
# What binds less than a comparison.
_LOOSER = frozenset(
    {";", ",", "?", ":", "&&", "||", "|", "^", "return", "case", "else", "do", "throw"}
    | {f"{operator}=" for operator in ("", *"+-*/%&|^", "<<", ">>")}
)


def comparisons(outline: Outline) -> Iterator[tuple[int, int]]:
    """The first token and the one behind the last of each comparison in a function. Where a text
    could as well be a template list, as in `a < b && c > d`, it is left out."""
    for i, token in enumerate(outline.tokens):
        if token.text not in _EQUALITY + _RELATION or outline.scope_at(i).function is None:
            continue
        if outline[i - 1] != "operator" and not _may_be_list(outline, i):
            yield _begin(outline, i), _end(outline, i)


def _may_be_list(outline: Outline, i: int) -> bool:
    """Whether token i may open or close a template list, or is a part of `>>`."""
    if outline[i] == "<":
        if outline[i - 1] == "template" or outline.angle_end(i) >= 0:
            return True
        k = i + 1
        while k < len(outline) and outline[k] not in (")", "]", "}", ";"):
            if outline[k] == ">" and outline.angle_start(k) < 0:
                return True
            k = outline.skip(k)
        return False
    if outline[i] == ">":
        if ">" in (outline[i - 1], outline[i + 1]) or outline.angle_start(i) >= 0:
            return True
        k = i - 1
        while k >= 0 and outline[k] not in ("(", "[", "{", "}", ";"):
            if outline[k] == "<" and outline.angle_end(k) < 0:
                return True
            k = (outline.partner.get(k, k) if outline[k] in (")", "]") else k) - 1
    return False


def _begin(outline: Outline, i: int) -> int:
    """The first token of the left operand."""
    k = i - 1
    while k >= 0:
        text = outline[k]
        opens = text in ("(", "[", "{", "}") or (text == "<" and outline.angle_end(k) > i)
        equals = text in _EQUALITY and outline[i] in _RELATION
        if text in (")", "]") or (text == "}" and _closes_value(outline, k)):
            k = outline.partner.get(k, k)
        elif text == ">" and outline.angle_start(k) >= 0:
            k = outline.angle_start(k)
        elif opens or equals or text in _LOOSER or _is_and(outline, k):
            break
        k -= 1
    return k + 1


def _end(outline: Outline, i: int) -> int:
    """The token behind the right operand."""
    k = i + 1
    while k < len(outline):
        text = outline[k]
        if text == "<" and outline.angle_end(k) >= 0:
            k = outline.angle_end(k) + 1
            continue
        if text == ">" and outline[k + 1] == ">" and outline.angle_start(k) < 0:
            k += 2
            continue
        closes = text == ">" and outline.angle_start(k) >= 0
        if closes or text in _LOOSER or text in (")", "]", "}") or _is_and(outline, k):
            break
        if text in _EQUALITY or (text in _RELATION and outline[i] in _RELATION):
            break
        k = outline.skip(k)
    return k


def _closes_value(outline: Outline, i: int) -> bool:
    """Whether the brace i closes a list of values: `float2{a, b}`."""
    opening = outline.partner.get(i, -1)
    return any(s.open == opening and s.kind == "initializer" for s in outline.scopes)


def _is_and(outline: Outline, i: int) -> bool:
    """Whether token i is an `&` between values."""
    before = outline.tokens[i - 1]
    cast = before.text == ")" and outline[i - 2] == "*"  # `(thread uint*)&v`
    value = before.kind in ("word", "number") or (before.text in (")", "]", "}") and not cast)
    return outline[i] == "&" and value and before.text not in _LOOSER
