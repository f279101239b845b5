"""One hand-written CPU kernel by itself: time, GB/s or operations a second, and the share of the roof that was measured in turn with it.

    python -m benchmarks.kernels matmul --weight BF16 --I 2048 --O 5632 --T 1
    python -m benchmarks.kernels attention_decode --T 1 --context 8192 --cache BF16
    python -m benchmarks.kernels all --T 1
    python -m benchmarks.kernels --plan METAL --shape llama-3.2-1b --weights q4_0 --T 1 --context 4096    (plan.py: nothing is timed)

Letters are those of docs/shapes.md; left out, they are TinyLlama's. The kernel is compiled with a loop around it, which all threads run in
threads of their own: call, meet, call with the next set of arguments. The sets have weights (or caches) of their own, 256 MB together, so
that nothing is found in a processor's cache. Bytes are those that must come from memory: weights, or keys and values.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import plan
from benchmarks.harness import record, spread, table, take_turns
from benchmarks.roof import operations, read_once, read_size, threads_of_machine
from tinyvllm.backends.cpu.threads import TEAM_BYTES
from tinyvllm.backends.cpu.toolchain import provide_compiler, target_flags
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.registry import usable_variants
from tinyvllm.backends.source import kernel_text
from tinyvllm.batch import PACKED_KV, KVLayout
from tinyvllm.placement import Placement
from tinyvllm.quant.codecs import f32_to_bf16
from tinyvllm.quant.formats import Activations, Layout, activations_of, formats_in
from tinyvllm.quant.kv import pack_blocks
from tinyvllm.quant.layouts import panel_bytes
from tinyvllm.weights.mapping import allocate

DISTINCT = 256 << 20  # bytes of weights in all sets together
ROUND_SECONDS = 0.15
_FLAGS = ("-x", "c", "-O2", "-fPIC", "-shared", "-ffreestanding", "-nostdlib", "-fno-builtin", "-fno-jump-tables", "-ffp-contract=off",
          "-fno-math-errno", "-fno-stack-protector", "-Wno-deprecated-non-prototype")  # fmt: skip
_NUMBER = {"F32": 4, "F16": 2, "BF16": 2}  # bytes


def _block_bytes(o: argparse.Namespace) -> int:
    """Bytes of a block of one layer's cache."""
    if o.cache in PACKED_KV.values():
        return KVLayout(o.cache, o.K, o.S, o.D).block_bytes
    return int(2 * o.K * o.S * o.D * _NUMBER[o.cache])


@dataclass
class Work:
    """A kernel's arguments. `big(n)` makes the one that every set has of its own; it is at `place` in each of `sets`' lists."""

    kernel: Kernel
    arguments: list[np.ndarray]
    place: int
    big: Callable[[], np.ndarray]
    bytes: int
    flops: int
    unit: str  # which roof of operations is meant


# --- arguments


def floats(*shape: int) -> np.ndarray:
    out = allocate(4 * int(np.prod(shape))).view(np.float32).reshape(shape)
    out[...] = np.random.default_rng(0).standard_normal(shape, np.float32)
    return out


def empty(*shape: int) -> np.ndarray:
    return allocate(4 * int(np.prod(shape))).view(np.float32).reshape(shape)


def ints(*values: int) -> np.ndarray:
    out = allocate(4 * len(values)).view(np.int32)
    out[:] = values
    return out


def plain(nbytes: int) -> np.ndarray:
    """Bytes from 0x3C to 0x3F: an ordinary number between 0.01 and 2 in every float format, and some quant or other."""
    out = allocate(nbytes)
    pool = np.random.default_rng(0).integers(0x3C, 0x40, 1_048_573, np.uint8)
    for start in range(0, nbytes, len(pool)):
        out[start : start + len(pool)] = pool[: nbytes - start]
    return out


