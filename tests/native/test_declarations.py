"""Declarations in front of a kernel: functions, overloads and types, and what they are named."""

from __future__ import annotations

import mlx.core as mx
import pytest
from metal_source import cpp, run


def value(source: str, header: str = "") -> float:
    """What a kernel of one thread stores."""
    return run(source, output=(1, mx.float32), header=header).item()


def test_a_pragma_before_a_function_is_no_part_of_its_name() -> None:
    header = """
        _Pragma("unused") float once(float a) { return a; }
        _Pragma("unused") float twice(float a) { return 2 * a; }
    """
    assert value("out[0] = once(1) + twice(2);", header) == 5


@pytest.mark.parametrize(
    "header, source",
    [
        (
            "template <class T> auto f(T a) -> enable_if_t<is_integral_v<T>, T> { return a + 1; }"
            "template <class T> auto f(T a) -> enable_if_t<!is_integral_v<T>, T> { return a * 2; }",
            "out[0] = f(1u) + f(1.5f);",
        ),
        (
            "struct A { float get() const { return 2; } };"
            "struct B { float take() const { return 3; } };"
            "template <class T> auto f(T a) -> decltype(a.get()) { return a.get(); }"
            "template <class T> auto f(T a) noexcept -> decltype(a.take()) { return a.take(); }",
            "out[0] = f(A{}) + f(B{});",
        ),
        (
            "struct A { template <class T> auto f(T a) const -> enable_if_t<sizeof(T) == 4, T>;"
            " template <class T> auto f(T a) const -> enable_if_t<sizeof(T) == 8, T>; };"
            "template <class T>"
            "auto A::f(T a) const -> enable_if_t<sizeof(T) == 4, T> { return a; }"
            "template <class T>"
            "auto A::f(T a) const -> enable_if_t<sizeof(T) == 8, T> { return a + 2; }",
            "out[0] = A().f(1u) + A().f(2ul);",
        ),
    ],
)
def test_overloads_may_differ_in_what_they_return(header: str, source: str) -> None:
    assert value(source, header + "\n") == 5


def test_overloads_that_return_pointers_differ_in_address_space_only() -> None:
    header = """
        template <class T> auto next(device T* p) -> device T* { return p + 1; }
        template <class T> auto next(thread T* a) -> thread T* { return a + 1; }
    """
    assert value("float a[2] = {1, 5}; out[0] = *next(a); next(out);", header) == 5


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("name", ["concept", "requires", "consteval", "constinit", "char8_t"])
def test_newer_keywords_of_cpp_name_anything(name: str, group: int) -> None:
    source = f"""
        threadgroup float {name}[4], b;
        uint i = thread_position_in_threadgroup.x;
        {name}[i] = i + 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = {name}[threads_per_threadgroup.x - 1 - i];
    """
    found = run(source, output=(4, mx.float32), grid=4, group=group)
    assert found.tolist() == ([4, 3, 2, 1] if group > 1 else [1] * 4)


def test_a_variable_may_have_its_functions_name() -> None:
    header = """
        inline float total(float a) { float total(a); return total + 1; }
        inline uint sum(uint a) { if (a > 2) { const uint sum(a); return sum; } else return 2; }
    """
    assert value("out[0] = total(3) + sum(1) + sum(5);", header) == 11
    with pytest.raises(RuntimeError, match="recursion"):
        value("out[0] = f(3);", "float f(float a) { if (a < 1) return 1; else return f(a - 1); }\n")


def test_constants_may_come_from_a_function_that_calls_itself() -> None:
    header = """
        constexpr int bits(int n) { return n < 2 ? 0 : 1 + bits(n / 2); }
        constexpr METAL_FUNC bool odd(int n);
        constexpr METAL_FUNC bool even(int n) { return n == 0 ? true : odd(n - 1); }
        constexpr METAL_FUNC bool odd(int n) { return n == 0 ? false : even(n - 1); }
    """
    source = """
        threadgroup float a[even(4) ? bits(16) : 1];
        uint i = thread_position_in_threadgroup.x;
        a[i] = i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[thread_position_in_grid.x] = a[threads_per_threadgroup.x - 1 - i] + bits(i + 1);
    """
    for group, expected in ((1, [0, 0, 0, 0]), (4, [3, 3, 2, 2])):
        found = run(source, output=(4, mx.float32), grid=4, group=group, header=header)
        assert found.tolist() == expected


def test_a_function_of_the_library_may_be_a_value() -> None:
    header = """
        uint apply(uint (*f)(uint), uint a) { return f(a); }
        template <uint (*F)(uint)> uint applied(uint a) { return F(a); }
    """
    source = """
        uint (*f)(uint) = popcount;
        out[0] = f(7u) + 10 * apply(clz, 1) + 1000 * applied<ctz>(16);
    """
    assert value(source, header) == 4313


