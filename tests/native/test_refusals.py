"""What the language lacks, and what is wrong with a kernel, is said with the user's own line."""

from __future__ import annotations

import platform
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from metal_source import (
    BREADTH_FIRST,
    DEPTH_FIRST,
    SAYS_VALUES,
    SCHEDULES,
    Metal,
    checking,
    cpp,
    run,
    schedule,
)

from zmlx import native


def refusal(source: str, header: str = "", group: int = 1, **more: Any) -> str:
    """The error of a kernel whose name is `wrong`."""
    with pytest.raises(RuntimeError) as caught:
        Metal(source, {"x": mx.ones((64,))}, (64, mx.float32), group, group, header=header,
              name="wrong", **more)  # fmt: skip
    return str(caught.value)


@pytest.mark.parametrize("group", [1, 32])
@pytest.mark.parametrize(
    "declaration",
    ["float a[32], *p; p = a;", "float *p, a[32]; p = a;", "float a[32], *p = a;",
     "float *p = nullptr, a[32]; p = a;", "float a[32], (*p)[32]; p = &a;",
     "alignas(16) float a[32], &p = *b;"],
)  # fmt: skip
def test_a_pointer_beside_a_threadgroup_variable_is_refused(declaration: str, group: int) -> None:
    message = refusal(f"\nthreadgroup {declaration}", group=group)
    assert "line 2 of the source: a pointer and a variable in one threadgroup" in message
    assert "declare the pointer by itself" in message


KEYWORDS = ["kernel", "vertex", "device", "constant", "thread", "threadgroup", "half", "bfloat"]


@pytest.mark.parametrize("word", KEYWORDS)
@pytest.mark.parametrize(
    "header",
    ["float {}(float a);", "struct {} {{}};", "namespace {} {{}}", "enum {{ {}, last }};",
     "using {} = float;", "typedef float {};", "template <typename {}> void f();",
     "template <int {}> void f();", "void f(float {});", "void f() {{ device float* {} = 0; }}",
     "struct S {{ float a, {}; }};", "struct S {{ float {}() {{ return 1; }} }};",
     "constant float {}[2] = {{1, 2}};"],
)  # fmt: skip
def test_keywords_of_metal_are_no_names(header: str, word: str) -> None:
    message = refusal("out[0] = 1;", header.format(word) + "\n")
    said = f"line 1 of the header: `{word}` is a keyword of Metal: choose another name"
    assert message.endswith(said)


def test_keywords_of_metal_stand_where_they_may() -> None:
    header = """
        struct S {
            float a;
            float get() const thread;
            float near() const threadgroup { return a; }
            operator half() const { return half(a); }
        };
        inline float S::get() const thread { return a; }
        template <typename T, typename U = half> half narrow(T a) { return half{half(a)}; }
        constant half table[2] = {half(1), 2};
        kernel void other(device float* a, constant half (&b)[2]) { a[0] = b[0]; }
        template <typename T> [[kernel, max_total_threads_per_threadgroup(32)]] void more(
            device T* a) {}
        inline float last(const device float* const device* a, const thread half&, half) {
            return a[0][0];
        }
    """
    source = """
        S s = {x[0]};
        const half h = s, k(h);
        const float device* p = x;
        out[0] = s.get() + h * half(2) + narrow<float>(x[1]) + table[1] + (half)x[2] + k + *p;
    """
    x = mx.array([1.5, 2.0, 3.0])
    assert run(source, {"x": x}, header=header)[0] == 1.5 * 5 + 2 + 2 + 3


@pytest.mark.parametrize(
    "source", ["Pair<int> p(1, 2);", "auto p = Pair<int>(x[0], 2);", "f(Pair<int>(1, g(2)));"]
)
def test_values_in_brackets_of_a_struct_without_a_constructor_are_refused(source: str) -> None:
    header = """
        template <typename T> struct Pair { T a, b; };
        inline int g(int a) { return a; }
        inline int f(Pair<int> p) { return p.a; }
    """
    assert "several values in brackets are not supported for `Pair`" in refusal(source, header)


