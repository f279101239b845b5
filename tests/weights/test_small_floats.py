"""Checkpoints of floats of a few bits: every matrix equals the formula of its kind, without a lost bit, and contradictions are errors."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.tiny import quantized, small_floats
from tests.tiny.quantized import ct_settings, mlx_settings
from tests.tiny.small_floats import (
    E4M3,
    E5M2,
    NF4,
    bitsandbytes,
    fp8,
    int8_rows,
    modelopt_fp8,
    modelopt_nvfp4,
    modelopt_settings,
    mxfp4,
    mxfp8,
    nvfp4,
    settings,
)
from tinyvllm.errors import FormatError, ModelError
from tinyvllm.quant.layouts import unpack_rows
from tinyvllm.weights.checkpoint import open_checkpoint
from tinyvllm.weights.mapping import BuiltRecord
from tinyvllm.weights.quantized.notes import describe

Q = "model.layers.0.self_attn.q_proj"
FINE = settings("fp8", activation_scheme="dynamic", weight_block_size=[128, 128], fmt="e4m3")
BNB = settings("bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")


def ct(format: str, bits: int, strategy: str, group: int | None = None, **more: Any) -> dict[str, Any]:
    return ct_settings(format, bits, strategy, group, type="float", **more)


KINDS: dict[str, tuple[dict[str, Any], quantized.Quantize, str]] = {
    "fp8 fine-grained": (FINE, fp8((128, 128)), "FP8_G128"),
    "fp8 with powers of two": (FINE, fp8((128, 128), powers=True), "FP8_G128"),
    "fp8 of one scale": (settings("fp8", activation_scheme="static"), fp8((0, 0), "weight_scale", flat=0), "FP8_G128"),
    "fp8 in narrow blocks": (settings("fp8", weight_block_size=[32, 64]), fp8((32, 64)), "F32"),
    "ct fp8 by rows": (ct("float-quantized", 8, "channel"), fp8((1, 0), "weight_scale", "f2"), "FP8_G128"),
    "ct fp8 by rows, naive": (ct("naive-quantized", 8, "channel"), fp8((1, 0), "weight_scale", flat=1), "FP8_G128"),
    "ct fp8 by matrices": (ct("float-quantized", 8, "tensor"), fp8((0, 0), "weight_scale", flat=1), "FP8_G128"),
    "ct fp8 by blocks": (ct("float-quantized", 8, "block", block_structure=[128, 128]), fp8((128, 128), "weight_scale"), "FP8_G128"),
    "ct fp8 by groups": (ct("float-quantized", 8, "group", 128), fp8((1, 128), "weight_scale"), "FP8_G128"),
    "ct mxfp8": (ct("mxfp8-quantized", 8, "group", 32), mxfp8(mlx=False), "MXFP8"),
    "ct mxfp4": (ct("mxfp4-pack-quantized", 4, "group", 32), mxfp4(mlx=False), "MXFP4"),
    "ct nvfp4": (ct("nvfp4-pack-quantized", 4, "tensor_group", 16), nvfp4(mlx=False), "NVFP4_G128"),
    "modelopt fp8": (modelopt_settings("FP8"), modelopt_fp8(), "FP8_G128"),
    "modelopt fp8 by rows": (modelopt_settings("FP8_PER_CHANNEL_PER_TOKEN"), modelopt_fp8((1, 0)), "FP8_G128"),
    "modelopt fp8 by blocks": (modelopt_settings("fp8_pb_wo"), modelopt_fp8((128, 128)), "FP8_G128"),
    "modelopt nvfp4": (modelopt_settings("NVFP4", 16), modelopt_nvfp4(), "NVFP4_G128"),
    "modelopt nvfp4, weights only": (settings("modelopt_fp4", quant_algo="W4A16_NVFP4"), modelopt_nvfp4(), "NVFP4_G128"),
    "modelopt mxfp8": (modelopt_settings("MXFP8", 32), mxfp8(mlx=False), "MXFP8"),
    "mlx mxfp8": (mlx_settings(8, 32, mode="mxfp8"), mxfp8(mlx=True), "MXFP8"),
    "mlx mxfp4": (mlx_settings(4, 32, mode="mxfp4"), mxfp4(mlx=True), "MXFP4"),
    "mlx nvfp4": (mlx_settings(4, 16, mode="nvfp4"), nvfp4(mlx=True), "NVFP4_G128"),
    "nf4": (BNB, bitsandbytes(), "NF4"),
    "nf4 nested, blocks of 128": (BNB, bitsandbytes(blocksize=128, nested=True), "NF4"),
    "fp4": (BNB, bitsandbytes("fp4", blocksize=4096), "BNB_FP4"),
    "nf4 in blocks of 32": (BNB, bitsandbytes(blocksize=32), "F32"),
    "nf4 with another table": (BNB, bitsandbytes(table=NF4[::-1].copy()), "F32"),
}


def matrices(folder: Path) -> list[tuple[BuiltRecord, np.ndarray]]:
    """Each matrix, and its numbers by the formula, float32."""
    stored, floats = open_checkpoint(folder / "quantized").tensors, open_checkpoint(folder / "floats").tensors
    assert stored.keys() == floats.keys()
    found = []
    for name, shape in quantized.MATRICES.items():
        record = stored[f"{name}.weight"]
        assert isinstance(record, BuiltRecord) and record.shape == shape
        found.append((record, floats[f"{name}.weight"].data.view(np.float32).reshape(shape)))
    return found


def numbers(record: BuiltRecord) -> np.ndarray:
    return unpack_rows(record.format, record.data.reshape(record.shape[0], -1))


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_is_that_of_the_formula(tmp_path, kind):
    config, quantize, format = KINDS[kind]
    for record, want in matrices(quantized.write(tmp_path, config, quantize)):
        assert record.format == format and bool(record.reason) == (format == "F32")
        np.testing.assert_array_equal(numbers(record), want)
        assert record.nbytes < want.nbytes / 3


@pytest.mark.parametrize(
    ("config", "quantize", "format"),
    [
        (ct("nvfp4-pack-quantized", 4, "tensor_group", 16), nvfp4(mlx=False, divisor=3871.0), "NVFP4_G128"),
        (settings("bitsandbytes", load_in_8bit=True), int8_rows, "INT8_G128"),
        (modelopt_settings("NVFP4"), modelopt_nvfp4(1 / 3871), "NVFP4_G128"),
    ],
)
def test_a_product_of_scales_is_rounded_once(tmp_path, config, quantize, format):
    """With the divisor or the factor of all scales, or SCB / 127; products with the integers are not rounded before their sum."""
    for record, want in matrices(quantized.write(tmp_path, config, quantize)):
        assert record.format == format
        np.testing.assert_allclose(numbers(record), want, rtol=3e-7, atol=3e-5 * abs(want).max() if format == "INT8_G128" else 0)


def test_the_experts_of_gpt_oss(tmp_path):
    """The rows of all experts, in the file's order; config.json of this test is a llama's."""
    E, R, I = 3, 8, 64
    folder = quantized.write(tmp_path, settings("mxfp4"), fp8((128, 128)))
    parts, dense = mxfp4(mlx=False)(np.random.default_rng(2), E * R, I)
    tensors = {"mlp.experts.gate_up_proj_blocks": parts["weight_packed"].reshape(E, R, I // 32, 16)}
    tensors["mlp.experts.gate_up_proj_scales"] = parts["weight_scale"].reshape(E, R, I // 32)
    quantized.save(tensors, folder / "quantized" / "model.safetensors")
    (record,) = open_checkpoint(folder / "quantized").tensors.values()
    assert isinstance(record, BuiltRecord) and record.name == "mlp.experts.gate_up_proj" and record.format == "MXFP4"
    np.testing.assert_array_equal(numbers(record), dense.astype(np.float32))


def test_two_formats_in_one_checkpoint(tmp_path):
    config = ct("mixed-precision", 4, "tensor_group", 16)
    (group,) = config["quantization_config"]["config_groups"].values()
    group["format"] = "nvfp4-pack-quantized"
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config["quantization_config"]["config_groups"]["group_1"] = {"format": "float-quantized", "weights": weights}
    folder = quantized.write(tmp_path, config, nvfp4(mlx=False), {"down_proj": fp8((1, 0), "weight_scale")})
    for record, want in matrices(folder):
        assert record.format == ("FP8_G128" if "down_proj" in record.name else "NVFP4_G128")
        np.testing.assert_array_equal(numbers(record), want)


# --- modelopt

LISTED = {"quantized_layers": {"model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16}}}
OWN_FILE = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                                                               "exclude_modules": ["lm_head", "model.layers.*.(x+x+)+y"]}}  # fmt: skip


def test_modelopts_mixed_precision(tmp_path):
    """Of a module that quantized_layers does not list by its name, the tensors say what it is."""
    config = modelopt_settings("MIXED_PRECISION", **LISTED)
    folder = quantized.write(tmp_path, config, modelopt_fp8(), {"down_proj": modelopt_nvfp4(), "up_proj": mxfp8(mlx=False)})
    formats = {"down_proj": "NVFP4_G128", "up_proj": "MXFP8"}
    for record, want in matrices(folder):
        assert record.format == formats.get(record.name.split(".")[-2], "FP8_G128")
        np.testing.assert_array_equal(numbers(record), want)


def test_modelopts_settings_in_a_file_of_their_own(tmp_path):
    folder = quantized.write(tmp_path, {}, modelopt_nvfp4()) / "quantized"
    (folder / "hf_quant_config.json").write_text(json.dumps(OWN_FILE))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantization == "modelopt" and checkpoint.tensors[f"{Q}.weight"].format == "NVFP4_G128"


@pytest.mark.parametrize(("algorithm", "refused"), [("nvfp4", False), ("FP8", True), (None, True)])
def test_two_files_of_modelopts_settings_must_agree(tmp_path, algorithm, refused):
    folder = quantized.write(tmp_path, modelopt_settings("NVFP4", 16), modelopt_nvfp4()) / "quantized"
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
    if not refused:
        assert open_checkpoint(folder).tensors[f"{Q}.weight"].format == "NVFP4_G128"
        return
    with pytest.raises(FormatError, match=f"says quant_algo 'NVFP4' and hf_quant_config.json {algorithm!r}; download both files again"):
        open_checkpoint(folder)


def test_modelopts_kv_scales_are_named_and_its_floats_stay_floats(tmp_path):
    """With a quantized cache alone: the scales are of no use, as packed caches have one a token."""
    folder = (
        quantized.write(tmp_path, settings("modelopt", kv_cache_scheme={"num_bits": 8, "type": "float"}), quantized.plain) / "quantized"
    )
    tensors = dict(load_file(folder / "model.safetensors"))
    tensors |= {f"model.layers.0.self_attn.{name}_proj.{name}_scale": np.ones((), np.float32) for name in "kv"}
    quantized.save(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert {record.format for record in checkpoint.tensors.values()} == {"F16"}
    line = describe(checkpoint.tensors, checkpoint.unused, {})
    assert line == "quantized checkpoint: not used: 'k_scale' of 1 modules, 'v_scale' of 1 modules"


# --- NaNs, and what is damaged or not supported

Edit = Callable[[dict[str, Any], dict[str, np.ndarray]], object]
BASES = {
    "fp8": (FINE, fp8((128, 128))),
    "one": (settings("fp8"), fp8((0, 0), "weight_scale", flat=0)),
    "ct8": (ct("float-quantized", 8, "channel"), fp8((1, 0), "weight_scale")),
    "mxfp8": (ct("mxfp8-quantized", 8, "group", 32), mxfp8(mlx=False)),
    "mxfp4": (ct("mxfp4-pack-quantized", 4, "group", 32), mxfp4(mlx=False)),
    "nvfp4": (ct("nvfp4-pack-quantized", 4, "tensor_group", 16), nvfp4(mlx=False)),
    "mlx": (mlx_settings(4, 32, mode="mxfp4"), mxfp4(mlx=True)),
    "nf4": (BNB, bitsandbytes(nested=True)),
    "int8": (settings("bitsandbytes", load_in_8bit=True), int8_rows),
    "mo8": (modelopt_settings("FP8"), modelopt_fp8()),
    "mo_blocks": (modelopt_settings("FP8_PB_WO"), modelopt_fp8((128, 128))),
    "mo4": (modelopt_settings("NVFP4", 16), modelopt_nvfp4()),
    "mixed": (modelopt_settings("MIXED_PRECISION", **LISTED), modelopt_fp8()),
}


def setting(**values: object) -> Edit:
    return lambda config, tensors: config["quantization_config"].update(values)


def scheme(**values: object) -> Edit:
    return lambda config, tensors: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(values)


def mlx_setting(**values: object) -> Edit:
    return lambda config, tensors: config["quantization"].update(values)


def without(suffix: str) -> Edit:
    return lambda config, tensors: tensors.pop(f"{Q}.{suffix}")


def replaced(suffix: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{Q}.{suffix}"] = np.asarray(change(tensors[f"{Q}.{suffix}"].copy()), order="C")

    return edit


def added(suffix: str, array: np.ndarray) -> Edit:
    return lambda config, tensors: tensors.update({f"{Q}.{suffix}": array})


def without_projections(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if "_proj" in name]:
        del tensors[name]


def filled(value: object, kind: Any = None) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array.reshape(-1).view(kind or array.dtype)[0] = value
        return array

    return change


def state(**values: object) -> Edit:
    name = f"{Q}.weight.quant_state.bitsandbytes__nf4"

    def edit(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = np.frombuffer(json.dumps(json.loads(tensors[name].tobytes()) | values).encode(), np.uint8)

    return edit


BROKEN: list[tuple[str, Edit, str]] = [
    ("fp8", setting(fmt="e5m2"), "fmt 'e5m2' is not supported; supported is e4m3"),
    ("fp8", setting(weight_block_size=[128]), "weight_block_size must be two numbers"),
    ("fp8", setting(weight_block_size=[128, 0]), "weight_block_size must be two numbers"),
    ("fp8", setting(weight_block_size=[64, 128]), "must have the shape \\[4, 2\\] \\(a scale for 64 x 128 weights\\), got \\[2, 2\\]"),
    ("fp8", setting(weight_block_size=None), "must have the shape \\[1, 1\\]"),
    ("fp8", replaced("weight", lambda a: a.view(E5M2)), "is F8_E5M2, which is not supported; of float8, e4m3 is"),
    ("fp8", replaced("weight", lambda a: a.view(np.uint8)), "is a scale, but its weights are not float8"),
    ("fp8", replaced("weight", lambda a: a.reshape(2, 128, 256)), "must have 2 dimensions"),
    ("fp8", replaced("weight_scale_inv", lambda a: a.astype(np.int32)), "must hold float32, float16 or bfloat16, got I32"),
    ("fp8", without("weight_scale_inv"), "has no tensor 'weight_scale_inv'"),
    ("fp8", without_projections, "no file has a 'X.weight' in float8"),
    ("one", without("weight_scale"), "has no tensor 'weight_scale'"),
    ("ct8", scheme(num_bits=4), "float-quantized with 4 bits of type 'float' is not supported"),
    ("ct8", scheme(type="int"), "float-quantized with 8 bits of type 'int' is not supported"),
    ("ct8", scheme(strategy="attn_head"), "scales by 'attn_head' are not supported, only by tensor, channel, group, block"),
    ("ct8", scheme(strategy="block"), "needs block_structure"),
    ("ct8", scheme(strategy="block", block_structure=[128]), "block_structure must be two numbers"),
    ("ct8", replaced("weight", lambda a: a.view(E5M2)), "is F8_E5M2, which is not supported"),
    ("ct8", replaced("weight_scale", lambda a: a[1:]), "must have the shape \\[256, 1\\] \\(a scale for 1 x 256 weights\\)"),
    ("mxfp8", scheme(group_size=64), "mxfp8-quantized has groups of 32, got 64"),
    ("mxfp8", replaced("weight_scale", lambda a: a[:, 1:]), "must have the shape \\[256, 8\\] \\(a scale for 32 columns\\)"),
    ("mxfp4", replaced("weight_scale", filled(255)), "has a scale that is NaN"),
    ("mxfp4", replaced("weight_packed", lambda a: a.astype(np.int32)), "must hold U8, got I32"),
    ("mxfp4", replaced("weight_packed", lambda a: a[:, 1:]), "multiple of 32 columns, got 254"),
    ("nvfp4", without("weight_global_scale"), "has no tensor 'weight_global_scale'"),
    ("nvfp4", replaced("weight_global_scale", lambda a: a * 0), "must be a number above 0, got 0.0"),
    ("nvfp4", replaced("weight_global_scale", lambda a: a * np.nan), "must be a number above 0, got nan"),
    ("nvfp4", replaced("weight_global_scale", lambda a: np.ones(2, np.float32)), "must hold one number"),
    ("nvfp4", replaced("weight_scale", lambda a: a[:, 1:]), "must have the shape \\[256, 16\\] \\(a scale for 16 columns\\)"),
    ("nvfp4", replaced("weight_scale", lambda a: a.view(np.int8)), "must hold F8_E4M3 or U8, got I8"),
    ("mlx", mlx_setting(group_size=16), "mode mxfp4 has 4 bits in groups of 32, got 4 in groups of 16"),
    ("mlx", mlx_setting(mode="nvfp4", group_size=16), "must have the shape \\[256, 32\\] \\(a scale for 16 columns"),
    ("mlx", lambda config, tensors: tensors.update({f"{Q}.biases": np.zeros((256, 8), np.float16)}), "has no biases"),
    ("nf4", without("weight.quant_state.bitsandbytes__nf4"), "has no weight.quant_state.bitsandbytes__nf4 next to it"),
    ("nf4", without("weight.absmax"), "has no tensor 'weight.absmax'"),
    ("nf4", without("weight.nested_absmax"), "has no tensor 'weight.nested_absmax'"),
    ("nf4", state(shape=[256, 512]), "must have the 65536 bytes of \\[256, 512\\]"),
    ("nf4", state(shape=[1 << 62, 4]), "must have the"),
    ("nf4", state(shape="wide"), "shape must be a list of integers"),
    ("nf4", state(blocksize=128), "must have the shape \\[512\\] \\(a scale for 128 weights\\)"),
    ("nf4", state(blocksize=0), "blocksize must be an integer from 1"),
    ("nf4", state(nested_blocksize=128), "must have the shape \\[8\\] \\(a scale for 128 scales\\)"),
    ("nf4", state(nested_offset="0"), "nested_offset must be a number"),
    ("nf4", state(quant_type="fp4"), "must describe a matrix of nf4, got 'fp4'"),
    ("nf4", replaced("weight.quant_state.bitsandbytes__nf4", lambda a: a[:-1]), "cannot be read as JSON"),
    ("nf4", replaced("weight.quant_map", lambda a: a[1:]), "must have the shape \\[16\\]"),
    ("int8", replaced("SCB", lambda a: a[1:]), "must have the shape \\[256\\] \\(a scale for each row\\)"),
    ("int8", replaced("weight_format", lambda a: a + np.uint8(2)), "rows in a GPU's order, which is not supported"),
    ("int8", replaced("weight", lambda a: a.view(np.uint8)), "must be I8, got U8"),
    ("mo8", setting(quant_algo="W4A16_AWQ"), "quant_algo 'W4A16_AWQ' is not supported; supported are FP8, "),
    ("mo8", setting(quant_algo=["FP8"]), "quant_algo \\['FP8'\\] is not supported"),
    ("mo8", setting(quant_algo=None), "has no quant_algo; download the file again"),
    ("mo8", setting(quant_algo=None, kv_cache_quant_algo="FP8"), "has no quant_algo, but 'model.layers.0.self_attn.q_proj' is quantized"),
    ("mo8", setting(quant_algo="NVFP4", config_groups={}), "says NVFP4 for 'model.layers.0.self_attn.q_proj', but its tensors are FP8"),
    ("mo8", setting(quant_algo="FP8_PB_WO"), "says FP8_PB_WO for .* with scales F32 \\[\\]"),
    ("mo8", setting(quant_algo="MXFP8"), "says MXFP8 for .*, but its tensors are FP8"),
    ("mo8", setting(quantization=4), "quantization must be an object, got 4"),
    ("mo8", scheme(num_bits=4), "FP8 has weights of type float with 8 bits, got 'float' with 4"),
    ("mo8", scheme(type="int"), "FP8 has weights of type float with 8 bits, got 'int' with 8"),
    ("mo8", setting(config_groups=[]), "config_groups must be an object, got \\[\\]"),
    ("mo8", setting(config_groups={"group_0": 4}), "must be an object with an object `weights`, got 4"),
    ("mo8", without("weight_scale"), "has no tensor 'weight_scale'"),
    ("mo8", without("weight"), "has no tensor 'weight'"),
    ("mo8", replaced("weight", lambda a: a.view(np.uint8)), "has no tensor 'weight_scale_2'"),
    ("mo8", replaced("weight", lambda a: a.view(E5M2)), "is F8_E5M2, which is not supported"),
    ("mo8", replaced("weight", lambda a: a.view(np.uint8).astype(np.float16)), "must hold F8_E4M3 or U8, as it has a scale, got F16"),
    ("mo8", replaced("weight", lambda a: a.reshape(2, 128, 256)), "must have 2 dimensions"),
    ("mo8", added("pre_quant_scale", np.ones(256, np.float16)), "pre_quant_scale' scales inputs, which is not supported"),
    ("mo8", added("weight_scale_2", np.ones((), np.float32)), "its weights are not the U8 of NVFP4"),
    ("mo8", without_projections, "says FP8, but no file has its tensors"),
    ("mo_blocks", replaced("weight_scale", lambda a: a.reshape(2, 2)[:, :1]), "must have the shape \\[2, 2\\] \\(a scale for 128 x 128"),
    ("mo4", scheme(group_size=32), "NVFP4 has groups of 16, got 32"),
    ("mo4", setting(group_size=32), "NVFP4 has groups of 16, got 32"),
    ("mo4", replaced("weight_scale", lambda a: a[:, ::2]), "must have the shape \\[256, 16\\] \\(a scale for 16 columns\\)"),
    ("mo4", replaced("weight_scale_2", lambda a: a * np.nan), "must be a number of 0 or more, got nan"),
    ("mo4", replaced("weight_scale_2", lambda a: np.ones(2, np.float32)), "must hold one number"),
    ("mixed", setting(quantized_layers=[]), "quantized_layers must be an object"),
    ("mixed", setting(quantized_layers={Q: 4}), "q_proj' must be an object, got 4"),
    ("mixed", setting(quantized_layers={Q: {"quant_algo": "INT4"}}), "quant_algo 'INT4' is not supported"),
    ("mixed", setting(quantized_layers={Q: {"quant_algo": "NVFP4", "group_size": 8}}), "NVFP4 has groups of 16, got 8"),
    ("mixed", setting(quantized_layers={Q: {"quant_algo": "NVFP4"}}), "says NVFP4 for 'model.layers.0.self_attn.q_proj'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """The configuration and the tensors of one kind, as they were written."""

    @functools.cache
    def make(kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        kept: dict[str, np.ndarray] = {}
        folder = tmp_path_factory.mktemp("base")
        with pytest.MonkeyPatch.context() as patch:
            save = quantized.save
            patch.setattr(
                quantized, "save", lambda tensors, path: (kept.update(tensors) if "quantized" in str(path) else 0, save(tensors, path))
            )
            quantized.write(folder, *BASES[kind])
        return json.loads((folder / "quantized" / "config.json").read_text()), kept

    return make


def edited(base_of: Any, kind: str, folder: Path, edit: Edit) -> Path:
    config, tensors = json.loads(json.dumps(base_of(kind)[0])), dict(base_of(kind)[1])
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    quantized.save(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("kind", "edit", "words"), BROKEN, ids=[f"{kind}-{words[:40]}" for kind, _, words in BROKEN])
def test_what_is_damaged_or_not_supported_is_one_clear_error(base_of, tmp_path, kind, edit, words):
    folder = edited(base_of, kind, tmp_path, edit)
    with pytest.raises((FormatError, ModelError), match=words) as caught:
        for record in open_checkpoint(folder).tensors.values():
            record.data.sum()
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "suffix", "code", "columns"),
    [("fp8", "weight", 0x7F, 128), ("fp8", "weight", 0xFF, 128), ("mxfp8", "weight", 0xFF, 32), ("mxfp8", "weight_scale", 255, 32),
     ("nvfp4", "weight_scale", 0x7F, 128)],
)  # fmt: skip
def test_a_nan_stays_one_in_its_row(base_of, tmp_path, kind, suffix, code, columns):
    """Others of its group become NaN too: a product of the row is a NaN in either case."""
    record = open_checkpoint(edited(base_of, kind, tmp_path, replaced(suffix, filled(code, np.uint8)))).tensors[f"{Q}.weight"]
    assert isinstance(record, BuiltRecord)
    nan = np.isnan(numbers(record))
    assert nan[0, :columns].all() and nan.sum() == columns


def test_scales_that_are_not_used_are_named(base_of, tmp_path):
    def add(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors |= {f"{Q}.input_scale": np.ones(1, np.float32)}
        tensors |= {f"model.layers.{i}.self_attn.{name}_scale": np.full(1, -1, np.float32) for i in range(2) for name in "kv"}

    checkpoint = open_checkpoint(edited(base_of, "fp8", tmp_path, add))
    line = describe(checkpoint.tensors, checkpoint.unused, {})
    assert line == "quantized checkpoint: not used: 'input_scale' of 1 modules, 'k_scale' of 2 modules, 'v_scale' of 2 modules"


def test_codes_of_the_writers_have_every_exponent():
    codes = small_floats.codes_of_eight_bits(np.random.default_rng(1), 64, 256)
    assert codes.dtype == np.uint8 and len(np.unique(codes & 0x78)) >= 14 and E4M3.itemsize == 1
