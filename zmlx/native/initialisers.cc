// Lists in braces that clang takes in Metal and C++ knows not, and those in brackets that C++20
// takes and Metal does not.
#include "passes.h"

namespace zmlx {

// float, or float4.
bool names_number(const Token& token) {
  static const std::set<std::string> elements = {"bool", "char", "uchar", "short", "ushort", "int",
                                                 "uint", "long", "ulong", "half", "bfloat", "float"};
  size_t size = token.text.size();
  bool vector = size > 1 && token.text[size - 1] >= '2' && token.text[size - 1] <= '4';
  return token.kind == Token::word && elements.count(token.text.substr(0, size - vector));
}

namespace {

// The `=` of the value that the designator at `bracket` is given, or none.
size_t value_of(const Unit& unit, size_t bracket) {
  if (!unit.tokens[bracket].is("[")) return Outline::none;
  size_t equals = unit.outline.partner[bracket] + 1;
  return unit.tokens[equals].is("=") ? equals : Outline::none;
}

// The , or } behind the value.
size_t value_end(const Unit& unit, size_t i) {
  while (!unit.tokens[i].is_any({",", "}"})) {
    i = unit.tokens[i].is_any({"(", "[", "{"}) ? unit.outline.partner[i] + 1 : i + 1;
  }
  return i;
}

// The structs of the text that have no constructors, nor bases to inherit some from.
std::set<std::string> aggregates(const Unit& unit) {
  auto& tokens = unit.tokens;
  std::set<std::string> found, others;
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    if (!tokens[i].is_any({"struct", "class", "union"})) continue;
    size_t list = unit.outline.angle_end(i + 2), end = list == Outline::none ? i + 2 : list + 1;
    if (tokens[end].is("{")) found.insert(tokens[i + 1].text);
    if (tokens[end].is(":")) others.insert(tokens[i + 1].text);
  }
  for (auto& function : unit.outline.functions) {
    if (!is_constructor(unit, function)) continue;
    size_t name = function.open - 1, list = unit.outline.partner[name];
    others.insert(tokens[list == Outline::none ? name : list - 1].text);
  }
  for (auto& name : others) found.erase(name);
  return found;
}

}  // namespace

// `S(1, 2)` and `S s(1, 2);` of a struct without constructors.
void refuse_values_in_brackets(const Unit& unit) {
  auto& tokens = unit.tokens;
  auto types = aggregates(unit);
  for (size_t i = 1; i + 2 < tokens.size() && !types.empty(); ++i) {
    bool type = types.count(tokens[i].text) && !tokens[i - 1].is_any({".", "->"});
    if (!type || !unit.outline.function_at(i) || unit.outline.in_type(i)) continue;
    size_t list = unit.outline.angle_end(i + 1), behind = list == Outline::none ? i + 1 : list + 1;
    size_t open = tokens[behind].kind == Token::word ? behind + 1 : behind;
    if (!tokens[open].is("(")) continue;
    size_t close = unit.outline.partner[open];
    for (size_t k = open + 1; k < close; ++k) {
      if (tokens[k].is(",")) {
        unit.place.refuse(tokens[i].line, "several values in brackets are not supported for `" +
                                              tokens[i].text + "`, which has no constructor: put "
                                              "them in braces");
      }
      if (unit.outline.partner[k] != Outline::none) k = unit.outline.partner[k];
    }
  }
}

// `(T){…}` is `T{…}`.
void unwrap_literals(Unit& unit) {
  auto& tokens = unit.tokens;
  for (size_t i = 2; i + 3 < tokens.size(); ++i) {
    size_t end = unit.outline.partner[i];
    if (!tokens[i].is("(") || end == Outline::none || !tokens[end + 1].is("{")) continue;
    auto& before = tokens[i - 1];
    bool value = before.is("return") || (before.kind == Token::mark &&
                                         !before.is_any({")", "]", ">", "}"}));
    if (!value || tokens[i - 2].is("operator")) continue;
    bool type = tokens[end - 1].kind == Token::word || tokens[end - 1].is(">");
    for (size_t k = i + 1; type && k < end; ++k) {
      size_t list = unit.outline.angle_end(k);
      if (list != Outline::none) k = list;
      type = tokens[k].kind == Token::word || tokens[k].is("::") || tokens[k].is(">");
    }
    if (!type) continue;
    for (size_t k = i + 1; k < end; ++k) tokens[k].dropped |= tokens[k].is("const");
    tokens[i].text = tokens[end].text = " ";
  }
}

// `float a[N] = {[0 ... N - 1] = 1};`: a loop that stores stands behind the declaration.
void expand_designators(Unit& unit) {
  auto& tokens = unit.tokens;
  for (size_t brace = 1; brace + 1 < tokens.size(); ++brace) {
    bool designated = tokens[brace].is("{") && tokens[brace - 1].is("=") &&
                      value_of(unit, brace + 1) != Outline::none;
    if (!designated) continue;
    size_t end = unit.outline.partner[brace], name = brace - 2;
    while (name > 0 && tokens[name].is("]")) name = unit.outline.partner[name] - 1;
    bool constant = false;
    for (size_t i = unit.outline.statement_begin(name); i < name; ++i) {
      constant |= tokens[i].is_any({"const", "constexpr", "constant"});
    }
    if (constant || !tokens[end + 1].is(";") || !unit.outline.function_at(brace)) {
      unit.place.refuse(tokens[brace].line,
                        "designated elements are not supported here: list the values, or declare "
                        "`" + tokens[name].text + "` alone, in a function and not constant");
    }
    tokens[brace].after += "};";
    for (size_t i = brace + 1; i < end;) {
      size_t equals = value_of(unit, i), close = equals - 1;
      if (equals == Outline::none) {
        unit.place.refuse(tokens[i].line, "elements with and without designators are not supported "
                                          "in one list: designate all of them");
      }
      size_t range = i + 1;
      while (range < close && !tokens[range].is("...")) ++range;
      if (range < close) {
        tokens[i].text = "for (long zk_at = ";
        tokens[range].text = "; zk_at <= long(";
        tokens[close].text = "); ++zk_at) " + tokens[name].text + "[zk_at]";
      } else {
        tokens[i].before += tokens[name].text;
      }
      i = value_end(unit, equals + 1);
      if (i < end) tokens[i++].text = ";";
    }
    tokens[end].dropped = true;
  }
}

}  // namespace zmlx
