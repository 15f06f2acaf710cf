"""Functions that reach a simdgroup function, called from several branches: each call combines the
lanes that make it. CUDA leaves open which lanes those are, so that the table of the language, which
all targets compute, has none of these."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from metal_source import SCHEDULES, schedule

import zmlx
from zmlx.language.row import Row

SUMS = [sum(range(16))] * 16 + [sum(range(16, 32))] * 16


def apart(call: str, header: str, before: str = "", values: Sequence[int] = SUMS) -> Row:
    """The sum of a lane's number over those that call from the same branch, or other values."""
    return Row(
        f"int v = int(i);\n{before}\nif (i < 16) {{ r = {call}; }}\nelse {{ r = {call}; }}",
        np.array(values),
        header,
        threads=32,
        together=True,
    )


SUM = "inline int sum(int a) { return simd_sum(a); }\n"
OBJECT = "struct Sum { int operator()(int a) const thread { return simd_sum(a); } };\n"
MADE = "struct Made { int sum; Made(int a) : sum(simd_sum(a)) {} };\n"
APPLY = "template <typename F> int apply(F f, int a) { return f(a); }\n"

#: A function that is a template argument of some type.
RUN = "template <{} f> int run(int a) {{ return f(a); }}\n"
POINTER = "typedef int (*pointer)(int);\n" + RUN.format("pointer")
TWICE = "template <typename T, int N> T twice(T a) { return N * simd_sum(a) / 2; }\n"

