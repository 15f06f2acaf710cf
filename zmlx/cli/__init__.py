"""The subcommands of ``python -m zmlx``, one per file.

Each module's docstring is its help text; ``configure(parser)`` adds its options and
``run(arguments)`` returns the exit status. Whatever is heavy is imported inside ``run``.
"""

import sys


def runs_here(command: str, target: str | None = None) -> bool:
    """Whether the target (default: the one in use) runs kernels here; says why not."""
    from zmlx import launch
    from zmlx.cli.doctor import target_state

    target = target or launch.settings().target or "reference"
    state = target_state(target)
    if not state.runs:
        print(f"[{command}] the target {target} does not run here: {state.reason}", file=sys.stderr)
    return state.runs
