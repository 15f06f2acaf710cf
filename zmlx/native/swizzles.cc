// Swizzles: several components of a vector by name, `v.xy`, which C++ has no way to write.
#include "passes.h"

namespace zmlx {
namespace {

// The number of a component's letter, or -1 if the name is no component.
int component(const std::string& name) {
  if (name.size() != 1) return -1;
  size_t at = std::string("xyzwrgba").find(name[0]);
  return at == std::string::npos ? -1 : int(at % 4);
}

// "0, 1" for xy or rg; empty if the name is no swizzle.
std::string components(const std::string& name) {
  if (name.size() < 2 || name.size() > 4) return {};
  for (std::string letters : {"xyzw", "rgba"}) {
    if (name.find_first_not_of(letters) != std::string::npos) continue;
    std::string list;
    for (char c : name) list += (list.empty() ? "" : ", ") + std::to_string(letters.find(c));
    return list;
  }
  return {};
}

// The components that `.name` or `->name`, the name at token i, stands for if what it is of is a
// vector; empty if it is no such access.
std::string accessed(const Unit& unit, size_t i) {
  auto& tokens = unit.tokens;
  bool access = i > 0 && tokens[i - 1].is_any({".", "->"}) && tokens[i].kind == Token::word;
  bool call = i + 1 < tokens.size() && tokens[i + 1].is("(");
  return access && !call ? components(tokens[i].text) : "";
}

// Whether the expression that goes on behind token i with subscripts and components is stored to.
bool stored_to(const Unit& unit, size_t i) {
  auto& tokens = unit.tokens;
  auto& partner = unit.outline.partner;
  size_t begin = i, end = i + 1;
  while (true) {
    if (tokens[end].is_any({".", "["})) {
      end = tokens[end].is(".") ? end + 2 : partner[end] + 1;
      continue;
    }
    while (begin > 0) {
      auto& before = tokens[begin - 1];
      bool bracket = before.is_any({")", "]"});
      if (!bracket && before.kind != Token::word && !before.is_any({".", "->"})) break;
      begin = bracket ? partner[begin - 1] : begin - 1;
    }
    bool group = tokens[end].is(")") && begin > 1 && partner[end] == begin - 1 &&
                 tokens[begin - 2].kind == Token::mark && !tokens[begin - 2].is_any({")", "]", ">"});
    if (!group) break;
    begin -= 1;
    end += 1;
  }
  return assigns(tokens[end]) || steps(tokens[end]) || (begin > 0 && steps(tokens[begin - 1]));
}

// Whether the ( or [ at token i follows what it calls or subscripts. In `(T)(v)` the first group is
// a cast, in `f(a)(v)` a call.
bool follows_operand(const Unit& unit, size_t i) {
  if (i == 0) return false;
  auto& before = unit.tokens[i - 1];
  size_t partner = unit.outline.partner[i - 1];
  if (before.is(")") && unit.tokens[i].is("(")) return follows_operand(unit, partner);
  if (before.is_any({")", "]"})) return true;
  if (before.is(">")) return partner != Outline::none;
  bool keyword = before.is_any({"return", "case", "else", "do", "if", "while", "for", "switch", "sizeof",
                                "alignof"});
  return before.kind == Token::word && !keyword;
}

// Where the operand of the `.` or `->` at token i begins, such as `a` of `a.b[1].xy` and `f` of
// `f(x)->xy`; none where that is not told, and for a designator.
size_t operand_begin(const Unit& unit, size_t i) {
  auto& tokens = unit.tokens;
  auto& partner = unit.outline.partner;
  while (i > 0) {
    --i;
    if (tokens[i].is_any({")", "]", ">"})) {
      bool group = tokens[i].is(")"), list = tokens[i].is(">");
      i = partner[i];
      if (i == Outline::none || i == 0) return i;
      if (list || follows_operand(unit, i)) continue;
      return group && !tokens[i - 1].is("}") ? i : Outline::none;
    }
    if (tokens[i].kind != Token::word) return Outline::none;
    while (i > 1 && tokens[i - 1].is("::") && tokens[i - 2].kind == Token::word) i -= 2;
    if (i == 0) return i;
    if (tokens[i - 1].is_any({"template", "::"})) return Outline::none;
    if (!tokens[i - 1].is_any({".", "->"})) return i;
    --i;
  }
  return Outline::none;
}

// Whether the token names a field of so many bits, to which nothing can refer.
bool names_bits(const Unit& unit, size_t i) {
  return unit.tokens[i].kind == Token::word && unit.tokens[i + 1].is(":") && unit.outline.in_type(i);
}

// The function that takes what a field or a swizzle is of, and returns the field if there is one.
struct Chooser {
  std::string field, list;  // "xy" and "0, 1"
  std::string letter;       // of a component that is stored to, or empty
  bool arrow, stored;

