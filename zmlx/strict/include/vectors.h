// Vectors, packed vectors, matrices and arrays of Metal's library, comparisons and `?:` of them.

namespace metal {

template <typename T>
struct zk_shape {
  enum { size = 1, vector = 0 };
  typedef T element;
};
template <typename T, int N>
struct zk_shape<vec<T, N>> {
  enum { size = N, vector = 1 };
  typedef T element;
};

// boolN: what a comparison of vectors in a macro gives converts to it, and nothing else does. clang's own
// vectors of bool have no swizzles, so each of them is a member, of a type that converts to boolN.
struct bool2;
struct bool3;
struct bool4;
#define ZK_OPERATORS(N)                     \
  bool operator[](int) const;               \
  bool##N operator!() const;                \
  bool##N operator&&(bool##N) const;        \
  bool##N operator||(bool##N) const;        \
  bool##N operator&(bool##N) const;         \
  bool##N operator|(bool##N) const;         \
  bool##N operator^(bool##N) const;         \
  bool##N operator==(bool##N) const;        \
  bool##N operator!=(bool##N) const;        \
  template <typename T>                     \
  explicit operator vec<T, N>() const;
#define ZK_SWIZZLE(N, ...)                  \
  struct zk_swizzle##N {                    \
    bool __VA_ARGS__;                       \
    operator bool##N() const;               \
    void operator=(bool##N) thread;         \
    ZK_OPERATORS(N)                         \
  };
ZK_SWIZZLE(2, x, y)
ZK_SWIZZLE(3, x, y, z)
ZK_SWIZZLE(4, x, y, z, w)
// Members for every word of 2, 3 and 4 letters, from 2, 3 and 4 letters.
#define ZK_2(w) zk_swizzle2 w;
#define ZK_3(w) zk_swizzle3 w;
#define ZK_4(w) zk_swizzle4 w;
#define ZK_FROM_2(M, w, a, b) M(w##a) M(w##b)
#define ZK_FROM_3(M, w, a, b, c) M(w##a) M(w##b) M(w##c)
#define ZK_FROM_4(M, w, a, b, c, d) M(w##a) M(w##b) M(w##c) M(w##d)
#define ZK_PAIRS_2(M, w, a, b) ZK_FROM_2(M, w##a, a, b) ZK_FROM_2(M, w##b, a, b)
#define ZK_PAIRS_3(M, w, a, b, c) \
  ZK_FROM_3(M, w##a, a, b, c) ZK_FROM_3(M, w##b, a, b, c) ZK_FROM_3(M, w##c, a, b, c)
#define ZK_PAIRS_4(M, w, a, b, c, d)                            \
  ZK_FROM_4(M, w##a, a, b, c, d) ZK_FROM_4(M, w##b, a, b, c, d) \
  ZK_FROM_4(M, w##c, a, b, c, d) ZK_FROM_4(M, w##d, a, b, c, d)
#define ZK_TRIPLES_2(M, w, a, b) ZK_PAIRS_2(M, w##a, a, b) ZK_PAIRS_2(M, w##b, a, b)
#define ZK_TRIPLES_3(M, w, a, b, c) \
  ZK_PAIRS_3(M, w##a, a, b, c) ZK_PAIRS_3(M, w##b, a, b, c) ZK_PAIRS_3(M, w##c, a, b, c)
#define ZK_TRIPLES_4(M, w, a, b, c, d)                            \
  ZK_PAIRS_4(M, w##a, a, b, c, d) ZK_PAIRS_4(M, w##b, a, b, c, d) \
  ZK_PAIRS_4(M, w##c, a, b, c, d) ZK_PAIRS_4(M, w##d, a, b, c, d)
#define ZK_WORDS_2(a, b)                            \
  ZK_PAIRS_2(ZK_2, , a, b) ZK_TRIPLES_2(ZK_3, , a, b) \
  ZK_TRIPLES_2(ZK_4, a, a, b) ZK_TRIPLES_2(ZK_4, b, a, b)
#define ZK_WORDS_3(a, b, c)                               \
  ZK_PAIRS_3(ZK_2, , a, b, c) ZK_TRIPLES_3(ZK_3, , a, b, c) \
  ZK_TRIPLES_3(ZK_4, a, a, b, c) ZK_TRIPLES_3(ZK_4, b, a, b, c) ZK_TRIPLES_3(ZK_4, c, a, b, c)
#define ZK_WORDS_4(a, b, c, d)                                  \
  ZK_PAIRS_4(ZK_2, , a, b, c, d) ZK_TRIPLES_4(ZK_3, , a, b, c, d) \
  ZK_TRIPLES_4(ZK_4, a, a, b, c, d) ZK_TRIPLES_4(ZK_4, b, a, b, c, d) \
  ZK_TRIPLES_4(ZK_4, c, a, b, c, d) ZK_TRIPLES_4(ZK_4, d, a, b, c, d)
#define ZK_BOOLS(N, WORDS, POSITIONS, COLOURS)                              \
  struct bool##N {                                                          \
    union {                                                                 \
      struct { bool ZK_PLAIN POSITIONS; };                                  \
      struct { bool ZK_PLAIN COLOURS; };                                    \
      struct { WORDS POSITIONS WORDS COLOURS };                             \
    };                                                                      \
    bool##N() = default;                                                    \
    bool##N(bool);                                                          \
    bool##N(char##N);                                                       \
    bool##N(short##N);                                                      \
    bool##N(int##N);                                                        \
    bool##N(long##N);                                                       \
    template <typename T, typename = enable_if_t<!__is_arithmetic(T)>>      \
    explicit bool##N(T);                                                    \
    template <typename A, typename B, typename... C>                        \
    bool##N(A, B, C...);                                                    \
    thread bool& operator[](int) thread;                                    \
    thread bool##N& operator&=(bool##N) thread;                             \
    thread bool##N& operator|=(bool##N) thread;                             \
    thread bool##N& operator^=(bool##N) thread;                             \
    ZK_OPERATORS(N)                                                         \
  };                                                                        \
  bool any(bool##N);                                                        \
  bool all(bool##N);
#define ZK_PLAIN(...) __VA_ARGS__
ZK_BOOLS(2, ZK_WORDS_2, (x, y), (r, g))
ZK_BOOLS(3, ZK_WORDS_3, (x, y, z), (r, g, b))
ZK_BOOLS(4, ZK_WORDS_4, (x, y, z, w), (r, g, b, a))
#undef ZK_BOOLS
bool any(bool);
bool all(bool);

// `a < b`: translate.py passes what a comparison gives through here.
template <typename T>
constexpr enable_if_t<!zk_shape<T>::vector, T> zk_compared(T a) {
  return a;
}
template <typename T>
bool2 zk_compared(vec<T, 2>);
template <typename T>
bool3 zk_compared(vec<T, 3>);
template <typename T>
bool4 zk_compared(vec<T, 4>);

// `float4(...)`: translate.py writes a constructor of a vector as a call of `zk_make`.
template <typename E, typename A>
constexpr enable_if_t<!zk_shape<A>::vector, E> zk_component(A a) {
  return static_cast<E>(a);
}
template <typename E, typename A>
constexpr enable_if_t<zk_shape<A>::vector, A> zk_component(A a) {
  static_assert(__is_same(E, typename zk_shape<A>::element),
                "a vector in a constructor must have the element type of the constructed vector");
  return a;
}
template <typename V>
constexpr V zk_made() {
  return V{};
}
template <typename T>
static constexpr constant bool zk_is_bools =
    __is_same(T, bool2) || __is_same(T, zk_swizzle2) || __is_same(T, bool3) ||
    __is_same(T, zk_swizzle3) || __is_same(T, bool4) || __is_same(T, zk_swizzle4);
template <typename V, typename A>
constexpr enable_if_t<zk_shape<V>::vector && zk_is_bools<A>, V> zk_made(A a) {
  return static_cast<V>(a);
}
template <typename V, typename A>
constexpr enable_if_t<zk_shape<V>::vector && !zk_shape<A>::vector && !zk_is_bools<A>, V> zk_made(A a) {
  return static_cast<V>(static_cast<typename zk_shape<V>::element>(a));
}
template <typename V, typename A>
constexpr enable_if_t<zk_shape<V>::vector && zk_shape<A>::vector, V> zk_made(A a) {
  static_assert(int(zk_shape<V>::size) == int(zk_shape<A>::size),
                "a vector constructor must get as many components as the vector has");
  return __builtin_convertvector(a, V);
}
template <typename V, typename A, typename B, typename... C>
constexpr enable_if_t<zk_shape<V>::vector, V> zk_made(A a, B b, C... c) {
  return V{zk_component<typename zk_shape<V>::element>(a),
           zk_component<typename zk_shape<V>::element>(b),
           zk_component<typename zk_shape<V>::element>(c)...};
}
template <typename V, typename A, typename... B>
constexpr enable_if_t<!zk_shape<V>::vector, V> zk_made(A a, B... b) {
  return V(a, b...);
}
template <typename T, int N>
struct packed_vec;
template <typename A>
constexpr A zk_unpacked(A a) {
  return a;
}
template <typename T, int N>
vec<T, N> zk_unpacked(packed_vec<T, N>);
template <typename V, typename... A>
constexpr V zk_make(A... a) {
  return zk_made<V>(zk_unpacked(a)...);
}

// `c ? a : b`: translate.py has both arms looked at here. A half or bfloat beside another type
// converts one way on Metal and is ambiguous in C++ and CUDA.
template <typename T>
static constexpr constant bool zk_small_v =
    __is_same(typename zk_shape<T>::element, half) || __is_same(typename zk_shape<T>::element, bfloat);
template <typename A, typename B>
struct zk_pair {
  static_assert(__is_same(A, B) || !(zk_small_v<A> || zk_small_v<B>),
                "both arms of ?: must be cast to one type");
};
template <typename A, typename B>
zk_pair<A, B> zk_arms(A, B);

// Subscripts of an object in every space, of one in a constructor, and of a temporary.
#define ZK_ELEMENTS(T, I)                                 \
  thread T& operator[](I) thread&;                        \
  device T& operator[](I) device&;                        \
  threadgroup T& operator[](I) threadgroup&;              \
  const thread T& operator[](I) const thread&;            \
  const device T& operator[](I) const device&;            \
  const threadgroup T& operator[](I) const threadgroup&;  \
  const constant T& operator[](I) const constant&;        \
  T& operator[](I)&;                                      \
  const T& operator[](I) const&;                          \
  T operator[](I) const&&;

// Packed vectors have the alignment of an element. Components by name are there, swizzles are not.
template <typename T, int N>
struct zk_packed_fields;
#define ZK_PACKED_FIELDS(N, FIELDS, RED)      \
  template <typename T>                       \
  struct zk_packed_fields<T, N> {             \
    union {                                   \
      T zk_elements[N];                       \
      struct { T FIELDS; };                   \
      struct { T RED; };                      \
    };                                        \
  };
#define ZK_COMMA ,
ZK_PACKED_FIELDS(2, x ZK_COMMA y, r ZK_COMMA g)
ZK_PACKED_FIELDS(3, x ZK_COMMA y ZK_COMMA z, r ZK_COMMA g ZK_COMMA b)
ZK_PACKED_FIELDS(4, x ZK_COMMA y ZK_COMMA z ZK_COMMA w, r ZK_COMMA g ZK_COMMA b ZK_COMMA a)
#undef ZK_PACKED_FIELDS
template <typename T, int N>
struct packed_vec : zk_packed_fields<T, N> {
  packed_vec() = default;
  packed_vec(vec<T, N>);
  packed_vec(T);
  template <typename A, typename B, typename... C>
  packed_vec(A, B, C...);
  operator vec<T, N>() const;
  operator vec<T, N>() const constant;
  T& operator[](int);
  T operator[](int) const;
  T operator[](int) const constant;
};
template <typename T>
static constexpr constant bool zk_is_packed = false;
template <typename T, int N>
static constexpr constant bool zk_is_packed<packed_vec<T, N>> = true;
#define ZK_PACKED_COMPUTED(op)                                                  \
  template <typename A, typename B,                                             \
            typename = enable_if_t<zk_is_packed<A> || zk_is_packed<B>>>         \
  auto operator op(A a, B b) -> decltype(zk_unpacked(a) op zk_unpacked(b));
#define ZK_PACKED_OPERATOR(op)                                                  \
  ZK_PACKED_COMPUTED(op)                                                        \
  template <typename T, int N, typename B>                                      \
  auto operator op##=(packed_vec<T, N>& a, B b)                                 \
      -> decltype(packed_vec<T, N>(zk_unpacked(a) op zk_unpacked(b)));
ZK_PACKED_OPERATOR(+)
ZK_PACKED_OPERATOR(-)
ZK_PACKED_OPERATOR(*)
ZK_PACKED_OPERATOR(/)
ZK_PACKED_OPERATOR(%)
ZK_PACKED_OPERATOR(&)
ZK_PACKED_OPERATOR(|)
ZK_PACKED_OPERATOR(^)
ZK_PACKED_OPERATOR(<<)
ZK_PACKED_OPERATOR(>>)
ZK_PACKED_COMPUTED(==)
ZK_PACKED_COMPUTED(!=)
ZK_PACKED_COMPUTED(<)
ZK_PACKED_COMPUTED(>)
ZK_PACKED_COMPUTED(<=)
ZK_PACKED_COMPUTED(>=)
#undef ZK_PACKED_OPERATOR
#undef ZK_PACKED_COMPUTED
template <typename T, int N>
vec<T, N> operator-(packed_vec<T, N>);
#define ZK_PACKED(T)                    \
  typedef packed_vec<T, 2> packed_##T##2; \
  typedef packed_vec<T, 3> packed_##T##3; \
  typedef packed_vec<T, 4> packed_##T##4;
ZK_PACKED(char)
ZK_PACKED(uchar)
ZK_PACKED(short)
ZK_PACKED(ushort)
ZK_PACKED(int)
ZK_PACKED(uint)
ZK_PACKED(long)
ZK_PACKED(half)
ZK_PACKED(bfloat)
ZK_PACKED(float)
#undef ZK_PACKED

template <typename T>
using uniform = T;
template <typename T>
constexpr T make_uniform(T x) { return x; }

template <typename T, size_t N>
struct array {
  T zk_elements[N];
  constexpr size_t size() const { return N; }
  constexpr size_t size() const constant { return N; }
  constexpr bool empty() const { return N == 0; }
  constexpr bool empty() const constant { return N == 0; }
#define ZK_READ(space)               \
  const space T& front() const space; \
  const space T& back() const space;  \
  const space T* data() const space;  \
  const space T* begin() const space; \
  const space T* end() const space;
#define ZK_SPACE(space)  \
  space T& front() space; \
  space T& back() space;  \
  space T* data() space;  \
  space T* begin() space; \
  space T* end() space;   \
  ZK_READ(space)
  ZK_SPACE(thread)
  ZK_SPACE(device)
  ZK_SPACE(threadgroup)
  ZK_SPACE()
  ZK_READ(constant)
#undef ZK_SPACE
#undef ZK_READ
  ZK_ELEMENTS(T, size_t)
};

template <typename To, typename From>
constexpr To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of the same size");
  if constexpr (sizeof(To) == sizeof(From)) {
    return __builtin_bit_cast(To, x);
  }
}

}  // namespace metal
using namespace metal;

// Of braces in the head of a loop.
namespace std {
template <typename T>
class initializer_list {
  __decay(const T[1]) first;  // clang wants a pointer without a space
  size_t count;
};
template <typename T>
const thread T* begin(initializer_list<T>);
template <typename T>
const thread T* end(initializer_list<T>);
}  // namespace std
