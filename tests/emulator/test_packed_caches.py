"""A file of mixed formats together with a packed KV cache on the emulated GPUs: a request has the same tokens alone, in a batch, from the
prefix cache, and after a preemption."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.emulator.driver import cuda_device
from tests.emulator.metal_runtime import metal_device
from tests.engine.test_packed_files import write_model
from tests.engine.test_packed_weights_and_caches import COUNT, SCARCE, load, require_kernels, run
from tinyvllm.backends import registry
from tinyvllm.request import RequestOutput

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["CUDA", "METAL"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    opened: AbstractContextManager[Any] = cuda_device(seed=5) if request.param == "CUDA" else metal_device()
    with opened:
        yield request.param


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_request_has_the_same_tokens(device: str, kind: str, tmp_path: Path) -> None:
    path, everything = write_model(tmp_path, "Q4_K_M"), list(range(COUNT))
    registry.forget_choices()
    with load(path, kind, device) as llm:
        alone = [tokens(run(llm, [i]))[0] for i in everything]
        require_kernels(llm, device)
        assert tokens(run(llm, everything)) == alone, "together"
    with load(path, kind, device, enable_prefix_caching=True, max_num_batched_tokens=24) as llm:
        assert tokens(run(llm, everything)) == alone, "in chunks"
        outputs = run(llm, everything)
        assert all(output.num_cached_tokens for output in outputs) and tokens(outputs) == alone
    with load(path, kind, device, num_blocks=SCARCE, preemption_mode="recompute") as llm:
        outputs = run(llm, everything)
        assert sum(output.metrics.preemptions for output in outputs) and tokens(outputs) == alone, "after a preemption"
