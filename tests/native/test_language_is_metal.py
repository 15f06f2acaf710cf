"""What the tests of the language run on the CPU is Metal: the strict front end takes it too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_declarations
import test_expressions
import test_threadgroup_memory
from language_case import Case
from metal_source import core

from zmlx import strict

pytest.importorskip("ziglang")

#: Cases that the CPU takes and Metal does not, with the reason.
CPU_ONLY = {
    "small inputs are constant, large ones device": "drops a const",
    "tables in functions": "a constant is at program scope (§4.2)",
    "constant members of a struct": "a member initialized in its class is const",
    "hints": "[[unroll]] is an unknown attribute",
}


class Read(Exception):
    """Carries the text of a kernel instead of compiling it."""


@pytest.fixture
def text_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def prepare(*arguments: object) -> None:
        raise Read(core.metal_text(*arguments[:7]))

    def text(test: Callable[..., None], *arguments: str) -> str:
        with pytest.raises(Read) as caught:
            test(*arguments)
        return str(caught.value)

    monkeypatch.setattr(core, "prepare", prepare)
    return text


def cases() -> dict[str, Case]:
    """The cases of the modules that hold them, by name."""
    tables = [*vars(test_declarations).values(), *vars(test_expressions).values()]
    found = {}
    for table in tables:
        if isinstance(table, dict):
            found.update({n: c for n, c in table.items() if isinstance(c, Case)})
    return found


def test_the_language_corpus_is_metal(text_of: Callable[..., str]) -> None:
    texts = {name: text_of(case.check, "fibers") for name, case in cases().items()}
    for name in test_threadgroup_memory.THREADGROUP:
        texts[name] = text_of(test_threadgroup_memory.test_threadgroup_memory, name)
    assert len(texts) > 50
    # Metal has lambdas from 3.2 on.
    found = dict(zip(texts, strict.check_many(list(texts.values()), version=320), strict=True))
    refused = {name: [str(p) for p in problems] for name, problems in found.items() if problems}
    assert set(refused) == set(CPU_ONLY), refused
