"""Packed matrices kept on disk, so that the next start maps them as they are instead of packing them again.

One file a model and way of packing lies in the cache folder, with a small index beside it. It is filled through a shared mapping and
mapped read-only afterwards: a second engine, or a later start with the file still in memory, shares its pages. The index carries the
identity of the model's files (path, size, time) and is written last, so what was left unfinished or has gone stale is never used.
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

VERSION = 1  # of the panels' layout; a change makes all kept ones stale
SMALLEST = 64 << 20  # bytes of weights below which packing is quicker than it is worth
_ALIGNED = 2 << 20  # a huge page
_SPARE = 2  # the disk must have so many times the file free


class WeightCache:
    """The panels of one model on disk: those of an earlier start to be mapped, or a new file to be filled."""

    def __init__(self, folder: Path, checkpoint: Checkpoint, packing: str):
        files = _files(checkpoint)
        stems = "\0".join([str(checkpoint.path.resolve()), packing, str(VERSION)])
        self._index_path = folder / "weights" / f"{hashlib.sha256(stems.encode()).hexdigest()[:32]}.json"
        self._identity = {"version": VERSION, "packing": packing, "files": files}
        self._entries = self._read()
        self._writing: _Writing | None = None

    @property
    def complete(self) -> bool:
        """Whether an earlier start has kept all that there is."""
        return bool(self._entries)

    def get(self, name: str) -> tuple[str, int, np.ndarray] | None:
        """Format, rows and panels, uint8 [bytes], of a product that was kept."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        with open(self._index_path.with_suffix(".panels"), "rb") as file:
            mapped = mmap.mmap(file.fileno(), entry["bytes"], flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=entry["offset"])
        return entry["format"], entry["O"], np.frombuffer(mapped, np.uint8)

    def begin(self, total: int) -> bool:
        """Start a new file for about `total` bytes; False where it is not worth it, or the disk has no room to spare."""
        folder = self._index_path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{self._index_path.stem}.*.fresh"):
                if not _alive(int(left.name.split(".")[1])):
                    left.unlink()  # by a start that did not come to its end
            if total < SMALLEST or shutil.disk_usage(folder).free < _SPARE * total:
                return False
            self._writing = _Writing(self._index_path.with_name(f"{self._index_path.stem}.{os.getpid()}.fresh"))
        except OSError:
            return False  # a folder that cannot be written: packing into memory works as well
        return True

    def allocate(self, name: str, format: str, O: int, nbytes: int) -> np.ndarray | None:
        """Zeros to be filled with a product's panels, in the file; None when none was begun."""
        return None if self._writing is None else self._writing.allocate(name, format, O, nbytes)

    def finish(self) -> None:
        """All products are in: from now on the file is what a start maps."""
        if self._writing is None:
            return
        self._writing.path.replace(self._index_path.with_suffix(".panels"))
        fresh = self._index_path.with_suffix(f".{os.getpid()}.json")
        fresh.write_text(json.dumps(self._identity | {"products": self._writing.entries}))
        fresh.replace(self._index_path)
        self._writing = None

    def _read(self) -> dict[str, Any]:
        try:
            said = json.loads(self._index_path.read_text())
            size = self._index_path.with_suffix(".panels").stat().st_size
        except (OSError, ValueError):
            return {}
        entries: dict[str, Any] = said.get("products", {}) if {k: said.get(k) for k in self._identity} == self._identity else {}
        return entries if all(e["offset"] + e["bytes"] <= size for e in entries.values()) else {}


class _Writing:
    """A file that grows by a mapping for each product."""

    def __init__(self, path: Path):
        self.path, self._end = path, 0
        self.entries: dict[str, dict[str, Any]] = {}
        path.touch()

    def allocate(self, name: str, format: str, O: int, nbytes: int) -> np.ndarray:
        start = -(-self._end // _ALIGNED) * _ALIGNED
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
    """Name, size and time of the files that hold the weights."""
    path = checkpoint.path
    found = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".json", ".gguf"))
    parts = sorted(path.parent.glob("*.gguf")) if path.suffix == ".gguf" else found
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in parts]  # type: ignore[misc]  # lists, as JSON gives them back
