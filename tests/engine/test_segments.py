"""Segments: what they hold, that prompts with them hit the cache, that they outlast everything else in it, and what is refused."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinyvllm import LLM, ArgumentError, AsyncLLM, RequestError, RequestOutput, SamplingParams
from tinyvllm.engine.prompt import Prompt
from tinyvllm.engine.segments import Segment
from tinyvllm.request import RequestOptions

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
BOS = 256
SYSTEM = "the rules of the shop are these:  " * 2  # 68 characters, and as many tokens
LETTER = "a letter that a client has sent to us"  # 37


@pytest.fixture
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, num_blocks=24, max_model_len=176, max_num_seqs=4) as llm:
        yield llm


def fill(llm: LLM) -> None:
    """Requests that want more blocks than there are, so that everything that may be evicted is."""
    llm.generate([{"prompt_token_ids": [30 + n] * 160} for n in range(6)], GREEDY)


def test_a_segment_is_computed_once_and_stays(llm: LLM) -> None:
    alone = llm.generate(SYSTEM + " what?", GREEDY)[0].outputs[0].token_ids
    fill(llm)
    segment = llm.segment(SYSTEM)
    assert segment.num_tokens == 1 + len(SYSTEM) and segment.blocks == 4 and segment.bytes == 4 * llm.engine.runner.pool.block_bytes
    fill(llm)
    output = llm.generate(segment + " what?", GREEDY)[0]
    assert output.num_cached_tokens == 64 and output.prompt_token_ids == [BOS, *SYSTEM.encode(), *b" what?"]
    assert output.outputs[0].token_ids == alone
    assert (
        llm.generate(SYSTEM + " what?", GREEDY)[0].num_cached_tokens == 64
    )  # the same tokens are the same prefix, with a segment or without


def test_a_released_segment_is_evicted_like_other_blocks(llm: LLM) -> None:
    segment = llm.segment(SYSTEM)
    free = llm.engine.scheduler.pool.num_free
    segment.release()
    segment.release()
    assert llm.engine.scheduler.pool.num_free == free + 4 and not segment.held and segment.blocks == 0 and llm.segments() == []
    fill(llm)
    assert llm.generate(segment + " what?", GREEDY)[0].num_cached_tokens == 0


def test_a_segment_follows_another(llm: LLM) -> None:
    system = llm.segment(SYSTEM)  # 69 tokens: 4 blocks and 5 tokens
    letter = llm.segment(LETTER, after=system)  # 106: 6 blocks and 10 tokens
    assert (letter.num_tokens, letter.blocks, llm.segments()) == (37, 2, [system, letter])
    assert llm.engine.status()["segments"] == {"count": 2, "blocks": 6, "bytes": 6 * system.segments.block_bytes}
    assert letter.chain == (system, letter)
    fill(llm)
    asked = llm.generate([letter + "?", system + "?", {"segments": [system, letter]}], GREEDY)
    assert [output.num_cached_tokens for output in asked] == [96, 64, 96]
    assert asked[0].prompt_token_ids == [BOS, *(SYSTEM + LETTER + "?").encode()]
    system.release()
    assert letter.blocks == 2 and llm.engine.status()["segments"]["blocks"] == 6  # the letter needs the blocks before its own


def test_another_order_is_computed_again_and_cached_for_the_next_time(llm: LLM) -> None:
    system, letter = llm.segment(SYSTEM), llm.segment(LETTER)
    prompt = {"segments": [letter, system], "prompt": "?"}
    first, second = llm.generate(prompt, GREEDY)[0], llm.generate(prompt, GREEDY)[0]
    assert first.prompt_token_ids == [BOS, *(LETTER + SYSTEM + "?").encode()]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (32, 96)  # of the letter alone; then of both
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == llm.generate(LETTER + SYSTEM + "?", GREEDY)[0].outputs[0].token_ids


def test_an_answer_becomes_a_segment(llm: LLM) -> None:
    system = llm.segment(SYSTEM)
    output = llm.generate(system + " what?", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0]
    turn = llm.segment_of(output, after=system)
    assert turn.num_tokens == 46 and turn.context == output.prompt_token_ids + output.outputs[0].token_ids
    fill(llm)
    again = llm.generate(turn + " and then?", GREEDY)[0]
    assert again.num_cached_tokens == 112 == (69 + 46) // 16 * 16
    assert llm.segment_of(again).num_tokens == len(again.prompt_token_ids) + 6
    with pytest.raises(ArgumentError, match="does not begin with Segment"):
        llm.segment_of(llm.generate("other", GREEDY)[0], after=system)


def test_token_ids_are_taken_as_they_are(llm: LLM) -> None:
    segment = llm.segment([5] * 20)
    output = llm.generate(segment + [6, 7], GREEDY)[0]
    assert output.prompt_token_ids == [5] * 20 + [6, 7] and output.num_cached_tokens == 16


def test_a_salt_belongs_to_the_segment(llm: LLM) -> None:
    segment = llm.segment(SYSTEM, cache_salt="a")
    assert llm.segment(LETTER, after=segment).cache_salt == "a"
    assert llm.generate(segment + "?", GREEDY, options=RequestOptions(cache_salt="a"))[0].num_cached_tokens == 64
    assert llm.generate(SYSTEM + "?", GREEDY)[0].num_cached_tokens == 0
    with pytest.raises(ArgumentError, match="give both the same"):
        llm.generate(segment + "?", GREEDY)
    with pytest.raises(ArgumentError, match="must be that of the segment before it"):
        llm.segment("b", after=segment, cache_salt="b")


def test_too_much_is_refused_and_requests_keep_room(llm: LLM) -> None:
    held = [llm.segment([40 + n] * 64) for n in range(3)]  # 12 of 24 blocks, and a sequence may be 11 long
    free = llm.engine.scheduler.pool.num_free
    with pytest.raises(RequestError, match="hold 12 KV blocks, this one needs 4 more, and requests leave them at most 13 of 24"):
        llm.segment([50] * 64)
    assert llm.engine.scheduler.pool.num_free == free
    assert len(llm.generate({"prompt_token_ids": [60] * 160}, GREEDY)[0].outputs[0].token_ids) == 6  # a long one has room
    again = llm.segment([40] * 80, after=None)  # blocks that are held already count once
    assert again.blocks == 5 and llm.engine.status()["segments"]["blocks"] == 13
    held[1].release()
    assert llm.segment([50] * 64).blocks == 4


def test_a_prompt_that_segments_leave_no_room_for_is_refused(tiny_model: Path) -> None:
    with LLM(tiny_model, num_blocks=8, max_model_len=128, max_num_seqs=2) as llm:
        segment = llm.segment([5] * 64)
        with pytest.raises(RequestError, match="need 6 KV blocks, [a-z]+ leave 4 of 8"):
            llm.generate({"prompt_token_ids": [6] * 80}, GREEDY)
        assert len(llm.generate(segment + [6] * 40, GREEDY)[0].outputs[0].token_ids) == 6  # 7 blocks, of which the segment has 4


def test_what_is_not_a_segment_is_refused(llm: LLM, tiny_model: Path) -> None:
    with pytest.raises(ArgumentError, match="at least one token"):
        llm.segment("")
    with pytest.raises(ArgumentError, match="segments must be a list of results of llm.segment"):
        llm.generate({"segments": [SYSTEM]}, GREEDY)  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match='segment \\+ "text"'):
        llm.generate([llm.segment(SYSTEM)], GREEDY)  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="give one of them"):
        llm.generate({"segments": [llm.segment(SYSTEM)], "prompt": "a", "prompt_token_ids": [1]}, GREEDY)
    with LLM(tiny_model, num_blocks=24, max_model_len=176) as other:
        foreign: Segment = other.segment(SYSTEM)
        with pytest.raises(ArgumentError, match="belongs to another engine"):
            llm.generate(foreign + "?", GREEDY)
        with pytest.raises(ArgumentError, match="after must be a segment of this engine"):
            llm.segment("b", after=foreign)
    with (
        LLM(tiny_model, num_blocks=24, max_model_len=176, enable_prefix_caching=False) as plain,
        pytest.raises(RequestError, match="enable_prefix_caching"),
    ):
        plain.segment(SYSTEM)


async def cancelled_at(number: int, work: Coroutine[Any, Any, Any]) -> Any:
    """The work, whose task is cancelled when it waits for the `number`th time."""

    class Steps:
        def __await__(self) -> Generator[Any, Any, Any]:
            advance = functools.partial(work.send, None)
            for suspension in itertools.count(1):
                try:
                    future = advance()
                except StopIteration as end:
                    return end.value
                if suspension == number:
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()
                try:
                    advance = functools.partial(work.send, (yield future))
                except BaseException as error:
                    advance = functools.partial(work.throw, error)

    return await Steps()


def test_segments_of_an_async_llm(tiny_model: Path) -> None:
    async def leave(llm: AsyncLLM) -> None:
        """A caller that is cancelled, at any moment, leaves no segment that is held."""
        before = await llm.segments()
        for suspensions in itertools.count(1):
            try:
                segment = await asyncio.create_task(cancelled_at(suspensions, llm.segment([20 + suspensions] * 40)))
            except asyncio.CancelledError:
                assert await llm.segments() == before
            else:
                segment.release()
                break
        assert suspensions > 3 and await llm.segments() == before

    async def serve(llm: AsyncLLM) -> None:
        async def ask(prompt: Prompt, params: SamplingParams = GREEDY) -> RequestOutput:
            return [output async for output in llm.generate(prompt, params)][-1]

        system = await llm.segment(SYSTEM)
        first = await ask(system + " what?")
        turn = await llm.segment_of(first, after=system)
        await asyncio.gather(*(ask({"prompt_token_ids": [30 + n] * 160}) for n in range(6)))
        assert await llm.segments() == [system, turn]
        again = await ask(turn + " and then?")
        assert (first.num_cached_tokens, again.num_cached_tokens) == (64, 80)
        assert again.prompt_token_ids == first.prompt_token_ids + first.outputs[0].token_ids + list(b" and then?")
        system.release()
        assert await llm.segments() == [turn]
        with pytest.raises(RequestError, match="at most 13 of 24"):
            await llm.segment([5] * 160)
        with LLM(tiny_model, num_blocks=24, max_model_len=176) as other:
            foreign = other.segment(SYSTEM)
        with pytest.raises(ArgumentError, match="belongs to another engine"):
            await ask(foreign + "?")

    llm = AsyncLLM(tiny_model, num_blocks=24, max_model_len=176, max_num_seqs=4)
    try:
        asyncio.run(serve(llm))
        asyncio.run(leave(llm))
    finally:
        llm.close()
