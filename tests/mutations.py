"""Mutations of model files: of bytes, and of values in JSON, GGUF metadata and protobuf. Every choice is that of a seeded generator."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

DEEP = "\0deep"  # a place in JSON that is written as lists nested deeper than Python's stack
ODD_TEXTS = (
    "", " ", "0", "-1", "true", "\x00", "\n", "\ud800", "a\udfff", "\u202e", "x" * 5000, "\u00e9" * 700, "{{", "[", "<0x41>", "<0xZZ>",
    "(?i:", "\ufffd",
)  # fmt: skip
ODD_NUMBERS = (
    0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
ODD_METADATA = (3, -1, 2**63, 0.5, float("nan"), True, "x", "\ud800", "y" * 4000, [1, 2], ["a"], [0.5], [])
EDGES = [struct.pack("<Q", v) for v in (0, 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1)] + [struct.pack("<I", 2**32 - 1)]
Path = tuple[Any, ...]


def odd_value(rng: random.Random) -> Any:
    """A value of another type or size than any reader expects."""
    match rng.randrange(8):
        case 0 | 1:
            return rng.choice(ODD_TEXTS)
        case 2 | 3:
            return rng.choice(ODD_NUMBERS)
        case 4:
            return rng.choice((None, True, False))
        case 5:
            return [odd_value(rng) for _ in range(rng.randrange(3))]
        case 6:
            return {str(rng.choice(ODD_TEXTS)): odd_value(rng) for _ in range(rng.randrange(3))}
        case _:
            return rng.choice((DEEP, [[[]]], {"type": "Sequence"}, {"content": 3}, ["a"] * 1000, list(range(1000))))


# --- bytes


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(6):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                out[at : at + 1] = bytes([out[at] ^ 1 << rng.randrange(8)]) if out else b""
            case 2:
                edge = rng.choice(EDGES)
                out[at : at + len(edge)] = edge
            case 3:
                del out[at : at + rng.randrange(1, 16)]
            case 4:
                out[at:at] = out[rng.randrange(len(out) or 1) :][: rng.randrange(1, 64)]
            case _:
                out = out[: at + 1]
    return bytes(out)


# --- JSON


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """A JSON text with some values replaced, wrapped, removed, or named differently; or mutated bytes."""
    if rng.random() < 0.15:
        return mutate_bytes(rng, data)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _with_change(rng, value)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.8)
    text = text.replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000)
    if rng.random() < 0.03:
        text = "\ufeff" + text
    return text.encode("utf-8", "surrogatepass")


def _with_change(rng: random.Random, value: Any) -> Any:
    paths: list[Path] = [()]
    _collect(value, (), paths)
    # half of the changes are near the root, where types matter most: vocabularies have a thousand leaves
    shallow = [path for path in paths if len(path) <= 2]
    path = rng.choice(shallow if rng.random() < 0.5 else paths)
    if not path:
        return odd_value(rng) if rng.random() < 0.2 else value
    holder = value
    for step in path[:-1]:
        holder = holder[step]
    last = path[-1]
    match rng.randrange(6):
        case 0 | 1 | 2:
            holder[last] = odd_value(rng)
        case 3:
            del holder[last]
        case 4:
            holder[last] = [holder[last]] if rng.random() < 0.5 else {"x": holder[last]}
        case _:
            moved = copy.deepcopy(holder[last])
            if isinstance(holder, dict):
                holder[str(rng.choice(ODD_TEXTS))] = moved
            else:
                holder.insert(0, moved)
    return value


def _collect(value: Any, path: Path, out: list[Path]) -> None:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        out.append((*path, key))
        _collect(inner, (*path, key), out)


# --- GGUF

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64, F64 = 0, 4, 5, 6, 7, 8, 9, 10, 12
_PACKED = {U8: "<B", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", F64: "<d"}
Typed = tuple[int, Any]  # ggml's type number, and the value; of an array (type of the elements, list)
Tensor = tuple[str, tuple[int, ...], int, bytes]  # name, shape with the innermost first, ggml's type, data


def typed(value: object) -> Typed:
    """A Python value as GGUF metadata."""
    if isinstance(value, bool):
        return BOOL, value
    if isinstance(value, int):
        return (I32 if value < 0 else U32 if value < 2**32 else U64), value
    if isinstance(value, float):
        return F32, value
    if isinstance(value, str):
        return STRING, value.encode("utf-8", "surrogatepass")
    assert isinstance(value, list)
    kinds = {typed(item)[0] for item in value} or {STRING}
    kind = kinds.pop() if len(kinds) == 1 else F32
    return ARRAY, (kind, [typed(item)[1] for item in value])


def write_gguf(metadata: dict[str, Typed], tensors: list[Tensor]) -> bytes:
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, (kind, value) in metadata.items():
        out += _string(key.encode("utf-8", "surrogatepass")) + struct.pack("<I", kind) + _payload(kind, value)
    offset, body = 0, b""
    for name, shape, kind, data in tensors:
        out += _string(name.encode()) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        data += bytes(-len(data) % 32)
        offset, body = offset + len(data), body + data
    return out + bytes(-len(out) % 32) + body


def _string(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def _payload(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_payload(inner, item) for item in items)
    return struct.pack(_PACKED[kind], value)


def mutate_gguf(rng: random.Random, metadata: dict[str, Typed], tensors: list[Tensor]) -> bytes:
    """A GGUF file with some metadata of other types, lists for scalars and scalars for lists, elements changed, keys removed or copied."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, write_gguf(metadata, tensors))
    changed = dict(metadata)
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = rng.choice(list(changed))
        kind, value = changed[key]
        match rng.randrange(7):
            case 0 | 1:
                changed[key] = typed(rng.choice(ODD_METADATA))
            case 3 if kind == ARRAY and value[1]:
                changed[key] = (value[0], value[1][0])
            case 4 if kind == ARRAY and value[1]:
                changed[key] = (ARRAY, (value[0], _with_changed_item(rng, value[0], value[1])))
            case 5:
                del changed[key]
            case _:
                changed[rng.choice(list(metadata))] = (kind, value)
    return write_gguf(changed, tensors)


