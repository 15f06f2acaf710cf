// Where threads meet. Every call of a collective gets a line of its own, so that __builtin_LINE()
// as a default argument numbers it; helpers that hold one get the number of the line that calls
// them, and loops that hold one count their turns. Number, call path and turns together are a
// thread's position, which tells the runtime which lanes are at the same point of the program.
#include <set>

#include "reach.h"

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

const char* const site = "zk_site(__builtin_LINE())";

// Whether the function at hand says what its default arguments are: its first declaration does.
bool gives_defaults(const Unit& unit, const Function& function, std::set<std::string>* declared) {
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

// Whether the text has pointers to functions: `(*f)(`, `(*)(`.
bool points_to_functions(const Tokens& tokens) {
  for (size_t i = 0; i + 4 < tokens.size(); ++i) {
    if (!tokens[i].is("(") || !tokens[i + 1].is("*")) continue;
    size_t close = tokens[i + 2].kind == Token::word ? i + 3 : i + 2;
    if (tokens[close].is(")") && tokens[close + 1].is("(")) return true;
  }
  return false;
}

// Whether the function is a constructor, in its class or outside.
bool constructs(const Unit& unit, const Function& function) {
  if (is_constructor(unit, function)) return true;
  bool outside = !function.lambda && function.open > 2 && unit.tokens[function.open - 2].is("::");
  if (!outside) return false;
  size_t owner = function.open - 3, list = unit.outline.partner[owner];
  if (list != Outline::none && unit.tokens[owner].is(">")) owner = list - 1;
  return unit.tokens[owner].text == function.name;
}

// Adds the parameter that tells a helper which line called it.
void pass_site(Unit& unit, const Reach& reach) {
  auto& tokens = unit.tokens;
  std::set<std::string> declared;
  bool pointers = points_to_functions(tokens);
  for (auto& function : unit.outline.functions) {
    bool object = (function.lambda || is_call_operator(unit, function)) && reach.names(objects) &&
                  (!function.body || reach.called_within(function.body, function.end));
    bool helper = object || (!function.name.empty() && reach.names(function.name));
    bool kernel = function.name == unit.signature.name;
    bool given = tokens[function.close + 1].is("=");  // by default, or deleted
    bool bare = function.open == function.close;  // [&] { … }
    // One that holds nothing may become a pointer, if nothing is added to it.
    bool pointer = bare && tokens[function.close - 1].is("[") &&
                   (pointers || tokens[function.head - 1].is("+"));
    if (!helper || kernel || given || pointer || is_destructor(unit, function) ||
        (function.lambda && is_variadic(unit, function))) {
      continue;
    }
    bool none = function.close == function.open + 2 && tokens[function.open + 1].is("void");
    if (none) tokens[function.open + 1].dropped = true;  // f(void)
    bool empty = none || function.close == function.open + 1;
    bool constructor = constructs(unit, function);
    const std::string parameter = constructor ? "zk_entry zk_called" : "zk_site zk_called";
    const std::string by_default = parameter + " = " + site;
    if (function.body) {
      tokens[function.body].after += constructor ? " zk_leaving zk_within{zk_called};"
                                                 : " zk_scope zk_within(zk_called);";
    }
    if (reach.variadic(function.name)) {
      tokens[function.open].after += parameter + (empty ? "" : ", ");
      continue;
    }
    if (bare) {
      tokens[function.close].after += "(" + by_default + ")";
      continue;
    }
    bool first = gives_defaults(unit, function, &declared);
    tokens[function.close].before += (empty ? "" : ", ") + (first ? by_default : parameter);
  }
}

// f  ->  a pointer to a function of f's own type, or an object that calls one of several.
void hand_on(Unit& unit, const Reach& reach, const Handed& handed) {
  auto& tokens = unit.tokens;
  auto &first = tokens[handed.begin], &last = tokens[handed.end];
  if (handed.type) {
    tokens[handed.begin - (handed.address ? 3 : 2)].before += "zk_without_site<";
    tokens[handed.end + 1].after += ">";
    return;
  }
  if (handed.address) tokens[handed.begin - 1].dropped = true;
  if (handed.single) {
    first.text = (handed.global ? "zk_hand<&::" : "zk_hand<&") + first.text;
    last.after += ">";
    return;
  }
  bool variadic = reach.variadic(tokens[handed.name].text);
  std::string name;
  for (size_t i = handed.begin; i <= handed.end; ++i) {
    if (!tokens[i].dropped) name += tokens[i].before + tokens[i].text + tokens[i].after + " ";
  }
  const std::string arguments = std::string("(") + (variadic ? std::string(site) + ", " : "") +
                                "static_cast<decltype(zk_a)>(zk_a)...)";
  first.site = true;
  last.after += arguments + "; })";
  first.text = "zk_hand_on([](auto&&... zk_a) -> decltype(" + name + arguments + ") { return " +
               first.text;
}

// Calls of helpers of any number of arguments and through variables, and functions that are handed
// on.
void rewrite_calls(Unit& unit, const Reach& reach) {
  auto& tokens = unit.tokens;
  std::set<size_t> declarations;
  for (auto& function : unit.outline.functions) declarations.insert(function.open);
  Handed handed;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (reach.called(i)) tokens[i].site = true;
    size_t open = unit.outline.call_at(i);
    if (open != Outline::none && reach.variadic(tokens[i].text) && !declarations.count(open)) {
      tokens[open].after += std::string(site) + (tokens[open + 1].is(")") ? "" : ", ");
    }
    if (reach.handed(i, &handed)) hand_on(unit, reach, handed);
  }
  if (!reach.hands_any()) return;  // lambdas and objects know who calls them
  for (auto [begin, open] : reach.through_values()) {
    if (reach.is_told(begin)) continue;
    tokens[begin].text = std::string("zk_call(") + site + ", " + tokens[begin].text;
    tokens[open].text = ")(";
  }
}

