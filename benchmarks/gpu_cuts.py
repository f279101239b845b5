"""What each cut and split of matmul.cu takes on this GPU (plan.CUTS), for the products of Llama-3.2-1B and Llama-3.1-8B: the cost model
of plan.py is fitted to it, and tests/backends/cuda/test_plan.py holds its choices against the records.

    python -m benchmarks.gpu_cuts --rows 16,64 --format BF16
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu import NVIDIA
from benchmarks.gpu_figures import gpu, start
from benchmarks.harness import record

PRODUCTS = {"1b qkv": (3072, 2048), "1b o": (2048, 2048), "1b gate and up": (16384, 2048), "1b down": (2048, 8192),
            "8b qkv": (6144, 4096), "8b o": (4096, 4096), "8b down": (4096, 14336)}  # fmt: skip
TRIED, SLOWER = 16, 2.5  # of each product: how many cuts, and how much slower than the best the model may expect them


def likely(O: int, I: int, T: int, format: str, machine: Any) -> list[tuple[Any, int]]:
    """The cuts and splits that may be the fastest, by the model's order."""
    from tinyvllm.backends.cuda import plan
    from tinyvllm.integers import ceil_div

    pieces = ceil_div(I, plan.PIECE)
    splits = [n for n in range(1, min(pieces, 16) + 1) if (n - 1) * ceil_div(pieces, n) < pieces]
    known = [(c, n) for c in plan.CUTS if plan.stages_of(c, format, machine) >= 2 for n in splits if plan.has_registers(c, n, format)]
    cost = {cut: plan.cycles_of(*cut, O, T, I, format, machine) for cut in known if cut[0].tile_t <= max(T, 16)}
    return [cut for cut in sorted(cost, key=lambda cut: cost[cut]) if cost[cut] < SLOWER * min(cost.values())][:TRIED]


@contextlib.contextmanager
def _chosen(cut: tuple[Any, int]) -> Iterator[None]:
    from tinyvllm.backends.cuda import plan

    before, plan.choice_of_cut = plan.choice_of_cut, lambda *arguments: cut  # type: ignore[assignment]
    try:
        yield
    finally:
        plan.choice_of_cut = before


def measure(rows: list[int], format: str) -> Iterator[dict[str, Any]]:
    """A record of each product, number of rows, cut and split."""
    from benchmarks.gpu_ops import DISTINCT, MOST_SETS, Effort, Op, bytes_of, captured, device_seconds, floats, int32, tile_weight
    from tinyvllm.backends.cuda import plan
    from tinyvllm.backends.cuda.driver import gpu_of
    from tinyvllm.backends.cuda.launch import compile_ahead
    from tinyvllm.backends.shapes import Product
    from tinyvllm.ops.linear import linear
    from tinyvllm.placement import Placement

    def product(O: int, I: int, T: int, weights: list[Any]) -> Op:
        x, count, left = floats(T, I), int32([T]), iter(weights)

        def make(kernel: bool) -> Any:
            weight = next(left)
            return lambda: linear(x, weight, count)

        return Op("product", "matmul", make, bytes_of(format, O, I), 2 * T * O * I)

    machine = gpu_of(Placement("CUDA"))
    jobs = [(name, O, I, T, likely(O, I, T, format, machine)) for name, (O, I) in PRODUCTS.items() for T in rows]
    compile_ahead((plan.matmul(plan.BASE, Product(format, T, O, I), machine, cut)[0] for _, O, I, T, cuts in jobs for cut in cuts), "CUDA")
    weights: list[Any] = []
    for name, O, I, T, cuts in jobs:
        if rows[0] == T:
            weights = [tile_weight(format, O, I) for _ in range(max(1, min(MOST_SETS, DISTINCT // bytes_of(format, O, I))))]
        sets = len(weights)
        for cut, split in cuts:
            with _chosen((cut, split)):
                seconds = device_seconds(captured(product(O, I, T, weights), True, sets), Effort(3, 0.003)) / sets
            yield {"what": name, "O": O, "I": I, "rows": T, "format": format, "us": round(1e6 * seconds, 2), "split": split,
                   "cut": [cut.tile_o, cut.tile_t, cut.warps_o, cut.warps_t, cut.warps_k, cut.resident]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="what each cut of a large product takes")
    parser.add_argument("--rows", type=lambda text: [int(word) for word in text.split(",")], default=[16, 64])
    parser.add_argument("--format", default="BF16")
    options = parser.parse_args()
    start(argparse.Namespace(machine=NVIDIA))
    for line in measure(options.rows, options.format):
        record("gpu_cuts", {**gpu(), **line})


if __name__ == "__main__":
    main()
