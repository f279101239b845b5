"""A plan says what a loaded engine then takes and runs; what is damaged is the loader's error, and what does not fit is said."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor

from tests.runner.test_weights import GOLDEN, write
from tinyvllm import LLM
from tinyvllm.cli import main
from tinyvllm.config.engine import DEFAULT_MODEL, resolve
from tinyvllm.engine.frontend import plan_engine
from tinyvllm.engine.tools.plan import Plan
from tinyvllm.errors import ArgumentError, FormatError, ModelError, OutOfMemoryError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def planned(path: Path | None, memory: int | None = None, **options: Any) -> Plan:
    return plan_engine(resolve(path, device="CPU", **options), memory, speed=False)


def held_bytes(*roots: object) -> int:
    """Bytes of all realized tensors that can be reached from `roots`, each memory once."""
    seen: dict[int, object] = {}  # alive, so that no other object gets their ids
    buffers: dict[int, int] = {}

    def visit(value: object) -> None:
        if id(value) in seen:
            return
        seen[id(value)] = value
        if isinstance(value, Tensor):
            if value.uop.is_realized:
                buffers[id(value.uop.base.buffer)] = value.uop.base.buffer.nbytes
        elif isinstance(value, (list, tuple)):
            for one in value:
                visit(one)
        elif isinstance(value, dict):
            visit(list(value.values()))
        elif type(value).__module__.startswith(("tinyvllm", "tinygrad.nn", "tinygrad.llm")):
            visit(list(vars(value).values()))

    visit(roots)
    return sum(buffers.values())


@pytest.mark.parametrize("quantization", ["bf16", "q8_0", "q4_k_m"])
@pytest.mark.parametrize("model", ["bundled", "random"])
def test_bytes_are_those_of_the_loaded_engine(tmp_path, model, quantization):
    options: dict[str, Any] = {"num_blocks": 24, "max_num_seqs": 2, "kv_cache_dtype": "int8" if quantization == "q8_0" else "auto"}
    options |= {"dtype": "bfloat16"} if quantization == "bf16" else {"quantization": quantization}
    if model == "random":
        write(tmp_path, hidden=256, intermediate=768)
    path = tmp_path if model == "random" else DEFAULT_MODEL
    plan = planned(path, **options)
    with LLM(path, device="CPU", skip_tokenizer_init=True, **options) as llm:
        runner, start = llm.engine.runner, plan.sizes.start
        assert plan.sizes.memory.weights == runner.weight_bytes
        assert plan.sizes.memory.weights == pytest.approx(held_bytes(runner.model), rel=0.02)
        pool = sum(cache.keys.nbytes() for cache in runner.pool.layers)
        assert plan.sizes.memory.kv_token == pytest.approx(pool / (24 + 1) / 16, rel=0.02)
        assert start is not None and start.kv_bytes == pytest.approx(pool * 24 / 25, rel=0.02)
        assert (start.num_blocks, start.max_model_len) == (runner.pool.num_blocks, runner.max_model_len)
        assert plan.formats.keys() - {"F32"} == runner.weight_formats - {"F32"}


def test_the_bytes_of_each_rank_are_those_of_the_loaded_one():
    """The tied table is in both stages; a rank of two has half of each head and matrix, and the whole table."""
    plan = planned(DEFAULT_MODEL, num_blocks=24, pipeline_parallel_size=2)
    last, first = plan.sizes.ranks
    assert (first.layers, last.layers) == ((0, 3), (3, 6)) and first.kv_token + last.kv_token == plan.sizes.memory.kv_token
    with LLM(DEFAULT_MODEL, device="CPU", skip_tokenizer_init=True, num_blocks=24, pipeline_parallel_size=2) as llm:
        runner = llm.engine.runner
        assert last.weights == held_bytes(runner.model) and last.kv_token * 16 * 24 == runner.pool.block_bytes * runner.pool.num_blocks
        assert runner.weight_bytes == plan.sizes.memory.weights and plan.sizes.start.num_blocks == runner.pool.num_blocks
    whole = planned(DEFAULT_MODEL, num_blocks=24).sizes
    table = first.weights + last.weights - whole.memory.weights
    tensor = planned(DEFAULT_MODEL, num_blocks=24, tensor_parallel_size=2).sizes
    assert 0 < table < first.weights and tensor.memory.kv_token == whole.memory.kv_token == 2 * tensor.ranks[1].kv_token
    assert abs(sum(one.weights for one in tensor.ranks) - 2 * table - whole.memory.weights) < whole.memory.weights / 100


def test_each_rank_has_the_caches_and_states_of_its_layers():
    """Of three stages the middle one alone has keys and values, the others states; heads of two sizes are divided by kind."""
    options = {"num_blocks": 16, "max_num_seqs": 2, "max_model_len": 128}
    states, whole = (planned(GOLDEN / "qwen3.5", pipeline_parallel_size=n, **options).sizes for n in (3, 1))
    assert [one.kv_token for one in states.ranks] == [0, whole.memory.kv_token, 0]
    assert whole.memory.scratch < states.memory.scratch < 3 * whole.memory.scratch, "the states are counted once"
    heads, whole = (planned(GOLDEN / "gemma4", tensor_parallel_size=n, pipeline_parallel_size=n, **options).sizes for n in (2, 1))
    assert sum(one.kv_token for one in heads.ranks) == heads.memory.kv_token == whole.memory.kv_token
    assert [one.layers for one in heads.ranks] == [(1, 6), (1, 6), (0, 1), (0, 1)]


def test_ranks_that_divide_contexts_have_all_weights_and_a_part_of_each_block():
    plan = planned(DEFAULT_MODEL, num_blocks=4, context_parallel_size=2)
    first, second = plan.sizes.ranks
    assert first.layers == second.layers == (0, 6) and first.kv_token == second.kv_token == plan.sizes.memory.kv_token // 2
    whole = planned(DEFAULT_MODEL, num_blocks=128).sizes
    assert plan.sizes.start.kv_bytes == whole.start.kv_bytes and 1.5 * whole.memory.weights < plan.sizes.memory.weights
    with LLM(DEFAULT_MODEL, device="CPU", skip_tokenizer_init=True, num_blocks=4, context_parallel_size=2) as llm:
        runner = llm.engine.runner
        assert first.weights == held_bytes(runner.model) and runner.weight_bytes == plan.sizes.memory.weights
        assert first.kv_token * 512 * 4 == runner.pool.block_bytes * runner.pool.num_blocks


def test_kernels_are_those_that_a_loaded_engine_chooses():
    from tinyvllm.backends import registry
    from tinyvllm.engine.tools.one_off import kernel_choices

    plan = planned(None, quantization="q4_k_m", num_blocks=16)
    registry.forget_choices()
    with LLM(device="CPU", skip_tokenizer_init=True, quantization="q4_k_m", num_blocks=16) as llm:
        chosen = {choice[:3] for choice in kernel_choices(llm.engine) if "at load" not in choice[1]}
    steps = {(one.op, one.shape, one.variant) for one in plan.kernels if one.shape}
    assert steps == {choice for choice in chosen if choice[0] not in ("advance", "kv_copy", "sample")}
    assert {one.op for one in plan.kernels if not one.shape} == {"advance", "kv_copy", "sample"}


def sparse_model(folder: Path) -> Path:
    """Safetensors of 8B's layer shapes, two of them: a header and a hole."""
    folder.mkdir(exist_ok=True)
    E, F, V, layer = 4096, 14336, 32768, "model.layers.{}."
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [V, E], "lm_head.weight": [V, E], "model.norm.weight": [E]}
    for i in range(2):
        names = {"self_attn.q_proj": [E, E], "self_attn.k_proj": [1024, E], "self_attn.v_proj": [1024, E], "self_attn.o_proj": [E, E]}
        names |= {"mlp.gate_proj": [F, E], "mlp.up_proj": [F, E], "mlp.down_proj": [E, F]}
        names |= {"input_layernorm": [E], "post_attention_layernorm": [E]}
        shapes |= {f"{layer.format(i)}{name}.weight": shape for name, shape in names.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Path:
    return sparse_model(tmp_path_factory.mktemp("sparse"))


def test_the_best_quantization_that_fits(sparse):
    """In 1 GiB neither bfloat16 nor eight bits fit; no page of the file is read."""
    plan = planned(sparse, memory=1 << 30, max_num_seqs=1)
    sizes, best = plan.sizes, plan.sizes.best
    assert sizes.start is None and sizes.refusal is not None and "weights need 1345 MiB" in sizes.refusal
    own = next(one for one in sizes.candidates if one.quantization is None)
    assert not own.fits and own.weights == sizes.memory.weights and best is not None and best.quantization is not None
    assert all(one.weights > best.weights for one in sizes.candidates[: sizes.candidates.index(best)])
    assert f"with --quantization {best.quantization}, one sequence of {best.longest} tokens fits" in str(sizes)
    as_told = planned(sparse, memory=1 << 30, max_num_seqs=1, quantization=best.quantization).sizes
    assert as_told.start is not None and as_told.memory.weights == best.weights
    assert (sparse / "model.safetensors").stat().st_blocks * 512 < 1 << 20


def test_contexts_and_sequences_share_the_room(sparse):
    sizes = planned(sparse, memory=4 << 30, max_num_seqs=6, quantization="q4_k").sizes
    room = sizes.memory.available - sizes.memory.fixed
    assert [fit.sequences for fit in sizes.fits] == [1, 2, 4, 6] and sizes.fits[0].context == 8192
    for fit in sizes.fits:
        assert fit.context % 16 == 0 and fit.sequences * fit.context * sizes.memory.kv_token <= room
    int8 = planned(sparse, memory=4 << 30, quantization="q4_k", kv_cache_dtype="int8").sizes.memory.kv_token
    assert int8 < 0.55 * sizes.memory.kv_token


def test_no_room_at_all(sparse):
    sizes = planned(sparse, memory=100 << 20).sizes
    assert sizes.best is None and sizes.fits == [] and "use a smaller model" in str(sizes)


def test_a_packed_file_is_planned_as_it_is(tmp_path):
    from tests.tiny.to_gguf import write_gguf

    write_gguf(GOLDEN / "llama2", tmp_path / "m.gguf", "llama", "Q8_0")
    assert [one.quantization for one in planned(tmp_path / "m.gguf").sizes.candidates] == [None]


def damaged(folder: Path, kind: str) -> Path:
    path = sparse_model(folder) / "model.safetensors"
    with path.open("rb") as file:
        data = file.read(1 << 14)
    if kind == "a header beyond the file":
        path.write_bytes((1 << 40).to_bytes(8, "little") + data[8:])
    elif kind == "truncated":
        path.write_bytes(data[:2000])
    elif kind == "a wrong shape":
        (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 2048, "head_dim": 128}))
    elif kind == "a tensor less":
        (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    elif kind == "heads that cannot be divided":
        (folder / "config.json").write_text(json.dumps(CONFIG | {"num_key_value_heads": 7}))
    else:
        (folder / "config.json").write_text("[" * 100_000)
    return folder


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("a header beyond the file", FormatError, "has a header of"),
        ("truncated", FormatError, "truncated"),
        ("a wrong shape", ModelError, "must have the shape"),
        ("a tensor less", ModelError, "holds no tensor"),
        ("heads that cannot be divided", ModelError, "cannot be divided"),
        ("a bomb of brackets", FormatError, "config.json"),
    ],
)
def test_a_hostile_header_is_the_loaders_error(tmp_path, kind, error, message):
    with pytest.raises(error, match=message):
        planned(damaged(tmp_path / "m", kind))


