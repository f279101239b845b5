"""Calls of the CPU's kernels, `kernels/cpu`: the crew's lanes share the work of each, so a call has no grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinygrad import Tensor

from tinyvllm.backends.buffers import cache_format, constant, empty, integers, scratch
from tinyvllm.backends.kernel import Kernel
from tinyvllm.batch import Batch, LayerCache
from tinyvllm.bridge import launch
from tinyvllm.ops.norm import Norm
from tinyvllm.quant.layouts import BLOCK, PackedWeight, RowWeight, panel_bytes, row_bytes

if TYPE_CHECKING:
    from tinyvllm.ops.advance import History
    from tinyvllm.ops.qkv import QKV

KERNEL_WIDTH = 32  # the kernels read x and weights in steps of so many
CHUNK = 256  # keys that one unit of work of attention_decode sees
LANES = 64  # areas in attention_prefill's scratch
_REPORT_BYTES, _MOST_LANES, _CHUNK = 192, 64, 128  # of sample.c: what a lane tells the others, how many there may be, tokens a chunk


# --- what the kernels cannot take: the reason, or None


def refuses_table(table: PackedWeight | RowWeight) -> str | None:
    return _refuses_width(table.I)


def refuses_product(weight: PackedWeight) -> str | None:
    return _refuses_width(weight.I)


def refuses_qkv(weight: PackedWeight, norm: Norm, D: int) -> str | None:
    return _refuses_width(weight.I) or refuses_heads(D)


def refuses_gate_up(weight: PackedWeight, norm: Norm) -> str | None:
    if weight.O // 2 % 16:
        return f"its {weight.O // 2} outputs are not a multiple of 16"
    return _refuses_width(weight.I) or ("it is made for RMSNorm, and this is LayerNorm" if norm.kind != "RMS" else None)


def refuses_head(weight: PackedWeight, norm: Norm) -> str | None:
    return _refuses_width(weight.I)


def refuses_heads(D: int) -> str | None:
    return f"its head dimension {D} is not a multiple of 16" if D % 16 else None


def refuses_block(nbytes: int) -> str | None:
    return f"its blocks of {nbytes} bytes are no multiple of 8" if nbytes % 8 else None


def refuses_sample(V: int) -> str | None:
    return None


def refuses_attention(cache: LayerCache, H: int) -> str | None:
    D = int(cache.keys.shape[4])
    return f"its head dimension {D} is not a multiple of 16 from 32 to 256" if D % 16 or not 32 <= D <= 256 else None


def _refuses_width(I: int) -> str | None:
    return f"its {I} inputs are not a multiple of {KERNEL_WIDTH}" if I % KERNEL_WIDTH else None


# --- products


def prepared_bytes(format: str, T: int, I: int) -> int:
    """Scratch for T rows as kernels/cpu/include/product.h lays them out: an odd number of cache lines each."""
    width = {"F32": 4 * I, "F16": 4 * I, "BF16": 2 * I}.get(format, I // BLOCK * 40)
    return -(-T // 16) * 16 * 64 * (-(-width // 64) | 1)


def matmul(row: str, x: Tensor, weight: PackedWeight, rows: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool) -> Tensor:
    T, O, I = int(x.shape[0]), weight.O, weight.I
    ins = [x, weight.tensor, *(t for t in (bias, residual) if t is not None), rows]
    kernel = Kernel.cpu(
        "matmul", row, 2, len(ins), 2 * T * O * I, panel_bytes(weight.format, O, I) + 4 * T * (O + I),
        O=O, I=I, WEIGHT=weight.format, BIAS=int(bias is not None), RESIDUAL=int(residual is not None), ACTIVATION=int(gelu),
    )  # fmt: skip
    outs = [empty(x, T, O), scratch(x, prepared_bytes(weight.format, T, I))]
    return launch(kernel, outs, ins)[0]


def gate_up_silu(row: str, x: Tensor, norm: Norm, weight: PackedWeight, rows: Tensor, bias: Tensor | None) -> Tensor:
    T, E, F = int(x.shape[0]), weight.I, weight.O // 2
    ins = [x, norm.weight, weight.tensor, *([bias] if bias is not None else []), rows]
    kernel = Kernel.cpu(
        "norm_gate_up_silu", row, 2, len(ins), 4 * T * F * E, panel_bytes(weight.format, 2 * F, E) + 4 * T * (E + F),
        E=E, F=F, WEIGHT=weight.format, BIAS=int(bias is not None), EPS=constant(norm.eps),
    )  # fmt: skip
    return launch(kernel, [empty(x, T, F), scratch(x, prepared_bytes(weight.format, T, E))], ins)[0]


def norm_qkv_rope_store(
    row: str, x: Tensor, norm: Norm, qkv: QKV, weight: PackedWeight, angles: Tensor | None, cache: LayerCache, batch: Batch
) -> tuple[Tensor, LayerCache]:
    _, _, K, S, D = (int(d) for d in cache.keys.shape)
    T, E = int(x.shape[0]), weight.I
    H = weight.O // D - 2 * K
    R = 0 if angles is None else int(angles.shape[1])
    optional = norm.bias, weight.tensor, qkv.bias, qkv.q_norm, qkv.k_norm, angles
    ins = [x, norm.weight, *(t for t in optional if t is not None), batch.slots, batch.rows]
    kernel = Kernel.cpu(
        "norm_qkv_rope_store", row, 4, len(ins), 2 * T * E * weight.O, panel_bytes(weight.format, weight.O, E) + 4 * T * (E + H * D),
        E=E, H=H, K=K, D=D, S=S, R=R, WEIGHT=weight.format, CACHE_TYPE=cache_format(cache), NORM=norm.kind, BIAS=int(qkv.bias is not None),
        QK_NORM=int(qkv.q_norm is not None), EPS=constant(norm.eps), QK_EPS=constant(qkv.qk_eps),
    )  # fmt: skip
    outs = [empty(x, T, H, D), cache.keys, cache.values, scratch(x, prepared_bytes(weight.format, T, E))]
    q, keys, values, _ = launch(kernel, outs, ins)
    return q, LayerCache(keys, values)


def norm_head(row: str, x: Tensor, norm: Norm, weight: PackedWeight, rows: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    N, V, E = int(rows.shape[0]), weight.O, weight.I
    ins = [x, norm.weight, *([norm.bias] if norm.bias is not None else []), weight.tensor, rows, count]
    kernel = Kernel.cpu(
        "norm_head", row, 3, len(ins), 2 * N * V * E, panel_bytes(weight.format, V, E) + 4 * N * (V + E),
        E=E, V=V, WEIGHT=weight.format, NORM=norm.kind, EPS=constant(norm.eps),
    )  # fmt: skip
    outs = [empty(x, N, V), integers(x, N), scratch(x, prepared_bytes(weight.format, N, E))]
    logits, best, _ = launch(kernel, outs, ins)
    return logits, best


# --- rows and the cache


def embed(row: str, table: PackedWeight | RowWeight, tokens: Tensor, rows: Tensor) -> Tensor:
    T, E = int(tokens.shape[0]), table.I
    panels, work = int(isinstance(table, PackedWeight)), T * (row_bytes(table.format, E) + 4 * E)
    kernel = Kernel.cpu("embed", row, 1, 3, bytes=work, E=E, V=table.O, WEIGHT=table.format, PANELS=panels)
    return launch(kernel, [empty(tokens, T, E)], [table.tensor, tokens, rows])[0]


def append_kv(row: str, k: Tensor, v: Tensor, cache: LayerCache, batch: Batch) -> LayerCache:
    (T, K, D), S = (int(d) for d in k.shape), int(cache.keys.shape[3])
    work = 2 * T * K * D * (4 + cache.keys.dtype.itemsize)
    kernel = Kernel.cpu("kv_append", row, 2, 4, bytes=work, K=K, S=S, D=D, CACHE_TYPE=cache_format(cache))
    return LayerCache(*launch(kernel, cache, [k, v, batch.slots, batch.rows]))


def copy_blocks(row: str, pool: Tensor, pairs: Tensor, count: Tensor) -> Tensor:
    block = pool.nbytes() // int(pool.shape[0])
    kernel = Kernel.cpu("kv_copy", row, 1, 2, bytes=2 * int(pairs.shape[0]) * block, BLOCK_BYTES=block)
    return launch(kernel, [pool], [pairs, count])[0]


# --- attention


def attention_decode(row: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch) -> Tensor:
    """[T, H * D], of which the rows of the decodes are attended. Keys and values that `batch.alike` says are shared are read once."""
    T, H, D = (int(d) for d in q.shape)
    most_chunks = -(-int(batch.block_tables.shape[1]) * int(cache.keys.shape[3]) // CHUNK)
    partial = empty(q, batch.num_decodes * H * most_chunks * (D + 2))
    ins = [
        q,
        cache.keys,
        batch.block_tables,
        batch.context_lens,
        batch.decodes,
        *([batch.shared_prefix_lens] if batch.shared_prefix_lens is not None else []),
    ]
    kernel = _attention(
        "attention_decode", row, q, cache, scale, window, batch, len(ins), CASCADE=int(batch.shared_prefix_lens is not None)
    )
    return launch(kernel, [empty(q, T, H * D), partial], ins)[0]


def attention_prefill(row: str, out: Tensor | None, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch) -> Tensor:
    """`out` [T, H * D] with the rows of the chunks attended."""
    (T, H, D), K = (int(d) for d in q.shape), int(cache.keys.shape[2])
    rows = H // K * max(1, 128 // (H // K))
    areas = empty(q, LANES * (128 * D + rows * (3 * D + 32)))
    # the values' alias: a tensor that two kernels read after a store is copied, the whole pool
    ins = [q, cache.values, batch.block_tables, batch.context_lens, batch.query_starts, batch.chunks]
    kernel = _attention("attention_prefill", row, q, cache, scale, window, batch, len(ins))
    return launch(kernel, [empty(q, T, H * D) if out is None else out, areas], ins)[0]


def _attention(
    stem: str, row: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, ins: int, **more: int
) -> Kernel:  # fmt: skip
    _, _, K, S, D = (int(d) for d in cache.keys.shape)
    return Kernel.cpu(
        stem, row, 2, ins,
        H=int(q.shape[1]), K=K, D=D, S=S, M=int(batch.block_tables.shape[1]), CACHE_TYPE=cache_format(cache), SCALE=constant(scale),
        WINDOW=window, **more,
    )  # fmt: skip


# --- tokens


def advance(row: str, batch: Batch, sampled: Tensor, history: History, block_size: int, scratch_slot: int) -> None:
    B, M = (int(d) for d in batch.block_tables.shape)
    outs = [batch.tokens, batch.positions, batch.slots, batch.context_lens, history.tokens, history.round]
    N = int(history.tokens.shape[0])
    kernel = Kernel.cpu("advance", row, 6, 3, B=B, M=M, S=block_size, N=N, SCRATCH_SLOT=scratch_slot)
    Tensor.realize(*launch(kernel, outs, [sampled, batch.block_tables, batch.decodes]))


def sample(
    row: str, logits: Tensor, lines: Tensor, count: Tensor, neutral_row: int, features: dict[str, bool],
    seen: tuple[Tensor, Tensor] | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    B, V = (int(d) for d in logits.shape)
    adjusted, filtered = features["PENALIZED"] or features["BIASED"], features["TOP_K"] or features["TOP_P"] or features["MIN_P"]
    numbers = int(adjusted) * V + int(filtered) * (V + -(-V // _CHUNK))
    outs = [integers(logits, B), lines, scratch(logits, 2 * _MOST_LANES * _REPORT_BYTES + 4 * B * numbers), *(seen[:1] if seen else ())]
    ins = [logits, *(seen[1:] if seen else ()), *([bias] if bias is not None else ()), count]
    defines = {name: int(on) for name, on in features.items()}
    work = 4 * B * V * (1 + 2 * sum(defines.values()))
    return launch(Kernel.cpu("sample", row, len(outs), len(ins), bytes=work, V=V, NEUTRAL_ROW=neutral_row, **defines), outs, ins)[0]
