"""A prefix cache on disk, so that it survives a restart. No tensors: the contents of a block are bytes.

A folder holds `key`, the 32 random bytes that key its hashes, with their digest (storage/cache.py); `prefix.kv`, all that was cached
at an orderly shutdown; and `recent-N.kv`, what was cached since (journal.py writes them, the highest N last). A .kv file is a list of
groups, all little-endian:

    header   magic 8s, version u32, block_size u32, bytes_per_block u64, entries u64, fingerprint 32s, checksum u32
    entries  hash 16s, parent 16s, tokens i32 x block_size, checksum u32 of its data
    data     bytes_per_block of each entry, in the same order

prefix.kv is one group, each entry after its parent, otherwise the most recently used first; a recent file grows by groups, the latest last.
The header's checksum is the CRC-32 of the header's bytes before it and of the entries. Only their owner may read the files: they contain
tokens. One process uses a folder at a time; files that two have written at once fail their checksums when they are read.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from tinyvllm.cache.prefix import HASH_BYTES, Entry, PrefixCache
from tinyvllm.errors import FormatError, OutputError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.storage.cache import framed, read_believed, replace_file, verified, write_whole
from tinyvllm.storage.folders import Refusal, open_believed, reason_of, remove, require_private, warn_once

Buffer = bytes | bytearray | memoryview

MAGIC = b"tinykv\r\n"
VERSION = 1
KEY_BYTES = 32
_MAX_KEY_FILE = 1024
_WHOLE = "prefix.kv"
_HEAD = struct.Struct("<8sIIQQ32s")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _HEAD.size + _CHECKSUM.size


@dataclass
class Loaded:
    """What `load` found: how many blocks it filled, the hashes in each file, the oldest file first, and the faults of damaged files."""

    filled: int = 0
    stored: dict[Path, list[bytes]] = field(default_factory=dict)
    faults: dict[Path, FormatError] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """The format of the blocks in a folder's files."""

    block_size: int
    bytes_per_block: int
    fingerprint: bytes  # of all that keys and values depend on: weights, dtype, layout

    @property
    def record(self) -> struct.Struct:
        return struct.Struct(f"<{HASH_BYTES}s{HASH_BYTES}s{4 * self.block_size}sI")

    def group_bytes(self, count: int) -> int:
        """Bytes of a group of `count` blocks."""
        return _HEADER_BYTES + count * (self.record.size + self.bytes_per_block)

    def head(self, count: int) -> bytes:
        """A header without its checksum."""
        return _HEAD.pack(MAGIC, VERSION, self.block_size, self.bytes_per_block, count, self.short)

    @property
    def short(self) -> bytes:
        return blake2b(self.fingerprint, digest_size=32).digest()


def load_key(folder: str | Path) -> bytes:
    """The 32 bytes for `PrefixCache(key=...)` of a folder; creates both if they do not exist. FormatError, OutputError.

    A key that is damaged is replaced, and the files of blocks under it are removed: nothing can be found in them.
    """
    try:
        path = require_private(Path(folder)) / "key"
    except Refusal as reason:
        raise FormatError(f"{folder}: cannot be used: {reason}; give another folder") from reason
    try:
        return verified(read_believed(path, _MAX_KEY_FILE), path.name)
    except FileNotFoundError:
        pass
    except Refusal as reason:
        warn_once(f"damaged {path}", f"prefix cache: {path} is not used: {reason}; it starts without blocks")
        for stored in files_of(folder):
            remove(stored)
    key = os.urandom(KEY_BYTES)
    try:
        write_whole(path, framed(key, path.name))
    except OSError as error:
        raise OutputError(f"prefix cache: {path} cannot be written: {reason_of(error)}; give another folder") from error
    return key


