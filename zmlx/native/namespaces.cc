// Functions of the text's own namespaces that are called like one of Metal's. Inside such a namespace
// a call means its own function: half, bfloat and vectors are built into Metal's compiler. Here they
// are classes of namespace metal, where C++ looks as well for what takes them, unless the function's
// name stands in brackets. sign(v)  ->  (sign)(v)
#include <algorithm>
#include <map>

#include "passes.h"

namespace zmlx {
namespace {

// The names of the namespaces around a token, outermost first; those without a name do not count.
using Path = std::vector<std::string>;

class Namespaces {
 public:
  explicit Namespaces(const Unit& unit) {
    auto& tokens = unit.tokens;
    for (size_t i = 0; i < tokens.size(); ++i) {
      Path names = tokens[i].is("{") ? names_before(tokens, i) : Path();
      if (!names.empty()) paths_[i] = names;
    }
  }

  bool any() const { return !paths_.empty(); }
  bool opens(size_t brace) const { return paths_.count(brace) > 0; }

  Path path(const Unit& unit, size_t i) const {
    Path path;
    for (size_t end = unit.outline.scope_end(i); end != Outline::none;) {
      size_t brace = unit.outline.partner[end];
      auto found = paths_.find(brace);
      if (found != paths_.end()) path.insert(path.begin(), found->second.begin(), found->second.end());
      end = brace ? unit.outline.scope_end(brace) : Outline::none;
    }
    return path;
  }

 private:
  static Path names_before(const Tokens& tokens, size_t brace) {
    size_t i = brace;
    while (i > 0 && (tokens[i - 1].kind == Token::word || tokens[i - 1].is("::")) &&
           !tokens[i - 1].is("namespace")) {
      --i;
    }
    Path names;
    bool is_namespace = i > 0 && tokens[i - 1].is("namespace");
    for (; is_namespace && i < brace; ++i) {
      bool name = tokens[i].kind == Token::word && !tokens[i].is("inline");
      if (name) names.push_back(tokens[i].text);
    }
    return names;
  }

  std::map<size_t, Path> paths_;
};

bool begins(const Path& path, const Path& with) {
  return path.size() >= with.size() && std::equal(with.begin(), with.end(), path.begin());
}

}  // namespace

void shield_names(Unit& unit, const Library& library) {
  auto& tokens = unit.tokens;
  Namespaces namespaces(unit);
  if (!namespaces.any()) return;
  std::map<std::string, std::map<Path, size_t>> own;  // and where each is first declared
  std::set<size_t> declarations;
  for (auto& function : unit.outline.functions) {
    declarations.insert(function.open);
    bool free = !function.lambda && namespaces.opens(function.scope);
    if (free && library().count(function.name)) {
      own[function.name].emplace(namespaces.path(unit, function.head), function.head);
    }
  }
  for (size_t i = 1; i < tokens.size(); ++i) {
    auto found = own.find(tokens[i].text);
    if (found == own.end() || tokens[i].kind != Token::word) continue;
    size_t open = unit.outline.call_at(i);
    bool call = open != Outline::none && !declarations.count(open) &&
                !tokens[i - 1].is_any({".", "->", "::", "operator", "template"});
    if (!call) continue;
    Path here = namespaces.path(unit, i);
    for (auto& [path, declared] : found->second) {
      if (i < declared || !begins(here, path)) continue;
      tokens[i].before += "(";
      tokens[open - 1].after = ")" + tokens[open - 1].after;
      break;
    }
  }
}

}  // namespace zmlx
