// section vectors; needs base member_alignment; after numbers; tokens vec packed_vec bool2 bool3 bool4 char2 char3 char4 uchar2 uchar3 uchar4 short2 short3 short4 ushort2 ushort3 ushort4 int2 int3 int4 uint2 uint3 uint4 long2 long3 long4 ulong2 ulong3 ulong4 float2 float3 float4 half2 half3 half4 bfloat2 bfloat3 bfloat4 packed_char2 packed_char3 packed_char4 packed_uchar2 packed_uchar3 packed_uchar4 packed_short2 packed_short3 packed_short4 packed_ushort2 packed_ushort3 packed_ushort4 packed_int2 packed_int3 packed_int4 packed_uint2 packed_uint3 packed_uint4 packed_long2 packed_long3 packed_long4 packed_float2 packed_float3 packed_float4 packed_half2 packed_half3 packed_half4 packed_bfloat2 packed_bfloat3 packed_bfloat4
// Metal's vectors: classes, because no C++ compiler's own vectors have both swizzles and
// constructors. Sizes are those of Metal (three components are stored as four).

#define ZK_VECTORS 1

namespace metal {

template <class T, int N>
struct vec {
  static_assert(N == 2, "a vector has 2, 3 or 4 components");
};
template <class T, int N>
struct packed_vec;

// v.zx is written v[zk_swizzle<2, 0>()]; where it is assigned to, v[zk_swizzle_ref<2, 0>()].
template <int... I>
struct zk_swizzle {};
template <int... I>
struct zk_swizzle_ref {};

// Vectors and what stands for one (packed vectors, assignable swizzles) name their vector type.
template <class A>
concept zk_vectorial = requires { typename A::zk_vector; };

// The vector type of an operation: all operands that are vectors share it, scalars are spread.
template <class... A>
struct zk_joined {};
template <zk_vectorial A, class... B>
  requires((__is_same(A, B) || zk_scalar<B> || zk_vectorial<B>) && ...)
struct zk_joined<A, B...> {
  using type = typename A::zk_vector;
};
template <zk_scalar A, class... B>
struct zk_joined<A, B...> : zk_joined<B...> {};
template <class... A>
using zk_join = typename zk_joined<A...>::type;

// Spreads a scalar or copies a vector; other vector types do not convert by themselves.
template <class V, class A>
constexpr METAL_FUNC V zk_spread(A x) {
  V v = x;
  return v;
}

// Operators take no floating scalar beside integers. A macro, because NVRTC loads a vector that
// passes through another function component by component.
template <class A>
inline constexpr bool zk_is_whole = zk_vectorial<A> || zk_counts<A>;
#define ZK_CHECK_OPERANDS(V, A, B)                                                             \
  static_assert(!zk_is_integer<typename V::zk_element> || (zk_is_whole<A> && zk_is_whole<B>), \
                "a floating scalar beside a vector of integers must be converted")

// An operand of a shift, whose two may be vectors of different integers.
template <class V, class A>
constexpr METAL_FUNC V zk_shifted(A x) {
  return zk_spread<V>(x);
}
template <class V, zk_vectorial A>
  requires zk_is_integer<typename A::zk_vector::zk_element>
constexpr METAL_FUNC V zk_shifted(A x) {
  return V(x);
}

template <class T, class S>
concept zk_converts = requires(S x, void (*take)(T)) { take(x); };

template <class A>
inline constexpr int zk_count = 1;
template <zk_vectorial A>
inline constexpr int zk_count<A> = A::zk_vector::zk_lanes;

#ifdef __CUDACC_RTC__
inline void zk_list_too_long() { __trap(); }
#else
[[gnu::error("more values in braces than the vector has components")]] void zk_list_too_long();
#endif

// A component by its number, which a constant cannot read as an element of a union's other member.
template <int N, class V>
constexpr METAL_FUNC auto& zk_component(V& v, int i) {
  if constexpr (N == 2) {
    return i ? v.y : v.x;
  } else if constexpr (N == 3) {
    return i == 0 ? v.x : i == 1 ? v.y : v.z;
  } else {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }
}

// What a list in braces holds: scalars, and vectors for several components.
template <class T>
struct zk_part {
  T at[4];
  int count;
  template <zk_scalar S>
    requires zk_converts<T, S>
  constexpr METAL_FUNC zk_part(S s) : at{T(s)}, count(1) {}
  template <zk_vectorial P>
    requires __is_same(typename P::zk_vector::zk_element, T)
  constexpr METAL_FUNC zk_part(const P& p) : at{}, count(zk_count<P>) {
    typename P::zk_vector v = p;
    for (int k = 0; k < zk_count<P>; ++k) at[k] = v[k];
  }
};

// N components in order, from values one by one or from a list in braces, which may be shorter: the
// others are zeros.
struct zk_apart {};
template <class T, int N>
struct zk_listed {
  T x = T(0), y = T(0), z = T(0), w = T(0);
  template <class... A>
  constexpr METAL_FUNC zk_listed(zk_apart, A... a) {
    int i = 0;
    (add(i, a), ...);
  }
  constexpr METAL_FUNC zk_listed(std::initializer_list<T> list) { read(list); }
  constexpr METAL_FUNC zk_listed(std::initializer_list<zk_part<T>> list) { read(list); }

