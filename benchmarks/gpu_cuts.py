"""What each cut and split of matmul.cu takes on this GPU (plan.CUTS), or of matmul_hopper.cu (hopper_plan.CUTS), for the products of
Llama-3.2-1B, Llama-3.1-8B and Qwen3-0.6B: the cost models are fitted to it, and tests/backends/cuda/test_plan.py holds their choices
against the records.

    python -m benchmarks.gpu_cuts --rows 16,64 --format BF16
    python -m benchmarks.gpu_cuts --rows 16,64,256 --hopper

The seconds are those of the product and of what prepares its x.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu import NVIDIA
from benchmarks.gpu_figures import gpu, start
from benchmarks.harness import record

PRODUCTS = {"1b qkv": (3072, 2048), "1b o": (2048, 2048), "1b gate and up": (16384, 2048), "1b down": (2048, 8192),
            "8b qkv": (6144, 4096), "8b o": (4096, 4096), "8b down": (4096, 14336), "0.6b o": (1024, 2048),
            "0.6b down": (1024, 3072)}  # fmt: skip
TRIED, SLOWER = 16, 2.5  # of each product: how many cuts, and how much slower than the best the model may expect them


Choice = tuple[Any, int]  # a cut and a split


@dataclass(frozen=True)
class Kind:
    """A kernel of large products: its module of plans, the variant that has it, and what a record says of a cut."""

    plans: Any
    variant: str
    fields: Callable[[Any], list[int]]
    known: Callable[[int, str, Any], list[Choice]]
    cycles: Callable[[Choice, int, int, int, str, Any], float]
    kernel: Callable[[Any, Any, Choice], Any]


def kind_of(hopper: bool) -> Kind:
    from tinyvllm.backends.cuda import hopper_plan, plan

    if hopper:
        hopper_plan.LEAST_ROWS = 16
        return Kind(
            hopper_plan, hopper_plan.HOPPER, lambda cut: [cut.tile_o, cut.tile_t, cut.resident],
            lambda I, _, machine: hopper_plan.known_cuts(I, False, machine),
            lambda choice, O, T, I, _, machine: hopper_plan.cycles_of(*choice, O, T, I, machine),
            lambda product, machine, choice: hopper_plan.matmul_hopper(hopper_plan.HOPPER, product, machine, choice)[0],
        )  # fmt: skip
    return Kind(
        plan, plan.BASE, lambda cut: [cut.tile_o, cut.tile_t, cut.warps_o, cut.warps_t, cut.warps_k, cut.resident],
        lambda I, format, machine: plan.known_cuts(I, format, False, machine),
        lambda choice, O, T, I, format, machine: plan.cycles_of(*choice, O, T, I, format, machine),
        lambda product, machine, choice: plan.matmul(plan.BASE, product, machine, choice)[0],
    )  # fmt: skip


def likely(kind: Kind, O: int, I: int, T: int, format: str, machine: Any) -> list[Choice]:
    """The cuts and splits that may be the fastest, by the model's order."""
    known = [choice for choice in kind.known(I, format, machine) if choice[0].tile_t <= max(T, 16)]
    cost = {choice: kind.cycles(choice, O, T, I, format, machine) for choice in known}
    return [choice for choice in sorted(cost, key=lambda choice: cost[choice]) if cost[choice] < SLOWER * min(cost.values())][:TRIED]


@contextlib.contextmanager
def _chosen(kind: Kind, choice: Choice) -> Iterator[None]:
    before, kind.plans.choice_of_cut = kind.plans.choice_of_cut, lambda *arguments: choice
    try:
        yield
    finally:
        kind.plans.choice_of_cut = before


def measure(rows: list[int], format: str, hopper: bool) -> Iterator[dict[str, Any]]:
    """A record of each product, number of rows, cut and split."""
    from benchmarks.gpu_ops import DISTINCT, MOST_SETS, Effort, Op, bytes_of, captured, device_seconds, floats, int32, tile_weight
    from tinyvllm.backends.cuda.driver import gpu_of
    from tinyvllm.backends.cuda.launch import compile_ahead
    from tinyvllm.backends.shapes import Product
    from tinyvllm.ops.linear import linear
    from tinyvllm.placement import Placement

    kind = kind_of(hopper)

    def product(O: int, I: int, T: int, weights: list[Any]) -> Op:
        x, count, left = floats(T, I), int32([T]), iter(weights)

        def make(kernel: bool) -> Any:
            weight = next(left)
            return lambda: linear(x, weight, count)

        return Op("product", "matmul", make, bytes_of(format, O, I), 2 * T * O * I, f"matmul={kind.variant}")

    machine = gpu_of(Placement("CUDA"))
    jobs = [(name, O, I, T, likely(kind, O, I, T, format, machine)) for name, (O, I) in PRODUCTS.items() for T in rows]
    compile_ahead((kind.kernel(Product(format, T, O, I), machine, choice) for _, O, I, T, cuts in jobs for choice in cuts), "CUDA")
    weights: list[Any] = []
    for name, O, I, T, cuts in jobs:
        if rows[0] == T:
            weights = [tile_weight(format, O, I) for _ in range(max(1, min(MOST_SETS, DISTINCT // bytes_of(format, O, I))))]
        sets = len(weights)
        for cut, split in cuts:
            with _chosen(kind, (cut, split)):
                seconds = device_seconds(captured(product(O, I, T, weights), True, sets), Effort(3, 0.003)) / sets
            yield {"what": name, "O": O, "I": I, "rows": T, "format": format, "us": round(1e6 * seconds, 2), "split": split,
                   "cut": kind.fields(cut), **({"variant": kind.variant} if hopper else {})}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="what each cut of a large product takes")
    parser.add_argument("--rows", type=lambda text: [int(word) for word in text.split(",")], default=[16, 64])
    parser.add_argument("--format", default="BF16")
    parser.add_argument("--hopper", action="store_true", help="the cuts of matmul_hopper.cu")
    options = parser.parse_args()
    start(argparse.Namespace(machine=NVIDIA))
    for line in measure(options.rows, options.format, options.hopper):
        record("gpu_cuts", {**gpu(), **line})


if __name__ == "__main__":
    main()
