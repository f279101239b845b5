"""Reasoning before an answer: the marks around it, a budget for it, and the structure that begins after it.

Marks are found in the text, as a reader of the answer finds them: a model may write one in other tokens than the tokenizer would.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from tinyvllm.request import SamplingParams
from tinyvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tinyvllm.sampling.grammar import Grammar

MAX_BLANKS = 2  # blank tokens between the closing mark and a structure: models are trained to write a line feed or two
TAIL = 64  # tokens at the end of the prompt in which a mark is looked for


class ReasoningMarks:
    """The marks around a model's reasoning, as bytes and as tokens. All sequences of an engine share them."""

    def __init__(self, tokenizer: Tokenizer, opening: str, closing: str, eos_ids: Iterable[int]):
        self.opening, self.closing = opening.encode(), closing.encode()
        self.opening_ids, self.closing_ids = _ids(tokenizer, opening), _ids(tokenizer, closing)  # empty: the vocabulary cannot write it
        self.token_bytes = tokenizer.token_bytes
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = tokenizer.vocab_size

    @cached_property
    def blanks(self) -> tuple[int, ...]:
        """The tokens of spaces, tabs and line feeds only."""
        return tuple(i for i in range(self._vocab_size) if (text := self.token_bytes(i)) and not text.strip(b" \t\r\n"))

    @cached_property
    def _overruns(self) -> tuple[frozenset[int], ...]:
        """By the number of bytes of the closing mark that are written: the tokens that complete it and have text after it."""
        overruns = []
        tokens = [self.token_bytes(i) for i in range(self._vocab_size)]
        for written in range(len(self.closing)):
            rest = self.closing[written:]
            closing = [(i, text) for i, text in enumerate(tokens) if (text.startswith(rest) if written else rest in text)]
            overruns.append(frozenset(i for i, text in closing if text.partition(rest)[2].strip()))
        return tuple(overruns)

    def scan_vocabulary(self) -> None:
        """Compute what depends on the vocabulary: a tenth of a second that another thread than the engine's can spend."""
        _ = self.blanks, self._overruns

    def banned(self, text: bytes) -> frozenset[int]:
        """Tokens that must not follow `text` inside reasoning before a structure: an end, and a mark with text after it in one token."""
        written = [n for n in range(len(self.closing)) if text.endswith(self.closing[:n])]
        return self._eos_ids.union(*(self._overruns[n] for n in written))