# ---- fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "member",
    [
        "Pair(float4 w) : v(w.zw) {}",
        "Pair(float4 w) : v{w.zw} {}",
        "Pair(float4 w) { v = w.zw; } float2 plus(float2 zw) const { return v + zw; }",
        "float4 w; float2 u = w.zw, t = vec<float, 2>(1, 2); Pair(float4 a) : v(a.zw), w(a) {}",
        "Pair(float4 w) { v = w.zw; } float2 zw() const { return v; }",
        "Pair(float4 w) { v = w.zw; } template <int zw> int has() const { return zw; }",
    ],
)
def test_what_is_no_field_of_a_struct_leaves_swizzles(member: str) -> None:
    header = f"struct Pair {{ float2 v; {member} }};\n"
    source = "float4 w(1, 2, 3, 4); Pair p(w); out[0] = p.v.x + 10 * p.v.y + 100 * w.zw.y;"
    assert value(source, header) == 443


@pytest.mark.parametrize(
    "fields",
    [
        "float2 xy; float ab;",
        "float2 a, xy = float2(0); float ab{0};",
        "vec<float, 2> a, xy; uint ab : 4;",
        "union { struct { float2 xy; }; float z[2]; }; float ab [[maybe_unused]];",
        "struct Inner { float a; } inner; float2 xy __attribute__((unused)); float ab;",
        "void f(float4 a) { xy = a.zw; } float ab; float2 xy;",
    ],
)
def test_a_field_may_look_like_a_swizzle(fields: str) -> None:
    source = "Box b; b.xy = float2(1, 2); b.ab = 3; out[0] = b.xy.x + 10 * b.xy.y + 100 * b.ab;"
    assert value(source, f"struct Box {{ {fields} }};\n") == 321


# ---- type parameters ----------------------------------------------------------------------------

SAME = "template <typename S> S same(S s) { S t = {s}; return t; }\n"


@pytest.mark.parametrize(
    "header, source",
    [
        ("struct S { float a; };", "S s; s.a = 3; out[0] = same(s.a);"),
        (
            "struct S { float a; };",
            "S s = {3}; out[0] = s.a; int i = 4; S t = {i}; out[0] -= t.a - 4;",
        ),
        ("struct S final { float a; };", "S s; s.a = 3; out[0] = s.a;"),
        ("enum class S { a };", "out[0] = 3 + int(same(S::a));"),
        ("enum S : uint { a };", "out[0] = 3 + same(a);"),
        ("namespace S { float f(float a) { return a; } }", "out[0] = S::f(3);"),
        (
            "template <class S> struct A : S { float a; }; struct B { float b; };",
            "A<B> a; out[0] = a.b = 3;",
        ),
        (
            "struct B { float b; }; struct C {};"
            "template <class S, class T> struct A : public S, private T { float a; };",
            "A<B, C> a; out[0] = a.b = 3;",
        ),
        (
            "struct B { float b; }; template <class S> struct A : S { A(float a) : S{a} {} };",
            "A<B> a(3); out[0] = a.b;",
        ),
        (
            "template <class T> struct S { using type = T; };"
            "static_assert(is_same_v<float, typename S<float>::type>);",
            "out[0] = same(3.0f);",
        ),
    ],
)
def test_a_type_parameter_is_one_in_its_template_only(header: str, source: str) -> None:
    assert value(source, SAME + header + "\n") == 3


def test_a_type_parameter_may_be_a_vector() -> None:
    header = """
        template <typename T> struct Cell {
          T v = {1};
          Cell() : v(2) {}
          template <class S> T get(S s);
        };
        template <typename T> template <class S> T Cell<T>::get(S s) { S t = {s[0]}; return v + t; }
        template <typename T> T pick(bool c) { return c ? T{1} : T{2}; }
    """
    source = """
        Cell<float2> cell;
        float2 v = cell.get(float2(3, 4)) + pick<float2>(true) + pick<float2>(false);
        T w = {5};
        out[0] = v.x + 10 * v.y + 100 * w.x + 1000 * w.y;
    """
    found = run("using T = float2; " + source, output=(1, mx.float32), header=header).item()
    assert found == 8 + 20 + 500


def test_mlx_asks_whether_a_type_is_one_of_several() -> None:
    header = """
        template <typename T>
        constexpr constant bool listed = _disjunction<is_same<T, int>, is_same<T, float>>::value;
    """
    assert value("out[0] = listed<float> + 2 * listed<uint> + 4 * listed<int>;", header) == 5


