"""Requests with known answers: LLM's offline outputs, and clients that compare the streams of a server with them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.server.soak_client import Connection, Reply, Told, read_stream, read_whole

_NAMES = ("Lily", "Tom", "Mia", "Ben", "Zoe", "Max")
_THINGS = ("a red kite", "an old boat", "a small dog", "a big tree", "a blue bird", "a round stone")
_ENDS = ("One day", "Then", "In the morning", "Suddenly", '"Look!" said', "It was")
_SHARED = "There was a village by the river. Every child knew the miller, the baker and the old man with the boat. " * 6


@dataclass(frozen=True)
class Asked:
    """A request and its expected answer: for each choice text, token ids, log-probabilities (if requested) and finish reason."""

    path: str
    body: dict[str, Any]
    right: tuple[Told, ...]
    prompt_tokens: int

    @property
    def tokens(self) -> int:
        return sum(len(told.token_ids) for told in self.right)


def _shape(number: int, chance: random.Random) -> dict[str, Any]:
    """Sampling fields under the names that SamplingParams and the API share."""
    fields: dict[str, Any] = {"max_tokens": chance.choice((8, 24, 60, 120, 160)), "temperature": 0.0}
    if number % 2:
        fields |= {"temperature": 0.8, "seed": chance.randrange(2**31), "top_p": chance.choice((1.0, 0.9))}
    kind = number % 9
    if kind == 3:
        fields |= {"n": 2, "temperature": 0.9, "seed": number}
    elif kind == 4:
        fields |= {"stop": [".", "the"]}
    elif kind == 5:
        fields |= {"repetition_penalty": 1.2, "presence_penalty": 0.4}
    elif kind == 6:
        fields |= {"ignore_eos": True, "min_tokens": 4}
    elif kind == 7:
        fields |= {"structured_outputs": {"regex": r"[A-Z][a-z]+ (saw|found) (a|the) [a-z ]{3,60}\."}}
    return fields


def _prompt(chance: random.Random) -> str:
    begin = _SHARED if chance.random() < 0.3 else ""
    middle = " ".join(f"{chance.choice(_NAMES)} had {chance.choice(_THINGS)}." for _ in range(chance.choice((1, 2, 8, 30))))
    return f"{begin}{middle} {chance.choice(_ENDS)}"


def known(count: int, seed: int = 0, **engine: Any) -> list[Asked]:
    """`count` requests with the answers of LLM, computed here."""
    from tinyvllm import LLM, SamplingParams, StructuredOutputsParams

    chance, asked, prompts, params = random.Random(seed), [], [], []
    with LLM(**{"max_num_seqs": 8, "num_blocks": 640, **engine}) as llm:
        for number in range(count):
            text, fields, chat = _prompt(chance), _shape(number, chance), number % 3 == 2
            wants = number % 5 == 1  # log-probabilities
            given = dict(fields)
            if structure := given.pop("structured_outputs", None):
                given["structured_outputs"] = StructuredOutputsParams(**structure)
            messages = [{"role": "user", "content": text}]
            prompts.append({"messages": messages} if chat else text)
            params.append(replace(llm.default_params, **given, logprobs=1 if wants else None))
            body = {**fields, **({"messages": messages} if chat else {"prompt": text}), "return_token_ids": True}
            if wants:
                body |= {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
            if number % 8 != 7:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            asked.append(("/v1/chat/completions" if chat else "/v1/completions", body))
        assert all(isinstance(one, SamplingParams) for one in params)
        outputs = llm.generate(prompts, params)
    found = []
    for (path, body), output in zip(asked, outputs, strict=True):
        right = []
        for part in output.outputs:
            values = [at[token].logprob for token, at in zip(part.token_ids, part.logprobs or (), strict=False)]
            right.append(Told(part.text, list(part.token_ids), values, part.finish_reason))
        found.append(Asked(path, body, tuple(right), len(output.prompt_token_ids)))
    return found


def fault_of(asked: Asked, reply: Reply) -> str | None:
    """The fault of an answer; None if every token, text, log-probability and number equals the offline one."""
    if not reply.whole:
        return f"cut off after status {reply.status} and {len(reply.body)} bytes"
    if reply.status != 200:
        return f"status {reply.status}: {reply.body[:300]!r}"
    got = read_stream(reply.body) if asked.body.get("stream") else read_whole(reply.body)
    if got.error is not None:
        return f"an error in the stream: {got.error}"
    if not got.done:
        return "no [DONE] at the end"
    if sorted(got.choices) != list(range(len(asked.right))):
        return f"choices {sorted(got.choices)} instead of {len(asked.right)}"
    for index, right in enumerate(asked.right):
        if difference := _difference(right, got.choices[index]):
            return f"choice {index}: {difference}"
    used = got.usage or {}
    if (used.get("prompt_tokens"), used.get("completion_tokens")) != (asked.prompt_tokens, asked.tokens):
        return f"usage {used} instead of {asked.prompt_tokens} and {asked.tokens} tokens"
    return None


def _difference(right: Told, got: Told) -> str | None:
    if got.token_ids != right.token_ids:
        at = next((i for i, pair in enumerate(zip(right.token_ids, got.token_ids, strict=False)) if pair[0] != pair[1]), None)
        return f"{len(got.token_ids)} tokens instead of {len(right.token_ids)}, the first other one at {at}"
    if got.text != right.text:
        return f"text {got.text[-80:]!r} instead of {right.text[-80:]!r}"
    if got.finish_reason != right.finish_reason:
        return f"finish_reason {got.finish_reason} instead of {right.finish_reason}"
    if len(got.logprobs) != len(right.logprobs):
        return f"{len(got.logprobs)} log-probabilities instead of {len(right.logprobs)}"
    if any(abs(a - b) > 1e-4 for a, b in zip(got.logprobs, right.logprobs, strict=True)):
        return "other log-probabilities"
    return None


@dataclass
class Tally:
    """The counts of some clients."""

    requests: int = 0
    tokens: int = 0
    events: int = 0
    firsts: list[float] = field(default_factory=list)  # seconds to the first byte of streams
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, asked: Asked, reply: Reply) -> None:
        self.requests += 1
        try:
            fault = fault_of(asked, reply)
        except (ValueError, LookupError, TypeError) as error:
            fault = f"an answer that cannot be read ({error!r})"
        if fault is not None:
            self.faults[f"{asked.path}: {fault}"] += 1
            return
        self.tokens += asked.tokens
        self.events += reply.body.count(b"\n\n")
        if asked.body.get("stream"):
            self.firsts.append(reply.first)


async def keep_asking(port: int, work: Sequence[Asked], tally: Tally, until: float, seed: int, more: str = "") -> None:
    """One client: consecutive random requests until the time `until` (time.monotonic)."""
    chance, connection = random.Random(seed), Connection(port)
    while time.monotonic() < until:
        asked = chance.choice(work)
        tally.add(asked, await connection.ask(asked.path, asked.body, more))
        await asyncio.sleep(0)  # a refusal returns at once; let the other clients run
    connection.close()
