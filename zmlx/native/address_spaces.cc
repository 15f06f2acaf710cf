// device, constant, thread and threadgroup: qualifiers of pointers vanish, variables in threadgroup
// memory move to the arena that all threads of a group share, tables in constant memory become
// static, and overloads that were told apart by an address space only become one.
#include <algorithm>
#include <map>
#include <set>

#include "passes.h"

namespace zmlx {
bool is_space(const Token& token) {
  return token.is("device") || token.is("constant") || token.is("thread") ||
         token.is("threadgroup");
}

namespace {

// The `;`, `=`, `{` or `(` that ends the first declarator of a statement; `*pointer` if the
// variable only points to what the qualifier describes.
size_t declarator_end(const Unit& unit, size_t begin, bool* pointer) {
  auto& tokens = unit.tokens;
  *pointer = false;
  for (size_t i = begin; i < tokens.size(); ++i) {
    if (tokens[i].is_any({";", "=", "{", ")", ":"})) return i;
    if (tokens[i].is_any({"*", "&", "&&"})) *pointer = true;
    if (tokens[i].is_any({"(", "["})) {
      if (i + 1 < tokens.size() && tokens[i].is("(") &&
          tokens[i + 1].is_any({"*", "&"})) {
        *pointer = true;
      }
      i = unit.outline.partner[i];
    } else if (unit.outline.angle_end(i) != Outline::none) {
      i = unit.outline.angle_end(i);
    }
  }
  return tokens.size();
}

// Whether the qualifier at i is a member function's: `float get() const threadgroup`.
bool qualifies_object(const Unit& unit, size_t i) {
  auto& tokens = unit.tokens;
  while (i > 0 && (is_space(tokens[i - 1]) || tokens[i - 1].is_any({"const", "volatile"}))) --i;
  if (i == 0 || !tokens[i - 1].is(")")) return false;
  auto& functions = unit.outline.functions;
  return std::any_of(functions.begin(), functions.end(),
                     [&](auto& function) { return function.close == i - 1; });
}

}  // namespace

// Whether the qualifier at i describes a variable that its statement declares, not something that
// is pointed to, cast to, or passed.
bool declares_variable(const Unit& unit, size_t i) {
  auto& tokens = unit.tokens;
  if (qualifies_object(unit, i)) return false;
  size_t begin = unit.outline.statement_begin(i);
  for (size_t k = begin; k < i; ++k) {
    if (tokens[k].is_any({"using", "typedef", "=", "return"})) return false;
    size_t list = unit.outline.angle_end(k);
    if (list != Outline::none && list > i) return false;
  }
  if (begin > 0 && tokens[begin - 1].is_any({"(", "["})) return false;
  bool pointer;
  size_t end = declarator_end(unit, i, &pointer);
  return !pointer && end < tokens.size() && !tokens[end].is_any({")", ":"}) &&
         !(tokens[end - 1].is(")") && tokens[end].is("{"));
}

namespace {

// Whether the declaration that the qualifier at i belongs to has both pointers and variables, as in
// `threadgroup float a[8], *p = a;`: the qualifier says where a lies, and of p what it points to.
bool mixes_pointers(const Unit& unit, size_t i) {
  auto& tokens = unit.tokens;
  size_t begin = unit.outline.statement_begin(i);
  if (begin > 0 && tokens[begin - 1].is_any({"(", "["})) return false;
  for (size_t k = begin; k < i; ++k) {
    if (tokens[k].is_any({"using", "typedef", "=", "return"})) return false;
    size_t list = unit.outline.angle_end(k);
    if (list != Outline::none && list > i) return false;
  }
  bool pointers = false, variables = false, pointer = false, value = false;
  for (size_t k = i + 1; k < tokens.size(); ++k) {
    bool body = tokens[k].is("{") && !value;
    if (body || tokens[k].is_any({")", "]", "}"}) || is_space(tokens[k])) return false;
    if (tokens[k].is_any({",", ";"})) {
      (pointer ? pointers : variables) = true;
      if (tokens[k].is(";")) return pointers && variables;
      pointer = value = false;
    }
    value |= tokens[k].is("=");
    pointer |= !value && tokens[k].is_any({"*", "&", "&&"});
    pointer |= !value && tokens[k].is("(") && tokens[k + 1].is_any({"*", "&"});
    bool list = unit.outline.angle_end(k) != Outline::none;
    if (tokens[k].is_any({"(", "[", "{"}) || list) k = unit.outline.partner[k];
  }
  return false;
}

// The names that the statement begin ... end declares.
std::vector<std::string> declared_names(const Unit& unit, size_t begin, size_t end) {
  auto& tokens = unit.tokens;
  std::vector<std::string> names;
  for (size_t i = begin; i < end; ++i) {
    if (tokens[i].is("=")) {
      unit.place.refuse(tokens[i].line,
                        "a threadgroup variable with an initial value is not supported: let one "
                        "thread store it, and put a barrier behind");
    }
    if (tokens[i].is_any({"(", "[", "{"})) i = unit.outline.partner[i];
    size_t list = unit.outline.angle_end(i);
    if (list != Outline::none) i = list;
    bool declares = tokens[i].kind == Token::word && tokens[i + 1].is_any({"[", ",", ";"});
    if (declares) names.push_back(tokens[i].text);
  }
  return names;
}

// The type that a declaration defines in front of its qualifier: `struct S { … } threadgroup s;`.
std::string type_in_front(const Unit& unit, size_t begin) {
  auto& tokens = unit.tokens;
  size_t open = begin > 0 && tokens[begin - 1].is("}") ? unit.outline.partner[begin - 1] : 0;
  bool defines = open > 1 && tokens[open - 2].is_any({"struct", "class", "union"});
  return defines ? tokens[open - 1].text + " " : "";
}

// threadgroup float a[N], b;  ->  struct zk_shared0 { float a[N], b; };
//                                 auto& a = zk_threadgroup<zk_shared0, 0>(zk_memory).a; ...
// In a group of one thread they are ordinary variables.
void declare_shared(Unit& unit, size_t i) {
  auto& tokens = unit.tokens;
  const Function* function = unit.outline.function_at(i);
  bool in_lambda = function && function->lambda;
  if (!unit.in_kernel(i) || in_lambda) {
    unit.place.refuse(tokens[i].line,
                      "a threadgroup variable outside the kernel's body is not supported: declare "
                      "it in the body and pass a pointer");
  }
  size_t begin = unit.outline.past_labels(unit.outline.statement_begin(i));
  size_t end = unit.outline.statement_end(begin);
  auto names = declared_names(unit, begin, end);
  if (unit.declarations == 64) {
    unit.place.refuse(tokens[i].line,
                      "more than 64 threadgroup declarations are not supported: gather them in a "
                      "struct");
  }
  std::string number = std::to_string(unit.declarations++);
  std::string whole = "zk_shared" + number;
  if (unit.mode == Mode::cooperative) {
    std::string type = type_in_front(unit, begin);
    tokens[begin].before += (type.empty() ? "" : "; ") + ("struct " + whole + " { ") + type;
    tokens[end].after += " };";
    for (auto& name : names) {
      tokens[end].after += " auto& " + name + " = zk_threadgroup<" + whole + ", " + number +
                           ">(zk_memory)." + name + ";";
    }
  }
  // With those before it whose scope has not ended: the sizes are known only to the compiler.
  std::string bytes;
  for (auto& name : names) unit.shared.emplace_back(i, name);
  for (auto& [at, name] : unit.shared) {
    if (unit.outline.scope_end(at) < i) continue;
    bytes += (bytes.empty() ? "sizeof(" : " + sizeof(") + name + ")";
  }
  tokens[end].after += " static_assert(" + bytes +
                       " <= 32768, \"threadgroup variables hold at most 32768 bytes\");";
}

// `constant` is `const` once address spaces are gone; a variable in it is a table that must not be
// built anew at every call.
void replace_constant(Unit& unit, size_t i, bool variable) {
  auto& tokens = unit.tokens;
  bool constant = false, fixed = false, computed = false;
  auto look = [&](const Token& token) {
    constant |= token.is("const");
    fixed |= token.is("static");
    computed |= token.is("constexpr");
    return token.kind == Token::word || token.is("::");
  };
  for (size_t k = i; k-- > 0 && look(tokens[k]);) {
  }
  for (size_t k = i + 1; k < tokens.size() && look(tokens[k]); ++k) {
  }
  tokens[i].dropped = constant || (computed && variable);  // of a pointer it is what it points to
  tokens[i].text = "const";
  bool local = unit.outline.function_at(i) != nullptr;
  // A member of a struct is defined where it is declared, which C++ allows constexpr ones only.
  if (fixed && unit.outline.in_type(i) && !computed) tokens[i].text = "constexpr";
  if (variable && local && !fixed) tokens[i].before += "static ";
}

using Range = std::pair<size_t, size_t>;

// The parts between the commas of a bracket or of a template list.
std::vector<Range> list_items(const Unit& unit, size_t open, size_t close) {
  std::vector<Range> items;
  size_t begin = open + 1;
  for (size_t i = begin; i <= close; ++i) {
    if (i == close || unit.tokens[i].is(",")) {
      if (i > begin) items.push_back({begin, i});
      begin = i + 1;
    } else if (unit.outline.partner[i] != Outline::none) {
      i = unit.outline.partner[i];
    }
  }
  return items;
}

// The name that a parameter declares: its last word before a default or an array bound, or the one
// in `(&a)[4]`, if it is more than a type.
size_t declared_name(const Unit& unit, Range item) {
  auto& tokens = unit.tokens;
  size_t name = Outline::none;
  for (size_t i = item.first; i < item.second && !tokens[i].is_any({"=", "["}); ++i) {
    size_t list = unit.outline.angle_end(i);
    if (list != Outline::none) i = list;
    if (tokens[i].kind == Token::word) name = i;
  }
  bool alone = name == Outline::none || name == item.first ||
               tokens[name - 1].is_any({"const", "unsigned", "::"});
  return alone ? Outline::none : name;
}

// A declaration as text that two overloads share if they differ in address spaces and in names
// only: qualifiers dropped, parameters and template parameters numbered.
class Canonical {
 public:
  Canonical(const Unit& unit, const Function& function) : unit_(unit), function_(function) {
    for (size_t i = function.head; i < function.open; ++i) {
      if (unit.outline.angle_end(i) == Outline::none) continue;
      size_t end = unit.outline.angle_end(i);
      if (unit.tokens[i - 1].is("template")) {
        auto items = list_items(unit, i, end);
        number(items);
        head_ += "<";
        for (auto& item : items) head_ += text(item.first, value_begin(item)) + ",";
      } else {
        head_ += text(i, end);
      }
      i = end;
    }
    bool none = function.close == function.open + 2 && unit.tokens[function.open + 1].is("void");
    if (!none) parameters_ = list_items(unit, function.open, function.close);
    number(parameters_);
  }

