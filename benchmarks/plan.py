"""A step on Metal by arithmetic, where no Mac is at hand: what each kernel moves and computes, and what chips could make of it.

    python -m benchmarks.kernels --plan METAL --shape llama-3.2-1b --weights q4_0 --T 1 --context 4096

T sequences of `context` tokens decode one token each (T up to 16), or one sequence of T tokens is prefilled after `context`. Kernels,
grids, bytes and operations are those of the records that launches are made of; threadgroup memory is what a compiler lays out. Everything
about time is a model, none of it has been measured on a Mac:

    time of a launch = gap + max(bytes / (bandwidth * stream * fed), operations / rate, bytes of x / near) + latency * trips

  gap         from the end of a launch to the start of the next, across the barrier of a captured graph: assumed, --gap
  stream      what a kernel that does nothing else can read of the named bandwidth: assumed, --stream. Public figures are 0.83 for an M4
              (100 of 120 GB/s, Huebner et al., "Apple vs. Oranges", arXiv:2502.05317) and 0.79 for a product on an M1 Max (315 of 400 GB/s,
              llama.cpp pull request 1642)
  fed         bytes in flight / (bandwidth * latency), at most 1: threads that are resident times what each has asked for. Latency and
              registers a thread are assumed
  trips       to memory, one after the other, when all else is done: of attention_decode where it puts partitions together
  operations  multiply-adds, what taking weights apart costs, and what it costs each threadgroup to lay out x, counted in the source
  matrices    a product of two matrices of eight by eight costs a SIMD group 18 cycles, of which 16 are its multiply-adds (17 for half
              precision, 18 for float32: github.com/philipturner/metal-benchmarks, M1): no more than float32 goes through there
  near        what a core reads of its cache or of threadgroup memory: 64 bytes a cycle. The same source has that of the cache; of
              threadgroup memory it is assumed
  rate        a lane does one a cycle. Apple publishes operations a second for M1 and M2; later ones are taken for M2's, which is too little

The share is bytes / (time * bandwidth) over a whole step. From that follows what a chip must be able to stream for a goal to be met.
For several sequences the last columns are how many times the tokens of one they get, by the same model; with each product's work cut as a
trial would cut it, if the model were right. From thirteen on there are two rows to choose between, and what no kernel could exceed that
multiplies in float32: nothing but the multiply-adds. A last round of threadgroups that does not fill all cores costs nothing here, nor
does the unpacking of scales.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from benchmarks.harness import table
from benchmarks.shapes import DENSE, SHAPES
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal import plan as records
from tinyvllm.backends.shapes import Attention, Heads, Product
from tinyvllm.integers import ceil_div
from tinyvllm.quant.formats import FORMATS, Layout, formats_in
from tinyvllm.quant.layouts import row_bytes

WEIGHTS = tuple(name for name in formats_in(Layout.ROWS) if FORMATS[name].type_id is not None)  # of GGUF files
GOALS = {"BF16": 0.88, "F16": 0.88, "Q8_0": 0.82, "Q4_0": 0.75, "Q4_K": 0.75}  # of bandwidth, for a row of models of 4 to 8 B on Max chips
SMALL_GOALS = {("qwen3-0.6b", "Q8_0"): 0.65}
ROW, S, EPS = "apple7", 16, "1e-05f"


# --- chips


@dataclass(frozen=True)
class Chip:
    """A GPU: cores, GB/s of its memory, and 10^9 float32 operations a second of a core."""

    name: str
    cores: int
    bandwidth: float
    rate: float


# Cores and bandwidth: Apple's newsroom on the day of each chip (M1 Nov 2020, M1 Pro and Max Oct 2021, M1 Ultra Mar 2022, M2 Jun 2022,
# M2 Pro and Max Jan 2023, M2 Ultra Jun 2023, M3 to M3 Max Oct 2023, M3 Ultra Mar 2025, M4 May 2024, M4 Pro and Max Oct 2024, M5 Oct 2025,
# M5 Pro and Max Mar 2026) and the Macs' technical specifications; M1's 68 is that of its memory, LPDDR4X-4266 on 128 bits. Of each the
# largest GPU, of Max chips also smaller ones with a bandwidth of their own. Operations: Apple's 2.6 * 10^12 for the M1's 8 cores, 3.6 for
# the M2's 10.
_M1, _M2 = 2600 / 8, 3600 / 10
CHIPS = (
    Chip("M1", 8, 68, _M1), Chip("M1 Pro", 16, 200, _M1), Chip("M1 Max", 32, 400, _M1), Chip("M1 Ultra", 64, 800, _M1),
    Chip("M2", 10, 100, _M2), Chip("M2 Pro", 19, 200, _M2), Chip("M2 Max", 38, 400, _M2), Chip("M2 Ultra", 76, 800, _M2),
    Chip("M3", 10, 100, _M2), Chip("M3 Pro", 18, 150, _M2), Chip("M3 Max 30", 30, 300, _M2), Chip("M3 Max", 40, 400, _M2),
    Chip("M3 Ultra", 80, 819, _M2), Chip("M4", 10, 120, _M2), Chip("M4 Pro", 20, 273, _M2), Chip("M4 Max 32", 32, 410, _M2),
    Chip("M4 Max", 40, 546, _M2), Chip("M5", 10, 153, _M2), Chip("M5 Pro", 20, 307, _M2), Chip("M5 Max", 40, 614, _M2),
)  # fmt: skip

# Of a core: public measurements of M1 and M2 (github.com/philipturner/metal-benchmarks; for registers also github.com/dougallj/applegpu).
# Later cores share out their memory differently and are taken for the same.
REGISTER_BYTES, THREADGROUP_BYTES, MOST_THREADS = 384 << 10, 64 << 10, 3072
REGISTERS = 64  # 32-bit ones of a thread: assumed, as only Apple's compiler knows
LATENCY = 500e-9  # seconds until memory answers under load: assumed
# Counted in kernels/metal/include/product.h: bytes that a lane asks for of a row of weights, and instructions that take a weight apart.
_RAW = {
    "F32": 32, "F16": 16, "BF16": 16, "Q8_0": 10, "Q4_0": 10, "Q5_0": 14, "Q4_1": 12, "Q5_1": 16, "Q2_K": 20, "Q3_K": 30, "Q4_K": 24,
    "Q5_K": 32, "Q6_K": 20, "IQ4_NL": 10, "IQ4_XS": 16, "MXFP4": 9,
}  # fmt: skip
_UNPACKING = {
    "F32": 0.0, "F16": 0.0, "BF16": 1.0, "Q8_0": 2.5, "Q4_0": 2.1, "Q5_0": 4.6, "Q4_1": 3.1, "Q5_1": 5.6, "Q2_K": 4.2, "Q3_K": 4.5,
    "Q4_K": 3.1, "Q5_K": 4.5, "Q6_K": 3.5, "IQ4_NL": 8.1, "IQ4_XS": 8.1, "MXFP4": 4.5,
}  # fmt: skip
# In kernels/metal/include/operands.h: bytes of a lane's part of a slice; instructions a weight, scales brought in; and a number of x.
# Formats whose operands are float32 ask for what a row's share takes, and take it apart in the same way.
_SLICE = _RAW | {"Q4_0": 6}
_OPERANDS = _UNPACKING | {"Q8_0": 2.0, "Q4_0": 1.6, "Q4_K": 2.1}
_LAYING = dict.fromkeys(WEIGHTS, 1.3) | {"Q8_0": 2.3, "Q4_0": 3.3, "Q4_K": 2.3}
MATRIX_CYCLES = 18 / 16  # of a multiply-add of simdgroup_matrix
NEAR_BYTES = 64  # a cycle of a core


# --- a step


@dataclass(frozen=True)
class Launch:
    """A kernel of a step, `times` times in it. `layer`: whether each layer has it. `weights`: how many weights it multiplies with.

    `bare`: of a product only the multiply-adds cost anything.
    """

    kernel: Kernel
    times: int = 1
    layer: bool = False
    weights: int = 0
    bare: bool = False

    @property
    def groups(self) -> int:
        x, y, z = self.kernel.grid
        return x * y * z

    @property
    def constants(self) -> dict[str, int | float | str]:
        return dict(self.kernel.defines)

    @property
    def weight_bytes(self) -> int:
        return row_bytes(str(self.constants["WEIGHT"]), self.weights) if self.weights else 0

    @property
    def streams(self) -> int:
        """How many threadgroups read each row of weights: each asks memory for it once."""
        return self.kernel.grid[0] if self.kernel.stem == "matmul" else int(self.weights > 0)

    @property
    def operations(self) -> float:
        """Multiply-adds; taking weights apart, in each team of SIMD groups and for each tile of tokens once more; laying out x."""
        if not self.weights or self.bare:
            return self.kernel.flops / 2
        format, norm = str(self.constants["WEIGHT"]), 2 * int(self.constants.get("NORM", self.kernel.stem.startswith("norm_")))
        columns = self.groups * int(self.constants.get("E", self.constants.get("I", 0)))
        if self.kernel.stem == "matmul16":
            return self.weights * (records.FEW * MATRIX_CYCLES + _OPERANDS[format]) + columns * records.FEW * (norm + _LAYING[format])
        again = int(self.constants.get("TEAMS", 1)) * max(1, self.streams)
        laying = columns * int(self.constants["TOKENS"]) * (norm + 0.5) if self.constants.get("STAGED") else 0
        multiplying = self.kernel.flops / 2 * (MATRIX_CYCLES if self.kernel.stem == "matmul" else 1)
        return multiplying + _UNPACKING[format] * self.weights * again + laying

    @property
    def near_bytes(self) -> float:
        """Of x, that a product of few rows reads in its cores, however many cores they are."""
        if self.bare or not self.weights or self.kernel.stem == "matmul":
            return 0.0
        fragments = int(self.constants.get("FRAGMENTS", 0))
        tokens, rows = (records.FEW, 8 * fragments) if fragments else (int(self.constants["TOKENS"]), int(self.constants["ROWS"]))
        return 4.0 * self.weights * tokens / rows

    @property
    def registers(self) -> int:
        """32-bit ones of a thread: more where a lane keeps 64 sums."""
        sums = int(self.constants.get("ROWS", 0)) * ceil_div(int(self.constants.get("TOKENS", 0)), int(self.constants.get("TEAMS", 1)))
        return REGISTERS * (2 if sums > 32 else 1)

    @property
    def trips(self) -> int:
        """To memory, in sequence, by attention_decode's last threadgroup: the count, the partitions' ends, their values, zeros."""
        return 4 if self.kernel.stem == "attention_decode" and self.kernel.grid[2] > 1 else 0

    @property
    def asked(self) -> int:
        """Bytes that a thread has asked memory for while it waits."""
        known = {"sample": 32, "read": 64, "attention_decode": 32, "kv_copy": 64}
        rows, fragments = int(self.constants.get("ROWS", 0)), int(self.constants.get("FRAGMENTS", 0))
        if not rows and not fragments:
            return known.get(self.kernel.stem, 16)
        format = str(self.constants["WEIGHT"])
        return fragments * _SLICE[format] if fragments else rows * _RAW[format]


@dataclass(frozen=True)
class Model:
    """A named shape in the letters of docs/shapes.md."""

    E: int
    F: int
    L: int
    H: int
    K: int
    D: int
    V: int
    bias: bool
    qk_norm: bool

    @classmethod
    def named(cls, shape: str) -> Model:
        c = SHAPES[shape]
        qk_norm = c["model_type"] == "qwen3"
        return cls(
            c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"], c["num_attention_heads"], c["num_key_value_heads"],
            c["head_dim"], c["vocab_size"], bool(c.get("attention_bias")), qk_norm,
        )  # fmt: skip

    def heads(self, cache: str) -> Heads:
        return Heads(self.H, self.K, self.D, S, self.D, cache, self.bias, self.qk_norm, EPS)

    def attention(self, cache: str, context: int) -> Attention:
        return Attention(self.H, self.K, self.D, S, ceil_div(context, S), cache, f"{self.D**-0.5}f", 0)


def _cut(cuts: list[records.Cut], format: str, T: int) -> records.Cut:
    """What a trial would take by this model: the least cycles of a core for a weight."""

    def cycles(cut: records.Cut) -> float:
        laying = 2.5 * T / cut.rows_of_group if cut.staged else 2.0 * T / cut.rows
        return max((T + cut.teams * _UNPACKING[format] + laying) / 128, 4 * T / cut.rows / NEAR_BYTES)

    return cuts[0] if T == 1 else min(cuts, key=cycles)


def _few(m: Model, format: str, T: int, heads: Heads) -> list[tuple[Kernel, int]]:
    """Products of a layer, and weights of each: q, k and v, attention's output, gate and up, down."""
    cut = _cut(records.cuts(T), format, T)
    of_heads = _cut(records.cuts_for_heads(T, m.E, heads), format, T)
    return [
        (records.norm_qkv_rope_store(ROW, format, T, m.E, heads, EPS, of_heads), heads.outputs * m.E),
        (records.matvec(ROW, Product(format, T, m.E, m.H * m.D, residual=True), cut=cut), m.E * m.H * m.D),
        (records.norm_gate_up_silu(ROW, format, T, m.E, m.F, EPS, cut=cut), 2 * m.F * m.E),
        (records.matvec(ROW, Product(format, T, m.E, m.F, residual=True), cut=cut), m.E * m.F),
    ]


