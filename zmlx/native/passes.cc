#include "passes.h"

#include <locale.h>

#include <algorithm>
#include <cctype>
#include <cfenv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <utility>

namespace zmlx {
namespace {

struct Unsupported {
  const char* word;
  char use;  // 'k' a keyword of Metal or C++, 't' a type, '(' a function
  const char* why;
};

const char* const image = "images cannot be bound by mx.fast.metal_kernel; read from an array";
const char* const ray = "ray tracing has no counterpart outside Metal";
const char* const tensor = "Metal 4 tensors are not available; use simdgroup_matrix or plain loops";
const char* const tile = "tile memory belongs to render passes; use threadgroup memory";
const char* const stage = "only compute kernels run here";
const char* const unwind = "Metal has no exceptions; write a sentinel value instead";
const char* const heap = "Metal cannot allocate; declare an array of constant size";
const char* const fixed = "mx.fast.metal_kernel cannot set it; use a template argument";

const Unsupported unsupported[] = {
    {"double", 'k', "Metal has no double; use float"},
    {"goto", 'k', "Metal has no goto; use a loop with break"},
    {"throw", 'k', unwind},
    {"try", 'k', unwind},
    {"catch", 'k', unwind},
    {"virtual", 'k', "Metal has no virtual functions; use a template"},
    {"dynamic_cast", 'k', "Metal has no run-time types; use a template"},
    {"typeid", 'k', "Metal has no run-time types; use a template"},
    {"new", 'k', heap},
    {"delete", 'k', heap},
    {"malloc", '(', heap},
    {"asm", 'k', "inline assembly runs on one target only; use Metal's functions"},
    {"__asm__", 'k', "inline assembly runs on one target only; use Metal's functions"},
    {"__asm", 'k', "inline assembly runs on one target only; use Metal's functions"},
    {"ext_vector_type", '(', "use Metal's own vectors, such as float4"},
    {"vector_size", '(', "use Metal's own vectors, such as float4"},
    {"thread_local", 'k', "Metal has none; use a local variable"},
    {"vertex", 'k', stage},
    {"fragment", 'k', stage},
    {"ray_data", 'k', ray},
    {"object_data", 'k', stage},
    {"threadgroup_imageblock", 'k', tile},
    {"imageblock", 't', tile},
    {"sampler", 't', image},
    {"texture_buffer", 't', image},
    {"intersector", 't', ray},
    {"intersection_query", 't', ray},
    {"intersection_function_table", 't', ray},
    {"visible_function_table", 't', "function tables cannot be bound; call the function"},
    {"acceleration_structure", 't', ray},
    {"instance_acceleration_structure", 't', ray},
    {"primitive_acceleration_structure", 't', ray},
    {"command_buffer", 't', "indirect command buffers cannot be bound"},
    {"tensor", '<', tensor},
    {"cooperative_tensor", 't', tensor},
    {"mpp", ':', tensor},
    {"std", ':', "Metal has no std; its library is in namespace metal"},
    {"raytracing", ':', ray},
};

bool is_texture(const std::string& word) {
  static const std::set<std::string> shapes = {"1d", "1d_array", "2d", "2d_array", "2d_ms",
                                               "2d_ms_array", "3d", "cube", "cube_array"};
  for (const char* kind : {"texture", "depth"}) {
    size_t length = std::strlen(kind);
    if (word.compare(0, length, kind) == 0 && shapes.count(word.substr(length))) return true;
  }
  return false;
}

bool names_space(const Token& token) {
  return token.is_any({"device", "constant", "threadgroup", "thread", "const"});
}

bool used_as(char use, const Tokens& tokens, size_t i) {
  if (i > 0 && tokens[i - 1].is_any({".", "->"})) return false;
  if (i + 1 >= tokens.size()) return use == 'k';
  auto& next = tokens[i + 1];
  switch (use) {
    case 't': return next.kind == Token::word || next.is("<");
    case '(': return next.is("(");
    case '<': return next.is("<") && (names_number(tokens[i + 2]) || names_space(tokens[i + 2]));
    case ':': return next.is("::");
  }
  // `f() = delete` declares, it frees nothing.
  return !(tokens[i].is("delete") && i > 0 && tokens[i - 1].is("="));
}

// Words that are keywords in Metal alone.
bool is_of_metal(const Token& token) {
  return is_space(token) ||
         token.is_any({"kernel", "vertex", "fragment", "half", "bfloat", "threadgroup_imageblock",
                       "ray_data", "object_data"});
}

// Whether the word at token i is what its declaration names, by what stands on both sides of it.
bool is_declared(const Unit& unit, size_t i) {
  auto& tokens = unit.tokens;
  if (i == 0) return false;
  auto &previous = tokens[i - 1], &next = tokens[i + 1];
  size_t list = unit.outline.partner[i - 1];
  if (previous.is_any({"struct", "class", "union", "enum", "namespace", "typename", "using"})) {
    return true;
  }
  if (previous.is(",")) return next.is_any({"=", ";", "}"});
  if (previous.is("{")) return next.is_any({"=", ",", "}"});  // an enumerator
  if (previous.is_any({"*", "&"})) {
    // `device float* thread` is a type.
    return next.is_any({"=", "["}) || (!is_space(tokens[i]) && next.is_any({";", ",", ")"}));
  }
  bool typed = previous.kind == Token::word
                   ? !is_keyword(previous)
                   : previous.is(">") && list != Outline::none && !tokens[list - 1].is("template");
  bool last = next.is(">") && unit.outline.partner[i + 1] != Outline::none &&
              tokens[unit.outline.partner[i + 1] - 1].is("template");
  bool called = next.is("(") && !tokens[i + 2].is_any({"*", "&"});  // not `float device (&a)[4]`
  return typed && (last || called || next.is_any({"=", ";", ",", ")", "[", "{", ":"}));
}

}  // namespace

bool is_keyword(const Token& token) {
  return is_space(token) ||
         token.is_any({"alignof", "case", "class", "const", "constexpr", "delete", "do", "else",
                       "enum", "explicit", "extern", "friend", "goto", "inline", "METAL_FUNC",
                       "mutable", "namespace", "new", "operator", "private", "protected", "public",
                       "return", "sizeof", "static", "struct", "throw", "typedef", "typename",
                       "union", "using", "volatile"});
}

void refuse_unsupported(const Unit& unit) {
  auto& tokens = unit.tokens;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i].kind != Token::word) continue;
    if (is_of_metal(tokens[i]) && is_declared(unit, i)) {
      unit.place.refuse(tokens[i].line, "`" + tokens[i].text +
                                            "` is a keyword of Metal: choose another name");
    }
    for (auto& entry : unsupported) {
      if (!tokens[i].is(entry.word) || !used_as(entry.use, tokens, i)) continue;
      unit.place.refuse(tokens[i].line,
                        "`" + tokens[i].text + "` is not supported: " + entry.why);
    }
    if (is_texture(tokens[i].text) && used_as('t', tokens, i)) {
      unit.place.refuse(tokens[i].line,
                        "`" + tokens[i].text + "` is not supported: " + image);
    }
    if (tokens[i].is("kernel") && tokens[i].line >= unit.place.body_first_line &&
        i + 1 < tokens.size() && tokens[i + 1].is("void")) {
      unit.place.refuse(tokens[i].line,
                        "a whole kernel is not supported here: the source is the inside of one, "
                        "whose parameters are the inputs and outputs");
    }
    if (tokens[i].is("function_constant") && i > 0 && tokens[i - 1].is("[")) {
      unit.place.refuse(tokens[i].line,
                        std::string("`[[function_constant]]` is not supported: ") + fixed);
    }
  }
}

