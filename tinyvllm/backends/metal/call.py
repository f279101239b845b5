"""Calls of the Metal kernels, `kernels/metal`: which of them an op becomes, with what buffers. Records are made in metal_records.py.

Weights lie as in files, each projection its own, so that they can be mapped without a copy; kernels take them side by side. Up to sixteen
rows are one launch that reads the weights once for all of them; more are multiplied tile by tile. Products do not round x. The row
apple7_matrix, for who asks, multiplies thirteen to sixteen rows by matrices, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends.autotune import tuned
from tinyvllm.backends.buffers import cache_format, constant, empty, integers, scratch
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.metal import plan as records
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.bridge import Timed, launch, shared_zeros, spans
from tinyvllm.ops.norm import Norm
from tinyvllm.quant.layouts import RowWeight, StoredWeight

if TYPE_CHECKING:
    from tinyvllm.ops.advance import History
    from tinyvllm.ops.qkv import QKV

Argument = Tensor | np.ndarray | int  # of a kernel that is timed
Variant = TypeVar("Variant", records.Cut, records.Fragments)


# --- what the kernels cannot take: the reason, or None


def refuses_table(table: RowWeight) -> str | None:
    return _refuses_width(table)


def refuses_product(weight: StoredWeight) -> str | None:
    return _refuses_width(weight) or (None if len(weight.parts) == 1 else "its projections are multiplied only together with their norm")


def refuses_qkv(weight: StoredWeight, norm: Norm, D: int) -> str | None:
    three = None if len(weight.parts) == 3 else f"its {len(weight.parts)} matrices are not q, k and v"
    return _refuses_width(weight) or three or _refuses_norm(norm) or refuses_heads(D)


def refuses_gate_up(weight: StoredWeight, norm: Norm) -> str | None:
    two = None if len(weight.parts) == 2 else f"its {len(weight.parts)} matrices are not gate and up"
    return _refuses_width(weight) or two or _refuses_norm(norm)


def refuses_head(weight: StoredWeight, norm: Norm) -> str | None:
    return _refuses_width(weight) or _refuses_norm(norm)


def refuses_heads(D: int) -> str | None:
    return f"its head dimension {D} is not a multiple of 16" if D % 16 else None


def refuses_block(nbytes: int) -> str | None:
    return f"its blocks of {nbytes} bytes are no multiple of 16" if nbytes % 16 else None


def refuses_sample(V: int) -> str | None:
    return f"its vocabulary of {V} is beyond the {1 << 18} that bins can count" if V > 1 << 18 else None


def refuses_attention(cache: LayerCache, H: int) -> str | None:
    _, _, K, S, D = (int(d) for d in cache.keys.shape)
    if D % 16 or not 32 <= D <= 256:
        return f"its head dimension {D} is not a multiple of 16 from 32 to 256"
    if int(cache.keys.numel()) >= 1 << 34:
        return "its cache has 2^34 numbers a layer or more, beyond what the kernels' places reach"
    if S & (S - 1) or not 8 <= S <= 256:
        return f"its blocks of {S} tokens are not a power of two from 8 to 256"
    return f"{H // K} query heads share a key head, and at most 32 can" if H // K > 32 else None


def _refuses_width(weight: StoredWeight | RowWeight) -> str | None:
    step = 256 if weight.format == "Q4_K" else 32
    return f"its {weight.I} inputs are not a multiple of {step}" if weight.I % step else None


def _refuses_norm(norm: Norm) -> str | None:
    return "it is made for RMSNorm, and this is LayerNorm" if norm.kind != "RMS" else None


def _there(*optional: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in optional if tensor is not None]


def _each(bias: Tensor | None, weight: StoredWeight) -> list[Tensor]:
    """The parts of a joined bias, one for each matrix."""
    if bias is None:
        return []
    starts = [sum(part.O for part in weight.parts[:i]) for i in range(len(weight.parts))]
    return spans(bias, [(start, part.O) for start, part in zip(starts, weight.parts, strict=True)])


def _matrices(weight: StoredWeight) -> list[Tensor]:
    return [part.tensor for part in weight.parts]


def _tuned(x: Tensor, variants: list[Variant], made: Callable[[Variant], Kernel], arguments: list[Argument]) -> Kernel:
    """The kernel, its work cut as is fastest on this GPU; `arguments` as for Timed, of the sizes that it will get."""
    device, default = str(x.device), made(variants[0])
    shape = " ".join(f"{name}={value}" for name, value in default.defines if name not in records.CUT_DEFINES)
    return made(tuned(device, default.stem, shape, variants, lambda cut: Timed(made(cut), device, arguments)))


def _count(T: int) -> np.ndarray:
    return np.array([T], np.int32)


# --- products


def _by_matrices(row: str, x: Tensor, weight: StoredWeight, T: int, O: int, arguments: list[Argument], **what: Any) -> Kernel:
    """matmul, or where the row is for it matmul16, cut as is fastest; `what` as for the record."""
    if not records.by_matrix(row, T):
        return records.matmul(row, weight.format, T, O, weight.I, **what)
    made = functools.partial(records.matmul16, row, weight.format, T, O, weight.I, **what)
    return _tuned(x, [*records.FRAGMENTS], lambda fragments: made(fragments=fragments), arguments)


def matmul(row: str, x: Tensor, weight: StoredWeight, rows: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool) -> Tensor:
    T, O, I = int(x.shape[0]), weight.O, weight.I
    added = dict(bias=bias is not None, residual=residual is not None, gelu=gelu)
    sizes: list[Argument] = [4 * T * O, 4 * T * I, *_matrices(weight), *_there(bias)]
    sizes += [*([4 * T * O] if residual is not None else []), _count(T)]
    if records.by_lanes(row, T):
        kernel = _tuned(x, records.cuts(T), lambda cut: records.matvec(row, weight.format, T, O, I, **added, cut=cut), sizes)
    else:
        kernel = _by_matrices(row, x, weight, T, O, sizes, **added)
    return launch(kernel, [empty(x, T, O)], [x, *_matrices(weight), *_there(bias, residual), rows])[0]


def gate_up_silu(row: str, x: Tensor, norm: Norm, weight: StoredWeight, rows: Tensor, bias: Tensor | None) -> Tensor:
    T, E, F, eps = int(x.shape[0]), weight.I, weight.O // 2, constant(norm.eps)
    sizes: list[Argument] = [4 * T * F, 4 * T * E, norm.weight, *_matrices(weight), *_each(bias, weight), _count(T)]
    if records.by_lanes(row, T):
        shape = row, weight.format, T, E, F, eps, bias is not None
        kernel = _tuned(x, records.cuts(T), lambda cut: records.norm_gate_up_silu(*shape, cut=cut), sizes)
    else:
        kernel = _by_matrices(row, x, weight, T, F, sizes, bias=bias is not None, silu=True, eps=eps)
    return launch(kernel, [empty(x, T, F)], [x, norm.weight, *_matrices(weight), *_each(bias, weight), rows])[0]


def norm_qkv_rope_store(
    row: str, x: Tensor, norm: Norm, qkv: QKV, weight: StoredWeight, angles: Tensor | None, cache: LayerCache, batch: Batch
) -> tuple[Tensor, LayerCache]:
    _, _, K, S, D = (int(d) for d in cache.keys.shape)
    T, H, eps = int(x.shape[0]), weight.O // D - 2 * K, constant(norm.eps)
    R = 0 if angles is None else int(angles.shape[1])
    heads = records.Heads(H, K, D, S, R, cache_format(cache), qkv.bias is not None, qkv.q_norm is not None, constant(qkv.qk_eps))
    optional = [*_each(qkv.bias, weight), *_there(qkv.q_norm, qkv.k_norm, angles)]
    ins = [x, norm.weight, *_matrices(weight)]
    if records.by_lanes(row, T):
        shape = row, weight.format, T, weight.I, heads, eps
        pool = 8 * K * D * -(-T // S) * S  # a cache of as many blocks as these rows fill
        sizes: list[Argument] = [4 * T * H * D, pool, 4, 4 * T * weight.I, *ins[1:], *optional[: len(optional) - (R > 0)]]
        sizes += [*([4 * T * R] if R else []), np.arange(T, dtype=np.int32), _count(T)]
        variants = records.cuts_for_heads(T, weight.I, heads)
        kernel = _tuned(x, variants, lambda cut: records.norm_qkv_rope_store(*shape, cut=cut), sizes)
    else:
        borders = weight.parts[0].O, weight.parts[0].O + weight.parts[1].O
        sizes = [4 * T * weight.O, 4 * T * weight.I, *ins[1:], _count(T)]
        product = _by_matrices(row, x, weight, T, weight.O, sizes, eps=eps, borders=borders)
        ins = launch(product, [empty(x, T, weight.O)], [*ins, batch.rows])
        kernel = records.rope_store(row, T, heads)
    q, keys, values = launch(kernel, [empty(x, T, H, D), *cache], [*ins, *optional, batch.slots, batch.rows])
    return q, LayerCache(keys, values)


def norm_head(row: str, x: Tensor, norm: Norm, weight: StoredWeight, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    N, V, eps = int(rows.shape[0]), weight.O, constant(norm.eps)
    index = np.zeros(N, np.int32)
    if records.by_lanes(row, N):
        shape, ins = (row, weight.format, N, V, weight.I, eps), [x, norm.weight, *_matrices(weight), rows, count]
        sizes: list[Argument] = [4 * N * V, 4 * weight.I, norm.weight, *_matrices(weight), index, _count(N)]
        kernel = _tuned(x, records.cuts(N), lambda cut: records.norm_head(*shape, cut=cut), sizes)
    else:
        sizes = [4 * N * V, 4 * weight.I, norm.weight, index, *_matrices(weight), _count(N)]
        ins = [x, norm.weight, rows, *_matrices(weight), count]
        kernel = _by_matrices(row, x, weight, N, V, sizes, eps=eps, gather=True)
    logits = launch(kernel, [empty(x, N, V)], ins)[0]
    first, second, parts = records.argmax(row, N, V)
    ranks, indices = launch(first, [integers(x, N, parts), integers(x, N, parts)], [logits, count])
    return logits, launch(second, [integers(x, N)], [ranks, indices, count])[0]


# --- rows and the cache


def embed(row: str, table: RowWeight, tokens: Tensor, rows: Tensor) -> Tensor:
    T, E = int(tokens.shape[0]), table.I
    return launch(records.embed(row, table.format, T, table.O, E), [empty(tokens, T, E)], [table.tensor, tokens, rows])[0]


def append_kv(row: str, k: Tensor, v: Tensor, cache: LayerCache, batch: Batch) -> LayerCache:
    (T, K, D), S = (int(d) for d in k.shape), int(cache.keys.shape[3])
    return LayerCache(*launch(records.kv_append(row, T, K, S, D, cache_format(cache)), cache, [k, v, batch.slots, batch.rows]))


def copy_blocks(row: str, pool: Tensor, pairs: Tensor, count: Tensor) -> Tensor:
    kernel = records.kv_copy(row, int(pairs.shape[0]), pool.nbytes() // int(pool.shape[0]))
    return launch(kernel, [pool], [pairs, count])[0]


# --- attention


def attention_decode(row: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch) -> Tensor:
    """[T, H * D], of which the rows of the decodes are attended. What `batch.alike` says is shared is read once for several of them."""
    (T, H, D), a = (int(d) for d in q.shape), _attention(q, cache, scale, window, batch)
    kernel, partial = records.attention_decode(row, batch.num_decodes, a, cascade=batch.shared_prefix_lens is not None)
    ins = [q, cache.keys, batch.block_tables, batch.context_lens, batch.decodes, *_there(batch.shared_prefix_lens)]
    return launch(kernel, [empty(q, T, H * D), shared_zeros(str(q.device), partial)], ins)[0]


def attention_prefill(row: str, out: Tensor | None, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch) -> Tensor:
    """`out` [T, H * D] with the rows of the chunks attended."""
    T, H, D = (int(d) for d in q.shape)
    kernel = records.attention_prefill(row, T - batch.num_decodes, batch.num_chunks, _attention(q, cache, scale, window, batch))
    # the values' alias: a tensor that two kernels read after a store is copied, the whole pool
    ins = [q, cache.values, batch.block_tables, batch.context_lens, batch.query_starts, batch.chunks]
    return launch(kernel, [empty(q, T, H * D) if out is None else out], ins)[0]


def _attention(q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch) -> records.Attention:
    _, _, K, S, D = (int(d) for d in cache.keys.shape)
    return records.Attention(int(q.shape[1]), K, D, S, int(batch.block_tables.shape[1]), cache_format(cache), constant(scale), window)


# --- tokens


def advance(row: str, batch: Batch, sampled: Tensor, history: History, block_size: int, scratch_slot: int) -> None:
    B, M = (int(d) for d in batch.block_tables.shape)
    outs = [batch.tokens, batch.positions, batch.slots, batch.context_lens, history.tokens, history.round]
    kernel = records.advance(row, B, M, block_size, int(history.tokens.shape[0]), scratch_slot)
    Tensor.realize(*launch(kernel, outs, [sampled, batch.block_tables, batch.decodes]))


def sample(
    row: str, logits: Tensor, lines: Tensor, count: Tensor, neutral_row: int, features: dict[str, bool],
    seen: tuple[Tensor, Tensor] | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    B, V = (int(d) for d in logits.shape)
    kernels, nbytes = records.sample(row, B, V, neutral_row, features)
    outs = [integers(logits, B), lines, scratch(logits, nbytes), *(seen[:1] if seen else ())]
    ins = [logits, *(seen[1:] if seen else ()), *_there(bias), count]
    for kernel in kernels:  # each goes on where the one before has been
        outs = launch(kernel, outs, ins)
    return outs[0]


def accept_drafts(row: str, drafts: Tensor, chosen: Tensor, lengths: Tensor, count: Tensor) -> list[Tensor]:
    B, N = (int(d) for d in drafts.shape)
    return launch(records.accept_drafts(row, B, N), [integers(drafts, B), integers(drafts, B)], [drafts, chosen, lengths, count])
