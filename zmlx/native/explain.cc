#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <sstream>

#include "rewrite.h"
#include "tokens.h"

namespace zmlx {
namespace {

// A line without the blanks around it, or what of it comes before a column.
std::string line_text(const std::string& text, int number, size_t end = std::string::npos) {
  std::istringstream stream(text);
  std::string line;
  for (int i = 0; i < number; ++i) {
    if (!std::getline(stream, line)) return {};
  }
  line = line.substr(0, end);
  size_t begin = line.find_first_not_of(" \t"), last = line.find_last_not_of(" \t\r");
  return begin == std::string::npos ? "" : line.substr(begin, last - begin + 1);
}

struct Message {
  enum Kind { error, context, inlined, note } kind;
  int line = 0, column = 0;  // of the translation unit
  std::string text;
};

// "file:line:column: error: text", the common form of g++ and clang; `context` leads from an error
// inside the prelude to the line that caused it, `inlined` to that of an error found in what was
// inlined, innermost first.
bool parse(const std::string& line, Message* message) {
  size_t at = line.rfind(" at ");
  if (line.compare(0, 17, "    inlined from ") == 0 && at != std::string::npos) {
    size_t number = line.find(':', at);
    message->kind = Message::inlined;
    message->line = number == std::string::npos ? 0 : std::atoi(line.c_str() + number + 1);
    return message->line > 0;
  }
  static const std::pair<const char*, Message::Kind> kinds[] = {
      {": error: ", Message::error},
      {": fatal error: ", Message::error},
      {":   required from", Message::context},
      {":   in 'constexpr' expansion of", Message::context},
      {": note: in instantiation of", Message::context},
      {": note: ", Message::note},
  };
  for (auto& [mark, kind] : kinds) {
    size_t found = line.find(mark);
    if (found == std::string::npos || found == 0) continue;
    size_t column = line.rfind(':', found - 1);
    size_t number = column == std::string::npos || column == 0 ? std::string::npos
                                                               : line.rfind(':', column - 1);
    if (number == std::string::npos) continue;
    message->kind = kind;
    message->line = std::atoi(line.c_str() + number + 1);
    message->column = std::atoi(line.c_str() + column + 1);
    message->text = line.substr(found + std::string(mark).size());
    return message->line > 0;
  }
  return false;
}

void replace_all(std::string* text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text->find(from, at)) != std::string::npos; at += to.size()) {
    text->replace(at, from.size(), to);
  }
}

