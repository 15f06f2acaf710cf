"""Run a script for the Mac here: its Metal kernels run on zmlx's targets."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import runpy
import sys
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT names a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or a module with -m")
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="…", help="arguments of the script"
    )
    rest.required = False  # argparse calls it missing where SCRIPT is


def run(arguments: argparse.Namespace) -> int:
    """Runs the script after `install(claim_metal=True)`; returns 0, or 2 if there is no such file
    or module. What the script raises, an exit too, goes on to the caller."""
    import zmlx

    if not arguments.module and not Path(arguments.script).is_file():
        print(f"[run] no file is called {arguments.script!r}.", file=sys.stderr)
        return 2
    sys.argv = [arguments.script, *arguments.arguments]
    # As `python SCRIPT` and `python -m MODULE` do.
    sys.path[0] = "" if arguments.module else str(Path(arguments.script).resolve().parent)
    # For good: threads and exit handlers of the script run after its last line. Before a module is
    # looked for, which imports the packages that it lies in.
    zmlx.install(claim_metal=True)
    if arguments.module and not _is_module(arguments.script):
        print(f"[run] no module is called {arguments.script!r}.", file=sys.stderr)
        return 2
    if arguments.module:
        runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments.script, run_name="__main__")
    return 0


def _is_module(name: str) -> bool:
    """Whether there is such a module. What its packages raise goes on to the caller."""
    for parent in itertools.accumulate(name.split("."), "{}.{}".format):
        loaded = sys.modules.get(parent)
        if loaded is not None and getattr(loaded, "__spec__", None) is None:
            return False  # one that another module has made
        try:
            if not parent or importlib.util.find_spec(parent) is None:
                return False
        except ModuleNotFoundError as error:
            if error.name != parent:
                raise
            return False
    return True
