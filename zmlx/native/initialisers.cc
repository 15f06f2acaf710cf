// Lists in braces that clang takes in Metal and C++ knows not, or otherwise.
#include <algorithm>
#include <cctype>
#include <map>

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

bool names_vector(const Token& token) {
  return names_number(token) && std::isdigit((unsigned char)token.text.back());
}

// The end of the declaration that a template list opens.
size_t template_end(const Unit& unit, size_t list) {
  for (auto& function : unit.outline.functions) {
    if (function.body && function.head < list && list < function.open) return function.end;
  }
  auto& tokens = unit.tokens;
  size_t i = unit.outline.partner[list] + 1;
  while (i + 1 < tokens.size() && !tokens[i].is_any({";", "{"})) {
    bool group = tokens[i].is_any({"(", "["}) || unit.outline.angle_end(i) != Outline::none;
    i = group ? unit.outline.partner[i] + 1 : i + 1;
  }
  return tokens[i].is("{") ? unit.outline.partner[i] : i;
}

// Names that may stand for a vector: type parameters, as far as their template goes, and aliases of
// vectors and of those.
class MaybeVectors {
 public:
  explicit MaybeVectors(const Unit& unit) : tokens_(unit.tokens) {
    for (size_t i = 0; i + 3 < tokens_.size(); ++i) {
      size_t list = tokens_[i].is("template") ? unit.outline.angle_end(i + 1) : Outline::none;
      if (list != Outline::none) add_parameters(unit, i + 1, list);
      bool alias = tokens_[i].is("using") && tokens_[i + 2].is("=");
      if (!alias && !tokens_[i].is("typedef")) continue;
      size_t end = unit.outline.statement_end(i), name = alias ? i + 1 : end - 1;
      bool vector = false, type = false;
      for (size_t k = alias ? i + 3 : i + 1; k < (alias ? end : end - 1); ++k) {
        vector |= tokens_[k].is("vec") || names_vector(tokens_[k]) || names(k);
        type |= tokens_[k].is_any({"{", "(", "*", "&", "["});
      }
      if (vector && !type) scopes_.insert({tokens_[name].text, {0, tokens_.size()}});
    }
  }

  bool names(size_t i) const {
    auto [begin, end] = scopes_.equal_range(tokens_[i].text);
    return std::any_of(begin, end, [&](auto& entry) {
      return entry.second.first < i && i < entry.second.second;
    });
  }

 private:
  void add_parameters(const Unit& unit, size_t open, size_t close) {
    for (size_t i = open + 1; i < close; ++i) {
      size_t list = unit.outline.angle_end(i);
      if (list != Outline::none) i = list;
      bool parameter = tokens_[i].is_any({"typename", "class"}) &&
                       tokens_[i - 1].is_any({"<", ","}) && tokens_[i + 1].kind == Token::word &&
                       tokens_[i + 2].is_any({",", ">", "="});
      if (parameter) scopes_.insert({tokens_[i + 1].text, {open, template_end(unit, open)}});
    }
  }

  const Tokens& tokens_;
  std::multimap<std::string, std::pair<size_t, size_t>> scopes_;
};

// How many values the braces hold; 0 if one of them is a list, or has a designator.
int values_in(const Unit& unit, size_t brace) {
  size_t end = unit.outline.partner[brace];
  int values = 1;
  for (size_t i = brace + 1; i < end;) {
    bool first = unit.tokens[i - 1].is(",") || i == brace + 1;
    if (first && unit.tokens[i].is_any({"{", "[", "."})) return 0;
    values += unit.tokens[i].is(",") && i + 1 < end;
    size_t list = unit.outline.angle_end(i);
    bool bracket = unit.tokens[i].is_any({"(", "[", "{"}) || list != Outline::none;
    i = bracket ? unit.outline.partner[i] + 1 : i + 1;
  }
  return end == brace + 1 ? 0 : values;
}

// Whether the type at token i is what its declaration defines, or a base of that, or one that a
// constructor initialises: `struct S {`, `struct A : S {`, `A() : S{} {`.
bool defines_type(const Unit& unit, size_t i) {
  auto& tokens = unit.tokens;
  auto& functions = unit.outline.functions;
  while (i-- > 0) {
    if (tokens[i].is_any({"struct", "class", "union", "enum", "namespace"})) return true;
    bool constructor = tokens[i].is(":") && std::any_of(functions.begin(), functions.end(),
                                                        [&](auto& f) { return f.close + 1 == i; });
    if (constructor) return true;
    bool group = tokens[i].is_any({")", "]", ">"}) && unit.outline.partner[i] != Outline::none;
    if (group) i = unit.outline.partner[i];
    bool part = group || tokens[i].kind == Token::word || tokens[i].is_any({":", "::", ","});
    if (!part) return false;
  }
  return false;
}

// Whether braces behind the type at token i make a value of it. Behind what a function returns they
// are its body; a name of a namespace of the text's own is left alone.
bool makes_value(const Tokens& tokens, size_t i) {
  if (i > 1 && tokens[i - 1].is("::")) {
    if (!tokens[i - 2].is("metal")) return false;
    i -= 2;
  }
  return i == 0 || !tokens[i - 1].is("->");
}

