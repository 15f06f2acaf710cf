// Runs another program, and ends it when the host program's signals say so.
#include <fcntl.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <thread>

#include "host.h"

extern char** environ;

namespace zmlx {
namespace {

std::atomic<bool (*)()> interrupts{nullptr};

// A program that runs, and the end of the pipe that it prints to. Whoever stops waiting for it ends
// it, with all that it started.
struct Child {
  pid_t number = 0;
  int output = -1;

  ~Child() {
    if (output >= 0) close(output);
    if (number == 0) return;
    kill(-number, SIGTERM);  // compilers remove their temporary files
    siginfo_t ended = {};
    for (int waits = 0; waits < 20 && ended.si_pid == 0; ++waits) {
      if (waits > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      if (waitid(P_PID, number, &ended, WEXITED | WNOHANG | WNOWAIT) != 0) break;
    }
    kill(-number, SIGKILL);
    while (waitpid(number, nullptr, 0) < 0 && errno == EINTR) {}
  }

  // Starts it in a group of processes of its own. The error's number, or 0.
  int start(char* const* argv, char* const* environment) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) return errno;
    output = ends[0];
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 2);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    pid_t child;
    int error = posix_spawn(&child, argv[0], &actions, &attributes, argv, environment);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (error == 0) number = child;
    return error;
  }

  std::string read_all() {
    std::string text;
    char block[4096];
    while (true) {
      pollfd ready = {output, POLLIN, 0};
      if (poll(&ready, 1, milliseconds_between_looks) <= 0) {
        handle_signals();
        continue;
      }
      ssize_t got = read(output, block, sizeof block);
      if (got > 0) {
        text.append(block, got);
      } else if (got == 0 || errno != EINTR) {
        return text;
      }
    }
  }

  // False where a host program that ignores SIGCHLD leaves no status.
  bool wait(int* status) {
    while (waitpid(number, status, 0) < 0) {
      if (errno == EINTR) {
        handle_signals();
        continue;
      }
      number = 0;
      return false;
    }
    number = 0;
    return true;
  }
};

}  // namespace

// As programs in run_program() say it, whatever the process's locale.
std::string error_text(int error) {
  static const locale_t english = newlocale(LC_ALL_MASK, "C", nullptr);
  return strerror_l(error, english);
}

void set_interrupts(bool (*check)()) { interrupts = check; }

void handle_signals() {
  bool (*check)() = interrupts;
  if (check && check()) throw Interrupted{};
}

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

  Child child;
  int error = child.start(argv.data(), environment.data());
  if (error != 0) return {false, arguments[0] + ": " + error_text(error)};
  std::string output = child.read_all();
  int status;
  if (!child.wait(&status)) return {true, output};  // the object file decides
  if (WIFSIGNALED(status)) {
    output += arguments[0] + " was killed by signal " + std::to_string(WTERMSIG(status)) + "\n";
  }
  return {WIFEXITED(status) && WEXITSTATUS(status) == 0, output};
}

}  // namespace zmlx
