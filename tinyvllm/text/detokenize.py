"""Text for streaming: only whole characters, and nothing that may still become a stop string.

Knows neither requests nor tokenizer libraries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tinyvllm.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text that output tokens add to a prompt, token by token.

    The pieces that `add` and `finish` return, joined, are `tokenizer.decode(prompt + output)` without its longest common prefix with
    `tokenizer.decode(prompt)`: a character that is incomplete in the prompt is completed in the output.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True):
        self._stream = tokenizer.text_stream(skip_special_tokens)
        self._stream.resume(prompt_token_ids)
        self._shown = self._stream.held()  # the end of the prompt's own text, which the stream has not returned yet

    def add(self, token_ids: int | Iterable[int]) -> str:
        """New text after one or more tokens: "" while a character is incomplete."""
        if isinstance(token_ids, int):
            text = self._stream.add(token_ids)
        else:
            text = "".join([self._stream.add(token_id) for token_id in token_ids])
        return self._without_shown(text)

    def finish(self) -> str:
        """The rest of the text, with U+FFFD for incomplete characters."""
        return self._without_shown(self._stream.finish())

    def _without_shown(self, text: str) -> str:
        """Remove what the prompt's own text already contains."""
        if not (text and self._shown):
            return text
        same = 0
        while same < min(len(text), len(self._shown)) and text[same] == self._shown[same]:
            same += 1
        self._shown = self._shown[same:] if same == len(text) else ""
        return text[same:]


class StopStrings:
    """Finds the first stop string in text that arrives in pieces, and holds back text that may be the start of one.

    The first stop string is the one that is complete first; of several complete at the same character, the longest. So the result does not
    depend on how the text is cut into pieces. `matched` is that string, None until it is found.
    """

    def __init__(self, stop: Iterable[str], include_stop_str: bool = False):
        self._stops = tuple(stop)
        self._include = include_stop_str
        self._prefixes = frozenset(one[:length] for one in self._stops for length in range(1, len(one)))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> tuple[str, str | None]:
        """(text that contains no stop string, the stop string that ended it or None). After a match all further text is dropped."""
        if self.matched is not None:
            return "", self.matched
        text = self._held + text
        self._held = ""
        ends = [(start + len(one), start, one) for one in self._stops if (start := text.find(one)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            return text[: end if self._include else start], self.matched
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._prefixes:
                self._held = text[start:]
                return text[:start], None
        return text, None

    def finish(self) -> str:
        """The text held back, when no more text follows."""
        text, self._held = self._held, ""
        return text
