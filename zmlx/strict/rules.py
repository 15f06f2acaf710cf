"""What clang does not say: rules of Metal's language that OpenCL C++ lacks, and the rules that
zmlx's own kernels keep so that every target can take them.

Section numbers are those of Apple's Metal Shading Language Specification, version 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from ..packed import MOST_BUFFERS
from .tokens import Outline, Scope, tokenize
from .translate import COHERENT_IN, DEFINE, ELEMENTS, SPACES, VECTORS, Layout

#: Line of the Metal text, what is wrong.
Finding = tuple[int, str]

_KNOWN_TYPES = {
    "bool", "void", "char", "short", "int", "long", "unsigned", "signed", "size_t", "ptrdiff_t",
    "auto", "bfloat16_t", "float16_t", "complex64_t", "atomic_int", "atomic_uint", "atomic_bool",
    "atomic_float", "atomic_ulong", "uintptr_t", "intptr_t", *ELEMENTS, *VECTORS,
    *(f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)),
    *(f"bool{n}" for n in "234"), *(f"packed_{v}" for v in VECTORS),
    *(f"{p}float{c}x{r}" for p in ("", "simd_", "matrix_") for c in "234" for r in "234"),
    *(f"half{c}x{r}" for c in "234" for r in "234"),
    *(f"simdgroup_{e}8x8" for e in ("half", "bfloat", "float")),
}  # fmt: skip
_TEMPLATES = ("vec", "packed_vec", "matrix", "array", "complex_t", "atomic", "simdgroup_matrix")
_QUALIFIERS = ("const", "volatile", "constexpr", "static", "inline", "extern", "struct", "typename",
               "unsigned", "signed", "long", "coherent", "restrict")  # fmt: skip

_WORDS = {
    "goto": "goto (§1.5.4)",
    "virtual": "virtual functions (§1.5.4)",
    "throw": "exceptions (§1.5.4)",
    "try": "exceptions (§1.5.4)",
    "asm": "inline assembly",
    "__asm": "inline assembly",
    "__asm__": "inline assembly",
    "wchar_t": "wide characters (§2.1)",
    "char16_t": "wide characters (§2.1)",
    "char32_t": "wide characters (§2.1)",
    "co_await": "coroutines",
    "co_yield": "coroutines",
    "co_return": "coroutines",
}

_STAGES = ("kernel", "vertex", "fragment")
_BEHIND_NAMES = (",", ")", "=", ";", "[", "(", "{")

_HEADER = re.compile(r"[ \t]*(.*?)[ \t]*(?=$|//|/\*)", re.MULTILINE)
_LONG_DOUBLE = re.compile(r"(?!0[xX]).*[.eE].*[lL]")
_INTEGER = re.compile(r"(0[xX][\da-fA-F][\da-fA-F']*|0[bB][01][01']*|0[0-7']*|[1-9][\d']*)[uUlL]*")


def metal(outline: Outline, version: int) -> Iterator[Finding]:
    """Rules of Metal."""
    for i, token in enumerate(outline.tokens):
        text, line = token.text, token.line
        if text in _WORDS and token.kind == "word":
            yield line, f"Metal has no {_WORDS[text]}"
        elif text == "noexcept" and outline[i + 1] == "(" and outline[i - 1] not in (")", "const"):
            yield line, "Metal has no noexcept operator (§1.5.4)"
        elif text == "double":
            yield line, "Metal has no double (§2.1)"
        elif text == "long" and outline[i + 1] in ("long", "double"):
            yield line, f"Metal has no long {outline[i + 1]} (§2.1)"
        elif text == "std" and outline[i + 1] == "::":
            yield line, "Metal has its own library and no std:: (§1.5.4)"
        elif token.kind == "number" and _LONG_DOUBLE.fullmatch(text):
            yield line, f"Metal has no type for the literal {text} (§2.1)"
        elif token.kind == "number" and (match := _INTEGER.fullmatch(text)):
            if int(re.sub("^0(?=[0-7])", "0o", match[1].replace("'", "")), 0) >= 2**64:
                yield line, f"Metal has no type for the literal {text} (§2.1)"
        elif text == "buffer" and outline[i - 1] == "[" and outline[i + 2].isdigit():
            if int(outline[i + 2]) >= MOST_BUFFERS:
                yield line, f"Metal has {MOST_BUFFERS} buffers for a kernel"
        elif text == "static" and _in_function(outline, i):
            yield line, "variables in a function cannot be static (§5.3)"
        elif text == "[" and version < 320 and _is_lambda(outline, i):
            yield line, f"Metal {version / 100:.1f} has no lambda expressions; 3.2 has (§1.5.4)"
        elif _is_named(outline, i):
            yield line, f"'{text}' is a keyword of Metal (§5.1)"
        elif text == "auto" and version < 400 and _is_parameter(outline, i):
            yield line, f"Metal {version / 100:.1f} has no template <auto>"
        elif text == "coherent" and version < 320 and _is_qualifier(outline, i):
            yield line, f"Metal {version / 100:.1f} has no coherent memory; 3.2 has (§4.8)"
    yield from _spaceless(outline)
    if version < 400:
        for line, name in _deduced(outline):
            yield line, f"Metal {version / 100:.1f} deduces no template arguments: {name}<…>"
    for line, header in _includes(outline):
        if not re.fullmatch(r"<(metal_\w+|simd/simd\.h)>", header):
            yield line, f"{header} is not a header of Metal's library (§6.1)"


def _includes(outline: Outline) -> Iterator[tuple[int, str]]:
    for mark, word in pairwise(outline.all):
        if word.directive and mark.text == "#" and word.text in ("include", "import"):
            match = _HEADER.match(outline.text, word.end)
            yield word.line, match[1] if match else ""


def _in_function(outline: Outline, i: int) -> bool:
    scope = outline.scope_at(i)
    return scope.function is not None and scope.kind != "type"


def _is_named(outline: Outline, i: int) -> bool:
    """Whether token i is a keyword that clang does not know, used as a name."""
    before, behind = outline[i - 1], outline[i + 1]
    if outline[i] == "bfloat":
        return before in (*_KNOWN_TYPES, "struct", "namespace") and behind in _BEHIND_NAMES
    if outline[i] not in _STAGES or before == "[" or behind == "]":
        return False
    typed = behind == "::" or behind.isidentifier()  # a stage stands before a type
    return not typed and not behind == outline[i + 2] == "["


def _is_qualifier(outline: Outline, i: int) -> bool:
    return outline[i + 1] == "(" and outline[i + 2] in COHERENT_IN


def _is_parameter(outline: Outline, i: int) -> bool:
    """Whether token i is of a template's parameters."""
    while i > 0 and outline[i] not in ("<", ">", ";", "{", "}", "(", ")"):
        i -= 1
    return outline[i] == "<" and outline[i - 1] == "template"


