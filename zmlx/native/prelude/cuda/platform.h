// section abi; needs builtins intrinsics; tokens *
// What every kernel is framed with: where its threads are, what it is called with.

// Only the CPU target can report a value that a kernel finds out of range, and only it has to wait
// for memory: here other warps work meanwhile.
#define ZMLX_FAIL(argument, value)
#define ZMLX_PREFETCH(pointer)

// ZK_GEOMETRY says how a launch covers Metal's grid of threads:
//   0 exact   no threadgroup is cut off: CUDA's own indices are Metal's
//   1 line    one dimension, and the last threadgroup may be cut off
//   2 linear  CUDA's groups are numbered along x and y and their threads along x; both numbers are
//             taken apart by Metal's grid, whose edge groups are smaller, so that a thread has the
//             same place in its group and in its simdgroup as on Metal
#ifndef ZK_GEOMETRY
#define ZK_GEOMETRY 0
#endif
// Threads per group at most.
#ifndef ZK_THREADS
#define ZK_THREADS 1024
#endif
// Whether every simdgroup has 32 threads, and whether none holds threads of two rows (of different
// y or z).
#ifndef ZK_FULL_SIMD
#define ZK_FULL_SIMD 0
#endif
#ifndef ZK_SIMD_ROWS
#define ZK_SIMD_ROWS 0
#endif

#if ZK_GEOMETRY == 0
#define ZK_GRID_PARAMETERS
#define ZK_GRID_ARGUMENTS
#define ZK_POSITION zk_exact()
#elif ZK_GEOMETRY == 1
#define ZK_GRID_PARAMETERS , int zk_grid_x
#define ZK_GRID_ARGUMENTS , zk_grid_x
#define ZK_POSITION zk_line(unsigned(zk_grid_x))
#else
#define ZK_GRID_PARAMETERS \
  , int zk_grid_x, int zk_grid_y, int zk_grid_z, int zk_group_x, int zk_group_y, int zk_group_z
#define ZK_GRID_ARGUMENTS , zk_grid_x, zk_grid_y, zk_grid_z, zk_group_x, zk_group_y, zk_group_z
#define ZK_POSITION                                                            \
  zk_linear({unsigned(zk_grid_x), unsigned(zk_grid_y), unsigned(zk_grid_z)}, \
            {unsigned(zk_group_x), unsigned(zk_group_y), unsigned(zk_group_z)})
#endif

// The sizes of an input whose shape a kernel asks for, as parameters and as arguments.
#define ZK_DIMS_1(n) int n##_0
#define ZK_DIMS_2(n) ZK_DIMS_1(n), int n##_1
#define ZK_DIMS_3(n) ZK_DIMS_2(n), int n##_2
#define ZK_DIMS_4(n) ZK_DIMS_3(n), int n##_3
#define ZK_DIMS_5(n) ZK_DIMS_4(n), int n##_4
#define ZK_DIMS_6(n) ZK_DIMS_5(n), int n##_5
#define ZK_DIMS_7(n) ZK_DIMS_6(n), int n##_6
#define ZK_DIMS_8(n) ZK_DIMS_7(n), int n##_7
#define ZK_DIMS_9(n) ZK_DIMS_8(n), int n##_8
#define ZK_DIMS_10(n) ZK_DIMS_9(n), int n##_9
#define ZK_SIZES_1(n) n##_0
#define ZK_SIZES_2(n) ZK_SIZES_1(n), n##_1
#define ZK_SIZES_3(n) ZK_SIZES_2(n), n##_2
#define ZK_SIZES_4(n) ZK_SIZES_3(n), n##_3
#define ZK_SIZES_5(n) ZK_SIZES_4(n), n##_4
#define ZK_SIZES_6(n) ZK_SIZES_5(n), n##_5
#define ZK_SIZES_7(n) ZK_SIZES_6(n), n##_6
#define ZK_SIZES_8(n) ZK_SIZES_7(n), n##_7
#define ZK_SIZES_9(n) ZK_SIZES_8(n), n##_8
#define ZK_SIZES_10(n) ZK_SIZES_9(n), n##_9
#define ZK_JOINED(a, b) a##b
#define ZK_JOIN(a, b) ZK_JOINED(a, b)
#define ZK_DIMS(rank, n) ZK_JOIN(ZK_DIMS_, rank)(n)
#define ZK_SIZES(rank, n) ZK_JOIN(ZK_SIZES_, rank)(n)

