"""Adapters from outside: what is read, what is refused by its name, and files that are damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.tiny.adapters import ATTENTION, write_adapter
from tinyvllm.errors import FormatError, ModelError
from tinyvllm.weights.peft import CONFIG_NAME, WEIGHTS_NAME, read_adapter

PREFIX = "base_model.model.model.layers"
Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def adapter(tiny_model, tmp_path):
    def write(**settings):
        return write_adapter(tmp_path / "adapter", tiny_model, modules=ATTENTION[:2], rank=4, alpha=8.0, settings=settings)

    return write


def change(folder, edit):
    tensors = load_file(folder / WEIGHTS_NAME)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS_NAME)


@pytest.mark.parametrize(("settings", "scale"), [
    ({}, 2.0),
    ({"use_rslora": True}, 4.0),
    ({"alpha_pattern": {"q_proj": 2}}, 0.5),
    ({"alpha_pattern": {Q: 6.0, "k_proj": 1}}, 1.5),
    ({"alpha_pattern": {"proj": 1, "^model.layers.0.self_attn.q_proj": 1}}, 2.0),
    ({"target_modules": ".*(q|k)_proj", "init_lora_weights": True, "layers_to_transform": [0, 1], "eva_config": None}, 2.0),
    ({"target_modules": "all-linear", "trainable_token_indices": None, "use_dora": False, "new_key": None}, 2.0),
])  # fmt: skip
def test_scales(adapter, settings, scale):
    module = read_adapter(adapter(**settings)).modules[Q]
    a, b = module.read()
    stored = load_file(adapter() / WEIGHTS_NAME)[f"{PREFIX}.1.self_attn.q_proj.lora_B.weight"]
    assert module.scale == pytest.approx(scale) and module.rank == 4 and a.dtype == b.dtype == np.float32
    np.testing.assert_allclose(b, stored * scale, rtol=1e-6)


def test_ranks_by_module_and_names_of_saved_adapters(adapter, tiny_model, tmp_path):
    folder = adapter(rank_pattern={"k_proj": 2})

    def smaller(tensors):
        for name in [name for name in tensors if "k_proj" in name]:
            tensors[name] = np.ascontiguousarray(tensors[name][:2] if ".lora_A." in name else tensors[name][:, :2])

    change(folder, smaller)
    modules = read_adapter(folder).modules
    assert {modules[f"model.layers.0.self_attn.{part}_proj"].rank for part in "qk"} == {2, 4}
    assert modules["model.layers.0.self_attn.k_proj"].scale == 4.0
    half = write_adapter(tmp_path / "half", tiny_model, modules=ATTENTION[:1], infix="default.", dtype=np.float16)
    a, _ = read_adapter(half).modules[Q].read()
    assert (a == load_file(half / WEIGHTS_NAME)[f"{PREFIX}.1.self_attn.q_proj.lora_A.default.weight"].astype(np.float32)).all()


@pytest.mark.parametrize(("settings", "named"), [
    ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
    ({"use_dora": True}, "use_dora True"),
    ({"bias": "all"}, "bias 'all'"),
    ({"lora_bias": True}, "lora_bias True"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out True"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights 'pissa_niter_16'"),
    ({"a_key_of_next_year": 3}, "a_key_of_next_year 3"),
    ({"rank_pattern": {".*q_proj": 4}}, "rank_pattern has the regular expression"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
    ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
    ({"target_modules": ["q_proj"]}, "target_modules does not name"),
    ({"target_modules": [3]}, "target_modules must be"),
    ({"layers_to_transform": 0}, "layers_to_transform does not have layer 1"),
    ({"r": 8}, "its rank is 8"),
    ({"r": 0}, "r must be an integer of 1 or more"),
    ({"lora_alpha": None, "use_rslora": "yes"}, "use_rslora"),
])  # fmt: skip
def test_what_changes_the_computation_is_refused_by_its_name(adapter, settings, named):
    with pytest.raises((ModelError, FormatError), match=named.replace("[", r"\[")):
        read_adapter(adapter(**settings))


@pytest.mark.parametrize(("edit", "named"), [
    (lambda t: t.update({f"{PREFIX}.0.self_attn.q_proj.lora_magnitude_vector": np.ones(64, np.float32)}), "lora_magnitude_vector"),
    (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": np.ones((4, 64), np.float32)}), "lm_head"),
    (lambda t: t.update({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 9), np.float32)}), "embed_tokens"),
    (lambda t: t.pop(f"{PREFIX}.1.self_attn.q_proj.lora_B.weight"), "has lora_A only"),
    (lambda t: t.update({f"{PREFIX}.1.self_attn.q_proj.lora_B.default.weight": np.ones((64, 4), np.float32)}), "are of one module"),
    (lambda t: t.update({f"{PREFIX}.1.self_attn.q_proj.lora_A.weight": np.ones((4, 64), np.int32)}), "is I32"),
    (lambda t: t.update({f"{PREFIX}.1.self_attn.q_proj.lora_A.weight": np.ones((4, 8, 8), np.float32)}), "expected a matrix"),
    (lambda t: t.clear(), "has no tensors"),
])  # fmt: skip
def test_tensors_that_do_not_belong_together(adapter, edit, named):
    folder = adapter()
    change(folder, edit)
    with pytest.raises((ModelError, FormatError), match=named):
        read_adapter(folder)


def test_numbers_must_be_finite(adapter):
    folder = adapter()
    change(folder, lambda tensors: tensors[f"{PREFIX}.1.self_attn.q_proj.lora_B.weight"].__setitem__((3, 1), np.inf))
    with pytest.raises(FormatError, match="not finite"):
        read_adapter(folder).modules[Q].read()


def test_a_rank_of_nothing_is_refused(adapter):
    """rank_pattern may say 0, and the file have matrices without a row: nothing is divided by it."""
    folder = adapter(rank_pattern={"q_proj": 0})

    def empty(tensors):
        for name in [name for name in tensors if ".q_proj." in name]:
            shape = tensors[name].shape
            tensors[name] = np.zeros((0, shape[1]) if "lora_A" in name else (shape[0], 0), np.float32)

    change(folder, empty)
    with pytest.raises((ModelError, FormatError), match=r"rank 0; supported are ranks from 1 to 64|no elements|empty"):
        read_adapter(folder)


def test_a_scale_beyond_float32_is_refused(adapter):
    module = read_adapter(adapter(alpha_pattern={"q_proj": 1e300})).modules[Q]
    with pytest.raises(FormatError, match="beyond float32 when scaled by"):
        module.read()


def test_ranks_are_bounded(tiny_model, tmp_path):
    with pytest.raises(ModelError, match="rank 65; supported are ranks from 1 to 64"):
        read_adapter(write_adapter(tmp_path, tiny_model, modules=ATTENTION[:1], rank=65))


@pytest.mark.parametrize("damage", [
    lambda folder: (folder / WEIGHTS_NAME).write_bytes((folder / WEIGHTS_NAME).read_bytes()[:-100]),
    lambda folder: (folder / WEIGHTS_NAME).write_bytes((1 << 40).to_bytes(8, "little")),
    lambda folder: (folder / CONFIG_NAME).write_text("[" * 100_000),
    lambda folder: (folder / CONFIG_NAME).write_text(json.dumps(["LORA"])),
    lambda folder: (folder / CONFIG_NAME).unlink(),
    lambda folder: (folder / WEIGHTS_NAME).rename(folder / "adapter_model.bin"),
])  # fmt: skip
def test_damaged_files(adapter, damage):
    folder = adapter()
    damage(folder)
    with pytest.raises((ModelError, FormatError)) as caught:
        read_adapter(folder)
    assert len(str(caught.value)) < 500
    if (folder / "adapter_model.bin").is_file():
        assert "save the adapter as safetensors" in str(caught.value)
