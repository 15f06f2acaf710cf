"""What the CUDA target makes of a kernel: instructions in the PTX, and which lanes an operation
on a simdgroup is said to have."""

import re
import time

import mlx.core as mx
import pytest
from cuda_launches import compile_all, launch_of, needs_nvrtc, ptx_of, text_of

pytestmark = needs_nvrtc


def ptx(source, *shape, **options):
    return ptx_of(launch_of(source, *shape, **options))


SOFTMAX = """
    threadgroup float scratch[32];
    uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    float e = exp(x[thread_position_in_grid.x]);
    float s = simd_sum(e);
    if (lane == 0) { scratch[simd] = s; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[thread_position_in_grid.x] = e / (scratch[0] + scratch[1]);
"""


def test_float_kernels_have_no_double_arithmetic():
    text = ptx("y[thread_position_in_grid.x] = x[thread_position_in_grid.x] * 1.7 + .5 + 1e-3;")
    assert ".f64" not in text


def test_inputs_are_loaded_through_the_read_only_cache():
    text = ptx(SOFTMAX, 64, 64)
    assert text.count("ld.global.nc.f32") == 1
    assert "ld.global.f32" not in text


def test_vectors_load_and_store_in_one_instruction():
    text = ptx(
        "uint i = thread_position_in_grid.x;"
        "*(device float4*)(y + 4 * i) = 2 * *(const device float4*)(x + 4 * i);"
    )
    assert "ld.global.nc.v4.f32" in text
    assert "st.global.v4.f32" in text


def test_a_full_simdgroup_reduces_in_five_shuffles():
    text = ptx(SOFTMAX, 64, 64)
    assert text.count("shfl.sync.bfly") == text.count("shfl.sync") == 5
    assert "vote" not in text
    assert text.count("bar.sync") == 1


@pytest.mark.parametrize(("n", "group"), [(64, 48), (70, 64)], ids=["group of 48", "edge group"])
def test_a_simdgroup_that_may_be_partial_asks_who_is_there(n, group):
    assert "vote.sync.ballot" in ptx(SOFTMAX, n, group)


def test_half_products_use_the_matrix_units():
    text = ptx(
        """
        simdgroup_half8x8 a, b;
        simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0);
        simdgroup_load(a, x); simdgroup_load(b, x);
        simdgroup_multiply_accumulate(c, a, b, c);
        y[thread_index_in_simdgroup] = half(c.thread_elements()[0]);
        """,
        dtype=mx.float16,
    )
    assert text.count("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32") == 1


def test_half_and_bfloat_convert_in_one_instruction():
    source = "uint i = thread_position_in_grid.x; y[i] = T(float(x[i]) * 3.0f);"
    for dtype, instruction in ((mx.float16, "cvt.rn.f16.f32"), (mx.bfloat16, "cvt.rn.bf16.f32")):
        assert ptx(source, dtype=dtype, template=(("T", dtype),)).count(instruction) == 1


def test_fast_math_is_the_kernels_choice():
    source = "y[0] = exp(x[0]) / x[1]; y[1] = metal::precise::divide(x[0], x[1]);"
    assert "div.rn.f32" in ptx(source)
    fast = ptx(source, math_mode="fast")
    assert "div.full.ftz.f32" in fast
    assert fast.count("div.rn.ftz.f32") == 1


# ---- who takes part -----------------------------------------------------------------------------


