"""Records of the Metal kernels: constants, grid and threads for a shape.

No tensors here. Every formula is said and reasoned at the top of the kernel's file; what is chosen here is only how work is cut, which no
bit of a result depends on. None of the choices has been measured on a Mac.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.shapes import Attention, Heads, up
from tinyvllm.quant.formats import FORMATS

THREADGROUP_BYTES = 32 << 10  # of memory that a threadgroup may have


def _kernel(
    stem: str, row: str, outs: int, ins: int, grid: tuple[int, int, int], block: int, flops: int = 0, bytes: int = 0,
    **defines: int | float | str,
) -> Kernel:  # fmt: skip
    return Kernel(stem, "metal", row, tuple(defines.items()), outs, ins, flops, bytes, grid, block)


# --- products


FEW = 16  # rows up to which a product reads its weights once, past all of them


def row_bytes(format: str, columns: int) -> int:
    """Of a row of weights as in a file."""
    return columns // FORMATS[format].elements * FORMATS[format].nbytes


@dataclass(frozen=True)
class Cut:
    """Who does what in a product of up to FEW rows: constants of kernels/metal/include/stream.h."""

    rows: int
    simds: int
    teams: int = 1
    staged: bool = False

    def part(self, T: int) -> int:
        """Rows of x of a SIMD group."""
        return up(T, self.teams)

    @property
    def rows_of_group(self) -> int:
        """Rows of weights that a threadgroup takes at a time."""
        return self.rows * self.simds // self.teams

    def depth(self, T: int, I: int) -> int:
        """Rounds that are staged at a time: as many as go into half of a threadgroup's memory."""
        rounds, depth = up(I, 256), 1
        while 2 * depth * T <= 16 and depth < rounds:
            depth *= 2
        return depth

    def memory(self, T: int, I: int) -> int:
        """Bytes of threadgroup memory that the product takes."""
        return self.depth(T, I) * T * 1024 + 4 * T if self.staged else 0

    def defines(self, format: str, T: int, I: int) -> dict[str, int | float | str]:
        return dict(
            TOKENS=T, WEIGHT=format, ROWS=self.rows, SIMDS=self.simds, TEAMS=self.teams, STAGED=int(self.staged),
            DEPTH=self.depth(T, I),
        )  # fmt: skip


CUT_DEFINES = ("ROWS", "SIMDS", "TEAMS", "STAGED", "DEPTH", "FRAGMENTS")


def cut_for(T: int) -> Cut:
    """What is taken where nothing has been tuned.

    Of x's bytes a threadgroup reads 4 * T a column, of the weights' those of `rows_of_group` rows: many rows keep the caches' traffic in
    x below that of the weights, few sums a lane leave room for many SIMD groups.
    """
    if T == 1:
        return Cut(4, 2)
    if T == 2:
        return Cut(4, 4)
    return Cut(4, 8, staged=True) if T <= 8 else Cut(4, 16, 2, True)


def cuts(T: int) -> list[Cut]:
    """Variants worth timing: the one of `cut_for` first. A SIMD group has rows * part(T) sums in registers, at most 64."""
    if T == 1:
        found = [Cut(rows, simds) for rows in (2, 4, 8) for simds in (2, 4, 8)]
    else:
        found = [
            Cut(rows, simds, teams, staged) for rows in (2, 4, 8) for simds in (4, 8, 16) for teams in (1, 2) for staged in (False, True)
        ]
    fit = [cut for cut in found if cut.rows * cut.part(T) <= 64 and (cut.teams == 1 or T > 4)]
    return [cut_for(T), *(cut for cut in fit if cut != cut_for(T))]


def matvec(
    row: str, format: str, T: int, O: int, I: int, bias: bool = False, residual: bool = False, gelu: bool = False, cut: Cut | None = None
) -> Kernel:
    cut = cut or cut_for(T)
    return _kernel(
        "matvec", row, 1, 3 + bias + residual, (up(O, cut.rows_of_group), 1, 1), 32 * cut.simds,
        2 * T * O * I, O * row_bytes(format, I) + 4 * T * (I + O * (1 + residual)),
        O=O, I=I, BIAS=int(bias), RESIDUAL=int(residual), ACTIVATION=int(gelu), **cut.defines(format, T, I),
    )  # fmt: skip


