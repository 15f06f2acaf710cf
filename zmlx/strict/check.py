"""The checks: translate, let clang read, apply the rules, map every line to the user's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import clang, conditionals, rules, translate
from .tokens import Outline

if TYPE_CHECKING:
    import mlx.core as mx

    from ..metal import KernelSpec

#: The oldest version of Metal that a supported MLX compiles kernels with (macOS 14); macOS 15 has
#: 320, macOS 26 has 400. Whatever is valid here is valid there.
METAL_VERSION = 310

_INTO_KERNEL = "the header's last line goes on into the kernel: end the header with a newline"
_WIDER = re.compile(r"increases floating-point precision: (.*) to (.*)")
_FLOAT = r"'(?:const |volatile )*float'"
_NARROW = re.compile(rf"(?:{_FLOAT}(?: \(aka [^)]*\))?|'[^']*' \(aka {_FLOAT}\)) to '([^']*)'")


@dataclass(frozen=True)
class Problem:
    """Something that Metal refuses, or a rule of the catalogue that is broken.

    Attributes:
        line: 1 is the first line of the kernel's source, or of its header.
        where: "source" or "header".
        message: what is wrong.
        code: the line itself.
        rule: "metal" or "catalogue".
    """

    line: int
    where: str
    message: str
    code: str
    rule: str = "metal"

    def __str__(self) -> str:
        return f"line {self.line} of the {self.where}: {self.message}\n    {self.code.strip()}"


def check(
    metal_text: str, *, version: int = METAL_VERSION, catalogue: bool = False
) -> list[Problem]:
    """What Metal refuses in a complete kernel function as MLX makes it.

    Args:
        metal_text: see `metal_text`.
        version: of the language, 310 for Metal 3.1.
        catalogue: check the rules that zmlx's own kernels keep too.
    """
    return check_many([metal_text], version=version, catalogue=catalogue)[0]


def check_many(
    metal_texts: Sequence[str], *, version: int = METAL_VERSION, catalogue: bool = False
) -> list[list[Problem]]:
    """`check` of every text, in parallel; about 15 ms each."""
    parted = [translate.apart(text) for text in metal_texts]
    outlines = [Outline(conditionals.taken(text, version)) for text, _ in parted]

    def read(some: list[Outline], *, copied: bool) -> list[list[clang.Diagnostic]]:
        texts = [translate.to_clang(o.text, o, arms=catalogue, copied=copied) for o in some]
        return clang.read(texts, version, function_pointers=not catalogue)

    found = read(outlines, copied=False)
    # What has a temporary is read once more, with copies where Metal binds a reference to it.
    temporaries = [{d.line for d in some if _of_temporary(d)} for some in found]
    which = [k for k, lines in enumerate(temporaries) if lines]
    again = read([outlines[k] for k in which], copied=True) if which else []
    for k, diagnostics in zip(which, again, strict=True):
        kept = [d for d in found[k] if not _of_temporary(d)]
        more = (d for d in diagnostics if d.line in temporaries[k] and _UNRESOLVED.match(d.message))
        found[k] = kept + list(more)
    return [
        _problems(outline, line, diagnostics, version, catalogue)
        for outline, (_, line), diagnostics in zip(outlines, parted, found, strict=True)
    ]


def _problems(
    outline: Outline,
    into_kernel: int,
    diagnostics: list[clang.Diagnostic],
    version: int,
    catalogue: bool,
) -> list[Problem]:
    """The problems of a text in which the header's line `into_kernel`, if there is such, takes in
    the kernel's first."""
    where = translate.layout(outline.text)
    lines = outline.text.split("\n")

    def place(line: int) -> tuple[int, str]:
        if line >= where.body_line:
            return line - where.body_line + 1, "source"
        return line, "header"

    def problem(line: int, message: str, rule: str) -> Problem:
        number, part = place(line)
        # A message may name another line in braces.
        message = re.sub(r"\{(\d+)\}", lambda m: str(place(int(m[1]))[0]), message)
        code = lines[line - 1] if 0 < line <= len(lines) else ""
        return Problem(number, part, message, code, rule)

    found = {problem(line, text, "metal"): None for line, text in rules.metal(outline, version)}
    if into_kernel:
        found[problem(into_kernel, _INTO_KERNEL, "metal")] = None
    kernels = [
        range(outline.tokens[s.head].line, outline.tokens[s.close].line + 1)
        for s in outline.scopes
        if s.kind == "function"
        and outline.tokens[s.open].start < where.kernel
        and "kernel" in {outline[i] for i in range(s.head, s.parameters[0])}
    ]
    for diagnostic in diagnostics:
        said = _say(diagnostic)
        if _LOCAL in diagnostic.message and any(diagnostic.line in lines for lines in kernels):
            continue  # of a kernel in the header, which translate.py makes a function
        if said is not None and (said[1] == "metal" or catalogue):
            found[problem(diagnostic.line, *said)] = None
    if catalogue:
        for line, text in rules.catalogue(outline, where):
            found[problem(line, text, "catalogue")] = None
    return sorted(found, key=lambda p: (p.where != "header", p.line))