def _is_lambda(outline: Outline, i: int) -> bool:
    if i not in outline.partner or outline[i + 1] == "[" or outline[i - 1] == "[":
        return False
    before = outline.tokens[i - 1] if i else None
    value = before is None or before.text in (")", "]") or before.kind in ("word", "number")
    if value and before is not None and before.text != "return":
        return False
    return outline[outline.partner[i] + 1] in ("(", "{", "<", "mutable", "->")


def _derived(outline: Outline) -> Iterator[Finding]:
    """The specification excludes them, though Apple's compiler takes those without `virtual`."""
    for scope in outline.scopes:
        if scope.kind != "type":
            continue
        for i in range(scope.head, scope.open):
            if outline[i] == ":" and outline[scope.head] != "enum":
                yield outline.tokens[i].line, "the language has no derived classes (§1.5.4)"
                break


def _deduced(outline: Outline) -> Iterator[tuple[int, str]]:
    """Objects of a class template of the text that is given no arguments: `Box b(1)`, `Box(1)`."""
    types = [scope for scope in outline.scopes if scope.kind == "type"]
    templates = {s.name for s in types if outline[s.head] == "template"}
    templates -= {s.name for s in types if outline[s.head] != "template"}
    templates -= {b.text for a, b in pairwise(outline.tokens) if a.text in ("typename", "using")}
    for i, token in enumerate(outline.tokens):
        if token.text not in templates:
            continue
        names = outline.tokens[i + 1].kind == "word" and outline[i + 2] in ("(", "{", "=", ";")
        scope = outline.scope_at(i)
        function = scope.function
        while scope.kind != "type" and scope.parent is not None:
            scope = scope.parent  # in a class the name may stand for that class itself
        inside = function is None or scope.kind == "type"
        inside |= function is not None and outline[function.parameters[0] - 2] == "::"
        made = (names or outline[i + 1] in ("(", "{")) and not inside
        if made and outline[i - 1] not in ("struct", "class", "union", "::", "~"):
            yield token.line, token.text


