#include "reach.h"

#include <cctype>

namespace zmlx {

bool is_call_operator(const Unit& unit, const Function& function) {
  return function.name == "operator" && unit.tokens[function.open - 1].is(")");
}

bool is_destructor(const Unit& unit, const Function& function) {
  return !function.lambda && function.open > 1 && unit.tokens[function.open - 2].is("~");
}

bool is_variadic(const Unit& unit, const Function& function) {
  for (size_t i = function.open; i < function.close; ++i) {
    if (unit.tokens[i].is("...")) return true;
  }
  return false;
}

bool starts_expression(const Token& token) {
  return token.is_any({"return", "else", "case", "do"});
}

bool is_number_type(const Token& token) {
  static const std::set<std::string> names = {
      "bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat",
      "float", "unsigned", "signed", "auto"};
  std::string text = token.text;
  while (!text.empty() && std::isdigit((unsigned char)text.back())) text.pop_back();
  bool sized = text.size() > 1 && text.compare(text.size() - 2, 2, "_t") == 0;
  return sized || names.count(text) > 0;
}

namespace {

// Words that a bracket follows without being called.
bool precedes_bracket(const Token& token) {
  return token.is_any({"if", "for", "while", "switch", "constexpr", "sizeof", "alignof", "alignas",
                       "decltype", "noexcept", "operator", "void", "_Pragma",
                       "__attribute__"});
}

}  // namespace

Reach::Reach(Unit& unit, const Library& library)
    : unit_(unit), library_(library), names_(collectives()) {
  find_functions();
  find_types();
  find_variables();
  find_indirect();
  bool grew = true;
  while (grew) {
    grew = false;
    for (auto& function : unit.outline.functions) grew |= take(function);
    grew |= take_values();
    grew |= take_types();
  }
}

bool Reach::called(size_t i) const {
  auto& tokens = unit_.tokens;
  if (names(objects) && indirect_.count(i)) return true;
  if (tokens[i].is("{") && i > 0 && tokens[i - 1].is("return")) return makes_result(i);
  if (tokens[i].kind != Token::word) return false;
  if (initialised_.count(i)) {
    const Variable* member = variable_at(i);
    return names(member ? member->type : tokens[i].text);
  }
  if (names(tokens[i].text) && unit_.outline.call_at(i) != Outline::none) return true;
  if (makes_type(i)) return true;
  bool declares = tokens[i + 1].is_any({";", "(", "{", "=", ",", "["});
  size_t type = i - 1;
  if (i > 0 && tokens[type].is(">") && unit_.outline.partner[type] != Outline::none) {
    type = unit_.outline.partner[type] - 1;
  }
  return i > 0 && declares && names(tokens[type].text) && tokens[type].kind == Token::word;
}

// S{…} or S<T>{…}
bool Reach::makes_type(size_t i) const {
  auto& text = unit_.tokens[i].text;
  if (!names(text) || !named_.count(text)) return false;
  size_t list = unit_.outline.angle_end(i + 1), brace = list == Outline::none ? i + 1 : list + 1;
  return unit_.tokens[brace].is("{") && !bodies_.count(brace) && !unit_.outline.in_type(brace + 1);
}

// Whether the values behind `return` make an object, by the function's type.
bool Reach::makes_result(size_t brace) const {
  const Function* function = unit_.outline.function_at(brace);
  if (!function || function->lambda) return false;
  for (size_t i = function->head; i + 1 < function->open; ++i) {
    auto& text = unit_.tokens[i].text;
    if (names(text) && named_.count(text)) return true;
  }
  return false;
}

bool Reach::called_within(size_t begin, size_t end) const {
  for (size_t i = begin; i < end; ++i) {
    if (called(i)) return true;
  }
  return false;
}

bool Reach::handed(size_t i, Handed* handed) const {
  auto& tokens = unit_.tokens;
  auto& outline = unit_.outline;
  if (tokens[i].kind != Token::word || i == 0 || !names(tokens[i].text)) return false;
  size_t begin = i;
  while (begin > 1 && tokens[begin - 1].is("::")) {
    size_t owner = begin - 2;
    if (tokens[owner].is(">") && outline.partner[owner] != Outline::none) {
      owner = outline.partner[owner] - 1;
    }
    if (tokens[owner].kind != Token::word) break;
    begin = owner;
  }
  bool qualified = begin != i;
  bool known = qualified ? owned(i) : free_.count(tokens[i].text) && !variable_at(i);
  auto types = types_.find(tokens[i].text);
  if (!known || types == types_.end() || begin == 0) return false;
  size_t list = outline.angle_end(i + 1);
  size_t end = list == Outline::none ? i : list;
  auto &before = tokens[begin - 1], &after = tokens[end + 1];
  bool first = before.is_any({"(", ",", "=", "{", "return", "?", ":", "&", "==", "!="}) ||
               outline.angle_end(begin - 1) != Outline::none;
  bool last = after.is_any({")", ",", ";", "}", ":", "?", "==", "!=", "&&", "||"}) ||
              (after.is(">") && outline.partner[end + 1] != Outline::none);
  if (!first || !last) return false;
  handed->begin = begin;
  handed->name = i;
  handed->end = end;
  handed->address = before.is("&") && tokens[begin - 2].kind == Token::mark;
  size_t bracket = begin - (handed->address ? 2 : 1);
  handed->type = tokens[bracket].is("(") && bracket > 0 && tokens[bracket - 1].is("decltype");
  auto wanted = open_.find(tokens[i].text);
  size_t given = list == Outline::none ? 0 : list_size(i + 1);
  // Behind `::` a function at file scope is told from one of Metal's that has its name.
  handed->global = !qualified && global_.count(tokens[i].text) > 0;
  handed->single = types->second.size() == 1 && !variadic_.count(tokens[i].text) &&
                   given == (wanted == open_.end() ? 0 : wanted->second) &&
                   (qualified || handed->global || !library_().count(tokens[i].text));
  return true;
}

// Whether some function has the qualified name at token i, for all that the text tells: what a
// parameter of a template stands for is open, and so is what a type inherits.
bool Reach::owned(size_t i) const {
  auto found = owners_.find(unit_.tokens[i].text);
  if (found == owners_.end()) return false;
  size_t owner = named_before(i - 2);
  if (owner == Outline::none) return true;
  auto& name = unit_.tokens[owner].text;
  if (closed_.count(name) && !derived_.count(name)) return found->second.count(name) > 0;
  return found->second.size() > found->second.count("");
}

// The type or namespace whose braces open at that token, or none at file scope.
std::string Reach::scope_name(size_t brace) const {
  auto& tokens = unit_.tokens;
  auto& outline = unit_.outline;
  for (size_t i = brace ? outline.statement_begin(brace) : brace; i < brace; ++i) {
    if (outline.angle_end(i) != Outline::none) i = outline.angle_end(i);
    if (!tokens[i].is_any({"struct", "class", "union", "namespace"})) continue;
    bool see_through = tokens[i].is("namespace") &&
                       (i + 1 == brace || (i > 0 && tokens[i - 1].is("inline")));
    size_t end = outline.scope_end(brace);
    if (see_through) return end == Outline::none ? "" : scope_name(outline.partner[end]);
    size_t name = i + 1;
    while (tokens[name + 1].is("(")) name = outline.partner[name + 1] + 1;  // alignas(16)
    return tokens[name].text;
  }
  return "";
}

// The items of a template list; a pack is more than any list holds.
size_t Reach::list_size(size_t open) const {
  size_t close = unit_.outline.partner[open], size = open + 1 < close;
  if (close == Outline::none) return Outline::none;
  for (size_t i = open + 1; i < close; ++i) {
    if (unit_.tokens[i].is("...")) return Outline::none;
    if (unit_.tokens[i].is(",")) ++size;
    if (unit_.outline.partner[i] != Outline::none) i = unit_.outline.partner[i];
  }
  return size;
}

void Reach::find_functions() {
  auto& tokens = unit_.tokens;
  for (auto& function : unit_.outline.functions) {
    if (function.lambda) continue;
    own_.insert(function.name);
    size_t name = function.open - 1, list_of = unit_.outline.partner[name];
    if (tokens[name].is(">") && list_of != Outline::none) name = list_of - 1;
    bool elsewhere = name > 1 && tokens[name - 1].is("::");
    size_t owner = elsewhere ? named_before(name - 2) : Outline::none;
    owners_[function.name].insert(owner == Outline::none ? scope_name(function.scope)
                                                         : tokens[owner].text);
    if (is_variadic(unit_, function)) variadic_.insert(function.name);
    size_t head = function.head;
    bool list = tokens[head].is("template") && tokens[head + 1].is("<");
    if (tokens[head].is("template") && (!list || tokens[head + 2].is(">"))) continue;  // of another
    types_[function.name].insert(parameter_types(unit_, function));
    if (list) open_[function.name] = list_size(head + 1);
    if (function.scope == 0) global_.insert(function.name);
  }
}

bool Reach::has_word(size_t begin, size_t end, const char* word) const {
  for (size_t i = begin; i < end; ++i) {
    if (unit_.tokens[i].is(word)) return true;
  }
  return false;
}

void Reach::find_indirect() {
  auto& tokens = unit_.tokens;
  auto& partner = unit_.outline.partner;
  std::set<size_t> declarations;
  for (auto& function : unit_.outline.functions) {
    declarations.insert(function.open);
    if (!function.body) continue;
    bodies_.insert(function.body);
    for (size_t i = members_begin(function); i < function.body; ++i) {
      if (!tokens[i].is_any({"(", "{"})) continue;
      size_t list = partner[i - 1];
      bool instance = tokens[i - 1].is(">") && list != Outline::none;
      initialised_.insert(instance ? list - 1 : i - 1);
      declarations.insert(i);
      i = partner[i];
    }
  }
  auto parameters = this->parameters();
  for (size_t open = 4; open < tokens.size(); ++open) {
    if (!tokens[open].is("(") || declarations.count(open)) continue;
    bool declared = parameters.count(open) && tokens[open - 1].is(")") &&
                    declares(partner[open - 1] + 1);  // int f(int (g)(int))
    size_t name, begin = declared ? Outline::none : callee(open, &name);
    if (begin == Outline::none) continue;
    indirect_.insert(begin);
    bool variable = name != Outline::none;
    if (!variable || variable_at(name)->value) through_values_[begin] = open;
    if (!variable && makes_object(open)) objects_.insert(begin);
  }
}

// Where a constructor's list of members and their values begins, or its body.
size_t Reach::members_begin(const Function& function) const {
  auto& tokens = unit_.tokens;
  bool list = !function.lambda && tokens[function.close + 1].is(":");
  return list ? function.close + 1 : function.body;
}

bool Reach::closes(size_t i) const {
  auto partner = unit_.outline.partner[i];
  return partner != Outline::none && partner < i;
}

// The name before the brackets that end at token i, if they are an argument list, an index or the
// values of an object: f of f(1)[2], S of S<T>{}. Else none.
size_t Reach::named_before(size_t i) const {
  auto& tokens = unit_.tokens;
  while (closes(i)) {
    size_t open = unit_.outline.partner[i];
    bool block = tokens[open].is("{") && (bodies_.count(open) || tokens[open - 1].is(")"));
    if (open == 0 || block) return Outline::none;
    i = open - 1;
  }
  bool name = tokens[i].kind == Token::word && !starts_expression(tokens[i]) &&
              !precedes_bracket(tokens[i]) && !is_number_type(tokens[i]);
  return name ? i : Outline::none;
}

// Whether what the bracket calls is an object made there, or named with its operator: that one is
// told who calls.
bool Reach::makes_object(size_t open) const {
  auto& tokens = unit_.tokens;
  if (tokens[open - 1].is("}") || tokens[open - 3].is("operator")) return true;
  size_t name = named_before(open - 1);
  return name != Outline::none && named_.count(tokens[name].text);
}

// Where the expression begins whose value the bracket calls, or none: f, a.f, A::f, a[i], (*f),
// f(), F{}, a.operator() or (c ? f : g). `name` is that of a variable, or none.
size_t Reach::callee(size_t open, size_t* name) const {
  auto& tokens = unit_.tokens;
  auto& partner = unit_.outline.partner;
  size_t last = open - 1, begin = last;
  *name = Outline::none;
  while (tokens[begin].is("]") && partner[begin] > 0) begin = partner[begin] - 1;
  if (tokens[begin].kind == Token::word) {
    *name = begin;
  } else if (tokens[last].is("}")) {
    begin = named_before(last);
  } else if (tokens[last].is(")")) {
    begin = partner[last];
    bool method = begin + 1 == last && tokens[begin - 1].is("operator");
    bool declarator = tokens[begin + 1].is_any({"*", "&"});  // int (*f)(int)
    size_t made = declarator ? Outline::none : named_before(last);
    bool chosen = false;
    for (size_t i = begin + 1; i < last; ++i) {
      chosen |= tokens[i].is("?");
      if (partner[i] != Outline::none) i = partner[i];
    }
    bool pointer = begin + 3 == last && tokens[begin + 1].is("*");
    if (method) {
      --begin;
    } else if (made != Outline::none) {
      begin = made;
    } else if (pointer) {
      *name = begin + 2;
    } else if (!chosen) {
      return Outline::none;
    }
  } else {
    return Outline::none;
  }
  if (begin == Outline::none || (*name != Outline::none && !variable_at(*name))) {
    return Outline::none;
  }
  while (begin > 1 && tokens[begin - 1].is_any({".", "->", "::"})) {
    auto& owner = tokens[begin - 2];
    bool owned = closes(begin - 2) || (owner.kind == Token::word && !starts_expression(owner));
    begin -= owned ? 2 : 1;
    if (!owned) break;  // ::f
    if (!closes(begin)) continue;
    size_t named = named_before(begin);
    begin = named == Outline::none ? partner[begin] : named;
  }
  if (begin > 0 && tokens[begin - 1].is("typename")) --begin;
  if (begin == 0) return Outline::none;
  auto& before = tokens[begin - 1];
  bool declares = (before.kind == Token::word && !starts_expression(before)) ||
                  (before.is(">") && partner[begin - 1] != Outline::none);
  return declares ? Outline::none : begin;
}

bool Reach::take(const Function& function) {
  if (function.name == unit_.signature.name) return false;
  bool within = function.body && called_within(members_begin(function), function.end);
  if (!within && !defaults_call(function)) return false;
  if (function.lambda || is_call_operator(unit_, function)) {
    bool grew = names_.insert(objects).second;
    return function.name.empty() || function.name == "operator"
               ? grew : names_.insert(function.name).second || grew;
  }
  if (is_destructor(unit_, function)) return false;
  if (function.name == "operator") {
    unit_.place.refuse(unit_.tokens[function.head].line,
                       "a simdgroup function or barrier within an operator is not supported: its "
                       "uses cannot be told apart; call a function by its name");
  }
  if (!unit_.outline.in_type(function.head)) free_.insert(function.name);
  return names_.insert(function.name).second;
}

// Whether what an argument is by default is a call: f(int a = simd_sum(1)).
bool Reach::defaults_call(const Function& function) const {
  // A template's definition does not repeat its defaults, and is not known for the same function.
  if (!function.body && has_word(function.head, function.open, "=")) return false;
  size_t i = function.open;
  while (i < function.close && !unit_.tokens[i].is("=")) ++i;
  return !function.lambda && called_within(i, function.close);
}

// Types whose members are calls by default.
bool Reach::take_types() {
  auto& outline = unit_.outline;
  size_t size = names_.size();
  auto of_function = [&](size_t i) {
    for (auto& function : outline.functions) {
      size_t end = function.body ? function.end : function.close;
      if (function.head <= i && i < end) return true;
    }
    return false;
  };
  for (size_t i = 1; i < unit_.tokens.size(); ++i) {
    if (!called(i) || !outline.in_type(i) || of_function(i)) continue;
    auto name = scope_name(outline.partner[outline.scope_end(i)]);
    if (!name.empty()) names_.insert(name);
  }
  return names_.size() > size;
}

bool Reach::take_values() {
  if (hands_any_) return false;
  Handed handed;
  for (size_t i = 0; i < unit_.tokens.size() && !hands_any_; ++i) {
    hands_any_ = this->handed(i, &handed) && !handed.type;
  }
  return hands_any_ && names_.insert(objects).second;
}

}  // namespace zmlx