# Of OpenCL, not of Metal.
_NOT_METAL = re.compile(
    r"bit-fields are not supported"
    r"|kernel functions cannot be used in a template"
    r"|scalar operand type has greater rank(?!.*bfloat)"
    r"(?=.*(?:vec<half|'half' values)|(?!.*'[^']*\b(?:float|half)'))"
    r"|requested shift is a vector .* not a vector \('(?:const |__\w+ |unsigned |signed )*"
    r"(?:char|short|int|long)'"
    r"|(cast|conversion) from '[^']*'( \(aka '(\w+ )*half'\))? to .*__bf16.* is not allowed"
    r"|cast from '([^']*' \(aka ')?[^']*__bf16'.* to .*half.* is not allowed"
)
_SAYS = (
    (re.compile(r"(variables in the local address space can only be .*)"), "catalogue"),
    (re.compile(r"((?:pointers to|taking address of) functions? .*)"), "catalogue"),
    (re.compile(r"static assertion failed.*?: (both arms of .*)"), "catalogue"),
)
_SPELLINGS = (
    (
        r"call to deleted member function '([^']*)'",
        r"'\1' is a member function of thread objects: qualify it with the space of this one",
    ),
    (r"call to deleted function '(\w+)'", r"call to '\1' is ambiguous"),
    (r"\b__global\b", "device"),
    (r"\b__local\b", "threadgroup"),
    (r"\b__private\b", "thread"),
    (r"\b__constant\b", "constant"),
    (r"\b__generic ", ""),
    (r"\blocal address space", "threadgroup address space"),
    (r"\bzk_make<(\w+)>", r"\1"),
    (r"\bzk_(?=\w)", ""),
    (r"__bf16", "bfloat"),
    (r"\bvec<(\w+), (\d)>", r"\1\2"),
    (r" \(aka '[^']*ext_vector_type[^)]*\)\)\)'\)", ""),
    (r"__attribute__\(\(ext_vector_type\((\d)\)\)\)", r"vector of \1"),
    (
        r"scalar operand type has greater rank than the type of the vector element\. \((.*)\)",
        r"the scalar does not convert to the elements of the vector: cast one of them (\1)",
    ),
    (r"use of type 'double' requires.*", "Metal has no double (§2.1)"),
    (r"C\+\+ for OpenCL( version 2021)?|OpenCL", "Metal"),
    (r" \[-W[^\]]*\]$", ""),
)


# A temporary has no space in OpenCL, and is one of `thread` in Metal.
_NO_SPACE = r"'(?!.*__(?:global|local|private|constant|generic)\b)"
_NUMBER = r"(?:unsigned )?(?:bool|char|short|int|long|float|half|__bf16)\b"
_TEMPORARY = re.compile(
    r"cannot bind reference in default address space to object in address space '__private'"
    rf"|cannot deduce a type for '\w+' that would make '(const )?__private [^']*' equal {_NO_SPACE}"
    rf"|could not match '(const )?__private [^']*' against {_NO_SPACE}"
    rf"|binding reference of type '(const )?__private .* to value of type {_NO_SPACE}.*changes"
    rf"|cannot initialize object parameter of type '(const )?__private [^']*' with .* {_NO_SPACE}"
    r"|'this' object is in default address space, but method expects .*'__private'"
    rf"|invalid argument type {_NO_SPACE}.* to unary expression"
    r"|invalid operands to binary expression (?!.*__(?:global|local|constant)\b)"
    rf".*'(?!{_NUMBER}|[^']*__private)[^']*'( and |\))"
)
# What clang says where it finds nothing to call, or nothing to bind.
_UNRESOLVED = re.compile(
    r"no matching |no viable |invalid operands to |invalid argument type |binding reference |"
    r"cannot initialize object parameter "
)
# OpenCL has no implicit copy from constant, nor to there, Metal has.
_COPY = re.compile(
    r"implicit (?:copy|move) constructor\) not viable: cannot bind reference .*'__constant'"
    r"|no matching constructor for initialization of '(?:const )?__constant"
)
# The arms of ?:, of one class in two spaces: OpenCL has no copy of them, Metal has.
_TYPE = r"'([^']*)'(?: \(aka '([^']*)'\))?"
_ARMS = re.compile(rf"(?:incompatible operand types \(|is ambiguous; ){_TYPE} and {_TYPE}")
_OBJECT = re.compile(r"(?:const |__(?:global|local|private|constant|generic) )*([\w:]+(<.*>)?)")
_EXTENDED = re.compile(r"use of overloaded operator .* is ambiguous .*\b(?:half|__bf16)\b")
_LOCAL = "non-kernel function variable cannot be declared in local address space"
_CAST = re.compile(r"(?:C-style |static_)cast from (.*?) to (.*)")
_COMPONENTS = re.compile(r"(?:, |ext_vector_type\()(\d)")
# Of an instance in which clang found something wrong, and said so where that was.
_INVALID = re.compile(r"candidate template ignored: substitution failure( \[with [^\]]*\])?$")


