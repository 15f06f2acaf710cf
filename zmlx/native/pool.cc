// Threads that run the threadgroups of a launch.
//
// The thread that asks takes part, and chunks are taken as threads get free, so that a thread which
// another process delays costs one chunk and not its share. A second launch that comes while the
// pool is at work (MLX runs each stream on its own thread) runs on its own thread alone.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "host.h"
#include "runtime.h"

namespace zmlx {
namespace {

// Waking a sleeping thread takes some 10 µs, the time in which one core moves this much.
constexpr uint64_t inline_bytes = 256 << 10;
constexpr int most_threads = 256;

using Body = std::function<void(zk_worker*, uint64_t, uint64_t)>;

zk_worker* this_worker() {
  struct Owner {
    zk_worker* worker = new_worker();
    ~Owner() { delete_worker(worker); }
  };
  thread_local Owner owner;
  return owner.worker;
}

class Pool {
 public:
  void run(uint64_t count, const Body& body, int threads) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn) {
      body(this_worker(), 0, count);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (int(workers_.size()) < threads - 1) {
        if (!add_thread()) break;
      }
      keep_off_this_cpu();
      body_ = &body;
      count_ = count;
      // Sixteen chunks per thread: fine enough to even out, coarse enough to be taken cheaply.
      chunk_ = std::max<uint64_t>(1, count / (uint64_t(threads) * 16));
      next_.store(0, std::memory_order_relaxed);
      seats_ = threads - 1;
      ++generation_;
    }
    if (threads == 2) {
      wake_.notify_one();
    } else {
      wake_.notify_all();
    }
    work(body, count, chunk_);
    std::unique_lock<std::mutex> lock(mutex_);
    body_ = nullptr;
    done_.wait(lock, [&] { return inside_ == 0; });
  }

 private:
  bool add_thread() {
    // Signals are for the program's own threads, but for the one that division.cc answers.
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGFPE);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = true;
    try {
      std::thread worker([this] { serve(); });
      workers_.push_back(worker.native_handle());
      worker.detach();
      avoided_ = -1;
    } catch (const std::system_error&) {
      started = false;  // a process limit: go on with fewer
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
  }

  // Linux in a virtual machine takes a CPU that sleeps for one that the host has taken away, and so
  // wakes a worker on the CPU of the thread that wakes it, which is at work there: one to four
  // milliseconds pass until it is moved. A worker that may not run there is woken elsewhere.
  void keep_off_this_cpu() {
#if defined(__linux__)
    int here = sched_getcpu();
    if (here == avoided_ || here < 0) return;
    avoided_ = here;
    cpu_set_t cpus;
    if (here >= CPU_SETSIZE || sched_getaffinity(0, sizeof cpus, &cpus) != 0) return;
    CPU_CLR(here, &cpus);
    if (CPU_COUNT(&cpus) == 0) return;
    // A worker that this fails for runs where it is put.
    for (pthread_t worker : workers_) pthread_setaffinity_np(worker, sizeof cpus, &cpus);
#endif
  }

  void serve() {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return body_ && generation_ != seen; });
      seen = generation_;
      if (seats_ == 0) continue;
      --seats_;
      ++inside_;
      const Body& body = *body_;
      uint64_t count = count_, chunk = chunk_;
      lock.unlock();
      work(body, count, chunk);
      lock.lock();
      if (--inside_ == 0) done_.notify_one();
    }
  }

  void work(const Body& body, uint64_t count, uint64_t chunk) {
    zk_worker* worker = this_worker();
    for (;;) {
      uint64_t begin = next_.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= count) return;
      body(worker, begin, std::min(count, begin + chunk));
    }
  }

  std::mutex turn_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const Body* body_ = nullptr;
  uint64_t count_ = 0, chunk_ = 1, generation_ = 0;
  std::atomic<uint64_t> next_{0};
  std::vector<pthread_t> workers_;
  int seats_ = 0, inside_ = 0;
  int avoided_ = -1;  // the CPU that workers are kept off
};

