"""Kernels for test_strict.py: what Metal refuses, what zmlx's own rules refuse, what both accept.

Each is (claim, header, body, part of the expected message). The kernel has the inputs x (4 by 4
float), h (half), b (bfloat), n (0-d int) and w (4 floats, so in constant), the outputs y (float)
and z (bfloat), and the template arguments T = bfloat16 and N = 4.
"""

METAL_REFUSES = [
    ("a cast does not shorten a vector", "",
     "float4 v = float4(x[0]); half3 a = (half3)v; y[0] = float(a.x);", "C-style cast from vector"),
    # ---- address spaces (MSL 4 §4)
    ("a threadgroup pointer is no device pointer", "",
     "threadgroup float s[4]; device float* p = s; y[0] = p[0];",
     "cannot initialize a variable of type 'device float"),
    ("a threadgroup pointer does not pass as a device parameter",
     "float first(const device float* p) { return p[0]; }",
     "threadgroup float s[4]; s[0] = 1; y[0] = first(s);",
     "no matching function for call to 'first'"),
    ("a device pointer does not pass as a thread parameter",
     "float first(const thread float* p) { return p[0]; }",
     "y[0] = first(x);", "no matching function for call to 'first'"),
    ("a pointer in a helper has an address space", "float first(const float* p) { return p[0]; }",
     "float a[2] = {1, 2}; y[0] = first(a);", "pointer type must have an address space"),
    ("a reference in a helper has an address space", "void twice(float& v) { v *= 2; }",
     "float a = x[0]; twice(a); y[0] = a;", "reference type must have an address space"),
    ("a local pointer has an address space", "", "float* p = y; p[0] = 1;",
     "pointer type must have an address space"),
    ("a pointer to a template type has an address space",
     "template <typename U> U first(U* p) { return p[0]; }", "y[0] = first(y);",
     "pointer type must have an address space"),
    ("a pointer to a type of another name has an address space",
     "typedef float real;\nvoid twice(real* a) { *a *= 2; }", "y[0] = x[0];",
     "pointer type must have an address space"),
    ("so has one to a macro for a type", "#define REAL const float\nREAL* first(REAL* a);",
     "y[0] = x[0];", "pointer type must have an address space"),
    ("so has one to a member of a template parameter",
     "template <typename U> void twice(typename U::type* a) { *a *= 2; }", "y[0] = x[0];",
     "pointer type must have an address space"),
    ("a reference to a matrix has an address space", "void clear(float3x3& m) { m[0] = 0; }",
     "y[0] = x[0];", "reference type must have an address space"),
    ("so has one to vec", "void clear(vec<float, 2>& v) { v = 0; }", "y[0] = x[0];",
     "reference type must have an address space"),
    ("so has one to an array object", "void clear(metal::array<float, 2>& v) { v[0] = 0; }",
     "y[0] = x[0];", "reference type must have an address space"),
    ("so has one to an array", "void clear(float (&v)[2]) { v[0] = 0; }", "y[0] = x[0];",
     "reference type must have an address space"),
    ("so has one to a complex number", "void clear(complex_t<float>& v) { v.real = 0; }",
     "y[0] = x[0];", "reference type must have an address space"),
    ("so has one to a matrix of a simdgroup", "void clear(simdgroup_float8x8& m) {}",
     "y[0] = x[0];", "reference type must have an address space"),
    ("a cast names an address space", "", "y[0] = as_type<float>(*(int*)(y));",
     "pointer type must have an address space"),
    ("const device does not lose its const", "", "device float* p = x; p[0] = 1;",
     "'const device float"),
    ("inputs are not written", "", "x[0] = 1.0f;", "read-only variable is not assignable"),
    ("small inputs lie in constant and are not written", "", "w[0] = 1.0f;",
     "read-only variable is not assignable"),
    ("a cast does not change the address space", "",
     "threadgroup float s[4]; y[0] = ((device float*)s)[0];",
     "converts between mismatching address spaces"),
    ("nor does reinterpret_cast", "",
     "threadgroup float s[4]; y[0] = reinterpret_cast<device float*>(s)[0];", "is not allowed"),
    ("a method of a thread object does not run on a device object",
     "struct S { float a; float get() const { return a; } };",
     "const device S* s = (const device S*)x; y[0] = s[0].get();",
     "'get' is a member function of thread objects"),
    ("a constant pointer does not construct from a device one",
     "struct S { const device float* p; S(const device float* q) : p(q) {} };",
     "S s(w); y[0] = s.p[0];", "no matching constructor for initialization of 'thread S'"),
    ("a temporary beside another argument",
     "struct B { float v; };\nB box(float v) { return {v}; }\n"
     "float get(const thread B& b, const device float* p) { return b.v + p[0]; }",
     "y[0] = get(box(x[0]), w);", "no matching function for call to 'get'"),
    ("an output is no atomic unless it is declared so", "",
     "atomic_fetch_add_explicit(&y[0], 1.0f, memory_order_relaxed);", "no matching function"),
    # ---- program scope and storage (§4.2, §4.4, §5.3)
    ("a table is in constant", "const float table[2] = {1.0f, 2.0f};", "y[0] = table[n];",
     "program scope variable must reside in constant address space"),
    ("constexpr at program scope is in constant", "constexpr int count = 4;", "y[0] = count;",
     "program scope variable must reside in constant address space"),
    ("a constant is initialized", "constant float table[2];", "y[0] = table[n];",
     "variable in constant address space must be initialized"),
    ("a constant is not written", "constant int table[2] = {1, 2};", "table[0] = 3; y[0] = 0;",
     "cannot assign to variable 'table' with const-qualified type"),
    ("threadgroup memory belongs to a kernel",
     "float sum(float v) { threadgroup float s[4]; s[0] = v; return s[0]; }", "y[0] = sum(x[0]);",
     "non-kernel function variable cannot be declared in threadgroup address space"),
    ("threadgroup memory has no initializer", "", "threadgroup float s = 1.0f; y[0] = s;",
     "'threadgroup' variable cannot have an initializer"),
    ("variables in functions are not static", "", "static int calls = 0; y[0] = calls;",
     "variables in a function cannot be static"),
    ("nor thread_local", "", "thread_local int calls = 0; y[0] = calls;", "thread_local"),
    ("nor register", "", "register int calls = 0; y[0] = calls;", "register"),
    ("an array has a constant size", "", "float a[n]; a[0] = 1; y[0] = a[0];",
     "array size is not a constant expression"),
    # ---- numbers (§2.1, §2.22)
    ("a float does not initialize a bfloat", "", "T v = x[0]; z[0] = v;",
     "float does not convert to 'T' (bfloat) implicitly"),
    ("nor does a literal that would fit", "", "T v = 0.0f; z[0] = v;",
     "float does not convert to 'T' (bfloat) implicitly"),
    ("a float is not assigned to a bfloat", "", "z[0] = x[0];",
     "float does not convert to 'bfloat16_t' (bfloat) implicitly"),
    ("a float of another name is not assigned to a bfloat", "typedef float Wide;",
     "const Wide v = x[0]; z[N] = v;",
     "float does not convert to 'bfloat16_t' (bfloat) implicitly"),
    ("a float is not returned as a bfloat", "bfloat one() { return 1.0f; }", "z[0] = T(one());",
     "float does not convert to 'bfloat' (bfloat) implicitly"),
    ("a float is not passed as a bfloat", "float wide(bfloat v) { return v; }",
     "y[0] = wide(x[0]);", "float does not convert to 'bfloat' (bfloat) implicitly"),
    ("a bfloat does not accumulate a float", "", "T s = T(0); s += x[0]; z[0] = s;",
     "float does not convert to 'T' (bfloat) implicitly"),
    ("half and bfloat do not convert to each other", "", "half v = z[0]; y[0] = v;",
     "incompatible type|cannot initialize a variable of type"),
    ("half and bfloat do not mix", "", "y[0] = float(h[0] * b[0]);",
     "bfloat and half do not mix"),
    ("half and bfloat do not compare", "", "y[0] = h[0] < z[1] ? 1.0f : 0.0f;",
     "bfloat and half do not mix"),
    ("there is no double", "", "double v = 1.0; y[0] = v;", "Metal has no double"),
    ("there is no long long", "", "long long v = 1; y[0] = v;", "Metal has no long long"),
    ("literals have 64 bits", "", "y[0] = 0x10000000000000000;",
     "Metal has no type for the literal 0x10000000000000000"),
    ("an octal literal has no 8", "", "y[0] = 08;", "invalid digit '8' in octal constant"),
    ("nor more with a suffix", "", "y[0] = 0x10000000000000000ull;",
     "Metal has no type for the literal 0x10000000000000000ull"),
    ("no literal is a long double", "", "y[0] = 1.0L;", "Metal has no type for the literal 1.0L"),
    ("vectors do not convert to other vectors", "", "int4 i = int4(1); float4 f = i; y[0] = f.x;",
     "cannot initialize a variable of type 'thread float4'"),
    ("vectors of different types do not add", "", "y[0] = (float4(1) + int4(1)).x;",
     "implicit conversions between vector types"),
    ("a float does not compute with a vector of integers", "",
     "int4 v = int4(n); y[0] = (v * 2.5f).x;", "the scalar does not convert to the elements"),
    ("nor does a half of another name, or a vector of a template type",
     "typedef half F; template <typename U> U one(vec<U, 3> v, F f) { return (f < v).x ? 1 : 0; }",
     "y[0] = one(uchar3(1), h[0]);", "the scalar does not convert to the elements"),
    ("a vector constructor takes all components", "", "float4 v = float4(1, 2, 3); y[0] = v.x;",
     "too few elements in vector initialization"),
    ("a vector has no fourth component of three", "", "float3 v = float3(1); y[0] = v.w;",
     "vector component access exceeds type"),
    ("a swizzle does not mix xyzw and rgba", "", "float4 v = float4(1); y[0] = v.xg.x;",
     "illegal vector component name"),
    ("a swizzle on the left names a component once", "", "float4 v; v.xx = float2(1); y[0] = v.x;",
     "contains duplicate components"),
    ("a comparison of vectors is no condition", "",
     "float4 v = float4(1); if (v < v) y[0] = 1;", "not contextually convertible to 'bool'"),
    ("as_type keeps the size", "", "y[0] = as_type<float>(h[0]);",
     "as_type needs types of the same size"),
    ("braces do not narrow", "", "int a[1] = {x[0]}; y[0] = a[0];", "cannot be narrowed"),
    ("nor a float to a half", "struct P { half a; };", "float f = x[0];\nP p = {f};\ny[0] = p.a;",
     "cannot be narrowed from type 'float' to 'half'"),
    # ---- overloads (§6)
    ("max of int and uint is ambiguous", "", "uint u = 3; y[0] = max(n, u);",
     "call to 'max' is ambiguous"),
    ("max of uint and size_t is ambiguous", "", "uint u = 3; y[0] = max(u, size_t(n));",
     "call to 'max' is ambiguous"),
    ("min of float and int is ambiguous", "", "y[0] = min(x[0], 1);", "call to 'min' is ambiguous"),
    ("max of half and float is ambiguous", "", "y[0] = max(h[0], 0.0f);",
     "call to 'max' is ambiguous"),
    ("max of bfloat and int is ambiguous", "", "y[0] = max(b[0], 0);",
     "call to 'max' is ambiguous"),
    ("median3 of bfloats and int is ambiguous", "", "y[0] = median3(b[0], 0, b[1]);",
     "call to 'median3' is ambiguous"),
    ("clamp of float and ints is ambiguous", "", "y[0] = clamp(x[0], 0, 1);",
     "call to 'clamp' is ambiguous"),
    ("exp of an int is ambiguous", "", "y[0] = exp(n);", "call to 'exp' is ambiguous"),
    ("simd_sum takes no bool", "", "y[0] = simd_sum(n > 0);", "no matching function"),
    ("simd_sum takes no 64 bits", "", "y[0] = simd_sum(long(n));", "no matching function"),
    ("a float atomic has no maximum", "",
     "threadgroup atomic<float> s; y[0] = "
     "atomic_fetch_max_explicit(&s, 1.0f, memory_order_relaxed);", "no matching function"),
    ("floats are added to in device memory only", "",
     "threadgroup atomic<float> s; atomic_store_explicit(&s, 0.0f, memory_order_relaxed);\n"
     "atomic_fetch_add_explicit(&s, 1.0f, memory_order_relaxed); y[0] = 0;",
     "no matching function for call to 'atomic_fetch_add_explicit'"),
    ("a complex number is not multiplied by a real one", "",
     "complex64_t c = {1.0f, 2.0f}; c = c * 2.0f; y[0] = c.real;", "operator '*' is ambiguous"),
    ("nor divided by one", "", "complex64_t c = {1.0f, 2.0f}; c = c / x[0]; y[0] = c.real;",
     "operator '/' is ambiguous"),
    ("an atomic holds no half", "", "threadgroup atomic<half> s; y[0] = 0;",
     "atomic<T> needs T to be int, uint, bool, ulong or float"),
    ("a simdgroup matrix is 8 by 8", "", "simdgroup_matrix<float, 4, 4> m; y[0] = 0;",
     "simdgroup_matrix has 8 columns and 8 rows"),
    ("arms of ?: are of one class", "struct P { float a; };\nstruct Q { float a; };",
     "const device P* s = (const device P*)x; Q q = {1}; q = n ? s[0] : q; y[0] = q.a;",
     "incompatible operand types ('const device P' and 'thread Q')"),
    ("and of one specialisation of it", "template <typename U> struct P { U a; };",
     "P<device float*> p; P<threadgroup float*> q; q = n ? p : q; y[0] = q.a[0];",
     "incompatible operand types ('thread P<device float *>' and 'thread P<threadgroup float *>')"),
    ("arms of ?: that point do so into one space", "struct P { float a; };",
     "const device P* s = (const device P*)x; P p; y[0] = (n ? s : &p)->a;",
     "incompatible operand types ('const device P *' and 'thread P *')"),
    ("a list for a vector is not too long", "float f(float a, float2 b) { return a + b.x; }",
     "y[0] = f(1, {x[0], x[1], x[2]});", "excess elements in vector"),
    ("the other arguments are read", "float f(float a, float2 b) { return a + b.x; }",
     "y[0] = f(x, {x[0], x[1]});", "no matching function for call to 'f'"),
    # ---- names (§6)
    ("there is no erf", "", "y[0] = erf(x[0]);", "use of undeclared identifier 'erf'"),
    ("there is no expm1", "", "y[0] = metal::expm1(x[0]);", "no member named 'expm1'"),
    ("there is no std", "", "y[0] = std::max(x[0], y[0]);", "no std::"),
    ("there is no printf", "", 'printf("%d", n); y[0] = 0;', "undeclared identifier 'printf'"),
    ("there is no C header", "#include <cmath>\n", "y[0] = 0;",
     "<cmath> is not a header of Metal's library"),
    ("there is no CUDA name", "", "__syncthreads(); y[0] = 0;",
     "undeclared identifier '__syncthreads'"),
    ("a thread attribute is spelled right", "", "y[thread_position_in_gird.x] = 0;",
     "undeclared identifier 'thread_position_in_gird'"),
    ("MLX's functions are not defined again",
     "inline float log1p(float v) { return log(1.0f + v); }", "y[0] = log1p(x[0]);",
     "redefinition of 'log1p'"),
    ("nor its templates", "template <typename U, typename V> U cast_to(V v) { return U(v); }",
     "y[0] = cast_to<float>(n);", "redefinition of 'cast_to'"),
    ("MLX's ceildiv is no constant", "", "constexpr int k = ceildiv(N, 3); y[0] = k;",
     "must be initialized by a constant expression"),
    ("vertex is a keyword", "", "float vertex = x[0]; y[0] = vertex;", "is a keyword of Metal"),
    ("fragment is a keyword", "float f(float fragment) { return 1; }", "y[0] = f(1);",
     "is a keyword of Metal"),
    ("kernel is a keyword", "struct S { int kernel[2], n; };", "y[0] = sizeof(S);",
     "is a keyword of Metal"),
    ("vertex is no function", "float vertex(float a) { return a; }", "y[0] = vertex(1);",
     "is a keyword of Metal"),
    ("fragment is no struct", "struct fragment { float a; };", "y[0] = 1;",
     "is a keyword of Metal"),
    ("bfloat is a keyword", "", "float bfloat = x[0]; y[0] = bfloat;", "is a keyword of Metal"),
    ("attributes are known", "[[fastcall]] float f(float v) { return v; }", "y[0] = f(x[0]);",
     "unknown attribute 'fastcall'"),
    # ---- what C++ has and Metal has not (§1.5.4)
    ("goto", "", "int i = 0; again: if (++i < n) goto again; y[0] = i;", "Metal has no goto"),
    ("new", "", "thread float* p = new float; y[0] = p[0];", "new"),
    ("delete", "", "thread float* p = 0; delete p; y[0] = 0;", "delete"),
    ("exceptions", "", "throw 1;", "exceptions disabled"),
    ("virtual functions", "struct S { virtual float f() { return 1; } };", "y[0] = 0;",
     "virtual functions are not supported"),
    ("dynamic_cast", "struct S {};", "S s; y[0] = dynamic_cast<thread S*>(&s) == &s;",
     "dynamic_cast"),
    ("typeid", "", "y[0] = sizeof(typeid(int));", "typeid"),
    ("the noexcept operator", "", "y[0] = noexcept(n + 1);", "no noexcept operator"),
    ("inline assembly", "", 'asm("nop"); y[0] = 0;', "inline assembly"),
    ("lambdas before Metal 3.2", "", "auto f = [](float v) { return v; }; y[0] = f(x[0]);",
     "Metal 3.1 has no lambda expressions"),
    ("template arguments of a class are not deduced",
     "template <typename U> struct Box { U v; Box(U a) : v(a) {} };", "Box b(x[0]); y[0] = b.v;",
     "deduces no template arguments"),
    ("template parameters of any type", "template <auto k> int f() { return k; }",
     "y[0] = f<3>();", "has no template <auto>"),
    ("variadic functions", "float f(int k, ...) { return k; }", "y[0] = f(1, 2);",
     "variadic arguments are not allowed"),
    ("a dependent type says typename",
     "template <typename U> struct Box { typedef U type; };", "Box<T>::type v = T(1); z[0] = v;",
     "expected ';' after expression"),
]  # fmt: skip

