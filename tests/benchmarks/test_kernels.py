"""Every kernel's argument list in the kernel benchmark is the one that the kernel reads: small sizes, no times."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from benchmarks import kernels
from tinyvllm.backends.registry import usable_variants
from tinyvllm.placement import Placement

TARGET = usable_variants(Placement("CPU"))[0]
SIZES = {"I": 64, "O": 96, "E": 64, "F": 96, "H": 4, "K": 2, "D": 32, "S": 16, "V": 320, "X": 4, "C": 2}


CACHED = ("norm_qkv_rope_store", "attention_decode", "attention_prefill", "kv_copy", "kv_append")
CASES = [(stem, weight, "BF16", T) for stem in kernels.STEMS for weight in ("BF16", "Q4_0") for T in (1, 5)]
CASES += [(stem, "BF16", cache, 5) for stem in CACHED for cache in ("KV_INT8", "KV_INT4")]


@pytest.mark.parametrize("stem, weight, cache, T", CASES)
def test_runs(stem: str, weight: str, cache: str, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DISTINCT", 1)
    options = argparse.Namespace(**SIZES, T=T, weight=weight, cache=cache, context=70, target=TARGET)
    work = kernels.STEMS[stem](options)
    assert len(work.arguments) == work.kernel.outs + work.kernel.ins
    runner = kernels.Runner(work, 2)
    runner.run(3)
    out = runner.sets[0] if work.place == 0 else work.arguments[0]
    values = out.view(np.float32) if out.dtype == np.float32 else out
    assert np.isfinite(values).all() and np.any(values)
