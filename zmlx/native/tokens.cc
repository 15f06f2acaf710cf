#include "tokens.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace zmlx {
namespace {

bool digit(char c) { return c >= '0' && c <= '9'; }
// What is not ASCII is a letter: π.
bool starts_word(char c) {
  return std::isalpha((unsigned char)c) || c == '_' || c == '$' || (unsigned char)c > 127;
}
bool in_word(char c) { return starts_word(c) || digit(c); }

// Marks that C++ also spells as words.
constexpr std::pair<std::string_view, std::string_view> spelled_marks[] = {
    {"and", "&&"},    {"or", "||"},    {"not", "!"},    {"xor", "^"},
    {"bitand", "&"},  {"bitor", "|"},  {"compl", "~"},  {"not_eq", "!="},
    {"and_eq", "&="}, {"or_eq", "|="}, {"xor_eq", "^="}};

// Longest first. `>>` is left out: it closes two template lists as often as it shifts, and two
// adjacent tokens print as it does.
constexpr std::string_view marks[] = {">>=", "<<=", "...", "->*", "<=>", "->", "::", "<<", "<=",
                                      ">=",  "==",  "!=",  "&&",  "||",  "++", "--", "+=", "-=",
                                      "*=",  "/=",  "%=",  "&=",  "|=",  "^=", "##", ".*"};

class Lexer {
 public:
  explicit Lexer(const std::string& text) : text_(text) {}

  Tokens run() {
    while (skip_blanks()) {
      size_t begin = at_;
      Token::Kind kind = lex();
      Token token;
      token.kind = kind;
      token.first = fresh_line_;
      token.column = column_;
      token.line = line_;
      token.text = text_.substr(begin, at_ - begin);
      fresh_line_ = false;
      line_ += (int)std::count(token.text.begin(), token.text.end(), '\n');
      tokens_.push_back(std::move(token));
    }
    return std::move(tokens_);
  }

 private:
  char peek(size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }

  void newline() {
    ++line_;
    fresh_line_ = true;
    column_ = 0;
  }

  // Moves to the next token; false at the end of the text.
  bool skip_blanks() {
    column_ = 0;
    while (at_ < text_.size()) {
      char c = peek();
      if (c == '\n') {
        ++at_;
        newline();
      } else if (size_t length = splice()) {
        at_ += length;
        ++line_;
      } else if (std::isspace((unsigned char)c)) {
        ++at_;
        ++column_;
      } else if (c == '/' && peek(1) == '/') {
        skip_line_comment();
      } else if (c == '/' && peek(1) == '*' && text_.find("*/", at_ + 2) != std::string::npos) {
        skip_block_comment();
      } else {
        return true;
      }
    }
    return false;
  }

  // The backslash at the end of a line, and what is behind it on the line; or 0.
  size_t splice() const {
    if (peek() != '\\') return 0;
    size_t end = text_.find_first_not_of(" \t\v\f\r", at_ + 1);
    return end != std::string::npos && text_[end] == '\n' ? end + 1 - at_ : 0;
  }

  // Lines are spliced before comments are seen: one that ends in a backslash goes on.
  void skip_line_comment() {
    while (at_ < text_.size() && peek() != '\n') {
      size_t length = splice();
      at_ += length ? length : 1;
      line_ += length > 0;
    }
  }

  void skip_block_comment() {
    size_t end = text_.find("*/", at_ + 2) + 2;
    for (; at_ < end; ++at_) line_ += text_[at_] == '\n';
    ++column_;
  }

  Token::Kind lex() {
    char c = peek();
    if (starts_word(c)) {
      while (in_word(peek())) ++at_;
      return Token::word;
    }
    if (digit(c) || (c == '.' && digit(peek(1)))) {
      lex_number();
      return Token::number;
    }
    if (c == '"' || c == '\'') {
      lex_quoted(c);
      return Token::literal;
    }
    if (c == '/' && peek(1) == '*') {  // not closed: the rest of the text, for a pass to refuse
      at_ = text_.size();
      return Token::mark;
    }
    for (auto mark : marks) {
      if (text_.compare(at_, mark.size(), mark) == 0) {
        at_ += mark.size();
        return Token::mark;
      }
    }
    ++at_;
    return Token::mark;
  }

  void lex_number() {
    bool hexadecimal = peek() == '0' && (peek(1) == 'x' || peek(1) == 'X');
    while (in_word(peek()) || peek() == '.' || (peek() == '\'' && in_word(peek(1)))) {
      char c = peek();
      bool exponent = hexadecimal ? (c == 'p' || c == 'P') : (c == 'e' || c == 'E');
      ++at_;
      if (exponent && (peek() == '+' || peek() == '-')) ++at_;
    }
  }

