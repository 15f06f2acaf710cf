// The passes over a kernel's tokens. Each handles one difference between Metal and the target
// language and is independent of the others; none moves a token (see tokens.h).
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "outline.h"
#include "signature.h"
#include "tokens.h"

namespace zmlx {

struct Unit {
  Unit(Tokens text, const Place& where)
      : tokens(std::move(text)), place(where), outline((pad(tokens), tokens), place),
        signature(read_signature(tokens, outline, place)) {}
  Unit(const Unit&) = delete;  // the outline refers to the tokens

  Tokens tokens;
  Place place;
  Outline outline;
  Signature signature;
  Mode mode = Mode::one_thread;
  int declarations = 0;  // threadgroup declarations so far
  std::vector<std::pair<size_t, std::string>> shared;  // where they are, and what they name

  bool in_kernel(size_t i) const {
    return i > signature.body && i < outline.partner[signature.body];
  }

 private:
  // Empty tokens behind the last one, so that passes may look ahead anywhere.
  static void pad(Tokens& tokens) {
    Token empty;
    empty.dropped = true;
    tokens.resize(tokens.size() + 4, empty);
  }
};

// The names of Metal's functions, which take a while to gather.
using Library = std::function<const std::set<std::string>&()>;

// passes.cc
bool is_keyword(const Token&);  // other than a type
void refuse_unsupported(const Unit&);
void refuse_mutable_globals(const Unit&);
void refuse_recursion(const Unit&, const Library&);
void drop_unused_matrices(Unit&);
void drop_attributes(Unit&);
void drop_hints(Unit&);
void free_specialised_operators(Unit&);
bool is_constructor(const Unit&, const Function&);
void name_constructors(Unit&);
void suffix_literals(Unit&);
void rename_keywords(Unit&);
void spell_in_ascii(Unit&);
bool assigns(const Token&);  // = += -= …
bool steps(const Token&);    // ++ --
void spell_casts(Unit&);
void declare_kernel(Unit&);

// conditionals.cc
void balance_conditionals(Unit&);

// address_spaces.cc
// Type of each parameter without address space, name and default, so that declarations compare.
std::string parameter_types(const Unit&, const Function&);
void merge_overloads(Unit&);  // those that differ in address space only
void merge_specialisations(Unit&);  // likewise
bool is_space(const Token&);
bool declares_variable(const Unit&, size_t space);
void rewrite_address_spaces(Unit&);

// member_alignment.cc
// The braces of structs that are __attribute__((packed)), in front or behind.
std::set<size_t> pack_structs(Unit&);
bool align_members(Unit&);  // whether there are any

// anonymous_structs.cc
void free_anonymous_structs(Unit&);

// initialisers.cc
bool names_number(const Token&);  // a scalar or vector type
void refuse_values_in_brackets(const Unit&);
void unwrap_literals(Unit&);
void expand_designators(Unit&);

// swizzles.cc
void rewrite_swizzles(Unit&);
bool names_swizzle_or_field(const Unit&, size_t i);
void choose_fields(Unit&);

// namespaces.cc
void shield_names(Unit&, const Library&);

// collectives.cc
const std::set<std::string>& collectives();  // Metal's functions at which threads meet
bool names_matrix(const Token&);  // of a simdgroup
bool has_collectives(const Unit&);
bool has_threadgroup_memory(const Unit&);
void mark_collectives(Unit&, const Library&);

}  // namespace zmlx
