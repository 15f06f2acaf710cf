// Where threads meet. Every call of a collective gets a line of its own, so that __builtin_LINE()
// as a default argument numbers it; helpers that hold one get the number of the line that calls
// them, and loops that hold one count their turns. Number, call path and turns together are a
// thread's position, which tells the runtime which lanes are at the same point of the program.
#include <set>

#include "passes.h"

namespace zmlx {

const std::set<std::string>& collectives() {
  static const std::set<std::string> names = [] {
    std::set<std::string> all = {
        "threadgroup_barrier",  "simdgroup_barrier",  "simdgroup_multiply",
        "simdgroup_multiply_accumulate",  "simdgroup_load",  "simdgroup_store"};
    for (std::string prefix : {"simd_", "quad_"}) {
      for (const char* name :
           {"sum", "product", "min", "max", "and", "or", "xor", "broadcast", "broadcast_first",
            "shuffle", "shuffle_xor", "shuffle_up", "shuffle_down", "shuffle_rotate_up",
            "shuffle_rotate_down", "shuffle_and_fill_up", "shuffle_and_fill_down", "ballot", "all",
            "any", "is_first", "active_threads_mask", "prefix_inclusive_sum",
            "prefix_exclusive_sum", "prefix_inclusive_product", "prefix_exclusive_product"}) {
        all.insert(prefix + name);
      }
    }
    return all;
  }();
  return names;
}

namespace {

using Names = std::set<std::string>;

bool calls_one_of(const Unit& unit, size_t i, const Names& names) {
  return unit.tokens[i].kind == Token::word && names.count(unit.tokens[i].text) &&
         unit.outline.call_at(i) != Outline::none;
}

bool holds_call(const Unit& unit, size_t begin, size_t end, const Names& names) {
  for (size_t i = begin; i < end; ++i) {
    if (calls_one_of(unit, i, names)) return true;
  }
  return false;
}

// Collectives and every function that reaches one, by name.
Names reach(const Unit& unit) {
  Names names = collectives();
  for (bool grew = true; grew;) {
    grew = false;
    for (auto& function : unit.outline.functions) {
      bool callable = function.body && !function.name.empty() && function.name != "operator" &&
                      function.name != unit.signature.name;
      if (!callable || names.count(function.name)) continue;
      if (!holds_call(unit, function.body, function.end, names)) continue;
      grew |= names.insert(function.name).second;
    }
  }
  return names;
}

bool variadic(const Unit& unit, const Function& function) {
  for (size_t i = function.open; i < function.close; ++i) {
    if (unit.tokens[i].is("...")) return true;
  }
  return false;
}

// Adds the parameter that tells a helper which line called it. The default argument stands on the
// first declaration only.
void pass_site(Unit& unit, const Names& names) {
  Names declared;
  for (auto& function : unit.outline.functions) {
    bool helper = names.count(function.name) && function.open != function.close;
    if (!helper || variadic(unit, function)) continue;
    if (function.body && !holds_call(unit, function.body, function.end, names)) continue;
    bool first = function.lambda || declared.insert(parameter_types(unit, function)).second;
    unit.tokens[function.close].before +=
        std::string(function.close > function.open + 1 ? ", " : "") + "zk_site zk_called" +
        (first ? " = zk_site(__builtin_LINE())" : "");
    if (function.body) unit.tokens[function.body].after += " zk_scope zk_within(zk_called);";
  }
}

// for (a; b; c) d  ->  for (zk_loop …; once;) for (a; turn() && (b); c) d
// An outer `for` keeps the loop one statement, so that no `else` changes its partner.
void count_turns(Unit& unit, size_t loop) {
  auto& tokens = unit.tokens;
  auto& outline = unit.outline;
  bool whole = tokens[loop].is("do") || tokens[loop + 1].is("(");
  if (!whole) return;  // the compiler will say what is missing
  tokens[loop].site = true;
  tokens[loop].before = "for (zk_loop zk_turns; zk_turns.once();) " + tokens[loop].before;
  if (tokens[loop].is("do")) {
    size_t last = outline.statement_end(loop + 1);
    tokens[loop].after += " { zk_turns.turn();";
    tokens[last].after += " }";
    return;
  }
  size_t open = loop + 1, close = outline.partner[open];
  size_t begin = open, end = close;
  if (tokens[loop].is("for")) {
    begin = end = 0;
    for (size_t i = open + 1; i < close; ++i) {
      if (tokens[i].is("(") || tokens[i].is("{") || tokens[i].is("[")) i = outline.partner[i];
      if (tokens[i].is(";")) (begin ? end : begin) = i;
    }
    if (!end) {  // over a range
      tokens[close].after += " if (zk_turns.turn(); true)";
      return;
    }
  }
  bool endless = begin + 1 == end;
  tokens[begin].after += endless ? " zk_turns.turn()" : " zk_turns.turn() && (";
  if (!endless) tokens[end].before = ")" + tokens[end].before;
}

}  // namespace

bool has_collectives(const Unit& unit) {
  for (size_t i = 0; i < unit.tokens.size(); ++i) {
    auto& text = unit.tokens[i].text;
    bool matrix = text.compare(0, 10, "simdgroup_") == 0 &&
                  (text == "simdgroup_matrix" || text.find("8x8") != std::string::npos);
    if (matrix || calls_one_of(unit, i, collectives())) return true;
  }
  return false;
}

void mark_collectives(Unit& unit) {
  Names names = reach(unit);
  for (size_t i = 0; i < unit.tokens.size(); ++i) {
    if (calls_one_of(unit, i, names)) unit.tokens[i].site = true;
  }
  pass_site(unit, names);
  std::set<size_t> tails;  // the `while` of each `do`
  for (size_t i = 0; i < unit.tokens.size(); ++i) {
    auto& token = unit.tokens[i];
    bool loop = token.is("for") || token.is("do") || (token.is("while") && !tails.count(i));
    if (!loop) continue;
    if (token.is("do")) tails.insert(unit.outline.statement_end(i + 1) + 1);
    if (holds_call(unit, i, unit.outline.statement_end(i), names)) count_turns(unit, i);
  }
}

}  // namespace zmlx
