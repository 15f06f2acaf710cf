// Other kernels in the header, as when a whole file of Metal is pasted there. Nothing can call a
// kernel, so they are declared and no more, whatever their bodies hold; the lines that instantiate
// them go.
#include "signature.h"

namespace zmlx {
namespace {

size_t matching(const Tokens& tokens, size_t open, const char* opens, const char* closes) {
  int depth = 0;
  for (size_t i = open; i < tokens.size(); ++i) {
    depth += tokens[i].is(opens) - tokens[i].is(closes);
    if (depth == 0) return i;
  }
  return tokens.size();
}

// The `{` or `;` that ends the declarator behind token i.
size_t declaration_end(const Tokens& tokens, size_t i) {
  while (i < tokens.size() && !tokens[i].is_any({"{", ";"})) {
    i = tokens[i].is("(") ? matching(tokens, i, "(", ")") + 1 : i + 1;
  }
  return i;
}

// Where the statement begins that the last token is in.
size_t statement_begin(const Tokens& tokens) {
  size_t i = tokens.size();
  while (i > 0 && !tokens[i - 1].is_any({";", "{", "}"})) --i;
  return i;
}

// Whether the word `kernel` at token i makes a kernel of a function, and is not used as a name.
bool marks_kernel(const Tokens& tokens, size_t i, bool attribute) {
  auto& next = tokens[i + 1];
  return attribute || next.is("]") || next.kind == Token::word || next.is("::") ||
         (next.is("[") && tokens[i + 2].is("["));
}

bool instantiates(const Tokens& tokens, size_t begin) {
  return begin + 1 < tokens.size() && tokens[begin].is("template") && !tokens[begin + 1].is("<");
}

}  // namespace

Tokens declare_header_kernels(Tokens tokens) {
  size_t main = find_kernel(tokens);
  if (main == Outline::none) return tokens;
  Tokens kept;
  for (size_t i = 0; i < tokens.size(); ++i) {
    bool attribute = !kept.empty() && kept.back().is("[");
    if (i + 4 >= main || !tokens[i].is("kernel") || !marks_kernel(tokens, i, attribute)) {
      kept.push_back(std::move(tokens[i]));
      continue;
    }
    size_t end = declaration_end(tokens, i), begin = statement_begin(kept);
    if (end >= main) {
      kept.push_back(std::move(tokens[i]));
    } else if (tokens[end].is(";") && instantiates(kept, begin)) {
      kept.resize(begin);
      i = end;
    } else {
      if (attribute) kept.push_back(tokens[i]);
      for (++i; i <= end; ++i) kept.push_back(tokens[i]);
      i = kept.back().is("{") ? matching(tokens, end, "{", "}") : end;
      kept.back().text = ";";
    }
  }
  return kept;
}

}  // namespace zmlx
