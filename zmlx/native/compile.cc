// From C++ text to a loaded kernel: the compiler, its flags, and the cache of objects.
//
// An object's name is the digest of all that decides its bytes: text (prelude included), flags,
// compiler and processor. An entry is written beside its final name and renamed, so that a reader
// never sees half of one and two processes that compile the same kernel do no harm; its own digest
// follows the ELF image (loaders ignore what follows) and is checked before it is loaded. Threads
// that want the same kernel at the same time compile it once.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <unordered_map>
#include <vector>

#include "host.h"

namespace zmlx {
namespace {

constexpr std::string_view seal = "zmlx-object-1 ";  // followed by the digest of what precedes it

std::optional<std::string> read_file(const std::string& path) {
  int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return std::nullopt;
  std::string data;
  char block[1 << 16];
  ssize_t got;
  while ((got = read(file, block, sizeof block)) > 0 || (got < 0 && errno == EINTR)) {
    if (got > 0) data.append(block, got);
  }
  close(file);
  if (got < 0) return std::nullopt;
  return data;
}

// False, with errno set, when the file could not be written whole.
bool write_file(const std::string& path, std::string_view data, int flags) {
  int file = open(path.c_str(), O_WRONLY | O_CLOEXEC | flags, 0600);
  if (file < 0) return false;
  while (!data.empty()) {
    ssize_t put = write(file, data.data(), data.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) {
      int error = errno;
      close(file);
      errno = error;
      return false;
    }
    data.remove_prefix(put);
  }
  return close(file) == 0;
}

// ---- what threads share -----------------------------------------------------------------------

// A kernel that some thread compiles. Others that want it wait.
struct Compile {
  const pid_t process = getpid();
  const std::thread::id thread = std::this_thread::get_id();
  std::condition_variable ended;
  bool over = false;
  std::exception_ptr failure;

