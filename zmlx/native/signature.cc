#include "signature.h"

#include <algorithm>
#include <cstdlib>

namespace zmlx {
namespace {

constexpr int most_buffers = 31;

bool is_address_space(const Token& token) {
  return token.is("device") || token.is("constant") || token.is("thread") ||
         token.is("threadgroup");
}

Parameter read_parameter(const Tokens& tokens, size_t begin, size_t end) {
  Parameter parameter;
  size_t bracket = begin;
  while (bracket < end && !tokens[bracket].is("[")) ++bracket;
  if (bracket == begin) return parameter;
  if (bracket + 2 < end) {
    std::string attribute = tokens[bracket + 2].text;
    if (attribute == "buffer") {
      parameter.buffer = std::atoi(tokens[bracket + 4].text.c_str());
    } else {
      parameter.attribute = attribute;
    }
  }
  size_t name = bracket - 1;
  parameter.name = tokens[name].text;
  parameter.type_token = begin;
  for (size_t i = begin; i < name; ++i) {
    if (is_address_space(tokens[i])) continue;
    bool declares = i + 1 == name && (tokens[i].is("*") || tokens[i].is("&"));
    if (declares) {
      parameter.declarator = tokens[i].text[0];
    } else {
      parameter.type += (parameter.type.empty() ? "" : " ") + tokens[i].text;
    }
  }
  return parameter;
}

// Every use of the name takes one coordinate, so the type needs nothing but three members.
bool uses_coordinates_only(const Tokens& tokens, const Parameter& parameter, size_t begin,
                           size_t end) {
  for (size_t i = begin; i < end; ++i) {
    if (!tokens[i].is(parameter.name.c_str())) continue;
    bool coordinate = tokens[i + 1].is(".") && (tokens[i + 2].is("x") || tokens[i + 2].is("y") ||
                                                tokens[i + 2].is("z"));
    if (!coordinate) return false;
  }
  return true;
}

// What a thread attribute is, per coordinate `?` for a uint3. The names are the driver's:
// zk_b group in grid, zk_p thread in group, zk_e extent of this group, zk_t extent of a full group,
// zk_n grid in threads, zk_g grid in groups, zk_l linear index of the thread in its group.
const std::pair<const char*, const char*> attributes[] = {
    {"thread_position_in_grid", "zk_b? * zk_t? + zk_p?"},
    {"thread_position_in_threadgroup", "zk_p?"},
    {"threadgroup_position_in_grid", "zk_b?"},
    {"threadgroups_per_grid", "zk_g?"},
    {"threads_per_grid", "zk_n?"},
    {"grid_size", "zk_n?"},
    {"grid_origin", "0"},
    {"threads_per_threadgroup", "zk_e?"},
    {"dispatch_threads_per_threadgroup", "zk_t?"},
    {"thread_index_in_threadgroup", "zk_l"},
    {"thread_index_in_simdgroup", "zk_l % 32"},
    {"thread_index_in_quadgroup", "zk_l % 4"},
    {"simdgroup_index_in_threadgroup", "zk_l / 32"},
    {"quadgroup_index_in_threadgroup", "zk_l / 4"},
    {"simdgroups_per_threadgroup", "(zk_ex * zk_ey * zk_ez + 31) / 32"},
    {"quadgroups_per_threadgroup", "(zk_ex * zk_ey * zk_ez + 3) / 4"},
    {"dispatch_simdgroups_per_threadgroup", "(zk_tx * zk_ty * zk_tz + 31) / 32"},
    {"dispatch_quadgroups_per_threadgroup", "(zk_tx * zk_ty * zk_tz + 3) / 4"},
    {"threads_per_simdgroup", "32"},
    {"thread_execution_width", "32"},
};

}  // namespace

std::string attribute_value(const Parameter& parameter) {
  std::string pattern = "0";
  for (auto& [name, value] : attributes) {
    if (parameter.attribute == name) pattern = value;
  }
  if (parameter.type != "uint3") return "(" + parameter.type + ")(" + pattern + ")";
  std::string value = parameter.plain ? "zk_uint3{" : "metal::uint3(";
  for (char axis : {'x', 'y', 'z'}) {
    for (char c : pattern) value += c == '?' ? axis : c;
    value += axis == 'z' ? "" : ", ";
  }
  return value + (parameter.plain ? "}" : ")");
}

namespace {

std::string buffer_type(const Parameter& parameter) { return parameter.type + "*"; }

std::string call(const Signature& signature, int declarations, Mode mode) {
  std::string text = signature.call + "(";
  if (declarations && mode != Mode::one_thread) text += "zk_memory, ";
  for (size_t i = 0; i < signature.parameters.size(); ++i) {
    auto& parameter = signature.parameters[i];
    if (i) text += ", ";
    if (parameter.buffer < 0) {
      text += attribute_value(parameter);
    } else {
      text += (parameter.declarator == '&' ? "*zk_buffer" : "zk_buffer") +
              std::to_string(parameter.buffer);
    }
  }
  return text + ");\n";
}

// Copies of all that a launch holds: stores of the kernel could otherwise change it, as far as the
// compiler knows, and no loop over threads would vectorise.
std::string unpack(const Signature& signature) {
  std::string text;
  for (auto& parameter : signature.parameters) {
    if (parameter.buffer < 0) continue;
    std::string number = std::to_string(parameter.buffer);
    text += "  const auto zk_buffer" + number + " = (" + buffer_type(parameter) +
            ")zk_launched->buffers[" + number + "];\n";
  }
  return text +
         "  const unsigned zk_nx = zk_launched->grid[0], zk_ny = zk_launched->grid[1], "
         "zk_nz = zk_launched->grid[2];\n"
         "  const unsigned zk_gx = zk_launched->groups[0], zk_gy = zk_launched->groups[1], "
         "zk_gz = zk_launched->groups[2];\n";
}

const char* const group_extent =
    "  const unsigned zk_tx = zk_launched->group[0], zk_ty = zk_launched->group[1], "
    "zk_tz = zk_launched->group[2];\n";

const char* const entry =
    "extern \"C\" __attribute__((visibility(\"default\"))) void zk_kernel(\n"
    "    const zk_launch* zk_launched, zk_worker* zk_working, unsigned long long zk_first,\n"
    "    unsigned long long zk_last) {\n"
    "#ifdef ZK_FAILURE\n"
    "  zk_failing = zk_launched->failure;\n"
    "#endif\n";

// Runs of groups along x, so that the innermost loop has a counter and nothing else.
const char* const walk_groups =
    "  unsigned zk_start = zk_first % zk_gx;\n"
    "  unsigned zk_by = zk_first / zk_gx % zk_gy, zk_bz = zk_first / zk_gx / zk_gy;\n"
    "  while (zk_first < zk_last) {\n"
    "    unsigned long long zk_left = zk_last - zk_first + zk_start;\n"
    "    const unsigned zk_stop = zk_left < zk_gx ? (unsigned)zk_left : zk_gx;\n"
    "    for (unsigned zk_bx = zk_start; zk_bx < zk_stop; ++zk_bx) {\n";

const char* const next_row =
    "    }\n"
    "    zk_first += zk_stop - zk_start;\n"
    "    zk_start = 0;\n"
    "    if (++zk_by == zk_gy) zk_by = 0, ++zk_bz;\n"
    "  }\n"
    "}\n";

std::string one_thread_driver(const Signature& signature, int declarations) {
  return entry + unpack(signature) +
         "  constexpr unsigned zk_tx = 1, zk_ty = 1, zk_tz = 1, zk_ex = 1, zk_ey = 1, zk_ez = 1;\n"
         "  constexpr unsigned zk_px = 0, zk_py = 0, zk_pz = 0, zk_l = 0;\n" +
         walk_groups + "      " + call(signature, declarations, Mode::one_thread) + next_row;
}

// The innermost loop counts positions in the grid: a sum of group and thread could wrap, as far as
// the compiler knows, and would not make consecutive addresses.
std::string threads_driver(const Signature& signature) {
  return entry + unpack(signature) + group_extent + walk_groups +
         "      auto zk_edge = [](unsigned n, unsigned t, unsigned b) {\n"
         "        return n - b * t < t ? n - b * t : t;\n"
         "      };\n"
         "      const unsigned zk_ex = zk_edge(zk_nx, zk_tx, zk_bx);\n"
         "      const unsigned zk_ey = zk_edge(zk_ny, zk_ty, zk_by);\n"
         "      const unsigned zk_ez = zk_edge(zk_nz, zk_tz, zk_bz);\n"
         "      for (unsigned zk_pz = 0; zk_pz < zk_ez; ++zk_pz)\n"
         "      for (unsigned zk_py = 0; zk_py < zk_ey; ++zk_py)\n"
         "      for (unsigned zk_x = zk_bx * zk_tx; zk_x < zk_bx * zk_tx + zk_ex; ++zk_x) {\n"
         "        const unsigned zk_px = zk_x - zk_bx * zk_tx;\n"
         "        const unsigned zk_l = (zk_pz * zk_ey + zk_py) * zk_ex + zk_px;\n        " +
         call(signature, 0, Mode::threads) + "      }\n" + next_row;
}

std::string site_table(const std::vector<std::pair<int, int>>& sites) {
  std::string text = "static const int zk_sites[] = {";
  for (auto& [line, source] : sites) {
    text += std::to_string(line) + ", " + std::to_string(source) + ", ";
  }
  return text + "0, 0};\n";
}

std::string cooperative_driver(const Signature& signature, int declarations,
                               const std::vector<std::pair<int, int>>& sites) {
  std::string memory = declarations ? "zk_bytes, " : "nullptr, ";
  return "static void zk_run_thread(const zk_launch* zk_launched, zk_group* zk_cohort,\n"
         "                          const char* zk_floor) {\n"
         "  if (zk_stack() < (unsigned long)zk_floor) zk_cohort->overflow(zk_cohort);\n" +
         unpack(signature) + group_extent +
         "  const unsigned zk_ex = zk_cohort->extent[0], zk_ey = zk_cohort->extent[1], "
         "zk_ez = zk_cohort->extent[2];\n"
         "  const unsigned zk_bx = zk_cohort->position[0], zk_by = zk_cohort->position[1], "
         "zk_bz = zk_cohort->position[2];\n"
         "  const unsigned zk_l = zk_cohort->index;\n"
         "  const unsigned zk_px = zk_l % zk_ex, zk_py = zk_l / zk_ex % zk_ey, "
         "zk_pz = zk_l / zk_ex / zk_ey;\n"
         "  char* const* const zk_memory = zk_cohort->memory;\n  " +
         call(signature, declarations, Mode::cooperative) + "}\n" + site_table(sites) + entry +
         "  const zk_cooperative zk_described = {zk_run_thread, " + memory +
         std::to_string(declarations) + ", zk_sites, " + std::to_string(sites.size()) +
         "};\n"
         "  zk_launched->runtime->run(zk_launched, zk_working, zk_first, zk_last, "
         "&zk_described);\n"
         "}\n";
}

}  // namespace

size_t find_kernel(const Tokens& tokens) {
  for (size_t i = tokens.size(); i-- > 5;) {
    if (tokens[i].is("void") && tokens[i - 1].is("]") && tokens[i - 2].is("]") &&
        tokens[i - 3].is("kernel") && tokens[i - 4].is("[")) {
      return i;
    }
  }
  return Outline::none;
}

Signature read_signature(const Tokens& tokens, const Outline& outline, const Place& place) {
  Signature signature;
  size_t start = find_kernel(tokens);
  if (start == Outline::none) place.refuse(1, "no [[kernel]] function");
  signature.name_at = start + 1;
  signature.name = signature.call = tokens[start + 1].text;
  signature.open = start + 2;
  if (tokens[start + 1].kind != Token::word || !tokens[signature.open].is("(")) {
    place.refuse(tokens[start].line, "the kernel's name is not an identifier");
  }
  size_t close = outline.partner[signature.open];
  if (close == Outline::none || !tokens[close + 1].is("{")) {
    place.refuse(tokens[start].line, "the kernel has no body");
  }
  signature.body = close + 1;
  size_t end = outline.partner[signature.body];
  signature.head = outline.statement_begin(start);
  for (size_t i = signature.open + 1, begin = i; i <= close; ++i) {
    if (tokens[i].is("(") || tokens[i].is("[")) {
      i = outline.partner[i];
    } else if (tokens[i].is("<")) {
      size_t closes = outline.angle_end(i);
      if (closes != Outline::none) i = closes;
    } else if (tokens[i].is(",") || i == close) {
      if (i > begin) signature.parameters.push_back(read_parameter(tokens, begin, i));
      begin = i + 1;
    }
  }
  int buffers = 0;
  for (auto& parameter : signature.parameters) buffers = std::max(buffers, parameter.buffer + 1);
  if (buffers > most_buffers) {
    place.refuse(tokens[start].line, "it takes " + std::to_string(buffers) +
                                         " buffers, more than the " +
                                         std::to_string(most_buffers) + " that Metal has");
  }
  for (auto& parameter : signature.parameters) {
    parameter.plain = parameter.type == "uint3" &&
                      uses_coordinates_only(tokens, parameter, signature.body, end);
  }
  signature.tail = end + 1;
  // template [[host_name("NAME")]] [[kernel]] decltype(NAME<…>) NAME<…>;
  for (size_t i = end + 1; i + 1 < tokens.size(); ++i) {
    if (!tokens[i].is("decltype")) continue;
    signature.call.clear();
    for (size_t k = i + 2; k < outline.partner[i + 1]; ++k) {
      signature.call += tokens[k].text + (tokens[k].is(",") ? " " : "");
    }
  }
  return signature;
}

std::string driver(const Signature& signature, Mode mode, int declarations,
                   const std::vector<std::pair<int, int>>& sites) {
  if (mode == Mode::one_thread) return one_thread_driver(signature, declarations);
  if (mode == Mode::threads) return threads_driver(signature);
  return cooperative_driver(signature, declarations, sites);
}

}  // namespace zmlx
