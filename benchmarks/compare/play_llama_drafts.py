"""llama.cpp with drafts, by hand: guesses of its binding's prompt lookup or of a second model, verified in one `llama_decode`.

The loop is that of play_llama_cpp, faster than the binding's own `generate`: argmax over the logits of the rows that are checked, no
sampler and no copy of all logits. A draft is accepted if it is the argmax; what follows a rejected one is removed from the cache.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from benchmarks.compare.child import serve
from benchmarks.compare.play_llama_cpp import Llama


class LlamaDrafts(Llama):
    """Greedy answers to prompts of token ids, with no drafts, by lookup in the text, or by a draft model."""

    def __init__(self, options: argparse.Namespace):
        super().__init__(options)
        self._drafts = 0
        self._lookup: Callable[[np.ndarray], np.ndarray] | None = None
        self._second: SecondModel | None = None
        self._opened: dict[str, SecondModel] = {}

    def use(self, way: str, drafts: int, model: str = "") -> None:
        """Guess by `way`, "plain", "lookup" or "draft", at most `drafts` tokens a step."""
        self._drafts, self._lookup, self._second = drafts, None, None
        if way == "lookup":
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            self._lookup = LlamaPromptLookupDecoding(num_pred_tokens=drafts)
        if way == "draft":
            if model not in self._opened:
                self._opened[model] = SecondModel(argparse.Namespace(**vars(self.options) | {"model": model}))
            self._second = self._opened[model]

    def answers(self, prompts: list[list[int]], counts: list[int]) -> list[object]:
        """Seconds after the first token of each answer, summed, and the answers: `counts` tokens each, without regard to their end."""
        seconds, answers = 0.0, []
        for ids, count in zip(prompts, counts, strict=True):
            self._forget()
            tokens = [self._compute(ids, 0)]
            start = time.perf_counter()
            while len(tokens) < count:
                self._advance(ids, tokens, count)
            seconds += time.perf_counter() - start
            answers.append(tokens[:count])
        return [seconds, answers]

    def _advance(self, ids: list[int], tokens: list[int], count: int) -> None:
        """One step: the drafts that are right, and the token after them."""
        position, room = len(ids) + len(tokens) - 1, count - len(tokens) - 1
        drafts = self._guess(ids + tokens, min(self._drafts, room)) if self._drafts and room > 0 else []
        drawn = self._decode([(token, position + i, 0, True) for i, token in enumerate([tokens[-1], *drafts])])
        accepted = next((i for i, draft in enumerate(drafts) if drawn[i] != draft), len(drafts))
        tokens += drawn[: accepted + 1]
        if accepted < len(drafts):
            self.cut(position + accepted + 1)

    def _guess(self, known: list[int], most: int) -> list[int]:
        if self._second is not None:
            return self._second.guess(known, most)
        return [] if self._lookup is None else [int(token) for token in self._lookup(np.array(known, np.intc))[:most]]

    def _compute(self, ids: list[int], start: int) -> int:
        """The tokens ids[start:] in chunks; the most likely next one."""
        best: list[int] = []
        for first in range(start, len(ids), self.chunk):
            piece = range(first, min(first + self.chunk, len(ids)))
            best = self._decode([(ids[i], i, 0, i == len(ids) - 1) for i in piece])
        return best[0]

    def cut(self, position: int) -> None:
        """Remove the tokens from `position` on from the cache."""
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, position, -1)


class SecondModel(LlamaDrafts):
    """The draft model: what its cache holds stays as far as it is the beginning of the text."""

    def __init__(self, options: argparse.Namespace):
        super().__init__(options)
        self._cached: list[int] = []

    def guess(self, known: list[int], most: int) -> list[int]:
        most_kept = min(len(self._cached), len(known) - 1)
        kept = next((i for i in range(most_kept) if self._cached[i] != known[i]), most_kept)
        self.cut(kept)
        drafts = [self._compute(known, kept)]
        while len(drafts) < most:
            drafts += self._decode([(drafts[-1], len(known) + len(drafts) - 1, 0, True)])
        self._cached = known + drafts[:-1]
        return drafts


if __name__ == "__main__":
    serve(LlamaDrafts)
