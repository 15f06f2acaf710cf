// section simd_fiber; needs base fiber; after numbers
// Barriers, simd_* and quad_* for groups whose threads are fibers. A lane leaves its operand in its
// cell and meets the others; the last to arrive runs the operation over all cells; each lane finds
// its result in its cell. Reductions have a fixed tree, so a result depends on nothing but the
// operands: halves of a full simdgroup fold onto each other, a partial one folds in lane order.

// The line of a collective, as its default argument. With braces instead of brackets around
// __builtin_LINE(), g++ 12 takes the line of the declaration.
struct zk_site {
  int line;
  explicit constexpr zk_site(int line) : line(line) {}
};

inline unsigned long zk_stack() {
  unsigned long stack;
#if defined(__x86_64__)
  asm("mov %%rsp, %0" : "=r"(stack));
#else
  asm("mov %0, sp" : "=r"(stack));
#endif
  return stack;
}

inline zk_group* zk_here() { return (zk_group*)(zk_stack() & ~(zk_region_bytes - 1)); }

// A level of the running thread's position, for as long as the object lives.
struct zk_scope {
  zk_group* group;
  zk_level level;
  explicit zk_scope(zk_site site) : group(zk_here()) {
    level = {group->level, (unsigned)site.line, 0, 0};
    count();
    group->level = &level;
  }
  ~zk_scope() { group->level = level.outer; }
  zk_scope(const zk_scope&) = delete;

 protected:
  void count() {
    unsigned long long hash = level.outer ? level.outer->path : 0;
    hash = (hash ^ level.site) * 0x9e3779b97f4a7c15ull;
    hash = (hash ^ hash >> 29 ^ level.turn) * 0xbf58476d1ce4e5b9ull;
    level.path = hash ^ hash >> 32;
  }
};

// for (zk_loop l; l.once();) for (a; l.turn() && (b); c) …
struct zk_loop : zk_scope {
  bool entered = false;
  explicit zk_loop(zk_site site = zk_site(__builtin_LINE())) : zk_scope(site) {}
  bool once() {
    bool first = !entered;
    entered = true;
    return first;
  }
  bool turn() {
    ++level.turn;
    count();
    return true;
  }
};

// (x, zk_rejoin(…)) is x, once the other lanes have come there.
struct zk_rejoin {
  explicit zk_rejoin(zk_site site) {
    zk_group* group = zk_here();
    group->meet(group, (unsigned)site.line, nullptr);
  }
};
template <class T>
inline T operator,(T&& x, zk_rejoin) {
  return static_cast<T&&>(x);
}

