"""The Zig generators against Python's, byte for byte, on drawn specifications."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import zig_build as zig
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from zmlx import codegen, launch, msl
from zmlx.codegen import (
    Check,
    Climb,
    Columnwise,
    Elementwise,
    Fold,
    Let,
    Operand,
    Output,
    Pass,
    Pattern,
    Reduce,
    Rowwise,
    Scan,
)
from zmlx.codegen.monoids import RANGES
from zmlx.codegen.pattern import RESERVED, SUFFIXES
from zmlx.metal import KernelSpec

EXAMPLES = settings(
    max_examples=20 * settings().max_examples,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def generator() -> Iterator[zig.Process]:
    process = zig.Process("zmlx-codegen")
    yield process
    process.close()


def as_json(pattern: Pattern) -> dict[str, Any]:
    return {type(pattern).__name__.lower(): dataclasses.asdict(pattern)}


# ---- what is drawn ------------------------------------------------------------------------------

#: Few names, so that expressions reach lets, lets reach lets, and names collide with each other and
#: with what a body adds to them.
NAMES = st.sampled_from(
    ["x", "y", "w", "total", "a1", "_t2", "drop", "mean"] * 10 + ["x_sum", "y_out"]
)
#: Mostly names that are allowed: a pattern has many, and one that is not is its end.
ODD_NAMES = st.integers(0, 30).flatmap(
    lambda n: (
        NAMES
        if n
        else st.one_of(
            st.sampled_from(
                [
                    *sorted(RESERVED),
                    "thread",
                    "",
                    "1x",
                    "é",
                    "xé",
                    "a'b",
                    'a"b',
                    "a'b\"c",
                    "x\n",
                    "a b",
                ]
            ),
            st.builds(str.__add__, NAMES, st.sampled_from(SUFFIXES)),
            st.text(max_size=3),
        )
    )
)
#: Pieces that meet in odd ways: members, suffixes of numbers, braces, quotes, letters that are not
#: ASCII.
PIECES = st.one_of(
    NAMES,
    st.sampled_from(
        [" + ", ".", "1", "2.5f", "1e", "(", ")", " ? ", "{", "}", "{a}", '"', "'", "\\", "é", "×",
         "\n", "%d", "{{", "x.y", "j", "D", "row", "exp(", "zmlx_erf(", "\t", "\x7f", "😀"]
    ),
    st.text(max_size=3),
)  # fmt: skip
EXPRESSIONS = st.lists(PIECES, max_size=7).map("".join)
TYPES = st.sampled_from(["float", "int", "uint64_t", "bool", "half"])
#: A part and its parts; mostly some that are.
PARTS = st.sampled_from(
    [(0, 1)] * 20 + [(0, 2), (1, 2), (2, 3), (2, 4)] * 4 + [(0, 0), (1, 1), (3, 2)]
)
ARRAYS = st.sampled_from(["", "", "", "packed", "logits"])


def operands(kinds: tuple[str, ...]) -> st.SearchStrategy[tuple[Operand, ...]]:
    one = st.builds(
        lambda name, kind, type_, array, part, index: Operand(
            name, kind, type_, array, *part, index
        ),
        ODD_NAMES,
        st.sampled_from(kinds),
        TYPES,
        ARRAYS,
        PARTS,
        st.one_of(st.just(""), NAMES),
    )
    return st.lists(one, max_size=4).map(tuple)


def every_part(
    name: str, expr: str, kind: str, array: str, part: tuple[int, int], odd: int
) -> tuple[Output, ...]:
    """An output, and mostly one for each other part of its array."""
    one = Output(name, expr, kind, array, *part)
    if not odd:
        return (one,)
    rest = [Output(f"{name}{k}", expr, kind, array or name, k, one.parts)
            for k in range(one.parts) if k != one.part]  # fmt: skip
    return (one, *rest)


def outputs(kinds: tuple[str, ...]) -> st.SearchStrategy[tuple[Output, ...]]:
    one = st.builds(
        every_part, ODD_NAMES, EXPRESSIONS, st.sampled_from(kinds), ARRAYS, PARTS, st.integers(0, 9)
    )
    return st.lists(one, max_size=3).map(lambda some: sum(some, ()))


LETS = st.lists(
    st.builds(Let, ODD_NAMES, EXPRESSIONS, TYPES, st.sampled_from(["", "", "y"])), max_size=3
).map(tuple)
OPS = st.sampled_from([*codegen.REDUCTIONS, "sum_exp", "sum_exp"])
REDUCTIONS = st.builds(
    Reduce,
    ODD_NAMES,
    st.one_of(OPS, OPS, OPS, OPS, st.sampled_from(["median", "", "{a}"])),
    EXPRESSIONS,
    TYPES,
    st.sampled_from(["", "peak", "largest"]),
)
PASSES = st.builds(
    Pass,
    st.lists(REDUCTIONS, max_size=3).map(tuple),
    LETS,
    st.one_of(st.none(), st.none(), st.builds(Climb, NAMES, EXPRESSIONS, EXPRESSIONS)),
)
ALL_KINDS = ("full", "row", "column", "per_row", "at", "scalar", "random")

ELEMENTWISE = st.tuples(operands(ALL_KINDS), outputs(("full",)), LETS)
COLUMNWISE = st.tuples(operands(ALL_KINDS), outputs(("row",)), LETS)
ROWWISE = st.tuples(
    operands(ALL_KINDS),
    outputs(("row", "row", "row", "row", "per_row", "per_row", "column", "full")),
    st.lists(PASSES, max_size=3).map(tuple),
    LETS,
    st.lists(NAMES, max_size=2).map(tuple),
    LETS,
    st.lists(st.builds(Check, EXPRESSIONS, NAMES, EXPRESSIONS), max_size=1).map(tuple),
)

MONOIDS = st.sampled_from([*codegen.MONOIDS, *codegen.MONOIDS, "median"])
ELEMENTS = st.sampled_from([*RANGES, *RANGES, "half"])
FLAG = st.booleans()
FOLD = st.tuples(
    MONOIDS, outputs(("row",)), ELEMENTS, FLAG, FLAG, FLAG, FLAG, FLAG, operands(("scalar",))
)
SCAN = st.tuples(
    MONOIDS,
    outputs(("row",)),
    ELEMENTS,
    FLAG,
    FLAG,
    FLAG,
    st.lists(NAMES, max_size=2).map(tuple),
    st.lists(EXPRESSIONS, max_size=3).map(tuple),
    FLAG,
)


def assert_same(generator: zig.Process, request: dict[str, Any], make: Any) -> None:
    """Zig answers `request` with what the pattern that `make` returns gives, or why it is none."""
    try:
        pattern = make()
    except ValueError as error:
        expected: dict[str, Any] = {"reason": str(error)}
    else:
        expected = {
            "source": pattern.source(),
            "header": pattern.header,
            "input_names": list(pattern.input_names),
            "output_names": list(pattern.output_names),
        }
    assert generator.ask([request]) == [expected]


def unchecked(kind: type[Pattern], fields: tuple[Any, ...]) -> dict[str, Any]:
    """The request for a pattern that Python may refuse to make."""
    names = [f.name for f in dataclasses.fields(kind)]
    plain = [
        [dataclasses.asdict(x) if dataclasses.is_dataclass(x) else x for x in field]
        if isinstance(field, tuple)
        else field
        for field in fields
    ]
    return {"pattern": {kind.__name__.lower(): dict(zip(names, plain, strict=True))}}


# ---- patterns -----------------------------------------------------------------------------------


@EXAMPLES
@given(fields=ELEMENTWISE)
def test_elementwise_patterns_are_the_same(generator, fields):
    assert_same(generator, unchecked(Elementwise, fields), lambda: Elementwise(*fields))


@EXAMPLES
@given(fields=COLUMNWISE)
def test_columnwise_patterns_are_the_same(generator, fields):
    assert_same(generator, unchecked(Columnwise, fields), lambda: Columnwise(*fields))


@EXAMPLES
@given(fields=ROWWISE)
def test_rowwise_patterns_are_the_same(generator, fields):
    assert_same(generator, unchecked(Rowwise, fields), lambda: Rowwise(*fields))


@EXAMPLES
@given(fields=FOLD)
def test_folds_are_the_same(generator, fields):
    assert_same(generator, unchecked(Fold, fields), lambda: Fold(*fields))


@EXAMPLES
@given(fields=SCAN)
def test_scans_are_the_same(generator, fields):
    assert_same(generator, unchecked(Scan, fields), lambda: Scan(*fields))


@pytest.mark.parametrize("op", codegen.MONOIDS)
@pytest.mark.parametrize("columns", [False, True])
def test_every_state_is_folded_and_scanned_the_same(generator, op, columns):
    names = codegen.MONOIDS[op].names
    out = tuple(Output(f"{n}_y", n) for n in names)
    for type_, merges, cut, short in product(("float", "int64_t"), *[(False, True)] * 3):
        fields = (op, out, type_, columns, merges, cut, False, short, ())
        assert_same(generator, unchecked(Fold, fields), lambda f=fields: Fold(*f))
    rows = (Operand("s", "row"),)
    fields = (op, out, "float", columns, False, False, False, False, rows)
    with pytest.raises(ValueError, match=r"'scalars' must be of kind scalar but got row\.$"):
        Fold(*fields)
    assert_same(generator, unchecked(Fold, fields), lambda: Fold(*fields))
    for reverse, exclusive, cut in ((False, False, True), (True, True, False)):
        fields = (op, out, "int", columns, reverse, exclusive, ("w",), ("x * w",) * len(names), cut)
        assert_same(generator, unchecked(Scan, fields), lambda f=fields: Scan(*f))


def as_dict(**fields: Any) -> dict[str, Any]:
    return {
        n: dataclasses.asdict(x) if isinstance(x, Reduce)
        else [dataclasses.asdict(r) for r in x] if isinstance(x, tuple) else x
        for n, x in fields.items()
    }  # fmt: skip


@EXAMPLES
@given(
    first=EXPRESSIONS,
    second=EXPRESSIONS,
    op=OPS,
    reductions=st.lists(REDUCTIONS, min_size=2, max_size=3).map(tuple),
)
def test_the_named_patterns_are_the_same(generator, first, second, op, reductions):
    cases = {
        "elementwise_unary": {"expr": first},
        "elementwise_binary": {"expr": first},
        "rowwise_reduction": {"op": op, "expr": first, "finalize": second},
        "rowwise_parallel_reduction": {"reductions": reductions, "finalize": first},
        "rowwise_map_reduce": {"first": reductions[0], "second": reductions[1], "write": first},
    }
    for name, fields in cases.items():
        assert_same(
            generator,
            {"named": {name: as_dict(**fields)}},
            lambda name=name, fields=fields: getattr(codegen, name)(**fields),
        )


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"outputs": ()}, "'outputs' must have at least one entry"),
        ({"inputs": (Operand("rows"),)}, "must not be a name of the body itself but got 'rows'"),
        ({"inputs": (Operand("a b"),)}, "must be an identifier but got 'a b'"),
        ({"inputs": (Operand("x", parts=0),)}, "'parts' must be at least 1 but got 0"),
        ({"inputs": (Operand("x", part=3),)}, "'part' must be from 0 to 0 but got 3"),
        (
            {"inputs": (Operand("a", array="x"), Operand("b", array="x", parts=2))},
            "'parts' must be the same for all of 'x' but got 1 and 2",
        ),
        ({"outputs": (Output("y", "x", part=5, parts=2),)}, "must be from 0 to 1 but got 5"),
        (
            {"outputs": (Output("y", "x", part=1, parts=2),)},
            "'outputs' must have all 2 parts of 'y' but have 1",
        ),
        ({"outputs": (Output("y", "x", "full"),)}, "'kind' of 'y' must be row, per_row or column"),
        ({"keep": ("nothing",)}, "'keep' must name operands or lets of the elements but got "),
        ({"passes": (Pass((Reduce("m", "median", "x"),)),)}, "'op' must be one of sum, prod"),
    ],
)
def test_what_python_rejects_zig_rejects_with_the_same_reason(generator, fields, reason):
    good = Rowwise((Operand("x"),), (Output("y", "x"),))
    values = tuple({**vars(good), **fields}.values())
    with pytest.raises(ValueError, match=r"\[codegen\] .*" + reason.replace("(", r"\(")):
        Rowwise(*values)
    assert_same(generator, unchecked(Rowwise, values), lambda: Rowwise(*values))


# ---- header, names, geometry --------------------------------------------------------------------


@EXAMPLES
@given(
    st.lists(
        st.one_of(st.sampled_from(msl.function_names()), PIECES, st.just("ZMLX_FAIL")), max_size=5
    ).map("".join)
)
def test_the_shared_header_is_the_same(generator, text):
    assert generator.ask([{"header_for": text}]) == [{"header": msl.header_for(text)}]


def test_every_function_of_the_header_brings_the_same_sections(generator):
    for name in msl.function_names():
        assert generator.ask([{"header_for": name}]) == [{"header": msl.header_for(name)}]


SPECS = st.fixed_dictionaries(
    {
        "name": ODD_NAMES,
        "input_names": st.lists(ODD_NAMES, max_size=3),
        "output_names": st.lists(ODD_NAMES, max_size=2),
        "body": EXPRESSIONS,
        "header": st.text(max_size=8),
        "ensure_row_contiguous": st.booleans(),
        "atomic_outputs": st.booleans(),
        "math_mode": st.sampled_from(["safe", "safe", "relaxed", "fast", "slow"]),
    }
)


@EXAMPLES
@given(SPECS)
def test_specifications_have_the_same_canonical_text_and_name(generator, fields):
    try:
        spec = KernelSpec(**{n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()})
    except ValueError as error:
        expected = {"reason": str(error)}
    else:
        expected = {"canonical": spec.canonical(), "full_name": spec.full_name}
    assert generator.ask([{"spec": fields}]) == [expected]


SIZES = st.one_of(st.integers(0, 70), st.integers(0, 2**17), st.integers(0, 2**31))


@EXAMPLES
@given(
    kind=st.sampled_from(["gpu", "cpu"]),
    rows=SIZES,
    d=st.one_of(st.integers(0, 300), st.integers(0, 2**16)),
    capped=st.booleans(),
    least=st.sampled_from([1, 4]),
)
def test_geometries_are_the_same(generator, kind, rows, d, capped, least):
    with launch.geometry(kind):
        chosen = launch.settings()
        chunks, _ = launch.row_chunks(rows)
        cases = [
            ({"elementwise": {"kind": kind, "size": rows * d, "least": least}},
             launch.elementwise(chosen, rows * d, least=least)),
            ({"rowwise": {"kind": kind, "rows": rows, "d": d, "capped": capped, "least": least}},
             launch.rowwise(chosen, rows, d, capped=capped, least=least)),
            ({"rowwise_chunks": {"kind": kind, "rows": rows, "d": d, "least": least}},
             launch.rowwise_chunks(chosen, chunks, d, least=least)),
            ({"columnwise": {"kind": kind, "rows": rows, "d": d}},
             launch.columnwise(chosen, chunks, d)),
        ]  # fmt: skip
    for request, g in cases:
        (answer,) = generator.ask([{"geometry": request}])
        assert answer == {
            "template": [{"name": n, "value": v} for n, v in g.template],
            "grid": list(g.grid),
            "threadgroup": list(g.threadgroup),
        }


@EXAMPLES
@given(
    kind=st.sampled_from(["gpu", "cpu"]),
    columns=FLAG,
    scans=FLAG,
    reverse=FLAG,
    narrow=FLAG,
    short=FLAG,
    states=st.integers(1, 3),
    shape=st.tuples(st.integers(0, 300), st.integers(0, 2**17), st.integers(0, 300)),
)
@example("cpu", True, False, False, False, False, 1, (2**27, 1024, 0))
def test_geometries_of_folds_and_scans_are_the_same(
    generator, kind, columns, scans, reverse, narrow, short, states, shape
):
    short = short and not columns and not scans
    shape = shape if columns else shape[:2]
    with launch.geometry(kind):
        chosen = launch.settings()
        parts, chunk = (launch.scan_parts if scans else launch.fold_parts)(shape, columns)
        if columns:
            g = launch.fold_columns(chosen, shape[0] * parts, shape[2], states=states, scans=scans)
        elif scans:
            g = launch.scan_rows(chosen, shape[0] * parts, chunk, reverse=reverse, narrow=narrow)
        elif short:
            g = launch.fold_short_rows(chosen, shape[0] * parts)
        else:
            g = launch.fold_rows(chosen, shape[0] * parts, chunk)
    request = {
        "kind": kind,
        "columns": columns,
        "scans": scans,
        "reverse": reverse,
        "narrow": narrow,
        "short": short,
        "states": states,
        "shape": shape,
    }
    assert generator.ask([{"geometry": {"axis": request}}]) == [
        {
            "template": [{"name": n, "value": v} for n, v in g.template],
            "grid": list(g.grid),
            "threadgroup": list(g.threadgroup),
        }
    ]