CALLS = {
    "of a function": apart("sum(v)", SUM),
    "of an object": apart("total(v)", OBJECT, "Sum total;"),
    "of an object that is handed on": apart("apply(Sum(), v)", OBJECT + APPLY),
    "of an object that is made there": apart(
        "made<Sum>(v)", OBJECT + "template <typename Op> int made(int a) { return Op()(a); }"
    ),
    "of an object that is made there, with braces": apart(
        "made<Sum>(v)", OBJECT + "template <typename Op> int made(int a) { return Op{}(a); }"
    ),
    "of an object that a function returns": apart(
        "run(v)", OBJECT + "Sum make(int) { return {}; }\nint run(int a) { return make(1)(a); }"
    ),
    "of a pointer that a function returns": apart(
        "run(v)",
        SUM + "typedef int (*pointer)(int);\npointer get(int) { return sum; }\n"
        "int run(int a) { return get(1)(a); }",
    ),
    "of an object by its operator's name": apart(
        "run(Sum(), v)", OBJECT + "int run(Sum f, int a) { return f.operator()(a); }"
    ),
    "of an object by itself": apart(
        "total.run(v)",
        "struct Sum { int operator()(int a) const thread { return simd_sum(a); }\n"
        "int run(int a) const thread { return (*this)(a); } };",
        "Sum total;",
    ),
    "of a static member": apart(
        "run(v)",
        OBJECT + "struct W { static constexpr Sum sum{}; };\nint run(int a) { return W::sum(a); }",
    ),
    "of a variable at file scope": apart(
        "run(v)", OBJECT + "constant constexpr Sum total{};\nint run(int a) { return ::total(a); }"
    ),
    "of those in an array of another's type, on one line": Row(
        "auto total = [](int a) { return simd_sum(a); };\n"
        "decltype(total) both[2] = {total, total};\n"
        "r = i < 16 ? both[0](int(i)) : both[1](int(i));",
        np.array(SUMS),
        threads=32,
        together=True,
    ),
    "beside what only looks like a call of a value": apart(
        "total(v) + metal::max(0, max) + (int)(float)(one + one).x - 2",
        "struct Z { float x; Z operator+(Z b) const thread {\n"
        "if (x > 0) (void)(b); else { } (void)(x);\n"
        "return Z{(float)(x) + metal::max(b.x, 0.0f)}; } };",
        "auto total = [](int a) { return simd_sum(a); }; int max = 0; Z one{1};",
    ),
    "beside an operator that makes what it returns": apart(
        "total(v + int((C(1) + C(-1)).x))",
        "struct C { float x; C(float x) : x(x) {}\n"
        "C operator+(C b) const thread { return C(x + b.x); } };",
        "auto total = [](int a) { return simd_sum(a); };",
    ),
    "beside enumerators of its name": apart(
        "op == Op::sum ? run<Op::sum>(v, op) + n::sum() : R::sum == R::most ? 1 : width(v)",
        "enum class Op : int { sum, most };\nnamespace n { int sum() { return 0; } }\n"
        + SUM
        + SUM.replace(" sum(", " width(")
        + "struct R { enum Kind : int { sum, most };\n"
        "static int go(int a) { return max(a, (sum)); } };\n"
        "template <Op o> int run(int a, Op op) {\nif (op == Op::sum && o == Op::sum)\n"
        "return sum(a);\nreturn a; }",
        "Op op = i < 64 ? Op::sum : Op::most;",
    ),
    "beside a static member of its name": apart(
        "width(v) * (W::width + of<W>())",
        SUM.replace(" sum(", " width(") + "struct W { static constexpr int width = 1; };\n"
        "template <typename T> int of() { return width(0) + T::width - 1; }",
    ),
    "of one in an inline namespace of a namespace": apart(
        "run<n::sum>(v)",
        "namespace n { inline namespace one { " + SUM + "} }\n" + POINTER,
    ),
    "of one that a type inherits": apart(
        "run<S::sum>(v)",
        "struct B { static " + SUM + "};\nstruct S : B {};\n" + POINTER,
    ),
    "of one in what a template stands for": apart(
        "go<S>(v)",
        "struct S { static "
        + SUM
        + "};\n"
        + POINTER
        + "template <typename T> int go(int a) { return run<T::sum>(a); }",
    ),
    "behind heads of statements that hide it": apart(
        "run(sum, v) + n - 24",
        SUM + "template <typename F> int run(F f, int a) { return f(a); }",
        "int n = 0; for (int sum = 5; sum > 0; --sum) n += max(sum, 0);\n"
        "if (int sum = n) n += max(sum, 0) - 10; while (int sum = 24 - n) n += max(sum, 0);\n"
        "int one[1] = {1}; for (auto sum : one) n += max(sum, 0) - 1;",
    ),
    "beside bindings of its name": apart(
        "sum(v) + n - 7",
        SUM + "struct S { int a, b; };",
        "int n = 0; { S s{5, 6}; auto [sum, other] = s; n += max(sum, other); }\n"
        "{ S s{5, 6}; thread auto& [other, sum] = s; n += max(sum, other) - 5; }",
    ),
    "beside captures of its name": apart(
        "sum(v) + g() + h() - 10",
        SUM,
        "auto g = [sum = 5] { return max(sum, 0); };\n"
        "int five = 5; auto h = [&sum = five](int a = 0) { return max(sum, a); };",
    ),
    "beside members of its name that a type inherits": apart(
        "sum(v) + t.g() - 5",
        SUM + "struct B { int sum; }; struct S : B {};\n"
        "struct T : public S { int g() const thread { return max(sum, 0); } };",
        "T t; t.sum = 5;",
    ),
    "of a lambda that is handed on": apart(
        "apply(total, v)", APPLY, "auto total = [](int a) { return simd_sum(a); };"
    ),
    "of a lambda without a list": apart("total()", "", "auto total = [&] { return simd_sum(v); };"),
    "of a lambda without a list that holds nothing": apart(
        "7 * total()", "", "auto total = [] { return simd_sum(1); };", [7 * 16] * 32
    ),
    "of a lambda without a list that is handed on": Row(
        "int v = int(i);\nr = both([&] { return simd_sum(v); }, v);",
        np.array(SUMS),
        "template <typename F> int both(F f, int a) {\n"
        "if (a < 16)\nreturn f();\nelse\nreturn f(); }",
        threads=32,
        together=True,
    ),
    "of a lambda without a list that becomes a pointer": Row(
        "int (*f)() = [] { return simd_sum(1); };\nr = f();", 32, threads=32, together=True
    ),
    "of a pointer that a lambda without a list becomes": Row(
        "auto f = +[] { return simd_sum(1); };\nr = f();", 32, threads=32, together=True
    ),
    "of a function that is handed on": apart("apply(sum, v)", SUM + APPLY),
    "of a function that stores to its argument": apart(
        "apply(add, v)",
        "inline void add(int a, thread int& b) { b = simd_sum(a); }\n"
        "template <typename F> int apply(F f, int a) { int b = 0; f(a, b); return b; }",
    ),
    "of a pointer": apart("f(v)", SUM, "int (*f)(int) = sum;"),
    "of what a pointer points to": apart("(*f)(v)", SUM, "int (*f)(int) = &sum;"),
    "of one in an array": apart("f[i / 32](v)", SUM, "int (*f[2])(int) = {sum, sum};"),
    "of one of two": apart("(v < 99 ? sum : other)(v)", SUM + SUM.replace(" sum(", " other(")),
    "of a parameter that is a function": apart(
        "run(sum, v)", SUM + "int run(int f(int), int a) { return f(a); }"
    ),
    "of a parameter whose type is deduced": apart(
        "run(sum, v)", SUM + "template <typename T> T run(T (*f)(T), T a) { return f(a); }"
    ),
    "of a parameter, with values in braces": apart(
        "run(sum, v)", SUM + "int run(int (*f)(int), int a) { return f({a}); }"
    ),
    "of a template argument": apart("run<sum>(v)", SUM + POINTER),
    "of its address": apart("run<&sum>(v)", SUM + POINTER),
    "of a template argument of any type": apart("run<sum>(v)", SUM + RUN.format("auto")),
    "of a template argument of a function's type": apart(
        "run<sum>(v)", SUM + "typedef int (function)(int);\n" + RUN.format("function")
    ),
    "of a template argument of another's type": apart(
        "run<sum>(v)", SUM + "typedef decltype(sum) function;\n" + RUN.format("function")
    ),
    "of a template argument of another's address": apart(
        "run<sum>(v)", SUM + "typedef decltype(&sum) function;\n" + RUN.format("function")
    ),
    "of a template argument of a template argument": apart("run<run<sum>>(v)", SUM + POINTER),
    "of an instance as a template argument": apart("run<twice<int, 2>>(v)", TWICE + POINTER),
    "of a template as a template argument": apart(
        "run<sum>(v)", "template <typename T> T sum(T a) { return simd_sum(a); }\n" + POINTER
    ),
    "of an overload as a template argument": apart(
        "run<sum>(v)", SUM + "float sum(float a, float b) { return a + b; }\n" + POINTER
    ),
    "of one that has the name of Metal's own": apart(
        "run<step>(v)", SUM.replace(" sum(", " step(") + POINTER
    ),
    "of one in a namespace": apart("run<n::sum>(v)", "namespace n { " + SUM + "}\n" + POINTER),
    "of one in a class": apart(
        "run<S<int>::sum>(v)", "template <typename T> struct S { static " + SUM + "};\n" + POINTER
    ),
    "of the argument of a class": apart(
        "R<sum>::run(v)",
        SUM + "template <int (*f)(int)> struct R { static int run(int a) { return f(a); } };",
    ),
    "of an argument that is what a class was specialised for": apart(
        "R<sum>::run(v)",
        SUM + "template <int (*f)(int)> struct R;\n"
        "template <> struct R<sum> { static int run(int a) { return sum(a); } };",
    ),
    "of an argument, between constructors": apart(
        "run(sum, v)",
        SUM + "struct A { int a; A(int a) : a(a) {} };\n"
        "int zero(const half4, const int) { return 0; }\n"
        "template <typename F, typename T> T run(F f, T a) {\n"
        "A one(1); return f(T(a)) + A(a).a - a + one.a - int(1) + zero(half4(1), int(2)); }",
    ),
    "of an argument that is compared": apart(
        "run(sum, v)", SUM + "int run(int (*f)(int), int a) { return f == sum ? f(a) : 0; }"
    ),
    "of a parameter that has the function's name": apart(
        "run(sum, v)", SUM + "template <typename F> int run(F sum, int a) { return sum(a); }"
    ),
    "of a template argument that has the function's name": apart(
        "R<sum>::run(v)",
        SUM + "template <int (*sum)(int)> struct R { static int run(int a) { return sum(a); } };",
    ),
    "of a parameter that has a method's name": apart(
        "run(sum, v) + q.f(0)",
        SUM + "struct Q { int f(int a) const thread { return a; } };\n"
        "template <typename F> int run(F f, int a) { return f(a); }",
        "Q q;",
    ),
    "of a member that is a pointer": apart(
        "s.go(v) + s.f(v) - p->f(v)",
        SUM + "struct S { int go(int a) const thread { return f(a); } int (*f)(int); };",
        "S s = {sum}; thread S* p = &s;",
    ),
    "of what a lambda holds": apart(
        "f(v)", SUM, "int (*g)(int) = sum; auto f = [=](int a) { return g(a); };"
    ),
    "of a function whose name another function's variable has": apart(
        "run(sum, v) + other(v) - v",
        SUM + "int other(int a) { int sum = a; return sum; }\n"
        "template <typename F> int run(F f, int a) { return f(a); }",
    ),
    "of a function that a variable hides later": Row(
        "int v = sum(int(i)); { int sum = 3; r = max(sum, v); }",
        np.full(32, 496),
        SUM,
        threads=32,
        together=True,
    ),
    "of a lambda that calls one": apart(
        "twice(total, v)",
        "",
        "auto total = [](int a) { return simd_sum(a); };\n"
        "auto twice = [](auto f, int a) { return f(a); };",
    ),
    "of a template of any number of arguments": apart(
        "all(v, v - i)", "template <typename... A> int all(A... a) { return simd_sum((a + ...)); }"
    ),
    "of a constructor": apart(
        "Made(v).sum", "struct Made { int sum; Made(int a) {\nsum = simd_sum(a); } };"
    ),
    "of a variable's constructor": Row(
        "int v = int(i);\nif (i < 16) { Made a(v); r = a.sum; } else { Made b{v}; r = b.sum; }",
        np.array(SUMS),
        "struct Made { int sum; Made(int a) {\nsum = simd_sum(a); } };",
        threads=32,
        together=True,
    ),
    "of a constructor, before its body": apart("Made(v).sum", MADE),
    "of a constructor outside its class": apart(
        "Made(v).sum",
        "struct Made { int sum; Made(int a); };\nMade::Made(int a) : sum(simd_sum(a)) {}",
    ),
    "of a constructor of a member": apart(
        "Holds(v).made.sum", MADE + "struct Holds { Made made; Holds(int a) : made{a} {} };"
    ),
    "of a constructor of a base": apart(
        "Holds(v).sum", MADE + "struct Holds : Made { Holds(int a) : Made(a) {} };"
    ),
    "of a constructor by a lambda": apart(
        "Holds(total, v).sum",
        "template <typename F> struct Holds { int sum; Holds(F f, int a) : sum(f(a)) {} };",
        "auto total = [](int a) { return simd_sum(a); };",
    ),
    "of a constructor that a member needs": apart(
        "Holds(v).sum",
        "struct One { int one; One() : one(simd_sum(1) / 16) {} };\n"
        "struct Holds { One one; int sum; Holds(int a) { sum = one.one * simd_sum(a); } };",
    ),
    "of a constructor by what a function returns": apart(
        "make(v).sum", MADE + "Made make(int a) { return {a}; }"
    ),
    "of constructors on one line": Row(
        "int v = int(i); r = i < 16 ? Made{v}.sum : Made{v}.sum;",
        np.array(SUMS),
        MADE,
        threads=32,
        together=True,
    ),
    "of constructors between others": Row(
        "int v = int(i);\nr = max(i < 16 ? Made(v).sum : 0, simd_sum(1)) + simd_sum(1);",
        np.array([120 + 32] * 16 + [32 + 32] * 16),
        MADE,
        threads=32,
        together=True,
    ),
    "of a default argument on one line": Row(
        "r = i < 16 ? count() : count();",
        16,
        "int count(int a = simd_sum(1)) { return a; }",
        threads=32,
        together=True,
    ),
    "of a default argument of a template that is defined later": apart(
        "count() * v / v",
        "template <typename T = int> T count(T a = simd_sum(1));\n"
        "template <typename T> T count(T a) { return a; }",
        "v += 1;",
        [16] * 32,
    ),
    "of a member's value on one line": Row(
        "if (i < 16) { Counts c{}; r = c.n; } else { Counts c{}; r = c.n; }",
        16,
        "struct Counts { int n = simd_sum(1); };",
        threads=32,
        together=True,
    ),
    "of a specialisation": apart(
        "sum<int>(v)",
        "template <typename T> T sum(T a) { return a; }\n"
        "template <> int sum<int>(int a) { return simd_sum(a); }",
    ),
    "of a method defined behind its class": apart(
        "a.sum(v)",
        "struct A { int sum(int a) const thread; };\n"
        "inline int A::sum(int a) const thread { return simd_sum(a); }",
        "A a;",
    ),
    "of a function with an overload that is apart": apart(
        "sum(v) + sum(0.5f)", "float sum(float);\n" + SUM + "float sum(float a) { return 0 * a; }"
    ),
    "of an overload of Metal's own": apart(
        "simd_sum(Two{v, 1}).a",
        "struct Two { int a, b; };\n"
        "inline Two simd_sum(Two t) { return Two{simd_sum(t.a), simd_sum(t.b)}; }",
    ),
    "of objects that are made on one line": Row(
        "r = i < 16 ? Sum()(int(i)) : Sum{}(int(i));",
        np.array(SUMS),
        OBJECT,
        threads=32,
        together=True,
    ),
    "in turns of a loop that lanes skip, of objects that are made there": Row(
        "r = 0;\nfor (uint k = 0; k < 4; ++k) {\n"
        "if ((i + k) % 2) continue;\nr += Sum()(1) * (k + 1);\n}",
        np.array([64, 96] * 16),
        OBJECT,
        threads=32,
        together=True,
    ),
    "in turns of a loop that lanes skip": Row(
        "Sum total; r = 0;\nfor (uint k = 0; k < 4; ++k) {\n"
        "if ((i + k) % 2) continue;\nr += total(1) * (k + 1);\n}",
        np.array([64, 96] * 16),
        OBJECT,
        threads=32,
        together=True,
    ),
}


@pytest.mark.parametrize("row", CALLS.values(), ids=CALLS)
def test_a_call_combines_the_lanes_that_make_it(row: Row) -> None:
    with zmlx.target("cpu"):
        for order in SCHEDULES:
            with schedule(order):
                row.check()
