#include "outline.h"

#include <algorithm>

#include "passes.h"

namespace zmlx {
namespace {

// Words that a bracket may follow without a function being named.
bool not_a_function(const Token& token) {
  return token.is_any({"if", "for", "while", "switch", "return", "alignas", "decltype", "noexcept",
                        "requires", "__attribute__", "sizeof", "explicit", "static_assert",
                        "_Pragma"});
}

}  // namespace

Outline::Outline(const Tokens& tokens, const Place& place) : tokens_(tokens) {
  match_brackets(place);
  find_scopes();
  find_templates();
  match_lists();
  check_statements(place);
  scan();
}

void Outline::match_brackets(const Place& place) {
  partner.assign(tokens_.size(), none);
  std::vector<size_t> open;
  size_t outermost = none;  // the last bracket that closed all others
  size_t closed = none;     // what the last } closed
  for (size_t i = 0; i < tokens_.size(); ++i) {
    auto& token = tokens_[i];
    if (token.kind != Token::mark) continue;
    if (token.is_any({"(", "[", "{"})) open.push_back(i);
    if (!token.is_any({")", "]", "}"})) continue;
    const char* wanted = token.is(")") ? "(" : token.is("]") ? "[" : "{";
    if (open.empty() && token.is("}") && outermost != none) {
      place.refuse(tokens_[outermost].line, "this '}' closes the kernel itself");
    }
    bool closes = !open.empty() && tokens_[open.back()].is(wanted);
    if (!closes && (open.empty() || tokens_[open.back()].is("{"))) {
      place.refuse(token.line, "'" + token.text + "' closes nothing");
    }
    auto& opened = tokens_[open.back()];
    if (!closes) place.refuse(opened.line, "'" + opened.text + "' is not closed");
    partner[i] = open.back();
    partner[open.back()] = i;
    if (token.is("}")) closed = open.back();
    open.pop_back();
    if (!open.empty() || !token.is("}")) continue;
    outermost = i;
    if (place.in_source(token.line)) place.refuse(token.line, "this '}' closes the kernel itself");
  }
  if (open.empty()) return;
  auto& token = tokens_[open.back()];
  if (token.is("{") && token.line + 1 == place.body_first_line) {
    // What was to close the kernel is in a comment or a literal.
    int behind = place.body_first_line + std::max(place.source_lines, 0);
    if (closed == none || tokens_[partner[closed]].line < behind) {
      place.refuse(std::max(behind - 1, place.body_first_line),
                   "this line goes on behind the end of the source");
    }
    // The source closed another one by it.
    place.refuse(tokens_[closed].line,
                 "this '{', or one within it, is not closed before the end of the source");
  }
  place.refuse(token.line, "'" + token.text + "' is not closed");
}

void Outline::find_scopes() {
  size_t brace = none;
  for (size_t i = 0; i < tokens_.size(); ++i) {
    around_.push_back(brace);
    if (tokens_[i].is("{")) brace = i;
    if (tokens_[i].is("}")) brace = around_[partner[i]];
  }
}

// Templates of Metal's library and of MLX.
const std::set<std::string> library_templates = {
    "array", "atomic", "_atomic", "bool_constant", "cast_to", "ceildiv", "common_type",
    "common_type_t", "conditional", "conditional_t", "ConditionalType", "const_cast", "as_type",
    "decay", "decay_t", "declval", "enable_if", "enable_if_t", "extent", "integral_constant",
    "Limits", "LoopedElemToLoc", "make_diagonal_simdgroup_matrix", "make_filled_simdgroup_matrix",
    "make_signed", "make_signed_t", "make_unsigned", "make_unsigned_t", "matrix", "numeric_limits",
    "packed_vec", "rank", "reinterpret_cast", "remove_const", "remove_const_t", "remove_cv",
    "remove_cv_t", "remove_pointer", "remove_pointer_t", "remove_reference", "remove_reference_t",
    "simdgroup_matrix", "static_cast", "template", "underlying_type", "underlying_type_t", "uniform",
    "vec", "WorkPerThread", "_disjunction"};

// Functions of a simdgroup and of atomics: Metal deduces their types, or is told, simd_sum<float>(x).
bool is_library_function(const Token& token) {
  const std::string& name = token.text;
  const std::string suffix = "_explicit";
  bool atomic = name.compare(0, 7, "atomic_") == 0 && name.size() > suffix.size() &&
                name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
  return token.kind == Token::word && (atomic || collectives().count(name));
}

// The name that a template declares: the last word before the first of some marks.
void Outline::find_templates() {
  templates = library_templates;
  std::set<std::string> types = library_templates;
  for (size_t i = 0; i + 1 < tokens_.size(); ++i) {
    if (tokens_[i + 1].is("<") && is_library_function(tokens_[i])) {
      templates.insert(tokens_[i].text);
      function_templates_.insert(tokens_[i].text);
    }
    if (!tokens_[i].is("template") || !tokens_[i + 1].is("<")) continue;
    size_t end = find_list_end(i + 1);
    if (end == none) continue;
    size_t name = none;
    bool function = false;
    for (size_t k = end + 1; k < tokens_.size(); ++k) {
      function = tokens_[k].is("(");
      if (tokens_[k].is_any({"(", "{", ";", "=", ":"})) break;
      size_t closes = find_list_end(k);
      if (closes != none) k = closes;
      if (tokens_[k].is("[")) k = partner[k];
      if (tokens_[k].kind == Token::word) name = k;
    }
    if (name == none) continue;
    templates.insert(tokens_[name].text);
    (function ? function_templates_ : types).insert(tokens_[name].text);
  }
  for (auto& name : types) function_templates_.erase(name);
}

void Outline::match_lists() {
  for (size_t i = 0; i < tokens_.size(); ++i) {
    size_t end = find_list_end(i);
    if (end == none) continue;
    partner[i] = end;
    partner[end] = i;
  }
}

bool Outline::opens_list(size_t i) const {
  return i < tokens_.size() && tokens_[i].is("<") && partner[i] != none;
}

size_t Outline::find_list_end(size_t i) const {
  if (i == 0 || i >= tokens_.size() || !tokens_[i].is("<")) return none;
  const std::string& name = tokens_[i - 1].text;
  bool trait = name.compare(0, 3, "is_") == 0;
  if (!trait && !templates.count(name)) return none;
  // Names that are as good for a variable, which may stand before a comparison.
  bool doubtful = is_library_function(tokens_[i - 1]) ||
                  tokens_[i - 1].is_any({"array", "matrix", "vec", "rank", "extent", "uniform"});
  // A variable may have a function's name, and behind a list of that stands no operand.
  bool function = function_templates_.count(name);
  int depth = 0;
  for (size_t k = i; k < tokens_.size(); ++k) {
    if (tokens_[k].is("<")) {
      // A list holds comparisons in brackets, or of what no list is behind: sizeof(T) < 8.
      bool compared = tokens_[k - 1].is_any({")", "]"}) || tokens_[k - 1].kind == Token::number ||
                      (tokens_[k + 1].kind == Token::number && !templates.count(tokens_[k - 1].text));
      depth += k == i || !compared;
    } else if (tokens_[k].is(">")) {
      if (--depth) continue;
      bool compared = function && k + 1 < tokens_.size() &&
                      (tokens_[k + 1].kind == Token::number || tokens_[k + 1].kind == Token::word);
      return compared ? none : k;
    } else if (tokens_[k].is_any({"(", "[", "{"})) {
      k = partner[k];
    } else if (tokens_[k].is_any({";", ")", "]", "}"}) ||
               (doubtful && tokens_[k].is_any({"&&", "||"}))) {
      return none;
    }
  }
  return none;
}

bool Outline::in_type(size_t i) const { return opens_type(around_[i]); }

size_t Outline::scope_end(size_t i) const {
  return around_[i] == none ? none : partner[around_[i]];
}

size_t Outline::call_at(size_t i) const {
  size_t next = opens_list(i + 1) ? partner[i + 1] + 1 : i + 1;
  return next < tokens_.size() && tokens_[next].is("(") ? next : none;
}

const Function* Outline::function_at(size_t i) const {
  const Function* innermost = nullptr;
  for (auto& function : functions) {
    if (function.body < i && i < function.end && (!innermost || function.body > innermost->body)) {
      innermost = &function;
    }
  }
  return innermost;
}

size_t Outline::statement_begin(size_t i) const {
  while (i > 0) {
    auto& previous = tokens_[i - 1];
    if (previous.is_any({";", "{", "}", "(", "["})) break;
    if (previous.is_any({"else", "do"})) break;
    bool group = previous.is_any({")", "]"});
    // `if (a) statement`: the statement begins after the bracket.
    size_t opens = group ? partner[i - 1] : 0;
    if (opens > 0 && tokens_[opens - 1].is_any({"if", "for", "while", "switch"})) break;
    i = group ? partner[i - 1] : i - 1;
  }
  return i;
}

size_t Outline::past_labels(size_t i) const {
  if (!tokens_[i].is_any({"case", "default"})) return i;
  int choices = 0;  // a `?` has a colon of its own
  for (size_t k = i + 1; k < tokens_.size() && !tokens_[k].is_any({";", "}"}); ++k) {
    if (tokens_[k].is_any({"(", "[", "{"})) k = partner[k];
    choices += tokens_[k].is("?");
    if (tokens_[k].is(":") && choices-- == 0) return past_labels(k + 1);
  }
  return i;
}

size_t Outline::past_prefix(size_t i) const {
  while (i + 1 < tokens_.size()) {
    auto &token = tokens_[i], &following = tokens_[i + 1];
    size_t next = past_labels(i);
    bool attribute = token.is("[") && following.is("[");
    if (attribute) next = partner[i] + 1;
    if (token.is_any({"_Pragma", "__attribute__"}) && following.is("(")) next = partner[i + 1] + 1;
    bool macro = token.kind == Token::word && !token.is_any({"do", "else"}) &&
                 following.is_any({"for", "while", "do", "switch", "if"});
    if (macro) next = i + 1;
    if (next == i) break;
    i = next;
  }
  return i;
}

size_t Outline::statement_end(size_t i) const {
  i = past_prefix(i);
  const size_t last = tokens_.size() - 1;
  if (i >= last) return last;
  auto& token = tokens_[i];
  if (token.is("{")) return partner[i];
  if (token.is_any({"for", "while", "switch", "if"})) {
    size_t open = tokens_[i + 1].is("constexpr") ? i + 2 : i + 1;
    if (open > last || !tokens_[open].is("(")) return i;
    size_t end = statement_end(partner[open] + 1);
    bool otherwise = token.is("if") && end < last && tokens_[end + 1].is("else");
    return otherwise ? statement_end(end + 2) : end;
  }
  if (token.is("do")) i = statement_end(i + 1) + 1;  // on to its `while (…);`
  while (i < last && !tokens_[i].is_any({";", "}"})) {
    i = tokens_[i].is_any({"(", "[", "{"}) ? partner[i] + 1 : i + 1;
  }
  return std::min(i, last);
}

// Passes follow statements from bracket to bracket.
void Outline::check_statements(const Place& place) const {
  for (size_t i = 0; i + 4 < tokens_.size(); ++i) {
    auto& token = tokens_[i];
    if (token.is("do")) {
      size_t end = statement_end(i + 1);
      bool whole = end + 2 < tokens_.size() && tokens_[end + 1].is("while");
      if (!whole) place.refuse(token.line, "this `do` has no `while`");
    } else if (token.is_any({"if", "for", "while", "switch"})) {
      size_t open = token.is("if") && tokens_[i + 1].is("constexpr") ? i + 2 : i + 1;
      if (!tokens_[open].is("(")) place.refuse(token.line, "no '(' follows `" + token.text + "`");
    }
  }
}

// Walks the text once, keeping the kind of every open brace.
void Outline::scan() {
  struct Frame {
    Scope kind;
    size_t brace;
  };
  std::vector<Frame> frames{{Scope::file, 0}};
  size_t head = 0;
  for (size_t i = 0; i < tokens_.size(); ++i) {
    auto& token = tokens_[i];
    auto [scope, enclosing] = frames.back();
    bool declares = scope == Scope::file || scope == Scope::type;
    if (token.is("{")) {
      if (declares && initialises_member(head, i)) {
        i = partner[i];
        continue;
      }
      frames.push_back({open_brace(head, i, scope, enclosing), i});
      if (frames.back().kind == Scope::type) type_braces_.insert(i);
      head = i + 1;
    } else if (token.is("}")) {
      frames.pop_back();
      head = i + 1;
    } else if (token.is(";")) {
      Function function;
      if (declares && function_head(head, i, &function)) {
        function.scope = enclosing;
        functions.push_back(function);
      }
      head = i + 1;
    } else if (token.is_any({"public", "private", "protected"})) {
      head = i + 2;
    } else if (scope == Scope::type && token.kind == Token::word && names_field(head, i)) {
      fields.insert(token.text);
    } else if (token.is("[")) {
      find_lambda(i);
    }
  }
}

// Whether the declaration in a type that begins at head may name a field at i: outside of brackets
// and values, or as in `float (*f)(float)`.
bool Outline::names_field(size_t head, size_t i) const {
  auto &previous = tokens_[i - 1], &next = tokens_[i + 1];
  if (previous.is_any({".", "->"})) return false;
  if (next.is(")")) return previous.is_any({"*", "&"}) && tokens_[i - 2].is("(");
  if (!next.is_any({";", ",", "=", "[", "{", ":", "__attribute__"})) return false;
  bool value = false;
  size_t k = head;
  for (; k < i; ++k) {
    if (tokens_[k].is_any({"=", ","})) value = tokens_[k].is("=");
    if (tokens_[k].is_any({"(", "[", "{"}) || opens_list(k)) k = partner[k];
  }
  return k == i && !value;
}

// Whether the brace belongs to a constructor's initialiser list: `S(float a) : x{a} { … }`.
bool Outline::initialises_member(size_t head, size_t brace) const {
  Function function;
  if (brace < head + 2 || !function_head(head, brace, &function)) return false;
  return tokens_[brace - 1].kind == Token::word && tokens_[brace - 2].is_any({":", ","});
}

Outline::Scope Outline::open_brace(size_t head, size_t brace, Scope outer, size_t scope) {
  if (outer == Scope::function) {
    // Local structs are the only declarations with scopes of their own inside a function.
    for (size_t i = head; i < brace; ++i) {
      if (tokens_[i].is_any({"(", "=", "enum"})) break;
      if (tokens_[i].is_any({"struct", "class", "union"})) return Scope::type;
    }
    return Scope::function;
  }
  Function function;
  if (function_head(head, brace, &function)) {
    function.body = brace;
    function.end = partner[brace];
    function.scope = scope;
    functions.push_back(function);
    return Scope::function;
  }
  for (size_t i = head; i < brace; ++i) {
    size_t closes = angle_end(i);
    if (closes != none) i = closes;
    if (tokens_[i].is_any({"(", "["})) i = partner[i];
    if (tokens_[i].is_any({"=", "enum"})) return Scope::other;
    if (tokens_[i].is_any({"namespace", "extern"})) return Scope::file;
    if (tokens_[i].is_any({"struct", "class", "union"})) return Scope::type;
  }
  return Scope::other;
}

// Whether tokens head ... end-1 declare a function; fills in its name and its brackets.
bool Outline::function_head(size_t head, size_t end, Function* function) const {
  size_t angle = none;  // of the last template list
  for (size_t i = head; i < end; ++i) {
    auto& token = tokens_[i];
    size_t open = none;
    if (token.is("operator")) {
      open = i + 1 + (tokens_[i + 1].is("(") ? 2 : 0);
      while (open < end && !tokens_[open].is("(")) ++open;
      if (open >= end) return false;
      function->name = "operator";
    } else if (token.is_any({"=", "using", "typedef", "enum", "namespace", "static_assert"})) {
      return false;
    } else if (angle_end(i) != none) {
      angle = i;
      i = angle_end(i);
    } else if (token.is("[")) {
      i = partner[i];
    } else if (token.is("(")) {
      if (i == head) return false;
      auto& previous = tokens_[i - 1];
      if (not_a_function(previous)) {
        i = partner[i];
        continue;
      }
      open = i;
      function->name = previous.is(">") && angle != none ? tokens_[angle - 1].text : previous.text;
    }
    if (open == none) continue;
    function->head = head;
    function->open = open;
    function->close = partner[open];
    return true;
  }
  return false;
}

// A lambda is known by the name it is assigned to; one that is passed on directly has none.
void Outline::find_lambda(size_t bracket) {
  auto& next = tokens_[partner[bracket] + 1];
  bool subscript = bracket > 0 && !tokens_[bracket - 1].is("return") &&
                   (tokens_[bracket - 1].kind != Token::mark ||
                    tokens_[bracket - 1].is_any({")", "]"}));
  if (subscript || tokens_[bracket + 1].is("[") || !next.is_any({"(", "{"})) return;
  Function function;
  function.lambda = true;
  function.head = bracket;
  function.open = function.close = partner[bracket];
  size_t i = partner[bracket] + 1;
  if (next.is("(")) {
    function.open = i;
    function.close = partner[i];
    i = partner[i] + 1;
  }
  while (i < tokens_.size() && !tokens_[i].is_any({"{", ";", ")"})) ++i;
  if (i >= tokens_.size() || !tokens_[i].is("{")) return;
  function.body = i;
  function.end = partner[i];
  if (bracket >= 2 && tokens_[bracket - 1].is("=")) function.name = tokens_[bracket - 2].text;
  functions.push_back(function);
}

}  // namespace zmlx
