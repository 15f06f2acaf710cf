#include "cuda_flow.h"

#include <algorithm>

#include "cuda_bodies.h"
#include "cuda_pointers.h"
#include "reach.h"

namespace zmlx {
namespace {

bool is_warp_operation(const std::string& name) {
  bool warp = name.compare(0, 5, "simd_") == 0 || name.compare(0, 5, "quad_") == 0;
  return (warp || name == "threadgroup_barrier" || name == "simdgroup_barrier") &&
         collectives().count(name);
}

// Every lane of a simdgroup gets the same result.
bool agrees(const std::string& name) {
  if (name.compare(0, 5, "simd_") != 0) return false;
  for (auto part : {"shuffle", "prefix", "is_first"}) {
    if (name.find(part) != std::string::npos) return false;
  }
  return true;
}

class Analysis {
 public:
  Analysis(Unit& unit, const Library& library)
      : tokens_(unit.tokens), outline_(unit.outline), library_(library), bodies_(unit),
        pointers_(unit, bodies_), followed_(tokens_.size()) {
    for (auto& body : bodies_.all) {
      lost_ |= stores(body);
      names_.insert(body.name);
      braces_.insert(body.begin);
      if (body.method) methods_.insert(body.name);
    }
    for (auto& function : outline_.functions) {
      declared_.insert(function.open);
      if (function.lambda) captures_.insert(function.head);
    }
    for (size_t i = 0; i + 1 < tokens_.size(); ++i) {
      bool names = one_of(tokens_[i], {"struct", "class", "union", "enum", "typename", "using"});
      if (names) types_.insert(tokens_[i + 1].text);
    }
  }

  void run() {
    // Levels only rise, and a name or a call has three, so this ends.
    do {
      grew_ = false;
      for (auto& body : bodies_.all) {
        if (!body.kernel) find_own(body);
        walk_body(body);
      }
      find_unfollowed();
    } while (grew_);
  }

  void mark() const {
    // The text's own overloads take it too.
    for (auto& function : outline_.functions) {
      if (!is_warp_operation(function.name) || function.lambda) continue;
      bool alone = function.close == function.open + 1;
      tokens_[function.open].after += std::string("zk_lanes") + (alone ? "" : ", ");
    }
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (tokens_[i].kind != Token::word || !is_warp_operation(tokens_[i].text)) continue;
      size_t open = outline_.call_at(i);
      if (open == Outline::none || declared_.count(open)) continue;
      auto known = sites_.find(i);
      // Outside of every body, as in a value by default.
      Flow flow = known == sites_.end() || lost_ ? Flow{2, 2} : known->second;
      bool alone = outline_.partner[open] == open + 1;
      tokens_[open].after += "zk_flow<" + std::to_string(flow.control) + ", " +
                             std::to_string(flow.exits) + ">()" + (alone ? "" : ", ");
    }
  }

 private:
  // ---- levels ----

  void raise(int& level, int to) {
    if (to <= level) return;
    level = to;
    grew_ = true;
  }

  int name_level(const Body& body, size_t i) const {
    auto& names = bodies_.all[body.names];
    std::string key = bodies_.key(i);
    int behind = stored_ && names.exposed.count(key) ? stored_ : 0;
    auto found = names.levels.find(key);
    if (names.method && is_of_object(i)) behind = 2;
    if (found == names.levels.end()) return behind;
    // Of a position, y and z are the same along a row of threads.
    bool coordinate = found->second == 2 && body.kernel && i + 2 < tokens_.size() &&
                      tokens_[i + 1].is(".") && is_position(tokens_[i].text);
    if (coordinate && tokens_[i + 2].text.find_first_not_of("yz") == std::string::npos) return 1;
    return std::max(found->second, behind);
  }
  // In a method, whose object is not known.
  bool is_of_object(size_t i) const {
    auto& text = tokens_[i].text;
    return text == "this" || outline_.fields.count(text) || methods_.count(text);
  }
  bool is_position(const std::string& name) const {
    return name == "thread_position_in_grid" || name == "thread_position_in_threadgroup";
  }