def norm_gate_up_silu(row: str, format: str, T: int, E: int, F: int, eps: str, bias: bool = False, cut: Cut | None = None) -> Kernel:
    cut = cut or cut_for(T)
    return _kernel(
        "norm_gate_up_silu", row, 1, 5 + 2 * bias, (up(2 * F, cut.rows_of_group), 1, 1), 32 * cut.simds,
        4 * T * F * E, 2 * F * row_bytes(format, E) + 4 * T * (E + F),
        E=E, F=F, BIAS=int(bias), EPS=eps, **cut.defines(format, T, E),
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


def norm_qkv_rope_store(row: str, format: str, T: int, E: int, heads: Heads, eps: str, cut: Cut | None = None) -> Kernel:
    cut = cut or _cut_for_heads(T, E, heads)
    grid = heads.H + 2 * heads.K if heads.whole else up(heads.outputs, cut.rows_of_group)
    return _kernel(
        "norm_qkv_rope_store", row, 3, 7 + heads.optional(3), (grid, 1, 1), 32 * cut.simds,
        2 * T * E * heads.outputs, heads.outputs * row_bytes(format, E) + 4 * T * (E + heads.outputs),
        E=E, EPS=eps, **cut.defines(format, T, E), **heads.defines,
    )  # fmt: skip


def norm_head(row: str, format: str, N: int, V: int, E: int, eps: str, cut: Cut | None = None) -> Kernel:
    """Logits; `best` finds the largest."""
    cut = cut or cut_for(N)
    return _kernel(
        "norm_head", row, 1, 5, (up(V, cut.rows_of_group), 1, 1), 32 * cut.simds,
        2 * N * V * E, V * row_bytes(format, E) + 4 * N * (V + E),
        E=E, V=V, EPS=eps, **cut.defines(format, N, E),
    )  # fmt: skip


def argmax(row: str, N: int, V: int) -> tuple[Kernel, Kernel, int]:
    """Both launches, and how many parts a row has: numbers of `ranks` and of `indices` between them."""
    parts = max(1, min(32, up(V, 4096)))
    first = _kernel("argmax", row, 2, 2, (parts, N, 1), 256, N * V, 4 * N * V, V=V, PARTS=parts)
    return first, _kernel("argmax_merge", row, 1, 3, (N, 1, 1), 256, N * parts, 8 * N * parts, PARTS=parts), parts


def matmul(
    row: str, format: str, T: int, O: int, I: int, bias: bool = False, residual: bool = False, gelu: bool = False, silu: bool = False,
    eps: str | None = None, gather: bool = False, borders: tuple[int, int] | None = None, tile: int | None = None,
) -> Kernel:  # fmt: skip
    """`eps` of the norm ahead of it, None for none. `borders`: where the outputs of the second and third of three matrices begin.

    O counts the outputs; with `silu` there are two matrices of O rows. `tile`: tokens of a threadgroup, 32 or 64.
    """
    tile = tile or (32 if T <= 32 else 64)
    ins, flops, nbytes, defines = _by_matrices(format, T, O, I, bias, residual, gelu, silu, eps, gather, borders)
    return _kernel("matmul", row, 1, ins, (up(T, tile), up(O, 32 if silu else 64), 1), 128, flops, nbytes, **defines, TILE_T=tile)


def _by_matrices(
    format: str, T: int, O: int, I: int, bias: bool, residual: bool, gelu: bool, silu: bool, eps: str | None, gather: bool,
    borders: tuple[int, int] | None,
) -> tuple[int, int, int, dict[str, int | float | str]]:  # fmt: skip
    """Ins, operations and bytes, and constants of kernels/metal/include/matrices.h."""
    matrices, (first, second), rows = 3 if borders else 1 + silu, borders or (O, O), O * (1 + silu)
    ins = 2 + matrices + (eps is not None) + gather + bias * (1 + silu) + residual
    nbytes = rows * row_bytes(format, I) + 4 * T * (I + O * (1 + residual))
    return ins, 2 * T * rows * I, nbytes, dict(
        O=O, I=I, WEIGHT=format, NORM=int(eps is not None), EPS=eps or "0.0f", GATHER=int(gather), MATRICES=matrices, O1=first, O2=second,
        BIAS=int(bias), RESIDUAL=int(residual), ACTIVATION=int(gelu), SILU=int(silu),
    )  # fmt: skip


MATRIX_ROW = "apple7_matrix"


def by_matrix(row: str, T: int) -> bool:
    """Whether T rows of x are matmul16's, which always costs what sixteen cost. Decodes are padded to eight or sixteen."""
    return row == MATRIX_ROW and 12 < T <= FEW


def by_lanes(row: str, T: int) -> bool:
    """Whether T rows of x are for matvec and its like."""
    return T <= FEW and not by_matrix(row, T)


@dataclass(frozen=True)
class Fragments:
    """Matrices of eight rows of weights that a SIMD group has in matmul16."""

    count: int


FRAGMENTS = (Fragments(4), Fragments(2))  # worth timing; the default first
MATRIX_SIMDS = 8


def shares_of(rows: int) -> int:
    """SIMD groups that share the columns of the same rows of weights. Bits depend on it: it goes by the matrices alone."""
    return 1 if rows >= 1 << 16 else 2 if rows >= 1 << 14 else 4


def matmul16(
    row: str, format: str, T: int, O: int, I: int, bias: bool = False, residual: bool = False, gelu: bool = False, silu: bool = False,
    eps: str | None = None, gather: bool = False, borders: tuple[int, int] | None = None, fragments: Fragments = FRAGMENTS[0],
    shares: int | None = None,
) -> Kernel:  # fmt: skip
    """As `matmul`, of up to FEW rows."""
    shares = shares or shares_of(O * (1 + silu))
    ins, flops, nbytes, defines = _by_matrices(format, T, O, I, bias, residual, gelu, silu, eps, gather, borders)
    outputs = 8 * fragments.count // (1 + silu) * MATRIX_SIMDS // shares
    return _kernel(
        "matmul16", row, 1, ins, (up(O, outputs), 1, 1), 32 * MATRIX_SIMDS, flops, nbytes, **defines,
        FRAGMENTS=fragments.count, SIMDS=MATRIX_SIMDS, SHARES=shares,
    )  # fmt: skip


def rope_store(row: str, T: int, heads: Heads) -> Kernel:
    grid = T, up(heads.H + 2 * heads.K, 8), 1
    return _kernel("rope_store", row, 3, 3 + heads.optional(3), grid, 256, 8 * T * heads.outputs, 8 * T * heads.outputs, **heads.defines)


# --- attention. Here the bits do depend on the cut: PARTITION and SIMDS must stay the same for as long as an engine runs.


SPREAD = 64  # threadgroups that attention_decode should not have less of for the sake of sharing: two a core of a large chip


def partition_of(a: Attention) -> int:
    """Keys of a partition: so many that there are at most 32, and no fewer than 512."""
    keys = 512
    while up(a.M * a.S, keys) > 32:
        keys *= 2
    return keys


def _attention_work(a: Attention, rows: int, context: int) -> tuple[int, int]:
    """Operations of rows that see `context` keys each, and bytes of that many keys and values."""
    seen = min(context, a.window) if a.window else context
    return 4 * rows * a.H * a.D * seen, 2 * a.K * a.D * seen * (4 if a.cache == "F32" else 2)


def attention_decode(
    row: str, B: int, a: Attention, context: int = 0, partition: int | None = None, simds: int = 8, cascade: bool = False,
    spread: int | None = None,
) -> tuple[Kernel, int]:  # fmt: skip
    """The kernel, and numbers of `partial`, its scratch: 32 bits each, zero between launches.

    With `cascade` it takes `alike` as well, and reads what sequences share once for several of them.

    `context` of each sequence is for the estimate of work alone.
    """
    keys = partition or partition_of(a)
    partitions, group = up(a.M * a.S, keys), a.H // a.K
    parts = up(group, 8 if a.D <= 128 else 4)
    flops, moved = _attention_work(a, B, context)
    met = B * a.H * _met(a, context, keys) * (a.D + 2)
    kernel = _kernel(
        "attention_decode", row, 2, 5 + cascade, (a.K * parts, B, partitions), 32 * simds, flops + 2 * met,
        B * moved + 8 * B * a.H * a.D + 12 * met, PARTITION=keys, SIMDS=simds, CASCADE=int(cascade),
        SPREAD=spread or SPREAD, **a.defines,
    )  # fmt: skip
    area = 32 + partitions * up(group, parts) * (a.D + 2)
    return kernel, B * a.K * parts * area if partitions > 1 else 1


def _met(a: Attention, context: int, keys: int) -> int:
    """Partitions that are put together, of `keys` each: their records are written, read and made zero again."""
    if context == 0:
        return 0
    first = max(0, context - a.window) // keys if a.window else 0
    partitions = up(context, keys) - first
    return partitions if partitions > 1 else 0


def attention_prefill(row: str, T: int, chunks: int, a: Attention, context: int = 0, simds: int = 4) -> Kernel:
    """T rows of `chunks` sequences; H / K is at most 8 * simds. `context` that a row sees on average is for the estimate of work alone."""
    span = simds * 8 * a.K // a.H
    flops, moved = _attention_work(a, T, context)
    grid = up(T, span) + chunks, a.K, 1
    return _kernel("attention_prefill", row, 1, 6, grid, 32 * simds, flops, chunks * moved + 8 * T * a.H * a.D, SIMDS=simds, **a.defines)


# --- tokens


def embed(row: str, format: str, T: int, V: int, E: int) -> Kernel:
    threads = min(256, 32 * up(E // 4, 32))
    work = T * (4 * E + row_bytes(format, E))
    return _kernel("embed", row, 1, 3, (T, 1, 1), threads, bytes=work, V=V, E=E, WEIGHT=format, THREADS=threads)


def kv_append(row: str, T: int, K: int, S: int, D: int, cache: str) -> Kernel:
    threads = min(256, 32 * up(K * D // 4, 32))
    work = 2 * T * K * D * (8 if cache == "F32" else 6)
    return _kernel("kv_append", row, 2, 4, (T, 1, 1), threads, bytes=work, K=K, S=S, D=D, CACHE_TYPE=cache, THREADS=threads)


def kv_copy(row: str, pairs: int, block_bytes: int) -> Kernel:
    grid = up(block_bytes, 16384), pairs, 1
    return _kernel("kv_copy", row, 1, 2, grid, 256, bytes=2 * pairs * block_bytes, BLOCK_BYTES=block_bytes)


def advance(row: str, B: int, M: int, S: int, rounds: int, scratch_slot: int) -> Kernel:
    threads = min(1024, 32 * up(B, 32))
    return _kernel(
        "advance", row, 6, 3, (1, 1, 1), threads, bytes=36 * B, B=B, M=M, S=S, ROUNDS=rounds, SCRATCH_SLOT=scratch_slot, THREADS=threads
    )


def accept_drafts(row: str, B: int, drafts: int) -> Kernel:
    return _kernel("accept_drafts", row, 2, 4, (up(B, 4), 1, 1), 128, bytes=8 * B * drafts, DRAFTS=drafts)


SAMPLE_THREADS, SAMPLE_CAPACITY, SAMPLE_GROUPS = 512, 2047, 32


def sample(row: str, B: int, V: int, neutral_row: int, features: dict[str, bool]) -> tuple[list[Kernel], int]:
    """The launches, one to three, and bytes of scratch, of any bits.

    A row is shared by as many threadgroups as keep all rows' within SAMPLE_GROUPS, and a thread's share at 8 numbers or more.
    """
    searched = features["TOP_K"] or features["TOP_P"]
    filtered = searched or features["MIN_P"]
    most, parts = max(1, min(32, SAMPLE_GROUPS // B, V // (8 * SAMPLE_THREADS))), 1
    while 2 * parts <= most:
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
            "sample", row, outs, ins, (1 if stage == "DRAW" else parts, B, 1), threads, bytes=B * work,
            V=V, NEUTRAL_ROW=neutral_row, PARTS=parts, STAGE=stage, THREADS=threads, **{name: int(on) for name, on in features.items()},
        ))  # fmt: skip
    return kernels, 16 if parts == 1 else B * scratch


def read(row: str, words: int, groups: int = 1024) -> Kernel:
    return _kernel("read", row, 1, 1, (groups, 1, 1), 256, bytes=16 * words, WORDS=words, GROUPS=groups)
