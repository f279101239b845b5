"""Cases of attention and of the KV cache."""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends.cases.case import Case
from tinyvllm.backends.cases.inputs import FEW, GROUPS, MANY, OTHER_BITS, PERIOD, QUERY_HEADS, Arrays, S, integers, numbers, repeated
from tinyvllm.backends.cases.site import Site, cached_numbers, empty_batch, realized
from tinyvllm.backends.cases.stores import slots_of, stored, unrotated
from tinyvllm.batch import LayerCache
from tinyvllm.lazy_dataclass import dataclass


def kv_append(site: Site, case: Case) -> list[Arrays]:
    K, D, (T, count) = 3, 48, FEW
    cache, slots = site.cache(case.cache, np.ones((3, 2, K, S, D), np.float32)), slots_of(T, count)
    before = cached_numbers(case.cache, cache)
    k, v = (site.place(repeated(numbers(seed, PERIOD, K, D), T)) for seed in (13, 14))
    batch = empty_batch(site, slots=site.int32(*slots), rows=site.int32(count))
    Tensor.realize(*site.backend.append_kv(site.variant, k, v, cache, batch))
    return [stored(case.cache, cache, before, slots[:count])]


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


CAP = 2.0  # of scores of about 1
SINKS = np.array([0.5, 2.0, -np.inf, 40.0], np.float32)  # of the recorded heads; the last one leaves nothing of the values
assert len(SINKS) == QUERY_HEADS


def queries(T: int, D: int) -> np.ndarray:
    return numbers(16, T, QUERY_HEADS, D)


def _padded(numbers: tuple[int, ...], B: int) -> list[int]:
    return [*numbers, *[0] * (B - len(numbers))]


def attention_decode(site: Site, case: Case) -> list[Arrays]:
    D, (few, count), results = case.head_dim, FEW, []
    for B, shared in ((few, True), (few, False), (2 * few, False))[: 3 if site.backend.reads_few_otherwise else 1]:
        q, cache = _placed(site, case, B, DECODES)
        tables = _tables(case, np.concatenate([DECODES.tables, np.zeros((B - count, DECODES.tables.shape[1]), np.int32)]))
        batch = empty_batch(
            site, block_tables=site.place(tables), context_lens=site.int32(*_padded(DECODES.lengths, B)), decodes=site.int32(count),
            num_decodes=B, num_blocks=tables.shape[1],
            shared_prefix_lens=site.int32(*_padded((0, DECODES.shared), B)) if shared else None,
        )  # fmt: skip
        out = realized(site.backend.attention_decode(site.variant, q, cache, D**-0.5, 0, batch, *_policies(site, case)))[0][:count]
        results.append({"out": _recorded_heads(case, out)})
    return results


def attention_prefill(site: Site, case: Case) -> list[Arrays]:
    D, (T, count), lengths = case.head_dim, MANY, CHUNKS.lengths
    (q, cache), tables = _placed(site, case, T, CHUNKS), _tables(case, CHUNKS.tables)
    first = lengths[0] - STARTS[0]
    batch = empty_batch(
        site, block_tables=site.place(tables), context_lens=site.int32(*lengths), query_starts=site.int32(0, first, count),
        chunks=site.int32(0, 2), rows=site.int32(count), num_blocks=tables.shape[1], max_query=16,
    )  # fmt: skip

    def computed(variant: str) -> np.ndarray:
        return realized(site.backend.attention_prefill(variant, None, q, cache, D**-0.5, 0, batch, *_policies(site, case)))[0][:count]

    out, other = computed(site.variant), site.backend.bits_of(site.variant)
    result = {"out": _recorded_heads(case, out[list(CHUNK_ROWS)])}
    if other is not None:
        result[OTHER_BITS] = np.array([int((out.view(np.uint32) != computed(other).view(np.uint32)).sum())])
    return [result]


def _heads(case: Case) -> np.ndarray:
    """Which of the recorded query heads each of the case's repeats: int [H]. KV head j repeats the recorded one j modulo GROUPS."""
    H, K = case.heads
    head, group = np.arange(H), H // K
    recorded = QUERY_HEADS // GROUPS
    return np.asarray(recorded * (head // group % GROUPS) + head % group % recorded)


def _policies(site: Site, case: Case) -> tuple[float, Tensor | None]:
    """The cap and the sinks of the case's heads."""
    return CAP if case.cap else 0.0, site.place(SINKS[_heads(case)]) if case.sinks else None


def _placed(site: Site, case: Case, T: int, context: Context) -> tuple[Tensor, LayerCache]:
    """Queries of T rows and the cache, with the case's heads."""
    q, pool = queries(T, case.head_dim)[:, _heads(case)], context.pool(case.head_dim)
    return site.place(unrotated(case, q)), site.cache(case.cache, pool[:, :, np.arange(case.heads[1]) % GROUPS])


def _tables(case: Case, tables: np.ndarray) -> np.ndarray:
    """Block tables of at least the case's width; what is added is not read."""
    return np.pad(tables, ((0, 0), (0, max(0, case.table_blocks - tables.shape[1]))))


def _recorded_heads(case: Case, out: np.ndarray) -> np.ndarray:
    """Of a result [T, H * D] the recorded heads [T, QUERY_HEADS * D], NaN where repetitions of a head differ."""
    by_head, heads = out.reshape(len(out), -1, case.head_dim), _heads(case)
    found = np.full((len(out), QUERY_HEADS, case.head_dim), np.nan, out.dtype)
    for head in range(QUERY_HEADS):
        copies = by_head[:, heads == head]
        if (copies == copies[:, :1]).all():
            found[:, head] = copies[:, 0]
    return found.reshape(len(out), -1)


def kv_copy(site: Site, case: Case) -> list[Arrays]:
    """Block 0 to 3 and block 4 to 1; a third pair does not count."""
    pool = site.place(integers(17, 0, 1000, 5, 80).astype(np.int32))
    pairs = site.place(np.array([[0, 3], [4, 1], [1, 2]], np.int32))
    return [{"pool": realized(site.backend.copy_blocks(site.variant, pool, pairs, site.int32(2)))[0]}]