using Range = std::pair<size_t, size_t>;

// The first and last token of the type of a field of the struct that surrounds token i; zeros if
// there is none.
Range field_type(const Unit& unit, size_t i, const std::string& name) {
  auto& tokens = unit.tokens;
  while (i > 0 && !tokens[i].is("{")) {
    --i;
    if (tokens[i].is("}")) i = unit.outline.partner[i] - 1;
  }
  for (size_t k = i + 1, end = unit.outline.partner[i]; k < end; ++k) {
    if (unit.outline.partner[k] != Outline::none) k = unit.outline.partner[k];
    if (tokens[k].text != name || !tokens[k + 1].is_any({";", ",", "=", "{"})) continue;
    size_t last = k - 1;
    while (tokens[last].is(",") && tokens[last - 1].kind == Token::word) last -= 2;
    size_t first = tokens[last].is(">") ? unit.outline.partner[last] - 1 : last;
    if (first > i && tokens[first].kind == Token::word) return {first, last};
  }
  return {0, 0};
}

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

// `float4 v = {s};` and `float4{s}` set the first component and clear the others, where
// `float4 v = s;` and a constructor of C++ set all.
void fill_vectors(Unit& unit) {
  auto& tokens = unit.tokens;
  MaybeVectors maybe(unit);
  // How many values are fewer than the type from i to type_end has components; of a type that may be
  // something else only one, which that has too, and 0 for other types.
  auto most = [&](size_t i, size_t type_end) {
    if (maybe.names(i)) return 1;
    return type_end > i ? 3 : names_vector(tokens[i]) ? tokens[i].text.back() - '1' : 0;
  };
  auto fill = [&](size_t i, size_t type_end, size_t brace, const char* before,
                  const char* after = ")") {
    int values = values_in(unit, brace);
    if (values < 1 || values > most(i, type_end)) return false;
    std::string type;
    for (size_t k = i; k <= type_end; ++k) type += tokens[k].text;
    tokens[brace].text = before + ("zk_lead<" + type) + ">(";
    tokens[unit.outline.partner[brace]].text = after;
    return true;
  };
  for (size_t i = 0; i + 3 < tokens.size(); ++i) {
    size_t type_end = tokens[i].is("vec") ? unit.outline.angle_end(i + 1) : i;
    if (type_end == Outline::none || !most(i, type_end) || defines_type(unit, i)) continue;
    size_t name = type_end + 1, brace = name + tokens[name].is(" ");
    if (tokens[brace].is("{") && makes_value(tokens, i) && fill(i, type_end, brace, " ")) {
      for (size_t k = i; k <= type_end; ++k) tokens[k].dropped = true;
    }
    while (tokens[name].kind == Token::word) {
      int bounds = 0;
      size_t behind = name + 1;
      for (; tokens[behind].is("["); ++bounds) behind = unit.outline.partner[behind] + 1;
      bool equals = tokens[behind].is("=");
      size_t brace = behind + equals;
      if (!tokens[brace].is("{")) break;
      size_t end = unit.outline.partner[brace];
      if (!bounds) fill(i, type_end, brace, equals ? "" : "= ");
      // The lists within as many others as the array has bounds are those of its vectors.
      int depth = 0;
      for (size_t k = brace; bounds && k < end; ++k) {
        bool list = tokens[k].is("{") && tokens[k - (k > brace)].is_any({"{", ",", "="});
        if (list && depth == bounds) fill(i, type_end, k, " ");
        if (list && depth < bounds) {
          ++depth;
        } else if (unit.outline.partner[k] != Outline::none && unit.outline.partner[k] > k) {
          k = unit.outline.partner[k];
        } else {
          depth -= tokens[k].is("}");
        }
      }
      if (!tokens[end + 1].is(",")) break;
      name = end + 2;
    }
  }
  // S(float a) : v{a} {…}
  for (auto& function : unit.outline.functions) {
    size_t at = function.close + 1;
    if (!function.body || !is_constructor(unit, function) || !tokens[at].is(":")) continue;
    while (++at < function.body) {
      bool list = tokens[at].is("{") && tokens[at - 1].kind == Token::word;
      Range type = list ? field_type(unit, function.head, tokens[at - 1].text) : Range{0, 0};
      if (type.first) fill(type.first, type.second, at, "(", "))");
      if (unit.outline.partner[at] != Outline::none) at = unit.outline.partner[at];
    }
  }
  for (size_t i = 0; i + 3 < tokens.size(); ++i) {
    if (!tokens[i].is("return") || !tokens[i + 1].is("{")) continue;
    auto function = unit.outline.function_at(i);
    if (!function || function->lambda || function->open < 2) continue;
    size_t type_end = function->open - 2, type = type_end;
    if (tokens[type_end].is(">")) type = unit.outline.partner[type_end] - 1;
    if (type == type_end || tokens[type].is("vec")) fill(type, type_end, i + 1, " ");
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