def test_brackets_of_constructors_calls_and_copies_are_taken() -> None:
    header = """
        struct Plain { int a, b; Plain both(int c, int d) { return {a + c, b + d}; } };
        struct Made { int a; Made(int c, int d) : a(c + d) {} };
        template <typename T> struct Special { T a; };
        template <> struct Special<int> { int a; Special(int c, int d) : a(c + d) {} };
        inline Plain make(int a, int b);
        inline Plain make(int a, int b) { return Plain{a, b}; }
    """
    source = """
        struct Local { int a; Plain twice(int b, int c) { return Plain{a * b, a * c}; } };
        Plain p(make(1, 2)), q = p.both(3, 4);
        auto f = [](Plain a, int b) { return a.a + b; };
        out[0] = Plain(q).a + Made(1, 2).a + Special<int>(3, 4).a + Local{5}.twice(1, 2).b;
        out[0] += f(Plain(p), 1);
    """
    assert run(source, {"x": mx.ones(1)}, header=header)[0] == 4 + 3 + 7 + 10 + 2


@pytest.mark.parametrize("group", [1, 4])
def test_threadgroup_declarations_of_one_kind_stay(group: int) -> None:
    header = """
        threadgroup float* next(threadgroup float* a, int n) { return a + n; }
        template <typename T> void set(threadgroup T* a, T v, threadgroup T* b) { *a = v, *b = v; }
    """
    source = """
        threadgroup float a[4], b[4];
        threadgroup float *p = (threadgroup float*)a, *q = true ? b : a, (*r)[4] = &b;
        uint i = thread_position_in_threadgroup.x;
        for (threadgroup float* s = p, *e = next(p, 1); s < e; ++s) set(s + i, float(i), q + i);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint o = threads_per_threadgroup.x - 1 - i;
        out[thread_position_in_grid.x] = a[o] + (*r)[o];
    """
    found = run(source, output=(4, mx.float32), grid=4, group=group, header=header)
    assert found.tolist() == ([6, 4, 2, 0] if group == 4 else [0] * 4)


@pytest.mark.parametrize("last", ["#pragma METAL internals : disable", "#define A 1", "// end"])
def test_a_header_that_goes_on_into_the_kernel_is_named(last: str) -> None:
    message = refusal("out[0] = 1;", header=f"inline int f() {{ return 1; }}\n{last}")
    assert f"the header's last line, `{last}`, goes on into the kernel" in message
    assert run("out[0] = f();", output=(1, mx.float32), header=f"int f() {{ return 1; }}\n{last}\n")


def test_a_templates_header_that_goes_on_into_the_kernel_is_named() -> None:
    message = refusal("out[0] = T(1);", header="// end", template={"T": mx.float32})
    assert "the header's last line, `// end`, goes on into the kernel" in message


def test_a_comment_may_hold_the_mark_of_kernels() -> None:
    assert run("// as in a [[kernel]] void f()\nout[0] = 1;", output=(1, mx.float32)) == 1


@pytest.mark.parametrize("last", ["/* https://x */", "/* a\n// b */", "/* //*/"])
def test_marks_within_a_comment_are_none(last: str) -> None:
    header = f"inline int f() {{ return 1; }} {last}"
    assert run("out[0] = f();", output=(1, mx.float32), header=header) == 1


def test_an_operator_whose_threads_meet_is_refused() -> None:
    """Its uses have no name, by which those of different branches are told apart."""
    header = "struct A { int v; int operator[](int) const { return simd_sum(v); } };\n"
    message = refusal("A a{1}; out[0] = a[0];", header, group=32)
    assert "line 1 of the header: a simdgroup function or barrier within an operator" in message


def test_a_vector_of_another_length_is_named_within_an_operator() -> None:
    message = refusal("out[0] = 1;\nfloat3 v = float3(1) * float4(1);")
    assert "line 2 of the source: `float3 v = float3(1) * float4(1);`" in message


