"""What the hand-written kernels bring over tinygrad's own code, op by op: the same op on bfloat16 weights, as kernel and as reference.

The reference is the op's plain tinygrad expression on plain tensors, captured and replayed as the kernel is: what a device without
kernels runs. The weights of one op are larger than the caches of most machines, but each round reads the same ones.

    python -m benchmarks.reference [--shape tinyllama-1.1b] [--rows 1] [--context 256]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.harness import record, spread, table, take_turns
from benchmarks.shapes import DENSE, SHAPES

Make = Callable[[bool], Callable[[], Any]]  # True: with the kernel's weights; gives the lazy op


def floats(*shape: int) -> Any:
    from tinygrad import Tensor

    return Tensor(np.random.default_rng(len(shape)).standard_normal(shape, np.float32)).realize()


def weight(O: int, I: int, packed: bool) -> Any:
    """Random bfloat16 weights [O, I], in panels or as a tensor."""
    from tinygrad import Tensor, dtypes

    from tinyvllm.ops.linear import TensorWeight
    from tinyvllm.quant.codecs import f32_to_bf16
    from tinyvllm.quant.layouts import PackedWeight, pack_panels
    from tinyvllm.weights.memory import adopt

    bits = f32_to_bf16(np.random.default_rng(O).standard_normal((O, I), np.float32) * np.float32(0.02))
    if not packed:
        return TensorWeight((adopt(bits, "CPU", dtypes.bfloat16),))
    tensor: Tensor = adopt(pack_panels("BF16", bits.view(np.uint8)), "CPU", dtypes.uint8)
    return PackedWeight(tensor, "BF16", O, I)


def decode_batch(T: int, context: int, S: int) -> Any:
    """A batch of T decodes that hold `context` tokens each, as the ops see it."""
    from tinygrad import Tensor

    def ints(values: Any) -> Tensor:
        return Tensor(np.asarray(values, np.int32)).realize()

    M = -(-context // S)
    return SimpleNamespace(
        shared_prefix_lens=None,
        positions=ints([context - 1] * T), slots=ints([t * M * S + context - 1 for t in range(T)]), rows=ints([T]), decodes=ints([T]),
        block_tables=ints(np.arange(T * M).reshape(T, M)), query_starts=ints(range(T + 1)), context_lens=ints([context] * T),
        chunks=ints([T, 0]), samples=ints(range(T)), sample_count=ints([T]), num_blocks=M, num_decodes=T, num_chunks=0, max_query=1,
        tokens=ints([0] * T),
    )  # fmt: skip


def ops(c: dict[str, Any], T: int, context: int) -> dict[str, Make]:
    from tinygrad import Tensor, dtypes

    from tinyvllm.batch import LayerCache
    from tinyvllm.bridge import alias
    from tinyvllm.ops.attention import PagedAttention
    from tinyvllm.ops.head import norm_head
    from tinyvllm.ops.linear import gate_up_silu, linear
    from tinyvllm.ops.norm import Norm
    from tinyvllm.ops.qkv import QKV, norm_qkv_rope_store

    E, F, H, K, V = (c[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"))
    D, S = c.get("head_dim") or E // H, 16
    batch = decode_batch(T, context, S)
    pool = Tensor.zeros(T * -(-context // S) + 1, 2, K, S, D, dtype=dtypes.bfloat16).contiguous().realize()
    cache = LayerCache(pool, alias(pool))
    x, h, o, q, angles = floats(T, E), floats(T, F), floats(T, H * D), floats(T, H, D), floats(T, D)
    norm = Norm("RMS", floats(E), 1e-5)

    def product(O: int, I: int, call: Callable[[Any], Any]) -> Make:
        def make(packed: bool) -> Callable[[], Any]:
            w = weight(O, I, packed)
            return lambda: call(w)

        return make

    return {
        "norm_qkv_rope_store": product((H + 2 * K) * D, E, lambda w: norm_qkv_rope_store(x, norm, QKV(w), angles, cache, batch)[0]),
        "attention_decode": lambda packed: lambda: PagedAttention(batch, S)(q, cache, D**-0.5),
        "matmul, attention's output": product(E, H * D, lambda w: linear(o, w, batch.rows, residual=x)),
        "norm_gate_up_silu": product(2 * F, E, lambda w: gate_up_silu(x, norm, w, batch.rows)),
        "matmul, down": product(E, F, lambda w: linear(h, w, batch.rows, residual=x)),
        "norm_head": product(V, E, lambda w: norm_head(x, norm, w, batch.samples, batch.sample_count)[0]),
    }


def captured(make: Make, kernel: bool) -> Callable[[], None]:
    from tinygrad import Tensor

    from benchmarks.gpu_ops import kernels
    from tinyvllm.bridge import Captured, synchronize

    with kernels(os.environ.get("TINYVLLM_KERNELS") if kernel else "all=ref"):
        op = make(kernel)

        def run() -> Tensor:
            result: Tensor = op().contiguous().realize()
            return result

        step = Captured(run)
        step()

    def once() -> None:
        for _ in range(4):
            step()
        synchronize("CPU")

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description="kernels against tinygrad's own code, op by op")
    parser.add_argument("--shape", choices=DENSE, default="tinyllama-1.1b")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    from tinyvllm.config.switches import cache_folder
    from tinyvllm.runner.device import start_device

    start_device("CPU", cache_folder())
    lines, figures = [], {}
    for name, make in ops(SHAPES[options.shape], options.rows, options.context).items():
        timed = take_turns({"kernel": captured(make, True), "reference": captured(make, False)}, options.rounds)
        kernel, reference = spread(timed["kernel"]).divided(4), spread(timed["reference"]).divided(4)
        ratio = reference.median / kernel.median
        slow, fast = reference.median * 1e6, kernel.median * 1e6
        lines.append([name, f"{slow:.0f}", f"{fast:.0f}", f"{ratio:.1f}", f"{kernel.quiet}/{kernel.rounds}"])
        figures[name] = {"reference_us": round(slow, 1), "kernel_us": round(fast, 1), "faster": round(ratio, 2)}
    print(table(["op", "tinygrad, us", "kernel, us", "faster", "quiet rounds"], lines))
    record("reference", {"shape": options.shape, "rows": options.rows, "context": options.context, "ops": figures})


if __name__ == "__main__":
    main()
