"""Drafters and a controller for tests: what they guess is scripted, and so is how they misbehave."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Row
from typing import Any

from tinyvllm import LLM
from tinyvllm.request import Sequence
from tinyvllm.speculate.protocol import Draft, DraftRequest

Guess = Callable[[list[int], int], list[int]]  # (tokens of prompt and output, how many are wanted) -> drafts


class Fixed:
    """Always K drafts."""

    pauses = False

    def __init__(self, K: int):
        self.K = K
        self.checked: list[tuple[int, int]] = []  # drafts and accepted ones, as observed
        self.steps: list[int] = []  # rows

    def limits(self, sequences: Row[Sequence], num_sequences: int) -> list[int]:
        return [self.K] * len(sequences)

    def rest(self, sequences: Row[Sequence]) -> int:
        return 0

    def batch_pause(self, num_sequences: int) -> int:
        return 0

    def choose(self, requests: Row[DraftRequest], drafts: Row[Draft], num_sequences: int) -> list[int]:
        return [len(draft.tokens) for draft in drafts]

    def observe_proposal(self, num_drafts: int, seconds: float) -> None:
        assert 1 <= num_drafts <= self.K

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafts
        self.checked.append((num_drafts, num_accepted))

    def observe_step(self, num_sequences: int, num_drafts: int, seconds: float) -> None:
        self.steps.append(num_sequences + num_drafts)

    def forget(self, sequence: Sequence) -> None:
        pass

    @property
    def accepted(self) -> int:
        return sum(accepted for _, accepted in self.checked)


class Scripted:
    """Guesses what `guess` says, and keeps what it was told."""

    method = "scripted"

    def __init__(self, guess: Guess, looks_up: bool = True):
        self.guess, self.looks_up = guess, looks_up
        self.texts: dict[int, list[int]] = {}  # by sequence id, from what was observed
        self.forgotten: dict[int, list[int]] = {}
        self.tenants: set[str] = set()

    def propose(self, requests: Row[DraftRequest]) -> list[Draft]:
        for request in requests:
            self.tenants.add(request.tenant)
            sequence = request.sequence
            output = self.texts.get(sequence.sequence_id, [])
            assert sequence.prompt_token_ids + output == sequence.token_ids(0, len(sequence)), "every token was observed, and once"
        return [Draft(self.guess(r.sequence.token_ids(0, len(r.sequence)), r.max_drafts)) for r in requests]

    def observe(self, sequence: Sequence, num_new: int) -> None:
        self.texts.setdefault(sequence.sequence_id, []).extend(sequence.output_token_ids[-num_new:])

    def forget(self, sequence: Sequence) -> None:
        assert sequence.sequence_id not in self.forgotten
        self.forgotten[sequence.sequence_id] = self.texts.pop(sequence.sequence_id, [])


class Oracle:
    """Knows continuations by their prompts. Outputs of an engine without drafts teach it."""

    def __init__(self, outputs: Row[Any]) -> None:
        self.texts = [output.prompt_token_ids + part.token_ids for output in outputs for part in output.outputs]

    def right(self, tokens: list[int], count: int) -> list[int]:
        known = next((text for text in self.texts if text[: len(tokens)] == tokens), [])
        return known[len(tokens) : len(tokens) + count]

    def half_right(self, tokens: list[int], count: int) -> list[int]:
        """Right for some tokens, a different number of them each time, then wrong."""
        right = self.right(tokens, count)
        good = len(tokens) % 4
        return right[:good] + [(token + 1) % 200 for token in right[good:]]

    def wrong(self, tokens: list[int], count: int) -> list[int]:
        return [(token + 1) % 200 for token in self.right(tokens, count)]


def repeats(tokens: list[int], count: int) -> list[int]:
    """Prompt lookup: what followed the last occurrence of the last two tokens before."""
    for start in range(len(tokens) - 3, -1, -1):
        if tokens[start : start + 2] == tokens[-2:]:
            return tokens[start + 2 : start + 2 + count]
    return []


def speculate(llm: LLM, guess: Guess, K: int, looks_up: bool = True) -> tuple[Scripted, Fixed]:
    """Let an engine take these guesses from its next step on."""
    drafter, controller = Scripted(guess, looks_up), Fixed(K)
    llm.engine.speculate(drafter, controller)
    return drafter, controller
