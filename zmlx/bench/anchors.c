// The memory bandwidth and the arithmetic that a result is held against. Threads take blocks (of
// 1 MiB, or as many steps of arithmetic as that has lines) until none is left; time runs from the
// moment when all threads stand ready until the last one is done.

#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <time.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

enum { COPY, NON_TEMPORAL, READ, FMA };

typedef float line __attribute__((vector_size(64)));  // 64 bytes: one cache line
enum { BLOCK = (1 << 20) / sizeof(line) };

// What sums are kept in: of longer vectors g++ makes memory.
#if defined(__AVX512F__)
enum { WIDTH = 64 };
#elif defined(__AVX__)
enum { WIDTH = 32 };
#else
enum { WIDTH = 16 };
#endif
typedef float lanes __attribute__((vector_size(WIDTH)));
enum { READS = 8, SUMS = 12 };  // enough to hide the latency of an addition

struct job {
  int kind;
  int threads;
  line* to;
  const line* from;
  size_t lines;
  size_t next;  // block to be taken
  int ready, started, done;
};

// The empty asm keeps the compiler from turning a loop into a call of memcpy, which chooses its own
// kind of store.
#define ONE_BY_ONE(i) __asm__ volatile("" : "+r"(i))

static void copy(line* to, const line* from, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    ONE_BY_ONE(i);
    to[i] = from[i];
  }
}

static void copy_non_temporal(line* to, const line* from, size_t n) {
#ifdef __SSE__
  for (size_t i = 0; i < n; ++i)
    for (int part = 0; part < 4; ++part)
      _mm_stream_ps((float*)(to + i) + 4 * part, _mm_load_ps((const float*)(from + i) + 4 * part));
  _mm_sfence();
#else
  copy(to, from, n);
#endif
}

static void read_all(const line* from, size_t n) {
  const lanes* p = (const lanes*)from;
  lanes sum[READS] = {0};
  for (size_t i = 0; i + READS <= n * (sizeof(line) / WIDTH); i += READS)
    for (int k = 0; k < READS; ++k) sum[k] += p[i + k];
  for (int k = 1; k < READS; ++k) sum[0] += sum[k];
  volatile float sink = sum[0][0];
  (void)sink;
}

// 2 * SUMS * 16 operations a step, in registers.
static void multiply_add(size_t steps) {
  volatile float given = 0.5f;  // the compiler may not know that all sums are the same
  lanes sum[SUMS];
  lanes factor = (lanes){0} + given, addend = factor;
  for (int k = 0; k < SUMS; ++k) sum[k] = (lanes){0} + given;
  for (size_t i = 0; i < steps * (sizeof(line) / WIDTH); ++i) {
    ONE_BY_ONE(i);
    for (int k = 0; k < SUMS; ++k) sum[k] = sum[k] * factor + addend;
  }
  for (int k = 1; k < SUMS; ++k) sum[0] += sum[k];
  volatile float sink = sum[0][0];
  (void)sink;
}

static void take_blocks(struct job* job) {
  for (;;) {
    size_t begin = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED) * BLOCK;
    if (begin >= job->lines) return;
    size_t n = job->lines - begin < BLOCK ? job->lines - begin : BLOCK;
    if (job->kind == COPY) copy(job->to + begin, job->from + begin, n);
    if (job->kind == NON_TEMPORAL) copy_non_temporal(job->to + begin, job->from + begin, n);
    if (job->kind == READ) read_all(job->from + begin, n);
    if (job->kind == FMA) multiply_add(n);
  }
}

static void wait_for(const int* count, int value) {
  while (__atomic_load_n(count, __ATOMIC_ACQUIRE) < value) sched_yield();
}

static void* work(void* argument) {
  struct job* job = argument;
  __atomic_fetch_add(&job->ready, 1, __ATOMIC_RELEASE);
  wait_for(&job->started, 1);
  take_blocks(job);
  __atomic_fetch_add(&job->done, 1, __ATOMIC_RELEASE);
  return NULL;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Walks `lines` cache lines (FMA: takes as many steps) with up to 64 threads; returns seconds, or -1
// where a thread cannot start. Both pointers are aligned to 64 bytes; FMA does not use them.
double zmlx_anchor(int kind, void* to, const void* from, size_t lines, int threads) {
  struct job job = {kind, threads, to, from, lines, 0, 0, 0, 0};
  pthread_t ids[64];
  int helpers = 0;
  while (helpers < threads - 1 && helpers < 64 &&
         pthread_create(&ids[helpers], NULL, work, &job) == 0)
    ++helpers;
  wait_for(&job.ready, helpers);
  double start = now();
  __atomic_store_n(&job.started, 1, __ATOMIC_RELEASE);
  take_blocks(&job);
  wait_for(&job.done, helpers);
  double seconds = now() - start;
  for (int i = 0; i < helpers; ++i) pthread_join(ids[i], NULL);
  return helpers == threads - 1 ? seconds : -1;
}
