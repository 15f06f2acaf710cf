// CUDA's execution model on the host, for tests without a GPU: a block's threads are fibers of one
// thread, which stop at every warp operation and barrier until those that it waits for have come.
// Put before the text of a kernel, whose section of intrinsics it replaces.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <vector>

#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static
#define __launch_bounds__(threads)

struct host_uint3 {
  unsigned x, y, z;
};
static host_uint3 threadIdx, blockIdx, blockDim, gridDim;

// ---- functions of CUDA's library ----

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float sinpif(float x) { return (float)sin(M_PI * fmod(x, 2.0)); }
inline float cospif(float x) { return (float)cos(M_PI * fmod(x, 2.0)); }
inline float host_divide(float x, float y) { return x / y; }
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __powf powf
#define __fdividef host_divide
#define __fdiv_rn host_divide
#define __fsqrt_rn sqrtf
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __byte_perm(unsigned x, unsigned, unsigned) { return __builtin_bswap32(x); }

template <class T>
T atomicExch(T* p, T x) {
  T before = *p;
  *p = x;
  return before;
}
template <class T>
T atomicCAS(T* p, T expected, T x) {
  T before = *p;
  if (before == expected) *p = x;
  return before;
}
#define HOST_ATOMIC(name, update)                \
  template <class T>                             \
  T name(T* p, T x) {                            \
    T before = *p;                               \
    *p = update;                                 \
    return before;                               \
  }
HOST_ATOMIC(atomicAdd, before + x)
HOST_ATOMIC(atomicAnd, before& x)
HOST_ATOMIC(atomicOr, before | x)
HOST_ATOMIC(atomicXor, before ^ x)
HOST_ATOMIC(atomicMin, before < x ? before : x)
HOST_ATOMIC(atomicMax, before > x ? before : x)

// ---- threads ----

enum host_state {
  host_ready,
  host_shuffle,
  host_ballot,
  host_active,
  host_warp,
  host_block,
  host_done,
};

struct host_fiber {
  ucontext_t context;
  host_uint3 place;
  host_state state;
  unsigned mask, word, from, result;
  void* site;
};

static std::vector<host_fiber> host_fibers;
static ucontext_t host_scheduler;
static unsigned host_current;
static void (*host_body)();

// Stops the running thread until what it waits for has happened. Inlined sites differ by address.
__attribute__((noinline)) static unsigned host_wait(host_state state, unsigned mask, unsigned word,
                                                    unsigned from) {
  host_fiber& fiber = host_fibers[host_current];
  fiber.state = state;
  fiber.mask = mask;
  fiber.word = word;
  fiber.from = from;
  fiber.site = __builtin_return_address(0);
  swapcontext(&fiber.context, &host_scheduler);
  return host_fibers[host_current].result;
}

static void host_start() {
  host_body();
  host_fibers[host_current].state = host_done;
  swapcontext(&host_fibers[host_current].context, &host_scheduler);
}

// Runs every thread of the block that can go on.
static bool host_run_ready() {
  bool ran = false;
  for (unsigned i = 0; i < host_fibers.size(); ++i) {
    if (host_fibers[i].state != host_ready) continue;
    ran = true;
    host_current = i;
    threadIdx = host_fibers[i].place;
    swapcontext(&host_scheduler, &host_fibers[i].context);
  }
  return ran;
}

// An operation on the lanes of a mask happens once all of them that have not left wait for it.
static bool host_meet_warp(unsigned first) {
  unsigned count = host_fibers.size() - first < 32 ? host_fibers.size() - first : 32;
  host_fiber* lanes = &host_fibers[first];
  for (unsigned i = 0; i < count; ++i) {
    host_state state = lanes[i].state;
    if (state != host_shuffle && state != host_ballot && state != host_warp) continue;
    unsigned here = 0;
    bool all = true;
    for (unsigned k = 0; k < count; ++k) {
      if (!(lanes[i].mask >> k & 1) || lanes[k].state == host_done) continue;
      here |= 1u << k;
      all &= lanes[k].state == state && lanes[k].mask == lanes[i].mask;
    }
    if (!all) continue;
    unsigned votes = 0;
    for (unsigned k = 0; k < count; ++k) {
      if (here >> k & 1 && lanes[k].word) votes |= 1u << k;
    }
    for (unsigned k = 0; k < count; ++k) {
      if (!(here >> k & 1)) continue;
      unsigned from = lanes[k].from % 32;
      // What a lane that takes no part would give is undefined: make it stand out.
      unsigned shuffled = here >> from & 1 ? lanes[from].word : 0xdeadbeefu;
      lanes[k].result = state == host_ballot ? votes : shuffled;
    }
    for (unsigned k = 0; k < count; ++k) {
      if (here >> k & 1) lanes[k].state = host_ready;
    }
    return true;
  }
  return false;
}

// Where nothing else moves, lanes of a warp that asked at the same place who is with them.
static bool host_meet_active(unsigned first) {
  unsigned count = host_fibers.size() - first < 32 ? host_fibers.size() - first : 32;
  host_fiber* lanes = &host_fibers[first];
  void* site = nullptr;
  for (unsigned i = 0; i < count; ++i) {
    bool earlier = lanes[i].state == host_active && (!site || lanes[i].site < site);
    if (earlier) site = lanes[i].site;
  }
  if (!site) return false;
  unsigned mask = 0;
  for (unsigned i = 0; i < count; ++i) {
    if (lanes[i].state == host_active && lanes[i].site == site) mask |= 1u << i;
  }
  for (unsigned i = 0; i < count; ++i) {
    if (!(mask >> i & 1)) continue;
    lanes[i].result = mask;
    lanes[i].state = host_ready;
  }
  return true;
}