def _spaceless(outline: Outline) -> Iterator[Finding]:
    """Pointers and references without an address space (§4)."""
    types = (_KNOWN_TYPES | outline.types.keys()) - _values(outline)
    types |= _type_macros(outline.text, types)
    for i, token in enumerate(outline.tokens):
        if token.kind != "word":
            continue
        begin = _qualified(outline, i) - 1
        dependent = outline[begin] == "typename" and begin < i - 1
        template = token.text in _TEMPLATES and outline[i + 1] == "<"
        if not (dependent or template or token.text in types):
            continue
        if not outline.is_within(i, outline.types.get(token.text, [outline.file])):
            continue
        if outline[begin] in (".", "->", "struct", "class", "using", "enum", "union"):
            continue
        end, spaced = i + 1, False
        if outline[end] == "<":
            end = outline.angle_end(end) + 1
            if end == 0:
                continue
        while outline[end] in ("const", "volatile") or outline[end] in SPACES:
            spaced |= outline[end] in SPACES
            end += 1
        if [outline[end + k] for k in (0, 1, 3, 4)] == ["(", "&", ")", "["]:  # `T (&name)[4]`
            end += 1
        if outline[end] not in ("*", "&", "&&"):
            continue
        if outline[end] == "&&" and outline.tokens[end + 1].kind != "word":
            continue
        while outline[begin] in _QUALIFIERS or outline[begin] in SPACES:
            spaced |= outline[begin] in SPACES
            begin -= 1
        if spaced or outline[begin] in ("operator", "sizeof"):
            continue
        what = "pointer" if outline[end] == "*" else "reference"
        yield (
            token.line,
            f"{what} type must have an address space: device, constant, thread or threadgroup (§4)",
        )


def _qualified(outline: Outline, i: int) -> int:
    """First token of the name that ends at i: of `Pack<U>::word`, `Pack`."""
    while outline[i - 1] == "::":
        last = i - 2
        if outline[last] == ">":
            last = outline.angle_start(last) - 1
        named = last >= 0 and outline.tokens[last].kind == "word"
        if not named or outline[last] in _QUALIFIERS or outline[last] in SPACES:
            return i - 1  # of the `::` in front of all
        i = last
    return i


def _type_macros(text: str, types: set[str]) -> set[str]:
    """Macros that are one of the types, without an address space."""
    names: set[str] = set()
    for macro in DEFINE.finditer(text):
        words = [t.text for t in tokenize(macro.group()) if t.directive][2:]
        if set(words[1:]) & types and set(words[1:]) <= {*types, "const", "metal", "::"}:
            names.add(words[0])
    return names


