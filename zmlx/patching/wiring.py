"""How a module's call wires its children together, found by tracing it with stand-ins for them.

The trace computes nothing: it yields, for every call of a child, the expressions that the child
gets, and the expression that the module returns. Arguments other than the first array (masks,
caches) are opaque tokens; a module that looks into one cannot be captured, one that hands it on to
a child can. What a token cannot notice, `is True` and the like, is traced with such values.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import combinations, product
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .capture import Graphs
from .reasons import CaptureError, UnmatchedError, notice, noticing
from .shadows import count_of, detached, entries, is_opaque, named, rebuilt, shadow


@dataclass(frozen=True)
class Given:
    """An argument of the module's call that is handed on as it is."""

    name: str


class Argument:
    """What a module gets for such an argument in a trace: it can be handed on and compared with
    None; a module that looks into it goes by more than a trace shows."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def given(self) -> Given:
        """The argument."""
        return Given(object.__getattribute__(self, "_name"))

    def __bool__(self) -> bool:
        return True  # what goes by it differs where None is given

    def _looked_into(self, *_: Any) -> Any:
        notice(f"its call looks into {Argument.given(self).name}")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _looked_into
    __getattr__ = __getitem__ = __contains__ = __iter__ = __len__ = __call__ = _looked_into
    __class__ = property(_looked_into)


@dataclass(frozen=True)
class Call:
    """One call of a child: its path, the method, and what it gets: numbers of expressions (as
    `int`), `Given`, or plain values wrapped in a tuple."""

    path: str
    method: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]


@dataclass
class Wiring:
    """Calls in their order, and what the module returns. Input 0 is the module's array (and the
    next ones are those that it gets beside it), then comes what the calls returned: one array each,
    or two where pairs were asked for. The last are arrays that it holds, so that nothing goes by
    their values: a learned factor of 1 is not taken for nothing.

    Attributes:
        shapes: of the arrays that calls returned.
        first: of each call, the index in `shapes` of its array, or of its two.
        second: the other array that the module returns, None where it is one.
        arrays: how many arrays the module gets.
        own: the arrays that it holds.
    """

    calls: list[Call]
    result: int
    shapes: list[tuple[tuple[int, ...], mx.Dtype]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    second: int | None = None
    arrays: int = 1
    own: list[mx.array] = field(default_factory=list)

    def given(self, *arrays: mx.array) -> list[mx.array]:
        """Inputs like those of the trace; `arrays`: what the module gets."""
        return [*arrays, *(mx.zeros(shape, dtype) for shape, dtype in self.shapes), *self.own]

    def input_of(self, array: mx.array) -> int:
        """Which input an array that the module holds is."""
        at = next(i for i, own in enumerate(self.own) if own is array)
        return self.arrays + len(self.shapes) + at

    def structure(self) -> Any:
        """What has to be equal for two wirings to be the same program."""
        return tuple(self.calls), self.result, self.second


def parameters_of_call(module: nn.Module) -> list[inspect.Parameter]:
    """The named parameters of the module's call after self; raises where it has one that cannot be
    given by name. What it may get besides, as `*args` and `**kwargs` say, it does not get in a
    trace, and a plan runs the module's own call where it gets it."""
    call = type(module).__call__
    every = list(inspect.signature(call).parameters.values())[1:]
    if any(p.kind is p.POSITIONAL_ONLY for p in every):
        raise UnmatchedError("its call takes an array by position only")
    parameters = [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise UnmatchedError("its call takes no array")
    return parameters


def own_call(module: Any, *arguments: Any, **keywords: Any) -> Any:
    """The module's call, on a shadow; raises where it sets an attribute, which a replacement would
    not do, and where something else is noticed."""
    before = {path: _state(m) for path, m in _inlined(module)}
    with noticing():
        result = type(module).__call__(module, *arguments, **keywords)
    for path, m in _inlined(module):
        was = before.get(path, {})
        for name, value in _state(m).items():
            if name not in was or was[name] is not value:
                raise UnmatchedError(f"its call sets {path}{name}")
    return result


def _inlined(module: Any) -> Iterator[tuple[str, Any]]:
    """A module and those below it that no stand-in stands for, with a path that ends in a dot."""
    left: list[tuple[str, Any]] = [("", module)]
    while left:
        path, value = left.pop()
        if issubclass(type(value), nn.Module):
            yield path, value
        if issubclass(type(value), (list, tuple, dict)):
            left += [(f"{path}{key}.", inner) for key, inner in entries(value)]


def _state(module: Any) -> dict[str, Any]:
    """The attributes and entries of a module."""
    return {**vars(module), **dict(entries(module))}


def random_states() -> Any:
    """Change where something is drawn: a call may go one way or another by it, as one that skips a
    layer at times, and a trace sees but one."""
    own: Any = mx.random.state
    numpys: Any = np.random.get_state(legacy=False)["state"]
    return own[0].tolist(), random.getstate(), numpys["pos"], numpys["key"].tobytes()


#: None that a call sets.
_SEEDS = iter(range(0x5EED << 32, 1 << 64))


def new_random_states() -> Any:
    """Those after a seed, so that a call which sets its own leaves others."""
    mx.random.seed(next(_SEEDS))
    return random_states()


class Stand:
    """Stands for a child: its calls go to `record`; what is no array can be read from it, and
    mlx-lm's dataclass of a model's arguments. A module that asks for its class goes by what another
    child in its place may not have."""

    def __init__(self, module: nn.Module, path: str, record: Callable[..., Any]) -> None:
        self.__dict__.update(_module=module, _path=path, _record=record)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The child's call."""
        return self._record(self._path, "__call__", self._module, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        path = f"{self._path}.{name}"
        if isinstance(value, nn.Module):
            return Stand(value, path, self._record)
        if inspect.ismethod(value):
            return lambda *a, **k: self._record(self._path, name, self._module, a, k)
        if isinstance(value, (bool, int, float, str, type(None))) or is_dataclass(value):
            return value
        notice(f"its call reads {path}")

    def __setattr__(self, name: str, value: Any) -> None:
        notice(f"its call sets {self._path}.{name}")

    def _looked_into(self, *_: Any) -> Any:
        notice(f"its call looks into {self._path}")

    __eq__ = __ne__ = __hash__ = _looked_into
    __getitem__ = __setitem__ = __delitem__ = __delattr__ = _looked_into
    __contains__ = __iter__ = __len__ = _looked_into

    def _classed(self) -> Any:
        notice(f"its call goes by the class of {self.__dict__['_path']}")

    __class__ = property(_classed)


def stands(
    module: nn.Module,
    record: Callable[..., Any],
    of_array: Callable[[mx.array], mx.array] = copy.copy,
) -> dict[str, Any]:
    """Entries for `shadow` with a stand-in for every opaque child, and for every array, which a
    call may change in place, a copy or another; raises where one child is in two places, as the
    module may ask whether it is."""
    paths: dict[int, str] = {}

    def convert(value: Any, path: str) -> Any:
        if isinstance(value, nn.Module):
            if not is_opaque(value):
                return detached(value)
            if (other := paths.setdefault(id(value), path)) != path:
                raise UnmatchedError(f"its {other} and {path} are one module")
            return Stand(value, path, record)
        if isinstance(value, (list, tuple, dict)):
            return rebuilt(value, {k: convert(v, f"{path}.{k}") for k, v in entries(value)})
        return of_array(value) if isinstance(value, mx.array) else value

    return {key: convert(value, key) for key, value in entries(module)}


def _shapes(
    module: nn.Module, arrays: Sequence[mx.array], arguments: Mapping[str, Any], pairs: bool
) -> list[list[tuple[tuple[int, ...], mx.Dtype]]]:
    """Shapes and dtypes of what each call of a child returns; nothing is computed."""
    found: list[list[tuple[tuple[int, ...], mx.Dtype]]] = []
    running: str | None = None

    def record(path: str, method: str, child: Any, a: Any, k: Any) -> Any:
        nonlocal running
        running = path
        result = getattr(detached(child), method)(*a, **k)
        running = None
        found.append([(tuple(y.shape), y.dtype) for y in _arrays(result, path, pairs)])
        return result

    twin = shadow(module, stands(module, record))
    try:
        own_call(twin, *arrays, **arguments)
    except UnmatchedError:
        raise
    except Exception as error:
        raise CaptureError(error, len(found), running, list(arguments)) from None
    return found


def _arrays(result: Any, who: str, pairs: bool) -> tuple[mx.array, ...]:
    """What a call returned: an array, or (`pairs`) two."""
    found = result if pairs and isinstance(result, tuple) and len(result) == 2 else (result,)
    if not all(isinstance(y, mx.array) for y in found):
        raise UnmatchedError(f"{who} does not return one array{' or two' if pairs else ''}")
    return found


def _like(arrays: Sequence[mx.array], few: tuple[int, ...]) -> list[mx.array]:
    """Arrays with these axes in front."""
    return [mx.zeros((*few, *a.shape[len(few) :]), a.dtype) for a in arrays]


def _grown(shape: tuple[int, ...], few: tuple[int, ...], lead: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what a child returned for `few`, for `lead`."""
    if shape[: len(few)] == few:
        return (*lead, *shape[len(few) :])
    if shape[:1] == (prod(few),):
        return (prod(lead), *shape[1:])
    return shape


def wiring(
    graphs: Graphs,
    module: nn.Module,
    *arrays: mx.array,
    pairs: bool = False,
    few: tuple[int, ...] | None = None,
    alone: bool = False,
) -> Wiring:
    """The wiring of the module's call on arrays like these, which are its first arguments; `pairs`:
    whether it and its children may return two arrays; `alone`: of a call with nothing else, where
    its other arguments are their defaults. Children are called only to see the shapes of
    what they return, with the axes `few` in front in the place of the arrays' own, if given: one
    that goes through a long prompt step by step, or needs a value, would take its time."""
    others = [] if alone else parameters_of_call(module)[len(arrays) :]
    required = [p for p in others if p.default is p.empty]
    small = _like(arrays, few) if few else arrays
    shapes = _shapes(module, small, {p.name: None for p in required}, pairs)
    if few:
        lead = arrays[0].shape[: len(few)]
        shapes = [[(_grown(s, few, lead), dtype) for s, dtype in call] for call in shapes]
    tokens = {p.name: Argument(p.name) for p in others}
    found = _trace(graphs, module, arrays, tokens, shapes, pairs)
    half = arrays[0].dtype in (mx.float16, mx.bfloat16)
    for given in _alike(others) if half else (*_alike(others), *_unlike(tokens, others)):
        other = _trace(graphs, module, arrays, given, shapes, pairs)
        if _with_arguments(found, given) != other.structure():
            raise UnmatchedError("what it computes depends on which arguments it gets")
    return found


def _alike(others: Sequence[inspect.Parameter]) -> Iterator[dict[str, Any]]:
    """Arguments that a call may tell apart without looking into them: of one value, and the
    defaults."""
    if not others:
        return
    for value in (None, True, False):
        yield dict.fromkeys((p.name for p in others), value)
    defaults = _defaults(others)
    if any(value is not None for value in defaults.values()):
        yield defaults


def _unlike(
    tokens: Mapping[str, Any], others: Sequence[inspect.Parameter]
) -> Iterator[dict[str, Any]]:
    """Arguments of which a call may go by one or by two together, the others being the defaults.
    One that does so goes by them in any dtype."""
    if len(others) < 2:
        return
    defaults = _defaults(others)
    for one, other in combinations(tokens, 2):
        for values in product((None, True, False, ...), repeat=2):
            pair = dict(zip((one, other), values, strict=True))
            yield {**defaults, **{n: tokens[n] if v is ... else v for n, v in pair.items()}}


def _defaults(others: Sequence[inspect.Parameter]) -> dict[str, Any]:
    """What is not given; None for what has to be."""
    return {p.name: None if p.default is p.empty else p.default for p in others}


def _trace(
    graphs: Graphs,
    module: nn.Module,
    own: Sequence[mx.array],
    given: Mapping[str, Any],
    shapes: Sequence[Sequence[tuple[tuple[int, ...], mx.Dtype]]],
    pairs: bool,
) -> Wiring:
    pending: list[tuple[str, str, Any, Any]] = []
    held: list[mx.array] = []
    first = [sum(map(len, shapes[:i])) for i in range(len(shapes))]

    def traced(*inputs: mx.array) -> list[mx.array]:
        outputs, of_module = inputs[len(own) :], iter(inputs[len(inputs) - len(held) :])
        arrays: list[mx.array] = []

        def argument(value: Any, path: str) -> Any:
            if type(value) is Argument:
                return value.given()
            if value is None or isinstance(value, (bool, int, float, str)):
                return (value,)
            for name, default in given.items():
                if value is default:
                    return Given(name)
            if isinstance(value, mx.array):
                arrays.append(copy.copy(value))  # as it is in the call
                return len(arrays) - 1
            notice(f"{path} gets a {type(value).__name__}")

        def record(path: str, method: str, child: Any, a: Any, k: Any) -> Any:
            pending.append(
                (
                    path,
                    method,
                    tuple(argument(v, path) for v in a),
                    tuple((n, argument(v, path)) for n, v in k.items()),
                )
            )
            if len(pending) > len(shapes):
                notice("its calls depend on its arguments")
            start, count = first[len(pending) - 1], len(shapes[len(pending) - 1])
            # The module may change them in place: copies share their data.
            results = tuple(map(copy.copy, outputs[start : start + count]))
            return results[0] if count == 1 else results

        twin = shadow(module, stands(module, record, lambda _: next(of_module)))
        drawn = new_random_states()
        result = own_call(twin, *inputs[: len(own)], **given)
        if random_states() != drawn:
            raise UnmatchedError("its call draws random numbers")
        return [*arrays, *_arrays(result, "it", pairs)]

    def hold(array: mx.array) -> mx.array:
        held.append(array)
        return array

    stands(module, lambda *_: None, hold)
    flat = [shape for call in shapes for shape in call]
    inputs = [*own, *(mx.zeros(shape, dtype) for shape, dtype in flat), *held]
    try:
        numbers = graphs.capture(traced, inputs)
    except UnmatchedError:
        raise
    except Exception as error:
        raise CaptureError(error, len(shapes)) from None
    if len(pending) != len(shapes):
        raise UnmatchedError("its calls depend on its arguments")
    count = sum(isinstance(v, int) for _, _, a, k in pending for v in (*a, *(w for _, w in k)))
    arrays, (result, *second) = numbers[:count], numbers[count:]

    def resolved(value: Any) -> Any:
        return arrays[value] if isinstance(value, int) else value

    calls = [
        Call(p, m, tuple(resolved(v) for v in a), tuple((n, resolved(v)) for n, v in k))
        for p, m, a, k in pending
    ]
    return Wiring(calls, result, flat, first, second[0] if second else None, len(own), held)


def _with_arguments(found: Wiring, given: Mapping[str, Any]) -> Any:
    """The structure with arguments in the places where they are handed on."""

    def argument(value: Any) -> Any:
        if not isinstance(value, Given):
            return value
        what = given[value.name]
        if type(what) is Argument:
            return value
        return (what,) if what is None or isinstance(what, (bool, int, float, str)) else value

    calls = tuple(
        Call(c.path, c.method, tuple(map(argument, c.arguments)),
             tuple((n, argument(v)) for n, v in c.keywords))
        for c in found.calls
    )  # fmt: skip
    return calls, found.result, found.second


def widths(module: nn.Module) -> Iterator[int]:
    """Sizes that the last axis of the module's array may have, from its children's parameters."""
    seen = set()
    for _, child in named(module):
        for width in _inputs(child):
            if width not in seen:
                seen.add(width)
                yield width


def _inputs(child: nn.Module) -> Iterator[int]:
    weight = dict.get(child, "weight")
    if not isinstance(weight, mx.array) or not weight.size:
        return
    if weight.ndim > 1 and dict.__contains__(child, "scales"):
        yield weight.shape[-1] * 32 // count_of(child, "bits", 4)
    elif weight.ndim:
        yield weight.shape[-1]


def arguments_needed(module: nn.Module) -> int:
    """How many arguments a call needs, -1 where its parameters cannot be given by name."""
    try:
        return sum(p.default is p.empty for p in parameters_of_call(module))
    except (UnmatchedError, ValueError, TypeError):
        return -1