  std::string types() const {
    std::string key = head_ + owner() + function_.name + symbol() + "(";
    for (auto& item : parameters_) {
      size_t end = value_begin(item);
      // Without the name, which a declaration may leave out.
      size_t name = declared_name(unit_, item);
      bool named = name != Outline::none;
      key += named ? text(item.first, name) + text(name + 1, end) : text(item.first, end);
      key += ",";
    }
    bool constant = false;
    for (size_t i = function_.close + 1; i < rest(); ++i) {
      constant |= unit_.tokens[i].is_any({"const", "constant"});
    }
    if (constant && !is_constructor(unit_, function_)) key += "const";
    key += trailing_result();
    return key + "@" + std::to_string(function_.scope);
  }

  std::string body() const { return text(rest(), function_.end); }

  // What stands around the types: the result, bases of a class, and what parameters are by default.
  std::string others() const {
    std::string result;
    size_t begin = function_.head;
    for (size_t i = begin; i < function_.open; ++i) {
      size_t list = unit_.outline.angle_end(i);
      bool specifier = unit_.tokens[i].is_any({"inline", "static", "constexpr", "explicit",
                                               "METAL_FUNC", "__attribute__"});
      if (!specifier && list == Outline::none) continue;
      result += text(begin, i);
      if (list != Outline::none) i = list;
      if (unit_.tokens[i].is("__attribute__")) i = unit_.outline.partner[i + 1];
      begin = i + 1;
    }
    result += text(begin, function_.open);
    for (auto& item : parameters_) result += text(value_begin(item), item.second) + ",";
    return result;
  }