def flows(source, header=""):
    """(control, exits) of each collective, in the order of the text."""
    text = text_of(launch_of(source, header=header)).rpartition("#undef kernel")[2]
    return [(int(c), int(e)) for c, e in re.findall(r"zk_flow<(\d), (\d)>\(\)", text)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("y[0] = simd_sum(x[thread_position_in_grid.x]);", [(0, 0)]),
        ("if (thread_index_in_simdgroup < 7) y[0] = simd_sum(x[0]);", [(2, 0)]),
        ("if (threadgroup_position_in_grid.x < 7) y[0] = simd_sum(x[0]);", [(0, 0)]),
        ("if (thread_position_in_grid.y < 7) y[0] = simd_sum(x[0]);", [(1, 0)]),
        ("if (thread_position_in_grid.x >= 9) return; y[0] = simd_sum(x[0]);", [(0, 2)]),
        ("if (thread_position_in_grid.z >= 9) return; y[0] = simd_sum(x[0]);", [(0, 1)]),
        ("for (uint i = thread_index_in_simdgroup; i < 9; ++i) y[0] = simd_sum(x[i]);", [(2, 0)]),
        ("for (uint i = 0; i < 9; ++i) y[0] = simd_sum(x[i]);", [(0, 0)]),
        ("for (ushort i : {16, 8}) if (i > 8) y[0] = simd_sum(x[i]);", [(0, 0)]),
        ("for (uint i : {thread_index_in_simdgroup, 8u}) if (i > 8) y[0] = simd_sum(x[i]);",
         [(2, 0)]),
        ("uint n = thread_index_in_simdgroup;"
         "while (n) { y[0] = simd_sum(x[n]); n /= 2; }", [(2, 0)]),
        ("uint t = thread_position_in_grid.x;"
         "for (uint i = 0; i < 9; ++i) { if (i == t) break; y[0] = simd_sum(x[i]); }", [(2, 0)]),
        ("uint t = thread_position_in_grid.x; for (uint i = 0; i < 9; ++i) {"
         "for (uint k = 0; k < 9; ++k) { if (k == t) break; }"
         "y[0] = simd_sum(x[i]); }", [(0, 0)]),
        ("uint t = thread_position_in_grid.x; for (uint i = 0; i < 9; ++i) {"
         "switch (t) { case 1: continue; case 2: break; }"
         "y[0] = simd_sum(x[i]); }", [(2, 0)]),
        ("uint t = thread_position_in_grid.x, n = 0; while (true) { if (n == t) break; n++; }"
         "if (n > 3) y[0] = simd_sum(x[0]);", [(2, 0)]),
        ("float v = 0; if (thread_position_in_grid.x < 3) v = 1;"
         "if (v > 0) y[0] = simd_sum(v);", [(2, 0)]),
        ("float v = simd_sum(x[thread_position_in_grid.x]); if (v > 0) y[0] = simd_max(v);",
         [(0, 0), (0, 0)]),
        ("float v = simd_shuffle(x[0], 1); if (v > 0) y[0] = simd_max(v);", [(0, 0), (2, 0)]),
        ("uint t = thread_position_in_grid.x; bool b = t < 3 && simd_any(x[t] > 0); y[t] = b;",
         [(2, 0)]),
        ("threadgroup float s[4]; s[thread_position_in_threadgroup.x % 4] = 1;"
         "if (s[0] > 0) y[0] = simd_sum(x[0]);", [(0, 0)]),
        ("thread float a[2]; a[0] = thread_position_in_grid.x;"
         "if (a[0] > 3) y[0] = simd_sum(x[0]);", [(2, 0)]),
        ("float c; float s = sincos(x[thread_position_in_grid.x], c);"
         "if (c > s) y[0] = simd_sum(c);", [(2, 0)]),
        ("auto f = [&](float v) { return simd_sum(v); };"
         "if (thread_position_in_grid.x < 3) y[0] = f(1);", [(2, 0)]),
        ("switch (thread_position_in_grid.x) { case 1: y[0] = simd_sum(x[0]); }", [(2, 0)]),
        ("if (thread_index_in_simdgroup == 0) for (int k = 0; k < 2; ++k) y[k] = 1;"
         "for (int k = 0; k < 2; ++k) y[k] = simd_sum(x[k]);", [(0, 0)]),
        ("uint n = 3; if (thread_index_in_simdgroup == 0)"
         "for (uint i = 0; i < (n == 3 ? 2u : 9u); ++i) y[i] = 1;"
         "if (n > 2) y[0] = simd_sum(x[0]);", [(0, 0)]),
        ("uint n = 3; EACH for (uint i = thread_index_in_simdgroup; i < 9; ++i) y[i] = 1;"
         "if (n > 2) y[0] = simd_sum(x[0]);", [(0, 0)]),
        ('_Pragma("unroll") for (uint i = 0; i < thread_index_in_simdgroup; ++i)'
         "{ y[0] = simd_sum(x[i]); } y[1] = simd_sum(x[0]);", [(2, 0), (0, 0)]),
        # Labels and attributes.
        ("uint n = 0; switch (int(x[0])) { case 0: if (x[1] > 0) { y[1] = 1; }"
         "n = thread_index_in_simdgroup; } if (n > 3) y[0] = simd_sum(x[0]);", [(2, 0)]),
        ("switch (int(x[0])) { case 0: default: if (thread_index_in_simdgroup < 16) y[1] = 1;"
         "else y[0] = simd_sum(x[0]); }", [(2, 0)]),
        ("switch (thread_index_in_simdgroup) { case 2 > 1 ? 0 : 1: if (x[1] > 0) { y[1] = 1; }"
         "return; } y[0] = simd_sum(x[0]);", [(0, 2)]),
        ("switch (int(x[0])) { case 0: uint n = 1, m(thread_index_in_simdgroup);"
         "if (m > 3) y[0] = simd_sum(x[0]); if (n > 0) y[1] = simd_sum(x[0]); }", [(2, 0), (0, 0)]),
        ("if (x[0] > 0) [[likely]] { if (thread_index_in_simdgroup < 3) y[0] = simd_sum(x[1]); }",
         [(2, 0)]),
        ("if (thread_index_in_simdgroup < 3) [[unlikely]] { y[0] = 1; }"
         "else [[likely]] { y[0] = simd_sum(x[1]); }", [(2, 0)]),
        ("__attribute__((annotate(\"a\"))) if (thread_index_in_simdgroup < 3) return;"
         "y[0] = simd_sum(x[1]);", [(0, 2)]),
        ("uint α = thread_index_in_simdgroup; if (α > 3) y[0] = simd_sum(x[0]);", [(2, 0)]),
    ],
)  # fmt: skip
def test_control_flow_is_followed_to_what_it_depends_on(source, expected):
    assert flows(source, "#define EACH\n" if "EACH" in source else "") == expected


