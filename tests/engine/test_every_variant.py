"""Every feature of the engine on every kernel variant that can be forced, the reference among them, also compiled for older processors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyvllm import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from tinyvllm.backends import registry
from tinyvllm.backends.cpu.toolchain import cpu_features
from tinyvllm.placement import Placement

LENGTHS = (40, 33, 17, 25, 48, 5)
PENALTIES = dict(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, logit_bias={97: 2.0}, bad_words=["e"], min_tokens=3)
FILTERS = dict(top_k=40, top_p=0.95, min_p=0.001)
_AVX2 = {"avx2", "fma", "f16c"} <= cpu_features()
# what runs the ops, what tinygrad compiles generated kernels for (None: this processor), and the dtype
CASES = [
    *((variant, None, "bfloat16") for variant in registry.usable_variants(Placement("CPU"))),
    *(("ref", None, dtype) for dtype in ("bfloat16", "float16", "float32")),
    *(("ref", target, "bfloat16") for target in ("x86-64-v3", "x86-64-v2") if _AVX2),
    *(("ref", "x86-64-v2", "float16") for _ in range(_AVX2)),  # without F16C
]


def prompt(i: int) -> dict[str, Any]:
    return {"prompt_token_ids": [256, *np.random.default_rng(i).integers(32, 127, LENGTHS[i] - 1).tolist()]}


def sampled(seed: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=20, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def wide_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with half as many heads, twice as wide: attention has kernels for 32 columns and more."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2, "num_key_value_heads": 1}))
    return folder


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(str(part) for part in case if part))
def llm(request: pytest.FixtureRequest, wide_model: Path) -> Iterator[LLM]:
    from tinygrad import helpers

    variant, target, dtype = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYVLLM_KERNELS", f"all={variant}")
        if target is not None:
            patch.setattr(helpers.DEV, "_value", [helpers.Target.parse(f"CPU::x86_64,{target}")])
        registry.forget_choices()
        options: dict[str, Any] = dict(num_blocks=14, swap_space="1MB", preemption_mode="swap", max_num_batched_tokens=32)
        with LLM(wide_model, device="CPU", dtype=dtype, max_model_len=128, max_num_seqs=8, **options) as llm:
            yield llm
            assert {choice.variant for choice in registry.choices()} == {variant}
            pool = llm.engine.scheduler.pool
            assert pool.num_free == pool.num_blocks


def tokens(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    return [part.token_ids for output in llm.generate(prompts, params) for part in output.outputs]


def continuations(llm: LLM) -> None:
    assert tokens(llm, prompt(1), sampled(7, n=3)) == [tokens(llm, prompt(1), sampled(7 + i))[0] for i in range(3)]


def beams(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=18)
    first, again = llm.beam_search([prompt(1), prompt(1)], params)
    found = [part.token_ids for part in first.outputs]
    assert len({tuple(ids) for ids in found}) == 3 and found == [part.token_ids for part in again.outputs]


def prefix_hits(llm: LLM) -> None:
    first, again = (llm.generate(prompt(0), sampled(3))[0] for _ in range(2))
    assert again.num_cached_tokens == 32 and first.outputs[0].token_ids == again.outputs[0].token_ids


def swaps(llm: LLM) -> None:
    before, indices = llm.engine.scheduler.num_swaps, range(len(LENGTHS))
    together = tokens(llm, [prompt(i) for i in indices], [sampled(i) for i in indices])
    assert llm.engine.scheduler.num_swaps > before, "the test is meant to preempt"
    assert together == [tokens(llm, prompt(i), sampled(i))[0] for i in indices]


def filters_and_penalties(llm: LLM) -> None:
    alone = tokens(llm, prompt(2), sampled(5, **PENALTIES, **FILTERS))
    mixed = tokens(llm, [prompt(3), prompt(2)], [sampled(1), sampled(5, **PENALTIES, **FILTERS)])
    assert alone[0] == mixed[1] and ord("e") not in alone[0]


def logprobs(llm: LLM) -> None:
    (output,) = llm.generate(prompt(3), sampled(2, logprobs=3, prompt_logprobs=2))
    scores, of_prompt = output.outputs[0].logprobs, output.prompt_logprobs
    assert scores is not None and of_prompt is not None and len(of_prompt) == LENGTHS[3]
    assert all(len(each) in (3, 4) and all(p.logprob <= 0 for p in each.values()) for each in scores)


def grammars(llm: LLM) -> None:
    (output,) = llm.generate("Say:", sampled(4, structured_outputs=StructuredOutputsParams(regex="(red|blue)-[0-9]{3}")))
    assert output.outputs[0].text[:3] in ("red", "blu") and output.outputs[0].text[-3:].isdigit()


def embeddings(llm: LLM) -> None:
    assert np.isfinite(llm.embed("words")).all()


FEATURES: list[Callable[[LLM], None]] = [
    continuations, beams, prefix_hits, swaps, filters_and_penalties, logprobs, grammars, embeddings,
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_every_feature_works_on_every_variant(llm: LLM, feature: Callable[[LLM], None]) -> None:
    feature(llm)
