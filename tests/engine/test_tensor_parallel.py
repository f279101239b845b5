"""Tensor parallelism on the CPU: the tokens and log-probabilities of one process, and what happens when a rank ends or hangs."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.engine.test_kernels import kernels
from tests.tiny.delta import write_delta_model
from tests.tiny.families import FAMILIES, SAME_DIVISION
from tests.tiny.small_floats import experts_in_mxfp4
from tests.tiny.to_gguf import read_folder, write_gguf
from tests.tiny.wide import with_wide_experts
from tinyvllm import LLM, SamplingParams
from tinyvllm.config.engine import DEFAULT_MODEL
from tinyvllm.distributed import ranks
from tinyvllm.errors import KernelError, ModelError, RankError, RequestError

PROMPTS = ["Once upon a time", "One day", "There was once a", "The"]
GOLDEN = Path(__file__).parents[1] / "tiny" / "golden"
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=3),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, logprobs=3),
    SamplingParams(temperature=0.7, seed=4, top_k=20, repetition_penalty=1.1, max_tokens=20),
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
]


def open_ranks(size: int, **options: Any) -> LLM:
    return LLM(DEFAULT_MODEL, device="CPU", max_model_len=128, max_num_seqs=4, num_blocks=64, tensor_parallel_size=size, **options)


@functools.cache
def answers(size: int, quantization: str | None) -> tuple[list[Any], np.ndarray]:
    """Tokens and log-probabilities with all their bits, and the logits of a prompt of 70 tokens in chunks."""
    with open_ranks(size, quantization=quantization, max_num_batched_tokens=48) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        logits = llm.prompt_logits(np.random.default_rng(1).integers(3, 3000, 70).tolist())
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs], logits


@pytest.mark.parametrize(
    ("size", "quantization"),
    [
        (2, "q8_0"),
        (4, "q4_k"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((4, None), (2, None), (4, "q8_0"), (2, "q4_k"))),
    ],
)
def test_ranks_have_the_bits_of_one_process(size: int, quantization: str | None) -> None:
    """Of 4 ranks, two share a key/value head; a Q4_K matrix of 256 columns is one block, which its slices cut."""
    (expected, logits), (got, got_logits) = answers(1, quantization), answers(size, quantization)
    assert got == expected
    np.testing.assert_array_equal(got_logits, logits)


UNDIVIDED = {"gpt2": "models with learned positions"}
EXPERTS = ("dots1", "ernie4.5moe", "glm4moe", "gpt-oss", "gpt-oss-clamped", "granitemoe", "mixtral", "olmoe", "qwen2moe", "qwen3moe")
EXPERTS += ("qwen3next", "qwen3.5moe", "gemma4moe", "qwen3moe-mixed", "deepseek2", "deepseek2-groups", "deepseek3", "glm4moelite")


def family_answers(model: Path, size: int, **more: Any) -> list[Any]:
    options = {"max_model_len": 128, "max_num_seqs": 2, "num_blocks": 32, "max_num_batched_tokens": 48, "skip_tokenizer_init": True}
    with LLM(model, device="CPU", tensor_parallel_size=size, **options | more) as llm:
        prompts = [{"prompt_token_ids": [*range(5, 75)]}, {"prompt_token_ids": [7, 9, 11]}]
        params = [SamplingParams(temperature=heat, seed=3, max_tokens=16, ignore_eos=True, logprobs=2) for heat in (0.0, 0.8)]
        outputs = llm.generate(prompts, params)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - SAME_DIVISION))
def test_a_family_has_the_bits_of_one_process_or_is_refused(name: str, tmp_path: Path) -> None:
    if name in UNDIVIDED:
        with pytest.raises(ModelError, match=rf"{UNDIVIDED[name]}.* are not divided yet"):
            family_answers(GOLDEN / name, 2)
        return
    model = with_wide_experts(name, tmp_path / name) if name in EXPERTS else GOLDEN / name
    assert family_answers(model, 2) == family_answers(model, 1)


def test_layers_with_heads_of_two_sizes_have_the_bits_of_one_process() -> None:
    """In two stages of two ranks. The last three of six layers read the keys and values of others, and all have inputs of their own."""
    model = GOLDEN / "gemma4"
    assert family_answers(model, 2, pipeline_parallel_size=2) == family_answers(model, 1)
    with pytest.raises(ModelError, match="the last 5 of 6 layers are in one stage, .*; use 2 stages at most"):
        family_answers(model, 1, pipeline_parallel_size=3)


@pytest.mark.long
@pytest.mark.parametrize("quantization", [None, "q8_0"])
def test_value_heads_in_the_order_of_gguf(quantization: str | None, tmp_path: Path) -> None:
    """Of two ranks each has the value heads of all key heads."""
    path = tmp_path / "model.gguf"
    write_gguf(write_delta_model(tmp_path / "model"), path, "qwen35")
    assert family_answers(path, 2, quantization=quantization) == family_answers(path, 1, quantization=quantization)


def test_experts_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Of a model with dense layers, and a shared expert with a gate; each expert has tensors of its own in the file."""
    model = with_wide_experts("qwen2moe", tmp_path / "model")
    assert family_answers(model, 2, dtype="bfloat16") == family_answers(model, 1, dtype="bfloat16")