def test_helpers_inherit_the_flow_of_their_callers():
    helper = """
        inline float total(float v, uint n) {
            if (n > 2) { return simd_sum(v); }
            return v;
        }
    """
    assert flows("y[0] = total(x[0], 3);", helper) == [(0, 0)]
    assert flows("y[0] = total(x[0], thread_index_in_simdgroup);", helper) == [(2, 0)]
    assert flows("if (thread_index_in_simdgroup > 1) y[0] = total(x[0], 3);", helper) == [(2, 0)]


@pytest.mark.parametrize(
    "argument", ["rows + r * N", "rows + N * (r + 1)", "&rows[N]", "rows + N", "N + rows"]
)
def test_what_a_helper_stores_to_is_the_array_and_no_index(argument):
    helper = "inline void fill(thread float* at, float v) { *at = v; }\n"
    source = f"""
        int N = 2, r = 0;
        float rows[8];
        fill({argument}, x[thread_position_in_grid.x]);
        for (int i = 0; i < N; ++i) y[i] = simd_sum(x[i]);
    """
    assert flows(source, helper) == [(0, 0)]
    assert flows(source.replace("i < N", "i < rows[0]"), helper) == [(2, 0)]


LANE = "thread_index_in_simdgroup"


@pytest.mark.parametrize(
    ("source", "header", "expected"),
    [
        # An index says where.
        ("int a[4] = {0}; a[LANE % 4] = 1; int n = a[0];", "", 2),
        ("int a[4] = {0}; a[LANE % 4]++; int n = a[0];", "", 2),
        ("int a[4] = {0}; ++a[LANE % 4]; int n = a[0];", "", 2),
        ("int a[4] = {0}; *(a + LANE % 4) = 1; int n = a[0];", "", 2),
        ("float4 v = 0; v[LANE % 4] = 1; float n = v.x;", "", 2),
        ("Pair a[2] = {}; a[LANE % 2].v = 1; int n = a[0].v;", "struct Pair { int v, w; };", 2),
        ("int n = 0, m = 0; (LANE > 3 ? n : m) = 1;", "", 2),
        ("int n = 3, a[4]; a[n] = LANE;", "", 0),
        ("uint n = 3; *(device float4*)(y + n) = x[LANE];", "", 0),
        ("threadgroup int s[1]; int a[2] = {0}; *(a + s[0]) = LANE; int n = a[0];", "", 2),
        ("int a[4] = {0}; *(a + x_ndim) = LANE; int n = a[1];", "", 2),
        ("int a[4] = {0}; put(a, x_ndim, LANE); int n = a[1];",
         "inline void put(thread int* p, constant const int& k, int v) { *(p + k) = v; }", 2),
        ("const device float* p = x; skip(p, LANE); int n = p[0];",
         "inline void skip(thread const device float*& p, int k) { p += k; }", 2),
        ("const device float* rows[2]; rows[0] = x + LANE; int n = rows[0][0];", "", 2),
        ("threadgroup int s[1]; s[0] = 4; int n = block(s);",
         "inline int block(threadgroup int* s)"
         " { threadgroup_barrier(mem_flags::mem_threadgroup); return s[0]; }", 0),
        # Pointers.
        ("int n = 0; auto p = &n; *p = LANE;", "", 2),
        ("int n = 0; thread int* p; p = &n; *p = LANE;", "", 2),
        ("int n = 0, m = 0; thread int* p = LANE > 3 ? &n : &m; *p = 1;", "", 2),
        ("int a[2] = {0}; thread int* p; p = a; *p++ = LANE; int n = a[0];", "", 2),
        ("int n = 0; put(&n, LANE);", "template <class P> void put(P p, int v) { *p = v; }", 2),
        ("int n = 0; auto p = at(n); *p = LANE;",
         "inline thread int* at(thread int& v) { return &v; }", 2),
        ("int n = 0; Box b = {&n}; b.p[0] = LANE;", "struct Box { thread int* p; };", 2),
        ("Pair s = {}; auto p = &s; p->v = LANE; int n = s.v;", "struct Pair { int v, w; };", 2),
        ("Row s; auto p = s.a; p[0] = LANE; int n = s.a[0];", "struct Row { int a[4]; };", 2),
        # Template lists between a name and its bracket.
        ("Box b = {0}; b.at<0>() = LANE; int n = b.v;",
         "struct Box { int v; template <int k> thread int& at() { return v; } };", 2),
        ("Box b = {LANE}; int n = 0; b.copy<0>(1).put(n);",
         "struct Box { int v; template <int k> Box copy(int) { return *this; }"
         "void put(thread int& to) { to = v; } };", 2),
        ("int n = 0; set<Box>(n, LANE);",
         "struct Box { int v; template <int k> void set(int n) { v = n; } };"
         "template <class B> void set(thread int& to, int v)"
         "{ B b = {0}; b.template set<0>(v); to = b.v; }", 2),
        ("float n = simd_sum<float>(x[LANE]);", "", 0),
        # References.
        ("int n = 0; auto& r = n; r = LANE;", "", 2),
        ("int a[2] = {0}; for (thread int& v : a) v = LANE; int n = a[0];", "", 2),
        ("Pair s = {}; auto& [v, w] = s; w = LANE; int n = s.w;", "struct Pair { int v, w; };", 2),
        ("int n = 0; auto f = [&r = n](int v) { r = v; }; f(LANE);", "", 2),
        ("int n = 0; Box b{n}; b.set(LANE);",
         "struct Box { thread int& r; void set(int v) { r = v; } };", 2),
        ("int n = 0; Box b(n); b.set(LANE);",
         "struct Box { thread int* p; Box(thread int& v) : p(&v) {} void set(int v) { *p = v; } };",
         2),
        ("int n = 0; at(n) = LANE;", "inline thread int& at(thread int& v) { return v; }", 2),
        ("int n = 0, m = 0; put(n, 3); put(m, LANE);",
         "inline void put(thread int& p, int v) { p = v; }", 0),
        ("int n = 0; apply([&](thread int& v) { v = LANE; }, n);",
         "template <class F> void apply(F f, thread int& v) { f(v); }", 2),
        ("Box b; b.set(0).set(LANE); int n = b.v;",
         "struct Box { int v; thread Box& set(int n) { v = n; return *this; } };", 2),
        ("Box b = {}; b(LANE); int n = b.v;",
         "struct Box { int v; void operator()(int n) { v = n; } };", 2),
        ("Box b{LANE}; int n = b.large();",
         "struct Box { int v; int get() { return this->v; }"
         "int large() { int n = get(); return n > 3 ? simd_sum(n) : 0; } };", 2),
        ("Box b = {0}; thread Box* p = &b; p->set(LANE); int n = b.v;",
         "struct Box { int v; void set(int n) { v = n; } };", 2),
        ("Box b = {0}; go(&b, LANE); int n = b.v;",
         "struct Box { int v; void set(int n) { v = n; } };"
         "inline void go(thread Box* p, int l) { p->set(l); }", 2),
        ("Box b = {0}; auto p = b.at(); *p = LANE; int n = b.v;",
         "struct Box { int v; thread int* at() { return &v; } };", 2),
        ("Box<int> b = {}; b(LANE); int n = b.v;",
         "template <class T> struct Box { T v; void operator()(T n) { v = n; } };", 2),
        ("Box b[2] = {}; b[0](LANE); int n = b[0].v;",
         "struct Box { int v; void operator()(int n) { v = n; } };", 2),
        ("Box b = {}; (b)(LANE); int n = b.v;",
         "struct Box { int v; void operator()(int n) { v = n; } };", 2),
        ("int n = 0; (put)(n, LANE);", "inline void put(thread int& p, int v) { p = v; }", 2),
        ("int n = 0; typedef thread int* P; auto p = (P)&n; *p = LANE;", "", 2),
        # Values that stand in brackets, and in the lists of constructors.
        ("uint a[2]{LANE, 0}; uint n = a[0];", "", 2),
        ("uint m(0), n(LANE);", "", 2),
        ("uint n(0), m(LANE);", "", 0),
        ("uint m{0}, n{LANE};", "", 2),
        ("alignas(16) uint m(0), step(LANE); uint n = step;", "", 2),
        ("uint m(0), (n)(LANE);", "", 2),
        ("uint n = 0; thread uint (&r){n}; r = LANE;", "", 2),
        ("uint k = LANE; thread uint& n(k);", "", 2),
        ("uint k = 0, *p(&k); *p = LANE; uint n = k;", "", 2),
        ("struct { uint v; float f; } s = {LANE, 0}; uint n = s.v;", "", 2),
        ("struct S { uint v; } s{LANE}; uint n = s.v;", "", 2),
        ("Pair s = {LANE, 0}; auto [n, m](s);", "struct Pair { int v, w; };", 2),
        ("uint n = last(1u, 2u, LANE);", "template <class A, class... R> uint last(A a, R... r)"
         "{ uint s = a; ((s += r), ...); if (s > 3) simd_sum(s); return s; }", 2),
        ("uint n = pass(1u, LANE);",
         "inline uint last(uint a, uint b) { if (b > 3) simd_sum(b); return b; }"
         "template <class... R> uint pass(R... r) { return last(r...); }", 2),
        # Equal names of other scopes are no memory.
        ("int dst[4] = {0}; dst[LANE % 4] = 1; int n = dst[0];",
         "struct Loader { const device float* src; threadgroup float* dst; };", 2),
        ("int n = 0; thread int* dst = &n; *dst = LANE;",
         "struct Loader { const device float* src; threadgroup float* dst; };", 2),
        ("{ device float* p; p = y; } int n = 0; { thread int* p; p = &n; *p = LANE; }", "", 2),
        ("int n = 0; auto put = [](thread int* y, int v) { *y = v; }; put(&n, LANE);", "", 2),
        ("int x[2] = {0}; x[LANE % 2] = 1; int n = x[0];", "", 2),
        # Functions of the library.
        ("threadgroup atomic_uint c; uint n = 0; atomic_compare_exchange_weak_explicit("
         "&c, &n, 1u, memory_order_relaxed, memory_order_relaxed);", "", 2),
        ("threadgroup atomic_uint c; uint n = 0; atomic_compare_exchange_weak_explicit<uint>("
         "&c, &n, 1u, memory_order_relaxed, memory_order_relaxed);", "", 2),
        ("threadgroup atomic_uint c; uint n = atomic_fetch_add_explicit<uint>("
         "&c, 1u, memory_order_relaxed);", "", 2),
        ("threadgroup atomic_uint c; uint n = metal::atomic_load_explicit<uint>("
         "&c, memory_order_relaxed);", "", 2),
        ("int a[2] = {0}; frexp(float(LANE), a[1]); int n = a[1];", "", 2),
        ("simdgroup_float8x8 m; simdgroup_load(m, x); float n = m.thread_elements()[0];", "", 2),
    ],
)  # fmt: skip
def test_a_store_reaches_what_it_may_mean(source, header, expected):
    source = source.replace("LANE", LANE) + " if (n > 3) y[0] = simd_sum(x[0]);"
    assert set(flows(source, header + "\n")) == {(expected, 0)}


