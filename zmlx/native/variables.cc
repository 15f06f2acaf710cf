// Which names of a text stand for variables, parameters, bindings and enumerators, and how far.
#include "reach.h"

namespace zmlx {
namespace {

// Words behind which a type's name stands.
bool names_type(const Token& token) {
  return token.is_any({"struct", "class", "union", "enum", "typename", "using", "namespace"});
}

bool qualifies(const Token& token) {
  return token.is_any({"const", "volatile", "device", "constant", "thread", "threadgroup"});
}

// Whether a type stands before the qualifiers that end at token i: `float const x`.
bool declared_behind(const Tokens& tokens, size_t i) {
  while (i > 0 && qualifies(tokens[i])) --i;
  return tokens[i].is_any({">", "*", "&"}) ||
         (tokens[i].kind == Token::word && !starts_expression(tokens[i]));
}

// Whether the `&` before the name at token i begins an expression; in `T (&a)[4]` it does not.
bool takes_address(const Tokens& tokens, size_t i) {
  if (i < 2 || tokens[i - 2].kind != Token::mark || tokens[i - 2].is_any({">", "*"})) return false;
  return !(tokens[i - 2].is("(") && tokens[i + 1].is(")") && tokens[i + 2].is_any({"[", "("}));
}

}  // namespace

// Where what is declared at each token ends, if it is a parameter: of a function, or of a template.
std::map<size_t, size_t> Reach::parameters() const {
  auto& tokens = unit_.tokens;
  std::map<size_t, size_t> ends;
  std::map<size_t, size_t> bodies;  // by the function's first token
  for (auto& function : unit_.outline.functions) {
    size_t end = function.body ? function.end : function.close;
    bodies[function.head] = end;
    if (tokens[function.open + 1].is("*")) continue;  // a pointer, which the outline takes for one
    for (size_t i = function.open + 1; i < function.close; ++i) ends[i] = end;
  }
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    size_t close = tokens[i].is("template") ? unit_.outline.angle_end(i + 1) : Outline::none;
    if (close == Outline::none) continue;
    auto function = bodies.find(i);
    size_t end = function == bodies.end() ? unit_.outline.statement_end(i) : function->second;
    for (size_t k = i + 2; k < close; ++k) ends.try_emplace(k, end);
  }
  return ends;
}

// Whether the name at token i is declared there like a variable's.
bool Reach::declares(size_t i) const {
  auto& tokens = unit_.tokens;
  auto& partner = unit_.outline.partner;
  auto &previous = tokens[i - 1], &next = tokens[i + 1];
  bool word = previous.kind == Token::word && !starts_expression(previous);
  // `void (f)(int)` is a parameter that is a function.
  bool function = previous.is("(") && next.is(")") && tokens[i + 2].is("(") && i > 1 &&
                  tokens[i - 2].kind == Token::word && !starts_expression(tokens[i - 2]);
  if (function) return true;
  // A product or a comparison with what a function returns is not a declaration.
  bool made = next.is("(");
  bool of_another = previous.is(")") && partner[i - 1] > 0 &&
                    tokens[partner[i - 1] - 1].is("decltype");
  bool typed = of_another || (word && !previous.is_any({"using", "typename"})) ||
               (previous.is(">") && (!made || partner[i - 1] != Outline::none)) ||
               (previous.is("*") && !made) ||
               (previous.is("&") && !made && !takes_address(tokens, i));
  bool last = next.is(">") && partner[i + 1] != Outline::none &&
              tokens[partner[i + 1] - 1].is("template");
  return typed && (last || next.is_any({";", "=", ",", ")", "[", "{", "(", ":"}));
}

void Reach::find_types() {
  auto& tokens = unit_.tokens;
  for (size_t i = 1; i + 1 < tokens.size(); ++i) {
    if (tokens[i].kind != Token::word || !names_type(tokens[i - 1])) continue;
    auto &previous = tokens[i - 1], &next = tokens[i + 1];
    bool opened = i > 1 && tokens[i - 2].is("using");
    if (previous.is("namespace") && !opened) namespaces_.insert(tokens[i].text);
    if (!previous.is("namespace") && !next.is("::")) named_.insert(tokens[i].text);
    if (next.is("{")) closed_.insert(tokens[i].text);
    bool values = previous.is("enum") || (i > 1 && tokens[i - 2].is("enum"));
    if (next.is(":") && !values) derived_.insert(tokens[i].text);
  }
}

// A type before a bracket is no call of a variable.
void Reach::find_variables() {
  auto& tokens = unit_.tokens;
  auto& outline = unit_.outline;
  auto ends = parameters();
  std::set<size_t> functions;
  for (auto& function : outline.functions) functions.insert(function.open);
  for (size_t i = 0; i + 2 < tokens.size(); ++i) {
    if (tokens[i].is("enum")) find_enumerators(i);
    if (tokens[i].is("[")) find_bindings(i);
  }
  Names types;
  for (size_t i = 1; i + 1 < tokens.size(); ++i) {
    if (tokens[i].kind != Token::word) continue;
    auto &previous = tokens[i - 1], &next = tokens[i + 1];
    if (next.kind == Token::word || names_type(previous)) types.insert(tokens[i].text);
    if (!declares(i) || functions.count(i + 1) || names_type(previous)) continue;
    auto end = ends.find(i);
    bool parameter = end != ends.end();
    Variable variable;
    size_t type = named_before(i - 1);
    if (type != Outline::none) variable.type = tokens[type].text;
    variable.end = parameter ? end->second : variable_end(i);
    variable.member = !parameter && outline.in_type(i);
    variable.global = variable.member ? has_word(outline.statement_begin(i), i, "static")
                                      : !parameter && !outline.function_at(i);
    // Methods may stand before the members that they name.
    bool whole = variable.member && variable.end != Outline::none;
    variable.begin = whole ? outline.partner[variable.end] : i;
    bool unnamed = qualifies(previous) && !declared_behind(tokens, i - 1);
    variable.value = (parameter || !next.is("(")) && !unnamed && !is_number_type(tokens[i]);
    variables_[tokens[i].text].push_back(variable);
  }
  for (auto& type : types) {
    for (auto& variable : variables_[type]) variable.value = false;
  }
  for (size_t i = 1; i + 1 < tokens.size(); ++i) {
    if (tokens[i - 1].is_any({"struct", "class"}) && tokens[i + 1].is(":")) inherit(i + 1);
  }
}

