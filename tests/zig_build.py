"""Builds and runs the programs of the Zig front end."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from zmlx import cache as zmlx_cache

ROOT = Path(__file__).resolve().parent.parent
ZIG = ROOT / "zig"


def folder() -> Path:
    """Where Zig's cache and outputs go; processes that build at once wait for each other there. A
    folder for each tree, since Zig takes what it built of another one for what this one would
    be."""
    return zmlx_cache.directory("zig") / hashlib.sha256(str(ZIG).encode()).hexdigest()[:12]


def build(*arguments: str, cwd: Path = ZIG, check: bool = True) -> subprocess.CompletedProcess:
    """`zig build ARGUMENTS`."""
    command = [sys.executable, "-m", "ziglang", "build", *arguments]
    command += ["--cache-dir", str(folder()), "--prefix", str(folder() / "out")]
    if not any(a.startswith("-Dpython=") for a in arguments):
        command.append(f"-Dpython={sys.executable}")
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


@cache
def program(name: str) -> Path:
    """A built program."""
    build(name)
    return folder() / "out" / "bin" / name


class Process:
    """A program that answers a line of JSON with a line of JSON."""

    def __init__(self, name: str) -> None:
        self._child = subprocess.Popen(
            [program(name)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
        )

    def ask(self, requests: Sequence[Any]) -> list[Any]:
        """An answer to each request."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        answers = []
        for request in requests:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
            assert line, f"the program ended at {request}"
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        """Ends the program, which must agree."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        assert self._child.wait(timeout=60) == 0
        assert self._child.stdout is not None
        self._child.stdout.close()
