"""Small fixed calls of every op, for the self-test (selftest.py): inputs, the launch on a backend, and what came out, as numpy arrays.

Inputs are made by integer arithmetic, so they have the same bits on every machine and need no library of random numbers. Where a product
rounds its activations, inputs are chosen so that nothing is rounded: numbers are k / 64, each block of 32 contains 127 / 64, and the mean
square of a row plus EPS is 1. So every format has an exact answer, and tolerances are those of float32.

The answers are recorded in answers.npz: `python -m tests.kernels.answers` writes it from float64 arithmetic. Row t of an input repeats row
t modulo PERIOD, so that few and many rows, which GPUs compute with other kernels, have the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinyvllm.backends.base import Backend
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.operands import QKV, DrawInputs, History, KernelTable, KernelWeight, NormWeights
from tinyvllm.batch import Batch, KVLayout, LayerCache
from tinyvllm.bridge import alias, byte_spans, download, mapped
from tinyvllm.integers import round_up
from tinyvllm.placement import Placement
from tinyvllm.quant.codecs import bf16_to_f32, f32_to_bf16, pack
from tinyvllm.quant.formats import FORMATS, GROUPED, Layout
from tinyvllm.quant.grouped import pack_groups
from tinyvllm.quant.kv import KV_FORMATS, is_rotated, pack_blocks, rotate, unpack_blocks
from tinyvllm.quant.layouts import PackedWeight, RowSource, RowWeight, StoredWeight, TileWeight, joined, pack_panels, pack_tiles

_WIDEST_GROUP = 128  # columns: the grouped formats hold the same numbers
PERIOD = 5  # distinct rows; no power of two, so that rows that changed places by one are noticed
FEW, MANY = (4, 3), (24, 19)  # rows of a batch, and how many of them count
S = 16  # tokens of a KV block
EPS = 1603.5 / 4096  # makes the mean square of `activations` 1
OUTPUTS, GATED, VOCABULARY = 50, 48, 70  # neither 50 nor 70 fills panels or tiles
HEADS, KV_HEADS, HEAD_DIM = 2, 1, 32  # of norm_qkv_rope_store
QUERY_HEADS, GROUPS = 4, 2  # of attention
DRAWN = 300  # vocabulary of the draw
CACHE_DTYPES = {"F32": dtypes.float32, "F16": dtypes.float16, "BF16": dtypes.bfloat16}
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One fixed call: of `stem`, with weights in `format` in `layout`, a KV cache in `cache`, and heads of `head_dim`."""

    stem: str
    format: str = ""
    layout: str = ""
    cache: str = ""
    head_dim: int = 0

    @property
    def name(self) -> str:
        """As in messages and on disk: "matmul Q8_0"."""
        dim = f"D={self.head_dim}" if self.head_dim else ""
        return " ".join(word for word in (self.stem, self.format, self.layout, self.cache, dim) if word)

    @property
    def answer(self) -> str:
        """Which answer it has: float formats, grouped formats and cache formats hold the same numbers."""
        values = "" if self.format not in FORMATS or self.stem == "pack_tiles" else numbers_of(self.format)
        return " ".join(word for word in (self.stem, values, str(self.head_dim or "")) if word)

    @property
    def tolerances(self) -> Mapping[str, float]:
        """What each result may differ by, as a share of the answer's largest number; 0: not at all."""
        # numbers may be rounded to either neighbour
        stored = {"F32": 1e-5, "F16": 2**-10, "BF16": 2**-7, "KV_INT8": 2**-6, "KV_FP8": 2**-3, "KV_INT4": 0.25}.get(self.cache, 0.0)
        if self.stem == "norm_qkv_rope_store":
            return {"q": _PRODUCT, "kv": max(stored, _PRODUCT), "kept": 0.0}
        if self.stem == "kv_append" and self.cache in KV_FORMATS:
            return {"kv": stored, "kept": 0.0}
        if self.stem in ("attention_decode", "attention_prefill"):
            if self.cache in KV_FORMATS:
                return {"out": {"KV_INT8": 0.02, "KV_FP8": 0.08, "KV_INT4": 0.25}[self.cache]}
            return {"out": FORMATS[self.cache].tolerance}  # GPUs round the weights of the values to the cache's format
        return _TOLERANCES.get(self.stem, {})


