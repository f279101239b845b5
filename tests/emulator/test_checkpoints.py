"""Quantized checkpoints on the emulated GPU: every matrix is packed, and greedy tokens are those of the dequantized model in float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.emulator.driver import cuda_device
from tests.engine import test_small_floats as small_floats
from tests.engine.test_packed_files import PRODUCTS, prompts_of
from tests.tiny import quantized
from tests.tiny.quantized import (
    Quantize,
    awq,
    awq_settings,
    gptq,
    gptq_settings,
    mlx,
    mlx_settings,
    plain,
    shuffled,
)  # fmt: skip
from tinyvllm import LLM, SamplingParams
from tinyvllm.backends import registry

LENGTHS = (5, 19)  # of prompts: few rows, many rows
TOKENS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@dataclass(frozen=True)
class Kind:
    """A checkpoint, the formats that its matrices have on the GPU, and a seed with which no greedy step is a near tie."""

    settings: dict[str, Any]
    quantize: Quantize
    formats: set[str]
    more: dict[str, Quantize] = field(default_factory=dict)
    seed: int = 1


ENDS = {"embed_tokens": mlx(4, 64), "lm_head": mlx(4, 64)}
ACT_ORDER = gptq_settings(4, 128, sym=False, dynamic={"+:.*v_proj": {"bits": 8}})
KINDS = {
    "gptq with v in 8 bits and act-order": Kind(
        ACT_ORDER, gptq(4, 128, False, index=shuffled), {"INT4_G128", "INT8_G128", "F16"}, {"v_proj": gptq(8, 128, index=shuffled)}
    ),
    "awq": Kind(awq_settings(64), awq(64), {"INT4_G64", "F16"}),
    "mlx with its ends, up in floats": Kind(mlx_settings(4, 64), mlx(4, 64), {"INT4_G64", "F16"}, ENDS | {"up_proj": plain}),
}  # fmt: skip
KINDS |= {name: Kind(config, way, formats, more, seed) for name, (config, way, more, formats, seed) in small_floats.KINDS.items()}
LONG = {*KINDS} - {"gptq with v in 8 bits and act-order", "nf4"}


@pytest.fixture(scope="module")
def driver():
    with cuda_device(seed=5) as driver:
        yield driver


def tokens(folder: Path, prompts: list[list[int]], formats: set[str]) -> list[list[int]]:
    registry.forget_choices()
    with LLM(folder / "quantized", device="CUDA", max_model_len=64, skip_tokenizer_init=True, max_num_seqs=2) as llm:
        assert llm.engine.runner.weight_formats == formats
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], [GREEDY] * len(prompts))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.long if kind in LONG else ()) for kind in KINDS])
def test_greedy_tokens_are_those_of_the_dequantized_model(driver, tmp_path, caplog, kind):
    known = KINDS[kind]
    folder = quantized.write(tmp_path, known.settings, known.quantize, known.more, known.seed)
    prompts = [ids[:length] for ids, length in zip(prompts_of(2, quantized.V), LENGTHS, strict=True)]
    got = tokens(folder, prompts, known.formats)
    products = [choice for choice in registry.choices("CUDA") if choice.stem in PRODUCTS and "load" not in choice.shape]
    assert {choice.variant for choice in products} == {"sm_80"}
    assert not [record for record in caplog.records if "become floats" in record.getMessage()]
    assert got == [quantized.greedy(folder, ids, TOKENS) for ids in prompts]
