"""Rewrites damaged kernels for the CPU and for CUDA, by a seed; run by test_fuzz.py in a process of
its own. Prints the errors that do not say where they are."""

from __future__ import annotations

import random
import re
import signal
import sys
from pathlib import Path

from zmlx import metal, native
from zmlx.language import SECTIONS
from zmlx.targets import cpu

TOKEN = re.compile(r"\w+|\s+|.", re.DOTALL)
PIECES = [
    "(",
    ")",
    "{",
    "}",
    "[",
    "]",
    "<",
    ">",
    ";",
    ",",
    ".",
    '"',
    "'",
    "#",
    "\\",
    "/",
    "*",
    "&",
    "|",
    "?",
    ":",
    "=",
    "+",
    "-",
    "@",
    "`",
    "$",
    "~",
    "!",
    "%",
    "^",
    "[[",
    "]]",
    "/*",
    "*/",
    "//",
    "::",
    "->",
    "##",
    "...",
    "threadgroup",
    "device",
    "constant",
    "thread",
    "const",
    "static",
    "template<",
    "operator",
    "struct",
    "enum",
    "union",
    "using",
    "namespace",
    "typedef",
    "if",
    "else",
    "for",
    "while",
    "do",
    "switch",
    "case",
    "return",
    "simd_sum(",
    "threadgroup_barrier(",
    "void",
    "auto",
    "[&]",
    ".xy",
    "half",
    "1.0",
    "1.0h",
    "0x",
    "1e",
    'R"(',
    "__VA_ARGS__",
    "_Pragma(",
    "[[kernel]]",
    "\x00",
    "é",
]
PIECES += ["\n#define A(", "\n#if ", "\n#endif\n", "\n#else\n", "\\\n", "\r\n"]
WHERE = re.compile(r"\[kernel \w+\] (line \d+ of the (source|header)|the end of the source"
                   r"|the kernel's signature): |.* the header opens a comment"
                   r"|.* the header's last line, ", re.DOTALL)  # fmt: skip


def damaged(text: str, rng: random.Random) -> str:
    """The text after a few cuts, insertions and exchanges."""
    tokens = TOKEN.findall(text)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(tokens) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            tokens = tokens[:at]
        elif kind == 1:
            tokens = tokens[at:]
        elif kind == 2:
            del tokens[at : at + rng.choice((1, 1, 2, 5))]
        elif kind == 3:
            tokens.insert(at, rng.choice(PIECES))
        elif tokens:
            other = rng.choice(tokens)
            tokens[at : at + (kind == 4)] = [other]
    return "".join(tokens)


def main(seed: int, count: int, latest: Path) -> None:
    native.load()
    signal.alarm(60)  # ends the process if a rewrite does not
    rng = random.Random(seed)
    rows = [row.arguments(32) for rows in SECTIONS.values() for row in rows.values()]
    for _ in range(count):
        spec, *launch = rng.choice(rows)
        header, body = spec.header, spec.body
        if header and rng.random() < 0.5:
            header = damaged(header, rng)
        else:
            body = damaged(body, rng)
        if not body.strip():
            continue
        changed = metal.KernelSpec("k", spec.input_names, spec.output_names, body, header)
        for target in ("cpu", "cuda"):
            latest.write_text(f"{target}\n--- header\n{header}\n--- body\n{body}")
            try:
                cpu.text(changed, target, *launch)
            except RuntimeError as error:
                if not WHERE.match(str(error)):
                    print(error)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