def wide_description(name: str, folder: Path) -> Path:
    """The description alone, of a model whose matrices 8 ranks can divide: 768 features are 3 blocks of Q4_K, which slices cut."""
    widths = {"hidden_size": 256, "head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4}
    widths |= {"linear_num_key_heads": 4, "linear_num_value_heads": 16, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    widths |= {"intermediate_size": 768, "moe_intermediate_size": 768, "shared_expert_intermediate_size": 512}
    config = json.loads((GOLDEN / name / "config.json").read_text())
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {key: width for key, width in widths.items() if key in config}))
    return folder


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "size", "quantization"),
    [
        *(("qwen2moe", 2, quantization) for quantization in ("q4_k_m", "q8_0", "iq4_nl", "q6_k")),
        ("qwen3moe", 4, "q4_k"),
        ("qwen3moe", 8, "q8_0"),
        ("gpt-oss", 4, "mxfp4"),
        ("mixtral", 8, None),
        ("qwen3.5", 4, "q4_k"),
        ("qwen3.5", 8, "q8_0"),
        ("qwen3next", 2, "q4_k_m"),
        ("gemma4", 4, "q4_k"),
        ("gemma4moe", 4, "q8_0"),
    ],
)
def test_matrices_of_any_format_among_any_ranks(name: str, size: int, quantization: str | None, tmp_path: Path) -> None:
    options = {"load_format": "dummy", "quantization": quantization, "dtype": "bfloat16"}
    model = wide_description(name, tmp_path / "model")
    assert family_answers(model, size, **options) == family_answers(model, 1, **options)


