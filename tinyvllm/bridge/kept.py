"""Captured steps kept on disk, so that a later process replays them without running what was captured: no model, no scheduler.

A step is a file of the cache folder's room `steps`, by a digest of everything that decides its launches; the code of its programs is in
files of their own, by their content, which steps share. What is missing, damaged or does not fit is captured again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinygrad import Device, Tensor
from tinygrad.engine.realize import runtime_cache
from tinygrad.uop.ops import ProgramInfo

from tinyvllm.bridge.graph import StepGraph
from tinyvllm.bridge.kept_record import record_of, step_of
from tinyvllm.bridge.names import NamedBuffers, Unkept
from tinyvllm.storage.cache import CacheFolder, open_cache
from tinyvllm.storage.folders import remove

log = logging.getLogger("tinyvllm")

ROOM = "steps"
VERSION = 2  # of the records
MAX_RECORD = 8 << 20  # bytes of a file
MAX_CODE = 16 << 20
MAX_FILES = 4096  # of the room: the oldest half is removed when there are more


class KeptSteps:
    """The steps of one engine.

    `roots` is what all of them read (names.py); `identity` returns what else decides their launches: sources, options, versions.
    """

    def __init__(self, device: str, roots: Mapping[str, object], identity: Callable[[], str], notes: StepNotes):
        self.device, self._roots, self._identity, self.notes = Device.canonicalize(device), roots, identity, notes

    @functools.cached_property
    def _names(self) -> NamedBuffers:
        return NamedBuffers(self._roots)

    def step(self, name: str, **roots: object) -> KeptStep:
        """A step, to be captured later, that reads `roots`, too."""
        return KeptStep(self, name, roots)

    def names(self, roots: Mapping[str, object]) -> NamedBuffers:
        """What a step reads, by names. Unkept if something has none."""
        return NamedBuffers(roots, self._names)

    def place(self, *texts: str) -> str:
        """A file of the cache folder for this engine and these texts. Unkept if the engine has something that has no name."""
        parts = str(VERSION), self.device, self._identity(), self._names.digest, *texts
        return f"{ROOM}/{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:40]}"


class StepNotes:
    """What a capture notes elsewhere in the process, to be noted again where it is loaded. This one notes nothing."""

    def moment(self) -> Any:
        """Now, before a capture."""
        return None

    def since(self, moment: Any) -> list[Any]:
        """What was noted after a moment. Unkept if that cannot be noted again."""
        return []

    def restore(self, notes: list[Any], device: str) -> None:
        """Note this again. ValueError for what was not noted here."""


class KeptStep:
    """Where one captured step is kept."""

    def __init__(self, steps: KeptSteps, name: str, roots: Mapping[str, object]):
        self._steps, self._name, self._roots = steps, name, roots
        self._names: NamedBuffers | None = None
        self._place: str | None = None
        self._moment: Any = None

    def load(self, inputs: Sequence[Tensor], variables: Mapping[str, tuple[int, int]]) -> tuple[StepGraph, Any] | None:
        """The step as an earlier process captured it, and its result; None if it must be captured."""
        self._moment = self._steps.notes.moment()
        try:
            self._names = self._steps.names(self._roots)
            self._place = self._place_of(inputs, variables)
        except Unkept as reason:
            log.debug("steps: %s is not kept: %s", self._name, reason)
            return None
        content = open_cache().read(self._place, MAX_RECORD)
        if content is None:
            return None
        try:
            record = json.loads(content)
            graph: Any = Device[self._steps.device].graph
            loaded = step_of(record, inputs, self._names, self._steps.device, graph, self._load_program)
            self._steps.notes.restore(record["notes"], self._steps.device)
            return loaded
        except MemoryError:
            raise
        except Exception as error:  # a record that was not written here can raise anything
            open_cache().discard(self._place, f"{type(error).__name__}: {error}"[:200])
            return None

    def keep(
        self, graph: StepGraph, inputs: Sequence[Tensor], variables: Mapping[str, tuple[int, int]], result: Any, shared: Sequence[Tensor]
    ) -> None:
        """Keep a step that was captured after `load` has found none. `shared` are tensors that it writes, and other captures as well."""
        if self._place is None or self._names is None:
            return
        try:
            if self._place != self._place_of(inputs, variables):
                raise Unkept("what decides its kernels has changed meanwhile")
            record = record_of(graph, inputs, result, shared, self._names, _keep_code)
            record["notes"] = self._steps.notes.since(self._moment)
        except Unkept as reason:
            log.debug("steps: %s is not kept: %s", self._name, reason)
            return
        content = json.dumps(record, separators=(",", ":")).encode()
        if len(content) <= MAX_RECORD:
            _make_space(open_cache())
            open_cache().write(self._place, content)

    def _place_of(self, inputs: Sequence[Tensor], variables: Mapping[str, tuple[int, int]]) -> str:
        assert self._names is not None
        shapes = [f"{tensor.dtype} {tensor.shape}" for tensor in inputs]
        return self._steps.place(self._name, self._names.digest, repr(shapes), repr(sorted(variables.items())))

    def _load_program(self, code: str, info: ProgramInfo) -> tuple[bytes, Any]:
        """A program's code, and the program loaded once for each device."""
        binary = _code(code)
        device = Device[self._steps.device]
        key = repr((code, info.function_name, info.aux)).encode(), self._steps.device
        if key not in runtime_cache:
            runtime_cache[key] = device.runtime(info.function_name, binary, *info.aux)
        return binary, runtime_cache[key]


_codes: dict[str, bytes] = {}  # of this process, by their digests


def _keep_code(binary: bytes) -> str:
    digest = hashlib.sha256(binary).hexdigest()[:40]
    if digest not in _codes:
        if len(binary) > MAX_CODE or not open_cache().write(f"{ROOM}/{digest}.code", binary):
            raise Unkept(f"a program of {len(binary)} bytes that cannot be written")
        _codes[digest] = binary
    return digest


def _code(digest: str) -> bytes:
    if digest not in _codes:
        if len(digest) != 40 or not digest.isalnum():
            raise Unkept(f"a program by the name of {digest!r:.60}")
        binary = open_cache().read(f"{ROOM}/{digest}.code", MAX_CODE)
        if binary is None or hashlib.sha256(binary).hexdigest()[:40] != digest:
            raise Unkept("a program that is missing")
        _codes[digest] = binary
    return _codes[digest]


def _make_space(cache: CacheFolder) -> None:
    """Remove the older half of the room's files when there are too many."""
    room = cache.room(ROOM)
    if room is None:
        return
    files = list(room.iterdir())
    if len(files) > MAX_FILES:
        for path in sorted(files, key=_changed)[: len(files) // 2]:
            remove(path)
        _codes.clear()  # so that those of this process are written again


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
