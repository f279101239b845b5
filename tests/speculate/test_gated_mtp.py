"""The layer for drafts of models with recurrent states against its formulas, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.speculate import gated
from tests.speculate.gated import GOLDEN, GatedOracle
from tests.speculate.heads import Ends, Tensors, runner_of
from tests.speculate.test_heads import Text, deliver, drafts, expect
from tinyvllm import LLM
from tinyvllm.config.engine import resolve
from tinyvllm.errors import ModelError
from tinyvllm.runner.opened import open_model
from tinyvllm.speculate.eagle_drafter import EagleDrafter
from tinyvllm.speculate.gated_mtp import gated_mtp_file, load_gated_mtp, read_gated_mtp
from tinyvllm.speculate.protocol import FINAL
from tinyvllm.weights.checkpoint import open_checkpoint

LAYERS = [("qwen3.5", False), ("qwen3next", False), ("qwen3.5moe", True)]  # and whether all experts are in two tensors


def written(folder: Path, name: str, tensors: Tensors, **config: Any) -> Path:
    """A checkpoint of the layer alone, with the model's description."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(gated.config_of(name) | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def model_config(name: str) -> Any:
    return open_model(resolve(GOLDEN / name, device="CPU"), "CPU").config


def drafter_of(folder: Path, name: str, joined: bool) -> tuple[EagleDrafter, GatedOracle]:
    tensors, config = gated.mtp_tensors(name, joined=joined), model_config(name)
    rng = np.random.default_rng(9)
    ends = Ends(*(rng.normal(0, 1.0, (config.vocab_size, config.dim)).astype(np.float32) for _ in range(2)))
    runner: Any = runner_of(ends)
    runner.config = config
    file = gated_mtp_file(open_checkpoint(written(folder, name, tensors)), config)
    return EagleDrafter(runner, load_gated_mtp(file, runner), 4), GatedOracle(name, tensors, ends)


@pytest.mark.parametrize(
    ("name", "joined"), [pytest.param(*layer, id=layer[0], marks=() if layer[0] == "qwen3.5" else pytest.mark.long) for layer in LAYERS]
)
def test_guesses_are_what_the_formulas_say(name: str, joined: bool, tmp_path: Path) -> None:
    """A prompt in two chunks, then steps with none, some and all guesses accepted; a second text joins on the way."""
    drafter, oracle = drafter_of(tmp_path, name, joined)
    assert drafter.method == "mtp" and drafter.state_layers == (FINAL,)
    width = oracle.table.shape[1]
    first, second = Text(0, 22, width), Text(1, 5, width)
    for text in (first, second):
        text.sequence.prompt_token_ids[:] = [token % len(oracle.table) for token in text.sequence.prompt_token_ids]
    deliver(drafter, [first], [18])
    first.append([3])
    deliver(drafter, [first], [4])
    expect(oracle, first, drafts(drafter, [first])[0])
    second.append([11])
    for accepted in ([0, 4], [2, 0], [4, 3]):
        first.append([*range(20, 20 + accepted[0]), 40])
        if second.computed:
            second.append([*range(20, 20 + accepted[1]), 40])
        deliver(drafter, [first, second], [accepted[0] + 1, len(second.tokens) - 1 - second.computed])
        for text, found in zip([second, first], drafts(drafter, [second, first]), strict=True):
            expect(oracle, text, found)


def test_a_layer_with_a_dense_mlp_in_a_model_of_experts(tmp_path: Path) -> None:
    """The file says which it is."""
    layer = gated.mtp_tensors("qwen3.5")
    config = replace(model_config("qwen3next"), dense_hidden_dim=96)
    shape, block, _ = read_gated_mtp(gated_mtp_file(open_checkpoint(written(tmp_path, "qwen3.5", layer)), config), config)
    assert shape.dense_layers == {0} and "router" not in block.products()


@pytest.mark.parametrize(
    ("change", "config", "words"),
    [
        ({"mtp.layers.1.input_layernorm.weight": np.ones(64, np.float32)}, {}, ["has 2 layers mtp.layers.*", "supported is one"]),
        ({"mtp.embed_tokens.weight": np.ones((4, 4), np.float32)}, {}, ["mtp.embed_tokens.weight", "does not account for"]),
        ({}, {"mtp_use_dedicated_embeddings": True}, ["mtp_use_dedicated_embeddings", "not supported"]),
        ({"mtp.fc.weight": np.ones((64, 64), np.float32)}, {}, ["mtp.fc.weight", "[64, 64]", "[64, 128]"]),
        ({"mtp.norm.weight": None}, {}, ["no tensor 'mtp.norm.weight'"]),
        ({"model.layers.0.linear_attn.conv1d.weight": np.ones((8, 4, 1), np.float32)}, {}, ["MLX", "published checkpoint as model"]),
    ],
)
def test_what_is_refused(change: dict[str, Any], config: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    tensors = {name: each for name, each in (gated.mtp_tensors("qwen3.5") | change).items() if each is not None}
    model = model_config("qwen3.5")
    with pytest.raises(ModelError) as raised:
        read_gated_mtp(gated_mtp_file(open_checkpoint(written(tmp_path, "qwen3.5", tensors, **config)), model), model)
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_model_without_the_layer_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"method mtp needs the layer mtp.layers.0.\* .*has none; .* as model, or use the method suffix"):
        LLM(str(GOLDEN / "qwen3.5"), device="CPU", speculative_config={"method": "mtp", "num_speculative_tokens": 2})
