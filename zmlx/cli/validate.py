"""Compare a model of mlx-lm with itself patched: tokens, speed, memory, and a verdict."""
import argparse
def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
def run(arguments: argparse.Namespace) -> int:
    """Later in this branch."""
    raise NotImplementedError
