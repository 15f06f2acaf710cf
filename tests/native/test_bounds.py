"""No text makes the rewriting read beside its tokens.

The core is built with the checks of the standard library's containers, which end the process. Texts
are the table of the language, whole and cut: what stands before or after a token is missing then.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r"""
import dataclasses, re
from zmlx.language import REFUSALS, SECTIONS
from zmlx.native import load

def cuts(text):
    words = [m.start() for m in re.finditer(r"\w+|[^\w\s]", text)]
    yield text
    for at in words[1:COUNT]:
        yield text[at:]
    for at in words[::-1][:COUNT]:
        yield text[:at]

load()
print("built", flush=True)
taken = refused = 0
rows = [row for section in SECTIONS.values() for row in section.values()]
for row in [*rows, *REFUSALS.values()]:
    spec, arrays, template, grid, group, _, dtypes = row.arguments()
    specs = [dataclasses.replace(spec, header=text) for text in cuts(spec.header)]
    specs += [dataclasses.replace(spec, body=text) for text in cuts(spec.body) if text.strip()]
    specs.append(dataclasses.replace(spec, header="const constant int zero = 0;\n"))
    for one in specs:
        for target in ("cpu", "cuda"):
            try:
                one.source(target, *arrays, template=template, grid=grid, threadgroup=group,
                           output_dtypes=dtypes)
                taken += 1
            except (RuntimeError, ValueError, TypeError):
                refused += 1
print(taken, refused)
"""


@pytest.mark.slow
def test_texts_that_begin_and_end_anywhere_are_rewritten_or_refused(tmp_path):
    compiler = tmp_path / "checked-g++"
    compiler.write_text('#!/bin/sh\nexec g++ -D_GLIBCXX_ASSERTIONS "$@"\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "ZMLX_CXX": str(compiler), "ZMLX_CACHE_DIR": str(tmp_path / "c")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("COUNT", "8")],
        env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    taken, refused = map(int, done.stdout.split()[-2:])
    assert taken > 1000
    assert refused > 1000