_PRODUCT = 1e-4
_TOLERANCES = {"matmul": {"y": _PRODUCT}, "norm_gate_up_silu": {"y": _PRODUCT}, "norm_head": {"logits": _PRODUCT, "best": 0.0}}


def case_of(stem: str, facts: ShapeFacts | None) -> Case | None:
    """The case that is run for an op with these facts; None for one without facts, or without a case."""
    if facts is None or stem not in CASES:
        return None
    if stem in ("attention_decode", "attention_prefill"):
        # 48 is for all the others: kernels take the multiples of 16 in loops, of 32 in KV_INT4
        other = 64 if facts.cache_format == "KV_INT4" else 48
        return Case(stem, cache=facts.cache_format, head_dim=facts.head_dim if facts.head_dim in (64, 128) else other)
    layout = Layout(facts.layout).value if stem == "embed" else ""
    cached = stem in ("norm_qkv_rope_store", "kv_append")
    format = facts.format.split("+")[0]  # of parts in several formats the first: the others are products of a launch of their own
    return Case(stem, format, layout, facts.cache_format if cached else "")


@dataclass(frozen=True)
class Site:
    """Where a case runs: the kernels of `variant`, on `device`."""

    backend: Backend
    variant: str
    device: str

    def place(self, array: np.ndarray, dtype: DType | None = None) -> Tensor:
        return mapped(np.ascontiguousarray(array), self.device, dtype)

    def int32(self, *values: int) -> Tensor:
        return self.place(np.array(values, np.int32))

    def weight(self, format: str, rows: np.ndarray, parts: tuple[int, ...]) -> KernelWeight:
        """Rows of a matrix, uint8 [O, bytes], in the layout that the kernels read; `parts` are the outputs of its projections."""
        I = rows.shape[1] // FORMATS[format].nbytes * FORMATS[format].elements
        if self.backend.layout is Layout.ROWS:
            ends = np.cumsum(parts).tolist()
            pieces = [rows[end - part : end] for end, part in zip(ends, parts, strict=True)]
            return StoredWeight(tuple(RowWeight(self.place(piece.reshape(-1)), format, len(piece), I) for piece in pieces))
        if self.backend.layout is Layout.TILES:
            return TileWeight(self.place(pack_tiles(format, rows)), format, len(rows), I)
        return PackedWeight(self.place(pack_panels(format, rows)), format, len(rows), I)

    def cache(self, format: str, numbers: np.ndarray) -> LayerCache:
        if format in KV_FORMATS:
            _, _, K, block_size, D = numbers.shape
            blocks = self.place(pack_blocks(format, numbers))
            return LayerCache(blocks, alias(blocks), KVLayout(format, K, block_size, D))
        bits = f32_to_bf16(numbers) if format == "BF16" else numbers.astype({"F32": "f4", "F16": "f2"}[format])
        keys = self.place(bits, CACHE_DTYPES[format])
        return LayerCache(keys, alias(keys))

    def norm(self, I: int) -> NormWeights:
        return NormWeights("RMS", self.place(norm_weight(I)), EPS)


def cached_numbers(format: str, cache: LayerCache) -> np.ndarray:
    """What a cache holds, float32 [P, 2, K, S, D]; keys that are rotated there are rotated back."""
    data = download(byte_spans(cache.keys, [(0, cache.keys.nbytes())])[0])
    if cache.packed is not None:
        held = unpack_blocks(format, data.reshape(-1, cache.packed.block_bytes), cache.K, cache.S, cache.D)
        if is_rotated(format, keys=True):
            held[:, 0] = rotate(held[:, 0])
        return held
    values = bf16_to_f32(data.view(np.uint16)) if format == "BF16" else data.view({"F32": "f4", "F16": "f2"}[format])
    return values.astype(np.float32).reshape(tuple(int(d) for d in cache.keys.shape))


# --- inputs


def integers(seed: int, low: int, high: int, *shape: int) -> np.ndarray:
    """int64 from low to high - 1, by splitmix64 (Steele, Lea and Flood 2014) of the seed and the index."""
    z = np.arange(1, prod(shape) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 40)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return np.asarray((z % np.uint64(high - low)).astype(np.int64).reshape(shape) + low)


