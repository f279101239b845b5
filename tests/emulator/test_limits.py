"""An emulated GPU that is too small, and one that two engines share."""

from __future__ import annotations

import threading

import pytest

from tests.emulator.driver import cuda_device
from tinyvllm import LLM, SamplingParams
from tinyvllm.config.engine import DEFAULT_MODEL as MODEL
from tinyvllm.errors import OutOfMemoryError

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_a_model_that_does_not_fit_is_rejected_with_advice():
    with (
        cuda_device(capacity=8 << 20),
        pytest.raises(OutOfMemoryError, match="the weights need 13 MiB, 8 MiB can be allocated .*; use a smaller"),
    ):
        LLM(MODEL, device="CUDA", max_model_len=128, num_blocks=8)


def test_two_engines_capture_in_two_threads(tiny_model):
    with cuda_device(seed=1):
        engines = [LLM(tiny_model, device="CUDA", dtype="bfloat16", max_model_len=128, max_num_seqs=4) for _ in range(2)]
        results: list[list[int]] = [[], []]

        def answer(i: int) -> None:
            results[i] = engines[i].generate(["Once upon a time"], PARAMS)[0].outputs[0].token_ids

        threads = [threading.Thread(target=answer, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results[0] == results[1] and len(results[0]) == 4
        while engines:  # graphs must be freed before their driver
            engines.pop().close()
