"""Quantized checkpoints: every matrix equals the formula of its kind, runs packed, and gives the tokens of the same model in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.tiny import quantized
from tests.tiny.quantized import gptq, gptq_settings
from tinyvllm.quant.layouts import unpack_rows
from tinyvllm.weights.checkpoint import open_checkpoint
from tinyvllm.weights.mapping import BuiltRecord

KINDS = {
    "gptq 4 bits": (gptq_settings(4, 128), gptq(4, 128), "INT4_G128"),
    "gptq 3 bits in groups of 64": (gptq_settings(3, 64, sym=False), gptq(3, 64, symmetric=False), "INT3_G64"),
    "gptq v2": (gptq_settings(2, 32, checkpoint_format="gptq_v2"), gptq(2, 32, False, version=2), "INT2_G32"),
    "gptq by columns": (gptq_settings(8, -1), gptq(8, -1), "INT8_G128"),
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
        assert record.nbytes < want.nbytes / 2