namespace metal {

// ---- where a thread is ----

struct zk_uint3 {
  unsigned x, y, z;
};

struct zk_position {
  zk_uint3 n, g;  // the grid in threads, and in groups
  zk_uint3 t, e;  // the extent of a full group, and of this one
  zk_uint3 b, p;  // this group in the grid, this thread in its group
  unsigned l;     // this thread's linear index in its group
  bool live;      // in Metal's grid at all
};

// Threads of this group, of which fewer than CUDA's may be in Metal's grid. Every thread stores the
// number, so that none has to wait for another one's.
__shared__ unsigned zk_group_threads;

__forceinline__ unsigned zk_smaller(unsigned a, unsigned b) { return a < b ? a : b; }
__forceinline__ unsigned zk_ceil(unsigned a, unsigned b) { return a / b + (a % b != 0); }

__forceinline__ zk_position zk_exact() {
  zk_position at;
  at.g = {gridDim.x, gridDim.y, gridDim.z};
  at.t = at.e = {blockDim.x, blockDim.y, blockDim.z};
  at.n = {at.g.x * at.t.x, at.g.y * at.t.y, at.g.z * at.t.z};
  at.b = {blockIdx.x, blockIdx.y, blockIdx.z};
  at.p = {threadIdx.x, threadIdx.y, threadIdx.z};
  at.l = (at.p.z * at.e.y + at.p.y) * at.e.x + at.p.x;
  at.live = true;
  zk_group_threads = at.e.x * at.e.y * at.e.z;
  return at;
}

__forceinline__ zk_position zk_line(unsigned n) {
  zk_position at;
  at.n = {n, 1, 1};
  at.g = {gridDim.x, 1, 1};
  at.t = {blockDim.x, 1, 1};
  at.b = {blockIdx.x, 0, 0};
  at.e = {zk_smaller(at.t.x, n - at.b.x * at.t.x), 1, 1};
  at.p = {threadIdx.x, 0, 0};
  at.l = at.p.x;
  at.live = at.l < at.e.x;
  zk_group_threads = at.e.x;
  return at;
}

__forceinline__ zk_position zk_linear(zk_uint3 n, zk_uint3 t) {
  zk_position at;
  at.n = n;
  at.t = t;
  at.g = {zk_ceil(n.x, t.x), zk_ceil(n.y, t.y), zk_ceil(n.z, t.z)};
  unsigned group = blockIdx.y * gridDim.x + blockIdx.x;
  at.b = {group % at.g.x, group / at.g.x % at.g.y, group / at.g.x / at.g.y};
  at.e = {zk_smaller(t.x, n.x - at.b.x * t.x), zk_smaller(t.y, n.y - at.b.y * t.y),
          zk_smaller(t.z, n.z - at.b.z * t.z)};
  at.l = threadIdx.x;
  zk_group_threads = at.e.x * at.e.y * at.e.z;
  at.live = at.b.z < at.g.z && at.l < zk_group_threads;
  at.p = {at.l % at.e.x, at.l / at.e.x % at.e.y, at.l / at.e.x / at.e.y};
  return at;
}

// ---- what a kernel is called with ----

// Shape and strides of a row-contiguous input.
template <int Rank>
struct zk_layout {
  int shape[Rank];
  long strides[Rank];

  template <class... Sizes>
  __forceinline__ zk_layout(Sizes... sizes) : shape{sizes...} {
    strides[Rank - 1] = 1;
    for (int i = Rank - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
  }
};

// Threadgroup variables. Bytes, because types with a constructor cannot be shared themselves.
template <class Declared, int number, class Memory>
__forceinline__ Declared& zk_threadgroup(Memory) {
  alignas(Declared) alignas(16) __shared__ char memory[sizeof(Declared)];
  return *(Declared*)memory;
}

}  // namespace metal
