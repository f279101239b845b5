"""Quantized checkpoints in the engine: greedy tokens of the same model in float32, every matrix computed as packed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engine.test_kernels import greedy, kernels, prompts_of
from tests.engine.test_packed_files import formats_read
from tests.tiny import quantized
from tests.tiny.quantized import gptq, gptq_settings
from tinyvllm import LLM
from tinyvllm.backends import registry
from tinyvllm.engine.tools.verify import verify
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import GROUPED

KINDS = {"gptq": (gptq_settings(4, 128, sym=False), gptq(4, 128, False))}


def open_folder(path: Path, **options) -> LLM:
    return LLM(path, device="CPU", max_model_len=160, skip_tokenizer_init=True, max_num_seqs=2, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_the_dequantized_model(tmp_path, kind):
    settings, quantize = KINDS[kind]
    folder, prompts = quantized.write(tmp_path, settings, quantize), prompts_of(2, quantized.V)
    with kernels("ref"), open_folder(folder / "floats") as llm:
        want = greedy(llm, prompts, 12)
    with kernels(registry.usable_variants(Placement("CPU"))[0]), open_folder(folder / "quantized") as llm:
        report = verify(llm.engine, [{"prompt_token_ids": prompts[0]}], steps=2)
        got = greedy(llm, prompts, 12)
        assert formats_read() <= {*GROUPED, "F16"} and formats_read() & {*GROUPED}
    assert report.fine, report
    np.testing.assert_array_equal([ids for ids in got], [ids for ids in want])
