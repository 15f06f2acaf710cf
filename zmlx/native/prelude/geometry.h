// section geometry; needs vectors math; tokens dot( cross( length( length_squared( distance( distance_squared( normalize( reflect( refract( faceforward(
// Metal's geometric functions.

namespace metal {

template <zk_vectorial A, class B, class V = zk_join<A, B>>
METAL_FUNC typename V::zk_element dot(A a, B b) {
  V p = a, q = b;
  typename V::zk_element sum = p[0] * q[0];
  for (int i = 1; i < V::zk_lanes; ++i) sum = sum + p[i] * q[i];
  return sum;
}
template <zk_vectorial A, class B, class V = zk_join<A, B>>
METAL_FUNC V cross(A a, B b) {
  static_assert(V::zk_lanes == 3, "cross takes vectors of three components");
  V p = a, q = b;
  return V(p.y * q.z - p.z * q.y, p.z * q.x - p.x * q.z, p.x * q.y - p.y * q.x);
}
template <class T, int N>
METAL_FUNC T length_squared(vec<T, N> v) {
  return dot(v, v);
}
template <class T, int N>
METAL_FUNC T length(vec<T, N> v) {
  return sqrt(dot(v, v));
}
template <class T, int N>
METAL_FUNC T distance_squared(vec<T, N> a, zk_same<vec<T, N>> b) {
  return length_squared(a - b);
}
template <class T, int N>
METAL_FUNC T distance(vec<T, N> a, zk_same<vec<T, N>> b) {
  return length(a - b);
}
template <class T, int N>
METAL_FUNC vec<T, N> normalize(vec<T, N> v) {
  return v * rsqrt(dot(v, v));
}
template <class T, int N>
METAL_FUNC vec<T, N> reflect(vec<T, N> incident, zk_same<vec<T, N>> normal) {
  return incident - T(2) * dot(normal, incident) * normal;
}
// Zero where the light is reflected totally.
template <class T, int N>
METAL_FUNC vec<T, N> refract(vec<T, N> incident, zk_same<vec<T, N>> normal, zk_same<T> eta) {
  T d = dot(normal, incident);
  T k = T(1) - eta * eta * (T(1) - d * d);
  return k < T(0) ? vec<T, N>(T(0)) : eta * incident - (eta * d + sqrt(k)) * normal;
}
template <class T, int N>
METAL_FUNC vec<T, N> faceforward(vec<T, N> normal, zk_same<vec<T, N>> incident,
                                 zk_same<vec<T, N>> reference) {
  return dot(reference, incident) < T(0) ? normal : -normal;
}

}  // namespace metal
