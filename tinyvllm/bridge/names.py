"""Names of buffers that are the same in every process, and a digest of everything that decides what a step launches."""

from __future__ import annotations

import enum
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tinygrad import Tensor
from tinygrad.device import Buffer
from tinygrad.dtype import DType
from tinygrad.uop.ops import buffers

from tinyvllm.bridge.memory import buffer_of

_SCALARS = (bool, int, float, str, bytes, enum.Enum, DType, type(None))
_PACKAGES = ("tinyvllm", "tinygrad")  # of classes whose objects are described by their attributes
_makers: dict[str, Callable[..., Tensor]] = {}
_process_tensors: weakref.WeakKeyDictionary[Buffer, tuple[str, tuple[str | int, ...]]] = weakref.WeakKeyDictionary()


class Unkept(Exception):
    """A step cannot be kept: something has no name that is the same in the next process. The message says what."""


def define_process_tensor(kind: str, make: Callable[..., Tensor]) -> None:
    """`make(*arguments)` returns one tensor of the process for the same strings and integers, such as counters that all kernels share."""
    _makers[kind] = make


def name_process_tensor(tensor: Tensor, kind: str, *arguments: str | int) -> Tensor:
    """The tensor, of which captured steps know from now on how it was made."""
    _process_tensors[buffer_of(tensor.uop).base] = kind, arguments
    return tensor


def process_tensor_of(buffer: Buffer) -> tuple[str, tuple[str | int, ...]] | None:
    """Kind and arguments of the process's tensor whose memory this is; None if it is of none."""
    return _process_tensors.get(buffer.base)


def made_process_tensor(kind: str, arguments: tuple[str | int, ...]) -> Tensor:
    """The process's tensor. Unkept if there is no such kind; raises what making it raises."""
    if kind not in _makers:
        raise Unkept(f"a tensor of the process of kind {kind!r}")
    return _makers[kind](*arguments)


class NamedBuffers:
    """The realized tensors that are reachable from `roots`, by the path of attributes, keys and indices that leads to them.

    `digest` changes with every number, text, switch, shape and dtype on the way, and with the paths. The contents of tensors do not count:
    what is launched does not depend on them. Unkept for an object that has no such description, as a function.
    """

    def __init__(self, roots: Mapping[str, object], base: NamedBuffers | None = None):
        self._base, self._by_name = base, dict[str, Buffer]()
        self._by_memory: dict[int, list[tuple[str, Buffer]]] = {}  # by the id of what a buffer is a part of
        self._paths: dict[int, str] = {}  # of objects that were reached
        self._reached: list[object] = []  # alive, so that ids are theirs
        self._hash = hashlib.sha256(b"" if base is None else base.digest.encode())
        for name, root in roots.items():
            self._walk(name, root)
        self._reached.clear()
        self.digest: str = self._hash.hexdigest()

    def buffer(self, name: str) -> Buffer | None:
        """The buffer of this name; None if there is none."""
        found = self._by_name.get(name)
        return found if found is not None or self._base is None else self._base.buffer(name)

    def place_of(self, buffer: Buffer) -> tuple[str, int] | None:
        """The name of a tensor that contains the buffer, and the byte of it where the buffer starts; None if none does."""
        containing = [
            (name, buffer.offset - whole.offset)
            for name, whole in self._by_memory.get(id(buffer.base), ())
            if whole.offset <= buffer.offset and buffer.offset + buffer.nbytes <= whole.offset + whole.nbytes
        ]
        if containing:
            return min(containing, key=lambda place: place[1])
        return None if self._base is None else self._base.place_of(buffer)

    def _walk(self, path: str, value: object) -> None:
        if isinstance(value, _SCALARS):
            self._note(path, repr(value))
        elif isinstance(value, Tensor):
            self._add(path, value)
        elif (first := self._paths.get(id(value))) is not None:
            self._note(path, f"= {first}")
        else:
            self._paths[id(value)] = path
            self._reached.append(value)
            self._note(path, type(value).__qualname__)
            for name, part in _parts(path, value):
                self._walk(f"{path}.{name}", part)

    def _add(self, path: str, tensor: Tensor) -> None:
        self._note(path, f"{tensor.dtype} {tensor.shape}")
        if tensor.uop.has_buffer_identity() and tensor.uop.base in buffers:
            buffer = buffer_of(tensor.uop)
            self._by_name[path] = buffer
            self._by_memory.setdefault(id(buffer.base), []).append((path, buffer))

    def _note(self, path: str, text: str) -> None:
        self._hash.update(f"{path}\0{text}\0".encode())


def _parts(path: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(i), part) for i, part in enumerate(value))
    elif isinstance(value, set | frozenset):
        yield from ((str(i), text) for i, text in enumerate(sorted(map(repr, value))))
    elif type(value).__module__.partition(".")[0] in _PACKAGES and hasattr(value, "__dict__"):
        yield from vars(value).items()
    else:  # a function holds what no attribute shows
        raise Unkept(f"{path} is a {type(value).__qualname__}")