@pytest.mark.parametrize("text", [
    "constant int a = 1;", "constexpr constant float t[2] = {1, 2};", "const int a = 1;",
    "namespace n { constant int a = 1; struct S { int v; }; }", "struct S { int v; } ;",
    "enum E { one, two };", "static inline int f() { static constexpr int k = 3; return k; }",
    "template <typename T> struct W { T v; W(T a) : v{a} {} };\ntemplate struct W<float>;",
    "typedef struct { float a; } Named;", "using F = float;", "static_assert(1 == 1);",
    "struct S { static int f() { return 1; } S operator+(S a) { return a; } };", ";;",
])  # fmt: skip
def test_what_is_no_variable_that_changes_is_taken(text: str) -> None:
    assert run("out[0] = 1;", output=(1, mx.float32), header=text + "\n")[0] == 1


def test_names_that_only_look_unsupported_are_names() -> None:
    source = """
        float sampler = 1; int tensor = 2; Sampler texture2d = {3};
        out[0] = sampler + (tensor < 3 ? tensor : 0) + texture2d.vertex_count;
    """
    header = "struct Sampler { float vertex_count; Sampler(const thread Sampler&) = delete; };\n"
    header = "struct Sampler { float vertex_count; };\n"
    assert run(source, output=(1, mx.float32), header=header)[0] == 6


# Of a mistake in a kernel: where it is, and a part of what the compiler says.
MISTAKES = {
    "out[0] = 1;\nout[1] = missing + 1;": ("", 2, "source", "out[1] = missing + 1;", "missing"),
    "out[0] = f(1.0);": (
        "float f(float a) {\n    return a.x;\n}\n", 2, "header", "return a.x;", "'x' in 'a'",
    ),
    "float3 a;\nfloat2 b;\nfloat c = (a + b).x;": ("", 3, "source", "float c = (a + b).x;", "vec"),
    "bfloat b = 1.0;": ("", 1, "source", "bfloat b = 1.0;", "bfloat"),
    "bfloat b = bfloat(1.0); b = b * 2.0f;": ("", 1, "source", "bfloat b", "bfloat"),
    "int4 v = int4(3); out[0] = (v * 2.5f).x;": ("", 1, "source", "v * 2.5f", "must be converted"),
    "float v = 1; v.xy = 2;": ("", 1, "source", "float v = 1; v.xy = 2;", "xy"),
    'static_assert(sizeof(float) == 8, "floats are short");': (
        "", 1, "source", "static_assert", "floats are short" + " (4 == 8)" * SAYS_VALUES,
    ),
    "#define TWICE(a) (a + a)\nout[0] = 1;\nout[1] = TWICE(missing);": (
        "", 3, "source", "out[1] = TWICE(missing);", "missing",
    ),
    "out[0] = 1;\nx[out[0] > 0 ? 1 : 0] += 2;": (
        "", 2, "source", "x[out[0] > 0 ? 1 : 0] += 2;", "read-only",
    ),
    "out[0] = 1;\n}": ("", 2, "source", "", "this '}' closes the kernel itself"),
    "out[0] = sum<float4>(1);": (
        "template <typename T> float sum(T a) {\n    return simd_sum(a);\n}\n", 2, "header",
        "return simd_sum(a);", "cannot convert",
    ),
}  # fmt: skip


@pytest.mark.parametrize("group", [1, 32])
@pytest.mark.parametrize("source", MISTAKES)
def test_mistakes_come_back_with_the_users_line(source: str, group: int) -> None:
    header, line, where, text, what = MISTAKES[source]
    message = refusal(source, header, group)
    assert message.startswith(f"[kernel wrong_float_float] line {line} of the {where}: ")
    assert text in message
    assert what in message
    assert "zk_" not in message


