"""Calls of the CUDA kernels, `kernels/cuda`: which of them an op becomes, with what buffers. Records are made in cuda_records.py.

Up to eight rows, if a multiprocessor's shared memory holds them, are one launch that streams the weights past all of them. More are laid
out first, by a launch of their own, and multiplied by tensor cores tile by tile. Both give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinygrad import Tensor, dtypes

from tinyvllm.backends.buffers import cache_format, constant, empty, integers, scratch
from tinyvllm.backends.cuda import plan as records
from tinyvllm.backends.kernel import Kernel
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.bridge import gpu_attribute, launch, shared_zeros
from tinyvllm.ops.norm import Norm
from tinyvllm.quant.layouts import PackedWeight, RowWeight, TileWeight

if TYPE_CHECKING:
    from tinyvllm.ops.advance import History
    from tinyvllm.ops.qkv import QKV

FEW = records.FEW


# --- what the kernels cannot take: the reason, or None


def refuses_table(table: PackedWeight | RowWeight) -> str | None:
    return _refuses_width(table.I)


def refuses_product(weight: PackedWeight) -> str | None:
    return _refuses_width(weight.I) or _refuses_layout(weight)


def refuses_qkv(weight: PackedWeight, norm: Norm, D: int) -> str | None:
    return _refuses_width(weight.I) or _refuses_layout(weight) or _refuses_norm(norm) or refuses_heads(D)


def refuses_gate_up(weight: PackedWeight, norm: Norm) -> str | None:
    if weight.O // 2 % 16:
        return f"its {weight.O // 2} outputs are not a multiple of 16"
    return _refuses_width(weight.I) or _refuses_layout(weight) or _refuses_norm(norm)


def refuses_head(weight: PackedWeight, norm: Norm) -> str | None:
    return _refuses_width(weight.I) or _refuses_layout(weight) or _refuses_norm(norm)


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
    if cache.keys.dtype not in (dtypes.float16, dtypes.bfloat16):
        return f"its cache is {cache_format(cache)}, and tensor cores take F16 and BF16"
    if int(cache.keys.nbytes()) >= 64 << 30:
        return "its cache has 64 GiB a layer or more, beyond what the kernels' places reach"
    needs, gpu = records.prefill_shared(D, 1), _gpu(cache.keys)
    if needs > gpu.shared:
        return f"its head dimension {D} needs {needs} bytes of shared memory, and a block of threads has {gpu.shared} here"
    if S & (S - 1) or not 8 <= S <= 256:
        return f"its blocks of {S} tokens are not a power of two from 8 to 256"
    return f"{H // K} query heads share a key head, and at most 64 can" if H // K > 64 else None


def _refuses_width(I: int) -> str | None:
    return f"its {I} inputs are not a multiple of 32" if I % 32 else None


def _refuses_layout(weight: PackedWeight) -> str | None:
    return None if isinstance(weight, TileWeight) else f"its {weight.format} weights are not in tiles"


def _refuses_norm(norm: Norm) -> str | None:
    return "it is made for RMSNorm, and this is LayerNorm" if norm.kind != "RMS" else None


def _gpu(like: Tensor) -> records.GPU:
    device = str(like.device)
    names = "MULTIPROCESSOR_COUNT", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"
    return records.GPU(*(gpu_attribute(device, name) for name in names))


def _fits(kernel: Kernel, gpu: records.GPU) -> bool:
    """Whether a block of threads can have the shared memory, with what the source declares itself, which is less than 1 KiB."""
    return kernel.shared + 1024 <= gpu.shared


def _counters(like: Tensor, count: int) -> Tensor:
    return shared_zeros(str(like.device), count)


def _whole_eights(T: int) -> int:
    return -(-T // 8) * 8


# --- products


def matmul(row: str, x: Tensor, weight: PackedWeight, rows: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool) -> Tensor:
    T, O, gpu = int(x.shape[0]), weight.O, _gpu(x)
    if T <= FEW:
        kernel = records.matvec(records.BASE, weight.format, T, O, weight.I, gpu, bias is not None, residual is not None, gelu)
        if _fits(kernel, gpu):
            return launch(kernel, [empty(x, T, O)], [x, weight.tensor, *_there(bias, residual), rows])[0]
    return _product(row, _prepared(row, x, weight, rows), weight, rows, empty(x, T, O), bias, residual, gelu=gelu)


def gate_up_silu(row: str, x: Tensor, norm: Norm, weight: PackedWeight, rows: Tensor, bias: Tensor | None) -> Tensor:
    T, F, gpu = int(x.shape[0]), weight.O // 2, _gpu(x)
    if T <= FEW:
        kernel = records.norm_gate_up_silu(records.BASE, weight.format, T, weight.I, F, gpu, constant(norm.eps), bias is not None)
        if _fits(kernel, gpu):
            return launch(kernel, [empty(x, T, F)], [x, norm.weight, weight.tensor, *_there(bias), rows])[0]
    return _product(row, _prepared(row, x, weight, rows, norm), weight, rows, empty(x, T, F), bias, silu=True)


def norm_qkv_rope_store(
    row: str, x: Tensor, norm: Norm, qkv: QKV, weight: PackedWeight, angles: Tensor | None, cache: LayerCache, batch: Batch
) -> tuple[Tensor, LayerCache]:
    _, _, K, S, D = (int(d) for d in cache.keys.shape)
    T, H, gpu = int(x.shape[0]), weight.O // D - 2 * K, _gpu(x)
    R = 0 if angles is None else int(angles.shape[1])
    heads = records.Heads(
        H, K, D, S, R, cache_format(cache), qkv.bias is not None, qkv.q_norm is not None, constant(qkv.qk_eps),
    )  # fmt: skip
    outs, optional = [empty(x, T, H, D), *cache], _there(qkv.bias, qkv.q_norm, qkv.k_norm, angles)
    ins, kernel = [x, norm.weight, weight.tensor], None
    if T <= FEW:
        kernel = records.norm_qkv_rope_store(records.BASE, weight.format, T, weight.I, heads, gpu, constant(norm.eps))
    if kernel is None or not _fits(kernel, gpu):
        kernel = records.rope_store(records.BASE, T, heads)
        ins = [_product(row, _prepared(row, x, weight, batch.rows, norm), weight, batch.rows, empty(x, T, weight.O))]
    q, keys, values = launch(kernel, outs, [*ins, *optional, batch.slots, batch.rows])
    return q, LayerCache(keys, values)


def norm_head(row: str, x: Tensor, norm: Norm, weight: PackedWeight, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    N, V, gpu = int(rows.shape[0]), weight.O, _gpu(x)
    if N <= FEW:
        kernel = records.norm_head(records.BASE, weight.format, N, V, weight.I, gpu, constant(norm.eps))
        if _fits(kernel, gpu):
            outs = [empty(x, N, V), integers(x, N), _counters(x, 2 * N + 1)]
            logits, found, _ = launch(kernel, outs, [x, norm.weight, weight.tensor, rows, count])
            return logits, found
    logits = _product(row, _prepared(row, x, weight, count, norm, rows), weight, count, empty(x, N, V))
    state = _counters(x, 2 * N), _counters(x, N)
    return logits, launch(records.argmax(records.BASE, N, V, gpu), [integers(x, N), *state], [logits, count])[0]


def _there(*optional: Tensor | None) -> list[Tensor]:
    return [tensor for tensor in optional if tensor is not None]


def _prepared(row: str, x: Tensor, weight: PackedWeight, rows: Tensor, norm: Norm | None = None, index: Tensor | None = None) -> Tensor:
    """The rows of x, or those that `index` names, normed and rounded for a product with `weight`, laid out in whole eights of rows."""
    T, I = _whole_eights(int((x if index is None else index).shape[0])), weight.I
    eps, cores = None if norm is None else constant(norm.eps), _on_hopper(row, weight, T)
    kernel = records.quantize_input(records.BASE, weight.format, T, I, eps, index is not None, cores)
    out = scratch(x, records.prepared_bytes(weight.format, T, I))
    return launch(kernel, [out], [x, *_there(None if norm is None else norm.weight, index), rows])[0]


def _product(
    row: str, prepared: Tensor, weight: PackedWeight, rows: Tensor, out: Tensor, bias: Tensor | None = None,
    residual: Tensor | None = None, gelu: bool = False, silu: bool = False,
) -> Tensor:  # fmt: skip
    """`out` [T, O] of rows that are laid out: what prepared times weight gives, and what comes after it."""
    T, O = _whole_eights(int(out.shape[0])), int(out.shape[1])
    shape = weight.format, T, O, weight.I, _gpu(out), bias is not None, residual is not None, gelu, silu
    ins = [prepared, weight.tensor, *_there(bias, residual), rows]
    if _on_hopper(row, weight, T):
        return launch(records.matmul_hopper(row, *shape), [out], ins)[0]
    kernel, partial, counters = records.matmul(records.BASE, *shape)
    shares = [empty(out, partial), _counters(out, counters)] if partial else []
    return launch(kernel, [out, *shares], ins)[0]


def _on_hopper(row: str, weight: PackedWeight, T: int) -> bool:
    """Whether a product of T rows takes the kernel that only Hopper has; all else of that row is the base row's."""
    return row == records.HOPPER and weight.format in ("F16", "BF16") and T >= records.HOPPER_ROWS


