"""The environment's switches are one table: an unknown one and a wrong value are errors that name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinyvllm.config.engine import resolve
from tinyvllm.config.switches import SWITCHES, cache_folder, environment
from tinyvllm.errors import ArgumentError


def test_environment_switches(tmp_path: Path) -> None:
    assert environment({"HOME": "/", "TINYVLLM_DEVICE": "cuda:0"}) == {"TINYVLLM_DEVICE": "CUDA:0"}
    with pytest.raises(ArgumentError, match="TINYVLLM_DEVISE is not known, did you mean 'TINYVLLM_DEVICE'"):
        environment({"TINYVLLM_DEVISE": "cpu"})
    with pytest.raises(ArgumentError, match="TINYVLLM_DEVICE.*'toaster'"):
        environment({"TINYVLLM_DEVICE": "toaster"})
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ArgumentError, match="TINYVLLM_CACHE"):
        environment({"TINYVLLM_CACHE": str(file)})
    with pytest.raises(ArgumentError, match="TINYVLLM_DEVISE"):
        resolve(tmp_path, environ={"TINYVLLM_DEVISE": "cpu"})
    assert environment({"TINYVLLM_API_KEY": ""}) == {"TINYVLLM_API_KEY": ""}  # the command line reads it, no other part refuses it
    assert all(switch.name.startswith("TINYVLLM_") and switch.meaning for switch in SWITCHES)


def test_kernels_and_threads_are_switches(tmp_path: Path) -> None:
    read = environment({"TINYVLLM_KERNELS": " matmul=avx2, all=ref,", "TINYVLLM_THREADS": "64"})
    assert read == {"TINYVLLM_KERNELS": {"matmul": "avx2", "all": "ref"}, "TINYVLLM_THREADS": 64}
    for text in ("matmul", "matmul=", "=ref", "matmul=avx2=ref", "", " , "):
        with pytest.raises(ArgumentError, match="TINYVLLM_KERNELS must be like attention_decode=ref,matmul=avx2 or all=ref"):
            environment({"TINYVLLM_KERNELS": text})
    for text in ("0", "65", "-1", "two", "1.5", ""):
        with pytest.raises(ArgumentError, match="TINYVLLM_THREADS must be a number from 1 to 64"):
            environment({"TINYVLLM_THREADS": text})
    with pytest.raises(ArgumentError, match="TINYVLLM_THREADS"):
        resolve(tmp_path, environ={"TINYVLLM_THREADS": "many"})


def test_cache_folder(tmp_path: Path) -> None:
    assert cache_folder({"TINYVLLM_CACHE": str(tmp_path)}) == tmp_path
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/tinyvllm")
    assert cache_folder({}) == Path("~/.cache/tinyvllm").expanduser()
    with pytest.raises(ArgumentError, match="no such home; give the whole path"):
        cache_folder({"TINYVLLM_CACHE": "~no-such-user/cache"})