def _values(outline: Outline) -> set[str]:
    """Names that the text declares as variables or as template parameters that are not types."""
    return {
        token.text
        for i, token in enumerate(outline.tokens)
        if token.kind == "word"
        and (outline[i - 1] in _KNOWN_TYPES or outline[i - 1] in ("&", "*"))
        and outline[i + 1] in (",", ")", "=", ";", "[", ">")
        and token.text not in _KNOWN_TYPES
        and outline[i - 2] not in ("=", "(", ",", "+", "*", "]", ")")
        and outline[outline.statement(i)[0]] != "typedef"
    }


# ---- the rules of the catalogue ------------------------------------------------------------------


def catalogue(outline: Outline, where: Layout) -> Iterator[Finding]:
    """Rules of zmlx's own kernels."""
    for line, _ in _includes(outline):
        yield line, "kernels include nothing"
    for token in outline.tokens:
        if token.text.startswith("__builtin_"):
            yield token.line, f"{token.text} is not in Metal's library"
    yield from _derived(outline)
    yield from _recursion(outline)
    yield from _same_but_for_space(outline)
    yield from divergence(outline, where)


def _calls(outline: Outline, function: Scope) -> set[str]:
    return {
        outline[i]
        for i in range(function.open + 1, function.close)
        if outline[i + 1] in ("(", "<") and outline.tokens[i].kind == "word"
    }


def _recursion(outline: Outline) -> Iterator[Finding]:
    """Metal 2.4 and later has recursion; the CPU and CUDA targets inline helpers and do not."""
    functions = [s for s in outline.scopes if s.kind == "function" and s.parent is outline.file]
    names = [f.name for f in functions]
    calls = {f.name: _calls(outline, f) & set(names) for f in functions}
    for function in functions:
        if names.count(function.name) > 1:
            continue
        reached, work = set(), set(calls[function.name])
        while work:
            name = work.pop()
            if name not in reached:
                reached.add(name)
                work |= calls[name]
        if function.name in reached:
            line = outline.tokens[function.parameters[0]].line
            yield line, f"{function.name} calls itself; kernels have no recursion"


def _same_but_for_space(outline: Outline) -> Iterator[Finding]:
    seen: dict[tuple[str, ...], Scope] = {}
    for function in outline.scopes:
        if function.kind != "function":
            continue
        owner = function.parent.name if function.parent else ""
        key = [owner, function.name]
        begin, end = function.parameters
        for i in range(begin + 1, end):
            names = outline[i - 1] in ("*", "&", ">") and outline[i + 1] in (",", ")", "=", "[")
            if outline[i] not in SPACES and outline[i] != "const" and not names:
                key.append(outline[i])
        if tuple(key) in seen:
            line = outline.tokens[begin].line
            yield line, f"overloads of {function.name} must not differ only in address space"
        seen[tuple(key)] = function


_LANE = re.compile(r"thread_(position_in_(grid|threadgroup)|index_in_\w+)|.*_index_in_threadgroup")
_MEETING = re.compile(
    r"(simd|quad)_(?!is_helper|active_threads|is_first)\w+|(threadgroup|simdgroup)_barrier"
    r"|simdgroup_(load|store|multiply|multiply_accumulate)"
)
_UNIFORM = re.compile(
    r"(simd|quad)_(sum|product|min|max|and|or|xor|all|any|ballot|broadcast|broadcast_first)"
)


def divergence(outline: Outline, where: Layout) -> Iterator[Finding]:
    """Calls at which threads meet, inside control flow whose condition differs between threads.

    Values derived from a thread's position differ; results of simdgroup reductions do not. Names
    are followed through assignments in the order of the text and through the arguments of calls.
    """
    varying = {t.text for t in outline.tokens if _LANE.fullmatch(t.text)}
    for _ in range(3):  # a helper may stand before or after what it calls
        before = len(varying)
        _spread(outline, varying)
        if len(varying) == before:
            break
    meeting = {t.text for t in outline.tokens if _MEETING.fullmatch(t.text)}
    functions = [s for s in outline.scopes if s.kind == "function" and s.name != where.name]
    for function in functions * 2:
        if _calls(outline, function) & meeting:
            meeting.add(function.name)
    for begin, end, line in _divergent(outline, varying):
        for i in range(begin, end):
            if outline[i] in meeting and outline[i + 1] in ("(", "<"):
                yield (
                    outline.tokens[i].line,
                    f"{outline[i]} must be reached by all threads, but the condition in line "
                    f"{{{line}}} differs between them",
                )


