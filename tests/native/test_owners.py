"""Functions of one name and one parameter list that are defined outside their classes."""

from __future__ import annotations

import mlx.core as mx

import zmlx

HEADER = """
struct A { float k = 1; float f(float x) thread; float operator()(float x); };
struct B { float k = 5; float f(float x) thread; float operator()(float x); };
template <typename T> struct C { T f(T x); };
template <typename T> struct D { T f(T x); };
struct E { float k; float f() thread const; float f() device const; };
namespace p { float f(float x); }
float A::f(float x) thread { return x + k; }
float B::f(float x) thread { return x + k; }
float A::operator()(float x) { return x * 3; }
float B::operator()(float x) { return x - 3; }
template <typename T> T C<T>::f(T x) { return x + 1; }
template <typename T> T D<T>::f(T x) { return x * 2; }
float E::f() thread const { return k; }
float E::f() device const { return k; }
float p::f(float x) { return x / 2; }
int f(int x) { return -x; }
float f(float x) { return x + 100; }
"""

SOURCE = """
float v = x[0];
E e;
e.k = v;
y[0] = A().f(v); y[1] = B().f(v); y[2] = A()(v); y[3] = B()(v); y[4] = C<float>().f(v);
y[5] = D<float>().f(v); y[6] = p::f(v); y[7] = f(v); y[8] = e.f();
"""


def test_functions_of_different_classes_are_different() -> None:
    kernel = zmlx.metal.kernel(
        name="owners", input_names=["x"], output_names=["y"], header=HEADER, source=SOURCE
    )
    y = kernel(mx.array([4.5]), grid=1, output_shapes=[(9,)], output_dtypes=[mx.float32])
    assert y.tolist() == [5.5, 9.5, 13.5, 1.5, 5.5, 9, 2.25, 104.5, 4.5]
