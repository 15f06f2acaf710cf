// Members of structs where Metal has them. Vectors are aligned to 8 bytes at most (vectors.h), and
// so would be a struct with some of them, which a kernel may read from memory that others wrote.
#include "passes.h"

namespace zmlx {
namespace {

bool no_variable(const Token& token) {
  return token.is_any({"static", "constexpr", "friend", "using", "typedef", "template", "struct",
                       "union", "class", "enum", "operator", "return", "explicit", "alignas", "*",
                       "&"});
}

// Of a vector of more than 8 bytes, a matrix, or vec<T, n>, with any of the prefixes.
bool is_wide(std::string name) {
  if (name == "vec") return true;
  for (std::string prefix : {"simd_", "vector_", "metal_"}) {
    if (name.compare(0, prefix.size(), prefix) == 0) name = name.substr(prefix.size());
  }
  size_t digits = name.find_first_of("234");
  if (digits == std::string::npos) return false;
  std::string element = name.substr(0, digits), lanes = name.substr(digits);
  bool matrix = lanes.size() == 3 && lanes[1] == 'x';
  if (element == "float" && matrix) return true;
  if (element == "long" || element == "ulong") return lanes.size() == 1;
  bool four_bytes = element == "float" || element == "int" || element == "uint";
  return four_bytes && (lanes == "3" || lanes == "4");
}

// Names that `typedef float4 name;` and `using name = float4;` give.
std::set<std::string> wide_names(const Tokens& tokens) {
  std::set<std::string> names;
  for (size_t i = 0; i + 4 < tokens.size(); ++i) {
    auto wide = [&](size_t k) { return is_wide(tokens[k].text) || names.count(tokens[k].text); };
    if (tokens[i].is("typedef") && wide(i + 1) && tokens[i + 3].is(";")) {
      names.insert(tokens[i + 2].text);
    }
    if (tokens[i].is("using") && tokens[i + 2].is("=") && wide(i + 3)) {
      names.insert(tokens[i + 1].text);
    }
  }
  return names;
}

}  // namespace

bool align_members(Unit& unit) {
  Tokens& tokens = unit.tokens;
  std::set<std::string> names = wide_names(tokens);
  bool aligned = false;
  for (size_t i = 2; i + 1 < tokens.size(); ++i) {
    if (tokens[i].kind != Token::word || !unit.outline.in_type(i)) continue;
    bool label = tokens[i - 1].is(":") && tokens[i - 2].is_any({"public", "private", "protected"});
    if (!label && !tokens[i - 1].is_any({";", "{", "}"})) continue;
    size_t end = unit.outline.statement_end(i), name = i;
    bool variable = true, wide = false;
    std::string type;
    while (name < end && !tokens[name + 1].is_any({";", ",", "[", "=", "{", ":", "("})) {
      size_t last = unit.outline.angle_end(name + 1);
      if (last == Outline::none) last = name;
      wide |= is_wide(tokens[name].text) || names.count(tokens[name].text);
      for (size_t k = name; k <= last; ++k) {
        variable &= !no_variable(tokens[k]);
        if (!tokens[k].dropped) type += tokens[k].text + " ";
      }
      name = last + 1;
    }
    // A bit-field or a function has something else behind its name.
    if (!variable || !wide || tokens[name + 1].is_any({":", "("})) continue;
    tokens[i].before += "alignas(zk_member_alignment<" + type + ">) ";
    aligned = true;
  }
  return aligned;
}

}  // namespace zmlx
