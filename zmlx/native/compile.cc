// From C++ text to a loaded kernel: the compiler, its flags, and the cache of objects.
//
// An object's name is the digest of all that decides its bytes: text (prelude included), flags,
// compiler and processor. An entry is written beside its final name and renamed, so that a reader
// never sees half of one and two processes that compile the same kernel do no harm; its own digest
// follows the ELF image (loaders ignore what follows) and is checked before it is loaded.
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <random>
#include <sstream>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include "host.h"

extern char** environ;

namespace zmlx {
namespace {

constexpr std::string_view seal = "zmlx-object-1 ";  // followed by the digest of what precedes it

std::string error_text(int error) { return std::strerror(error); }

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

// ---- the compiler -----------------------------------------------------------------------------

struct Compiler {
  std::string path;
  std::string identity;  // path, version, file: a changed compiler makes every entry stale
};

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    return access(name.c_str(), X_OK) == 0 ? name : std::string();
  }
  const char* path = std::getenv("PATH");
  std::istringstream directories(path ? path : "/usr/local/bin:/usr/bin:/bin");
  for (std::string directory; std::getline(directories, directory, ':');) {
    std::string full = (directory.empty() ? "." : directory) + "/" + name;
    struct stat info;
    if (stat(full.c_str(), &info) == 0 && S_ISREG(info.st_mode) && !access(full.c_str(), X_OK)) {
      return full;
    }
  }
  return {};
}

struct Outcome {
  bool ok;
  std::string output;
};

// Runs a program without a shell and collects what it prints.
Outcome run_program(const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  for (auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  // Messages in English, since explain() reads them.
  std::vector<char*> environment;
  for (char** entry = environ; *entry; ++entry) {
    if (std::strncmp(*entry, "LC_ALL=", 7) != 0) environment.push_back(*entry);
  }
  char locale[] = "LC_ALL=C";
  environment.push_back(locale);
  environment.push_back(nullptr);

  int pipe_ends[2];
  if (pipe2(pipe_ends, O_CLOEXEC) != 0) return {false, "pipe: " + error_text(errno)};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], 1);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], 2);
  pid_t child;
  int error = posix_spawn(&child, argv[0], &actions, nullptr, argv.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_ends[1]);
  std::string output;
  if (error == 0) {
    char block[4096];
    ssize_t got;
    while ((got = read(pipe_ends[0], block, sizeof block)) > 0 || (got < 0 && errno == EINTR)) {
      if (got > 0) output.append(block, got);
    }
  }
  close(pipe_ends[0]);
  if (error != 0) return {false, arguments[0] + ": " + error_text(error)};
  int status;
  pid_t waited;
  do {
    waited = waitpid(child, &status, 0);
  } while (waited < 0 && errno == EINTR);
  // A host program that ignores SIGCHLD leaves no status; then the object file decides.
  if (waited < 0) return {errno == ECHILD, output};
  if (WIFSIGNALED(status)) {
    output += arguments[0] + " was killed by signal " + std::to_string(WTERMSIG(status)) + "\n";
  }
  return {WIFEXITED(status) && WEXITSTATUS(status) == 0, output};
}

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

  // One `--version` per compiler and process.
  static std::mutex mutex;
  static std::unordered_map<std::string, std::string> versions;
  std::lock_guard<std::mutex> lock(mutex);
  auto [entry, fresh] = versions.try_emplace(file.str());
  if (fresh) entry->second = run_program({path, "--version"}).output;
  return {path, file.str() + '\n' + entry->second};
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
      "-nostdlib", "-fno-strict-aliasing", "-fno-math-errno", "-fno-trapping-math", "-w", "-pipe",
#if defined(__aarch64__)
      "-mcpu=native",
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

std::mutex cache_mutex;
std::string cache_directory;
std::unordered_map<std::string, KernelFunction> loaded;

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
    const char* base = std::getenv("TMPDIR");
    path = std::string(base && *base ? base : "/tmp") + "/zmlx-XXXXXX";
    if (!mkdtemp(path.data())) {
      throw std::runtime_error("[zmlx] Cannot make a temporary directory " + path + ": " +
                               error_text(errno));
    }
  }
  ~TemporaryDirectory() { rmdir(path.c_str()); }
};

// The directory cannot be written (full, read-only, gone).
struct Unwritable {
  std::string why;
};

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

}  // namespace

void set_cache_directory(const std::string& path) {
  std::lock_guard<std::mutex> lock(cache_mutex);
  cache_directory = path;
}

KernelFunction compile_kernel(const CompileRequest& request) {
  Compiler compiler = find_compiler();
  std::string recipe = compiler.identity + '\n' + processor() + '\n';
  for (auto& flag : compiler_flags(compiler, request.cooperative)) recipe += flag + ' ';
  std::string key = sha256(recipe + '\n' + request.text);
  std::string name = request.prefix + "-" + key.substr(0, 32);

  std::string directory;
  {
    std::lock_guard<std::mutex> lock(cache_mutex);
    if (auto found = loaded.find(key); found != loaded.end()) return found->second;
    directory = cache_directory;
  }
  KernelFunction function = nullptr;
  if (!directory.empty()) {
    std::string path = directory + "/" + name + ".so";
    auto object = read_file(path);
    std::string why;
    if (object && intact(*object)) function = load_object(path, &why);
    if (function) {
      statistics().cache_hits++;
    } else {
      try {
        function = build(request, compiler, directory, name, true);
      } catch (const Unwritable& problem) {
        static std::once_flag once;
        std::call_once(once, [&] {
          std::fprintf(stderr, "zmlx: cannot write to %s (%s); compiled kernels are not kept.\n",
                       directory.c_str(), problem.why.c_str());
        });
      }
    }
  }
  if (!function) {
    TemporaryDirectory temporary;
    try {
      function = build(request, compiler, temporary.path, name, false);
    } catch (const Unwritable& problem) {
      throw std::runtime_error("[zmlx] Cannot write to " + temporary.path + ": " + problem.why);
    }
  }
  std::lock_guard<std::mutex> lock(cache_mutex);
  return loaded.try_emplace(key, function).first->second;
}

}  // namespace zmlx