@pytest.mark.parametrize(
    ("source", "header"),
    [
        ("int n = ({ int k = 0; if (LANE > 3) k = 1; k; }); if (n) y[0] = simd_sum(x[0]);", ""),
        ("Out s; s << LANE; if (s.v > 3) y[0] = simd_sum(x[0]);",
         "struct Out { int v; }; void operator<<(thread Out& s, int v) { s.v = v; }\n"),
        ("Out s; s << LANE; if (s.v > 3) y[0] = simd_sum(x[0]);",
         "struct Out { int v; void operator<<(int n) { v = n; } };\n"),
    ],
)  # fmt: skip
def test_what_is_not_understood_parts_all(source, header):
    assert flows(source.replace("LANE", LANE), header) == [(2, 2)]


def test_operators_without_effects_are_understood():
    header = """
        struct P {
            int v;
            P operator+(P o) const { return {v + o.v}; }
            void operator+=(P o) { v += o.v; }
            bool operator()(int n) { return n > v; }
        };
        inline P operator*(P a, const thread P& b) { return {a.v * b.v}; }
    """
    source = "P p = {1}; p += p + p * p; if (p(3)) y[0] = simd_sum(x[0]);"
    assert flows(source, header) == [(0, 0)]


@pytest.mark.parametrize(
    ("call", "helper"),
    [
        ("nth()", "inline uint nth() { return simd_prefix_exclusive_sum(1u); }"),
        ("twice()", "inline uint nth() { return simd_prefix_exclusive_sum(1u); }\n"
                    "inline uint twice() { return 2 * nth(); }"),
        ("ticket(c)", "inline uint ticket(threadgroup atomic_uint* c) {"
                      "return atomic_fetch_add_explicit(c, 1, memory_order_relaxed); }"),
    ],
)  # fmt: skip
def test_results_of_helpers_differ_by_what_the_helpers_do(call, helper):
    source = f"threadgroup atomic_uint c[1]; if ({call} < 4) y[0] = simd_sum(x[0]);"
    assert flows(source, helper + "\n")[-1] == (2, 0)


