// section simd; needs math; tokens threadgroup_barrier simdgroup_barrier simd_sum simd_product simd_min simd_max simd_and simd_or simd_xor simd_broadcast simd_broadcast_first simd_shuffle simd_shuffle_xor simd_shuffle_up simd_shuffle_down simd_shuffle_rotate_up simd_shuffle_rotate_down simd_shuffle_and_fill_up simd_shuffle_and_fill_down simd_ballot simd_all simd_any simd_is_first simd_is_helper_thread simd_active_threads_mask simd_prefix_inclusive_sum simd_prefix_exclusive_sum simd_prefix_inclusive_product simd_prefix_exclusive_product simd_vote quad_sum quad_product quad_min quad_max quad_and quad_or quad_xor quad_broadcast quad_broadcast_first quad_shuffle quad_shuffle_xor quad_shuffle_up quad_shuffle_down quad_shuffle_rotate_up quad_shuffle_rotate_down quad_shuffle_and_fill_up quad_shuffle_and_fill_down quad_ballot quad_all quad_any quad_is_first quad_is_helper_thread quad_active_threads_mask quad_prefix_inclusive_sum quad_prefix_exclusive_sum quad_prefix_inclusive_product quad_prefix_exclusive_product quad_vote
// simd_* and quad_*, barriers. The rewriter passes each of them what it found out about the place
// it is called at, a zk_flow, from which it knows which lanes take part.

namespace metal {

// By what the control flow around a call, and the returns before it, depend on a thread: 0 on
// nothing, 1 on nothing but its y and z in the group, 2 on something else.
template <int Control, int Exits>
struct zk_flow {};

// Lanes of this simdgroup that exist: the last simdgroup of a group may be short.
METAL_FUNC unsigned zk_existing_lanes() {
  if constexpr (ZK_FULL_SIMD) return 0xffffffffu;
  unsigned index = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  unsigned left = zk_group_threads - index / 32 * 32;
  return left < 32 ? (1u << left) - 1 : 0xffffffffu;
}

// The lanes that take part in an operation.
struct zk_lanes {
  unsigned mask;
  bool full;