CATALOGUE_REFUSES = [
    ("threadgroup memory is declared at the top of a kernel", "",
     "if (n > 0) { threadgroup float s[4]; s[0] = 1; y[0] = s[0]; }",
     "can only be declared in the outermost scope of a kernel function"),
    ("a half is stored by a cast", "", "half v = x[0]; y[0] = v;", "must be cast"),
    ("a half literal is cast", "", "half v = 0.5f; y[0] = v;", "must be cast"),
    ("so is one in braces", "", "half a[2] = {0.5f, h[0]}; y[0] = a[0];", "must be cast"),
    ("arms of ?: have one type", "", "y[0] = n > 0 ? h[0] : x[0];", "both arms of"),
    ("arms of ?: with a literal have one type", "", "y[0] = n > 0 ? b[0] : 0.0f;", "both arms of"),
    ("overloads differ in more than the address space",
     "float f(const device float* p) { return p[0]; }\n"
     "float f(const threadgroup float* q) { return q[0]; }",
     "y[0] = f(x);", "must not differ only in address space"),
    ("a simd operation under the condition of a lane", "",
     "uint lane = thread_index_in_simdgroup;\nif (lane < 4) {\n  y[0] = simd_sum(x[lane]);\n}",
     "simd_sum must be reached by all threads, but the condition in line 2 differs"),
    ("a barrier in a loop whose length differs", "",
     "uint i = thread_position_in_threadgroup.x;\n"
     "for (uint k = i; k < 9; k += 2) threadgroup_barrier(mem_flags::mem_threadgroup);",
     "threadgroup_barrier must be reached by all threads"),
    ("a simd operation after a return of some lanes", "",
     "uint i = thread_position_in_grid.x;\nif (i >= 9) return;\ny[i] = simd_sum(x[i]);",
     "simd_sum must be reached by all threads"),
    ("a barrier inside a helper under a condition",
     "void meet() { threadgroup_barrier(mem_flags::mem_none); }",
     "if (thread_index_in_threadgroup == 0) meet();", "meet must be reached by all threads"),
    ("recursion", "int down(int k) { return k > 0 ? down(k - 1) : 0; }", "y[0] = down(3);",
     "down calls itself"),
    ("mutual recursion",
     "int odd(int k);\nint even(int k) { return k ? odd(k - 1) : 1; }\n"
     "int odd(int k) { return k ? even(k - 1) : 0; }", "y[0] = odd(3);", "calls itself"),
    ("pointers to functions", "float one(float v) { return v; }",
     "float (*f)(float) = one; y[0] = f(x[0]);", "pointers to functions are not allowed"),
    ("derived classes", "struct A { int a; };\nstruct B : A { int b; };", "y[0] = 0;",
     "no derived classes"),
    ("a base by another name",
     "template <typename U> struct A { U v; A(U a) : v(a) {} };\n"
     "struct D : A<float> { using Base = A<float>; D(float a) : Base(a) {} };",
     "D d(x[0]); y[0] = d.v;", "no derived classes"),
    ("includes", "#include <metal_stdlib>\n", "y[0] = 0;", "kernels include nothing"),
    ("builtins of the compiler", "", "y[0] = __builtin_fabsf(x[0]);", "not in Metal's library"),
]  # fmt: skip

BOTH_ACCEPT = [
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
    ("macros", "#define SQUARE(v) ((v) * (v))\n#if __METAL_VERSION__ >= 310\n#define OK 1\n#endif",
     "#define LAST(v) y[0] = v\nLAST(SQUARE(x[0]) + OK);\n#undef LAST"),
    ("vectors made in macros", "#define ROW(i) float3( \\\n    x[i], \\\n    x[i + 1], 2)\n"
     "#define real2 float2 // of any precision\n#define TWICE(a) real2(a, 2 * (a))",
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
