"""The text of the patterns."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import zmlx
from zmlx import launch
from zmlx.codegen import (
    Columnwise,
    Elementwise,
    Fold,
    Let,
    Operand,
    Output,
    Pass,
    Reduce,
    Rowwise,
    Scan,
    free_names,
    identifiers,
)
from zmlx.expr.parse import METAL_WORDS, is_function
from zmlx.language import attributes

SOFTMAX = Rowwise(
    inputs=(Operand("x"),),
    lets=(Let("e", "exp(x - m)"),),
    passes=(
        Pass((Reduce("m", "max", "x"),)),
        Pass((Reduce("s", "sum", "e"),), (Let("inverse", "1.0f / s"),)),
    ),
    outputs=(Output("y", "e * inverse"),),
    keep=("e",),
)


def test_an_elementwise_body():
    pattern = Elementwise((Operand("x", "full"),), (Output("y", "x * x", "full"),))
    assert pattern.source() == (
        "    const size_t start_ = size_t(thread_position_in_grid.x) * N;\n"
        "    if (start_ + N <= size_t(size)) {\n"
        "        const uint block_ = N % 256 == 0 && sizeof(*y_out) < 4 ? 256 : N;\n"
        "        for (uint b_ = 0; b_ < N; b_ += block_) {\n"
        "            const auto x_in_step = ZMLX_READ_STEP(block_, x_in + start_ + b_);\n"
        "            auto y_out_step = ZMLX_WRITE_STEP(block_, y_out + start_ + b_, true);\n"
        "            for (uint k_ = 0; k_ < block_; ++k_) {\n"
        "                const float x = float(x_in_step[k_]);\n"
        "                ZMLX_SET(y_out_step, k_, y_t, x * x);\n"
        "            }\n"
        "        }\n"
        "    } else {\n"
        "        for (size_t i_ = start_; i_ < size_t(size); ++i_) {\n"
        "            const float x = float(x_in[i_]);\n"
        "            y_out[i_] = y_t(x * x);\n"
        "        }\n"
        "    }\n"
    )
    assert pattern.input_names == ("x_in", "size")
    assert pattern.output_names == ("y_out",)


def test_a_kept_value_is_computed_once():
    assert SOFTMAX.source().count("exp(") == 2  # the whole steps and the tail of one walk


def test_without_keep_it_is_computed_in_each_walk_that_needs_it():
    looped = Rowwise(SOFTMAX.inputs, SOFTMAX.outputs, SOFTMAX.passes, SOFTMAX.lets)
    assert looped.source().count("exp(") == 4
    assert "STEPS" not in looped.source()


def test_a_walk_loads_only_what_it_reaches():
    pattern = Rowwise(
        inputs=(Operand("x"), Operand("w", "column")),
        passes=(Pass((Reduce("s", "sum", "x"),)),),
        outputs=(Output("y", "x * w / s"),),
    )
    first, second = pattern.source().split("zmlx_row_reduce")
    assert "w_in" not in first
    assert "w_in[j]" in second


def test_the_last_of_several_walks_asks_for_the_next_row():
    total = Pass((Reduce("total", "sum", "x"),))
    spread = Pass((Reduce("spread", "sum", "x - total"),))
    hint = "ZMLX_PREFETCH_FAR(x_in_row + D + ahead_ + p_);"
    mapped = Rowwise((Operand("x"),), (Output("y", "x - total"),), (total,)).source()
    assert mapped.count(hint) == 1
    assert mapped.index(hint) > mapped.index("const float total")
    folded = (Output("y", "spread", "per_row"),)
    assert Rowwise((Operand("x"),), folded, (total, spread)).source().count(hint) == 1
    assert hint not in Rowwise((Operand("x"),), folded, (spread,)).source()


def _computed(expression, **values):
    """The value of C's expression over unsigned integers."""
    return eval(expression.replace("/", "//"), values) % 2**32


@pytest.mark.parametrize("places", [1, 4])
@pytest.mark.parametrize("d", [4096, 5000, 96, 32, 31])
def test_the_next_row_is_asked_for_in_places_that_cover_it(d, places):
    total = Pass((Reduce("total", "sum", "x"),))
    source = Rowwise((Operand("x"),), (Output("y", "x - total"),), (total,)).source()
    (place,) = re.findall(r"const uint ahead_ = (.*);", source)
    u = 32
    whole = d // u * u
    asked = [_computed(place, i_=i, U=u, whole_=whole, places_=places) for i in range(0, whole, u)]
    full = whole // u // places * places
    assert sorted(asked[:full]) == list(range(0, full * u, u))
    if d == 4096:
        assert asked[:4] == ([0, 32, 64, 96] if places == 1 else [0, 1024, 2048, 3072])


