// Metal text as tokens, and tokens as text. Passes never move a token: they drop it, change its
// text, or attach text before or after it, so an index stays valid from the first pass to the last.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace zmlx {

struct Token {
  enum Kind : uint8_t { word, number, literal, mark };
  Kind kind = mark;
  bool first = false;  // first on its line
  bool dropped = false;
  bool removed = false;  // dropped with all that passes attach to it
  bool site = false;  // a call at which threads meet; it gets a line of its own
  int column = 0;        // blanks before it; on the first token of a line, its indentation
  int line = 0;          // in the Metal text; for a macro's tokens, the line that uses the macro
  std::string text;
  std::string before, after;
  std::vector<std::string> hidden;  // macros that must not be expanded in this token any more

  bool is(const char* what) const { return text == what; }
  bool is_any(std::initializer_list<const char*> several) const {
    for (auto what : several) {
      if (is(what)) return true;
    }
    return false;
  }
};

using Tokens = std::vector<Token>;

// Comments and line splices are gone; `>` is always a token of its own except in `>=`, `>>=`, `->`.
Tokens tokenize(const std::string& text);
// `and` as `&&`, and so on: behind the preprocessor, which pastes words (`simd_##and`).
void read_marks(Tokens&);

unsigned digit_of(char);  // at most 15, or 99
// The value of an integer literal, and where its suffix begins; false if it has more than 64 bits.
bool read_digits(const std::string& literal, uint64_t* value, size_t* end);

// The words of a text, each once; a function that is called (or qualified) also as `name(`, and what
// stands nowhere but as a value: nothing declares it, so that it may be a function of the library.
std::set<std::string> identifiers(const std::string& text);

struct Printed {
  std::string text;
  std::vector<int> lines;                   // per line of `text`: the line of the Metal text
  std::vector<std::pair<int, int>> sites;   // line of `text`, from 0, and of the Metal text
};
Printed print(const Tokens&);

// Where an error lies, as the user counts: lines of the source or of the header.
struct Place {
  std::string kernel;
  int body_first_line = 0;
  int header_lines = -1, source_lines = -1;  // -1: unknown

  // Whether the line is known to be of the source, and not of what MLX writes around it.
  bool in_source(int metal_line) const {
    return source_lines >= 0 && metal_line >= body_first_line &&
           metal_line < body_first_line + source_lines;
  }
  std::string line(int metal_line) const;  // "line 3 of the source"
  // Throws "[kernel NAME] line L of the source: `what` is not supported…".
  [[noreturn]] void refuse(int metal_line, const std::string& what) const;
};

// ---- preprocess.cc ----------------------------------------------------------------------------

// Runs the user's directives and expands the user's macros. `prelude_defines` are the #define lines
// of the prelude: they count in conditions and stay for the C++ compiler to expand.
Tokens preprocess(const Tokens&, const Tokens& prelude_defines, const Place&);

// condition.cc: whether an #if's expression, its macros expanded, is not 0.
bool condition_holds(Tokens expression, const Place&, int line);

}  // namespace zmlx
