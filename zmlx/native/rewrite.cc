#include "rewrite.h"

#include <dirent.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>

#include "cuda_dialect.h"
#include "passes.h"

namespace zmlx {
namespace {

// A file of the prelude. Its first line says what it needs and which names call for it:
// "// section NAME; needs A B; after C D; tokens t1 t2( …", `*` for always, `t2(` for a call of t2 but
// not a variable of that name. What it needs comes before it; what it only comes after is not called
// in by it.
struct Section {
  std::string name, text;
  std::vector<std::string> needs, after, calls;
};

struct Prelude {
  std::vector<Section> sections;  // by name
  Tokens defines;
};

std::vector<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> all;
  for (std::string word; stream >> word;) all.push_back(word);
  return all;
}

Section parse_section(const std::string& text) {
  Section section;
  section.text = text;
  std::istringstream clauses(text.substr(0, text.find('\n')));
  for (std::string clause; std::getline(clauses, clause, ';');) {
    auto parts = words(clause);
    if (!parts.empty() && parts[0] == "//") parts.erase(parts.begin());
    if (parts.empty()) continue;
    std::string key = parts[0];
    parts.erase(parts.begin());
    if (key == "section" && !parts.empty()) section.name = parts[0];
    if (key == "needs") section.needs = parts;
    if (key == "after") section.after = parts;
    if (key == "tokens") section.calls = parts;
  }
  return section;
}

void read_folder(const std::string& directory, Prelude* prelude, std::string* defines) {
  DIR* folder = opendir(directory.c_str());
  if (!folder) throw std::runtime_error("[zmlx] The prelude is missing: " + directory);
  std::vector<std::string> files;
  while (dirent* entry = readdir(folder)) {
    std::string name = entry->d_name;
    if (name.size() > 2 && name.compare(name.size() - 2, 2, ".h") == 0) files.push_back(name);
  }
  closedir(folder);
  std::sort(files.begin(), files.end());
  for (auto& file : files) {
    std::ifstream stream(directory + "/" + file);
    std::string text((std::istreambuf_iterator<char>(stream)), {});
    Section section = parse_section(text);
    auto same = [&](const Section& other) { return other.name == section.name; };
    if (std::any_of(prelude->sections.begin(), prelude->sections.end(), same)) continue;
    prelude->sections.push_back(section);
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      bool whole = !line.empty() && line.back() != '\\';
      if (whole && line.compare(0, 8, "#define ") == 0) *defines += line + "\n";
    }
  }
}

// What stands between a type and a bracket, or in the brackets of a macro that declares functions.
const std::set<std::string>& library_names(const Prelude& prelude) {
  static std::mutex mutex;
  static std::map<const Prelude*, std::set<std::string>> known;
  std::lock_guard<std::mutex> lock(mutex);
  auto [found, fresh] = known.try_emplace(&prelude);
  std::set<std::string>& names = found->second;
  if (!fresh) return names;
  names = collectives();
  for (auto& section : prelude.sections) {
    Tokens tokens = tokenize(section.text);
    bool directive = !tokens.empty() && tokens[0].is("#");  // which names parameters
    for (size_t i = 1; i + 1 < tokens.size(); ++i) {
      directive = tokens[i].first ? tokens[i].is("#") : directive;
      if (directive) continue;
      auto& previous = tokens[i - 1];
      bool typed = previous.kind == Token::word && !previous.is("return") && tokens[i + 1].is("(");
      bool listed = previous.is("(") && i > 1 && tokens[i - 2].text.compare(0, 3, "ZK_") == 0 &&
                    tokens[i + 1].is_any({")", ","});
      if (tokens[i].kind == Token::word && (typed || listed)) names.insert(tokens[i].text);
    }
  }
  return names;
}

// The sections of all dialects; one of CUDA's own replaces the one of the same name.
const Prelude& prelude_in(const std::string& directory, Dialect dialect) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, Dialect>, Prelude> known;
  std::lock_guard<std::mutex> lock(mutex);
  auto [found, fresh] = known.try_emplace({directory, dialect});
  if (fresh) {
    std::string defines;
    if (dialect == Dialect::cuda) read_folder(directory + "/cuda", &found->second, &defines);
    read_folder(directory, &found->second, &defines);
    // Metal is a dialect of C++14 in clang.
    defines += "#define __cplusplus 201402L\n#define __clang__ 1\n";
    found->second.defines = tokenize(defines);
  }
  return found->second;
}