namespace metal {

// A packed vector or an assignable swizzle stands for its vector.
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

enum { zk_second_at = 16, zk_lane_at = 60 };  // in a cell: another operand, a lane

template <class T>
inline T& zk_cell(char* cells, unsigned lane, unsigned offset = 0) {
  return *(T*)(cells + lane * zk_cell_bytes + offset);
}

template <class T>
inline T zk_meet(T value, zk_operation operation, zk_site site) {
  static_assert(sizeof(T) <= 32, "a simd operand is a scalar or a vector");
  zk_group* group = zk_here();
  char* cell = group->cell;
  *(T*)cell = value;
  group->meet(group, (unsigned)site.line, operation);
  return *(T*)cell;
}

template <class F>
inline void zk_each(unsigned lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f((unsigned)__builtin_ctz(lanes));
}

// ---- reductions and scans: W lanes wide ---------------------------------------------------------

template <class T, class F>
inline T zk_fold(char* cells, unsigned first, unsigned width, unsigned active) {
  using A = typename zk_combined<T>::type;
  unsigned all = (width == 32 ? ~0u : (1u << width) - 1) << first;
  A a[32];
  if ((active & all) == all) {
    for (unsigned i = 0; i < width; ++i) a[i] = A(zk_cell<T>(cells, first + i));
    for (unsigned half = width / 2; half; half /= 2) {
      for (unsigned i = 0; i < half; ++i) a[i] = F::apply(a[i], a[i + half]);
    }
    return T(a[0]);
  }
  bool started = false;
  zk_each(active & all, [&](unsigned lane) {
    A next(zk_cell<T>(cells, lane));
    a[0] = started ? F::apply(a[0], next) : next;
    started = true;
  });
  return T(a[0]);
}

template <class T, class F, int W>
void zk_reduce(char* cells, unsigned active) {
  for (unsigned first = 0; first < 32; first += W) {
    unsigned lanes = active & ((W == 32 ? ~0u : (1u << W % 32) - 1) << first);
    if (!lanes) continue;
    T result = zk_fold<T, F>(cells, first, W, active);
    zk_each(lanes, [&](unsigned lane) { zk_cell<T>(cells, lane) = result; });
  }
}

template <class T, class F, int W, bool inclusive>
void zk_scan(char* cells, unsigned active) {
  using A = typename zk_combined<T>::type;
  for (unsigned first = 0; first < 32; first += W) {
    A sum = F::template identity<A>();
    zk_each(active & ((W == 32 ? ~0u : (1u << W % 32) - 1) << first), [&](unsigned lane) {
      A next = F::apply(sum, A(zk_cell<T>(cells, lane)));
      zk_cell<T>(cells, lane) = T(inclusive ? next : sum);
      sum = next;
    });
  }
}

// The smaller or larger one; a NaN loses, in vectors element by element.
template <class T>
inline T zk_pick(T a, T b, bool larger) {
  if constexpr (requires { a[0]; }) {
    for (unsigned i = 0; i < sizeof(T) / sizeof(a[0]); ++i) a[i] = zk_pick(a[i], b[i], larger);
    return a;
  } else {
    return (larger ? a < b : b < a) || a != a ? b : a;
  }
}

struct zk_add {
  template <class T> static T apply(T a, T b) { return T(a + b); }
  template <class T> static T identity() { return T(0); }
};
struct zk_multiply {
  template <class T> static T apply(T a, T b) { return T(a * b); }
  template <class T> static T identity() { return T(1); }
};
struct zk_lesser {
  template <class T> static T apply(T a, T b) { return zk_pick(a, b, false); }
};
struct zk_greater {
  template <class T> static T apply(T a, T b) { return zk_pick(a, b, true); }
};
struct zk_and {
  template <class T> static T apply(T a, T b) { return T(a & b); }
};
struct zk_or {
  template <class T> static T apply(T a, T b) { return T(a | b); }
};
struct zk_xor {
  template <class T> static T apply(T a, T b) { return T(a ^ b); }
};

// A collective of operands of any type T, which gives a V.
#define ZK_COLLECTIVE template <class T, class V = zk_operand_of<T>> inline V
#define ZK_HERE zk_site site = zk_site(__builtin_LINE())

#define ZK_REDUCTION(name, F)                                                                 \
  ZK_COLLECTIVE simd_##name(T x, ZK_HERE) { return zk_meet<V>(x, &zk_reduce<V, F, 32>, site); } \
  ZK_COLLECTIVE quad_##name(T x, ZK_HERE) { return zk_meet<V>(x, &zk_reduce<V, F, 4>, site); }
ZK_REDUCTION(sum, zk_add)
ZK_REDUCTION(product, zk_multiply)
ZK_REDUCTION(min, zk_lesser)
ZK_REDUCTION(max, zk_greater)
ZK_REDUCTION(and, zk_and)
ZK_REDUCTION(or, zk_or)
ZK_REDUCTION(xor, zk_xor)
#undef ZK_REDUCTION

#define ZK_PREFIX(name, F, inclusive)                          \
  ZK_COLLECTIVE simd_prefix_##name(T x, ZK_HERE) {             \
    return zk_meet<V>(x, &zk_scan<V, F, 32, inclusive>, site); \
  }                                                            \
  ZK_COLLECTIVE quad_prefix_##name(T x, ZK_HERE) {             \
    return zk_meet<V>(x, &zk_scan<V, F, 4, inclusive>, site);  \
  }
ZK_PREFIX(inclusive_sum, zk_add, true)
ZK_PREFIX(exclusive_sum, zk_add, false)
ZK_PREFIX(inclusive_product, zk_multiply, true)
ZK_PREFIX(exclusive_product, zk_multiply, false)
#undef ZK_PREFIX

// ---- shuffles -----------------------------------------------------------------------------------

// Each lane names the lane to read. From a lane that does not take part Metal leaves the value
// undefined; here it is zero, in every schedule.
template <class T>
void zk_gather(char* cells, unsigned active) {
  T value[32];
  zk_each(active, [&](unsigned lane) { value[lane] = zk_cell<T>(cells, lane); });
  zk_each(active, [&](unsigned lane) {
    unsigned from = zk_cell<unsigned>(cells, lane, zk_lane_at);
    bool there = from < 32 && active >> from & 1;
    zk_cell<T>(cells, lane) = there ? value[from] : T(0);
  });
}

