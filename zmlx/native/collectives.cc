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

// Stands for all lambdas and objects with an operator(): they are called by the names of variables.
const char* const objects = "()";

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

// Where threads meet or may come to, by name; found by scanning the text, so that a name stands for
// all that have it.
class Reach {
 public:
  explicit Reach(Unit& unit) : unit_(unit), names_(collectives()) {
    find_variables();
    for (auto& function : unit.outline.functions) {
      if (function.lambda) continue;
      own_.insert(function.name);
      if (is_variadic(unit, function)) variadic_.insert(function.name);
    }
    bool grew = true;
    while (grew) {
      grew = false;
      for (auto& function : unit.outline.functions) grew |= take(function);
      grew |= take_values();
    }
  }

  bool names(const std::string& name) const { return names_.count(name) > 0; }
  // Their argument that tells who calls comes first, since no other may follow theirs.
  bool variadic(const std::string& name) const { return names(name) && variadic_.count(name); }

  // Whether a call begins at token i, or a variable whose constructor is one.
  bool called(size_t i) const {
    auto& token = unit_.tokens[i];
    if (token.kind != Token::word) return false;
    if (unit_.outline.call_at(i) != Outline::none) {
      if (names(token.text)) return true;
      bool variable = variables_.count(token.text) && !own_.count(token.text);
      if (variable && names(objects)) return true;
    }
    bool declares = unit_.tokens[i + 1].is_any({";", "(", "{", "=", ",", "["});
    size_t type = i - 1;
    if (i > 0 && unit_.tokens[type].is(">") && unit_.outline.partner[type] != Outline::none) {
      type = unit_.outline.partner[type] - 1;
    }
    return i > 0 && declares && names(unit_.tokens[type].text) &&
           unit_.tokens[type].kind == Token::word;
  }

  bool called_within(size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      if (called(i)) return true;
    }
    return false;
  }

  // Whether the name of a function stands at token i as a value, which something else may call.
  bool is_value(size_t i) const {
    auto& tokens = unit_.tokens;
    bool known = tokens[i].kind == Token::word && free_.count(tokens[i].text) &&
                 !hidden_.count(tokens[i].text);
    return known && i > 0 && tokens[i - 1].is_any({"(", ",", "=", "{", "return", "?", ":", "&"}) &&
           tokens[i + 1].is_any({")", ",", ";", "}", ":"});
  }

 private:
  // Names that are declared like variables. A type before a bracket is no call of one.
  void find_variables() {
    auto& tokens = unit_.tokens;
    for (size_t i = 1; i + 1 < tokens.size(); ++i) {
      auto& previous = tokens[i - 1];
      bool after = (previous.kind == Token::word &&
                    !previous.is_any({"return", "else", "case", "using", "typename"})) ||
                   previous.is_any({">", "&", "*"});
      if (tokens[i].kind == Token::word && after &&
          tokens[i + 1].is_any({";", "=", ",", ")", "[", "{", "(", ":"})) {
        variables_.insert(tokens[i].text);
        if (!tokens[i + 1].is("(")) hidden_.insert(tokens[i].text);
      }
    }
  }

  bool take(const Function& function) {
    if (!function.body || function.name == unit_.signature.name) return false;
    if (!called_within(function.body, function.end)) return false;
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

  bool take_values() {
    if (names(objects)) return false;
    for (size_t i = 0; i < unit_.tokens.size(); ++i) {
      if (is_value(i)) return names_.insert(objects).second;
    }
    return false;
  }

  Unit& unit_;
  Names names_, own_, free_, variables_, variadic_;
  Names hidden_;  // by a variable: a function of that name is not meant
};

const char* const site = "zk_site(__builtin_LINE())";

// Whether the function at hand says what its default arguments are: its first declaration does.
bool gives_defaults(const Unit& unit, const Function& function, Names* declared) {
  if (function.lambda) return true;
  auto& tokens = unit.tokens;
  bool instance = tokens[function.head].is("template") &&
                  !(tokens[function.head + 1].is("<") && !tokens[function.head + 2].is(">"));
  size_t name = function.open - 1;
  if (tokens[name].is(">") && unit.outline.partner[name] != Outline::none) {
    name = unit.outline.partner[name] - 1;
  }
  bool elsewhere = name > 0 && tokens[name - 1].is("::");
  return !instance && !elsewhere && declared->insert(parameter_types(unit, function)).second;
}

// Adds the parameter that tells a helper which line called it.
void pass_site(Unit& unit, const Reach& reach) {
  auto& tokens = unit.tokens;
  Names declared;
  for (auto& function : unit.outline.functions) {
    bool object = (function.lambda || is_call_operator(unit, function)) && reach.names(objects) &&
                  (!function.body || reach.called_within(function.body, function.end));
    bool helper = object || (!function.name.empty() && reach.names(function.name));
    bool kernel = function.name == unit.signature.name;
    bool given = tokens[function.close + 1].is("=");  // by default, or deleted
    if (!helper || kernel || given || function.open == function.close ||
        is_destructor(unit, function) || (function.lambda && is_variadic(unit, function))) {
      continue;
    }
    bool empty = function.close == function.open + 1;
    if (function.body) tokens[function.body].after += " zk_scope zk_within(zk_called);";
    if (reach.variadic(function.name)) {
      tokens[function.open].after += std::string("zk_site zk_called") + (empty ? "" : ", ");
      continue;
    }
    bool first = gives_defaults(unit, function, &declared);
    tokens[function.close].before += std::string(empty ? "" : ", ") + "zk_site zk_called" +
                                     (first ? std::string(" = ") + site : "");
  }
}

// Calls of helpers of any number of arguments, and functions that are handed on.
void rewrite_calls(Unit& unit, const Reach& reach) {
  auto& tokens = unit.tokens;
  std::set<size_t> declarations;
  for (auto& function : unit.outline.functions) declarations.insert(function.open);
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (reach.called(i)) tokens[i].site = true;
    size_t open = unit.outline.call_at(i);
    if (open != Outline::none && reach.variadic(tokens[i].text) && !declarations.count(open)) {
      tokens[open].after += std::string(site) + (tokens[open + 1].is(")") ? "" : ", ");
    }
    if (reach.is_value(i)) {
      tokens[i].site = true;
      std::string argument = reach.variadic(tokens[i].text) ? std::string(site) + ", " : "";
      tokens[i].text = "[](auto... zk_a) { return " + tokens[i].text + "(" + argument + "zk_a...); }";
      bool address = tokens[i - 1].is("&") && tokens[i - 2].kind == Token::mark;
      if (address) tokens[i - 1].dropped = true;
    }
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
    bool call = unit.tokens[i].kind == Token::word && collectives().count(text) &&
                unit.outline.call_at(i) != Outline::none;
    if (matrix || call) return true;
  }
  return false;
}

void mark_collectives(Unit& unit) {
  Reach reach(unit);
  std::set<size_t> tails;  // the `while` of each `do`
  for (size_t i = 0; i < unit.tokens.size(); ++i) {
    auto& token = unit.tokens[i];
    bool loop = token.is("for") || token.is("do") || (token.is("while") && !tails.count(i));
    if (!loop) continue;
    if (token.is("do")) tails.insert(unit.outline.statement_end(i + 1) + 1);
    if (reach.called_within(i, unit.outline.statement_end(i))) count_turns(unit, i);
  }
  pass_site(unit, reach);
  rewrite_calls(unit, reach);
}

}  // namespace zmlx
