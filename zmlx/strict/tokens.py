"""Metal text as tokens with their places, brackets matched, and scopes named.

Scanned, not parsed: enough to tell a declaration from an expression, which is all that the rules
beside the compiler need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<skip>\s+|//[^\n]*|/\*.*?(?:\*/|\Z)|\\\r?\n)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<number>\.?\d(?:[eE][+-]|[pP][+-]|'(?=\w)|[\w.])*)
  | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
  | (?P<mark>>>=|<<=|\.\.\.|->|::|<<|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|\#\#|.)
    """,
    re.VERBOSE | re.DOTALL,
)

_OPEN = {"(": ")", "[": "]", "{": "}"}
_LABELS = ("public", "private", "protected", "default")


@dataclass(slots=True)
class Token:
    """A token; `directive` tells that it belongs to a preprocessor line."""

    kind: str
    text: str
    start: int
    end: int
    line: int
    directive: bool = False


@dataclass
class Scope:
    """A pair of braces: a "function", "type", "namespace", "enum", "initializer" or "block".

    `head` is the first token of the statement that the brace belongs to; a function has a name, the
    tokens of its parameter list, and the name of the type that it is a member of.
    """

    kind: str
    head: int
    open: int
    close: int
    parent: Scope | None
    name: str = ""
    parameters: tuple[int, int] = (0, 0)

    @property
    def function(self) -> Scope | None:
        """The function that this scope is, or lies in."""
        scope: Scope | None = self
        while scope is not None and scope.kind != "function":
            scope = scope.parent
        return scope


def tokenize(text: str) -> list[Token]:
    """The tokens of `text`, comments left out. `>` is always alone, as in nested templates."""
    tokens: list[Token] = []
    line, fresh, directive, at = 1, True, False, 0
    for match in _TOKEN.finditer(text, at):
        kind, part = match.lastgroup or "mark", match.group()
        if kind != "skip":
            if fresh and part == "#":
                directive = True
            fresh = False
            tokens.append(Token(kind, part, match.start(), match.end(), line, directive))
        newlines = part.count("\n")
        line += newlines
        if newlines and not part.startswith(("\\", "/*")):
            fresh, directive = True, False
    return tokens