def save(folder: str | Path, cache: PrefixCache, layout: Layout, read_block: Callable[[int], Buffer], limit_bytes: int) -> int:
    """Write what is cached, the latest used first, into a file of at most `limit_bytes`; returns the number of its blocks.

    `read_block(block)` returns `bytes_per_block` bytes, which are written before the next call. Earlier files are removed once this one is
    complete. OutputError if it cannot be written.
    """
    room = max(0, (limit_bytes - layout.group_bytes(0)) // (layout.group_bytes(1) - layout.group_bytes(0)))
    entries = list(islice(cache.entries(), room))
    path = Path(folder) / _WHOLE
    part = path.with_suffix(".part")
    try:
        remove(part)  # of a process that was killed
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
            _write(file, layout, entries, read_block)
            file.flush()
            os.fsync(file.fileno())
        replace_file(part, path)
        for recent in files_of(folder)[1:]:
            remove(recent)
    except OSError as error:
        raise OutputError(f"prefix cache: {path} cannot be written: {error.strerror}; free some space or give another folder") from error
    finally:
        with suppress(OSError):  # it was renamed if all went well
            part.unlink()
    return len(entries)


def append(path: Path, layout: Layout, entries: Sequence[Entry], data: Sequence[Buffer]) -> None:
    """Append a group to a file. OutputError if it cannot be written; the file is then as long as before.

    It is not forced to the disk: the operating system keeps it if the process is killed, and after a loss of power the checksums fail.
    """
    record = layout.record
    records = b"".join(record.pack(e.hash, e.parent, e.tokens, zlib.crc32(d)) for e, d in zip(entries, data, strict=True))
    head = layout.head(len(entries))
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "ab", buffering=0) as file:
            end = os.fstat(file.fileno()).st_size
            try:
                for piece in (head + _CHECKSUM.pack(zlib.crc32(records, zlib.crc32(head))) + records, *data):
                    _write_all(file, piece)
            except OSError:
                with suppress(OSError):
                    os.truncate(path, end)
                raise
    except OSError as error:
        raise OutputError(f"prefix cache: {path} cannot be written: {error.strerror}; free some space or give another folder") from error


def files_of(folder: str | Path) -> list[Path]:
    """The files with blocks, the oldest first: that of an orderly shutdown, then those written since."""
    recent = [(int(found[1]), path) for path in Path(folder).glob("recent-*.kv") if (found := re.fullmatch(r"recent-(\d+)\.kv", path.name))]
    whole = Path(folder) / _WHOLE
    return [whole] * os.path.lexists(whole) + [path for _, path in sorted(recent)]


def load(folder: str | Path, cache: PrefixCache, layout: Layout, write_block: Callable[[int, Buffer], None]) -> Loaded:
    """Adopt the stored blocks into free blocks: the newest first, each after its parent.

    `write_block(block, data)` gets `bytes_per_block` bytes that it must not keep. If a file is damaged, or of another version, model or
    key, the blocks read before the fault stay, and the file is among the faults.
    """
    loaded, newest, broken = Loaded(), list[_Stored](), set[Path]()
    files = files_of(folder)
    for path in reversed(files):
        entries = _scanned(path, layout, loaded.faults)
        newest += entries if path.name == _WHOLE else reversed(entries)
        loaded.stored[path] = [entry.hash for entry in entries]
    loaded.stored = dict(reversed(loaded.stored.items()))
    with _Reader(layout.bytes_per_block) as reader:
        for entry in _chained(newest):
            if entry.path in broken or cache.entry(entry.hash) is not None:
                continue
            try:
                data = reader.read(entry)
                block = cache.adopt(entry.hash, entry.parent, entry.tokens)
            except FormatError as error:
                loaded.faults.setdefault(entry.path, error)
                broken.add(entry.path)
                continue
            if block is None:
                break
            try:
                write_block(block, data)
            except BaseException:
                cache.drop(block)  # its contents are not those of its hash
                raise
            loaded.filled += 1
    return loaded


def _write(file: BinaryIO, layout: Layout, entries: list[Entry], read_block: Callable[[int], Buffer]) -> None:
    """Write the data first and then the header and entries, which need the data's checksums."""
    record, expected = layout.record, layout.bytes_per_block
    file.seek(_HEADER_BYTES + len(entries) * record.size)
    records = bytearray()
    for entry in entries:
        data = memoryview(read_block(entry.block))
        assert data.nbytes == expected, f"prefix cache: block {entry.block} has {data.nbytes} bytes, expected {expected}"
        file.write(data)
        records += record.pack(entry.hash, entry.parent, entry.tokens, zlib.crc32(data))
    head = layout.head(len(entries))
    file.seek(0)
    file.write(head + _CHECKSUM.pack(zlib.crc32(records, zlib.crc32(head))) + records)


