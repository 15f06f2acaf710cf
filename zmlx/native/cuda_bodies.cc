#include "cuda_bodies.h"

#include <algorithm>

namespace zmlx {

bool one_of(const Token& token, std::initializer_list<const char*> names) {
  for (auto name : names) {
    if (token.is(name)) return true;
  }
  return false;
}

bool heads_statement(const Token& token) {
  return one_of(token, {"if", "else", "for", "while", "do", "switch", "case", "default", "break",
                        "continue", "return"});
}

namespace {

// What a thread attribute depends on, before a coordinate is taken of it.
int attribute_level(const std::string& name) {
  static const std::set<std::string> differ = {
      "thread_position_in_grid", "thread_position_in_threadgroup", "thread_index_in_threadgroup",
      "thread_index_in_simdgroup", "thread_index_in_quadgroup", "quadgroup_index_in_threadgroup"};
  return differ.count(name) ? 2 : 0;
}

bool is_shared_space(const Token& token) {
  return one_of(token, {"device", "threadgroup", "constant"});
}

}  // namespace

Bodies::Bodies(const Unit& unit)
    : unit_(unit), tokens_(unit.tokens), outline_(unit.outline), innermost_(tokens_.size()) {
  find_declarations();
  for (auto& function : outline_.functions) {
    if (function.body && function.lambda) declare_parameters(function);
  }
  add_kernel();
  for (auto& function : outline_.functions) {
    if (function.body && function.body != unit.signature.body) add(function);
  }
  for (size_t i = 0; i < tokens_.size(); ++i) find_memory_names(i);
  find_handed_on();
}

// Declarations at the begin of a statement, or of a loop's head. What is not recognised shares its
// name with all others of the function, and then their levels too.
void Bodies::find_declarations() {
  std::vector<size_t> open;
  for (size_t i = 0; i < tokens_.size(); ++i) {
    if (one_of(tokens_[i], {")", "]", "}"})) open.pop_back();
    if (one_of(tokens_[i], {"(", "[", "{"})) open.push_back(i);
    if (open.empty() || !one_of(tokens_[i], {";", "{", "}", "("})) continue;
    size_t around = open.back();
    bool block = tokens_[around].is("{") && !outline_.opens_type(around);
    bool loop = tokens_[i].is("(") && i > 0 && tokens_[i - 1].is("for");
    if (!block && !loop) continue;
    size_t end = loop ? outline_.statement_end(i - 1) : outline_.partner[around];
    declare(declared_at(outline_.past_prefix(i + 1)), end);
  }
}

// `T name = …, *name(…), name[2]{…};` from its first name on.
void Bodies::declare(size_t name, size_t end) {
  while (name != Outline::none && tokens_[name].kind == Token::word) {
    declarations_[tokens_[name].text].push_back({name, end});
    name = right_side(name, tokens_.size());
    if (!tokens_[name].is(",")) return;
    ++name;
    while (one_of(tokens_[name], {"*", "&", "&&", "const"})) ++name;
  }
}

// The first name of the declaration at `begin`, or none: it stands behind a type, and before a
// value or the end.
size_t Bodies::declared_at(size_t begin) const {
  size_t name = Outline::none, i = begin;
  bool typed = false, refers = false, placed = false;
  while (i + 1 < tokens_.size()) {
    auto& token = tokens_[i];
    if (token.kind == Token::word) {
      if (heads_statement(token) || one_of(token, {"using", "typedef", "template", "namespace"})) {
        return Outline::none;
      }
      if (one_of(token, {"alignas", "__attribute__"}) && tokens_[i + 1].is("(")) {
        i = outline_.partner[i + 1] + 1;
        continue;
      }
      placed |= is_shared_space(token) || one_of(token, {"thread", "auto"});
      typed |= name != Outline::none;
      name = i++;
      if (token.is("decltype") && tokens_[i].is("(")) i = outline_.partner[i] + 1;
      if (outline_.angle_end(i) != Outline::none) i = outline_.angle_end(i) + 1;
    } else if (token.is("::")) {
      name = Outline::none;
      ++i;
    } else if (one_of(token, {"*", "&", "&&"}) && i > begin) {
      typed = refers = true;
      name = Outline::none;
      ++i;
    } else {
      break;
    }
  }
  // A type that refers has an address space, and a product has none.
  if (name == Outline::none || i != name + 1 || !typed || (refers && !placed)) return Outline::none;
  bool type = names_number(tokens_[name]) || tokens_[name].is("auto") ||
              one_of(tokens_[name - 1], {"struct", "class", "union", "enum"});
  if (type) return Outline::none;
  return one_of(tokens_[i], {"=", ";", "[", "{", "(", ",", ":"}) ? name : Outline::none;
}

// A lambda shares the names of what is around it, but for its parameters.
void Bodies::declare_parameters(const Function& lambda) {
  if (lambda.open == lambda.close) return;
  for (auto& parameter : arguments(lambda.open)) {
    size_t at = name(parameter);
    if (at != Outline::none) declarations_[tokens_[at].text].push_back({at, lambda.end});
  }
}

std::string Bodies::key(size_t i) const {
  auto& name = tokens_[i].text;
  auto found = declarations_.find(name);
  if (found == declarations_.end()) return name;
  size_t innermost = 0;
  for (auto& declaration : found->second) {
    bool here = declaration.begin <= i && i <= declaration.end;
    if (here) innermost = std::max(innermost, declaration.begin);
  }
  return innermost ? name + "@" + std::to_string(innermost) : name;
}

void Bodies::add_kernel() {
  auto& signature = unit_.signature;
  Body body;
  body.name = signature.name;
  body.open = signature.open;
  body.close = outline_.partner[signature.open];
  body.begin = signature.body;
  body.end = outline_.partner[signature.body];
  body.kernel = true;
  for (auto& parameter : signature.parameters) {
    if (parameter.buffer >= 0) {
      if (parameter.declarator == '*') body.memory.insert(parameter.name);
    } else {
      body.levels[parameter.name] = attribute_level(parameter.attribute);
    }
  }
  all.push_back(body);
}

void Bodies::add(const Function& function) {
  Body body;
  body.name = function.name;
  body.open = function.open;
  body.close = function.close;
  body.begin = function.body;
  body.end = function.end;
  body.names = function.lambda ? enclosing(function.body) : all.size();
  body.method = is_method(function);
  push(body);
  find_memory_parameters(body);
}

bool Bodies::is_method(const Function& function) const {
  if (!function.scope || function.lambda) return false;
  for (size_t i = outline_.statement_begin(function.scope); i < function.scope; ++i) {
    if (one_of(tokens_[i], {"struct", "class", "union"})) return true;
  }
  return false;
}

size_t Bodies::enclosing(size_t i) const { return all[innermost_[i]].names; }

// Its list of initialisers is a part of it.
void Bodies::push(const Body& body) {
  for (size_t i = body.open + 1; i < body.end; ++i) {
    size_t& known = innermost_[i];
    if (!known || body.begin > all[known].begin) known = all.size();
  }
  all.push_back(body);
}

std::vector<Argument> Bodies::arguments(size_t open) const {
  std::vector<Argument> list;
  size_t close = outline_.partner[open], begin = open + 1;
  for (size_t i = begin; i <= close; ++i) {
    if (one_of(tokens_[i], {"(", "[", "{"})) i = outline_.partner[i];
    if (outline_.angle_end(i) != Outline::none) i = outline_.angle_end(i);
    if (i < close && !tokens_[i].is(",")) continue;
    if (i > begin) list.push_back({begin, i});
    begin = i + 1;
  }
  return list;
}

// The last word before a default or an array's extent.
size_t Bodies::name(const Argument& parameter) const {
  size_t name = Outline::none;
  for (size_t i = parameter.begin; i < parameter.end; ++i) {
    if (one_of(tokens_[i], {"=", "["})) break;
    if (outline_.angle_end(i) != Outline::none) i = outline_.angle_end(i);
    if (tokens_[i].kind == Token::word) name = i;
  }
  return name;
}

bool Bodies::is_output(const Argument& parameter) const {
  bool refers = false, kept = false;
  for (size_t i = parameter.begin; i < parameter.end; ++i) {
    // What is said before a star is said of what it points to.
    kept = (kept || tokens_[i].is("const") || is_shared_space(tokens_[i])) && !tokens_[i].is("*");
    refers |= one_of(tokens_[i], {"&", "&&"});
  }
  return refers && !kept;
}

bool Bodies::casts(size_t open) const {
  auto& before = tokens_[open - 1];
  bool call = (before.kind == Token::word && !heads_statement(before)) ||
              one_of(before, {")", "]"}) || outline_.partner[open - 1] < open;
  for (size_t i = open + 1; i < outline_.partner[open]; ++i) {
    if (outline_.angle_end(i) != Outline::none) i = outline_.angle_end(i);
    bool type = tokens_[i].kind == Token::word || one_of(tokens_[i], {"::", "*", "&", ">"});
    if (!type || tokens_[open + 1].kind != Token::word) return false;
  }
  return !call;
}

size_t Bodies::right_side(size_t i, size_t end) const {
  for (size_t k = i + 1; k < end; ++k) {
    if (one_of(tokens_[k], {"(", "[", "{"})) {
      k = outline_.partner[k];
    } else if (outline_.angle_end(k) != Outline::none) {
      k = outline_.angle_end(k);
    } else if (one_of(tokens_[k], {",", ";", ")", "]", "}"})) {
      return k;
    }
  }
  return end;
}

size_t Bodies::operand_end(size_t i) const {
  while (one_of(tokens_[i], {"*", "&", "++", "--"})) ++i;
  bool cast = tokens_[i].is("(") && tokens_[outline_.partner[i] + 1].kind == Token::word;
  i = tokens_[i].is("(") ? outline_.partner[i] + 1 + cast : i + 1;
  while (true) {
    if (one_of(tokens_[i], {"(", "["}) || outline_.angle_end(i) != Outline::none) {
      i = outline_.partner[i] + 1;
    } else if (one_of(tokens_[i], {".", "->", "::"})) {
      i += 2;
    } else {
      return i;
    }
  }
}

size_t Bodies::selector(size_t i) const {
  if (i > 0 && tokens_[i - 1].is("template")) --i;
  return i > 0 && one_of(tokens_[i - 1], {".", "->"}) ? i - 1 : Outline::none;
}

size_t Bodies::path_begin(size_t i) const {
  auto closes = [&](size_t k) { return outline_.partner[k] < k; };
  for (size_t at = selector(i); at != Outline::none && at > 0; at = selector(i)) {
    i = at - 1;
    while (closes(i)) {
      i = outline_.partner[i];
      if (i > 0 && (tokens_[i - 1].kind != Token::mark || closes(i - 1))) --i;
    }
  }
  return i;
}

void Bodies::find_memory_parameters(const Body& body) {
  if (body.open == body.close) return;
  for (auto& parameter : arguments(body.open)) {
    size_t at = name(parameter);
    bool shared = false, several = false;  // a reference may be of one number
    for (size_t i = parameter.begin; i < parameter.end; ++i) {
      shared |= is_shared_space(tokens_[i]);
      several |= one_of(tokens_[i], {"*", "["});
    }
    if (shared && several && at != Outline::none) all[body.names].memory.insert(key(at));
  }
}

// threadgroup float a[8], b[8]; in a function, where no type holds it
void Bodies::find_memory_names(size_t i) {
  if (!one_of(tokens_[i], {"threadgroup", "device"})) return;
  size_t begin = outline_.statement_begin(i);
  if (begin > 0 && one_of(tokens_[begin - 1], {"(", "["})) return;
  if (!outline_.function_at(i) || outline_.in_type(i)) return;
  auto& memory = all[enclosing(i)].memory;
  for (size_t k = i; k < tokens_.size() && !one_of(tokens_[k], {";", "=", "(", "{", ")"}); ++k) {
    bool named = tokens_[k].kind == Token::word && one_of(tokens_[k + 1], {"[", ",", ";", "="});
    // An array of pointers is a thread's own.
    bool pointers = tokens_[k - 1].is("*") && tokens_[k + 1].is("[");
    if (named && !pointers) memory.insert(key(k));
    if (tokens_[k].is("[")) k = outline_.partner[k];
  }
}

// Functions that the text names other than in a call may be called from anywhere.
void Bodies::find_handed_on() {
  std::set<std::string> names = {"", "operator"};
  for (size_t i = 0; i + 1 < tokens_.size(); ++i) {
    bool call = outline_.call_at(i) != Outline::none || tokens_[i + 1].is("=");
    if (tokens_[i].kind == Token::word && !call) names.insert(tokens_[i].text);
  }
  for (size_t i = 1; i < all.size(); ++i) {
    if (names.count(all[i].name)) all[i].flow = {2, 2};
  }
}

}  // namespace zmlx