class Outline:
    """The structure of a text: `tokens` without directives, partners of brackets, scopes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.all = tokenize(text)
        self.tokens = [t for t in self.all if not t.directive]
        self.partner: dict[int, int] = {}
        self._match()
        self.file = Scope("file", 0, -1, len(self.tokens), None)
        self.scopes: list[Scope] = []
        self._scan()
        self._scope_of = [self.file] * (len(self.tokens) + 1)
        for scope in self.scopes:  # outer ones first
            self._scope_of[scope.open + 1 : scope.close] = [scope] * (scope.close - scope.open - 1)
        self.types = self._type_names()

    def __getitem__(self, i: int) -> str:
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def __len__(self) -> int:
        return len(self.tokens)

    def _match(self) -> None:
        stack: list[int] = []
        for i, token in enumerate(self.tokens):
            if token.kind != "mark":
                continue
            if token.text in _OPEN:
                stack.append(i)
            elif token.text in (")", "]", "}"):
                while stack:
                    j = stack.pop()
                    if _OPEN[self.tokens[j].text] == token.text:
                        self.partner[i], self.partner[j] = j, i
                        break

    def _scan(self) -> None:
        scope, head, i = self.file, 0, 0
        while i < len(self.tokens):
            text = self[i]
            if text == "{" and i in self.partner:
                scope = self._enter(scope, head, i)
                head = i + 1
            elif text == "}" and i in self.partner and scope.parent is not None:
                # A type's or an initializer's brace does not end its statement.
                ends = scope.kind not in ("type", "enum", "initializer")
                head = i + 1 if ends else scope.head
                scope = scope.parent
            elif text == ";" or (text == ":" and self[i - 1] in _LABELS):
                head = i + 1
            elif text in ("(", "[") and i in self.partner and not self._has_brace(i):
                i = self.partner[i]
            i += 1

    def _has_brace(self, i: int) -> bool:
        return any(self[j] == "{" for j in range(i, self.partner[i]))

    def _enter(self, parent: Scope, head: int, brace: int) -> Scope:
        kind, name, j = "block", "", head
        while self[j] == "template" and self[j + 1] == "<" and self.angle_end(j + 1) > 0:
            j = self.angle_end(j + 1) + 1
        words = []
        while j < brace:
            past = self._past_attribute(j)
            if past > j:
                j = past
                continue
            words.append(self[j])
            if self[j] == "<" and {"struct", "class", "union"} & set(words):
                j = max(j, self.angle_end(j))  # of a specialisation or a base, with any brackets
            j = self.skip(j)
        if parent.kind in ("function", "block", "initializer", "lambda"):
            if "struct" in words or "union" in words or "class" in words:
                kind = "type"
            elif self[brace - 1] in ("=", ",", "return", "(", "{", ">") or (
                self.tokens[brace - 1].kind == "word"
                and self[brace - 1] not in ("else", "do", "const", "thread", "mutable")
                and brace - 1 >= head
            ):
                kind = "initializer"
        elif ("=" in words and "operator" not in words) or self._is_member(words, brace):
            kind = "initializer"
        elif "(" in words:
            kind = "function"
        elif "namespace" in words or "extern" in words:
            kind = "namespace"
        elif "enum" in words:
            kind = "enum"
        elif {"struct", "class", "union"} & set(words):
            kind = "type"
        elif parent.kind == "type":
            kind = "initializer"
        if kind == "type":
            for k, word in enumerate(words[:-1]):
                if word in ("struct", "class", "union"):
                    name = words[k + 1]
        scope = Scope(kind, head, brace, self.partner[brace], parent, name)
        if kind == "function":
            scope.name, scope.parameters = self._function_name(head, brace)
        self.scopes.append(scope)
        return scope

    def _is_member(self, words: list[str], brace: int) -> bool:
        """Whether a constructor initialises a member by the brace: `S(int a) : v{a} {`."""
        listed = "(" in words and ":" in words[words.index("(") :]
        return listed and (self.tokens[brace - 1].kind == "word" or self[brace - 1] == ">")

    def _past_attribute(self, i: int) -> int:
        """The token behind the `alignas(…)`, `__attribute__((…))` or `[[…]]` that begins at i."""
        if self[i] in ("alignas", "__attribute__") and self[i + 1] == "(":
            return self.partner.get(i + 1, i - 1) + 1
        if self[i] == self[i + 1] == "[":
            return self.partner.get(i, i - 1) + 1
        return i

    def _function_name(self, head: int, brace: int) -> tuple[str, tuple[int, int]]:
        j = head
        while self[j] == "template" and self[j + 1] == "<" and self.angle_end(j + 1) > 0:
            j = self.angle_end(j + 1) + 1
        while j < brace:
            if self[j] == "(" and j in self.partner:
                close = self.partner[j]
                if self[close + 2] == "(" and self[close + 1] != "noexcept":
                    j = close + 1  # `VEC(U, 2) f(`, of a macro that is a type
                    continue
                if self[j - 1] == "operator":
                    j += 2
                return self[j - 1], (j, self.partner[j])
            j = max(j + 1, self._past_attribute(j))
        return "", (0, 0)

    def angle_end(self, i: int) -> int:
        """The `>` that closes the template list opening at token i, or -1 if `<` compares."""
        depth, j = 0, i
        while j < len(self.tokens):
            text = self[j]
            if text == "<":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return j
            elif text in ("(", "[", "{") and j in self.partner:
                j = self.partner[j]
            elif text in (";", "}", ")", "]", "&&", "||"):
                return -1
            j += 1
        return -1

    def angle_start(self, i: int) -> int:
        """The `<` of the template list that closes at token i, or -1."""
        j, depth = i, 0
        while j > 0:
            depth += (self[j] == ">") - (self[j] == "<")
            if depth == 0:
                return j if self.angle_end(j) == i else -1
            j = self.partner[j] if self[j] in (")", "]", "}") and j in self.partner else j
            j -= 1
        return -1

    def arguments(self, opening: int) -> list[tuple[int, int]]:
        """First token and the one behind the last of each argument in the brackets at `opening`."""
        close = self.partner.get(opening, opening)
        found, begin, i = [], opening + 1, opening + 1
        while i <= close:
            if i == close or self[i] == ",":
                if i > begin:
                    found.append((begin, i))
                begin = i + 1
            elif self[i] in ("(", "[", "{") and i in self.partner:
                i = self.partner[i]
            elif self[i] == "<" and self.angle_end(i) > 0:
                i = self.angle_end(i)
            i += 1
        return found

    def scope_at(self, i: int) -> Scope:
        """The innermost scope that holds token i."""
        return self._scope_of[i]

    def skip(self, i: int) -> int:
        """The token after token i, or after the brackets that open there."""
        return (self.partner[i] if self[i] in _OPEN and i in self.partner else i) + 1

    def statement(self, i: int) -> tuple[int, int]:
        """First token of the statement that token i is in, and the token after its last."""
        begin = i
        while begin > 0 and self[begin - 1] not in (";", "{", "}"):
            begin -= 1
            if self[begin] in (")", "]") and begin in self.partner:
                begin = self.partner[begin]
        end = i
        while end < len(self.tokens) and self[end] not in (";", "}"):
            end = self.skip(end)
        return begin, end

    def is_within(self, i: int, scopes: Iterable[Scope]) -> bool:
        """Whether token i is in one of the scopes."""
        return any(scope.open < i < scope.close for scope in scopes)

    def visible(self, i: int) -> Scope:
        """Where a name is known that token i declares: in its function, or everywhere."""
        return self.scope_at(i).function or self.file

    def _type_names(self) -> dict[str, list[Scope]]:
        """Types that the text declares, template parameters among them, and where."""
        names: dict[str, list[Scope]] = {}
        for i, token in enumerate(self.tokens):
            declares = token.text in ("struct", "class", "union", "enum", "typename")
            k = self._past_attribute(i + 1) if declares else i + 1
            if token.text == "typedef":
                k = self.statement(i)[1] - 1
            elif not declares and not (token.text == "using" and self[i + 2] == "="):
                continue
            if k < len(self.tokens) and self.tokens[k].kind == "word":
                names.setdefault(self[k], []).append(self.visible(i))
        for word in ("namespace", "class"):
            names.pop(word, None)
        return names
