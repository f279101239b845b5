"""Quantized checkpoints: every matrix equals the formula of its kind, runs packed, and gives the tokens of the same model in float32."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tinygrad import dtypes

from tests.mutations import mutate_json
from tests.tiny import quantized
from tests.tiny.quantized import (
    awq,
    awq_settings,
    ct_settings,
    gptq,
    gptq_settings,
    hqq,
    hqq_settings,
    int_ct,
    mlx,
    mlx_settings,
    packed_ct,
    shuffled,
    shuffled_each,
)
from tests.tiny.small_floats import modelopt_nvfp4, modelopt_settings
from tinyvllm.config.engine import CHECKPOINT_QUANTIZATIONS, QUANTIZATIONS, EngineConfig
from tinyvllm.errors import FormatError, ModelError, TinyvllmError
from tinyvllm.models.config import WeightRecipe
from tinyvllm.quant.formats import Layout, packed_in
from tinyvllm.quant.layouts import unpack_rows
from tinyvllm.runner.source import matrix_format, require_quantization
from tinyvllm.weights import mapping
from tinyvllm.weights.checkpoint import open_checkpoint, open_description
from tinyvllm.weights.load import load_rows, load_tensors, locate_rows
from tinyvllm.weights.mapping import BuiltRecord
from tinyvllm.weights.quantized.kinds import KINDS as KNOWN_KINDS
from tinyvllm.weights.quantized.notes import describe

KINDS = {
    "gptq 4 bits": (gptq_settings(4, 128), gptq(4, 128), "INT4_G128"),
    "gptq 3 bits in groups of 64": (gptq_settings(3, 64, sym=False), gptq(3, 64, symmetric=False), "INT3_G64"),
    "gptq v2": (gptq_settings(2, 32, checkpoint_format="gptq_v2"), gptq(2, 32, False, version=2), "INT2_G32"),
    "gptq by columns": (gptq_settings(8, -1), gptq(8, -1), "INT8_G128"),
    "awq": (awq_settings(64), awq(64), "INT4_G64"),
    "awq of an older file": ({"quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": 128}}, awq(128), "INT4_G128"),
    "compressed-tensors": (ct_settings("pack-quantized", 4, "group", 128), packed_ct(4, 128), "INT4_G128"),
    "compressed-tensors with zero points": (
        ct_settings("pack-quantized", 5, "group", 32, symmetric=False),
        packed_ct(5, 32, False),
        "INT5_G32",
    ),
    "compressed-tensors by rows": (ct_settings("pack-quantized", 7, "channel"), packed_ct(7, -1), "INT8_G128"),
    "compressed-tensors by matrices": (ct_settings("pack-quantized", 3, "tensor"), packed_ct(3, None), "INT3_G128"),
    "compressed-tensors W8A8": (ct_settings("int-quantized", 8, "channel"), int_ct(), "INT8_G128"),
    "compressed-tensors naive": (ct_settings("naive-quantized", 8, "channel", symmetric=False), int_ct(False), "INT8_G128"),
    "mlx": (mlx_settings(4, 64), mlx(4, 64), "INT4_G64"),
    "mlx 3 bits": (mlx_settings(3, 32), mlx(3, 32), "INT3_G32"),
    "mlx 6 bits": (mlx_settings(6, 128), mlx(6, 128), "INT6_G128"),
    "hqq 8 bits": (hqq_settings(), hqq(8, 64), "INT8_G64"),
    "hqq 4 bits": (hqq_settings(), hqq(4, 64), "INT4_G64"),
    "hqq 3 bits": (hqq_settings(), hqq(3, 128), "INT3_G128"),
    "hqq 2 bits": (hqq_settings(), hqq(2, 32), "INT2_G32"),
    "hqq 1 bit": (hqq_settings(), hqq(1, 32), "INT2_G32"),
    "hqq by columns": (hqq_settings(), hqq(4, 64, axis=0), "F32"),
    "hqq of 3 bits by columns": (hqq_settings(), hqq(3, 64, axis=0), "F32"),
    "groups that no format has": (gptq_settings(4, 16), gptq(4, 16), "F32"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: quantized.write(tmp_path_factory.mktemp("kind"), settings, quantize) for name, (settings, quantize, _) in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_every_matrix_is_that_of_the_formula(folders, kind):
    stored, floats = open_checkpoint(folders[kind] / "quantized").tensors, open_checkpoint(folders[kind] / "floats").tensors
    assert stored.keys() == floats.keys()
    for name in quantized.MATRICES:
        record, want = stored[f"{name}.weight"], floats[f"{name}.weight"]
        assert isinstance(record, BuiltRecord) and record.format == KINDS[kind][2] and record.shape == want.shape
        got = unpack_rows(record.format, record.data.reshape(record.shape[0], -1))
        np.testing.assert_array_equal(got, want.data.view(np.float32).reshape(want.shape))
        assert record.nbytes < want.nbytes / 2 and bool(record.reason) == (record.format == "F32")


@pytest.mark.parametrize(
    ("settings", "quantize", "format"),
    [
        (gptq_settings(4, 64, desc_act=True), gptq(4, 64, False, index=shuffled), "INT4_G64"),
        (ct_settings("pack-quantized", 6, "group", 32), packed_ct(6, 32, index=shuffled_each), "INT6_G32"),
    ],
)
def test_columns_are_sorted_by_their_groups_and_floats_have_them_in_order(tmp_path, settings, quantize, format):
    folder = quantized.write(tmp_path, settings, quantize)
    checkpoint, floats = open_checkpoint(folder / "quantized"), open_checkpoint(folder / "floats").tensors
    for name, shape in quantized.MATRICES.items():
        record, want = checkpoint.tensors[f"{name}.weight"], floats[f"{name}.weight"].data.view(np.float32).reshape(shape)
        assert isinstance(record, BuiltRecord) and record.format == format and record.order is not None
        got = unpack_rows(record.format, record.data.reshape(shape[0], -1))
        np.testing.assert_array_equal(got, want[:, record.order])
        recipe = WeightRecipe("w", shape, (f"{name}.weight",))
        np.testing.assert_array_equal(load_tensors(checkpoint, [recipe], "CPU", dtypes.float32)["w"].numpy(), want)
        assert load_rows(checkpoint, recipe, dtypes.float32)[0] == "F32"
        assert load_rows(checkpoint, recipe, dtypes.float32, ordered=True)[0] == format


def test_rows_are_packed_where_kernels_read_them_and_slices_are_rows_of_the_whole(base_of):
    checkpoint, name = open_checkpoint(base_of("gptq")), "model.layers.1.mlp.up_proj.weight"
    whole = WeightRecipe("w", (512, 256), (name,))
    part = WeightRecipe("w", (96, 256), (name,), lambda arrays: arrays[0][32:128])
    rows = load_rows(checkpoint, whole, dtypes.float16)[1]
    format, some = load_rows(checkpoint, part, dtypes.float16)
    assert format == "INT4_G64"
    np.testing.assert_array_equal(some, rows[32:128])
    assert locate_rows(checkpoint, whole, dtypes.float16, packed_in(Layout.TILES)).format == "INT4_G64"
    floats = locate_rows(checkpoint, whole, dtypes.float16, ())
    assert floats.format == "F16"
    want = unpack_rows("INT4_G64", rows).astype(np.float16)
    np.testing.assert_array_equal(floats.gathered().view(np.float16), want)


@pytest.mark.parametrize("rows", [33, 96, 1])
def test_rows_that_are_built_a_few_at_a_time_are_those_of_the_whole(tmp_path, rows, monkeypatch):
    """With 3 bits zero points of neighbouring rows share words."""
    monkeypatch.setattr(mapping, "_PIECE", rows * quantized.E)
    folder = quantized.write(tmp_path, gptq_settings(3, 64, sym=False), gptq(3, 64, False))
    stored, floats = open_checkpoint(folder / "quantized").tensors, open_checkpoint(folder / "floats").tensors
    record, want = stored["model.layers.0.mlp.gate_proj.weight"], floats["model.layers.0.mlp.gate_proj.weight"]
    assert isinstance(record, BuiltRecord) and len(list(record.pieces())) > 4
    np.testing.assert_array_equal(
        unpack_rows(record.format, record.data.reshape(record.shape[0], -1)).reshape(-1), want.data.view(np.float32)
    )


# --- what is damaged, and what is not supported

Edit = Callable[[dict[str, Any], dict[str, np.ndarray]], object]
Q = "model.layers.0.self_attn.q_proj"
BASES = {
    "gptq": (gptq_settings(4, 64), gptq(4, 64)),
    "awq": (awq_settings(64), awq(64)),
    "packed": (ct_settings("pack-quantized", 4, "group", 64, symmetric=False), packed_ct(4, 64, False)),
    "int": (ct_settings("int-quantized", 8, "channel"), int_ct()),
    "mlx": (mlx_settings(4, 64), mlx(4, 64)),
    "hqq": (hqq_settings(), hqq(4, 64)),
}
SMALL_FLOATS = {"modelopt": (modelopt_settings("NVFP4", 16), modelopt_nvfp4())}


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
        tensors[f"{Q}.{suffix}"] = np.ascontiguousarray(change(tensors[f"{Q}.{suffix}"]))

    return edit


BROKEN: list[tuple[str, Edit, str]] = [
    ("gptq", lambda config, tensors: config.update(quantization_config=[4]), "quantization_config must be an object, got \\[4\\]"),
    ("gptq", setting(quant_method="quip"), "quant_method 'quip' is not supported; supported are gptq, awq"),
    ("gptq", setting(quant_method=["gptq"]), "quant_method \\['gptq'\\] is not supported"),
    ("gptq", setting(bits=5), "5 bits are not supported; supported are 2, 3, 4, 8"),
    ("gptq", setting(bits=[4]), "bits must be an integer of 1 or more, got \\[4\\]"),
    ("gptq", setting(bits=10**400), "bits are not supported"),
    ("gptq", setting(bits=8), "does not have 8 bits in groups of 64, as config.json says: its tensors are qweight"),
    ("gptq", setting(group_size=0), "group_size must be -1"),
    ("gptq", setting(group_size=48), "does not have 4 bits in groups of 48"),
    ("gptq", setting(group_size=1 << 60), "group_size must be an integer from -1 to"),
    ("gptq", setting(checkpoint_format="marlin"), "checkpoint_format 'marlin' is not supported; supported are gptq, gptq_v2"),
    ("gptq", setting(dynamic=[1]), "dynamic must be an object, got \\[1\\]"),
    ("gptq", setting(dynamic={"+:(a+)+$": 4}), "must be an object, got 4"),
    ("gptq", without("qzeros"), "has no tensor 'qzeros'"),
    ("gptq", without("scales"), "has no tensor 'scales'"),
    ("gptq", replaced("g_idx", lambda a: a + 1), "must hold numbers of groups from 0 to 3, got 1 to 4"),
    ("gptq", replaced("g_idx", lambda a: a - 1), "from 0 to 3, got -1 to 2"),
    ("gptq", replaced("g_idx", lambda a: a[1:]), "must have the shape \\[256\\] \\(a group for each column\\), got \\[255\\]"),
    ("gptq", replaced("g_idx", lambda a: a.astype(np.float32)), "must hold integers, got F32"),
    ("gptq", replaced("qweight", lambda a: a[:, 1:]), "must have the shape"),
    ("gptq", replaced("qweight", lambda a: a.astype(np.float32)), "must hold 32-bit integers, got F32"),
    ("gptq", replaced("qweight", lambda a: a.reshape(-1)), "must have 2 dimensions"),
    ("gptq", replaced("qzeros", lambda a: a[:, 1:]), "does not have 4 bits in groups of 64"),
    ("gptq", replaced("scales", lambda a: a.astype(np.int8)), "must hold float32, float16 or bfloat16, got I8"),
    ("awq", setting(version="gemv"), "version 'gemv' of AWQ is not supported; supported is gemm"),
    ("awq", setting(bits=3), "AWQ with 3 bits is not supported"),
    ("awq", setting(zero_point=False), "without zero points"),
    ("awq", setting(group_size=128), "must have the shape \\[4, 256\\] \\(groups of 128 of the 512 columns"),
    ("awq", without("qzeros"), "has no tensor 'qzeros'"),
    ("awq", replaced("qzeros", lambda a: a[:, 1:]), "must have the shape"),
    ("packed", scheme(num_bits=8), "does not have 8 bits by group of 64 with zero points, as config.json says: its"),
    ("packed", scheme(num_bits="4"), "num_bits must be an integer"),
    ("packed", scheme(symmetric=True), "weight_zero_point"),
    ("packed", scheme(group_size=32), "does not have 4 bits by group of 32"),
    ("packed", scheme(strategy="block"), "scales by 'block' are not supported, only by tensor, channel, group"),
    ("packed", scheme(type="float"), "pack-quantized with 4 bits of type 'float' is not supported"),
    ("packed", setting(format="marlin-24"), "format 'marlin-24' is not supported; supported are pack-quantized"),
    ("packed", setting(config_groups={}), "config_groups must be an object"),
    ("packed", setting(config_groups={"group_0": {"weights": None}}), "must be an object with an object `weights`"),
    ("packed", setting(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config 'sparse-24-bitmask' is not supported"),
    ("packed", without("weight_shape"), "has no tensor 'weight_shape'"),
    ("packed", without("weight_zero_point"), "no weight_zero_point"),
    ("packed", replaced("weight_shape", lambda a: a * 2), "says \\[512, 512\\], but"),
    ("packed", replaced("weight_shape", lambda a: np.array([256, 1 << 62])), "does not have 4 bits"),
    ("int", replaced("weight_scale", lambda a: a[1:]), "with scales by channel, as config.json says, got I8 with scales \\[255, 1\\]"),
    ("int", replaced("weight", lambda a: a.astype(np.int16)), "must be I8"),
    ("mlx", mlx_setting(mode="mystery"), "mode 'mystery' is not supported"),
    ("mlx", mlx_setting(bits=7), "7 bits in groups of 64 are not supported; supported are 2, 3, 4, 5, 6, 8 bits"),
    ("mlx", mlx_setting(bits=8), "must have the shape \\[256, 4\\] \\(8 bits in groups of 64, as config.json says"),
    ("mlx", mlx_setting(bits=3), "does not hold whole groups of 64 integers of 3 bits"),
    ("mlx", mlx_setting(**{Q: False}), "is false, but the module has a tensor 'scales'"),
    ("mlx", mlx_setting(**{Q: 4}), "must be an object or false, got 4"),
    ("mlx", mlx_setting(**{Q: {"bits": 8}}), "must have the shape"),
    ("mlx", without("biases"), "has no tensor 'biases'"),
    ("hqq", replaced("nbits", lambda a: np.array(7, np.int32)), "7 bits are not supported; supported are 1, 2, 3, 4, 5, 6, 8"),
    ("hqq", replaced("nbits", lambda a: np.array(8, np.int32)), "must have 65536 bytes \\(8 bits, groups of 64, axis 1\\)"),
    ("hqq", replaced("group_size", lambda a: np.array(0, np.int32)), "group_size must be an integer from 1"),
    ("hqq", replaced("group_size", lambda a: np.array(48, np.int32)), "groups of 48 do not divide rows of 256 columns"),
    ("hqq", replaced("quant_scale", lambda a: np.array(1, np.uint8)), "quant_scale, scales or zero points that are quantized, is not"),
    ("hqq", replaced("shape", lambda a: np.array([1 << 62, 4])), "'shape' must hold two sizes"),
    ("hqq", replaced("shape", lambda a: np.array([1 << 30, 1 << 30])), "must have"),
    ("hqq", without("shape"), "'shape' must hold two sizes, got \\[\\]"),
    ("hqq", without("zero"), "has no tensor 'zero'"),
    ("hqq", replaced("zero", lambda a: a[1:]), "must hold a number for each of 1024 groups"),
]  # fmt: skip


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(kind: str) -> Path:
        return quantized.write(tmp_path_factory.mktemp("base"), *(BASES | SMALL_FLOATS)[kind]) / "quantized"

    return make


@pytest.mark.parametrize(("kind", "edit", "words"), BROKEN, ids=[f"{kind}-{words[:40]}" for kind, _, words in BROKEN])
def test_what_is_damaged_or_not_supported_is_one_clear_error(base_of, tmp_path, kind, edit, words):
    config = json.loads((base_of(kind) / "config.json").read_text())
    tensors = load_file(base_of(kind) / "model.safetensors")
    open_checkpoint(base_of(kind))
    edit(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises((FormatError, ModelError), match=words) as caught:
        for record in open_checkpoint(tmp_path).tensors.values():
            record.data.sum()
    assert len(str(caught.value)) <= 300 and "\n" not in str(caught.value)


def test_settings_in_a_file_of_their_own_are_those_of_an_older_checkpoint(base_of, tmp_path):
    config = json.loads((base_of("gptq") / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    shutil.copy(base_of("gptq") / "model.safetensors", tmp_path)
    record = open_checkpoint(tmp_path).tensors[f"{Q}.weight"]
    assert record.format == "INT4_G64" and open_checkpoint(tmp_path).config["quantization_config"]["quant_method"] == "gptq"


def test_scales_of_activations_are_left_out_by_name(base_of):
    checkpoint = open_checkpoint(base_of("int"))
    assert f"{Q}.input_scale" not in checkpoint.tensors and f"{Q}.input_scale" in checkpoint.unused
    assert describe(checkpoint.tensors, checkpoint.unused, {}) == "quantized checkpoint: not used: 'input_scale' of 14 modules"


def test_random_weights_are_not_made_for_a_quantized_description(base_of):
    with pytest.raises(ModelError, match="quantization_config .* is not supported with random weights"):
        open_description(base_of("awq"))


# --- mutated files


def mutated(kind: str, number: int, base: Path, folder: Path) -> None:
    """Mutation `number` of a checkpoint: of its settings, or of its file's header or bytes."""
    rng = random.Random(f"{kind} {number}")
    config, data = json.loads((base / "config.json").read_text()), (base / "model.safetensors").read_bytes()
    key = "quantization" if kind == "mlx" else "quantization_config"
    if rng.random() < 0.6:
        text = mutate_json(rng, json.dumps(config.pop(key)).encode())
        (folder / "config.json").write_bytes(json.dumps(config)[:-1].encode() + f', "{key}": '.encode() + text + b"}")
        (folder / "model.safetensors").write_bytes(data)
        return
    size = int.from_bytes(data[:8], "little")
    header = mutate_json(rng, data[8 : 8 + size])
    shutil.copy(base / "config.json", folder)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