  std::string name() const {
    std::string kind = arrow ? "through_" : "of_";
    return "zk_" + kind + (stored ? "stored_" : "") + field + (letter.empty() ? "" : "_" + letter);
  }

  std::string definition() const {
    std::string tail = letter.empty() ? "" : "." + letter;
    std::string swizzle = (stored ? "[zk_swizzle_ref<" : "[zk_swizzle<") + list + ">()]";
    if (!letter.empty()) swizzle += "[zk_swizzle_ref<" + std::to_string(component(letter)) + ">()]";
    return arrow ? overload("const V& v", "v->", "v[0]" + swizzle, tail, true)
                 : overload("V& v", "v.", "v" + swizzle, tail, true) +
                       overload("const V&& v", "v.", "v" + swizzle, tail, false);
  }

 private:
  // A field of a value that lasts is a place, one of a passing value is a value.
  std::string overload(const std::string& parameter, const std::string& access,
                       const std::string& swizzle, const std::string& tail, bool place) const {
    std::string whole = access + field + tail;
    return "template <class V> constexpr METAL_FUNC decltype(auto) " + name() + "(" + parameter +
           ") { if constexpr (requires { " + access + field + "; }) return " +
           (place ? "(" + whole + ")" : whole) + "; else return " + swizzle + "; } ";
  }
};

}  // namespace

// v.xy becomes v[zk_swizzle<0, 1>()], which is valid in templates too; where it is stored to,
// v[zk_swizzle_ref<0, 1>()], and so do the swizzles and the component behind it.
void rewrite_swizzles(Unit& unit) {
  auto& tokens = unit.tokens;
  for (size_t i = 1; i < tokens.size(); ++i) {
    std::string list = unit.outline.fields.count(tokens[i].text) ? "" : accessed(unit, i);
    if (list.empty()) continue;
    auto& access = tokens[i - 1];
    if (access.is("->")) access.after += "[0]";
    access.dropped = true;
    bool stored = stored_to(unit, i);
    tokens[i].text = (stored ? "[zk_swizzle_ref<" : "[zk_swizzle<") + list + ">()]";
    if (stored && tokens[i + 1].is(".") && component(tokens[i + 2].text) >= 0) {
      tokens[i + 1].dropped = true;
      tokens[i + 2].text = "[zk_swizzle_ref<" + std::to_string(component(tokens[i + 2].text)) + ">()]";
    }
  }
}

// Whether the token names a component or a field of what only the compiler knows.
bool names_swizzle_or_field(const Unit& unit, size_t i) {
  return unit.outline.fields.count(unit.tokens[i].text) && !accessed(unit, i).empty();
}

// Where a struct has a field called xy, v.xy becomes zk_of_xy(v): what v is only the compiler knows.
// From the last to the first, so that of `a.xy.rgb` the inner call is attached behind the outer.
void choose_fields(Unit& unit) {
  auto& tokens = unit.tokens;
  std::set<std::string> bits, definitions;
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    if (unit.outline.fields.count(tokens[i].text) && names_bits(unit, i)) bits.insert(tokens[i].text);
  }
  for (size_t i = tokens.size() - 1; i > 1; --i) {
    if (!names_swizzle_or_field(unit, i) || bits.count(tokens[i].text)) continue;
    size_t begin = operand_begin(unit, i - 1);
    if (begin == Outline::none) continue;
    bool type = begin > 1 && tokens[begin - 2].is("decltype") && tokens[i + 1].is(")");
    if (type) continue;  // of the field itself, which is no reference
    Chooser chooser{tokens[i].text, accessed(unit, i), "", tokens[i - 1].is("->"), stored_to(unit, i)};
    if (chooser.stored && tokens[i + 1].is(".") && component(tokens[i + 2].text) >= 0) {
      chooser.letter = tokens[i + 2].text;
      tokens[i + 1].dropped = tokens[i + 2].dropped = true;
    }
    definitions.insert(chooser.definition());
    tokens[begin].before += chooser.name() + "(";
    tokens[i - 1].dropped = tokens[i].dropped = true;
    tokens[i].after = ")" + tokens[i].after;
  }
  std::string all;
  for (auto& definition : definitions) all += definition;
  tokens[0].before = all + tokens[0].before;
}

}  // namespace zmlx
