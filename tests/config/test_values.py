"""Sizes with units, and paths from a home."""

from __future__ import annotations

import pytest

from tinyvllm.config.values import parse_size
from tinyvllm.errors import ArgumentError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("2G", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5KiB", 1536),
        ("64", 64),
        (" 3 kib ", 3072),
        ("10B", 10),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("kv_memory", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 gallons", "0", "0.1", "nan", "1e9", "2GiBB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentError, match="kv_memory"):
        parse_size("kv_memory", text)


def test_files_that_name_no_home() -> None:
    from tinyvllm.cli.chat import _read_messages
    from tinyvllm.cli.lines import read_lines
    from tinyvllm.cli.new_file import new_file
    from tinyvllm.engine.tools.record import record_to
    from tinyvllm.engine.tools.recording import read_run

    name = "~no-such-user/x"
    for use in (_read_messages, record_to, read_run, lambda name: list(read_lines(name)), lambda name: new_file(name).__enter__()):
        with pytest.raises(ArgumentError, match="and there is no such home"):
            use(name)
