"""Metal text to the OpenCL C++ that clang reads, line for line.

Almost everything is a macro or a type of `include/`. What is left to rewrite: the kernel's
attributes and template line, constructors of vectors (clang has no `float4(a, b)`), literals that
clang lacks or lets pass as bfloat, comparisons, and member functions, which run on `thread` objects
in Metal and on any in OpenCL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .comparisons import comparisons
from .conditionals import INCLUDE
from .literals import literals
from .tokens import Outline, Scope, tokenize

ELEMENTS = (
    "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float",
)  # fmt: skip
VECTORS = frozenset(
    prefix + e + n for prefix in ("", "simd_", "vector_") for e in ELEMENTS for n in "234"
)
SPACES = ("device", "constant", "thread", "threadgroup", "threadgroup_imageblock", "ray_data")

_KERNEL = re.compile(r"\[\[kernel\]\] void (\w+)\(")
_INSTANCE = re.compile(r"^template \[\[host_name\(.*\Z", re.MULTILINE | re.DOTALL)
_SAID = (
    r"(?:kernel|visible|stitchable|(?:host_name|max_total_threads_per_threadgroup"
    r"|function_constant|buffer|threadgroup|id)\s*\((?:[^()]|\([^()]*\))*\)|grid_(?:origin|size)"
    r"|(?:dispatch_)?thread(?:s|group|groups)?_\w+|(?:dispatch_)?(?:simd|quad)groups?_\w+)"
)
#: The scopes of Metal 3.2's qualifier `coherent(scope)`.
COHERENT_IN = ("device", "system", "threadgroup")
_COHERENT = re.compile(rf"\bcoherent\s*\(\s*(?:{'|'.join(COHERENT_IN)})\s*\)")
_ATTRIBUTE = re.compile(rf"\[\[\s*{_SAID}(\s*,\s*{_SAID})*\s*\]\]")
#: A macro's definition.
DEFINE = re.compile(r"^[ \t]*#[ \t]*define\b(?:[^\\\n]|\\.)*", re.MULTILINE | re.DOTALL)
_VECTOR = re.compile(rf"(?:metal :: )?(?:{'|'.join(sorted(VECTORS))}|vec < .* >)")
# The beginning of a function, with the pragmas that clang takes nowhere else in it.
_OPENING = re.compile(
    r"\{(?:(?:\s|//[^\n]*\n|/\*[\s\S]*?\*/)*"
    r"#[ \t]*pragma[ \t]+(?:clang[ \t]+fp|METAL[ \t]+fp|STDC)\b[^\n]*\n)*"
)


@dataclass
class Layout:
    """Where the parts of a kernel's text lie: offsets, and the first line of the user's body."""

    head: int = 0  # of the template line, or of the kernel without one
    kernel: int = 0
    signature_end: int = 0
    instance: int = 0
    template: tuple[tuple[str, str], ...] = ()  # declarations, in the order of the template line
    body_line: int = 1
    name: str = ""


def layout(text: str) -> Layout:
    """The parts of the text that MLX made, which are its own whatever the user wrote."""
    matches = list(_KERNEL.finditer(text))
    if not matches:
        raise ValueError("[strict] 'metal_text' must hold a [[kernel]] function but has none.")
    match = matches[-1]
    open_end = text.index(") {\n", match.end()) + 4
    found = Layout(match.start(), match.start(), open_end, len(text), name=match.group(1))
    found.body_line = text.count("\n", 0, open_end) + 1
    instance = _INSTANCE.search(text, open_end)
    if instance:
        found.instance = instance.start()
        found.head = text.rindex("template <", 0, match.start())
        parameters = text[found.head + len("template <") : match.start() - len(">\n")]
        arguments = re.search(rf"decltype\({found.name}<(.*?)>\)", instance.group())
        values = _split(arguments.group(1)) if arguments else []
        found.template = tuple(zip(_split(parameters), values, strict=True))
    return found


def apart(text: str) -> tuple[str, int]:
    """The text with the kernel on a line of its own, and the line of the header that takes in the
    kernel's first, or 0: MLX puts nothing between them."""
    head = layout(text).head
    begin = text.rfind("\n", 0, head) + 1
    if not text[begin:head].strip():
        return text, 0
    taken = all(token.directive or token.start != head for token in tokenize(text))
    return f"{text[:head]}\n{text[head:]}", taken * (text.count("\n", 0, head) + 1)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []


def _declare(parameter: str, value: str) -> str:
    kind, _, name = parameter.rpartition(" ")
    if kind in ("typename", "class"):
        return f"typedef {value} {name};"
    return f"constexpr {kind} {name} = {value};"


class _Edits:
    """Replacements of ranges of a text, none of which changes a line number."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.edits: list[tuple[int, int, str]] = []

    def replace(self, start: int, end: int, new: str) -> None:
        self.edits.append((start, end, new))

    def blank(self, start: int, end: int) -> None:
        # With the marks that continue a directive.
        self.replace(start, end, re.sub(r"(?!\\\n)[^\n]", " ", self.text[start:end]))

    def result(self, begin: int = 0, stop: int | None = None) -> str:
        """The text, or a part of it."""
        stop = len(self.text) if stop is None else stop
        out, at = [], begin
        for start, end, new in sorted(self.edits):
            if start >= at and end <= stop:
                out += [self.text[at:start], new]
                at = end
        return "".join([*out, self.text[at:stop]])


def to_clang(text: str, outline: Outline, *, arms: bool, copied: bool = False) -> str:
    """The text for clang; with `arms`, both arms of ?: are checked to have one type; `copied` are
    references that Metal binds to temporaries, which OpenCL does not."""
    where = layout(text)
    edits = _Edits(text)
    for match in (*_ATTRIBUTE.finditer(text), *_COHERENT.finditer(text)):
        edits.blank(match.start(), match.end())
    if where.template:
        edits.blank(where.instance, len(text))
    for token in outline.all:
        if token.text == "kernel" and text[token.start - 1] != "[" and token.start < where.kernel:
            edits.blank(token.start, token.end)  # another one, in the header: a function
    if not arms:
        _function_arguments(edits, outline)
    for token, value in literals(outline):
        edits.replace(token.start, token.end, value)
    for begin, end in comparisons(outline):
        edits.replace(outline.tokens[begin].start, outline.tokens[begin].start, "zk_compared(")
        edits.replace(outline.tokens[end - 1].end, outline.tokens[end - 1].end, ")")
    _constructors(edits, outline)
    _lists(edits, outline)
    if copied:
        _copies(edits, outline)
    _methods(edits, outline)
    _returned(edits, outline)
    _array_parameters(edits, outline)
    for match in INCLUDE.finditer(text):
        edits.blank(match.start(), match.end())
    marked = edits.result()
    return _kernel(_arms(marked) if arms else marked, where)


def _kernel(text: str, where: Layout) -> str:
    """The kernel as OpenCL's, which is no template: once with the template arguments declared in
    its body, and before that as the template that it is, for the rules of dependent names (clang
    refuses that one, but reads it)."""
    start = text.rindex("void " + where.name + "(")
    declared = " ".join(_declare(parameter, value) for parameter, value in where.template)

    def open_body(match: re.Match[str]) -> str:
        line = text.count("\n", 0, start + match.end()) + 1
        return f'{match.group()} {declared}\n# {line} "kernel.metal"\n'

    concrete = "__kernel " + _OPENING.sub(open_body, text[start:], count=1)
    if not where.template:
        return text[:start] + concrete
    head = text.rindex("template <", 0, start)
    line = text.count("\n", 0, head) + 1
    parameters = text.index("(", start)
    return (
        f'{text[:head]}\n# {line} "kernel.metal"\n{text[head:start]}'
        f"__kernel void {where.name}_template{text[parameters:]}"
        f'\n# {line + 1} "kernel.metal"\n{concrete}'
    )


def _function_arguments(edits: _Edits, outline: Outline) -> None:
    """`template <int (*f)(int)>` as `template <int f(int)>`, which is the same; OpenCL has no
    address space for the pointer. Of `template <F f>`, the function that the pointer F is to."""
    pointers = _function_pointers(outline)
    for i, token in enumerate(outline.tokens):
        end = outline.angle_end(i + 1) if token.text == "template" else -1
        for k in range(i + 2, end):
            if [outline[k], outline[k + 1], outline[k + 3], outline[k + 4]] == ["(", "*", ")", "("]:
                for mark in (outline.tokens[n] for n in (k, k + 1, k + 3)):
                    edits.blank(mark.start, mark.end)
            if outline[k] in pointers and outline[k - 1] in ("<", ","):
                last = outline.angle_end(k + 1) if outline[k + 1] == "<" else k
                if outline.tokens[last + 1].kind == "word":
                    start, behind = outline.tokens[k].start, outline.tokens[last].end
                    edits.replace(start, start, "zk_function<")
                    edits.replace(behind, behind, ">")


def _function_pointers(outline: Outline) -> set[str]:
    """Names of types that are pointers to functions."""
    names: set[str] = set()
    for i, token in enumerate(outline.tokens):
        if token.text not in ("typedef", "using"):
            continue
        for k in range(i + 1, outline.statement(i)[1]):
            mark = [outline[n] for n in range(k, k + 5)]
            if token.text == "using" and mark[:4] == ["(", "*", ")", "("]:
                names.add(outline[i + 1])
            elif token.text == "typedef" and mark[:2] + mark[3:] == ["(", "*", ")", "("]:
                names.add(mark[2])
    return names


def _array_parameters(edits: _Edits, outline: Outline) -> None:
    """`T c[]` as `thread T c[]`: OpenCL would deduce the space as a part of T."""
    for scope in outline.scopes:
        if scope.kind != "function":
            continue
        begin, end = scope.parameters
        words: set[str] = set()
        first, lists = begin + 1, 0
        i = first
        while i < end:
            if outline[i] == "[" and outline[i + 1] != "[" and not words & {*SPACES, "&"}:
                start = outline.tokens[first].start
                edits.replace(start, start, "thread ")
                words.add("thread")
            lists += (outline[i] == "<") - (outline[i] == ">")
            if outline[i] == "," and not lists:
                first, words = i + 1, set()
            words.add(outline[i])
            i = outline.partner[i] + 1 if outline[i] in ("(", "[", "{") else i + 1


def _constructors(edits: _Edits, outline: Outline) -> None:
    """`V(a, b)` as `zk_make<V>(a, b)`, and `V v(a, b)` as `V v = zk_make<V>(a, b)`, for vectors and
    for types whose meaning a scan does not know."""
    macros = list(_macros(outline.text))
    aliases = _maybe_vectors(outline)
    for macro in macros:
        if macro.is_vector([]):
            aliases[macro.name] = [outline.file]
    called = {macro.name: macro for macro in macros if macro.parameters is not None}
    members: dict[tuple[int, str], str] = {}
    _made(edits, outline, aliases, called, members)
    for at, owner in _initialised(outline).items():
        made = members.get((owner.open, outline[at]))
        if made and outline[at + 1] == "(" and _of_vector(outline, outline.arguments(at + 1)):
            brace, end = outline.tokens[at + 1], outline.tokens[outline.partner[at + 1]]
            edits.replace(brace.start, brace.end, f"(zk_make<{made}>(")
            edits.replace(end.start, end.end, "))")
    for macro in macros:
        inside = {name: [macro.body.file] for name in aliases}
        _made(edits, macro.body, inside, called, {})


def _made(
    edits: _Edits,
    outline: Outline,
    aliases: dict[str, list[Scope]],
    called: dict[str, _Macro],
    members: dict[tuple[int, str], str],
) -> None:
    """The calls and the variables; `called` are macros with arguments, `members` gets those of the
    text's types."""
    initialised = _initialised(outline)
    i = 0
    while i < len(outline):
        token = outline.tokens[i]
        last = i
        if token.text == "vec" and outline[i + 1] == "<":
            last = outline.angle_end(i + 1)
            if last < 0:
                last = i
            elif [outline[k] for k in range(i + 2, last - 1)] == ["bool", ","]:
                edits.replace(token.start, outline.tokens[last].end, f"bool{outline[last - 1]}")
                i = last + 1
                continue
        known = token.text in VECTORS or last > i
        alias = outline.is_within(i, aliases.get(token.text, ()))
        macro = called.get(token.text)
        if macro and outline[i + 1] == "(" and i + 1 in outline.partner:
            values = [
                (outline.tokens[b].start, outline.tokens[e - 1].end)
                for b, e in outline.arguments(i + 1)
            ]
            if macro.is_vector([edits.text[b:e] for b, e in values]):
                alias, last = True, outline.partner[i + 1]
        if (known or alias) and i not in initialised:
            name = edits.text[token.start : outline.tokens[last].end]
            call = outline[last + 1] == "(" and outline[i - 1] not in ("operator", "~", "struct")
            # `V (&name)[4]` declares, `V (*)(int)` is a type.
            close = last + (3 if outline[last + 3] == ")" else 4)
            declares = outline[last + 2] in ("&", "*") and outline[close + 1] in ("[", "(")
            if call and not (declares and outline[close] == ")"):
                edits.replace(token.start, outline.tokens[last].end, f"zk_make<{name}>")
            elif last + 1 < len(outline) and outline.tokens[last + 1].kind == "word":
                _declaration(edits, outline, i, last + 1, name, known, members)
        i = max(last, i) + 1


