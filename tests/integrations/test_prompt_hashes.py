"""Hashes of the prompts of requests."""

from __future__ import annotations

import json

from tinyvllm.distributed.prefix_map import MAX_PIECES, PIECE_BYTES
from tinyvllm.integrations.prompt_hashes import prompt_hashes

LONG = "a prompt of some length, " * 40


def hashes(text: str, **fields: object) -> list[bytes]:
    return prompt_hashes(json.dumps({"prompt": text, **fields}).encode())


def chat(*texts: str) -> list[bytes]:
    return prompt_hashes(json.dumps({"messages": [{"role": "user", "content": text} for text in texts]}).encode())


def test_hashes_agree_as_far_as_prompts_do() -> None:
    first, second = hashes(LONG + "x" * 600), hashes(LONG + "y" * 600)
    same = sum(a == b for a, b in zip(first, second))
    assert same == len(LONG) // PIECE_BYTES and first[same] != second[same] and len(first) == len(second) > same
    assert hashes(LONG, temperature=0.5, max_tokens=3) == hashes(LONG)
    turn = chat(LONG, "b")
    assert chat(LONG, "b", "c" * 300)[: len(turn)] == turn


def test_owners_and_salts_keep_prefixes_apart() -> None:
    body = json.dumps({"prompt": LONG}).encode()
    flat = [prompt_hashes(body)[0], prompt_hashes(body, b"Bearer a")[0], hashes(LONG, cache_salt="s")[0], hashes(LONG, model="m")[0]]
    assert len(set(flat)) == 4


def test_any_body_has_bounded_hashes() -> None:
    assert prompt_hashes(b"") == prompt_hashes(b"[" * 100_000) == prompt_hashes(b"[1]") == prompt_hashes(b"\xff") == []
    assert prompt_hashes(b'{"prompt": null}') == [] and prompt_hashes(b"{}") == []
    assert len(hashes("short")) == 1 and len(hashes("x" * 10_000_000)) == MAX_PIECES
    assert prompt_hashes(b'{"prompt": [1, 2, {"a": "\\ud800"}]}')
