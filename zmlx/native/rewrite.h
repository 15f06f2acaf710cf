// Metal functions as C++ (later also as CUDA): a rewrite over tokens plus a prelude. No MLX and no
// Python in here.
#pragma once

#include <string>
#include <vector>

namespace zmlx {

enum class Dialect { cpu, cuda };

struct RewriteOptions {
  Dialect dialect = Dialect::cpu;
  bool one_thread = false;  // every threadgroup has one thread
  std::string prelude_dir;
  int source_lines = -1;  // of the user's source and header; -1: unknown
  int header_lines = -1;
  std::string name;  // of the kernel's function; empty: taken from the text
};

struct Rewritten {
  std::string text;           // complete translation unit
  bool collective = false;    // uses barriers, simd_, quad_ or simdgroup_ functions
  bool aligned = false;       // has structs that expect memory to start as on a GPU
  std::vector<int> line_map;  // per line of `text`: line of the Metal text, 0 for a generated one
  int body_first_line = 0;    // first line of the user's source inside the Metal text
  int source_lines = -1, header_lines = -1;
  std::string kernel_name;
};

// `metal_text` is the complete function that MLX would compile. Throws std::runtime_error,
// "[kernel NAME] line L of the source: … is not supported …", for what has no equivalent.
Rewritten rewrite(const std::string& metal_text, const RewriteOptions&);

// MLX puts the kernel right behind the header. Throws where the last line of a header is a
// directive, or ends in a comment: it would take the kernel's first line with it, on a Mac too.
void check_header_end(const std::string& header, const std::string& name);

// A C++ compiler's messages with the lines of the user's source in place of generated ones.
std::string explain(const Rewritten&, const std::string& metal_text,
                    const std::string& compiler_output);

}  // namespace zmlx
