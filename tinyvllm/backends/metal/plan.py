"""Launch plans of the Metal kernels: constants, grid and threads for a shape.

No tensors here. Each kernel's file states and explains its formula; a plan only decides how work is divided, on which no bit of a result
depends. None of the choices has been measured on a Mac.
"""

from __future__ import annotations

from tinyvllm.backends.kernel import Constant, Kernel
from tinyvllm.backends.policies import row_bias
from tinyvllm.backends.shapes import Attention, Heads, Product, cached_bytes
from tinyvllm.batch import NO_SLOT
from tinyvllm.integers import ceil_div
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.layouts import row_bytes

BASE = "apple7"  # the variant that all kernels have
MATRIX = "apple7_matrix"  # the variant whose products use matrices for thirteen to sixteen rows, too
MERGE = "apple7_merge"  # the variant of attention_decode whose partitions are merged by a second launch
THREADGROUP_BYTES = 32 << 10  # of memory that a threadgroup may have


def _kernel(
    stem: str, variant: str, outs: int, ins: int, grid: tuple[int, int, int], block: int, flops: int = 0, bytes: int = 0,
    **defines: Constant,
) -> Kernel:  # fmt: skip
    return Kernel(stem, "metal", variant, tuple(defines.items()), outs, ins, flops, bytes, grid, block)


# --- products


FEW = 16  # rows up to which a product reads its weights once for all of them


@dataclass(frozen=True)
class Cut:
    """How a product of up to FEW rows is divided: constants of kernels/metal/include/stream.h."""

    rows: int
    simds: int
    teams: int = 1
    staged: bool = False

    def part(self, T: int) -> int:
        """Rows of x of a SIMD group."""
        return ceil_div(T, self.teams)

    @property
    def rows_of_group(self) -> int:
        """Rows of weights that a threadgroup takes at a time."""
        return self.rows * self.simds // self.teams

    def depth(self, T: int, I: int) -> int:
        """Rounds that are staged at a time: as many as fit into half of a threadgroup's memory."""
        rounds, depth = ceil_div(I, 256), 1
        while 2 * depth * T <= 16 and depth < rounds:
            depth *= 2
        return depth

    def memory(self, T: int, I: int) -> int:
        """Bytes of threadgroup memory that the product takes."""
        return self.depth(T, I) * T * 1024 + 4 * T if self.staged else 0

    def defines(self, format: str, T: int, I: int) -> dict[str, Constant]:
        return dict(
            TOKENS=T, WEIGHT=format, ROWS=self.rows, SIMDS=self.simds, TEAMS=self.teams, STAGED=int(self.staged),
            DEPTH=self.depth(T, I),
        )  # fmt: skip


CUT_DEFINES = ("ROWS", "SIMDS", "TEAMS", "STAGED", "DEPTH", "FRAGMENTS")


def cut_for(T: int) -> Cut:
    """The cut without tuning.

    Per column, a threadgroup reads 4 * T bytes of x and the bytes of `rows_of_group` rows of weights: many rows keep the caches' traffic
    in x below that of the weights, few sums per lane leave room for many SIMD groups.
    """
    if T == 1:
        return Cut(4, 2)
    if T == 2:
        return Cut(4, 4)
    return Cut(4, 8, staged=True) if T <= 8 else Cut(4, 16, 2, True)


def cuts(T: int) -> list[Cut]:
    """Cuts worth timing, that of `cut_for` first. A SIMD group has rows * part(T) sums in registers, at most 64."""
    if T == 1:
        every = [Cut(rows, simds) for rows in (2, 4, 8) for simds in (2, 4, 8)]
    else:
        every = [
            Cut(rows, simds, teams, staged) for rows in (2, 4, 8) for simds in (4, 8, 16) for teams in (1, 2) for staged in (False, True)
        ]
    fit = [cut for cut in every if cut.rows * cut.part(T) <= 64 and (cut.teams == 1 or T > 4)]
    return [cut_for(T), *(cut for cut in fit if cut != cut_for(T))]