// The sections that a text needs, in the order they ask for.
class Selection {
 public:
  Selection(const Prelude& prelude, const std::set<std::string>& names,
            const std::vector<std::string>& wanted) {
    for (auto& section : prelude.sections) by_name_[section.name] = &section;
    for (auto& section : prelude.sections) {
      bool called = std::any_of(section.calls.begin(), section.calls.end(), [&](auto& token) {
        return token == "*" || names.count(token);
      });
      if (called) choose(section.name);
    }
    for (auto& name : wanted) choose(name);
    for (auto& name : chosen_) place(name);
  }

  const std::string& text() const { return text_; }

 private:
  void choose(const std::string& name) {
    if (!by_name_.count(name)) {
      throw std::runtime_error("[zmlx] The prelude has no section '" + name + "'.");
    }
    if (!chosen_.insert(name).second) return;
    for (auto& need : by_name_[name]->needs) choose(need);
  }

  void place(const std::string& name) {
    if (!chosen_.count(name) || !placed_.insert(name).second) return;
    for (auto& need : by_name_[name]->needs) place(need);
    for (auto& earlier : by_name_[name]->after) place(earlier);
    text_ += by_name_[name]->text + "\n";
  }

  std::map<std::string, const Section*> by_name_;
  std::set<std::string> chosen_, placed_;
  std::string text_;
};

std::vector<std::string> wanted_sections(const Unit& unit, bool collective) {
  if (unit.mode == Mode::cooperative) return {"threadgroup", "simd_fiber"};
  if (unit.mode == Mode::one_thread && collective) return {"simd_one"};
  return {};
}

std::string preamble(const Unit& unit) {
  std::string text = "struct zk_uint3 { unsigned x, y, z; };\n";
  if (unit.mode != Mode::cooperative) return text;
  return text + "#define ZK_COOPERATIVE 1\n#define ZK_DECLARATIONS " +
         std::to_string(std::max(1, unit.declarations)) + "\n";
}

// MLX puts this before the name that the author gave, and template arguments and types behind it.
std::string author_name(const std::string& function) {
  const std::string prefix = "custom_kernel_";
  bool prefixed = function.compare(0, prefix.size(), prefix) == 0;
  return prefixed ? function.substr(prefix.size()) : function;
}

// MLX writes the types of arguments into the name, and whether they are constant, which is nothing to
// a CPU: kernels that are alike but for that are compiled once.
void name_alike(Unit& unit) {
  const std::string name = "zk_body";
  auto& signature = unit.signature;
  signature.call.replace(0, signature.name.size(), name);
  signature.name = unit.tokens[signature.name_at].text = name;
}

// The request that a * b + c be rounded twice, in a directive or a _Pragma; all other pragmas leave
// the compiler a choice.
bool forbids_contraction(const std::string& metal_text) {
  Tokens tokens = tokenize(metal_text);
  for (size_t i = 0; i + 2 < tokens.size(); ++i) {
    if (tokens[i].is("_Pragma") && tokens[i + 2].kind == Token::literal) {
      auto& quoted = tokens[i + 2].text;
      if (forbids_contraction("#pragma " + quoted.substr(1, quoted.size() - 2))) return true;
    }
    if (!tokens[i].is("#") || !tokens[i + 1].is("pragma")) continue;
    for (const char* spelling : {"METAL fp contract(off)", "clang fp contract(off)",
                                 "STDC FP_CONTRACT OFF"}) {
      Tokens words = tokenize(spelling);
      bool fits = words.size() <= tokens.size() - i - 2;
      if (fits && std::equal(words.begin(), words.end(), tokens.begin() + i + 2,
                             [](const Token& a, const Token& b) { return a.text == b.text; })) {
        return true;
      }
    }
  }
  return false;
}

const char* const no_contraction =
    "#if defined(__clang__)\n#pragma clang fp contract(off)\n#else\n"
    "#pragma GCC optimize(\"fp-contract=off\")\n#endif\n";

Unit read_unit(const std::string& metal_text, const Prelude& prelude,
               const RewriteOptions& options) {
  Tokens raw = tokenize(metal_text);
  size_t start = find_kernel(raw);
  if (start == Outline::none || start + 2 >= raw.size()) {
    throw std::runtime_error("[kernel " + author_name(options.name) +
                             "] the header opens a comment that it does not close, or the text has "
                             "no [[kernel]] function");
  }
  Place place;
  place.kernel = author_name(options.name.empty() ? raw[start + 1].text : options.name);
  place.header_lines = options.header_lines;
  place.source_lines = options.source_lines;
  for (size_t i = start; i + 1 < raw.size() && !place.body_first_line; ++i) {
    if (raw[i].is(")") && raw[i + 1].is("{")) place.body_first_line = raw[i + 1].line + 1;
  }
  return Unit(declare_header_kernels(preprocess(raw, prelude.defines, place)), place);
}

}  // namespace

