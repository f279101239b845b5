"""What can happen to a file between two processes: each function takes its path and leaves something else there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

Attack = Callable[[Path], None]


def _edit(change: Callable[[bytearray], None]) -> Attack:
    def attack(path: Path) -> None:
        data, status = bytearray(path.read_bytes()), path.stat()
        change(data)
        path.chmod(0o600)
        path.write_bytes(data)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as damage on its way to the disk leaves it

    return attack


def _flip(part: float) -> Attack:
    def change(data: bytearray) -> None:
        data[min(int(part * len(data)), len(data) - 1)] ^= 0x10

    return _edit(change)


def _zero(data: bytearray) -> None:
    data[:] = bytes(len(data))


def _truncate(data: bytearray) -> None:
    del data[len(data) * 2 // 3 :]


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "file").write_text("in the way")


def _as_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


def _as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _as_other_file(path: Path) -> None:
    """Another valid file under this name, where there is one."""
    others = [other for other in sorted(path.parent.iterdir()) if other.is_file() and other != path and other.suffix == path.suffix]
    if others:
        shutil.copyfile(others[0], path)
    else:
        path.write_bytes(b"\x80\x04.")


def _writable(path: Path) -> None:
    path.chmod(0o666)


ATTACKS: dict[str, Attack] = {
    "truncated": _edit(_truncate),
    "truncated to a byte": _edit(lambda data: data.__delitem__(slice(1, None))),
    "emptied": _edit(lambda data: data.clear()),
    "longer": _edit(lambda data: data.extend(b"more")),
    "flipped at its start": _flip(0.0),
    "flipped in the middle": _flip(0.5),
    "flipped at its end": _flip(1.0),
    "all zero": _edit(_zero),
    "a folder": _as_folder,
    "a link": _as_link,
    "a pipe": _as_pipe,
    "another file": _as_other_file,
    "writable by all": _writable,
}