 private:
  template <class A>
  constexpr METAL_FUNC void add(int& i, A a) {
    if constexpr (zk_vectorial<A>) {
      typename A::zk_vector v = a;
      for (int k = 0; k < zk_count<A>; ++k) zk_component<4>(*this, i++) = T(v[k]);
    } else {
      zk_component<4>(*this, i++) = T(a);
    }
  }
  constexpr METAL_FUNC void add(int& i, const zk_part<T>& part) {
    if (part.count > 0) add(i, part.at[0]);
    if (part.count > 1) add(i, part.at[1]);
    if (part.count > 2) add(i, part.at[2]);
    if (part.count > 3) add(i, part.at[3]);
  }
  // Without a loop, so that the compiler knows the count of whatever it inlines.
  template <class L>
  constexpr METAL_FUNC void read(L list) {
    auto value = list.begin();
    int count = int(list.end() - value), i = 0;
    if (count > 0) add(i, value[0]);
    if (count > 1) add(i, value[1]);
    if (count > 2) add(i, value[2]);
    if (count > 3) add(i, value[3]);
    if (count > 4) i = count;
    if (__builtin_constant_p(i) && i > N) zk_list_too_long();
  }
};

// A V of E(a, x), E(a, y), … for its components.
#define ZK_LANES(V, E, a)                                  \
  if constexpr (V::zk_lanes == 2) {                        \
    return V(E(a, x), E(a, y));                            \
  } else if constexpr (V::zk_lanes == 3) {                 \
    return V(E(a, x), E(a, y), E(a, z));                   \
  } else {                                                 \
    return V(E(a, x), E(a, y), E(a, z), E(a, w));          \
  }

// The part that all vectors share. A scalar converts as it would to T alone, so that bfloat4 from
// a float needs a cast; vectors of other types need one always.
#define ZK_VECTOR_BODY(N)                                                                     \
  using zk_vector = vec;                                                                      \
  using zk_element = T;                                                                       \
  static constexpr int zk_lanes = N;                                                          \
  vec() = default;                                                                            \
  vec(const vec&) = default;                                                                  \
  /* Not to a temporary, such as a swizzle that is read: the value would be lost. */          \
  constexpr vec& operator=(const vec&) & = default;                                           \
  /* `= {x}`: a list in braces clears what it does not say. */                                \
  constexpr METAL_FUNC vec(std::initializer_list<T> list)                                     \
      : vec(zk_from(), zk_listed<T, N>(list)) {}                                              \
  template <class P = zk_part<T>>                                                             \
  constexpr METAL_FUNC vec(std::initializer_list<zk_same<P>> list)                            \
      : vec(zk_from(), zk_listed<T, N>(list)) {}                                              \
  template <zk_scalar S>                                                                      \
  constexpr explicit(!zk_converts<T, S>) METAL_FUNC vec(S s) : vec(zk_all(), T(s)) {}         \
  template <class U>                                                                          \
  constexpr explicit METAL_FUNC vec(const vec<U, N>& v) : vec(zk_from(), v) {}                \
  template <zk_vectorial P>                                                                   \
    requires(zk_count<P> == N && !__is_same(typename P::zk_vector, P) &&                      \
             !__is_same(typename P::zk_vector, vec))                                          \
  constexpr explicit METAL_FUNC vec(const P& p) : vec(typename P::zk_vector(p)) {}            \
  template <class A, class B, class... C>                                                     \
    requires(zk_count<A> + zk_count<B> + (0 + ... + zk_count<C>) == N &&                      \
             2 + sizeof...(C) < N)                                                            \
  constexpr METAL_FUNC vec(A a, B b, C... c)                                                  \
      : vec(zk_from(), zk_listed<T, N>(zk_apart(), a, b, c...)) {}                            \
  constexpr METAL_FUNC T& operator[](int i) {                                                 \
    return __builtin_is_constant_evaluated() ? zk_component<N>(*this, i) : zk_at[i];          \
  }                                                                                           \
  constexpr METAL_FUNC const T& operator[](int i) const {                                     \
    return __builtin_is_constant_evaluated() ? zk_component<N>(*this, i) : zk_at[i];          \
  }                                                                                           \
  template <int... I>                                                                         \
  constexpr METAL_FUNC vec<T, int(sizeof...(I))> operator[](zk_swizzle<I...>) const {         \
    static_assert(((I < N) && ...), "the vector has no such component");                        \
    return vec<T, int(sizeof...(I))>((*this)[I]...);                                          \
  }                                                                                           \
  template <int... I>                                                                         \
  constexpr METAL_FUNC auto operator[](zk_swizzle_ref<I...>) {                                \
    static_assert(((I < N) && ...), "the vector has no such component");                        \
    return zk_reference<T, I...>{zk_start<T>(zk_at)};                                         \
  }                                                                                           \
                                                                                              \
 private:                                                                                     \
  struct zk_all {};                                                                           \
  struct zk_from {};

// A pointer that no list in braces makes: `v.xy = {0}` is of a vector.
template <class T>
struct zk_start {
  T* at;
  explicit constexpr METAL_FUNC zk_start(T* at) : at(at) {}
  constexpr METAL_FUNC T& operator[](int i) const { return at[i]; }
};

// An assignable swizzle; of a swizzle of it, and its components, too.
template <class T, int... I>
struct zk_reference {
  using zk_vector = vec<T, int(sizeof...(I))>;
  zk_start<T> zk_to;
  constexpr METAL_FUNC operator zk_vector() const { return zk_vector(zk_to[I]...); }
  constexpr METAL_FUNC const zk_reference& operator=(zk_vector v) const {
    int k = 0;
    ((zk_to[I] = v[k++]), ...);
    return *this;
  }
  constexpr METAL_FUNC const zk_reference& operator=(const zk_reference& v) const {
    return *this = zk_vector(v);
  }
  constexpr METAL_FUNC T& operator[](int k) const {
    const int at[] = {I...};
    return zk_to[at[k]];
  }
  template <int K>
  constexpr METAL_FUNC T& operator[](zk_swizzle_ref<K>) const {
    return (*this)[K];
  }
  template <int... K>
    requires(sizeof...(K) > 1)
  constexpr METAL_FUNC auto operator[](zk_swizzle_ref<K...>) const {
    constexpr int at[] = {I...};
    return zk_reference<T, at[K]...>{zk_to};
  }
};

template <class T, int N>
struct zk_combined<vec<T, N>> {
  using type = vec<typename zk_combined<T>::type, N>;
};

// Sizes are Metal's, alignments at most 8 where Metal has up to 32: MLX's buffers on the CPU start
// at odd multiples of 8, and a vector that is loaded whole from one must not be taken for aligned.
#ifndef ZK_MOST_ALIGNED
#define ZK_MOST_ALIGNED 8
#endif
template <class T, int N>
inline constexpr unsigned zk_member_alignment<vec<T, N>> = (N == 2 ? 2 : 4) * sizeof(T);
constexpr METAL_FUNC int zk_alignment(int natural) {
  return natural < ZK_MOST_ALIGNED ? natural : ZK_MOST_ALIGNED;
}

template <class T>
struct alignas(zk_alignment(2 * sizeof(T))) vec<T, 2> {
  union {
    struct { T x, y; };
    struct { T r, g; };
    T zk_at[2];
  };
  constexpr METAL_FUNC vec(T x, T y) : x(x), y(y) {}
  ZK_VECTOR_BODY(2)
  constexpr METAL_FUNC vec(zk_all, T s) : x(s), y(s) {}
  template <class V>
  constexpr METAL_FUNC vec(zk_from, const V& v) : x(T(v.x)), y(T(v.y)) {}
};

template <class T>
struct alignas(zk_alignment(4 * sizeof(T))) vec<T, 3> {
  union {
    struct { T x, y, z; };
    struct { T r, g, b; };
    T zk_at[3];
    T zk_stored[4];
  };
  constexpr METAL_FUNC vec(T x, T y, T z) : x(x), y(y), z(z) {}
  ZK_VECTOR_BODY(3)
  constexpr METAL_FUNC vec(zk_all, T s) : x(s), y(s), z(s) {}
  template <class V>
  constexpr METAL_FUNC vec(zk_from, const V& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
};

template <class T>
struct alignas(zk_alignment(4 * sizeof(T))) vec<T, 4> {
  union {
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    T zk_at[4];
  };
  constexpr METAL_FUNC vec(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
  ZK_VECTOR_BODY(4)
  constexpr METAL_FUNC vec(zk_all, T s) : x(s), y(s), z(s), w(s) {}
  template <class V>
  constexpr METAL_FUNC vec(zk_from, const V& v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
};
#undef ZK_VECTOR_BODY

#define ZK_INFIX(op, c) T(p.c op q.c)
#define ZK_COMPARED(op, c) (p.c op q.c)
#define ZK_PREFIX(op, c) T(op p.c)
#define ZK_CHOSEN(_, c) (r.c ? q.c : p.c)

#define ZK_OPERATOR(op, operand)                                 \
  template <class A, class B, class V = zk_join<A, B>>           \
  constexpr METAL_FUNC V operator op(A a, B b) {                 \
    using T = typename V::zk_element;                            \
    ZK_CHECK_OPERANDS(V, A, B);                                  \
    V p = operand<V>(a), q = operand<V>(b);                      \
    ZK_LANES(V, ZK_INFIX, op)                                    \
  }                                                              \
  template <zk_vectorial A, class B, class V = zk_join<A, B>>    \
  constexpr METAL_FUNC A& operator op##=(A& a, B b) {            \
    a = V(a) op b;                                               \
    return a;                                                    \
  }                                                              \
  template <class T, int... I, class B>                          \
  constexpr METAL_FUNC void operator op##=(zk_reference<T, I...>&& a, B b) { \
    a = vec<T, int(sizeof...(I))>(a) op b;                       \
  }
ZK_OPERATOR(+, zk_spread)
ZK_OPERATOR(-, zk_spread)
ZK_OPERATOR(*, zk_spread)
ZK_OPERATOR(/, zk_spread)
ZK_OPERATOR(%, zk_spread)
ZK_OPERATOR(&, zk_spread)
ZK_OPERATOR(|, zk_spread)
ZK_OPERATOR(^, zk_spread)
ZK_OPERATOR(<<, zk_shifted)
ZK_OPERATOR(>>, zk_shifted)
#undef ZK_OPERATOR

#define ZK_COMPARISON(op)                                        \
  template <class A, class B, class V = zk_join<A, B>>           \
  constexpr METAL_FUNC vec<bool, V::zk_lanes> operator op(A a, B b) { \
    using R = vec<bool, V::zk_lanes>;                            \
    ZK_CHECK_OPERANDS(V, A, B);                                  \
    V p = zk_spread<V>(a), q = zk_spread<V>(b);                  \
    ZK_LANES(R, ZK_COMPARED, op)                                 \
  }
ZK_COMPARISON(==)
ZK_COMPARISON(!=)
ZK_COMPARISON(<)
ZK_COMPARISON(>)
ZK_COMPARISON(<=)
ZK_COMPARISON(>=)
ZK_COMPARISON(&&)
ZK_COMPARISON(||)
#undef ZK_COMPARISON
#undef ZK_CHECK_OPERANDS

#define ZK_SIGN(op)                                              \
  template <class T, int N>                                      \
  constexpr METAL_FUNC vec<T, N> operator op(vec<T, N> p) {      \
    using V = vec<T, N>;                                         \
    ZK_LANES(V, ZK_PREFIX, op)                                   \
  }
ZK_SIGN(+)
ZK_SIGN(-)
ZK_SIGN(~)
#undef ZK_SIGN
template <class T, int N>
constexpr METAL_FUNC vec<bool, N> operator!(vec<T, N> v) { return v == T(0); }

#define ZK_STEP(op, sign)                                        \
  template <class T, int... I>                                   \
  constexpr METAL_FUNC auto operator op(zk_reference<T, I...>&& v) { \
    return v = vec<T, int(sizeof...(I))>(v) sign T(1);           \
  }                                                              \
  template <class T, int... I>                                   \
  constexpr METAL_FUNC auto operator op(zk_reference<T, I...>&& v, int) { \
    vec<T, int(sizeof...(I))> before = v;                        \
    v = before sign T(1);                                        \
    return before;                                               \
  }                                                              \
  template <class T, int N>                                      \
  constexpr METAL_FUNC vec<T, N>& operator op(vec<T, N>& v) { return v = v sign T(1); } \
  template <class T, int N>                                      \
  constexpr METAL_FUNC vec<T, N> operator op(vec<T, N>& v, int) { \
    vec<T, N> before = v;                                        \
    v = v sign T(1);                                             \
    return before;                                               \
  }
ZK_STEP(++, +)
ZK_STEP(--, -)
#undef ZK_STEP

template <int N>
constexpr METAL_FUNC bool any(vec<bool, N> v) {
  bool found = false;
  for (int i = 0; i < N; ++i) found |= v[i];
  return found;
}
template <int N>
constexpr METAL_FUNC bool all(vec<bool, N> v) {
  bool found = true;
  for (int i = 0; i < N; ++i) found &= v[i];
  return found;
}

template <zk_vectorial A, class V = zk_join<A>>
constexpr METAL_FUNC V select(A no, zk_same<V> q, vec<bool, V::zk_lanes> r) {
  V p = no;
  ZK_LANES(V, ZK_CHOSEN, )
}
template <zk_vectorial A, class V = zk_join<A>>
constexpr METAL_FUNC V select(A no, zk_same<V> yes, bool choice) {
  return choice ? yes : V(no);
}
template <zk_scalar A, zk_vectorial B, class V = zk_join<B>>
constexpr METAL_FUNC V select(A no, B yes, vec<bool, V::zk_lanes> choice) {
  return select(zk_spread<V>(no), yes, choice);
}

// Vectors in memory without padding or alignment of their own.
template <class T, int N>
struct zk_packed_components;
template <class T>
struct zk_packed_components<T, 2> {
  union {
    struct { T x, y; };
    struct { T r, g; };
  };
};
template <class T>
struct zk_packed_components<T, 3> {
  union {
    struct { T x, y, z; };
    struct { T r, g, b; };
  };
};
template <class T>
struct zk_packed_components<T, 4> {
  union {
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
  };
};
template <class T, int N>
struct packed_vec : zk_packed_components<T, N> {
  using zk_vector = vec<T, N>;
  packed_vec() = default;
  constexpr METAL_FUNC packed_vec(zk_vector v) : zk_packed_components<T, N>{} {
    for (int i = 0; i < N; ++i) (*this)[i] = v[i];
  }
  constexpr METAL_FUNC packed_vec(std::initializer_list<T> list) : packed_vec(zk_vector(list)) {}
  template <class P = zk_part<T>>
  constexpr METAL_FUNC packed_vec(std::initializer_list<zk_same<P>> list)
      : packed_vec(zk_vector(list)) {}
  template <class A, class... B>
  constexpr METAL_FUNC packed_vec(A a, B... b) : packed_vec(zk_vector(a, b...)) {}
  constexpr METAL_FUNC operator zk_vector() const {
    zk_vector v;
    for (int i = 0; i < N; ++i) v[i] = (*this)[i];
    return v;
  }
  constexpr METAL_FUNC T& operator[](int i) {
    return __builtin_is_constant_evaluated() ? zk_component<N>(*this, i) : (&this->x)[i];
  }
  constexpr METAL_FUNC const T& operator[](int i) const {
    return __builtin_is_constant_evaluated() ? zk_component<N>(*this, i) : (&this->x)[i];
  }
  template <int... I>
  constexpr METAL_FUNC vec<T, int(sizeof...(I))> operator[](zk_swizzle<I...>) const {
    return vec<T, int(sizeof...(I))>((*this)[I]...);
  }
  template <int... I>
  constexpr METAL_FUNC auto operator[](zk_swizzle_ref<I...>) {
    return zk_reference<T, I...>{zk_start<T>(&this->x)};
  }
};

#define ZK_VECTOR_NAMES(T)            \
  using T##2 = vec<T, 2>;             \
  using T##3 = vec<T, 3>;             \
  using T##4 = vec<T, 4>;             \
  using packed_##T##2 = packed_vec<T, 2>; \
  using packed_##T##3 = packed_vec<T, 3>; \
  using packed_##T##4 = packed_vec<T, 4>;
ZK_VECTOR_NAMES(bool)
ZK_VECTOR_NAMES(char)
ZK_VECTOR_NAMES(uchar)
ZK_VECTOR_NAMES(short)
ZK_VECTOR_NAMES(ushort)
ZK_VECTOR_NAMES(int)
ZK_VECTOR_NAMES(uint)
ZK_VECTOR_NAMES(long)
ZK_VECTOR_NAMES(ulong)
ZK_VECTOR_NAMES(float)
#ifdef ZK_NUMBERS
ZK_VECTOR_NAMES(half)
ZK_VECTOR_NAMES(bfloat)
#endif
#undef ZK_VECTOR_NAMES

}  // namespace metal

// Vector forms of the functions of later sections.
#define ZK_CALL_1(f, c) f(p.c)
#define ZK_CALL_2(f, c) f(p.c, q.c)
#define ZK_CALL_3(f, c) f(p.c, q.c, r.c)
// By a function of another scope.
#define ZK_VECTOR_1_BY(f, g)                           \
  template <class A, class V = zk_join<A>>             \
  METAL_FUNC V f(A a) {                                \
    V p = a;                                           \
    ZK_LANES(V, ZK_CALL_1, g)                          \
  }
#define ZK_VECTOR_2_BY(f, g)                           \
  template <class A, class B, class V = zk_join<A, B>> \
  METAL_FUNC V f(A a, B b) {                           \
    V p = zk_spread<V>(a), q = zk_spread<V>(b);        \
    ZK_LANES(V, ZK_CALL_2, g)                          \
  }
#define ZK_VECTOR_1(f) ZK_VECTOR_1_BY(f, f)
#define ZK_VECTOR_2(f) ZK_VECTOR_2_BY(f, f)
#define ZK_VECTOR_3(f)                                                         \
  template <class A, class B, class C, class V = zk_join<A, B, C>>             \
  METAL_FUNC V f(A a, B b, C c) {                                              \
    V p = zk_spread<V>(a), q = zk_spread<V>(b), r = zk_spread<V>(c);           \
    ZK_LANES(V, ZK_CALL_3, f)                                                  \
  }
#define ZK_VECTOR_SPLIT(f)                                         \
  template <class T, int N>                                        \
  METAL_FUNC vec<T, N> f(vec<T, N> x, vec<T, N>& rest) {           \
    for (int i = 0; i < N; ++i) x[i] = f(x[i], rest[i]);           \
    return x;                                                      \
  }
#define ZK_VECTOR_TEST(f)                              \
  template <class A, class V = zk_join<A>>             \
  METAL_FUNC vec<bool, V::zk_lanes> f(A a) {           \
    using R = vec<bool, V::zk_lanes>;                  \
    V p = a;                                           \
    ZK_LANES(R, ZK_CALL_1, f)                          \
  }