def test_an_engine_that_refuses_to_start_says_the_plan(sparse, monkeypatch):
    monkeypatch.setattr("tinyvllm.runner.memory.free_memory", lambda device: 1 << 30)
    plan = planned(sparse, max_num_seqs=1)
    with pytest.raises(OutOfMemoryError, match="weights need 1345 MiB") as refused:
        LLM(sparse, device="CPU", max_num_seqs=1, skip_tokenizer_init=True)
    assert str(plan.sizes) in str(refused.value) and plan.sizes.refusal in str(refused.value)


def test_a_server_that_refuses_to_start_says_the_plan(sparse, monkeypatch, capsys):
    """Alone, and where a budget of all models leaves too little: the same line, from the same bytes."""
    pytest.importorskip("fastapi")
    monkeypatch.setattr("tinyvllm.runner.memory.free_memory", lambda device: 1 << 30)
    plan = planned(sparse, max_num_seqs=1)
    serve = ["serve", "--model", str(sparse), "--device", "cpu", "--max-num-seqs", "1", "--skip-tokenizer-init", "--port", "0", "--quiet"]
    assert main(serve) == 1
    error = capsys.readouterr().err
    assert error.startswith("tinyvllm: error: memory: the weights need 1345 MiB") and str(plan.sizes) in error and error.count("\n") == 1
    assert main([*serve, "--memory-budget", "1GiB"]) == 1
    error = capsys.readouterr().err
    limited = str(plan.sizes).replace(plan.sizes.memory.limit, "--memory-budget")
    assert (
        "does not fit --memory-budget 1024 MiB: memory: the weights need 1345 MiB" in error and limited in error and error.count("\n") == 1
    )


