"""The promise that a request's tokens do not depend on batches, chunks or preemption, and what a step must not lose."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tinyvllm import LLM, SamplingParams
from tinyvllm.errors import RequestError

LENGTHS = (3, 40, 17, 1, 64, 9, 33, 5, 25, 12)
LONG = 24


def prompts() -> list[dict]:
    random = np.random.default_rng(5)
    return [{"prompt_token_ids": [256, *random.integers(32, 127, n).tolist()]} for n in LENGTHS]


def params(i: int, seeded: bool) -> SamplingParams:
    if not seeded:
        return SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    filters: list[dict] = [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}][i % 5]
    return SamplingParams(temperature=0.5 + 0.1 * i, seed=1000 + i, max_tokens=LONG, ignore_eos=True, **filters)


def tokens(llm: LLM, seeded: bool, indices: range) -> list[list[int]]:
    everything = prompts()
    outputs = llm.generate([everything[i] for i in indices], [params(i, seeded) for i in indices])
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(tiny_model):
    """What each of the ten requests gives when it has the engine for itself."""
    with LLM(tiny_model, max_model_len=128, max_num_seqs=1, max_num_batched_tokens=128) as llm:
        return {seeded: [tokens(llm, seeded, range(i, i + 1))[0] for i in range(len(LENGTHS))] for seeded in (False, True)}


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_ten_together_equal_ten_alone(tiny_model, alone, seeded):
    with LLM(tiny_model, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64) as llm:
        assert tokens(llm, seeded, range(len(LENGTHS))) == alone[seeded]


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_with_blocks_so_scarce_that_sequences_are_preempted(tiny_model, alone, seeded):
    with LLM(tiny_model, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=32, num_blocks=12) as llm:
        outputs = llm.generate(prompts(), [params(i, seeded) for i in range(len(LENGTHS))])
        assert [output.outputs[0].token_ids for output in outputs] == alone[seeded]
        assert sum(output.metrics.preemptions for output in outputs) > 0, "the test is meant to preempt"
        pool = llm.engine.scheduler.pool
        assert pool.num_free == pool.num_blocks == 12


def test_logits_have_the_same_bits_in_any_chunk(tiny_model):
    ids = prompts()[4]["prompt_token_ids"]
    with LLM(tiny_model, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=128) as llm:
        whole = llm.prompt_logits(ids)
    for budget in (2, 16, 48):
        with LLM(tiny_model, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=budget) as llm:
            np.testing.assert_array_equal(llm.prompt_logits(ids), whole)


def test_paged_equals_unpaged(tiny_model):
    """The cache in scattered blocks of 8 gives what one block that holds everything gives."""
    ids = prompts()[4]["prompt_token_ids"]
    with LLM(tiny_model, max_model_len=128, max_num_seqs=2, block_size=128) as llm:
        unpaged = llm.prompt_logits(ids)
    with LLM(tiny_model, max_model_len=128, max_num_seqs=2, block_size=8) as llm:
        llm.engine.scheduler.pool._free.reverse()
        np.testing.assert_allclose(llm.prompt_logits(ids), unpaged, atol=2e-5)


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(tiny_model, max_model_len=64, max_num_seqs=4) as llm:
        yield llm


def test_requests_join_and_leave_at_any_step(llm):
    engine, done, texts = llm.engine, {}, {}
    for i in range(6):
        greedy = SamplingParams(temperature=0.0, max_tokens=4 + 3 * (i % 2), ignore_eos=True)
        engine.add(str(i), prompts()[i % 3]["prompt_token_ids"], greedy)
        for output in engine.step():
            done[output.request_id] = output.finished
            texts[output.request_id] = output.outputs[0].token_ids
    while engine.has_work():
        for output in engine.step():
            done[output.request_id] = output.finished
            texts[output.request_id] = output.outputs[0].token_ids
    assert done == {str(i): True for i in range(6)}
    for i in range(3):
        first, second = texts[str(i)], texts[str(i + 3)]
        assert first[:4] == second[:4] and {len(first), len(second)} == {4, 7}, f"requests {i} and {i + 3} have the same prompt"
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks


def test_abort_frees_everything_and_reports_once(llm):
    engine = llm.engine
    engine.add("a", [1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    (output,) = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert not engine.has_work() and engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    engine.abort("never heard of")


@pytest.mark.parametrize(
    ("ids", "params", "words"),
    [
        ([5] * 64, {}, "max_model_len"),
        ([], {}, "empty"),
        ([5, 264], {}, "264"),
        ([5, -1], {}, "-1"),
        ([5], {"logit_bias": {999: 1.0}}, "999"),
        ([5], {"stop_token_ids": [999]}, "999"),
    ],
    ids=["long", "empty", "beyond the vocabulary", "negative", "bias beyond the vocabulary", "stop beyond the vocabulary"],
)
def test_what_can_never_run_is_refused_at_admission(llm, ids, params, words):
    with pytest.raises(RequestError, match=words):
        llm.engine.add("x", ids, SamplingParams(**params))
    assert not llm.engine.has_work()
    llm.engine.add("x", [5], SamplingParams(max_tokens=1))  # the name is still free
    while llm.engine.has_work():
        llm.engine.step()


def test_a_name_can_run_only_once_at_a_time(llm):
    llm.engine.add("twin", [5], SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match="twin"):
        llm.engine.add("twin", [5], SamplingParams(max_tokens=1))
    while llm.engine.has_work():
        llm.engine.step()


def test_the_context_ends_at_max_model_len(llm):
    output = llm.generate({"prompt_token_ids": [5] * 60}, SamplingParams(max_tokens=None, ignore_eos=True, seed=1))[0]
    assert len(output.outputs[0].token_ids) == 4 and output.outputs[0].finish_reason == "length"


def test_n_continuations_differ_and_are_those_of_their_seeds(llm):
    both = llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(n=2, seed=7, max_tokens=8, ignore_eos=True))[0].outputs
    second = llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(seed=8, max_tokens=8, ignore_eos=True))[0].outputs[0]
    assert both[0].token_ids != both[1].token_ids and both[1].token_ids == second.token_ids


def test_broken_logits_end_one_request_and_not_the_engine(tiny_model, tmp_path):
    """A NaN in one row of the embedding: a request that uses it gets no tokens, and its blocks, nearly full, harm no other request."""
    shutil.copytree(tiny_model, tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = np.nan
    save_file(tensors, tmp_path / "broken" / "model.safetensors")
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(tmp_path / "broken", max_model_len=64, num_blocks=4, max_num_seqs=1) as llm:
        before, bad, after = (llm.generate({"prompt_token_ids": ids}, greedy)[0].outputs[0] for ids in ([1, 2, 3], [7] * 62, [1, 2, 3]))
    assert bad.finish_reason == "error" and bad.token_ids == []
    assert before.token_ids == after.token_ids and len(after.token_ids) == 4


def test_prompt_logits_are_those_the_tokens_come_from(llm):
    ids = prompts()[2]["prompt_token_ids"]
    output = llm.generate({"prompt_token_ids": ids}, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))[0]
    assert [int(llm.prompt_logits(ids)[-1].argmax())] == output.outputs[0].token_ids
