#include "cuda_dialect.h"

#include <algorithm>
#include <cctype>

#include "cuda_flow.h"

namespace zmlx {
namespace {

// What an unroll pragma says, as NVRTC spells it; empty for any other pragma.
std::string unroll(const std::string& pragma) {
  if (pragma.find("unroll") == std::string::npos) return "";
  if (pragma.find("disable") != std::string::npos || pragma.find("nounroll") != std::string::npos) {
    return "unroll 1";
  }
  size_t digit = pragma.find_first_of("0123456789");
  if (digit == std::string::npos) return "unroll";
  return "unroll " + pragma.substr(digit, pragma.find_first_not_of("0123456789", digit) - digit);
}

void rewrite_pragmas(Unit& unit) {
  auto& tokens = unit.tokens;
  for (size_t i = 0; i + 2 < tokens.size(); ++i) {
    std::string text;
    if (tokens[i].is("_Pragma")) text = unroll(tokens[i + 2].text);
    if (tokens[i].is("MLX_MTL_PRAGMA_UNROLL")) {
      text = "unroll";
      tokens[i].dropped = true;
    }
    if (!text.empty()) tokens[i].before += "_Pragma(\"" + text + "\") ";
  }
}

// `::name` is a name of the text's own outermost scope, which is a namespace here.
void qualify_globals(Unit& unit) {
  auto& tokens = unit.tokens;
  auto qualifies = [&](size_t i) {  // whether the name that ends at i can stand before `::`
    size_t opens = unit.outline.partner[i];
    if (tokens[i].is(">")) return opens != Outline::none && !tokens[opens - 1].is("template");
    if (tokens[i].is(")")) return opens > 0 && tokens[opens - 1].is("decltype");
    return tokens[i].kind == Token::word && !names_number(tokens[i]) && !is_keyword(tokens[i]) &&
           !tokens[i].is_any({"auto", "signed", "unsigned", "void"});
  };
  for (size_t i = 1; i < tokens.size(); ++i) {
    if (tokens[i].is("::") && !qualifies(i - 1)) tokens[i].before += "zk";
  }
}

// Constants must be values that the compiler knows, and so must what they are made of:
// `constant float a = 2, b = a;`
void know_constants(Unit& unit) {
  auto& tokens = unit.tokens;
  for (size_t i = 0; i < tokens.size(); ++i) {
    bool variable = tokens[i].is("constant") && !unit.outline.in_type(i) &&
                    declares_variable(unit, i);
    if (!variable) continue;
    bool known = false;
    size_t first = i;  // of `constant float* constant a`
    size_t end = unit.outline.statement_end(i);
    for (size_t k = unit.outline.statement_begin(i); k < end; ++k) {
      known |= tokens[k].is_any({"constexpr", "extern"});
      if (tokens[k].is("constant")) first = std::min(first, k);
      if (unit.outline.angle_end(k) != Outline::none) k = unit.outline.angle_end(k);
    }
    if (!known) tokens[first].before += "constexpr ";
  }
}

// A parameter that MLX adds for an array whose shape, strides or number of dimensions the source
// names.
bool describes(const Parameter& parameter, const std::string& array) {
  return (parameter.declarator == '*' && parameter.type == "const int" &&
          parameter.name == array + "_shape") ||
         (parameter.declarator == '*' && parameter.type == "const int64_t" &&
          parameter.name == array + "_strides") ||
         (parameter.declarator == '&' && parameter.type == "const int" &&
          parameter.name == array + "_ndim");
}

// The kernel's parameters, sorted by what becomes of them.
struct Frame {
  std::string parameters;  // of the kernel: inputs, outputs, sizes of inputs
  std::string plain;       // the same without qualifiers, for zk_enter
  std::string arguments;   // names of all of these
  std::string ranks;       // defaults of ZK_RANK_n
  std::string layouts;     // shapes and strides, made from the sizes
  std::string call;        // of the Metal function
};

void add(std::string& list, const std::string& item) {
  list += (list.empty() ? "" : ", ") + item;
}

Frame frame_of(const Signature& signature, bool memory) {
  Frame frame;
  std::string sizes, size_arguments, array;
  int inputs = 0, described = -1;
  if (memory) add(frame.call, "nullptr");  // where threadgroup variables lie on the CPU
  for (auto& parameter : signature.parameters) {
    if (parameter.buffer < 0) {
      add(frame.call, attribute_value(parameter));
      continue;
    }
    if (describes(parameter, array)) {
      std::string number = std::to_string(inputs - 1);
      if (described < inputs - 1) {
        described = inputs - 1;
        frame.ranks += "#ifndef ZK_RANK_" + number + "\n#define ZK_RANK_" + number + " 4\n#endif\n";
        sizes += ", ZK_DIMS(ZK_RANK_" + number + ", zk_size" + number + ")";
        size_arguments += ", ZK_SIZES(ZK_RANK_" + number + ", zk_size" + number + ")";
        frame.layouts += "  const zk_layout<ZK_RANK_" + number + "> zk_layout" + number +
                         "(ZK_SIZES(ZK_RANK_" + number + ", zk_size" + number + "));\n";
      }
      std::string what = parameter.name.substr(array.size() + 1);
      add(frame.call, what == "ndim" ? "ZK_RANK_" + number : "zk_layout" + number + "." + what);
      continue;
    }
    std::string name = "zk_buffer" + std::to_string(parameter.buffer);
    bool input = parameter.type.compare(0, 6, "const ") == 0;
    if (input) {
      array = parameter.name;
      ++inputs;
    }
    std::string pointer = input ? "const void*" : "void*";
    add(frame.parameters, pointer + " __restrict__ " + name);
    add(frame.plain, pointer + " " + name);
    add(frame.arguments, name);
    add(frame.call, (parameter.declarator == '&' ? "*(" : "(") + parameter.type + "*)" + name);
  }
  frame.parameters += sizes;
  frame.plain += sizes;
  frame.arguments += size_arguments;
  return frame;
}

const char* const position_text =
    "  const zk_position zk_at = ZK_POSITION;\n"
    "  if (!zk_at.live) return;\n"
    "  const unsigned zk_nx = zk_at.n.x, zk_ny = zk_at.n.y, zk_nz = zk_at.n.z;\n"
    "  const unsigned zk_gx = zk_at.g.x, zk_gy = zk_at.g.y, zk_gz = zk_at.g.z;\n"
    "  const unsigned zk_tx = zk_at.t.x, zk_ty = zk_at.t.y, zk_tz = zk_at.t.z;\n"
    "  const unsigned zk_ex = zk_at.e.x, zk_ey = zk_at.e.y, zk_ez = zk_at.e.z;\n"
    "  const unsigned zk_bx = zk_at.b.x, zk_by = zk_at.b.y, zk_bz = zk_at.b.z;\n"
    "  const unsigned zk_px = zk_at.p.x, zk_py = zk_at.p.y, zk_pz = zk_at.p.z;\n"
    "  const unsigned zk_l = zk_at.l;\n";

std::string enter(const Signature& signature, const Frame& frame) {
  return "#line 1 \"zmlx\"\n" + frame.ranks + "METAL_FUNC void zk_enter(" + frame.plain +
         " ZK_GRID_PARAMETERS) {\n" + position_text + frame.layouts + "  " + signature.call + "(" +
         frame.call + ");\n}\n}  // namespace\n}  // namespace zk\n";
}

std::string kernel(const Signature& signature, const Frame& frame) {
  return "extern \"C\" __global__ void __launch_bounds__(ZK_THREADS) " +
         signature.name + "(" + frame.parameters + " ZK_GRID_PARAMETERS) {\n  zk::zk_enter(" +
         frame.arguments + " ZK_GRID_ARGUMENTS);\n}\n";
}

// The text with #line directives wherever the next line is not the next one of the Metal text.
std::string with_lines(const Printed& printed, const Place& place) {
  std::string text;
  int next = -1;
  size_t begin = 0;
  for (int line : printed.lines) {
    size_t end = printed.text.find('\n', begin);
    if (line > 0 && (line != next || line == place.body_first_line)) {
      bool source = line >= place.body_first_line;
      text += "#line " + std::to_string(source ? line - place.body_first_line + 1 : line) +
              (source ? " \"source\"\n" : " \"header\"\n");
    }
    text.append(printed.text, begin, end + 1 - begin);
    begin = end + 1;
    next = line > 0 ? line + 1 : -1;
  }
  return text;
}

}  // namespace

std::string keep_pragmas(const std::string& metal_text) {
  std::string text;
  for (size_t begin = 0; begin < metal_text.size();) {
    size_t end = std::min(metal_text.find('\n', begin), metal_text.size());
    std::string line = metal_text.substr(begin, end - begin);
    size_t hash = line.find_first_not_of(" \t");
    size_t word = hash == std::string::npos ? hash : line.find_first_not_of(" \t", hash + 1);
    bool pragma = word != std::string::npos && line[hash] == '#' &&
                  line.compare(word, 6, "pragma") == 0;
    std::string unrolled = pragma ? unroll(line) : "";
    text += unrolled.empty() ? line : "_Pragma(\"" + unrolled + "\")";
    if (end < metal_text.size()) text += '\n';
    begin = end + 1;
  }
  return text;
}

Rewritten cuda_text(Unit& unit, const Library& library,
                    const std::function<std::string(const std::set<std::string>&)>& sections) {
  bool collective = has_collectives(unit) || has_threadgroup_memory(unit);
  unit.mode = Mode::cooperative;
  refuse_unsupported(unit);
  refuse_mutable_globals(unit);
  refuse_values_in_brackets(unit);
  mark_flow(unit, library);
  merge_overloads(unit);
  merge_specialisations(unit);
  drop_attributes(unit);
  rewrite_pragmas(unit);
  drop_hints(unit);
  know_constants(unit);
  rename_keywords(unit);
  spell_in_ascii(unit);
  rewrite_address_spaces(unit);
  free_specialised_operators(unit);
  name_constructors(unit);
  pack_structs(unit);
  unwrap_literals(unit);
  expand_designators(unit);
  suffix_literals(unit);
  qualify_globals(unit);
  rewrite_swizzles(unit);
  balance_conditionals(unit);
  choose_fields(unit);
  shield_names(unit, library);
  declare_kernel(unit);

  std::string text = with_lines(print(unit.tokens), unit.place);
  auto names = identifiers(text);
  Frame frame = frame_of(unit.signature, unit.declarations > 0);
  std::string entry = enter(unit.signature, frame);
  names.merge(identifiers(entry));
  // CUDA's own macros expand to words that are qualifiers, and thus macros, in Metal.
  const char* freed = "#undef device\n#undef constant\n#undef thread\n#undef kernel\n";
  Rewritten result;
  result.text = "namespace zk {\nnamespace {\n" + sections(names) + freed + text + entry +
                kernel(unit.signature, frame);
  result.collective = collective;
  result.body_first_line = unit.place.body_first_line;
  result.kernel_name = unit.signature.name;
  return result;
}

}  // namespace zmlx
