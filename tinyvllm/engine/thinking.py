"""A budget for reasoning: after so many tokens between the model's marks of thinking, the closing mark is written for it."""

from __future__ import annotations

from tinyvllm.errors import RequestError
from tinyvllm.text.parsing import parser_for
from tinyvllm.text.tokenizer import Tokenizer


class ThinkingBudget:
    """Counts one sequence's tokens of reasoning. A budget of 0 closes at once what is opened."""

    def __init__(self, budget: int, tokenizer: Tokenizer | None, prompt: str | None, prompt_token_ids: list[int]):
        if tokenizer is None:
            raise RequestError("thinking_token_budget: this engine has no tokenizer (skip_tokenizer_init), so no marks are known")
        template = tokenizer.chat_templates.get("default")
        dialect = parser_for(template, {tokenizer.token_text(i): i for i in tokenizer.special_ids})
        if dialect.think is None:
            raise RequestError("thinking_token_budget: this model's chat template and vocabulary have no marks of thinking")
        self._budget = budget
        self._open, self._close = (self._ids(tokenizer, mark) for mark in dialect.think)
        text = tokenizer.decode(prompt_token_ids, skip_special_tokens=False) if prompt is None else prompt
        self._thinking, self._count = dialect.opened(text), 0

    @staticmethod
    def _ids(tokenizer: Tokenizer, mark: str) -> list[int]:
        special = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
        ids = [special[mark]] if mark in special else tokenizer.encode_within(mark)
        if not ids:
            raise RequestError(f"thinking_token_budget: the vocabulary cannot write {mark!r}")
        return ids

    def begun(self) -> list[int]:
        """Tokens that the answer must begin with: the prompt may have opened what may not be."""
        return self._closed() if self._thinking and not self._budget else []

    def took(self, output_token_ids: list[int]) -> list[int]:
        """The output has one token more; those that must follow it now."""
        if output_token_ids[-len(self._open) :] == self._open:
            self._thinking, self._count = True, 0
        elif output_token_ids[-len(self._close) :] == self._close:
            self._thinking = False
        elif self._thinking:
            self._count += 1
        return self._closed() if self._thinking and self._count >= self._budget else []

    def _closed(self) -> list[int]:
        self._thinking = False
        return list(self._close)