def _sixteen(m: Model, format: str, T: int, heads: Heads) -> list[tuple[Kernel, int]]:
    """As _few, by matrices; rope_store follows the first."""
    row, borders = records.MATRIX, (m.H * m.D, (m.H + m.K) * m.D)
    return [
        (records.matmul16(row, Product(format, T, heads.outputs, m.E, eps=EPS, borders=borders)), heads.outputs * m.E),
        (records.matmul16(row, Product(format, T, m.E, m.H * m.D, residual=True)), m.E * m.H * m.D),
        (records.matmul16(row, Product(format, T, m.F, m.E, silu=True, eps=EPS)), 2 * m.F * m.E),
        (records.matmul16(row, Product(format, T, m.E, m.F, residual=True)), m.E * m.F),
    ]


def decode(m: Model, format: str, T: int, context: int, cache: str, row: str = ROW) -> list[Launch]:
    """T sequences, a token each, greedy; products of `row`."""
    heads, attention, by_matrix = m.heads(cache), m.attention(cache, context), records.by_matrix(row, T)
    first, *others = (_sixteen if by_matrix else _few)(m, format, T, heads)
    storing = [(records.rope_store(ROW, T, heads), 0)] if by_matrix else []
    layer = [first, *storing, (records.attention_decode(ROW, T, attention, context, cascade=True)[0][0], 0), *others]
    if by_matrix:
        logits = records.matmul16(row, Product(format, T, m.V, m.E, eps=EPS, gather=True))
    else:
        logits = records.norm_head(ROW, format, T, m.V, m.E, EPS, _cut(records.cuts(T), format, T))
    return [
        Launch(records.embed(ROW, format, T, m.V, m.E)),
        *(Launch(kernel, m.L, True, weights) for kernel, weights in layer),
        Launch(logits, weights=m.V * m.E),
        *map(Launch, records.argmax(ROW, T, m.V)[:2]),
        Launch(records.advance(ROW, T, ceil_div(context, S), S, 64)),
    ]


