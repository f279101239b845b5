"""The arithmetic of windows against what queries see, key by key."""

from __future__ import annotations

import pytest

from tinyvllm.windows import BlockGroups, Window


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


@pytest.mark.parametrize("full, windowed", [(0, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("tokens", [1, 5, 9])
def test_rows_of_groups(tokens: int, full: int, windowed: int) -> None:
    groups = BlockGroups(Window(tokens, 4), full, windowed)
    table = [*range(10 * groups.count)]
    for freed in range(11):
        held = groups.held(table, freed)
        windowed_blocks = groups.windowed_blocks(table, 0, freed)
        assert sorted(held + windowed_blocks) == table and len(windowed_blocks) == freed * windowed
        assert all(block % groups.count >= full for block in windowed_blocks)
    for rows in range(11):
        seen = groups.held(table[: rows * groups.count], groups.window.first_block(4 * rows))
        assert groups.num_seen(rows) == len(seen)
        assert groups.num_seen(rows, min(rows, 3)) == sum(block >= 3 * groups.count for block in seen)


@pytest.mark.parametrize("full, windowed", [(0, 1), (1, 1), (1, 5), (2, 1)])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(full: int, windowed: int) -> None:
    for tokens in (0, 1, 9):
        groups = BlockGroups(Window(tokens, 4), full, windowed)
        for blocks in range(1, 60):
            longest = groups.longest(blocks, 200, 6)
            assert groups.most_blocks(longest, 6) <= blocks and (longest == 200 or groups.most_blocks(longest + 1, 6) > blocks)
