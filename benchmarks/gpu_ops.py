"""Ops on a GPU by themselves: random operands of a shape on tinygrad's default device, CUDA or METAL, the op captured as a graph, seconds
by the device's own clock.

A graph holds the op several times over, each time with weights (or a cache) of its own, so that together they exceed the device's cache,
as those of a model's layers do. An op can be made for the hand-written kernel, with weights in tiles, or for tinygrad's own code, with
plain bfloat16 tensors: what a device without kernels runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes

from tinyvllm.backends import registry
from tinyvllm.backends.cuda import plan as cuda_records
from tinyvllm.backends.cuda.driver import gpu_attribute
from tinyvllm.backends.launch import launch
from tinyvllm.backends.metal import plan as metal_records
from tinyvllm.batch import PACKED_KV, Batch, KVLayout, LayerCache
from tinyvllm.bridge import Captured, alias, synchronize
from tinyvllm.ops.attention import PagedAttention
from tinyvllm.ops.head import embed, norm_head
from tinyvllm.ops.linear import TensorWeight, Weight, gate_up_silu, linear
from tinyvllm.ops.norm import Norm
from tinyvllm.ops.qkv import QKV, norm_qkv_rope_store
from tinyvllm.placement import Placement
from tinyvllm.quant.codecs import f32_to_bf16
from tinyvllm.quant.formats import FLOATS, FORMATS
from tinyvllm.quant.kv import pack_blocks
from tinyvllm.quant.layouts import RowSource, RowWeight, StoredWeight, TileWeight, pack_tiles, panel_bytes
from tinyvllm.quant.random_rows import random_blocks
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.runner.packing import place_tiles
from tinyvllm.sampling.sampler import Sampler
from tinyvllm.weights.memory import place_bytes

DISTINCT, MOST_SETS = 160 << 20, 12  # bytes of weights in all sets together, where that many sets have them; an H100 caches 50 MB
S = 16  # slots of a block
_BLOCKS = 8191  # prime, too: of packed formats
_POOL = 1_048_573  # prime, so that no two rows of a matrix begin at the same place


@dataclass(frozen=True)
class Effort:
    """How long to measure: `rounds` of about `seconds` each. Zero seconds are one replay."""

    rounds: int = 5
    seconds: float = 0.03


@dataclass(frozen=True)
class Op:
    """An op of one shape. `make(True)` is the op for the kernel `stem` with operands of its own, `make(False)` for tinygrad's code.

    bytes and flops are what one call must move from or to memory (weights, or keys and values) and compute.
    """

    name: str
    stem: str
    make: Callable[[bool], Callable[[], Tensor]]
    bytes: int
    flops: int
    choice: str | None = None  # what TINYVLLM_KERNELS must say for the kernel to be taken


# --- the device's clock


def device_seconds(work: Callable[[], Any], effort: Effort) -> float:
    """Seconds of the device for one `work()`, launched many times in a row: the median of the rounds."""
    clock, most = (_busy, 200) if Device.DEFAULT == "METAL" else (_between_events, 1000)
    work()
    times = max(1, min(most, round(effort.seconds / max(1e-7, clock(work, 1)))))
    return median(clock(work, times) / times for _ in range(effort.rounds))


def _busy(work: Callable[[], Any], times: int) -> float:
    """Seconds in which Metal's device runs any command buffer; a graph is one. The gaps between them are the host's."""
    device: Any = Device["METAL"]
    device.synchronize()
    before, device.mtl_buffers_in_flight = device.mtl_buffers_in_flight, InFlight()
    try:
        for _ in range(times):
            work()
        buffers = device.mtl_buffers_in_flight.every
        device.synchronize()
    finally:
        device.mtl_buffers_in_flight = before
    if not buffers:
        raise RuntimeError("mac: tinygrad knows of no command buffer of this work")
    busy, until = 0.0, 0.0
    for start, end in sorted((buffer.GPUStartTime(), buffer.GPUEndTime()) for buffer in buffers):
        busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
    return busy


def _between_events(work: Callable[[], Any], times: int) -> float:
    from tinygrad.runtime.autogen import cuda

    _check(cuda.cuCtxSetCurrent(Device["CUDA"].context))  # type: ignore[attr-defined]
    events = [cuda.CUevent() for _ in range(2)]
    for event in events:
        _check(cuda.cuEventCreate(ctypes.byref(event), 0))
    _check(cuda.cuEventRecord(events[0], None))
    for _ in range(times):
        work()
    _check(cuda.cuEventRecord(events[1], None))
    _check(cuda.cuEventSynchronize(events[1]))
    milliseconds = ctypes.c_float()
    _check(cuda.cuEventElapsedTime(ctypes.byref(milliseconds), *events))
    for event in events:
        _check(cuda.cuEventDestroy_v2(event))
    return milliseconds.value / 1e3


class InFlight(list[Any]):
    """Command buffers in flight, which are taken off when they are done, and all that ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.every: list[Any] = []

    def append(self, buffer: Any) -> None:
        self.every.append(buffer)
        super().append(buffer)