@dataclass
class _Macro:
    """A macro; the outline of its body, at its place in the text; and its parameters, if any."""

    name: str
    body: Outline
    parameters: list[str] | None

    def is_vector(self, values: list[str]) -> bool:
        """Whether it is a type of vectors for these values of its parameters."""
        given = dict(zip(self.parameters or [], values, strict=False))
        words = [given.get(token.text, token.text) for token in self.body.tokens]
        return bool(_VECTOR.fullmatch(" ".join(words).replace(" ## ", "")))


def _macros(text: str) -> Iterator[_Macro]:
    for match in DEFINE.finditer(text):
        tokens = tokenize(match.group())
        if len(tokens) < 3:
            continue  # without a name, which clang says
        _, _, name, *more = tokens
        behind, parameters = name.end, None
        if more and more[0].text == "(" and more[0].start == name.end:
            close = next((k for k, token in enumerate(more) if token.text == ")"), 0)
            behind, parameters = more[close].end, [t.text for t in more[1:close:2]]
        start = match.start() + behind
        yield _Macro(name.text, Outline(" " * start + text[start : match.end()]), parameters)


def _declaration(
    edits: _Edits,
    outline: Outline,
    i: int,
    k: int,
    made: str,
    known: bool,
    members: dict[tuple[int, str], str],
) -> None:
    """The variables from token k on, of the type `made` at token i, which is a vector if it is
    known: `v(a, b), w(c)`. Those of a struct are members, by the brace of the struct."""
    scope = outline.scope_at(i)
    while outline[i - 1] in ("::", "metal", "const", "constexpr", "static"):
        i -= 1
    if scope.kind == "type" and outline[i - 1] not in (";", "{", "}", ":"):
        return  # a parameter
    if scope.function is None and scope.kind != "type" and outline[i - 1] != "constant":
        return  # a function or its parameter
    while k < len(outline) and outline.tokens[k].kind == "word":
        values = outline.arguments(k + 1) if outline[k + 1] == "(" else None
        if scope.kind == "type":
            if values is not None:
                return  # a function
            members[scope.open, outline[k]] = made
        elif values is not None and (known or _of_vector(outline, values)):
            brace = outline.tokens[k + 1]
            edits.replace(brace.start, brace.end, f" = zk_make<{made}>(")
        while k < len(outline) and outline[k] not in (",", ";", ")", "}"):
            k = outline.skip(k)
        if outline[k] != ",":
            return
        k += 1


