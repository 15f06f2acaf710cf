// section integers; needs math; tokens popcount( clz( ctz( reverse_bits( rotate( extract_bits( insert_bits( absdiff( addsat( subsat( mulhi( mul24( mad24( madhi( madsat( hadd( rhadd(
// Metal's integer functions, for every integer type and, by component, for vectors.

namespace metal {

template <class T>
inline constexpr int zk_width = 8 * sizeof(T);
template <class T>
inline constexpr bool zk_is_signed = T(-1) < T(0);

// The unsigned type of the same size, and a type of that sign that holds every product.
template <int bytes, bool with_sign>
struct zk_kin;
#define ZK_KIN(bytes, with_sign, same, wider) \
  template <>                                 \
  struct zk_kin<bytes, with_sign> {           \
    using bits = same;                        \
    using wide = wider;                       \
  };
ZK_KIN(1, true, uchar, int)
ZK_KIN(1, false, uchar, uint)
ZK_KIN(2, true, ushort, long)
ZK_KIN(2, false, ushort, ulong)
ZK_KIN(4, true, uint, long)
ZK_KIN(4, false, uint, ulong)
ZK_KIN(8, true, ulong, __int128)
ZK_KIN(8, false, ulong, unsigned __int128)
#undef ZK_KIN
template <class T>
using zk_bits = typename zk_kin<sizeof(T), zk_is_signed<T>>::bits;
template <class T>
using zk_wide = typename zk_kin<sizeof(T), zk_is_signed<T>>::wide;

template <class T>
inline constexpr T zk_largest = zk_is_signed<T> ? T(zk_bits<T>(-1) >> 1) : T(-1);
template <class T>
inline constexpr T zk_smallest = T(~zk_largest<T>);

template <zk_integer T>
constexpr METAL_FUNC T popcount(T x) {
  return T(__builtin_popcountll(zk_bits<T>(x)));
}
template <zk_integer T>
constexpr METAL_FUNC T clz(T x) {
  return x ? T(__builtin_clzll(zk_bits<T>(x)) - (64 - zk_width<T>)) : T(zk_width<T>);
}
template <zk_integer T>
constexpr METAL_FUNC T ctz(T x) {
  return x ? T(__builtin_ctzll(zk_bits<T>(x))) : T(zk_width<T>);
}
template <zk_integer T>
constexpr METAL_FUNC T reverse_bits(T x) {
  ulong b = zk_bits<T>(x);
  b = (b >> 1 & 0x5555555555555555ul) | (b & 0x5555555555555555ul) << 1;
  b = (b >> 2 & 0x3333333333333333ul) | (b & 0x3333333333333333ul) << 2;
  b = (b >> 4 & 0x0f0f0f0f0f0f0f0ful) | (b & 0x0f0f0f0f0f0f0f0ful) << 4;
  return T(__builtin_bswap64(b) >> (64 - zk_width<T>));
}
template <zk_integer T>
constexpr METAL_FUNC T rotate(T x, T by) {
  uint n = uint(by) % zk_width<T>;
  zk_bits<T> b = x;
  return T(zk_bits<T>(b << n) | (n ? b >> (zk_width<T> - n) : 0));
}
// `bits` bits from bit `offset` on, with the sign of their highest where T is signed.
template <zk_integer T>
constexpr METAL_FUNC T extract_bits(T x, uint offset, uint bits) {
  if (bits == 0) return 0;
  uint unused = zk_width<T> - bits;
  return T(T(zk_bits<T>(x) << (unused - offset)) >> unused);
}
template <zk_integer T>
constexpr METAL_FUNC T insert_bits(T base, T insert, uint offset, uint bits) {
  if (bits == 0) return base;
  zk_bits<T> mask = zk_bits<T>(zk_bits<T>(-1) >> (zk_width<T> - bits)) << offset;
  return T((base & ~mask) | ((zk_bits<T>(insert) << offset) & mask));
}

template <zk_integer T>
constexpr METAL_FUNC zk_bits<T> absdiff(T x, T y) {
  return x < y ? zk_bits<T>(y) - zk_bits<T>(x) : zk_bits<T>(x) - zk_bits<T>(y);
}
template <class T>
constexpr METAL_FUNC T zk_saturate(zk_wide<T> x) {
  zk_wide<T> low = zk_smallest<T>, high = zk_largest<T>;
  return T(x < low ? low : x > high ? high : x);
}
template <zk_integer T>
constexpr METAL_FUNC T addsat(T x, T y) {
  return zk_saturate<T>(zk_wide<T>(x) + zk_wide<T>(y));
}
template <zk_integer T>
constexpr METAL_FUNC T subsat(T x, T y) {
  return !zk_is_signed<T> && x < y ? T(0) : zk_saturate<T>(zk_wide<T>(x) - zk_wide<T>(y));
}
template <zk_integer T>
constexpr METAL_FUNC T mulhi(T x, T y) {
  return T(zk_wide<T>(x) * zk_wide<T>(y) >> zk_width<T>);
}
template <zk_integer T>
constexpr METAL_FUNC T madhi(T x, T y, T z) {
  return T(zk_bits<T>(mulhi(x, y)) + zk_bits<T>(z));
}
template <zk_integer T>
constexpr METAL_FUNC T madsat(T x, T y, T z) {
  return zk_saturate<T>(zk_wide<T>(x) * zk_wide<T>(y) + zk_wide<T>(z));
}
template <zk_integer T>
constexpr METAL_FUNC T hadd(T x, T y) {
  return T((zk_wide<T>(x) + zk_wide<T>(y)) >> 1);
}
template <zk_integer T>
constexpr METAL_FUNC T rhadd(T x, T y) {
  return T((zk_wide<T>(x) + zk_wide<T>(y) + 1) >> 1);
}
// The low 24 bits of each factor.
template <zk_integer T>
constexpr METAL_FUNC T mul24(T x, T y) {
  static_assert(sizeof(T) == 4, "mul24 takes int or uint");
  return T(zk_bits<T>(T(zk_bits<T>(x) << 8) >> 8) * zk_bits<T>(T(zk_bits<T>(y) << 8) >> 8));
}
template <zk_integer T>
constexpr METAL_FUNC T mad24(T x, T y, T z) {
  return T(zk_bits<T>(mul24(x, y)) + zk_bits<T>(z));
}

ZK_VECTOR_1(popcount)
ZK_VECTOR_1(clz)
ZK_VECTOR_1(ctz)
ZK_VECTOR_1(reverse_bits)
ZK_VECTOR_2(rotate)
ZK_VECTOR_2(addsat)
ZK_VECTOR_2(subsat)
ZK_VECTOR_2(mulhi)
ZK_VECTOR_3(madhi)
ZK_VECTOR_3(madsat)
ZK_VECTOR_2(hadd)
ZK_VECTOR_2(rhadd)
ZK_VECTOR_2(mul24)
ZK_VECTOR_3(mad24)
#ifdef ZK_VECTORS
template <class A, class B, class V = zk_join<A, B>>
METAL_FUNC auto absdiff(A a, B b) {
  using R = vec<zk_bits<typename V::zk_element>, V::zk_lanes>;
  V p = zk_spread<V>(a), q = zk_spread<V>(b);
  ZK_LANES(R, ZK_CALL_2, absdiff)
}
template <class T, int N>
constexpr METAL_FUNC vec<T, N> extract_bits(vec<T, N> x, uint offset, uint bits) {
  for (int i = 0; i < N; ++i) x[i] = extract_bits(x[i], offset, bits);
  return x;
}
template <class T, int N>
constexpr METAL_FUNC vec<T, N> insert_bits(vec<T, N> base, vec<T, N> insert, uint offset,
                                           uint bits) {
  for (int i = 0; i < N; ++i) base[i] = insert_bits(base[i], insert[i], offset, bits);
  return base;
}
#endif

}  // namespace metal
