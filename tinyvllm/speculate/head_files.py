"""Folders of published speculation heads (Medusa, EAGLE, speculators): config.json and safetensors, checked before anything is loaded.

A key of config.json that no reader knows may change the computation, so it is an error that names the key, unless its value is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.models.config import ModelConfig, WeightRecipe
from tinyvllm.models.projections import Product
from tinyvllm.runner.runner import Runner
from tinyvllm.runner.source import weight_dtype
from tinyvllm.runner.weight_plan import WeightPlan
from tinyvllm.runner.weights import WeightLoader
from tinyvllm.weights.checkpoint import Checkpoint, open_checkpoint
from tinyvllm.weights.mapping import Record

SPEAKER = "speculate"
MAX_DRAFTS = 16  # guesses of one sequence in one step; acceptance beyond is near 0 with every published head
_PICKLES = (".pt", ".bin", ".pth", ".ckpt")
# Keys that change no result of the heads: names, training, generation defaults, storage.
_INERT = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "base_model", "base_model_name_or_path", "bos_token_id",
    "classifier_dropout", "dtype", "embd_pdrop", "eos_token_id", "generation_config", "hidden_dropout", "initializer_range",
    "model_type", "name_or_path", "pad_token_id", "pretraining_tp", "resid_pdrop", "speculators_version",
    "torch_dtype", "transformers_version", "ttt_steps", "use_cache", "version",
})  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What heads are compared with: the model that they guess for."""

    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, config: ModelConfig) -> Target:
        return cls(config.dim, config.vocab_size, config.num_blocks)


@dataclass(frozen=True)
class HeadFile:
    """An opened folder of heads. `tensors` are by their published names without the prefix `model.`."""

    checkpoint: Checkpoint
    fields: Fields

    @property
    def tensors(self) -> Mapping[str, Record]:
        return self.checkpoint.tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        record = self.tensors.get(name)
        return None if record is None else record.shape

    def require_keys(self, known: Iterable[str], fields: Fields | None = None) -> None:
        """ModelError for a key with a value that is neither known nor inert."""
        fields = fields or self.fields
        allowed = _INERT | {*known}
        extra = sorted(key for key, value in fields.values.items() if key not in allowed and value not in (None, False, 0, "", [], {}))
        if extra:
            value = quoted(fields.values[extra[0]])
            raise ModelError(
                f"{SPEAKER}: {fields.where} of {self.checkpoint.path} has the key {quoted(extra[0])}: {value}, which this reader of heads "
                "does not know; it may change what the heads compute. Remove the key if it does not"
            )

    def require_used(self, names: Iterable[str], ignored: Iterable[str] = ()) -> None:
        """ModelError if the file has tensors other than these; patterns in `ignored` are of tensors that hold nothing of their own."""
        used = {*names}
        extra = sorted(name for name in self.tensors if name not in used and not any(fnmatchcase(name, each) for each in ignored))
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise ModelError(
                f"{SPEAKER}: {self.checkpoint.path} has the tensor {quoted(extra[0])}{more}, which its config.json does not account for; "
                "are the two of one model?"
            )

    def integers(self, name: str) -> np.ndarray:
        """A vector of integers, int64. ModelError for another dtype."""
        record = self.tensors[name]
        kinds = {"I64": "<i8", "I32": "<i4"}
        if record.format not in kinds or len(record.shape) != 1:
            raise ModelError(f"{SPEAKER}: {name!r} must be a vector of int64, got {record.format} {list(record.shape)}")
        return record.data.view(kinds[record.format]).astype(np.int64)


def open_heads(path: Path) -> HeadFile:
    """Opens a folder with config.json and safetensors; headers only. ModelError names what is missing, FormatError what is damaged."""
    path = Path(path)
    if path.is_dir():
        _refuse_pickles(path)
    checkpoint = open_checkpoint(path)
    if checkpoint.kind != "safetensors":
        raise ModelError(f"{SPEAKER}: {path} is a GGUF file; heads are read from a folder with config.json and safetensors")
    tensors: dict[str, Record] = {}
    for name, record in checkpoint.tensors.items():
        short = name.removeprefix("model.")
        if short in tensors:
            raise ModelError(f"{SPEAKER}: {path} has the tensor {quoted(short)} twice, with and without the prefix 'model.'")
        tensors[short] = record
    return HeadFile(replace(checkpoint, tensors=tensors), Fields(checkpoint.config))


def _refuse_pickles(folder: Path) -> None:
    names = sorted(each.name for each in folder.iterdir() if each.is_file())
    pickled = [name for name in names if name.endswith(_PICKLES)]
    if pickled and not any(name.endswith((".safetensors", ".gguf")) for name in names):
        target = f"{Path(pickled[0]).stem}.safetensors"
        raise ModelError(
            f"{SPEAKER}: {folder} has its heads only as {pickled[0]}, a pickle, which can run code and is not loaded. If you trust it, "
            f"convert it with PyTorch: safetensors.torch.save_file(torch.load({pickled[0]!r}, weights_only=True), {target!r})"
        )


def expect_equal(what: str, got: int, expected: int, of: str) -> None:
    """ModelError unless a size of the heads is the target's."""
    if got != expected:
        raise ModelError(f"{SPEAKER}: the heads have {what} {got}, {of} has {expected}; are they heads of this model?")


def head_recipe(file: HeadFile, name: str, shape: tuple[int, ...], source: str) -> WeightRecipe:
    """The recipe of one tensor. ModelError if the file lacks it or it has another shape."""
    got = file.shape(source)
    if got != shape:
        found = "is missing" if got is None else f"has the shape {list(got)}"
        raise ModelError(f"{SPEAKER}: {source!r} in {file.checkpoint.path} {found}; expected {list(shape)} by config.json and the target")
    return WeightRecipe(name, shape, (source,))


def load_head_products(
    file: HeadFile, runner: Runner, products: dict[str, tuple[str, ...]], recipes: list[WeightRecipe], format: str | None = None
) -> tuple[dict[str, Product], SimpleNamespace]:
    """The products of the heads, packed for the kernels of the runner's device, and the tensors in none as attributes of an object.

    A module is named by the part of a recipe's name before its last dot. `format` is that of the products' matrices; None: as stored.
    """
    owner = SimpleNamespace()
    for recipe in recipes:
        setattr(owner, recipe.name.rpartition(".")[0], SimpleNamespace(weight=None, bias=None))
    plan = WeightPlan(runner.placement, head_dtype(file), format)
    return WeightLoader(file.checkpoint, plan).load_products(owner, products, recipes), owner


def head_dtype(file: HeadFile) -> DType:
    """Of what is not packed, and of the heads' own keys and values: as most of the file's bytes, float32 where that is no float."""
    found = weight_dtype("auto", file.checkpoint)
    return found if found in (dtypes.bfloat16, dtypes.float16) else dtypes.float32
