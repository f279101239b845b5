"""The GGUF format, versions 2 and 3, little endian: metadata, a table of tensors, then their bytes.

Reads one file or all parts of a split one. Knows how values and tensors are stored; not what any key means beyond
`general.alignment` and `split.*`. Written against ggml's docs/gguf.md. Every length is checked against the file before anything is
allocated.
"""

from __future__ import annotations

import re
import struct
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NoReturn

import numpy as np

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.foreign import MAX_TENSORS, quoted
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.formats import FORMATS_BY_TYPE_ID, BlockFormat
from tinyvllm.weights.mapping import TensorRecord, map_file

_SPEAKER = "gguf"
_MAX_ELEMENTS = 1 << 21  # of all metadata arrays of a file: published vocabularies have 262,144 tokens and 514,906 merges
_MAX_METADATA = 128 << 20  # bytes; those of the largest vocabulary are 16 MB
_MAX_KEYS = 65_536  # published files have fewer than 100
_MAX_DEPTH = 4  # arrays of arrays
_ARRAY_COST = 16  # an array in an array takes the time of this many strings
_MAX_RANK = 4  # ggml's own limit
_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "u1", 10: "<u8", 11: "<i8", 12: "<f8"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SHAPES = [struct.Struct(f"<{rank}QIQ") for rank in range(_MAX_RANK + 1)]  # shape, type number, offset


def read_gguf(path: Path) -> tuple[dict[str, object], dict[str, TensorRecord]]:
    """Metadata as plain Python values, and the tensors by name as views into the file. Any part of a split file opens all of them.

    Raises FormatError for a damaged file, ModelError if one cannot be read or a part is missing.
    """
    parts = split_parts(path)
    metadata, tensors = _read_part(parts[0])
    for number, part in enumerate(parts[1:], 1):
        more_metadata, more_tensors = _read_part(part)
        if more_metadata.get("split.no") != number:
            _refuse(part, f"has split.no {quoted(more_metadata.get('split.no'))} (counted from 0), but its name says part {number}")
        for name in more_tensors.keys() & tensors.keys():
            _refuse(part, f"tensor {quoted(name)} is in an earlier part too")
        tensors |= more_tensors
    _check_split(path, metadata, len(parts), len(tensors))
    return metadata, tensors


def tensor_spans(path: Path, data: bytes) -> dict[str, tuple[int, int]] | None:
    """First byte and bytes of each tensor of a file that begins with `data`; None where the header goes beyond it.

    FormatError for a damaged header. Nothing is compared with the size of the file.
    """
    try:
        _, infos, start, _ = _read_header(path, _Cursor(path, memoryview(data)))
    except _EndOfData:
        return None
    return {info.name: (start + info.offset, info.nbytes) for info in infos}


def split_parts(path: Path) -> list[Path]:
    """All files of the model that `path` is a part of, in order; [path] if it is not split. ModelError names a missing one."""
    match = _SPLIT_NAME.match(path.name)
    if match is None or not path.is_file():
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ModelError(f"{_SPEAKER}: {path.name} is one of {count} parts, and {part.name} is not in the same folder; download it too")
    if path not in parts:
        raise ModelError(f"{_SPEAKER}: {path.name} is not a possible part of {count}; was it renamed?")
    return parts


def _check_split(path: Path, metadata: dict[str, object], parts: int, tensors: int) -> None:
    declared = metadata.get("split.count", 1)
    if declared not in (parts, 0):
        _refuse(path, f"belongs to a model in {quoted(declared)} parts, but {parts} were found; keep the names -00001-of-0000N.gguf")
    if parts > 1 and metadata.get("split.tensors.count") != tensors:
        _refuse(path, f"has parts with {tensors} tensors in total, but the first declares {quoted(metadata.get('split.tensors.count'))}")


def _read_part(path: Path) -> tuple[dict[str, object], dict[str, TensorRecord]]:
    data = map_file(path, _SPEAKER)
    metadata, infos, start, alignment = _read_header(path, _Cursor(path, data.data))
    return metadata, _view_tensors(path, data, infos, start, alignment)


