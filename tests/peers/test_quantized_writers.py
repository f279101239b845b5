"""Checkpoints whose matrices the libraries themselves have packed: our rows are the numbers that they unpack.

`make test-peers` installs compressed-tensors, hqq and mlx. Each test also runs alone, where one of them is missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tinyvllm.quant.layouts import unpack_rows
from tinyvllm.weights.checkpoint import open_checkpoint
from tinyvllm.weights.mapping import BuiltRecord

O, I = 96, 256


def values(seed: int = 0) -> np.ndarray:
    """float32 [O, I] that float16 holds."""
    return (np.random.default_rng(seed).standard_normal((O, I)) / 16).astype(np.float16).astype(np.float32)


def opened(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> BuiltRecord:
    save_file({f"layer.{name}": np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    record = open_checkpoint(folder).tensors["layer.weight"]
    assert isinstance(record, BuiltRecord)
    return record


def rows_of(record: BuiltRecord) -> np.ndarray:
    return unpack_rows(record.format, record.data.reshape(record.shape[0], -1))


@pytest.mark.parametrize(("bits", "group"), [(2, 64), (3, 32), (4, 64), (5, 128), (6, 64), (8, 32)])
def test_mlx(tmp_path, bits, group):
    mx = pytest.importorskip("mlx.core", reason="mlx is installed by `make test-peers` only")
    weight, scales, biases = mx.quantize(mx.array(values()).astype(mx.float16), group_size=group, bits=bits)
    tensors = {"weight": np.array(weight), "scales": np.array(scales), "biases": np.array(biases)}
    record = opened(tmp_path, tensors, {"quantization": {"group_size": group, "bits": bits}})
    assert record.format == f"INT{bits}_G{group}"
    want = mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group, bits=bits)
    np.testing.assert_array_max_ulp(rows_of(record), np.array(want), 2)


@pytest.mark.parametrize(
    ("bits", "group", "axis", "format"),
    [(8, 64, 1, "INT8_G64"), (4, 64, 1, "INT4_G64"), (3, 64, 1, "INT3_G64"), (2, 32, 1, "INT2_G32"), (1, 32, 1, "INT2_G32"),
     (4, 64, 0, "F32"), (3, 64, 0, "F32")],
)  # fmt: skip
def test_hqq(tmp_path, bits, group, axis, format):
    torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")
    hqq = pytest.importorskip("hqq.core.quantize", reason="hqq is installed by `make test-peers` only")
    layer = torch.nn.Linear(I, O, bias=False)
    layer.weight.data = torch.from_numpy(values())
    config = hqq.BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
    quantized = hqq.HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu")
    tensors = {name: value.detach().numpy() for name, value in quantized.state_dict().items()}
    record = opened(tmp_path, tensors, {"quantization_config": {"quant_method": "hqq", "quant_config": config}})
    assert record.format == format
    np.testing.assert_allclose(rows_of(record), quantized.dequantize().numpy(), rtol=0, atol=2e-7)


SCHEMES = [
    (4, True, "group", 64, "INT4_G64"), (4, False, "group", 128, "INT4_G128"), (3, False, "group", 32, "INT3_G32"),
    (8, True, "channel", None, "INT8_G128"), (6, False, "channel", None, "INT6_G128"),
]  # fmt: skip


@pytest.mark.parametrize(("bits", "symmetric", "strategy", "group", "format"), SCHEMES)
@pytest.mark.parametrize("kind", ["pack-quantized", "int-quantized"])
def test_compressed_tensors(tmp_path, kind, bits, symmetric, strategy, group, format):
    torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is installed by `make test-peers` only")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group)
    )
    groups, rng = I // (group or I), np.random.default_rng(bits)
    state = {
        "weight": torch.from_numpy(values()),
        "weight_scale": torch.from_numpy(rng.uniform(0.01, 0.02, (O, groups)).astype(np.float16).astype(np.float32)),
    }
    if not symmetric:
        state["weight_zero_point"] = torch.from_numpy(rng.integers(-2, 3, (O, groups)).astype(np.int8))
    compressor = BaseCompressor.get_value_from_registry(kind)
    packed = compressor.compress(state, scheme)
    weights = json.loads(scheme.weights.model_dump_json())
    config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": weights}}}
    record = opened(tmp_path, {name: value.numpy() for name, value in packed.items()}, {"quantization_config": config})
    assert record.format == (format if kind == "pack-quantized" else f"INT8_G{format.split('_G')[1]}")
    np.testing.assert_array_max_ulp(rows_of(record), compressor.decompress(packed, scheme)["weight"].numpy(), 2)
