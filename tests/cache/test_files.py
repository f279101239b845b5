"""A prefix cache on disk: what comes back is what was there, and what is damaged is refused with its reason."""

import stat
import struct
from pathlib import Path

import pytest

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.files import load, load_key, save
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.errors import FormatError, OutputError

BYTES = 8
MODEL = b"weights and dtype"
ENDLESS = 1 << 40
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
        return save(folder, self.cache, fingerprint, BYTES, lambda block: memoryview(self.contents[block]), limit)

    def load(self, folder: Path, fingerprint: bytes = MODEL, size: int = BYTES) -> int:
        return load(folder, self.cache, fingerprint, size, self.write)

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
        load(written, PrefixCache(BlockPool(8, 3), b"key"), MODEL, BYTES, lambda block, data: None)


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
        load(written, device.cache, MODEL, BYTES, write)
    assert device.cache.pool.num_cached == 2 and device.holds(NEW) == 2


def test_a_failed_save_leaves_the_earlier_file(written: Path):
    before = (written / "prefix.kv").read_bytes()

    def fails(block: int) -> bytes:
        raise OSError(28, "No space left on device")

    device = Device(4)
    device.compute([1, 2])
    with pytest.raises(OutputError, match="No space left"):
        save(written, device.cache, MODEL, BYTES, fails, ENDLESS)
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


def test_a_key_that_is_none_is_refused(tmp_path: Path):
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(FormatError, match="expected a key of 32 bytes, found 5"):
        load_key(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot be written"):
        load_key(tmp_path / "file")