 private:
  // Past the parameters and the qualifiers of the object.
  size_t rest() const {
    size_t i = function_.close + 1;
    while (unit_.tokens[i].is("const") || is_space(unit_.tokens[i])) ++i;
    return i;
  }

  // The `=` of what a parameter is by default, which one declaration gives, or its end.
  size_t value_begin(const Range& item) const {
    size_t i = item.first;
    while (i < item.second && !unit_.tokens[i].is("=")) ++i;
    return i;
  }

  // `-> enable_if_t<…>` is what some templates are told apart by.
  std::string trailing_result() const {
    size_t i = rest(), end = function_.body ? function_.body : unit_.outline.statement_end(i);
    while (i < end && !unit_.tokens[i].is_any({"->", ":"})) ++i;
    return i < end && unit_.tokens[i].is("->") ? text(i, end) : "";
  }

  // The classes or namespaces of a function that is defined outside them: `A::` of `A<T>::f`.
  std::string owner() const {
    auto& tokens = unit_.tokens;
    auto& partner = unit_.outline.partner;
    size_t name = function_.open - 1;
    for (size_t i = function_.head; i < function_.open; ++i) {
      if (tokens[i].is("operator")) name = i;
    }
    auto before_list = [&](size_t i) {
      return tokens[i].is(">") && partner[i] != Outline::none ? partner[i] - 1 : i;
    };
    name = before_list(name);
    std::string result;
    while (name > function_.head + 1 && tokens[name - 1].is("::")) {
      name = before_list(name - 2);
      result = tokens[name].text + "::" + result;
    }
    return result;
  }

