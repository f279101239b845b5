"""Text for streaming: only whole characters, and nothing that may still become a stop string.

Knows neither requests nor tokenizer libraries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

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


_CHARACTERS = 0x110000  # Unicode's code points
_KEPT_AUTOMATONS = 8  # of a few megabytes each, for the longest stop strings


class StopAutomaton:
    """Which stop strings end at each character of a text: Aho and Corasick's automaton (1975). Immutable, so that requests share it.

    A state is the longest end of the text that begins a stop string; state 0 is the empty one. Time and memory to build it are linear in
    the characters of all stop strings, and a step does not depend on them.
    """

    def __init__(self, stops: Iterable[str]):
        self.lengths = [0]  # by state: its characters
        self.matches: list[str | None] = [None]  # by state: the longest stop string that it ends with
        self._edges: dict[int, int] = {}  # by state * _CHARACTERS + character; a dict for each state would take ten times the memory
        self._fails = [0]  # by state: the longest shorter end of it that is a state
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for length, character in enumerate(stop, start=1):
            new = len(self.lengths)
            state = self._edges.setdefault(state * _CHARACTERS + ord(character), new)
            if state == new:
                self.lengths.append(length)
                self.matches.append(None)
                self._fails.append(0)
        self.matches[state] = stop

    def _link(self) -> None:
        """Set the fails of all states, the shorter ones first."""
        for edge, state in sorted(self._edges.items(), key=lambda item: self.lengths[item[1]]):
            parent, code = divmod(edge, _CHARACTERS)
            if parent:
                self._fails[state] = self._step(self._fails[parent], code)
            if self.matches[state] is None:
                self.matches[state] = self.matches[self._fails[state]]

    def _step(self, state: int, code: int) -> int:
        while (found := self._edges.get(state * _CHARACTERS + code)) is None and state:
            state = self._fails[state]
        return found or 0

    def step(self, state: int, character: str) -> int:
        """The state after one more character of the text."""
        return self._step(state, ord(character))


@lru_cache(_KEPT_AUTOMATONS)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings, kept for the next request with them; from any thread."""
    return StopAutomaton(stops)


class StopStrings:
    """Finds the first stop string in text that arrives in pieces, and holds back text that may be the start of one.

    The first stop string is the one that is complete first; of several complete at the same character, the longest. So the result does not
    depend on how the text is cut into pieces. `matched` is that string, None until it is found.
    """

    def __init__(self, automaton: StopAutomaton, include_stop_str: bool = False):
        self._automaton = automaton
        self._include = include_stop_str
        self._state = 0
        self._held = ""  # the characters of the state
        self.matched: str | None = None

    def add(self, text: str) -> tuple[str, str | None]:
        """(text that contains no stop string, the stop string that ended it or None). After a match all further text is dropped."""
        if self.matched is not None:
            return "", self.matched
        automaton, state, num_held = self._automaton, self._state, len(self._held)
        whole = self._held + text
        for end, character in enumerate(text, start=num_held + 1):
            state = automaton.step(state, character)
            if (matched := automaton.matches[state]) is not None:
                self.matched, self._held = matched, ""
                return whole[: end if self._include else end - len(matched)], matched
        self._state, num_safe = state, len(whole) - automaton.lengths[state]
        self._held = whole[num_safe:]
        return whole[:num_safe], None

    def finish(self) -> str:
        """The text held back, when no more text follows."""
        text, self._held = self._held, ""
        return text