  // To the end of the line at most: an apostrophe may stand in text that an #if leaves out.
  void lex_quoted(char quote) {
    for (++at_; at_ < text_.size() && peek() != quote && peek() != '\n'; ++at_) {
      if (peek() == '\\') ++at_;
    }
    if (peek() == quote) ++at_;
  }

  const std::string& text_;
  Tokens tokens_;
  size_t at_ = 0;
  int line_ = 1;
  int column_ = 0;
  bool fresh_line_ = true;
};

}  // namespace

Tokens tokenize(const std::string& text) { return Lexer(text).run(); }

void read_marks(Tokens& tokens) {
  for (auto& token : tokens) {
    if (token.kind != Token::word) continue;
    for (auto& [word, mark] : spelled_marks) {
      if (token.text != word) continue;
      token.kind = Token::mark;
      token.text = mark;
      break;
    }
  }
}

namespace {

class Printer {
 public:
  Printed run(const Tokens& tokens) {
    for (auto& token : tokens) {
      breaks_ |= token.first;
      blank_ |= token.column > 0;
      if (token.removed) continue;
      if (!token.dropped || !token.before.empty() || !token.after.empty()) add(token);
    }
    put("\n", line_);
    return std::move(out_);
  }

 private:
  void add(const Token& token) {
    bool starts = !out_.text.empty() && out_.text.back() != '\n';
    if (starts && (breaks_ || token.site)) {
      put("\n" + std::string(token.first ? token.column : 4, ' '), token.line);
    } else if (blank_) {
      put(" ", token.line);
    }
    breaks_ = blank_ = false;
    put(token.before, token.line);
    if (token.site) out_.sites.emplace_back((int)out_.lines.size(), token.line);
    if (!token.dropped) put(token.text, token.line);
    put(token.after, token.line);
  }

  void put(const std::string& text, int line) {
    for (char c : text) {
      if (c == '\n') out_.lines.push_back(line_);
    }
    out_.text += text;
    if (!text.empty()) line_ = line;
  }

  Printed out_;
  int line_ = 0;
  bool breaks_ = false, blank_ = false;
};

}  // namespace

Printed print(const Tokens& tokens) { return Printer().run(tokens); }

std::string Place::line(int metal_line) const {
  int in_source = metal_line - body_first_line + 1;
  if (source_lines >= 0 && in_source > source_lines) return "the end of the source";
  if (in_source > 0) return "line " + std::to_string(in_source) + " of the source";
  if (header_lines >= 0 && metal_line > header_lines) return "the kernel's signature";
  return "line " + std::to_string(metal_line) + " of the header";
}

unsigned digit_of(char c) {
  if (std::isdigit((unsigned char)c)) return c - '0';
  return std::isxdigit((unsigned char)c) ? std::tolower((unsigned char)c) - 'a' + 10 : 99;
}

bool read_digits(const std::string& literal, uint64_t* value, size_t* end) {
  char mark = literal.size() > 1 && literal[0] == '0' ? (char)std::tolower(literal[1]) : ' ';
  unsigned base = mark == 'x' ? 16 : mark == 'b' ? 2 : literal[0] == '0' ? 8 : 10;
  *value = 0;
  for (*end = mark == 'x' || mark == 'b' ? 2 : 0; *end < literal.size(); ++*end) {
    if (literal[*end] == '\'') continue;
    unsigned digit = digit_of(literal[*end]);
    if (digit >= base) break;
    if (*value > (~uint64_t(0) - digit) / base) return false;
    *value = *value * base + digit;
  }
  return true;
}

std::set<std::string> identifiers(const std::string& text) {
  std::set<std::string> names, values, declared;
  Tokens tokens = tokenize(text);
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i].kind != Token::word) continue;
    names.insert(tokens[i].text);
    bool called = i + 1 < tokens.size() && tokens[i + 1].is("(");
    if (called || (i > 0 && tokens[i - 1].is("::"))) names.insert(tokens[i].text + "(");
    bool value = i > 0 && tokens[i - 1].is_any({"=", "(", "?", ":", "<", "return"});
    bool member = i > 0 && tokens[i - 1].is_any({".", "->"});
    if (!called && !member) (value ? values : declared).insert(tokens[i].text);
  }
  for (auto& name : values) {
    if (!declared.count(name)) names.insert(name + "(");
  }
  return names;
}

void Place::refuse(int metal_line, const std::string& what) const {
  throw std::runtime_error("[kernel " + kernel + "] " + line(metal_line) + ": " + what);
}

}  // namespace zmlx
