"""``python -m zmlx``: the command line. Each subcommand is a module of :mod:`zmlx.cli`."""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from zmlx.backend import require_mlx
from zmlx.version import __version__

COMMANDS = (
    "list",
    "show",
    "doctor",
    "check",
    "language",
    "bench",
    "tune",
    "validate",
    "demo",
    "run",
)
"""Names of subcommands and of the modules behind them, in the order of the help text."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    main_parser = argparse.ArgumentParser(
        prog="python -m zmlx",
        description="Custom kernels for MLX, from one Metal source, on Metal, CUDA and the CPU.",
    )
    main_parser.add_argument("--version", action="version", version=f"zmlx {__version__}")
    commands = main_parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = import_module(f"zmlx.cli.{name}")
        summary = (module.__doc__ or "").strip().partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        module.configure(command)
        command.set_defaults(run=module.run)
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0 for success, 2 for wrong usage, 130
    where the user interrupted it."""
    parsed = parser().parse_args(arguments)
    try:
        require_mlx()
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        import_module("zmlx.launch")  # which reads ZMLX_TARGET
        import_module("zmlx.checks")  # and this one ZMLX_CHECK
        import_module("zmlx.cache").root()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        status: int = parsed.run(parsed)
    except KeyboardInterrupt:
        if parsed.command == "run":  # the script's own, with its traceback
            raise
        print("\ninterrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


def _console() -> int:
    """`main`, on streams that may lack a letter or be closed by who reads them."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        status = main()
        print(end="", flush=True)  # sys.stdout is None where it was closed from the start
    except BrokenPipeError:
        # As in `… | head`: nobody wants the rest, not even what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # What is buffered cannot be written at the end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"zmlx: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(_console())
