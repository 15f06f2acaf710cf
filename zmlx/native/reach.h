// Which calls of a text come to a place where threads meet. Found by scanning, so that a name
// stands for all that have it.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "passes.h"

namespace zmlx {

// Stands for all lambdas, objects with an operator() and pointers to functions: they are called by
// the names of variables.
inline const char* const objects = "()";

bool is_call_operator(const Unit&, const Function&);
bool is_destructor(const Unit&, const Function&);
bool is_variadic(const Unit&, const Function&);
bool starts_expression(const Token&);  // a word that does
bool is_number_type(const Token&);

// A function that stands as a value, which something else may call, or in `decltype`.
struct Handed {
  size_t begin = 0, name = 0, end = 0;  // S<T>::name<4>; `end` is its last token
  bool address = false;                 // behind an `&`
  bool type = false;
  bool global = false;  // at file scope
  bool single = false;  // no overload, and no template whose arguments are open
};

class Reach {
 public:
  Reach(Unit&, const Library&);

  bool names(const std::string& name) const { return names_.count(name) > 0; }
  // Their argument that tells who calls comes first, since no other may follow theirs.
  bool variadic(const std::string& name) const { return names(name) && variadic_.count(name); }

  // Whether a call begins at token i, or a variable whose constructor is one.
  bool called(size_t i) const;
  bool called_within(size_t begin, size_t end) const;

  // Whether one stands with its name at token i.
  bool handed(size_t i, Handed*) const;
  bool hands_any() const { return hands_any_; }
  // The calls of what a variable or another value may hold: their first token, and the bracket
  // behind it.
  const std::map<size_t, size_t>& through_values() const { return through_values_; }
  // Whether the one that begins at token i is told who calls.
  bool is_told(size_t i) const { return objects_.count(i) > 0; }

 private:
  using Names = std::set<std::string>;

  // What the tokens begin … end may name.
  struct Variable {
    size_t begin = 0, end = 0;
    std::string type;
    bool member = false;  // of a type
    bool global = false;  // outside functions, or of a type itself
    bool value = false;   // which may be a function, for all that the text tells
  };

  void find_functions();
  void find_indirect();
  bool take(const Function&);
  bool take_types();
  bool take_values();
  bool defaults_call(const Function&) const;
  bool makes_type(size_t) const;
  bool makes_result(size_t brace) const;
  bool makes_object(size_t open) const;
  size_t callee(size_t open, size_t* name) const;
  size_t members_begin(const Function&) const;
  size_t list_size(size_t open) const;
  size_t named_before(size_t) const;
  std::string scope_name(size_t brace) const;
  bool owned(size_t) const;
  bool closes(size_t) const;
  bool has_word(size_t begin, size_t end, const char* word) const;

  // variables.cc
  void find_types();
  void find_variables();
  void find_enumerators(size_t);
  void find_bindings(size_t open);
  void inherit(size_t colon);
  std::map<size_t, size_t> parameters() const;
  bool declares(size_t) const;
  size_t variable_end(size_t) const;
  const Variable* variable_at(size_t) const;

  Unit& unit_;
  const Library& library_;
  Names names_;
  // Functions of the text: all, those outside types, those at file scope, those with packs.
  Names own_, free_, global_, variadic_;
  std::map<std::string, Names> types_;   // of the functions of a name
  std::map<std::string, Names> owners_;  // the types and namespaces of the functions of a name
  Names closed_, derived_;               // types and namespaces with braces; types with bases
  std::map<std::string, size_t> open_;  // how many arguments a template has
  std::map<std::string, std::vector<Variable>> variables_;
  Names named_, namespaces_;            // types of the text; its namespaces
  std::set<size_t> bodies_;             // of functions
  std::set<size_t> initialised_;        // names of members and bases before a constructor's body
  std::set<size_t> indirect_;           // where calls of variables and of other values begin
  std::set<size_t> objects_;            // those of objects made there
  std::map<size_t, size_t> through_values_;
  bool hands_any_ = false;
};

// rejoin.cc: makes lanes meet behind what only some of them do within an expression.
void rejoin(Unit&, const Reach&);

}  // namespace zmlx
