"""Quantized checkpoints: every matrix equals the formula of its kind, runs packed, and gives the tokens of the same model in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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
)
from tinyvllm.quant.layouts import unpack_rows
from tinyvllm.weights.checkpoint import open_checkpoint
from tinyvllm.weights.mapping import BuiltRecord

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
