// Metal's functions between threads: barriers, simdgroups, quadgroups, atomics, simdgroup matrices.

namespace metal {

enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(uint(a) & uint(b)); }
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device,
};
enum memory_order {
  memory_order_relaxed,
#if ZK_METAL_VERSION >= 320
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst,
#endif
};

void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
#if ZK_METAL_VERSION >= 320
void threadgroup_barrier(mem_flags, thread_scope);
void simdgroup_barrier(mem_flags, thread_scope);
void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device);
#endif

// ---- simdgroups and quadgroups ----------------------------------------------------------------

// Types that travel between lanes: 8- to 32-bit numbers and their vectors. bool and 64-bit forms of
// some functions come from MLX (utilities.h), and so do the bfloat forms for simdgroups.
template <typename E>
static constexpr constant bool zk_travels_v =
    __is_same(E, half) || __is_same(E, float) ||
    (__is_integral(E) && !__is_same(E, bool) && sizeof(E) <= 4);
template <typename T>
using zk_lane = enable_if_t<zk_travels_v<typename zk_shape<T>::element>, T>;
template <typename T>
using zk_lane_or_bfloat =
    enable_if_t<zk_travels_v<typename zk_shape<T>::element> || __is_same(T, bfloat), T>;
template <typename T>
using zk_lane_integer = enable_if_t<zk_travels_v<typename zk_shape<T>::element> &&
                                        __is_integral(typename zk_shape<T>::element), T>;

#define ZK_LANES(group, LANE)                                                                    \
  template <typename T> LANE<T> group##_broadcast(T, ushort);                   \
  template <typename T> zk_lane<T> group##_broadcast_first(T);                               \
  template <typename T> LANE<T> group##_shuffle(T, ushort);                     \
  template <typename T> LANE<T> group##_shuffle_xor(T, ushort);                 \
  template <typename T> LANE<T> group##_shuffle_up(T, ushort);                  \
  template <typename T> LANE<T> group##_shuffle_down(T, ushort);                \
  template <typename T> LANE<T> group##_shuffle_rotate_up(T, ushort);           \
  template <typename T> LANE<T> group##_shuffle_rotate_down(T, ushort);         \
  template <typename T> LANE<T> group##_shuffle_and_fill_up(T, T, ushort);      \
  template <typename T> LANE<T> group##_shuffle_and_fill_down(T, T, ushort);    \
  template <typename T>                                                                      \
  LANE<T> group##_shuffle_and_fill_up(T, T, ushort, ushort);                    \
  template <typename T>                                                                      \
  LANE<T> group##_shuffle_and_fill_down(T, T, ushort, ushort);                  \
  template <typename T> LANE<T> group##_sum(T);                                 \
  template <typename T> LANE<T> group##_product(T);                             \
  template <typename T> LANE<T> group##_max(T);                                 \
  template <typename T> LANE<T> group##_min(T);                                 \
  template <typename T> LANE<T> group##_prefix_inclusive_sum(T);                \
  template <typename T> LANE<T> group##_prefix_exclusive_sum(T);                \
  template <typename T> LANE<T> group##_prefix_inclusive_product(T);            \
  template <typename T> LANE<T> group##_prefix_exclusive_product(T);            \
  template <typename T> zk_lane_integer<T> group##_and(T);                                   \
  template <typename T> zk_lane_integer<T> group##_or(T);                                    \
  template <typename T> zk_lane_integer<T> group##_xor(T);                                   \
  bool group##_all(bool);                                                                    \
  bool group##_any(bool);                                                                    \
  bool group##_is_first();                                                                   \
  bool group##_is_helper_thread();                                                           \
  struct group##_vote {                                                                      \
    typedef ulong vote_t;                                                                    \
    explicit constexpr group##_vote(vote_t = 0) {}                                               \
    explicit constexpr operator vote_t() const { return 0; }                                 \
    bool all() const;                                                                        \
    bool any() const;                                                                        \
  };                                                                                         \
  group##_vote group##_ballot(bool);                                                         \
  group##_vote group##_active_threads_mask();
ZK_LANES(simd, zk_lane_or_bfloat)
ZK_LANES(quad, zk_lane)
#undef ZK_LANES

// ---- atomics ----------------------------------------------------------------------------------

template <typename T>
struct atomic {
  static_assert(__is_same(T, int) || __is_same(T, uint) || __is_same(T, bool) ||
                    __is_same(T, ulong) || __is_same(T, float),
                "atomic<T> needs T to be int, uint, bool, ulong or float");
  T zk_value;
};
// Complete, so that a kernel may take pointers to them.
template struct atomic<int>;
template struct atomic<uint>;
template struct atomic<bool>;
template struct atomic<ulong>;
template struct atomic<float>;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
typedef atomic<float> atomic_float;

