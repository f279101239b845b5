"""The safetensors format: an 8-byte length, a JSON header, then the tensors' bytes without gaps.

Reads one file, or the shards that an index file names. Knows bytes and JSON; not which tensors a model needs. Every number in a header
is checked against the file. The rules are those of the format's description: no holes, no overlaps, no duplicate names. The header has
at most 32 MiB and MAX_TENSORS tensors.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.foreign import MAX_JSON_BYTES, MAX_TENSORS, parse_json, quoted, read_bounded
from tinyvllm.weights.mapping import TensorRecord, map_file

MAX_HEADER = 32 << 20  # bytes; the format allows 100 MB, which take seconds to read
INDEX_NAME = "model.safetensors.index.json"
_SPEAKER = "safetensors"
_MAX_DIM = 1 << 48

_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


def read_safetensors(path: Path) -> dict[str, TensorRecord]:
    """The tensors of one file, by name, as views into it. FormatError for a damaged file."""
    data = map_file(path, _SPEAKER)
    header, start = _read_header(path, data)
    body = data[start:]
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        _refuse(path, "__metadata__ must map strings to strings")
    spans = [_check_entry(path, name, entry) for name, entry in header.items()]
    _check_layout(path, spans, len(body))
    return {name: TensorRecord(name, kind, shape, body[begin:end]) for begin, end, name, kind, shape in spans}


def tensor_spans(path: Path, data: bytes) -> dict[str, tuple[int, int]]:
    """First byte and bytes of each tensor of a file that begins with `data`. FormatError for a damaged header and for less than all of it.

    Nothing is compared with the size of the file.
    """
    header, start = _read_header(path, np.frombuffer(data, np.uint8))
    spans = [_check_entry(path, name, entry) for name, entry in header.items() if name != "__metadata__"]
    return {name: (start + begin, end - begin) for begin, end, name, _, _ in spans}


def read_sharded(index: Path) -> dict[str, TensorRecord]:
    """The tensors of all shards that an index file names; every shard must exist and have the tensors that the index lists for it."""
    weight_map = _read_weight_map(index)
    tensors: dict[str, TensorRecord] = {}
    for shard in sorted(set(weight_map.values())):
        if not (index.parent / shard).is_file():
            raise ModelError(f"{_SPEAKER}: {index.name} names {shard}, which is not in {index.parent}; download it again")
        found = read_safetensors(index.parent / shard)
        for name, record in found.items():
            if name in tensors:
                _refuse(index, f"tensor {quoted(name)} is in two shards, the second {shard}")
            tensors[name] = record
        for name in (n for n, s in weight_map.items() if s == shard and n not in found):
            _refuse(index, f"says that {quoted(name)} is in {shard}, but it is not; download both again")
    return tensors


def read_json_object(path: Path, speaker: str) -> dict[str, Any]:
    """A JSON file that must hold an object. ModelError if it cannot be read, FormatError if it is not JSON or not an object."""
    try:
        value = parse_json(read_bounded(path, MAX_JSON_BYTES))
    except OSError as error:
        raise ModelError(f"{speaker}: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise FormatError(f"{speaker}: {path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{speaker}: {path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index, _SPEAKER).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _refuse(index, "weight_map must be an object that maps tensor names to file names")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors") or "\0" in shard:
            _refuse(
                index, f"weight_map sends {quoted(name)} to {quoted(shard)}, which is not the name of a safetensors file in the same folder"
            )
    return weight_map


def _read_header(path: Path, data: np.ndarray) -> tuple[dict[str, Any], int]:
    """The header, and the offset where the tensors' bytes begin."""
    if len(data) < 8:
        _refuse(path, f"is {len(data)} bytes long, too short for a header")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > MAX_HEADER:
        _refuse(path, f"has a header of {length} bytes, more than the {MAX_HEADER} allowed; it is not safetensors")
    if 8 + length > len(data):
        _refuse(path, f"is truncated: its header needs {8 + length} bytes, the file has {len(data)}")
    try:
        header = parse_json(data[8 : 8 + length].tobytes(), _no_duplicates)
    except ValueError as error:
        _refuse(path, f"has a damaged header: {error}")
    if not isinstance(header, dict):
        _refuse(path, f"has a header that is not an object but {type(header).__name__}")
    if len(header) > MAX_TENSORS:
        _refuse(path, f"has {len(header)} tensors, and at most {MAX_TENSORS} are read; split it into shards")
    return header, 8 + length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {quoted(twice)} appears twice")
    return out


Span = tuple[int, int, str, str, tuple[int, ...]]  # begin, end, name, dtype, shape


def _check_entry(path: Path, name: str, entry: Any) -> Span:
    """One header entry as (begin, end, name, dtype, shape), its extent equal to what its shape needs."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"tensor {quoted(name)} needs exactly dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _BITS:
        _refuse(path, f"tensor {quoted(name)} has the unknown dtype {quoted(kind)}")
    if not isinstance(shape, list) or len(shape) > 16 or not _are_sizes(shape):
        _refuse(path, f"tensor {quoted(name)} has the impossible shape {quoted(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_sizes(offsets) or offsets[0] > offsets[1]:
        _refuse(path, f"tensor {quoted(name)} has the impossible offsets {quoted(offsets)}")
    begin, end = offsets
    if prod(shape) * _BITS[kind] != (end - begin) * 8:
        _refuse(path, f"tensor {quoted(name)}, {kind} {shape}, does not take the {end - begin} bytes that its offsets give it")
    return begin, end, name, kind, tuple(shape)


def _are_sizes(values: list[Any]) -> bool:
    return all(type(v) is int and 0 <= v <= _MAX_DIM for v in values)


def _check_layout(path: Path, spans: list[Span], size: int) -> None:
    """The tensors must cover the body exactly, without hole or overlap."""
    reached = 0
    for begin, end, name, _, _ in sorted(spans):
        if begin != reached:
            _refuse(path, f"tensor {quoted(name)} {'overlaps its neighbour' if begin < reached else 'follows a hole'} at byte {begin}")
        reached = end
    if reached > size:
        _refuse(path, f"is truncated: its tensors need {reached} bytes, it has {size}; download it again")
    if reached < size:
        _refuse(path, f"has {size - reached} bytes beyond its last tensor; it is corrupt")


def _refuse(path: Path, what: str) -> NoReturn:
    verb = what.startswith(("is ", "has ", "says "))
    raise FormatError(f"{_SPEAKER}: {path}{' ' if verb else ': '}{what}")
