"""Pipeline parallelism on the CPU: the tokens and log-probabilities of one process, in each case that lays steps out differently."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import numpy as np
import pytest

from tests.engine.test_tensor_parallel import GOLDEN, PARAMS, PROMPTS, alive, open_ranks, run_on, start
from tests.tiny.families import FAMILIES, SAME_DIVISION
from tinyvllm import LLM, SamplingParams
from tinyvllm.distributed import ranks
from tinyvllm.engine.pipeline_loop import PipelineLoop
from tinyvllm.errors import ModelError, RankError
from tinyvllm.request import BeamSearchParams, StructuredOutputsParams

LONG = [{"prompt_token_ids": np.random.default_rng(seed).integers(3, 3000, 40).tolist()} for seed in range(4)]
SEVERAL = SamplingParams(n=3, temperature=0.9, seed=2, max_tokens=12)
IN_LETTERS = SamplingParams(temperature=0.9, seed=6, max_tokens=14, structured_outputs=StructuredOutputsParams(regex="[a-z ]{12}"))
TO_THE_END = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True, logprobs=1)


def results(outputs: list[Any]) -> list[Any]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@functools.cache
def answers(stages: int, quantization: str | None, tensor: int = 1) -> dict[str, Any]:
    """Tokens and log-probabilities with all their bits, prompts in chunks; 18 blocks are too few for what LONG needs at its end."""
    options = {"quantization": quantization, "max_num_batched_tokens": 32, "num_blocks": 18}
    with LLM(device="CPU", max_model_len=128, max_num_seqs=4, tensor_parallel_size=tensor, pipeline_parallel_size=stages, **options) as llm:
        found = {"short": results(llm.generate(PROMPTS, PARAMS)), "scored": llm.prompt_logits(LONG[0]["prompt_token_ids"])}
        outputs = llm.generate(LONG, TO_THE_END)
        assert sum(output.metrics.preemptions for output in outputs), "the case is of no use"
        found["preempted"] = results(outputs)
        (again,) = llm.generate(LONG[3:], TO_THE_END)
        assert again.num_cached_tokens == 32, "two blocks"
        found["cached"] = results([again])
        found["forks"] = [one.token_ids for output in llm.generate(PROMPTS[:2], SEVERAL) for one in output.outputs]
        found["beams"] = [one.token_ids for one in llm.beam_search(PROMPTS[0], BeamSearchParams(3, 12))[0].outputs]
        found["grammar"] = results(llm.generate(PROMPTS, IN_LETTERS))
        if tensor == 1:
            found["embedding"] = llm.embed(PROMPTS[0])
    return found


@pytest.mark.parametrize(
    ("stages", "quantization", "tensor"),
    [
        (2, "q4_k_m", 1),
        (2, None, 2),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((4, None, 1), (2, "q8_0", 1), (3, "q4_0", 1), (2, "mxfp4", 1))),
    ],
)
def test_stages_have_the_bits_of_one_process(stages: int, quantization: str | None, tensor: int) -> None:
    """Of 6 layers, with a tied head. The formats of Q4_K_M differ from layer to layer of the whole model."""
    expected, got = answers(1, quantization), answers(stages, quantization, tensor)
    for name, value in got.items():
        np.testing.assert_equal(value, expected[name], err_msg=name)


def test_two_steps_are_in_flight_over_different_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one in flight, an embedding is computed on the side, a request is aborted, and preparing a draw and drawing fail once each.
    The other requests have the tokens of a run without.
    """
    with LLM(device="CPU", max_model_len=128, max_num_seqs=4, num_blocks=64, pipeline_parallel_size=2) as llm:
        expected, embedding = llm.generate(LONG, TO_THE_END), llm.embed(PROMPTS[0])
        engine, loop, groups = llm.engine, llm.engine.loop, set[tuple[int, ...]]()
        assert isinstance(loop, PipelineLoop)
        for number, prompt in enumerate(LONG):
            engine.add(f"{number}", prompt["prompt_token_ids"], TO_THE_END)
        finished: dict[str, Any] = {}
        for turn in range(400):
            finished |= {output.request_id: output for output in engine.step() if output.finished}
            (step,) = loop._steps or (None,)
            if 10 < turn < 30 and step is not None:
                groups.add(tuple(sequence.sequence_id for sequence in step.sequences))
            if turn == 30:
                assert step is not None
                np.testing.assert_array_equal(llm.embed(PROMPTS[0]), embedding)
                engine.abort(step.sequences[0].request_id)
            if turn in (35, 80):
                method = "prepare" if turn == 35 else "draw"
                whole = getattr(engine.sampler, method)

                def fail_once(*given: Any, method: str = method, whole: Any = whole) -> None:
                    monkeypatch.setattr(engine.sampler, method, whole)
                    raise RuntimeError("planted")

                monkeypatch.setattr(engine.sampler, method, fail_once)
        assert engine.recovery.num_failed == 2
        assert len(groups) == 2 and all(len(group) == 2 for group in groups) and len({*sum(groups, ())}) == 4
    aborted = [name for name, output in finished.items() if output.outputs[0].finish_reason == "abort"]
    assert len(finished) == 4 and len(aborted) == 1
    for name in finished.keys() - {*aborted}:
        assert results([finished[name]]) == results([expected[int(name)]])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - SAME_DIVISION))
def test_a_family_has_the_bits_of_one_process(name: str) -> None:
    found = []
    for stages in (1, 2):
        options = {"max_model_len": 128, "max_num_seqs": 2, "num_blocks": 32, "max_num_batched_tokens": 48, "skip_tokenizer_init": True}
        with LLM(GOLDEN / name, device="CPU", pipeline_parallel_size=stages, speculative_config="off", **options) as llm:
            prompts = [{"prompt_token_ids": [*range(5, 75)]}, {"prompt_token_ids": [7, 9, 11]}]
            found.append(results(llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2))))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("rank", "sent", "reason"),
    [
        (2, signal.SIGKILL, r"rank 2 \(process \d+\) ended with code -9"),
        pytest.param(1, signal.SIGKILL, r"rank 1 \(process \d+\) ended with code -9", marks=pytest.mark.long),
        pytest.param(2, signal.SIGSTOP, r"rank 2 \(process \d+\) hangs: no heartbeat for \d+ s", marks=pytest.mark.long),
    ],
)
def test_a_stage_that_is_killed_or_hangs_ends_the_engine(
    rank: int, sent: signal.Signals, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first of three stages, whose neighbour is not rank 0: the message names it, and not that neighbour."""
    with open_ranks(1, pipeline_parallel_size=3) as llm:
        pids = start(llm)
        assert len(pids) == 2
        monkeypatch.setattr(ranks, "SILENT_SECONDS", 2.0)
        os.kill(pids[rank - 1], sent)
        for _ in range(2):
            with pytest.raises(RankError, match=reason):
                run_on(llm)
    assert not any(alive(pid) for pid in pids)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ModelError, match="pipeline_parallel_size=9: the model has 6 layers, and a stage needs one"):
        open_ranks(1, pipeline_parallel_size=9)