std::string utf8(unsigned long code) {
  auto rest = [&](int shift) { return char(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x800) return {char(0xc0 | code >> 6), rest(0)};
  if (code < 0x10000) return {char(0xe0 | code >> 12), rest(6), rest(0)};
  return {char(0xf0 | code >> 18), rest(12), rest(6), rest(0)};
}

// \U000000e9, which is how g++ spells a letter where the locale is C, back as the letter.
void restore_letters(std::string* text) {
  for (size_t at = 0; (at = text->find("\\U", at)) != std::string::npos; ++at) {
    std::string digits = text->substr(at + 2, 8);
    char* end = nullptr;
    unsigned long code = std::strtoul(digits.c_str(), &end, 16);
    if (digits.size() == 8 && !*end && code >= 0x80 && code < 0x110000) {
      text->replace(at, 10, utf8(code));
    }
  }
}

// zk_swizzle<0, 1> and zk_swizzle_ref<0, 1> back as .xy
void restore_swizzles(std::string* text) {
  for (size_t at = 0; (at = text->find("zk_swizzle", at)) != std::string::npos;) {
    size_t open = text->find('<', at), close = text->find('>', at);
    if (open == std::string::npos || close == std::string::npos) return;
    std::string letters = ".";
    for (size_t i = open; i < close; ++i) {
      if ((*text)[i] >= '0' && (*text)[i] <= '3') letters += "xyzw"[(*text)[i] - '0'];
    }
    text->replace(at, close + 1 - at, letters);
  }
}

// "use of deleted function 'void min(T, U) [with T = unsigned int; U = int]'": Metal's overloads,
// none of which fits better than another.
std::string ambiguous_call(const std::string& text) {
  const std::string start = "use of deleted function 'void ", types = " [with ";
  size_t name = start.size(), with = text.find(types);
  if (text.compare(0, name, start) != 0 || with == std::string::npos) return {};
  std::string function = text.substr(name, text.find('(', name) - name);
  std::string three = "clamp max3 min3 median3";
  if (function != "min" && function != "max" && three.find(function) == std::string::npos) return {};
  std::string list;
  for (size_t at = with; (at = text.find(" = ", at)) != std::string::npos;) {
    at += 3;
    list += (list.empty() ? "" : ", ") + text.substr(at, text.find_first_of(";]", at) - at);
  }
  return "the call '" + function + "(" + list +
         ")' is ambiguous: convert its arguments to one type";
}

// Names of the prelude as the user writes them, why what has no index may be none, and a location
// that cannot be written without the compiler's expression for it, which the line shows better.
std::string plain(std::string text) {
  restore_letters(&text);
  size_t location = text.find(" of read-only location ");
  if (location != std::string::npos) {
    return text.substr(0, location) + " of read-only memory, such as an input";
  }
  auto mentions = [&](const char* part) { return text.find(part) != std::string::npos; };
  if (mentions("zk_armed<metal::half>") && mentions("zk_armed<metal::bfloat>")) {
    return "half and bfloat do not mix as operands of '?:': cast one of them";
  }
  for (const char* type : {"half", "bfloat"}) {
    std::string target = std::string(" to non-scalar type 'metal::") + type + "' requested";
    replace_all(&text, target, std::string(" to '") + type + "' must be a cast");
  }
  restore_swizzles(&text);
  for (const char* prefix : {"metal::", "zk_"}) replace_all(&text, prefix, "");
  if (std::string call = ambiguous_call(text); !call.empty()) return call;
  if (mentions("no matching function for call to 'atomic_") && !mentions("_atomic<")) {
    return text + "; outputs are atomic with atomic_outputs=True";
  }
  if (mentions("list_too_long")) {
    return "more values in braces than the vector has components";
  }
  if (mentions("[-Werror=vla]")) return "the length of an array must be a constant";
  for (const char* subscript : {"for array subscript", "subscripted value is not"}) {
    if (mentions(subscript)) {
      return text + "; an array of no dimensions comes as a value, without an index";
    }
  }
  return text;
}

class Explanation {
 public:
  Explanation(const Rewritten& rewritten, const std::string& metal_text)
      : rewritten_(rewritten), metal_text_(metal_text),
        place_{rewritten.kernel_name, rewritten.body_first_line, rewritten.header_lines,
               rewritten.source_lines} {}

  void read(const std::string& compiler_output) {
    std::istringstream stream(compiler_output);
    for (std::string line; std::getline(stream, line);) {
      Message message;
      if (parse(line, &message)) take(message);
    }
    settle();
  }

  std::string text() const { return text_; }

 private:
  // g++ prints the way to an error before it, clang behind it.
  void take(const Message& message) {
    int line = user_line(message.line);
    if (message.kind == Message::error) {
      settle();
      error_ = message.text;
      error_line_ = line ? line_of_error(message, line) : way_;
      way_ = 0;
    } else if (message.kind == Message::context) {
      if (!error_.empty() && !error_line_) error_line_ = line;
      if (line) way_ = line;
    } else if (message.kind == Message::inlined) {
      if (!way_) way_ = line;
    } else if (message.text.compare(0, 11, "the compari") == 0) {
      // "the comparison reduces to '(40000 <= 32768)'": what a static assertion found.
      size_t quoted = message.text.find('(');
      error_ += " " + message.text.substr(quoted, message.text.rfind(')') + 1 - quoted);
    }
  }

  // A missing `;` is found at what comes next, which may be on a later line.
  int line_of_error(const Message& message, int line) const {
    bool missing = message.text.compare(0, 8, "expected") == 0 &&
                   message.text.find("';' before ") != std::string::npos;
    std::string until = line_text(rewritten_.text, message.line, message.column - 1);
    if (!missing || !until.empty()) return line;
    int first = line < place_.body_first_line ? 1 : place_.body_first_line;
    for (int earlier = line - 1; earlier >= first; --earlier) {
      std::string text = line_text(metal_text_, earlier);
      if (!text.empty() && text.compare(0, 2, "//") != 0) return earlier;
    }
    return line;
  }

  void settle() {
    bool fresh = !error_.empty() && error_line_ && error_line_ != last_line_;
    if (fresh) {
      text_ += (text_.empty() ? "" : "\n") + place_.line(error_line_) + ": `" +
               line_text(metal_text_, error_line_) + "`: " + plain(error_);
      last_line_ = error_line_;
    }
    error_.clear();
  }

  int user_line(int line) const {
    bool known = line > 0 && line <= (int)rewritten_.line_map.size();
    return known ? rewritten_.line_map[line - 1] : 0;
  }

  const Rewritten& rewritten_;
  const std::string& metal_text_;
  Place place_;
  std::string text_, error_;
  int error_line_ = 0, last_line_ = 0;
  int way_ = 0;  // the user's line that the error to come was reached from
};

}  // namespace

std::string explain(const Rewritten& rewritten, const std::string& metal_text,
                    const std::string& compiler_output) {
  Explanation explanation(rewritten, metal_text);
  explanation.read(compiler_output);
  std::string text = explanation.text();
  return "[kernel " + rewritten.kernel_name + "] " + (text.empty() ? compiler_output : text);
}

}  // namespace zmlx