  int level(const Body& body, size_t begin, size_t end) const {
    int highest = 0;
    for (size_t i = begin; i < end; ++i) {
      if (tokens_[i].kind != Token::word) continue;
      i = past_agreement(i);
      bool member = i > 0 && one_of(tokens_[i - 1], {".", "->"});
      highest = std::max(highest, call_level(i));
      if (!member) highest = std::max(highest, name_level(body, i));
    }
    return highest;
  }
  // The end of a call whose result is the same for all lanes, or i.
  size_t past_agreement(size_t i) const {
    size_t open = outline_.call_at(i);
    bool same = open != Outline::none && is_warp_operation(tokens_[i].text) &&
                agrees(tokens_[i].text);
    return same ? outline_.partner[open] : i;
  }
  // What the function that token i names returns, whatever it is given.
  int call_level(size_t i) const {
    auto& name = tokens_[i].text;
    bool barrier = name == "threadgroup_barrier" || name == "simdgroup_barrier";
    bool differs = name == "thread_elements" || name.compare(0, 7, "atomic_") == 0 ||
                   (is_warp_operation(name) && !barrier);
    if (differs && outline_.call_at(i) != Outline::none) return 2;
    auto found = own_.find(name);
    return found == own_.end() ? 0 : found->second;
  }
  // Whether it is an operator that may store to an operand, other than by assignments and steps.
  bool stores(const Body& body) const {
    if (body.name != "operator") return false;
    auto& symbol = tokens_[body.open - 1];
    if (assigns(symbol) || one_of(symbol, {"++", "--", ")", "]"})) return false;
    bool kept = !body.method;
    for (size_t i = body.close; i < body.begin; ++i) kept |= tokens_[i].is("const");
    for (auto& parameter : bodies_.arguments(body.open)) kept &= !bodies_.is_output(parameter);
    return !kept;
  }
  void find_own(Body& body) {
    for (size_t i = body.begin; i < body.end && !body.own; ++i) {
      if (tokens_[i].kind != Token::word) continue;
      i = past_agreement(i);
      raise(body.own, call_level(i));
    }
    if (body.own) own_[body.name] = body.own;
  }

  // ---- statements ----

  void walk_body(Body& body) {
    body.left = 0;
    Flow flow = body.flow;
    expression(body, body.close + 1, body.begin, flow);  // a constructor's list of initialisers
    walk(body, body.begin + 1, body.end, flow);
  }

  // Calls where no statement is, as in values by default: from anywhere.
  void find_unfollowed() {
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (followed_[i] || tokens_[i].kind != Token::word) continue;
      if (!names_.count(tokens_[i].text)) continue;
      size_t open = outline_.call_at(i);
      if (open == Outline::none || declared_.count(open)) continue;
      for (auto& body : bodies_.all) {
        if (body.kernel || body.name != tokens_[i].text) continue;
        raise(body.flow.control, 2);
        raise(body.flow.exits, 2);
      }
    }
  }

  // Statements from begin to end. `flow.exits` and `body.left` grow as returns are passed.
  void walk(Body& body, size_t begin, size_t end, Flow& flow) {
    for (size_t i = begin; i < end;) {
      size_t last = std::min(outline_.statement_end(i), end);
      statement(body, i, last, flow);
      i = last + 1;
    }
  }

  void statement(Body& body, size_t begin, size_t last, Flow& flow) {
    begin = outline_.past_prefix(begin);
    auto& token = tokens_[begin];
    if (token.is("{")) {
      walk(body, begin + 1, last, flow);
    } else if (token.is("if")) {
      branch(body, begin, last, flow);
    } else if (one_of(token, {"for", "while", "do", "switch"})) {
      loop(body, begin, last, flow);
    } else if (one_of(token, {"using", "typedef"})) {
      return;
    } else {
      if (one_of(token, {"struct", "class", "union", "enum"})) begin = past_type(begin, last);
      if (token.is("return") && body.kernel) flow.exits = std::max(flow.exits, flow.control);
      if (token.is("return") && !body.kernel) body.left = std::max(body.left, flow.control);
      expression(body, begin, last, {std::max(flow.control, body.left), flow.exits});
    }
  }

