// The integer expression of an #if.
#include <algorithm>
#include <cctype>
#include <map>
#include <utility>

#include "tokens.h"

namespace zmlx {
namespace {

// What an #if computes with: intmax_t or uintmax_t.
struct Integer {
  uint64_t bits = 0;
  bool is_unsigned = false;

  Integer(int64_t value) : bits((uint64_t)value) {}
  Integer(uint64_t bits, bool is_unsigned) : bits(bits), is_unsigned(is_unsigned) {}
  explicit operator bool() const { return bits != 0; }
  bool negative() const { return !is_unsigned && (int64_t)bits < 0; }
  Integer operator-() const { return {0 - bits, is_unsigned}; }
};

// What an integer literal says; false if it is none.
bool read_integer(std::string text, Integer* value) {
  for (char& c : text) c = (char)std::tolower((unsigned char)c);
  uint64_t bits;
  size_t at;
  if (!read_digits(text, &bits, &at)) return false;
  static const std::set<std::string> suffixes = {"",   "u",   "l",   "ll", "ul",
                                                 "lu", "ull", "llu", "z",  "uz"};
  std::string suffix = text.substr(at);
  *value = {bits, bits >> 63 || suffix.find('u') != std::string::npos};
  bool none = at == 2 && (text[1] == 'x' || text[1] == 'b');  // a prefix alone
  return at > 0 && !none && suffixes.count(suffix);
}

// What a character literal says: one char, which has a sign, or several, an int.
bool read_character(const std::string& text, Integer* value) {
  static const std::map<char, char> escapes = {{'n', '\n'}, {'t', '\t'}, {'r', '\r'}, {'a', '\a'},
                                               {'b', '\b'}, {'f', '\f'}, {'v', '\v'}};
  size_t end = text.size() - 1, count = 0;
  if (text[0] != '\'' || end < 2 || text[end] != '\'') return false;
  uint32_t all = 0;
  for (size_t i = 1; i < end; ++count) {
    unsigned c = (unsigned char)text[i++];
    if (c == '\\') {
      bool hexadecimal = text[i] == 'x';
      size_t first = i + hexadecimal, at = first, most = hexadecimal ? end : first + 3;
      for (c = 0; at < std::min(most, end) && digit_of(text[at]) < (hexadecimal ? 16 : 8); ++at) {
        c = c * (hexadecimal ? 16 : 8) + digit_of(text[at]);
      }
      if (at == first) {
        auto escape = escapes.find(text[i]);
        c = (unsigned char)(escape == escapes.end() ? text[i] : escape->second);
        at = i + 1;
      }
      i = at;
    }
    all = all << 8 | (c & 255);
  }
  *value = count == 1 ? (int8_t)all : (int32_t)all;
  return true;
}

class Condition {
 public:
  Condition(Tokens tokens, const Place& place, int line)
      : tokens_(std::move(tokens)), place_(place), line_(line) {
    read_marks(tokens_);
  }

  bool value() {
    Integer result = ternary();
    if (at_ != tokens_.size()) bad();
    return bool(result);
  }

 private:
  [[noreturn]] void bad() { place_.refuse(line_, "this #if condition is not an integer constant"); }
  bool take(const char* mark) {
    if (at_ < tokens_.size() && tokens_[at_].is(mark)) return ++at_, true;
    return false;
  }

  // An operand that counts only if `counts`: one that does not may divide by zero.
  template <typename Parse>
  Integer operand(bool counts, Parse parse) {
    bool outer = std::exchange(counts_, counts_ && counts);
    Integer result = parse();
    counts_ = outer;
    return result;
  }

  Integer ternary() {
    Integer condition = binary(0);
    if (!take("?")) return condition;
    Integer yes = operand(bool(condition), [&] { return ternary(); });
    if (!take(":")) bad();
    Integer no = operand(!condition, [&] { return ternary(); });
    return {condition ? yes.bits : no.bits, yes.is_unsigned || no.is_unsigned};
  }

