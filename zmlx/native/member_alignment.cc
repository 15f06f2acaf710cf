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

// Of a vector of more than 8 bytes or a matrix, with any of the prefixes, or of their templates.
bool is_wide(std::string name) {
  if (name == "vec" || name == "matrix") return true;
  for (std::string prefix : {"simd_", "vector_", "matrix_", "metal_"}) {
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

// The wide types that a text names.
class WideTypes {
 public:
  explicit WideTypes(const Unit& unit) : unit_(unit) {
    find_aliases();
    find_parameters();
    find_arguments();
  }

  // Whether the type of a member says token i, in itself or by a template parameter.
  bool may_be(size_t i) const {
    const std::string& name = unit_.tokens[i].text;
    if (named(i)) return true;
    if (!parameters_.count(name)) return false;
    bool local = unit_.outline.function_at(i) && !unit_.in_kernel(i);
    return given_ || (deduced_ && (passed_on_ || local));
  }

 private:
  bool named(size_t i) const {
    return is_wide(unit_.tokens[i].text) || aliases_.count(unit_.tokens[i].text);
  }

  // `typedef vec<float, 4> name, name[2];` and `using name = metal::float4;`.
  void find_aliases() {
    const Tokens& tokens = unit_.tokens;
    for (size_t i = 0; i + 4 < tokens.size(); ++i) {
      bool equals = tokens[i].is("using") && tokens[i + 2].is("=");
      if (!equals && !tokens[i].is("typedef")) continue;
      size_t end = unit_.outline.statement_end(i);
      bool wide = false;
      for (size_t k = i + 1; k < end; ++k) wide |= named(k);
      if (!wide) continue;
      if (equals) aliases_.insert(tokens[i + 1].text);
      for (size_t k = i + 1; k < end && !equals; ++k) {
        if (unit_.outline.partner[k] != Outline::none) k = unit_.outline.partner[k];
        bool declares = tokens[k].kind == Token::word && tokens[k + 1].is_any({",", ";", "["});
        if (declares) aliases_.insert(tokens[k].text);
      }
    }
  }

  void find_parameters() {
    const Tokens& tokens = unit_.tokens;
    for (size_t i = 1; i + 1 < tokens.size(); ++i) {
      bool parameter = tokens[i].is_any({"class", "typename"}) && tokens[i - 1].is_any({"<", ","});
      if (parameter) parameters_.insert(tokens[i + 1].text);
      if (tokens[i].is_any({"struct", "class", "union"})) structs_.insert(tokens[i + 1].text);
    }
  }

  // What is between the < > of templates.
  void find_arguments() {
    const Tokens& tokens = unit_.tokens;
    auto& signature = unit_.signature;
    for (size_t i = 1; i < tokens.size(); ++i) {
      deduced_ |= named(i) && (i < signature.open || i > signature.body);
      size_t end = unit_.outline.angle_end(i);
      auto& name = tokens[i - 1];
      if (end == Outline::none || name.is_any({"array", "as_type", "static_cast"})) continue;
      if (name.is_any({"vec", "matrix"})) continue;
      for (size_t k = i + 1; k < end; ++k) {
        given_ |= named(k);
        passed_on_ |= structs_.count(name.text) && parameters_.count(tokens[k].text);
      }
    }
  }

  const Unit& unit_;
  std::set<std::string> aliases_;
  std::set<std::string> parameters_;  // what templates call their types
  std::set<std::string> structs_;
  bool given_ = false;      // a template is given a wide type by name
  bool passed_on_ = false;  // a struct is given a parameter of another template
  bool deduced_ = false;    // a wide type is named, which a call may deduce a parameter from
};

// Metal's answer, where C++ has that of the vectors here.
void ask_members_alignment(Unit& unit) {
  for (size_t i = 0; i < unit.tokens.size(); ++i) {
    auto& token = unit.tokens[i];
    if (!token.is("alignof") || !unit.tokens[i + 1].is("(")) continue;
    token.text = "size_t(zk_member_alignment<";
    unit.tokens[i + 1].dropped = true;
    unit.tokens[unit.outline.partner[i + 1]].text = ">)";
  }
}

}  // namespace

// g++ packs no members with constructors, which half and the vectors are, and NVRTC no struct whose
// attribute stands behind it, unless a pragma says so.
std::set<size_t> pack_structs(Unit& unit) {
  Tokens& tokens = unit.tokens;
  std::set<size_t> packed;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!tokens[i].is("packed") && !tokens[i].is("__packed__")) continue;
    size_t begin = unit.outline.statement_begin(i), brace = i;
    bool attribute = false;
    while (begin > 1 && tokens[begin - 1].is_any({"(", "["})) {
      auto& before = tokens[begin - 2];
      attribute |= before.is(tokens[begin - 1].is("(") ? "__attribute__" : "[");
      begin = unit.outline.statement_begin(begin - 1);
    }
    if (!attribute) continue;
    if (begin > 0 && tokens[begin - 1].is("}") && unit.outline.in_type(begin - 1)) {
      brace = unit.outline.partner[begin - 1];
      begin = unit.outline.statement_begin(brace);
    }
    size_t end = unit.outline.statement_end(begin);
    while (brace < end && !tokens[brace].is("{")) ++brace;
    if (brace >= end || !unit.outline.in_type(brace + 1) || !packed.insert(brace).second) continue;
    tokens[begin].before = "_Pragma(\"pack(push, 1)\") " + tokens[begin].before;
    tokens[end].after += " _Pragma(\"pack(pop)\")";
  }
  return packed;
}

bool align_members(Unit& unit) {
  Tokens& tokens = unit.tokens;
  ask_members_alignment(unit);
  WideTypes wide_types(unit);
  std::set<size_t> packed = pack_structs(unit);
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
      for (size_t k = name; k <= last; ++k) {
        wide |= wide_types.may_be(k);
        variable &= !no_variable(tokens[k]);
        if (!tokens[k].dropped) type += tokens[k].text + " ";
      }
      name = last + 1;
    }
    // A bit-field or a function has something else behind its name.
    if (packed.count(unit.outline.partner[unit.outline.scope_end(i)])) continue;
    if (!variable || !wide || tokens[name + 1].is_any({":", "("})) continue;
    tokens[i].before += "alignas(zk_member_alignment<" + type + ">) ";
    aligned = true;
  }
  return aligned;
}

}  // namespace zmlx
