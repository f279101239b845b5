"""A prefix cache on disk: what comes back is what was there, and what is damaged is refused with its reason."""

import stat
import struct
from pathlib import Path

import pytest

from tests.storage.attacks import ATTACKS
from tinyvllm.cache import files
from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.files import Layout, append, load, load_key, save
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.errors import FormatError, OutputError
from tinyvllm.storage import folders

BYTES = 8
MODEL = b"weights and dtype"
ENDLESS = 1 << 40
LAYOUT = Layout(2, BYTES, MODEL)
HEADER, RECORD = 68, 16 + 16 + 2 * 4 + 4


class Device:
    """A pool of blocks of two tokens with their contents, `BYTES` each, and its index."""

    def __init__(self, blocks: int, key: bytes = b"key") -> None:
        self.cache = PrefixCache(BlockPool(blocks, 2), key)
        self.contents = [bytearray(BYTES) for _ in range(blocks)]

    def compute(self, tokens: list[int]) -> None:
        hashes = self.cache.hash_blocks(tokens)
        table = self.cache.pool.allocate(len(hashes))
        for block, digest in zip(table, hashes, strict=True):
            self.contents[block][:] = digest[:BYTES]  # as keys and values do, it depends on all tokens so far
        self.cache.publish(hashes, table, 0, len(hashes), lambda start, stop: tokens[start:stop])
        self.cache.pool.release(table)

    def holds(self, tokens: list[int]) -> int:
        """How many blocks of `tokens` are found; each must have the right contents."""
        hashes = self.cache.hash_blocks(tokens)
        blocks = self.cache.match(hashes)
        self.cache.pool.release(blocks)
        assert [bytes(self.contents[block]) for block in blocks] == [digest[:BYTES] for digest in hashes[: len(blocks)]]
        return len(blocks)

    def save(self, folder: Path, limit: int = ENDLESS, fingerprint: bytes = MODEL) -> int:
        return save(folder, self.cache, Layout(2, BYTES, fingerprint), lambda block: memoryview(self.contents[block]), limit)

    def append(self, path: Path, tokens: list[int], first: int = 0) -> None:
        """The blocks of `tokens` from number `first` on as one more group of a file."""
        entries = [self.cache.entry(digest) for digest in self.cache.hash_blocks(tokens)[first:]]
        append(path, LAYOUT, entries, [self.contents[entry.block] for entry in entries])

    def load(self, folder: Path, fingerprint: bytes = MODEL, size: int = BYTES) -> int:
        """The number of blocks that were filled; the first fault is raised."""
        loaded = load(folder, self.cache, Layout(self.cache.pool.block_size, size, fingerprint), self.write)
        for fault in loaded.faults.values():
            raise fault
        return loaded.filled

    def write(self, block: int, data: bytes) -> None:
        self.contents[block][:] = data


OLD, NEW = [1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 9, 9]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    device = Device(8)
    device.compute(OLD)
    device.compute(NEW)
    assert device.save(tmp_path) == 5
    return tmp_path


def test_what_was_cached_is_cached_after_a_restart(written: Path):
    device = Device(8)
    assert device.load(written) == 5
    assert (device.holds(OLD), device.holds(NEW)) == (3, 3)
    assert device.cache.pool.num_free == 8 and device.cache.pool.num_cached == 5
    assert [path.name for path in written.iterdir()] == ["prefix.kv"]
    assert stat.S_IMODE((written / "prefix.kv").stat().st_mode) == 0o600


def test_the_order_of_eviction_survives(written: Path):
    device = Device(5)
    device.load(written)
    device.cache.pool.allocate(2)
    assert (device.holds(OLD), device.holds(NEW)) == (1, 3)


def test_no_file_is_no_block(tmp_path: Path):
    assert Device(2).load(tmp_path) == 0


def test_an_empty_cache_replaces_a_full_one(written: Path):
    assert Device(2).save(written) == 0
    assert Device(2).load(written) == 0


