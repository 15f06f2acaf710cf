// Where lanes that took different ways through an expression meet again. Between statements the
// order of the text tells who is behind. Within one, g++ evaluates the arguments of a function, and
// the operands of a vector's operator, from the last to the first: lanes that skip a collective
// would run ahead to one that stands before it. x  ->  (x, zk_rejoin(…))
#include "reach.h"

namespace zmlx {
namespace {

const char* const rejoined = ", zk_rejoin(zk_site(\n__builtin_LINE())))";

class Rejoin {
 public:
  Rejoin(Unit& unit, const Reach& reach) : unit_(unit), tokens_(unit.tokens), reach_(reach) {
    for (auto& function : unit.outline.functions) {
      declared_.insert(function.open);
      if (function.body) bodies_.insert(function.body);
      if (function.lambda) invoked(function);
      bool nothing = !function.lambda && function.open > 1 &&
                     tokens_[function.open - 2].is("void");
      if (nothing) void_.insert(function.name);
    }
    size_t before;
    do {
      before = parting_.size();
      for (auto& function : unit.outline.functions) {
        if (!function.name.empty() && parts(function)) parting_.insert(function.name);
      }
    } while (parting_.size() > before);
  }

  void run() {
    for (size_t begin = 0; begin < tokens_.size();) {
      size_t end = begin;
      while (end < tokens_.size() && !ends_statement(end)) {
        end = tokens_[end].is_any({"(", "[", "{"}) ? partner(end) + 1 : end + 1;
      }
      expression(begin, std::min(end, tokens_.size()));
      begin = end + 1;
    }
  }

 private:
  // What is evaluated as a whole, and more where a bracket holds statements.
  void expression(size_t begin, size_t end) {
    calls_.clear();
    for (size_t i = begin; i < end; ++i) {
      if (reach_.called(i) && !declared_.count(unit_.outline.call_at(i))) calls_.push_back(i);
    }
    if (calls_.size() < 2) return;
    for (size_t i = begin; i < end; ++i) {
      if (tokens_[i].is_any({"(", "["}) || initialises(i)) arguments(i);
      if (assigns(i) && calls_[0] < i) piece(i + 1, piece_end(i + 1));
    }
    for (size_t call : calls_) helper(call, begin, end);
    for (auto [head, close] : lambdas_) {
      if (head >= begin && reach_.called_within(head, close)) result(head, close, end);
    }
  }

  // Whether some lanes may leave a function by another way than others.
  bool parts(const Function& function) const {
    for (size_t i = function.body; i < function.end; ++i) {
      if (tokens_[i].is_any({"if", "for", "while", "do", "switch", "?", "&&", "||"})) return true;
      if (reach_.through_values().count(i) || parting_.count(tokens_[i].text)) return true;
    }
    return false;
  }

  bool ends_statement(size_t i) const {
    bool within = initialises(i) || invoked_.count(i);
    return tokens_[i].is_any({";", "}"}) || (tokens_[i].is("{") && !within);
  }

  // Whether the brace holds values: behind a type's name, `=`, or what comes before an argument.
  bool initialises(size_t i) const {
    if (!tokens_[i].is("{") || i == 0 || bodies_.count(i)) return false;
    auto& before = tokens_[i - 1];
    if (before.is("{")) return initialises(i - 1);
    if (before.is_any({"=", ",", "(", "]", "return", "?"})) return true;
    bool type = before.kind == Token::word ? !before.is_any({"else", "do"})
                                           : before.is(">") && partner(i - 1) != Outline::none;
    auto& first = tokens_[unit_.outline.statement_begin(i)];
    return type && !first.is_any({"struct", "class", "union", "enum", "namespace", "template",
                                  "typedef", "extern"});
  }

  void arguments(size_t open) {
    auto& before = tokens_[open == 0 ? 0 : open - 1];
    bool control = before.is_any({"if", "for", "while", "switch", "constexpr"});
    if (declared_.count(open) || control) return;
    for (size_t begin = open + 1; begin < partner(open);) {
      size_t end = piece_end(begin);
      piece(begin, end);
      begin = end + 1;
    }
  }