namespace {

bool is_constexpr(const Unit& unit, const Function& function) {
  for (size_t i = function.head; i < function.open; ++i) {
    if (unit.tokens[i].is("constexpr")) return true;
  }
  return false;
}

// A function that calls itself. Overloads and templates may name themselves and mean another one,
// so only names with a single definition count, which the library has none of. What is constexpr may
// recurse in a constant, before there is any stack.
const Function* recursive(const Unit& unit, const std::set<std::string>& library) {
  std::map<std::string, const Function*> single;
  for (auto& function : unit.outline.functions) {
    if (!function.body || function.name.empty() || function.name == "operator") continue;
    bool other = unit.outline.templates.count(function.name) || single.count(function.name) ||
                 library.count(function.name) || is_constexpr(unit, function);
    single[function.name] = other ? nullptr : &function;
  }
  std::map<std::string, std::set<std::string>> calls;
  for (auto& [name, function] : single) {
    if (!function) continue;
    for (size_t i = function->body; i < function->end; ++i) {
      auto found = single.find(unit.tokens[i].text);
      auto& previous = unit.tokens[i - 1];
      bool member = previous.is_any({".", "->", "::"});
      // `float total(a);` may declare a variable.
      bool declares = previous.kind == Token::word &&
                      !previous.is_any({"return", "else", "do", "case"});
      if (found != single.end() && found->second && !member && !declares &&
          unit.tokens[i + 1].is("(")) {
        calls[name].insert(found->first);
      }
    }
  }
  for (auto& [name, direct] : calls) {
    std::set<std::string> reached = direct;
    std::vector<std::string> work(direct.begin(), direct.end());
    while (!work.empty()) {
      std::string next = work.back();
      work.pop_back();
      for (auto& callee : calls[next]) {
        if (reached.insert(callee).second) work.push_back(callee);
      }
    }
    if (reached.count(name)) return single[name];
  }
  return nullptr;
}

}  // namespace

