"""Ranks and replicas on memory nodes: each on its own, as if two processors of this machine were two nodes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tinyvllm import LLM, AsyncLLM, SamplingParams
from tinyvllm.backends.cpu import binding
from tinyvllm.backends.cpu.threads import thread_pool

pytestmark = pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="two processors of Linux")
SMALL = {"device": "CPU", "num_blocks": 32, "max_num_seqs": 2, "speculative_config": "off", "max_model_len": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def processors(tmp_path, monkeypatch) -> list[int]:
    """Two processors, each of which is a memory node to this process and to those that it starts."""
    found = sorted(os.sched_getaffinity(0))[:2]
    nodes = f"{{number: [cpu] for number, cpu in enumerate({found}) if cpu in allowed}}"  # as the system says it of what is allowed
    text = f"from tinyvllm.backends.cpu import binding\nbinding.memory_nodes = lambda sysfs, allowed: {nodes}\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("TINYVLLM_THREADS", "2")
    monkeypatch.setattr(
        binding, "memory_nodes", lambda sysfs, allowed: {number: [cpu] for number, cpu in enumerate(found) if cpu in allowed}
    )
    return found


def test_ranks_have_their_nodes_and_the_caller_is_released(tiny_model: Path, processors: list[int], capfd) -> None:
    before = os.sched_getaffinity(0)
    with LLM(tiny_model, tensor_parallel_size=2, **SMALL) as llm:
        llm.generate(["a"], GREEDY)
        steps = llm.engine.runner.ranks
        assert steps is not None
        workers = [thread.native_id for thread in thread_pool()._threads]
        assert workers and [os.sched_getaffinity(number) for number in (0, *workers, *steps.pids)] == [
            *[{processors[0]}] * (1 + len(workers)), {processors[1]},
        ]  # fmt: skip
        assert f"bound to memory node {0}" in llm.engine.runner.threads_in_words()
    assert os.sched_getaffinity(0) == before
    assert "not bound" not in capfd.readouterr().err


def test_replicas_have_their_nodes_and_the_caller_keeps_its_own(tiny_model: Path, processors: list[int]) -> None:
    before = os.sched_getaffinity(0)
    llm = AsyncLLM(tiny_model, data_parallel_size=2, **SMALL)
    try:
        assert llm._replicas is not None
        pids = [replica.process.pid for replica in llm._replicas._all]
        of_threads = [{*map(frozenset, [os.sched_getaffinity(int(task)) for task in os.listdir(f"/proc/{pid}/task")])} for pid in pids]
        assert frozenset({processors[1]}) in of_threads[0] and frozenset({processors[0]}) not in of_threads[0]
        assert os.sched_getaffinity(llm._own.thread.native_id) == {processors[0]}
        assert os.sched_getaffinity(0) == before
    finally:
        llm.close()
