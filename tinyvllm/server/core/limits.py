"""The limits of the server for what clients send, in one place; docs/serving-limits.md describes them.

Lengths of arrays are checked by the body models, so a body is refused before anything is made of it. Limits that an option changes are in
`core/config.py`; those that depend on a model (its context, its vocabulary) are checked when its name is known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tinyvllm.request.limits import MAX_COUNT, MAX_TOKEN_IDS, MAX_WORDS
from tinyvllm.server.core.failures import Failure

__all__ = ["MAX_COUNT", "MAX_TOKEN_IDS", "MAX_WORDS", "check_values"]  # those of the engine's own limits that body models repeat

MAX_BODY = 4 * 2**20  # bytes; default of --max-body
THREAD_BODY = 100_000  # bytes; longer bodies are parsed and checked in a thread
MAX_CONTAINERS = 50_000  # arrays and objects of a body: parsing a million takes half a second, during which no other thread runs
MAX_TRACE_STEPS = 1000  # of one call of /debug/trace
MAX_TRACE_SECONDS = 30.0  # that it waits for them
MAX_MEMBERS = 150_000  # names in the objects of a body: 400,000 different ones take 0.2 s in the same way

MAX_MESSAGES = 10_000  # messages of a conversation, or items
MAX_PARTS = 1_000  # parts or blocks of a message, its tool calls
MAX_TOOLS = 1_000
MAX_DOCUMENTS = 1_000
MAX_PROMPTS = 2_048  # prompts of a request, inputs of embeddings
MAX_CHOICES = 1_024  # sequences of a request: prompts times n or best_of
MAX_LOGIT_BIAS = 10_000
MAX_NAMES = 64  # entries of metadata, segments of a prompt
MAX_NAME = 512  # characters of names, of users, and of metadata, which the access log repeats
MAX_TEXT = 2**20  # characters of a text for /tokenize, token ids for /detokenize: their memory is a hundred times that

MAX_STORED_RESPONSES = 256  # answers of /v1/responses for each key
MAX_STORED_KEY_BYTES = 16 * 2**20  # of these, as JSON
MAX_STORED_BYTES = 64 * 2**20  # for all keys
MAX_STORED_AGE = 24 * 3600  # seconds
MAX_BACKGROUND = 64  # answers of /v1/responses of each key that run in the background

MAX_FILE = 64 * 2**20  # bytes of an uploaded file
MAX_FILES = 100  # of a key
MAX_FILES_BYTES = 256 * 2**20  # of all files, and of the answers of a batch that runs: they are in memory
MAX_BATCHES = 100  # of a key; then the oldest finished one leaves
MAX_BATCH_LINES = 50_000
MAX_BATCH_ERRORS = 100  # that a batch with wrong lines names

MAX_HEAD = 64 * 1024  # bytes of a request's head
MAX_HEADERS = 200
RESERVED_TOKENS = 1_024  # output tokens that a request without max_tokens reserves of its key's tokens_per_minute
MAX_CONNECTIONS = 2_000  # default of --max-connections
SPARE_DESCRIPTORS = 256  # open files other than connections: weights, caches, libraries
MAX_BODIES = 64  # of the longest length, that running requests may hold together

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
# At most 5000 in one match, which holds the interpreter lock. Not possessive: before Python 3.11.5 that matches too much or too little.
_STRINGS = re.compile(rb'(?:[^"]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"){1,5000}', re.DOTALL)


def check_values(raw: bytes) -> None:
    """Failure 400 for a body with more than MAX_CONTAINERS arrays and objects, or MAX_MEMBERS names. Those in strings do not count.

    The parser holds the interpreter lock, so a thread alone does not keep the event loop free.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_CONTAINERS and raw.count(b":") <= MAX_MEMBERS:
        return
    containers = members = 0
    for piece in _outside_strings(raw):
        containers += piece.count(b"[") + piece.count(b"{")
        members += piece.count(b":")
    if containers > MAX_CONTAINERS:
        text = f"the body has {containers} arrays and objects, the limit is {MAX_CONTAINERS}; send fewer or shorter lists in one request"
        raise Failure(400, text, code="too_many_values")
    if members > MAX_MEMBERS:
        text = f"the body has {members} names in its objects, the limit is {MAX_MEMBERS}; send fewer or smaller objects in one request"
        raise Failure(400, text, code="too_many_values")


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """What is outside the strings of a body, piece by piece: other threads run in between. Linear for every body."""
    at = 0
    while (strings := _STRINGS.match(raw, at)) is not None:
        yield _STRING.sub(b"", raw[at : strings.end()])
        at = strings.end()
    yield raw[at:].partition(b'"')[0]  # what follows is a string without end
