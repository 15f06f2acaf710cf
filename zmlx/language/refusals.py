"""What the language does not have, and what is wrong in the text itself: refused with the line and
the remedy."""

from __future__ import annotations

from .row import Refusal

_KEPT = (
    "it would keep its value from one launch to the next; Metal has variables of `constant` "
    "address space, `constexpr` ones, and local ones"
)

REFUSALS = {
    "static variables": Refusal("static int count = 0;", f"`count` is not supported: {_KEPT}"),
    "variables of the header": Refusal(
        "inline uint count[4] = {};", f"`count` is not supported: {_KEPT}", line=1, header=True
    ),
    "a comment without an end": Refusal("/* and so on", "this comment has no end, `*/`"),
    "double": Refusal(
        "double y = x[0];", "`double` is not supported: Metal has no double; use float"
    ),
    "long double literals": Refusal(
        "float y = 1.0L;",
        "the literal `1.0L` is not supported: Metal has float (1.0), half (1.0h) and bfloat "
        "(1.0bf) literals",
    ),
    "goto": Refusal(
        "goto end; end: return;",
        "`goto` is not supported: Metal has no goto; use a loop with break",
    ),
    "throw": Refusal(
        "throw 1;",
        "`throw` is not supported: Metal has no exceptions; write a sentinel value instead",
    ),
    "try": Refusal(
        "try { } catch (...) { }",
        "`try` is not supported: Metal has no exceptions; write a sentinel value instead",
    ),
    "virtual functions": Refusal(
        "struct S { virtual int f(); };",
        "`virtual` is not supported: Metal has no virtual functions; use a template",
    ),
    "new": Refusal(
        "float* p = new float[4];",
        "`new` is not supported: Metal cannot allocate; declare an array of constant size",
    ),
    "delete": Refusal(
        "delete &x[0];",
        "`delete` is not supported: Metal cannot allocate; declare an array of constant size",
    ),
    "inline assembly": Refusal(
        'asm volatile("nop");',
        "`asm` is not supported: inline assembly runs on one target only; use Metal's functions",
    ),
    "vectors by attribute": Refusal(
        "typedef float f4 __attribute__((ext_vector_type(4)));",
        "`ext_vector_type` is not supported: use Metal's own vectors, such as float4",
    ),
    "thread_local": Refusal(
        "thread_local int k;",
        "`thread_local` is not supported: Metal has none; use a local variable",
    ),
    "textures": Refusal(
        "texture2d<float> t;",
        "`texture2d` is not supported: images cannot be bound by mx.fast.metal_kernel; read "
        "from an array",
    ),
    "samplers": Refusal(
        "constexpr sampler s;",
        "`sampler` is not supported: images cannot be bound by mx.fast.metal_kernel; read "
        "from an array",
    ),
    "depth textures": Refusal(
        "depth2d_array<float> t;",
        "`depth2d_array` is not supported: images cannot be bound by mx.fast.metal_kernel; "
        "read from an array",
    ),
    "function constants": Refusal(
        "constant int k [[function_constant(0)]];",
        "`[[function_constant]]` is not supported: mx.fast.metal_kernel cannot set it; use a "
        "template argument",
    ),
    "ray tracing": Refusal(
        "raytracing::ray r;",
        "`raytracing` is not supported: ray tracing has no counterpart outside Metal",
    ),
    "Metal 4 tensors": Refusal(
        "tensor<device half, extents> t;",
        "`tensor` is not supported: Metal 4 tensors are not available; use simdgroup_matrix "
        "or plain loops",
    ),
    "namespace std": Refusal(
        "std::sort(x, x);",
        "`std` is not supported: Metal has no std; its library is in namespace metal",
    ),
    "initial values of threadgroup variables": Refusal(
        "threadgroup float a[2] = {0, 0};",
        "a threadgroup variable with an initial value is not supported: let one thread store "
        "it, and put a barrier behind",
    ),
    "designated elements of constants": Refusal(
        "const float a[2] = {[0 ... 1] = 1};",
        "designated elements are not supported here: list the values, or declare `a` alone, in a "
        "function and not constant",
    ),
    "some elements designated": Refusal(
        "float a[2] = {[0] = 1, 2};",
        "elements with and without designators are not supported in one list: designate all of "
        "them",
    ),
    "threadgroup variables in lambdas": Refusal(
        "auto f = [&] { threadgroup float a[2]; };",
        "a threadgroup variable outside the kernel's body is not supported: declare it in "
        "the body and pass a pointer",
    ),
    "#include": Refusal(
        "#include <vector>",
        "#include <vector> is not supported: mx.fast.metal_kernel has no include path; paste "
        "the text you need into the header argument",
    ),
    "headers of Metal 4": Refusal(
        "#include <metal_tensor>",
        "#include <metal_tensor> is not supported: zmlx has no such part of Metal's library; leave "
        "it out if nothing of it is used",
    ),
    "#error": Refusal("#error too few of them", "#error too few of them"),
    "#line": Refusal("#line 7", "the directive #line is not supported; remove it"),
    "threadgroup variables in functions": Refusal(
        "float f(float a) {\n  threadgroup float b[2];\n  return a;\n}",
        "a threadgroup variable outside the kernel's body is not supported: declare it in "
        "the body and pass a pointer",
        line=2,
        header=True,
    ),
    "whole kernels as the source": Refusal(
        "kernel void f(device float* out [[buffer(0)]]) { out[0] = 1; }",
        "a whole kernel is not supported here: the source is the inside of one, whose parameters "
        "are the inputs and outputs",
    ),
    "vertex, fragment and mesh functions": Refusal(
        "// one\n/* two\n*/ fragment float f() { return 1; }",
        "`fragment` is not supported: only compute kernels run here",
        line=3,
        header=True,
    ),
    "variables called like keywords": Refusal(
        "float a = 1, device = 2;", "`device` is a keyword of Metal: choose another name"
    ),
    "functions called like keywords": Refusal(
        "float kernel(float a) { return a; }",
        "`kernel` is a keyword of Metal: choose another name",
        line=1,
        header=True,
    ),
    "types called like keywords": Refusal(
        "struct half { float a; };",
        "`half` is a keyword of Metal: choose another name",
        line=1,
        header=True,
    ),
    "values in brackets of a struct without a constructor": Refusal(
        "struct Pair { int a, b; } pair = Pair(1, 2);",
        "several values in brackets are not supported for `Pair`, which has no constructor: put "
        "them in braces",
    ),
    "recursion": Refusal(
        "float f(float a) { return a > 1 ? f(a - 1) : a; }",
        "recursion (`f` calls itself) is not supported: Metal has no call stack; use a loop "
        "or a template",
        line=1,
        header=True,
    ),
    "recursion over several functions": Refusal(
        "float g(float a);\nfloat f(float a) { return g(a); }\nfloat g(float a) { return f(a); }",
        "recursion (`f` calls itself) is not supported: Metal has no call stack; use a loop "
        "or a template",
        line=2,
        header=True,
    ),
    "overloads with different bodies by address space": Refusal(
        "float f(device float* a) { return *a; }\nfloat f(threadgroup float* a) { return -*a; }",
        "overloads of `f` that differ in address space and in their bodies, results or defaults "
        "are not supported: give them different names",
        line=2,
        header=True,
    ),
    "specialisations with different bodies by address space": Refusal(
        "template <typename T> struct S {};\n"
        "template <typename T> struct S<device T*> { enum { id = 1 }; };\n"
        "template <typename T> struct S<threadgroup T*> { enum { id = 2 }; };",
        "specialisations of `S` that differ in address space and in their bases or bodies are "
        "not supported: give them one body",
        line=3,
        header=True,
    ),
    "#if of something unknown": Refusal(
        "#if UNKNOWN(\n#endif", "this #if condition is not an integer constant", line=1, header=True
    ),
    "#if without #endif": Refusal("#ifdef A", "this #if has no #endif", line=1, header=True),
    "#endif without #if": Refusal("#endif", "#endif without #if", line=1, header=True),
    "macros with other arguments": Refusal(
        "#define F(a, b) a\nint k = F(1);",
        "the macro F takes 2 arguments but got 1",
        line=2,
        header=True,
    ),
    "statements without their brackets": Refusal(
        "for int k = 0; k < 3; ++k {}", "no '(' follows `for`"
    ),
    "do without while": Refusal("do out[0] = 1;", "this `do` has no `while`"),
    "brackets that are not closed": Refusal("if (x[0] > 1 { out[1] = 2; }", "'(' is not closed"),
    "brackets that close nothing": Refusal("out[1] = (x[0] + 1));", "')' closes nothing"),
}