def test_the_limit_keeps_what_was_used_last(written: Path):
    device = Device(8)
    device.load(written)
    limit = HEADER + 3 * (RECORD + BYTES)
    assert device.save(written, limit) == 3
    assert (written / "prefix.kv").stat().st_size == limit
    assert device.save(written, limit - 1) == 2
    assert device.save(written, 0) == 0


def test_as_much_is_read_as_there_are_free_blocks(written: Path):
    device = Device(3)
    device.cache.pool.allocate(1)
    assert device.load(written) == 2 and device.holds(NEW) == 2


def test_blocks_that_are_there_already_are_left_alone(written: Path):
    device = Device(8)
    device.compute(NEW)
    assert device.load(written) == 2 and device.holds(OLD) == 3


def test_other_models_sizes_and_keys_are_refused(written: Path):
    for device, fingerprint, size, reason in (
        (Device(8), b"other", BYTES, "written for another model"),
        (Device(8), MODEL, 16, "expected a bytes per block of 16, found 8"),
        (Device(8, b"other"), MODEL, BYTES, "not that of its tokens under this key"),
    ):
        with pytest.raises(FormatError, match=reason):
            device.load(written, fingerprint, size)
        assert device.cache.pool.num_cached == 0
    with pytest.raises(FormatError, match="expected a block_size of 3, found 2"):
        raise load(written, PrefixCache(BlockPool(8, 3), b"key"), Layout(3, BYTES, MODEL), lambda block, data: None).faults.popitem()[1]


def test_every_truncation_is_refused(written: Path):
    path = written / "prefix.kv"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError, match=str(path)):
            Device(8).load(written)


def test_every_damaged_byte_is_refused_and_what_stays_is_right(written: Path):
    path = written / "prefix.kv"
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x40]) + whole[i + 1 :])
        device = Device(8)
        with pytest.raises(FormatError, match=str(path)):
            device.load(written)
        assert device.holds(OLD) + device.holds(NEW) < 6


def test_another_version_is_named(written: Path):
    path = written / "prefix.kv"
    whole = bytearray(path.read_bytes())
    struct.pack_into("<I", whole, 8, 7)
    path.write_bytes(whole)
    with pytest.raises(FormatError, match="expected version 1, found 7"):
        Device(8).load(written)


def test_a_block_that_could_not_be_filled_is_not_found(written: Path):
    device = Device(8)
    calls: list[int] = []

    def write(block: int, data: bytes) -> None:
        calls.append(block)
        if len(calls) == 3:
            raise OSError("the device")
        device.write(block, data)

    with pytest.raises(OSError, match="the device"):
        load(written, device.cache, LAYOUT, write)
    assert device.cache.pool.num_cached == 2 and device.holds(NEW) == 2


def test_a_failed_save_leaves_the_earlier_file(written: Path):
    before = (written / "prefix.kv").read_bytes()

    def fails(block: int) -> bytes:
        raise OSError(28, "No space left on device")

    device = Device(4)
    device.compute([1, 2])
    with pytest.raises(OutputError, match="No space left"):
        save(written, device.cache, LAYOUT, fails, ENDLESS)
    assert [path.name for path in written.iterdir()] == ["prefix.kv"]
    assert (written / "prefix.kv").read_bytes() == before


def test_a_folder_that_is_not_there_cannot_be_written(tmp_path: Path):
    with pytest.raises(OutputError, match="No such file"):
        Device(2).save(tmp_path / "absent")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="Not a directory"):
        Device(2).save(tmp_path / "file")


