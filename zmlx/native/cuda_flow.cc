#include "cuda_flow.h"

#include <algorithm>

#include "cuda_bodies.h"

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
  explicit Analysis(Unit& unit) : tokens_(unit.tokens), outline_(unit.outline), bodies_(unit) {}

  void run() {
    // Levels only rise, and a name or a call has three, so this ends.
    do {
      grew_ = false;
      for (auto& body : bodies_.all) walk_body(body);
    } while (grew_);
  }

  void mark() const {
    std::set<size_t> declared;
    // The text's own overloads take it too.
    for (auto& function : outline_.functions) {
      if (!is_warp_operation(function.name) || function.lambda) continue;
      declared.insert(function.open);
      bool alone = function.close == function.open + 1;
      tokens_[function.open].after += std::string("zk_lanes") + (alone ? "" : ", ");
    }
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (tokens_[i].kind != Token::word || !is_warp_operation(tokens_[i].text)) continue;
      size_t open = outline_.call_at(i);
      if (open == Outline::none || declared.count(open)) continue;
      auto known = sites_.find(i);
      // Outside of every body, as in a list of initialisers.
      Flow flow = known == sites_.end() ? Flow{2, 2} : known->second;
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
    auto& levels = bodies_.all[body.names].levels;
    auto found = levels.find(bodies_.key(i));
    if (found == levels.end()) return body.method && outline_.fields.count(tokens_[i].text) ? 2 : 0;
    // Of a position, y and z are the same along a row of threads.
    bool coordinate = found->second == 2 && body.kernel && i + 2 < tokens_.size() &&
                      tokens_[i + 1].is(".") && is_position(tokens_[i].text);
    if (coordinate && tokens_[i + 2].text.find_first_not_of("yz") == std::string::npos) return 1;
    return found->second;
  }
  bool is_position(const std::string& name) const {
    return name == "thread_position_in_grid" || name == "thread_position_in_threadgroup";
  }

  int level(const Body& body, size_t begin, size_t end) const {
    int highest = 0;
    for (size_t i = begin; i < end; ++i) {
      auto& token = tokens_[i];
      if (token.kind != Token::word) continue;
      bool member = i > 0 && one_of(tokens_[i - 1], {".", "->"});
      size_t open = outline_.call_at(i);
      if (open != Outline::none && is_warp_operation(token.text)) {
        if (agrees(token.text)) {
          i = outline_.partner[open];
        } else {
          highest = 2;
        }
        continue;
      }
      if (token.text.compare(0, 7, "atomic_") == 0) highest = 2;
      if (!member) highest = std::max(highest, name_level(body, i));
    }
    return highest;
  }

  // ---- statements ----

  void walk_body(Body& body) {
    body.left = 0;
    Flow flow = body.flow;
    walk(body, body.begin + 1, body.end, flow);
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
    } else if (one_of(token, {"case", "default"})) {
      size_t colon = begin;
      while (colon < last && !tokens_[colon].is(":")) ++colon;
      if (colon < last) statement(body, colon + 1, last, flow);
    } else if (one_of(token, {"struct", "class", "union", "enum", "using", "typedef"})) {
      return;
    } else {
      if (token.is("return") && body.kernel) flow.exits = std::max(flow.exits, flow.control);
      if (token.is("return") && !body.kernel) body.left = std::max(body.left, flow.control);
      expression(body, begin, last, {std::max(flow.control, body.left), flow.exits});
    }
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
    if (yes + 2 <= last && tokens_[yes + 1].is("else")) statement(body, yes + 2, last, other);
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
    for (size_t i = begin; i < end; ++i) {
      auto& token = tokens_[i];
      if (one_of(token, {"?", "&&", "||"})) {
        flow.control = std::max(flow.control, level(body, begin, i));
      } else if (assigns(token)) {
        size_t stop = right_side(i, end);
        assign(body, begin, i, level(body, i + 1, stop), flow.control);
      } else if (one_of(token, {"++", "--"})) {
        step(body, begin, i, flow.control);
      } else if (token.kind == Token::word) {
        size_t open = outline_.call_at(i);
        if (open == Outline::none) {
          if (is_constructed(i, begin)) construct(body, i);
          continue;
        }
        if (is_warp_operation(token.text)) {
          Flow& site = sites_[i];
          raise(site.control, flow.control);
          raise(site.exits, flow.exits);
        }
        if (is_constructed(i, begin)) {
          construct(body, i);
        } else {
          call(body, i, open, flow);
        }
      }
    }
  }

  static bool assigns(const Token& token) {
    return one_of(token, {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="});
  }
  size_t right_side(size_t i, size_t end) const {
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

  // `T name(…)` and `T name{…}`: a word after a type.
  bool is_constructed(size_t i, size_t begin) const {
    if (i <= begin || i + 1 >= tokens_.size() || !one_of(tokens_[i + 1], {"(", "{"})) return false;
    auto& previous = tokens_[i - 1];
    bool keyword = one_of(previous, {"return", "else", "do", "case", "goto", "sizeof"});
    return (previous.kind == Token::word && !keyword) || (previous.is(">") && closes_list(i - 1));
  }
  bool closes_list(size_t i) const {
    for (size_t k = i; k-- > 0 && !one_of(tokens_[k], {";", "{", "}"});) {
      if (outline_.angle_end(k) == i) return true;
    }
    return false;
  }
  void construct(Body& body, size_t i) {
    raise_name(body, i, level(body, i + 2, outline_.partner[i + 1]));
  }

  void raise_name(Body& body, size_t name, int to) {
    if (to > 0) raise(bodies_.all[body.names].levels[bodies_.key(name)], to);
  }

  // Raises what stands left of the operator at i; in a reference's declaration also what it refers
  // to, and in `auto [a, b] = …` all of the names.
  void assign(Body& body, size_t begin, size_t i, int value, int control) {
    int to = std::max(value, control);
    size_t k = i;
    bool through = false;
    while (k > begin) {
      auto& previous = tokens_[k - 1];
      if (one_of(previous, {")", "]"})) {
        k = outline_.partner[k - 1];
        through = true;
        if (k > begin && one_of(tokens_[k - 1], {"auto", "&"})) {
          for (size_t n = k; n < outline_.partner[k]; ++n) {
            if (tokens_[n].kind == Token::word) raise_name(body, n, to);
          }
        }
        continue;
      }
      if (previous.kind == Token::word && k >= 2 && one_of(tokens_[k - 2], {".", "->"})) {
        k -= 2;
        continue;
      }
      break;
    }
    if (k == begin) {
      // `(*p) = …` or `*(p + 1) = …`: every name in the brackets.
      raise_all(body, begin, i, to);
      return;
    }
    size_t name = k - 1;
    if (tokens_[name].kind != Token::word) {
      raise_all(body, begin, i, to);
      return;
    }
    bool dereferenced = name > begin && tokens_[name - 1].is("*") &&
                        (name - 1 == begin || tokens_[name - 2].kind == Token::mark);
    if (bodies_.all[body.names].memory.count(tokens_[name].text) && (through || dereferenced)) return;
    // A variable that is declared where threads have parted is not seen by the others.
    raise_name(body, name, declares(name, begin) ? value : to);
    bool refers = name > begin && one_of(tokens_[name - 1], {"&", "*", "&&"}) && !dereferenced;
    if (refers && tokens_[i].is("=")) {
      // What it refers to changes with it, now or later.
      size_t stop = right_side(i, tokens_.size());
      int now = bodies_.all[body.names].levels[bodies_.key(name)];
      if (!bodies_.all[body.names].memory.count(tokens_[name].text)) raise_all(body, i + 1, stop, now);
    }
  }
  // Lanes that part step different numbers of times.
  void step(Body& body, size_t begin, size_t i, int control) {
    bool behind = i > begin && (tokens_[i - 1].kind == Token::word ||
                                one_of(tokens_[i - 1], {")", "]"}));
    if (behind) {
      assign(body, begin, i, 0, control);
    } else if (tokens_[i + 1].kind == Token::word) {
      raise_name(body, i + 1, control);
    } else {
      raise_all(body, i + 1, right_side(i, tokens_.size()), control);
    }
  }
  bool declares(size_t name, size_t begin) const {
    if (name <= begin) return false;
    size_t type = name - 1;
    while (type > begin && one_of(tokens_[type], {"*", "&", "&&"})) --type;
    return tokens_[type].is(">") ||
           (tokens_[type].kind == Token::word && !one_of(tokens_[type], {"return", "else", "do"}));
  }
  // Every name that may be what a store to this goes to: no index, and no factor of one.
  void raise_all(Body& body, size_t begin, size_t end, int to) {
    for (size_t i = begin; i < end; ++i) {
      if (tokens_[i].is("[") && i > begin) {
        i = outline_.partner[i];
        continue;
      }
      bool member = i > 0 && one_of(tokens_[i - 1], {".", "->"});
      bool memory = bodies_.all[body.names].memory.count(tokens_[i].text);
      if (tokens_[i].kind == Token::word && !member && !memory && !is_factor(i, begin, end)) {
        raise_name(body, i, to);
      }
    }
  }
  bool is_factor(size_t i, size_t begin, size_t end) const {
    auto multiplies = [&](size_t k) { return one_of(tokens_[k], {"*", "/", "%"}); };
    if (i + 1 < end && multiplies(i + 1)) return true;
    // Behind an operand; elsewhere a star reads what a pointer points to.
    return i >= begin + 2 && multiplies(i - 1) &&
           (tokens_[i - 2].kind != Token::mark || one_of(tokens_[i - 2], {")", "]"}));
  }

  // A call hands levels to the callee's parameters, and its flow to the callee's collectives; what
  // the callee may store to rises to the level of everything that it is given.
  void call(Body& body, size_t i, size_t open, Flow flow) {
    auto given = bodies_.arguments(open);
    int highest = flow.control;
    for (auto& argument : given) {
      highest = std::max(highest, level(body, argument.begin, argument.end));
    }
    if (i >= 2 && one_of(tokens_[i - 1], {".", "->"}) && tokens_[i - 2].kind == Token::word) {
      raise_name(body, i - 2, highest);  // a method may change its object
    }
    bool stores = one_of(tokens_[i], {"sincos", "frexp", "modf"});
    if (stores && given.size() == 2) raise_all(body, given[1].begin, given[1].end, highest);
    for (auto& callee : bodies_.all) {
      if (callee.kernel || callee.name != tokens_[i].text) continue;
      raise(callee.flow.control, flow.control);
      raise(callee.flow.exits, flow.exits);
      if (callee.open == callee.close) continue;
      auto parameters = bodies_.arguments(callee.open);
      for (size_t k = 0; k < parameters.size() && k < given.size(); ++k) {
        size_t name = bodies_.name(parameters[k]);
        if (name != Outline::none) {
          raise_name(callee, name, level(body, given[k].begin, given[k].end));
        }
        if (bodies_.is_output(parameters[k])) raise_all(body, given[k].begin, given[k].end, highest);
      }
    }
  }

  Tokens& tokens_;
  const Outline& outline_;
  Bodies bodies_;
  std::map<size_t, Flow> sites_;
  bool grew_ = false;
};

}  // namespace

void mark_flow(Unit& unit) {
  Analysis analysis(unit);
  analysis.run();
  analysis.mark();
}

}  // namespace zmlx
