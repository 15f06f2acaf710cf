// `float4 v = {s};` and `float4{s}` set the first component and clear the others, where a constructor
// of C++ sets all: such a list becomes a call that fills it.
#include <algorithm>
#include <cctype>
#include <map>

#include "passes.h"

namespace zmlx {
namespace {

bool names_vector(const Token& token) {
  return names_number(token) && std::isdigit((unsigned char)token.text.back());
}

// What follows token i, or the brackets that it opens. A list that was filled still has its partner.
size_t behind(const Unit& unit, size_t i) {
  size_t end = unit.outline.partner[i];
  return end != Outline::none && end > i ? end + 1 : i + 1;
}

// The end of the declaration that a template list opens.
size_t template_end(const Unit& unit, size_t list) {
  for (auto& function : unit.outline.functions) {
    if (function.body && function.head < list && list < function.open) return function.end;
  }
  auto& tokens = unit.tokens;
  size_t i = unit.outline.partner[list] + 1;
  while (i + 1 < tokens.size() && !tokens[i].is_any({";", "{"})) i = behind(unit, i);
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
    i = behind(unit, i);
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

// A name that is declared: of a variable, a parameter or a field.
struct Declared {
  std::string name;
  size_t first = 0, last = 0;  // the type, past what qualifies it; zeros for a pointer
  int bounds = 0;              // of an array
};

// How many `[…]` stand behind the name at i; i becomes what stands behind them.
int bounds_behind(const Unit& unit, size_t* i) {
  int bounds = 0;
  for (++*i; unit.tokens[*i].is("["); ++bounds) *i = unit.outline.partner[*i] + 1;
  return bounds;
}

// The last token of the type whose name is at i.
size_t type_end(const Unit& unit, size_t i) {
  size_t list = unit.outline.angle_end(i + 1);
  return list == Outline::none ? i : list;
}

// What the tokens from i to end declare, such as `const float2 v = {}, w[2]`.
std::vector<Declared> names_declared(const Unit& unit, size_t i, size_t end) {
  auto& tokens = unit.tokens;
  while (tokens[i].is_any({"const", "volatile", "constant", "device", "thread", "threadgroup"}) ||
         (tokens[i].is("struct") && !tokens[i + 2].is("{"))) {
    ++i;
  }
  size_t first = i;
  if (tokens[i].is_any({"struct", "union", "enum"})) {
    first = tokens[i + 2].is("{") ? i + 1 : 0;  // the name, if it has one
    while (!tokens[i].is_any({"{", ";"})) ++i;
    if (tokens[i].is(";")) return {};
  } else {
    while (tokens[i + 1].is("::")) first = i += 2;
  }
  size_t last = tokens[i].is("{") ? first : type_end(unit, i);
  i = tokens[i].is("{") ? unit.outline.partner[i] : last;
  std::vector<Declared> found;
  for (++i; i < end; ++i) {
    bool points = false;
    for (; tokens[i].is_any({"*", "&", "const", "thread", "device"}); ++i) {
      points |= tokens[i].is("*");
    }
    if (tokens[i].kind != Token::word) return {};
    Declared one{tokens[i].text, points ? 0 : first, points ? 0 : last, 0};
    one.bounds = bounds_behind(unit, &i);
    found.push_back(one);
    while (i < end && !tokens[i].is(",")) {
      i = behind(unit, i);
    }
  }
  return found;
}

// The first tokens of what commas separate between brackets.
std::vector<size_t> parts_between(const Unit& unit, size_t open) {
  std::vector<size_t> parts;
  size_t end = unit.outline.partner[open];
  for (size_t i = open + 1; end != Outline::none && i < end;) {
    if (i == open + 1 || unit.tokens[i - 1].is(",")) parts.push_back(i);
    i = behind(unit, i);
  }
  return parts;
}

class ShortLists {
 public:
  explicit ShortLists(Unit& unit) : unit_(unit), tokens_(unit.tokens), maybe_(unit) {
    for (size_t i = 0; i + 2 < tokens_.size(); ++i) {
      if (!tokens_[i].is_any({"struct", "class"})) continue;
      size_t brace = i + 1 + (tokens_[i + 1].kind == Token::word);
      if (!tokens_[brace].is("{")) continue;
      size_t name = unit.outline.partner[brace] + 1;
      if (brace == i + 2) add_struct(tokens_[i + 1].text, brace);
      if (i > 0 && tokens_[i - 1].is("typedef")) add_struct(tokens_[name].text, brace);
    }
  }

  void run() {
    for (size_t i = 0; i + 3 < tokens_.size(); ++i) at_type(i);
    for (auto& function : unit_.outline.functions) in_constructor(function);
    for (size_t i = 0; i + 3 < tokens_.size(); ++i) {
      if (tokens_[i].is("return") && tokens_[i + 1].is("{")) at_return(i);
      if (tokens_[i].kind == Token::word && tokens_[i + 1].is("(")) {
        fill_arguments(tokens_[i].text, i + 1);
      }
    }
  }

 private:
  // Of two structs of one name, in different scopes, neither is known.
  void add_struct(const std::string& name, size_t brace) {
    auto [entry, added] = fields_.insert({name, {}});
    entry->second = added ? fields_at(brace, name) : std::vector<Declared>();
  }

  // The semicolon of the declaration that begins at i.
  size_t declaration_end(size_t i) const {
    while (!tokens_[i].is(";") && i + 1 < tokens_.size()) i = behind(unit_, i);
    return i;
  }

  // The fields of an aggregate, in order; none where values may be for something else.
  std::vector<Declared> fields_at(size_t brace, const std::string& name) const {
    std::vector<Declared> fields;
    for (size_t i = brace + 1, end = unit_.outline.partner[brace]; i < end;) {
      auto& functions = unit_.outline.functions;
      auto function = std::find_if(functions.begin(), functions.end(), [&](auto& f) {
        return f.scope == brace && f.head == i && !f.lambda;
      });
      if (function != functions.end()) {
        if (function->name == name) return {};
        i = function->body ? function->end + 1 : unit_.outline.statement_end(i) + 1;
        continue;
      }
      if (tokens_[i].is_any({"public", "private", "protected", "class"})) return {};
      size_t last = declaration_end(i);
      if (!tokens_[i].is_any({"static", "using", "typedef", "template", "friend", ";"})) {
        auto some = names_declared(unit_, i, last);
        if (some.empty()) return {};
        fields.insert(fields.end(), some.begin(), some.end());
      }
      i = last + 1;
    }
    return fields;
  }

  const std::vector<Declared>* fields_of(size_t type) const {
    auto found = fields_.find(tokens_[type].text);
    return found == fields_.end() || found->second.empty() ? nullptr : &found->second;
  }

  // How many values are fewer than the type from first to last has components; of a type that may be
  // something else only one, which that has too, and 0 for other types.
  int most(size_t first, size_t last) const {
    if (maybe_.names(first)) return 1;
    if (tokens_[first].is("vec")) return last > first ? 3 : 0;
    return names_vector(tokens_[first]) ? tokens_[first].text.back() - '1' : 0;
  }

  bool may_fill(size_t first, size_t last) const { return most(first, last) || fields_of(first); }

  std::string type_text(size_t first, size_t last) const {
    while (first > 1 && tokens_[first - 1].is("::") && tokens_[first - 2].kind == Token::word) {
      first -= 2;
    }
    std::string text;
    for (size_t i = first; i <= last; ++i) text += (i > first ? " " : "") + tokens_[i].text;
    return text;
  }

  // Fills the list at the brace, which is for a value of that type or an array of them, or those
  // within it. Whether it became a value itself.
  bool fill(const Declared& value, const std::string& type, size_t brace, const char* before = " ",
            const char* after = ")") {
    if (!value.first) return false;
    auto parts = parts_between(unit_, brace);
    if (value.bounds) {
      Declared element = value;
      --element.bounds;
      for (size_t part : parts) {
        if (tokens_[part].is("[") && tokens_[unit_.outline.partner[part] + 1].is("=")) {
          part = unit_.outline.partner[part] + 2;
        }
        if (tokens_[part].is("{")) fill(element, type, part);
      }
      return false;
    }
    if (auto fields = fields_of(value.first)) {
      fill_fields(*fields, type, parts);
      return false;
    }
    int values = values_in(unit_, brace);
    if (values < 1 || values > most(value.first, value.last)) return false;
    tokens_[brace].text = before + ("zk_lead<" + type) + ">(";
    tokens_[unit_.outline.partner[brace]].text = after;
    return true;
  }

  void fill_fields(const std::vector<Declared>& fields, const std::string& type,
                   const std::vector<size_t>& parts) {
    // With more values than fields, some are for the fields of a field.
    if (parts.size() > fields.size()) return;
    auto field = fields.begin();
    for (size_t part : parts) {
      if (tokens_[part].is(".")) {
        field = std::find_if(fields.begin(), fields.end(),
                             [&](auto& f) { return f.name == tokens_[part + 1].text; });
        part += 2 + tokens_[part + 2].is("=");
      }
      if (field == fields.end() || (field->bounds && !tokens_[part].is("{"))) return;
      if (tokens_[part].is("{")) {
        fill(*field, "zk_field<decltype(" + type + "::" + field->name + ")>", part);
      }
      ++field;
    }
  }

  // `T{…}`, `T v = {…}, w[2]{…};`
  void at_type(size_t i) {
    if (tokens_[i].is_any({"struct", "class"}) && tokens_[i + 2].is("{")) {
      declarators(i + 1, i + 1, unit_.outline.partner[i + 2] + 1);
    }
    size_t last = type_end(unit_, i);
    bool elaborated = i > 0 && tokens_[i - 1].is("struct") && tokens_[last + 1].kind == Token::word;
    bool constructed = fields_.count(tokens_[i].text) && !fields_of(i);
    if (!may_fill(i, last) && !constructed) return;
    if (!elaborated && defines_type(unit_, i)) return;
    if (constructed) {  // `S{…}`, `S v({…})`
      size_t open = last + 1 + (tokens_[last + 1].kind == Token::word);
      open += tokens_[open].is("=");
      if (tokens_[open].is_any({"(", "{"})) fill_arguments(tokens_[i].text, open);
      return;
    }
    size_t name = last + 1, brace = name + tokens_[name].is(" ");
    if (tokens_[brace].is("{") && makes_value(tokens_, i) &&
        fill({"", i, last, 0}, type_text(i, last), brace)) {
      for (size_t k = i; k <= last; ++k) tokens_[k].dropped = true;
    }
    declarators(i, last, name);
  }

  // `v = {…}, w[2]{…};` behind the type from i to last.
  void declarators(size_t i, size_t last, size_t name) {
    if (!may_fill(i, last)) return;
    while (tokens_[name].kind == Token::word) {
      Declared one{tokens_[name].text, i, last, 0};
      size_t list = name;
      one.bounds = bounds_behind(unit_, &list);
      bool equals = tokens_[list].is("=");
      list += equals;
      if (!tokens_[list].is("{")) break;
      fill(one, type_text(i, last), list, equals ? "" : "= ");
      if (!tokens_[unit_.outline.partner[list] + 1].is(",")) break;
      name = unit_.outline.partner[list] + 2;
    }
  }

  // `S(float a) : v{a} {…}`
  void in_constructor(const Function& function) {
    size_t at = function.close + 1;
    if (!function.body || !is_constructor(unit_, function) || !tokens_[at].is(":")) return;
    while (++at < function.body) {
      if (tokens_[at].is("{") && tokens_[at - 1].kind == Token::word) {
        Declared field = field_called(function.head, tokens_[at - 1].text);
        if (field.first) fill(field, type_text(field.first, field.last), at, "(", "))");
      }
      if (unit_.outline.partner[at] != Outline::none) at = unit_.outline.partner[at];
    }
  }

  // A field of the struct that surrounds token i.
  Declared field_called(size_t i, const std::string& name) const {
    while (i > 0 && !tokens_[i].is("{")) {
      --i;
      if (tokens_[i].is("}")) i = unit_.outline.partner[i] - 1;
    }
    for (size_t k = i + 1, end = unit_.outline.partner[i]; k < end; ++k) {
      if (unit_.outline.partner[k] != Outline::none) k = unit_.outline.partner[k];
      if (tokens_[k].text != name || !tokens_[k + 1].is_any({";", ",", "=", "{", "["})) continue;
      size_t begin = unit_.outline.statement_begin(k);
      for (auto& field : names_declared(unit_, begin, declaration_end(begin))) {
        if (field.name == name) return field;
      }
    }
    return {};
  }

  void at_return(size_t i) {
    auto function = unit_.outline.function_at(i);
    if (!function) return;
    bool trailing = tokens_[function->close + 1].is("->");
    if (!trailing && (function->lambda || function->open < 2)) return;
    size_t last = trailing ? function->body - 1 : function->open - 2;
    size_t first = tokens_[last].is(">") ? unit_.outline.partner[last] - 1 : last;
    if (may_fill(first, last)) fill({"", first, last, 0}, type_text(first, last), i + 1);
  }

  // `f({…})`, where the text's functions of that name agree on the parameter's type.
  void fill_arguments(const std::string& name, size_t open) {
    auto parts = parts_between(unit_, open);
    for (size_t k = 0; k < parts.size(); ++k) {
      if (!tokens_[parts[k]].is("{")) continue;
      Declared parameter;
      std::string type;
      for (auto& function : unit_.outline.functions) {
        if (function.name != name || function.lambda) continue;
        auto parameters = parts_between(unit_, function.open);
        if (parameters.size() < parts.size()) continue;
        size_t end = k + 1 < parameters.size() ? parameters[k + 1] - 1 : function.close;
        auto found = names_declared(unit_, parameters[k], end);
        if (found.empty() && !function.body) continue;  // `float2 f(float2);`, defined elsewhere
        if (found.size() != 1 || !found[0].first || found[0].bounds) return;
        // What only the function's scope or template knows can't be written here.
        bool inside = function.scope || tokens_[function.head].is("template");
        if (inside && !names_vector(tokens_[found[0].first])) return;
        std::string text = type_text(found[0].first, found[0].last);
        if (!type.empty() && type != text) return;
        parameter = found[0];
        type = text;
      }
      fill(parameter, type, parts[k]);
    }
  }

  Unit& unit_;
  Tokens& tokens_;
  MaybeVectors maybe_;
  std::map<std::string, std::vector<Declared>> fields_;
};

}  // namespace

void fill_vectors(Unit& unit) { ShortLists(unit).run(); }

}  // namespace zmlx