# --- rows and the cache


def embed(row: str, table: PackedWeight | RowWeight, tokens: Tensor, rows: Tensor) -> Tensor:
    T, E = int(tokens.shape[0]), table.I
    kernel = records.embed(row, table.format, T, table.O, E, isinstance(table, PackedWeight))
    return launch(kernel, [empty(tokens, T, E)], [table.tensor, tokens, rows])[0]


def append_kv(row: str, k: Tensor, v: Tensor, cache: LayerCache, batch: Batch) -> LayerCache:
    (T, K, D), S = (int(d) for d in k.shape), int(cache.keys.shape[3])
    kernel = records.kv_append(row, T, K, S, D, cache_format(cache))
    return LayerCache(*launch(kernel, cache, [k, v, batch.slots, batch.rows]))


def copy_blocks(row: str, pool: Tensor, pairs: Tensor, count: Tensor) -> Tensor:
    kernel = records.kv_copy(row, int(pairs.shape[0]), pool.nbytes() // int(pool.shape[0]))
    return launch(kernel, [pool], [pairs, count])[0]


# --- attention


def attention_decode(row: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch) -> Tensor:
    """[T, H * D], of which the rows of the decodes are attended. Keys and values that `batch.alike` says are shared are read once."""
    T, H, D = (int(d) for d in q.shape)
    kernel, partial, counters = records.attention_decode(
        row, batch.num_decodes, _attention(q, cache, scale, window, batch), _gpu(q), batch.shared_prefix_lens is not None
    )
    shares, ins = [empty(q, partial), _counters(q, counters)], [q, cache.keys, batch.block_tables, batch.context_lens, batch.decodes]
    ins += [batch.shared_prefix_lens] if batch.shared_prefix_lens is not None and dict(kernel.defines).get("CASCADE") else []
    return launch(kernel, [empty(q, T, H * D), *shares], ins)[0]


def attention_prefill(row: str, out: Tensor | None, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch) -> Tensor:
    """`out` [T, H * D] with the rows of the chunks attended."""
    T, H, D = (int(d) for d in q.shape)
    kernel = records.attention_prefill(row, T - batch.num_decodes, batch.num_chunks, _attention(q, cache, scale, window, batch), _gpu(q))
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
    kernels, nbytes = records.sample(row, B, V, neutral_row, features, _gpu(logits))
    outs = [integers(logits, B), lines, _counters(logits, max(4, nbytes // 4)), *(seen[:1] if seen else ())]
    ins = [logits, *(seen[1:] if seen else ()), *_there(bias), count]
    for kernel in kernels:  # the second goes on where the first has been
        outs = launch(kernel, outs, ins)
    return outs[0]


def accept_drafts(row: str, drafts: Tensor, chosen: Tensor, lengths: Tensor, count: Tensor) -> list[Tensor]:
    B, N = (int(d) for d in drafts.shape)
    return launch(records.accept_drafts(row, B, N), [integers(drafts, B), integers(drafts, B)], [drafts, chosen, lengths, count])
