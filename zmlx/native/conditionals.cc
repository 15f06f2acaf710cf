// `c ? a : b` where an arm may be a half or a bfloat.
#include <algorithm>
#include <cctype>

#include "passes.h"

namespace zmlx {
namespace {

// Where the expression that ends before token i begins, for operators that bind like `?`.
size_t condition_begin(const Unit& unit, size_t i) {
  auto& tokens = unit.tokens;
  while (i > 0) {
    auto& previous = tokens[i - 1];
    if (previous.is_any({"(", "[", "{", "}", ",", ";", "?", ":", "return", "case", "=", "+=",
                          "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=", "else", "do"})) {
      break;
    }
    // A group or a template list is one operand, unless it is the head of a statement.
    size_t partner = unit.outline.partner[i - 1];
    bool grouped = previous.is_any({")", "]", ">"}) && partner != Outline::none;
    bool head = grouped && partner > 0 &&
                tokens[partner - 1].is_any({"if", "for", "while", "switch"});
    if (head) break;
    i = grouped ? partner : i - 1;
  }
  return i;
}

// The `:` of the `?` at i, or the last token of the arm after the `:` at i.
size_t arm_end(const Unit& unit, size_t i, bool second) {
  auto& tokens = unit.tokens;
  int nested = 0;
  for (++i; i < tokens.size(); ++i) {
    if (tokens[i].is_any({"(", "[", "{"})) {
      i = unit.outline.partner[i];
    } else if (unit.outline.angle_end(i) != Outline::none) {
      i = unit.outline.angle_end(i);
    } else if (tokens[i].is("?")) {
      ++nested;
    } else if (tokens[i].is(":") && nested-- == 0) {
      return second ? i - 1 : i;
    } else if (tokens[i].is_any({")", "]", "}", ",", ";"})) {
      return second ? i - 1 : Outline::none;
    }
  }
  return Outline::none;
}

// half, half4, packed_half2, simdgroup_bfloat8x8, bfloat16_t, and 1.0h, which is half(1.0f) by now.
bool names_narrow_type(const Token& token) {
  if (token.is("float16_t")) return true;
  for (std::string name : {"half", "bfloat"}) {
    size_t at = token.text.find(name), end = at + name.size();
    if (at == std::string::npos || (at > 0 && token.text[at - 1] != '_')) continue;
    char next = end < token.text.size() ? token.text[end] : '(';
    if (next == '(' || std::isdigit((unsigned char)next)) return true;
  }
  return false;
}

// Whether the name at i is one of a reference: `thread T& name`.
bool declares_reference(const Unit& unit, size_t i) {
  auto& tokens = unit.tokens;
  if (i < 2 || !tokens[i - 1].is("&")) return false;
  for (size_t k = unit.outline.statement_begin(i); k + 1 < i; ++k) {
    size_t list = unit.outline.angle_end(k);
    if (list != Outline::none) {
      k = list;
    } else if (tokens[k].is("return") || (tokens[k].kind != Token::word && !tokens[k].is("::"))) {
      return false;
    }
  }
  return true;
}

bool returns_reference(const Unit& unit, const Function& function) {
  auto& tokens = unit.tokens;
  if (function.body > 0 && tokens[function.body - 1].is("&")) return true;  // -> T&
  size_t name = function.open - 1;
  while (name > function.head && !tokens[name].is("&")) --name;
  return tokens[name].is("&") && !function.lambda;
}

// Whether a function of the text by that name has a parameter that it may store to.
bool stores_to_argument(const Unit& unit, const std::string& name) {
  auto& tokens = unit.tokens;
  for (auto& function : unit.outline.functions) {
    if (function.name != name) continue;
    bool constant = false;
    for (size_t i = function.open + 1; i < function.close; ++i) {
      if (tokens[i].is("&") && !constant) return true;
      constant = !tokens[i].is(",") && (constant || tokens[i].is("const"));
    }
  }
  return false;
}

// The name of the function that the expression at `begin` is an argument of, or nothing.
std::string called_with(const Unit& unit, size_t begin) {
  auto& tokens = unit.tokens;
  size_t i = begin - 1;
  while (i > 0 && !tokens[i].is_any({"(", "[", "{", "}", ";"})) {
    i = tokens[i].is_any({")", "]"}) ? unit.outline.partner[i] - 1 : i - 1;
  }
  if (i < 1 || !tokens[i].is("(")) return {};
  size_t name = i - 1;
  bool list = tokens[name].is(">") && unit.outline.partner[name] != Outline::none;
  return tokens[list ? unit.outline.partner[name] - 1 : name].text;
}

// Whether the conditional from `begin` to `last` is what `(c ? a : b) = x`, `++(c ? a : b)`,
// `&(c ? a : b)`, `T& r = c ? a : b` or a function may store to. Others are values: they vectorise.
bool names_a_place(const Unit& unit, size_t begin, size_t last) {
  auto& tokens = unit.tokens;
  if (begin < 3) return false;
  auto& opens = tokens[begin - 1];
  if (opens.is("=") && tokens[begin - 3].is("&")) return true;
  if (opens.is("return")) {
    auto* function = unit.outline.function_at(begin);
    return function && returns_reference(unit, *function);
  }
  bool group = opens.is_any({"(", "{"}) && unit.outline.partner[begin - 1] == last + 1;
  if (group && declares_reference(unit, begin - 2)) return true;
  if (opens.is_any({"(", ","}) && stores_to_argument(unit, called_with(unit, begin))) return true;
  if (!group || opens.is("{")) return false;
  auto &before = tokens[begin - 2], &after = tokens[last + 2];
  if (assigns(after) || steps(after) || after.is_any({".", "["})) return true;
  if (steps(before) || before.is("&")) return true;
  return before.is_any({"=", "return", "(", ","}) && names_a_place(unit, begin - 1, last + 1);
}

// The text of an expression that names something which may be stored to, or nothing.
std::string lvalue_text(const Unit& unit, size_t begin, size_t end) {
  auto& tokens = unit.tokens;
  std::string text;
  for (size_t i = begin; i < end; ++i) {
    auto& token = tokens[i];
    bool name = token.kind == Token::word &&
                !token.is_any({"true", "false", "this", "sizeof", "alignof"});
    bool mark = token.is_any({".", "->", "::"}) || (token.is("*") && i == begin);
    size_t last = token.is("[") ? unit.outline.partner[i] : i;
    if (token.dropped || last == Outline::none || !(name || mark || token.is("["))) return {};
    if (names_swizzle_or_field(unit, i)) return {};
    for (size_t k = i; k <= last; ++k) {
      if (!tokens[k].before.empty() || !tokens[k].after.empty()) return {};
      if (!tokens[k].dropped) text += tokens[k].text + " ";
    }
    i = last;
  }
  return text;
}

// The types of an arm that names a place, or of the arms of one that is a conditional itself.
std::string place_types(const Unit& unit, size_t begin, size_t end) {
  auto& tokens = unit.tokens;
  while (begin < end && tokens[begin].is("(") && unit.outline.partner[begin] == end - 1) {
    ++begin, --end;
  }
  for (size_t i = begin; i < end; ++i) {
    if (tokens[i].is_any({"(", "[", "{"})) i = unit.outline.partner[i];
    if (!tokens[i].is("?")) continue;
    size_t colon = arm_end(unit, i, false);
    if (colon >= end) return {};
    std::string yes = place_types(unit, i + 1, colon), no = place_types(unit, colon + 1, end);
    return yes.empty() || no.empty() ? std::string() : yes + ", " + no;
  }
  std::string text = lvalue_text(unit, begin, end);
  return text.empty() ? text : "decltype((" + text + "))";
}

struct Conditional {
  size_t begin, question, colon, last;
  std::string yes, no;  // types of its arms, where it and both of them name places
};

std::vector<Conditional> find_conditionals(const Unit& unit) {
  auto& tokens = unit.tokens;
  std::vector<Conditional> found;
  std::set<size_t> arms;  // first tokens of those of places
  for (size_t i = 0; i < tokens.size(); ++i) {
    size_t list = unit.outline.angle_end(i);
    if (list != Outline::none) {  // integers, no arithmetic
      i = list;
      continue;
    }
    if (!tokens[i].is("?")) continue;
    size_t colon = arm_end(unit, i, false);
    if (colon == Outline::none) continue;
    size_t last = arm_end(unit, colon, true);
    if (last == Outline::none) continue;
    size_t begin = condition_begin(unit, i);
    std::string yes, no;
    if (arms.count(begin) || names_a_place(unit, begin, last)) {
      yes = place_types(unit, i + 1, colon);
      no = place_types(unit, colon + 1, last + 1);
    }
    if (yes.empty() || no.empty()) {
      yes = no = "";
    } else {
      for (size_t arm : {i + 1, colon + 1}) {
        while (tokens[arm].is("(")) arms.insert(arm++);
        arms.insert(arm);
      }
    }
    found.push_back({begin, i, colon, last, yes, no});
  }
  return found;
}

}  // namespace

// `c ? a : b` with a half and a float converts both ways in C++ and is ambiguous; with a half and
// an int it would yield an int. A comma behind zk_arm makes a number a class that converts one way
// only, as Metal's arithmetic conversions do, and one behind zk_value takes the number out again;
// of anything else, and of places that hold the same type, both are the comma of C++, which leaves
// the conditional as it is.
void balance_conditionals(Unit& unit) {
  auto& tokens = unit.tokens;
  if (std::none_of(tokens.begin(), tokens.end(), names_narrow_type)) return;
  for (auto& [begin, question, colon, last, yes, no] : find_conditionals(unit)) {
    // By value: clang 15 and older capture no name of a structured binding.
    auto open = [known = !no.empty()](const std::string& other) {
      return known ? " (zk_arm_beside<" + other + ">(), " : " (zk_arm(), ";
    };
    // A class is no null pointer, which this zero may have to be.
    for (size_t arm : {question + 1, colon + 1}) {
      bool alone = arm + 1 == colon || arm == last;
      if (alone && tokens[arm].is("0")) tokens[arm].text = "zk_zero()";
    }
    tokens[begin].before += "(zk_value(), ";
    tokens[question].after += open(no);
    tokens[colon].before += ")";
    tokens[colon].after += open(yes);
    tokens[last].after += "))";
  }
}

}  // namespace zmlx