@pytest.mark.long
def test_experts_in_mxfp4_as_published(tmp_path: Path) -> None:
    """With sinks, and biases of all products: a rank has those of its heads and features."""
    model = with_wide_experts("gpt-oss", tmp_path / "model")
    packed, _ = experts_in_mxfp4(read_folder(model), np.random.default_rng(3))
    save_file({name: np.ascontiguousarray(value) for name, value in packed.items()}, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (model / "config.json").write_text(json.dumps(config))
    assert family_answers(model, 2) == family_answers(model, 1)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_experts_of_a_gguf_file(kind: str, tmp_path: Path) -> None:
    """All experts of a layer are one tensor, of which a rank takes some rows, or columns, of each."""
    folder, path = with_wide_experts("qwen3moe", tmp_path / "model"), tmp_path / "model.gguf"
    write_gguf(folder, path, "qwen3moe", kind)
    assert family_answers(path, 2) == family_answers(path, 1)


def start(llm: LLM) -> list[int]:
    """A request that runs on and on, in its first steps; the processes of the other ranks."""
    llm.engine.add("long", [1, 5, 9], SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
    for _ in range(3):
        llm.engine.step()
    assert llm.engine.runner.ranks is not None
    return llm.engine.runner.ranks.pids


def run_on(llm: LLM) -> None:
    for _ in range(120):
        llm.engine.step()


@pytest.mark.parametrize(
    ("sent", "limit", "reason"),
    [
        (signal.SIGKILL, None, r"rank 1 \(process \d+\) ended with code -9"),
        (signal.SIGSTOP, "SILENT_SECONDS", r"rank 1 \(process \d+\) hangs: no heartbeat for \d+ s"),
        (signal.SIGSTOP, "STEP_SECONDS", "a rank hangs: a step took more than 1 s"),
    ],
)
def test_a_rank_that_is_killed_or_hangs_ends_the_engine(
    sent: signal.Signals, limit: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a step that waits for ever: the other ranks are ended, and each later step says why."""
    with open_ranks(2) as llm:
        (pid,) = start(llm)
        if limit is not None:
            monkeypatch.setattr(ranks, limit, 1.0)
        os.kill(pid, sent)
        with pytest.raises(RankError, match=reason):
            run_on(llm)
        with pytest.raises(RankError, match=reason):
            llm.engine.step()
    assert not alive(pid)


@pytest.mark.long
def test_an_idle_rank_that_sends_heartbeats_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step runs for much longer than the silence that ends an engine."""
    with open_ranks(2) as llm:
        start(llm)
        beats = []
        receives = ranks.Ranks._receives
        monkeypatch.setattr(ranks.Ranks, "_receives", lambda self, rank: beats.append(rank) or receives(self, rank))
        monkeypatch.setattr(ranks, "SILENT_SECONDS", 5.0)
        deadline = time.monotonic() + 60
        while len(beats) * ranks.BEAT_SECONDS < 6:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run_on(llm)


def test_a_step_that_fails_in_rank_0_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait in that step: its sums must not meet those of the next one."""
    with open_ranks(2) as llm:
        start(llm)

        def fail(*_: object, **__: object) -> None:
            raise RuntimeError("planted")

        monkeypatch.setattr("tinyvllm.runner.runner.Captured.__call__", fail)
        llm.engine.step()  # the engine recovers from it, as it does with one process
        monkeypatch.undo()
        with pytest.raises(RankError, match="a step failed in rank 0"):
            run_on(llm)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ranks_end_with_rank_0() -> None:
    code = (
        "from tests.engine.test_tensor_parallel import open_ranks, start, sys\n"
        "llm = open_ranks(2)\n"
        "print(*start(llm), flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert process.stdin is not None and process.stdout is not None
    pids = [int(text) for text in process.stdout.readline().split()]
    assert len(pids) == 1 and alive(pids[0])
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 60
    while alive(pids[0]):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="tensor_parallel_size=8: 4 query heads and 2 key/value heads cannot be divided"):
        open_ranks(8)
    with pytest.raises(KernelError, match="TINYVLLM_KERNELS"), kernels("ref"):
        open_ranks(2)
    with pytest.raises(ModelError, match="models with learned positions are not divided yet"):
        family_answers(GOLDEN / "gpt2", 2)
    with pytest.raises(ModelError, match="32 features of blk.0.ffn_gate_exps.weight .* in BF16, and 2 ranks would need 64"):
        family_answers(GOLDEN / "qwen3moe", 2)


def test_what_needs_hidden_states_is_refused() -> None:
    with open_ranks(2) as llm:
        with pytest.raises(RequestError, match="hidden states are not available with tensor_parallel_size above 1"):
            llm.embed("One day")
        assert llm.generate("One day", SamplingParams(max_tokens=1)), "that request alone has failed"
