"""Text as it may be shown while tokens are still coming: whole characters only, and nothing that may yet become a stop string.

Knows neither requests nor any tokenizer library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tinyvllm.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """The text that output tokens add to a prompt, token by token.

    All pieces returned by `add` and `finish` together are what `tokenizer.decode(prompt + output)` has beyond the longest beginning that it
    shares with `tokenizer.decode(prompt)`: a character that the prompt left incomplete is completed in the output.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True):
        self._stream = tokenizer.text_stream(skip_special_tokens)
        self._stream.resume(prompt_token_ids)
        self._shown = self._stream.held()  # the prompt's own decode ends in this, though the stream has yet to return it

    def add(self, token_ids: int | Iterable[int]) -> str:
        """New text after one or more tokens: "" while a character is incomplete."""
        if isinstance(token_ids, int):
            text = self._stream.add(token_ids)
        else:
            text = "".join([self._stream.add(token_id) for token_id in token_ids])
        return self._without_shown(text)

    def finish(self) -> str:
        """The rest of the text, with U+FFFD for what never became a character."""
        return self._without_shown(self._stream.finish())

    def _without_shown(self, text: str) -> str:
        """Leave out what the prompt's own text has shown, as far as the two agree."""
        if not (text and self._shown):
            return text
        same = 0
        while same < min(len(text), len(self._shown)) and text[same] == self._shown[same]:
            same += 1
        self._shown = self._shown[same:] if same == len(text) else ""
        return text[same:]


class StopStrings:
    """Finds the first stop string in text that comes in pieces, and holds back what may be the beginning of one.

    First is the one that is complete first, and of several complete at the same character the longest: so the result does not depend on how
    the text is cut into pieces. `matched` is that string, None until then.
    """

    def __init__(self, stop: Iterable[str], include_stop_str: bool = False):
        self._stops = tuple(stop)
        self._include = include_stop_str
        self._beginnings = frozenset(one[:length] for one in self._stops for length in range(1, len(one)))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def add(self, text: str) -> tuple[str, str | None]:
        """(text that is certain now, the stop string it ended with or None). After a match all further text is dropped."""
        if self.matched is not None:
            return "", self.matched
        text = self._held + text
        self._held = ""
        ends = [(start + len(one), start, one) for one in self._stops if (start := text.find(one)) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            return text[: end if self._include else start], self.matched
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._beginnings:
                self._held = text[start:]
                return text[:start], None
        return text, None

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        text, self._held = self._held, ""
        return text