  template <int Control, int Exits>
  METAL_FUNC zk_lanes(zk_flow<Control, Exits>) {
    if constexpr (Control > ZK_SIMD_ROWS) {
      // Where the lanes part, those that came together.
      mask = zk_intrinsic_active();
    } else if constexpr (Exits > ZK_SIMD_ROWS || !ZK_FULL_SIMD) {
      // All that have not left the kernel.
      mask = zk_intrinsic_ballot(0xffffffffu, true);
    } else {
      mask = 0xffffffffu;
    }
    full = mask == 0xffffffffu;
  }
};

// A barrier of CUDA orders memory for its group; for the other groups a fence does. They are meant
// where device memory is, too: kernels count the groups that are done behind such a barrier.
METAL_FUNC void zk_order(mem_flags flags) {
  if ((flags & mem_flags::mem_device) != mem_flags::mem_none) zk_intrinsic_fence_device();
}

template <int Control, int Exits>
METAL_FUNC void threadgroup_barrier(zk_flow<Control, Exits>, mem_flags flags) {
  zk_order(flags);
  if constexpr (Control > ZK_SIMD_ROWS) {
    zk_intrinsic_meet_apart();
  } else {
    zk_intrinsic_meet_group();
  }
}
template <int Control, int Exits>
METAL_FUNC void simdgroup_barrier(zk_flow<Control, Exits>, mem_flags flags) {
  zk_order(flags);
  zk_intrinsic_meet_simd(Control > ZK_SIMD_ROWS ? zk_intrinsic_active() : 0xffffffffu);
}
template <class Flow>
METAL_FUNC void threadgroup_barrier(Flow flow, mem_flags flags, thread_scope scope) {
  if (scope == thread_scope_device) zk_intrinsic_fence_device();
  threadgroup_barrier(flow, flags);
}
template <class Flow>
METAL_FUNC void simdgroup_barrier(Flow flow, mem_flags flags, thread_scope scope) {
  if (scope == thread_scope_device) zk_intrinsic_fence_device();
  simdgroup_barrier(flow, flags);
}

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

// A value as words, filled up at its end.
template <int count>
struct zk_words {
  unsigned word[count];
};
template <class T, int missing>
struct zk_filled {
  T value;
  char rest[missing];
};
template <class T>
struct zk_filled<T, 0> {
  T value;
};

// What another lane holds: `read` takes a word of it.
template <class T, class Read>
METAL_FUNC T zk_read(T x, Read read) {
  if constexpr (sizeof(T) == 4) {
    return as_type<T>(read(as_type<unsigned>(x)));
  } else if constexpr (sizeof(T) == 2) {
    return as_type<T>(ushort(read(as_type<ushort>(x))));
  } else if constexpr (sizeof(T) == 1) {
    return as_type<T>(uchar(read(as_type<uchar>(x))));
  } else {
    constexpr int count = (sizeof(T) + 3) / 4;
    using Filled = zk_filled<T, 4 * count - int(sizeof(T))>;
    auto words = __builtin_bit_cast(zk_words<count>, Filled{x});
    for (int i = 0; i < count; ++i) words.word[i] = read(words.word[i]);
    return __builtin_bit_cast(Filled, words).value;
  }
}
template <class T>
METAL_FUNC T zk_from(zk_lanes lanes, T x, unsigned lane) {
  return zk_read(x, [=](unsigned word) { return zk_intrinsic_shuffle(lanes.mask, word, lane); });
}
template <class T>
METAL_FUNC T zk_from_xor(zk_lanes lanes, T x, unsigned bits) {
  return zk_read(
      x, [=](unsigned word) { return zk_intrinsic_shuffle_xor(lanes.mask, word, bits); });
}

struct zk_add {
  template <class T>
  METAL_FUNC T operator()(T a, T b) const {
    return T(a + b);
  }
};
struct zk_multiply {
  template <class T>
  METAL_FUNC T operator()(T a, T b) const {
    return T(a * b);
  }
};
struct zk_least {
  template <class T>
  METAL_FUNC T operator()(T a, T b) const {
    return min(a, b);
  }
};
struct zk_greatest {
  template <class T>
  METAL_FUNC T operator()(T a, T b) const {
    return max(a, b);
  }
};
struct zk_both {
  template <class T>
  METAL_FUNC T operator()(T a, T b) const {
    return T(a & b);
  }
};
struct zk_either {
  template <class T>
  METAL_FUNC T operator()(T a, T b) const {
    return T(a | b);
  }
};
struct zk_one_of {
  template <class T>
  METAL_FUNC T operator()(T a, T b) const {
    return T(a ^ b);
  }
};

// Reduces over the lanes of a simdgroup (width 32) or quadgroup (4). Exchanges in a butterfly give
// every lane the same bits; if lanes are missing, those that are there are taken in order.
template <int width, class Op, class T>
METAL_FUNC T zk_reduce(zk_lanes lanes, T x, Op op) {
  using A = typename zk_combined<T>::type;
  if constexpr (!__is_same(A, T)) return T(zk_reduce<width>(lanes, A(x), op));
  if (lanes.full) {
    for (unsigned bit = width / 2; bit > 0; bit /= 2) x = op(x, zk_from_xor(lanes, x, bit));
    return x;
  }
  unsigned begin = zk_lane() & (32 - width);
  T result = x;
  bool started = false;
#pragma unroll 1
  for (unsigned lane = begin; lane < begin + width; ++lane) {
    T other = zk_from(lanes, x, lane);
    if (!(lanes.mask >> lane & 1)) continue;
    result = started ? op(result, other) : other;
    started = true;
  }
  return result;
}

// The reduction over the lanes up to this one, or before it if not `inclusive`.
template <int width, bool inclusive, class Op, class T>
METAL_FUNC T zk_scan(zk_lanes lanes, T x, T identity, Op op) {
  using A = typename zk_combined<T>::type;
  if constexpr (!__is_same(A, T)) {
    return T(zk_scan<width, inclusive>(lanes, A(x), A(identity), op));
  }
  unsigned lane = zk_lane(), place = lane % width;
  if (lanes.full) {
    T sum = x;
    for (unsigned step = 1; step < width; step *= 2) {
      T before = zk_from(lanes, sum, lane - step);
      if (place >= step) sum = op(before, sum);
    }
    if (inclusive) return sum;
    T before = zk_from(lanes, sum, lane - 1);
    return place == 0 ? identity : before;
  }
  T sum = identity;
#pragma unroll 1
  for (unsigned i = 0; i < width; ++i) {
    unsigned other = lane - place + i;
    T value = zk_from(lanes, x, other);
    if ((lanes.mask >> other & 1) && (inclusive ? i <= place : i < place)) sum = op(sum, value);
  }
  return sum;
}

// The lane that a shuffle reads, and for the forms that fill whether it reads the filling.
template <int width, class T>
METAL_FUNC T zk_fill(zk_lanes lanes, T x, T filling, int delta, int modulo) {
  unsigned lane = zk_lane();
  int place = int(lane % width) % modulo, begin = int(lane) - place, wanted = place - delta;
  bool inside = wanted >= 0 && wanted < modulo;
  T own = zk_from(lanes, x, begin + wanted);
  T other = zk_from(lanes, filling, begin + wanted + (delta > 0 ? modulo : -modulo));
  return inside ? own : other;
}

#define ZK_REDUCTION(name, Op)                                                                   \
  template <class T>                                                                             \
  METAL_FUNC zk_operand_of<T> simd_##name(zk_lanes lanes, T x) {                                 \
    return zk_reduce<32>(lanes, zk_operand_of<T>(x), Op());                                      \
  }                                                                                              \
  template <class T>                                                                             \
  METAL_FUNC zk_operand_of<T> quad_##name(zk_lanes lanes, T x) {                                 \
    return zk_reduce<4>(lanes, zk_operand_of<T>(x), Op());                                       \
  }
