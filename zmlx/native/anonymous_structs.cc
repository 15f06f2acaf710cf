// `union { struct { half d, m; }; half2 dm; };` as a member: GCC takes no type with a constructor in
// an anonymous struct, as half and vectors have, unless the type depends on a template argument. So
// the members' types are made to depend on one: of the kernel, or of a base that takes over the
// struct's members.
#include <algorithm>

#include "passes.h"

namespace zmlx {
namespace {

const char* const argument = "zk_on";

class AnonymousStructs {
 public:
  explicit AnonymousStructs(Unit& unit) : unit_(unit), tokens_(unit.tokens) {}

  void free() {
    for (size_t i = 0; i + 1 < tokens_.size(); ++i) {
      if (!tokens_[i].is("struct") || !member(i + 1) || !unit_.outline.in_type(i)) continue;
      if (plain(i + 1)) continue;
      size_t owner = owner_of(i);
      if (unit_.in_kernel(i)) {
        depend(i + 1);
        in_kernel_ = true;
      } else if (has_base_.count(owner) || take_over(owner)) {
        has_base_.insert(owner);
        depend(i + 1);
      }
    }
    if (in_kernel_) parametrise_kernel();
  }

 private:
  // Whether the brace opens a struct or union without name that is a member.
  bool member(size_t brace) const {
    if (brace == 0 || !tokens_[brace].is("{")) return false;
    size_t behind = unit_.outline.partner[brace] + 1;
    return tokens_[brace - 1].is_any({"struct", "union"}) && behind < tokens_.size() &&
           tokens_[behind].is(";");
  }

  size_t brace_around(size_t i) const {
    size_t end = unit_.outline.scope_end(i);
    return end == Outline::none ? end : unit_.outline.partner[end];
  }

  // The brace of the innermost struct around i that is not such a member itself.
  size_t owner_of(size_t i) const {
    size_t brace = brace_around(i);
    while (brace != Outline::none && member(brace)) brace = brace_around(brace - 1);
    return brace;
  }

  // Calls what(first, end) for the type of each declaration between the braces.
  template <class F>
  void each_type(size_t brace, F what) const {
    for (size_t i = brace + 1; i < unit_.outline.partner[brace];) {
      size_t last = unit_.outline.statement_end(i), name = i;
      while (name < last && !tokens_[name + 1].is_any({";", ",", "[", ":", "="})) {
        name = unit_.outline.angle_end(name) != Outline::none ? unit_.outline.angle_end(name)
                                                               : name + 1;
      }
      bool declares = tokens_[name].kind == Token::word && name > i;
      for (size_t k = i; k < name; ++k) {
        declares &= !tokens_[k].is_any({"(", "{", "*", "&"});
      }
      if (declares) what(i, name);
      i = last + 1;
    }
  }

  bool plain(size_t brace) const {
    bool all = true;
    each_type(brace, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        all &= tokens_[i].is_any({"const", "volatile", "unsigned", "signed", "bool", "char", "uchar",
                                  "short", "ushort", "int", "uint", "long", "ulong", "float",
                                  "int8_t", "uint8_t", "int16_t", "uint16_t", "int32_t", "uint32_t",
                                  "int64_t", "uint64_t", "size_t"});
      }
    });
    return all;
  }

  void depend(size_t brace) {
    each_type(brace, [&](size_t begin, size_t end) {
      tokens_[begin].before += std::string("typename zk_member<") + argument + ", ";
      tokens_[end - 1].after += ">::type";
    });
  }

  // struct NAME { … }  ->  template <bool zk_on> struct zk_members0 { … };
  //                        struct NAME : zk_members0<true> {}
  // A union, which has no bases, becomes another name of the template's. False if that is not
  // possible: then the compiler says what it does not take.
  bool take_over(size_t brace) {
    if (brace == Outline::none || unit_.outline.function_at(brace)) return false;
    size_t begin = unit_.outline.statement_begin(brace), end = unit_.outline.partner[brace];
    std::string head, kind, name;
    for (size_t i = begin; i < brace; ++i) {
      if (tokens_[i].is_any({"template", ":", "(", "="})) return false;
      if (tokens_[i].dropped) continue;
      if (!kind.empty()) name = tokens_[i].text;
      if (tokens_[i].is_any({"struct", "union"})) kind = tokens_[i].text;
      head += tokens_[i].text + " ";
    }
    // Members that name their struct would name one that is not declared yet.
    for (size_t i = brace; i < end; ++i) {
      if (!name.empty() && tokens_[i].text == name) return false;
    }
    if (kind.empty()) return false;
    std::string base = "zk_members" + std::to_string(has_base_.size());
    for (size_t i = begin; i < brace; ++i) tokens_[i].dropped = true;
    tokens_[begin].before += std::string("template <bool ") + argument + "> " + kind + " " + base + " ";
    base += "<true>";
    if (kind == "struct") {
      tokens_[end].after += "; " + head + ": " + base + " {}";
    } else {
      bool other_name = !name.empty() && tokens_[begin].is("typedef");
      tokens_[end].after += "; typedef " + base + " " + name + (other_name ? "," : "");
    }
    return true;
  }

  void parametrise_kernel() {
    std::string parameter = std::string("bool ") + argument + " = true";
    size_t head = unit_.signature.head;
    if (tokens_[head].is("template")) {
      tokens_[unit_.outline.partner[head + 1]].before += ", " + parameter;
    } else {
      tokens_[head].before += "template <" + parameter + "> ";
    }
  }

  Unit& unit_;
  Tokens& tokens_;
  std::set<size_t> has_base_;
  bool in_kernel_ = false;
};

}  // namespace

void free_anonymous_structs(Unit& unit) { AnonymousStructs(unit).free(); }

}  // namespace zmlx