  // What follows `operator`: a mark, brackets or a type.
  std::string symbol() const {
    size_t i = function_.open;
    while (i > function_.head && !unit_.tokens[i].is("operator")) --i;
    return unit_.tokens[i].is("operator") ? text(i + 1, function_.open) : "";
  }

  void number(const std::vector<Range>& items) {
    for (auto& item : items) {
      size_t name = declared_name(unit_, item);
      if (name != Outline::none) names_[unit_.tokens[name].text] = "$" + std::to_string(names_.size());
    }
  }

  std::string text(size_t begin, size_t end) const {
    std::string result;
    bool constant = false;
    for (size_t i = begin; i < end; ++i) {
      auto& token = unit_.tokens[i];
      bool repeated = constant && token.is_any({"const", "constant"});
      constant = token.is_any({"const", "constant"}) || (constant && is_space(token));
      if (repeated || token.dropped || (is_space(token) && !token.is("constant"))) continue;
      bool member = i > 0 && unit_.tokens[i - 1].is_any({".", "->"});
      auto found = member ? names_.end() : names_.find(token.text);
      result += (token.is("constant") ? "const" : found == names_.end() ? token.text : found->second);
      result += " ";
    }
    return result;
  }

  const Unit& unit_;
  const Function& function_;
  std::map<std::string, std::string> names_;
  std::vector<Range> parameters_;
  std::string head_;
};

}  // namespace

std::string parameter_types(const Unit& unit, const Function& function) {
  return Canonical(unit, function).types();
}

// One of several that are the same without address spaces.
void remove(Tokens& tokens, size_t begin, size_t end) {
  for (size_t i = begin; i <= end; ++i) tokens[i].dropped = tokens[i].removed = true;
}

// A member function that has no body where it is declared; a defaulted constructor, say.
void merge_declarations(Unit& unit) {
  std::set<std::string> known;
  for (auto& function : unit.outline.functions) {
    if (function.body || !unit.outline.in_type(function.head)) continue;
    if (known.insert(parameter_types(unit, function)).second) continue;
    remove(unit.tokens, function.head, unit.outline.statement_end(function.close));
  }
}

void merge_overloads(Unit& unit) {
  merge_declarations(unit);
  std::map<std::string, const Function*> first;
  for (auto& function : unit.outline.functions) {
    if (!function.body || function.lambda || function.name.empty()) continue;
    Canonical declaration(unit, function);
    auto [entry, fresh] = first.try_emplace(declaration.types(), &function);
    if (fresh) continue;
    Canonical other(unit, *entry->second);
    if (declaration.body() != other.body() || declaration.others() != other.others()) {
      unit.place.refuse(
          unit.tokens[function.head].line,
          "overloads of `" + function.name + "` that differ in address space and in their bodies, "
          "results or defaults are not supported: give them different names");
    }
    remove(unit.tokens, function.head, function.end);
  }
}

void merge_specialisations(Unit& unit) {
  auto& tokens = unit.tokens;
  std::map<std::string, Function> first;
  for (size_t i = 0; i + 2 < tokens.size(); ++i) {
    if (!tokens[i].is_any({"struct", "class"}) || unit.outline.angle_end(i + 2) == Outline::none) {
      continue;
    }
    Function type;  // no function, but read like one: its brackets are the braces
    type.name = tokens[i].text + " " + tokens[i + 1].text;
    type.head = unit.outline.statement_begin(i);
    type.scope = unit.outline.scope_end(i);
    size_t brace = unit.outline.angle_end(i + 2) + 1;
    while (!tokens[brace].is_any({"{", ";"}) && brace + 1 < tokens.size()) ++brace;
    if (!tokens[brace].is("{")) continue;
    type.open = type.close = type.body = brace;
    type.end = unit.outline.statement_end(type.head);
    Canonical declaration(unit, type);
    auto [entry, fresh] = first.try_emplace(declaration.types(), type);
    if (fresh) continue;
    Canonical other(unit, entry->second);
    if (declaration.body() != other.body() || declaration.others() != other.others()) {
      unit.place.refuse(tokens[i].line,
                        "specialisations of `" + tokens[i + 1].text +
                            "` that differ in address space and in their bases or bodies are not "
                            "supported: give them one body");
    }
    remove(tokens, type.head, type.end);
  }
}

bool has_threadgroup_memory(const Unit& unit) {
  for (size_t i = 0; i < unit.tokens.size(); ++i) {
    if (unit.tokens[i].is("threadgroup") && declares_variable(unit, i)) return true;
  }
  return false;
}

void rewrite_address_spaces(Unit& unit) {
  auto& tokens = unit.tokens;
  for (auto& function : unit.outline.functions) {
    // No object is constant before it is made.
    bool drops = tokens[function.close + 1].is("constant") && is_constructor(unit, function);
    if (drops) tokens[function.close + 1].dropped = true;
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (!is_space(tokens[i]) || tokens[i].dropped) continue;
    bool variable = declares_variable(unit, i);
    if (tokens[i].is("threadgroup") && mixes_pointers(unit, i)) {
      unit.place.refuse(tokens[i].line,
                        "a pointer and a variable in one threadgroup declaration are not "
                        "supported: declare the pointer by itself");
    }
    if (tokens[i].is("constant")) {
      replace_constant(unit, i, variable);
      continue;
    }
    tokens[i].dropped = true;
    if (tokens[i].is("threadgroup") && variable) declare_shared(unit, i);
  }
}

}  // namespace zmlx
