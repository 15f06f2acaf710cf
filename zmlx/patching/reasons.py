"""Why a module is left alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import NoReturn


class UnmatchedError(Exception):
    """Why a module is left alone."""


class Noticed(BaseException):
    """A module's call does what its trace does not show; no `except Exception` in the call takes it
    for an error of its own."""


_noticed: list[str] = []


def notice(why: str) -> NoReturn:
    """What a stand-in does in a call that goes by more than a trace shows."""
    _noticed.append(why)
    raise Noticed(why)


@contextmanager
def noticing() -> Iterator[None]:
    """Raises `UnmatchedError` where something is noticed meanwhile, whatever the call makes of
    it."""
    before = len(_noticed)
    try:
        yield
    finally:
        found = _noticed[before:]
        del _noticed[before:]
        if found:
            raise UnmatchedError(found[0]) from None


class NoGradientError(UnmatchedError):
    """MLX has no gradient of a module's call, such as by indices that it gathers by."""


class CaptureError(UnmatchedError):
    """A module's call, or that of a child in it, raised in a trace, when `calls` children had
    returned."""

    def __init__(
        self, error: Exception, calls: int, child: str | None = None, missing: Sequence[str] = ()
    ) -> None:
        given = f" with None for {', '.join(missing)}" * bool(missing)
        who = f"{child}: " if child else ""
        super().__init__(f"its call cannot be captured{given}: {who}{first_line(error)}")
        self.calls = calls


class Reasons:
    """Why each of several tries did not match. Of them counts the first that says what the call
    does, or else the one whose call went furthest."""

    def __init__(self) -> None:
        self._first: UnmatchedError | None = None
        self._furthest: CaptureError | None = None

    def add(self, reason: UnmatchedError) -> None:
        """The reason of another try."""
        if not isinstance(reason, CaptureError):
            self._first = self._first or reason
        elif self._furthest is None or reason.calls > self._furthest.calls:
            self._furthest = reason

    def one(self, default: str) -> UnmatchedError:
        """The one that counts, or a default where there is none."""
        return self._first or self._furthest or UnmatchedError(default)


def first_line(error: Exception) -> str:
    """The first line of an error's message, shortened; its class where it has none."""
    lines = str(error).strip().splitlines()
    return shorten(lines[0] if lines else type(error).__name__, 120, placeholder=" …").rstrip(":")