def _of_vector(outline: Outline, values: list[tuple[int, int]]) -> bool:
    """Whether the values in brackets may be those of a vector, and are not a scalar's."""
    return len(values) > 1 and not any(outline[begin] == "{" for begin, _ in values)


def _initialised(outline: Outline) -> dict[int, Scope]:
    """What constructors initialise, and of which type: of `S(int a) : v(a), w(a) {`, the tokens v
    and w."""
    found: dict[int, Scope] = {}
    types = {scope.name: scope for scope in outline.scopes if scope.kind == "type"}
    for scope in outline.scopes:
        if scope.kind != "function":
            continue
        owner = scope.parent if scope.parent and scope.parent.kind == "type" else None
        if outline[scope.parameters[0] - 2] == "::":  # `S::S(int a) : v(a) {`
            owner = types.get(scope.name)
        if owner is None or owner.name != scope.name:
            continue
        k = scope.parameters[1] + 1
        while k < scope.open and outline[k] != ":":
            k = outline.skip(k)
        while k < scope.open:
            if outline[k] in (":", ","):
                found[k + 1] = owner
            elif outline[k] == "<":
                k = max(k, outline.angle_end(k))
            k = outline.skip(k)
    return found


def _lists(edits: _Edits, outline: Outline) -> None:
    """`f({a, b})` as `f(zk_make<V>(a, b))` where every f of the text has a vector V there: clang
    does not convert a list that is an argument."""
    taken: dict[tuple[str, int, int], set[str]] = {}
    for scope in outline.scopes:
        if scope.kind != "function" or scope.parameters[0] not in outline.partner:
            continue
        parameters = outline.arguments(scope.parameters[0])
        for place, (begin, end) in enumerate(parameters):
            words = [outline[k] for k in range(begin, end)]
            words = words[: words.index("=")] if "=" in words else words
            vectors = [w for w in words if w in VECTORS and not {"*", "[", "<"} & set(words)]
            taken.setdefault((scope.name, len(parameters), place), set()).update(vectors or [""])
    names = {name for name, _, _ in taken}
    for i, token in enumerate(outline.tokens):
        if token.text not in names or outline[i + 1] != "(" or i + 1 not in outline.partner:
            continue
        arguments = outline.arguments(i + 1)
        for place, (begin, end) in enumerate(arguments):
            types = taken.get((token.text, len(arguments), place), set())
            if outline[begin] == "{" and len(types) == 1 and types <= VECTORS:
                opened, closed = outline.tokens[begin], outline.tokens[end - 1]
                edits.replace(opened.start, opened.end, f"zk_make<{min(types)}>(")
                edits.replace(closed.start, closed.end, ")")


