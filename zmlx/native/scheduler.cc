// The cooperative runtime: every thread of a group is a fiber that runs until it meets others.
//
// A thread that reaches a collective leaves its operand in its cell and switches straight to the
// next ready thread; the last one to arrive runs the operation for all. There is no scheduler
// thread in between: the decisions below run on the stack of whoever stops.
//
// Lanes of a simdgroup need not be at the same collective. Once all of them have stopped, the
// earliest position in the program goes first, on the lanes that wait there, as it does on
// hardware that reconverges after branches and loops. A position is the chain of calls and loop
// turns that leads to a site; it is compared element by element, so that a lane in an earlier
// turn of a loop goes before one that is ahead, and both before one that has left the loop.
#include "scheduler.h"

#include <cstdio>
#include <cstring>

namespace zmlx {
namespace {

// ---- choosing who runs --------------------------------------------------------------------------

enum { breadth_first = 0, depth_first = 1 };

// Inlined by force: the core is built at a low level, and these run at every switch.
#define ZK_INLINED [[gnu::always_inline]] inline

ZK_INLINED bool shuffled(const Group* group) { return group->launch->schedule > depth_first; }

unsigned random_bit(Group* group, unsigned mask) {
  unsigned long long& state = group->random;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  for (unsigned skip = (unsigned)(state >> 33) % (unsigned)__builtin_popcount(mask); skip; --skip) {
    mask &= mask - 1;
  }
  return (unsigned)__builtin_ctz(mask);
}

ZK_INLINED void* resume(Group* group, unsigned thread) {
  group->index = thread;
  group->cell = group->cells + thread * zk_cell_bytes;
  group->level = group->fibers[thread].level;
  return group->fibers[thread].stack;
}

ZK_INLINED void* resume_in(Group* group, unsigned simdgroup) {
  unsigned ready = group->simdgroups[simdgroup].ready;
  unsigned lane = shuffled(group) ? random_bit(group, ready) : (unsigned)__builtin_ctz(ready);
  return resume(group, simdgroup * zk_simd_width + lane);
}

// The levels of a waiting thread from the outermost, ending in its site: its position.
unsigned position(const Group* group, unsigned thread, const zk_level** levels, unsigned most) {
  unsigned depth = 0;
  const zk_level* level = group->fibers[thread].level;
  for (; level && depth < most; level = level->outer) levels[depth++] = level;
  for (unsigned i = 0; i < depth / 2; ++i) {
    const zk_level* swapped = levels[i];
    levels[i] = levels[depth - 1 - i];
    levels[depth - 1 - i] = swapped;
  }
  return depth;
}

// Below, at or past the other thread in the order of the program: negative, 0, positive.
int compare_positions(const Group* group, unsigned a, unsigned b) {
  constexpr unsigned most = 64;
  const zk_level *left[most], *right[most];
  unsigned left_depth = position(group, a, left, most);
  unsigned right_depth = position(group, b, right, most);
  for (unsigned i = 0;; ++i) {
    unsigned left_site = i < left_depth ? left[i]->site : group->fibers[a].site;
    unsigned right_site = i < right_depth ? right[i]->site : group->fibers[b].site;
    if (left_site != right_site) return left_site < right_site ? -1 : 1;
    if (i >= left_depth || i >= right_depth) return (int)left_depth - (int)right_depth;
    if (left[i]->turn != right[i]->turn) return left[i]->turn < right[i]->turn ? -1 : 1;
  }
}

// The waiting lanes at the earliest position.
unsigned earliest(const Group* group, unsigned simdgroup) {
  unsigned first = simdgroup * zk_simd_width, chosen = 0, best = 0;
  for (unsigned rest = group->simdgroups[simdgroup].waiting; rest; rest &= rest - 1) {
    unsigned lane = (unsigned)__builtin_ctz(rest);
    int order = chosen ? compare_positions(group, first + lane, first + best) : -1;
    if (order < 0) {
      chosen = 0;
      best = lane;
    }
    if (order <= 0) chosen |= 1u << lane;
  }
  return chosen;
}

// Runs one simd operation; its lanes become ready.
void operate(Group* group, unsigned simdgroup) {
  Simdgroup& simd = group->simdgroups[simdgroup];
  unsigned active = simd.mixed ? earliest(group, simdgroup) : simd.waiting;
  unsigned first = simdgroup * zk_simd_width;
  zk_operation operation = group->fibers[first + __builtin_ctz(active)].operation;
  if (operation) operation(group->cells + first * zk_cell_bytes, active);
  simd.waiting &= ~active;
  simd.mixed = simd.waiting != 0;
  simd.ready = active;
  group->ready |= 1u << simdgroup;
}

void* leave_group(Group*);
void* pass_barrier(Group*);

// Called when a simdgroup has no ready lane left.
void* leave_simdgroup(Group* group, unsigned simdgroup) {
  group->ready &= ~(1u << simdgroup);
  if (group->simdgroups[simdgroup].waiting) operate(group, simdgroup);
  unsigned ready = group->ready;
  if (!ready) return group->alive ? pass_barrier(group) : leave_group(group);
  if (shuffled(group)) return resume_in(group, random_bit(group, ready));
  if (group->launch->schedule == breadth_first) {
    unsigned later = simdgroup == 31 ? 0 : ready & (~0u << (simdgroup + 1));
    return resume_in(group, (unsigned)__builtin_ctz(later ? later : ready));
  }
  bool stay = ready >> simdgroup & 1;
  return resume_in(group, stay ? simdgroup : (unsigned)__builtin_ctz(ready));
}

ZK_INLINED void* next_thread(Group* group, unsigned simdgroup) {
  if (!group->simdgroups[simdgroup].ready) return leave_simdgroup(group, simdgroup);
  if (shuffled(group)) return resume_in(group, random_bit(group, group->ready));
  return resume_in(group, simdgroup);
}

// ---- groups -------------------------------------------------------------------------------------

unsigned at_most(unsigned total, unsigned size, unsigned index) {
  unsigned left = total - index * size;
  return left < size ? left : size;
}

void begin_group(Group* group) {
  const zk_launch& launch = *group->launch;
  unsigned long long index = group->next++;
  group->position[0] = (unsigned)(index % launch.groups[0]);
  group->position[1] = (unsigned)(index / launch.groups[0] % launch.groups[1]);
  group->position[2] = (unsigned)(index / launch.groups[0] / launch.groups[1]);
  group->threads = 1;
  for (int axis = 0; axis < 3; ++axis) {
    group->extent[axis] = at_most(launch.grid[axis], launch.group[axis], group->position[axis]);
    group->threads *= group->extent[axis];
  }
  group->alive = group->threads;
  group->at_barrier = false;
  group->stray = zk_most_threads;
  group->simdgroup_count = (group->threads + zk_simd_width - 1) / zk_simd_width;
  group->ready = ~0u >> ((zk_most_threads / zk_simd_width) - group->simdgroup_count);
  for (unsigned i = 0; i < group->simdgroup_count; ++i) {
    unsigned lanes = at_most(group->threads, zk_simd_width, i);
    unsigned all = ~0u >> (zk_simd_width - lanes);
    group->simdgroups[i] = {all, all, 0, false, 0, 0};
  }
  for (unsigned i = 0; i < group->threads; ++i) group->fibers[i].level = nullptr;
  // A value that nobody wrote shows as NaN in every floating type.
  if (launch.checking) {
    for (size_t i = 0; i < group->memory_bytes; ++i) group->arena[i] = i % 2 ? 0x7f : (char)0xff;
  }
}

void* leave_group(Group* group) {
  if (group->next == group->last) return group->caller;
  begin_group(group);
  return next_thread(group, shuffled(group) ? random_bit(group, group->ready) : 0);
}

// Abandons the threads where they stand; nothing of theirs needs to be undone.
void* give_up(Group* group) {
  group->prepared = 0;
  return group->caller;
}

// The user's line of a site.
struct Line {
  char text[48];
};

Line line_of(const Group* group, unsigned site) {
  Line line = {"an unknown line"};
  for (unsigned i = 0; i < group->program->site_count; ++i) {
    if (group->program->sites[2 * i] != (int)site) continue;
    int number = group->program->sites[2 * i + 1];
    std::snprintf(line.text, sizeof line.text, "line %d of the %s", number < 0 ? -number : number,
                  number < 0 ? "header" : "source");
  }
  return line;
}

void* report_divergence(Group* group) {
  unsigned other = group->fibers[group->stray].site;
  Line here = line_of(group, group->barrier_site), there = line_of(group, other);
  if (other != group->barrier_site) {
    fail(group->launch->failure,
         "threads of one group wait at different barriers, some in %s, others (such as thread %u) "
         "in %s; every thread must reach the same barrier",
         here.text, group->stray, there.text);
  } else {
    fail(group->launch->failure,
         "threads of one group wait at the barrier in %s in different turns of a loop or from "
         "different calls; every thread must reach it equally often",
         here.text);
  }
  return give_up(group);
}

// All threads that have not returned stand at a barrier.
void* pass_barrier(Group* group) {
  if (group->stray != zk_most_threads) return report_divergence(group);
  if (group->launch->checking && group->alive != group->threads) {
    fail(group->launch->failure,
         "%u of %u threads returned before the barrier in %s; Metal leaves that undefined",
         group->threads - group->alive, group->threads, line_of(group, group->barrier_site).text);
    return give_up(group);
  }
  group->at_barrier = false;
  for (unsigned i = 0; i < group->simdgroup_count; ++i) {
    group->simdgroups[i].ready = group->simdgroups[i].live;
    if (group->simdgroups[i].live) group->ready |= 1u << i;
  }
  return next_thread(group, (unsigned)(shuffled(group) ? random_bit(group, group->ready)
                                                       : __builtin_ctz(group->ready)));
}

ZK_INLINED bool overflowed(Group* group, void* stack) {
  return (char*)stack < stack_low(group, group->index);
}

void* report_overflow(Group* group) {
  fail(group->launch->failure,
       "a thread needs more than %zu KiB for its variables; use smaller arrays", stack_bytes >> 10);
  return give_up(group);
}

}  // namespace

void prepare_fibers(Group* group, unsigned threads) {
  for (; group->prepared < threads; ++group->prepared) {
    void** top = (void**)stack_top(group, group->prepared);
#if defined(__x86_64__)
    void** stack = top - 8;  // padding, r15, r14, r13, r12, rbx, rbp, return address
    std::memset(stack, 0, 64);
    stack[4] = group;
    stack[7] = (void*)zk_fiber_start;
#else
    void** stack = top - 20;  // x29, x30, x19 … x28, d8 … d15
    std::memset(stack, 0, 160);
    stack[1] = (void*)zk_fiber_start;
    stack[2] = group;
#endif
    group->fibers[group->prepared].stack = stack;
  }
}

}  // namespace zmlx