class Reasoning:
    """The reasoning of one sequence. Its state is "before", "inside", "blanks" (after the closing mark) or "over".

    After `budget` tokens inside, the closing mark must come; None sets no bound. With a grammar, reasoning comes first or not at all, and
    the grammar begins after it (`MAX_BLANKS` blank tokens may come between); without one it may open and close anywhere, any number of
    times. `must` has the tokens that have to come next.
    """

    def __init__(self, marks: ReasoningMarks, initial: str, budget: int | None, grammar: Grammar | None):
        """`initial` is "before", "inside" or "after": where the output begins."""
        self.must: list[int] = []
        self._marks, self._budget, self._grammar = marks, budget, grammar
        self._state = "before"
        self._count = 0  # tokens inside
        self._text = b""  # the last bytes, fewer than those of a mark
        self._num_opened = 0  # tokens of the opening mark so far, with a grammar
        self._num_shared = 0  # those of them that the grammar has accepted too
        self._num_blanks = 0
        if initial == "inside":
            self._enter()
        elif grammar is not None and (initial == "after" or not marks.opening_ids):
            self._state = "over"

    @property
    def over(self) -> bool:
        """Only the grammar is left."""
        return self._state == "over"

    @property
    def uses_grammar(self) -> bool:
        """Whether the grammar restricts the next token."""
        if self._state == "before":
            return self._grammar is not None and self._num_shared == self._num_opened
        return self._state != "inside"

    @property
    def banned(self) -> frozenset[int]:
        """Tokens that must not come next while the grammar does not apply."""
        return self._marks.banned(self._text) if self._grammar is not None and self._state == "inside" else frozenset()

    @property
    def extra_tokens(self) -> Collection[int]:
        """Tokens that may come next in addition to those of the grammar."""
        if self._state == "before":
            return self._marks.opening_ids[self._num_opened : self._num_opened + 1]
        return self._marks.blanks if self._state == "blanks" else ()

    def accept(self, token: int) -> bool:
        """Take in the next token of the output; False if it is not allowed there."""
        if self.must and self.must[0] == token:
            del self.must[0]
        if self._state == "inside":
            self._continue(token)
            return True
        if self._grammar is None:
            if self._ends_with(token, self._marks.opening):
                self._enter()
            return True
        return self._open(self._grammar, token) if self._state == "before" else self._begin(self._grammar, token)

    def _open(self, grammar: Grammar, token: int) -> bool:
        opening, n = self._marks.opening_ids, self._num_opened
        accepted = self._num_shared == n and grammar.accept(token)
        self._num_shared += accepted
        if opening[n : n + 1] != [token]:
            self._state = "over"
            return accepted
        self._num_opened += 1
        if self._num_opened == len(opening):
            self._enter()
        elif not accepted:
            self.must = opening[self._num_opened :]
        if self.must or self._state == "inside":  # the grammar starts again after the reasoning
            grammar.rollback(self._num_shared)
            self._num_shared = 0
        return True

    def _enter(self) -> None:
        self._state, self._count, self._text = "inside", 0, b""
        self._check_budget()

    def _continue(self, token: int) -> None:
        if self._ends_with(token, self._marks.closing):
            self._state, self.must, self._text = "before" if self._grammar is None else "blanks", [], b""
            self._num_opened = self._num_shared = 0
        else:
            self._count += 1
            self._check_budget()

    def _check_budget(self) -> None:
        if self._budget is not None and self._count >= self._budget and not self.must:
            self.must = self._marks.closing_ids.copy()

    def _begin(self, grammar: Grammar, token: int) -> bool:
        if grammar.accept(token):
            self._state = "over"
            return True
        self._num_blanks += 1
        allowed = token in self._marks.blanks
        if self._num_blanks >= MAX_BLANKS or not allowed:
            self._state = "over"
        return allowed

    def _ends_with(self, token: int, mark: bytes) -> bool:
        """Whether the token completes the mark in the text."""
        text = self._text + self._marks.token_bytes(token)
        self._text = text[max(0, len(text) - len(mark) + 1) :]
        return mark in text


def model_marks(tokenizer: Tokenizer) -> tuple[str, str] | None:
    """The marks in a model's chat template or vocabulary; None without any."""
    special = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
    from tinyvllm.text.parsing import parser_for  # 5 ms of a start that has no use for it

    return parser_for(tokenizer.chat_templates.get("default"), special).think


def initial_state(tokenizer: Tokenizer, params: SamplingParams, marks: ReasoningMarks, prompt_token_ids: list[int]) -> str:
    """Where the output begins: "before", "inside" or "after" its reasoning."""
    if params.reasoning is not None:
        return params.reasoning.begins
    text = tokenizer.decode(prompt_token_ids[-TAIL:], skip_special_tokens=False).rstrip().encode()
    return "inside" if text.endswith(marks.opening) else "after" if text.endswith(marks.closing) else "before"


def _ids(tokenizer: Tokenizer, mark: str) -> list[int]:
    """The tokens that write a mark, which may consist of special tokens and text between them; empty if none do."""
    special = {text: i for i in tokenizer.special_ids if (text := tokenizer.token_text(i)) and text in mark}
    longest_first = sorted(special, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", mark) if special else [mark]
    encoded = [[special[part]] if part in special else tokenizer.encode_within(part) for part in parts if part]
    return [] if None in encoded else [i for ids in encoded for i in ids or ()]
