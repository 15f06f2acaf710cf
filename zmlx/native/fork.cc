// Streams of MLX that a fork left without their thread.
//
// MLX gives each stream a thread, at its first task. A forked process has the stream and not the
// thread: what it evaluates there it waits for without end, and for an error, too. So a call is
// refused. The streams that ran kernels are noted without a lock, which a thread that is not forked
// might hold.
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "host.h"

namespace zmlx {
namespace {

// MLX counts streams up. What is beyond these is not noted.
constexpr size_t most_streams = 1 << 16;

struct Streams {
  std::array<std::atomic<uint64_t>, most_streams / 64> words = {};

  bool hold(size_t stream) const {
    return words[stream / 64].load(std::memory_order_relaxed) >> stream % 64 & 1;
  }
  void add(size_t stream) {
    if (hold(stream)) return;
    words[stream / 64].fetch_or(uint64_t(1) << stream % 64, std::memory_order_relaxed);
  }
};

Streams begun, lost;

void lose_all() {
  for (size_t i = 0; i < begun.words.size(); ++i) lost.words[i] |= begun.words[i].exchange(0);
}

}  // namespace

void note_stream(int stream) {
  if (size_t(stream) >= most_streams) return;
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, lose_all); });
  begun.add(stream);
}

bool is_lost(int stream) { return size_t(stream) < most_streams && lost.hold(stream); }

}  // namespace zmlx