using namespace zmlx;

// Each gets the stack pointer of the fiber that stops and returns that of the one to run.
extern "C" {
#define ZK_PRIVATE __attribute__((visibility("hidden"), used))

ZK_PRIVATE void zk_fiber_main(Group* group) {
  const char* floor = stack_low(group, group->index);
  for (;;) {
    group->program->run_thread(group->launch, group, floor);
    zk_fiber_finish(group);
  }
}

ZK_PRIVATE void* zk_decide_enter(Group* group, unsigned, zk_operation, void* stack) {
  group->caller = stack;
  return leave_group(group);
}

ZK_PRIVATE void* zk_decide_meet(Group* group, unsigned site, zk_operation operation, void* stack) {
  unsigned thread = group->index, simdgroup = thread / zk_simd_width;
  Simdgroup& simd = group->simdgroups[simdgroup];
  unsigned long long path = group->level ? group->level->path : 0;
  if (overflowed(group, stack)) return report_overflow(group);
  group->fibers[thread] = {stack, group->level, operation, site};
  if (!simd.waiting) {
    simd.site = site;
    simd.path = path;
  } else {
    simd.mixed |= site != simd.site || path != simd.path;
  }
  unsigned bit = 1u << thread % zk_simd_width;
  simd.waiting |= bit;
  simd.ready &= ~bit;
  return next_thread(group, simdgroup);
}

ZK_PRIVATE void* zk_decide_barrier(Group* group, unsigned site, zk_operation, void* stack) {
  unsigned thread = group->index, simdgroup = thread / zk_simd_width;
  unsigned long long path = group->level ? group->level->path : 0;
  if (overflowed(group, stack)) return report_overflow(group);
  group->fibers[thread] = {stack, group->level, nullptr, site};
  if (!group->at_barrier) {
    group->at_barrier = true;
    group->barrier_site = site;
    group->barrier_path = path;
  } else if (site != group->barrier_site || path != group->barrier_path) {
    group->stray = thread;
  }
  group->simdgroups[simdgroup].ready &= ~(1u << thread % zk_simd_width);
  return next_thread(group, simdgroup);
}

ZK_PRIVATE void* zk_decide_finish(Group* group, unsigned, zk_operation, void* stack) {
  unsigned thread = group->index, simdgroup = thread / zk_simd_width;
  unsigned bit = 1u << thread % zk_simd_width;
  group->fibers[thread].stack = stack;
  group->simdgroups[simdgroup].live &= ~bit;
  group->simdgroups[simdgroup].ready &= ~bit;
  --group->alive;
  return next_thread(group, simdgroup);
}

ZK_PRIVATE void* zk_decide_overflow(Group* group, unsigned, zk_operation, void*) {
  return report_overflow(group);
}

}  // extern "C"