@pytest.mark.parametrize("kind", BASES | SMALL_FLOATS)
def test_mutated_checkpoints_are_read_or_refused_in_one_line(base_of, tmp_path, kind):
    """What is built stays within the size of what the files hold in float32: 16 times, for two bits."""
    for number in range(40):
        mutated(kind, number, base_of(kind), tmp_path)
        try:
            for record in open_checkpoint(tmp_path).tensors.values():
                assert len(record.data) <= 40 * record.nbytes
        except TinyvllmError as error:
            assert len(str(error)) <= 300 and "\n" not in str(error), (number, str(error))


@pytest.mark.parametrize("name", ["modelopt", "modelopt_fp4"])
def test_modelopt_has_two_names(tmp_path, name):
    folder = quantized.write(tmp_path, modelopt_settings("NVFP4", 16), modelopt_nvfp4()) / "quantized"
    require_quantization(EngineConfig(str(folder), quantization=name), open_checkpoint(folder))


def test_vllms_names_are_those_of_the_kinds():
    """mxfp4 is a format that `--quantization` packs to."""
    assert {*CHECKPOINT_QUANTIZATIONS, "mxfp4"} == KNOWN_KINDS.keys() and "mxfp4" in QUANTIZATIONS


@pytest.mark.parametrize(("kind", "held"), [("gptq", None), ("awq", "this one is gptq"), ("fp8", "this one is not quantized")])
def test_a_quantization_that_names_a_kind_requires_it(base_of, tmp_path, kind, held):
    folder = base_of("gptq")
    path = folder.parent / "floats" if held == "this one is not quantized" else folder
    config, checkpoint = EngineConfig(str(path), quantization=kind), open_checkpoint(path)
    assert matrix_format(config) is None
    if held is None:
        return require_quantization(config, checkpoint)
    with pytest.raises(ModelError, match=f"quantization={kind} expects a checkpoint of that kind, and {held}; leave quantization out"):
        require_quantization(config, checkpoint)
    with pytest.raises(ModelError, match="random weights have none"):
        require_quantization(config, None)
