"""A model on disk: which files, in which of the two formats, and the tensors in them.

Finds and opens; converts nothing, and does not know what the model is. See safetensors.py and gguf.py for the formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.weights.gguf import read_gguf, split_parts
from tinyvllm.weights.language_part import language_description, language_tensors
from tinyvllm.weights.mapping import Record, TensorRecord
from tinyvllm.weights.quantized.kinds import logical_tensors, read_quantization, require_float_description
from tinyvllm.weights.quantized.notes import unused_tensors
from tinyvllm.weights.safetensors import INDEX_NAME, read_json_object, read_safetensors, read_sharded

__all__ = ["Checkpoint", "TensorRecord", "open_checkpoint"]

_SPEAKER = "checkpoint"
_PICKLES = (".bin", ".pth", ".pt", ".ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """An opened model. `config` is config.json, or GGUF's metadata as plain Python values; `tensors` are views into mapped
    files, which stay mapped while any view of them lives, and the matrices that a quantized checkpoint stores in parts
    (weights/quantized); `folder` is where tokenizer files are looked for; `unused` names tensors that a quantized model does
    without, and `quantization` its kind (weights/quantized/kinds.py); `left_out` is a line about the parts of a model for images that are
    not loaded (weights/language_part.py).
    """

    kind: Literal["safetensors", "gguf"]
    path: Path
    config: dict[str, object]
    tensors: Mapping[str, Record]
    folder: Path
    unused: tuple[str, ...] = ()
    quantization: str | None = None
    left_out: str | None = None


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a .gguf file (any part of a split one), or a folder with config.json and safetensors, or with one GGUF model.

    Reads headers only. ModelError names what is missing, FormatError what is damaged.
    """
    path = Path(path)
    try:
        return _open(path)
    except OSError as error:  # a folder that may not be listed, a name too long
        raise ModelError(f"{_SPEAKER}: cannot read {str(path)[:200]}: {error.strerror}") from error


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return _open_gguf(path)
    if not path.exists():
        raise ModelError(f"{_SPEAKER}: no such file or folder: {path}")
    if path.suffix.lower() in (*_PICKLES, ".safetensors"):
        raise ModelError(f"{_SPEAKER}: {path} is one file of a model; give the folder with it and config.json")
    raise ModelError(f"{_SPEAKER}: {path} is neither a model folder nor a .gguf file")


def open_description(folder: Path) -> Checkpoint:
    """A Checkpoint without tensors, from config.json alone: for a model whose tensors are missing or not needed."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{_SPEAKER}: {folder} has no config.json, which describes the model to make random weights for")
    config = read_json_object(folder / "config.json", _SPEAKER)
    require_float_description(config)
    return Checkpoint("safetensors", folder, language_description(config), {}, folder)


def _open_folder(folder: Path) -> Checkpoint:
    names = sorted(p.name for p in folder.iterdir() if p.is_file())
    safetensors = [n for n in names if n.endswith(".safetensors")]
    if INDEX_NAME in names or safetensors:
        return _open_safetensors(folder, names, safetensors)
    if gguf := [folder / n for n in names if n.lower().endswith(".gguf")]:
        models = sorted({split_parts(p)[0] for p in gguf})
        if len(models) > 1:
            listed = ", ".join(p.name for p in models)
            raise ModelError(f"{_SPEAKER}: {folder} holds several GGUF models, give the path of one: {listed}")
        return _open_gguf(models[0])
    raise ModelError(_no_weights(folder, names))


def _no_weights(folder: Path, names: list[str]) -> str:
    if pickled := [n for n in names if n.endswith(_PICKLES)]:
        return (
            f"{_SPEAKER}: {folder} has its weights only as {pickled[0]}, a pickle, which can run code and is not loaded; "
            "convert it to safetensors (load it with transformers and call save_pretrained)"
        )
    held = f"it holds {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}" if names else "it is empty"
    return f"{_SPEAKER}: {folder} has no model.safetensors and no .gguf file; {held}"


def _open_safetensors(folder: Path, names: list[str], safetensors: list[str]) -> Checkpoint:
    """model.safetensors if there is one, as transformers prefers, else the shards of the index, else a single file of another name."""
    if "config.json" not in names:
        raise ModelError(f"{_SPEAKER}: {folder} has safetensors but no config.json, which describes the model")
    config = read_json_object(folder / "config.json", _SPEAKER)
    if "model.safetensors" in safetensors:
        tensors = read_safetensors(folder / "model.safetensors")
    elif INDEX_NAME in names:
        tensors = read_sharded(folder / INDEX_NAME)
    elif len(safetensors) == 1:
        tensors = read_safetensors(folder / safetensors[0])
    else:
        raise ModelError(f"{_SPEAKER}: {folder} holds {len(safetensors)} safetensors files but no {INDEX_NAME}; download it too")
    config = read_quantization(folder, config)
    kind, logical = logical_tensors(config, tensors)
    kept, left_out = language_tensors(config, logical)
    unused = unused_tensors(tensors, logical)
    return Checkpoint("safetensors", folder, language_description(config, kept), kept, folder, unused, kind, left_out)


def _open_gguf(path: Path) -> Checkpoint:
    metadata, tensors = read_gguf(path)
    return Checkpoint("gguf", path, metadata, tensors, path.parent)
