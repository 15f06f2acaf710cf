"""What calls go by besides what their modules hold: global names, closures, attributes of classes
and of objects.

A trace runs a call, and a replacement does not. So what the code of the call reads there by name
has to stay as it was while a replacement runs, and what a trace changes there is put back; a call
that can reach arrays, modules, generators and other things whose changes nobody would notice is
left alone.
"""

from __future__ import annotations

import builtins
import copy
import dis
import functools
import gc
import random
import re
import sys
import types
import weakref
from collections import deque, namedtuple
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import product
from operator import is_
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .code import _Use, _uses, function_of
from .reasons import UnmatchedError
from .shadows import entries, is_opaque, original_class

_NOTHING = object()

#: Packages whose functions keep nothing from one call to the next. What draws random numbers with
#: MLX's functions is noticed by its state.
_PURE = frozenset(
    ("mlx", "zmlx", "numpy", "math", "cmath", "operator", "_operator", "functools", "_functools",
     "itertools", "typing", "collections", "enum", "dataclasses", "abc", "builtins")
)  # fmt: skip

#: Builtins that go by more than their arguments, or do more than return something.
_IMPURE = frozenset(
    (print, input, open, id, globals, locals, eval, exec, compile, __import__, breakpoint)
)

#: Builtins and attributes by which code reads attributes whose names it does not say.
_BY_NAME = frozenset(("getattr", "hasattr", "setattr", "delattr", "vars", "dir", "__dict__",
                      "attrgetter", "methodcaller"))  # fmt: skip

#: Methods that no call of a module runs by itself.
_ASIDE = frozenset(
    ("__init__", "__new__", "__post_init__", "__init_subclass__", "__class_getitem__", "__repr__",
     "__str__", "__del__", "__copy__", "__deepcopy__", "__getstate__", "__setstate__",
     "__reduce__", "__reduce_ex__", "__subclasshook__")
)  # fmt: skip

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)

#: The types of what `mx.compile` and other transforms of MLX return.
_TRANSFORMED = (type(mx.compile(lambda: None)), mx.custom_function)

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(...),
    type(NotImplemented), re.Pattern, Enum, np.generic, np.dtype, mx.Dtype, mx.Device, mx.Stream,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, type(vars(namedtuple("Field", "value"))["value"]),
)  # fmt: skip

#: Lists and dicts that are longer are not looked through.
_LONG = 64


class Surroundings:
    """What the code of some calls refers to, as it was; `changed`: whether it had to be put
    back."""

    def __init__(self) -> None:
        self.changed = False
        self._names: list[tuple[Any, str, Any, type | None]] = []  # and whose they are
        self._cells: list[tuple[types.CellType, Any]] = []
        self._contents: list[tuple[Any, list[Any]]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Any, Any]] = []

    def is_same(self) -> bool:
        """Whether all of it is still what it was."""
        return (
            all(names.get(name, _NOTHING) is was for names, name, was, _ in self._names)
            and all(_inside(cell) is was for cell, was in self._cells)
            and all(_equal(_content(holder), was) for holder, was in self._contents)
            and all(_is_equal_array(array, was) for array, was in self._arrays)
        )

    def put_back(self) -> None:
        """Makes it what it was."""
        for generator, drawn in self._generators:
            _redraw(generator, drawn)
        if self.is_same():
            return
        self.changed = True
        for names, name, was, cls in self._names:
            if names.get(name, _NOTHING) is was:
                continue
            if cls is not None and was is not _NOTHING:
                type.__setattr__(cls, name, was)
            elif cls is not None:
                type.__delattr__(cls, name)
            elif was is _NOTHING:
                names.pop(name)
            else:
                names[name] = was
        for cell, was in self._cells:
            if _inside(cell) is not was:
                cell.cell_contents = was
        for holder, was in self._contents:
            if not _equal(_content(holder), was):
                _refill(holder, was)
        for array, was in self._arrays:
            if not _is_equal_array(array, was):
                array[...] = was


