"""Cases of products with weights, of the embedding, and of packing."""

from __future__ import annotations

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends.cases.case import Case
from tinyvllm.backends.cases.inputs import (
    FEW,
    GATED,
    HEAD_DIM,
    KV_HEADS,
    MANY,
    MOST,
    OTHER_BITS,
    OUTPUTS,
    PERIOD,
    QKV_OUTPUTS,
    VOCABULARY,
    Arrays,
    S,
    activations,
    columns,
    numbers,
    parts_of,
    repeated,
    table_columns,
    token_ids,
    weight_rows,
)
from tinyvllm.backends.cases.site import Site, cached_numbers, empty_batch, realized
from tinyvllm.backends.cases.stores import slots_of, stored, unrotated
from tinyvllm.backends.operands import QKV, KernelTable, KernelWeight, NormWeights
from tinyvllm.bridge import download
from tinyvllm.placement import Placement
from tinyvllm.quant import layouts
from tinyvllm.quant.formats import FORMATS, Layout
from tinyvllm.quant.layouts import PackedWeight, RowSource, RowWeight, joined


def _batches(site: Site) -> tuple[tuple[int, int], ...]:
    """Rows of each batch, and how many of them count."""
    return (FEW, MANY) if site.backend.bits_of(site.variant) is None else (FEW, MANY, MOST)


def _with_bits(site: Site, results: list[Arrays]) -> list[Arrays]:
    """The results, and of how many numbers a variant's kernel for many rows has other bits than the one of few, which another has."""
    if site.backend.bits_of(site.variant) is not None:
        pairs = [(results[-1][name][: len(few)], few) for name, few in results[0].items()]
        results[-1][OTHER_BITS] = np.array([sum(int((many.view(np.uint32) != few.view(np.uint32)).sum()) for many, few in pairs)])
    return results


def embed(site: Site, case: Case) -> list[Arrays]:
    (V, E), T = (VOCABULARY, table_columns(case.format)) if case.sizes is None else (case.sizes.outputs, case.sizes.inputs), 8
    rows = repeated(weight_rows(case.format, VOCABULARY, E, 5), V)
    if case.layout == Layout.ROWS:
        table: KernelTable = RowWeight(site.place(rows.reshape(-1)), case.format, V, E)
    else:
        packed = site.weight([(case.format, rows)])
        assert isinstance(packed, PackedWeight)
        table = packed
    out = site.backend.embed(site.variant, table, site.int32(*token_ids(T)), site.int32(PERIOD))
    return [{"x": realized(out)[0][:PERIOD]}]


def _weight(site: Site, case: Case, outputs: tuple[int, ...], seed: int) -> KernelWeight:
    """A matrix of projections with `outputs`; in other sizes their rows repeat."""
    parts = parts_of(case.format, outputs, seed, case.inputs)
    if case.sizes is not None:
        parts = [(format, repeated(rows, case.sizes.outputs)) for format, rows in parts]
    return site.weight(parts)


def _qkv(site: Site, case: Case) -> tuple[KernelWeight, Tensor | None, tuple[int, int]]:
    """The same of q, k and v with their bias, and the KV heads and what a head has."""
    parts = parts_of(case.format, QKV_OUTPUTS, 10, case.inputs)
    if case.sizes is None:
        return site.weight(parts), site.place(numbers(11, sum(QKV_OUTPUTS))), (KV_HEADS, HEAD_DIM)
    (H, K), D = case.sizes.heads, case.sizes.head_dim
    parts = [(format, repeated(rows, heads * D)) for (format, rows), heads in zip(parts, (H, K, K), strict=True)]
    return site.weight(parts), None, (K, D)


def _norm(site: Site, case: Case) -> NormWeights:
    return site.norm(case.inputs) if case.sizes is None else site.norm(case.inputs, case.sizes.eps)


def matmul(site: Site, case: Case) -> list[Arrays]:
    weight, results = _weight(site, case, (OUTPUTS,), 6), []
    for T, count in _batches(site):
        x, residual = (site.place(repeated(rows, T)) for rows in (activations(weight.I), numbers(7, PERIOD, weight.O)))
        y = site.backend.matmul(site.variant, x, weight, site.int32(count), None, residual, False)
        results.append({"y": realized(y)[0][:count]})
    return _with_bits(site, results)


def norm_gate_up_silu(site: Site, case: Case) -> list[Arrays]:
    weight, norm, results = _weight(site, case, (GATED, GATED), 8), _norm(site, case), []
    for T, count in _batches(site):
        x = site.place(repeated(activations(weight.I), T))
        y = site.backend.gate_up_silu(site.variant, x, norm, weight, site.int32(count), None)
        results.append({"y": realized(y)[0][:count]})
    return _with_bits(site, results)


def norm_head(site: Site, case: Case) -> list[Arrays]:
    weight, norm, results = _weight(site, case, (VOCABULARY,), 9), _norm(site, case), []
    x = site.place(repeated(activations(weight.I), MANY[0]))
    for N, count in (FEW, MANY):
        rows = site.int32(*(t % PERIOD + PERIOD * (3 * t % 4) for t in range(N)))  # another row with the same answer
        logits, best = realized(*site.backend.norm_head(site.variant, x, norm, weight, rows, site.int32(count)))
        results.append({"logits": logits[:count], "best": best[:count]})
    return results


def norm_qkv_rope_store(site: Site, case: Case) -> list[Arrays]:
    results, norm, (weight, bias, (K, D)) = [], _norm(site, case), _qkv(site, case)
    qkv = QKV(weight, bias)
    for T, count in (FEW, MANY):
        x, angles = (site.place(repeated(rows, T)) for rows in (activations(weight.I), numbers(12, PERIOD, D)))
        cache, slots = site.cache(case.cache, np.ones((3, 2, K, S, D), np.float32)), slots_of(T, count)
        before = cached_numbers(case.cache, cache)
        batch = empty_batch(site, slots=site.int32(*slots), rows=site.int32(count))
        q, after = site.backend.norm_qkv_rope_store(site.variant, x, norm, qkv, weight, angles, cache, batch)
        Tensor.realize(q, *after)
        results.append({"q": unrotated(case, download(q)[:count]).reshape(count, -1), **stored(case.cache, cache, before, slots[:count])})
    return results


def pack_tiles(site: Site, case: Case) -> list[Arrays]:
    """Whether the tiles are those of the definition in numpy, for rows in two arrays; float formats also from F32, which is converted."""
    I, at = columns(case.format), Placement.of(site.device)
    right = layouts.pack_tiles(case.format, weight_rows(case.format, OUTPUTS, I, 22))
    equal = []
    for source in dict.fromkeys([case.format, "F32" if FORMATS[case.format].is_float else case.format]):
        rows = weight_rows(source, OUTPUTS, I, 22)
        halves = joined([RowSource.of(source, rows[: OUTPUTS // 2]), RowSource.of(source, rows[OUTPUTS // 2 :])])
        equal.append(np.array_equal(download(site.backend.pack_tiles(site.variant, at, halves, case.format, I)), right))
    return [{"equal": np.array([all(equal)], np.int32)}]
