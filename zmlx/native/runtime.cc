// Workers: the memory that cooperative threadgroups run in, and the call that runs them. Which
// thread runs when is decided in scheduler.cc.
#include "runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <new>

#include "scheduler.h"

namespace zmlx {
namespace {

// Stacks whose tops share their low address bits would share a few sets of the first-level cache.
constexpr size_t stack_spread = 4 << 10;
constexpr size_t largest_page = 64 << 10;
const size_t page = (size_t)sysconf(_SC_PAGESIZE);
// The page between may be a guard.
const size_t stack_stride = (stack_bytes + stack_spread + 2 * page - 1) / page * page;
// Below the first stack lies room for what overflows it, until the overflow is noticed: a thread's
// variables, all at once.
constexpr size_t room = 16 << 20;
constexpr size_t stacks_at = ((sizeof(Group) + room) / largest_page + 1) * largest_page;
static_assert(stacks_at + zk_most_threads * (stack_bytes + 2 * largest_page) <= zk_region_bytes);

}  // namespace

char* stack_low(Group* group, unsigned thread) {
  return (char*)group + stacks_at + page + thread * stack_stride;
}

char* stack_top(Group* group, unsigned thread) {
  return stack_low(group, thread) + stack_bytes + stack_spread - thread * 448 % stack_spread;
}

// `set` becomes 2 when the text is whole.
void fail(zk_failure* failure, const char* format, ...) {
  int none = 0;
  if (!__atomic_compare_exchange_n(&failure->set, &none, 1, false, __ATOMIC_ACQ_REL,
                                   __ATOMIC_RELAXED)) {
    return;
  }
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(failure->text, sizeof failure->text, format, arguments);
  va_end(arguments);
  __atomic_store_n(&failure->set, 2, __ATOMIC_RELEASE);
}

}  // namespace zmlx

struct zk_worker {
  char* region = nullptr;
  size_t open = 0;  // bytes of the region that may be used
};

namespace {

using namespace zmlx;

// Reserves an aligned region; memory is taken from the system page by page as it is touched.
bool reserve(zk_worker* worker) {
  if (worker->region) return true;
  size_t twice = 2 * zk_region_bytes;
  void* found = mmap(nullptr, twice, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return false;
  char* start = (char*)found;
  char* region = (char*)(((uintptr_t)start + zk_region_bytes - 1) & ~(zk_region_bytes - 1));
  if (region > start) munmap(start, region - start);
  munmap(region + zk_region_bytes, start + twice - (region + zk_region_bytes));
#ifdef MADV_NOHUGEPAGE
  madvise(region, zk_region_bytes, MADV_NOHUGEPAGE);  // a huge page would span 30 stacks
#endif
  worker->region = region;
  return true;
}

Group* open_group(zk_worker* worker, unsigned threads, bool guarded) {
  size_t need = stacks_at + threads * stack_stride;
  if (!reserve(worker)) return nullptr;
  if (need > worker->open) {
    // From the start, so that no guard is left.
    if (mprotect(worker->region, need, PROT_READ | PROT_WRITE) != 0) return nullptr;
    if (worker->open == 0) new (worker->region) Group();
    worker->open = need;
    ((Group*)worker->region)->guarded = false;
  }
  Group* group = (Group*)worker->region;
  if (guarded != group->guarded) {
    for (char* guard = (char*)group + stacks_at; guard < worker->region + worker->open;
         guard += stack_stride) {
      mprotect(guard, page, guarded ? PROT_NONE : PROT_READ | PROT_WRITE);
    }
    group->guarded = guarded;
  }
  return group;
}

// Gives every threadgroup declaration its place; false when they do not fit.
bool place_memory(Group* group, const zk_cooperative& program, zk_failure* failure) {
  size_t used = 0;
  for (unsigned i = 0; i < program.declarations; ++i) used += (program.bytes[i] + 15) / 16 * 16;
  if (used > memory_limit) {
    fail(failure, "threadgroup variables take %zu bytes, more than the %zu that Metal has", used,
         memory_limit);
    return false;
  }
  group->memory_bytes = 0;
  for (unsigned i = 0; i < program.declarations; ++i) {
    group->memory[i] = group->arena + group->memory_bytes;
    group->memory_bytes += (program.bytes[i] + 63) / 64 * 64;
  }
  return true;
}

void run(const zk_launch* launch, zk_worker* worker, unsigned long long begin,
         unsigned long long end, const zk_cooperative* program) {
  if (begin >= end) return;
  unsigned threads = launch->group[0] * launch->group[1] * launch->group[2];
  Group* group = open_group(worker, threads, launch->checking != 0);
  if (!group) {
    fail(launch->failure, "no memory for the stacks of %u threads", threads);
    return;
  }
  if (!place_memory(group, *program, launch->failure)) return;
  group->meet = zk_fiber_meet;
  group->barrier = zk_fiber_barrier;
  group->overflow = zk_fiber_overflow;
  group->launch = launch;
  group->program = program;
  group->next = begin;
  group->last = end;
  group->random = (unsigned)launch->schedule * 0x9e3779b97f4a7c15ull + begin + 1;
  prepare_fibers(group, threads);
  zk_fiber_enter(group);
}

const zk_runtime table = {run};

}  // namespace

namespace zmlx {

const zk_runtime* runtime() { return &table; }

zk_worker* new_worker() { return new zk_worker; }

void delete_worker(zk_worker* worker) {
  if (worker && worker->region) munmap(worker->region, zk_region_bytes);
  delete worker;
}

}  // namespace zmlx
