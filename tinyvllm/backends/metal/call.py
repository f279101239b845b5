"""The Metal backend: which kernels of `kernels/metal` an op becomes, with which buffers. Launch plans are made in plan.py.

Weights are in rows as in files, each projection by itself, so that files can be mapped without a copy; kernels take them one after the
other. Up to sixteen rows of x are one launch that reads the weights once for all of them; more are multiplied tile by tile. Products do not
round x. The variant apple7_matrix, which is used only on request, multiplies thirteen to sixteen rows by matrices, too.
"""

from __future__ import annotations

import functools
import logging
import platform
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from tinygrad import Tensor

from tinyvllm.backends import low_rank, recurrent
from tinyvllm.backends.autotune import source_digest, tuned
from tinyvllm.backends.buffers import cache_format, constant, empty, integers, present, scratch
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.limits import ShapeFacts, first_reason
from tinyvllm.backends.metal import plan
from tinyvllm.backends.metal.experts import ExpertKernels
from tinyvllm.backends.metal.icb import MetalGraph
from tinyvllm.backends.metal.launch import TimedKernel, UnusableKernelError, launch, require_runnable
from tinyvllm.backends.metal.limits import LIMITS
from tinyvllm.backends.metal.parts import each_bias, halves, tensors_of
from tinyvllm.backends.metal.probe import unexpected_matrix_layout
from tinyvllm.backends.metal.queue import gpu_name, import_pages, max_import, metal_free_memory, queue_of
from tinyvllm.backends.metal.unusable import of_op
from tinyvllm.backends.operands import (
    QKV,
    AdapterStack,
    DeltaWeights,
    DrawInputs,
    History,
    KernelTable,
    KernelWeight,
    NormWeights,
    stored,
)
from tinyvllm.backends.policies import bias_pitch
from tinyvllm.backends.shapes import Attention, Heads, Product
from tinyvllm.backends.without_ranks import WithoutRanks
from tinyvllm.batch import Batch, LayerCache, StateCache
from tinyvllm.bridge import (
    DeviceHooks,
    architecture,
    define_process_tensor,
    forbid_tensor_cores,
    has_graph,
    install_hooks,
    name_process_tensor,
    opaque_memory,
    opened_device,
    share_programs,
    shared_zeros,
    use_graph,
)
from tinyvllm.integers import round_up
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Layout
from tinyvllm.quant.layouts import RowSource, StoredWeight

log = logging.getLogger("tinyvllm")

Argument = Tensor | np.ndarray | int  # of a kernel that is timed
Cut = TypeVar("Cut", plan.Cut, plan.Fragments)

OLDEST_FAMILY = 7  # of Apple's GPUs: M1's
PRODUCTS = ("matmul", "norm_gate_up_silu", "norm_qkv_rope_store", "norm_head")


