"""EngineConfig holds only what can be meant; resolve fills in the rest."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from tinyvllm import aliases
from tinyvllm.config import engine
from tinyvllm.config.engine import EngineConfig, resolve
from tinyvllm.errors import ArgumentError


def test_defaults(tmp_path: Path) -> None:
    chosen = resolve(tmp_path, environ={})
    assert chosen == EngineConfig(model=str(tmp_path))
    assert (chosen.device, chosen.dtype, chosen.block_size) == ("auto", "auto", 16)
    assert (chosen.max_num_seqs, chosen.max_num_batched_tokens) == (64, 512)
    assert (chosen.quantization, chosen.num_scheduler_steps) == (None, 1)
    assert resolve(tmp_path, environ={}, quantization="q4_0", num_scheduler_steps=64).quantization == "q4_0"
    with pytest.raises(FrozenInstanceError):
        chosen.device = "CPU"  # type: ignore[misc]


def test_none_means_not_given(tmp_path: Path) -> None:
    assert resolve(tmp_path, environ={}, device=None, kv_memory=None, block_size=None) == EngineConfig(model=str(tmp_path))


def test_one_block_is_a_cache(tmp_path: Path) -> None:
    assert resolve(tmp_path, environ={}, num_blocks=1).num_blocks == 1


def test_without_a_model_it_is_the_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "DEFAULT_MODEL", tmp_path)
    assert resolve(environ={}).model == str(tmp_path)
    monkeypatch.setattr(engine, "DEFAULT_MODEL", tmp_path / "gone")
    with pytest.raises(ArgumentError, match="bundled model is not in this installation"):
        resolve(environ={})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_blocks": 10, "kv_memory": 1 << 30}, ["num_blocks", "kv_memory"]),
        ({"block_size": 24}, ["block_size", "power of two", "24"]),
        ({"block_size": 4}, ["block_size", "8 to 256", "4"]),
        ({"block_size": 512}, ["block_size", "512"]),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, ["max_num_batched_tokens", "max_num_seqs"]),
        ({"max_model_len": 1}, ["max_model_len", "2 or more"]),
        ({"max_num_seqs": 0}, ["max_num_seqs"]),
        ({"max_num_seqs": True}, ["max_num_seqs", "True"]),
        ({"max_num_seqs": "8"}, ["max_num_seqs", "'8'"]),
        ({"num_blocks": 0}, ["num_blocks", "1 or more"]),
        ({"kv_memory": 0}, ["kv_memory"]),
        ({"kv_memory": "lots"}, ["kv_memory", "'lots'"]),
        ({"dtype": "bloat16"}, ["dtype", "bloat16", "did you mean 'bfloat16'"]),
        ({"load_format": "random"}, ["load_format", "auto, dummy"]),
        ({"quantization": "q8"}, ["quantization", "q8_0, q4_0", "did you mean 'q8_0'"]),
        ({"quantization": 8}, ["quantization", "8"]),
        ({"num_scheduler_steps": 0}, ["num_scheduler_steps", "from 1 to 64", "0"]),
        ({"num_scheduler_steps": 65}, ["num_scheduler_steps", "65"]),
        ({"num_scheduler_steps": 2.0}, ["num_scheduler_steps", "2.0"]),
        ({"device": "gpu"}, ["device", "'gpu'", "METAL"]),
        ({"device": "auto:1"}, ["device"]),
        ({"device": 3}, ["device", "3"]),
        ({"seed": 2**64}, ["seed"]),
        ({"tokenizer": ""}, ["tokenizer"]),
        ({"tokenizer": "./nothing"}, ["tokenizer", "./nothing"]),
        ({"skip_tokenizer_init": 1}, ["skip_tokenizer_init"]),
        ({"skip_tokenizer_init": True, "tokenizer": "gpt2"}, ["skip_tokenizer_init", "tokenizer"]),
        ({"revision": "main"}, ["revision", "local path"]),
        ({"max_modellen": 8}, ["max_modellen", "did you mean 'max_model_len'"]),
    ],
)
def test_contradictions_are_refused_by_name(tmp_path: Path, fields: dict, words: list[str]) -> None:
    with pytest.raises(ArgumentError) as refusal:
        resolve(tmp_path, environ={}, **fields)
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert "\n" not in str(refusal.value)


def test_more_sequences_raise_the_token_budget(tmp_path: Path) -> None:
    assert resolve(tmp_path, environ={}, max_num_seqs=1000).max_num_batched_tokens == 1000
    assert resolve(tmp_path, environ={}, max_num_seqs=4).max_num_batched_tokens == 512


def test_options_under_the_names_of_vllm(tmp_path: Path) -> None:
    """The same meaning is taken, a value that asks for what is the case is nothing, and everything else is refused by name."""
    same = {"tensor_parallel_size": 1, "trust_remote_code": True, "enforce_eager": False, "gpu_memory_utilization": None, "task": "auto"}
    assert resolve(tmp_path, environ={}, num_gpu_blocks_override=7, **same) == resolve(tmp_path, environ={}, num_blocks=7)
    assert resolve(tmp_path, environ={}, kv_cache_memory_bytes="2GiB").kv_memory == 2 << 30
    for given, words in [
        ({"gpu_memory_utilization": 0.9}, ["gpu_memory_utilization=0.9", "nearest: kv_memory, num_blocks"]),
        ({"cpu_offload_gb": 4}, ["cpu_offload_gb=4", "device=CUDA,CPU"]),
        ({"decode_context_parallel_size": 2}, ["decode_context_parallel_size=2", "nearest: context_parallel_size"]),
        ({"more_devices": ("CPU",)}, ["unknown engine option 'more_devices'"]),
        ({"enforce_eager": True}, ["enforce_eager=True", "nearest: warm_up"]),
        ({"num_gpu_blocks_override": 7, "num_blocks": 8}, ["num_gpu_blocks_override", "num_blocks", "one of them"]),
        ({"swap_space": 4}, ["swap_space=4", "GiB", "'4GiB'"]),
        ({"swap_space": 0.5}, ["'0.5GiB'"]),
        ({"tensor_paralel_size": 1}, ["unknown engine option 'tensor_paralel_size'", "did you mean 'tensor_parallel_size'"]),
    ]:
        with pytest.raises(ArgumentError) as caught:
            resolve(tmp_path, environ={}, **given)
        assert all(word in str(caught.value) for word in words), caught.value
    assert not aliases.VLLM.keys() & {field.name for field in fields(EngineConfig)}
    nearest = {name for alias in aliases.VLLM.values() for name in (*alias.nearest, *filter(None, [alias.ours]))}
    assert nearest <= {field.name for field in fields(EngineConfig)}


def test_models_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "story").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for wrong in ("./story", "/no/such/folder", "models/stroy", "a/b/c", "weights.gguf", "~/no-such-model", ""):
        with pytest.raises(ArgumentError, match="model"):
            resolve(wrong, environ={})
    with pytest.raises(ArgumentError, match="did you mean 'story'"):
        resolve("models/stroy", environ={})
    assert resolve("models/story", environ={}).model == "models/story"
    assert resolve("org/name-7B", environ={}, revision="main").model == "org/name-7B"  # may be on the hub: the engine will look
    assert resolve("gpt2", environ={}).model == "gpt2"


def test_a_home_that_is_not_there_is_a_wrong_path() -> None:
    with pytest.raises(ArgumentError, match="no file or folder at '~no-such-user/model.gguf'"):
        resolve("~no-such-user/model.gguf", environ={})


@pytest.mark.parametrize("option", ["tokenizer", "prefix_cache_dir", "record"])
def test_options_that_name_no_home(tmp_path: Path, option: str) -> None:
    with pytest.raises(ArgumentError, match=f"{option}: got '~no-such-user/x', and there is no such home; give the whole path"):
        resolve(tmp_path, environ={}, **{option: "~no-such-user/x"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"imatrix": "i.dat"}, "give quantization too, such as q4_k_m"),
        ({"imatrix": "i.dat", "quantization": "q8_0"}, "changes nothing of quantization=q8_0, which has no search"),
        ({"imatrix": "i.dat", "quantization": "mxfp4"}, "changes nothing"),
        ({"imatrix": "i.dat", "quantization": "gptq"}, "which keeps the checkpoint's matrices"),
        ({"imatrix": "i.dat", "quantization": "q4_k_m", "load_format": "dummy"}, "has no use with load_format=dummy"),
    ],
)
def test_an_importance_matrix_needs_a_quantization_that_uses_it(tmp_path, options, message):
    with pytest.raises(ArgumentError, match=message):
        resolve(tmp_path, environ={}, **options)
    assert resolve(tmp_path, environ={}, imatrix=Path("i.dat"), quantization="q4_k_m").imatrix == "i.dat"