def test_a_helpers_result_is_no_more_than_its_arguments():
    helper = "inline uint total(uint n) { return simd_sum(n) + n; }\n"
    assert flows("if (total(3) < 4) y[0] = simd_sum(x[0]);", helper)[-1] == (0, 0)


def test_products_are_rounded_where_the_source_says_so():
    source = "y[0] = x[0] * x[1] - x[2];"
    assert "mul.rn.f32" not in ptx(source)  # the assembler may fuse it
    assert "mul.rn.f32" in ptx("#pragma clang fp contract(off)\n" + source)


def test_a_barrier_of_device_memory_orders_it_for_the_other_groups():
    barrier = "threadgroup_barrier(mem_flags::mem_{}); y[0] = x[0];"
    assert "membar.gl" in ptx(barrier.format("device"), group=64)
    assert "membar.gl" not in ptx(barrier.format("threadgroup"), group=64)


def test_an_overload_of_the_texts_own_inherits_its_callers_flow():
    """As MLX has them: simd_shuffle_down for bool goes through that for uint."""
    overload = """
        inline bool simd_shuffle_down(bool data, uint16_t delta) {
            return metal::simd_shuffle_down(uint(data), delta);
        }
    """
    source = "bool b = simd_shuffle_down(x[thread_position_in_grid.x] > 0, 1); y[0] = b;"
    assert flows(source, overload) == [(0, 0), (0, 0)]
    assert flows("if (thread_index_in_simdgroup < 9) {" + source + "}", overload) == [(2, 0)] * 2
    assert compile_all([launch_of(source, header=overload)]) == []