  // Behind the braces of a type that a statement defines.
  size_t past_type(size_t begin, size_t last) const {
    size_t i = begin;
    while (i < last && !one_of(tokens_[i], {"{", "=", "("})) ++i;
    return tokens_[i].is("{") ? outline_.partner[i] + 1 : begin;
  }

  void branch(Body& body, size_t begin, size_t last, Flow& flow) {
    size_t open = begin + 1;
    while (!tokens_[open].is("(")) ++open;
    size_t close = outline_.partner[open];
    int now = std::max(flow.control, body.left);
    expression(body, open + 1, close, {now, flow.exits});
    Flow inside{std::max(now, level(body, open + 1, close)), flow.exits};
    Flow other = inside;
    size_t yes = outline_.statement_end(close + 1);
    statement(body, close + 1, yes, inside);
    bool otherwise = yes + 2 <= last && tokens_[yes + 1].is("else");
    if (otherwise) statement(body, yes + 2, last, other);
    lost_ |= !otherwise && yes != last;
    flow.exits = std::max(inside.exits, other.exits);
  }

  void loop(Body& body, size_t begin, size_t last, Flow& flow) {
    int now = std::max(flow.control, body.left);
    size_t open = begin + 1, close = 0, inner = begin + 1;
    if (!tokens_[begin].is("do")) {
      while (!tokens_[open].is("(")) ++open;
      close = outline_.partner[open];
      inner = close + 1;
    } else {
      // do S while (condition);
      open = outline_.statement_end(inner) + 2;
      close = outline_.partner[open];
    }
    if (tokens_[begin].is("for")) {
      expression(body, open + 1, close, {now, flow.exits});
      // Over a range; in a header of three parts a colon is that of `?`.
      bool range = std::count_if(tokens_.begin() + open, tokens_.begin() + close,
                                 [](const Token& token) { return token.is(";"); }) < 2;
      for (size_t i = open + 1; i < close && range; ++i) {
        if (tokens_[i].is(":")) assign(body, open + 1, i, level(body, i + 1, close), 0);
      }
    }
    Flow inside{std::max(now, level(body, open + 1, close)), flow.exits};
    // What leaves an iteration parts the threads of the next one.
    for (bool again = true; again;) {
      Flow before = inside;
      expression(body, open + 1, close, inside);
      size_t stop = tokens_[begin].is("do") ? open - 2 : last;
      statement(body, inner, stop, inside);
      inside.control = std::max(inside.control, parting(body, inner, stop, inside.control));
      inside.control = std::max(inside.control, body.left);
      inside.control = std::max(inside.control, level(body, open + 1, close));
      again = inside.control > before.control || inside.exits > before.exits;
    }
    flow.exits = std::max(flow.exits, inside.exits);
  }

  // What the conditions around the loop's own `break` and `continue` depend on.
  int parting(const Body& body, size_t begin, size_t end, int control) const {
    for (size_t i = begin; i < end; ++i) {
      bool loop = one_of(tokens_[i], {"for", "while", "do"});
      if (loop || tokens_[i].is("switch")) {
        size_t last = outline_.statement_end(i);
        // A `continue` in a switch is the loop's.
        for (size_t k = i; k < last && !loop; ++k) {
          if (tokens_[k].is("continue")) control = std::max(control, around(body, begin, k));
        }
        i = last;
      } else if (one_of(tokens_[i], {"break", "continue"})) {
        control = std::max(control, around(body, begin, i));
      }
    }
    return control;
  }
  int around(const Body& body, size_t begin, size_t i) const {
    int highest = 0;
    for (size_t k = begin; k < i; ++k) {
      if (!one_of(tokens_[k], {"if", "switch"}) || outline_.statement_end(k) < i) continue;
      size_t open = k + 1;
      while (!tokens_[open].is("(")) ++open;
      highest = std::max(highest, level(body, open + 1, outline_.partner[open]));
    }
    return highest;
  }