template <typename T>
struct zk_same {
  typedef T type;
};
template <typename T, bool allowed>
using zk_if = enable_if_t<allowed, T>;
#define ZK_WORD(T) (__is_same(T, int) || __is_same(T, uint))
#define ZK_NUMBER(T) (ZK_WORD(T) || __is_same(T, float))
#define ZK_HELD(T) (ZK_NUMBER(T) || __is_same(T, bool))
#define ZK_VALUE typename zk_same<T>::type
#define ZK_ATOMICS(space, ADDED)                                                                 \
  template <typename T>                                                                          \
  zk_if<void, ZK_HELD(T)> atomic_store_explicit(volatile space atomic<T>*, ZK_VALUE, memory_order); \
  template <typename T>                                                                          \
  zk_if<T, ZK_HELD(T)> atomic_load_explicit(const volatile space atomic<T>*, memory_order);      \
  template <typename T>                                                                          \
  zk_if<T, ZK_HELD(T)> atomic_exchange_explicit(volatile space atomic<T>*, ZK_VALUE,             \
                                                memory_order);                                   \
  template <typename T>                                                                          \
  zk_if<bool, ZK_HELD(T)> atomic_compare_exchange_weak_explicit(                                 \
      volatile space atomic<T>*, thread T*, ZK_VALUE, memory_order, memory_order);               \
  template <typename T>                                                                          \
  zk_if<T, ADDED(T)> atomic_fetch_add_explicit(volatile space atomic<T>*, ZK_VALUE,              \
                                               memory_order);                                    \
  template <typename T>                                                                          \
  zk_if<T, ADDED(T)> atomic_fetch_sub_explicit(volatile space atomic<T>*, ZK_VALUE,              \
                                               memory_order);                                    \
  ZK_ATOMIC_WORD(space, and) ZK_ATOMIC_WORD(space, or) ZK_ATOMIC_WORD(space, xor)                \
  ZK_ATOMIC_WORD(space, min) ZK_ATOMIC_WORD(space, max)
#define ZK_ATOMIC_WORD(space, name)                                                              \
  template <typename T>                                                                          \
  zk_if<T, ZK_WORD(T)> atomic_fetch_##name##_explicit(volatile space atomic<T>*, ZK_VALUE,       \
                                                      memory_order);
// Floats are added in device memory only.
ZK_ATOMICS(device, ZK_NUMBER)
ZK_ATOMICS(threadgroup, ZK_WORD)
void atomic_min_explicit(volatile device atomic<ulong>*, ulong, memory_order);
void atomic_max_explicit(volatile device atomic<ulong>*, ulong, memory_order);
#undef ZK_ATOMICS
#undef ZK_ATOMIC_WORD

// ---- simdgroup matrices -------------------------------------------------------------------------

template <typename T, int Columns, int Rows>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix has 8 columns and 8 rows");
  static_assert(__is_same(T, half) || __is_same(T, bfloat) || __is_same(T, float),
                "simdgroup_matrix needs half, bfloat or float");
  vec<T, 2> zk_elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  thread vec<T, 2>& thread_elements() thread;
  const thread vec<T, 2>& thread_elements() const thread;
};
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

template <typename T, int C, int R = C> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
template <typename T, int C, int R = C> simdgroup_matrix<T, C, R> make_diagonal_simdgroup_matrix(T);
#define ZK_MATRIX_MEMORY(space)                                                                  \
  template <typename T, int C, int R>                                                            \
  void simdgroup_load(thread simdgroup_matrix<T, C, R>&, const space T*, ulong row = C,          \
                      ulong2 origin = 0, bool transposed = false);                               \
  template <typename T, int C, int R>                                                            \
  void simdgroup_store(simdgroup_matrix<T, C, R>, space T*, ulong row = C, ulong2 origin = 0,    \
                       bool transposed = false);
ZK_MATRIX_MEMORY(device)
ZK_MATRIX_MEMORY(threadgroup)
#undef ZK_MATRIX_MEMORY
template <typename D, typename A, typename B, int N>
void simdgroup_multiply(thread simdgroup_matrix<D, N, N>&, simdgroup_matrix<A, N, N>,
                        simdgroup_matrix<B, N, N>);
template <typename D, typename A, typename B, typename C, int N>
void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, N, N>&, simdgroup_matrix<A, N, N>,
                                   simdgroup_matrix<B, N, N>, simdgroup_matrix<C, N, N>);
template <typename T, int N>
simdgroup_matrix<T, N, N> operator*(simdgroup_matrix<T, N, N>, simdgroup_matrix<T, N, N>);

}  // namespace metal
