"""The preprocessor: what `#if` computes, and lines in a macro's arguments."""

from __future__ import annotations

import mlx.core as mx
import pytest
from metal_source import cpp, run

TRUE = [
    "-1 > 0u", "-1 < 0", "-1 < 0x7fffffffffffffff", "-1 > 0x8000000000000000", "(1 ? -1 : 0u) > 0",
    "0u - 1 == 18446744073709551615u", "~0 == -1", "~0u == 0xffffffffffffffff", "-1u > 0",
    "-7 / 2 == -3 && -7 % 2 == -1 && 7 % -2 == 1", "7 / -2 == -3", "-2u / 2 == 0x7fffffffffffffff",
    "-1 >> 1 == -1", "-1u >> 1 == 0x7fffffffffffffff", "1 << 3 >> 1 == 4", "2 <= 2u && 2 >= 2u",
    "(-0x7fffffffffffffff - 1) / -1 && (-0x7fffffffffffffff - 1) % -1 == 0",
    "0b11 == 3", "0B1'1 == 3", "1'000 == 1000", "0x1'0 == 16", "010 == 8", "0xFFull == 255",
    "1L + 1UL + 1lu == 3", "0 == 0u",
    "'A' == 65", "'\\n' == 10", "'\\0' == 0", "'\\x41' == 'A'", "'\\101' == 65", "'\\'' == 39",
    "'\\\\' == 92", "'\\xff' == -1", "'AB' == 65 * 256 + 66", "' ' == 32",
    "not 0", "1 and 1", "0 or 1", "(6 xor 3) == 5", "(6 bitand 3) == 2", "(6 bitor 3) == 7",
    "compl 0 == -1", "1 not_eq 2",
    "not (0 && 1 / 0)", "1 || 1 / 0", "1 ? 2 : 1 % 0", "0 ? 1 / 0 : 1", "!(0 && (1 || 1 / 0))",
    "0 && 1 / 0 || 1", "1 || (0 && 1) / 0", "true && !false && !UNKNOWN",
    "2 - 1 - 1 == 0", "1 + 2 * 3 == 7", "(1 | 2 ^ 3 & 4) == 3", "1 < 2 == 1", "0 ? 0 : 0 ? 0 : 1",
]  # fmt: skip


@pytest.mark.parametrize("condition", TRUE)
def test_if_computes_as_in_cpp(condition: str) -> None:
    text = cpp(f"#if {condition}\nout[0] = 7;\n#else\nout[0] = 8;\n#endif")
    assert "7;" in text.replace(" ", "").partition("out[0]=")[2][:3]


@pytest.mark.parametrize(
    "condition",
    ["1 / 0", "1 && 1 % 0", "0 || 1 / 0", "1.5", "1f", "09", "0b2", "0x", "1kb", "''", '"a"',
     "99999999999999999999", "1 +", "(1", "1, 2", "1 ? 2", "1 or and"],
)  # fmt: skip
def test_what_is_no_integer_constant_is_refused(condition: str) -> None:
    with pytest.raises(RuntimeError, match="line 1 of the source: this #if condition is not"):
        cpp(f"#if {condition}\n#endif\nout[0] = 7;")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("DO(if (i) r = 1; else\nr = 2;)", 2),
        ("DO(\nconst\nint k = 5; r = k;\n)", 5),
        ("int k = 3; r = ID(k +\n+k);", 6),
        ("int k = 3; r = ID(ID(k -\r\n-k));", 6),
        ("r = sizeof(QUOTE(a\nb\n\n  c)) * 10 + sizeof(QUOTE(\na\n));", 62),
        ("r = ID(JOIN(1,\n2));", 12),
        ("#define K 4 +\nr = ID(K\n+K\n1);", 9),
    ],
)
def test_a_line_in_an_argument_ends_a_token(text: str, value: int) -> None:
    header = """
        #define DO(...) do { __VA_ARGS__ } while (false)
        #define ID(x) (x)
        #define QUOTE(x) #x
        #define JOIN(x, y) x##y
    """
    source = f"uint i = thread_position_in_grid.x; int r = 0;\n{text};\nout[i] = r;"
    assert run(source, output=(1, mx.int32), header=header).tolist() == [value]


@pytest.mark.parametrize("end", ["\\\n", "\\ \n", "\\ \t\r\n"])
def test_a_line_that_ends_in_a_backslash_goes_on_behind_blanks_too(end: str) -> None:
    header = f"#define TWICE(a) {end}  (2 * (a))\n"
    source = f"out[0] = TWICE(3); // on: {end}out[0] = 1;\nout[1] = 4;"
    assert run(source, output=(2, mx.int32), header=header).tolist() == [6, 4]


