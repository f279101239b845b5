"""Reads an object file: the sizes of its sections, and its constants of 32 bits."""

from __future__ import annotations

import struct

_SYMBOLS, _NO_CONTENT, _DATA = 2, 8, 1  # types of sections and of symbols


def read(content: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """ELF of 64 bits -> bytes of each section by name, and the value of each global variable of four bytes by name."""
    assert content[:5] == b"\x7fELF\x02", "no ELF object of 64 bits"
    (start,), (size, count, names) = struct.unpack_from("<Q", content, 0x28), struct.unpack_from("<3H", content, 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, size of an entry
    sections = [struct.unpack_from("<2I4Q2I2Q", content, start + i * size) for i in range(count)]

    def text(table: int, at: int) -> str:
        begin = sections[table][4] + at
        return content[begin : content.index(b"\0", begin)].decode()

    variables = {}
    for _, kind, _, _, offset, nbytes, link, *_ in sections:
        for at in range(offset, offset + nbytes, 24) if kind == _SYMBOLS else ():
            name, info, _, section, value, length = struct.unpack_from("<I2BH2Q", content, at)
            if info & 15 == _DATA and length == 4 and 0 < section < count and sections[section][1] != _NO_CONTENT:
                variables[text(link, name)] = struct.unpack_from("<i", content, sections[section][4] + value)[0]
    return {text(names, name): nbytes for name, _, _, _, _, nbytes, *_ in sections}, variables
