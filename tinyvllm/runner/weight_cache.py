"""Packed matrices kept on disk, so that the next start maps them as they are instead of packing them again.

The cache folder has one file per model and way of packing, and a small index next to it. The file is filled through a shared mapping and
mapped read-only afterwards: a second engine, or a later start with the file still in memory, shares its pages. The index has the
identity of the model's files (path, size, time) and is written last, so an unfinished or stale file is never used.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tinyvllm.weights.checkpoint import Checkpoint

VERSION = 1  # of the panels' layout; a change invalidates all cached files
MIN_BYTES = 64 << 20  # of weights: below this, packing again takes less time than caching is worth
_ALIGNMENT = 2 << 20  # a huge page
_SPARE = 2  # free space on the disk that is needed, in sizes of the file


class WeightCache:
    """The packed matrices of one model on disk: mapped from an earlier start, or a new file to fill."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, packing: str):
        files = _files(checkpoint)
        stems = "\0".join([str(checkpoint.path.resolve()), packing, str(VERSION)])
        self._index_path = folder / "weights" / f"{hashlib.sha256(stems.encode()).hexdigest()[:32]}.json"
        self._identity = {"version": VERSION, "packing": packing, "files": files}
        self._entries = self._read()
        self._writing: _Writing | None = None

    @property
    def complete(self) -> bool:
        """Whether an earlier start has cached all matrices."""
        return bool(self._entries)

    def get(self, name: str) -> tuple[str, int, np.ndarray] | None:
        """Format, rows and packed bytes, uint8 [bytes], of a cached product."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        with open(self._index_path.with_suffix(".panels"), "rb") as file:
            mapped = mmap.mmap(file.fileno(), entry["bytes"], flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=entry["offset"])
        return entry["format"], entry["O"], np.frombuffer(mapped, np.uint8)

    def begin(self, total: int) -> bool:
        """Begin a new file for about `total` bytes; False if it is not worth it, or the disk lacks space."""
        folder = self._index_path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for fresh in folder.glob(f"{self._index_path.stem}.*.fresh"):
                if not _alive(int(fresh.name.split(".")[1])):
                    fresh.unlink()  # of a start that was killed
            if total < MIN_BYTES or shutil.disk_usage(folder).free < _SPARE * total:
                return False
            self._writing = _Writing(self._index_path.with_name(f"{self._index_path.stem}.{os.getpid()}.fresh"))
        except OSError:
            return False  # not a writable folder: pack into memory instead
        return True

    def allocate(self, name: str, format: str, O: int, nbytes: int) -> np.ndarray | None:
        """Zeros in the file to fill with a product's packed bytes; None if no file was begun."""
        return None if self._writing is None else self._writing.allocate(name, format, O, nbytes)

    def finish(self) -> None:
        """All products are written: from now on a start maps the file."""
        if self._writing is None:
            return
        self._writing.path.replace(self._index_path.with_suffix(".panels"))
        fresh = self._index_path.with_suffix(f".{os.getpid()}.json")
        fresh.write_text(json.dumps(self._identity | {"products": self._writing.entries}))
        fresh.replace(self._index_path)
        self._writing = None

    def _read(self) -> dict[str, Any]:
        try:
            index = json.loads(self._index_path.read_text())
            size = self._index_path.with_suffix(".panels").stat().st_size
        except (OSError, ValueError):
            return {}
        entries: dict[str, Any] = index.get("products", {}) if {k: index.get(k) for k in self._identity} == self._identity else {}
        return entries if all(e["offset"] + e["bytes"] <= size for e in entries.values()) else {}


class _Writing:
    """A file that grows by one mapping per product."""

    def __init__(self, path: Path):
        self.path, self._end = path, 0
        self.entries: dict[str, dict[str, Any]] = {}
        path.touch()

    def allocate(self, name: str, format: str, O: int, nbytes: int) -> np.ndarray:
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        self._end = start + nbytes
        with open(self.path, "r+b") as file:
            os.truncate(file.fileno(), self._end)
            mapped = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
        self.entries[name] = {"format": format, "O": O, "offset": start, "bytes": nbytes}
        return np.frombuffer(mapped, np.uint8)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _files(checkpoint: Checkpoint) -> list[tuple[str, int, int]]:
    """Name, size and modification time of the files with the weights."""
    path = checkpoint.path
    found = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".json", ".gguf"))
    parts = sorted(path.parent.glob("*.gguf")) if path.suffix == ".gguf" else found
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in parts]  # type: ignore[misc]  # lists, as JSON gives them back
