// section simd_one; needs base
// Barriers, simd_* and quad_* for groups of one thread: lane 0 is alone, every function folds away.

namespace metal {

template <class T>
struct zk_operand {
  using type = T;
};
template <class T>
  requires requires { typename T::zk_vector; }
struct zk_operand<T> {
  using type = typename T::zk_vector;
};
template <class T>
using zk_operand_of = typename zk_operand<T>::type;

// What a lane reads from lane `from`: nobody but lane 0 is there.
template <class T>
METAL_FUNC T zk_read_lane(T x, unsigned from) {
  return from == 0 ? x : T(0);
}

#define ZK_OWN(name)                                                                       \
  template <class T> METAL_FUNC zk_operand_of<T> simd_##name(T x) { return x; }            \
  template <class T> METAL_FUNC zk_operand_of<T> quad_##name(T x) { return x; }
ZK_OWN(sum)
ZK_OWN(product)
ZK_OWN(min)
ZK_OWN(max)
ZK_OWN(and)
ZK_OWN(or)
ZK_OWN(xor)
ZK_OWN(broadcast_first)
ZK_OWN(prefix_inclusive_sum)
ZK_OWN(prefix_inclusive_product)
#undef ZK_OWN

#define ZK_READ(name, from)                                                                \
  template <class T> METAL_FUNC zk_operand_of<T> simd_##name(T x, ushort n) {              \
    constexpr unsigned width = 32;                                                         \
    return zk_read_lane<zk_operand_of<T>>(x, from);                                        \
  }                                                                                        \
  template <class T> METAL_FUNC zk_operand_of<T> quad_##name(T x, ushort n) {              \
    constexpr unsigned width = 4;                                                          \
    return zk_read_lane<zk_operand_of<T>>(x, from);                                        \
  }
ZK_READ(broadcast, n)
ZK_READ(shuffle, n)
ZK_READ(shuffle_xor, n)
ZK_READ(shuffle_up, 0)
ZK_READ(shuffle_down, n < width ? n : 0)
ZK_READ(shuffle_rotate_up, (0u - n) % width)
ZK_READ(shuffle_rotate_down, n % width)
#undef ZK_READ

#define ZK_LONE(kind, width)                                                               \
  template <class T>                                                                       \
  METAL_FUNC zk_operand_of<T> kind##_shuffle_and_fill_up(T x, T filling, ushort delta,     \
                                                         ushort modulo = width) {          \
    using V = zk_operand_of<T>;                                                            \
    return delta ? zk_read_lane<V>(filling, modulo - delta) : V(x);                        \
  }                                                                                        \
  template <class T>                                                                       \
  METAL_FUNC zk_operand_of<T> kind##_shuffle_and_fill_down(T x, T filling, ushort delta,   \
                                                           ushort modulo = width) {        \
    using V = zk_operand_of<T>;                                                            \
    return delta < modulo ? zk_read_lane<V>(x, delta) : zk_read_lane<V>(filling, delta - modulo);\
  }                                                                                        \
  template <class T> METAL_FUNC zk_operand_of<T> kind##_prefix_exclusive_sum(T) {          \
    return zk_operand_of<T>(0);                                                            \
  }                                                                                        \
  template <class T> METAL_FUNC zk_operand_of<T> kind##_prefix_exclusive_product(T) {      \
    return zk_operand_of<T>(1);                                                            \
  }                                                                                        \
  METAL_FUNC bool kind##_all(bool x) { return x; }                                         \
  METAL_FUNC bool kind##_any(bool x) { return x; }                                         \
  METAL_FUNC bool kind##_is_first() { return true; }                                       \
  METAL_FUNC bool kind##_is_helper_thread() { return false; }                              \
  class kind##_vote {                                                                      \
   public:                                                                                 \
    using vote_t = zk_##kind##_vote_bits;                                                  \
    explicit constexpr kind##_vote(vote_t votes = 0) : votes_(votes) {}                    \
    explicit constexpr operator vote_t() const { return votes_; }                          \
    constexpr bool all() const { return votes_ & 1; }                                      \
    constexpr bool any() const { return votes_ & 1; }                                      \
                                                                                           \
   private:                                                                                \
    vote_t votes_;                                                                         \
  };                                                                                       \
  METAL_FUNC kind##_vote kind##_ballot(bool x) { return kind##_vote(x); }                  \
  METAL_FUNC kind##_vote kind##_active_threads_mask() { return kind##_vote(1); }
using zk_simd_vote_bits = ulong;
using zk_quad_vote_bits = uint;
ZK_LONE(simd, 32)
ZK_LONE(quad, 4)
#undef ZK_LONE

METAL_FUNC void threadgroup_barrier(mem_flags) {}
METAL_FUNC void simdgroup_barrier(mem_flags) {}
METAL_FUNC void threadgroup_barrier(mem_flags, thread_scope) {}
METAL_FUNC void simdgroup_barrier(mem_flags, thread_scope) {}

}  // namespace metal