void check_header_end(const std::string& header, const std::string& name) {
  if (header.empty() || header.back() == '\n') return;
  const char* const kernel = "zk_kernel";
  Tokens tokens = tokenize(header + " " + kernel);
  bool comment = tokens.empty() || !tokens.back().is(kernel);
  if (comment && !tokens.empty() && tokens.back().text.compare(0, 2, "/*") == 0) return;
  size_t first = comment ? 0 : tokens.size() - 1;
  while (first > 0 && !tokens[first].first) --first;
  if (!comment && !tokens[first].is("#")) return;
  std::string line = header.substr(header.rfind('\n') + 1);  // npos + 1 is 0
  throw std::runtime_error("[kernel " + name + "] the header's last line, `" +
                           line.substr(std::min(line.find_first_not_of(" \t"), line.size())) +
                           "`, goes on into the kernel: end the header with a newline");
}

Rewritten rewrite(const std::string& metal_text, const RewriteOptions& options) {
  const Prelude& prelude = prelude_in(options.prelude_dir, options.dialect);
  const Library library = [&]() -> const std::set<std::string>& { return library_names(prelude); };
  if (options.dialect == Dialect::cuda) {
    Unit unit = read_unit(keep_pragmas(metal_text), prelude, options);
    refuse_recursion(unit, library);
    Rewritten result =
        cuda_text(unit, library,
                  [&](auto& names) { return Selection(prelude, names, {}).text(); });
    if (forbids_contraction(metal_text)) result.text += "#define ZK_NO_CONTRACTION\n";
    return result;
  }
  Unit unit = read_unit(metal_text, prelude, options);
  if (options.one_thread) drop_unused_matrices(unit);
  bool collective = has_collectives(unit);
  bool together = collective || has_threadgroup_memory(unit);
  unit.mode = options.one_thread ? Mode::one_thread
              : together         ? Mode::cooperative
                                 : Mode::threads;

  refuse_unsupported(unit);
  refuse_mutable_globals(unit);
  refuse_values_in_brackets(unit);
  refuse_recursion(unit, library);
  merge_overloads(unit);
  merge_specialisations(unit);
  drop_attributes(unit);
  drop_hints(unit);
  rename_keywords(unit);
  rewrite_address_spaces(unit);
  free_specialised_operators(unit);
  name_constructors(unit);
  bool aligned = align_members(unit);
  free_anonymous_structs(unit);
  unwrap_literals(unit);
  expand_designators(unit);
  suffix_literals(unit);
  rewrite_swizzles(unit);
  balance_conditionals(unit);
  spell_casts(unit);
  choose_fields(unit);
  if (unit.mode == Mode::cooperative) mark_collectives(unit, library);
  shield_names(unit, library);
  declare_kernel(unit);
  name_alike(unit);

  Printed printed = print(unit.tokens);
  auto names = identifiers(printed.text + unit.signature.call);
  // The sections list Metal's names; a swizzle is a vector's even where no vector is named.
  if (names.count("zk_swizzle") || names.count("zk_swizzle_ref")) names.insert("vec");
  for (auto& parameter : unit.signature.parameters) {
    if (!parameter.plain || parameter.type != "uint3") names.insert(parameter.type);
  }
  std::string before = forbids_contraction(metal_text) ? no_contraction : "";
  before += preamble(unit) + Selection(prelude, names, wanted_sections(unit, collective)).text();
  int offset = (int)std::count(before.begin(), before.end(), '\n');
  std::vector<std::pair<int, int>> sites;
  for (auto& [line, metal_line] : printed.sites) {
    int source = metal_line - unit.place.body_first_line + 1;
    sites.emplace_back(line + offset + 1, source > 0 ? source : -metal_line);
  }

  Rewritten result;
  result.text = before + printed.text + driver(unit.signature, unit.mode, unit.declarations, sites);
  result.collective = together;
  result.aligned = aligned;
  result.line_map.assign(offset, 0);
  result.line_map.insert(result.line_map.end(), printed.lines.begin(), printed.lines.end());
  result.body_first_line = unit.place.body_first_line;
  result.source_lines = unit.place.source_lines;
  result.header_lines = unit.place.header_lines;
  result.kernel_name = unit.place.kernel;
  return result;
}

}  // namespace zmlx
