"""Writes what the Zig front end embeds of the Python package: `python zig/export.py`.

Everything that is data stays in Python and is exported: the shared header, the reductions, names,
constants of the geometry, how the core is compiled, the kernels of the catalogue. Only what
computes is written twice. `--check` says whether the files are current.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXPORTED = Path(__file__).resolve().parent / "src" / "exported"
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from catalogue_kernels import OPS, arguments, dtype_rule, kernels, rope_spec  # noqa: E402

from zmlx import codegen, launch, msl, native  # noqa: E402
from zmlx.codegen import elementwise, fold, monoids, scan  # noqa: E402
from zmlx.codegen import pattern as patterns  # noqa: E402
from zmlx.expr.parse import METAL_WORDS  # noqa: E402
from zmlx.kernels.rope_arguments import MOST_DIMS  # noqa: E402

HEAD = """\
// Written by zig/export.py.
// zig fmt: off
"""

#: Of `zmlx.launch`, by the names that Zig gives them.
LAUNCH = (
    "LONGEST_KEPT_ROW", "_GPU_GROUP", "_GPU_VECTOR", "_CPU_ELEMENTS", "_CPU_COLUMNS",
    "_COLUMN_CHUNKS", "_ROW_STEPS", "_FOLD_STEPS", "_RANDOM_STEPS", "_MOST_COLUMNS", "_FOLD_PARTS",
    "_SHORT_ROWS", "_SCAN_COLUMNS", "_SCAN_THREADS", "_SCAN_PARTS", "_SCAN_BLOCKS", "_LEAST_PART",
    "_PARTS",
)  # fmt: skip


class Name(str):
    """An enum literal."""


def zon(value: Any, indent: int = 0) -> str:
    """A value as Zig's object notation."""
    pad, end = "    " * (indent + 1), "    " * indent
    if isinstance(value, Name):
        return f".{value}"
    if isinstance(value, str):
        # JSON's escapes are Zig's but for \\b, \\f and \\u.
        text = json.dumps(value, ensure_ascii=False)
        assert not any(ord(c) < 32 and c not in "\n\r\t" for c in value), value
        return text
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        items = [f".{name} = {zon(item, indent + 1)}" for name, item in value.items()]
    else:
        items = [zon(item, indent + 1) for item in value]
    one_line = f".{{ {', '.join(items)} }}" if items else ".{}"
    if "\n" not in one_line and len(one_line) + 4 * indent <= 96:
        return one_line
    return ".{\n" + "".join(f"{pad}{item},\n" for item in items) + end + "}"


def tables() -> dict[str, Any]:
    """What the generators read."""
    return {
        "sections": [{"name": name, "text": text} for name, text in msl.sections()],
        "step_header": codegen.STEP_HEADER,
        "row_header": codegen.ROW_HEADER,
        "prefetch_header": codegen.PREFETCH_HEADER,
        "block_header": codegen.BLOCK_HEADER,
        "reductions": [
            {"name": name, **dataclasses.asdict(rule)} for name, rule in codegen.REDUCTIONS.items()
        ],
        "monoids": [
            {
                "name": name,
                **plain(monoid),
                "states": [{"name": n, "type": t} for n, t in monoid.states],
            }
            for name, monoid in codegen.MONOIDS.items()
        ],
        "ranges": [
            {"type": t, "lowest": low, "highest": high} for t, (low, high) in monoids.RANGES.items()
        ],
        "draw_block": elementwise._BLOCK,
        "fold_block": fold._BLOCK,
        "scan_run": scan._RUN,
        "reserved": sorted(patterns.RESERVED),
        "metal_words": sorted(METAL_WORDS),
        "suffixes": list(patterns.SUFFIXES),
        "launch": {n.strip("_").lower(): getattr(launch, n) for n in LAUNCH},
    }


def plain(item: Any) -> Any:
    """A dataclass of a pattern as a dictionary without defaults."""
    if not dataclasses.is_dataclass(item):
        return [plain(i) for i in item] if isinstance(item, tuple) else item
    fields = {}
    for f in dataclasses.fields(item):
        value = getattr(item, f.name)
        if value != f.default:
            fields[f.name] = Name(value) if f.name == "kind" else plain(value)
    return fields


def catalogue() -> dict[str, Any]:
    """The kernels of some ops and their declared arguments."""
    rope = rope_spec()
    return {
        "ops": [
            {
                "name": op,
                "arguments": [
                    {**a, "dtypes": [Name(d) for d in a["dtypes"]]} for a in arguments(op)
                ],
            }
            for op in OPS
        ],
        "rope": {
            "name": rope.name,
            "input_names": list(rope.input_names),
            "output_names": list(rope.output_names),
            "body": rope.body,
            "header": rope.header,
        },
        "rope_full_name": rope.full_name,
        "rope_most_dims": MOST_DIMS,
        "kernels": [
            {
                "key": key,
                "full_name": kernel.spec.full_name,
                "kernel": {
                    "name": kernel.spec.name,
                    "header": kernel.spec.header.removesuffix(kernel.pattern.header),
                    "pattern": {type(kernel.pattern).__name__.lower(): plain(kernel.pattern)},
                    "chunks": kernel._chunks or 0,
                    "dtypes": [
                        {n: Name(v) if n == "dtype" else v for n, v in dtype_rule(rule).items()}
                        for rule in kernel.dtypes
                    ],
                },
            }
            for key, kernel in kernels()
        ],
    }


def core() -> dict[str, Any]:
    """How the core is compiled."""
    return {"flags": native.FLAGS, "hot": sorted(native.HOT)}


def files() -> dict[str, str]:
    """Name and text of each file."""
    contents = {"tables": tables(), "catalogue": catalogue(), "core": core()}
    return {f"{name}.zon": f"{HEAD}{zon(content)}\n" for name, content in contents.items()}


def stale() -> list[str]:
    """The files that are not what `files` gives."""
    return [
        name
        for name, text in files().items()
        if not (EXPORTED / name).exists() or (EXPORTED / name).read_text() != text
    ]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if stale():
            sys.exit(f"not current: {', '.join(stale())}; run `python zig/export.py`")
    else:
        EXPORTED.mkdir(exist_ok=True)
        for name, text in files().items():
            (EXPORTED / name).write_text(text)
