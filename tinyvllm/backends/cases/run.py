"""Launches of the cases, and the comparison of their results with the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tinyvllm.backends.cases.adapters import lora_bias
from tinyvllm.backends.cases.attention import attention_decode, attention_prefill, kv_append, kv_copy
from tinyvllm.backends.cases.case import TESTED, Case
from tinyvllm.backends.cases.expected import computed_answer
from tinyvllm.backends.cases.experts import experts_down, experts_gate_up_silu, norm_route
from tinyvllm.backends.cases.inputs import OTHER_BITS, PERIOD, Arrays, repeated
from tinyvllm.backends.cases.products import embed, matmul, norm_gate_up_silu, norm_head, norm_qkv_rope_store, pack_tiles
from tinyvllm.backends.cases.site import Site
from tinyvllm.backends.cases.states import gated_delta
from tinyvllm.backends.cases.tokens import advance, sample

Run = Callable[[Site, Case], list[Arrays]]
CASES: Mapping[str, Run] = {
    "embed": embed,
    "norm_qkv_rope_store": norm_qkv_rope_store,
    "kv_append": kv_append,
    "attention_decode": attention_decode,
    "attention_prefill": attention_prefill,
    "matmul": matmul,
    "norm_gate_up_silu": norm_gate_up_silu,
    "lora_bias": lora_bias,
    "gated_delta": gated_delta,
    "norm_route": norm_route,
    "experts_gate_up_silu": experts_gate_up_silu,
    "experts_down": experts_down,
    "norm_head": norm_head,
    "advance": advance,
    "kv_copy": kv_copy,
    "sample": sample,
    "pack_tiles": pack_tiles,
}
assert CASES.keys() == TESTED


def run(case: Case, site: Site) -> list[Arrays]:
    """Launch the case's kernels and return their results, one array a batch and name."""
    return CASES[case.stem](site, case)


def wrong(case: Case, results: list[Arrays], answers: Mapping[str, np.ndarray]) -> str | None:
    """Why the results are not the recorded ones, with the largest error; None if they are."""
    computed = None if case.is_recorded else computed_answer(case)
    for arrays in results:
        for name, got in arrays.items():
            if name == OTHER_BITS:
                if got.any():
                    return f"{int(got[0])} numbers have other bits than those of the kernel that it replaces"
                continue
            want = answers[f"{case.answer}/{name}"] if computed is None else computed[name]
            tolerance = case.tolerances.get(name, 0.0)
            want = repeated(want, len(got)) if len(want) == PERIOD else want
            if got.shape != want.shape:
                return f"{name} has the shape {got.shape}, expected {want.shape}"
            if not np.isfinite(got).all():
                return f"{name} of {len(got)} rows is not finite in {int((~np.isfinite(got)).sum())} of {got.size} numbers"
            error, most = float(np.abs(got.astype(np.float64) - want).max()), tolerance * float(np.abs(want).max())
            if error > most:
                return f"largest error {error:.2g} in {name} of {len(got)} rows, expected at most {most:.2g}"
    return None