def test_the_refusal_stays_where_there_is_no_memory_for_a_plan(sparse, monkeypatch):
    def fail(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tinyvllm.runner.memory.free_memory", lambda device: 1 << 30)
    monkeypatch.setattr("tinyvllm.engine.tools.plan_sizes.make_sizes", fail)
    with pytest.raises(OutOfMemoryError, match=r"weights need 1345 MiB.*not even memory for a plan"):
        LLM(sparse, device="CPU", max_num_seqs=1, skip_tokenizer_init=True)


def test_the_command_prints_what_llm_plan_returns(sparse, capsys):
    assert main(["plan", str(sparse), "--device", "cpu", "--memory", "1G", "--max-num-seqs", "1", "--no-speed", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    plan = LLM(sparse, device="cpu", memory=1 << 30, max_num_seqs=1, speed=False, plan=True).plan
    assert record == json.loads(json.dumps(plan.record()))
    assert record["sizes"]["best"] == dataclasses.asdict(plan.sizes.best)
    assert main(["plan", "--device", "cpu", "--no-speed", "--quantization", "q4_k_m"]) == 0
    text = capsys.readouterr().out
    assert "the most bits that fit: as in the file" in text and "norm_gate_up_silu" in text and "no speed is predicted" in text


def test_an_llm_with_a_plan_has_no_engine(sparse):
    with LLM(sparse, device="cpu", plan=True, memory="1G", speed=False, max_num_seqs=1) as llm:
        assert llm.plan is not None and llm.plan.sizes.memory.available == 1 << 30
        with pytest.raises(ArgumentError, match="plan=True, which loads no model"):
            llm.generate("x")
    with pytest.raises(ArgumentError, match="belong to plan=True"):
        LLM(sparse, device="cpu", memory="1G")


def test_a_speed_where_the_whole_context_is_a_prompt(tiny_model):
    """The prompt that is timed leaves room for a token of the answer."""
    assert plan_engine(resolve(tiny_model, device="CPU", max_model_len=64, max_num_seqs=2)).speed is not None


def test_help_loads_no_tinygrad():
    code = "import sys; from tinyvllm.cli import main; main(['plan', '--help']); sys.exit('tinygrad' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--kv-cache-dtype" in done.stdout
