"""What all patterns have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .parts import Operand, Output
from .text import array, unique

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)

#: Names that bodies use themselves, and suffixes that they add to the names of a pattern.
RESERVED = frozenset(
    (
        "D", "G", "N", "RPG", "STEPS", "TPR", "U", "batches", "chunk", "j", "parts", "row", "rows",
        "size",
        "D_", "ahead_", "apart_", "away_", "b_", "base_", "block_", "blocks_", "both_", "column_",
        "d_", "e_", "end_", "first_", "front_", "full_", "group_", "i_", "item_", "items_", "k_",
        "lane_", "last_", "later_", "live_", "m_", "more_", "n_", "p_", "page_", "part_", "place_",
        "places_", "q_", "r_", "run_", "s_", "share_", "shift_", "slot_", "some_", "start_",
        "step_", "steps_", "stop_", "t_", "turn_", "u_", "v_", "w_", "whole_", "width_", "words_",
    )
)  # fmt: skip
SUFFIXES = (
    "_after", "_before", "_block", "_carry", "_drawn", "_first", "_in", "_in_at", "_in_first",
    "_in_row", "_in_rows", "_in_step", "_kept", "_kept_tail", "_key", "_left", "_most", "_next",
    "_out", "_out_first", "_out_row", "_out_step", "_own", "_part", "_rest", "_right", "_run",
    "_scratch", "_sum", "_sum_tail", "_t", "_total",
)  # fmt: skip

#: Names that are read as something else than a value. Compilers own those that begin with two
#: underscores or one and a capital, macros are all capitals, the headers' own names have prefixes;
#: then what bodies call, what MLX declares around them, and constants of the expression language.
_OTHER_MEANING = re.compile(
    r"""_[A-Z_]\w* | [A-Z][A-Z0-9_]{2,} | (?:zmlx|zk|ZMLX|ZK)_\w* | scratch_\w+ | size_t
      | (?:dispatch_)?(?:thread|quad|simd)\w*_(?:in|per)_\w+
      | thread_execution_width | grid_origin | grid_size
      | pi | inf | nan | assert""",
    re.VERBOSE | re.ASCII,
)


def taken_names(names: Iterable[str]) -> frozenset[str]:
    """Names that the body of a pattern of `names` uses itself."""
    return RESERVED | {name + suffix for name in names for suffix in SUFFIXES}


def free_names(names: Iterable[str]) -> dict[str, str]:
    """Each of `names` as a pattern can take it: itself, with a word before it where it means
    something else to a compiler, and with underscores behind it where a body uses it itself."""
    names = tuple(names)
    taken = taken_names(names)
    free: dict[str, str] = {}
    for name in names:
        text = f"named_{name}" if _OTHER_MEANING.fullmatch(name) else name
        while text in taken or (text != name and text in (*names, *free.values())):
            text += "_"
        free[name] = text
    return free


def name_beside(stem: str, names: Iterable[str]) -> str:
    """`stem`, with underscores behind it until a pattern can have it beside `names`."""
    others = frozenset(names)
    taken = taken_names(others) | others
    while stem in taken or any(stem + suffix in others for suffix in SUFFIXES):
        stem += "_"
    return stem


def _check_parts(items: Sequence[Operand] | Sequence[Output]) -> None:
    """Raises unless inputs or outputs are slices of their arrays."""
    parts: dict[str, int] = {}
    for x in items:
        if x.parts < 1:
            raise ValueError(f"[codegen] 'parts' must be at least 1 but got {x.parts}.")
        if not 0 <= x.part < x.parts:
            raise ValueError(f"[codegen] 'part' must be from 0 to {x.parts - 1} but got {x.part}.")
        known = parts.setdefault(array(x, ""), x.parts)
        if known != x.parts:
            raise ValueError(
                f"[codegen] 'parts' must be the same for all of {array(x, '')!a} but got {known} "
                f"and {x.parts}."
            )


class Pattern:
    """Inputs, outputs, and the body of a kernel that maps one to the other.

    The kernel's parameters are the arrays behind `inputs` (`x_in`), the launch constants, and the
    arrays behind `outputs` (`y_out`); operands that are parts of one array share a parameter.
    """

    inputs: tuple[Operand, ...]
    outputs: tuple[Output, ...]

    def __post_init__(self) -> None:
        names = self.names()
        taken = taken_names(names)
        for name in names:
            if not _IDENTIFIER.fullmatch(name):
                raise ValueError(f"[codegen] 'name' must be an identifier but got {name!a}.")
            if name in taken:
                raise ValueError(
                    f"[codegen] 'name' must not be a name of the body itself but got {name!a}."
                )
        if not self.outputs:
            raise ValueError("[codegen] 'outputs' must have at least one entry but got ().")
        _check_parts(self.inputs)
        _check_parts(self.outputs)

    def names(self) -> tuple[str, ...]:
        """What the pattern names: operands, lets, reductions and outputs."""
        return unique([*(x.name for x in self.inputs), *(y.name for y in self.outputs)])

    @property
    def constants(self) -> tuple[str, ...]:
        """The launch constants that follow the inputs."""
        return ()

    @property
    def header(self) -> str:
        """Functions that the body calls."""
        return ""

    @property
    def input_names(self) -> tuple[str, ...]:
        """Parameters of the kernel that are inputs."""
        return unique(array(x, "_in") for x in self.inputs) + self.constants

    @property
    def output_names(self) -> tuple[str, ...]:
        """Parameters of the kernel that are outputs."""
        return unique(array(y, "_out") for y in self.outputs)

    def source(self) -> str:
        """The body."""
        raise NotImplementedError
