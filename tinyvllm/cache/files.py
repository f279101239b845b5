"""A prefix cache on disk, so that it survives a restart. Knows no tensors: what a block holds comes and goes as bytes.

A folder holds `key`, the 32 random bytes under which its hashes were made, and `prefix.kv`, everything little-endian:

    header   magic 8s, version u32, block_size u32, bytes_per_block u64, entries u64, fingerprint 32s, checksum u32
    entries  hash 16s, parent 16s, tokens i32 x block_size, checksum u32 of its data; each behind its parent, the latest used first
    data     bytes_per_block of each entry, in the same order

The header's checksum is the CRC-32 of what stands before it and of the entries. Both files may be read by their owner only: tokens can be
read from them. The folder is one process's at a time; what two wrote at once is noticed when it is read.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from tinyvllm.cache.prefix import HASH_BYTES, Entry, PrefixCache
from tinyvllm.errors import FormatError, OutputError

Buffer = bytes | bytearray | memoryview

MAGIC = b"tinykv\r\n"
VERSION = 1
KEY_BYTES = 32
_HEAD = struct.Struct("<8sIIQQ32s")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _HEAD.size + _CHECKSUM.size


def load_key(folder: str | Path) -> bytes:
    """The 32 bytes for `PrefixCache(key=...)` that belong to a folder; both are made where they are absent. FormatError, OutputError."""
    path = Path(folder) / "key"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(os.urandom(KEY_BYTES))
    except OSError as error:
        raise OutputError(f"prefix cache: {path} cannot be written: {error.strerror}; give another folder") from error
    with _reading(path):
        key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise FormatError(f"{path}: expected a key of {KEY_BYTES} bytes, found {len(key)}; empty the folder")
    return key


def save(
    folder: str | Path,
    cache: PrefixCache,
    fingerprint: bytes,
    bytes_per_block: int,
    read_block: Callable[[int], Buffer],
    limit_bytes: int,
) -> int:
    """Write what is cached, the latest used first, into a file of at most `limit_bytes`; returns the number of its blocks.

    `fingerprint` stands for all that keys and values depend on (weights, dtype, layout). `read_block(block)` gives `bytes_per_block` bytes,
    used up before the next call. An earlier file stays until this one is whole. OutputError where it cannot be written.
    """
    assert bytes_per_block > 0, "prefix cache: blocks without bytes"
    record = _record(cache.pool.block_size)
    room = max(0, (limit_bytes - _HEADER_BYTES) // (record.size + bytes_per_block))
    entries = list(islice(cache.entries(), room))
    path = Path(folder) / "prefix.kv"
    part = path.with_suffix(".part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            head = _HEAD.pack(MAGIC, VERSION, cache.pool.block_size, bytes_per_block, len(entries), _short(fingerprint))
            _write(file, head, record, entries, bytes_per_block, read_block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise OutputError(f"prefix cache: {path} cannot be written: {error.strerror}; free some space or give another folder") from error
    finally:
        with suppress(OSError):  # there is none any more where all went well
            part.unlink()
    return len(entries)


def load(
    folder: str | Path,
    cache: PrefixCache,
    fingerprint: bytes,
    bytes_per_block: int,
    write_block: Callable[[int, Buffer], None],
) -> int:
    """Adopt what `save` wrote, as far as there are free blocks; returns how many were filled, 0 where there is no file.

    `write_block(block, data)` gets `bytes_per_block` bytes that it must not keep. FormatError for a file that is damaged, of another
    version, model or key: blocks filled before it was noticed are good and stay.
    """
    filled = 0
    for digest, parent, tokens, data in _stored(Path(folder) / "prefix.kv", cache.pool.block_size, bytes_per_block, _short(fingerprint)):
        if cache.known([digest]):
            continue
        if (block := cache.adopt(digest, parent, tokens)) is None:
            break
        try:
            write_block(block, data)
        except BaseException:
            cache.drop(block)  # or others would take what it holds for what its hash says
            raise
        filled += 1
    return filled


def _write(
    file: BinaryIO, head: bytes, record: struct.Struct, entries: list[Entry], bytes_per_block: int, read_block: Callable[[int], Buffer]
) -> None:
    """The data first and then what stands before them, since their checksums are known only then."""
    file.seek(_HEADER_BYTES + len(entries) * record.size)
    records = bytearray()
    for entry in entries:
        data = memoryview(read_block(entry.block))
        assert data.nbytes == bytes_per_block, f"prefix cache: block {entry.block} has {data.nbytes} bytes, expected {bytes_per_block}"
        file.write(data)
        records += record.pack(entry.hash, entry.parent, entry.tokens, zlib.crc32(data))
    file.seek(0)
    file.write(head + _CHECKSUM.pack(zlib.crc32(records, zlib.crc32(head))) + records)


def _stored(path: Path, block_size: int, bytes_per_block: int, fingerprint: bytes) -> Iterator[tuple[bytes, bytes, bytes, memoryview]]:
    """(hash, parent, tokens, data) of each entry of a file; the data are good until the next one is asked for."""
    record, data = _record(block_size), memoryview(bytearray(bytes_per_block))
    with _reading(path):
        if not path.exists():
            return
        with open(path, "rb") as file:
            entries = _read_entries(path, file, record, fingerprint, block_size, bytes_per_block)
            for i, (digest, parent, tokens, checksum) in enumerate(record.iter_unpack(entries)):
                if file.readinto(data) != bytes_per_block or zlib.crc32(data) != checksum:
                    raise FormatError(f"{path}: the data of block {i} are damaged; remove the file")
                yield digest, parent, tokens, data


def _read_entries(path: Path, file: BinaryIO, record: struct.Struct, fingerprint: bytes, block_size: int, bytes_per_block: int) -> bytes:
    """The entries' bytes, the file standing behind them; every reason not to take the file is looked for first."""
    header = file.read(_HEADER_BYTES)
    if header[: len(MAGIC)] != MAGIC:
        raise FormatError(f"{path}: not a prefix cache of tinyvllm; remove the file")
    if len(header) < _HEADER_BYTES:
        raise FormatError(f"{path}: truncated in its header, {len(header)} bytes; remove the file")
    head, (checksum,) = header[: _HEAD.size], _CHECKSUM.unpack(header[_HEAD.size :])
    _, version, size, per_block, count, made_for = _HEAD.unpack(head)
    if version != VERSION:
        raise FormatError(f"{path}: expected version {VERSION}, found {version}; remove the file")
    if made_for != fingerprint:
        raise FormatError(f"{path}: written for another model, or for the same in another dtype or layout; give each a folder of its own")
    for name, expected, found in (("block_size", block_size, size), ("bytes per block", bytes_per_block, per_block)):
        if found != expected:
            raise FormatError(f"{path}: expected a {name} of {expected}, found {found}; start as before or remove the file")
    expected, found = _HEADER_BYTES + count * (record.size + per_block), os.fstat(file.fileno()).st_size
    if found != expected:
        raise FormatError(f"{path}: truncated or damaged, expected {expected} bytes for {count} blocks, found {found}; remove the file")
    entries = file.read(count * record.size)
    if zlib.crc32(entries, zlib.crc32(head)) != checksum:
        raise FormatError(f"{path}: the entries are damaged; remove the file")
    return entries


def _record(block_size: int) -> struct.Struct:
    return struct.Struct(f"<{HASH_BYTES}s{HASH_BYTES}s{4 * block_size}sI")


def _short(fingerprint: bytes) -> bytes:
    return blake2b(fingerprint, digest_size=32).digest()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error.strerror}; remove the file or give another folder") from error