def _copies(edits: _Edits, outline: Outline) -> None:
    """`const thread T& v` and `thread T&& v` as `const T v` and `T v`, and member functions of
    `thread` objects as those of any."""
    for i, token in enumerate(outline.tokens):
        before = outline[i - 2] if outline[i - 1] == "const" else outline[i - 1]
        if token.text == "thread" and before == ")":
            edits.blank(token.start, token.end)
        if token.text not in ("&", "&&"):
            continue
        first = i
        while outline.tokens[first - 1].kind == "word" or outline[first - 1] in ("::", ">"):
            first -= 1
            if outline[first] == ">":
                first = outline.angle_start(first)
                if first < 0:
                    break
        words = {outline[k] for k in range(first, i)} if first >= 0 else set()
        # A constructor of copies takes a reference.
        if outline[first - 1] == "(" and outline[first - 2] in words:
            continue
        if "thread" in words and ("const" in words or token.text == "&&"):
            for k in (*(k for k in range(first, i) if outline[k] == "thread"), i):
                edits.blank(outline.tokens[k].start, outline.tokens[k].end)


def _maybe_vectors(outline: Outline) -> dict[str, list[Scope]]:
    """Names of types in the text that may stand for a vector, and where they do: aliases and
    template parameters."""
    constructed = {s.name for s in outline.scopes if s.kind == "type"}
    names: dict[str, list[Scope]] = {}
    for i, token in enumerate(outline.tokens):
        end, name = outline.statement(i)[1] if token.text in ("using", "typedef") else i, ""
        if token.text == "typename" and outline[i - 1] in ("<", ","):
            name = outline[i + 1]
        elif token.text == "using" and outline[i + 2] == "=":
            name = "" if _whole(outline, i + 3, end, constructed) else outline[i + 1]
        elif token.text == "typedef":
            name = "" if _whole(outline, i + 1, end - 1, constructed) else outline[end - 1]
        if re.fullmatch(r"[A-Za-z_]\w*", name) and name not in constructed:
            names.setdefault(name, []).append(outline.visible(i))
    return names


def _whole(outline: Outline, begin: int, end: int, names: set[str]) -> bool:
    """Whether the tokens up to the end are one of the names, with any template list."""
    last = outline.angle_end(begin + 1) if outline[begin + 1] == "<" else begin
    return outline[begin] in names and last == end - 1