@pytest.mark.parametrize("places", [1, 4])
@pytest.mark.parametrize(("size", "u"), [(4, 64), (2, 64), (8, 64), (4, 16), (2, 4)])
def test_a_fold_of_rows_asks_for_what_it_reads_some_pages_later(size, u, places):
    source = Fold("sum", (Output("y", "total", "per_row"),)).source()
    page = 4096 // size
    turn, ahead = (re.search(rf"const uint {n}_ = (.*);", source)[1] for n in ("turn", "ahead"))
    window = places * page
    asked = []
    for i in range(0, 3 * window, u):
        values = {"i_": i, "first_": 0, "U": u, "places_": places, "page_": page}
        values["turn_"] = _computed(turn, **values)
        asked.append(i + _computed(ahead, **values))
    assert sorted(asked) == list(range(window, 4 * window, u))
    assert [a // page for a in asked[:places]] == list(range(places, 2 * places))


def test_what_a_fold_asks_for():
    def of(op, state, **how):
        return Fold(op, (Output("y", state, "per_row"),), **how)

    rows, columns = of("sum", "total"), of("sum", "total", columns=True)
    assert rows.source().count("ZMLX_PREFETCH_WALK_FAR(x_in_row + i_ + ahead_ + p_);") == 1
    assert "#define ZMLX_PREFETCH_FAR" in rows.header
    for asks in (columns, of("min_at", "at", columns=True)):
        hint = "ZMLX_PREFETCH_FAR(x_in_rows + (q_ + 8) * apart_ + m_ + p_);"
        assert asks.source().count(hint) == 1
        assert "#define ZMLX_PREFETCH_FAR" in asks.header
    merged = of("min_at", "at", columns=True, merges=True)
    assert "PREFETCH" not in merged.header + merged.source()
    assert "PREFETCH" not in of("sum", "total", merges=True).header


@pytest.mark.parametrize("other", ["columns", "merges", "cut"])
def test_short_rows_are_whole_ones(other):
    with pytest.raises(ValueError, match=r"^\[codegen\] 'short' must be False with columns, "):
        Fold("sum", (Output("y", "total", "per_row"),), short=True, **{other: True})


@pytest.mark.parametrize(
    "pattern",
    [
        SOFTMAX,
        Fold("sum", (Output("y", "total", "per_row"),)),
        Fold("moments", (Output("y", "m2", "per_row"),)),
        Scan("sum", (Output("y", "total"),)),
    ],
)
def test_loops_over_a_step_say_that_they_are(pattern):
    """A compiler that unrolls them first finds few vectors."""
    lines = pattern.source().splitlines()
    loops = [i for i, line in enumerate(lines) if re.search(r"; u_ < (U|w_); ", line)]
    assert len(loops) >= 3
    assert {lines[i - 1].strip() for i in loops} == {"ZMLX_STEP_LOOP"}
    assert "#define ZMLX_STEP_LOOP\n" in pattern.header


@pytest.mark.parametrize(
    "pattern",
    [
        Fold("max_at", (Output("y", "at", "per_row"),), columns=True),
        Fold("moments", (Output("y", "m2", "per_row"),), columns=True),
        Scan("sum", (Output("y", "total"),), columns=True),
    ],
)
def test_columns_take_some_rows_at_a_time_in_a_loop_that_is_unrolled(pattern):
    """Left as it is, it keeps g++ from vectorising the loop over columns: float16 takes ten times
    as long."""
    lines = pattern.source().splitlines()
    (loop,) = (i for i, line in enumerate(lines) if "for (uint r_ = 0; r_ < " in line)
    assert "for (uint n_ = " in "\n".join(lines[loop - 6 : loop])
    assert lines[loop - 1].strip() == "ZMLX_ROWS_LOOP"
    assert "#define ZMLX_ROWS_LOOP\n" in pattern.header


def test_a_row_of_a_cpu_has_at_least_two_whole_steps():
    """Its last elements are taken one by one, and folding accumulators takes as long as they."""
    with launch.geometry("cpu"):
        chosen = launch.settings()
    for d in range(16, 2049):
        for geometry in (
            launch.fold_rows(chosen, 9, d),
            launch.rowwise(chosen, 9, d, capped=True),
            launch.rowwise(chosen, 9, d, capped=True, least=8),
        ):
            assert 2 * dict(geometry.template)["U"] <= d


def test_parts_of_one_array_share_its_pointer():
    pattern = Rowwise(
        inputs=(
            Operand("gate", array="x", parts=2),
            Operand("up", array="x", part=1, parts=2),
        ),
        outputs=(Output("y", "gate * up"),),
    )
    source = pattern.source()
    assert source.count("auto x_in_row = x_in + size_t(row) * (D * 2);") == 1
    assert "x_in_row[j]" in source
    assert "x_in_row[D_ + j]" in source
    assert "const auto up_in_step = ZMLX_READ_STEP(U, x_in_row + D_ + i_);" in source
    assert pattern.input_names == ("x_in", "rows", "D")


def test_row_offsets_are_64_bit():
    assert "size_t(row) * D" in SOFTMAX.source()
    columns = Columnwise((Operand("x"),), (Output("y", "x"),))
    assert "size_t(part_) * D" in columns.source()
    # Where the last chunk ends may be beyond 32 bits too.
    walked = Rowwise((Operand("x"),), (Output("y", "x", "column"),))
    assert "min(size_t(rows), (size_t(part_) + 1) * chunk)" in columns.source()
    assert "min(size_t(rows), (size_t(group_) + 1) * chunk)" in walked.source()


@pytest.mark.parametrize("text, names", [
    ("exp(x - m) * 1.0f", ["exp", "x", "m"]),
    ("1e5f + a1 - 0x1Fu", ["a1"]),
    ("p.x + q", ["p", "q"]),
])  # fmt: skip
def test_identifiers(text, names):
    assert identifiers(text) == names


def test_text_is_the_same_in_every_process():
    code = "from tests.test_codegen import SOFTMAX; print(SOFTMAX.source())"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }  # fmt: skip
    assert texts == {SOFTMAX.source() + "\n"}


