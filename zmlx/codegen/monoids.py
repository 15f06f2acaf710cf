"""What folds and scans combine: states with a merge that may be grouped in any way.

A state is one or several variables. Templates name the variables of the earlier elements `{m}` and
those of the later ones `{m2}`, an element `v_` and its position `j`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .text import Body


@dataclass(frozen=True)
class Monoid:
    """A kind of state.

    Attributes:
        states: name and type of each variable, where "T" stands for the type of the elements.
        start: what each variable is before any element; "lowest" and "highest" are the ends of the
            range of T, "front" is the position of the first element.
        lift: the state of one element.
        merge: statements that merge the later state into the earlier one.
        step: statement before the elements of a step, where every accumulator takes one.
        update: statements that take an element; the merge of its state unless given.
        after: statements for each accumulator after all steps.
        blocked: whether long runs are summed in blocks, which keeps the rounding errors of a sum of
            n numbers near those of √n.
        shifted: whether the last element along the axis is taken off each, so that what all share
            costs no digits.
    """

    states: tuple[tuple[str, str], ...]
    start: tuple[str, ...]
    lift: tuple[str, ...]
    merge: tuple[str, ...]
    step: str = ""
    update: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    blocked: bool = False
    shifted: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The variables."""
        return tuple(name for name, _ in self.states)

    def types(self, element: str) -> dict[str, str]:
        """The type of each variable for elements of a type."""
        return {name: element if type_ == "T" else type_ for name, type_ in self.states}

    def started(self, element: str, front: str) -> dict[str, str]:
        """The value that each variable starts with."""
        known = {"front": front, "lowest": RANGES[element][0], "highest": RANGES[element][1]}
        return {
            name: known.get(text, f"{type_}({text})")
            for (name, type_), text in zip(self.types(element).items(), self.start, strict=True)
        }

    def lifted(self, index: str) -> dict[str, str]:
        """The state of the element `v_` at `index`."""
        return {n: t.replace("j", index) for n, t in zip(self.names, self.lift, strict=True)}


#: The least and the largest value of each type of element.
RANGES = {
    "float": ("-INFINITY", "INFINITY"),
    "int": ("-2147483647 - 1", "2147483647"),
    "uint": ("0u", "4294967295u"),
    "int64_t": ("-int64_t(~uint64_t(0) >> 1) - 1", "int64_t(~uint64_t(0) >> 1)"),
    "uint64_t": ("uint64_t(0)", "~uint64_t(0)"),
}


def _extreme(sign: str) -> dict[str, Monoid]:
    """Folds of the largest (">") or smallest ("<") element; NaN is beyond all, as in MLX. Where
    nothing is beyond the start, all elements equal it, and the first is at the front."""
    start = "lowest" if sign == ">" else "highest"
    sign_or_same = "<=" if sign == ">" else ">="
    # Two comparisons: beyond, or NaN where none was.
    beyond = f"(!({{m2}} {sign_or_same} {{m}})) & ({{m}} == {{m}})"
    same = "({m2} == {m}) | (({m2} != {m2}) & ({m} != {m}))"
    take = "{m} = away_ ? {m2} : {m};"
    return {
        # Two selects, of which g++ makes vectors in a row of few accumulators too.
        "": Monoid(
            (("m", "T"),),
            (start,),
            ("v_",),
            (f"{{m}} = {{m2}} {sign} {{m}} ? {{m2}} : {{m}};", "{m} = {m2} != {m2} ? {m2} : {m};"),
        ),
        # How many elements equal the extreme one, for the gradient, which they share; 0 for NaN.
        "_count": Monoid(
            (("m", "T"), ("count", "uint")),
            (start, "0"),
            ("v_", "uint(v_ == v_)"),
            (
                f"const bool away_ = {beyond};",
                "const uint more_ = {m2} == {m} ? {count} + {count2} : {count};",
                "{count} = away_ ? {count2} : more_;",
                take,
            ),
        ),
        "_at": Monoid(
            (("m", "T"), ("at", "uint")),
            (start, "front"),
            ("v_", "uint(j)"),
            (
                f"const bool away_ = ({beyond}) | (({same}) & ({{at2}} < {{at}}));",
                "{at} = away_ ? {at2} : {at};",
                take,
            ),
            # In a walk from the front the first of equals is there already.
            update=(f"const bool away_ = {beyond};", "{at} = away_ ? {at2} : {at};", take),
        ),
    }


MONOIDS: dict[str, Monoid] = {
    "sum": Monoid(
        (("total", "T"),),
        ("0",),
        ("v_",),
        ("{total} = {total} + {total2};",),
        blocked=True,
    ),
    "prod": Monoid((("total", "T"),), ("1",), ("v_",), ("{total} = {total} * {total2};",)),
    **{f"max{kind}": monoid for kind, monoid in _extreme(">").items()},
    **{f"min{kind}": monoid for kind, monoid in _extreme("<").items()},
    # Mean and sum of squared deviations in one walk (Welford 1962; the merge: Chan, Golub &
    # LeVeque 1979). The accumulators of a thread have seen equally many elements, so that a step
    # has one division. The order of the factors keeps an empty state from making NaN.
    "moments": Monoid(
        (("mean", "float"), ("m2", "float"), ("count", "float")),
        ("0", "0", "0"),
        ("v_", "0.0f", "1.0f"),
        (
            "const float both_ = {count} + {count2};",
            "const float later_ = both_ > 0.0f ? {count2} / both_ : 0.0f;",
            "const float d_ = {count2} > 0.0f ? {mean2} - {mean} : 0.0f;",
            "{mean} = {mean} + d_ * later_;",
            "{m2} = {m2} + {m22} + d_ * (d_ * ({count} * later_));",
            "{count} = both_;",
        ),
        step="const float share_ = 1.0f / float(++steps_);",
        update=(
            "const float d_ = v_ - {mean};",
            "{mean} = {mean} + d_ * share_;",
            "{m2} = {m2} + d_ * (v_ - {mean});",
        ),
        after=("{count} = float(steps_);",),
        shifted=True,
    ),
    # The map h -> a·h + b of a run of elements, the earlier ones first.
    "linear": Monoid(
        (("a", "T"), ("b", "T")),
        ("1", "0"),
        ("v_", "w_"),
        ("{b} = {a2} * {b} + {b2};", "{a} = {a} * {a2};"),
    ),
}


def check(op: str, element: str) -> None:
    """Raises unless there is such a state of elements of such a type."""
    for argument, value, known in (("op", op, MONOIDS), ("type", element, RANGES)):
        if value not in known:
            raise ValueError(
                f"[codegen] '{argument}' must be one of {', '.join(known)} but got {value!a}."
            )


#: A state's variables by name, as they are written in the text.
Names = Mapping[str, str]


def names_of(monoid: Monoid, spell: Callable[[str], str]) -> dict[str, str]:
    """How each variable is spelled."""
    return {name: spell(name) for name in monoid.names}


def fill(template: str, own: Names, other: Names) -> str:
    """A template with its variables spelled out."""
    return template.format_map({**own, **{f"{name}2": text for name, text in other.items()}})


def add_merge(body: Body, monoid: Monoid, own: Names, other: Names, *, quick: bool = False) -> None:
    """Merges the state `other` into `own`; with `quick` it is that of an element in a walk."""
    lines = (monoid.update if quick else ()) or monoid.merge
    scoped = len(lines) > 1
    if scoped:
        body.add("{")
        body.depth += 1
    body.add(*(fill(line, own, other) for line in lines))
    if scoped:
        body.close()
