// Which variables a store through a pointer or a reference may mean. Pointers are not told apart:
// what is stored through one may be in every variable that is exposed. References that are
// parameters are followed from call to call instead.
#pragma once

#include <set>
#include <string>
#include <utility>

#include "cuda_bodies.h"

namespace zmlx {

class Pointers {
 public:
  // Marks in the bodies what the text exposes.
  Pointers(const Unit&, Bodies&);

  // Variables among the tokens, but for indices, may be stored to by other names from here on;
  // whether that is news.
  bool expose(size_t begin, size_t end);
  // Whether the name at i stands for a variable that has another name, too.
  bool is_reference(size_t i) const { return references_.count(tokens_[i].text) > 0; }
  // Whether functions with outputs are handed on, and called by names that are not theirs.
  bool hands_on() const { return hands_on_; }

 private:
  void find_names();
  void find_exposed(size_t i);
  bool takes_address(size_t i) const;
  bool binds(size_t i) const;
  size_t value_at(size_t i) const;
  bool is_initialiser(size_t brace) const;
  bool is_variable(size_t i) const;
  bool selects(size_t i) const;

  const Tokens& tokens_;
  const Outline& outline_;
  Bodies& bodies_;
  std::set<std::string> references_;
  std::set<std::pair<size_t, std::string>> indexed_;  // by body; arrays are among them
  std::set<std::string> array_fields_;
  bool holds_references_ = false;  // some struct does
  bool hands_on_ = false;
};

}  // namespace zmlx