ZK_REDUCTION(sum, zk_add)
ZK_REDUCTION(product, zk_multiply)
ZK_REDUCTION(min, zk_least)
ZK_REDUCTION(max, zk_greatest)
ZK_REDUCTION(and, zk_both)
ZK_REDUCTION(or, zk_either)
ZK_REDUCTION(xor, zk_one_of)
#undef ZK_REDUCTION

#define ZK_SCAN(name, inclusive, identity, Op)                                                   \
  template <class T>                                                                             \
  METAL_FUNC zk_operand_of<T> simd_prefix_##name(zk_lanes lanes, T x) {                          \
    using V = zk_operand_of<T>;                                                                  \
    return zk_scan<32, inclusive>(lanes, V(x), V(identity), Op());                               \
  }                                                                                              \
  template <class T>                                                                             \
  METAL_FUNC zk_operand_of<T> quad_prefix_##name(zk_lanes lanes, T x) {                          \
    using V = zk_operand_of<T>;                                                                  \
    return zk_scan<4, inclusive>(lanes, V(x), V(identity), Op());                                \
  }
ZK_SCAN(inclusive_sum, true, 0, zk_add)
ZK_SCAN(exclusive_sum, false, 0, zk_add)
ZK_SCAN(inclusive_product, true, 1, zk_multiply)
ZK_SCAN(exclusive_product, false, 1, zk_multiply)
#undef ZK_SCAN

// `from` is the place in the group of `width` lanes, of which this lane's is `place`.
#define ZK_SHUFFLE(name, from)                                                                   \
  template <class T>                                                                             \
  METAL_FUNC zk_operand_of<T> simd_##name(zk_lanes lanes, T x, ushort n) {                       \
    constexpr unsigned width = 32;                                                               \
    unsigned place = zk_lane();                                                                  \
    return zk_from(lanes, zk_operand_of<T>(x), from);                                            \
  }                                                                                              \
  template <class T>                                                                             \
  METAL_FUNC zk_operand_of<T> quad_##name(zk_lanes lanes, T x, ushort n) {                       \
    constexpr unsigned width = 4;                                                                \
    unsigned lane = zk_lane(), place = lane % 4;                                                 \
    return zk_from(lanes, zk_operand_of<T>(x), lane - place + (from));                           \
  }
