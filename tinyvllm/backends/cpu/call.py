"""The CPU backend: calls of the kernels in `kernels/cpu`. The threads of the pool share the work of each, so a launch has no grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends import policies
from tinyvllm.backends.buffers import cache_format, constant, empty, integers, present, scratch
from tinyvllm.backends.cpu.compile import prepare_compiler
from tinyvllm.backends.cpu.experts import ExpertKernels
from tinyvllm.backends.cpu.graph import CpuGraph
from tinyvllm.backends.cpu.launch import compile_ahead, launch, row_numbers
from tinyvllm.backends.cpu.limits import LIMITS
from tinyvllm.backends.cpu.prepared import MAX_THREADS, prepared_bytes
from tinyvllm.backends.cpu.states import StateKernels
from tinyvllm.backends.cpu.toolchain import compiler_state, cpu_features, processor, processor_name
from tinyvllm.backends.cpu.variants import NEEDS, best_variant, cpu_variants
from tinyvllm.backends.kernel import Constant, Kernel
from tinyvllm.backends.limits import ShapeFacts, first_reason
from tinyvllm.backends.operands import QKV, AdapterStack, DrawInputs, History, KernelTable, KernelWeight, NormWeights, packed, packed_parts
from tinyvllm.backends.shapes import AdapterProduct, Attention
from tinyvllm.batch import NO_SLOT, Batch, LayerCache
from tinyvllm.bridge import (
    defer_frees,
    emulate_half_without_f16c,
    opened_device,
    over_host,
    raise_memory_errors,
    render_bfloat16_as_bits,
    time_generated_kernels,
    use_graph,
)
from tinyvllm.integers import ceil_div
from tinyvllm.placement import Placement, RankGroup
from tinyvllm.quant.formats import Layout
from tinyvllm.quant.layouts import PackedWeight, RowSource, panel_bytes, row_bytes
from tinyvllm.quant.slices import ColumnShare, RowShare

HEADS_OF_A_PART = 8  # of those that share latents: a unit of attention converts their keys once, and more heads leave threads without work
PARTITION = 256  # keys that one unit of work of attention_decode reads
_REPORT_BYTES, _SAMPLE_CHUNK = 192, 128  # of sample.c: what a thread tells the others, and tokens of a chunk


class CpuBackend(ExpertKernels, StateKernels):
    """Kernels in C for x86-64 and ARM."""

    name = "cpu"
    layout = Layout.PANELS
    reads_few_otherwise = False
    stems = frozenset(LIMITS)
    variant_names = tuple(NEEDS)

    def open(self, placement: Placement) -> None:
        opened_device(placement.device)
        if use_graph(placement.device, CpuGraph):
            defer_frees(placement.device)
            raise_memory_errors(placement.device)
            render_bfloat16_as_bits()
            emulate_half_without_f16c(cpu_features())
            time_generated_kernels()
            prepare_compiler(best_variant())

    def variants(self, placement: Placement, stem: str | None = None) -> dict[str, str | None]:
        return cpu_variants()

    def identity(self, placement: Placement) -> str:
        return " ".join([processor_name(), processor(), compiler_state()])

    def compile_ahead(self, kernels: Sequence[Kernel], placement: Placement) -> None:
        compile_ahead(kernels)

    def bits_of(self, variant: str) -> str | None:
        return None

    def unsupported(self, stem: str, facts: ShapeFacts) -> str | None:
        return first_reason(LIMITS[stem], facts)

    def free_memory(self, placement: Placement) -> int | None:
        return None

    def read_bandwidth(self, placement: Placement, seconds: float, nbytes: int) -> float | None:
        return None

    def embed(self, variant: str, table: KernelTable, tokens: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
        T, E = int(tokens.shape[0]), table.I
        panels, work = int(isinstance(table, PackedWeight)), T * (row_bytes(table.format, E) + 4 * E)
        kernel = Kernel.cpu(
            "embed", variant, 1, 3, 0, work, E=E, V=table.O, WEIGHT=table.format, PANELS=panels, **policies.row_scale(scale)
        )
        return launch(kernel, [empty(tokens, T, E)], [table.tensor, tokens, rows])[0]

    def norm_qkv_rope_store(
        self,
        variant: str,
        x: Tensor,
        norm: NormWeights,
        qkv: QKV,
        weight: KernelWeight,
        angles: Tensor | None,
        cache: LayerCache,
        batch: Batch,
    ) -> tuple[Tensor, LayerCache]:
        K, S, D = cache.K, cache.S, cache.D
        T, E = int(x.shape[0]), weight.I
        H, R = weight.O // D - (qkv.parts - 1) * K, 0 if angles is None else int(angles.shape[1])
        main, *others = packed_parts(weight)
        products = [self._normed_product(variant, x, norm, part, batch.rows) for part in others]
        optional = present(norm.bias, main.tensor, *products, qkv.bias, qkv.q_norm, qkv.k_norm, angles)
        ins = [x, norm.weight, *optional, batch.slots, batch.rows]
        kernel = Kernel.cpu(
            "norm_qkv_rope_store", variant, 4, len(ins), 2 * T * E * main.O,
            panel_bytes(main.format, main.O, E) + 4 * T * (E + H * D),
            E=E, H=H, K=K, D=D, S=S, R=R, MAIN=main.O // D, SECOND=others[0].O // D if others else 0, WEIGHT=main.format,
            CACHE_TYPE=cache_format(cache), NORM=norm.kind, BIAS=int(qkv.bias is not None), QK_NORM=int(qkv.q_norm is not None),
            EPS=constant(norm.eps), QK_EPS=constant(qkv.qk_eps), **policies.row_bias(policies.bias_pitch(qkv.bias)),
            **policies.ranks(cache.ranks), **policies.values(qkv.parts, qkv.value_norm),
        )  # fmt: skip
        written = [cache.keys, cache.values] if qkv.parts > 1 else [empty(x, 1), empty(x, 1)]
        q, keys, values, _ = launch(kernel, [empty(x, T, H, D), *written, scratch(x, prepared_bytes(main.format, T, E))], ins)
        return q, cache.after(keys, values) if qkv.parts > 1 else cache

    def _normed_product(self, variant: str, x: Tensor, norm: NormWeights, part: PackedWeight, count: Tensor) -> Tensor:
        """norm(x) . part^T, float32 [T, O], by the kernel of the head: a launch of its own, because no launch reads two formats."""
        return self.norm_head(variant, x, norm, part, row_numbers(int(x.shape[0])), count)[0]

    def append_kv(self, variant: str, k: Tensor, v: Tensor, cache: LayerCache, batch: Batch) -> LayerCache:
        (T, K, D), S = (int(d) for d in k.shape), cache.S
        work = 2 * T * K * D * (4 + cache.keys.dtype.itemsize)
        ins = [k, *([] if cache.latent else [v]), batch.slots, batch.rows]
        sizes = dict(K=K, S=S, D=D, CACHE_TYPE=cache_format(cache)) | policies.latent(cache.latent) | policies.ranks(cache.ranks)
        kernel = Kernel.cpu("kv_append", variant, 2, len(ins), bytes=work, **sizes)  # type: ignore[arg-type]
        return cache.after(*launch(kernel, [*cache], ins))

    def attention_decode(
        self, variant: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        (T, H, _), V = (int(d) for d in q.shape), cache.value_dim
        max_partitions = ceil_div(int(batch.block_tables.shape[1]) * cache.S, PARTITION)
        partial = empty(q, batch.num_decodes * H * max_partitions * (V + 2))
        ins = [q, cache.keys, batch.block_tables, batch.context_lens, batch.decodes, *present(sinks, batch.shared_prefix_lens)]
        constants = _attention(q, cache, scale, window, batch, cap, sinks) | dict(CASCADE=int(batch.shared_prefix_lens is not None))
        kernel = Kernel.cpu("attention_decode", variant, 2, len(ins), **constants)  # type: ignore[arg-type]
        return launch(kernel, [empty(q, T, H * V), partial], ins)[0]

    def attention_prefill(
        self, variant: str, out: Tensor | None, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch,
        cap: float = 0.0, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        T, H, _ = (int(d) for d in q.shape)
        constants = _attention(q, cache, scale, window, batch, cap, sinks)
        areas = _attention_areas(q, int(constants["K"]))
        # the values' alias: a tensor that two kernels read after a store is copied, the whole pool
        ins = [q, cache.values, batch.block_tables, batch.context_lens, batch.query_starts, batch.chunks, *present(sinks)]
        kernel = Kernel.cpu("attention_prefill", variant, 2, len(ins), **constants)  # type: ignore[arg-type]
        return launch(kernel, [empty(q, T, H * cache.value_dim) if out is None else out, areas], ins)[0]

    def attention_ranks(
        self, variant: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        (T, H, _), group = (int(d) for d in q.shape), cache.ranks
        assert group is not None
        constants = _attention(q, cache, scale, window, batch, cap, sinks) | policies.ranks(group) | dict(PLACE=group.place)
        ins = [q, cache.keys, batch.block_tables, batch.context_lens, batch.query_starts, batch.decodes, batch.chunks, *present(sinks)]
        kernel = Kernel.cpu("attention_ranks", variant, 3, len(ins), **constants)  # type: ignore[arg-type]
        outs = [empty(q, T, H * cache.value_dim), group.memory, _attention_areas(q, int(constants["K"]))]
        return launch(kernel, outs, ins)[0]

    def matmul(
        self, variant: str, x: Tensor, weight: KernelWeight, rows: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool,
        output_norm: NormWeights | None = None, output_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        weight = packed(weight)
        share = weight.share if isinstance(weight.share, ColumnShare) else None
        T, O, I = int(x.shape[0]), weight.O, weight.I if share is None else share.columns
        norm = None if output_norm is None else output_norm.weight
        ins = [x, weight.tensor, *present(bias, norm, residual), rows]
        kernel = Kernel.cpu(
            "matmul", variant, 2, len(ins), 2 * T * O * I, panel_bytes(weight.format, O, weight.I) + 4 * T * (O + I),
            O=O, I=I, WEIGHT=weight.format, BIAS=int(bias is not None), RESIDUAL=int(residual is not None), ACTIVATION=int(gelu),
            **policies.row_bias(policies.bias_pitch(bias)), **policies.output_norm(output_norm), **policies.output_scale(output_scale),
            **policies.slices(share),
        )  # fmt: skip
        outs = [empty(x, T, O), scratch(x, prepared_bytes(weight.format, T, I))]
        return launch(kernel, outs, ins)[0]

    def lora_bias(
        self, variant: str, x: Tensor, norm: NormWeights | None, stack: AdapterStack, bias: Tensor | None, adapters: Tensor, rows: Tensor
    ) -> Tensor:
        p = AdapterProduct.of(x, norm, stack, bias)
        before: dict[str, Constant] = {"NORM": "NO_NORM"} if p.eps is None else {"EPS": p.eps}
        ins = [x, *present(None if norm is None else norm.weight), stack.a, stack.b, stack.ranks, *present(bias), adapters, rows]
        outs = [empty(x, p.T, p.O), scratch(x, 4 * p.T * (p.I + p.hidden)), *([] if stack.share is None else [stack.share.group.memory])]
        numbers = p.hidden * p.I + p.R * p.O  # of an adapter
        kernel = Kernel.cpu(
            "lora_bias", variant, len(outs), len(ins), 2 * p.T * numbers, 4 * (numbers + p.T * (p.I + p.O)),
            E=p.I, O=p.O, R=p.R, PARTS=len(p.starts), BIAS=int(p.bias), **p.borders, **before,
            **policies.sums_of_adapters(stack),
        )  # fmt: skip
        return launch(kernel, outs, ins)[0]

    def rank_environments(self, ranks: int, share: bool) -> list[dict[str, str]]:
        return [{}] * ranks

    def rank_group(self, placement: Placement, rank: int, world_size: int, memory: np.ndarray, place: int, logits: int) -> RankGroup:
        shared = over_host(memory.ctypes.data, placement.device, memory, opened_device(placement.device).synchronize)
        return RankGroup(rank, world_size, shared, place, logits)

    def all_reduce(
        self, variant: str, part: Tensor, group: RankGroup, rows: Tensor, bias: Tensor | None, residual: Tensor | None,
        output_norm: NormWeights | None = None, output_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        T, O = (int(d) for d in part.shape)
        ins = [part, *present(bias, None if output_norm is None else output_norm.weight, residual), rows]
        kernel = Kernel.cpu(
            "all_reduce", variant, 2, len(ins), 0, 4 * T * O * (group.world_size + 3),
            O=O, WORLD=group.world_size, RANK=group.rank, PLACE=group.place, BIAS=int(bias is not None), RESIDUAL=int(residual is not None),
            **policies.output_norm(output_norm), **policies.output_scale(output_scale), **policies.row_bias(policies.bias_pitch(bias)),
        )  # fmt: skip
        return launch(kernel, [empty(part, T, O), group.memory], ins)[0]

    def gather_logits(self, variant: str, part: Tensor, share: RowShare, count: Tensor) -> Tensor:
        (N, columns), group = (int(d) for d in part.shape), share.group
        kernel = Kernel.cpu(
            "gather_logits", variant, 2, 2, bytes=8 * N * share.all_rows, V=share.all_rows, COLUMNS=columns, FIRST=share.first,
            WORLD=group.world_size, RANK=group.rank, PLACE=group.place, LOGITS=group.logits,
        )  # fmt: skip
        return launch(kernel, [empty(part, N, share.all_rows), group.memory], [part, count])[0]

    def own_rows(self, variant: str, x: Tensor, group: RankGroup, rows: Tensor) -> tuple[Tensor, Tensor]:
        T, N = (int(d) for d in x.shape)
        own = ceil_div(T, group.world_size)
        kernel = Kernel.cpu("own_rows", variant, 2, 2, bytes=8 * own * N, N=N, WORLD=group.world_size, RANK=group.rank)
        out, count = launch(kernel, [empty(x, own, N), integers(x, 1)], [x, rows])
        return out, count

    def gather_rows(self, variant: str, part: Tensor, T: int, group: RankGroup, rows: Tensor) -> Tensor:
        N = int(part.shape[1])
        kernel = Kernel.cpu("gather_rows", variant, 2, 2, bytes=12 * T * N, N=N, WORLD=group.world_size, RANK=group.rank, PLACE=group.place)
        return launch(kernel, [empty(part, T, N), group.memory], [part, rows])[0]

    def gate_up_silu(
        self, variant: str, x: Tensor, norm: NormWeights | None, weight: KernelWeight, rows: Tensor, bias: Tensor | None, gelu: bool = False
    ) -> Tensor:
        T, E, F = int(x.shape[0]), weight.I, weight.O // 2
        out, parts = empty(x, T, F), packed_parts(weight)
        before = {"NORM": "NO_NORM"} if norm is None else {"EPS": constant(norm.eps)}
        for half, part in zip(("BOTH",) if len(parts) == 1 else ("GATE", "UP"), parts, strict=True):
            ins = [x, *present(None if norm is None else norm.weight), part.tensor, *present(bias), rows]
            kernel = Kernel.cpu(
                "norm_gate_up_silu", variant, 2, len(ins), 2 * T * part.O * E, panel_bytes(part.format, part.O, E) + 4 * T * (E + F),
                E=E, F=F, WEIGHT=part.format, HALF=half, BIAS=int(bias is not None), **before, **policies.gate(gelu),
                **policies.row_bias(policies.bias_pitch(bias)),
            )  # fmt: skip
            out, _ = launch(kernel, [out, scratch(x, prepared_bytes(part.format, T, E))], ins)
        return out

    def norm_head(
        self, variant: str, x: Tensor, norm: NormWeights, weight: KernelWeight, rows: Tensor, count: Tensor,
        divisor: float = 1.0, cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        weight = packed(weight)
        N, V, E = int(rows.shape[0]), weight.O, weight.I
        ins = [x, norm.weight, *present(norm.bias), weight.tensor, rows, count]
        kernel = Kernel.cpu(
            "norm_head", variant, 3, len(ins), 2 * N * V * E, panel_bytes(weight.format, V, E) + 4 * N * (V + E),
            E=E, V=V, WEIGHT=weight.format, NORM=norm.kind, EPS=constant(norm.eps),
            **policies.logits(divisor, cap),
        )  # fmt: skip
        outs = [empty(x, N, V), integers(x, N), scratch(x, prepared_bytes(weight.format, N, E))]
        logits, best, _ = launch(kernel, outs, ins)
        return logits, best

    def advance(self, variant: str, batch: Batch, sampled: Tensor, history: History, block_size: int) -> None:
        B, M = (int(d) for d in batch.block_tables.shape)
        outs = [batch.tokens, batch.positions, batch.slots, batch.context_lens, history.tokens, history.round]
        N = int(history.tokens.shape[0])
        kernel = Kernel.cpu("advance", variant, 6, 3, B=B, M=M, S=block_size, N=N, NO_SLOT=NO_SLOT)
        Tensor.realize(*launch(kernel, outs, [sampled, batch.block_tables, batch.decodes]))

    def copy_blocks(self, variant: str, pool: Tensor, pairs: Tensor, count: Tensor) -> Tensor:
        block = pool.nbytes() // int(pool.shape[0])
        kernel = Kernel.cpu("kv_copy", variant, 1, 2, bytes=2 * int(pairs.shape[0]) * block, BLOCK_BYTES=block)
        return launch(kernel, [pool], [pairs, count])[0]

    def sample(self, variant: str, logits: Tensor, draw: DrawInputs) -> Tensor:
        (B, V), features = (int(d) for d in logits.shape), draw.features
        adjusted, filtered = features["PENALIZED"] or features["BIASED"], features["TOP_K"] or features["TOP_P"] or features["MIN_P"]
        numbers = int(adjusted) * V + int(filtered) * (V + ceil_div(V, _SAMPLE_CHUNK))
        seen = draw.seen or ()
        outs = [integers(logits, B), draw.lines, scratch(logits, 2 * MAX_THREADS * _REPORT_BYTES + 4 * B * numbers), *seen[:1]]
        ins = [logits, *seen[1:], *present(draw.bias), draw.count]
        defines = {name: int(on) for name, on in features.items()}
        work = 4 * B * V * (1 + 2 * sum(defines.values()))
        rows = {"NEUTRAL_ROW": draw.neutral_row} if adjusted else {}  # else the kernel has no tables, and serves any batch
        kernel = Kernel.cpu("sample", variant, len(outs), len(ins), bytes=work, V=V, **rows, **defines)
        return launch(kernel, outs, ins)[0]

    def pack_tiles(self, variant: str, placement: Placement, rows: RowSource, format: str, I: int) -> Tensor:
        raise NotImplementedError("kernels: the CPU reads panels, not tiles")


def _attention(
    q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, cap: float, sinks: Tensor | None
) -> dict[str, Constant]:  # fmt: skip
    """Constants of attention. All heads read the same latents: they are divided into parts, each a unit of work."""
    shape = Attention.of(q, cache, scale, window, batch, cap, sinks)
    if not cache.latent:
        return shape.defines
    part = next(heads for heads in range(min(HEADS_OF_A_PART, shape.H), 0, -1) if shape.H % heads == 0)
    return replace(shape, K=shape.H // part).defines | policies.latent(cache.latent)


def _attention_areas(q: Tensor, K: int) -> Tensor:
    """Scratch of kernels/cpu/include/attention_area.h."""
    _, H, D = (int(d) for d in q.shape)
    group = H // K
    rows = group * max(1, 128 // group)
    return empty(q, MAX_THREADS * (256 * D + rows * (3 * D + 32)))