  static int precedence(const std::string& mark) {
    static const std::map<std::string, int> levels = {
        {"||", 1}, {"&&", 2}, {"|", 3}, {"^", 4}, {"&", 5},  {"==", 6}, {"!=", 6}, {"<", 7},
        {">", 7},  {"<=", 7}, {">=", 7}, {"<<", 8}, {"+", 9}, {"-", 9},  {"*", 10}, {"/", 10},
        {"%", 10}};
    auto found = levels.find(mark);
    return found == levels.end() ? 0 : found->second;
  }

  Integer binary(int least) {
    Integer left = unary();
    while (at_ < tokens_.size()) {
      std::string mark = tokens_[at_].text;
      bool shift = mark == ">" && at_ + 1 < tokens_.size() && tokens_[at_ + 1].is(">");
      int level = shift ? 8 : precedence(mark);
      if (level == 0 || level <= least) break;
      at_ += shift ? 2 : 1;
      bool known = mark == "||" ? bool(left) : mark == "&&" && !left;
      Integer right = operand(!known, [&] { return binary(level); });
      left = apply(shift ? ">>" : mark, left, right);
    }
    return left;
  }

  Integer apply(const std::string& mark, Integer a, Integer b) {
    if (mark == "||") return a || b;
    if (mark == "&&") return a && b;
    uint64_t by = std::min<uint64_t>(b.bits, 63);
    if (mark == "<<") return {a.bits << by, a.is_unsigned};
    if (mark == ">>" && a.is_unsigned) return {a.bits >> by, true};
    if (mark == ">>") return (int64_t)a.bits >> by;
    bool is_unsigned = a.is_unsigned || b.is_unsigned;
    a.is_unsigned = b.is_unsigned = is_unsigned;
    if (mark == "==") return a.bits == b.bits;
    if (mark == "!=") return a.bits != b.bits;
    // The order of the bits, and that of signs before it.
    bool less = a.negative() != b.negative() ? a.negative() : a.bits < b.bits;
    if (mark == "<") return less;
    if (mark == ">=") return !less;
    if (mark == ">") return !less && a.bits != b.bits;
    if (mark == "<=") return less || a.bits == b.bits;
    if (mark == "|") return {a.bits | b.bits, is_unsigned};
    if (mark == "^") return {a.bits ^ b.bits, is_unsigned};
    if (mark == "&") return {a.bits & b.bits, is_unsigned};
    if (mark == "+") return {a.bits + b.bits, is_unsigned};
    if (mark == "-") return {a.bits - b.bits, is_unsigned};
    if (mark == "*") return {a.bits * b.bits, is_unsigned};
    if (!b && counts_) bad();
    if (!b) return b;
    bool minus = a.negative(), other = b.negative();
    uint64_t over = minus ? 0 - a.bits : a.bits, under = other ? 0 - b.bits : b.bits;
    Integer result(mark == "/" ? over / under : over % under, is_unsigned);
    return (mark == "/" ? minus != other : minus) ? -result : result;
  }

  Integer unary() {
    if (take("!")) return !unary();
    if (take("-")) return -unary();
    if (take("+")) return unary();
    if (take("~")) {
      Integer inner = unary();
      return {~inner.bits, inner.is_unsigned};
    }
    if (take("(")) {
      Integer inner = ternary();
      if (!take(")")) bad();
      return inner;
    }
    if (at_ == tokens_.size()) bad();
    auto& token = tokens_[at_++];
    Integer result = 0;
    if (token.kind == Token::number && read_integer(token.text, &result)) return result;
    if (token.kind == Token::literal && read_character(token.text, &result)) return result;
    if (token.kind == Token::word) return token.is("true");
    bad();
  }

  Tokens tokens_;
  const Place& place_;
  int line_;
  size_t at_ = 0;
  bool counts_ = true;
};

}  // namespace

bool condition_holds(Tokens expression, const Place& place, int line) {
  return Condition(std::move(expression), place, line).value();
}

}  // namespace zmlx