def _converts(message: str) -> bool:
    """Whether a cast is one between vectors of one length, which OpenCL has none for."""
    cast = _CAST.search(message)
    components = [_COMPONENTS.findall(side) for side in cast.groups()] if cast else []
    return all(components) and len({found[-1] for found in components}) == 1


def _copies(message: str) -> bool:
    """Whether the arms of a ?: that clang refuses are objects of one class."""
    arms = _ARMS.search(message)
    if arms is None:
        return False
    first, second = (_OBJECT.fullmatch(arms[i + 1] or arms[i]) for i in (1, 3))
    return first is not None and second is not None and first[1] == second[1]


def _of_temporary(diagnostic: clang.Diagnostic) -> bool:
    """Whether OpenCL may only refuse to bind a reference to a temporary."""
    return any(map(_TEMPORARY.search, (diagnostic.message, *diagnostic.notes)))


def _say(diagnostic: clang.Diagnostic) -> tuple[str, str] | None:
    """Message and rule of a diagnostic, or None if Metal accepts the code."""
    message = diagnostic.message
    if _NOT_METAL.search(message) or _converts(message):
        return None
    if any(_copies(text) for text in (message, *diagnostic.notes)):
        return None
    if message.startswith("no matching function") and any(map(_INVALID.search, diagnostic.notes)):
        return None
    if diagnostic.severity == "warning":
        mixed = _WIDER.search(message)
        if mixed and "__bf16" in mixed[1] and "half" in mixed[2]:
            return "bfloat and half do not mix (§3.1): cast one of them", "metal"
        narrow = _NARROW.search(message)
        if "unknown attribute" in message:
            return message.partition(" [-W")[0], "metal"
        if narrow is None or "loses floating-point precision" not in message:
            return None
        target = message.partition(" to ")[2]
        if "__bf16" in target:
            name = narrow[1]
            return f"float does not convert to '{name}' (bfloat) implicitly: cast it", "metal"
        return f"a float stored as '{narrow[1]}' must be cast", "catalogue"
    if message.startswith("too few elements in vector") and not any(
        "zk_made" in note for note in diagnostic.notes
    ):
        return None  # of a list in braces Metal clears the others
    constructs = message.startswith("no matching constructor")
    if constructs and any(map(_COPY.search, (message, *diagnostic.notes))):
        return None
    candidates = [note for note in diagnostic.notes if "candidate" in note]
    if _EXTENDED.search(message) and all(n.startswith("built-in ") for n in candidates):
        return None  # beside an enumerator clang does not count these types as numbers
    if "is ambiguous" in message and any("explicitly deleted" in n for n in diagnostic.notes):
        return None  # what a function returns has no space in OpenCL; see translate._methods
    rule = "metal"
    for pattern, which in _SAYS:
        match = pattern.search(message)
        if match:
            rule, message = which, match[1]
    for old, new in _SPELLINGS:
        message = re.sub(old, new, message)
    return message, rule


def metal_text(
    spec: KernelSpec,
    arrays: Iterable[mx.array],
    template: Iterable[tuple[str, Any]] = (),
    grid: tuple[int, int, int] = (1, 1, 1),
    threadgroup: tuple[int, int, int] = (1, 1, 1),
    output_shapes: Sequence[Sequence[int]] | None = None,
    output_dtypes: Sequence[mx.Dtype] | None = None,
) -> str:
    """The complete function that MLX would compile, from MLX's own generator (no Metal needed)."""
    import mlx.core as mx

    from ..targets import metal

    count = len(spec.output_names)
    shapes = tuple(tuple(shape) for shape in output_shapes or [(1,)] * count)
    dtypes = tuple(output_dtypes or [mx.float32] * count)
    return metal.text(spec, tuple(arrays), tuple(template), grid, threadgroup, shapes, dtypes)


def check_kernel(
    spec: KernelSpec,
    arrays: Iterable[mx.array],
    template: Iterable[tuple[str, Any]] = (),
    *,
    version: int = METAL_VERSION,
    catalogue: bool = True,
    **call: Any,
) -> list[Problem]:
    """`check` of a kernel as it would be launched on `arrays`; `call` is grid, threadgroup,
    output_shapes and output_dtypes."""
    text = metal_text(spec, arrays, template, **call)
    return check(text, version=version, catalogue=catalogue)
