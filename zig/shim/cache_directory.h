// Where compiled kernels are kept: the folder that zmlx/cache.py chooses, for the reasons that it
// gives, so that Python and Zig share what either compiled.
#pragma once

#include <pwd.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

namespace zmlx_shim {

// A variable of the environment; an empty one counts as none, as in Python.
inline std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// What "~" or "~user" stands for; none where no home directory is known.
inline std::optional<std::string> home_directory(const std::string& tilde) {
  bool own = tilde == "~";
  if (const char* home = std::getenv("HOME"); own && home) return home;
  const passwd* entry = own ? getpwuid(getuid()) : getpwnam(tilde.c_str() + 1);
  if (!entry) return std::nullopt;
  return entry->pw_dir;
}

inline bool is_utf8(const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    unsigned char c = text[at++];
    int rest = c < 0x80 ? 0 : c < 0xc2 ? -1 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : c < 0xf5 ? 3 : -1;
    if (rest < 0) return false;
    for (; rest > 0; --rest) {
      if (at == text.size() || (text[at++] & 0xc0) != 0x80) return false;
    }
  }
  return true;
}

// A text that can be part of a message.
inline std::string ascii(const std::string& text) {
  std::string result;
  for (unsigned char c : text) {
    char escaped[8];
    std::snprintf(escaped, sizeof escaped, c < 0x80 ? "%c" : "\\x%02x", c);
    result += escaped;
  }
  return result;
}

// The directory that the environment names, not looked at yet; none where nothing is kept.
inline std::optional<std::string> cache_root() {
  std::string kept = variable("ZMLX_CACHE");
  if (kept == "0") return std::nullopt;
  if (!kept.empty() && kept != "1") {
    throw std::invalid_argument("[zmlx] 'ZMLX_CACHE' must be 0 or 1 but got " + kept + ".");
  }
  std::string root = variable("ZMLX_CACHE_DIR");
  if (root.empty()) {
    std::string base = variable("XDG_CACHE_HOME");
    if (!base.empty() && base[0] == '/') return base + "/zmlx";
    auto home = home_directory("~");
    if (!home) return std::nullopt;
    root = *home + "/.cache/zmlx";
  } else {
    std::string tilde = root.substr(0, root.find('/'));
    auto home = tilde[0] == '~' ? home_directory(tilde) : tilde;
    if (!home || !is_utf8(root)) {
      throw std::invalid_argument(
          "[zmlx] 'ZMLX_CACHE_DIR' must be a directory whose name is UTF-8 but got '" +
          ascii(root) + (home ? "'." : "': Could not determine home directory."));
    }
    root = *home + root.substr(tilde.size());
  }
  if (root[0] == '/') return root;
  char* here = getcwd(nullptr, 0);
  if (!here) return std::nullopt;
  root = std::string(here) + "/" + root;
  std::free(here);
  return root;
}

// An absolute path as Python's pathlib has it: no last slash, no two in a row, and no ".".
inline std::string tidied(const std::string& path) {
  std::string result;
  for (size_t at = 0; at < path.size();) {
    size_t end = path.find('/', at);
    if (end == std::string::npos) end = path.size();
    std::string part = path.substr(at, end - at);
    if (!part.empty() && part != ".") result += "/" + part;
    at = end + 1;
  }
  return result.empty() ? "/" : result;
}

// Makes the folder if need be, and says why it cannot be the cache; empty if it can. Objects in it
// are loaded into the process, so it must be the user's own, and nobody else may write there.
inline std::string problem_of(const std::string& path, mode_t forbidden) {
  int made = 0;
  for (size_t at = 0; at != std::string::npos;) {  // as mkdir -p
    at = path.find('/', at + 1);
    made = mkdir(path.substr(0, at).c_str(), at == std::string::npos ? 0700 : 0777) ? errno : 0;
  }
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return std::strerror(made ? made : errno);
  if (!S_ISDIR(info.st_mode)) return std::strerror(made);
  if (info.st_uid != geteuid()) {
    return path + " belongs to user " + std::to_string(info.st_uid) + " and not to " +
           std::to_string(geteuid());
  }
  if (info.st_mode & forbidden) {
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", unsigned(info.st_mode & 07777));
    return path + " has mode " + mode + " (remedy: chmod 700 " + path + ")";
  }
  return {};
}

inline std::string unusable(const std::string& root, const std::string& folder) {
  if (std::string reason = problem_of(root, 0022); !reason.empty()) return reason;
  if (std::string reason = problem_of(folder, 0077); !reason.empty()) return reason;
  struct statvfs system;
  if (statvfs(folder.c_str(), &system) != 0) return std::strerror(errno);
#ifdef ST_NOEXEC
  if (system.f_flag & ST_NOEXEC) return "it is mounted noexec, so that nothing in it can run";
#endif
  std::string file = folder + "/XXXXXX";
  int handle = mkstemp(file.data());
  if (handle < 0) return std::strerror(errno);
  close(handle);
  unlink(file.c_str());
  return {};
}

// Empty: nothing is kept.
inline std::string cache_directory() {
  auto named = cache_root();
  if (!named) return {};
  std::string root = tidied(*named), folder = root + "/cpu";
  std::string reason = unusable(root, folder);
  if (reason.empty()) return folder;
  std::fprintf(stderr,
               "zmlx cannot keep compiled kernels in %s: %s. They are compiled again in each "
               "process; set ZMLX_CACHE_DIR to a directory of your own.\n",
               root.c_str(), reason.c_str());
  return {};
}

}  // namespace zmlx_shim