  // Whether there is somebody to wait for: a forked process has none of its parent's threads, and a
  // signal's handler runs in the thread whose compile it came into.
  bool elsewhere() const { return process == getpid() && thread != std::this_thread::get_id(); }
};

// Of all below, and held for no longer than it takes to look.
std::mutex shared_mutex;
std::string cache_directory;
std::unordered_map<std::string, std::string> versions;  // of compilers, by file
std::unordered_map<std::string, KernelFunction> loaded;  // by digest, as is the next
std::unordered_map<std::string, std::shared_ptr<Compile>> compiles;  // those that go on

// ---- the compiler -----------------------------------------------------------------------------

struct Compiler {
  std::string path;
  std::string identity;  // path, version, file: a changed compiler makes every entry stale
};

Compiler find_compiler() {
  std::string path;
  const char* chosen = std::getenv("ZMLX_CXX");
  if (chosen && *chosen) {
    path = find_program(chosen);
    if (path.empty()) {
      throw std::runtime_error(std::string("[zmlx] ZMLX_CXX must name a C++ compiler but got '") +
                               chosen + "', which is not an executable.");
    }
  } else {
    for (const char* name : {"g++", "c++", "clang++"}) {
      path = find_program(name);
      if (!path.empty()) break;
    }
    if (path.empty()) {
      throw std::runtime_error(
          "[zmlx] The CPU target needs g++ or clang++ with its standard library: apt install g++");
    }
  }
  struct stat info = {};
  stat(path.c_str(), &info);
  std::ostringstream file;
  file << path << ' ' << info.st_size << ' ' << info.st_mtime << ' ' << info.st_ino;

  // One `--version` per compiler and process, or one per thread where several begin at once.
  {
    std::lock_guard<std::mutex> lock(shared_mutex);
    auto found = versions.find(file.str());
    if (found != versions.end()) return {path, file.str() + '\n' + found->second};
  }
  std::string version = run_program({path, "--version"}).output;
  std::lock_guard<std::mutex> lock(shared_mutex);
  versions.try_emplace(file.str(), version);
  return {path, file.str() + '\n' + version};
}

// What -march=native means here: the first processor's entry, without what changes from one
// moment to the next.
const std::string& processor() {
  static const std::string description = [] {
    std::string text;
    FILE* file = std::fopen("/proc/cpuinfo", "re");
    char line[8192];
    while (file && std::fgets(line, sizeof line, file) && line[0] != '\n') {
      for (const char* name : {"vendor_id", "cpu family", "model", "stepping", "flags", "Features",
                               "CPU implementer", "CPU variant", "CPU part"}) {
        if (std::strncmp(line, name, std::strlen(name)) == 0) {
          text += line;
          break;
        }
      }
    }
    if (file) std::fclose(file);
    utsname system;
    if (uname(&system) == 0) text += std::string(system.sysname) + ' ' + system.machine;
    return text;
  }();
  return description;
}

std::vector<std::string> compiler_flags(const Compiler& compiler, bool cooperative) {
  std::vector<std::string> flags = {
      "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
      "-nostdlib", "-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math", "-Wno-narrowing", "-Werror=vla", "-pipe",
#if defined(__aarch64__)
      "-mcpu=native", "-fsigned-char",  // which Metal's char is
#else
      // g++ prefers vectors of 256 bits on most processors that have AVX-512; the longer ones made
      // bfloat16 rows from cache 1.2 to 1.4 times as fast and float32 rows no slower.
      "-march=native", "-mprefer-vector-width=512",
#endif
  };
  // Cooperative groups promise the association that a GPU has, down to the bit, and run no faster
  // at higher levels; everything else is a loop to vectorise, still without reassociation.
  if (cooperative) {
    flags.insert(flags.end(), {"-O1", "-ffp-contract=off"});
  } else {
    // g++ gives up on a loop that needs more than 10 checks that arrays do not overlap: two outputs
    // of five inputs. clang ignores the parameter.
    flags.insert(flags.end(), {"-O3", "-ffp-contract=fast",
                               "--param=vect-max-version-for-alias-checks=100"});
  }
  if (compiler.identity.find("Free Software Foundation") == std::string::npos) return flags;
  // Where an integer is divided by zero, g++ would end the process instead of dividing.
  flags.push_back("-fno-isolate-erroneous-paths-dereference");
  // Passes that took a quarter of the time of g++ on average (a tenth in cooperative groups) and made
  // no kernel faster, of 50 pairs of kernel and dtype that were timed; threading jumps alone took a
  // quarter of a row kernel's, and registers allocated loop by loop an eighth. Others were not left
  // out, since some kernel needs them: without ranges of values (VRP) softmax takes five times as
  // long, without induction variables attention a quarter longer, without GCSE silu 4 % longer.
  flags.insert(flags.end(), {"-fno-thread-jumps", "-fira-region=one", "-fno-shrink-wrap",
                             "-fno-partial-inlining", "-fno-tree-bit-ccp", "-fno-dse",
                             "-fno-ident"});
  if (cooperative) {
    flags.insert(flags.end(), {"-fno-ivopts", "-fno-tree-dominator-opts",
                               "-fno-if-conversion", "-fno-if-conversion2", "-fno-tree-slsr"});
  } else {
    flags.insert(flags.end(), {"-fno-tree-pre", "-fno-code-hoisting", "-fno-gcse-after-reload",
                               "-fno-cse-follow-jumps", "-fno-rerun-cse-after-loop",
                               "-fno-crossjumping", "-fno-tree-tail-merge", "-fno-split-paths",
                               "-fno-predictive-commoning", "-fno-loop-interchange",
                               "-fno-loop-unroll-and-jam", "-fno-split-loops",
                               "-fno-version-loops-for-strides", "-fno-tree-loop-distribution",
                               "-fno-unswitch-loops", "-fno-schedule-insns2",
                               "--param=vect-epilogues-nomask=0"});
  }
  return flags;
}

// ---- the cache --------------------------------------------------------------------------------

KernelFunction load_object(const std::string& path, std::string* why) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* symbol = handle ? dlsym(handle, "zk_kernel") : nullptr;
  if (!symbol) {
    const char* text = dlerror();
    *why = text ? text : "no zk_kernel in it";
    if (handle) dlclose(handle);
  }
  // Never closed again: a lazy node may still be waiting to run it.
  return reinterpret_cast<KernelFunction>(symbol);
}

bool intact(const std::string& object) {
  size_t tail = seal.size() + 64;
  if (object.size() <= tail) return false;
  std::string_view view(object);
  std::string_view body = view.substr(0, view.size() - tail);
  return view.substr(body.size(), seal.size()) == seal && view.substr(view.size() - 64) ==
                                                              sha256(body);
}

struct TemporaryDirectory {
  std::string path;
  TemporaryDirectory() {
    const char* chosen = std::getenv("TMPDIR");
    std::string base = chosen && *chosen ? chosen : "/tmp";
    path = base + "/zmlx-XXXXXX";
    if (!mkdtemp(path.data())) {
      throw std::runtime_error("[zmlx] Cannot make a temporary directory in " + base + " (" +
                               error_text(errno) +
                               "); set TMPDIR to a directory that can be written.");
    }
  }
  ~TemporaryDirectory() { rmdir(path.c_str()); }
};

// The directory cannot be written (full, read-only, gone).
struct Unwritable {
  std::string why;
};

// Removes what processes that were killed left of entries that they were making. Only such files
// have two points in their names.
void remove_leftovers(const std::string& directory) {
  constexpr time_t seconds_of_the_longest_compile = 3600;
  DIR* listing = opendir(directory.c_str());
  if (!listing) return;
  while (dirent* entry = readdir(listing)) {
    const char* point = std::strchr(entry->d_name, '.');
    if (!point || point == entry->d_name || !std::strchr(point + 1, '.')) continue;
    struct stat info;
    if (fstatat(dirfd(listing), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
        info.st_mtime + seconds_of_the_longest_compile < std::time(nullptr)) {
      unlinkat(dirfd(listing), entry->d_name, 0);
    }
  }
  closedir(listing);
}

// Compiles into `directory` under `name` and loads it; the object stays there if `keep`.
KernelFunction build(const CompileRequest& request, const Compiler& compiler,
                     const std::string& directory, const std::string& name, bool keep) {
  // Processes of several containers that share the directory may have the same number.
  std::random_device random;
  std::string base = directory + "/" + name;
  std::string unique = base + "." + std::to_string(getpid()) + "." + std::to_string(random()) +
                       std::to_string(random());
  std::string source = unique + ".cc", object = unique + ".so";
  struct Cleanup {
    std::vector<std::string> paths;
    ~Cleanup() {
      for (auto& path : paths) unlink(path.c_str());
    }
  } cleanup{{source, object}};

  if (!write_file(source, request.text, O_CREAT | O_EXCL)) throw Unwritable{error_text(errno)};
  std::vector<std::string> command = {compiler.path};
  for (auto& flag : compiler_flags(compiler, request.cooperative)) command.push_back(flag);
  command.insert(command.end(), {source, "-o", object, "-lm"});
  Outcome outcome = run_program(command);
  statistics().compiles++;
  auto bytes = outcome.ok ? read_file(object) : std::nullopt;
  if (!bytes) {
    if (outcome.ok) outcome.output += compiler.path + " wrote no object: is it a C++ compiler?\n";
    if (outcome.output.empty()) outcome.output = compiler.path + " failed and said nothing\n";
    for (int full : {ENOSPC, EDQUOT}) {
      bool is_full = outcome.output.find(error_text(full)) != std::string::npos;
      if (keep && is_full) throw Unwritable{error_text(full)};
    }
    throw CompileError{outcome.output};
  }
  if (keep && (!write_file(object, std::string(seal) + sha256(*bytes), O_APPEND) ||
               rename(object.c_str(), (base + ".so").c_str()) != 0)) {
    throw Unwritable{error_text(errno)};
  }
  std::string why;
  KernelFunction function = load_object(keep ? base + ".so" : object, &why);
  if (!function) throw CompileError{"the compiled kernel does not load: " + why + "\n"};
  return function;
}

// From the cache of `directory`, if there is one, or from the compiler.
KernelFunction load_or_build(const CompileRequest& request, const Compiler& compiler,
                             const std::string& directory, const std::string& name) {
  if (!directory.empty()) {
    std::string path = directory + "/" + name + ".so";
    auto object = read_file(path);
    std::string why;
    KernelFunction function = nullptr;
    if (object && intact(*object)) function = load_object(path, &why);
    if (function) {
      statistics().cache_hits++;
      return function;
    }
    static std::once_flag swept;
    std::call_once(swept, remove_leftovers, directory);
    try {
      return build(request, compiler, directory, name, true);
    } catch (const Unwritable& problem) {
      static std::once_flag once;
      std::call_once(once, [&] {
        std::fprintf(stderr, "zmlx: cannot write to %s (%s); compiled kernels are not kept.\n",
                     directory.c_str(), problem.why.c_str());
      });
    }
  }
  TemporaryDirectory temporary;
  try {
    return build(request, compiler, temporary.path, name, false);
  } catch (const Unwritable& problem) {
    throw std::runtime_error("[zmlx] Cannot write to " + temporary.path + ": " + problem.why);
  }
}

// Until the other thread is done with it, or a signal's handler raises.
void wait_for(Compile& other, std::unique_lock<std::mutex>& lock) {
  std::chrono::milliseconds time(milliseconds_between_looks);
  while (!other.ended.wait_for(lock, time, [&] { return other.over; })) {
    lock.unlock();  // Python's lock is never asked for under this one
    handle_signals();
    lock.lock();
  }
}

// Takes a compile off the list, however it ends, and wakes who waits for it.
struct Ending {
  const std::string& key;
  const std::shared_ptr<Compile>& compile;
  ~Ending() {
    std::lock_guard<std::mutex> lock(shared_mutex);
    auto found = compiles.find(key);
    if (found != compiles.end() && found->second == compile) compiles.erase(found);
    compile->over = true;
    compile->ended.notify_all();
  }
};

}  // namespace

void set_cache_directory(const std::string& path) {
  std::lock_guard<std::mutex> lock(shared_mutex);
  cache_directory = path;
}

KernelFunction compile_kernel(const CompileRequest& request) {
  Compiler compiler = find_compiler();
  std::string recipe = compiler.identity + '\n' + processor() + '\n';
  for (auto& flag : compiler_flags(compiler, request.cooperative)) recipe += flag + ' ';
  std::string key = sha256(recipe + '\n' + request.text);
  std::string name = request.prefix + "-" + key.substr(0, 32);

  auto compile = std::make_shared<Compile>();
  std::string directory;
  {
    std::unique_lock<std::mutex> lock(shared_mutex);
    while (true) {
      if (auto found = loaded.find(key); found != loaded.end()) return found->second;
      auto other = compiles[key];
      if (!other || !other->elsewhere()) break;
      wait_for(*other, lock);
      // One that was interrupted has no failure of its own, and somebody else begins again.
      if (other->failure) std::rethrow_exception(other->failure);
    }
    compiles[key] = compile;
    directory = cache_directory;
  }
  Ending ending{key, compile};
  try {
    KernelFunction function = load_or_build(request, compiler, directory, name);
    std::lock_guard<std::mutex> lock(shared_mutex);
    return loaded.try_emplace(key, function).first->second;
  } catch (const Interrupted&) {
    throw;
  } catch (...) {
    compile->failure = std::current_exception();
    throw;
  }
}

}  // namespace zmlx
