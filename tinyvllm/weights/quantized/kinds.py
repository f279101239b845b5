"""Which kind of quantized checkpoint a folder is, and its matrices under the names that models use.

A new kind is a row of KINDS and a file. Its function takes the settings (`quantization_config` of config.json) and all tensors of the
files, and returns the tensors that a model asks for: where the file has `X.qweight` and `X.scales`, it returns a BuiltRecord `X.weight`;
what is not quantized stays as it is. It decides by the tensors that are there: patterns of module names in the settings are not evaluated,
because a regular expression from a file may take forever. It raises a ModelError for what it does not support, by name, and a FormatError
where settings and tensors contradict each other. It may read headers and the tensors of READ_AT_OPENING; `BuiltRecord.build` reads weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.weights.mapping import Record, TensorRecord
from tinyvllm.weights.quantized import awq, bitsandbytes, compressed_tensors, fp8, gptq, hqq, mlx, modelopt, mxfp4
from tinyvllm.weights.safetensors import read_json_object

Tensors = Mapping[str, TensorRecord]
Kind = Callable[[Fields, Tensors], dict[str, Record]]

KINDS: dict[str, Kind] = {
    "gptq": gptq.tensors,
    "awq": awq.tensors,
    "compressed-tensors": compressed_tensors.tensors,
    "hqq": hqq.tensors,
    "mlx": mlx.tensors,
    "fp8": fp8.tensors,
    "bitsandbytes": bitsandbytes.tensors,
    "mxfp4": mxfp4.tensors,
    **dict.fromkeys(modelopt.METHODS, modelopt.tensors),
}
# The last parts of the names of tensors whose numbers say how matrices are held. Biases of zeros are left out (notes.py).
READ_AT_OPENING = frozenset(
    ("bias", *gptq.READ_AT_OPENING, *compressed_tensors.READ_AT_OPENING, *bitsandbytes.READ_AT_OPENING, *hqq.SETTINGS)
)
_MLX = "quantization"  # mlx-lm copies it as quantization_config, without a quant_method
_KEYS = ("quantization_config", "compression_config")
# of older checkpoints and of modelopt, next to config.json
_FILES = {modelopt.FILE: modelopt.METHODS[0], "quantize_config.json": "gptq", "quant_config.json": "awq"}


def read_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """`config` with the settings of checkpoints that have them in a file of their own as its `quantization_config`.

    FormatError if both files are modelopt's and contradict each other.
    """
    if (key := _settings_key(config)) is not None:
        settings = config[key]
        if isinstance(settings, Mapping) and settings.get("quant_method") in modelopt.METHODS and (folder / modelopt.FILE).is_file():
            own = read_json_object(folder / modelopt.FILE, "checkpoint")
            modelopt.require_same_algorithm(Fields(settings, where=f"config.json, {key}"), own)
        return config
    for name, kind in _FILES.items():
        if (folder / name).is_file():
            return config | {"quantization_config": {"quant_method": kind} | read_json_object(folder / name, "checkpoint")}
    return config


def is_quantized(folder: Path) -> bool:
    """Whether the description of a folder is that of a quantized checkpoint. Errors of its JSON files."""
    config = read_json_object(folder / "config.json", "checkpoint") if (folder / "config.json").is_file() else {}
    return _settings_key(read_quantization(folder, config)) is not None


def _settings_key(config: Mapping[str, Any]) -> str | None:
    """The key of config.json with the settings; None for a model that is not quantized."""
    return next((key for key in (_MLX, *_KEYS) if config.get(key) is not None), None)


def require_float_description(config: Mapping[str, Any]) -> None:
    """ModelError for the description of a quantized model: random weights are not made in its format."""
    key = _settings_key(config)
    if key is not None:
        raise ModelError(
            f"config.json: {key} {quoted(config[key], 80)} is not supported with random weights; "
            "remove it and choose a format with --quantization"
        )


def logical_tensors(config: Mapping[str, Any], tensors: Tensors) -> tuple[str | None, Mapping[str, Record]]:
    """The kind of a quantized checkpoint, and the tensors of the files as a model asks for them: themselves, without
    `quantization_config`."""
    key = _settings_key(config)
    if key is None:
        return None, tensors
    if not isinstance(config[key], Mapping):
        raise FormatError(f"config.json: {key} must be an object, got {quoted(config[key])}")
    settings = Fields(config[key], where=f"config.json, {key}")
    kind = "mlx" if key == _MLX else settings.get("quant_method", "")
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        raise ModelError(
            f"{settings.where}: quant_method {quoted(kind)} is not supported; supported are {known}; "
            "use the unquantized model or a GGUF file"
        )
    return kind, KINDS[kind](settings, tensors)
