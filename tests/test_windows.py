"""The arithmetic of windows against what queries see, key by key."""

from __future__ import annotations

import pytest

from tinyvllm.windows import Window


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("tokens", [1, 3, 4, 9])
def test_the_first_block_has_the_first_token_that_is_seen(tokens: int, size: int) -> None:
    window = Window(tokens, size)
    for position in range(40):
        first = min(key for key in range(position + 1) if key > position - tokens)
        assert window.first_block(position) == first // size
        assert Window(0, size).first_block(position) == 0


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("chunk", [1, 6])
@pytest.mark.parametrize("tokens", [1, 3, 4, 9])
def test_no_sequence_holds_more(tokens: int, chunk: int, size: int) -> None:
    """Whatever the chunks are, where blocks are freed once another one is full, as far as the last computed token does not see them."""
    window = Window(tokens, size)
    for total in range(1, 60):
        for begin in range(min(chunk, total) + 1):  # the first chunk, then the longest ones
            held, computed, first = [0], 0, 0
            while computed < total:
                count = min(begin if not computed and begin else chunk, total - computed)
                held.append(-(-(computed + count) // size) - first)
                full = computed // size
                computed += count
                first = window.first_block(computed - 1) if computed // size > full else first
            assert max(held) <= window.most_blocks(total, chunk) <= -(-total // size)
        assert Window(0, size).most_blocks(total, chunk) == -(-total // size)