// Metal has no stack to recurse on.
void refuse_recursion(const Unit& unit, const Library& library) {
  if (!recursive(unit, {})) return;
  const Function* function = recursive(unit, library());
  if (!function) return;
  unit.place.refuse(unit.tokens[function->head].line,
                    "recursion (`" + function->name + "` calls itself) is not supported: Metal has "
                    "no call stack; use a loop or a template");
}

// One thread has no lanes that a matrix could lie in. Functions that nothing names are as good as
// templates that nothing instantiates.
void drop_unused_matrices(Unit& unit) {
  auto& tokens = unit.tokens;
  auto is_named = [&](const Function& function) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      bool within = function.head <= i && i <= function.end;
      if (!within && !tokens[i].removed && tokens[i].text == function.name) return true;
    }
    return false;
  };
  auto holds_matrix = [&](const Function& function) {
    for (size_t i = function.head; i < function.end; ++i) {
      if (names_matrix(tokens[i])) return true;
    }
    return false;
  };
  for (bool again = true; std::exchange(again, false);) {
    for (auto& function : unit.outline.functions) {
      bool plain = function.body && !function.lambda && function.body != unit.signature.body &&
                   !unit.outline.in_type(function.head) && !tokens[function.head].removed;
      if (!plain || !holds_matrix(function) || is_named(function)) continue;
      again = true;
      for (size_t i = function.head; i <= function.end; ++i) {
        tokens[i].dropped = tokens[i].removed = true;
      }
    }
  }
}

// [[…]] says nothing that the target language needs: geometry comes from the driver, and hints
// such as [[unroll]] are the compiler's business.
void drop_attributes(Unit& unit) {
  auto& tokens = unit.tokens;
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    if (!tokens[i].is("[") || !tokens[i + 1].is("[") || tokens[i + 1].column) continue;
    size_t end = unit.outline.partner[i];
    if (unit.outline.partner[i + 1] + 1 != end) continue;
    for (; i <= end; ++i) tokens[i].dropped = true;
    --i;
  }
}

