"""What benchmarks/traffic.py compares must be the same work: the static batch's tokens are the engine's. Nothing is timed here."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import traffic
from tinyvllm import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, speculative_config="off") as llm:
        yield llm


@pytest.mark.long
def test_a_static_batch_has_the_engines_tokens(llm: LLM) -> None:
    work = [(ids, answer // 8) for ids, answer in traffic.random_work(6, random.Random(0))]
    work = [([token % 250 for token in ids], answer) for ids, answer in work]
    free = llm.engine.scheduler.pool.num_free
    static = traffic.serve_static(llm.engine, work, 4)
    prompts = [{"prompt_token_ids": ids} for ids, _ in work]
    params = [SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True) for _, answer in work]
    for (_, answer), tokens, output in zip(work, static, llm.generate(prompts, params), strict=True):
        assert tokens[:answer] == output.outputs[0].token_ids
    assert llm.engine.scheduler.pool.num_free == free


def test_the_cache_is_full_of_blocks_without_a_hit(llm: LLM) -> None:
    engine, prefix = llm.engine, llm.engine.scheduler.prefix
    assert prefix is not None
    traffic.fill(engine, random.Random(1))
    assert engine.scheduler.pool.num_cached == 64 == engine.scheduler.pool.num_free
    hits, evictions = prefix.hits, prefix.evictions
    with traffic.spent_in(prefix) as seconds:
        traffic.serve(engine, [([token % 250 for token in ids], 4) for ids, _ in traffic.equal_work(2, random.Random(2))])
    assert seconds[0] > 0 and prefix.hits == hits and prefix.evictions >= evictions + 8
    assert not {"match", "extend", "publish", "count"} & set(vars(prefix))
    with traffic.no_prefix(engine):
        assert engine.scheduler.prefix is None and engine.scheduler.pool.num_cached == 0
    assert engine.scheduler.prefix is prefix


def test_gaps_are_the_steps_until_a_prompt_has_its_token(llm: LLM) -> None:
    assert len(traffic.gaps_of(llm.engine, [7] * 150)) == 3  # 64 tokens a step


def test_an_unknown_figure_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["traffic", "--what", "idle,speed"])
    with pytest.raises(SystemExit):
        traffic.main()
    assert "there is no speed" in capsys.readouterr().err