def _with_changed_item(rng: random.Random, kind: int, items: list[Any]) -> list[Any]:
    out = list(items)
    at = rng.randrange(len(out))
    if kind == STRING:
        odd = (rng.choice(ODD_TEXTS).encode("utf-8", "surrogatepass"), b"\xff\xfe", out[0])
        out[at] = rng.choice(odd)
    elif kind in (F32, F64):
        out[at] = rng.choice((float("nan"), float("inf"), -1e30))
    elif kind in _PACKED:
        out[at] = rng.choice((0, 1, 7, 100))
    if rng.random() < 0.3:
        del out[rng.randrange(len(out)) :]
    return out


# --- protobuf


def mutate_protobuf(rng: random.Random, data: bytes) -> bytes:
    """A message with some fields of other wire types, numbers, lengths or contents, or removed; one level down as often as at the top."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    parts = fields_of(data)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(parts))
        if rng.random() < 0.5:  # the last fields are the specifications of trainer and normalizer
            at = max(0, len(parts) - 1 - rng.randrange(4))
        number, kind, value = parts[at]
        if kind == 2 and value and rng.random() < 0.7 and (inner := _try_fields(value)):
            index = rng.randrange(len(inner))
            inner[index] = _odd_field(rng, *inner[index])
            parts[at] = (number, 2, b"".join(map(_field_bytes, inner)))
        elif rng.random() < 0.2:
            del parts[at]
        else:
            parts[at] = _odd_field(rng, number, kind, value)
        if not parts:
            break
    return b"".join(map(_field_bytes, parts))


Field = tuple[int, int, Any]  # number, wire type, value


def _odd_field(rng: random.Random, number: int, kind: int, value: Any) -> Field:
    match rng.randrange(5):
        case 0:
            return number, 2, rng.choice(ODD_TEXTS).encode("utf-8", "surrogatepass")
        case 1:
            return number, 2, rng.choice((b"\xff\xfe", b"\xc0", b"\x08" * 40))
        case 2:
            return number, 0, rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 2**31, 2**63, 2**64 - 1))
        case 3:
            return number, 5, rng.choice((b"\0\0\xc0\x7f", b"\xff\xff\xff\xff", b"\0\0\x80\x7f"))
        case _:
            return rng.randrange(1, 50), kind, value


def fields_of(data: bytes) -> list[Field]:
    out: list[Field] = []
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            out.append((key >> 3, kind, value))
            continue
        size = 8 if kind == 1 else 4
        if kind == 2:
            size, at = _varint(data, at)
        if kind not in (1, 2, 5) or at + size > len(data):
            raise ValueError("no message")
        out.append((key >> 3, kind, data[at : at + size]))
        at += size
    return out


def _try_fields(data: bytes) -> list[Field]:
    try:
        return fields_of(data)
    except (ValueError, IndexError):
        return []


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def _encoded(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field_bytes(field: Field) -> bytes:
    number, kind, value = field
    if kind == 0:
        return _encoded(number << 3) + _encoded(value)
    return _encoded(number << 3 | kind) + (_encoded(len(value)) if kind == 2 else b"") + value


# --- lines of text


def mutate_lines(rng: random.Random, data: bytes) -> bytes:
    lines = data.splitlines()
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        token, _, rank = lines[at].partition(b" ")
        odd = (b"", b"%", b"====", b"9" * 5000, b"-1", b"1_0", b"\xff", "\u0663".encode(), token, rank, b"QUI=" * 200)
        match rng.randrange(4):
            case 0:
                lines[at] = rng.choice(odd) + b" " + rank
            case 1:
                lines[at] = token + b" " + rng.choice(odd)
            case 2:
                lines[at] = rng.choice(odd)
            case _:
                del lines[at]
        if not lines:
            break
    text = b"\n".join(lines)
    return mutate_bytes(rng, text) if rng.random() < 0.2 else text


Mutation = Callable[[random.Random], bytes]
