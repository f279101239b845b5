"""A small vocabulary of bytes and pieces, and texts forced through a grammar token by token."""

from __future__ import annotations

import numpy as np

from tinyvllm.request import StructuredOutputsParams
from tinyvllm.sampling.grammar import Grammar, GrammarBackend

PIECES = [b'{"', b'":', b'","', b'"}', b"true", b"tr", b"12", b"1", b" ", b"\n ", "é".encode(), "日本".encode(), b"ab", b"abc", b""]
TOKENS = [bytes([i]) for i in range(256)] + PIECES + [b"<s>", b"</s>", b"<|end|>"]  # b"1" and b" " are there twice
BOS, EOS, END = range(len(TOKENS) - 3, len(TOKENS))
V = len(TOKENS) + 5  # the logits are wider than the vocabulary
WORDS = -(-V // 32)


def new_backend() -> GrammarBackend:
    return GrammarBackend(TOKENS, {BOS, EOS, END}, (EOS, END), V)


def allowed(grammar: Grammar) -> set[int]:
    """The tokens of a grammar's mask; what is beyond the vocabulary must not be in it."""
    mask = np.full(WORDS, 0x55555555, np.uint32)
    grammar.fill(mask)
    found = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
    assert not found & {BOS, 256 + len(PIECES) - 1} and max(found, default=0) <= END
    return found


def force(backend: GrammarBackend, params: StructuredOutputsParams, text: str) -> bool:
    """Whether the grammar lets a text come, its longest tokens first, and then ends; masks and `accept` must say the same."""
    grammar, data = Grammar(backend.compile(params)), text.encode()
    longest_first = sorted(range(256 + len(PIECES) - 1), key=lambda token: -len(TOKENS[token]))
    while data:
        mask = allowed(grammar)
        token = next((token for token in longest_first if data.startswith(TOKENS[token]) and token in mask), None)
        if token is None:
            assert not grammar.accept(data[0])
            return False
        assert grammar.accept(token)
        data = data[len(TOKENS[token]) :]
    ends = allowed(grammar) & {EOS, END}
    assert len(ends) in (0, 2) and bool(ends) == grammar.accepting and grammar.accept(END) == bool(ends)
    return bool(ends)
