"""A captured step as a record of JSON: programs by the digest of their code, buffers by name, and the launches; and back.

    programs  [code, name, global size, local size, [variable, lowest, highest]..., globals, outs, ins, aux] of each
    memory    what buffers are parts of: ["input", i, bytes], ["named", name, bytes], ["process", [kind, ...], bytes],
              ["arena", bytes] or ["own", bytes], which belongs to the step alone
    buffers   [memory, first byte, bytes] of each
    launches  [program, buffers] of each, in their order
    result    null, {"buffer": b, "shape": [...], "dtype": name}, or a list of these

Nothing in a record is believed: each number is within its range, each buffer within its memory, and each memory has the size that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from tinygrad import Tensor, UOp, dtypes
from tinygrad.device import Buffer
from tinygrad.uop.ops import ProgramInfo
from tinygrad.uop.ops import buffers as allocated

from tinyvllm.bridge.arena import arenas, fitting_arena
from tinyvllm.bridge.graph import Launch, StepGraph
from tinyvllm.bridge.memory import buffer_of
from tinyvllm.bridge.names import NamedBuffers, Unkept, made_process_tensor, process_tensor_of
from tinyvllm.bridge.tensors import device_buffer, over

Record = dict[str, Any]
LoadProgram = Callable[[str, ProgramInfo], tuple[bytes, Any]]  # the code and the loaded program, by the digest of the code

MAX_LAUNCHES = 1 << 16
MAX_MEMORY = 1 << 16  # pieces of memory of a step, and its buffers by the same limit
MAX_BYTES = 1 << 40  # of one
MAX_WORK = 1 << 60  # operations, or bytes, of a launch
MAX_NUMBER = 1 << 31  # sizes of launches, and integers of kernels
_DTYPES = {dtype.name: dtype for dtype in (dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int32, dtypes.uint32, dtypes.uint8)}


def record_of(
    graph: StepGraph, inputs: Sequence[Tensor], result: Any, shared: Sequence[Tensor], names: NamedBuffers, keep: Callable[[bytes], str]
) -> Record:
    """The record of a captured step. `keep` keeps a program's code and returns its digest. Unkept for what cannot be recorded.

    `shared` are tensors that the step writes before it reads them, and other captures as well: where it is loaded, it has its own.
    """
    memory, own = _Memory(inputs, names, result, shared), dict[tuple[ProgramInfo, bytes], int]()
    launches = []
    for launch in graph.launches:
        program = own.setdefault((launch.program, launch.binary), len(own))
        moved = dict(launch.inputs)
        launches.append([program, [memory.index_of(buffer, moved.get(position)) for position, buffer in enumerate(launch.buffers)],
                         launch.flops, launch.nbytes])  # fmt: skip
    programs = [_program_record(info, keep(binary)) for info, binary in own]
    structure = _result_record(result, memory)
    return {"programs": programs, "memory": memory.pieces, "buffers": memory.buffers, "launches": launches, "result": structure}


class _Memory:
    """The tables of memory and of buffers of a record."""

    def __init__(self, inputs: Sequence[Tensor], names: NamedBuffers, result: Any, shared: Sequence[Tensor]):
        self._inputs, self._names = [buffer_of(tensor.uop) for tensor in inputs], names
        self._arenas = {id(buffer_of(arena)): buffer_of(arena) for arena in arenas() if arena in allocated}
        own = [*_tensors_of(result), *(tensor for tensor in shared if tensor.uop.base in allocated)]
        self._results = {id(buffer.base): buffer.base for buffer in map(_buffer_of_result, own)}
        self._piece_of: dict[Any, int] = {}
        self._buffer_of: dict[tuple[int, int, int], int] = {}
        self.pieces: list[list[Any]] = []
        self.buffers: list[list[int]] = []

    def index_of(self, buffer: Buffer, moved: int | None = None) -> int:
        """The index of a buffer, which is the input `moved` if that is not None."""
        piece, start = self._place(buffer, moved)
        key = piece, start, buffer.nbytes
        if key not in self._buffer_of:
            self._buffer_of[key] = len(self.buffers)
            self.buffers.append([*key])
        return self._buffer_of[key]

    def _place(self, buffer: Buffer, moved: int | None) -> tuple[int, int]:
        base = buffer.base
        if moved is not None:
            return self._piece("input", moved, size=self._inputs[moved].nbytes), 0
        if (place := self._names.place_of(buffer)) is not None:
            name, start = place
            named = self._names.buffer(name)
            assert named is not None
            return self._piece("named", name, size=named.nbytes), start
        if (made := process_tensor_of(buffer)) is not None:
            kind, arguments = made
            return self._piece("process", (kind, *arguments), size=base.nbytes), buffer.offset
        if id(base) in self._arenas:
            end = buffer.offset + buffer.nbytes
            piece = self._piece("arena", id(base), size=end)
            self.pieces[piece][-1] = max(self.pieces[piece][-1], end)
            return piece, buffer.offset
        if id(base) in self._results and base not in [each.base for each in self._inputs]:
            return self._piece("own", id(base), size=base.nbytes), buffer.offset
        raise Unkept(f"a buffer of {buffer.nbytes} bytes that is in no table")

    def _piece(self, kind: str, which: Any, size: int) -> int:
        if (kind, which) not in self._piece_of:
            self._piece_of[kind, which] = len(self.pieces)
            self.pieces.append([kind, size] if kind in ("arena", "own") else [kind, which, size])
        return self._piece_of[kind, which]


def _program_record(info: ProgramInfo, code: str) -> list[Any]:
    sizes = [*info.global_size, *(info.local_size or ()), *info.aux]
    if not all(type(size) is int for size in sizes):
        raise Unkept(f"{info.name}: a launch whose size depends on a variable")
    variables = [[v.expr, v.arg[1], v.arg[2]] for v in info.vars]
    local = None if info.local_size is None else [*info.local_size]
    return [code, info.name, [*info.global_size], local, variables, [*info.globals], [*info.outs], [*info.ins], [*info.aux]]


def _result_record(result: Any, memory: _Memory) -> Any:
    if result is None:
        return None
    if isinstance(result, tuple):
        return [_result_record(part, memory) for part in result]
    buffer = _buffer_of_result(result)
    if result.dtype.name not in _DTYPES:
        raise Unkept(f"a result of {result.dtype}")
    return {"buffer": memory.index_of(buffer), "shape": [int(d) for d in result.shape], "dtype": result.dtype.name}


def _tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, tuple):
        return [tensor for part in result for tensor in _tensors_of(part)]
    if result is not None and not isinstance(result, Tensor):
        raise Unkept(f"a result that is a {type(result).__qualname__}")
    return [] if result is None else [result]


def _buffer_of_result(tensor: Tensor) -> Buffer:
    buffer = buffer_of(tensor.uop) if tensor.uop.has_buffer_identity() else None
    if buffer is None or buffer.nbytes != prod(int(d) for d in tensor.shape) * tensor.dtype.itemsize:
        raise Unkept(f"a result {tensor.shape} that is a part of a buffer")
    return buffer


class Damaged(Exception):
    """A record that was not written here."""


def step_of(
    record: Record, inputs: Sequence[Tensor], names: NamedBuffers, device: str, graph: type[StepGraph], load: LoadProgram
) -> tuple[StepGraph, Any]:
    """The captured step of a record, and its result. Damaged, Unkept and what a device or Python raises for a record of another kind."""
    pieces = [_Piece(piece, inputs, names, device) for piece in _list(record["memory"], MAX_MEMORY)]
    held = _hold_arenas(pieces, device)
    buffers = [_part(part, pieces) for part in _list(record["buffers"], MAX_MEMORY)]
    programs = [_program(each, load) for each in _list(record["programs"], MAX_LAUNCHES)]
    launches = [_launch(each, programs, buffers) for each in _list(record["launches"], MAX_LAUNCHES)]
    if not launches:
        raise Damaged("no launches")
    result = _result(record["result"], buffers, device, depth=0)
    step = graph(launches, tuple(tensor.uop.base for tensor in inputs))
    step.held = held
    return step, result


class _Piece:
    """A piece of memory: its buffer, and which input it is."""

    def __init__(self, piece: list[Any], inputs: Sequence[Tensor], names: NamedBuffers, device: str):
        kind, *which, size = piece
        self.kind, self.size = str(kind), _integer(size, 1, MAX_BYTES)
        self.input: int | None = None
        self.buffer: Buffer | None = None
        if kind == "input":
            self.input = _integer(which[0], 0, len(inputs) - 1)
            self.buffer = buffer_of(inputs[self.input].uop)
        elif kind == "named":
            self.buffer = names.buffer(str(which[0]))
        elif kind == "process":
            name, *arguments = which[0]
            if not all(isinstance(a, str) and len(a) < 64 or type(a) is int and 0 <= a < MAX_NUMBER for a in arguments):
                raise Damaged(f"a tensor of the process {name!r} of {arguments!r:.80}")
            self.buffer = buffer_of(made_process_tensor(name, tuple(arguments)).uop)
        elif kind == "own":
            self.buffer = device_buffer(device, self.size, dtypes.uint8)
        elif kind != "arena":
            raise Damaged(f"memory of kind {kind!r:.40}")
        if kind != "arena" and (self.buffer is None or self.buffer.nbytes != self.size or self.buffer.device != device):
            raise Damaged(f"memory {piece!r:.120}: expected {self.buffer}")


def _hold_arenas(pieces: Sequence[_Piece], device: str) -> list[UOp]:
    """Give each piece of an arena one of its own; the arenas, which live as long as they are held."""
    held: list[UOp] = []
    for piece in sorted((piece for piece in pieces if piece.kind == "arena"), key=lambda piece: -piece.size):
        arena = fitting_arena(device, piece.size, set(held))
        held.append(arena)
        piece.buffer = buffer_of(arena)
    return held


def _part(part: list[Any], pieces: Sequence[_Piece]) -> tuple[Buffer, int | None]:
    """A buffer, and which input it is."""
    index, start, nbytes = part
    piece = pieces[_integer(index, 0, len(pieces) - 1)]
    start, nbytes = _integer(start, 0, piece.size - 1), _integer(nbytes, 1, piece.size)
    assert piece.buffer is not None
    if start + nbytes > piece.size or (piece.input is not None and nbytes != piece.size):
        raise Damaged(f"bytes {start} to {start + nbytes} of {piece.size}")
    if start == 0 and nbytes == piece.buffer.nbytes:
        return piece.buffer, piece.input
    return piece.buffer.view(nbytes, dtypes.uint8, start).ensure_allocated(), None


def _program(program: list[Any], load: LoadProgram) -> tuple[ProgramInfo, bytes, Any]:
    code, name, grid, block, variables, arguments, outs, ins, aux = program
    bounds = [(str(v), _integer(low, -MAX_NUMBER, MAX_NUMBER), _integer(high, -MAX_NUMBER, MAX_NUMBER)) for v, low, high in variables]
    taken, written, read = (_integers(each, 0, MAX_MEMORY) for each in (arguments, outs, ins))
    info = ProgramInfo(
        str(name), _integers(grid, 1, MAX_NUMBER, count=3), None if block is None else _integers(block, 1, MAX_NUMBER, count=3),
        tuple(UOp.variable(*each, dtype=dtypes.int) for each in bounds), taken, written, read, _integers(aux, 0, MAX_NUMBER),
    )  # fmt: skip
    binary, runtime = load(str(code), info)
    return info, binary, runtime


def _launch(launch: list[Any], programs: Sequence[tuple[ProgramInfo, bytes, Any]], buffers: Sequence[tuple[Buffer, int | None]]) -> Launch:
    info, binary, runtime = programs[_integer(launch[0], 0, len(programs) - 1)]
    parts = [buffers[i] for i in _integers(launch[1], 0, len(buffers) - 1)]
    if not parts or not {*info.globals, *info.outs, *info.ins} <= {*range(len(parts))}:
        raise Damaged(f"{info.name} takes other arguments than {len(parts)}")
    inputs = [(position, i) for position, (_, i) in enumerate(parts) if i is not None]
    flops, nbytes = _integers(launch[2:], 0, MAX_WORK, count=2)
    return Launch(info, binary, runtime, [buffer for buffer, _ in parts], inputs, flops, nbytes)


def _result(result: Any, buffers: Sequence[tuple[Buffer, int | None]], device: str, depth: int) -> Any:
    if result is None:
        return None
    if isinstance(result, list):
        if depth > 1:
            raise Damaged("results in results")
        return tuple(_result(part, buffers, device, depth + 1) for part in result)
    buffer, _ = buffers[_integer(result["buffer"], 0, len(buffers) - 1)]
    shape, dtype = _integers(result["shape"], 1, MAX_NUMBER), _DTYPES[result["dtype"]]
    if prod(shape) * dtype.itemsize != buffer.nbytes:
        raise Damaged(f"a result {shape} of {dtype} in {buffer.nbytes} bytes")
    return over(buffer, 0, shape, dtype)


def _list(value: Any, limit: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > limit:
        raise Damaged(f"expected a list of at most {limit}, got {value!r:.40}")
    return value


def _integer(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise Damaged(f"expected a number from {low} to {high}, got {value!r:.40}")
    return value


def _integers(values: Any, low: int, high: int, count: int | None = None) -> tuple[int, ...]:
    numbers = tuple(_list(values, MAX_MEMORY))
    if count is not None and len(numbers) != count:
        raise Damaged(f"expected {count} numbers, got {values!r:.40}")
    if numbers and ({*map(type, numbers)} != {int} or min(numbers) < low or max(numbers) > high):  # a check of each took half of a start
        raise Damaged(f"expected numbers from {low} to {high}, got {values!r:.80}")
    return numbers