def _write_all(file: BinaryIO, data: Buffer) -> None:
    """Write all of `data`: an unbuffered file may take only a part at once."""
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[file.write(rest) :]


class _Stored(NamedTuple):
    """A block in a file."""

    hash: bytes
    parent: bytes
    tokens: bytes
    checksum: int
    path: Path
    place: int  # byte offset of its data


def _scanned(path: Path, layout: Layout, faults: dict[Path, FormatError]) -> list[_Stored]:
    """The entries of a file, up to the first fault."""
    found: list[_Stored] = []
    record, size = layout.record, layout.bytes_per_block
    try:
        with _reading(path), open(open_believed(path), "rb") as file:
            at, end = 0, os.fstat(file.fileno()).st_size
            while at < end or not at:
                file.seek(at)
                entries = _read_entries(path, file, layout, at, end)
                place = at + _HEADER_BYTES + len(entries)
                for i, (digest, parent, tokens, checksum) in enumerate(record.iter_unpack(entries)):
                    found.append(_Stored(digest, parent, tokens, checksum, path, place + i * size))
                at = place + len(entries) // record.size * size
    except FormatError as error:
        faults[path] = error
    return found


def _read_entries(path: Path, file: BinaryIO, layout: Layout, at: int, end: int) -> bytes:
    """A group's entries as bytes, after every check that needs no data."""
    header = file.read(_HEADER_BYTES)
    if header[: len(MAGIC)] != MAGIC:
        raise FormatError(f"{path}: not a prefix cache of tinyvllm; remove the file")
    if len(header) < _HEADER_BYTES:
        raise FormatError(f"{path}: truncated in a header, {len(header)} bytes; remove the file")
    head, (checksum,) = header[: _HEAD.size], _CHECKSUM.unpack(header[_HEAD.size :])
    _, version, block_size, per_block, count, made_for = _HEAD.unpack(head)
    if version != VERSION:
        raise FormatError(f"{path}: expected version {VERSION}, found {version}; remove the file")
    if made_for != layout.short:
        raise FormatError(f"{path}: written for another model, or for the same in another dtype or layout; give each a folder of its own")
    for name, expected, found in (
        ("block_size", layout.block_size, block_size),
        ("bytes per block", layout.bytes_per_block, per_block),
    ):
        if found != expected:
            raise FormatError(f"{path}: expected a {name} of {expected}, found {found}; start as before or remove the file")
    if at + (expected := layout.group_bytes(count)) > end:
        raise FormatError(f"{path}: truncated or damaged, expected {expected} bytes for {count} blocks, found {end - at}; remove the file")
    entries = file.read(count * layout.record.size)
    if zlib.crc32(entries, zlib.crc32(head)) != checksum:
        raise FormatError(f"{path}: the entries are damaged; remove the file")
    return entries


def _chained(newest: list[_Stored]) -> Iterator[_Stored]:
    """Each hash once, after its parent: if only some fit, a block without its parents would be useless."""
    stored: dict[bytes, _Stored] = {}
    for entry in newest:
        stored.setdefault(entry.hash, entry)
    for entry in newest:
        chain: list[_Stored] = []
        digest = entry.hash
        while (found := stored.pop(digest, None)) is not None:
            chain.append(found)
            digest = found.parent
        yield from reversed(chain)


class _Reader:
    """Reads the data of blocks from several files, in any order."""

    def __init__(self, bytes_per_block: int):
        self._data = memoryview(bytearray(bytes_per_block))
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, entry: _Stored) -> memoryview:
        """A block's data, valid until the next read. FormatError if they are not what was written."""
        path = entry.path
        with _reading(path):
            if path not in self._files:
                self._files[path] = open(open_believed(path), "rb")  # noqa: SIM115  closed with the reader
            file = self._files[path]
            file.seek(entry.place)
            read = file.readinto(self._data)  # type: ignore[attr-defined]
        if read != len(self._data) or zlib.crc32(self._data) != entry.checksum:
            raise FormatError(f"{path}: the data of a block at byte {entry.place} are damaged; remove the file")
        return self._data


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {reason_of(error)}; remove the file or give another folder") from error
    except Refusal as reason:
        raise FormatError(f"{path}: is not read: {reason}; remove the file or give another folder") from reason