// Where the variable's name at token i ends: with its scope, or with the statement whose head
// declares it.
size_t Reach::variable_end(size_t i) const {
  auto& tokens = unit_.tokens;
  auto& outline = unit_.outline;
  for (size_t k = i; k-- > 1;) {
    if (tokens[k].is("{")) break;
    if (tokens[k].is_any({")", "]", "}"})) k = outline.partner[k];
    bool head = k > 0 && tokens[k].is("(") &&
                tokens[k - 1].is_any({"for", "if", "while", "switch"});
    if (head && outline.partner[k] > i) return outline.statement_end(k - 1);
  }
  return outline.scope_end(i);
}

// auto [a, b] = c, and the captures [a = b] of a lambda.
void Reach::find_bindings(size_t open) {
  auto& tokens = unit_.tokens;
  size_t close = unit_.outline.partner[open];
  bool bound = open > 1 && (tokens[open - 1].is("auto") ||
                            (tokens[open - 1].is_any({"&", "&&"}) && tokens[open - 2].is("auto")));
  Variable variable;
  variable.value = true;
  variable.begin = close;
  variable.end = Outline::none;
  if (bound) variable.end = variable_end(open);
  for (auto& function : unit_.outline.functions) {
    if (!bound && function.lambda && function.head == open) variable.end = function.end;
  }
  if (!bound && variable.end == Outline::none) return;
  for (size_t i = open + 1; i < close; ++i) {
    bool named = tokens[i].kind == Token::word && (bound || tokens[i + 1].is("="));
    if (named) variables_[tokens[i].text].push_back(variable);
    if (tokens[i].is_any({"(", "{", "["})) i = unit_.outline.partner[i];
  }
}

// The members of the types behind the `:` of another are its own; those of a template are not seen
// without `this`.
void Reach::inherit(size_t colon) {
  auto& tokens = unit_.tokens;
  size_t brace = colon;
  Names bases;
  for (; brace + 1 < tokens.size() && !tokens[brace].is_any({"{", ";"}); ++brace) {
    if (unit_.outline.angle_end(brace + 1) != Outline::none) {
      brace = unit_.outline.angle_end(brace + 1);
    } else if (tokens[brace].kind == Token::word) {
      bases.insert(tokens[brace].text);
    }
  }
  if (!tokens[brace].is("{")) return;
  for (auto& [name, variables] : variables_) {
    for (size_t i = variables.size(); i-- > 0;) {
      Variable variable = variables[i];
      if (!variable.member || !bases.count(scope_name(variable.begin))) continue;
      variable.begin = brace;
      variable.end = unit_.outline.partner[brace];
      variables.push_back(variable);
    }
  }
}

// Enumerators are variables as far as names go.
void Reach::find_enumerators(size_t i) {
  auto& tokens = unit_.tokens;
  auto& outline = unit_.outline;
  bool scoped = tokens[i + 1].is_any({"class", "struct"});
  size_t brace = i + 1;
  while (tokens[brace].kind == Token::word || tokens[brace].is_any({":", "::"})) ++brace;
  if (!tokens[brace].is("{")) return;
  if (tokens[i + 1 + scoped].kind == Token::word) closed_.insert(tokens[i + 1 + scoped].text);
  Variable variable;
  variable.begin = scoped ? brace : i;
  variable.end = scoped ? outline.partner[brace] : outline.scope_end(i);
  variable.member = !scoped && outline.in_type(i);
  variable.global = variable.member || (!scoped && !outline.function_at(i));
  if (variable.member) variable.begin = outline.partner[variable.end];
  for (size_t k = brace + 1; k < outline.partner[brace]; ++k) {
    bool first = tokens[k - 1].is(",") || k == brace + 1;
    if (first && tokens[k].kind == Token::word) variables_[tokens[k].text].push_back(variable);
    if (tokens[k].is_any({"(", "{", "["})) k = outline.partner[k];
  }
}

// What the name at token i stands for, if that is a variable.
const Reach::Variable* Reach::variable_at(size_t i) const {
  auto found = variables_.find(unit_.tokens[i].text);
  if (found == variables_.end()) return nullptr;
  auto& tokens = unit_.tokens;
  bool of_object = i > 0 && tokens[i - 1].is_any({".", "->"});
  bool qualified = i > 1 && tokens[i - 1].is("::");
  size_t owner = qualified ? named_before(i - 2) : Outline::none;
  bool of_type = owner != Outline::none && named_.count(tokens[owner].text);
  bool of_text = owner == Outline::none || namespaces_.count(tokens[owner].text);
  const Variable* innermost = nullptr;
  for (auto& variable : found->second) {
    bool within = variable.begin <= i && i <= variable.end;
    bool seen = of_object   ? variable.member && !own_.count(found->first)
                : of_type   ? variable.member && (variable.global || within)
                : qualified ? of_text && !variable.member && variable.global
                            : within;
    if (seen && (!innermost || variable.begin >= innermost->begin)) innermost = &variable;
  }
  return innermost;
}

}  // namespace zmlx
