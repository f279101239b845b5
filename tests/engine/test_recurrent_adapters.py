"""Adapters of a model with recurrent states: several in one batch, rows without one, and copies of states that belong to an adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny.adapters import merge, write_adapter
from tests.tiny.delta import write_delta_model
from tinyvllm import LLM, LoRARequest, SamplingParams
from tinyvllm.backends import registry
from tinyvllm.errors import ModelError

PROMPTS = [[(7 * i * i + 3 * n) % 250 + 3 for i in range(length)] for n, length in enumerate((37, 5, 64, 21))]
SCORED = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_delta_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(model, tmp_path_factory) -> list[LoRARequest]:
    """Of ranks 4 and 7; the second changes layers with states alone."""
    folder = tmp_path_factory.mktemp("adapters")
    delta = [f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_a", "out_proj")]
    write_adapter(folder / "first", model, seed=1, size=0.3)
    write_adapter(folder / "second", model, modules=delta, rank=7, seed=2, size=0.3)
    return [LoRARequest(name, lora_path=str(folder / name)) for name in ("first", "second")]


def open_llm(model: Path, **options) -> LLM:
    own = {"dtype": "float32", "max_model_len": 160, "max_num_seqs": 4, "max_loras": 2}
    return LLM(str(model), skip_tokenizer_init=True, enable_lora=True, **own | options)


@pytest.fixture(scope="module")
def llm(model) -> LLM:
    registry.forget_choices()
    return open_llm(model)


def answers(llm: LLM, prompts, lora, params: SamplingParams = SCORED) -> list[list[dict[int, float]]]:
    """The tokens with their log-probabilities, after those of the prompt if they are asked for."""
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, lora_request=lora)
    steps = [[*(output.prompt_logprobs or [None])[1:], *output.outputs[0].logprobs] for output in outputs]
    return [[{t: p.logprob for t, p in step.items()} for step in each] for each in steps]


@pytest.fixture(scope="module")
def mixed(adapters) -> list[LoRARequest | None]:
    return [adapters[0], None, adapters[1], adapters[0]]


@pytest.fixture(scope="module")
def alone(llm, mixed) -> list[list[dict[int, float]]]:
    """Each prompt with its adapter, run by itself."""
    return [answers(llm, [prompt], lora)[0] for prompt, lora in zip(PROMPTS, mixed, strict=True)]


def test_a_batch_of_several_adapters_changes_no_bit(llm, mixed, alone):
    """By kernels; the request without an adapter has the bits of a batch without adapters."""
    for _ in range(2):  # the second time from copies of states
        assert answers(llm, PROMPTS, mixed) == alone
    assert answers(llm, PROMPTS[1:2], None) == alone[1:2] and answers(llm, PROMPTS[:1], None) != alone[:1]
    chosen = {(choice.stem, choice.variant) for choice in registry.choices() if choice.stem in ("lora_bias", "gated_delta")}
    assert len(chosen) == 2 and "ref" not in dict(chosen).values()


def test_pieces_of_prompts_change_no_bit(model, mixed, alone):
    assert answers(open_llm(model, max_num_batched_tokens=16), PROMPTS, mixed) == alone


@pytest.mark.parametrize("which", [0, 1])
def test_tokens_are_those_of_merged_weights(which, llm, model, adapters, tmp_path):
    merged = merge(model, Path(adapters[which].lora_path), tmp_path / "merged", 8.0 / (4, 7)[which])
    params = replace(SCORED, prompt_logprobs=1)
    got, wanted = answers(llm, PROMPTS, adapters[which], params), answers(open_llm(merged), PROMPTS, None, params)
    assert got == [[pytest.approx(step, abs=2e-3) for step in each] for each in wanted] and got != answers(llm, PROMPTS, None, params)


def test_a_copy_of_a_state_belongs_to_an_adapter(llm, adapters):
    """The same prompt with another adapter or with none finds neither blocks nor states, and has the bits of a cold run."""
    prompt = {"prompt_token_ids": PROMPTS[2]}

    def run(lora: LoRARequest | None) -> tuple[int, list[int]]:
        (output,) = llm.generate([prompt], SCORED, lora_request=lora)
        return output.num_cached_tokens, list(output.outputs[0].token_ids)

    llm.engine.scheduler.prefix.reset()
    llm.engine.scheduler.states.snapshots.reset()  # there is room for a few copies
    cold = [run(lora) for lora in (None, *adapters)]
    assert [cached for cached, _ in cold] == [0, 0, 0] and len({tuple(tokens) for _, tokens in cold}) == 3
    assert [run(lora) for lora in (None, *adapters)] == [(48, tokens) for _, tokens in cold]
    llm.unload_lora("second")
    llm.load_lora("again", adapters[1].lora_path)
    assert run(LoRARequest("again")) == (48, cold[2][1]), "the same content under another name"
    llm.unload_lora("again")


@pytest.mark.long
@pytest.mark.parametrize("options", [{"num_scheduler_steps": 4}, {"num_blocks": 9}, {"quantization": "q8_0"}, {"dtype": "bfloat16"},
                                     {"speculative_config": "ngram"}, {"speculative_config": "off"}])  # fmt: skip
def test_adapters_on_other_engines(options, model, mixed, alone):
    """Several steps at a time, preemption, packed weights, with drafts and without: a batch gives what each gives alone."""
    llm = open_llm(model, **options)
    own = [answers(llm, [prompt], lora)[0] for prompt, lora in zip(PROMPTS, mixed, strict=True)]
    assert answers(llm, [*PROMPTS, *PROMPTS], [*mixed, *mixed]) == [*own, *own]
    assert own == alone or not options.keys() & {"speculative_config", "num_scheduler_steps", "num_blocks"}
    assert llm.engine.metrics.recomputed > 0 or "num_blocks" not in options


@pytest.mark.long
def test_stages_have_the_bits_of_one_process(model, adapters, mixed, alone):
    """Of ranks that divide heads, sixteen of values are too few for the kernels of adapters."""
    with open_llm(model, pipeline_parallel_size=2, speculative_config="off") as llm:
        assert answers(llm, PROMPTS, mixed) == alone
    with pytest.raises(ModelError, match="blk.0.attn_qkv.weight has 8 outputs in each of 2 ranks, and kernels of adapters take sixteens"):
        open_llm(model, tensor_parallel_size=2)