  // ---- expressions ----

  void expression(Body& body, size_t begin, size_t end, Flow flow) {
    size_t inner = begin;  // past lambdas so far, whose statements are walked by themselves
    for (size_t i = begin; i < end; ++i) {
      auto& token = tokens_[i];
      if (braces_.count(i)) inner = std::max(inner, outline_.partner[i]);
      bool leaves = i == begin && one_of(token, {"return", "break", "continue"});
      if (heads_statement(token) && i >= inner && !leaves) lost_ = true;
      if (one_of(token, {"?", "&&", "||"})) {
        flow.control = std::max(flow.control, level(body, begin, i));
      } else if (assigns(token)) {
        size_t stop = bodies_.right_side(i, end);
        assign(body, begin, i, level(body, i + 1, stop), flow.control);
      } else if (one_of(token, {"++", "--"})) {
        step(body, begin, i, flow.control);
      } else if (i > begin && one_of(token, {"(", "{"}) && gives_value(i)) {
        assign(body, begin, i, level(body, i + 1, outline_.partner[i]), flow.control);
        if (pointers_.hands_on()) grew_ |= pointers_.expose(i + 1, outline_.partner[i]);
      } else if (token.kind == Token::word) {
        size_t open = tokens_[i + 1].is("{") ? i + 1 : outline_.call_at(i);
        if (open == Outline::none || braces_.count(open)) continue;
        if (is_warp_operation(token.text)) {
          Flow& site = sites_[i];
          raise(site.control, flow.control);
          raise(site.exits, flow.exits);
        }
        if (is_constructed(i, begin)) {
          construct(body, i);
          call(body, begin, type_before(i), open, flow);
        } else {
          call(body, begin, i, open, flow);
        }
      }
    }
  }

