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
template <zk_vectorial A, class V = zk_join<A>, class T = typename V::zk_element>
METAL_FUNC T length_squared(A a) {
  return dot(a, a);
}
template <zk_vectorial A, class V = zk_join<A>, class T = typename V::zk_element>
METAL_FUNC T length(A a) {
  return sqrt(dot(a, a));
}
template <zk_vectorial A, class V = zk_join<A>, class T = typename V::zk_element>
METAL_FUNC T distance_squared(A a, zk_same<V> b) {
  return length_squared(a - b);
}
template <zk_vectorial A, class V = zk_join<A>, class T = typename V::zk_element>
METAL_FUNC T distance(A a, zk_same<V> b) {
  return length(a - b);
}
template <zk_vectorial A, class V = zk_join<A>>
METAL_FUNC V normalize(A a) {
  return a * rsqrt(dot(a, a));
}
template <zk_vectorial A, class V = zk_join<A>, class T = typename V::zk_element>
METAL_FUNC V reflect(A incident, zk_same<V> normal) {
  return incident - T(2) * dot(normal, incident) * normal;
}
// Zero where the light is reflected totally.
template <zk_vectorial A, class V = zk_join<A>, class T = typename V::zk_element>
METAL_FUNC V refract(A incident, zk_same<V> normal, zk_same<T> eta) {
  T d = dot(normal, incident);
  T k = T(1) - eta * eta * (T(1) - d * d);
  return k < T(0) ? V(T(0)) : eta * incident - (eta * d + sqrt(k)) * normal;
}
template <zk_vectorial A, class V = zk_join<A>, class T = typename V::zk_element>
METAL_FUNC V faceforward(A normal, zk_same<V> incident, zk_same<V> reference) {
  V n = normal;
  return dot(reference, incident) < T(0) ? n : -n;
}

}  // namespace metal
