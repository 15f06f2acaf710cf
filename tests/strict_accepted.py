"""Kernels for test_strict.py that Metal and zmlx's own rules accept.

Each is (claim, header, body), with the arguments of those in strict_kernels.py.
"""

BOTH_ACCEPT = [
    ("a template list with && and || in it first",
     "template <typename U, typename = enable_if_t<is_scalar_v<U> && (sizeof(U) > 1 || 1)>>\n"
     "U first(U v) { return v; }", "y[0] = first(x[0]);"),
    ("variables of vectors with round brackets",
     "using V = float2;\nstatic constant float2 k(1, 2);\n"
     "template <typename U> float last() { U v(1, 2), w(3, 4); return v.y + w.y; }\n"
     "struct S { float2 v; V w; int n; S(float a, float b) : v(a, b), w(b, a), n(int(a)) {} };\n"
     "template <typename U> struct P { U a, b; P(U c, U d) : a(c), b(d) {} };",
     "float2 a(1, 2), e = 1, c(e.x, x[0]); V d(1, 2); metal::float2 const_(1, 2); S s(1, 2);\n"
     "for (float2 f(0, 2); f.x < 1; f.x += 1) y[1] = f.y; const metal::float3 g(a, 1);\n"
     "using Q = P<float>; Q q(1, 2); y[0] = last<float2>() + s.v.x + s.w.y + k.x + c.y + q.a;"),
    ("structs with attributes",
     "struct alignas(16) S { float4 v; static constexpr constant int k = 4;\n"
     "float4 twice(float a) const { return v * a; } };\n"
     "struct __attribute__((packed)) P { uchar c; half h; static constexpr constant int k = 4; };\n"
     "struct [[gnu::packed]] G { uchar c; half h; G(const thread G& g) : c(g.c), h(g.h) {} };\n"
     "[[gnu::noinline]] float first(const device S* s) { return s[0].v.x; }",
     "S s; s.v = x[0]; P p; p.h = h[0]; y[0] = s.twice(S::k).x + float(p.h) * P::k;\n"
     "y[1] = first((const device S*)x);"),
    ("local structs that compute with vectors", "",
     "struct A { float2 v; float2 twice() const { return v * 2; } float2 both(float a, float b) {\n"
     "return float2(a, b); } };\n"
     "struct Add { float4 operator()(float4 a, float4 b) const { return a + b; } };\n"
     "A a = {float2(1)}; y[0] = a.twice().x + Add()(float4(1), float4(2)).x + a.both(1, 2).y;"),
    ("places in arrays and matrices",
     "void sort(thread float& a, thread float& b) { float t = min(a, b); b = max(a, b); a = t; }\n"
     "void one(thread float3& v) { v = normalize(v); }\n"
     "float sum(const threadgroup array<float, 2>& a) { return a[0] + a.size(); }\n"
     "constant array<float, 2> t = {{1, 2}};",
     "array<float, 2> a = {{2, 1}}; sort(a[0], a[1]); thread float& r = a[1]; r = 3;\n"
     "thread float* p = a.data(); sort(a.front(), p[1]); float3x3 m(2.0f); one(m[1]);\n"
     "float s = p[0] + m[2].x; thread float* q = &a[0]; s += q[1];\n"
     "for (float v : t) s += v; threadgroup array<float, 2> u; u[0] = t.back() + t.size();\n"
     "for (float v : a) s += v; y[0] = s + sum(u) + float3x3(1)[1].y + array<float, 1>{{4}}[0];"),
    ("arrays that are members",
     "struct S { array<float, 2> a; float3x3 m; auto first() const { return a[0]; }\n"
     "S(float v) { a[0] = v; a[1] = a[0]; m[0].x = v; for (float u : a) m[1].x += u; } };\n"
     "struct Plain { array<float, 2> a; float3x3 m; };",
     "S s(x[0]); y[0] = s.first() + s.m[0].x + s.a[1]; threadgroup Plain t[1]; t[0] = {s.a, s.m};\n"
     "threadgroup float& r = t[0].a[1]; y[1] = r + t[0].m[1].x;"),
    ("members of templates in an address space",
     "template <typename U> struct Pack { using word = uint; typedef U type; };\n"
     "uint first(const device Pack<float>::word* p) { return p[0]; }\n"
     "template <typename U> float again(const device typename U::type* p,\n"
     "thread ::metal::float2& v, thread float (&a)[1]) { return p[0] + v.x + a[0]; }",
     "float2 v = 1; float a[1] = {2}; thread float2* p = &v;\n"
     "y[0] = first((const device uint*)x) + again<Pack<float>>(x, v, a) + float2(*p)[1];"),
    ("default arguments of methods",
     "struct S { float v; float get(float2 a = float2(1, 2), float b = 0.5f) const {\n"
     "return v + a.y * b; } };", "S s = {1}; y[0] = s.get() + s.get(3.0f) + S{2}.get();"),
    ("constants made of floats", "",
     "float a[int(N * 1.5)]; a[5] = 1; const int k = int(N * 0.5f); float c[k]; c[1] = 2;\n"
     "y[0] = a[int(0.5f * 10)] + c[1];"),
    ("limits of numbers", "",
     "using L = numeric_limits<T>; y[0] = L::digits10 + L::radix + L::max_exponent10 +\n"
     "numeric_limits<half>::has_quiet_NaN + numeric_limits<int>::digits10 + L::min_exponent;\n"
     "static_assert(numeric_limits<float>::max_digits10 == 9 && L::digits10 == 2, \"\");\n"
     "z[0] = L::round_error();"),
    ("temporaries beside other arguments",
     "struct B { float v; B(float a) : v(a) {} B(const thread B& b) : v(b.v) {} };\n"
     "float get(const thread B& b, const device float* p, const thread float2& q) {\n"
     "return b.v + p[0] + q.x; }\n"
     "template <typename U> float sum(const thread U& u, constant float* p) { return u.v + p[0]; }",
     "y[0] = get(B(1), x, float2(1, 2)) + sum(B(2), w); float2 v = 1; y[1] = get(B(2), y, v);"),
    ("vectors, swizzles and constructors", "",
     "float4 a = float4(1, 2, 3, 4); float2 p(1.0f, 2.0f); a.xy = p.yx; a = float4(a.wz, p);\n"
     "half4 q = half4(a); a += float4(q) * 2; half2 d = q.xy * 2.0; y[0] = dot(a, a) + d.x;"),
    ("vectors of a template type", "template <typename V> V both(float v) { return V(v, v); }",
     "vec<T, 4> v = vec<T, 4>(T(1), T(2), T(3), T(4)); z[0] = v.z; y[0] = both<float2>(1).y;"),
    ("scalars beside vectors",
     "template <typename U> U one(vec<U, 3> v) { return (v * 2.5f).x; }",
     "half4 v = half4(h[0]) * 2.5f; short4 k = short4(n) * 3; int4 m = 2.5f; float f = x[0] * 2;\n"
     "y[0] = float(v.x) + k.x + max(m, 2.5f).x + float(one<half>(half3(1))) + (f * v).y;"),
    ("scalars shifted by vectors", "template <typename U> vec<U, 2> bit(U a) {\n"
     "return 1 << vec<U, 2>(a); }",
     "const int k = 1; uint3 v = 1 << uint3(n); v = k << v; ushort2 p = 1u >> ushort2(n);\n"
     "y[0] = v.x + p.y + bit<uint>(2).x;"),
    ("enumerators beside half and bfloat", "enum { two = 2 };\nenum K : uint { three = 3 };",
     "T a = two; a += two; a = a < two ? a * three : T(two); half c = h[0] + three;\n"
     "z[0] = three * b[0]; y[0] = c / two; if (b[0] > two) y[1] = 1;"),
    ("names of types of the body in the header",
     "float f(float real, float V) { return real * V; }\n"
     "template <typename F> float apply(F V) { return V(1.0f, 2.0f); }\n"
     "struct Sum { float operator()(float a, float b) const { return a + b; } };",
     "typedef float real; using V = float2; V v(1, 2); real a = f(x[0], 2);\n"
     "y[0] = a + v.x + apply(Sum());"),
    ("thread objects that are returned",
     "struct S { float v; thread S& id() thread { return *this; } };\n"
     "thread S mk(float a);\nthread S mk(float a) { return {a}; }\n"
     "thread S operator+(S a, S b) { return {a.v + b.v}; }\n"
     "thread float twice(thread float (&a)[1]) { return a[0] * 2; }",
     "float a[1] = {1}; S s = mk(1); y[0] = (mk(1) + s.id()).v + twice(a);"),
    ("macros that are vectors",
     "#define VEC(T, n) vec<T, n>\n#define NAMED(T, n) T##n\n#define V4 metal::float4\n"
     "#define MAKE(T, n, ...) vec<T, n>(__VA_ARGS__)\n#define JOIN(a, b) a##b\n"
     "float two(float a) { return a; }\n"
     "template <typename U> VEC(U, 2) add(VEC(U, 2) a) { return a + VEC(U, 2)(1, 2); }",
     "VEC(float, 4) v = VEC(float, 4)(1, 2, 3, 4); VEC(float, 2) p(1, 2); V4 q(1, 2, 3, 4);\n"
     "NAMED(half, 2) r = NAMED(half, 2)(1, 2); y[0] = v.x + p.y + q.x + V4(1, 2, 3, 4).w + r.x;\n"
     "y[1] = MAKE(float, 2, 1, 2).y + JOIN(t, wo)(x[0]) + add<float>(p).x;"),
    ("casts of vectors", "template <typename V> V cast(float4 v) { return (V)v; }",
     "float4 v = float4(x[0]); half4 a = (half4)v; a = static_cast<half4>(v); int4 k = (int4)v;\n"
     "a = cast<half4>(v); bool4 m = v > 0; y[0] = float(a.x) + float(k.y) + float4(m).z;"),
    ("arithmetic of packed vectors", "",
     "packed_float3 p = float3(x[0], 1, 2); p += float3(1); p *= 2.0f; float3 v = p * 2.0f - p;\n"
     "y[0] = dot(-p, v) + float(any(p > v)) + (v / p).x;"),
    ("constants are const", "float first(constant float* p) { return *p; }\n"
     "constexpr constant float table[1] = {1}; static constant half other[2] = {1, 2};\n"
     "struct S { float a; S() constant = default; float get() const constant { return a; } };",
     "const constant float* p = w; y[0] = first(table) + first(p) + first(w) + float(other[0]);"),
    ("lists shorter than their vector", "",
     "float4 a = {0.f}, c = {x[0]}; half2 d{}; y[0] = a.x + c.y + float(d.x);"),
    ("lists for a vector of a function",
     "struct P { float a; float2 b; };\n"
     "float f(float a, const float2 b) { return a * b.x; }\nfloat f(P p) { return p.a; }\n"
     "float f(const thread float3& v, half2 d = half2(0), float e = float2(1).x) { return e; }\n"
     "struct S { float get(thread float4 v) const { return v.w; } };",
     "S s; y[0] = f(x[0], {x[1], 2}) + f({x[0], {1, 2}}) + f({x[0], 1, 2}, {h[0], 1}, {3}) +\n"
     "s.get({x[0], 1, float2(2).y, 3});"),
    ("loops over elements", "",
     "float a[2] = {1, 2}; array<float, 2> c = {{3, 4}}; float s = 0; for (float v : a) s += v;\n"
     "for (float v : c) s += v; y[0] = s;"),
    ("comparisons of vectors", "",
     "float4 a = float4(x[0]); bool4 m = a < 2.0f; if (any(m) && !all(a == 1.0f)) y[0] = 1;\n"
     "y[1] = select(a, float4(0), m).x + (isnan(a).y ? 1 : 0);"),
    ("comparisons beside whatever binds more and less",
     "template <typename V> bool same(V a, V b) { return all(a == b); }\n"
     "template <int K> float both(int i) { return i < K && K > 2 ? 1 : 0; }\n"
     "#define LESS(a, b) ((a) < (b))\n"
     "struct S { int v; bool operator<(S o) const { return v < o.v; } };",
     "float4 v = float4(x[0]), q = float4(1); int i = n; thread int* p = &i;\n"
     "bool4 m = v * 2 + 1 < q.wzyx; m = !(v < q) || v == vec<float, 4>(1) && q != float4{1, 2};\n"
     "m = ((v < q) & (q <= v)) | (v >= 2); m = LESS(v, q); m |= (bool4)(v < q);\n"
     "if (i >> 1 < n << 2 == true) y[0] = static_cast<int>(v.x) < 3 ? 1 : 2;\n"
     "if ((thread int*)&i == p && i & 1 != 0) y[1] = (v < q).x;\n"
     "for (int k = 0, l = 3; k < l; ++k) y[6] = k != 1;\n"
     "if constexpr (N > 3) y[2] = int4(v < q).x + both<(N > 2)>(i) + half4(v > q).y;\n"
     "float a[N > 2 ? N : 2]; a[i < 2] = 0; do i -= 1; while (i > 0); y[3] = (v < q)[1];\n"
     "y[5] = a[S{1} < S{2}]; switch (i) { case 1 == 1: return; default: i = v.x > 1; }\n"
     "y[4] = same(v, q) + same(int2(1), int2(2)) + any(v.xy > 0) + select(v, q, v < q).x;"),
    ("swizzles of bool vectors", "",
     "bool4 p = bool4(true, false, x[0] > 0, false); bool3 q = p.xyz; bool2 r = p.zw; p.xy = r;\n"
     "bool4 s = p.wzyx; p.y = true; q.rg = r && p.xx; bool2 t = !(x[0] < float4(2)).xy;\n"
     "bool4 u = r.xyxy || s; y[0] = select(float4(1), float4(2), u.bgra).x + float(any(q.zzy));\n"
     "p[2] = t.x; y[1] = float(all(p == s)) + float(bool4(p.xy, p.zw).w);"),
    ("threadgroup memory sized by a template argument", "",
     "threadgroup float s[N], t[2 * N]; threadgroup T u[N]; uint i = thread_index_in_threadgroup;\n"
     "s[i] = x[i]; t[i] = 0; u[i] = T(0.0f); threadgroup_barrier(mem_flags::mem_threadgroup);\n"
     "threadgroup float* p = s; y[i] = p[i] + t[i] + float(u[i]);"),
    ("helpers over pointer types", "template <typename P> float first(P p) { return p[0]; }",
     "threadgroup float s[4]; s[0] = 1; float a[1] = {2.0f}; y[0] = first(x) + first(s) + first(a);"
    ),
    ("tables", "constant float table[3] = {0.0f, 0.5f, -1e-3};\nconstant constexpr int count = 3;\n"
     "static constant half small[2] = {1.0f, 2.0f};", "y[0] = table[n % count] + float(small[0]);"),
    ("structs", "struct Pair { float a; int b; float sum() const { return a + b; } };\n"
     "Pair make(float a) { Pair p = {a, 1}; return p; }",
     "threadgroup Pair s[2]; s[0] = make(x[0]); Pair p = s[0]; const device Pair* d =\n"
     "(const device Pair*)x; p = d[0]; y[0] = p.sum() + d[1].a;"),
    ("arms of ?: are objects of one class in any space",
     "struct P { float a; };\nusing Q = P;\nP make(float a) { return {a}; }\n"
     "template <typename U> U either(bool c, const device U* s) { return c ? s[0] : make(1); }\n"
     "template <typename U> auto first(const device U* s) -> decltype(true ? s[0] : make(1)) {\n"
     "return s[0]; }",
     "threadgroup P s[1]; s[0] = make(x[0]); const device Q* d = (const device Q*)x; P p = s[0];\n"
     "P q = n > 0 ? p : make(1); q = n > 1 ? Q{2} : make(3); q = n > 2 ? d[0] : s[0];\n"
     "q = n > 3 ? d[0] : n > 4 ? q : s[0]; y[0] = q.a + (n > 5 ? make(6) : s[0]).a +\n"
     "either(n > 7, d).a + first(d).a; const device complex64_t* c =\n"
     "(device complex64_t*)y; complex64_t v = n > 8 ? c[0] : complex64_t(0, 1); y[1] = v.real;"),
    ("methods of device objects",
     "struct S { float a; float get() const device { return a; }\n"
     "void set(float v) thread { a = v; } };",
     "const device S* s = (const device S*)x; S t; t.set(s[0].get()); y[0] = t.a;"),
    ("methods that pass on members",
     "void twice(thread float& v) { v *= 2; }\nstruct Box { float v; void grow() { twice(v); }"
     " float get() const { return v; } };",
     "Box box = {x[0]}; box.grow(); y[0] = box.get() + Box{1}.get();"),
    ("functors and temporaries",
     "struct Sum { float operator()(float a, float b) const { return a + b; } };\n"
     "struct Box { float v; Box twice() const { return Box{v * 2}; } float get() { return v; } };\n"
     "template <typename Op> float fold(float a, float b) { return Op()(a, b); }",
     "Box box = {x[0]}; y[0] = fold<Sum>(1, 2) + Sum{}(3, 4) + box.twice().twice().get();"),
    ("temporaries by reference",
     "struct Box { float v; };\nBox box(float v) { return {v}; }\n"
     "struct Pair { Box a, b;\n"
     "Pair(const thread Box& p, const thread Box& q) : a(p), b(q) {} };\n"
     "float get(const thread Box& b) { return b.v; }\n"
     "template <typename U> U twice(const thread U& v) { return v + v; }",
     "const thread float& v = x[0] * 2; Pair pair(box(1), Box{2});\n"
     "y[0] = v + get(box(x[0])) + get(Box{1}) + twice(x[0] * 2) + pair.b.v;"),
    ("operators of temporaries",
     "struct S { float v; float get() const thread { return v; }\n"
     "float operator*(float b) const thread { return v * b; }\n"
     "operator float() const thread { return v; } };\nS mk(float a) { return {a}; }\n"
     "S operator-(const thread S& a);\nS operator-(const thread S& a) { return {-a.v}; }\n"
     "bool operator&(const thread S& a, float b) { return a.v > b; }\n"
     "template <typename U> struct C { U v; };\n"
     "template <typename U> C<U> box(U a) { return {a}; }\n"
     "template <typename U> C<U> operator+(const thread C<U>& a, const thread C<U>& b) {\n"
     "return {a.v + b.v}; }\n"
     "template <typename U> U add(const thread U& a, thread U&& b) { return a + b; }\n"
     "float sum(const thread float2& q = float2(1) * 2) { return q.x; }",
     "y[0] = (-mk(1)).get() + mk(1) * 5.0f + float(mk(2) & 1) + (box(x[0]) + box(x[1])).v;\n"
     "thread S&& s = mk(1); y[1] = s.v + add(float2(1), float2(2)).x + sum() + (mk(1) + 2);"),
    ("members by default",
     "struct Box { float v; Box() thread = default; Box(float v) : v(v) {}\n"
     "Box(const thread Box&) thread = default;\n"
     "thread Box& operator=(const thread Box&) = default; };",
     "Box p, q = Box(x[0]); p = q; q = Box(2); y[0] = p.v + q.v;"),
    ("specialisations with brackets in their arguments",
     "template <int R, typename = void> struct Sum;\n"
     "template <int R> struct Sum<R, enable_if_t<(R > 1)>> {\n"
     "static float of(float v) { return v * R; } };",
     "y[0] = Sum<N>::of(x[0]);"),
    ("literals", "",
     "z[0] = 1.5bf + 0x1p1bf + 1e1BF; half a = 1.h; y[0] = a * 2.5e-1h + .5 + 0x1p-3;"),
    ("constants of bfloat",
     "#define K 1.5bf\n#define F 1.5f\nconstant bfloat k[3] = {1.5bf, bfloat(0.0f), 2};\n"
     "constant bfloat2 v = bfloat2(1.5f, 2.0f); constant float f[2] = {F, 1e-3f};\n"
     "struct S { bfloat a = 1.5bf; bfloat c; S() : c(bfloat(F)) {} };\n"
     "static_assert(F == 1.5f && 3.5e38f > F, \"\");",
     "constexpr half t[2] = {0.5f, 1}; constexpr T c = K; S s; bfloat a = bfloat(F);\n"
     "z[0] = k[n] + c * s.c + a * v.x;\n"
     "y[3] = t[n]; y[0] = b[0] > 1.5f ? f[0] : F; float d[int(F * 2)]; d[0] = F; y[1] = d[0];\n"
     "switch (n) { case int(1.5f): y[2] = 1; }"),
    ("literals of 64 bits", "constant ulong table[1] = {0xcbf29ce484222325ULL};",
     "ulong a = 1ULL << n; a = a * 6364136223846793005ull + 5ll; long i = -3LL * n;\n"
     "y[0] = (a & (1ULL << 40)) != 0 ? i : max(a ^ table[0], 7ul);"),
    ("unions and enums", "enum class Kind : uchar { a, b = 4 };\nenum { four = 4 };\n"
     "union Bits { float f; uint u; };",
     "Bits bits; bits.f = x[0]; y[0] = bits.u + four + uint(Kind::b); y[1] = Kind(0) == Kind::a;"),
    ("simdgroups", "",
     "float v = x[thread_index_in_simdgroup]; v = simd_sum(v) + simd_shuffle_xor(v, 1) +\n"
     "simd_shuffle_and_fill_up(v, 0.0f, 1) + simd_broadcast(v, 0) + simd_prefix_exclusive_sum(v);\n"
     "simd_vote vote = simd_ballot(v > 0); uint m = uint(simd_vote::vote_t(vote));\n"
     "y[0] = simd_any(v > 1) ? v : float(popcount(m)); z[0] = simd_max(T(v));"),
    ("bfloat arithmetic", "",
     "T a = T(x[0]); a = a * a + T(1) - 2; a += b[0]; float f = a * 2.0f; int i = a;\n"
     "y[0] = max(a, f) + float(exp(a)) + i + (a < 0 ? -a : a); z[0] = max(a, T(0.0f));\n"
     "z[1] = 1.5bf; z[2] = T(h[0]); bool set = a; z[3] = set ? T(a) : T(0);\n"
     "z[0] = pow(a, 2) + fmin(1, a) + fma(a, n, b[0]) + fmax3(a, b[1], true) + divide(a, 2u);"),
    ("a template whose instance OpenCL refuses is called again",
     "template <typename T> struct cx { T re, im; cx() {} cx(T a, T b) : re(a), im(b) {} };\n"
     "template <typename T> cx<T> conjugate(cx<T> a) { return cx<T>(a.re, -a.im); }\n"
     "template <typename T> T part(int q, thread cx<T>* c) {\n"
     "    cx<T> v = q >= 0 ? c[q] : conjugate(c[-q]); return v.re; }\n"
     "template <typename T> T one(thread cx<T>* c) { return part(1, c); }\n"
     "template <typename T> T two(thread cx<T>* c) { return part(-1, c); }\n",
     "cx<float> c[2]; c[0] = cx<float>(x[0], 1); c[1] = c[0]; y[0] = one(c) + two(c);"),
    ("bfloat is cast to half", "",
     "half v = static_cast<half>(b[0]) + (half)b[1]; T t = b[0]; v += (float16_t)t + half(b[1]);\n"
     "y[0] = v; bfloat k = static_cast<bfloat>(h[0]); z[0] = k + (T)h[1];"),
    ("traits of MLX's own headers",
     "#pragma METAL internals : enable\n"
     "template <typename T> constexpr constant bool atomic_v =\n"
     "    _disjunction<is_same<T, int>, is_same<T, float>>::value;\n"
     "#pragma METAL internals : disable\n",
     "y[0] = atomic_v<float> && !atomic_v<half>;"),
    ("half arithmetic", "", "half v = half(x[0]); v = v * 2 + 1.5h; y[0] = float(v * v) + exp(v);"),
    ("integer functions", "",
     "uint u = uint(n); y[0] = clz(u) + popcount(u) + extract_bits(u, 1, 2) + mulhi(n, n) +\n"
     "min(n, 3) + max(u, 3u) + clamp(n, 0, 7) + abs(n) + rotate(u, 3u) + reverse_bits(u);"),
    ("math", "",
     "int e; float f = frexp(x[0], e); float i; f += modf(x[0], i) + ldexp(f, 2); float c;\n"
     "f += sincos(f, c) + metal::precise::exp(f) + fast::log(f) + pow(f, 2) + fma(f, f, 1.0f);\n"
     "y[0] = f + float(e) + log1p(f) + M_PI_F + INFINITY;"),
    ("atomics", "",
     "threadgroup atomic_uint count; if (thread_index_in_threadgroup == 0)\n"
     "atomic_store_explicit(&count, 0, memory_order_relaxed);\n"
     "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);\n"
     "uint old = atomic_fetch_add_explicit(&count, 1u, memory_order_relaxed);\n"
     "uint want = old; atomic_compare_exchange_weak_explicit(&count, &want, 3u,\n"
     "memory_order_relaxed, memory_order_relaxed); y[0] = float(old);"),
    ("simdgroup matrices", "",
     "simdgroup_float8x8 a, c = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);\n"
     "simdgroup_matrix<half, 8, 8> m; simdgroup_load(a, x, 8);\n"
     "simdgroup_load(m, h, 8, ulong2(0), true); simdgroup_multiply_accumulate(c, a, a, c);\n"
     "simdgroup_store(c, y, 8); m.thread_elements()[0] = 1;"),
    ("MLX's utilities", "",
     "size_t k = elem_to_loc(uint(3), x_shape, x_strides, x_ndim);\n"
     "y[0] = ceildiv(n, 32) + float(k);\n"
     "z[0] = Limits<T>::max; float16_t v = Limits<float16_t>::finite_min; y[1] = float(v);\n"
     "complex64_t c = {1.0f, 2.0f}; c = c * c + 1; y[2] = (2 / c).real; y[3] = cast_to<float>(n);"),
    ("control flow", "",
     "float s = 0; for (int i = 0; i < N; ++i) { if (i == n) continue; s += x[i]; }\n"
     "MLX_MTL_PRAGMA_UNROLL\nfor (ushort i = 0; i < 4; i++) s *= 0.5f;\n"
     "do { s -= 1; } while (s > 9);\n"
     "switch (n) { case 0: s = 1; break; default: s = -s; } y[0] = N > 4 ? s : 2.0f * s;"),
    ("names that OpenCL reserves", "float generic(float local) { return local; }",
     "float global = x[0]; int pipe = 1; float read_only = generic(global);\n"
     "y[0] = read_only * pipe;"),
    ("a uniform loop around barriers", "",
     "threadgroup float s[N]; uint i = thread_index_in_threadgroup;\n"
     "for (uint step = 2; step > 0; step /= 2) { if (i < step) s[i] += s[i + step];\n"
     "threadgroup_barrier(mem_flags::mem_threadgroup); }\n"
     "float all = simd_sum(s[i]); if (all > 0) y[i] = simd_max(all); else y[i] = 0;"),
    ("macros",
     "#define SQUARE(v) ((v) * (v))\n#if __METAL_VERSION__ >= 310\n#define OK 1\n#endif\n",
     "#define LAST(v) y[0] = v\nLAST(SQUARE(x[0]) + OK);\n#undef LAST"),
    ("vectors made in macros", "#define ROW(i) float3( \\\n    x[i], \\\n    x[i + 1], 2)\n"
     "#define real2 float2 // of any precision\n#define TWICE(a) real2(a, 2 * (a))\n",
     "float3 v = ROW(0) * 2.0f; real2 p = TWICE(v.x) + real2(half(1), 2); y[0] = v.y + p.x;"),
    ("matrices are added to", "",
     "threadgroup float2x2 t[2]; t[0] = float2x2(1.0f); float2x2 m(1, 2, 3, 4); m += t[0] * m;\n"
     "y[0] = (m -= t[0])[0].x;"),
    ("matrices have the operators that a header declares",
     "thread float2x2& operator*=(thread float2x2& a, float2x2 b) { a = a * b; return a; }\n"
     "bool operator==(float2x2 a, float2x2 b) { return all(a[0] == b[0]) && all(a[1] == b[1]); }",
     "float2x2 m(x[0]); m *= m; y[0] = m == float2x2(1) ? 1 : 0;"),
    ("constexpr lists of floats",
     "float f(float v) { constexpr float c[2] = {0.5f, 1.5f}; return v * c[1]; }",
     "constexpr float2 d[2] = {{0.5f, 1.f}, {2.0f, 1.0f}}; y[0] = f(x[0]) + d[0].x;"),
    ("arrays as parameters of templates",
     "template <typename U> U g(U v, const U c[], vec<U, 2> d[2], int n) {\n"
     "  return v * c[n] + d[0].x;\n}",
     "const float c[2] = {0.5f, 1.5f}; float2 d[2] = {float2(1), float2(2)};\n"
     "y[0] = g(x[0], c, d, 1);"),
    ("traits of references, constants and unions", "union U { int a; float b; };",
     "static_assert(is_scalar_v<float> && !is_void_v<int> && is_union_v<U>, \"\");\n"
     "static_assert(is_reference<thread int&>::value && !is_volatile_v<int>, \"\");\n"
     "static_assert(is_lvalue_reference_v<thread int&>, \"\");\n"
     "static_assert(is_same_v<add_const_t<T>, const T>, \"\"); y[0] = x[0];"),
    ("what #if leaves out",
     "#if 0\n#include <vector>\nstd::size_t n;\n#elif \\\n  defined(__METAL__)\n"
     "#ifndef __METAL_VERSION__\ndouble d;\n#endif\n#define OK 1\n#else\nlong long q;\n#endif\n",
     "y[0] = OK;"),
    ("what a condition on a header of Metal's leaves out",
     "#if __has_include(<metal_stdlib>) && __has_include(<simd/simd.h>)\n"
     "float one(float v) { return v; }\n#else /* of another\n compiler */\n#include <cmath>\n"
     "double one(double);\n#define V2 double\n#endif\n"
     "#if __has_include(<cmath>)\n#define V float4\n#else // as it is\n#define V float\n#endif\n",
     "V q(2); y[0] = one(q);"),
    ("members that constructors initialise in braces",
     "struct A { float v; int k; };\n"
     "struct S { const device float* p; int n; float2 v; A a;\n"
     "S(const device float* p, int n) : p{p}, n(n), v{1, 2}, a{n > 0 ? 1.0f : 2.0f, n} { ++n; }\n"
     "float get() const { return p[n] + v.y + a.v; } };\n"
     "struct V { float2 v; V(float a, float b); };\nV::V(float a, float b) : v(a, b) {}\n"
     "template <typename U> struct Box { U v; int n; Box(U a) : v{a}, n{1} {} };\n"
     "struct One { float v; int n; constexpr One(float v, int n) : v{v}, n(n) {} };\n"
     "constant One table[1] = {One(1.0f, 2)};",
     "struct L { float p; int n; L(float p, int n) : p{p}, n{n} {} float get() { return p; } };\n"
     "S s(x, 2); Box<float> c{x[0]}; L l(1, 2); y[0] = s.get() + c.v + l.get() + table[0].v;\n"
     "y[1] = V(1, 2).v.x;"),
    ("attributes of other kernels",
     "enum { first };\n[[stitchable]] half4 f(float2 p, half4 c) { return c; }\n"
     "kernel void one(device float* a [[ buffer( 0) ]],\n"
     "                device float* b [[buffer (int(first) + 1)]],\n"
     "                uint i [[thread_position_in_grid]]) { a[i] = b[i]; }", "y[0] = x[0];"),
    ("attributes in one list",
     "[[kernel, max_total_threads_per_threadgroup(32)]]\n"
     "void one(device float* a [[buffer(0)]]) { a[0] = 1; }", "y[0] = x[0];"),
    ("a host's name in two lines of a macro",
     "template <typename U> kernel void one(device U* out [[buffer(0)]]) { out[0] = 1; }\n"
     "#define MAKE(NAME, U) \\\n  template [[host_name(#NAME \"_\" \\\n #U)]] \\\n"
     "  kernel void one<U>(device U*);\nMAKE(one, float)\n", "y[0] = x[0];"),
    ("results of objects",
     "struct E { template <typename U> U operator()(U a) { return a + 1; } };",
     "using R = decltype(declval<E>()(declval<float>())); R r = E()(x[0]); y[0] = r;"),
    ("an include in a comment", "/*\n#include <vector>\n*/\n", "y[0] = x[0];"),
]  # fmt: skip