# ---- casts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression, expected",
    [
        ("(float2(float(m), float(m)) + s).y", 3),
        ("(vec<float, 2>(float(m), float(m)) + s).y", 3),
        ("(float3(s, float(m), float(m)) + s).y", 3),
        ("int(max(int(m), int(m))) > 1 ? 3 : 1", 3),
        ("((uint2(uint(u))[0] & 3u) + 1)", 3),
        ("(float4(float(m)).yx - float4(1).rb).x + 2", 3),
        ("(2 * (float4(half(min(float(m), float(m)))).zyx - 1)).z + 1", 3),
        ("(T(float(m), float(m)) + s).y", 3),
        ("s > (int2(int(b), int(b)) - 1).y ? 3 : 1", 3),
    ],
)
def test_casts_in_brackets_are_no_types(expression: str, expected: float) -> None:
    source = f"""
        half m = 2; float s = 1; uint u = 2; bool b = true;
        if (int(max(int(m), int(m))) > 1) out[0] = {expression}; else out[0] = 0;
    """
    assert value("using T = float2;" + source) == expected


def test_casts_of_one_variable_are_left_where_no_bracket_is_around_them() -> None:
    text = cpp(
        "half m = 2; float2 v(float(m), float(m)); out[0] = dot(float2(float(m), float(m)), v);"
    )
    assert "(float)(m)" not in text


@pytest.mark.parametrize("header", [
    "uint total();\nuint total(void) { return simd_sum(1u); }",
    "uint total(void);\nuint total() { return simd_sum(1u); }",
    "template <typename T = uint, int N = 1> T total();\n"
    "template <typename T, int N> T total() { return simd_sum(T(N)); }",
])  # fmt: skip
def test_a_function_that_is_declared_first(header: str) -> None:
    call = "total<>()" if "template" in header else "total()"
    source = f"uint i = thread_position_in_grid.x; out[i] = i < 12 ? {call} : {call};"
    result = run(source, {}, (32, mx.uint32), 32, 32, header=header)
    assert result.tolist() == [12] * 12 + [20] * 20


@pytest.mark.parametrize("group", [1, 8])
def test_coherent_qualifies_and_is_a_name(group: int) -> None:
    source = """
        uint i = thread_position_in_grid.x;
        coherent(device) device float* q = (coherent(device) device float*)out;
        volatile coherent(system) device float* r = out;
        int coherent = 3;
        q[i] = x[i];
        r[i] = r[i] + coherent;
    """
    assert (run(source, {"x": mx.ones((8,))}, (8, mx.float32), 8, group) == 4).all()