template <class T>
inline T zk_read_lane(T value, unsigned lane, zk_site site) {
  *(unsigned*)(zk_here()->cell + zk_lane_at) = lane;
  return zk_meet<T>(value, &zk_gather<T>, site);
}

inline unsigned zk_lane() { return zk_here()->index % 32; }

template <class T>
void zk_first(char* cells, unsigned active) {
  T value = zk_cell<T>(cells, (unsigned)__builtin_ctz(active));
  zk_each(active, [&](unsigned lane) { zk_cell<T>(cells, lane) = value; });
}

template <class T>
void zk_quad_first(char* cells, unsigned active) {
  zk_each(active, [&](unsigned lane) {
    unsigned quad = active >> (lane & ~3u);
    T value = zk_cell<T>(cells, (lane & ~3u) + (unsigned)__builtin_ctz(quad));
    zk_cell<T>(cells, lane) = value;
  });
}

// Lanes form vectors of `modulo`; what a shift moves in from beyond a vector's end comes from the
// other end of the filling data.
template <class T>
inline T zk_read_filled(T x, T filling, unsigned modulo, int shift, zk_site site) {
  int lane = (int)(zk_lane() % modulo), from = lane + shift, width = (int)modulo;
  unsigned base = zk_lane() - (unsigned)lane;
  bool inside = from >= 0 && from < width;
  unsigned source = base + (unsigned)(inside ? from : from < 0 ? from + width : from - width);
  T shifted = zk_read_lane<T>(x, source, site);
  T filled = zk_read_lane<T>(filling, source, site);
  return inside ? shifted : filled;
}

// W lanes: those of a simdgroup or of a quad.
#define ZK_SHUFFLES(kind, W, first)                                                       \
  ZK_COLLECTIVE kind##_shuffle(T x, ushort lane, ZK_HERE) {                               \
    return zk_read_lane<V>(x, lane < W ? (zk_lane() & ~(W - 1u)) + lane : 32, site);      \
  }                                                                                       \
  ZK_COLLECTIVE kind##_broadcast(T x, ushort lane, ZK_HERE) {                             \
    return kind##_shuffle(x, lane, site);                                                 \
  }                                                                                       \
  ZK_COLLECTIVE kind##_broadcast_first(T x, ZK_HERE) {                                    \
    return zk_meet<V>(x, &first<V>, site);                                                \
  }                                                                                       \
  ZK_COLLECTIVE kind##_shuffle_xor(T x, ushort mask, ZK_HERE) {                           \
    return zk_read_lane<V>(x, mask < W ? zk_lane() ^ mask : 32, site);                    \
  }                                                                                       \
  ZK_COLLECTIVE kind##_shuffle_up(T x, ushort delta, ZK_HERE) {                           \
    unsigned lane = zk_lane();                                                            \
    return zk_read_lane<V>(x, lane % W < delta ? lane : lane - delta, site);              \
  }                                                                                       \
  ZK_COLLECTIVE kind##_shuffle_down(T x, ushort delta, ZK_HERE) {                         \
    unsigned lane = zk_lane();                                                            \
    return zk_read_lane<V>(x, lane % W + delta < W ? lane + delta : lane, site);          \
  }                                                                                       \
  ZK_COLLECTIVE kind##_shuffle_rotate_up(T x, ushort delta, ZK_HERE) {                    \
    unsigned lane = zk_lane();                                                            \
    return zk_read_lane<V>(x, (lane & ~(W - 1u)) + (lane - delta) % W, site);             \
  }                                                                                       \
  ZK_COLLECTIVE kind##_shuffle_rotate_down(T x, ushort delta, ZK_HERE) {                  \
    unsigned lane = zk_lane();                                                            \
    return zk_read_lane<V>(x, (lane & ~(W - 1u)) + (lane + delta) % W, site);             \
  }                                                                                       \
  ZK_COLLECTIVE kind##_shuffle_and_fill_up(T x, T filling, ushort delta,                  \
                                           ushort modulo = W, ZK_HERE) {                  \
    return zk_read_filled<V>(x, filling, modulo, -(int)delta, site);                      \
  }                                                                                       \
  ZK_COLLECTIVE kind##_shuffle_and_fill_down(T x, T filling, ushort delta,                \
                                             ushort modulo = W, ZK_HERE) {                \
    return zk_read_filled<V>(x, filling, modulo, (int)delta, site);                       \
  }