static bool host_meet_block() {
  for (auto& fiber : host_fibers) {
    if (fiber.state != host_block && fiber.state != host_done) return false;
  }
  bool any = false;
  for (auto& fiber : host_fibers) {
    if (fiber.state != host_block) continue;
    any = true;
    fiber.state = host_ready;
  }
  return any;
}

// False where threads wait for each other for ever.
static bool host_run_block(void (*body)()) {
  static const size_t stack = 256 << 10;
  static char* stacks = (char*)mmap(nullptr, 1024 * stack, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  host_body = body;
  host_fibers.assign(blockDim.x * blockDim.y * blockDim.z, {});
  for (unsigned i = 0; i < host_fibers.size(); ++i) {
    host_fiber& fiber = host_fibers[i];
    fiber.place = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    getcontext(&fiber.context);
    fiber.context.uc_stack = {stacks + i * stack, 0, stack};
    makecontext(&fiber.context, host_start, 0);
  }
  while (true) {
    if (host_run_ready()) continue;
    bool moved = false;
    for (unsigned w = 0; w < host_fibers.size(); w += 32) moved |= host_meet_warp(w);
    for (unsigned w = 0; !moved && w < host_fibers.size(); w += 32) moved = host_meet_active(w);
    if (!moved && !host_meet_block()) break;
  }
  for (auto& fiber : host_fibers) {
    if (fiber.state != host_done) return false;
  }
  return true;
}

// ---- matrix units, by the fragment layouts of the PTX manual ----

static float host_half(unsigned bits) {
  _Float16 x;
  unsigned short low = bits;
  memcpy(&x, &low, 2);
  return x;
}
static float host_bfloat(unsigned bits) {
  float x;
  bits <<= 16;
  memcpy(&x, &bits, 4);
  return x;
}
static unsigned host_lane() { return host_current % 32; }
static unsigned host_word(unsigned word, unsigned from) {
  return host_wait(host_shuffle, 0xffffffffu, word, from);
}
// Element `column` of row `row`: the lane and the half of its word that have it.
static unsigned host_element(unsigned fragment, unsigned row, unsigned column) {
  return host_word(fragment, row * 4 + column / 2) >> (16 * (column % 2)) & 0xffff;
}
static unsigned host_transpose(unsigned fragment) {
  unsigned row = host_lane() / 4, column = host_lane() % 4 * 2;
  unsigned low = host_element(fragment, column, row);
  return low | host_element(fragment, column + 1, row) << 16;
}
// mma.m16n8k8 with rows 8 to 15 of zeros: lane has a[g][2t…], b[2t…][g], c[g][2t…].
static void host_multiply(unsigned a, unsigned b, float& x, float& y, float (*value)(unsigned)) {
  unsigned g = host_lane() / 4, t = host_lane() % 4;
  for (unsigned k = 0; k < 8; ++k) {
    float left = value(host_word(a, g * 4 + k / 2) >> (16 * (k % 2)) & 0xffff);
    for (unsigned i = 0; i < 2; ++i) {
      unsigned column = 2 * t + i;
      float right = value(host_word(b, column * 4 + k / 2) >> (16 * (k % 2)) & 0xffff);
      (i ? y : x) += left * right;
    }
  }
}

// ---- the table of intrinsics (prelude/cuda/intrinsics.h) ----

#define ZK_MOST_ALIGNED 32
#define ZK_MAXIMUM fmaxf
#define ZK_MINIMUM fminf
#define ZK_INTRINSICS_ON_HOST                                                                      \
  namespace metal {                                                                                \
  inline unsigned zk_lane() {                                                                      \
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32;             \
  }                                                                                                \
  __forceinline__ unsigned zk_intrinsic_shuffle(unsigned mask, unsigned x, unsigned from) {        \
    return host_wait(host_shuffle, mask, x, from);                                                 \
  }                                                                                                \
  __forceinline__ unsigned zk_intrinsic_shuffle_xor(unsigned mask, unsigned x, unsigned bits) {    \
    return host_wait(host_shuffle, mask, x, zk_lane() ^ bits);                                     \
  }                                                                                                \
  __forceinline__ unsigned zk_intrinsic_ballot(unsigned mask, bool x) {                            \
    return host_wait(host_ballot, mask, x, 0);                                                     \
  }                                                                                                \
  __forceinline__ unsigned zk_intrinsic_active() { return host_wait(host_active, 0, 0, 0); }       \
  __forceinline__ void zk_intrinsic_meet_simd(unsigned mask) { host_wait(host_warp, mask, 0, 0); } \
  __forceinline__ void zk_intrinsic_meet_group() { host_wait(host_block, 0, 0, 0); }               \
  __forceinline__ void zk_intrinsic_meet_apart() { host_wait(host_block, 0, 0, 0); }               \
  inline void zk_intrinsic_fence_group() {}                                                        \
  inline void zk_intrinsic_fence_device() {}                                                       \
  inline float zk_intrinsic_tanh(float x) { return ::tanhf(x); }                                   \
  inline float zk_intrinsic_sqrt(float x) { return ::sqrtf(x); }                                   \
  inline unsigned zk_intrinsic_transpose(unsigned fragment) {                                      \
    return host_transpose(fragment);                                                               \
  }                                                                                                \
  inline void zk_intrinsic_multiply_half(unsigned a, unsigned b, float& x, float& y) {             \
    host_multiply(a, b, x, y, host_half);                                                          \
  }                                                                                                \
  inline void zk_intrinsic_multiply_bfloat(unsigned a, unsigned b, float& x, float& y) {           \
    host_multiply(a, b, x, y, host_bfloat);                                                        \
  }                                                                                                \
  }
#define ZK_MATRIX_UNITS 1