ZK_SHUFFLE(broadcast, n % width + 0 * place)
ZK_SHUFFLE(shuffle, n % width + 0 * place)
ZK_SHUFFLE(shuffle_xor, (place ^ n) % width)
ZK_SHUFFLE(shuffle_up, place >= n ? place - n : place)
ZK_SHUFFLE(shuffle_down, place + n < width ? place + n : place)
ZK_SHUFFLE(shuffle_rotate_up, (place - n) % width)
ZK_SHUFFLE(shuffle_rotate_down, (place + n) % width)
#undef ZK_SHUFFLE

using zk_simd_vote_bits = ulong;
using zk_quad_vote_bits = uint;

// Of the lanes of a simdgroup, those of this lane's group of `width`.
template <int width>
METAL_FUNC unsigned zk_own(unsigned lanes) {
  return lanes >> (zk_lane() & (32 - width)) & (0xffffffffu >> (32 - width));
}

#define ZK_VOTES(kind, width)                                                                     \
  template <class T>                                                                              \
  METAL_FUNC zk_operand_of<T> kind##_broadcast_first(zk_lanes lanes, T x) {                       \
    unsigned first = __ffs(int(zk_own<width>(lanes.mask))) - 1;                                   \
    return zk_from(lanes, zk_operand_of<T>(x), (zk_lane() & (32 - width)) + first);               \
  }                                                                                               \
  template <class T>                                                                              \
  METAL_FUNC zk_operand_of<T> kind##_shuffle_and_fill_up(zk_lanes lanes, T x, zk_same<T> filling, \
                                                         ushort delta, ushort modulo = width) {   \
    using V = zk_operand_of<T>;                                                                   \
    return zk_fill<width>(lanes, V(x), V(filling), delta, modulo);                                \
  }                                                                                               \
  template <class T>                                                                              \
  METAL_FUNC zk_operand_of<T> kind##_shuffle_and_fill_down(zk_lanes lanes, T x,                   \
                                                           zk_same<T> filling, ushort delta,      \
                                                           ushort modulo = width) {               \
    using V = zk_operand_of<T>;                                                                   \
    return zk_fill<width>(lanes, V(x), V(filling), -int(delta), modulo);                          \
  }                                                                                               \
  class kind##_vote {                                                                             \
   public:                                                                                        \
    using vote_t = zk_##kind##_vote_bits;                                                         \
    explicit constexpr METAL_FUNC kind##_vote(vote_t votes = 0) : votes_(votes) {}                \
    explicit constexpr METAL_FUNC operator vote_t() const { return votes_; }                      \
    METAL_FUNC bool all() const { return (~votes_ & existing()) == 0; }                           \
    METAL_FUNC bool any() const { return (votes_ & existing()) != 0; }                            \
                                                                                                  \
   private:                                                                                       \
    METAL_FUNC unsigned existing() const { return zk_own<width>(zk_existing_lanes()); }           \
                                                                                                  \
    vote_t votes_;                                                                                \
  };                                                                                              \
  METAL_FUNC kind##_vote kind##_ballot(zk_lanes lanes, bool x) {                                  \
    return kind##_vote(zk_own<width>(zk_intrinsic_ballot(lanes.mask, x)));                        \
  }                                                                                               \
  METAL_FUNC kind##_vote kind##_active_threads_mask(zk_lanes lanes) {                             \
    return kind##_ballot(lanes, true);                                                            \
  }                                                                                               \
  METAL_FUNC bool kind##_any(zk_lanes lanes, bool x) {                                            \
    return zk_own<width>(zk_intrinsic_ballot(lanes.mask, x)) != 0;                                \
  }                                                                                               \
  METAL_FUNC bool kind##_all(zk_lanes lanes, bool x) { return !kind##_any(lanes, !x); }           \
  METAL_FUNC bool kind##_is_first(zk_lanes lanes) {                                               \
    unsigned before = (1u << zk_lane()) - (1u << (zk_lane() & (32 - width)));                     \
    return !(lanes.mask & before);                                                                \
  }                                                                                               \
  METAL_FUNC bool kind##_is_helper_thread() { return false; }
ZK_VOTES(simd, 32)
ZK_VOTES(quad, 4)
#undef ZK_VOTES

}  // namespace metal
