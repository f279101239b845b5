"""Whole GGUF files in packed formats on the emulated Mac, mixed as converters mix them: every matrix stays as the file has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulator.metal_runtime import metal_device
from tests.engine.test_kernels import prompts_of
from tests.engine.test_packed_files import MIXES, V, formats_read, matrices_of, write_model
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry

OPTIONS: dict[str, Any] = dict(max_model_len=128, max_num_seqs=2, seed=0, skip_tokenizer_init=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
# No greedy step of any mix is a near tie: the best logit leads by 0.15, and 16-bit keys and values move it by less than 0.01.
PROMPTS = [{"prompt_token_ids": prompts_of(2, V)[1][start:end]} for start, end in ((0, 20), (48, 53))]
ANYTIME = ("Q4_K_M",)  # parts of one product in several formats; the other files are `long`


@pytest.fixture(scope="module")
def mac():
    with metal_device() as runtime:
        yield runtime


def tokens(llm: LLM) -> list[list[int]]:
    """Of prompts that are computed by matrices and by lanes."""
    return [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("mix", [mix if mix in ANYTIME else pytest.param(mix, marks=pytest.mark.long) for mix in MIXES])
def test_a_packed_file_gives_the_tokens_of_its_exact_weights(mac, tmp_path: Path, mix: str) -> None:
    """Metal does not round x: logits are those of the unpacked weights but for the order of sums, and keys and values in 16 bits."""
    for name in ("packed", "unpacked"):
        (tmp_path / name).mkdir()
    packed, unpacked = write_model(tmp_path / "packed", mix), write_model(tmp_path / "unpacked", mix, unpacked=True)
    with LLM(unpacked, device="CPU", dtype="float32", **OPTIONS) as cpu:
        logits, expected = cpu.prompt_logits(PROMPTS[0]["prompt_token_ids"]), tokens(cpu)
    registry.forget_choices()
    with LLM(packed, device="METAL", **OPTIONS) as gpu:
        found = gpu.prompt_logits(PROMPTS[0]["prompt_token_ids"])
        assert tokens(gpu) == expected
        assert {choice.variant for choice in registry.choices("METAL")} == {"apple7"}
        assert formats_read("METAL") <= {format for format, _ in matrices_of(mix).values()}
        assert gpu.engine.runner.weight_bytes < 1.02 * packed.stat().st_size
        assert LLM(packed, device="METAL", speed=False, **OPTIONS, plan=True).plan.sizes.memory.weights == gpu.engine.runner.weight_bytes
    error, size = np.abs(found - logits), np.abs(logits).max()
    assert error.max() < 1e-2 * size and error.mean() < 1e-3 * size
