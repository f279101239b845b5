"""Digests of large files: of all of the content, remembered until it changes; sums find every kind of damage."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tinyvllm.storage import digests
from tinyvllm.storage.digests import content_digest, sums


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the files that were read; a digest is remembered however new its file is."""
    real, found = digests._digest_of, []

    def counted(descriptor: int, size: int, stopped: Callable[[], bool] | None) -> str:
        found.append(size)
        return real(descriptor, size, stopped)

    monkeypatch.setattr(digests, "_digest_of", counted)
    monkeypatch.setattr(digests, "_SETTLED_NS", -(10**18))
    monkeypatch.setattr(digests, "PIECE_BYTES", 1000)
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    return found


def file(path: Path, size: int = 2500) -> Path:
    path.write_bytes(np.random.default_rng(size).bytes(size))
    return path


def edit(path: Path, at: int) -> None:
    """Flip a bit in place and set the time of modification back, as a careful patch does."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of file times may be slower than this loop
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        with open(path, "r+b") as opened:
            opened.write(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    data[at] = before.st_size % 251 if data[at] != before.st_size % 251 else 252
    with open(path, "r+b") as opened:
        opened.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_mtime_ns, after.st_size, after.st_ino) == (before.st_mtime_ns, before.st_size, before.st_ino)


def test_a_digest_is_computed_once(tmp_path, reads):
    one, other = file(tmp_path / "one"), file(tmp_path / "other", 3000)
    first = content_digest([one, other])
    assert content_digest([one, other]) == first and reads == [2500, 3000]
    assert content_digest([other, one]) != first and content_digest([one]) != first


def test_a_digest_next_to_other_work_is_equal_and_can_be_stopped(tmp_path, reads):
    pieces = itertools.count()
    with pytest.raises(digests.Stopped):
        content_digest([file(tmp_path / "one")], lambda: next(pieces) == 2)
    first = content_digest([tmp_path / "one"], lambda: False)
    assert content_digest([tmp_path / "one"], lambda: True) == first, "remembered"
    (tmp_path / "copy").write_bytes((tmp_path / "one").read_bytes())
    assert content_digest([tmp_path / "copy"]) == first and next(pieces) == 3


@pytest.mark.parametrize("at", [0, 999, 1000, 1700, 2499])
def test_an_edit_with_its_time_set_back_is_seen(tmp_path, reads, at):
    path = file(tmp_path / "model")
    first = content_digest([path])
    edit(path, at)
    assert content_digest([path]) != first and len(reads) == 2


def test_a_copy_is_the_same(tmp_path, reads):
    path = file(tmp_path / "model")
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    assert content_digest([copy]) == content_digest([path])


def test_the_sizes_of_pieces_count(tmp_path, reads):
    """Zeros: only the length differs."""
    assert (
        len({content_digest([Path(tmp_path / str(n)).write_bytes(bytes(n)) and tmp_path / str(n)]) for n in (999, 1000, 1001, 2000)}) == 4
    )


def test_a_new_file_is_not_remembered(tmp_path, reads, monkeypatch):
    """Within the resolution of file times it could be edited again without a trace."""
    monkeypatch.setattr(digests, "_SETTLED_NS", 2 * 10**9)
    path = file(tmp_path / "model")
    assert content_digest([path]) == content_digest([path]) and len(reads) == 2


def test_a_damaged_memory_is_computed_again(tmp_path, reads):
    path = file(tmp_path / "model")
    first = content_digest([path])
    (remembered,) = (tmp_path / "cache" / "digests").iterdir()
    remembered.write_bytes(remembered.read_bytes()[:-1] + b"0")
    assert content_digest([path]) == first and len(reads) == 2


def test_a_file_that_cannot_be_read(tmp_path, reads):
    with pytest.raises(OSError, match="No such file"):
        content_digest([tmp_path / "none"])


SIZES = (0, 1, 4095, 4096, digests.SUM_BYTES, digests.SUM_BYTES + 12345)


@pytest.mark.parametrize("size", SIZES)
def test_sums_find_damage(size):
    random = np.random.default_rng(size)
    data = random.integers(0, 256, size, np.uint8)
    (whole,) = sums(data)
    assert sums(data.copy()) == [whole] and sums(data[::-1].copy()) != [whole] or size < 2
    assert sums(np.concatenate([data, np.zeros(1, np.uint8)])) != [whole], "a byte more"
    for at in random.integers(0, size, 20) if size else ():
        damaged = data.copy()
        damaged[at] ^= 1 << int(random.integers(8))
        assert sums(damaged) != [whole]
    if size > 8192:
        damaged = data.copy()
        damaged[4096:8192] = 0
        swapped = data.copy()
        swapped[:4096], swapped[4096:8192] = data[4096:8192], data[:4096]
        words = data.copy()
        words[:8], words[8:16] = data[8:16], data[:8]
        assert whole not in (*sums(damaged), *sums(swapped), *sums(words), *sums(np.zeros_like(data)))


def test_sums_of_several_and_of_unaligned_views():
    data = np.random.default_rng(0).integers(0, 256, 3 * digests.SUM_BYTES, np.uint8)
    views = [data[:100], data[3 : digests.SUM_BYTES + 3], data[5:]]
    assert sums(*views) == [digest for view in views for digest in sums(view.copy())]