def matvec(variant: str, p: Product, cut: Cut | None = None) -> Kernel:
    cut, T, O, I = cut or cut_for(p.T), p.T, p.O, p.I
    return _kernel(
        "matvec", variant, 1, 3 + p.bias + p.residual, (ceil_div(O, cut.rows_of_group), 1, 1), 32 * cut.simds,
        2 * T * O * I, O * row_bytes(p.format, I) + 4 * T * (I + O * (1 + p.residual)),
        O=O, I=I, BIAS=int(p.bias), RESIDUAL=int(p.residual), ACTIVATION=int(p.gelu), **cut.defines(p.format, T, I),
        **row_bias(p.bias_pitch),
    )  # fmt: skip


def norm_gate_up_silu(
    variant: str, format: str, T: int, E: int, F: int, eps: str, bias: bool = False, cut: Cut | None = None, half: str = "BOTH",
    bias_pitch: int = 0,
) -> Kernel:  # fmt: skip
    """`half`: BOTH; or GATE and then UP, two launches with one `out`, of matrices in two formats."""
    cut, matrices = cut or cut_for(T), 2 if half == "BOTH" else 1
    return _kernel(
        "norm_gate_up_silu", variant, 1, 3 + matrices * (1 + bias), (ceil_div(matrices * F, cut.rows_of_group), 1, 1), 32 * cut.simds,
        2 * matrices * T * F * E, matrices * F * row_bytes(format, E) + 4 * T * (E + F),
        E=E, F=F, BIAS=int(bias), EPS=eps, HALF=half, **cut.defines(format, T, E), **row_bias(bias_pitch),
    )  # fmt: skip


