"""Several processes or devices that share a model: what follows from their options, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinyvllm import speculative
from tinyvllm.config.engine import resolve
from tinyvllm.errors import ArgumentError

EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}


def test_two_devices_are_two_stages(tmp_path: Path) -> None:
    for given in ({"environ": {"TINYVLLM_DEVICE": "cuda:1, cpu"}}, {"environ": {}, "device": "cuda:1,cpu"}):
        both = resolve(tmp_path, **given)
        assert (both.devices, both.device_names, both.pipeline_parallel_size) == (("CUDA:1", "CPU"), "CUDA:1,CPU", 2)
        assert both.speculative_config is None and both.cpu_ranks == 1 and both.step_seconds == 0.25
        assert both.of_rank(1).devices == ("CPU",) and both.of_rank(1).num_ranks == 2


def test_all_ways_work_together(tmp_path: Path) -> None:
    sizes = {"prefill_context_parallel_size": 4, "tensor_parallel_size": 2, "pipeline_parallel_size": 3}
    grid = resolve(tmp_path, environ={}, **sizes)
    assert (grid.num_ranks, grid.cpu_ranks, grid.block_size) == (24, 24, 1024)


def test_what_several_ranks_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    assert resolve(tmp_path, environ={}, pipeline_parallel_size=2).speculative_config is None, "a default that does not work with it"
    for name in ("tensor_parallel_size", "context_parallel_size"):
        assert resolve(tmp_path, environ={}, **{name: 2}).speculative_config is speculative.AUTO
    for given, words in [
        ({"pipeline_parallel_size": 0}, ["pipeline_parallel_size", "1 to 64", "got 0"]),
        ({"pipeline_parallel_size": 2, "swap_space": "1GiB"}, ["swap_space does not work with pipeline_parallel_size=2"]),
        ({"tensor_parallel_size": 3}, ["tensor_parallel_size must be one of 1, 2, 4, 8", "got 3"]),
        ({"tensor_parallel_size": 2, "device": "METAL"}, ["tensor_parallel_size=2 runs on the CPU and on CUDA, got device=METAL"]),
        ({"pipeline_parallel_size": 2, "device": "CUDA:3"}, ["choose them by CUDA_VISIBLE_DEVICES=3,..., got device=CUDA:3"]),
        ({"context_parallel_size": 2, "device": "METAL"}, ["context_parallel_size=2 runs on the CPU and on CUDA, got device=METAL"]),
        ({"tensor_parallel_size": 2, "swap_space": "1GiB"}, ["swap_space does not work with tensor_parallel_size=2"]),
        (
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "speculative_config": "ngram"},
            ["speculative_config does not work with pipeline_parallel_size=2"],
        ),
        (
            {"tensor_parallel_size": 2, "speculative_config": "mtp"},
            ["method=mtp does not work with tensor_parallel_size=2", "one of ngram, suffix, draft_model"],
        ),
        (
            {"context_parallel_size": 2, "speculative_config": {"method": "draft_model", "model": "m"}},
            ["method=draft_model does not work with context_parallel_size=2", "one of ngram, suffix,"],
        ),
        ({"tensor_parallel_size": 2, "prefix_cache_dir": tmp_path}, ["prefix_cache_dir does not work with tensor_parallel_size=2"]),
        ({"tensor_parallel_size": 2, "async_scheduling": True}, ["async_scheduling does not work with tensor_parallel_size=2"]),
        (
            {"tensor_parallel_size": 2, "quantization": "q4_k", "imatrix": tmp_path / "i.dat"},
            ["imatrix does not work with tensor_parallel_size=2"],
        ),
        ({"device": "CPU,CUDA"}, ["device=CPU,CUDA: expected a GPU, then the CPU"]),
        ({"device": "CUDA:0,CUDA:1"}, ["device=CUDA:0,CUDA:1: expected a GPU, then the CPU", "--tensor-parallel-size 2"]),
        ({"device": "NV,CPU"}, ["device=NV,CPU: expected a GPU"]),
        ({"device": "auto,CPU"}, ["device must name each of several devices once", "'auto,CPU'"]),
        ({"device": "CUDA,CUDA"}, ["device must name each of several devices once"]),
        ({"device": "CUDA,toaster"}, ["device must be one of", "'toaster'"]),
        ({"device": "CUDA,CPU", "tensor_parallel_size": 2}, ["tensor_parallel_size=2 does not work with device=CUDA,CPU"]),
        ({"device": "METAL,CPU", "context_parallel_size": 2}, ["context_parallel_size=2 does not work with device=METAL,CPU"]),
        ({"device": "CUDA,CPU", "pipeline_parallel_size": 3}, ["pipeline_parallel_size=3 contradicts device=CUDA,CPU"]),
        ({"device": "CUDA,CPU", "swap_space": "1GiB"}, ["swap_space does not work with device=CUDA,CPU"]),
        ({"device": "CUDA,CPU", "enable_lora": True}, ["enable_lora does not work with device=CUDA,CPU"]),
        ({"device": "CUDA,CPU", "speculative_config": "ngram"}, ["speculative_config does not work with device=CUDA,CPU"]),
        ({"device": "CUDA,CPU", "gpu_layers": 0}, ["gpu_layers must be an integer of 1 or more, got 0"]),
        ({"device": "CUDA", "gpu_layers": 8}, ["gpu_layers=8", "device=CUDA: give device=CUDA,CPU"]),
        ({"context_parallel_size": 3}, ["context_parallel_size must be one of 1, 2, 4, 8", "got 3"]),
        ({"context_parallel_size": 2, "block_size": 16}, ["block_size=16", "context_parallel_size=2", "256 tokens", "leave it out"]),
        ({"context_parallel_size": 2, "enable_lora": True}, ["enable_lora does not work with context_parallel_size=2"]),
        ({"tensor_parallel_size": 2, "num_scheduler_steps": 4}, ["num_scheduler_steps=4 is not supported with tensor_parallel_size=2"]),
    ]:
        with pytest.raises(ArgumentError) as caught:
            resolve(tmp_path, environ={}, **given)
        assert all(word in str(caught.value) for word in words), caught.value


def test_what_replicas_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    two = {"data_parallel_size": 2}
    for given, words in [
        ({"data_parallel_rank": 2, **two}, ["data_parallel_rank=2 must be below data_parallel_size=2"]),
        ({"data_parallel_size": 0}, ["from 1 to 64"]),
        ({"device": "METAL", **two}, ["data_parallel_size=2", "got device=METAL"]),
        ({"device": "CUDA:1", **two}, ["CUDA_VISIBLE_DEVICES", "got device=CUDA:1"]),
        ({"device": "CUDA,CPU", **two}, ["got device=CUDA,CPU"]),
        ({"energy": True, **two}, ["energy is of one engine"]),
        ({"prefix_cache_dir": "d", **two}, ["prefix_cache_dir is of one engine"]),
        ({"kv_events_config": EVENTS, **two}, ["2 replicas", "overlap", "2 or more apart"]),
    ]:
        with pytest.raises(ArgumentError) as caught:
            resolve(tmp_path, environ={}, **given)
        assert all(word in str(caught.value) for word in words), caught.value
    own = resolve(tmp_path, environ={}, data_parallel_rank=1, energy=True, **two)
    assert not own.starts_replicas and own.cpu_ranks == 2 and resolve(tmp_path, environ={}, tensor_parallel_size=2, **two).cpu_ranks == 4
    own.require_one_engine()
    assert [resolve(tmp_path, environ={}, max_num_seqs=8, **given).all_seqs for given in ({}, two, {**two, "data_parallel_rank": 1})] == [
        8,
        16,
        8,
    ]
    with pytest.raises(ArgumentError, match="here is one"):
        resolve(tmp_path, environ={}, **two).require_one_engine()
