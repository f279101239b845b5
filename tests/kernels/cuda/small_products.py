"""Launch plans of the CUDA kernels that multiply up to eight rows, for a GPU of a given number of multiprocessors."""

from __future__ import annotations

from tinyvllm.backends.cuda import plan as records
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.shapes import Heads, Product

VARIANT, EPS, QK_EPS = "sm_90", 1e-5, 1e-6


def _gpu(processors: int) -> records.GPU:
    return records.GPU(processors, 227 * 1024, 227 * 1024)


def matvec(T: int, O: int, I: int, format: str, bias: int = 0, residual: int = 0, activation: int = 0, processors: int = 132) -> Kernel:
    return records.matvec(VARIANT, Product(format, T, O, I, bool(bias), bool(residual), bool(activation)), _gpu(processors))


def norm_gate_up_silu(T: int, E: int, F: int, format: str, bias: int = 0, processors: int = 132) -> Kernel:
    return records.norm_gate_up_silu(VARIANT, format, T, E, F, _gpu(processors), f"{EPS}f", bool(bias))


def norm_qkv_rope_store(
    T: int, E: int, H: int, K: int, D: int, R: int, S: int, format: str, cache: str = "BF16", bias: int = 0, qk_norm: int = 0,
    processors: int = 132, others: tuple[int, ...] = (),
) -> Kernel:  # fmt: skip
    heads = Heads(H, K, D, S, R, cache, bool(bias), bool(qk_norm), f"{QK_EPS}f", others)
    return records.norm_qkv_rope_store(VARIANT, format, T, E, heads, _gpu(processors), f"{EPS}f")


def norm_head(T: int, E: int, V: int, format: str, processors: int = 132) -> Kernel:
    return records.norm_head(VARIANT, format, T, V, E, _gpu(processors), f"{EPS}f")