def _read_header(path: Path, cursor: _Cursor) -> tuple[dict[str, object], list[_Info], int, int]:
    """Metadata, the table of tensors, the position of the first byte of tensors, and the alignment."""
    if cursor.take(4, "magic") != b"GGUF":
        _refuse(path, "is not a GGUF file: it does not begin with the letters GGUF")
    _check_version(path, cursor.u32("version"))
    tensor_count, key_count = cursor.u64("tensor count"), cursor.u64("metadata count")
    for what, count, limit in (("tensors", tensor_count, MAX_TENSORS), ("metadata keys", key_count, _MAX_KEYS)):
        if count > limit:
            _refuse(path, f"has {count} {what}, and at most {limit} are read; it is corrupt, or no model that can be run")
    metadata: dict[str, object] = {}
    for _ in range(key_count):
        key = cursor.string("metadata key")
        if key in metadata:
            _refuse(path, f"metadata key {quoted(key)} appears twice")
        metadata[key] = cursor.value(cursor.u32("type of a metadata value"), key)
    infos = _read_infos(path, cursor, tensor_count)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        _refuse(path, f"general.alignment must be a power of two up to 2^20, got {quoted(alignment)}")
    return metadata, infos, -(-cursor.position // alignment) * alignment, alignment


def _check_version(path: Path, version: int) -> None:
    if version in (2, 3):
        return
    if version & 0xFFFF == 0:
        _refuse(path, "is a big-endian GGUF file; only little-endian ones can be read, convert it with gguf-py's gguf_convert_endian")
    _refuse(path, f"is GGUF version {version}; versions 2 and 3 can be read, convert the model again with a current llama.cpp")


@dataclass(frozen=True)
class _Info:
    name: str
    format: BlockFormat
    shape: tuple[int, ...]
    offset: int  # from the first byte of all tensors
    nbytes: int


def _read_infos(path: Path, cursor: _Cursor, count: int) -> list[_Info]:
    infos: dict[str, _Info] = {}
    for _ in range(count):
        name = cursor.string("tensor name")
        if name in infos:
            _refuse(path, f"tensor {quoted(name)} appears twice")
        rank = cursor.u32("rank of a tensor")
        if rank > _MAX_RANK:
            _refuse(path, f"tensor {quoted(name)} has {rank} dimensions, expected at most {_MAX_RANK}")
        *innermost_first, type_id, offset = _SHAPES[rank].unpack(cursor.take(_SHAPES[rank].size, "shape, type and offset of a tensor"))
        stored, shape = FORMATS_BY_TYPE_ID.get(type_id), tuple(innermost_first[::-1])
        if stored is None:
            _refuse(path, f"tensor {quoted(name)} has the unknown type number {type_id}; update tinyvllm or convert the model again")
        if (row := shape[-1] if shape else 1) % stored.elements:
            _refuse(path, f"tensor {quoted(name)} has rows of {row} numbers, but {stored.name} needs multiples of {stored.elements}")
        infos[name] = _Info(name, stored, shape, offset, prod(shape) // stored.elements * stored.nbytes)
    return list(infos.values())


def _view_tensors(path: Path, data: np.ndarray, infos: list[_Info], start: int, alignment: int) -> dict[str, TensorRecord]:
    """`start` is the position in the file that the tensors' offsets are relative to."""
    for info in infos:
        if info.offset % alignment:
            _refuse(path, f"tensor {quoted(info.name)} begins at {info.offset}, which is not a multiple of the alignment, {alignment}")
        if start + info.offset + info.nbytes > len(data):
            need = start + info.offset + info.nbytes
            _refuse(path, f"is truncated: tensor {quoted(info.name)} ends at byte {need}, the file at {len(data)}; download it again")
    for before, after in pairwise(sorted(infos, key=lambda info: (info.offset, info.nbytes))):
        if before.offset + before.nbytes > after.offset:
            _refuse(path, f"tensors {quoted(before.name)} and {quoted(after.name)} overlap")
    out = {}
    for info in infos:
        begin = start + info.offset
        out[info.name] = TensorRecord(info.name, info.format.name, info.shape, data[begin : begin + info.nbytes])
    return out


class _Cursor:
    """Reads values one after another from a file's bytes and refuses to read past the end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.position, self.elements = path, data, 0, 0

    def take(self, nbytes: int, what: str, key: str | None = None) -> bytes:
        """The next bytes: `what`, of the metadata `key` if there is one."""
        start = self.position
        if start + nbytes > min(len(self.data), _MAX_METADATA):
            what = what if key is None else f"{what} of {quoted(key)}"
            if nbytes > len(self.data) - start:
                left = len(self.data) - start
                _refuse_end(self.path, f"is truncated or corrupt: {what} at byte {start} needs {nbytes} bytes, but {left} are left")
            _refuse(self.path, f"is corrupt: {what} ends at byte {start + nbytes}, and metadata may have at most {_MAX_METADATA} bytes")
        self.position = start + nbytes
        return bytes(self.data[start : self.position])

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def string(self, what: str, key: str | None = None) -> str:
        try:
            return self.take(self.u64("length of a string"), what, key).decode("utf-8")
        except UnicodeDecodeError:
            _refuse(self.path, f"{what}{'' if key is None else f' of {quoted(key)}'} is not UTF-8")

    def value(self, kind: int, key: str, depth: int = 0) -> object:
        """One metadata value of ggml's type number `kind`: int, float, bool, str, or a list of one of them."""
        if kind == _STRING:
            return self.string("value", key)
        if kind == _ARRAY:
            return self._array(key, depth)
        return self._scalars(kind, 1, key)[0]

    def _array(self, key: str, depth: int) -> list[object]:
        kind, count = self.u32("element type of an array"), self.u64("length of an array")
        self.elements += count * (_ARRAY_COST if kind == _ARRAY else 1)
        if self.elements > _MAX_ELEMENTS:
            _refuse(self.path, f"metadata arrays have more than {_MAX_ELEMENTS} values together, {quoted(key)} has {count}; it is corrupt")
        if kind == _STRING:
            return self._strings(count, key)
        if kind != _ARRAY:
            return self._scalars(kind, count, key)
        if depth == _MAX_DEPTH:
            _refuse(self.path, f"metadata {quoted(key)} has arrays nested deeper than {_MAX_DEPTH}")
        return [self._array(key, depth + 1) for _ in range(count)]

    def _strings(self, count: int, key: str) -> list[object]:
        """A vocabulary has hundreds of thousands of strings: this is the reader's only hot loop."""
        data, position, size, length_of = self.data, self.position, min(len(self.data), _MAX_METADATA), _U64.unpack_from
        out: list[object] = []
        append = out.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + length_of(data, position)[0]
                if position > size:
                    break
                append(str(data[start:position], "utf-8"))
        except struct.error:
            position = size + 1
        except UnicodeDecodeError:
            _refuse(self.path, f"string {len(out)} of {quoted(key)} is not UTF-8")
        if position > size:
            end = f"the end of the file, or of the {_MAX_METADATA} bytes that metadata may have"
            _refuse_end(self.path, f"is truncated or corrupt: string {len(out)} of {quoted(key)} extends past {end}")
        self.position = position
        return out

    def _scalars(self, kind: int, count: int, key: str) -> list[object]:
        if kind not in _SCALARS:
            _refuse(self.path, f"metadata {quoted(key)} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize, "value", key), dtype)
        if kind != _BOOL:
            return list(values.tolist())
        if (values > 1).any():
            _refuse(self.path, f"metadata {quoted(key)} must be true or false (1 or 0), got {int(values.max())}")
        return list(values.astype(bool).tolist())


class _EndOfData(FormatError):
    """The header goes beyond the bytes that there are."""


def _refuse_end(path: Path, what: str) -> NoReturn:
    raise _EndOfData(f"{_SPEAKER}: {path} {what}")


def _refuse(path: Path, what: str) -> NoReturn:
    verb = what.startswith(("is ", "has ", "says ", "belongs "))
    raise FormatError(f"{_SPEAKER}: {path}{' ' if verb else ': '}{what}")