def test_a_key_is_made_once_and_kept(tmp_path: Path):
    folder = tmp_path / "a" / "b"
    key = load_key(folder)
    assert len(key) == 32 and load_key(folder) == key != load_key(tmp_path / "c")
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "another file"])
def test_a_damaged_key_is_replaced_and_its_blocks_are_removed(tmp_path: Path, attack: str, caplog: pytest.LogCaptureFixture):
    key = load_key(tmp_path)
    device = Device(8, key)
    device.compute(OLD)
    device.save(tmp_path)
    ATTACKS[attack](tmp_path / "key")
    folders._logged.clear()
    other = load_key(tmp_path)
    assert len(other) == 32 and other != key and load_key(tmp_path) == other and not files.files_of(tmp_path)
    assert len(caplog.messages) == 1 and "it starts without blocks" in caplog.messages[0]


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FormatError, match="cannot be used: .*give another folder"):
        load_key(tmp_path / "file")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(FormatError, match="every user can write to it"):
        load_key(tmp_path / "open")


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "another file"])
@pytest.mark.parametrize("name", ["prefix.kv", "recent-3.kv"])
def test_an_attacked_file_is_a_fault_and_is_replaced(tmp_path: Path, name: str, attack: str):
    device = Device(8)
    device.compute(OLD)
    device.save(tmp_path) if name == "prefix.kv" else device.append(tmp_path / name, OLD)
    ATTACKS[attack](tmp_path / name)
    again = Device(8)
    with pytest.raises(FormatError, match=name):
        again.load(tmp_path)
    again.compute(OLD[2 * again.holds(OLD) :] if not again.holds(OLD) else [])
    again.compute([50, 51])
    again.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != "elsewhere"] == ["prefix.kv"]
    last = Device(8)
    last.load(tmp_path)
    assert last.holds([50, 51]) == 1


def test_what_was_appended_comes_back_and_a_torn_end_costs_no_more_than_itself(written: Path):
    device = Device(16)
    later, last = [1, 2, 3, 4, 5, 6, 10, 11, 12, 13], [20, 21, 22, 23]
    for tokens in (later, last):
        device.compute(tokens)
    path = written / "recent-3.kv"
    device.append(path, later, first=3)
    one = path.stat().st_size
    device.append(path, last)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    whole = path.read_bytes()
    for length in range(one, len(whole) + 1):
        path.write_bytes(whole[:length])
        again = Device(16)
        if one < length < len(whole):
            with pytest.raises(FormatError, match=str(path)):
                again.load(written)
        else:
            again.load(written)
        assert (again.holds(later), again.holds(last), again.holds(NEW)) == (5, 2 if length == len(whole) else 0, 3)


def test_the_newest_comes_first_and_never_without_its_beginning(written: Path):
    device = Device(16)
    device.compute([*OLD, 10, 11])
    device.append(written / "recent-10.kv", [*OLD, 10, 11], first=3)
    device.compute([30, 31, 32, 33])
    device.append(written / "recent-9.kv", [30, 31, 32, 33])  # by number, not by name
    for room, found in ((4, (4, 0)), (5, (4, 1)), (6, (4, 2))):
        again = Device(room)
        again.load(written)
        assert (again.holds([*OLD, 10, 11]), again.holds([30, 31, 32, 33])) == found and again.holds(NEW) == 1


def test_an_orderly_end_takes_the_place_of_all(written: Path):
    device = Device(16)
    device.compute(NEW)
    device.append(written / "recent-1.kv", NEW)
    assert device.save(written) == 3 and [path.name for path in written.iterdir()] == ["prefix.kv"]


def test_what_has_no_room_on_the_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    device = Device(8)
    device.compute(OLD)
    path = tmp_path / "recent-1.kv"
    device.append(path, OLD[:4])
    before = path.read_bytes()
    real, calls = files._write_all, []

    def full(file: object, data: bytes) -> None:
        calls.append(data)
        if len(calls) == 2:
            real(file, data[:3])
            raise OSError(28, "No space left on device")
        real(file, data)

    monkeypatch.setattr(files, "_write_all", full)
    with pytest.raises(OutputError, match="No space left"):
        device.append(path, OLD, first=2)
    assert path.read_bytes() == before