def _methods(edits: _Edits, outline: Outline) -> None:
    """A member function without an address space is one of `thread` objects, and of temporaries. In
    OpenCL it is one of any object: hence deleted overloads for the other spaces, and one without
    a body for temporaries."""
    structs = {scope.name for scope in outline.scopes if scope.kind == "type"}
    for i, token in enumerate(outline.tokens):
        if token.text != "constant" or outline[i - 1] != ")" or i - 1 not in outline.partner:
            continue
        if outline[outline.partner[i - 1] - 1] in structs:  # constructors are never const
            edits.replace(token.start, token.end, "__constant")
    for scope in outline.scopes:
        if scope.kind != "function" or scope.parent is None or scope.parent.kind != "type":
            continue
        words = [outline[j] for j in range(scope.head, scope.parameters[0])]
        close = scope.parameters[1]
        trailing = [outline[j] for j in range(close + 1, scope.open)]
        if scope.name == scope.parent.name:
            if trailing[:1] == ["thread"]:  # what a constructor makes has no space yet
                edits.blank(outline.tokens[close + 1].start, outline.tokens[close + 1].end)
        elif not {"static", "friend", "~"} & set(words) and not set(trailing) & set(SPACES):
            start = outline.tokens[scope.head].start
            head = re.sub(r"//[^\n]*|\s+", " ", edits.result(start, outline.tokens[close].end))
            const = "const" if "const" in trailing else ""
            for space in ("__global", "__local"):
                edits.replace(start, start, f"{head} {const} {space} = delete; ")
            if "auto" in words:
                continue  # its type is that of its body, which there is once
            # The body is that of `thread` objects, so that it may pass on members as `thread T&`.
            edits.replace(start, start, f"{head} {const}; ")
            behind = outline.tokens[close + 1 if const else close].end
            edits.replace(behind, behind, " __private ")
    _defaults(edits, outline)


def _returned(edits: _Edits, outline: Outline) -> None:
    """`thread S f(…)` as `S f(…)`: what a function returns has no space in OpenCL."""
    for i, token in enumerate(outline.tokens):
        k = i + 1 if token.text == "thread" else i
        while k > i and (outline.tokens[k].kind == "word" or outline[k] in ("::", "<")):
            k = outline.angle_end(k) + 1 if outline[k] == "<" else k + 1
        while outline[k - 1] == "operator" and outline[k] not in ("(", ""):
            k += 1
        named = k > i + 2 and outline[k - 2] != "::" and outline[k + 1] not in ("&", "*")
        if named and outline[k] == "(":
            edits.blank(token.start, token.end)


def _defaults(edits: _Edits, outline: Outline) -> None:
    """Copies by default, which in OpenCL have no spaces: an assignment is left out, since it is
    there anyway, and a constructor loses that of the object that it makes."""
    for i, token in enumerate(outline.tokens):
        if token.text != "default" or outline[i - 1] != "=" or outline[i + 1] != ";":
            continue
        spaced = outline[i - 2] in SPACES
        close = i - 3 if spaced else i - 2
        opened = outline.partner.get(close, -1)
        if [outline[opened - 2], outline[opened - 1]] == ["operator", "="]:
            head = opened
            while outline[head - 1] not in (";", "{", "}", ":"):
                head -= 1
            edits.blank(outline.tokens[head].start, outline.tokens[i + 1].end)
        elif spaced and close > opened + 1:
            edits.blank(outline.tokens[i - 2].start, outline.tokens[i - 2].end)


def _arms(text: str) -> str:
    """`c ? a : b` as `c ? (sizeof(zk_arms((a), (b))), a) : b`."""
    outline, edits = Outline(text), _Edits(text)
    for i, token in enumerate(outline.tokens):
        if token.text != "?":
            continue
        colon = _arm_end(outline, i + 1, (":",))
        end = _arm_end(outline, colon + 1, (",", ";", ":"))
        if end >= len(outline):
            continue
        middle = text[token.end : outline.tokens[colon].start]
        last = text[outline.tokens[colon].end : outline.tokens[end - 1].end]
        check = f"sizeof(zk_arms(({middle}), ({last})))"
        edits.replace(token.end, token.end, " (" + re.sub(r"//[^\n]*|\s+", " ", check) + ",")
        edits.replace(outline.tokens[colon].start, outline.tokens[colon].start, ") ")
    return edits.result()


def _arm_end(outline: Outline, i: int, stops: tuple[str, ...]) -> int:
    """The first token after i, outside brackets and nested ?:, that ends an arm."""
    nested = 0
    while i < len(outline):
        text = outline[i]
        if text in ("(", "[", "{") and i in outline.partner:
            i = outline.partner[i]
        elif text in (")", "]", "}"):
            return i
        elif text == "?":
            nested += 1
        elif text == ":" and nested:
            nested -= 1
        elif text in stops:
            return i
        i += 1
    return i