def test_letters_beyond_ascii_are_letters() -> None:
    source = """
        threadgroup float σ[2];
        uint i = thread_position_in_grid.x;
        float2 Δt = float2(i, 1);
        σ[i] = Δt.yx.y * π;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = σ[1 - i];
    """
    header = "#define π 3.0f\n"
    assert run(source, output=(2, mx.float32), grid=2, group=2, header=header).tolist() == [3, 0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("DECL(,k, 5); r = k;", 5),
        ("DECL(k,, 5); r = k;", 5),
        ("int k = 2; r = THREE(,k,) + THREE(,,3) + THREE(k,,);", 7),
        ("r = SUM(1, 2, 3);", 6),
        ("r = TAIL(1, 2, 3) + TAIL(4);", 10),
        ("r = OPT(1, 2, 3) + OPT(4);", 10),
        ("#define NONE\nr = OPT(1, 2, 3) + OPT(4, NONE);", 10),
        ("r = JOINED(1) + JOINED(1, 9);", 31),
    ],
)
def test_macros_join_and_take_what_remains(text: str, value: int) -> None:
    header = """
        int sum(int a, int b = 0, int c = 0) { return a + b + c; }
        #define DECL(p, n, v) int p##n = v
        #define THREE(a, b, c) a##b##c
        #define SUM(args...) sum(args)
        #define TAIL(a, args...) sum(a, ## args)
        #define OPT(a, ...) sum(a __VA_OPT__(, (__VA_ARGS__, 0) * 0 + sum(__VA_ARGS__)))
        #define ID(a) a
        #define JOINED(a, ...) (2##__VA_OPT__(8 + a) + 0)
    """
    source = f"uint i = thread_position_in_grid.x; int r = 0;\n{text};\nout[i] = r;"
    assert run(source, output=(1, mx.int32), header=header).tolist() == [value]


@pytest.mark.parametrize("body, expected", [
    ("float k = 3; out[0] = NEG(-k); out[1] = k;", [3, 3]),
    ("int a = 1, i = 3; out[0] = SUB(a, --i); out[1] = i;", [-1, 2]),
    ("float v = 4; thread float* p = &v; out[0] = INV(*p); out[1] = ADD(0x1E,2);", [0.25, 32]),
    ("out[0] = BOTH(,3); out[1] = SUB(1,-2);", [3, 3]),
])  # fmt: skip
def test_an_argument_of_a_macro_is_no_part_of_the_tokens_beside_it(
    body: str, expected: list[float]
) -> None:
    header = """
        #define NEG(x) -x
        #define SUB(a,b) a-b
        #define ADD(a,b) a+b
        #define INV(x) 1/x
        #define BOTH(a,b) -a-b
    """
    assert run(body, output=(2, mx.float32), header=header).tolist() == expected


@pytest.mark.parametrize(
    ("condition", "holds"),
    [("HAS", True), ("HAS_NOT", False), ("!(HAS_NOT) && HAS", True), ("ASKS", True),
     ("defined HAS", True), ("HERE", True)],
)  # fmt: skip
def test_a_macro_may_ask_what_is_defined(condition: str, holds: bool) -> None:
    header = """
        #define A 5
        #define HAS defined(A)
        #define HAS_NOT defined B || 0
        #define ASKS __has_include(<metal_stdlib>)
        #define HERE defined(HUGE_VALF)
    """
    text = cpp(f"#if {condition}\nout[0] = 7;\n#else\nout[0] = 8;\n#endif", header=header)
    assert ("7;" in text.replace(" ", "").partition("out[0]=")[2][:3]) == holds


@pytest.mark.parametrize("before", ["", "#define A\n"])
def test_elifdef_is_refused_where_it_counts_and_where_not(before: str) -> None:
    with pytest.raises(RuntimeError, match="#elifdef is not supported: write #elif defined"):
        cpp(f"{before}#ifdef A\nout[0] = 1;\n#elifdef B\nout[0] = 2;\n#endif\n")


def test_words_that_are_marks_of_the_language() -> None:
    body = """
        bool a = true, b = false;
        int m = 6;
        m and_eq 3; m or_eq 8; m xor_eq 1;
        out[0] = (a and not b) + 2 * (a or b) + 4 * (not a or b) + (m bitand 1) + (compl 0);
        out[1] = m not_eq 11 ? 0 : (m bitor 4) xor 1;
    """
    assert run(body, output=(2, mx.float32)).tolist() == [3, 14]


def test_words_that_are_marks_are_pasted_as_words() -> None:
    header = "#define REDUCE(op, v) simd_##op(v)\n#define FETCH(op) atomic_fetch_##op##_explicit\n"
    body = """
        threadgroup atomic_uint c;
        atomic_store_explicit(&c, 4u, memory_order_relaxed);
        FETCH(or)(&c, 3u, memory_order_relaxed);
        out[0] = REDUCE(and, 3u) + REDUCE(or, 1u) + REDUCE(xor, 2u);
        out[1] = atomic_load_explicit(&c, memory_order_relaxed);
    """
    assert run(body, output=(2, mx.float32), header=header).tolist() == [6, 7]
    with pytest.raises(RuntimeError, match="this and that"):
        cpp("#error this and that")
