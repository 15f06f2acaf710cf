// The kernel's signature as MLX writes it, one parameter per line, and the driver that calls the
// kernel for every thread of a range of threadgroups.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "outline.h"
#include "tokens.h"

namespace zmlx {

// one_thread: groups of one thread. threads: no thread waits for another, so a group is a loop.
// cooperative: threads meet at collectives, and run as fibers.
enum class Mode { one_thread, threads, cooperative };

struct Parameter {
  std::string type;       // without address space and declarator
  std::string name;
  std::string attribute;  // of a thread attribute, else empty
  int buffer = -1;
  char declarator = ' ';  // '*', '&' or none
  size_t type_token = 0;
  bool plain = true;  // a uint3 of which the kernel uses only single coordinates
};

struct Signature {
  std::string name;
  std::string call;  // NAME or NAME<arguments>
  size_t head = 0, name_at = 0, open = 0, body = 0;
  size_t tail = 0;  // the instantiation line, or the end of the text
  std::vector<Parameter> parameters;
};

// Index of the `void` in "[[kernel]] void NAME(", or Outline::none.
size_t find_kernel(const Tokens&);

// header_kernels.cc: the same with all kernels before that one declared only.
Tokens declare_header_kernels(Tokens);

// The value of a thread attribute in the names that drivers declare: see the table in signature.cc.
std::string attribute_value(const Parameter&);

Signature read_signature(const Tokens&, const Outline&, const Place&);

// `sites`: line of the text and line of the source (negative: of the header) of each collective.
std::string driver(const Signature&, Mode, int declarations,
                   const std::vector<std::pair<int, int>>& sites);

}  // namespace zmlx
