"""Chunks: what they hold, that prompts of them hit, that they stay while everything else goes, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinyvllm import LLM, ArgumentError, AsyncLLM, RequestError, RequestOutput, SamplingParams
from tinyvllm.engine.chunks import Chunk
from tinyvllm.engine.prompt import Prompt
from tinyvllm.request import RequestOptions

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
BOS = 256
SYSTEM = "the rules of the house are these: " * 2  # 68 characters, and as many tokens
LETTER = "a letter that somebody has sent to us"  # 37


@pytest.fixture
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, num_blocks=24, max_model_len=176, max_num_seqs=4) as llm:
        yield llm


def fill(llm: LLM) -> None:
    """Requests that want more blocks than there are, so that whatever may be evicted is."""
    llm.generate([{"prompt_token_ids": [30 + n] * 160} for n in range(6)], GREEDY)


def test_a_chunk_is_computed_once_and_stays(llm: LLM) -> None:
    alone = llm.generate(SYSTEM + " what?", GREEDY)[0].outputs[0].token_ids
    fill(llm)
    chunk = llm.chunk(SYSTEM)
    assert chunk.num_tokens == 1 + len(SYSTEM) and chunk.blocks == 4 and chunk.bytes == 4 * llm.engine.runner.pool.block_bytes
    fill(llm)
    output = llm.generate(chunk + " what?", GREEDY)[0]
    assert output.num_cached_tokens == 64 and output.prompt_token_ids == [BOS, *SYSTEM.encode(), *b" what?"]
    assert output.outputs[0].token_ids == alone
    assert llm.generate(SYSTEM + " what?", GREEDY)[0].num_cached_tokens == 64  # the same tokens are the same prefix, however they came


def test_a_released_chunk_is_evicted_like_all_else(llm: LLM) -> None:
    chunk = llm.chunk(SYSTEM)
    free = llm.engine.scheduler.pool.num_free
    chunk.release()
    chunk.release()
    assert llm.engine.scheduler.pool.num_free == free + 4 and not chunk.held and chunk.blocks == 0 and llm.chunks() == []
    fill(llm)
    assert llm.generate(chunk + " what?", GREEDY)[0].num_cached_tokens == 0


def test_chunks_stand_behind_each_other(llm: LLM) -> None:
    system = llm.chunk(SYSTEM)  # 69 tokens: 4 blocks and 5 tokens
    letter = llm.chunk(LETTER, after=system)  # 106: 6 blocks and 10 tokens
    assert (letter.num_tokens, letter.blocks, llm.chunks()) == (37, 2, [system, letter])
    assert llm.engine.status()["chunks"] == {"count": 2, "blocks": 6, "bytes": 6 * system.chunks.block_bytes}
    assert letter.chain == (system, letter)
    fill(llm)
    asked = llm.generate([letter + "?", system + "?", {"chunks": [system, letter]}], GREEDY)
    assert [output.num_cached_tokens for output in asked] == [96, 64, 96]
    assert asked[0].prompt_token_ids == [BOS, *(SYSTEM + LETTER + "?").encode()]
    system.release()
    assert letter.blocks == 2 and llm.engine.status()["chunks"]["blocks"] == 6  # the letter needs what it stands behind


def test_another_order_is_computed_anew_and_cached_for_the_next_time(llm: LLM) -> None:
    system, letter = llm.chunk(SYSTEM), llm.chunk(LETTER)
    prompt = {"chunks": [letter, system], "prompt": "?"}
    first, second = llm.generate(prompt, GREEDY)[0], llm.generate(prompt, GREEDY)[0]
    assert first.prompt_token_ids == [BOS, *(LETTER + SYSTEM + "?").encode()]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (32, 96)  # of the letter alone; then of both
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == llm.generate(LETTER + SYSTEM + "?", GREEDY)[0].outputs[0].token_ids


def test_an_answer_is_kept_as_a_chunk(llm: LLM) -> None:
    system = llm.chunk(SYSTEM)
    output = llm.generate(system + " what?", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0]
    turn = llm.chunk_of(output, after=system)
    assert turn.num_tokens == 46 and turn.context == output.prompt_token_ids + output.outputs[0].token_ids
    fill(llm)
    again = llm.generate(turn + " and then?", GREEDY)[0]
    assert again.num_cached_tokens == 112 == (69 + 46) // 16 * 16
    assert llm.chunk_of(again).num_tokens == len(again.prompt_token_ids) + 6
    with pytest.raises(ArgumentError, match="does not begin with Chunk"):
        llm.chunk_of(llm.generate("other", GREEDY)[0], after=system)


def test_token_ids_are_taken_as_they_are(llm: LLM) -> None:
    chunk = llm.chunk([5] * 20)
    output = llm.generate(chunk + [6, 7], GREEDY)[0]
    assert output.prompt_token_ids == [5] * 20 + [6, 7] and output.num_cached_tokens == 16


def test_a_salt_belongs_to_the_chunk(llm: LLM) -> None:
    chunk = llm.chunk(SYSTEM, cache_salt="a")
    assert llm.chunk(LETTER, after=chunk).cache_salt == "a"
    assert llm.generate(chunk + "?", GREEDY, options=RequestOptions(cache_salt="a"))[0].num_cached_tokens == 64
    assert llm.generate(SYSTEM + "?", GREEDY)[0].num_cached_tokens == 0
    with pytest.raises(ArgumentError, match="give both the same"):
        llm.generate(chunk + "?", GREEDY)
    with pytest.raises(ArgumentError, match="cannot stand behind"):
        llm.chunk("b", after=chunk, cache_salt="b")


def test_too_much_is_refused_and_requests_keep_room(llm: LLM) -> None:
    held = [llm.chunk([40 + n] * 64) for n in range(3)]  # 12 of 24 blocks, and a sequence may be 11 long
    free = llm.engine.scheduler.pool.num_free
    with pytest.raises(RequestError, match="4 more KV blocks would be held beside 12, and at most 13 of 24"):
        llm.chunk([50] * 64)
    assert llm.engine.scheduler.pool.num_free == free
    assert len(llm.generate({"prompt_token_ids": [60] * 160}, GREEDY)[0].outputs[0].token_ids) == 6  # a long one has room
    again = llm.chunk([40] * 80, after=None)  # what is held already counts once
    assert again.blocks == 5 and llm.engine.status()["chunks"]["blocks"] == 13
    held[1].release()
    assert llm.chunk([50] * 64).blocks == 4


def test_a_prompt_that_chunks_leave_no_room_for_is_refused(tiny_model: Path) -> None:
    with LLM(tiny_model, num_blocks=8, max_model_len=128, max_num_seqs=2) as llm:
        chunk = llm.chunk([5] * 64)
        with pytest.raises(RequestError, match="need 6 KV blocks, chunks leave 4 of 8; release a chunk"):
            llm.generate({"prompt_token_ids": [6] * 80}, GREEDY)
        assert len(llm.generate(chunk + [6] * 40, GREEDY)[0].outputs[0].token_ids) == 6  # 7 blocks, of which the chunk has 4


def test_what_is_not_a_chunk_is_refused(llm: LLM, tiny_model: Path) -> None:
    with pytest.raises(ArgumentError, match="at least one token"):
        llm.chunk("")
    with pytest.raises(ArgumentError, match="chunks must be a list of what llm.chunk gave"):
        llm.generate({"chunks": [SYSTEM]}, GREEDY)  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match='chunk \\+ "text"'):
        llm.generate([llm.chunk(SYSTEM)], GREEDY)  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="give one of them"):
        llm.generate({"chunks": [llm.chunk(SYSTEM)], "prompt": "a", "prompt_token_ids": [1]}, GREEDY)
    with LLM(tiny_model, num_blocks=24, max_model_len=176) as other:
        foreign: Chunk = other.chunk(SYSTEM)
        with pytest.raises(ArgumentError, match="belongs to another engine"):
            llm.generate(foreign + "?", GREEDY)
        with pytest.raises(ArgumentError, match="after must be a chunk of this engine"):
            llm.chunk("b", after=foreign)
    with (
        LLM(tiny_model, num_blocks=24, max_model_len=176, enable_prefix_caching=False) as plain,
        pytest.raises(RequestError, match="enable_prefix_caching"),
    ):
        plain.chunk(SYSTEM)


def test_many_callers_have_chunks_too(tiny_model: Path) -> None:
    async def leave(llm: AsyncLLM) -> None:
        """Whoever is cancelled, at whatever moment, leaves nothing that is held."""
        before, cut = await llm.chunks(), 0
        for turn in range(20):
            task = asyncio.create_task(llm.chunk([20 + turn] * 40))
            await asyncio.sleep(0.0004 * turn)
            if task.cancel():
                cut += 1
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            else:
                (await task).release()
        assert cut and await llm.chunks() == before

    async def serve(llm: AsyncLLM) -> None:
        async def ask(prompt: Prompt, params: SamplingParams = GREEDY) -> RequestOutput:
            return [output async for output in llm.generate(prompt, params)][-1]

        system = await llm.chunk(SYSTEM)
        first = await ask(system + " what?")
        turn = await llm.chunk_of(first, after=system)
        await asyncio.gather(*(ask({"prompt_token_ids": [30 + n] * 160}) for n in range(6)))
        assert await llm.chunks() == [system, turn]
        again = await ask(turn + " and then?")
        assert (first.num_cached_tokens, again.num_cached_tokens) == (64, 80)
        assert again.prompt_token_ids == first.prompt_token_ids + first.outputs[0].token_ids + list(b" and then?")
        system.release()
        assert await llm.chunks() == [turn]
        with pytest.raises(RequestError, match="at most 13 of 24"):
            await llm.chunk([5] * 160)
        with LLM(tiny_model, num_blocks=24, max_model_len=176) as other:
            foreign = other.chunk(SYSTEM)
        with pytest.raises(ArgumentError, match="belongs to another engine"):
            await ask(foreign + "?")

    llm = AsyncLLM(tiny_model, num_blocks=24, max_model_len=176, max_num_seqs=4)
    try:
        asyncio.run(serve(llm))
        asyncio.run(leave(llm))
    finally:
        llm.close()