def test_what_is_written_to_an_input_is_shown_in_the_users_line_alone() -> None:
    message = refusal("uint i = thread_position_in_grid.x;\nx[i] = 2;\nout[i] = 1;")
    assert "sizetype" not in message
    if "clang" not in native.compiler_path():
        assert message.endswith("`x[i] = 2;`: assignment of read-only memory, such as an input")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("out[0] = mesuré; // 中文", "'mesuré' was not declared in this scope"),
        ("struct 型 { float a; }; 型 𝛼 = {1}; 𝛼.b = 2;", "::型' has no member named 'b'"),
        ("out[0] = 1 € 2;", "expected ';' before '€'"),
        ('static_assert(false, "é µ");', "static assertion failed: é µ"),
    ],
)
def test_letters_beyond_ascii_are_shown_as_they_are_written(line: str, message: str) -> None:
    said = refusal(f"// é µ 中\u2028文\n/* é\n */\n{line}")
    assert f"line 4 of the source: `{line}`: " in said
    assert said.endswith(message)


def test_two_mistakes_are_both_reported() -> None:
    message = refusal("out[0] = one;\nout[1] = 1;\nout[2] = two;")
    assert "line 1 of the source: `out[0] = one;`" in message
    assert "line 3 of the source: `out[2] = two;`" in message


# ---- at run time --------------------------------------------------------------------------------


def failure(source: str, group: int, **more: Any) -> str:
    kernel = Metal(source, output=(64, mx.float32), grid=group, group=group, name="wrong", **more)
    with pytest.raises(RuntimeError) as caught:
        kernel()
    return str(caught.value)


@pytest.mark.parametrize("order", SCHEDULES)
def test_threads_at_different_barriers_are_an_error(order: int) -> None:
    source = """
        if (thread_position_in_threadgroup.x < 40) {
            threadgroup_barrier(mem_flags::mem_none);
        } else {
            threadgroup_barrier(mem_flags::mem_none);
        }
    """
    with schedule(order):
        message = failure(source, 64)
    assert "[wrong] threads of one group wait at different barriers" in message
    assert "line 3 of the source" in message
    assert "line 5 of the source" in message


@pytest.mark.parametrize("order", SCHEDULES)
def test_threads_in_different_turns_at_a_barrier_are_an_error(order: int) -> None:
    source = """
        for (uint turn = 0; turn < 3; ++turn) {
            if (turn == 0 && thread_position_in_threadgroup.x == 5) continue;
            threadgroup_barrier(mem_flags::mem_none);
        }
    """
    with schedule(order):
        message = failure(source, 64)
    assert "line 4 of the source in different turns of a loop or from different calls" in message


def test_a_barrier_in_a_helper_names_the_header() -> None:
    header = "void meet() {\n    threadgroup_barrier(mem_flags::mem_none);\n}\n"
    source = "if (thread_position_in_threadgroup.x < 4) meet(); else meet();"
    message = failure(source, 8, header=header)
    assert "line 2 of the header in different turns of a loop or from different calls" in message


def test_work_goes_on_after_a_failed_group() -> None:
    """The threads that were given up leave nothing behind for the next launch."""
    source = """
        uint i = thread_position_in_threadgroup.x;
        if (i == threadgroup_position_in_grid.x) threadgroup_barrier(mem_flags::mem_none);
        threadgroup_barrier(mem_flags::mem_none);
    """
    assert "different barriers" in failure(source, 64)
    good = "out[thread_position_in_grid.x] = simd_sum(1);"
    assert run(good, output=(64, mx.float32), grid=64, group=64).tolist() == [32] * 64


def test_threads_that_returned_are_not_waited_for() -> None:
    source = """
        uint i = thread_position_in_threadgroup.x;
        if (i >= 40) return;
        threadgroup uint a[64];
        a[i] = i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = a[39 - i] + simd_sum(1);
    """
    kernel = Metal(source, output=(64, mx.float32), grid=64, group=64, init=0)
    expected = [39 - i + (32 if i < 32 else 8) for i in range(40)] + [0] * 24
    assert kernel().tolist() == expected
    with (
        checking(),
        pytest.raises(
            RuntimeError,
            match="24 of 64 threads returned before the barrier in line 6 of the source",
        ),
    ):
        kernel()


