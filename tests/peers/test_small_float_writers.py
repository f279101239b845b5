"""Floats of a few bits that the libraries themselves have packed: our rows are the numbers that they unpack.

`make test-peers` installs bitsandbytes, compressed-tensors and mlx. Each test also runs alone, where one of them is missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.peers.test_quantized_writers import I, O, rows_of, values
from tests.tiny.quantized import save
from tests.tiny.small_floats import E4M3
from tinyvllm.weights.checkpoint import open_checkpoint
from tinyvllm.weights.mapping import BuiltRecord

torch = pytest.importorskip("torch", reason="PyTorch is installed by `make test-peers` only")


def array_of(value: Any) -> np.ndarray:
    small = value.dtype == torch.float8_e4m3fn
    return value.view(torch.uint8).numpy().view(E4M3) if small else value.numpy()


def opened(folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> BuiltRecord:
    save({f"layer.{name}": np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    record = open_checkpoint(folder).tensors["layer.weight"]
    assert isinstance(record, BuiltRecord)
    return record


@pytest.mark.parametrize(("kind", "format"), [("nf4", "NF4"), ("fp4", "BNB_FP4")])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes(tmp_path, kind, format, nested):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is installed by `make test-peers` only")
    weight, state = functional.quantize_4bit(torch.from_numpy(values()), quant_type=kind, compress_statistics=nested)
    tensors = {"weight": weight.numpy()}
    tensors |= {f"weight.{name}": value.numpy() for name, value in state.as_dict(packed=True).items()}
    record = opened(tmp_path, tensors, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})
    assert record.format == format
    np.testing.assert_array_max_ulp(rows_of(record), functional.dequantize_4bit(weight, state).numpy(), 2)


@pytest.mark.parametrize(
    ("mode", "bits", "group", "format"), [("mxfp4", 4, 32, "MXFP4"), ("nvfp4", 4, 16, "NVFP4_G128"), ("mxfp8", 8, 32, "MXFP8")]
)
def test_mlx(tmp_path, mode, bits, group, format):
    mx = pytest.importorskip("mlx.core", reason="mlx is installed by `make test-peers` only")
    weight, scales = mx.quantize(mx.array(values()), group_size=group, bits=bits, mode=mode)
    settings = {"group_size": group, "bits": bits, "mode": mode}
    record = opened(tmp_path, {"weight": np.array(weight), "scales": np.array(scales)}, {"quantization": settings})
    assert record.format == format
    want = mx.dequantize(weight, scales, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    np.testing.assert_array_equal(rows_of(record), np.array(want))


@pytest.mark.parametrize(
    ("kind", "bits", "strategy", "group", "format"),
    [("float-quantized", 8, "channel", None, "FP8_G128"), ("nvfp4-pack-quantized", 4, "tensor_group", 16, "NVFP4_G128")],
)
def test_compressed_tensors(tmp_path, kind, bits, strategy, group, format):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is installed by `make test-peers` only")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=bits, type="float", symmetric=True, strategy=strategy, group_size=group)
    scheme, rng = QuantizationScheme(targets=["Linear"], weights=args), np.random.default_rng(bits)
    state = {"weight": torch.from_numpy(values())}
    if group is None:
        state["weight_scale"] = torch.from_numpy(rng.uniform(1e-3, 2e-3, (O, 1)).astype(np.float32))
    else:
        state["weight_scale"] = torch.from_numpy(rng.uniform(20, 200, (O, I // group)).astype(np.float32)).to(torch.float8_e4m3fn).float()
        state["weight_global_scale"] = torch.tensor([3871.0])
    compressor = BaseCompressor.get_value_from_registry(kind)
    packed = compressor.compress(dict(state), scheme)
    weights = json.loads(scheme.weights.model_dump_json())
    config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": weights}}}
    record = opened(tmp_path, {name: array_of(value) for name, value in packed.items()}, {"quantization_config": config})
    assert record.format == format
    want = compressor.decompress(dict(packed), scheme)["weight"].float().numpy()
    np.testing.assert_allclose(rows_of(record), want, rtol=4e-7 if group is None else 2.0**-8, atol=0)  # nvfp4 is unpacked in bfloat16
