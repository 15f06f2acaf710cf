// section abi; tokens *
// What a compiled kernel and the core know of each other. Plain C++ without headers, because the
// kernel side of it is compiled with nothing but the prelude.
#ifndef ZMLX_ABI
#define ZMLX_ABI

// The first value that a kernel found out of range; later ones are dropped.
struct zk_failure {
  int set;         // 0: none, 1: being written, 2: readable
  char text[500];  // names the argument and the value
};

struct zk_worker;   // one per worker thread: fiber stacks, threadgroup arena
struct zk_runtime;  // functions that collectives call

struct zk_launch {
  void* const* buffers;      // in [[buffer(n)]] order of the Metal signature
  unsigned grid[3];          // threads
  unsigned group[3];         // threads per group, each min(threadgroup, grid)
  unsigned groups[3];        // ceil(grid / group)
  int schedule;              // 0 breadth-first, 1 depth-first, >= 2 shuffled with that seed
  int checking;              // 1: NaN-filled threadgroup memory, guard pages, early-return reports
  zk_failure* failure;
  const zk_runtime* runtime;  // null in one-thread mode
};

// Every kernel object exports exactly this: it runs the threadgroups begin ... end-1, numbered
// with x fastest.
extern "C" __attribute__((visibility("default"))) void zk_kernel(const zk_launch*, zk_worker*,
                                                                 unsigned long long begin,
                                                                 unsigned long long end);

#endif