def test_checking_shows_threadgroup_memory_that_nobody_wrote() -> None:
    source = """
        threadgroup float a[64];
        threadgroup half b[64];
        uint i = thread_position_in_threadgroup.x;
        if (i > 0) { a[i] = i; b[i] = half(i); }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = a[i] + float(b[i]);
    """
    kernel = Metal(source, output=(32, mx.float32), grid=32, group=32)
    with checking():
        result = kernel()
    assert np.isnan(result[0])
    assert result[1:].tolist() == [2 * i for i in range(1, 32)]


def test_too_much_threadgroup_memory_names_the_sizes() -> None:
    message = refusal("threadgroup float a[9000];\na[0] = 1;", group=32)
    assert "line 1 of the source" in message
    assert "at most 32768 bytes" in message
    assert "(36000 <= 32768)" in message or not SAYS_VALUES
    for group in (1, 32):
        message = refusal("threadgroup float a[5000];\n{ threadgroup half b[7000]; }", group=group)
        assert "line 2 of the source" in message
        assert "(34000 <= 32768)" in message or not SAYS_VALUES


def test_threadgroup_memory_in_scopes_that_end_adds_up() -> None:
    """As on Metal's GPUs, which place no two variables at one address."""
    source = "{ threadgroup float a[5000]; a[0] = 1; }\n{ threadgroup half b[7000]; b[0] = 1; }"
    message = failure(source, 32)
    assert "threadgroup variables take 34000 bytes, more than the 32768 that Metal has" in message


@pytest.mark.parametrize("group", [1, 8, 32])
def test_integers_divided_by_zero_do_not_end_the_process(group: int) -> None:
    """A GPU goes on with some value too, and so does aarch64 by itself."""
    source = """
        uint i = thread_position_in_grid.x;
        int zero = int(x[i]) - 1;
        ulong wide = ulong(zero);
        device int* o = out + i * 8;
        o[0] = 5 / zero; o[1] = 5 % zero; o[2] = int(5ul / wide); o[3] = int(5ul % wide);
        o[4] = char(5) / char(zero); o[5] = ushort(5) % ushort(zero); o[6] = INT_MIN / (zero - 1);
        o[7] = simd_max(6 / (zero + 2)) + 5 / (int(x[i]) * 0);
    """
    ones = {"x": mx.ones((4096,))}
    result = run(source, ones, ((4096, 8), mx.int32), 4096, group)
    undefined = [0, 5, 0, 5, 0, 5, -(2**31)] if platform.machine() == "aarch64" else 7 * [0]
    assert (result == [*undefined, 3]).all()


@pytest.mark.parametrize("group", [1, 9])
@pytest.mark.parametrize("dtype", [mx.uint8, mx.int8, mx.uint16, mx.int16], ids=str)
def test_narrow_integers_divided_by_zero_leave_the_others_alone(
    dtype: mx.Dtype, group: int
) -> None:
    """x86-64 divides bytes in one register, and the next one may hold an address."""
    x, y = mx.array([9] * 9, dtype), mx.array([2, 2, 2, 0, 2, 5, 9, 0, 4], dtype)
    for operator, by in (("/", np.floor_divide), ("%", np.remainder)):
        for wide in ("", "int"):
            source = f"""
                uint i = thread_position_in_grid.x;
                out[i] = {wide}(x[i]) {operator} {wide}(y[i]);
            """
            result = run(source, {"x": x, "y": y}, (9, dtype), 9, group)
            divisible = np.array(y) != 0
            assert (result[divisible] == by(9, np.array(y)[divisible])).all()


