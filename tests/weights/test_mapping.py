"""Pages of a mapped file: which are small, and that they are read again."""

from __future__ import annotations

import io
import os
import platform
import sys
from pathlib import Path

import numpy as np
import pytest

from tinyvllm.weights import mapping
from tinyvllm.weights.mapping import forget_pages, in_small_pages, map_shared, read_ahead

SIZE = 4 << 20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="by Linux's table of mappings")


@pytest.fixture
def descriptor(tmp_path: Path):
    (tmp_path / "a file").write_bytes(np.arange(SIZE // 8, dtype=np.uint64).tobytes())
    descriptor = os.open(tmp_path / "a file", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_a_mapping_holds_the_bytes_of_the_file(descriptor):
    read_ahead(descriptor)
    words = np.frombuffer(map_shared(descriptor, SIZE // 2, SIZE // 2), np.uint64)
    np.testing.assert_array_equal(words, np.arange(SIZE // 16, SIZE // 8))


@on_linux
def test_forgotten_pages_are_read_again(descriptor):
    os.fsync(descriptor)
    forget_pages(descriptor)
    words = np.frombuffer(map_shared(descriptor, SIZE, 0), np.uint64)
    np.testing.assert_array_equal(words, np.arange(SIZE // 8))


@on_linux
@pytest.mark.parametrize(("huge", "small"), [(0, True), (2040, True), (2052, False), (4096, False)])
def test_small_pages_are_those_of_the_file(descriptor, monkeypatch, huge, small):
    """By a table of this process in which the file has `huge` KiB in huge pages of 4096; other mappings do not count."""
    path, table = (
        os.readlink(f"/proc/self/fd/{descriptor}"),
        "7f00-7f01 r--s 00000000 fe:00 7 {}\nRss: {} kB\nFilePmdMapped: {} kB\nVmFlags: rd sh\n",
    )
    text = table.format("/another/file", 9999, 0) + table.format(path, 4096, huge) + table.format("", 9999, 0)
    monkeypatch.setattr(mapping, "_has_large_folios", lambda system, release: True)
    monkeypatch.setattr("builtins.open", lambda path: io.StringIO(text))
    assert in_small_pages(descriptor) is small


@on_linux
def test_the_table_of_this_process_is_read(descriptor, monkeypatch):
    monkeypatch.setattr(mapping, "_has_large_folios", lambda system, release: True)
    mapped = map_shared(descriptor, 4096 * 3, 0)
    assert not in_small_pages(descriptor), "nothing was touched"
    assert bytes(mapped[:8]) == bytes(8)
    assert in_small_pages(descriptor), "three pages are no huge one"


@pytest.mark.parametrize(
    ("system", "release", "has"),
    [
        ("linux", "6.16.0", True),
        ("linux", "7.0-rc1", True),
        ("linux", "6.8.0-45-generic", False),
        ("darwin", "24.1.0", False),
        ("linux", "?", False),
    ],
)
def test_which_systems_have_large_folios(system, release, has):
    assert mapping._has_large_folios(system, release) is has


def test_another_system_looks_at_nothing(descriptor, monkeypatch):
    monkeypatch.setattr(platform, "release", lambda: "5.15.0")
    monkeypatch.setattr(os, "readlink", lambda path: pytest.fail("it looked"))
    assert not in_small_pages(descriptor)