def _cut_for_heads(T: int, E: int, heads: Heads) -> Cut:
    if not heads.whole:
        return cut_for(T)
    cut = Cut(8, max(1, min(16, heads.D // 8))) if T == 1 else Cut(4, 16, 1 if T <= 8 else 2, T > 2)
    return cut if _fits_with_heads(cut, T, E, heads) else Cut(cut.rows, cut.simds, cut.teams)


def _fits_with_heads(cut: Cut, T: int, E: int, heads: Heads) -> bool:
    return cut.memory(T, E) + (4 * T * heads.D if heads.whole else 0) <= THREADGROUP_BYTES


def cuts_for_heads(T: int, E: int, heads: Heads) -> list[Cut]:
    """As `cuts`, of norm_qkv_rope_store."""
    taken = _cut_for_heads(T, E, heads)
    return [taken, *(cut for cut in cuts(T) if cut != taken and _fits_with_heads(cut, T, E, heads))]


def _apart(heads: Heads, apart: tuple[int, ...]) -> tuple[int, dict[str, Constant]]:
    """Outputs of the heads that are computed together, and constants: `apart` are the outputs of k or v, whose products come ready."""
    main = heads.outputs - sum(apart)
    return main, dict(MAIN=main // heads.D, SECOND=apart[0] // heads.D if apart else 0)


def norm_qkv_rope_store(
    variant: str, format: str, T: int, E: int, heads: Heads, eps: str, cut: Cut | None = None, apart: tuple[int, ...] = ()
) -> Kernel:
    """`apart`: outputs of v, or of k and of v, whose weights have another format, and whose products are arguments."""
    cut = cut or _cut_for_heads(T, E, heads)
    main, parts = _apart(heads, apart)
    grid = heads.H + 2 * heads.K if heads.whole else ceil_div(main, cut.rows_of_group) + ceil_div(sum(apart) // 2, 32 * cut.simds)
    return _kernel(
        "norm_qkv_rope_store", variant, 3, 7 + heads.optional(3), (grid, 1, 1), 32 * cut.simds,
        2 * T * E * main, main * row_bytes(format, E) + 4 * T * (E + heads.outputs + sum(apart)),
        E=E, EPS=eps, **cut.defines(format, T, E), **heads.defines, **parts,
    )  # fmt: skip


def norm_head(variant: str, format: str, N: int, V: int, E: int, eps: str, cut: Cut | None = None, gather: bool = True) -> Kernel:
    """Logits of the rows of an index, of which `argmax` finds the largest; or products of all rows."""
    cut = cut or cut_for(N)
    return _kernel(
        "norm_head", variant, 1, 4 + gather, (ceil_div(V, cut.rows_of_group), 1, 1), 32 * cut.simds,
        2 * N * V * E, V * row_bytes(format, E) + 4 * N * (V + E),
        E=E, V=V, EPS=eps, GATHER=int(gather), **cut.defines(format, N, E),
    )  # fmt: skip


def argmax(variant: str, N: int, V: int) -> tuple[Kernel, Kernel, int]:
    """Both launches, and how many parts a row has: the size of `ranks` and of `indices` between them, per row."""
    parts = max(1, min(32, ceil_div(V, 4096)))
    first = _kernel("argmax", variant, 2, 2, (parts, N, 1), 256, N * V, 4 * N * V, V=V, PARTS=parts)
    return first, _kernel("argmax_merge", variant, 1, 3, (N, 1, 1), 256, N * parts, 8 * N * parts, PARTS=parts), parts


def matmul(variant: str, p: Product, tile: int | None = None) -> Kernel:
    """`tile`: tokens of a threadgroup, 32 or 64."""
    tile = tile or (32 if p.T <= 32 else 64)
    ins, flops, nbytes, defines = _by_matrices(p)
    grid = ceil_div(p.T, tile), ceil_div(p.O, 32 if p.silu else 64), 1
    return _kernel("matmul", variant, 1, ins, grid, 128, flops, nbytes, **defines, TILE_T=tile)


def _by_matrices(p: Product) -> tuple[int, int, int, dict[str, Constant]]:
    """Ins, operations and bytes, and constants of kernels/metal/include/matrices.h."""
    matrices, (first, second) = 3 if p.borders else 1 + p.silu, p.borders or (p.O, p.O)
    ins = 2 + matrices + (p.eps is not None) + p.gather + p.bias * (1 + p.silu) + p.residual
    nbytes = p.rows * row_bytes(p.format, p.I) + 4 * p.T * (p.I + p.O * (1 + p.residual + p.gated))
    return ins, 2 * p.T * p.rows * p.I, nbytes, dict(
        O=p.O, I=p.I, WEIGHT=p.format, NORM=int(p.eps is not None), EPS=p.eps or "0.0f", GATHER=int(p.gather), MATRICES=matrices, O1=first,
        O2=second, BIAS=int(p.bias), RESIDUAL=int(p.residual), ACTIVATION=int(p.gelu), SILU=int(p.silu), GATED=int(p.gated),
        **row_bias(p.bias_pitch),
    )  # fmt: skip


def by_matrix(variant: str, T: int) -> bool:
    """Whether matmul16 multiplies T rows of x; it always costs what sixteen rows cost. Decodes are padded to eight or sixteen."""
    return variant == MATRIX and 12 < T <= FEW


def by_lanes(variant: str, T: int) -> bool:
    """Whether matvec and the kernels like it multiply T rows of x."""
    return T <= FEW and not by_matrix(variant, T)


@dataclass(frozen=True)
class Fragments:
    """Matrices of eight rows of weights that a SIMD group has in matmul16."""

    count: int


FRAGMENTS = (Fragments(4), Fragments(2))  # worth timing; the default first
MATRIX_SIMDS = 8


def shares_of(rows: int) -> int:
    """SIMD groups that share the columns of the same rows of weights. Bits depend on it, so it depends on the matrices alone."""
    return 1 if rows >= 1 << 16 else 2 if rows >= 1 << 14 else 4


def matmul16(variant: str, p: Product, fragments: Fragments = FRAGMENTS[0], shares: int | None = None) -> Kernel:
    """As `matmul`, of up to FEW rows."""
    shares = shares or shares_of(p.rows)
    ins, flops, nbytes, defines = _by_matrices(p)
    outputs = 8 * fragments.count // (1 + p.silu) * MATRIX_SIMDS // shares
    return _kernel(
        "matmul16", variant, 1, ins, (ceil_div(p.O, outputs), 1, 1), 32 * MATRIX_SIMDS, flops, nbytes, **defines,
        FRAGMENTS=fragments.count, SIMDS=MATRIX_SIMDS, SHARES=shares,
    )  # fmt: skip


def rope_store(variant: str, T: int, heads: Heads, apart: tuple[int, ...] = ()) -> Kernel:
    """`apart` as for norm_qkv_rope_store."""
    grid, work = (T, ceil_div(heads.H + 2 * heads.K, 8), 1), 8 * T * heads.outputs
    ins, parts = 3 + len(apart) + heads.optional(3), _apart(heads, apart)[1]
    return _kernel("rope_store", variant, 3, ins, grid, 256, work, work, **heads.defines, **parts)


# --- attention. Here the bits depend on the cut: PARTITION and SIMDS must not change while an engine runs.


SPREAD = 64  # threadgroups that attention_decode keeps in spite of sharing: two per core of a large chip


def partition_of(a: Attention) -> int:
    """Keys of a partition: at least 512, and enough that there are at most 32 partitions."""
    keys = 512
    while ceil_div(a.M * a.S, keys) > 32:
        keys *= 2
    return keys


def _attention_work(a: Attention, rows: int, context: int) -> tuple[int, int]:
    """Operations of rows that see `context` keys each, and bytes of that many keys and values."""
    seen = min(context, a.window) if a.window else context
    return 4 * rows * a.H * a.D * seen, 2 * a.K * seen * cached_bytes(a.cache, a.D)


def attention_decode(
    variant: str, B: int, a: Attention, context: int = 0, partition: int | None = None, simds: int = 8, cascade: bool = False,
    spread: int | None = None,
) -> tuple[list[Kernel], int]:  # fmt: skip
    """The launches, one, or two with the variant MERGE; and the size of `partial`, their scratch: numbers of 32 bits.

    A single launch needs zeros in `partial` and leaves zeros, but for a fault. The first of two launches writes `partial`, the second reads
    it. With `cascade` the first also takes `shared_prefix_lens`, its last array, and reads shared blocks once for several sequences.
    `context` of each sequence is for the estimate of work alone.
    """
    keys = partition or partition_of(a)
    partitions, group = ceil_div(a.M * a.S, keys), a.H // a.K
    parts = ceil_div(group, 8 if a.D <= 128 else 4 if a.D <= 256 else 2)
    flops, moved = _attention_work(a, B, context)
    merged = B * a.H * _merged(a, context, keys) * (a.D + 2)
    launches = 2 if variant == MERGE and partitions > 1 else 1
    defines: dict[str, Constant] = dict(
        PARTITION=keys, SIMDS=simds, CASCADE=int(cascade), SPREAD=spread or SPREAD, LAUNCHES=launches, **a.defines
    )
    kernels = [_kernel(
        "attention_decode", variant, 2, 5 + a.sinks + cascade, (a.K * parts, B, partitions), 32 * simds, flops + 2 * merged,
        B * moved + 8 * B * a.H * a.D + 12 * merged, **defines,
    )]  # fmt: skip
    if launches == 2:
        kernels.append(_kernel(
            "attention_merge", variant, 2, 2 + a.sinks, (a.K * parts, B, 1), 32 * simds, 2 * merged, 4 * merged, **defines
        ))  # fmt: skip
    area = 32 + partitions * ceil_div(group, parts) * (a.D + 2)
    return kernels, B * a.K * parts * area if partitions > 1 else 1


def _merged(a: Attention, context: int, keys: int) -> int:
    """Partitions of `keys` that are merged: their results are written, read and set to zero again."""
    if context == 0:
        return 0
    first = max(0, context - a.window) // keys if a.window else 0
    partitions = ceil_div(context, keys) - first
    return partitions if partitions > 1 else 0


def attention_prefill(variant: str, T: int, chunks: int, a: Attention, context: int = 0, simds: int = 4) -> Kernel:
    """T rows of `chunks` sequences; H / K is at most 8 * simds. `context`, a row's average, is for the estimate of work alone."""
    span = simds * 8 * a.K // a.H
    flops, moved = _attention_work(a, T, context)
    grid = ceil_div(T, span) + chunks, a.K * (1 if a.D <= 256 else 2), 1
    return _kernel(
        "attention_prefill", variant, 1, 6 + a.sinks, grid, 32 * simds, flops, chunks * moved + 8 * T * a.H * a.D, SIMDS=simds, **a.defines
    )


# --- tokens


def embed(variant: str, format: str, T: int, V: int, E: int) -> Kernel:
    threads = min(256, 32 * ceil_div(E // 4, 32))
    work = T * (4 * E + row_bytes(format, E))
    return _kernel("embed", variant, 1, 3, (T, 1, 1), threads, bytes=work, V=V, E=E, WEIGHT=format, THREADS=threads)


def kv_append(variant: str, T: int, K: int, S: int, D: int, cache: str) -> Kernel:
    threads = min(256, 32 * ceil_div(K * D // 4, 32))
    work = 2 * T * K * (4 * D + cached_bytes(cache, D))
    return _kernel("kv_append", variant, 2, 4, (T, 1, 1), threads, bytes=work, K=K, S=S, D=D, CACHE_TYPE=cache, THREADS=threads)


def kv_copy(variant: str, pairs: int, block_bytes: int) -> Kernel:
    grid = ceil_div(block_bytes, 16384), pairs, 1
    return _kernel("kv_copy", variant, 1, 2, grid, 256, bytes=2 * pairs * block_bytes, BLOCK_BYTES=block_bytes)


def advance(variant: str, B: int, M: int, S: int, rounds: int) -> Kernel:
    threads = min(1024, 32 * ceil_div(B, 32))
    return _kernel(
        "advance", variant, 6, 3, (1, 1, 1), threads, bytes=36 * B, B=B, M=M, S=S, ROUNDS=rounds, NO_SLOT=NO_SLOT, THREADS=threads
    )


SAMPLE_THREADS, SAMPLE_CAPACITY, SAMPLE_GROUPS = 512, 2047, 32


def sample(variant: str, B: int, V: int, neutral_row: int, features: dict[str, bool]) -> tuple[list[Kernel], int]:
    """The launches, one to three, and bytes of scratch, of any bits.

    As many threadgroups share a row as keep the total within SAMPLE_GROUPS and a thread's part at 8 numbers or more.
    """
    searched = features["TOP_K"] or features["TOP_P"]
    filtered = searched or features["MIN_P"]
    max_parts, parts = max(1, min(32, SAMPLE_GROUPS // B, V // (8 * SAMPLE_THREADS))), 1
    while 2 * parts <= max_parts:
        parts *= 2
    stages = ["LOOK"] * filtered + ["GATHER", "DRAW"] if parts > 1 else ["WHOLE"]
    outs, ins = 3 + features["PENALIZED"], 2 + features["PENALIZED"] + features["BIASED"]
    scratch = 16 * parts + 16 + filtered * (4 * SAMPLE_THREADS + 8 * (SAMPLE_CAPACITY + 1))
    row_once = V * (4 + 5 * features["PENALIZED"] + 4 * features["BIASED"])
    kernels = []
    for stage in stages:
        threads = 32 if stage == "DRAW" and not searched else SAMPLE_THREADS
        work = scratch if stage == "DRAW" else row_once * (2 if stage == "WHOLE" and filtered else 1)
        kernels.append(_kernel(
            "sample", variant, outs, ins, (1 if stage == "DRAW" else parts, B, 1), threads, bytes=B * work,
            V=V, NEUTRAL_ROW=neutral_row, PARTS=parts, STAGE=stage, THREADS=threads, **{name: int(on) for name, on in features.items()},
        ))  # fmt: skip
    return kernels, 16 if parts == 1 else B * scratch


def matrix_probe(variant: str) -> Kernel:
    return _kernel("matrix_probe", variant, 1, 2, (1, 1, 1), 32)


def read(variant: str, words: int, groups: int = 1024) -> Kernel:
    return _kernel("read", variant, 1, 1, (groups, 1, 1), 256, bytes=16 * words, WORDS=words, GROUPS=groups)
