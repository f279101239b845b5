"""The grammar library's messages in our words: what is wrong, at which line and character of the client's text, and what to try.

llguidance wraps a regular expression into a grammar of its own and reports positions there; GBNF is converted to Lark first. Messages here
name places in the text that the client sent, and have at most `MAX_MESSAGE` characters.
"""

from __future__ import annotations

import re

MAX_MESSAGE = 300
_MAX_NEAR = 24  # characters of the client's text that a message shows before and after the place

_REGEX_REASON = re.compile(r"error: (.+)")
_CARET = re.compile(r"^ {4}( *)\^", re.MULTILINE)
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_FOUND = re.compile(r" \(at .*", re.DOTALL)
_GBNF_PLACE = re.compile(r"^(.*?) at line (\d+), .* \^ (.*)$", re.DOTALL)

_REGEX_HINTS = (
    ("unclosed group", r"close it with ), or write \( for the character"),
    ("unopened group", r"open it with (, or write \) for the character"),
    ("unclosed character class", r"close it with ], or write \[ for the character"),
    ("invalid character class range", "write the smaller character first, or put - last"),
    ("unclosed counted repetition", r"write {n}, {n,} or {n,m}, or \{ for the character"),
    ("invalid repetition count range", "write the smaller count first"),
    ("repetition operator missing", r"put something before *, + or ?, or write \* for the character"),
    ("unrecognized escape", r"a backslash precedes only punctuation and letters such as \d, \w, \s, \n"),
    ("look-around", "write what matches without (?=, (?!, (?<= and (?<!"),
    ("backreferences", r"repeat the group instead of \1"),
    ("word boundaries", r"leave \b out: the expression matches the whole output"),
    ("Unicode property not found", r"see Unicode's names of general categories and scripts, such as \p{L} or \p{Greek}"),
)
_GRAMMAR_HINTS = (
    ("no start rule", "name the first rule start: `start: ...`"),
    ("no rule or terminal", "define it, or put literal text in quotes"),
    ("duplicate rule", "join the alternatives in one rule with |"),
    ("not a word of the grammar", "texts are in double quotes, regular expressions between slashes, comments after //"),
    ("No 'root' rule", "name the first rule root: `root ::= ...`"),
    ("circular reference", "a terminal cannot contain itself: write its name in lower case to make it a rule"),
)
_SCHEMA_HINTS = (
    ("lookarounds not supported", "a pattern has ^ or $ inside: put them at its ends only"),
    ("not disjoint", "write the patterns of patternProperties so that no name matches two of them"),
    ("circular references with sibling keys", "write the keywords next to $ref into the schema that it refers to"),
    ("too large", "cut the schema down, or write its alternatives (oneOf, anyOf, allOf) as fewer ones"),
    ("too big", "cut the schema down: fewer alternatives, properties and lengths"),
    ("Unsatisfiable", "no value satisfies all of it"),
)


def one_line(text: str, most: int = MAX_MESSAGE) -> str:
    """A text in one line, not all of it if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def regex_error(pattern: str, message: str) -> str:
    """What is wrong with a regular expression of the client, from the library's message."""
    reason, caret = _REGEX_REASON.search(message), _CARET.search(message)
    if reason is None:
        if "lookarounds not supported" in message:
            return _with_hint("word boundaries and multi-line anchors are not supported", _REGEX_HINTS)
        return one_line(_PLACE.sub("", message).partition("\n")[0])
    place = _place_in_pattern(pattern, len(caret[1])) if caret is not None and pattern else ""
    return _with_hint(f"{reason[1].strip()}{place}", _REGEX_HINTS)


def unfinished_escape(pattern: str) -> str | None:
    """The error for a regular expression that ends with half an escape, which the library would drop without a word."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        return f"unfinished escape at character {len(pattern)}: write \\\\ for a backslash"
    return None


def lark_error(text: str, message: str) -> str:
    """What is wrong with a Lark grammar of the client, from the library's message. text: "" if the library read another text."""
    found = _PLACE.match(message)
    what = _FOUND.sub("", _PLACE.sub("", message, count=1).partition("\n   ")[0])
    place = "" if found is None or not text else _place_in_lines(text, int(found[1]), int(found[2]))
    if what.startswith("invalid regex"):
        reason = _REGEX_REASON.search(message)
        detail = reason[1] if reason is not None else "word boundaries and multi-line anchors are not supported"
        return _with_hint(f"a regular expression{place}: {detail.strip()}", _REGEX_HINTS)
    what = re.sub(r'unknown name: "(.*)"', lambda m: f"no rule or terminal is named {_short(m[1])}", what, flags=re.DOTALL)
    what = what.replace("lexer error", "not a word of the grammar").replace(r"'\n'", "the end of the line")
    return _with_hint(one_line(what, 200) + place, _GRAMMAR_HINTS)


def json_error(message: str) -> str:
    """What is wrong with a rewritten JSON schema, from the library's message."""
    what = message.partition("\n")[0] if "regex parse error" not in message else regex_error("", message)
    return _with_hint(
        re.sub(r"json-schema:///|\(limit for this grammar: (\d+)\)", lambda m: f"(at most {m[1]})" if m[1] else "", what), _SCHEMA_HINTS
    )


def gbnf_error(message: str) -> str:
    """What is wrong with a GBNF grammar of the client, from the converter's message."""
    found = _GBNF_PLACE.match(message)
    if found is None:
        missing = re.fullmatch(r"Rule '(.*)' not found", message, re.DOTALL)
        return _with_hint(f"no rule or terminal is named {_short(missing[1])}" if missing else one_line(message, 200), _GRAMMAR_HINTS)
    rest = found[3].strip("'\"").replace("\\n", "").strip()
    return f"{found[1][:1].lower()}{found[1][1:]} at line {found[2]}, {f'before {_short(rest)}' if rest else 'at the end'}"


def _with_hint(what: str, hints: tuple[tuple[str, str], ...]) -> str:
    hint = next((hint for words, hint in hints if words in what), None)
    return one_line(what if hint is None else f"{what}: {hint}")


def _place_in_pattern(pattern: str, column: int) -> str:
    """Where in `pattern` a column of the library's form of it is: there slashes, line feeds and tabs are escaped."""
    at = shown = 0
    while at < len(pattern) and shown < column:
        escaped = pattern[at] == "\\" and at + 1 < len(pattern)
        shown += 2 if escaped or pattern[at] in "/\n\r\t" else 1
        at += 2 if escaped else 1
    return f" at character {min(at, len(pattern) - 1) + 1}, {_near(pattern, at)}"


def _place_in_lines(text: str, line: int, character: int) -> str:
    lines = text.split("\n")
    shown = lines[line - 1] if line <= len(lines) else ""
    return f" at line {line}, character {character}" + (f", {_near(shown, character - 1)}" if shown.strip() else "")


def _near(text: str, at: int) -> str:
    start, end = max(0, at - _MAX_NEAR), at + _MAX_NEAR
    dots = ("..." if start else "", "..." if end < len(text) else "")
    return f"in {dots[0]}{text[start:end]!r}{dots[1]}"


def _short(name: str) -> str:
    return repr(name if len(name) <= 40 else name[:40] + "...")