def test_arms_of_half_and_bfloat_are_named() -> None:
    message = refusal("half a = 1; bfloat b = 2; float c = x[0] > 0 ? a : b; out[0] = c;")
    assert "half and bfloat do not mix as operands of '?:': cast one of them" in message


@pytest.mark.parametrize("type", ["half", "bfloat"])
def test_a_conversion_that_must_be_a_cast_is_named(type: str) -> None:
    other = "bfloat" if type == "half" else "float"
    message = refusal(f"{type} a = {other}(x[0]); out[0] = a;")
    assert f"conversion from '{other}' to '{type}' must be a cast" in message


@pytest.mark.parametrize("line", [
    "float2 v = {x[0], 1, 2};",
    "float3 v = {float2(x[0]), float2(1)};",
    "half2 v; v = {1, 2, 3, 4, 5};",
    "constexpr int2 v = {1, 2, 3};",
    "float2 v[1] = {{1, x[0], 3}};",
])  # fmt: skip
def test_a_list_longer_than_its_vector_is_named(line: str) -> None:
    message = refusal(f"float s = 1;\n{line}\nout[0] = s + sum(v);",
                      "float sum(float2 v) { return v.x; } float sum(float3 v) { return v.z; }"
                      "float sum(half2 v) { return v.x; } float sum(int2 v) { return v.x; }"
                      "float sum(thread float2* v) { return v[0].x; }")  # fmt: skip
    assert "line 2 of the source" in message
    assert "more values in braces than the vector has components" in message


def test_an_open_comment_in_the_header_is_named() -> None:
    assert "the header opens a comment that it does not close" in refusal("out[0] = 1;", "/* on")


def test_a_brace_that_is_not_closed_is_of_the_source() -> None:
    message = refusal("out[0] = 0;\nif (x[0] > 1) {\n  out[0] = 1;\n")
    assert "line 2 of the source" in message
    assert "this '{', or one within it, is not closed before the end of the source" in message


@pytest.mark.parametrize("header", ["", "float f() { return 1; }\n"])
@pytest.mark.parametrize("body", ["out[0] = 1;", "{ out[0] = 1; }"])
@pytest.mark.parametrize("end", ["// on \\", '"on\\'], ids=["comment", "literal"])
def test_a_line_that_hides_the_kernel_s_own_brace_is_named(
    end: str, body: str, header: str
) -> None:
    message = refusal(f"{body}\n{end}", header)
    assert "line 2 of the source: this line goes on behind the end of the source" in message


def test_an_array_whose_length_is_no_constant_is_refused_as_metal_does() -> None:
    message = refusal("uint n = uint(x[0]);\nfloat a[n];\na[0] = 1;\nout[0] = a[0];")
    assert "line 2 of the source: `float a[n];`: the length of an array must be a const" in message


def test_a_missing_semicolon_is_of_the_line_that_lacks_it() -> None:
    message = refusal("float a = x[0]\n// a comment\n\n  out[0] = a;")
    assert "line 1 of the source: `float a = x[0]`: expected ',' or ';' before 'out'" in message
    message = refusal("out[0] = 1;\nout[1] = out[0] out[2] = 3;")
    assert "line 2 of the source: `out[1] = out[0] out[2] = 3;`: expected ';'" in message
    message = refusal("out[0] = f(x[0]);", "float f(float a) {\n  return a\n}")
    assert "line 2 of the header: `return a`: expected ';' before '}'" in message


def test_a_thread_with_too_many_variables_is_an_error_not_a_crash() -> None:
    source = """
        float a[40000];
        uint i = thread_position_in_threadgroup.x;
        for (uint k = 0; k < 40000; ++k) a[k] = i;
        float s = simd_sum(a[i]);
        for (uint k = 0; k < 40000; ++k) s += a[(k * 7) % 40000];
        out[i] = s;
    """
    what = "a thread needs more than 64 KiB for its variables; use smaller arrays"
    assert what in failure(source, 32)
    with checking():
        assert what in failure(source, 32)
    assert what in failure(source.replace("40000", "2000000"), 32)  # megabytes below its stack
    alone = "float a[40000]; threadgroup float b[2]; uint i = thread_position_in_threadgroup.x;"
    alone += "for (uint k = 0; k < 40000; ++k) a[k] = k * i; b[i] = a[i * 7]; out[i] = a[i];"
    assert what in failure(alone, 2)