// Never destroyed: MLX may still be running tasks while the process ends.
std::atomic<Pool*> shared_pool{nullptr};

Pool& pool() {
  Pool* found = shared_pool.load(std::memory_order_acquire);
  if (found) return *found;
  static std::once_flag once;
  std::call_once(once, [] {
    // A forked child has the memory of the pool but none of its threads: it starts afresh.
    pthread_atfork(nullptr, nullptr, [] { shared_pool.store(nullptr, std::memory_order_release); });
  });
  auto* fresh = new Pool;
  if (shared_pool.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;
  return *found;
}

// The CPUs that the control group may use, or 0 where there is no limit.
int cgroup_limit() {
  double least = 0;
  auto consider = [&](double quota, double period) {
    if (quota > 0 && period > 0 && (least == 0 || quota / period < least)) least = quota / period;
  };
  auto read_line = [](const std::string& path, char* line, int size) {
    FILE* file = std::fopen(path.c_str(), "re");
    bool got = file && std::fgets(line, size, file);
    if (file) std::fclose(file);
    return got;
  };
  char line[4096];
  FILE* groups = std::fopen("/proc/self/cgroup", "re");
  while (groups && std::fgets(line, sizeof line, groups)) {
    if (std::strncmp(line, "0::", 3) != 0) continue;
    std::string path(line + 3);
    while (!path.empty() && (path.back() == '\n' || path.back() == '/')) path.pop_back();
    for (;;) {
      char limits[128];
      double quota, period;
      if (read_line("/sys/fs/cgroup" + path + "/cpu.max", limits, sizeof limits) &&
          std::sscanf(limits, "%lf %lf", &quota, &period) == 2) {
        consider(quota, period);
      }
      if (path.empty()) break;
      path.erase(path.rfind('/'));
    }
  }
  if (groups) std::fclose(groups);
  char quota[64], period[64];
  if (read_line("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota, sizeof quota) &&
      read_line("/sys/fs/cgroup/cpu/cpu.cfs_period_us", period, sizeof period)) {
    consider(std::atof(quota), std::atof(period));
  }
  return least == 0 ? 0 : std::max(1, int(least + 0.999));
}

int default_threads() {
  if (const char* chosen = std::getenv("ZMLX_NUM_THREADS"); chosen && *chosen) {
    char* end;
    long count = std::strtol(chosen, &end, 10);
    if (*end || count < 1 || count > most_threads) {
      throw std::invalid_argument("[zmlx] ZMLX_NUM_THREADS must be from 1 to " +
                                  std::to_string(most_threads) + " but got '" + chosen + "'.");
    }
    return int(count);
  }
  int count = 0;
#if defined(__linux__)
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus) == 0) count = CPU_COUNT(&cpus);
#endif
  if (count < 1) count = int(std::thread::hardware_concurrency());
  if (int limit = cgroup_limit(); limit > 0) count = std::min(count, limit);
  return std::clamp(count, 1, most_threads);
}

std::atomic<int> chosen_threads{0};

}  // namespace

int threads() {
  int count = chosen_threads.load(std::memory_order_relaxed);
  if (count == 0) {
    count = default_threads();
    chosen_threads.store(count, std::memory_order_relaxed);
  }
  return count;
}

void set_threads(int count) {
  if (count < 0 || count > most_threads) {
    throw std::invalid_argument("[set_threads] 'n' must be from 0 (the default) to " +
                                std::to_string(most_threads) + " but got " +
                                std::to_string(count) + ".");
  }
  chosen_threads.store(count, std::memory_order_relaxed);
}

void parallel(uint64_t count, uint64_t bytes, const Body& body) {
  if (count == 0) return;
  int width = int(std::min<uint64_t>(threads(), count));
  if (width == 1 || bytes < inline_bytes) {
    body(this_worker(), 0, count);
  } else {
    pool().run(count, body, width);
  }
}

}  // namespace zmlx
