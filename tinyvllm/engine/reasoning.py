"""Thoughts in front of an answer: the marks around them, a budget for them, and the structure that begins behind them.

Marks are found in the text, as who reads the answer finds them: a model may write one in other tokens than the tokenizer would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from tinyvllm.request import SamplingParams
from tinyvllm.text.parsing import parser_for
from tinyvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tinyvllm.sampling.grammar import Grammar

BLANKS = 2  # tokens of blanks that may stand between the closing mark and a structure: models are trained to write a line feed or two
_LOOKS_BACK = 64  # tokens of the prompt's end in which a mark is looked for


class Marks:
    """The marks around a model's thoughts, as bytes and as tokens. All sequences of an engine share it."""

    def __init__(self, tokenizer: Tokenizer, opening: str, closing: str, eos_ids: Iterable[int]):
        self.opening, self.closing = opening.encode(), closing.encode()
        self.opening_ids, self.closing_ids = _ids(tokenizer, opening), _ids(tokenizer, closing)  # empty: the vocabulary cannot write it
        self.token_bytes = tokenizer.token_bytes
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = tokenizer.vocab_size

    @cached_property
    def blanks(self) -> tuple[int, ...]:
        """The tokens that are spaces, tabs and line feeds and nothing else."""
        return tuple(i for i in range(self._vocab_size) if (text := self.token_bytes(i)) and not text.strip(b" \t\r\n"))

    @cached_property
    def _overruns(self) -> tuple[frozenset[int], ...]:
        """By how many bytes of the closing mark are written: the tokens that would complete it and go on with text behind it."""
        found = []
        tokens = [self.token_bytes(i) for i in range(self._vocab_size)]
        for written in range(len(self.closing)):
            rest = self.closing[written:]
            there = [(i, text) for i, text in enumerate(tokens) if (text.startswith(rest) if written else rest in text)]
            found.append(frozenset(i for i, text in there if text.partition(rest)[2].strip()))
        return tuple(found)

    def survey(self) -> None:
        """Look through the vocabulary now: a tenth of a second that need not be the engine's."""
        _ = self.blanks, self._overruns

    def banned(self, text: bytes) -> frozenset[int]:
        """What must not come inside thoughts that end with `text` if a structure is to follow: an end, and text in the mark's own token."""
        written = [n for n in range(len(self.closing)) if text.endswith(self.closing[:n])]
        return self._eos_ids.union(*(self._overruns[n] for n in written))


class Reasoning:
    """Where one sequence stands: before its thoughts, inside them, or behind.

    budget: so many tokens inside, then the closing mark must come; None sets no bound. With a grammar, thoughts come first or not at all,
    and it begins behind them (`BLANKS` may stand between); without one they may open and close anywhere, again and again.
    """

    def __init__(self, marks: Marks, begins: str, budget: int | None, grammar: Grammar | None):
        self.must: list[int] = []  # tokens that have to come next
        self._marks, self._budget, self._grammar = marks, budget, grammar
        self._place = "before"
        self._count = 0  # tokens inside
        self._text = b""  # the last bytes, less than a mark of them
        self._opened = 0  # tokens of the opening mark that have come, with a grammar
        self._shared = 0  # those of them that the grammar has taken too
        self._blanks = 0
        if begins == "inside":
            self._enter()
        elif grammar is not None and (begins == "behind" or not marks.opening_ids):
            self._place = "over"

    @property
    def over(self) -> bool:
        """Nothing is left but the grammar."""
        return self._place == "over"

    @property
    def bound(self) -> bool:
        """Whether the grammar narrows the next token."""
        if self._place == "before":
            return self._grammar is not None and self._shared == self._opened
        return self._place != "inside"

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that must not come next, where the grammar says nothing."""
        return self._marks.banned(self._text) if self._grammar is not None and self._place == "inside" else frozenset()

    @property
    def beside(self) -> Collection[int]:
        """Tokens that may come next besides those of the grammar."""
        if self._place == "before":
            return self._marks.opening_ids[self._opened : self._opened + 1]
        return self._marks.blanks if self._place == "blanks" else ()

    def took(self, token: int) -> bool:
        """The output has one token more; whether it may be there."""
        if self.must and self.must[0] == token:
            del self.must[0]
        if self._place == "inside":
            self._think(token)
            return True
        if self._grammar is None:
            if self._ends_with(token, self._marks.opening):
                self._enter()
            return True
        return self._open(self._grammar, token) if self._place == "before" else self._begin(self._grammar, token)

    def _open(self, grammar: Grammar, token: int) -> bool:
        opening, n = self._marks.opening_ids, self._opened
        accepted = self._shared == n and grammar.accept(token)
        self._shared += accepted
        if opening[n : n + 1] != [token]:
            self._place = "over"
            return accepted
        self._opened += 1
        if self._opened == len(opening):
            self._enter()
        elif not accepted:
            self.must = opening[self._opened :]
        if self.must or self._place == "inside":  # the grammar begins behind the thoughts, from its start
            grammar.rollback(self._shared)
            self._shared = 0
        return True

    def _enter(self) -> None:
        self._place, self._count, self._text = "inside", 0, b""
        self._spend()

    def _think(self, token: int) -> None:
        if self._ends_with(token, self._marks.closing):
            self._place, self.must, self._text = "before" if self._grammar is None else "blanks", [], b""
            self._opened = self._shared = 0
        else:
            self._count += 1
            self._spend()

    def _spend(self) -> None:
        if self._budget is not None and self._count >= self._budget and not self.must:
            self.must = self._marks.closing_ids.copy()

    def _begin(self, grammar: Grammar, token: int) -> bool:
        if grammar.accept(token):
            self._place = "over"
            return True
        self._blanks += 1
        allowed = token in self._marks.blanks
        if self._blanks >= BLANKS or not allowed:
            self._place = "over"
        return allowed

    def _ends_with(self, token: int, mark: bytes) -> bool:
        """Whether the text has the mark now."""
        text = self._text + self._marks.token_bytes(token)
        self._text = text[max(0, len(text) - len(mark) + 1) :]
        return mark in text


def own_marks(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """The marks that a model's chat template or vocabulary tells of."""
    special = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
    return parser_for(tokenizer.chat_templates.get("default"), special).think


def begins_of(tokenizer: Tokenizer, params: SamplingParams, marks: Marks, prompt_token_ids: list[int]) -> str:
    """Where the output begins: before, inside or behind thoughts."""
    if params.thinking is not None:
        return params.thinking.begins
    text = tokenizer.decode(prompt_token_ids[-_LOOKS_BACK:], skip_special_tokens=False).rstrip().encode()
    return "inside" if text.endswith(marks.opening) else "behind" if text.endswith(marks.closing) else "before"


def _ids(tokenizer: Tokenizer, mark: str) -> list[int]:
    special = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
    return [special[mark]] if mark in special else tokenizer.encode_within(mark) or []