// What has no meaning once a text is a translation unit of its own.
void drop_hints(Unit& unit) {
  auto& tokens = unit.tokens;
  auto drop = [&](size_t begin, size_t end) {
    for (size_t i = begin; i <= end; ++i) tokens[i].dropped = true;
  };
  for (size_t i = 0; i + 2 < tokens.size(); ++i) {
    if (tokens[i].is("_Pragma") && tokens[i + 1].is("(")) drop(i, unit.outline.partner[i + 1]);
    bool of_scope = tokens[i + 1].is("(") &&
                    tokens[i + 2].is_any({"device", "system", "threadgroup"});
    if (tokens[i].is("coherent") && of_scope) drop(i, unit.outline.partner[i + 1]);
    if (tokens[i].is("__extension__")) drop(i, i);
    if (tokens[i].is("using") && tokens[i + 1].is("namespace") && tokens[i + 2].is("metal")) {
      drop(i, unit.outline.statement_end(i));
    }
  }
}

// GCC before 14 takes no explicit specialisation inside a struct. Of an operator, which is called
// without template arguments, a plain overload is the same.
void free_specialised_operators(Unit& unit) {
  auto& tokens = unit.tokens;
  for (auto& function : unit.outline.functions) {
    size_t i = function.head;
    bool specialised = function.name == "operator" && unit.outline.in_type(i) &&
                       tokens[i].is("template") && tokens[i + 1].is("<") && tokens[i + 2].is(">");
    if (!specialised) continue;
    for (size_t k = i; k < i + 3; ++k) tokens[k].dropped = true;
  }
}

bool is_constructor(const Unit& unit, const Function& function) {
  auto& tokens = unit.tokens;
  if (function.open == 0 || function.lambda || !unit.outline.in_type(function.head)) return false;
  size_t list = unit.outline.partner[function.open - 1];
  bool named = tokens[function.open - 1].is(">") && list != Outline::none;
  size_t name = named ? list - 1 : function.open - 1;
  for (size_t i = function.head; i < name; ++i) {
    if (unit.outline.angle_end(i) != Outline::none) {
      i = unit.outline.angle_end(i);
    } else if (!tokens[i].dropped && !tokens[i].is_any({"constexpr", "inline", "explicit",
                                                          "METAL_FUNC", "template"})) {
      return false;
    }
  }
  return true;
}

// `Pair<T>() { … }` in a template Pair is a constructor in C++17; C++20 knows `Pair() { … }` only.
void name_constructors(Unit& unit) {
  auto& tokens = unit.tokens;
  for (auto& function : unit.outline.functions) {
    if (!is_constructor(unit, function) || !tokens[function.open - 1].is(">")) continue;
    size_t list = unit.outline.partner[function.open - 1];
    for (size_t i = list; i < function.open; ++i) tokens[i].dropped = true;
  }
}

namespace {

// The number that the digits of a literal mean, rounded once to so many bits of which the last is
// not below 2^least. As a literal of float, which holds it.
std::string rounded_literal(std::string digits, int bits, int least) {
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
  digits.erase(std::remove(digits.begin(), digits.end(), '\''), digits.end());
  int mode = std::fegetround();
  std::fesetround(FE_UPWARD);
  double above = strtod_l(digits.c_str(), nullptr, plain);
  std::fesetround(FE_TOWARDZERO);
  double value = strtod_l(digits.c_str(), nullptr, plain);
  std::fesetround(mode);
  // An odd last bit says that more follows, and is never taken for half of a place.
  uint64_t word;
  std::memcpy(&word, &value, sizeof word);
  word |= above != value;
  std::memcpy(&value, &word, sizeof word);
  int place;
  std::frexp(value, &place);
  place = std::max(place - bits, least);
  auto whole = (unsigned long long)std::nearbyint(std::ldexp(value, -place));
  char text[64];
  std::snprintf(text, sizeof text, "0x%llxp%df", whole, place);
  return text;
}

}  // namespace