def blocks(o: argparse.Namespace, count: int) -> np.ndarray:
    """Blocks of one layer's cache, a few in turn: keys and values from the normal distribution. With other numbers scores may be so far
    apart that most weights are subnormal, which some processors multiply a hundred times as slowly."""
    numbers = np.random.default_rng(0).standard_normal((min(count, 61), 2, o.K, o.S, o.D), np.float32)
    if o.cache in PACKED_KV.values():
        few = pack_blocks(o.cache, numbers)
    else:
        few = f32_to_bf16(numbers) if o.cache == "BF16" else numbers.astype(np.float16 if o.cache == "F16" else np.float32)
    few = few.reshape(len(numbers), -1).view(np.uint8)
    out = allocate(count * few.shape[1])
    for start in range(0, out.size, few.size):
        out[start : start + few.size] = few.reshape(-1)[: out.size - start]
    return out


def scratch(T: int, I: int) -> np.ndarray:
    """Room for T prepared rows of any format."""
    return allocate(-(-T // 16) * 16 * (4 * I + 128))


# --- the kernels


def matmul(o: argparse.Namespace) -> Work:
    defines = (("I", o.I), ("O", o.O), ("WEIGHT", o.weight), ("BIAS", 0), ("RESIDUAL", 0), ("ACTIVATION", 0))
    size = panel_bytes(o.weight, o.O, o.I)
    arguments = [empty(o.T, o.O), scratch(o.T, o.I), floats(o.T, o.I), ints(), ints(o.T)]
    return Work(Kernel("matmul", "cpu", o.target, defines, 2, 3), arguments, 3, lambda: plain(size), size, 2 * o.T * o.I * o.O, _unit(o))


def norm_gate_up_silu(o: argparse.Namespace) -> Work:
    defines = (("E", o.E), ("F", o.F), ("WEIGHT", o.weight), ("HALF", "BOTH"), ("BIAS", 0), ("EPS", 1e-5))
    size = panel_bytes(o.weight, 2 * o.F, o.E)
    arguments = [empty(o.T, o.F), scratch(o.T, o.E), floats(o.T, o.E), floats(o.E), ints(), ints(o.T)]
    kernel = Kernel("norm_gate_up_silu", "cpu", o.target, defines, 2, 4)
    return Work(kernel, arguments, 4, lambda: plain(size), size, 4 * o.T * o.E * o.F, _unit(o))


def norm_route(o: argparse.Namespace) -> Work:
    """Each row has experts of its own, as far as there are as many."""
    size, defines = panel_bytes("F32", o.X, o.E), (("E", o.E), ("X", o.X), ("C", o.C), ("WEIGHT", "F32"), ("RENORMALIZE", 1), ("EPS", 1e-5))
    outs = [empty(o.T, o.C), empty(o.T, o.C), empty(o.T * o.C), empty(1 + 3 * o.T * o.C), gathering(o.T, max(o.E, o.X))]
    arguments = [*outs, floats(o.T, o.E), floats(o.E), ints(), ints(o.T)]
    return Work(
        Kernel("norm_route", "cpu", o.target, defines, 5, 4), arguments, 7, lambda: plain(size), size, 2 * o.T * o.E * o.X, "f32_flops"
    )


def gathering(rows: int, I: int) -> np.ndarray:
    """Scratch of a product of experts: prepared rows, and a tile of them for each of 64 threads."""
    return np.concatenate([scratch(rows, I), scratch(64 * 32, I)])


def _groups(o: argparse.Namespace) -> tuple[list[np.ndarray], int]:
    """The order and the tasks of rows whose experts follow each other, and how many experts have a row."""
    experts = np.arange(o.T * o.C) % o.X
    order, tasks = np.argsort(experts, kind="stable"), []
    for expert in range(min(o.X, o.T * o.C)):
        start, end = np.searchsorted(experts[order], (expert, expert + 1)).tolist()
        tasks += [(expert, first, min(first + 96, end)) for first in range(start, end, 96)]
    return [ints(*order.tolist()), ints(len(tasks), *np.ravel(tasks).tolist())], min(o.X, o.T * o.C)


def experts_gate_up_silu(o: argparse.Namespace) -> Work:
    groups, read = _groups(o)
    defines = (("E", o.E), ("F", o.F), ("X", o.X), ("C", o.C), ("WEIGHT", o.weight), ("HALF", "BOTH"), ("EPS", 1e-5))
    size = panel_bytes(o.weight, 2 * o.F, o.E)
    arguments = [empty(o.T * o.C, o.F), gathering(o.T, o.E), floats(o.T, o.E), floats(o.E), ints(), *groups, ints(o.T)]
    kernel, work = Kernel("experts_gate_up_silu", "cpu", o.target, defines, 2, 6), 4 * o.T * o.C * o.E * o.F
    return Work(kernel, arguments, 4, lambda: plain(o.X * size), read * size, work, _unit(o))


def experts_down(o: argparse.Namespace) -> Work:
    groups, read = _groups(o)
    defines = (("E", o.E), ("F", o.F), ("X", o.X), ("C", o.C), ("WEIGHT", o.weight), ("RESIDUAL", 1))
    size, pairs = panel_bytes(o.weight, o.E, o.F), o.T * o.C
    outs, more = [empty(o.T, o.E), empty(pairs, o.E), gathering(pairs, o.F)], [floats(o.T, o.C), *groups, floats(o.T, o.E), ints(o.T)]
    kernel = Kernel("experts_down", "cpu", o.target, defines, 3, 7)
    return Work(
        kernel, [*outs, floats(pairs, o.F), ints(), *more], 4, lambda: plain(o.X * size), read * size, 2 * pairs * o.E * o.F, _unit(o)
    )


def lora_bias(o: argparse.Namespace) -> Work:
    """Rows of one adapter of 16 ranks, for a product of I inputs and O outputs."""
    rank, defines = 16, (("E", o.I), ("O", o.O), ("R", 16), ("PARTS", 1), ("BIAS", 0), ("NORM", "NO_NORM"))
    arguments = [empty(o.T, o.O), empty(o.T, o.I + rank), floats(o.T, o.I), floats(1, 1, rank, o.I), ints(), ints(rank), ints(*[1] * o.T)]
    kernel, size = Kernel("lora_bias", "cpu", o.target, defines, 2, 6), 4 * rank * o.O
    work = 2 * o.T * rank * (o.I + o.O)
    return Work(kernel, [*arguments, ints(o.T)], 4, lambda: plain(size), size + 4 * rank * o.I, work, "f32_flops")


def gated_delta(o: argparse.Namespace) -> Work:
    """One sequence of T rows: K key heads and H value heads of D features."""
    channels = (2 * o.K + o.H) * o.D
    state, width = 3 * channels + o.H * o.D * o.D, channels + o.H * (o.D + 2)
    sizes = (("KH", o.K), ("VH", o.H), ("DK", o.D), ("DV", o.D), ("TAPS", 4), ("TILED", 0), ("EPS", 1e-6), ("DRAFTS", 0))
    outs = [empty(o.T, o.H * o.D), empty(o.T, channels + 2 * o.H + o.K), ints()]
    ins = [
        floats(o.T, width),
        floats(4, channels),
        -np.ones(o.H, np.float32),
        floats(o.H),
        floats(o.D),
        ints(0, 0, 0, 0),
        ints(*range(1, o.T + 1)),
    ]
    kernel = Kernel("gated_delta", "cpu", o.target, sizes, 3, 10)
    moved = 8 * state + 4 * o.T * (width + o.H * o.D)
    arguments = [*outs, *ins, ints(0, o.T), ints(int(o.T == 1)), ints(int(o.T == 1), int(o.T > 1))]
    return Work(kernel, arguments, 2, lambda: plain(4 * state), moved, 8 * o.T * o.H * o.D * o.D, "f32_flops")


def norm_qkv_rope_store(o: argparse.Namespace) -> Work:
    sizes = (("E", o.E), ("H", o.H), ("K", o.K), ("D", o.D), ("S", o.S), ("R", o.D), ("MAIN", o.H + 2 * o.K), ("SECOND", 0))
    defines = (
        *sizes,
        ("WEIGHT", o.weight),
        ("CACHE_TYPE", o.cache),
        ("NORM", 0),
        ("BIAS", 0),
        ("QK_NORM", 0),
        ("EPS", 1e-5),
        ("QK_EPS", 1e-5),
    )
    rows = (o.H + 2 * o.K) * o.D
    size, pool = panel_bytes(o.weight, rows, o.E), plain((-(-o.T // o.S) + 1) * _block_bytes(o))
    arguments = [empty(o.T, o.H, o.D), pool, pool, scratch(o.T, o.E), floats(o.T, o.E), floats(o.E), ints(), floats(o.T, o.D)]
    arguments += [ints(*range(o.T)), ints(o.T)]
    kernel = Kernel("norm_qkv_rope_store", "cpu", o.target, defines, 4, 6)
    return Work(kernel, arguments, 6, lambda: plain(size), size, 2 * o.T * o.E * rows, _unit(o))


def norm_head(o: argparse.Namespace) -> Work:
    defines = (("E", o.E), ("V", o.V), ("N", o.T), ("WEIGHT", o.weight), ("NORM", 0), ("EPS", 1e-5))
    size = panel_bytes(o.weight, o.V, o.E)
    arguments = [empty(o.T, o.V), ints(*[0] * o.T), scratch(o.T, o.E), floats(o.T, o.E), floats(o.E), ints(), ints(*range(o.T)), ints(o.T)]
    kernel = Kernel("norm_head", "cpu", o.target, defines, 3, 5)
    return Work(kernel, arguments, 5, lambda: plain(size), size, 2 * o.T * o.V * o.E, _unit(o))


def attention_decode(o: argparse.Namespace) -> Work:
    """T sequences of `context` tokens each, one new token a sequence."""
    M = -(-o.context // o.S)
    partial = empty(o.T * o.H * -(-M * o.S // 256) * (o.D + 2))
    tables = np.random.default_rng(0).permutation(o.T * M).tolist()
    arguments = [empty(o.T, o.H, o.D), partial, floats(o.T, o.H, o.D), ints(), ints(*tables), ints(*[o.context] * o.T), ints(o.T)]
    kernel = Kernel("attention_decode", "cpu", o.target, _attention(o, o.T, M), 2, 5)
    size = o.T * M * _block_bytes(o)
    return Work(kernel, arguments, 3, lambda: blocks(o, o.T * M), size, 4 * o.T * o.context * o.H * o.D, "f32_flops")


def attention_prefill(o: argparse.Namespace) -> Work:
    """One sequence of T new rows after `context` tokens; operations that the causal mask leaves out do not count."""
    M = -(-(o.context + o.T) // o.S)
    group = o.H // o.K
    lane = 256 * o.D + max(1, 128 // group) * group * (3 * o.D + 32)
    tables = np.random.default_rng(0).permutation(M).tolist()
    arguments = [empty(o.T, o.H, o.D), empty(64 * lane), floats(o.T, o.H, o.D), ints(), ints(*tables), ints(o.context + o.T)]
    arguments += [ints(0, o.T), ints(0, 1)]
    kernel = Kernel("attention_prefill", "cpu", o.target, _attention(o, 1, M), 2, 6)
    seen = o.T * o.context + o.T * (o.T + 1) // 2
    size = M * _block_bytes(o)
    return Work(kernel, arguments, 3, lambda: blocks(o, M), size, 4 * seen * o.H * o.D, "f32_flops")


def _attention(o: argparse.Namespace, B: int, M: int) -> tuple[tuple[str, int | float | str], ...]:
    sizes = (("H", o.H), ("K", o.K), ("D", o.D), ("S", o.S), ("B", B), ("M", M), ("WINDOW", 0))
    return (*sizes, ("CACHE_TYPE", o.cache), ("SCALE", f"{o.D**-0.5}f"))


def embed(o: argparse.Namespace) -> Work:
    size = panel_bytes(o.weight, o.V, o.E)
    tokens = np.random.default_rng(0).integers(0, o.V, o.T).tolist()
    defines = (("E", o.E), ("V", o.V), ("WEIGHT", o.weight), ("PANELS", 1))
    arguments = [empty(o.T, o.E), ints(), ints(*tokens), ints(o.T)]
    touched = o.T * 16 * size // o.V  # a row is part of a panel of sixteen: every cache line of the panel has a word of it
    return Work(Kernel("embed", "cpu", o.target, defines, 1, 3), arguments, 1, lambda: plain(size), touched, 0, "f32_flops")


def pack(o: argparse.Namespace) -> Work:
    """From rows [O, I] of a file's layout to panels, in pages that are there already."""
    size = panel_bytes(o.weight, o.O, o.I)  # rows take as much, if O is a multiple of 16
    arguments = [plain(size), ints(), ints(0, -(-o.O // 16), o.O, o.I)]
    defines = (("SOURCE", o.weight), ("FORMAT", o.weight))
    return Work(Kernel("pack", "cpu", o.target, defines, 1, 2), arguments, 1, lambda: plain(size), size, 0, "f32_flops")


def kv_copy(o: argparse.Namespace) -> Work:
    """T blocks of one layer's cache copied to T others."""
    block = _block_bytes(o)
    pairs = [n for t in range(o.T) for n in (t, o.T + t)]
    arguments = [ints(), ints(*pairs), ints(o.T)]
    kernel = Kernel("kv_copy", "cpu", o.target, (("BLOCK_BYTES", block),), 1, 2)
    return Work(kernel, arguments, 0, lambda: plain(2 * o.T * block), o.T * block, 0, "f32_flops")


def kv_append(o: argparse.Namespace) -> Work:
    """Keys and values of T new tokens to T blocks of one layer's cache, which is the second argument as well, where it is not used."""
    count = max(o.T, 64)
    size = count * _block_bytes(o)
    slots = (np.random.default_rng(0).permutation(count)[: o.T] * o.S).tolist()
    arguments = [ints(), ints(), floats(o.T, o.K, o.D), floats(o.T, o.K, o.D), ints(*slots), ints(o.T)]
    kernel = Kernel("kv_append", "cpu", o.target, (("K", o.K), ("S", o.S), ("D", o.D), ("CACHE_TYPE", o.cache)), 2, 4)
    moved = o.T * (8 * o.K * o.D + _block_bytes(o) // o.S)
    return Work(kernel, arguments, 0, lambda: plain(size), moved, 0, "f32_flops")


STEMS = {f.__name__: f for f in (matmul, norm_gate_up_silu, norm_route, experts_gate_up_silu, experts_down, lora_bias, gated_delta,
                                 norm_qkv_rope_store, norm_head,
                                 attention_decode, attention_prefill, embed, pack, kv_copy, kv_append)}  # fmt: skip


def _unit(o: argparse.Namespace) -> str:
    units = {Activations.BFLOAT16: "bf16_flops", Activations.INT8: "int8_ops", Activations.FLOAT32: "f32_flops"}
    return units[activations_of(o.weight, Layout.PANELS)]


# --- running


class Team(ctypes.Structure):
    _fields_ = [("thread", ctypes.c_int), ("threads", ctypes.c_int), ("pool", ctypes.c_void_p)]


def compiled(kernel: Kernel) -> ctypes.CDLL:
    """The kernel with `repeat` after it: `times` calls, the argument lists of `sets` one after the other."""
    count = kernel.outs + kernel.ins
    actual = ", ".join(f"a[{i}]" for i in range(count))
    text = (
        kernel_text(kernel)
        + f"""
void repeat(const long *lists, int sets, int times, const struct thread_team *team) {{
  barrier(team);
  for (int i = 0; i < times; i++) {{
    const long *a = lists + i % sets * {count};
    entry({actual}, team);
    barrier(team);
  }}
}}
"""
    )
    folder = Path(tempfile.gettempdir()) / f"tinyvllm-benchmarks-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    command = [provide_compiler(folder), *_FLAGS, *target_flags(kernel.target)]
    path = folder / f"{kernel.name}-{hashlib.sha256((text + repr(command)).encode()).hexdigest()[:24]}.so"
    if not path.is_file():
        fresh = path.with_suffix(f".{os.getpid()}.so")
        subprocess.run([*command, "-", "-o", str(fresh)], input=text.encode(), check=True)
        fresh.replace(path)
    return ctypes.CDLL(str(path))


class Runner:
    """Calls a kernel many times on threads that stay in C meanwhile."""

    def __init__(self, work: Work, num_threads: int):
        self.work, self.num_threads = work, num_threads
        first = work.big()
        self.sets = [first, *(work.big() for _ in range(-(-DISTINCT // first.nbytes) - 1))]
        arguments = [a.ctypes.data for a in work.arguments]
        lists = [[s.ctypes.data if i == work.place else a for i, a in enumerate(arguments)] for s in self.sets]
        self.lists = np.array(lists, np.int64)
        self.repeat = compiled(work.kernel).repeat
        self.repeat.restype = None

    def run(self, times: int) -> None:
        pool = allocate(TEAM_BYTES)
        lists = ctypes.c_void_p(self.lists.ctypes.data)

        def run_thread(number: int) -> None:
            self.repeat(lists, len(self.sets), times, ctypes.byref(Team(number, self.num_threads, pool.ctypes.data)))

        threads = [threading.Thread(target=run_thread, args=(number,)) for number in range(1, self.num_threads)]
        for thread in threads:
            thread.start()
        run_thread(0)
        for thread in threads:
            thread.join()


def measure(stem: str, options: argparse.Namespace) -> list[object]:
    """Time it, record it; a row of the table."""
    work = STEMS[stem](options)
    runner = Runner(work, options.threads)
    runner.run(len(runner.sets))
    once = take_turns({"": lambda: runner.run(len(runner.sets))}, 1, patience=1)[""][0].seconds / len(runner.sets)
    times = max(len(runner.sets), round(ROUND_SECONDS / once))
    turns = take_turns({"kernel": lambda: runner.run(times), "read": lambda: read_once(options.threads)}, options.rounds)
    timed, reading = spread(turns["kernel"]).divided(times), spread(turns["read"])
    bandwidth, most = read_size(options.threads) / reading.median, operations(work.unit, options.threads)
    of_bytes = work.bytes / timed.median / bandwidth
    of_flops = work.flops / timed.median / most if most else None
    record("kernels", {
        "kernel": work.kernel.name, "defines": dict(work.kernel.defines), "rows": options.T, "context": options.context,
        "threads": options.threads, "us": round(1e6 * timed.median, 2), "GBps": round(work.bytes / timed.median / 1e9, 2),
        "of_read": round(of_bytes, 3), "Gops": round(work.flops / timed.median / 1e9, 1), "of_ops": of_flops and round(of_flops, 3),
        "read_GBps": round(bandwidth / 1e9, 1), "roof_Gops": most and round(most / 1e9), "quiet": timed.quiet, "rounds": timed.rounds,
    }, [timed])  # fmt: skip
    shares = [f"{of_bytes:.0%}", None if of_flops is None else f"{of_flops:.0%}"]
    rates = [work.bytes / timed.median / 1e9, shares[0], work.flops / timed.median / 1e9, shares[1]]
    return [stem, 1e6 * timed.median, 1e6 * timed.low, 1e6 * timed.high, *rates, f"{timed.quiet}/{timed.rounds}"]


def main() -> None:
    best = usable_variants(Placement("CPU"))[0]
    parser = argparse.ArgumentParser(description="one CPU kernel, timed")
    parser.add_argument("stem", choices=[*STEMS, "all"], nargs="?")
    letters = {"I": 2048, "O": 5632, "T": 1, "E": 2048, "F": 5632, "H": 32, "K": 4, "D": 64, "S": 16, "V": 32000, "X": 8, "C": 2}
    for letter, value in letters.items():
        parser.add_argument(f"--{letter}", type=int, default=value)
    parser.add_argument("--context", type=int, default=0, help="tokens of attention's sequences (prefill: before its rows)")
    parser.add_argument("--weight", default="BF16", choices=formats_in(Layout.PANELS))
    parser.add_argument("--cache", default="BF16", choices=(*_NUMBER, *PACKED_KV.values()))
    parser.add_argument("--target", default=best)
    parser.add_argument("--threads", type=int, default=threads_of_machine())
    parser.add_argument("--rounds", type=int, default=9)
    plan.add_arguments(parser)
    options = parser.parse_args()
    if options.plan:
        return plan.show(options)
    if options.stem is None:
        parser.error("the kernel's stem is missing")
    rows = []
    for stem in STEMS if options.stem == "all" else [options.stem]:
        given = argparse.Namespace(**vars(options))
        given.context = options.context or (2048 if stem == "attention_decode" else 0)
        rows.append(measure(stem, given))
    header = ["kernel", "us", "low", "high", "GB/s", "of reading", "10^9 op/s", "of the roof", "quiet rounds"]
    print(f"{options.target}, {options.threads} threads, {options.weight}, T={options.T}")
    print(table(header, rows))


if __name__ == "__main__":
    main()