ZK_SHUFFLES(simd, 32, zk_first)
ZK_SHUFFLES(quad, 4, zk_quad_first)
#undef ZK_SHUFFLES
#undef ZK_COLLECTIVE

// ---- votes --------------------------------------------------------------------------------------

// Lanes of the running thread's simdgroup that exist: the last simdgroup may be short.
inline unsigned zk_existing_lanes() {
  zk_group* group = zk_here();
  unsigned left = group->threads - group->index / 32 * 32;
  return left >= 32 ? ~0u : (1u << left) - 1;
}

inline void zk_vote(char* cells, unsigned active) {
  unsigned votes = 0;
  zk_each(active, [&](unsigned lane) { votes |= zk_cell<unsigned>(cells, lane) << lane; });
  zk_each(active, [&](unsigned lane) {
    zk_cell<unsigned>(cells, lane) = votes;
    zk_cell<unsigned>(cells, lane, zk_second_at) = active;
  });
}

struct zk_votes {
  unsigned yes, active;
};
inline zk_votes zk_ask(bool x, zk_site site) {
  unsigned yes = zk_meet<unsigned>(x, &zk_vote, site);
  return {yes, *(unsigned*)(zk_here()->cell + zk_second_at)};
}
inline zk_votes zk_ask_quad(bool x, zk_site site) {
  zk_votes votes = zk_ask(x, site);
  unsigned shift = zk_lane() & ~3u;
  return {votes.yes >> shift & 15, votes.active >> shift & 15};
}

// What its bits say of lanes that do not exist counts for nothing; a lane that has returned exists.
class simd_vote {
 public:
  using vote_t = ulong;
  explicit constexpr simd_vote(vote_t votes = 0) : votes_(votes) {}
  explicit constexpr operator vote_t() const { return votes_; }
  bool all() const { return (~votes_ & zk_existing_lanes()) == 0; }
  bool any() const { return (votes_ & zk_existing_lanes()) != 0; }

 private:
  vote_t votes_;
};

class quad_vote {
 public:
  using vote_t = uint;
  explicit constexpr quad_vote(vote_t votes = 0) : votes_(votes) {}
  explicit constexpr operator vote_t() const { return votes_; }
  bool all() const { return (~votes_ & existing()) == 0; }
  bool any() const { return (votes_ & existing()) != 0; }

 private:
  static unsigned existing() { return zk_existing_lanes() >> (zk_lane() & ~3u) & 15; }

  vote_t votes_;
};

#define ZK_VOTES(kind, ask)                                                                \
  inline kind##_vote kind##_ballot(bool x, ZK_HERE) { return kind##_vote(ask(x, site).yes); } \
  inline bool kind##_all(bool x, ZK_HERE) {                                                \
    zk_votes votes = ask(x, site);                                                         \
    return votes.yes == votes.active;                                                      \
  }                                                                                        \
  inline bool kind##_any(bool x, ZK_HERE) { return ask(x, site).yes != 0; }                \
  inline kind##_vote kind##_active_threads_mask(ZK_HERE) {                                 \
    return kind##_vote(ask(true, site).active);                                            \
  }                                                                                        \
  inline bool kind##_is_helper_thread() { return false; }
ZK_VOTES(simd, zk_ask)
ZK_VOTES(quad, zk_ask_quad)
#undef ZK_VOTES

inline bool simd_is_first(ZK_HERE) {
  return zk_lane() == (unsigned)__builtin_ctz(zk_ask(true, site).active);
}
inline bool quad_is_first(ZK_HERE) {
  return zk_lane() % 4 == (unsigned)__builtin_ctz(zk_ask_quad(true, site).active);
}

// ---- barriers -----------------------------------------------------------------------------------

// Fibers of a group share an OS thread: what one has stored, the next one sees.
inline void threadgroup_barrier(mem_flags, ZK_HERE) {
  zk_group* group = zk_here();
  group->barrier(group, (unsigned)site.line);
}
inline void simdgroup_barrier(mem_flags, ZK_HERE) {
  zk_group* group = zk_here();
  group->meet(group, (unsigned)site.line, nullptr);
}
inline void threadgroup_barrier(mem_flags flags, thread_scope, ZK_HERE) {
  threadgroup_barrier(flags, site);
}
inline void simdgroup_barrier(mem_flags flags, thread_scope, ZK_HERE) {
  simdgroup_barrier(flags, site);
}
#undef ZK_HERE

}  // namespace metal
