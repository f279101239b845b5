"""EngineConfig holds only what can be meant; resolve fills in the rest; environment switches are one table."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from tinyvllm import aliases, config
from tinyvllm.config import SWITCHES, EngineConfig, cache_folder, environment, parse_device, parse_size, resolve
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
    monkeypatch.setattr(config, "DEFAULT_MODEL", tmp_path)
    assert resolve(environ={}).model == str(tmp_path)
    monkeypatch.setattr(config, "DEFAULT_MODEL", tmp_path / "gone")
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
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        assert resolve(tmp_path, environ={}, **{name: 2}).speculative_config is None, "a default that does not work with it"
    for given, words in [
        ({"gpu_memory_utilization": 0.9}, ["gpu_memory_utilization=0.9", "nearest: kv_memory, num_blocks"]),
        ({"data_parallel_size": 2}, ["data_parallel_size=2", "accepted: 1", "nearest: device"]),
        ({"pipeline_parallel_size": 0}, ["pipeline_parallel_size", "1 to 64", "got 0"]),
        ({"pipeline_parallel_size": 2, "swap_space": "1GiB"}, ["swap_space does not work with pipeline_parallel_size=2"]),
        ({"tensor_parallel_size": 3}, ["tensor_parallel_size must be one of 1, 2, 4, 8", "got 3"]),
        ({"tensor_parallel_size": 2, "device": "CUDA"}, ["tensor_parallel_size=2 runs on the CPU only", "device=CUDA"]),
        ({"tensor_parallel_size": 2, "swap_space": "1GiB"}, ["swap_space does not work with tensor_parallel_size=2"]),
        ({"tensor_parallel_size": 2, "speculative_config": "ngram"}, ["speculative_config does not work with tensor_parallel_size=2"]),
        ({"tensor_parallel_size": 2, "prefix_cache_dir": tmp_path}, ["prefix_cache_dir does not work with tensor_parallel_size=2"]),
        ({"tensor_parallel_size": 2, "async_scheduling": True}, ["async_scheduling does not work with tensor_parallel_size=2"]),
        (
            {"tensor_parallel_size": 2, "quantization": "q4_k", "imatrix": tmp_path / "i.dat"},
            ["imatrix does not work with tensor_parallel_size=2"],
        ),
        ({"device": "CPU,CUDA"}, ["device=CPU,CUDA: expected a GPU, then the CPU"]),
        ({"device": "CUDA:0,CUDA:1"}, ["device=CUDA:0,CUDA:1: expected a GPU, then the CPU"]),
        ({"device": "NV,CPU"}, ["device=NV,CPU: expected a GPU"]),
        ({"device": "auto,CPU"}, ["device must name each of several devices once", "'auto,CPU'"]),
        ({"device": "CUDA,CUDA"}, ["device must name each of several devices once"]),
        ({"device": "CUDA,toaster"}, ["device must be one of", "'toaster'"]),
        ({"device": "CUDA,CPU", "tensor_parallel_size": 2}, ["tensor_parallel_size=2 does not work with device=CUDA,CPU"]),
        ({"device": "METAL,CPU", "context_parallel_size": 2}, ["context_parallel_size=2 does not work with device=METAL,CPU"]),
        ({"device": "CUDA,CPU", "pipeline_parallel_size": 3}, ["pipeline_parallel_size=3 contradicts device=CUDA,CPU"]),
        ({"device": "CUDA,CPU", "swap_space": "1GiB"}, ["swap_space does not work with device=CUDA,CPU"]),
        ({"device": "CUDA,CPU", "speculative_config": "ngram"}, ["speculative_config does not work with device=CUDA,CPU"]),
        ({"device": "CUDA,CPU", "gpu_layers": 0}, ["gpu_layers must be an integer of 1 or more, got 0"]),
        ({"device": "CUDA", "gpu_layers": 8}, ["gpu_layers=8", "device=CUDA: give device=CUDA,CPU"]),
        ({"more_devices": ("CPU",)}, ["unknown engine option 'more_devices'"]),
        ({"cpu_offload_gb": 4}, ["cpu_offload_gb=4", "device=CUDA,CPU"]),
        ({"context_parallel_size": 3}, ["context_parallel_size must be one of 1, 2, 4, 8", "got 3"]),
        ({"context_parallel_size": 2, "block_size": 16}, ["block_size=16", "context_parallel_size=2", "256 tokens", "leave it out"]),
        ({"context_parallel_size": 2, "enable_lora": True}, ["enable_lora does not work with context_parallel_size=2"]),
        (
            {"context_parallel_size": 2, "tensor_parallel_size": 2},
            ["context_parallel_size=2 does not work with tensor_parallel_size=2", "leave one"],
        ),
        (
            {"prefill_context_parallel_size": 4, "pipeline_parallel_size": 2},
            ["context_parallel_size=4 does not work with pipeline_parallel_size=2"],
        ),
        ({"decode_context_parallel_size": 2}, ["decode_context_parallel_size=2", "nearest: context_parallel_size"]),
        ({"tensor_parallel_size": 2, "num_scheduler_steps": 4}, ["num_scheduler_steps=4 is not supported with tensor_parallel_size=2"]),
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


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("2G", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5KiB", 1536),
        ("64", 64),
        (" 3 kib ", 3072),
        ("10B", 10),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("kv_memory", text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 gallons", "0", "0.1", "nan", "1e9", "2GiBB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentError, match="kv_memory"):
        parse_size("kv_memory", text)


def test_devices_have_one_spelling(tmp_path: Path) -> None:
    assert [parse_device("device", d) for d in ("cpu", "Cuda:1", "AUTO", "METAL")] == ["CPU", "CUDA:1", "auto", "METAL"]
    assert resolve(tmp_path, environ={"TINYVLLM_DEVICE": "cpu"}).device == "CPU"
    assert resolve(tmp_path, environ={"TINYVLLM_DEVICE": "cpu"}, device="cuda").device == "CUDA"
    for given in ({"environ": {"TINYVLLM_DEVICE": "cuda:1, cpu"}}, {"environ": {}, "device": "cuda:1,cpu"}):
        both = resolve(tmp_path, **given)
        assert (both.devices, both.device_names, both.pipeline_parallel_size) == (("CUDA:1", "CPU"), "CUDA:1,CPU", 2)
        assert both.speculative_config is None and both.cpu_ranks == 1 and both.step_seconds == 0.25
        assert both.of_rank(1).devices == ("CPU",) and both.of_rank(1).num_ranks == 2


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


def test_a_home_that_is_not_there_is_a_wrong_path() -> None:
    with pytest.raises(ArgumentError, match="no file or folder at '~no-such-user/model.gguf'"):
        resolve("~no-such-user/model.gguf", environ={})


@pytest.mark.parametrize("option", ["tokenizer", "prefix_cache_dir", "record"])
def test_options_that_name_no_home(tmp_path: Path, option: str) -> None:
    with pytest.raises(ArgumentError, match=f"{option}: got '~no-such-user/x', and there is no such home; give the whole path"):
        resolve(tmp_path, environ={}, **{option: "~no-such-user/x"})


def test_files_that_name_no_home() -> None:
    from tinyvllm.cli.chat import _read_messages
    from tinyvllm.cli.lines import read_lines
    from tinyvllm.cli.new_file import new_file
    from tinyvllm.engine.tools.record import record_to
    from tinyvllm.engine.tools.recording import read_run

    name = "~no-such-user/x"
    for use in (_read_messages, record_to, read_run, lambda name: list(read_lines(name)), lambda name: new_file(name).__enter__()):
        with pytest.raises(ArgumentError, match="and there is no such home"):
            use(name)


def test_importing_the_package_is_light() -> None:
    """`import tinyvllm` and the names that need no model load neither tinygrad nor numpy nor a tokenizer."""
    code = "import sys, tinyvllm, tinyvllm.config; tinyvllm.SamplingParams(); tinyvllm.RequestError; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert not {"tinygrad", "numpy", "tokenizers", "jinja2", "tqdm"} & set(done.stdout.split())


def test_the_public_names_are_there() -> None:
    import tinyvllm
    from tinyvllm.request import SamplingParams

    assert tinyvllm.SamplingParams is SamplingParams
    assert dir(tinyvllm) == sorted(tinyvllm.__all__) and set(tinyvllm.__all__) == set(tinyvllm._MODULES)
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        tinyvllm.LLMM  # noqa: B018


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
