"""The cache folder: small files with their length and digest in front, read as a whole and replaced as a whole.

    tinyvllm-cache 1 SHA256 LENGTH\\n, then LENGTH bytes

SHA256 is that of the file's name in the folder, a zero byte and the content: a file under another name is not taken. A copied folder is
used as it is, since no name depends on where it is.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from contextlib import suppress
from dataclasses import field
from pathlib import Path

from tinyvllm.config.switches import cache_folder
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.storage.folders import Refusal, open_believed, reason_of, remove, require_private, temporary_folder, warn_once

MAX_BYTES = 256 << 20  # of one file; the largest, a program that tinygrad generated, has about 1 MB
_MAGIC = b"tinyvllm-cache 1 "
_MAX_HEAD = 128


@dataclass(frozen=True)
class CacheFolder:
    """A private folder: `path` is None where there is none at all, `temporary` if it lives as long as this process."""

    path: Path | None
    temporary: bool = False
    _rooms: dict[str, Path | None] = field(default_factory=dict)

    def room(self, name: str) -> Path | None:
        """The private folder `name` in this one, created if necessary; None if it cannot be used, which is logged."""
        if self.path is None:
            return None
        if name not in self._rooms or (self._rooms[name] is not None and not (self.path / name).is_dir()):
            self._rooms[name] = self._open_room(self.path / name)
        return self._rooms[name]

    def _open_room(self, folder: Path) -> Path | None:
        if os.path.lexists(folder) and not folder.is_dir():
            warn_once(str(folder), f"cache: {folder} is not a folder: it is removed, and its files are built again")
            remove(folder)
        try:
            return require_private(folder)
        except Refusal as reason:
            warn_once(str(folder), f"cache: {folder} is not used: {reason}; continuing without it")
            return None

    def read(self, name: str, max_bytes: int = MAX_BYTES) -> bytes | None:
        """The content of "FILE" or "ROOM/FILE" as it was written; None if it must be built again.

        Damage, and a file of more than `max_bytes`, is logged once for each room.
        """
        path = self._place(name)
        if path is None:
            return None
        try:
            return verified(read_believed(path, max_bytes + _MAX_HEAD), name)
        except FileNotFoundError:
            return None
        except Refusal as reason:
            self.discard(name, str(reason))
            return None

    def discard(self, name: str, reason: str) -> None:
        """Remove a file that must be built again, and log why, once for each room."""
        path = self._place(name)
        if path is not None:
            warn_once(f"damaged {path.parent}", f"cache: {path} is not used: {reason}; it is built again")
            remove(path)

    def write(self, name: str, content: bytes) -> bool:
        """Keep a file for later processes; False, logged once, if it cannot be written: the caller continues without it."""
        path = self._place(name)
        if path is None:
            return False
        try:
            write_whole(path, framed(content, name))
        except OSError as error:
            reason = f"cache: {path.parent} cannot be written: {reason_of(error)}; continuing without it"
            warn_once(f"unwritable {path.parent} {error.errno}", reason)
            return False
        return True

    def _place(self, name: str) -> Path | None:
        room, _, file = name.rpartition("/")
        folder = self.room(room) if room else self.path
        return None if folder is None else folder / file


def framed(content: bytes, name: str) -> bytes:
    """The content with its length and digest in front."""
    return _MAGIC + f"{_digest(content, name)} {len(content)}\n".encode() + content


def verified(data: bytes, name: str) -> bytes:
    """What `framed` was given. Refusal if a byte, the length or the name differs."""
    head, line_feed, content = data[:_MAX_HEAD].partition(b"\n")
    words = head.removeprefix(_MAGIC).split(b" ")
    if not head.startswith(_MAGIC) or not line_feed or len(words) != 2:
        raise Refusal("it is empty" if not data else "it is damaged, or not a file of this version")
    content = data[len(head) + 1 :]
    if words[1] != str(len(content)).encode():
        raise Refusal(f"it is truncated or damaged: {len(content)} bytes, expected {words[1].decode(errors='replace')[:20]}")
    if words[0] != _digest(content, name).encode():
        raise Refusal("it is damaged: its digest is another")
    return content


def _digest(content: bytes, name: str) -> str:
    digest = hashlib.sha256(name.encode() + b"\0")
    digest.update(content)
    return digest.hexdigest()


def read_believed(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """All of a file that only this user or root can have written. FileNotFoundError, Refusal."""
    with open(open_believed(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise Refusal(f"it has {size} bytes, expected at most {max_bytes}")
        try:
            return file.read(size)  # more would allocate that much
        except OSError as error:
            raise Refusal(reason_of(error)) from error


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file at once, for this user only: another process reads the old one or the new one. OSError, and nothing is left."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    fresh.unlink(missing_ok=True)
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode), "wb") as file:
            file.write(data)
        replace_file(fresh, path)
    finally:
        with suppress(OSError):  # it was renamed if all went well
            fresh.unlink()


def replace_file(fresh: Path, path: Path) -> None:
    """Rename a complete file to its place, whatever is there. OSError."""
    try:
        fresh.replace(path)
    except IsADirectoryError:
        remove(path)
        fresh.replace(path)


def open_cache(folder: Path | None = None) -> CacheFolder:
    """The folder of TINYVLLM_CACHE, or `folder`; a temporary one, logged once, where that cannot be made or others could change it."""
    return _open_cache(cache_folder() if folder is None else folder)


@functools.cache
def _open_cache(folder: Path) -> CacheFolder:
    try:
        return CacheFolder(require_private(folder))
    except Refusal as reason:
        instead = temporary_folder()
        rest = "nothing is kept" if instead is None else f"using {instead} until this process ends"
        warn_once(f"cache {folder}", f"cache: {folder} is not used: {reason}; {rest}; TINYVLLM_CACHE names another folder")
        return CacheFolder(instead, temporary=True)
