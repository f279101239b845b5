"""The files of /v1/files, in memory: they end with the server. A key sees only its own; for another key they do not exist."""

from __future__ import annotations

import secrets
import time
from dataclasses import field
from typing import Any

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.keys import Key
from tinyvllm.server.core.limits import MAX_FILES, MAX_FILES_BYTES


@dataclass(eq=False)
class StoredFile:
    """One file and its owner."""

    owner: Key
    filename: str
    purpose: str
    data: bytes
    id: str = field(default_factory=lambda: f"file-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def description(self) -> dict[str, Any]:
        """The file as OpenAI's API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.data),
            "created_at": self.created,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    """The files of one server: at most MAX_FILES of a key, and MAX_FILES_BYTES of all keys together. Belongs to its event loop."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._files: dict[str, StoredFile] = {}

    def check_enabled(self) -> None:
        """Failure 501 if the server keeps no files."""
        if not self._enabled:
            raise Failure(501, "this server keeps no files and runs no batches (--no-store)", code="store_disabled")

    def add(self, file: StoredFile) -> StoredFile:
        """Keep a file; Failure 409 if there is no room."""
        if len(self.owned_by(file.owner)) >= MAX_FILES:
            raise Failure(409, f"there are {MAX_FILES} files of this key, which is the limit; delete some", code="too_many_files")
        if (size := self.size + len(file.data)) > MAX_FILES_BYTES:
            text = f"the files of the server would have {size} bytes, the limit is {MAX_FILES_BYTES}; delete some or send fewer lines"
            raise Failure(409, text, code="no_room")
        self._files[file.id] = file
        return file

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(len(file.data) for file in self._files.values())

    def owned_by(self, owner: Key) -> list[StoredFile]:
        """The files of a key, the oldest first."""
        return [file for file in self._files.values() if file.owner is owner]

    def get(self, owner: Key, name: str, param: str | None = None) -> StoredFile:
        """The file with this id. Failure 404 if the key has none."""
        file = self._files.get(name)
        if file is None or file.owner is not owner:
            raise Failure(404, f"there is no file {name!r:.80}", param=param, code="file_not_found")
        return file

    def delete(self, owner: Key, name: str) -> StoredFile:
        """Forget a file; a batch that reads it continues."""
        return self._files.pop(self.get(owner, name).id)
