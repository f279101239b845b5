"""MultiStepLoop (num_scheduler_steps): the device runs several decode steps by itself, and the tokens are those of the plain loop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.drafting import Oracle, speculate
from tinyvllm import LLM, AsyncLLM, SamplingParams

ROUNDS = (2, 7, 16)
S = 16  # tokens of a block
LENGTHS = (3, 40, 17, 1, 15, 16)


def prompt(i: int) -> dict[str, Any]:
    return {"prompt_token_ids": [256, *np.random.default_rng(i).integers(32, 127, LENGTHS[i] - 1).tolist()]}


def open_model(model: Path, rounds: int, **options: Any) -> LLM:
    """Without drafts: the tests count steps and rounds, and accepted drafts make them fewer."""
    return LLM(
        model, **(dict(device="CPU", max_model_len=128, max_num_seqs=8, num_scheduler_steps=rounds, speculative_config="off") | options)
    )


def record(llm: LLM) -> list[tuple[int, int]]:
    """From now on, the number of decodes and of rounds of each step, as the runner gets them."""
    steps: list[tuple[int, int]] = []
    advance = llm.engine.runner.advance

    def spy(step: Any, sampled: Any, draw: Any, rounds: int) -> Any:
        steps.append((len(step.logit_rows), rounds))
        return advance(step, sampled, draw, rounds)

    llm.engine.runner.advance = spy  # type: ignore[method-assign]
    return steps


def results(outputs: list[Any]) -> list[tuple[Any, ...]]:
    """Everything that a caller gets."""
    parts = [part for output in outputs for part in output.outputs]
    return [(part.token_ids, part.text, part.finish_reason, part.stop_reason, part.logprobs) for part in parts]


def all_free(llm: LLM) -> bool:
    pool = llm.engine.scheduler.pool
    return pool.num_free == pool.num_blocks


MIXED = [
    SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=21, ignore_eos=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=2, top_k=20, presence_penalty=0.7, max_tokens=1, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, top_p=0.8, max_tokens=38, ignore_eos=True, n=2),
    SamplingParams(temperature=0.0, logit_bias={97: 3.0}, max_tokens=16, ignore_eos=True),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def one_by_one(tiny_model):
    with open_model(tiny_model, 1) as llm:
        yield llm


@pytest.fixture(scope="module", params=ROUNDS)
def several(request, tiny_model):
    with open_model(tiny_model, request.param) as llm:
        yield llm


def both(one_by_one: LLM, several: LLM, numbers: list[int], params: list[SamplingParams]) -> tuple[list[Any], list[tuple[int, int]]]:
    """The results of the requests, which must be the same in both engines, and the steps of the one with rounds."""
    prompts, expected = [prompt(i) for i in numbers], results(one_by_one.generate([prompt(i) for i in numbers], params))
    advance, steps = several.engine.runner.advance, record(several)
    try:
        assert results(several.generate(prompts, params)) == expected
    finally:
        several.engine.runner.advance = advance  # type: ignore[method-assign]
    assert all_free(several)
    return expected, steps


def test_mixed_requests(one_by_one, several):
    expected, steps = both(one_by_one, several, list(range(6)), MIXED)
    assert [len(tokens) for tokens, *_ in expected] == [33, 21, 40, 1, 38, 38, 16], "no multiples of 7 or 16, and n = 2"
    assert max(rounds for _, rounds in steps) == several.config.num_scheduler_steps


def test_one_request_of_any_length(one_by_one, several):
    wanted = several.config.num_scheduler_steps
    for length in {1, 2, wanted, wanted + 1, wanted + 2, 2 * wanted + 1}:
        _, steps = both(one_by_one, several, [0], [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)])
        full, rest = divmod(length - 1, wanted)  # the first token comes with the prompt
        assert [rounds for _, rounds in steps] == [wanted] * full + [rest] * (rest > 0)


def test_a_block_border_within_a_run_and_at_its_edges(one_by_one, several):
    """Prompts of 1, 15, 16 and 17 tokens: runs of 16 end with a block, begin with one, and cross from one to the next."""
    both(one_by_one, several, [3, 4, 5, 2], [GREEDY] * 4)
    for i in (3, 4, 5, 2):
        both(one_by_one, several, [i], [GREEDY])


def test_ends_in_the_middle_of_a_run(one_by_one, several):
    (tokens, text, *_) = results(one_by_one.generate([prompt(0)], [GREEDY]))[0]
    at = next(i for i in range(4, 40) if tokens[i] not in tokens[:i])
    letters = next(text[i : i + 2] for i in range(8, 30) if text.index(text[i : i + 2]) == i)
    stops = [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=[tokens[at]]),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[letters]),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[letters], include_stop_str_in_output=True),
        GREEDY,
    ]
    expected, _ = both(one_by_one, several, [0, 0, 0, 0], stops)
    assert expected[0][0] == tokens[: at + 1] and expected[0][2:4] == ("stop", tokens[at])
    assert expected[1][1] == text[: text.index(letters)] and expected[1][2:4] == ("stop", letters)
    assert expected[2][1].endswith(letters) and expected[3][0] == tokens, "the other sequence continues"


def test_penalties_forget_what_came_after_the_end(one_by_one, several):
    """The row of a sequence that ended within a run has counted surplus tokens; they must not penalise the next sequence in that row."""
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=20, ignore_eos=True)
    tokens = results(one_by_one.generate([prompt(1)], [penalised]))[0][0]
    stopped = SamplingParams(
        temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=20, ignore_eos=True, stop_token_ids=[tokens[2]]
    )
    both(one_by_one, several, [1], [stopped])
    both(one_by_one, several, [1], [penalised])


def test_with_min_tokens_or_logprobs_the_host_reads_every_token(one_by_one, several):
    tokens = results(one_by_one.generate([prompt(0)], [GREEDY]))[0][0]
    late = SamplingParams(temperature=0.0, max_tokens=30, min_tokens=9, ignore_eos=True, stop_token_ids=tokens[2:4])
    expected, steps = both(one_by_one, several, [0], [late])
    assert len(expected[0][0]) >= 9 and not set(expected[0][0][:9]) & set(tokens[2:4])
    assert all(rounds == 1 for _, rounds in steps[:8])
    scored = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2)
    expected, steps = both(one_by_one, several, [0, 1], [GREEDY, scored])
    assert len(expected[1][4]) == 9
    assert all(rounds == 1 for count, rounds in steps if count == 2) and any(rounds > 1 for count, rounds in steps if count == 1)


def test_the_context_ends_within_a_run(one_by_one, several):
    endless = SamplingParams(temperature=0.7, seed=5, max_tokens=None, ignore_eos=True)
    expected, _ = both(one_by_one, several, [1, 2], [endless, endless])
    assert [(len(tokens), reason) for tokens, _, reason, *_ in expected] == [(128 - 40, "length"), (128 - 17, "length")]


@pytest.mark.parametrize("blocks", [5, 9])
def test_scarce_blocks(one_by_one, tiny_model, blocks):
    """Five blocks hold one sequence and no run past its end, with nine sequences are preempted."""
    numbers = [0, 2, 3, 4, 5] if blocks > 5 else [1, 2]
    expected = results(one_by_one.generate([prompt(i) for i in numbers], [GREEDY] * len(numbers)))
    with open_model(tiny_model, 16, num_blocks=blocks) as llm:
        steps = record(llm)
        outputs = llm.generate([prompt(i) for i in numbers], [GREEDY] * len(numbers))
        assert results(outputs) == expected and all_free(llm)
    assert sum(output.metrics.preemptions for output in outputs) > 0 or blocks == 5
    assert {rounds for _, rounds in steps} - {1, 16}, "some runs should be cut short"


@pytest.mark.parametrize("num_drafts", [0, 1, 8])
def test_requests_arrive_and_leave_between_runs(one_by_one, several, num_drafts):
    """With drafts that are right for some tokens, too: requests then end in other steps."""
    outputs = one_by_one.generate([prompt(i) for i in range(6)], MIXED)
    expected, engine, done = results(outputs), several.engine, {}
    if num_drafts:
        speculate(several, Oracle(outputs).half_right, num_drafts)
    for i in range(6):
        engine.add(str(i), prompt(i)["prompt_token_ids"], MIXED[i])
        for _ in range(2):
            done |= {output.request_id: output for output in engine.step()}
    engine.add("aborted", prompt(1)["prompt_token_ids"], GREEDY)
    done |= {output.request_id: output for output in engine.step()}  # a request may end here
    engine.abort("aborted")
    while engine.has_work():
        done |= {output.request_id: output for output in engine.step()}
    engine.stop_speculation()
    assert results([done[str(i)] for i in range(6)]) == expected and all_free(several)


def test_many_callers(one_by_one, tiny_model):
    expected = results(one_by_one.generate([prompt(i) for i in range(6)], MIXED))
    llm = AsyncLLM(tiny_model, device="CPU", max_model_len=128, max_num_seqs=4, num_scheduler_steps=7)

    async def one(i: int) -> Any:
        await asyncio.sleep(0.01 * i)
        return [output async for output in llm.generate(prompt(i), MIXED[i])][-1]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(one(i) for i in range(6)))

    try:
        assert results(asyncio.run(all_of_them())) == expected
    finally:
        llm.close()


@pytest.mark.parametrize("rounds", [1, 7])
@pytest.mark.parametrize("params", [[GREEDY], [GREEDY] * 4, [MIXED[1], MIXED[4], MIXED[1]]], ids=["one", "four", "seeded"])
def test_a_reused_decode_copies_only_what_changed(tiny_model, monkeypatch, rounds, params):
    """A step of unchanged decodes copies its round and, for a sequence with a new block, that block and its slot; never the whole batch."""
    from tinyvllm.runner import prepare, runner
    from tinyvllm.runner.arrays import PackedArrays
    from tinyvllm.sampling import sampler

    copies: list[tuple[str, int]] = []

    def watch(module: Any, name: str) -> None:
        upload = module.upload

        def spy(tensor: Any, array: np.ndarray, start: int = 0) -> None:
            copies.append((name, array.size))
            upload(tensor, array, start)

        monkeypatch.setattr(module, "upload", spy)

    def watch_parts(upload_parts: Any) -> None:
        def spy(tensor: Any, mirror: np.ndarray, parts: list[tuple[int, int]]) -> None:
            copies.append(("parts", sum(stop - start for start, stop in parts)))
            upload_parts(tensor, mirror, parts)

        monkeypatch.setattr(prepare, "upload_parts", spy)

    with open_model(tiny_model, rounds) as llm:
        engine = llm.engine
        for i, each in enumerate(params):
            engine.add(str(i), prompt(i)["prompt_token_ids"], each)
        engine.step()
        engine.step()  # the first step of decodes only is laid out completely
        for module, name in ((prepare, "batch"), (runner, "round"), (sampler, "sampler")):
            watch(module, name)
        monkeypatch.setattr(PackedArrays, "upload", lambda arrays: copies.append(("batch", arrays.host.size)))
        watch_parts(prepare.upload_parts)
        grown = 0
        for _ in range(14 // rounds):
            before = [(s.block_table, len(s.block_table)) for s in engine.scheduler.running]
            copies.clear()
            engine.step()
            new = [len(table) - width for table, width in before]
            expected = [("parts", sum(new) + sum(map(bool, new)))] if any(new) else []
            assert copies == [*expected, ("round", 1)]
            grown += any(new)
        assert grown, "the test should cross a block border"
        for i in range(len(params)):
            engine.abort(str(i))
        engine.step()


def test_the_host_reads_a_round_after_the_launch_of_the_next(tiny_model, monkeypatch):
    """Here the rounds after the first do not start before the tokens of the first are appended."""
    from tinyvllm.backends.cpu.graph import CpuGraph

    appended, run, waits = threading.Event(), CpuGraph.run, []

    def held(graphs: list[Any], times: int) -> None:
        if threading.current_thread().name.startswith("tinyvllm-launcher"):
            waits.append(appended.wait(120))
        run(graphs, times)

    with open_model(tiny_model, 8) as llm:
        expected = results(llm.generate([prompt(1)], [GREEDY]))
        append = llm.engine.stages.append_rounds

        def append_and_tell(step: Any, tokens: np.ndarray) -> None:
            append(step, tokens)
            appended.set()

        monkeypatch.setattr(CpuGraph, "run", staticmethod(held))
        monkeypatch.setattr(llm.engine.stages, "append_rounds", append_and_tell)
        assert results(llm.generate([prompt(1)], [GREEDY])) == expected
    assert waits and all(waits), "the host waited for all rounds before it read one"


@pytest.mark.parametrize("switch", ["JIT=0", "GRAPH_ONE_KERNEL=0"])
def test_tokens_are_awaited_if_steps_are_not_graphs(tiny_model, one_by_one, switch):
    """tinygrad's CPU device returns before its worker starts."""
    code = (
        "import sys; from tinyvllm import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny_model)!r}, device='CPU', max_model_len=128, max_num_seqs=8)\n"
        f"params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)\n"
        f"print(llm.generate([{prompt(0)!r}], [params])[0].outputs[0].token_ids)"
    )
    process = subprocess.run([sys.executable, "-c", code], env=os.environ | dict([switch.split("=")]), capture_output=True, text=True)
    expected = one_by_one.generate([prompt(0)], [SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)])
    assert process.stdout.strip() == str(expected[0].outputs[0].token_ids), process.stderr