def numbers(seed: int, *shape: int) -> np.ndarray:
    """float32 k / 64 with |k| <= 127: exact in every float format."""
    return np.asarray(integers(seed, -127, 128, *shape) / 64, np.float32)


def columns(format: str) -> int:
    """Inputs of a product: more than the 512 that GPUs sum in one piece, and not a multiple of 64 where the format allows it."""
    return round_up(544, _WIDEST_GROUP if format in GROUPED else FORMATS[format].elements)


def repeated(rows: np.ndarray, T: int) -> np.ndarray:
    """T rows: row t is row t modulo PERIOD."""
    return rows[np.arange(T) % len(rows)]


def activations(I: int) -> np.ndarray:
    """float32 [PERIOD, I], k / 64: pairs on circles, so that each block of 32 has one sum of squares; its first pair has the largest k."""
    circle = np.array([(16, 63), (33, 56), (25, 60), (39, 52)])  # the sums of squares are 65 squared
    pairs = circle[integers(1, 0, 4, PERIOD, I // 2)]
    pairs[:, ::16] = 127, 16
    signs = integers(2, 0, 2, PERIOD, I // 2, 2) * 2 - 1
    swapped: np.ndarray = np.where(integers(3, 0, 2, PERIOD, I // 2, 1) == 1, pairs[..., ::-1], pairs)
    return np.asarray(swapped * signs / 64).astype(np.float32).reshape(PERIOD, I)


def norm_weight(I: int) -> np.ndarray:
    """float32 [I]: a power of two for each block of 32, and a sign for each number."""
    blocks = 2.0 ** (np.arange(I) // 32 % 3 - 1)
    return np.asarray(blocks * (integers(4, 0, 2, I) * 2 - 1), np.float32)


def table_columns(format: str) -> int:
    """Columns of the embedding table."""
    return round_up(96, _WIDEST_GROUP if format in GROUPED else FORMATS[format].elements)


def numbers_of(format: str) -> str:
    """Which numbers `weight_rows` has: formats of one name have the same."""
    return "float" if FORMATS[format].is_float else "grouped" if format in GROUPED else format


def weight_rows(format: str, O: int, I: int, seed: int) -> np.ndarray:
    """uint8 [O, bytes of a row]: numbers below 1 in the float formats, else random bits with scales that are powers of two."""
    known = FORMATS[format]
    if format in GROUPED:
        return _grouped_rows(format, O, I, seed)
    if known.is_float:
        return pack(format, (integers(seed, -63, 64, O * I, 1) / 64).astype(np.float32)).reshape(O, -1)
    blocks = integers(seed, 0, 255, O * I // known.elements, known.nbytes).astype(np.uint8)
    start, scale = 0, 1 / known.zero if known.zero and known.scales is None else 0.5 if known.float_values else 2.0**-9
    for field in known.fields:
        if field.name == "exponent":
            blocks[:, start] = 122 + np.arange(len(blocks)) % 2
        elif field.name in ("scale", "offset", "minimum"):
            value = np.float16(scale if field.name == "scale" else 2.0**-6) * (np.arange(len(blocks)) % 2 + 1)
            blocks[:, start : start + field.nbytes] = value.astype(f"<f{field.nbytes}").view(np.uint8).reshape(-1, field.nbytes)
        elif field.name == "e8m0":
            blocks[:, start] = 118 + np.arange(len(blocks)) % 2
        elif field.flip == 128:  # int8: files have no -128
            quants = blocks[:, start : start + field.nbytes]
            quants[quants == 128] = 129
        start += field.nbytes
    return blocks.reshape(O, -1)


def _grouped_rows(format: str, O: int, I: int, seed: int) -> np.ndarray:
    """The numbers -3, -1, 1, 3 times 1/8 and 1/4 in turn: in even groups by the lowest two bits, in odd ones by the highest two."""
    quants = integers(seed, 0, 4, O * I, 1).astype(np.uint8).reshape(O, -1, _WIDEST_GROUP)
    groups = np.arange(I // _WIDEST_GROUP)
    shift = np.where(groups % 2, int(format[3]) - 2, 0).astype(np.uint8)
    step = np.ldexp(np.float32(0.25), groups % 2).astype(np.float32)
    scales = np.broadcast_to(np.ldexp(step, -shift.astype(np.int32)), (O, len(groups)))
    offsets = np.broadcast_to(step * np.float32(-1.5), (O, len(groups)))
    return pack_groups(format, (quants << shift[:, None]).reshape(O, I), scales, offsets)


def empty_batch(site: Site, **arrays: Any) -> Batch:
    """A batch with these arrays; what an op does not read is one zero."""
    zero = site.int32(0)
    names = ("tokens", "positions", "slots", "block_tables", "query_starts", "context_lens", "rows", "decodes", "chunks", "samples")
    return Batch(**{name: zero for name in (*names, "sample_count")} | {"num_blocks": 1, "num_decodes": 0, "max_query": 1} | arrays)


def realized(*tensors: Tensor) -> list[np.ndarray]:
    Tensor.realize(*tensors)
    return [download(tensor) for tensor in tensors]


# --- the cases: each returns its results by name, one array a batch


def _embed(site: Site, case: Case) -> list[Arrays]:
    rows, T = weight_rows(case.format, VOCABULARY, table_columns(case.format), 5), 8
    if case.layout == Layout.ROWS:
        table: KernelTable = RowWeight(site.place(rows.reshape(-1)), case.format, VOCABULARY, table_columns(case.format))
    else:
        packed = site.weight(case.format, rows, (VOCABULARY,))
        assert isinstance(packed, PackedWeight)
        table = packed
    out = site.backend.embed(site.variant, table, site.int32(*token_ids(T)), site.int32(PERIOD))
    return [{"x": realized(out)[0][:PERIOD]}]


def token_ids(T: int) -> list[int]:
    return [(VOCABULARY - 1 + 13 * t) % VOCABULARY for t in range(T)]


def _matmul(site: Site, case: Case) -> list[Arrays]:
    weight, results = site.weight(case.format, weight_rows(case.format, OUTPUTS, columns(case.format), 6), (OUTPUTS,)), []
    for T, count in (FEW, MANY):
        x, residual = (site.place(repeated(rows, T)) for rows in (activations(weight.I), numbers(7, PERIOD, OUTPUTS)))
        y = site.backend.matmul(site.variant, x, weight, site.int32(count), None, residual, False)
        results.append({"y": realized(y)[0][:count]})
    return results


def _norm_gate_up_silu(site: Site, case: Case) -> list[Arrays]:
    weight, results = site.weight(case.format, weight_rows(case.format, 2 * GATED, columns(case.format), 8), (GATED, GATED)), []
    for T, count in (FEW, MANY):
        x = site.place(repeated(activations(weight.I), T))
        y = site.backend.gate_up_silu(site.variant, x, site.norm(weight.I), weight, site.int32(count), None)
        results.append({"y": realized(y)[0][:count]})
    return results


def _norm_head(site: Site, case: Case) -> list[Arrays]:
    weight, results = site.weight(case.format, weight_rows(case.format, VOCABULARY, columns(case.format), 9), (VOCABULARY,)), []
    x = site.place(repeated(activations(weight.I), MANY[0]))
    for N, count in (FEW, MANY):
        rows = site.int32(*(t % PERIOD + PERIOD * (3 * t % 4) for t in range(N)))  # another row with the same answer
        logits, best = realized(*site.backend.norm_head(site.variant, x, site.norm(weight.I), weight, rows, site.int32(count)))
        results.append({"logits": logits[:count], "best": best[:count]})
    return results


def slots_of(T: int, count: int) -> list[int]:
    """Slots of T rows in a cache of three blocks, the last of which is for rows that do not count."""
    return [7 * t % (2 * S) if t < count else 3 * S - 1 for t in range(T)]


def _norm_qkv_rope_store(site: Site, case: Case) -> list[Arrays]:
    parts, results = tuple(heads * HEAD_DIM for heads in (HEADS, KV_HEADS, KV_HEADS)), []
    weight = site.weight(case.format, weight_rows(case.format, sum(parts), columns(case.format), 10), parts)
    qkv = QKV(weight, site.place(numbers(11, sum(parts))))
    for T, count in (FEW, MANY):
        x, angles = (site.place(repeated(rows, T)) for rows in (activations(weight.I), numbers(12, PERIOD, HEAD_DIM)))
        cache, slots = site.cache(case.cache, np.ones((3, 2, KV_HEADS, S, HEAD_DIM), np.float32)), slots_of(T, count)
        before = cached_numbers(case.cache, cache)
        batch = empty_batch(site, slots=site.int32(*slots), rows=site.int32(count))
        q, after = site.backend.norm_qkv_rope_store(site.variant, x, site.norm(weight.I), qkv, weight, angles, cache, batch)
        Tensor.realize(q, *after)
        results.append({"q": _unrotated(case, download(q)[:count]).reshape(count, -1), **_stored(case.cache, cache, before, slots[:count])})
    return results


def _unrotated(case: Case, q: np.ndarray) -> np.ndarray:
    """Queries [T, H, D] for a cache with rotated keys, rotated back or, as the matrix is its own inverse, made so."""
    return rotate(q) if is_rotated(case.cache, keys=True) else q


def _stored(format: str, cache: LayerCache, before: np.ndarray, slots: list[int]) -> Arrays:
    """Keys and values of these slots [T, 2 * K * D], and whether the other slots of the first two blocks are as before."""
    held, old = (numbers[:2].transpose(0, 3, 1, 2, 4).reshape(2 * S, -1) for numbers in (cached_numbers(format, cache), before))
    kept = np.array_equal(np.delete(held, slots, axis=0), np.delete(old, slots, axis=0))
    return {"kv": held[slots], "kept": np.array([kept], np.int32)}


def _kv_append(site: Site, case: Case) -> list[Arrays]:
    K, D, (T, count) = 3, 48, FEW
    cache, slots = site.cache(case.cache, np.ones((3, 2, K, S, D), np.float32)), slots_of(T, count)
    before = cached_numbers(case.cache, cache)
    k, v = (site.place(repeated(numbers(seed, PERIOD, K, D), T)) for seed in (13, 14))
    batch = empty_batch(site, slots=site.int32(*slots), rows=site.int32(count))
    Tensor.realize(*site.backend.append_kv(site.variant, k, v, cache, batch))
    return [_stored(case.cache, cache, before, slots[:count])]


@dataclass(frozen=True)
class Context:
    """Sequences over one pool: how many tokens each has, of which the first `shared` are in blocks that the longer ones have in common."""

    lengths: tuple[int, ...]
    shared: int = 0

    @property
    def tables(self) -> np.ndarray:
        """int32 [B, M]; after a sequence's own blocks comes one that no row may read."""
        B, M, shared = len(self.lengths), max(self.lengths) // S + 2, self.shared // S
        tables, used = np.zeros((B, M), np.int64), shared + 1
        for b, length in enumerate(self.lengths):
            lead, own = (shared if length > self.shared else 0), -(-length // S)
            tables[b, :lead] = np.arange(1, lead + 1)
            tables[b, lead:own] = np.arange(used, used + own - lead)
            used += own - lead
        return (tables * 7 % BLOCKS).astype(np.int32)

    def pool(self, D: int) -> np.ndarray:
        """float32 [BLOCKS, 2, K, S, D], NaN in every slot that no sequence has."""
        held = np.full((BLOCKS, 2, GROUPS, S, D), np.nan, np.float32)
        values, tables = numbers(15, BLOCKS, 2, GROUPS, S, D), self.tables
        for b, length in enumerate(self.lengths):
            for n in range(-(-length // S)):
                block, end = tables[b, n], min(S, length - n * S)
                held[block, :, :, :end] = values[block, :, :, :end]
        return held


BLOCKS = 24  # 7 has no common divisor with it
DECODES = Context((290, 277, 5), shared=272)  # more than a partition of 256 keys
CHUNKS, STARTS = Context((274, 5)), (260, 0)  # a chunk of 14 tokens in the middle of a sequence, and a whole prompt of 5
CHUNK_ROWS = (0, 6, 13, 14, 18)  # whose answers are recorded


def queries(T: int, D: int) -> np.ndarray:
    return numbers(16, T, QUERY_HEADS, D)


def _attention_decode(site: Site, case: Case) -> list[Arrays]:
    D, (B, count) = case.head_dim, FEW
    q, cache = site.place(_unrotated(case, queries(B, D))), site.cache(case.cache, DECODES.pool(D))
    tables = np.concatenate([DECODES.tables, np.zeros_like(DECODES.tables[:1])])
    batch = empty_batch(
        site, block_tables=site.place(tables), context_lens=site.int32(*DECODES.lengths, 0), decodes=site.int32(count),
        num_decodes=B, num_blocks=tables.shape[1], shared_prefix_lens=site.int32(0, DECODES.shared, 0, 0),
    )  # fmt: skip
    return [{"out": realized(site.backend.attention_decode(site.variant, q, cache, D**-0.5, 0, batch))[0][:count]}]


def _attention_prefill(site: Site, case: Case) -> list[Arrays]:
    D, (T, count), lengths = case.head_dim, MANY, CHUNKS.lengths
    q, cache, tables = site.place(_unrotated(case, queries(T, D))), site.cache(case.cache, CHUNKS.pool(D)), CHUNKS.tables
    first = lengths[0] - STARTS[0]
    batch = empty_batch(
        site, block_tables=site.place(tables), context_lens=site.int32(*lengths), query_starts=site.int32(0, first, count),
        chunks=site.int32(0, 2), rows=site.int32(count), num_blocks=tables.shape[1], max_query=16,
    )  # fmt: skip
    out = realized(site.backend.attention_prefill(site.variant, None, q, cache, D**-0.5, 0, batch))[0]
    return [{"out": out[list(CHUNK_ROWS)]}]


def _advance(site: Site, case: Case) -> list[Arrays]:
    """Four rows of which three count: within a block, into the next one, and past the last."""
    state = [[1, 2, 3, 4], [5, S - 1, 2 * S - 1, 9], [5, S - 1, 3 * S - 1, 9], [6, S, 2 * S, 10]]
    tokens, positions, slots, lengths = (site.int32(*row) for row in state)
    history = History(site.place(np.full((3, 4), -1, np.int32)), site.int32(1))
    tables = site.place(np.array([[4, 1], [0, 3], [5, 2], [6, 7]], np.int32))
    batch = empty_batch(
        site, tokens=tokens, positions=positions, slots=slots, context_lens=lengths, block_tables=tables, decodes=site.int32(3),
        num_decodes=4,
    )  # fmt: skip
    site.backend.advance(site.variant, batch, site.int32(11, -1, 13, 14), history, S, 127)
    moved = np.stack([download(tensor) for tensor in (tokens, positions, slots, lengths)])
    return [{"state": moved, "history": download(history.tokens), "round": download(history.round)}]


def _kv_copy(site: Site, case: Case) -> list[Arrays]:
    """Block 0 to 3 and block 4 to 1; a third pair does not count."""
    pool = site.place(integers(17, 0, 1000, 5, 80).astype(np.int32))
    pairs = site.place(np.array([[0, 3], [4, 1], [1, 2]], np.int32))
    return [{"pool": realized(site.backend.copy_blocks(site.variant, pool, pairs, site.int32(2)))[0]}]


NEUTRAL = 6  # row of the draw's tables that changes nothing
# seen_row, bias_row, seeds and position; 1 / temperature; top_k, top_p; min_p, penalties: greedy, plain, then one filter each, then all
DRAWS: tuple[tuple[tuple[int, ...], float, tuple[int, int], tuple[float, ...]], ...] = (
    ((NEUTRAL, NEUTRAL, 1, 2, 3), 0.0, (DRAWN, 1 << 30), (-np.inf, 1.0, 0.0, 0.0)),
    ((NEUTRAL, NEUTRAL, 1, 2, 3), 0.5, (DRAWN, 1 << 30), (-np.inf, 1.0, 0.0, 0.0)),
    ((NEUTRAL, NEUTRAL, 1, 2, 3), 0.5, (5, 1 << 30), (-np.inf, 1.0, 0.0, 0.0)),
    ((NEUTRAL, 3, 7, 8, 9), 0.5, (DRAWN, 1 << 29), (-np.inf, 1.0, 0.0, 0.0)),
    ((NEUTRAL, NEUTRAL, 3, 4, 5), 0.5, (DRAWN, 1 << 30), (-1.53, 1.0, 0.0, 0.0)),
    ((5, 5, 11, 12, 13), 0.5, (40, 1 << 29), (-2.03, 1.25, 0.5, 0.25)),
)


def draw_lines() -> np.ndarray:
    """int32 [rows, 12], SampleParams of kernels/include/params.h."""
    lines = np.zeros((len(DRAWS), 12), np.int32)
    for line, (places, inverse_temperature, filters, rest) in zip(lines, DRAWS, strict=True):
        line[:5], line[6:8] = places, filters
        line.view(np.float32)[[5, 8, 9, 10, 11]] = inverse_temperature, *rest
    return lines


def draw_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits float32 [rows, V], counts int32 and prompted uint8 [NEUTRAL + 1, V], bias float32 [NEUTRAL + 1, V]."""
    shape = NEUTRAL + 1, DRAWN
    logits, bias = integers(18, -511, 512, len(DRAWS), DRAWN) / 128, integers(19, -8, 9, *shape) / 16
    counts, prompted = integers(20, 0, 3, *shape), integers(21, 0, 2, *shape)
    return logits.astype(np.float32), counts.astype(np.int32), prompted.astype(np.uint8), bias.astype(np.float32)


def _sample(site: Site, case: Case) -> list[Arrays]:
    logits, counts, prompted, bias = draw_tables()
    lines, seen = site.place(draw_lines()), site.place(counts)
    how = DrawInputs(
        lines, site.int32(len(DRAWS)), NEUTRAL, True, True, True, True, (seen, site.place(prompted)), site.place(bias)
    )  # fmt: skip
    tokens = realized(site.backend.sample(site.variant, site.place(logits), how))[0]
    counted = np.argwhere(download(seen) - counts).astype(np.int32)
    return [{"tokens": tokens, "positions": download(lines)[:, 4], "counted": counted}]


def _pack_tiles(site: Site, case: Case) -> list[Arrays]:
    """Whether the tiles are those of the definition in numpy, for rows in two arrays; float formats also from F32, which is converted."""
    I, at = columns(case.format), Placement.of(site.device)
    right = pack_tiles(case.format, weight_rows(case.format, OUTPUTS, I, 22))
    equal = []
    for source in dict.fromkeys([case.format, "F32" if FORMATS[case.format].is_float else case.format]):
        rows = weight_rows(source, OUTPUTS, I, 22)
        halves = joined([RowSource.of(source, rows[: OUTPUTS // 2]), RowSource.of(source, rows[OUTPUTS // 2 :])])
        equal.append(np.array_equal(download(site.backend.pack_tiles(site.variant, at, halves, case.format, I)), right))
    return [{"equal": np.array([all(equal)], np.int32)}]


Run = Callable[[Site, Case], list[Arrays]]
CASES: Mapping[str, Run] = {
    "embed": _embed,
    "norm_qkv_rope_store": _norm_qkv_rope_store,
    "kv_append": _kv_append,
    "attention_decode": _attention_decode,
    "attention_prefill": _attention_prefill,
    "matmul": _matmul,
    "norm_gate_up_silu": _norm_gate_up_silu,
    "norm_head": _norm_head,
    "advance": _advance,
    "kv_copy": _kv_copy,
    "sample": _sample,
    "pack_tiles": _pack_tiles,
}


def run(case: Case, site: Site) -> list[Arrays]:
    """Launch the case's kernels and return their results, one array a batch and name."""
    return CASES[case.stem](site, case)


def wrong(case: Case, results: list[Arrays], answers: Mapping[str, np.ndarray]) -> str | None:
    """Why the results are not the recorded ones, with the largest error; None if they are."""
    for arrays in results:
        for name, got in arrays.items():
            want, tolerance = answers[f"{case.answer}/{name}"], case.tolerances.get(name, 0.0)
            want = repeated(want, len(got)) if len(want) == PERIOD else want
            if got.shape != want.shape:
                return f"{name} has the shape {got.shape}, expected {want.shape}"
            if not np.isfinite(got).all():
                return f"{name} of {len(got)} rows is not finite in {int((~np.isfinite(got)).sum())} of {got.size} numbers"
            error, most = float(np.abs(got.astype(np.float64) - want).max()), tolerance * float(np.abs(want).max())
            if error > most:
                return f"largest error {error:.2g} in {name} of {len(got)} rows, expected at most {most:.2g}"
    return None
