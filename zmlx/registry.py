"""One entry per op: what `zmlx list`, the tests, the benchmark, the catalogue page and the JSON
export know about it. An op is tested, timed and documented by being registered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from .arguments import Argument


@dataclass(frozen=True)
class Option:
    """A keyword that is not an array: the value that benchmarks give it, which need not be the
    function's default, the other values that tests try, and whether it reaches the kernel as an
    input ("input": a new value compiles nothing) or as text ("text")."""

    name: str
    default: Any
    values: tuple[Any, ...] = ()
    passed: str = "input"


#: Draws an argument: of a NumPy generator, a shape and the sizes of the symbols.
Sample = Callable[[np.random.Generator, tuple[int, ...], Mapping[str, int]], Any]


@dataclass(frozen=True)
class Case:
    """Shapes and options of one test or benchmark call: leading axes, sizes of the symbols,
    whether the optional arguments are given, dtypes of arguments that are not the call's, symbols
    that are multiples of the first leading axis, and samples in place of the op's."""

    lead: tuple[int, ...]
    sizes: Mapping[str, int]
    why: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    optional: bool = True
    dtypes: Mapping[str, mx.Dtype] = field(default_factory=dict)
    follows: tuple[str, ...] = ()
    samples: Mapping[str, Sample] = field(default_factory=dict)


#: Shapes for ops on (*, D) arrays.
ROWS = (
    Case((3,), {"D": 1}, "one element: a mean is the element itself"),
    Case((2, 3), {"D": 5}, "shorter than a vector load, two leading axes"),
    Case((7,), {"D": 31}, "one lane short of a simdgroup"),
    Case((1,), {"D": 32}, "one row, exactly one simdgroup"),
    Case((5,), {"D": 129}, "one element past 32 lanes of 4"),
    Case((9,), {"D": 515}, "several simdgroups and a tail of 3"),
    Case((2, 2, 3), {"D": 1024}, "three leading axes, no tail"),
    Case((300,), {"D": 65}, "more rows than a group holds, last group partial"),
    Case((3,), {"D": 4097}, "one past a power of two"),
    Case((), {"D": 40}, "no leading axis"),
    Case((0,), {"D": 16}, "no rows"),
)

#: Rows past every boundary; slow.
LONG_ROWS = (
    Case((2,), {"D": 16385}, "past 16384"),
    Case((1,), {"D": 40001}, "longer than a row that is kept in registers"),
)

BENCHMARK_ROWS = (Case((4096,), {"D": 4096}), Case((2048,), {"D": 4096}), Case((8192,), {"D": 512}))


@dataclass(frozen=True)
class Op:
    """An entry of the catalogue.

    Attributes:
        name, family, summary, formula: for the catalogue; the formula in plain text.
        function: the public function, or one that calls it with its arrays first, or with values
            for options that the user must choose; `reference`: the same in plain MLX with a further
            keyword `xp`, the array namespace (`mlx.core` unless given), so that it also runs in
            float64.
        arguments: the arrays, in the order of the call; options: the other keywords.
        outputs: symbolic shapes of the outputs.
        baseline: MLX's own fused version, where it has one.
        unfused: the same by other ops of the catalogue, with an array that this one never holds.
        paper: where the method comes from.
        reads_backward: arguments that the backward reads; statistics: float32 values per row that
            the forward keeps for it.
        view_gradient: whether the gradient is a view of the cotangent, which moves nothing.
        flops: operations of a forward where it is a matrix product, as an expression of the
            symbols, the options and `rows`, the leading axes; then its rate is measured in these.
        torch: the same op as an expression of torch, of the argument names and `F`.
        cases, long_cases, benchmarks: shapes; see `ROWS`.
        samples: how to draw an argument that is not normally distributed, by name.
        rounding: multiples of eps(dtype)·max|result| allowed over the float64 reference; more than
            4 only with a reason in the entry.
        refuses: transforms that the op cannot take ("shapeless compile", "vmap", "jvp"), with the
            remedy.
        needs: transforms that take a newer MLX than the oldest supported one, with its version.
    """

    name: str
    family: str
    summary: str
    formula: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: tuple[Argument, ...]
    options: tuple[Option, ...] = ()
    outputs: tuple[str, ...] = ("(*, D)",)
    baseline: Callable[..., Any] | None = None
    unfused: Callable[..., Any] | None = None
    paper: str = ""
    reads_backward: tuple[str, ...] = ()
    statistics: int = 0
    view_gradient: bool = False
    flops: str = ""
    torch: str = ""
    cases: tuple[Case, ...] = ROWS
    long_cases: tuple[Case, ...] = LONG_ROWS
    benchmarks: tuple[Case, ...] = BENCHMARK_ROWS
    samples: Mapping[str, Sample] = field(default_factory=dict)
    rounding: float = 4.0
    refuses: Mapping[str, str] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)

    @property
    def public(self) -> Callable[..., Any]:
        """What a user calls."""
        from . import kernels

        return getattr(kernels, self.name)  # type: ignore[no-any-return]

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Indices of the arguments that have a gradient."""
        return tuple(i for i, a in enumerate(self.arguments) if a.differentiable)

    @property
    def timed(self) -> tuple[str, ...]:
        """The modes in which there is work to time."""
        gradients = self.differentiable and not self.view_gradient
        return ("forward", "backward", "both") if gradients else ("forward",)


#: `Op.needs` of scans, and of what counts elements with `mx.cumsum` where shapes are not known.
COUNTS_ELEMENTS = {"shapeless compile": "0.32.3"}

_ops: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Adds an entry; a name is used once."""
    if op.name in _ops:
        raise ValueError(f"[register] 'name' must be new but got {op.name!r} twice.")
    _ops[op.name] = op
    return op


#: Calls of kernels that no op reaches by itself, by name: the strict front end and the CUDA sweep
#: record what they launch. Each is called with a floating dtype.
_calls: dict[str, Callable[[Any], Any]] = {}


def register_call(name: str, call: Callable[[Any], Any]) -> None:
    """Adds a call that launches kernels, for the checks of kernels' texts; a name is used once."""
    if name in _calls:
        raise ValueError(f"[register_call] 'name' must be new but got {name!r} twice.")
    _calls[name] = call


def calls() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """The calls of `register_call`, by name."""
    from . import kernels  # noqa: F401

    yield from sorted(_calls.items())


def ops(family: str | None = None) -> Iterator[Op]:
    """The catalogue, by family and name."""
    from . import kernels  # noqa: F401  (importing the catalogue fills it)

    for op in sorted(_ops.values(), key=lambda o: (o.family, o.name)):
        if family is None or op.family == family:
            yield op


def get(name: str) -> Op:
    """The op of that name; a `KeyError` suggests near ones."""
    list(ops())  # the catalogue is filled by being listed
    if name not in _ops:
        raise KeyError(f"no op is called {name!r}{_hint(name, _ops)}")
    return _ops[name]


def select(names: Collection[str]) -> list[Op]:
    """The ops that have one of the names, or whose family has; all without a name."""
    catalogue = list(ops())
    known = {name for op in catalogue for name in (op.name, op.family)}
    for name in names:
        if name not in known:
            raise KeyError(f"no op or family is called {name!r}{_hint(name, known)}")
    return [op for op in catalogue if not names or {op.name, op.family} & set(names)]


def _hint(name: str, known: Iterable[str]) -> str:
    """The end of a sentence: names that are near, whatever their case."""
    from difflib import get_close_matches

    near = get_close_matches(name.lower(), sorted(known))
    meant = f"did you mean {', '.join(near)}?" if near else "`python -m zmlx list` names them."
    return f"; {meant}"
