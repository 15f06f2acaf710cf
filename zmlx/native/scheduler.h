// What the cooperative runtime keeps of a threadgroup, and the entry points that switch stacks.
#pragma once

#include <cstddef>

#include "prelude/abi.h"
#include "prelude/fiber.h"

namespace zmlx {

constexpr size_t memory_limit = 32 << 10;  // Metal's threadgroup memory
constexpr size_t stack_bytes = 64 << 10;   // at least what each thread has

struct Simdgroup {
  unsigned live;     // lanes that have not returned
  unsigned ready;    // lanes that can run
  unsigned waiting;  // lanes at a simd operation
  bool mixed;        // the waiting lanes are at different positions
  unsigned site;     // the position of the first that came, valid unless mixed
  unsigned long long path;
};

// Where a thread stopped.
struct Fiber {
  void* stack;
  zk_level* level;
  zk_operation operation;
  unsigned site;
};

// State that every switch touches lies densely, not on the stacks: those share few cache sets.
struct Group : zk_group {
  Fiber fibers[zk_most_threads];
  Simdgroup simdgroups[zk_most_threads / zk_simd_width];
  unsigned simdgroup_count;
  unsigned ready;  // simdgroups with a ready lane
  unsigned alive;  // threads that have not returned
  unsigned barrier_site;  // where the first thread waits
  unsigned long long barrier_path;
  bool at_barrier;
  unsigned stray;  // a thread that waits at another barrier, or zk_most_threads
  const zk_launch* launch;
  const zk_cooperative* program;
  unsigned long long next, last;  // threadgroups still to run
  unsigned long long random;
  void* caller;  // stack of the worker itself
  unsigned prepared;  // fibers that exist
  size_t memory_bytes;
  bool guarded;
  alignas(64) char cells[zk_most_threads * zk_cell_bytes];
  // Declarations start at multiples of 64, the largest alignment of a type.
  alignas(64) char arena[memory_limit + 64 * zk_most_declarations];
};

char* stack_low(Group*, unsigned thread);
char* stack_top(Group*, unsigned thread);

// Keeps the first failure of a launch.
void fail(zk_failure*, const char* format, ...);

// Makes fibers up to that many. They outlive groups and launches.
void prepare_fibers(Group*, unsigned threads);

}  // namespace zmlx

// switch.cc. They return when the calling fiber is chosen to run again; zk_fiber_enter, called on
// the worker's own stack, when all threadgroups are done.
extern "C" {
void zk_fiber_enter(zk_group*);
void zk_fiber_meet(zk_group*, unsigned site, zk_operation);
void zk_fiber_barrier(zk_group*, unsigned site);
void zk_fiber_finish(zk_group*);
void zk_fiber_overflow(zk_group*);
void zk_fiber_start();  // where a new fiber begins; see prepare_fibers
}