def _differs(outline: Outline, begin: int, end: int, varying: set[str]) -> bool:
    i = begin
    while i < end:
        if _UNIFORM.fullmatch(outline[i]) and outline[i + 1] == "(":
            i = outline.partner.get(i + 1, i)
        elif outline[i] in varying and outline[i - 1] not in (".", "->"):
            return True
        i += 1
    return False


def _spread(outline: Outline, varying: set[str]) -> None:
    definitions = {s.name: s for s in outline.scopes if s.kind == "function"}
    for i, token in enumerate(outline.tokens):
        if token.text in ("=", "+=", "-=", "*=", "/=", "|=", "&=", "^=") and i > 0:
            target = i - 1
            while outline[target] == "]" and target in outline.partner:
                target = outline.partner[target] - 1
            if outline[target - 1] == ".":
                target -= 2
            end = _expression_end(outline, i + 1)
            if outline.tokens[target].kind == "word" and _differs(outline, i + 1, end, varying):
                varying.add(outline[target])
        elif token.text in definitions and outline[i + 1] in ("(", "<"):
            callee = definitions[token.text]
            opening = i + 1 if outline[i + 1] == "(" else outline.angle_end(i + 1) + 1
            if opening == callee.parameters[0] or opening not in outline.partner:
                continue
            parameters = [outline[e - 1] for _, e in outline.arguments(callee.parameters[0])]
            for (b, e), name in zip(outline.arguments(opening), parameters, strict=False):
                if _differs(outline, b, e, varying):
                    varying.add(name)


def _expression_end(outline: Outline, i: int) -> int:
    while i < len(outline) and outline[i] not in (";", ",", ")", "}"):
        i = outline.skip(i)
    return i


def _divergent(outline: Outline, varying: set[str]) -> Iterator[tuple[int, int, int]]:
    """Ranges of tokens that not all threads of a group reach, with the line of the condition."""
    for i, token in enumerate(outline.tokens):
        if token.text not in ("if", "while", "for", "switch") or outline[i + 1] not in (
            "(",
            "constexpr",
        ):
            continue
        opening = i + 1 if outline[i + 1] == "(" else i + 2
        close = outline.partner.get(opening, opening)
        begin, end = opening, close
        if token.text == "for":
            parts = [k for k in range(opening, close) if outline[k] == ";"]
            if len(parts) == 2:
                begin, end = parts
        if not _differs(outline, begin + 1, end, varying):
            continue
        stop = _body_end(outline, close + 1)
        yield close + 1, stop, token.line
        if token.text == "if" and outline[stop] == "else":
            yield stop + 1, _body_end(outline, stop + 1), token.line
        # After `if (…) return;` only the other threads go on.
        if token.text == "if" and "return" in (outline[k] for k in range(close + 1, stop)):
            function = outline.scope_at(i).function
            if function is not None:
                yield stop, function.close, token.line


def _body_end(outline: Outline, i: int) -> int:
    """The token after the statement that begins at i."""
    if outline[i] == "{":
        return outline.partner.get(i, i) + 1
    if outline[i] in ("if", "for", "while", "switch"):
        close = outline.partner.get(i + 1, i + 1)
        end = _body_end(outline, close + 1)
        while outline[end] == "else":
            end = _body_end(outline, end + 1)
        return end
    while i < len(outline) and outline[i] != ";":
        i = outline.skip(i)
    return i + 1