// Metal's literals are float unless they say otherwise; C++ would compute in double.
void suffix_literals(Unit& unit) {
  for (auto& token : unit.tokens) {
    std::string& text = token.text;
    if (token.kind != Token::number) continue;
    bool hexadecimal = text.size() > 1 && (text[1] == 'x' || text[1] == 'X');
    const char* floating = hexadecimal ? "pP" : ".eE";
    if (text.find_first_of(floating) == std::string::npos) {
      uint64_t value;
      size_t end;
      if (read_digits(text, &value, &end)) continue;
      unit.place.refuse(token.line, "the literal `" + text + "` does not fit into any integer type");
    }
    size_t length = text.find_last_of(hexadecimal ? "0123456789" : "0123456789.") + 1;
    std::string suffix = text.substr(length);
    for (char& c : suffix) c = (char)std::tolower((unsigned char)c);
    std::string digits = text.substr(0, length);
    if (suffix.empty()) {
      text = digits + "f";
    } else if (suffix == "h") {
      text = "half(" + rounded_literal(digits, 11, -24) + ")";
    } else if (suffix == "bf") {
      text = "bfloat(" + rounded_literal(digits, 8, -133) + ")";
    } else if (suffix != "f") {
      unit.place.refuse(token.line, "the literal `" + text +
                                        "` is not supported: Metal has float (1.0), half (1.0h) "
                                        "and bfloat (1.0bf) literals");
    }
  }
}

// Keywords since C++20 that are ordinary names in Metal.
void rename_keywords(Unit& unit) {
  for (auto& token : unit.tokens) {
    if (token.is_any({"concept", "requires", "consteval", "constinit", "co_await", "co_return",
                       "co_yield", "char8_t"})) {
      token.text += "_";
    }
  }
}

// NVRTC takes no letters beyond ASCII.
void spell_in_ascii(Unit& unit) {
  for (auto& token : unit.tokens) {
    auto beyond = [](char c) { return (unsigned char)c >= 0x80; };
    if (token.kind != Token::word || std::none_of(token.text.begin(), token.text.end(), beyond)) {
      continue;
    }
    std::string spelled = "zk_";
    for (char c : token.text) {
      char digits[4];
      std::snprintf(digits, sizeof digits, "x%02x", (unsigned char)c);
      spelled += beyond(c) ? std::string(digits) : std::string(1, c);
    }
    token.text = spelled;
  }
}

namespace {

bool declares_something_else(const Token& token) {
  return token.is_any({"constant", "constexpr", "const", "using", "typedef", "template", "struct",
                       "class", "union", "enum", "namespace", "extern", "friend", "operator",
                       "static_assert", "_Pragma", "return", "threadgroup"});
}

}  // namespace

// A variable that outlives a launch would keep what the last one left; Metal has constants only.
void refuse_mutable_globals(const Unit& unit) {
  auto& tokens = unit.tokens;
  auto& outline = unit.outline;
  // Reads a declaration up to its name; whether it may be one of a variable that changes.
  auto changes = [&](size_t head, size_t* name, size_t* end) {
    int words = 0;
    bool otherwise = false;
    size_t i = head;
    while (i < tokens.size() && !tokens[i].is_any({";", "{", "}", "=", "("})) {
      size_t list = tokens[i].is("[") ? outline.partner[i] : outline.angle_end(i);
      if (list != Outline::none) {
        i = list + 1;
        continue;
      }
      otherwise |= declares_something_else(tokens[i]);
      if (tokens[i].kind == Token::word) ++words, *name = i;
      ++i;
    }
    *end = i;
    return words > 1 && !otherwise && i < tokens.size() && tokens[i].is_any({";", "{", "="});
  };
  auto refuse = [&](size_t name) {
    unit.place.refuse(tokens[name].line,
                      "`" + tokens[name].text + "` is not supported: it would keep its value from "
                      "one launch to the next; Metal has variables of `constant` address space, "
                      "`constexpr` ones, and local ones");
  };
  size_t name = 0, end = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    bool local = tokens[i].is("static") && outline.function_at(i) && !outline.in_type(i);
    if (local && changes(outline.statement_begin(i), &name, &end)) refuse(name);
  }
  for (size_t head = 0; head < tokens.size();) {
    if (changes(head, &name, &end)) refuse(name);
    if (end >= tokens.size()) break;
    bool encloses = tokens[end].is("{") && tokens[head].is_any({"namespace", "extern", "inline"});
    if (encloses || tokens[end].is_any({"}", ";"})) {
      head = end + 1;
      continue;
    }
    bool function = tokens[end].is("(");
    while (end < tokens.size() && !tokens[end].is(";")) {
      bool body = function && tokens[end].is("{");
      if (tokens[end].is_any({"(", "[", "{"})) end = outline.partner[end];
      if (body) break;
      ++end;
    }
    head = end + 1;
  }
}

