// What the core needs of the machine: a compiler, a cache of compiled kernels, threads, a BLAS.
// No MLX and no Python in here.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "prelude/abi.h"

namespace zmlx {

// SHA-256 in lower-case hexadecimal.
std::string sha256(std::string_view data);

// Counted since the core was loaded; `statistics()` of the binding returns them.
struct Statistics {
  std::atomic<uint64_t> compiles{0};           // compiler runs
  std::atomic<uint64_t> cache_hits{0};         // kernels loaded from disk
  std::atomic<uint64_t> launches{0};           // kernels that ran
  std::atomic<uint64_t> contiguous_copies{0};  // inputs copied because of their strides
  std::atomic<uint64_t> donations{0};          // outputs that took over an input's memory
};
Statistics& statistics();

// ---- program.cc -------------------------------------------------------------------------------

// The path of an executable, by its name or path; empty if there is none.
std::string find_program(const std::string& name);

struct Outcome {
  bool ok;             // it ended with status 0, or nothing is known of how it ended
  std::string output;  // what it printed, to either stream
};

// Runs a program without a shell. Throws Interrupted.
Outcome run_program(const std::vector<std::string>& arguments);

// `check` is asked now and then while somebody waits for a program: it runs the host program's
// handlers of the signals that came, and says whether one raised.
void set_interrupts(bool (*check)());

// Such a handler raised. The program was ended.
struct Interrupted {};

// Throws Interrupted if `check` says so. Whoever waits does this again and again: a signal that
// comes to another thread, or before the wait begins, does not end it.
void handle_signals();
constexpr int milliseconds_between_looks = 50;

std::string error_text(int error);  // an errno in words

// ---- compile.cc -------------------------------------------------------------------------------

using KernelFunction = decltype(&zk_kernel);

struct CompileRequest {
  std::string text;    // a complete translation unit
  bool cooperative;    // threads of a group meet at collectives
  std::string prefix;  // readable start of the object's file name
};

// Raised when the compiler rejects a text. `output` is what the compiler printed.
struct CompileError {
  std::string output;
};

// The kernel's entry point, from the cache or from the compiler. Throws CompileError, Interrupted,
// or std::runtime_error when there is no compiler or no writable directory.
KernelFunction compile_kernel(const CompileRequest&);

// Where objects are kept. The directory must belong to the user and be private (zmlx/cache.py
// decides); an empty path means a private temporary directory that goes with the process.
void set_cache_directory(const std::string&);

// ---- pool.cc ----------------------------------------------------------------------------------

// Runs body(worker, begin, end) over 0 ... count-1, in chunks that the threads take as they get
// free. `bytes` is the memory that the whole job touches: below a measured threshold the calling
// thread does it all, since waking another would cost more.
void parallel(uint64_t count, uint64_t bytes,
              const std::function<void(zk_worker*, uint64_t begin, uint64_t end)>& body);

int threads();
void set_threads(int);  // 0: the default, from $ZMLX_NUM_THREADS, affinity and cgroup quota

// ---- fork.cc ----------------------------------------------------------------------------------

// Notes that the MLX stream of this number runs kernels.
void note_stream(int stream);
// Whether it did before this process was forked, and lost its thread by that.
bool is_lost(int stream);

// ---- division.cc ------------------------------------------------------------------------------

// While one lives, an integer that is divided by zero on its thread gives 0 and no signal.
struct RunningKernel {
  RunningKernel();
  ~RunningKernel();
  RunningKernel(const RunningKernel&) = delete;
};

// ---- copy.cc ----------------------------------------------------------------------------------

// Writes the elements of a strided array to `to`, in row-major order. Strides are in elements.
void copy_to_contiguous(const char* from, char* to, size_t itemsize, const int32_t* shape,
                        const int64_t* strides, int ndim);

// ---- blas.cc ----------------------------------------------------------------------------------

// Routes the BLAS calls of libmlx to `library` (OpenBLAS with the symbol prefix `prefix`) by
// rewriting libmlx's own import table. Returns the number of routed functions; throws when the
// platform or the library does not allow it.
int route_blas(const std::string& library, const std::string& prefix, int threads);
bool blas_routed();

}  // namespace zmlx
