"""Byte equality with llama.cpp's own quantizer and mixes, through the shared library of llama-cpp-python (extra `bench`).

`python -m tests.peers.test_quantizers` records tests/quant/ggml_blocks.npz, which tests/quant/test_quantizers.py compares without it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

if importlib.util.find_spec("llama_cpp") is None:
    pytest.skip("llama-cpp-python is in the extra bench", allow_module_level=True)

from tests.quant.test_mixes import PARTS  # noqa: E402
from tests.quant.test_quantizers import RECORDED, WEIGHTINGS, importance, numbers  # noqa: E402
from tests.tiny.to_gguf import write_gguf  # noqa: E402
from tinyvllm.quant.formats import FORMATS, QUANTIZATIONS  # noqa: E402
from tinyvllm.quant.layouts import quantize_rows, row_bytes  # noqa: E402
from tinyvllm.quant.mixes import Quantization  # noqa: E402
from tinyvllm.weights.gguf import read_gguf  # noqa: E402


class _Memory(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def library() -> ctypes.CDLL:
    """ggml's shared library; its table of half floats is filled."""
    (origin,) = importlib.util.find_spec("llama_cpp").submodule_search_locations
    (path,) = (found for found in (Path(origin) / "lib").iterdir() if found.name in ("libggml-base.so", "libggml-base.dylib"))
    ggml = ctypes.CDLL(str(path))
    ggml.ggml_init.argtypes, ggml.ggml_init.restype = [_Memory], ctypes.c_void_p
    ggml.ggml_init(_Memory(1 << 20, None, False))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return ggml


def quantize(ggml: ctypes.CDLL, format: str, rows: np.ndarray, columns: np.ndarray | None) -> np.ndarray:
    O, I = rows.shape
    out = np.zeros((O, row_bytes(format, I)), np.uint8)
    weights = None if columns is None else columns.ctypes.data
    written = ggml.ggml_quantize_chunk(FORMATS[format].type_id, np.ascontiguousarray(rows).ctypes.data, out.ctypes.data, 0, O, I, weights)
    assert written == out.size
    return out


@pytest.mark.parametrize("format", QUANTIZATIONS)
def test_bytes_are_those_of_ggml(format):
    ggml, rng = library(), np.random.default_rng(8)
    rows = (rng.standard_t(4, (300, 1024)) * 0.02).astype(np.float32)
    columns = (rng.standard_normal(1024) ** 2).astype(np.float32)
    columns[100:140] = 0
    for weights in (None, columns):
        np.testing.assert_array_equal(quantize_rows(format, rows, weights), quantize(ggml, format, rows, weights))


def blocks_of(ggml: ctypes.CDLL, rows: np.ndarray, columns: np.ndarray) -> dict[str, np.ndarray]:
    return {f"{format} {weighted}": quantize(ggml, format, rows, columns if weighted else None) for format, weighted in WEIGHTINGS}


def test_the_recorded_blocks_are_those_of_this_library():
    recorded = np.load(RECORDED)
    for name, blocks in blocks_of(library(), recorded["numbers"], recorded["importance"]).items():
        np.testing.assert_array_equal(blocks, recorded[name])


LAYERS, HIDDEN = 18, 256
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "vocab_size": 256,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
FILE_TYPES = {"Q3_K_S": 11, "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17}  # LLAMA_FTYPE_MOSTLY_*


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mix", FILE_TYPES)
def test_a_file_has_the_formats_and_bytes_of_llama_quantize(tmp_path, mix, tied):
    llama_cpp = pytest.importorskip("llama_cpp")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(2)
    shapes = {f"blk.{i}.{part}.weight": (128 if part in ("attn_k", "attn_v") else HIDDEN, HIDDEN) for i in range(LAYERS) for part in PARTS}
    shapes |= {"token_embd.weight": (256, HIDDEN)} | ({} if tied else {"output.weight": (256, HIDDEN)})
    tensors = {name: (rng.standard_t(4, shape) * 0.02).astype(np.float32) for name, shape in shapes.items()}
    norms = {f"blk.{i}.{name}.weight": np.ones(HIDDEN, np.float32) for i in range(LAYERS) for name in ("attn_norm", "ffn_norm")}
    write_gguf(tmp_path, tmp_path / "in.gguf", "llama", tensors=tensors | norms | {"output_norm.weight": np.ones(HIDDEN, np.float32)})
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = FILE_TYPES[mix], 1
    assert llama_cpp.llama_model_quantize(str(tmp_path / "in.gguf").encode(), str(tmp_path / "out.gguf").encode(), params) == 0
    _, written = read_gguf(tmp_path / "out.gguf")
    rule = Quantization(mix, LAYERS, tied)
    assert {name: written[name].format for name in tensors} == {name: rule.format_of(name, HIDDEN) for name in tensors}
    for name in [name for name in tensors if name.startswith(("blk.0.", "blk.9.attn_v", "output", "token_embd"))]:
        rows = quantize_rows(written[name].format, tensors[name])
        np.testing.assert_array_equal(written[name].data.reshape(rows.shape), rows, err_msg=name)


def record() -> None:
    rows, columns = numbers(), importance()
    np.savez_compressed(RECORDED, numbers=rows, importance=columns, **blocks_of(library(), rows, columns))


if __name__ == "__main__":
    record()