bool assigns(const Token& token) {
  return token.is_any({"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="});
}

bool steps(const Token& token) { return token.is_any({"++", "--"}); }

namespace {

// The variable in `float(a)` at token i, if that is a whole argument, or null.
const Token* cast_variable(const Unit& unit, size_t i) {
  auto& tokens = unit.tokens;
  bool cast = names_number(tokens[i]) && tokens[i + 1].is("(") &&
              tokens[i + 2].kind == Token::word && tokens[i + 3].is(")") &&
              tokens[i + 4].is_any({",", ")"});
  return cast ? &tokens[i + 2] : nullptr;
}

// Whether two arguments of the list that opens at i are casts of one variable.
bool casts_twice(const Unit& unit, size_t i) {
  std::set<std::string> seen;
  size_t end = unit.outline.partner[i];
  for (++i; i < end; ++i) {
    auto variable = unit.tokens[i - 1].is_any({"(", ","}) ? cast_variable(unit, i) : nullptr;
    if (variable && !seen.insert(variable->text).second) return true;
    if (unit.outline.partner[i] != Outline::none) i = unit.outline.partner[i];
  }
  return false;
}

// Whether the bracket at i groups an expression or a condition.
bool groups(const Unit& unit, size_t i) {
  if (i == 0 || !unit.tokens[i].is("(")) return false;
  auto& before = unit.tokens[i - 1];
  if (before.kind == Token::word) return before.is_any({"if", "while", "switch", "return"});
  bool list_end = before.is(">") && unit.outline.partner[i - 1] != Outline::none;
  return before.kind == Token::mark && !before.is_any({")", "]", "}"}) && !list_end;
}

}  // namespace

// GCC tries what a bracket holds as a type first, and takes errors in that for the user's: a
// variable twice in `(float2(float(a), float(a)) + b)`, which would be two parameters of one name,
// or a function that returns an array, `(uint2(uint(a))[0] + b)`. `(float)(a)` is no parameter.
void spell_casts(Unit& unit) {
  auto& tokens = unit.tokens;
  std::set<std::string> types;
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    bool names = tokens[i].is_any({"typename", "class", "struct", "using"});
    if (names) types.insert(tokens[i + 1].text);
  }
  for (size_t i = 1; i + 4 < tokens.size(); ++i) {
    if (!groups(unit, i)) continue;
    bool type = names_number(tokens[i + 1]) || tokens[i + 1].is("vec") ||
                types.count(tokens[i + 1].text);
    size_t list = type ? unit.outline.call_at(i + 1) : Outline::none;
    if (list == Outline::none) continue;
    size_t behind = unit.outline.partner[list] + 1;
    bool subscript = tokens[behind].is("[") || tokens[behind].dropped;  // which a swizzle is by now
    while (list != Outline::none && !cast_variable(unit, list + 1)) {
      list = tokens[list + 1].kind == Token::word ? unit.outline.call_at(list + 1) : Outline::none;
    }
    if (list == Outline::none || !(subscript || casts_twice(unit, list))) continue;
    tokens[list + 1].before += "(";
    tokens[list + 1].after = ")" + tokens[list + 1].after;
  }
}

// The kernel must be inlined into the driver: only then do thread indices fold and loops vectorise.
void declare_kernel(Unit& unit) {
  auto& signature = unit.signature;
  auto& tokens = unit.tokens;
  tokens[signature.name_at - 1].before += "static inline __attribute__((always_inline)) ";
  if (unit.declarations && unit.mode == Mode::cooperative) {
    tokens[signature.open].after += "char* const* zk_memory, ";
  }
  for (auto& parameter : signature.parameters) {
    if (parameter.plain) tokens[parameter.type_token].text = "zk_uint3";
  }
  for (size_t i = signature.tail; i < tokens.size(); ++i) tokens[i].dropped = true;
}

}  // namespace zmlx
