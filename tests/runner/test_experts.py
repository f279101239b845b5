"""How a model holds the experts of its layers: packed as the file has them or as the plan wants them, one matrix of all experts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.quant.blocks import finite_blocks
from tests.runner.test_weights import GOLDEN, load
from tests.tiny.to_gguf import gguf_tensors, read_folder, write_gguf
from tests.weights.test_imatrix import write_dat
from tinyvllm.quant.formats import FORMATS
from tinyvllm.quant.layouts import quantize_rows, unpack_rows
from tinyvllm.weights.imatrix import read_imatrix

FOLDER, X, WIDTH = GOLDEN / "qwen3moe", 3, 256
NAMES = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A random model of one layer whose rows are whole blocks of 256; three experts."""
    config = json.loads((FOLDER / "config.json").read_text()) | {"hidden_size": WIDTH, "moe_intermediate_size": WIDTH}
    config |= {"num_hidden_layers": 1, "num_local_experts": X}
    random, tensors = np.random.default_rng(0), {}
    for name, tensor in read_folder(FOLDER).items():
        if "layers.1." in name or ".experts." in name:
            continue
        axis = 0 if tensor.ndim == 1 or "o_proj" in name else 1  # the one that is the model's width
        shape = tuple(WIDTH if size == 64 and i == axis else size for i, size in enumerate(tensor.shape))
        tensors[name] = random.standard_normal((X, WIDTH) if ".gate.weight" in name else shape).astype(np.float32)
    for expert in range(X):
        for part in NAMES:
            values = random.standard_normal((WIDTH, WIDTH)).astype(np.float32)
            tensors[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"] = values
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def experts_of(tensors: dict[str, np.ndarray], part: str) -> np.ndarray:
    """float32 [X * O, I]."""
    return np.concatenate([tensors[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"] for expert in range(X)])


def test_tensors_of_one_expert_each_become_one_matrix_in_the_format_of_the_plan(wide):
    tensors = load_file(wide / "model.safetensors")
    for format, rounded in (("F32", lambda rows: rows), ("Q4_K", lambda rows: unpack_rows("Q4_K", quantize_rows("Q4_K", rows)))):
        weights = load(wide, format=format).model.blk[0].weights
        assert (weights.ffn_in.weight.format, weights.ffn_down.weight.format, weights.router.weight.format) == (format, format, "F32")
        both = np.concatenate([experts_of(tensors, part) for part in ("gate", "up")])
        np.testing.assert_array_equal(weights.ffn_in.weight.dense().numpy(), rounded(both))
        np.testing.assert_array_equal(weights.ffn_down.weight.dense().numpy(), rounded(experts_of(tensors, "down")))
        np.testing.assert_array_equal(weights.router.weight.dense().numpy(), tensors["model.layers.0.mlp.gate.weight"])


def test_a_mix_gives_down_of_experts_more_bits(wide):
    weights = load(wide, format="Q4_K_M").model.blk[0].weights
    assert (weights.ffn_in.weight.format, weights.ffn_down.weight.format, weights.router.weight.format) == ("Q4_K", "Q6_K", "F32")


def test_each_expert_has_its_own_importance(wide):
    columns = np.random.default_rng(1).uniform(0, 10, (X, WIDTH)).astype(np.float32)
    imatrix = read_imatrix(write_dat(wide / "i.dat", {"blk.0.ffn_down_exps.weight": (1, columns.reshape(-1))}))
    got = load(wide, format="Q4_K", imatrix=imatrix).model.blk[0].weights.ffn_down.weight.dense().numpy().reshape(X, WIDTH, WIDTH)
    rows = experts_of(load_file(wide / "model.safetensors"), "down").reshape(X, WIDTH, WIDTH)
    for expert in range(X):
        np.testing.assert_array_equal(got[expert], unpack_rows("Q4_K", quantize_rows("Q4_K", rows[expert], columns[expert])))
    assert not np.array_equal(got[1], unpack_rows("Q4_K", quantize_rows("Q4_K", rows[1], columns[0])))


@pytest.mark.parametrize(("gate", "down"), [("Q4_K", "Q6_K"), ("Q8_0", "Q8_0")])
def test_packed_experts_of_a_gguf_file_stay_packed(wide, gate, down):
    """Their tensors have three dimensions; up is in another format than gate."""
    config = json.loads((wide / "config.json").read_text())
    tensors = gguf_tensors(read_folder(wide), config, "qwen3moe")
    formats = {"gate": gate, "up": "Q5_0", "down": down}
    rows = {
        NAMES[part]: (format, finite_blocks(format, X * WIDTH * WIDTH // FORMATS[format].elements).reshape(X, WIDTH, -1))
        for part, format in formats.items()
    }
    for name in rows:
        del tensors[f"blk.0.{name}.weight"]
    write_gguf(wide, wide / "m.gguf", "qwen3moe", tensors=tensors, stored={f"blk.0.{name}.weight": stored for name, stored in rows.items()})
    loaded = load(wide / "m.gguf")
    weights = loaded.model.blk[0].weights
    assert (weights.ffn_in.weight.format, weights.ffn_down.weight.format) == (f"{gate}+Q5_0", down)
    want = [unpack_rows(format, blocks.reshape(X * WIDTH, -1)) for format, blocks in rows.values()]
    np.testing.assert_array_equal(weights.ffn_in.weight.dense().numpy(), np.concatenate(want[:2]))
    np.testing.assert_array_equal(weights.ffn_down.weight.dense().numpy(), want[2])
    assert not loaded.loader.unpacked
