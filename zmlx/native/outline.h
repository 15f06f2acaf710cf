// What the passes know of a text's structure: partners of brackets, function definitions, fields
// of structs, names of templates. Found by scanning, not by parsing: enough to tell a declaration
// from an expression, and a template list from a comparison.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "tokens.h"

namespace zmlx {

struct Function {
  std::string name;
  size_t head = 0;           // first token of its declaration
  size_t open = 0, close = 0;  // brackets of the parameters; equal for a lambda without any
  size_t body = 0, end = 0;  // braces; both 0 for a declaration without a body
  size_t scope = 0;          // brace that encloses it, 0 at file scope
  bool lambda = false;
};

class Outline {
 public:
  Outline(const Tokens&, const Place&);

  static constexpr size_t none = ~size_t(0);

  std::vector<size_t> partner;  // of ( ) [ ] { } and the < > of template lists, else none
  std::vector<Function> functions;
  std::set<std::string> fields;     // of the text's structs
  std::set<std::string> templates;  // names after which `<` opens a list

  // The innermost function whose body holds token i, or null.
  const Function* function_at(size_t i) const;
  // First token of the statement that token i is in, and its last (`;` or `}`).
  size_t statement_begin(size_t i) const;
  size_t statement_end(size_t begin) const;
  // Past the labels `case …:` and `default:` of a statement.
  size_t past_labels(size_t begin) const;
  // Past what stands before a statement: labels, attributes, `_Pragma("…")`, and before a keyword
  // a macro that becomes one.
  size_t past_prefix(size_t begin) const;
  // The `>` of a template list that opens at i, or none if `<` compares or i is something else.
  size_t angle_end(size_t i) const { return opens_list(i) ? partner[i] : none; }
  // Whether token i stands in a struct, outside its functions.
  bool in_type(size_t i) const;
  bool opens_type(size_t brace) const { return type_braces_.count(brace) > 0; }
  // The } of the braces that token i stands in, or none.
  size_t scope_end(size_t i) const;
  // The ( of a call of the name at i, past a template list, or none.
  size_t call_at(size_t i) const;

 private:
  enum class Scope { file, type, function, other };
  bool opens_list(size_t i) const;
  void match_brackets(const Place&);
  void find_scopes();
  void find_templates();
  void match_lists();
  void check_statements(const Place&) const;
  size_t find_list_end(size_t i) const;
  void scan();
  Scope open_brace(size_t head, size_t brace, Scope outer, size_t scope);
  bool names_field(size_t head, size_t i) const;
  bool initialises_member(size_t head, size_t brace) const;
  bool function_head(size_t head, size_t end, Function*) const;
  void find_lambda(size_t bracket);

  const Tokens& tokens_;
  std::vector<size_t> around_;                // the { that each token stands in, or none
  std::set<std::string> function_templates_;  // of the text
  std::set<size_t> type_braces_;
};

}  // namespace zmlx
