"""The requests of a load: random prompts, or those of a file, and when each of them arrives."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinyvllm.errors import ArgumentError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIRST_TOKEN = 10  # of random prompts: smaller ids are often special tokens
WORDS = ("the", "a", "red", "old", "small", "kite", "river", "house", "went", "saw", "was", "very", "day", "and", "then", "we")
MAX_LENGTH = 1 << 22  # tokens of a random prompt or answer


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: `N`, `LOW-HIGH` (uniform), or `lognormal:MEDIAN,SIGMA,MAX`."""

    text: str
    kind: str
    numbers: tuple[float, ...]

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """ArgumentError, which names the option, for any other text."""
        if match := re.fullmatch(r"(\d{1,8})(?:-(\d{1,8}))?", text, re.ASCII):
            low, high = int(match[1]), int(match[2] or match[1])
            if 1 <= low <= high <= MAX_LENGTH:
                return cls(text, "uniform", (low, high))
        if match := re.fullmatch(r"lognormal:(\d{1,8}),(\d{1,3}(?:\.\d{1,6})?),(\d{1,8})", text, re.ASCII):
            median, sigma, most = int(match[1]), float(match[2]), int(match[3])
            if 1 <= median <= most <= MAX_LENGTH and sigma <= 10:
                return cls(text, "lognormal", (median, sigma, most))
        raise ArgumentError(f"{option}: expected N, LOW-HIGH or lognormal:MEDIAN,SIGMA,MAX, of 1 to {MAX_LENGTH} tokens, got {text[:60]!r}")

    def draw(self, chance: random.Random) -> int:
        if self.kind == "uniform":
            return chance.randint(int(self.numbers[0]), int(self.numbers[1]))
        median, sigma, most = self.numbers
        return max(1, min(int(most), round(chance.lognormvariate(math.log(median), sigma))))


@dataclass(frozen=True)
class Prompt:
    """The fields of a prompt (prompt, prompt_token_ids or messages), its own sampling fields, and its tokens where they are known."""

    fields: Mapping[str, Any]
    sampling: Mapping[str, Any]
    tokens: int = 0


@dataclass(frozen=True)
class Request:
    """When it arrives, in seconds from the start; its body; the tokens of its prompt and of its answer, 0 where they are not known."""

    arrival: float
    body: bytes
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class RandomPrompts:
    """Random token ids below `vocabulary`, or words (about a token each); `prefixes` of them are shared beginnings of `prefix` tokens."""

    input: Lengths
    output: Lengths
    vocabulary: int
    words: bool
    prefix: int = 0
    prefixes: int = 1

    def draw(self, count: int, seed: int, load: int) -> list[Prompt]:
        """`count` prompts, the same for the same seed; loads differ, or the second would find the first's in the prefix cache."""
        chance = random.Random(f"{seed} {load}")
        shared = [self._some(self.prefix, random.Random(f"{seed} prefix {number}")) for number in range(self.prefixes)]
        prompts = []
        for _ in range(count):
            tokens = [*chance.choice(shared), *self._some(self.input.draw(chance), chance)]
            fields = {"prompt": " ".join(map(str, tokens))} if self.words else {"prompt_token_ids": tokens}
            prompts.append(Prompt(fields, {"max_tokens": self.output.draw(chance)}, len(tokens)))
        return prompts

    def _some(self, count: int, chance: random.Random) -> list[int | str]:
        return [chance.choice(WORDS) if self.words else chance.randrange(FIRST_TOKEN, self.vocabulary) for _ in range(count)]


def arrivals(rate: float, burstiness: float, count: int, chance: random.Random) -> list[float]:
    """Seconds from the start. Gaps are gamma-distributed with the mean 1 / rate and the shape `burstiness`: 1 are Poisson arrivals, less is
    burstier, infinity is a clock. An infinite rate lets all requests arrive at the start.
    """
    if rate == math.inf:
        return [0.0] * count
    at, times = 0.0, []
    for _ in range(count):
        times.append(at)
        at += 1 / rate if burstiness == math.inf else chance.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


def requests(prompts: Sequence[Prompt], at: Sequence[float], endpoint: str, common: Mapping[str, Any], seed: int) -> list[Request]:
    """A request for each arrival; the prompts begin again where they are fewer. `common` fields yield to a prompt's own."""
    chance = random.Random(f"{seed} sampling")
    made = []
    for number, arrival in enumerate(at):
        prompt = prompts[number % len(prompts)]
        body = {"stream": True, "stream_options": {"include_usage": True}, "seed": chance.randrange(2**31), **common, **prompt.sampling}
        body |= _prompt_fields(prompt, endpoint)
        wanted = body["max_tokens"] if body.get("ignore_eos") else 0
        made.append(Request(arrival, json.dumps(body).encode(), prompt.tokens, wanted))
    return made


def _prompt_fields(prompt: Prompt, endpoint: str) -> dict[str, Any]:
    """The prompt as an endpoint takes it. ArgumentError for one that it does not."""
    (name, value), *_ = prompt.fields.items()
    if endpoint == CHAT:
        if name == "prompt_token_ids":
            raise ArgumentError(f"bench serve: {CHAT} takes texts and messages, and a prompt is token ids: give --endpoint {COMPLETIONS}")
        return {"messages": value if name == "messages" else [{"role": "user", "content": value}]}
    if name == "messages":
        raise ArgumentError(f"bench serve: {COMPLETIONS} takes texts and token ids, and a prompt is messages: give --endpoint {CHAT}")
    return {"prompt": value}