@pytest.mark.parametrize(
    "total",
    [
        "struct Total { float v; Total(float x) : v(simd_sum(x)) {} };\n",
        "inline float f(float x) { return simd_sum(x); }\n"
        "struct Total { float v; Total(float x) : v(f(x)) {} };\n",
        "inline float f(float x) { return simd_sum(x); }\nstruct Total { float x, v = f(1); };\n",
    ],
)
def test_an_operation_outside_of_every_statement_assumes_nothing(total):
    assert flows("y[0] = Total{x[0]}.v;", total) == [(2, 2)]


def test_rows_of_whole_simdgroups_count_as_uniform():
    source = "if (thread_position_in_grid.y < 7) { y[0] = simd_sum(x[thread_position_in_grid.x]); }"
    text = ptx(source, grid=(32, 8, 1), group=(32, 4, 1))
    assert "activemask" not in text
    assert "activemask" in ptx(source, grid=(16, 8, 1), group=(16, 4, 1))


def test_a_pointer_beside_a_threadgroup_variable_is_refused():
    with pytest.raises(RuntimeError, match="declare the pointer by itself"):
        text_of(launch_of("threadgroup float a[32], *p; p = a; y[0] = *p;"))


def test_the_time_for_a_header_grows_as_its_length():
    def seconds(functions):
        header = "".join(
            f"inline float f{i}(const float a, thread float& b) {{ return a + b; }}\n"
            for i in range(functions)
        )
        launch = launch_of("y[0] = x[0];", header=header)
        begin = time.process_time()
        text_of(launch)
        return time.process_time() - begin

    assert seconds(4000) < 20 * seconds(500)  # where each asks all others, 64