  bool assigns(size_t i) const {
    return tokens_[i].is_any({"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="}) &&
           !tokens_[i + 1].is("{");
  }

  // One argument, or what is assigned, with a choice that some lanes make in another way.
  void piece(size_t begin, size_t end) {
    size_t chooses = begin;
    while (chooses < end && !tokens_[chooses].is_any({"?", "&&", "||"})) chooses = next(chooses);
    if (begin == end || tokens_[begin].is_any({"{", "."}) || tokens_[end - 1].is("...")) return;
    if (!reach_.called_within(chooses, end) || !others(begin, end)) return;
    tokens_[begin].before = "(" + tokens_[begin].before;
    tokens_[end].before = rejoined + tokens_[end].before;
  }

  // A call of a function from which some lanes may return before others.
  void helper(size_t name, size_t begin, size_t end) {
    auto value = reach_.through_values().find(name);
    if (value != reach_.through_values().end()) return result(name, partner(value->second), end);
    size_t open = unit_.outline.call_at(name);
    auto& text = tokens_[name].text;
    if (open == Outline::none || !parting_.count(text) || void_.count(text)) return;
    size_t first = name;
    while (first > begin) {
      auto& before = tokens_[first - 1];
      bool outermost = before.is("::") && (first == begin + 1 || !qualifies(first - 2));
      if (before.is("template") || before.is("typename") || outermost) {
        --first;
      } else if (before.is_any({".", "->", "::"}) && first > begin + 1) {
        first = operand(first - 2, begin);
      } else {
        break;
      }
    }
    result(first, partner(open), end);
  }

  // Whether the token may end a name that stands before `::`.
  bool qualifies(size_t i) const {
    return closes(i) ? !tokens_[i].is("]") : tokens_[i].kind == Token::word && !tokens_[i].is("return");
  }

  void result(size_t first, size_t last, size_t end) {
    if (last >= end || !others(first, last)) return;
    tokens_[first].before += "(";
    tokens_[last].after = rejoined + tokens_[last].after;
  }

  // A lambda that is called where it stands: [&] { … }(), ([&] { … })().
  void invoked(const Function& lambda) {
    size_t first = lambda.head, last = lambda.end;
    while (first > 0 && tokens_[first - 1].is("(") && partner(first - 1) == last + 1) {
      --first, ++last;
    }
    if (!lambda.body || !tokens_[last + 1].is("(")) return;
    lambdas_[first] = partner(last + 1);
    invoked_.insert(lambda.body);
  }

  // Where what ends at token i begins: a, a[i], a(i), a<T>.
  size_t operand(size_t i, size_t begin) const {
    while (i > begin && closes(i)) {
      i = partner(i);
      bool named = i > begin && (tokens_[i - 1].kind == Token::word || closes(i - 1));
      if (!named) break;
      --i;
    }
    return i;
  }

  // Whether the expression holds calls outside of begin … end.
  bool others(size_t begin, size_t end) const {
    for (size_t call : calls_) {
      if (call < begin || call >= end) return true;
    }
    return false;
  }

  // The `,`, `;` or bracket behind the piece that begins at token i.
  size_t piece_end(size_t i) const {
    while (i < tokens_.size() && !tokens_[i].is_any({",", ";"}) && !closes(i)) i = next(i);
    return i;
  }

  size_t partner(size_t i) const { return unit_.outline.partner[i]; }
  bool closes(size_t i) const { return partner(i) < i; }
  bool opens(size_t i) const { return partner(i) != Outline::none && partner(i) > i; }
  size_t next(size_t i) const { return opens(i) ? partner(i) + 1 : i + 1; }

  Unit& unit_;
  Tokens& tokens_;
  const Reach& reach_;
  std::set<size_t> declared_;  // brackets of parameters
  std::set<size_t> bodies_, invoked_;  // of functions, of lambdas that are called where they stand
  std::map<size_t, size_t> lambdas_;  // the first and last tokens of those calls
  std::set<std::string> parting_, void_;  // the text's functions that part lanes, return nothing
  std::vector<size_t> calls_;  // of the expression at hand
};

}  // namespace

void rejoin(Unit& unit, const Reach& reach) { Rejoin(unit, reach).run(); }

}  // namespace zmlx