def test_a_missing_barrier_shows_when_simdgroups_run_one_after_the_other() -> None:
    """The race of mlx-lm's KL kernels: lane 0 overwrites what other simdgroups still read."""
    source = """
        threadgroup float shared[4];
        uint i = thread_position_in_threadgroup.x, group = simdgroup_index_in_threadgroup;
        if (thread_index_in_simdgroup == 0) shared[group] = group + 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float largest = 0;
        for (uint k = 0; k < 4; ++k) largest = max(largest, shared[k]);
        {BARRIER}
        float sum = simd_sum(largest);
        if (thread_index_in_simdgroup == 0) shared[3 - group] = sum * 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = largest;
    """

    def results(barrier: str) -> list[float]:
        text = source.replace("{BARRIER}", barrier)
        kernel = Metal(text, output=(128, mx.float32), grid=128, group=128)
        found = []
        for order in (BREADTH_FIRST, DEPTH_FIRST):
            with schedule(order):
                found.append(float(kernel().min()))
        return found

    assert results("") == [4, 1]
    assert results("threadgroup_barrier(mem_flags::mem_threadgroup);") == [4, 4]


# ---- the text -----------------------------------------------------------------------------------


def test_the_rewrite_is_deterministic() -> None:
    source = "threadgroup float a[32]; a[0] = x[0].xy.x; out[0] = simd_sum(a[0]);"
    arguments = (source, {"x": mx.ones((64,))}, (1, mx.float32), 32, 32)
    assert cpp(*arguments, name="same") == cpp(*arguments, name="same")


def test_sections_of_the_prelude_come_only_when_named() -> None:
    plain = cpp("out[0] = x[0] + 1;", {"x": mx.ones((64,))}, group=1)
    assert "zk_group" not in plain
    assert "simd_sum" not in plain
    assert "struct bfloat" not in plain


def test_a_variable_named_like_a_function_calls_for_no_section() -> None:
    x = {"x": mx.ones((64,))}
    variable = cpp("float length = x[0]; out[0] = length;", x, group=1)
    assert "section geometry" not in variable
    assert "section vectors" not in variable
    for call in (
        "out[0] = length(float3(x[0]));",
        "out[0] = metal::length(float3(x[0]));",
        "using metal::length; out[0] = length(float3(x[0]));",
        "#define F(NAME, v) NAME(v)\nout[0] = F(length, float3(x[0]));",
        "float length = x[0]; out[0] = length + metal::length (float3(x[0]));",
    ):
        assert "section geometry" in cpp(call, x, group=1), call


@pytest.mark.parametrize("rest", ["} { no words;", "} else { out[0] = 2;", "} int f() { return 1;"])
def test_text_behind_the_kernel_s_own_brace_is_refused(rest: str) -> None:
    message = refusal(f"out[0] = 1;\nif (x[0] > 1) {{ out[0] = 3; }}\n{rest}")
    assert "line 3 of the source: this '}' closes the kernel itself" in message


@pytest.mark.parametrize("header", [
    "int get(const device float* p) { return *p; }\n"
    "float get(const threadgroup float* p) { return *p; }",
    "float get(const device float* p, int n = 0) { return p[n]; }\n"
    "float get(const threadgroup float* p, int n = 1) { return p[n]; }",
])  # fmt: skip
def test_overloads_by_address_space_with_other_results_or_defaults_are_refused(header: str) -> None:
    message = refusal("threadgroup float s[2]; s[0] = s[1] = 1; out[0] = get(s);", header)
    assert "line 2 of the header: overloads of `get` that differ in address space" in message