class MetalBackend(ExpertKernels, WithoutRanks):
    """Kernels for the GPUs of Apple Silicon."""

    name = "metal"
    layout = Layout.ROWS
    reads_few_otherwise = False
    stems = frozenset(LIMITS)
    variant_names = (plan.BASE, plan.MATRIX, plan.MERGE)

    def __init__(self) -> None:
        super().__init__()
        self._layouts: dict[str, str | None] = {}  # by device: how the layout of its matrices is another one than kernels assume

    def open(self, placement: Placement) -> None:
        opened_device(placement.device)
        share_programs(placement.device)
        if has_graph(placement.device):
            use_graph(placement.device, MetalGraph)
        import_at = functools.partial(import_pages, placement.device)
        hooks = DeviceHooks(queue_of(placement.device), import_at, max_import(placement.device))
        install_hooks(placement.device, hooks)
        self._unusable = {key: reason for key, reason in self._unusable.items() if key[0] != placement.device}
        self._layouts[placement.device] = layout = unexpected_matrix_layout(placement.device)
        if layout is not None:
            forbid_tensor_cores()
            log.warning(
                "%s: the lanes of this GPU's matrices do not hold the numbers that the kernels expect: %s; attention_prefill runs without "
                "a kernel, products of more than %d rows run in pieces, %s is not available: correct, but slower. Please report it",
                placement.device, layout, plan.FEW, plan.MATRIX,
            )  # fmt: skip

    def forget_devices(self) -> None:
        """Forget what was found out about the devices that were opened."""
        self._layouts.clear()
        self._unusable.clear()

    def variants(self, placement: Placement, stem: str | None = None) -> dict[str, str | None]:
        family = architecture(placement.device)
        number = re.fullmatch(r"Apple(\d+)", family)
        lacking = None if number and int(number[1]) >= OLDEST_FAMILY else f"the GPU is of the family {family}, older than Apple7"
        # the matrix variant is never the default: with it a request's bits depend on how many rows are computed with it
        others = {} if stem is None else {v: r for (device, of, v), r in self._unusable.items() if (device, of) == (placement.device, stem)}
        own = [plan.MATRIX] if stem in PRODUCTS else [plan.MERGE] if stem == "attention_decode" else []
        every = {variant: lacking or others.get(variant) for variant in (plan.BASE, *own)}
        if plan.MATRIX in every and every[plan.MATRIX] is None:
            layout = self._layouts.get(placement.device)
            # it shares most kernels with the base, and must not take its place: its bits depend on the number of rows
            every[plan.MATRIX] = every[plan.BASE] if layout is None else f"its matrices have another layout: {layout}"
        return every

    def identity(self, placement: Placement) -> str:
        # driver and compiler are part of macOS
        return f"{gpu_name(placement.device)}, {architecture(placement.device)}, macOS {platform.mac_ver()[0]}"

    def compile_ahead(self, kernels: Sequence[Kernel], placement: Placement) -> None:
        """Nothing: Metal compiles a kernel in milliseconds, in a process of its own."""

    def bits_of(self, variant: str) -> str | None:
        return None

    def unsupported(self, stem: str, facts: ShapeFacts) -> str | None:
        if stem == "attention_prefill" and (layout := self._layouts.get(facts.placement.device)) is not None:
            return f"kernel multiplies matrices, which have another layout here: {layout}"
        return first_reason(LIMITS[stem], facts)

    def _pieces(self, like: Tensor, T: int) -> list[slice]:
        """Rows of x that are multiplied together: all of T, or at most FEW where the layout of matrices is another one."""
        step = plan.FEW if self._layouts.get(Placement.of(like.device).device) is not None else max(1, T)
        return [slice(start, min(T, start + step)) for start in range(0, T, step)]

    def free_memory(self, placement: Placement) -> int | None:
        return metal_free_memory(placement.device)

    def read_bandwidth(self, placement: Placement, seconds: float, nbytes: int) -> float | None:
        return None

    @of_op("embed")
    def embed(self, variant: str, table: KernelTable, tokens: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
        T, E = int(tokens.shape[0]), table.I
        return launch(plan.embed(variant, table.format, T, table.O, E), [empty(tokens, T, E)], [table.tensor, tokens, rows])[0]

    @of_op("norm_qkv_rope_store")
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
        weight = stored(weight)
        T, eps, heads = int(x.shape[0]), constant(norm.eps), Heads.of(weight.O, qkv, angles, cache)
        in_pieces = len(self._pieces(x, T)) > 1  # then all products are launches of their own: two that write one cache make a cycle
        main, others = weight.leading(1 if in_pieces else len(weight.parts))
        ins = [self._normed_product(variant, x, norm, part, batch.rows) for part in others]
        apart, optional = tuple(part.O for part in others), [*each_bias(qkv.bias, weight), *present(qkv.q_norm, qkv.k_norm, angles)]
        if not in_pieces and plan.by_lanes(variant, T):
            shape = variant, main.format, T, main.I, heads, eps
            pool = 8 * heads.K * heads.D * round_up(T, heads.S)  # a cache with the blocks that these rows fill
            sizes: list[Argument] = [4 * T * heads.H * heads.D, pool, 4, 4 * T * main.I, norm.weight, *tensors_of(main)]
            sizes += [*(4 * T * outputs for outputs in apart), *map(_timed_with, optional)]
            sizes += [np.arange(T, dtype=np.int32), _count(T)]
            kernel_of = functools.partial(plan.norm_qkv_rope_store, *shape, apart=apart)
            kernel = _tuned(x, plan.cuts_for_heads(T, main.I, heads), functools.partial(_with_cut, kernel_of), sizes)
            ins = [x, norm.weight, *tensors_of(main), *ins]
        else:
            ins = [self._normed_product(variant, x, norm, main, batch.rows), *ins]
            kernel = plan.rope_store(variant, T, heads, apart)
        q, keys, values = launch(kernel, [empty(x, T, heads.H, heads.D), *cache], [*ins, *optional, batch.slots, batch.rows])
        return q, cache.after(keys, values)

    def _normed_product(self, variant: str, x: Tensor, norm: NormWeights, weight: StoredWeight, rows: Tensor) -> Tensor:
        """norm(x) . weight^T, float32 [T, O], of matrices in one format: one, or of many rows up to three."""
        T, O, I, eps, matrices = int(x.shape[0]), weight.O, weight.I, constant(norm.eps), tensors_of(weight)
        if len(pieces := self._pieces(x, T)) > 1:
            return _joined([self._normed_product(variant, _rows_of(x, piece), norm, weight, _count_of(rows, piece)) for piece in pieces])
        borders = None
        if len(matrices) > 1:
            matrices, first = [*matrices, matrices[-1]][:3], weight.parts[0].O
            borders = first, first + weight.parts[1].O  # of two matrices, no output belongs to a third
        sizes: list[Argument] = [4 * T * O, 4 * T * I, norm.weight, *matrices, _count(T)]
        if plan.by_lanes(variant, T):
            kernel_of = functools.partial(plan.norm_head, variant, weight.format, T, O, I, eps, gather=False)
            kernel = _tuned(x, plan.cuts(T), functools.partial(_with_cut, kernel_of), sizes)
        else:
            kernel = _by_matrices(variant, x, Product(weight.format, T, O, I, eps=eps, borders=borders), sizes)
        return launch(kernel, [empty(x, T, O)], [x, norm.weight, *matrices, rows])[0]

    @of_op("kv_append")
    def append_kv(self, variant: str, k: Tensor, v: Tensor, cache: LayerCache, batch: Batch) -> LayerCache:
        (T, K, D), S = (int(d) for d in k.shape), cache.S
        return cache.after(*launch(plan.kv_append(variant, T, K, S, D, cache_format(cache)), [*cache], [k, v, batch.slots, batch.rows]))

    @of_op("attention_decode")
    def attention_decode(
        self, variant: str, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch, cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        (T, H, D), a = (int(d) for d in q.shape), Attention.of(q, cache, scale, window, batch, cap, sinks)
        kernels, words = plan.attention_decode(variant, batch.num_decodes, a, cascade=batch.shared_prefix_lens is not None)
        ins = [q, cache.keys, batch.block_tables, batch.context_lens, batch.decodes, *present(sinks, batch.shared_prefix_lens)]
        if len(kernels) == 1:
            return launch(kernels[0], [empty(q, T, H * D), _counting_scratch(q, kernels[0], words)], ins)[0]
        out, partial = launch(kernels[0], [empty(q, T, H * D), integers(q, words)], ins)
        return launch(kernels[1], [out, partial], [batch.context_lens, batch.decodes, *present(sinks)])[0]

    @of_op("attention_prefill")
    def attention_prefill(
        self, variant: str, out: Tensor | None, q: Tensor, cache: LayerCache, scale: float, window: int, batch: Batch,
        cap: float = 0.0, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        T, H, D = (int(d) for d in q.shape)
        a = Attention.of(q, cache, scale, window, batch, cap, sinks)
        kernel = plan.attention_prefill(variant, T - batch.num_decodes, batch.num_chunks, a)
        # the values' alias: a tensor that two kernels read after a store is copied, the whole pool
        ins = [q, cache.values, batch.block_tables, batch.context_lens, batch.query_starts, batch.chunks, *present(sinks)]
        return launch(kernel, [empty(q, T, H * D) if out is None else out], ins)[0]

    @of_op("matmul")
    def matmul(
        self, variant: str, x: Tensor, weight: KernelWeight, rows: Tensor, bias: Tensor | None, residual: Tensor | None, gelu: bool,
        output_norm: NormWeights | None = None, output_scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        weight = stored(weight)
        T, O, I = int(x.shape[0]), weight.O, weight.I
        if len(pieces := self._pieces(x, T)) > 1:
            parts = []
            for piece in pieces:
                own = None if residual is None else _rows_of(residual, piece)
                count, added = _count_of(rows, piece), _bias_of(bias, piece)
                parts.append(self.matmul(variant, _rows_of(x, piece), weight, count, added, own, gelu))
            return _joined(parts)
        product = Product(
            weight.format, T, O, I, bias=bias is not None, residual=residual is not None, gelu=gelu, bias_pitch=bias_pitch(bias)
        )
        sizes: list[Argument] = [4 * T * O, 4 * T * I, *tensors_of(weight), *map(_timed_with, present(bias))]
        sizes += [*([4 * T * O] if residual is not None else []), _count(T)]
        if plan.by_lanes(variant, T):
            kernel = _tuned(x, plan.cuts(T), lambda cut: plan.matvec(variant, product, cut), sizes)
        else:
            kernel = _by_matrices(variant, x, product, sizes)
        return launch(kernel, [empty(x, T, O)], [x, *tensors_of(weight), *present(bias, residual), rows])[0]

    @of_op("lora_bias")
    def lora_bias(
        self, variant: str, x: Tensor, norm: NormWeights | None, stack: AdapterStack, bias: Tensor | None, adapters: Tensor, rows: Tensor
    ) -> Tensor:
        return low_rank.lora_bias(launch, self.name, variant, x, norm, stack, bias, adapters, rows)

    @of_op("gated_delta")
    def gated_delta(self, variant: str, y: Tensor, weights: DeltaWeights, cache: StateCache, batch: Batch) -> Tensor:
        return recurrent.gated_delta(launch, self.name, variant, y, weights, cache, batch)

    @of_op("norm_gate_up_silu")
    def gate_up_silu(
        self, variant: str, x: Tensor, norm: NormWeights | None, weight: KernelWeight, rows: Tensor, bias: Tensor | None, gelu: bool = False
    ) -> Tensor:
        assert norm is not None, "limits.py"
        weight = stored(weight)
        T, E, F, eps = int(x.shape[0]), weight.I, weight.O // 2, constant(norm.eps)
        if len(pieces := self._pieces(x, T)) > 1:
            parts = []
            for piece in pieces:
                count, added = _count_of(rows, piece), _bias_of(bias, piece)
                parts.append(self.gate_up_silu(variant, _rows_of(x, piece), norm, weight, count, added))
            return _joined(parts)
        out, pitch = empty(x, T, F), bias_pitch(bias)
        for half, part, own in halves(weight, each_bias(bias, weight)):
            ins = [norm.weight, *tensors_of(part), *own]
            sizes: list[Argument] = [4 * T * F, 4 * T * E, norm.weight, *tensors_of(part), *map(_timed_with, own), _count(T)]
            if plan.by_lanes(variant, T):
                shape = variant, part.format, T, E, F, eps, bias is not None
                kernel_of = functools.partial(plan.norm_gate_up_silu, *shape, half=half, bias_pitch=pitch)
                kernel = _tuned(x, plan.cuts(T), functools.partial(_with_cut, kernel_of), sizes)
            else:
                both, up = half == "BOTH", half == "UP"
                product = Product(part.format, T, F, E, bias=bias is not None, silu=both, gated=up, eps=eps, bias_pitch=pitch)
                kernel = _by_matrices(variant, x, product, sizes)
            out = launch(kernel, [out], [x, *ins, rows])[0]
        return out

    @of_op("norm_head")
    def norm_head(
        self, variant: str, x: Tensor, norm: NormWeights, weight: KernelWeight, rows: Tensor, count: Tensor,
        divisor: float = 1.0, cap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        weight = stored(weight)
        N, V, eps = int(rows.shape[0]), weight.O, constant(norm.eps)
        if len(pieces := self._pieces(x, N)) > 1:
            heads = [self.norm_head(variant, x, norm, weight, _rows_of(rows, piece), _count_of(count, piece)) for piece in pieces]
            return _joined([logits for logits, _ in heads]), _joined([best for _, best in heads])
        index = np.zeros(N, np.int32)
        if plan.by_lanes(variant, N):
            shape, ins = (variant, weight.format, N, V, weight.I, eps), [x, norm.weight, *tensors_of(weight), rows, count]
            sizes: list[Argument] = [4 * N * V, 4 * weight.I, norm.weight, *tensors_of(weight), index, _count(N)]
            kernel = _tuned(x, plan.cuts(N), lambda cut: plan.norm_head(*shape, cut=cut), sizes)
        else:
            sizes = [4 * N * V, 4 * weight.I, norm.weight, index, *tensors_of(weight), _count(N)]
            ins = [x, norm.weight, rows, *tensors_of(weight), count]
            kernel = _by_matrices(variant, x, Product(weight.format, N, V, weight.I, eps=eps, gather=True), sizes)
        logits = launch(kernel, [empty(x, N, V)], ins)[0]
        first, second, parts = plan.argmax(variant, N, V)
        ranks, indices = launch(first, [integers(x, N, parts), integers(x, N, parts)], [logits, count])
        return logits, launch(second, [integers(x, N)], [ranks, indices, count])[0]

    @of_op("advance")
    def advance(self, variant: str, batch: Batch, sampled: Tensor, history: History, block_size: int) -> None:
        B, M = (int(d) for d in batch.block_tables.shape)
        outs = [batch.tokens, batch.positions, batch.slots, batch.context_lens, history.tokens, history.round]
        kernel = plan.advance(variant, B, M, block_size, int(history.tokens.shape[0]))
        Tensor.realize(*launch(kernel, outs, [sampled, batch.block_tables, batch.decodes]))

    @of_op("kv_copy")
    def copy_blocks(self, variant: str, pool: Tensor, pairs: Tensor, count: Tensor) -> Tensor:
        kernel = plan.kv_copy(variant, int(pairs.shape[0]), pool.nbytes() // int(pool.shape[0]))
        return launch(kernel, [pool], [pairs, count])[0]

    @of_op("sample")
    def sample(self, variant: str, logits: Tensor, draw: DrawInputs) -> Tensor:
        (B, V), seen = (int(d) for d in logits.shape), draw.seen or ()
        kernels, nbytes = plan.sample(variant, B, V, draw.neutral_row, draw.features)
        outs = [integers(logits, B), draw.lines, scratch(logits, nbytes), *seen[:1]]
        ins = [logits, *seen[1:], *present(draw.bias), draw.count]
        for kernel in kernels:  # each continues from the scratch of the one before
            outs = launch(kernel, outs, ins)
        tokens: Tensor = outs[0]
        return tokens

    def pack_tiles(self, variant: str, placement: Placement, rows: RowSource, format: str, I: int) -> Tensor:
        raise NotImplementedError("kernels: Metal reads rows of files, not tiles")


def _counting_scratch(like: Tensor, kernel: Kernel, words: int) -> Tensor:
    """Zeros that launches of the kernel share, leave and may report a fault in."""
    return _watched_zeros(Placement.of(like.device).device, kernel.stem, words)


def _watched_zeros(device: str, stem: str, words: int) -> Tensor:
    zeros = shared_zeros(device, words)
    memory = opaque_memory(zeros)
    queue_of(device).scratch.watch(stem, memory.buf.contents() + memory.offset, 4 * words)
    return name_process_tensor(zeros, "metal scratch", device, stem, words)


define_process_tensor("metal scratch", _watched_zeros)


def _tuned(x: Tensor, cuts: list[Cut], kernel_of: Callable[[Cut], Kernel], arguments: list[Argument]) -> Kernel:
    """The kernel with the fastest cut on this GPU; `arguments` as for TimedKernel, of the sizes that it will get."""
    device, default = Placement.of(x.device).device, kernel_of(cuts[0])
    shape = " ".join(f"{name}={value}" for name, value in default.defines if name not in plan.CUT_DEFINES)
    source = source_digest("metal", default.stem)
    timed = functools.partial(_timed, kernel_of, device, arguments)
    while len(cuts) > 1:
        cut = tuned(gpu_name(device), default.stem, shape, cuts, timed, source)
        try:
            require_runnable(kernel_of(cut), device)
            return kernel_of(cut)
        except UnusableKernelError as error:
            log.info("%s: %s; another cut is used", device, error.reason)
            cuts = [other for other in cuts if other != cut]
    return kernel_of(cuts[0])


def _with_cut(kernel_of: Callable[..., Kernel], cut: plan.Cut) -> Kernel:
    return kernel_of(cut=cut)


def _timed(kernel_of: Callable[[Cut], Kernel], device: str, arguments: list[Argument], cut: Cut) -> TimedKernel:
    return TimedKernel(kernel_of(cut), device, arguments)


def _rows_of(tensor: Tensor, piece: slice) -> Tensor:
    return tensor[piece].contiguous()


def _bias_of(bias: Tensor | None, piece: slice) -> Tensor | None:
    """The piece's own biases, or the one of all rows."""
    return _rows_of(bias, piece) if bias is not None and bias_pitch(bias) else bias


def _timed_with(argument: Tensor) -> Argument:
    """An argument for `_tuned`: what the step makes for each row is scratch of its size, as the model's own tensors are used themselves."""
    return argument.nbytes() if len(argument.shape) > 1 else argument


def _count_of(count: Tensor, piece: slice) -> Tensor:
    """How many rows of the piece count, where `count` [1] of all do."""
    own: Tensor = (count - piece.start).maximum(0).minimum(piece.stop - piece.start)
    return own.contiguous()


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0].cat(*parts[1:]).contiguous()


def _count(T: int) -> np.ndarray:
    return np.array([T], np.int32)


def _by_matrices(variant: str, x: Tensor, product: Product, arguments: list[Argument]) -> Kernel:
    """matmul, or matmul16 with its fastest cut if the variant has it for this many rows."""
    if not plan.by_matrix(variant, product.T):
        return plan.matmul(variant, product)
    return _tuned(x, [*plan.FRAGMENTS], lambda fragments: plan.matmul16(variant, product, fragments), arguments)