def broken() -> bool:
    """Whether the device answers nothing but errors any more, as after a kernel that wrote where it may not: only a new process helps."""
    if Device.DEFAULT == "METAL":
        try:
            Device["METAL"].synchronize()
        except RuntimeError:
            return True
        return False
    from tinygrad.runtime.autogen import cuda

    return bool(cuda.cuCtxSetCurrent(Device["CUDA"].context) or cuda.cuCtxSynchronize())  # type: ignore[attr-defined]


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"gpu: the driver answers with error {status}; a kernel before this may be the cause")


# --- operands


def on_device(array: np.ndarray) -> Tensor:
    return Tensor(np.ascontiguousarray(array), device=Device.DEFAULT).contiguous().realize()


def floats(*shape: int) -> Tensor:
    return on_device(np.random.default_rng(len(shape)).standard_normal(shape, np.float32))


def int32(values: Any) -> Tensor:
    return on_device(np.asarray(values, np.int32))


def normal_bits(count: int, deviation: float, format: str = "BF16") -> np.ndarray:
    """uint16 [count]: normal numbers as bfloat16 or as float16, the same million again and again."""
    values = np.random.default_rng(0).standard_normal(_POOL, np.float32) * np.float32(deviation)
    return np.resize(f32_to_bf16(values) if format == "BF16" else values.astype(np.float16).view(np.uint16), count)


