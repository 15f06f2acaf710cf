// The functions of a text as the analysis of control flow sees them: their parameters, the names that
// stand for memory of all threads, and whether all places that call them are known.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "passes.h"

namespace zmlx {

// What control flow depends on: 0 nothing that differs between the threads of a simdgroup, 1 nothing
// but a thread's y and z in its group, 2 something else. `control` is of the statements around a
// place, `exits` of the returns from the kernel before it.
struct Flow {
  int control = 0, exits = 0;
};

// Tokens begin ... end-1.
struct Argument {
  size_t begin, end;
};

// A function's text, and what is known of its names. A lambda shares the names of the function
// around it.
struct Body {
  std::string name;
  size_t open = 0, close = 0, begin = 0, end = 0;  // brackets of the parameters, braces
  size_t names = 0;                                 // index of the body whose names apply
  bool kernel = false, method = false;
  Flow flow;     // of the places that call it
  int left = 0;  // what returns from it before the current statement depend on; 0 in the kernel
  int own = 0;   // what its result depends on beside its arguments
  std::map<std::string, int> levels;  // what a name's value depends on
  std::set<std::string> memory;       // keys of memory of all threads, which a store leaves as is
  // See cuda_pointers.h.
  std::set<std::string> exposed;
  bool exposes_object = false;  // that it is a method of
};

class Bodies {
 public:
  explicit Bodies(const Unit&);

  std::vector<Body> all;  // the kernel first

  // The variable that token i names, as a key of `levels`: equal names of different scopes differ.
  std::string key(size_t i) const;
  // Of the bracket at `open`, in a call or in a declaration.
  std::vector<Argument> arguments(size_t open) const;
  // The token that names a parameter, or Outline::none.
  size_t name(const Argument& parameter) const;
  // Whether it refers to a variable that the callee may store to: neither const nor memory of all
  // threads.
  bool is_output(const Argument& parameter) const;
  // Whether the bracket at `open` may hold a type, that of a cast.
  bool casts(size_t open) const;
  // The body whose names hold at token i; the kernel for what lies outside of all.
  size_t enclosing(size_t i) const;
  // What the operator at i takes on its right.
  size_t right_side(size_t i, size_t end) const;
  // Behind the operand of a unary operator, `*p`, `(a)` or `s.a[1]`.
  size_t operand_end(size_t i) const;
  // The `.` or `->` before the member at i, which `template` may follow, or Outline::none.
  size_t selector(size_t i) const;
  // The first token of the path `f<T>(a).s[1].` that selects the member at i.
  size_t path_begin(size_t i) const;

 private:
  struct Declaration {
    size_t begin, end;  // where the name means it
  };
  void find_declarations();
  void declare(size_t name, size_t end);
  size_t declared_at(size_t begin) const;
  void add_kernel();
  void add(const Function&);
  void declare_parameters(const Function& lambda);
  bool is_method(const Function&) const;
  void find_memory_parameters(const Body&);
  void find_memory_names(size_t i);
  void find_handed_on();
  void push(const Body&);

  const Unit& unit_;
  const Tokens& tokens_;
  const Outline& outline_;
  std::map<std::string, std::vector<Declaration>> declarations_;
  std::vector<size_t> innermost_;  // the body that each token stands in, or 0
};

bool one_of(const Token&, std::initializer_list<const char*> names);
bool heads_statement(const Token&);  // a keyword that no expression holds

}  // namespace zmlx
