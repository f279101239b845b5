"""Forbidden words as token sequences: which token would complete one. No text: the caller provides the encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tinyvllm.errors import RequestError


class BadWords:
    """Lists of token ids. A single token is always banned, the last of several if the others are the last of the output.

    That is vLLM's rule: a word written in other tokens than those that the tokenizer makes of it is not recognized.
    """

    def __init__(self, lines: Iterable[Sequence[int]]):
        distinct = [line for line in dict.fromkeys(tuple(line) for line in lines) if line]
        self._always = frozenset(line[0] for line in distinct if len(line) == 1)
        self._after = [(list(line[:-1]), line[-1]) for line in distinct if len(line) > 1]

    @classmethod
    def of(cls, words: Iterable[str], encode: Callable[[str], list[int] | None]) -> BadWords:
        """Each word as it is and with a space in front; `encode` returns the ids of a part of a text, None if it has none.

        RequestError for a word that the vocabulary cannot write.
        """
        lines: list[list[int]] = []
        for word in words:
            found = [ids for text in (word, " " + word.lstrip()) if (ids := encode(text))]
            if not found:
                raise RequestError(f"bad_words: the vocabulary has no tokens for {word!r:.60} (special tokens are none): leave it out")
            lines += found
        return cls(lines)

    @property
    def looks_back(self) -> bool:
        """Whether `banned` depends on the output."""
        return bool(self._after)

    def banned(self, output_token_ids: list[int]) -> frozenset[int]:
        """The ids that must not come next."""
        if not self._after:
            return self._always
        completing = [last for before, last in self._after if output_token_ids[-len(before) :] == before]
        return self._always.union(completing)