def tile_weight(format: str, O: int, I: int) -> TileWeight:
    """Random weights [O, I] in tiles, of deviation about 0.02."""
    if format in FLOATS:  # random bits need no packing
        return TileWeight(
            place_bytes(normal_bits(panel_bytes(format, O, I) // 2, 0.02, format).view(np.uint8), Device.DEFAULT), format, O, I
        )
    return TileWeight(place_bytes(pack_tiles(format, file_bytes(format, O, I).reshape(O, -1)), Device.DEFAULT), format, O, I)


def placing_seconds(format: str, O: int, I: int) -> float:
    """Seconds of the host's clock until rows in its memory are tiles on the device (pack_tiles): the upload counts. The best of three."""
    rows, placement, best = RowSource.of(format, file_bytes(format, O, I).reshape(O, -1)), Placement(Device.DEFAULT), float("inf")
    for _ in range(3):
        synchronize(Device.DEFAULT)
        start = time.perf_counter()
        place_tiles(placement, [rows], I, format)
        synchronize(Device.DEFAULT)
        best = min(best, time.perf_counter() - start)
    return best


def stored_weight(format: str, rows: tuple[int, ...], I: int) -> StoredWeight:
    """Random matrices [O, I], one for each of `rows`, as they lie in files, of deviation about 0.02."""
    return StoredWeight(tuple(RowWeight(place_bytes(file_bytes(format, O, I), Device.DEFAULT), format, O, I) for O in rows))


def file_bytes(format: str, O: int, I: int) -> np.ndarray:
    """uint8 [bytes] of random rows [O, I] of a file."""
    count = O * I // FORMATS[format].elements
    if format in FLOATS:
        return normal_bits(count, 0.02, format).view(np.uint8)
    pool = random_blocks(format, min(count, _BLOCKS), 0.02)
    blocks = np.resize(pool, (count, FORMATS[format].nbytes))
    return blocks.reshape(-1)


def kernel_weight(format: str, rows: tuple[int, ...], I: int) -> Weight:
    """A random matrix [sum of rows, I] as the device's kernels take it."""
    return stored_weight(format, rows, I) if Device.DEFAULT == "METAL" else tile_weight(format, sum(rows), I)


def bytes_of(format: str, O: int, I: int) -> int:
    """Of a matrix that is read once."""
    return O * I // FORMATS[format].elements * FORMATS[format].nbytes


def tensor_weight(O: int, I: int) -> TensorWeight:
    """Random weights [O, I] as a bfloat16 tensor."""
    bits = Tensor(normal_bits(O * I, 0.02).reshape(O, I), device=Device.DEFAULT)
    return TensorWeight((bits.bitcast(dtypes.bfloat16).contiguous().realize(),))


def random_cache(blocks: int, K: int, D: int, cache: str = "BF16") -> LayerCache:
    """A pool of normal numbers: bfloat16 [blocks, 2, K, S, D], or packed blocks."""
    if cache in PACKED_KV.values():
        numbers = np.random.default_rng(0).standard_normal((min(blocks, 61), 2, K, S, D)).astype(np.float32)
        layout = KVLayout(cache, K, S, D)
        packed = Tensor(np.resize(pack_blocks(cache, numbers), (blocks, layout.block_bytes)), device=Device.DEFAULT).realize()
        return LayerCache(packed, alias(packed), layout)
    bits = Tensor(normal_bits(blocks * 2 * K * S * D, 1.0).reshape(blocks, 2, K, S, D), device=Device.DEFAULT)
    pool = bits.bitcast(dtypes.bfloat16).contiguous().realize()
    return LayerCache(pool, alias(pool))


def decodes(B: int, context: int) -> Batch:
    """B decodes that hold `context` tokens each, their blocks in no order."""
    M = -(-context // S)
    tables = np.random.default_rng(0).permutation(B * M).reshape(B, M)
    last = context - 1
    ids = range(B)
    return Batch(
        int32([0] * B), int32([last] * B), int32([tables[b, last // S] * S + last % S for b in ids]), int32(tables), int32(range(B + 1)),
        int32([context] * B), int32([B]), int32([B]), int32([B, 0]), int32(ids), int32([B]), M, B, 1,
    )  # fmt: skip


def chunk(T: int) -> Batch:
    """A prompt of T tokens in one step."""
    M = -(-T // S)
    table = np.random.default_rng(0).permutation(M)
    places = np.arange(T)
    return Batch(
        int32([0] * T), int32(places), int32(table[places // S] * S + places % S), int32(table.reshape(1, M)), int32([0, T]), int32([T]),
        int32([T]), int32([0]), int32([0, 1]), int32([T - 1]), int32([1]), M, 0, T,
    )  # fmt: skip


# --- ops


def product_op(name: str, T: int, O: int, I: int, format: str = "BF16", residual: bool = False, variant: str | None = None) -> Op:
    x, added, rows = floats(T, I), floats(T, O) if residual else None, int32([T])

    def make(kernel: bool) -> Callable[[], Tensor]:
        weight: Weight = kernel_weight(format, (O,), I) if kernel else tensor_weight(O, I)
        return lambda: linear(x, weight, rows, residual=added)

    return Op(name, "matmul", make, bytes_of(format, O, I), 2 * T * O * I, variant and f"matmul={variant}")


def cache_bytes(cache: str, tokens: int, K: int, D: int) -> int:
    """Bytes of this number of keys and values."""
    return tokens * (KVLayout(cache, K, S, D).block_bytes // S if cache in PACKED_KV.values() else 4 * K * D)


def attention_decode_op(B: int, context: int, H: int, K: int, D: int, cache: str = "BF16") -> Op:
    q, batch = floats(B, H, D), decodes(B, context)

    def make(kernel: bool) -> Callable[[], Tensor]:
        pool = random_cache(B * -(-context // S), K, D, cache if kernel else "BF16")
        return lambda: PagedAttention(batch, S)(q, pool, D**-0.5)

    name = f"attention_decode, {B} x {context}" + (f", {cache}" if cache != "BF16" else "")
    return Op(name, "attention_decode", make, cache_bytes(cache, B * context, K, D), 4 * B * context * H * D)


def attention_prefill_op(T: int, H: int, K: int, D: int, cache: str = "BF16", variant: str | None = None) -> Op:
    """Operations that the causal mask leaves out do not count."""
    q, batch = floats(T, H, D), chunk(T)

    def make(kernel: bool) -> Callable[[], Tensor]:
        pool = random_cache(-(-T // S), K, D, cache if kernel else "BF16")
        return lambda: PagedAttention(batch, S)(q, pool, D**-0.5)

    name = f"attention_prefill, {T}" + (f", {cache}" if cache != "BF16" else "")
    choice = variant and f"attention_prefill={variant}"
    return Op(name, "attention_prefill", make, cache_bytes(cache, T, K, D), 2 * T * (T + 1) * H * D, choice)


def layer_ops(c: dict[str, Any], T: int, context: int) -> list[Op]:
    """The ops of one layer of the model `c`, and its head, for T sequences that decode at `context`."""
    E, F, H, K, V = (c[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"))
    D = c["head_dim"]
    O, batch, norm = (H + 2 * K) * D, decodes(T, context), Norm("RMS", floats(E), 1e-5)
    x, angles = floats(T, E), floats(T, D)

    def qkv(kernel: bool) -> Callable[[], Tensor]:
        weight: Weight = kernel_weight("BF16", (H * D, K * D, K * D), E) if kernel else tensor_weight(O, E)
        cache = random_cache(T * -(-context // S), K, D)
        return lambda: norm_qkv_rope_store(x, norm, QKV(weight), angles, cache, batch)[0]

    def gate_up(kernel: bool) -> Callable[[], Tensor]:
        weight: Weight = kernel_weight("BF16", (F, F), E) if kernel else tensor_weight(2 * F, E)
        return lambda: gate_up_silu(x, norm, weight, batch.rows)

    def head(kernel: bool) -> Callable[[], Tensor]:
        weight: Weight = kernel_weight("BF16", (V,), E) if kernel else tensor_weight(V, E)
        return lambda: norm_head(x, norm, weight, batch.samples, batch.sample_count)[0]

    def table(kernel: bool) -> Callable[[], Tensor]:
        weight: Any = kernel_weight("BF16", (V,), E) if kernel else tensor_weight(V, E)
        rows = weight if isinstance(weight, TileWeight) else weight.parts[0]
        return lambda: embed(rows, batch.tokens, batch.rows)

    return [
        Op("embed", "embed", table, 16 * 2 * T * E, 0),
        Op("norm_qkv_rope_store", "norm_qkv_rope_store", qkv, bytes_of("BF16", O, E), 2 * T * O * E),
        attention_decode_op(T, context, H, K, D),
        product_op("matmul, attention's output", T, E, H * D, residual=True),
        Op("norm_gate_up_silu", "norm_gate_up_silu", gate_up, bytes_of("BF16", 2 * F, E), 4 * T * F * E),
        product_op("matmul, down", T, E, F, residual=True),
        Op("norm_head", "norm_head", head, bytes_of("BF16", V, E), 2 * T * V * E),
    ]


# --- running


@contextlib.contextmanager
def kernels(choice: str | None) -> Iterator[None]:
    """TINYVLLM_KERNELS as given, None unset, while ops are captured."""
    before = os.environ.pop("TINYVLLM_KERNELS", None)
    if choice is not None:
        os.environ["TINYVLLM_KERNELS"] = choice
    registry.forget_choices()
    try:
        yield
    finally:
        os.environ.pop("TINYVLLM_KERNELS", None)
        if before is not None:
            os.environ["TINYVLLM_KERNELS"] = before


def sets_of(op: Op) -> int:
    return 1 if op.stem == "embed" else max(1, min(MOST_SETS, -(-DISTINCT // op.bytes)))


def captured(op: Op, kernel: bool, sets: int) -> Captured:
    """A graph of the op on `sets` sets of operands. RuntimeError where it should be the kernel and another choice was made."""
    with kernels(op.choice if kernel else f"{op.stem}=ref"):
        calls = [op.make(kernel) for _ in range(sets)]

        def run() -> Tensor:
            results = [call() if kernel else call().contiguous() for call in calls]
            Tensor.realize(*results)
            return results[-1]

        step = Captured(run)
        step()
        refused = [c for c in registry.choices() if c.stem == op.stem and c.variant == registry.REFERENCE]
    if kernel and refused:
        raise RuntimeError(f"gpu: {op.name} should run its kernel, but {refused[0].shape} does not: {refused[0].why}")
    return step


def seconds_of(op: Op, effort: Effort, kernel: bool = True) -> float:
    """Seconds of the device for the op once."""
    sets = sets_of(op)
    return device_seconds(captured(op, kernel, sets), effort) / sets


def draw_seconds(V: int, B: int, effort: Effort, kernel: bool = True) -> float:
    """Seconds of the device in which B tokens are drawn at a temperature from logits [B, V], launches of the host's included."""
    sampler = Sampler(V, B, Device.DEFAULT)
    sequences = [Sequence(b, str(b), [1], SamplingParams(temperature=0.6, seed=b), row=b) for b in range(B)]
    for sequence in sequences:
        sampler.add(sequence, ())
    logits, flags = floats(B, V), sampler.prepare(sequences, B)
    with kernels(None if kernel else "sample=ref"):
        sampler.draw(logits, flags)
    return device_seconds(lambda: sampler.draw(logits, flags), effort)


# --- roofs


def memory_seconds(stem: str, nbytes: int, effort: Effort) -> float:
    """Seconds in which the kernel "read" or "copy" (CUDA's alone) reads, or reads and writes, `nbytes` (a multiple of 16)."""
    words = on_device(np.ones(nbytes // 4, np.uint32))
    if Device.DEFAULT == "METAL":
        kernel, blocks = metal_records.read("apple7", nbytes // 16, 1024), 1024
    else:
        blocks = 2 * gpu_attribute("CUDA", "MULTIPROCESSOR_COUNT")
        kernel = {"read": cuda_records.read, "copy": cuda_records.copy}[stem]("sm_80", nbytes // 16, blocks)
    size = blocks if stem == "read" else nbytes // 4
    out = Tensor.empty(size, dtype=dtypes.uint32, device=Device.DEFAULT)

    def run() -> Tensor:
        return launch(kernel, [out], [words])[0].realize()

    return device_seconds(Captured(run), effort)


def driver_copy_seconds(nbytes: int, effort: Effort) -> float:
    """Seconds in which the driver itself copies `nbytes` from one buffer to another."""
    from tinygrad.runtime.autogen import cuda

    tensors = [on_device(np.full(nbytes // 4, value, np.uint32)) for value in range(2)]  # kept: their memory would be given away
    source, target = (tensor.uop.buffer._buf for tensor in tensors)  # type: ignore[union-attr]
    return device_seconds(lambda: _check(cuda.cuMemcpyDtoDAsync_v2(target, source, nbytes, None)), effort)
