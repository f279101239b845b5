"""The CUDA backend: which kernels of `kernels/cuda` an op becomes, with which buffers. Launch plans are made in plan.py.

Up to eight rows, if a multiprocessor's shared memory holds them, are one launch that streams the weights past all of them. More rows are
first rearranged, by a launch of their own, and multiplied by tensor cores tile by tile. Both give the same bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from tinygrad import Tensor

from tinyvllm.backends import low_rank, recurrent
from tinyvllm.backends.buffers import cache_format, constant, empty, integers, present, scratch
from tinyvllm.backends.cuda import attention_plan, hopper_plan, plan
from tinyvllm.backends.cuda.bandwidth import gpu_read_bandwidth
from tinyvllm.backends.cuda.context import ContextKernels
from tinyvllm.backends.cuda.driver import CudaCopies, copies_of, counters, gpu_at, gpu_free_memory, gpu_of
from tinyvllm.backends.cuda.experts import ExpertKernels
from tinyvllm.backends.cuda.graph import CudaGraph
from tinyvllm.backends.cuda.hopper_plan import HOPPER
from tinyvllm.backends.cuda.launch import compile_ahead, launch, versions
from tinyvllm.backends.cuda.limits import LIMITS
from tinyvllm.backends.cuda.packing import pack_rows
from tinyvllm.backends.cuda.ranks import RankKernels
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.limits import ShapeFacts, first_reason
from tinyvllm.backends.operands import (
    QKV,
    AdapterStack,
    DeltaWeights,
    DrawInputs,
    History,
    KernelTable,
    KernelWeight,
    NormWeights,
    packed,
    packed_parts,
)
from tinyvllm.backends.policies import bias_pitch
from tinyvllm.backends.shapes import Attention, Heads, Product
from tinyvllm.batch import Batch, LayerCache, StateCache
from tinyvllm.bridge import (
    DeviceHooks,
    architecture,
    compile_to_cubins,
    install_hooks,
    opened_device,
    replace_copy_in,
    use_graph,
)
from tinyvllm.integers import round_up
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Layout
from tinyvllm.quant.layouts import MixedWeight, PackedWeight, RowSource

# The oldest GPU that a variant runs on. Each kernel is compiled for the GPU of this machine.
OLDEST = {plan.BASE: 80}
# These have HOPPER as well, for many rows. On an H100 its instructions round as the others' do; the self-test compares the bits on each
# machine, since NVIDIA does not promise it, and a request's tokens must not depend on how many rows are computed with it.
OF_HOPPER = ("matmul", "norm_gate_up_silu", "norm_qkv_rope_store", "norm_head", "attention_prefill")
ON_REQUEST = ("attention_prefill",)  # until a GPU has run it


class CudaBackend(ExpertKernels, RankKernels, ContextKernels):
    """Kernels for NVIDIA GPUs of compute capability 8.0 and later."""

    name = "cuda"
    layout = Layout.TILES
    reads_few_otherwise = True
    stems = frozenset(LIMITS)
    variant_names = (*OLDEST, HOPPER)

    def open(self, placement: Placement) -> None:
        opened_device(placement.device)
        if use_graph(placement.device, CudaGraph):
            copies = CudaCopies(copies_of(placement.device))
            install_hooks(placement.device, DeviceHooks(copies))
            replace_copy_in(placement.device, copies)
            compile_to_cubins(placement.device)

    def variants(self, placement: Placement, stem: str | None = None) -> dict[str, str | None]:
        name = architecture(placement.device)
        number = int(re.sub(r"\D", "", name))
        every = {variant: None if number >= oldest else f"the GPU is {name}, older than {variant}" for variant, oldest in OLDEST.items()}
        if stem not in OF_HOPPER:
            return every
        own = {HOPPER: None if number == 90 else f"the GPU is {name}, and this variant runs on sm_90 only"}
        return own | every if number == 90 and stem not in ON_REQUEST else every | own

    def bits_of(self, variant: str) -> str | None:
        return plan.BASE if variant == HOPPER else None

    def identity(self, placement: Placement) -> str:
        return f"{architecture(placement.device)}, {gpu_of(placement)}, {versions()}"

    def compile_ahead(self, kernels: Sequence[Kernel], placement: Placement) -> None:
        compile_ahead(kernels, placement.device)

    def unsupported(self, stem: str, facts: ShapeFacts) -> str | None:
        return first_reason(LIMITS[stem], facts)

    def free_memory(self, placement: Placement) -> int | None:
        return gpu_free_memory(placement.device)

    def read_bandwidth(self, placement: Placement, seconds: float, nbytes: int) -> float | None:
        return gpu_read_bandwidth(placement.device, seconds, nbytes)

    def embed(self, variant: str, table: KernelTable, tokens: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
        T, E = int(tokens.shape[0]), table.I
        kernel = plan.embed(variant, table.format, T, table.O, E, isinstance(table, PackedWeight))
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
        main, *others = packed_parts(weight)
        T, gpu, D = int(x.shape[0]), gpu_at(x), cache.D
        heads = replace(Heads.of(weight.O, qkv, angles, cache), others=tuple(part.O // D for part in others))
        outs, optional = [empty(x, T, heads.H, heads.D), *cache], present(qkv.bias, qkv.q_norm, qkv.k_norm, angles)
        products, kernel = [self._normed_product(variant, x, norm, part, batch.rows) for part in others], None
        ins = [x, norm.weight, main.tensor]
        if T <= plan.FEW:
            kernel = plan.norm_qkv_rope_store(plan.BASE, main.format, T, main.I, heads, gpu, constant(norm.eps))
        if kernel is None or not fits(kernel, gpu):
            kernel = plan.rope_store(plan.BASE, T, heads)
            ins = [self._normed_product(variant, x, norm, main, batch.rows, few=False)]
        q, keys, values = launch(kernel, outs, [*ins, *products, *optional, batch.slots, batch.rows])
        return q, cache.after(keys, values)

    def _normed_product(
        self, variant: str, x: Tensor, norm: NormWeights, part: PackedWeight, count: Tensor, few: bool = True
    ) -> Tensor:  # fmt: skip
        """norm(x) . part^T, float32 [T, O]; of up to eight rows, where `few`, by the kernel of the head."""
        T, O, gpu = int(x.shape[0]), part.O, gpu_at(x)
        if few and T <= plan.FEW:
            kernel = plan.norm_head(plan.BASE, part.format, T, O, part.I, gpu, constant(norm.eps), indexed=False)
            if fits(kernel, gpu):
                outs = [empty(x, T, O), integers(x, T), counters(x, 2 * T + 1)]
                return launch(kernel, outs, [x, norm.weight, part.tensor, count])[0]
        return _large_product(variant, x, part, count, Product(part.format, T, O, part.I), norm)

    def append_kv(self, variant: str, k: Tensor, v: Tensor, cache: LayerCache, batch: Batch) -> LayerCache:
        (T, K, D), S = (int(d) for d in k.shape), cache.S
        kernel = plan.kv_append(variant, T, K, S, D, cache_format(cache), cache.ranks)
        return cache.after(*launch(kernel, [*cache], [k, v, batch.slots, batch.rows]))

    def attention_decode(
        self, variant: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        T, H, D = (int(d) for d in q.shape)
        a = Attention.of(q, cache, scale, window, batch, cap, sinks)
        shares = batch.shared_prefix_lens is not None
        kernel, partial, count = attention_plan.attention_decode(variant, batch.num_decodes, a, gpu_at(q), shares)
        partials = [empty(q, partial), counters(q, count)]
        ins = [q, cache.keys, batch.block_tables, batch.context_lens, batch.decodes, *present(sinks)]
        ins += present(batch.shared_prefix_lens) if dict(kernel.defines).get("CASCADE") else []
        return launch(kernel, [empty(q, T, H * D), *partials], ins)[0]

    def attention_prefill(
        self, variant: str, out: Tensor | None, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch,
        cap: float = 0.0, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        T, H, D = (int(d) for d in q.shape)
        a = Attention.of(q, cache, scale, window, batch, cap, sinks)
        rows, chunks = T - batch.num_decodes, batch.num_chunks
        if hopper_plan.attends(variant, a):
            kernel = hopper_plan.attention_prefill(variant, rows, chunks, a)
        else:
            kernel = attention_plan.attention_prefill(plan.BASE, rows, chunks, a, gpu_at(q))
        # the values' alias: a tensor that two kernels read after a store is copied, the whole pool
        ins = [q, cache.values, batch.block_tables, batch.context_lens, batch.query_starts, *present(sinks), batch.chunks]
        return launch(kernel, [empty(q, T, H * D) if out is None else out], ins)[0]

    def matmul(
        self, variant: str, x: Tensor, weight: KernelWeight, rows: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool,
        output_norm: NormWeights | None = None, output_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        weight = packed(weight)
        T, O, gpu = int(x.shape[0]), weight.O, gpu_at(x)
        product = Product(
            weight.format, T, O, weight.I, bias=bias is not None, residual=residual is not None, gelu=gelu, bias_pitch=bias_pitch(bias)
        )
        if T <= plan.FEW:
            kernel = plan.matvec(plan.BASE, product, gpu)
            if fits(kernel, gpu):
                return launch(kernel, [empty(x, T, O)], [x, weight.tensor, *present(bias, residual), rows])[0]
        return _large_product(variant, x, weight, rows, product, bias=bias, residual=residual)

    def lora_bias(
        self, variant: str, x: Tensor, norm: NormWeights | None, stack: AdapterStack, bias: Tensor | None, adapters: Tensor, rows: Tensor
    ) -> Tensor:
        share = stack.share
        add_up = None if share is None else lambda part: self.all_reduce(variant, part, share.group, rows, None, None)
        return low_rank.lora_bias(launch, self.name, variant, x, norm, stack, bias, adapters, rows, add_up)

    def gated_delta(self, variant: str, y: Tensor, weights: DeltaWeights, cache: StateCache, batch: Batch) -> Tensor:
        return recurrent.gated_delta(launch, self.name, variant, y, weights, cache, batch)

    def gate_up_silu(
        self, variant: str, x: Tensor, norm: NormWeights | None, weight: KernelWeight, rows: Tensor, bias: Tensor | None, gelu: bool = False
    ) -> Tensor:
        assert norm is not None, "limits.py"
        if isinstance(weight, MixedWeight):
            return self._mixed_gate_up(variant, x, norm, weight, rows, bias)
        weight = packed(weight)
        T, F, gpu = int(x.shape[0]), weight.O // 2, gpu_at(x)
        if T <= plan.FEW:
            kernel = plan.norm_gate_up_silu(
                plan.BASE, weight.format, T, weight.I, F, gpu, constant(norm.eps), bias is not None, bias_pitch(bias)
            )
            if fits(kernel, gpu):
                return launch(kernel, [empty(x, T, F)], [x, norm.weight, weight.tensor, *present(bias), rows])[0]
        product = Product(weight.format, T, F, weight.I, bias=bias is not None, silu=True, bias_pitch=bias_pitch(bias))
        return _large_product(variant, x, weight, rows, product, norm, bias=bias)

    def _mixed_gate_up(self, variant: str, x: Tensor, norm: NormWeights, weight: MixedWeight, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Gate and up in two formats: a product each; that of up multiplies with the other. Files that people have do not need it fast."""
        out: Tensor | None = None
        for i, part in enumerate(weight.parts):
            product = Product(
                part.format, int(x.shape[0]), part.O, part.I, bias=bias is not None, residual=i > 0, gate=i > 0, bias_first=i * part.O,
                bias_pitch=bias_pitch(bias),
            )  # fmt: skip
            out = _large_product(variant, x, part, rows, product, norm, bias=bias, residual=out)
        assert out is not None
        return out

    def norm_head(
        self, variant: str, x: Tensor, norm: NormWeights, weight: KernelWeight, rows: Tensor, count: Tensor,
        divisor: float = 1.0, cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        weight = packed(weight)
        N, V, gpu = int(rows.shape[0]), weight.O, gpu_at(x)
        if N <= plan.FEW:
            kernel = plan.norm_head(plan.BASE, weight.format, N, V, weight.I, gpu, constant(norm.eps))
            if fits(kernel, gpu):
                outs = [empty(x, N, V), integers(x, N), counters(x, 2 * N + 1)]
                logits, tokens, _ = launch(kernel, outs, [x, norm.weight, weight.tensor, rows, count])
                return logits, tokens
        logits = _large_product(variant, x, weight, count, Product(weight.format, N, V, weight.I), norm, rows)
        state = counters(x, 2 * N), counters(x, N)
        return logits, launch(plan.argmax(plan.BASE, N, V, gpu), [integers(x, N), *state], [logits, count])[0]

    def advance(self, variant: str, batch: Batch, sampled: Tensor, history: History, block_size: int) -> None:
        B, M = (int(d) for d in batch.block_tables.shape)
        outs = [batch.tokens, batch.positions, batch.slots, batch.context_lens, history.tokens, history.round]
        kernel = plan.advance(variant, B, M, block_size, int(history.tokens.shape[0]))
        Tensor.realize(*launch(kernel, outs, [sampled, batch.block_tables, batch.decodes]))

    def copy_blocks(self, variant: str, pool: Tensor, pairs: Tensor, count: Tensor) -> Tensor:
        kernel = plan.kv_copy(variant, int(pairs.shape[0]), pool.nbytes() // int(pool.shape[0]))
        return launch(kernel, [pool], [pairs, count])[0]

    def sample(self, variant: str, logits: Tensor, draw: DrawInputs) -> Tensor:
        (B, V), seen = (int(d) for d in logits.shape), draw.seen or ()
        kernels, nbytes = plan.sample(variant, B, V, draw.neutral_row, draw.features, gpu_at(logits))
        outs = [integers(logits, B), draw.lines, counters(logits, max(4, nbytes // 4)), *seen[:1]]
        ins = [logits, *seen[1:], *present(draw.bias), draw.count]
        for kernel in kernels:  # the second continues from the scratch of the first
            outs = launch(kernel, outs, ins)
        tokens: Tensor = outs[0]
        return tokens

    def pack_tiles(self, variant: str, placement: Placement, rows: RowSource, format: str, I: int) -> Tensor:
        return pack_rows(plan.pack_tiles(variant, rows.format, format, gpu_of(placement)), placement.device, rows, format, I)


def fits(kernel: Kernel, gpu: plan.GPU) -> bool:
    """Whether a block of threads can have the shared memory, including what the source declares itself, which is less than 1 KiB."""
    return kernel.shared + 1024 <= gpu.shared


def _large_product(
    variant: str, x: Tensor, weight: PackedWeight, rows: Tensor, product: Product, norm: NormWeights | None = None,
    index: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """[T, O] float32: the rows of x, or those that `index` names, normed and rounded, times the weight, and what follows it."""
    out, padded, gpu = empty(x, product.T, product.O), replace(product, T=round_up(product.T, 8)), gpu_at(x)
    T, I, eps, format = padded.T, weight.I, None if norm is None else constant(norm.eps), weight.format
    if hopper_plan.computes(variant, padded):
        prepare, held = hopper_plan.quantize_cores(plan.BASE, format, T, I, eps, index is not None), 8 * hopper_plan.core_groups(T)
        kernel, partial, count = hopper_plan.matmul_hopper(variant, padded, gpu)
    else:
        prepare, held = plan.quantize_input(plan.BASE, format, T, I, eps, index is not None), T
        kernel, partial, count = plan.matmul(plan.BASE, padded, gpu)
    inputs = [x, *present(None if norm is None else norm.weight, index), rows]
    (prepared,) = launch(prepare, [scratch(x, plan.prepared_bytes(format, held, I))], inputs)
    partials = [empty(out, partial), counters(out, count)] if partial else []
    return launch(kernel, [out, *partials], [prepared, weight.tensor, *present(bias, residual), rows])[0]
