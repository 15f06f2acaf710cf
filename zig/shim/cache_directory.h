// Where compiled kernels are kept: the folder that zmlx/cache.py chooses, so that Python and Zig
// share what either compiled.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace zmlx_shim {

// Makes the folder if need be. Objects in it are loaded into the process, so it must be the user's
// own, and nobody else may write there.
inline bool own_folder(const std::string& path, mode_t forbidden) {
  for (size_t at = 1; at != std::string::npos;) {  // as mkdir -p
    at = path.find('/', at + 1);
    mkdir(path.substr(0, at).c_str(), 0700);
  }
  struct stat info;
  return stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == geteuid() &&
         !(info.st_mode & forbidden) && access(path.c_str(), W_OK) == 0;
}

// Empty: nothing is kept.
inline std::string cache_directory() {
  auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value ? value : "");
  };
  if (variable("ZMLX_CACHE") == "0") return {};
  std::string root = variable("ZMLX_CACHE_DIR");
  if (root.empty()) {
    std::string base = variable("XDG_CACHE_HOME");
    if (base.empty() || base[0] != '/') {
      if (variable("HOME").empty()) return {};
      base = variable("HOME") + "/.cache";
    }
    root = base + "/zmlx";
  }
  if (root[0] != '/') {
    char* here = getcwd(nullptr, 0);
    if (!here) return {};
    root = std::string(here) + "/" + root;
    std::free(here);
  }
  if (!own_folder(root, 0022) || !own_folder(root + "/cpu", 0077)) return {};
  return root + "/cpu";
}

}  // namespace zmlx_shim