// The `=` of a condition begin … end that declares a variable, `while (int a = b)`, or none.
size_t declared_in(const Unit& unit, size_t begin, size_t end) {
  auto& tokens = unit.tokens;
  for (size_t i = begin + 1; i < end; ++i) {
    auto& type = tokens[i - 2];
    bool typed = type.kind == Token::word || type.is_any({">", "*", "&"});
    if (tokens[i].is("=") && i > begin + 2) {
      bool declares = typed && tokens[begin + 1].kind == Token::word &&
                      tokens[i - 1].kind == Token::word;
      return declares ? i : Outline::none;
    }
    if (tokens[i].is_any({"(", "[", "{"})) i = unit.outline.partner[i];
  }
  return Outline::none;
}

// for (a; b; c) d  ->  for (zk_loop …; once;) for (a; turn() && (b); c) d
// An outer `for` keeps the loop one statement, so that no `else` changes its partner. Where threads
// meet in c, which stands before d and comes after it, it counts as a turn, too.
void count_turns(Unit& unit, size_t loop, const Reach& reach) {
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
      tokens[close].after += " { zk_turns.turn();";
      tokens[outline.statement_end(close + 1)].after += " }";
      return;
    }
  }
  bool endless = begin + 1 == end;
  size_t equals = declared_in(unit, begin, end);
  if (equals != Outline::none) {
    tokens[equals].after += " (zk_turns.turn(),";
  } else {
    tokens[begin].after += endless ? " zk_turns.turn()" : " zk_turns.turn() && (";
  }
  if (!endless) tokens[end].before = ")" + tokens[end].before;
  if (end != close && reach.called_within(end, close)) tokens[end].after += " zk_turns.turn(),";
}

}  // namespace

bool names_matrix(const Token& token) {
  return token.text.compare(0, 10, "simdgroup_") == 0 &&
         (token.is("simdgroup_matrix") || token.text.find("8x8") != std::string::npos);
}

bool has_collectives(const Unit& unit) {
  for (size_t i = 0; i < unit.tokens.size(); ++i) {
    auto& text = unit.tokens[i].text;
    bool call = unit.tokens[i].kind == Token::word && collectives().count(text) &&
                unit.outline.call_at(i) != Outline::none;
    if (names_matrix(unit.tokens[i]) || call) return true;
  }
  return false;
}

void mark_collectives(Unit& unit, const Library& library) {
  Reach reach(unit, library);
  std::set<size_t> tails;  // the `while` of each `do`
  for (size_t i = 0; i < unit.tokens.size(); ++i) {
    auto& token = unit.tokens[i];
    bool loop = token.is("for") || token.is("do") || (token.is("while") && !tails.count(i));
    if (!loop) continue;
    if (token.is("do")) tails.insert(unit.outline.statement_end(i + 1) + 1);
    if (reach.called_within(i, unit.outline.statement_end(i))) count_turns(unit, i, reach);
  }
  rejoin(unit, reach);
  pass_site(unit, reach);
  rewrite_calls(unit, reach);
}

}  // namespace zmlx