@pytest.mark.parametrize("type_", ["half", "half4", "bfloat3"])
@pytest.mark.parametrize("call", ["fast::exp(v)", "fast::pow(v, v)", "precise::divide(v, v)"])
@pytest.mark.parametrize("math_mode", ["safe", "fast"])
def test_variants_of_other_precision_take_narrow_vectors(type_, call, math_mode):
    ptx(f"{type_} v = {type_}(x[0]); *(device {type_}*)y = {call};", math_mode=math_mode)


@pytest.mark.parametrize("type_", ["half", "bfloat", "float4", "half2", "bfloat3"])
def test_sincos_takes_what_sin_takes(type_):
    ptx(f"{type_} c, s = sincos({type_}(x[0]), c); *(device {type_}*)y = s + c;")


def test_short_lists_and_enumerators_compile():
    ptx(
        "enum { B = 3 }; half h = half(x[0]); float2 a[2] = {{x[0]}, {2, 3}}, v;"
        "v = {x[1]}; v.yx = {x[2]}; y[0] = float(h * B) + float(B - bfloat(x[0])) + a[0].y + v.x;"
    )


def test_a_parameter_that_is_a_constant_array_is_no_constant():
    header = (
        "constant float t[4] = {1, 2, 3, 4};"
        "inline float total(constant float (&w)[4]) { return w[0] + w[3]; }"
        "inline float first(constant float (*w)[4]) { return (*w)[0]; }"
    )
    assert (
        "constexpr"
        not in text_of(launch_of("y[0] = total(t);", header=header)).rpartition("total(")[2]
    )
    ptx("y[0] = total(t) + first(&t);", header=header)


@pytest.mark.parametrize(
    ("declaration", "size", "alignment"),
    [
        ("struct S { int a; long3 v; };", 64, 32),
        ("struct S { int a; ulong4 v[2]; };", 96, 32),
        ("template <class T> struct Any { char a; T v; }; typedef Any<long4> S;", 64, 32),
        ("using V = long4; union S { V v; char a[40]; };", 64, 32),
        ("struct S { char a; float4x4 m; };", 80, 16),
        ("struct S { char a; packed_half3 v; half h; packed_bfloat4 b; };", 18, 2),
        ("struct __attribute__((packed)) S { char a; packed_half3 v; half h; };", 9, 1),
        ("typedef struct { char a; half3 v; bfloat b; } __attribute__((packed)) S;", 11, 1),
        ("struct S { char a; half h[3]; long4 v; } __attribute__((packed));", 39, 1),
        ("struct S { char a; union { struct { half d, m; }; half2 dm; }; float4 v; }"
         " __attribute__((packed));", 21, 1),
        ("template <class T> struct [[gnu::packed]] Any { char a; T v; }; typedef Any<half> S;",
         3, 1),
    ],
)  # fmt: skip
def test_members_lie_where_metal_has_them(declaration, size, alignment):
    ptx(
        f"threadgroup S s[2]; thread S* p; y[0] = sizeof(s) + (p == nullptr); static_assert("
        f"sizeof(S) == {size} && alignof(S) == {alignment}, \"\");",
        header=declaration + "\n",
    )  # fmt: skip


def test_threadgroup_memory_of_wide_vectors_begins_where_they_do():
    text = ptx("threadgroup long4 s[2]; s[thread_index_in_simdgroup % 2] = long4(x[0]);"
               "threadgroup_barrier(mem_flags::mem_threadgroup); y[0] = s[0].w;")  # fmt: skip
    assert ".shared .align 32 " in text
