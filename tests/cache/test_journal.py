"""What is newly cached reaches the disk in its turn, once, and the folder does not grow without end."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cache.test_files import LAYOUT, Device
from tinyvllm.cache.files import Loaded, load
from tinyvllm.cache.journal import Journal
from tinyvllm.errors import OutputError


def begun(folder: Path, device: Device) -> Journal:
    return Journal(folder, device.cache, LAYOUT, load(folder, device.cache, LAYOUT, device.write))


def drain(journal: Journal, device: Device, count: int = 3) -> int:
    """Have all written that waits; how many blocks."""
    written = 0
    while entries := journal.next(count):
        journal.write(entries, [bytes(device.contents[entry.block]) for entry in entries])
        written += len(entries)
    return written


def test_what_is_cached_is_written_once(tmp_path: Path) -> None:
    device = Device(16)
    journal = begun(tmp_path, device)
    assert not journal.waits and journal.next(4) == []
    device.compute([1, 2, 3, 4, 5, 6])
    assert journal.waits and drain(journal, device) == 3 and not journal.waits
    device.compute([1, 2, 3, 4, 7, 8])
    assert drain(journal, device) == 1
    journal.close()
    again = Device(16)
    restarted = begun(tmp_path, again)
    assert (again.holds([1, 2, 3, 4, 5, 6]), again.holds([1, 2, 3, 4, 7, 8])) == (3, 3)
    assert not restarted.waits, "what was read is on the disk already"
    again.compute([9, 9])
    assert drain(restarted, again) == 1
    restarted.close()
    assert len(list(tmp_path.iterdir())) == 2, "a file of another process is never continued"


def test_what_is_gone_before_its_turn_is_not_written(tmp_path: Path) -> None:
    device = Device(4)
    journal = begun(tmp_path, device)
    for n in range(40):
        device.compute([n, n, n, n])
    assert drain(journal, device) <= 4
    journal.close()
    again = Device(4)
    assert again.load(tmp_path) == 4 and again.holds([39, 39, 39, 39]) == 2


def test_the_folder_stays_small_and_holds_what_is_cached(tmp_path: Path) -> None:
    """A thousand prompts through twelve blocks, the folder read by another at times: as after a kill."""
    device = Device(12)
    journal = begun(tmp_path, device)
    dice = random.Random(5)
    for turn in range(1000):
        device.compute([0, 0, *dice.choices(range(3), k=6)])
        if dice.random() < 0.5:
            drain(journal, device, dice.randint(1, 4))
        if turn % 50 == 49:
            drain(journal, device)
            journal.bytes_on_their_way  # noqa: B018  raises what went wrong
            journal._writer.submit(int).result()
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4 * 12 * LAYOUT.group_bytes(1)
            other = Device(400)
            other.load(tmp_path)
            cached = [entry.hash for entry in device.cache.entries()]
            assert len(cached) >= 8 and all(other.cache.known([digest]) for digest in cached)
    journal.close()


def test_a_damaged_file_goes_once_what_is_good_of_it_is_written_again(tmp_path: Path) -> None:
    device = Device(16)
    journal = begun(tmp_path, device)
    device.compute([1, 2, 3, 4, 5, 6])
    drain(journal, device, 16)
    device.compute([7, 8])
    drain(journal, device)
    journal.close()
    (damaged,) = tmp_path.glob("recent-1.kv")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    again = Device(16)
    restarted = begun(tmp_path, again)
    assert drain(restarted, again) >= 3
    restarted.close()
    assert not damaged.exists()
    third = Device(16)
    assert third.load(tmp_path) >= 3 and third.holds([1, 2, 3, 4, 5, 6]) == 3


def test_a_disk_that_fails_is_told(tmp_path: Path) -> None:
    device = Device(16)
    journal = Journal(tmp_path / "absent", device.cache, LAYOUT, Loaded())
    device.compute([1, 2])
    drain(journal, device)
    journal._writer.submit(int).result()
    with pytest.raises(OutputError, match="No such file"):
        journal.bytes_on_their_way  # noqa: B018
    journal.close()
    device.compute([3, 4])
    assert not journal.waits, "a closed journal ignores the cache"
