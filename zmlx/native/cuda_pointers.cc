#include "cuda_pointers.h"

namespace zmlx {

Pointers::Pointers(const Unit& unit, Bodies& bodies)
    : tokens_(unit.tokens), outline_(unit.outline), bodies_(bodies) {
  find_names();
  for (size_t i = 1; i + 1 < tokens_.size(); ++i) find_exposed(i);
}

void Pointers::find_names() {
  for (auto& body : bodies_.all) {
    bool handed_on = !body.kernel && body.flow.control == 2;
    if (!handed_on || body.open == body.close) continue;
    for (auto& parameter : bodies_.arguments(body.open)) {
      size_t name = bodies_.name(parameter);
      if (name == Outline::none || !bodies_.is_output(parameter)) continue;
      references_.insert(tokens_[name].text);
      hands_on_ |= body.name != "operator";
    }
  }
  for (size_t i = 1; i + 2 < tokens_.size(); ++i) {
    if (tokens_[i].kind != Token::word) continue;
    if (binds(i)) {
      references_.insert(tokens_[i].text);
      holds_references_ |= outline_.in_type(i);
    }
    if (!tokens_[i + 1].is("[") || tokens_[i + 2].is("[")) continue;
    indexed_.insert({bodies_.enclosing(i), bodies_.key(i)});
    if (outline_.in_type(i)) array_fields_.insert(tokens_[i].text);
  }
}

void Pointers::find_exposed(size_t i) {
  auto &token = tokens_[i], &next = tokens_[i + 1];
  if (takes_address(i)) {
    expose(i + 1, bodies_.operand_end(i + 1));
  } else if (token.is("this")) {
    if (!next.is("->")) expose(i, i + 1);
  } else if (token.is("[")) {
    // auto& [a, b] = …
    size_t end = outline_.partner[i];
    if (!one_of(tokens_[i - 1], {"&", "&&"}) || !tokens_[end + 1].is("=")) return;
    for (size_t k = i + 1; k < end; ++k) references_.insert(tokens_[k].text);
    expose(end + 2, bodies_.right_side(end + 1, tokens_.size()));
  } else if (token.is("{")) {
    if (holds_references_ && is_initialiser(i)) expose(i + 1, outline_.partner[i]);
  } else if (token.kind == Token::word) {
    size_t value = value_at(i);
    if (is_reference(i) && one_of(tokens_[value], {"(", "{"})) {
      expose(value + 1, outline_.partner[value]);
    }
    if (binds(i) && one_of(tokens_[value], {"=", ":"})) {
      expose(value + 1, bodies_.right_side(value, tokens_.size()));
    }
    // An array that is handed on is a pointer.
    if (next.is("[")) return;
    if (selects(i - 1)) {
      // Of a thread attribute it is a coordinate.
      size_t path = bodies_.path_begin(i);
      bool attribute = bodies_.all[0].levels.count(bodies_.key(path));
      if (array_fields_.count(token.text) && !attribute) expose(path, i);
    } else if (!selects(i + 1) && indexed_.count({bodies_.enclosing(i), bodies_.key(i)})) {
      expose(i, i + 1);
    }
  }
}

// `&a`, and not `b & a` or `T& a`.
bool Pointers::takes_address(size_t i) const {
  if (!tokens_[i].is("&")) return false;
  auto& previous = tokens_[i - 1];
  if (previous.is(")")) {
    return one_of(tokens_[i - 2], {"*", ">"}) || bodies_.casts(outline_.partner[i - 1]);
  }
  if (previous.kind != Token::mark) return one_of(previous, {"return", "case", "else", "do"});
  return !one_of(previous, {"[", "]", "}", ">"});
}

// Where the value of the name at i may stand, which may be one in brackets, as of an array.
size_t Pointers::value_at(size_t i) const {
  if (!tokens_[i + 1].is(")") || !binds(i)) return i + 1;
  i += 2;
  while (tokens_[i].is("[")) i = outline_.partner[i] + 1;
  return i;
}

// Whether token i is the name in `thread T& name = …`, `auto& name{…}`, `thread T (&name)[2]`,
// `[&name = …]`, `for (auto& name : …)` or a field `thread T& name;`.
bool Pointers::binds(size_t i) const {
  if (i < 2 || !one_of(tokens_[i - 1], {"&", "&&"})) return false;
  auto& next = tokens_[i + 1];
  if (one_of(tokens_[i - 2], {"[", ","})) return next.is("=");
  bool field = one_of(next, {";", ","}) && outline_.in_type(i);
  bool within = i > 2 && tokens_[i - 2].is("(") && next.is(")");
  if (!field && !within && !one_of(next, {"=", "(", "{", ":"})) return false;
  // A type has an address space, and an operand of `&` has none.
  for (size_t k = i - 2 - within; tokens_[k].kind == Token::word || tokens_[k].is(">"); --k) {
    if (one_of(tokens_[k], {"auto", "thread", "threadgroup", "device", "constant"})) return true;
    if (tokens_[k].is(">") && outline_.partner[k] != Outline::none) k = outline_.partner[k];
    if (k == 0) return false;
  }
  return false;
}

// What is no block: one without a semicolon has none but blocks in it.
bool Pointers::is_initialiser(size_t brace) const {
  for (size_t i = brace + 1; i < outline_.partner[brace]; ++i) {
    if (tokens_[i].is(";")) return false;
    if (tokens_[i].is("{")) i = outline_.partner[i];
  }
  return true;
}

bool Pointers::selects(size_t i) const { return one_of(tokens_[i], {".", "->"}); }

// A word that is no type, function or member.
bool Pointers::is_variable(size_t i) const {
  auto& next = tokens_[i + 1];
  bool type = names_number(tokens_[i]) || next.kind == Token::word || next.is("::") ||
              (one_of(next, {"*", "&"}) && one_of(tokens_[i + 2], {")", ">"})) ||
              outline_.angle_end(i + 1) != Outline::none;
  return tokens_[i].kind == Token::word && !type && !selects(i - 1) && !one_of(next, {"(", "{"});
}

bool Pointers::expose(size_t begin, size_t end) {
  bool news = false;
  for (size_t i = begin; i < end; ++i) {
    if (tokens_[i].is("[")) i = outline_.partner[i];
    if (!is_variable(i)) continue;
    Body& body = bodies_.all[bodies_.enclosing(i)];
    std::string key = bodies_.key(i);
    bool field = body.method && key == tokens_[i].text && outline_.fields.count(key);
    if (field || tokens_[i].is("this")) news |= !std::exchange(body.exposes_object, true);
    if (!body.memory.count(key)) news |= body.exposed.insert(key).second;
  }
  return news;
}

}  // namespace zmlx
