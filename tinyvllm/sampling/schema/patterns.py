"""Regular expressions of JSON Schema (ECMAScript's) in the syntax of Rust, which the grammar reads.

The two differ where a silent difference would let wrong texts pass: `[` and `&&` inside a class, `.` and `\\s`, unescaped braces. What
comes out matches no text that the pattern refuses. Look-ahead at the start of an anchored pattern becomes a pattern of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_PATTERN = 16 * 1024  # characters
_MAX_WORDS = 2000  # characters of the words that `none_of` excludes

_QUANTIFIER = re.compile(r"\{\d{1,6}(,\d{0,6})?\}")
_FLAGS = re.compile(r"\(\?([is]+)(:|\))")
_NAMED_GROUP = re.compile(r"\(\?P?<[A-Za-z_]\w*>")
_LOOK = re.compile(r"\(\?<?[=!]")
_HEX = {"x": re.compile(r"[0-9a-fA-F]{2}"), "u": re.compile(r"[0-9a-fA-F]{4}|\{[0-9a-fA-F]{1,6}\}")}
_PROPERTY = re.compile(r"[pP]\{[\w=]{1,64}\}")
# of ECMAScript and of Python at once, without U+FEFF; and what is a space for either, which \S must not match
_SPACES = r"\x{9}-\x{d}\x{20}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_NO_SPACES = _SPACES + r"\x{1c}-\x{1f}\x{85}\x{feff}"
_CLASSES = {
    "d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES, "D": "[^0-9]", "W": "[^0-9A-Za-z_]", "S": f"[^{_NO_SPACES}]",
}  # fmt: skip
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_ANY = r"[^\x{a}\x{d}\x{2028}\x{2029}]"


class PatternError(ValueError):
    """A pattern that cannot be enforced; the message says why."""


def rust_patterns(pattern: str) -> list[str]:
    """Patterns in Rust's syntax that together allow what `pattern` allows. PatternError for one that cannot be enforced."""
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"{len(pattern)} characters, at most {MAX_PATTERN} are read")
    conditions, rest = _leading_conditions(pattern)
    return [*(_Translation(condition).text() for condition in conditions), _Translation(rest).text()]


def rust_pattern(pattern: str) -> str:
    """The same for a place that takes one pattern only."""
    translated = rust_patterns(pattern)
    if len(translated) > 1:
        raise PatternError("look-ahead is not supported here")
    return translated[0]


def none_of(words: Iterable[str]) -> str | None:
    """A pattern in Rust's syntax of all texts but these words; None if they are too long for it."""
    words = list(words)
    if sum(map(len, words)) > _MAX_WORDS or max(map(len, words), default=0) > 200:
        return None
    return f"^(?:{_other_than(sorted(set(words)))})$"


def _other_than(words: list[str]) -> str:
    """What may follow where `words`, sorted, are the rests of the words that must not come."""
    firsts: dict[str, list[str]] = {}
    for word in words:
        if word:
            firsts.setdefault(word[0], []).append(word[1:])
    if not firsts:
        return "(?s:.)+" if words else "(?s:.)*"
    options = [] if "" in words else [""]
    options.append(f"[^{''.join(map(_char, firsts))}](?s:.)*")
    options += [f"{_char(first)}(?:{_other_than(rests)})" for first, rests in firsts.items()]
    return "|".join(options)


def _char(c: str) -> str:
    return c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}"


def _leading_conditions(pattern: str) -> tuple[list[str], str]:
    """`^(?=A)(?=B)C` as (["^(?:A)", "^(?:B)"], "^C"); alternatives at the top level belong to more than C, so then nothing is taken off."""
    conditions, at = [], 1
    while pattern.startswith("^") and pattern.startswith("(?=", at):
        end = _group_end(pattern, at)
        conditions.append(f"^(?:{pattern[at + 3 : end]})")
        at = end + 1
    if not conditions:
        return [], pattern
    rest = pattern[at:]
    if _has_alternatives(rest) or rest[:1] in ("*", "+", "?", "{"):
        raise PatternError("look-ahead is not supported here: give each alternative a pattern of its own")
    return conditions, f"^{rest}"


def _group_end(pattern: str, at: int) -> int:
    """The index of the bracket that closes the group at `at`."""
    depth = 0
    for i, c in _outside_classes(pattern, at):
        depth += (c == "(") - (c == ")")
        if c == ")" and not depth:
            return i
    raise PatternError(f"unclosed group at character {at + 1}")


def _has_alternatives(pattern: str) -> bool:
    depth = 0
    for _, c in _outside_classes(pattern, 0):
        depth += (c == "(") - (c == ")")
        if c == "|" and not depth:
            return True
    return False


def _outside_classes(pattern: str, at: int) -> Iterable[tuple[int, str]]:
    """(index, character) of those that are neither escaped nor in a class."""
    in_class = False
    while at < len(pattern):
        c = pattern[at]
        if c == "\\":
            at += 1
        elif in_class:
            in_class = c != "]"
        elif c == "[":
            in_class = True
        else:
            yield at, c
        at += 1


