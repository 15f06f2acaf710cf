// `float a[N] = {[0 ... N - 1] = 1};`, which C has and clang takes in Metal, but no other compiler in
// C++: a loop that stores stands behind the declaration.
#include "passes.h"

namespace zmlx {
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

}  // namespace

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