  static bool assigns(const Token& token) {
    return one_of(token, {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="});
  }

  // Whether the bracket at i gives something else than a name its value, or calls it:
  // `T name[2]{…}`, `T (&name){…}`, `auto [a, b](…)`, `name[0](…)`, `(*name)(…)`.
  bool gives_value(size_t i) const {
    size_t before = outline_.partner[i - 1];
    if (tokens_[i - 1].is("]")) return !captures_.count(before);
    if (!tokens_[i - 1].is(")") || braces_.count(i)) return false;
    if (tokens_[before - 1].is("decltype")) return false;
    bool named = before + 3 == i && (names_.count(tokens_[i - 2].text) || !is_function(i - 2));
    return named || !bodies_.casts(before);
  }

  // `T name(…)` and `T name{…}`: a word after a type.
  bool is_constructed(size_t i, size_t begin) const {
    if (i <= begin || i + 1 >= tokens_.size() || !one_of(tokens_[i + 1], {"(", "{"})) return false;
    auto& previous = tokens_[i - 1];
    bool keyword = one_of(previous, {"return", "else", "do", "case", "goto", "sizeof"});
    return (previous.kind == Token::word && !keyword) || closes_list(i - 1);
  }
  bool closes_list(size_t i) const {
    return tokens_[i].is(">") && outline_.partner[i] != Outline::none;
  }
  size_t type_before(size_t i) const {
    return tokens_[i - 1].is(">") ? outline_.partner[i - 1] - 1 : i - 1;
  }
  void construct(Body& body, size_t i) {
    raise_name(body, i, level(body, i + 2, outline_.partner[i + 1]));
  }

  void raise_name(Body& body, size_t name, int to) {
    if (to > 0) raise(bodies_.all[body.names].levels[bodies_.key(name)], to);
  }

  // Raises what stands left of the operator at i; in `auto [a, b] = …` all of the names.
  void assign(Body& body, size_t begin, size_t i, int value, int control) {
    int to = std::max(value, control);
    size_t k = i;
    bool through = tokens_[i].is("->");  // a pointer, or what may be one
    while (k > begin && one_of(tokens_[k - 1], {"++", "--"})) --k;  // *p++ = …
    while (k > begin) {
      auto& previous = tokens_[k - 1];
      size_t selector = bodies_.selector(k - 1);
      if (one_of(previous, {")", "]"})) {
        size_t close = k - 1;
        k = outline_.partner[close];
        through = true;
        to = std::max(to, level(body, k + 1, close));  // where it is stored
        if (previous.is("]") && k > begin && one_of(tokens_[k - 1], {"auto", "&", "&&"})) {
          for (size_t n = k; n < close; ++n) {
            if (tokens_[n].kind == Token::word) raise_name(body, n, to);
          }
          return;
        }
        if (previous.is(")") && !is_dereferenced(begin, k)) store(body, k + 1, close, to);
      } else if (closes_list(k - 1)) {  // f<T>(…) = …
        k = outline_.partner[k - 1];
      } else if (previous.kind == Token::word && selector != Outline::none) {
        through |= tokens_[selector].is("->");
        k = selector;
      } else {
        break;
      }
    }
    size_t name = k - 1;
    if (k == begin || tokens_[name].kind != Token::word) {
      if (through && !points_to_memory(body, k, i)) raise(stored_, to);
      return;
    }
    if (declares(name, begin)) {
      // A variable that is declared where threads have parted is not seen by the others.
      raise_name(body, name, value);
      return;
    }
    through |= is_dereferenced(begin, name);
    if (bodies_.all[body.names].memory.count(bodies_.key(name)) && through) return;
    if (through) to = std::max(to, name_level(body, name));
    raise_name(body, name, to);
    if (through || pointers_.is_reference(name)) raise(stored_, to);
  }
  // Whether a term is a pointer to memory of all threads, and not what is read from it.
  bool points_to_memory(const Body& body, size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      if (tokens_[i].is("[")) i = outline_.partner[i];
      bool reads = tokens_[i - 1].is("*") || one_of(tokens_[i + 1], {"[", ".", "->"});
      if (!reads && bodies_.all[body.names].memory.count(bodies_.key(i))) return true;
    }
    return false;
  }
  // Behind a star that does not multiply, and casts.
  bool is_dereferenced(size_t begin, size_t i) const {
    while (i > begin && one_of(tokens_[i - 1], {"++", "--", ")"})) {
      i = tokens_[i - 1].is(")") ? outline_.partner[i - 1] : i - 1;
    }
    if (i <= begin || !tokens_[i - 1].is("*")) return false;
    return i - 1 == begin || tokens_[i - 2].kind == Token::mark;
  }
  // Raises the variables that an expression, or a list of them, may stand for.
  void store(Body& body, size_t begin, size_t end, int to) {
    for (size_t i = begin; i <= end; ++i) {
      if (i < end && one_of(tokens_[i], {"(", "[", "{"})) i = outline_.partner[i];
      if (i < end && !one_of(tokens_[i], {"?", ":", ","})) continue;
      if (i > begin) assign(body, begin, i, to, 0);
      begin = i + 1;
    }
  }
  // Lanes that part step different numbers of times.
  void step(Body& body, size_t begin, size_t i, int control) {
    bool behind = i > begin && (tokens_[i - 1].kind == Token::word ||
                                one_of(tokens_[i - 1], {")", "]"}));
    if (behind) {
      assign(body, begin, i, 0, control);
    } else {
      assign(body, i + 1, bodies_.operand_end(i + 1), 0, control);
    }
  }
  bool declares(size_t name, size_t begin) const {
    if (name <= begin) return false;
    size_t type = name - 1;
    while (type > begin && one_of(tokens_[type], {"*", "&", "&&"})) --type;
    return tokens_[type].is(">") ||
           (tokens_[type].kind == Token::word && !one_of(tokens_[type], {"return", "else", "do"}));
  }

  // A call hands levels to the callee's parameters, and its flow to the callee's collectives; what
  // the callee may store to rises to the level of everything that it is given.
  void call(Body& body, size_t begin, size_t i, size_t open, Flow flow) {
    followed_[i] = true;
    auto given = bodies_.arguments(open);
    size_t object = std::max(bodies_.path_begin(i), begin);
    int highest = std::max(flow.control, level(body, object, outline_.partner[open]));
    // A method may change its object.
    if (object < i) assign(body, object, bodies_.selector(i), highest, 0);
    bool stores = one_of(tokens_[i], {"sincos", "frexp", "modf"});
    if (stores && given.size() == 2) store(body, given[1].begin, given[1].end, highest);
    if (tokens_[i].text.compare(0, 23, "atomic_compare_exchange") == 0) raise(stored_, 2);
    bool known = false;
    for (auto& callee : bodies_.all) {
      if (callee.kernel || callee.name != tokens_[i].text) continue;
      known = true;
      raise(callee.flow.control, flow.control);
      raise(callee.flow.exits, flow.exits);
      if (callee.exposes_object && object < i) grew_ |= pointers_.expose(object, i - 1);
      if (callee.open == callee.close) continue;
      auto parameters = bodies_.arguments(callee.open);
      bool pack = has_pack(callee.open) || has_pack(open);
      for (size_t k = 0; k < parameters.size(); ++k) {
        for (size_t n = 0; n < given.size(); ++n) {
          if (pack || n == k) hand(body, given[n], callee, parameters[k], highest);
        }
      }
    }
    if (known) return;
    if (!is_function(i)) raise_name(body, i, highest);  // given its value, or called as an object
    if (pointers_.hands_on()) grew_ |= pointers_.expose(open + 1, outline_.partner[open]);
  }

  void hand(Body& body, const Argument& given, Body& callee, const Argument& parameter, int to) {
    size_t name = bodies_.name(parameter);
    if (name != Outline::none) raise_name(callee, name, level(body, given.begin, given.end));
    if (!bodies_.is_output(parameter)) return;
    store(body, given.begin, given.end, to);
    bool exposed = name != Outline::none &&
                   bodies_.all[callee.names].exposed.count(bodies_.key(name));
    if (exposed) grew_ |= pointers_.expose(given.begin, given.end);
  }

  // Which arguments it stands for, or is given to, is open.
  bool has_pack(size_t open) const {
    for (size_t i = open + 1; i < outline_.partner[open]; ++i) {
      if (tokens_[i].is("...")) return true;
    }
    return false;
  }

  // Whether the word before a bracket is a type, a keyword or a function that the text does not
  // have, or belongs to an object or a type; all other words are variables.
  bool is_function(size_t i) const {
    auto& text = tokens_[i].text;
    if (i > 0 && one_of(tokens_[i - 1], {".", "->", "::"})) return true;
    if (bodies_.key(i) != text) return false;
    return is_number_type(tokens_[i]) || types_.count(text) || outline_.templates.count(text) ||
           one_of(tokens_[i], {"return", "sizeof", "alignof", "alignas", "decltype", "noexcept",
                               "requires", "constexpr", "static_assert", "_Pragma"}) ||
           library_().count(text);
  }

  Tokens& tokens_;
  const Outline& outline_;
  const Library& library_;
  Bodies bodies_;
  Pointers pointers_;
  std::set<std::string> names_, methods_, types_;
  std::set<size_t> declared_, braces_, captures_;  // brackets of functions
  std::vector<bool> followed_;                     // calls
  std::map<size_t, Flow> sites_;
  std::map<std::string, int> own_;  // of functions, where it is not 0
  int stored_ = 0;  // through any pointer
  bool grew_ = false;
  bool lost_ = false;  // something is not understood, and what it does is anything
};

}  // namespace

void mark_flow(Unit& unit, const Library& library) {
  Analysis analysis(unit, library);
  analysis.run();
  analysis.mark();
}

}  // namespace zmlx