class _Translation:
    """One pattern on its way from ECMAScript's syntax to Rust's."""

    def __init__(self, pattern: str):
        self.pattern = pattern
        self.at = 0
        self.dot = _ANY

    def text(self) -> str:
        out: list[str] = []
        depth = 0
        while self.at < len(self.pattern):
            c = self.pattern[self.at]
            if c == "(":
                depth += 1
                piece = self._group()
                depth -= piece.endswith(")")  # flags alone
            elif c == ")":
                depth -= 1
                piece = self._take(1)
                if depth < 0:
                    raise self._error("unopened group", self.at - 1)
            elif c == "[":
                piece = self._class()
            elif c == "\\":
                piece = self._escape()
            else:
                piece = self._plain(c)
            out.append(piece)
        if depth:
            raise self._error("unclosed group")
        return "".join(out)

    def _take(self, n: int) -> str:
        taken = self.pattern[self.at : self.at + n]
        self.at += n
        return taken

    def _error(self, what: str, at: int | None = None) -> PatternError:
        return PatternError(f"{what} at character {min(self.at if at is None else at, len(self.pattern)) + 1}")

    def _plain(self, c: str) -> str:
        if c == "{" and (found := _QUANTIFIER.match(self.pattern, self.at)):
            return self._take(len(found[0]))
        self.at += 1
        if c == ".":
            return self.dot
        return _char(c) if c in "{}]" else c

    def _group(self) -> str:
        if (flags := _FLAGS.match(self.pattern, self.at)) is not None:
            if "s" in flags[1]:
                self.dot = "(?s:.)"
            return self._take(len(flags[0]))
        if (named := _NAMED_GROUP.match(self.pattern, self.at)) is not None:
            self.at += len(named[0])
            return "(?:"
        if _LOOK.match(self.pattern, self.at):
            raise self._error("look-around is not supported, except (?=...) right after ^,")
        if self.pattern.startswith("(?", self.at) and not self.pattern.startswith("(?:", self.at):
            raise self._error("this kind of group is not supported")
        return self._take(3) if self.pattern.startswith("(?:", self.at) else f"{self._take(1)}?:"

    def _escape(self) -> str:
        start = self.at
        letter = self.pattern[start + 1 : start + 2]
        if letter in "bB" and letter:
            raise self._error("word boundaries are not supported")
        if letter.isdigit() and letter != "0":
            raise self._error("back references are not supported")
        if letter in ("d", "w", "s", "D", "W", "S"):
            self.at += 2
            members = _CLASSES[letter]
            return members if members.startswith("[") else f"[{members}]"
        return self._property() or _char(self._escaped_char())

    def _property(self) -> str:
        """A Unicode property, or "" if there is none here."""
        found = _PROPERTY.match(self.pattern, self.at + 1)
        return self._take(1 + len(found[0])) if found is not None else ""

    def _escaped_char(self) -> str:
        """The character that an escape means."""
        start = self.at
        letter = self.pattern[start + 1 : start + 2]
        if not letter:
            raise self._error("unfinished escape")
        self.at += 2
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter == "c" and self.pattern[self.at : self.at + 1].isalpha():
            return chr(ord(self._take(1)) % 32)
        if letter in _HEX and (found := _HEX[letter].match(self.pattern, self.at)) is not None:
            self.at += len(found[0])
            return self._code_point(int(found[0].strip("{}"), 16), start)
        if letter.isalnum():
            raise self._error(f"the escape \\{letter} is not supported", start)
        return letter

    def _code_point(self, code: int, start: int) -> str:
        """A character by its number; two halves of a surrogate pair are one."""
        if 0xD800 <= code < 0xDC00 and self.pattern.startswith("\\u", self.at):
            low = int(found[0], 16) if (found := re.compile(r"[0-9a-fA-F]{4}").match(self.pattern, self.at + 2)) else 0
            if 0xDC00 <= low < 0xE000:
                self.at += 6
                return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error("an escape of no character", start)
        return chr(code)

    def _class(self) -> str:
        start = self.at
        negated = self.pattern.startswith("[^", self.at)
        self.at += 2 if negated else 1
        members: list[str] = []
        while not self.pattern.startswith("]", self.at):
            if self.at >= len(self.pattern):
                raise self._error("unclosed character class", start)
            members.append(self._member())
        self.at += 1
        if not members:
            return "(?s:.)" if negated else r"[^\x{0}-\x{10ffff}]"
        return f"[{'^' if negated else ''}{''.join(members)}]"

    def _member(self) -> str:
        """One character, range or class in a class."""
        start = self.at
        first = self._class_char()
        if len(first) > 1 or not self.pattern.startswith("-", self.at) or self.pattern.startswith("-]", self.at):
            return first if len(first) > 1 else _char(first)
        self.at += 1
        last = self._class_char()
        if len(last) > 1:  # [a-\d]: three members
            return f"{_char(first)}{_char('-')}{last}"
        if last < first:
            raise self._error("a range that ends before it starts", start)
        return f"{_char(first)}-{_char(last)}"

    def _class_char(self) -> str:
        """A character, or the text of a class, which is longer."""
        if not self.pattern.startswith("\\", self.at):
            if self.at >= len(self.pattern):
                raise self._error("unclosed character class")
            return self._take(1)
        letter = self.pattern[self.at + 1 : self.at + 2]
        if letter in _CLASSES:
            self.at += 2
            return _CLASSES[letter]
        if letter == "b":
            self.at += 2
            return "\b"
        return self._property() or self._escaped_char()