@pytest.mark.parametrize("text", [
    "float2 a[2] = {{x}, {2, 3}}; v.xy = a[0];",
    "const float2 a[][1] = {{{2, 3}}, {{x}}}; v.xy = a[1][0];",
    "metal::vec<float, 3> a[1]{{x}}, b[2] = {float3{9}, {9, 9, 9}}; v.xyz = a[0] + 0 * b[0];",
    "v = {x};",
    "v = float4(9), v = {x, 0.0f};",
    "v.xy = {x};",
    "v = S(x).v;",
    "v.xyz = S(x).c;",
    "v.xyz = W<float3>(x).v;",
    "v.xy = TABLE[1] + (x - 5);  v.y -= x - 5;",
    "struct L { float2 a[2] = {{5}, {5}}; } l; v.xy = l.a[1]; v.x += x - 5;",
    "Q q = {{x}, 3}; v.xy = q.v;",
    "const Q q[2] = {{{1, 2}, 3}, {{x}}}; v.xy = q[1].v + q[1].n;",
    "struct Q q{{}, 1, {{x, 0}, {x}}}; v.xy = q.w[1];",
    "Q q = {.n = 3, .w = {{x}}}; v.xy = q.w[0];",
    "P p = {{{x}}, {1, 2}}; v.xy = p.q.v;",
    "P p = {made(x), {x}}; v.xy = p.u;",
    "Pair<float2> p = {{x}, 3}; v.xy = p.v;",
    "auto p = Pair<vec<unsigned int, 2>>{{(unsigned int)x}, 3}; v.xy = float2(p.v);",
    "v.xy = made(x).v;",
    "v.xy = led(x);",
    "auto f = [](float a) -> float2 { return {a}; }; v.xy = f(x);",
    "v.xy = first(2, {x});",
    "v.xy = fourth(2, {x});",
    "v.xy = second({x}) + second({{x}, 1});",
    "v.xy = TABLE2[1].v + (x - 5); v.y -= x - 5;",
    "ns::In q = {{x}, 3}; v.xy = q.v;",
    "Deep d = {{{x}}, 3}; v.xy = d.in.v;",
    "struct L { float2 v; } l = {{x}}, m[2] = {{{1}}, {{x}}}; v.xy = l.v + m[1].v - l.v;",
    "Typed t = {.v = {x}}; v.xy = t.v;",
    "Made m = {{x}, 0}; Made n({x}, 0); v.xy = m.v; v.y += n.v.y;",
    "v.xy = third(float3{1, 2}, {x}, {x}) + third(float3{1, 2}, {}, {0});",
    "v.xy = Made({x}, 0).plus({0}, 1);",
    "Pointers p = {out, {x}, nullptr, {{1}}}; v.xy = p.v; v.y += p.w[0].y;",
    "Pair<float2> q; q = {{x}, 3}; v.xy = q.v;",
    "struct { float2 v; int n; } u = {{x}, 3}; v.xy = u.v;",
    "struct { union { float2 v; float a[2]; }; int n; } u = {{{x}}, 3}; v.xy = u.v;",
    "v.xy = either({x}, 1);",
    "packed_float2 p = {x}; v.xy = p;  v.yx = {0};  v.yx = {};  v.xy = float2(p);",
    "packed_float4 p{v.xy}; p = {float2(0, x)}; v.xy = p.yz;",
    "v.xy = SUM + (x - 5); v.y -= x - 5;",
])  # fmt: skip
def test_a_list_shorter_than_its_vector_is_filled_with_zeros(text: str) -> None:
    header = """
        constant float2 TABLE[2] = {{1, 2}, {5}};
        struct S { float3 b, c; float4 v = float4(9);
          S(float a) : c{a}, v{a} {} };
        template <typename T> struct W { T v; W(float a) : v{a} {} };
        struct Q { float2 v; int n = 0; const float2 w[2] = {{1, 2}}; float sum() { return v.x; } };
        struct P { Q q; float2 u; };
        template <typename T> struct Pair { T v; int n; };
        constant Q TABLE2[] = {{{1, 2}, 3}, {{5}, 4}};
        Q made(float a) { return {{a}, 3}; }
        auto led(float a) -> float2 { return {a}; }
        float2 first(int n, const thread float2& v) { return v; }
        float2 second(Q q) { return q.n ? q.v : q.n; }
        float2 fourth(int, float2);
        float2 fourth(int n, float2 v) { return v; }
        float2 third(float3 a, float2 b, float3 c) { return a.z + b; }
        namespace ns { struct In { float2 v; int n; }; }
        struct Deep { struct In2 { float2 v; } in; int n; };
        typedef struct { float2 v; int n; } Typed;
        struct Made { float2 v; Made(float2 a, int n) : v(a + n) {}
          float2 plus(float2 a, int n) const { return v + a * n; } };
        float2 either(float2 v, int n) { return v; }
        float2 either(Q q) { return q.v; }
        constant float4 TERMS = {float2(2, 3), 1};
        constant float2 SUM = {TERMS.x + TERMS[1]};
        struct Pointers { const device float* p; float2 v; thread float* q; float2 w[1]; };
    """
    source = f"""
        float x = 5 + float(thread_position_in_grid.x); float4 v = float4(9);
        {text}
        out[0] = v.x * 10 + v.y; out[1] = 0;
    """
    assert run(source, output=(2, mx.float32), grid=1, group=1, header=header)[0].item() == 50


@pytest.mark.parametrize("header", [
    "METAL_FUNC float get(const device float* p) { return *p; }\n"
    "inline float get(const threadgroup float* p) { return *p; }",
    "inline const device float* at(const device float* p) { return p; }\n"
    "static inline const threadgroup float* at(const threadgroup float* p) { return p; }\n"
    "float get(const threadgroup float* p) { return *at(p); }",
    "inline const constant float* at(const constant float* p) { return p; }\n"
    "inline const device float* at(const device float* p) { return p; }\n"
    "float get(const threadgroup float* p) { return *p; }",
])  # fmt: skip
def test_overloads_by_address_space_may_differ_in_specifiers(header: str) -> None:
    source = "threadgroup float s[1]; s[0] = 5; out[0] = get(s);"
    assert run(source, header=header).item() == 5


def test_a_kernel_of_the_header_may_have_buffers_alone() -> None:
    header = "[[kernel]] void other(device float* a [[buffer(0)]]) { a[0] = 1; }\n"
    result = run("out[0] = x[0] + y[0];", {"x": mx.ones((9,)), "y": mx.ones((9,))}, header=header)
    assert result.item() == 2
