"""The hashes of the prompt that a request of any API has. Knows no tokens, so that a router needs no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tinyvllm.distributed.prefix_map import chained_hashes

# Fields of all APIs that make a prompt, in the order in which templates use them.
_FIELDS = ("model", "segments", "tools", "system", "instructions", "messages", "prompt", "input", "input_prefix", "text", "inputs")


def prompt_hashes(body: bytes, owner: bytes = b"") -> list[bytes]:
    """The hashes of the beginnings of a request's prompt, the shortest first; none for a body without a prompt.

    owner  what keeps its prefixes apart, such as the API key of the request; a `cache_salt` of the body does so, too
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(data, dict):
        return []
    salt = repr(data.get("cache_salt")).encode("utf-8", "surrogatepass")
    return chained_hashes(_prompt_bytes(data), owner + b"\0" + salt)


def _prompt_bytes(data: Mapping[str, Any]) -> bytes:
    parts: list[bytes] = []
    for name in _FIELDS:
        if (value := data.get(name)) is not None:
            # message by message: the end of a conversation must not change the bytes of its beginning
            values = value if isinstance(value, list) else [value]
            parts += [name.encode(), *(json.dumps(one, sort_keys=True).encode() for one in values)]
    return b"\0".join(parts)