def prefill(m: Model, format: str, T: int, context: int, cache: str) -> list[Launch]:
    """T tokens of one sequence after `context`; the last one's logits."""
    heads, attention = m.heads(cache), m.attention(cache, context + T)
    borders = m.H * m.D, (m.H + m.K) * m.D
    layer = [
        (records.matmul(ROW, Product(format, T, heads.outputs, m.E, eps=EPS, borders=borders)), heads.outputs * m.E),
        (records.rope_store(ROW, T, heads), 0),
        (records.attention_prefill(ROW, T, 1, attention, context + T // 2), 0),
        (records.matmul(ROW, Product(format, T, m.E, m.H * m.D, residual=True)), m.E * m.H * m.D),
        (records.matmul(ROW, Product(format, T, m.F, m.E, silu=True, eps=EPS)), 2 * m.F * m.E),
        (records.matmul(ROW, Product(format, T, m.E, m.F, residual=True)), m.E * m.F),
    ]
    head = [Launch(records.norm_head(ROW, format, 1, m.V, m.E, EPS), weights=m.V * m.E), *map(Launch, records.argmax(ROW, 1, m.V)[:2])]
    return [Launch(records.embed(ROW, format, T, m.V, m.E)), *(Launch(k, m.L, True, weights) for k, weights in layer), *head]


def step(m: Model, format: str, T: int, context: int, cache: str, row: str = ROW) -> list[Launch]:
    return decode(m, format, T, context, cache, row) if T <= records.FEW else prefill(m, format, T, context, cache)


def threadgroup_bytes(kernel: Kernel) -> int:
    """What the kernel's text declares, as the emulator's compiler lays it out."""
    from tests.emulator.emulate import build
    from tinyvllm.backends.source import kernel_text

    return int(build(kernel_text(kernel), "metal").static_shared)


# --- the model of a chip


def resident(launch: Launch, memory: int, chip: Chip) -> int:
    """Threads of a core at a time: as registers, threadgroup memory and the grid allow, in whole threadgroups."""
    block = launch.kernel.block
    most = min(MOST_THREADS, REGISTER_BYTES // (4 * launch.registers)) // block
    most = min(most, THREADGROUP_BYTES // memory) if memory else most
    return block * max(1, min(most, ceil_div(launch.groups, chip.cores)))


@dataclass(frozen=True)
class Time:
    """Seconds that a launch takes by the model, and what bounds it."""

    seconds: float
    bound: str


def time_of(launch: Launch, memory: int, chip: Chip, gap: float, stream: float) -> Time:
    threads = min(chip.cores * resident(launch, memory, chip), launch.groups * launch.kernel.block)
    bandwidth = 1e9 * chip.bandwidth * stream
    fed = min(1.0, threads * launch.asked / (bandwidth * LATENCY))
    reading = launch.kernel.bytes / (bandwidth * fed)
    cores, cycles = min(chip.cores, launch.groups), 1e9 * chip.rate / 256  # a core multiplies and adds 128 times a cycle
    computing, near = launch.operations / (128 * cycles * cores), launch.near_bytes / (NEAR_BYTES * cycles * cores)
    longest = max(reading, computing, near)
    bound = "reads of x" if near == longest else "operations" if computing == longest else "memory" if fed == 1 else "latency"
    return Time(gap + longest + LATENCY * launch.trips, "gap" if longest < gap else bound)


@dataclass(frozen=True)
class Step:
    """Launches, and bytes of threadgroup memory of each."""

    launches: list[Launch]
    memory: list[int]

    @classmethod
    def of(cls, launches: list[Launch]) -> Step:
        return cls(launches, [threadgroup_bytes(launch.kernel) for launch in launches])

    def bare(self) -> Step:
        """The same, if its products cost nothing but their multiply-adds."""
        return Step([replace(launch, bare=True) for launch in self.launches], self.memory)

    @property
    def bytes(self) -> int:
        return sum(launch.kernel.bytes * launch.times for launch in self.launches)

    def time(self, chip: Chip, gap: float, stream: float) -> Time:
        """Seconds of all launches, and what most of them are bound by."""
        bounds: dict[str, float] = {}
        for launch, memory in zip(self.launches, self.memory, strict=True):
            time = time_of(launch, memory, chip, gap, stream)
            bounds[time.bound] = bounds.get(time.bound, 0.0) + time.seconds * launch.times
        return Time(sum(bounds.values()), max(bounds, key=lambda bound: bounds[bound]))

    def share(self, chip: Chip, gap: float, stream: float) -> float:
        return self.bytes / self.time(chip, gap, stream).seconds / (1e9 * chip.bandwidth)

    def needs(self, chip: Chip, gap: float, goal: float) -> float | None:
        """The least `stream` with which the share reaches the goal; None if not even 1 does."""
        return next((s / 100 for s in range(1, 101) if self.share(chip, gap, s / 100) >= goal), None)


# --- what is shown


def kernels_table(plan: Step) -> str:
    rows: list[list[object]] = [
        [
            one.kernel.stem, one.times, one.groups, one.kernel.block, memory, one.kernel.bytes / 1e6, one.weight_bytes / 1e6 or None,
            one.streams or None, one.kernel.flops / 1e6,
        ]
        for one, memory in zip(plan.launches, plan.memory, strict=True)
    ]  # fmt: skip
    return table(["kernel", "launches", "threadgroups", "threads", "their memory", "MB", "of weights", "read by", "10^6 op"], rows)


def sentences(plan: Step, T: int) -> list[str]:
    """Launches of a step and of a layer; how often the weights are asked for."""
    weights = sum(one.weight_bytes * one.times for one in plan.launches)
    asked = sum(one.weight_bytes * one.times * one.streams for one in plan.launches) / weights
    again, rows = "" if asked == 1 else "s", "" if T == 1 else "s"
    return [
        f"launches: {sum(one.times for one in plan.launches)} a step, {sum(one.layer for one in plan.launches)} a layer",
        f"weights: {weights / 1e6:.1f} MB, each asked of memory {asked:.3g} time{again} for {T} row{rows}",
    ]


def chips_table(plan: Step, gap: float, stream: float, goal: float | None, one: Step | None, T: int, other: Step | None = None) -> str:
    """`one`: the same step for one sequence, for the gain of T. `other`: the same step with the other row's products."""
    pairs = zip(plan.launches, plan.memory, strict=True)
    big = [(launch, memory) for launch, memory in pairs if launch.kernel.bytes * launch.times > 0.005 * plan.bytes]
    rows: list[list[object]] = []
    for chip in CHIPS:
        time = plan.time(chip, gap, stream)
        row: list[object] = [chip.name, chip.cores, f"{chip.bandwidth:.0f}", *(resident(*pair, chip) // 32 for pair in big)]
        row += [f"{plan.share(chip, gap, stream):.0%}", time.bound]
        if goal is not None:
            needed = plan.needs(chip, gap, goal)
            row.append("not even 100%" if needed is None else f"{needed:.0%}")
        if one is not None:
            ways = (plan, other, plan.bare()) if other is not None else (plan,)
            row += [f"{T * one.time(chip, gap, stream).seconds / way.time(chip, gap, stream).seconds:.1f}" for way in ways]
        rows.append(row)
    last = [f"{goal:.0%} if it streams"] if goal is not None else [f"tokens of {T} to 1"] if one is not None else []
    last += [records.MATRIX, "at most"] if other is not None else []
    return table(["chip", "cores", "GB/s", *(launch.kernel.stem for launch, _ in big), "share", "bound by", *last], rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """To a parser that has --T, --context and --cache."""
    parser.add_argument("--plan", choices=("METAL",), help="no timing: what a step on this device moves and computes")
    parser.add_argument("--shape", choices=DENSE, default="llama-3.2-1b", help="of the plan")
    parser.add_argument("--weights", type=str.upper, choices=WEIGHTS, default="Q4_0", help="of the plan")
    parser.add_argument("--gap", type=float, default=3.0, help="of the plan: microseconds between launches, assumed")
    parser.add_argument("--stream", type=float, default=0.9, help="of the plan: share of bandwidth that plain reading gets, assumed")


def show(o: argparse.Namespace) -> None:
    """Print the plan. o: shape, weights, T, context, cache, gap (microseconds), stream."""
    model, context, gap = Model.named(o.shape), o.context or 4096, 1e-6 * o.gap
    plan = Step.of(step(model, o.weights, o.T, context, o.cache))
    one = Step.of(step(model, o.weights, 1, context, o.cache)) if 1 < o.T <= records.FEW else None
    by_matrix = records.by_matrix(records.MATRIX, o.T)
    other = Step.of(step(model, o.weights, o.T, context, o.cache, records.MATRIX)) if by_matrix else None
    print(f"{o.shape}, {o.weights}, {o.T} rows, {context} tokens of context, cache {o.cache}: by arithmetic, not measured on a Mac\n")
    print(kernels_table(plan))
    print("\n" + "\n".join(sentences(plan, o.T)) + "\n")
    if other is not None:
        print(f"With the variant {records.MATRIX}, used on request\n\n{kernels_table(other)}\n\n{sentences(other, o.T)[0]}\n")
    assumed = f"gap {o.gap} us, stream {o.stream}, {REGISTERS} registers a thread"
    print(f"SIMD groups that a core has at a time, and share of bandwidth. Assumed: {assumed}\n")
    goal = SMALL_GOALS.get((o.shape, o.weights), GOALS.get(o.weights)) if o.T == 1 else None
    print(chips_table(plan, gap, o.stream, goal, one, o.T, other))