def _inside(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value
        return _NOTHING


def _content(holder: Any) -> list[Any]:
    if isinstance(holder, dict):
        return [*dict.keys(holder), *dict.values(holder)]
    return list(holder)


def _equal(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _is_equal_array(array: Any, was: Any) -> bool:
    if isinstance(array, np.ndarray):
        return bool(array.tobytes() == was.tobytes())
    try:
        inexact = mx.issubdtype(was.dtype, mx.inexact)
        return bool(mx.array_equal(array, was, equal_nan=inexact))
    except (RuntimeError, ValueError):  # it got what a transform traces
        return False


def _drawn(generator: Any) -> Any:
    """The state of a generator of random numbers."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    bits = getattr(generator, "bit_generator", generator)
    return copy.deepcopy(bits.state)


def _redraw(generator: Any, was: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(was)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(was)
    else:
        getattr(generator, "bit_generator", generator).state = was


def _refill(holder: Any, was: list[Any]) -> None:
    if isinstance(holder, list):
        list.__setitem__(holder, slice(None), was)
    elif isinstance(holder, dict):
        half = len(was) // 2
        dict.clear(holder)
        dict.update(holder, zip(was[:half], was[half:], strict=True))
    elif isinstance(holder, set):
        set.clear(holder)
        set.update(holder, was)
    elif isinstance(holder, deque):
        holder.clear()
        holder.extend(was)


@contextmanager
def kept(module: nn.Module, lenient: bool = False) -> Iterator[None]:
    """While calls of a module are traced; raises where one changes its surroundings, or may.
    `lenient` where what is below runs in any case: what cannot be watched there is no reason."""
    for other in _kept:
        other.put_back()  # it may be of this module's calls, in the trace of one above
    below = [m for m in _below(module) if is_opaque(m)]
    before = [surroundings(module), _found(below, traced=False, lenient=lenient)]
    _kept.extend(before)
    try:
        yield
    finally:
        del _kept[-2:]
        for one in before:
            one.put_back()
        if any(one.changed for one in before):
            raise UnmatchedError("its call changes what it does not hold") from None


#: The surroundings of the modules that are traced now.
_kept: list[Surroundings] = []


def surroundings(module: nn.Module, others: Iterable[nn.Module] = ()) -> Surroundings:
    """Those of a module, of the modules in it without arrays, and of some others; raises where they
    cannot be told."""
    inlined = (m for m in _below(module) if not is_opaque(m))
    return _found([module, *inlined, *others], traced=True)


def _found(modules: Iterable[nn.Module], traced: bool, lenient: bool = False) -> Surroundings:
    names = frozenset[str]()
    modules = list(modules)
    while True:
        search = _Search(names, traced, lenient)
        for module in modules:
            search.module(module)
        if search.names <= names:
            return search.found
        names = frozenset(search.names)


def _below(module: nn.Module) -> list[nn.Module]:
    """The modules below one, each once."""
    found: dict[int, nn.Module] = {}
    left: list[Any] = [v for _, v in entries(module)]
    while left:
        value = left.pop()
        if isinstance(value, nn.Module):
            if id(value) in found or value is module:
                continue
            found[id(value)] = value
        if isinstance(value, (list, tuple, dict)):
            left += [v for _, v in entries(value)]
    return list(found.values())


@functools.lru_cache(maxsize=4096)
def _read(
    code: types.CodeType,
) -> tuple[tuple[_Use, ...], frozenset[tuple[str, str]], frozenset[str]]:
    """The uses of names in code; of that and the functions in it operations with their arguments,
    and the attributes that they ask for by `getattr`."""
    found: set[tuple[str, str]] = set()
    asked: set[str] = set()
    left = [code]
    while left:
        one = left.pop()
        instructions = list(dis.get_instructions(one))
        found |= {(i.opname, str(i.argval)) for i in instructions}
        for at, instruction in enumerate(instructions):
            if instruction.opname == "LOAD_GLOBAL" and instruction.argval in _ASKS:
                asked.add(_asked(instructions[at + 1 :]))
        left += [c for c in one.co_consts if isinstance(c, types.CodeType)]
    return tuple(_uses(code)), frozenset(found), frozenset(asked)


_ASKS = ("getattr", "hasattr")


def _asked(instructions: Iterable[dis.Instruction]) -> str:
    """The attribute that is asked of a name; "getattr" where it is not said."""
    for i in instructions:
        if i.opname == "LOAD_CONST":
            return i.argval if isinstance(i.argval, str) else "getattr"
        if not i.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_ATTR")):
            break
        if i.opname == "LOAD_GLOBAL" and i.argval in _ASKS:
            break
    return "getattr"


#: In code that handles an error.
_HANDLERS = frozenset(("PUSH_EXC_INFO", "SETUP_FINALLY", "SETUP_WITH"))


class _Search:
    """Looks at what calls may reach by these names of attributes, and finds those in their code;
    `traced`: whether the calls are more than run; `lenient`: whether what cannot be watched is
    passed over."""

    def __init__(self, names: frozenset[str], traced: bool, lenient: bool) -> None:
        self.found = Surroundings()
        self.names = set(names)
        self._all = not names.isdisjoint(_BY_NAME)
        self._seen: set[Any] = set()
        self._traced = traced
        self._lenient = lenient
        self._by = "an attribute"

    def module(self, module: nn.Module) -> None:
        """What the calls of a module may read."""
        self._by = "an attribute"
        for name, value in vars(module).items():
            if self._reads(name) and not name.startswith("_zmlx_"):
                self._value(value)
        left = [v for _, v in entries(module)]
        while left:
            value = left.pop()
            if isinstance(value, (list, tuple, dict)) and not isinstance(value, nn.Module):
                left += [v for _, v in entries(value)]
            elif not isinstance(value, (mx.array, nn.Module)):
                self._value(value)
        self._by = "a name"
        self._class(original_class(module))

    def _reads(self, name: str) -> bool:
        return self._all or name in self.names

    def _refuse(self, what: str) -> NoReturn:
        raise UnmatchedError(f"its call uses {self._by} that refers to {what}")

    def _name(self, names: Mapping[str, Any], name: str, cls: Any = None) -> Any:
        """Notes what a name stands for."""
        value = names.get(name, _NOTHING)
        if (id(names) if cls is None else cls, name) not in self._seen:
            self._seen.add((id(names) if cls is None else cls, name))
            self.found._names.append((names, name, value, cls))
        return value

    def _content(self, holder: Any) -> None:
        if len(holder) > _LONG:
            self._refuse(f"a long {type(holder).__name__}")
        self.found._contents.append((holder, _content(holder)))

    def _value(self, value: Any) -> None:
        try:
            self._watch(value)
        except UnmatchedError:
            if not self._lenient:
                raise

    def _watch(self, value: Any) -> None:
        constant = isinstance(value, _CONSTANTS) or type(value) is object  # a mark
        if constant or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, _GENERATORS):
            if not self._lenient:
                raise UnmatchedError("its call draws random numbers")
            self.found._generators.append((value, _drawn(value)))
            return
        if isinstance(value, (mx.array, np.ndarray)):
            if self._traced:
                self._refuse("an array")
            self.found._arrays.append((value, copy.deepcopy(value)))
            return
        if isinstance(value, nn.Module):
            self._refuse("a module")
        if isinstance(value, types.ModuleType):
            self._python_module(value)
        elif isinstance(value, type):
            self._type(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif (parts := _parts(value)) is not None:
            for part in parts:
                self._value(part)
        elif self._traced and isinstance(value, deque):
            self._refuse("a deque")  # a full one may look the same after a change
        elif isinstance(value, (list, dict, set, deque, frozenset, tuple)):
            self._content(value)
            for part in _content(value):
                self._value(part)
            if not _is_pure(type(value).__module__):
                self._object(value)
        elif callable(value) and _is_pure(getattr(value, "__module__", None) or ""):
            if self._traced and isinstance(value, types.BuiltinFunctionType) and value in _IMPURE:
                raise UnmatchedError(f"its call uses {value.__name__}")
        elif type(value).__module__.partition(".")[0] not in ("mlx", "zmlx", "numpy", "typing"):
            self._object(value)

    def _object(self, value: Any) -> None:
        own = getattr(value, "__dict__", None)
        slots = any(
            isinstance(v, types.MemberDescriptorType) and name != "__dict__"
            for c in type(value).__mro__
            if not _is_pure(c.__module__)
            for name, v in vars(c).items()
        )
        if not isinstance(own, dict) or slots or _is_pure(type(value).__module__):
            if self._traced or slots or isinstance(value, Iterator):
                self._refuse(f"a {type(value).__name__}")
            return
        if own is not value:
            self._content(own)
            for name, part in list(own.items()):
                if self._reads(name):
                    self._value(part)
        self._class(type(value))

    def _class(self, cls: type) -> None:
        """What is read from a class by the names, and by Python itself."""
        above = [one for one in cls.__mro__ if not _is_pure(one.__module__)]
        read = dict.fromkeys(
            name for one in above for name in vars(one) if self._reads_of_class(name, vars(one))
        )
        for one, name in product(above, read):
            value = self._name(vars(one), name, one)  # it may get one that it does not have
            if value is not _NOTHING and not isinstance(value, types.MemberDescriptorType):
                self._value(value)

    def _reads_of_class(self, name: str, names: Mapping[str, Any]) -> bool:
        if name.startswith("__") and name.endswith("__"):
            function = function_of(names[name])
            # What `dataclass` writes goes by fields alone.
            written = "__dataclass_fields__" in names and _is_written(function)
            return name not in _ASIDE and function is not None and not written
        return self._reads(name) and not name.startswith("_abc_")

    def _type(self, cls: type) -> None:
        """A class that code uses: it may make an object."""
        if self._traced and cls is type:
            raise UnmatchedError("its call goes by types")
        self._class(cls)
        if not issubclass(cls, nn.Module):
            for one in (c for c in cls.__mro__ if not _is_pure(c.__module__)):
                for name in ("__new__", "__init__", "__post_init__"):
                    if name in vars(one):
                        self._value(vars(one)[name])

    def _python_module(self, module: types.ModuleType) -> None:
        """A module that is no value of a global name: its attributes are read later."""
        pure = _is_pure(module.__name__)
        for name, value in list(vars(module).items()):
            inner = isinstance(value, types.ModuleType)
            inner = inner and value.__name__.startswith(f"{module.__name__}.")
            if self._reads(name) and (inner or not pure):
                self._value(self._name(vars(module), name))

    def _function(self, function: types.FunctionType) -> None:
        if _is_pure(function.__module__ or ""):
            return
        uses, operations, asked = _read(function.__code__)
        outer = function.__code__.co_freevars
        for operation, name in operations:
            if operation in ("STORE_GLOBAL", "DELETE_GLOBAL") or (
                operation in ("STORE_DEREF", "DELETE_DEREF") and name in outer
            ):
                raise UnmatchedError(f"its call sets {name}")
            if operation == "IMPORT_NAME":
                self._value(sys.modules.get(name, _NOTHING))
            if operation in _HANDLERS and self._traced:
                raise UnmatchedError("its call catches errors, of which a trace may have others")
        self.names |= asked
        for use in uses:
            if use.other:
                self.names.add(use.name)
            else:
                self._global(function, use)
            self.names.update(use.attributes)
        for cell in function.__closure__ or ():
            self.found._cells.append((cell, _inside(cell)))
            with suppress(ValueError):  # one without a value
                self._value(cell.cell_contents)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(default)
        if vars(function):
            self._content(vars(function))
            for value in vars(function).values():
                self._value(value)

    def _global(self, function: types.FunctionType, use: _Use) -> None:
        """What a global name, with the attributes that are taken of it at once, stands for."""
        value = self._name(function.__globals__, use.name)
        if value is _NOTHING:
            value = vars(builtins).get(use.name, _NOTHING)
            self.names.update({use.name} & _BY_NAME - {"getattr", "hasattr"})
        for name in use.attributes:
            if not isinstance(value, types.ModuleType):
                break
            value = self._name(vars(value), name)
        if value is not _NOTHING:
            self._value(value)


def _is_written(function: types.FunctionType | None) -> bool:
    """Whether a function was made of a text by a program."""
    return function is not None and function.__code__.co_filename == "<string>"


def _is_pure(module: str) -> bool:
    return module.partition(".")[0] in _PURE and not module.startswith("numpy.random")


def _parts(value: Any) -> list[Any] | None:
    """What a function that is none of Python's own, or a descriptor, has in it; None for others."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        return [value.__func__, getattr(value, "__self__", None)]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, _TRANSFORMED):
        return gc.get_referents(value)
    if isinstance(value, types.BuiltinMethodType) and not isinstance(
        value.__self__, (types.ModuleType, type(None))
    ):
        return [value.__self__]
    if hasattr(value, "__wrapped__") and not _has_own_call(value):  # as of `functools.lru_cache`
        return [value.__wrapped__]
    return None


def _has_own_call(value: Any) -> bool:
    """Whether an object is of a class of Python code."""
    return function_of(vars(type(value)).get("__call__")) is not None
