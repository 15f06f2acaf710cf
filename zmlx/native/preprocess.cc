// The user's directives and macros, run before every other pass: what a macro holds (a barrier, a
// threadgroup array, a qualifier, a loop) must be seen by the passes as if it stood in the text.
#include <algorithm>
#include <map>
#include <utility>

#include "tokens.h"

namespace zmlx {
namespace {

struct Macro {
  bool function = false;
  bool variadic = false;  // the last parameter takes what remains
  std::vector<std::string> parameters;
  Tokens body;
};

using Macros = std::map<std::string, Macro>;

// Those of tensors came with Metal 4.
bool is_metal_header(const std::string& name) {
  if (name == "<simd/simd.h>") return true;
  return name.rfind("<metal_", 0) == 0 && name.find("tensor") == std::string::npos;
}

// What a compiler is asked about itself. Of attributes, built-in functions and features the answer
// is no: the passes and three compilers have none in common that Metal does not promise.
bool is_question(const Token& token) {
  return token.is_any({"__has_include", "__has_attribute", "__has_cpp_attribute", "__has_builtin",
                       "__has_feature", "__has_extension", "__has_warning"});
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

class Preprocessor {
 public:
  explicit Preprocessor(const Place& place) : place_(place) {}

  void take_prelude(const Tokens& defines) {
    run(defines);
    prelude_.swap(macros_);
  }

  Tokens run(const Tokens& tokens) {
    for (auto& token : tokens) {
      bool open = token.kind == Token::mark && token.text.compare(0, 2, "/*") == 0;
      if (open) place_.refuse(token.line, "this comment has no end, `*/`");
    }
    for (size_t i = 0; i < tokens.size();) {
      size_t end = i + 1;
      while (end < tokens.size() && !tokens[end].first) ++end;
      Tokens line(tokens.begin() + i, tokens.begin() + end);
      if (line[0].is("#")) {
        flush();
        directive(line);
      } else if (active()) {
        block_.insert(block_.end(), line.begin(), line.end());
      }
      i = end;
    }
    flush();
    if (!branches_.empty()) place_.refuse(branches_.back().line, "this #if has no #endif");
    read_marks(out_);
    return std::move(out_);
  }

 private:
  struct Branch {
    bool now, taken, outer;
    int line;
  };

  bool active() const { return branches_.empty() || branches_.back().now; }

  void flush() {
    Tokens expanded = expand(std::move(block_));
    out_.insert(out_.end(), expanded.begin(), expanded.end());
    block_.clear();
  }

  bool known(const std::string& name) const {
    Token token;
    token.text = name;
    return macros_.count(name) || prelude_.count(name) || is_question(token);
  }

  void directive(const Tokens& line) {
    std::string name = line.size() > 1 ? line[1].text : "";
    Tokens rest(line.begin() + std::min<size_t>(2, line.size()), line.end());
    if (conditional(name, rest, line[0].line) || !active()) return;
    if (name == "define") return define(rest, line[0].line);
    if (name == "undef") {
      if (!rest.empty()) macros_.erase(rest[0].text);
    } else if (name == "include" || name == "import") {
      include(rest, line[0].line);
    } else if (name == "error") {
      std::string text;
      for (auto& token : rest) text += " " + token.text;
      place_.refuse(line[0].line, "#error" + text);
    } else if (name == "pragma" && rest.size() > 3 && rest[0].is("pack") && !rest[2].is("pop")) {
      place_.refuse(line[0].line, "#pragma pack is not supported; write __attribute__((packed)) "
                                  "behind `struct`");
    } else if (name != "pragma" && name != "warning" && !name.empty()) {
      place_.refuse(line[0].line, "the directive #" + name + " is not supported; remove it");
    }
  }

  // Metal's own headers are the prelude; MLX compiles kernels without an include path, so no other
  // header can be meant.
  void include(const Tokens& rest, int line) {
    std::string header;
    for (auto& token : rest) header += token.text;
    if (is_metal_header(header)) return;
    bool of_system = header.rfind("<metal_", 0) == 0 || header.rfind("<Metal", 0) == 0;
    place_.refuse(line, "#include " + header + " is not supported: " +
                            (of_system ? "zmlx has no such part of Metal's library; leave it out "
                                         "if nothing of it is used"
                                       : "mx.fast.metal_kernel has no include path; paste the "
                                         "text you need into the header argument"));
  }

  bool conditional(const std::string& name, const Tokens& rest, int line) {
    bool opens = name == "if" || name == "ifdef" || name == "ifndef";
    if (opens) {
      bool outer = active();
      bool now = outer;
      if (now && name == "if") now = evaluate(rest, line);
      if (now && name != "if") now = !rest.empty() && known(rest[0].text) == (name == "ifdef");
      branches_.push_back({now, now, outer, line});
      return true;
    }
    if (name == "elifdef" || name == "elifndef") {
      place_.refuse(line, "#" + name + " is not supported: write #elif defined(…)");
    }
    if (name != "elif" && name != "else" && name != "endif") return false;
    if (branches_.empty()) place_.refuse(line, "#" + name + " without #if");
    auto& branch = branches_.back();
    if (name == "endif") {
      branches_.pop_back();
    } else {
      branch.now = branch.outer && !branch.taken && (name == "else" || evaluate(rest, line));
      branch.taken |= branch.now;
    }
    return true;
  }

  bool evaluate(const Tokens& condition, int line) {
    keeps_questions_ = true;
    Tokens tokens = expand(condition), resolved;
    keeps_questions_ = false;
    auto answer = [&](bool yes) {
      Token number;
      number.kind = Token::number;
      number.text = yes ? "1" : "0";
      resolved.push_back(number);
    };
    for (size_t i = 0; i < tokens.size(); ++i) {
      bool bracket = i + 1 < tokens.size() && tokens[i + 1].is("(");
      if (tokens[i].is("defined")) {
        size_t name = i + 1 + bracket;
        if (name >= tokens.size()) place_.refuse(line, "defined needs a name");
        answer(known(tokens[name].text));
        i = name + bracket;
      } else if (bracket && is_question(tokens[i])) {
        std::string what;
        size_t end = i + 2;
        for (; end < tokens.size() && !tokens[end].is(")"); ++end) what += tokens[end].text;
        answer(tokens[i].is("__has_include") && is_metal_header(what));
        i = end;
      } else {
        resolved.push_back(tokens[i]);
      }
    }
    macros_.swap(prelude_);
    Tokens expanded = expand(resolved);
    macros_.swap(prelude_);
    return condition_holds(std::move(expanded), place_, line);
  }

  void define(const Tokens& rest, int line) {
    if (rest.empty() || rest[0].kind != Token::word) {
      place_.refuse(line, "#define needs a name");
    }
    Macro macro;
    size_t at = 1;
    macro.function = rest.size() > 1 && rest[1].is("(") && rest[1].column == 0;
    if (macro.function) {
      for (at = 2; at < rest.size() && !rest[at].is(")"); ++at) {
        if (rest[at].is("...")) {
          macro.variadic = true;
          // `rest...` has a name of its own, in GNU C and clang.
          if (rest[at - 1].kind != Token::word) macro.parameters.push_back("__VA_ARGS__");
        } else if (rest[at].kind == Token::word) {
          macro.parameters.push_back(rest[at].text);
        }
      }
      ++at;
    }
    if (at < rest.size()) macro.body.assign(rest.begin() + at, rest.end());
    macros_[rest[0].text] = std::move(macro);
  }

  // Rescans what it produces; `hidden` stops a macro from expanding inside its own expansion.
  Tokens expand(Tokens in) {
    std::reverse(in.begin(), in.end());
    Tokens out;
    while (!in.empty()) {
      Token token = std::move(in.back());
      in.pop_back();
      auto found = token.kind == Token::word ? macros_.find(token.text) : macros_.end();
      if (found == macros_.end() || contains(token.hidden, token.text)) {
        bool asks = keeps_questions_ && (token.is("defined") || is_question(token));
        out.push_back(std::move(token));
        if (asks) keep_operand(&in, &out);
        continue;
      }
      const Macro& macro = found->second;
      std::vector<Tokens> arguments;
      if (macro.function && !collect(in, macro, token, &arguments)) {
        out.push_back(std::move(token));
        continue;
      }
      insert(substitute(macro, arguments), token, &in);
    }
    return out;
  }

  // `name` or `(name)`, as it is.
  static void keep_operand(Tokens* in, Tokens* out) {
    bool bracket = !in->empty() && in->back().is("(");
    while (!in->empty()) {
      out->push_back(std::move(in->back()));
      in->pop_back();
      if (!bracket || out->back().is(")")) break;
    }
  }

  // Puts a macro's expansion in front of what is still to be scanned.
  static void insert(Tokens body, const Token& use, Tokens* in) {
    if (!in->empty() && in->back().column == 0) in->back().column = 1;
    bool leads = true;
    for (auto& token : body) {
      token.line = use.line;
      token.first = leads && use.first;
      if (leads) token.column = use.first ? use.column : std::max(use.column, 1);
      token.hidden.insert(token.hidden.end(), use.hidden.begin(), use.hidden.end());
      token.hidden.push_back(use.text);
      leads = false;
    }
    if (body.empty() && use.first && !in->empty() && !in->back().first) {
      in->back().first = true;
      in->back().column = use.column;
    }
    in->insert(in->end(), body.rbegin(), body.rend());
  }

  // Takes "( … )" off the input; false when no bracket follows, and the name is just a name.
  bool collect(Tokens& in, const Macro& macro, const Token& use, std::vector<Tokens>* arguments) {
    if (in.empty() || !in.back().is("(")) return false;
    in.pop_back();
    arguments->emplace_back();
    int depth = 0;
    while (true) {
      if (in.empty()) place_.refuse(use.line, "the macro " + use.text + " lacks a closing bracket");
      Token token = std::move(in.back());
      in.pop_back();
      if (token.is(")") && depth == 0) break;
      depth += token.is("(") - token.is(")");
      bool rest = macro.variadic && arguments->size() >= macro.parameters.size();
      if (token.is(",") && depth == 0 && !rest) {
        arguments->emplace_back();
      } else {
        if (token.first) token.column = std::max(token.column, 1);  // a line's end is a blank
        token.first = false;
        arguments->back().push_back(std::move(token));
      }
    }
    if (macro.parameters.empty() && arguments->size() == 1 && arguments->front().empty()) {
      arguments->clear();
    }
    if (macro.variadic && arguments->size() + 1 == macro.parameters.size()) {
      arguments->emplace_back();
    }
    if (arguments->size() != macro.parameters.size()) {
      place_.refuse(use.line, "the macro " + use.text + " takes " +
                                  std::to_string(macro.parameters.size()) + " arguments but got " +
                                  std::to_string(arguments->size()));
    }
    return true;
  }

  // The body with what `__VA_OPT__(…)` stands for: its content, or nothing if no argument remains.
  Tokens with_options(const Macro& macro, const std::vector<Tokens>& arguments) {
    Tokens body;
    for (size_t i = 0; i < macro.body.size(); ++i) {
      bool option = macro.variadic && macro.body[i].is("__VA_OPT__") &&
                    i + 1 < macro.body.size() && macro.body[i + 1].is("(");
      if (!option) {
        body.push_back(macro.body[i]);
        continue;
      }
      bool given = !expand(arguments.back()).empty();
      body.push_back(nothing(macro.body[i]));
      int depth = 0;
      for (++i; i < macro.body.size(); ++i) {
        bool outer = depth == 0;
        depth += macro.body[i].is("(") - macro.body[i].is(")");
        if (depth == 0) break;
        if (!given || outer) continue;
        if (body.back().text.empty()) body.pop_back();
        body.push_back(macro.body[i]);
      }
    }
    return body;
  }

  // What an empty argument leaves beside `##`, where the token before it would be joined otherwise.
  static Token nothing(Token token) {
    token.kind = Token::mark;
    token.text.clear();
    return token;
  }

  Tokens substitute(Macro macro, const std::vector<Tokens>& arguments) {
    macro.body = with_options(macro, arguments);
    auto parameter = [&](const Token& token) -> const Tokens* {
      auto& names = macro.parameters;
      auto found = std::find(names.begin(), names.end(), token.text);
      return found == names.end() ? nullptr : &arguments[found - names.begin()];
    };
    Tokens out;
    bool apart = false;  // what follows is no part of the token before it
    for (size_t i = 0; i < macro.body.size(); ++i) {
      Token token = macro.body[i];
      if (std::exchange(apart, false)) token.column = std::max(token.column, 1);
      bool pastes = i + 1 < macro.body.size() && macro.body[i + 1].is("##");
      if (token.is("#") && macro.function && i + 1 < macro.body.size()) {
        if (auto* argument = parameter(macro.body[i + 1])) {
          out.push_back(quoted(*argument));
          ++i;
          continue;
        }
      }
      if (token.is("##") && i + 1 < macro.body.size()) {
        ++i;
        bool remaining = macro.variadic && macro.body[i].is(macro.parameters.back().c_str());
        paste(&out, macro.body[i], parameter(macro.body[i]), remaining);
        continue;
      }
      const Tokens* argument = parameter(token);
      if (!argument) {
        out.push_back(token);
        continue;
      }
      Tokens value = pastes ? *argument : expand(*argument);
      if (value.empty() && pastes) value.push_back(nothing(token));
      // `-x` of `-k` is no `--k`, and `x+1` of `0xE` no number.
      if (!value.empty()) value[0].column = std::max({value[0].column, token.column, 1});
      apart = true;
      out.insert(out.end(), value.begin(), value.end());
    }
    auto is_nothing = [](const Token& token) { return token.text.empty(); };
    out.erase(std::remove_if(out.begin(), out.end(), is_nothing), out.end());
    return out;
  }

  static Token quoted(const Tokens& argument) {
    Token token;
    token.kind = Token::literal;
    token.column = 1;
    for (auto& part : argument) {
      if (part.column && !token.text.empty()) token.text += ' ';
      for (char c : part.text) {
        if (part.kind == Token::literal && (c == '"' || c == '\\')) token.text += '\\';
        token.text += c;
      }
    }
    token.text = '"' + token.text + '"';
    return token;
  }

  // `left ## right`; a comma before empty variadic arguments goes away, as in GNU C and clang.
  static void paste(Tokens* out, const Token& right, const Tokens* argument, bool remaining) {
    Tokens value = argument ? *argument : Tokens{right};
    if (!argument && right.text.empty()) value.clear();
    if (!out->empty() && out->back().is(",") && remaining) {
      if (value.empty()) out->pop_back();
      out->insert(out->end(), value.begin(), value.end());
      return;
    }
    if (value.empty()) return;
    if (out->empty()) {
      *out = value;
      return;
    }
    Token& left = out->back();
    if (left.text.empty()) {
      value[0].column = std::max(value[0].column, left.column);
      out->pop_back();
      out->insert(out->end(), value.begin(), value.end());
      return;
    }
    Tokens joined = tokenize(left.text + value[0].text);
    left.text = joined.empty() ? "" : joined[0].text;
    left.kind = joined.empty() ? left.kind : joined[0].kind;
    out->insert(out->end(), joined.begin() + std::min<size_t>(1, joined.size()), joined.end());
    out->insert(out->end(), value.begin() + 1, value.end());
  }

  const Place& place_;
  Macros macros_, prelude_;
  bool keeps_questions_ = false;  // in a condition, macros in them stay
  std::vector<Branch> branches_;
  Tokens block_, out_;
};

}  // namespace

Tokens preprocess(const Tokens& tokens, const Tokens& prelude_defines, const Place& place) {
  Preprocessor preprocessor(place);
  preprocessor.take_prelude(prelude_defines);
  return preprocessor.run(tokens);
}

}  // namespace zmlx