def test_braces_match_and_every_store_is_cast():
    source = SOFTMAX.source()
    assert source.count("{") == source.count("}")
    assert all(re.search(r"= y_t\(", line) for line in source.splitlines() if "y_out_row[" in line)


@pytest.mark.parametrize("name", ["D", "j", "rows", "u_", "2x", "a b"])
def test_a_name_that_the_body_uses_is_refused(name):
    with pytest.raises(ValueError, match=r"\[codegen\] 'name' must"):
        Elementwise((Operand(name, "full"),), (Output("y", name, "full"),))


def test_short_names_do_not_meet_the_body():
    names = ["s", "u", "i", "k", "w", "n", "lane", "group", "row_", "part", "start", "live"]
    pattern = Rowwise(
        inputs=tuple(Operand(n) for n in names),
        passes=(Pass((Reduce("t", "sum", " + ".join(names)),)),),
        outputs=(Output("y", "t * " + " * ".join(names)),),
    )
    for n in names:
        assert f"const float {n} = float({n}_in_row[j]);" in pattern.source()


EVERY_KIND = (Operand("x"), Operand("s", "scalar"), Operand("r", "per_row"), Operand("w", "column"))
BODIES = (
    SOFTMAX,
    Elementwise((Operand("x", "full"), Operand("s", "scalar")), (Output("y", "x * s", "full"),)),
    Rowwise(
        EVERY_KIND,
        (Output("y", "x * s * r * w + t"), Output("z", "b", "per_row")),
        (Pass((Reduce("t", "prod", "x"), Reduce("b", "minimum", "x"))),),
    ),
)


def test_a_name_that_a_body_means_otherwise_is_renamed():
    """A user's value of that name would hide what the body calls."""
    for pattern in BODIES:
        own = {n for n in identifiers(pattern.source()) if n.rstrip("_") not in METAL_WORDS}
        own = {n for n in own if not is_function(n) and n not in pattern.names()}
        for n in own:
            renamed = free_names([*pattern.names(), n])[n]
            assert renamed != n, n
            assert renamed not in own


def test_a_name_of_a_macro_or_of_a_compiler_is_renamed():
    preludes = Path(zmlx.__file__).parent.joinpath("native", "prelude").glob("**/*.h")
    texts = [path.read_text() for path in preludes]
    macros = {m for text in texts for m in re.findall(r"^ *# *define +(\w+)", text, re.MULTILINE)}
    assert {"NAN", "FLT_MAX", "METAL_FUNC"} < macros
    compilers = {"__LINE__", "__asm__", "__METAL_VERSION__", "_Float16", "_Pragma", "EOF"}
    declared = set(attributes.ATTRIBUTES)
    assert "threads_per_grid" in declared
    for n in (macros | compilers | declared | {"ZMLX_STEP_LOOP", "zmlx_row_reduce"}) - METAL_WORDS:
        renamed = free_names([n])[n]
        assert renamed != n, n
        assert free_names([renamed])[renamed] == renamed


def test_a_renamed_name_meets_no_other():
    names = ["NAN", "named_NAN", "named_NAN_", "D", "D__"]
    assert len(set(free_names(names).values())) == len(names)
