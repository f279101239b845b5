"""Low-rank adapters as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors.

The names and their meaning are those of PEFT's LoraConfig. What changes the computation and is not computed here is refused by its name, as
is a key that this reader does not know. Shapes come from the header; numbers are read once a model has checked them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tinyvllm.errors import FormatError, ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant.codecs import unpack
from tinyvllm.weights.mapping import TensorRecord, require_whole
from tinyvllm.weights.safetensors import read_json_object, read_safetensors

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 64
_SPEAKER = "adapter"
_FLOATS = ("F32", "F16", "BF16")
# PEFT's prefix, that of models with more than text, the layer and the module in it or one in front of the layers (Gemma 4), the matrix, and
# the name of the adapter
_NAME = re.compile(
    r"base_model\.model\.(?:model\.)?(?:language_model\.)?(?:model\.)?"
    r"(?:layers\.(\d{1,5})\.([\w.]{1,100})|(per_layer_model_projection))\.lora_([AB])\.(?:default\.)?weight",
    re.ASCII,
)
_Module = tuple[int | None, str]  # its layer, None in front of the layers, and its name there
_LITERAL = re.compile(r"\^?[\w.]+\$?", re.ASCII)

# Keys that say how an adapter was trained, or whose tensors say the same.
_TRAINING = frozenset(
    ("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "loftq_config",
     "eva_config", "megatron_core", "megatron_config", "runtime_config", "qalora_group_size", "layers_pattern", "exclude_modules",
     "ensure_weight_tying"),
)  # fmt: skip
_READ = frozenset(
    ("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights",
     "layers_to_transform", "target_parameters"),
)  # fmt: skip
_SECOND = ".base_layer"  # of the inner one of two parameters of a module
_OF_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
_PARAMETERS_SINCE = (0, 19, 1)  # the version of PEFT whose matrices of parameters are those of transformers 5
_OWN_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that also change the base model's weights


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to one module: scale * x a^T b^T, with a [rank, I] and b [O, rank] in the file.

    Of a parameter with a matrix for each of X experts a is [X rank, I], one expert's rows after the other's, and b [O, rank X], first the
    columns of all experts for the first rank, then for the next. `matrices` is X, 1 for others.
    """

    module: str
    scale: float
    a: TensorRecord
    b: TensorRecord
    matrices: int = 1

    @property
    def rank(self) -> int:
        return self.a.shape[0] // self.matrices

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """a and scale * b, float32. FormatError for numbers that are not finite, or a file that was truncated since."""
        a, b = (_numbers(record) for record in (self.a, self.b))
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = b * np.float32(self.scale)
        if not np.isfinite(scaled).all():
            raise FormatError(f"{_SPEAKER}: {quoted(self.module)} has numbers beyond float32 when scaled by {self.scale:g}")
        return a, scaled


@dataclass(frozen=True, eq=False)
class AdapterFiles:
    """An adapter whose description and header were read. `modules` has names such as model.layers.3.self_attn.q_proj."""

    folder: Path
    modules: Mapping[str, LowRank]

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max(module.rank for module in self.modules.values())


def read_adapter(folder: Path) -> AdapterFiles:
    """Description and header of an adapter. ModelError or FormatError for what is missing, damaged, or not supported."""
    if not folder.is_dir():
        raise ModelError(f"{_SPEAKER}: {folder} is not a folder; expected one with {CONFIG_NAME} and {WEIGHTS_NAME}")
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            there = next((other for other in ("adapter_model.bin", "adapter_model.pt") if (folder / other).is_file()), None)
            hint = f"; {there} may run code when it is read: save the adapter as safetensors" if there and name == WEIGHTS_NAME else ""
            raise ModelError(f"{_SPEAKER}: {folder} has no {name}{hint}")
    settings = _Settings(read_json_object(folder / CONFIG_NAME, _SPEAKER))
    return AdapterFiles(folder, _modules(settings, read_safetensors(folder / WEIGHTS_NAME)))


class _Settings:
    """adapter_config.json, checked."""

    def __init__(self, values: dict[str, Any]):
        self._fields = fields = Fields(values, where=CONFIG_NAME)
        _refuse_unsupported(values)
        self._rank = fields.integer("r", 8, low=1)
        self._alpha = fields.number("lora_alpha", 8.0)
        self._rooted = fields.boolean("use_rslora")
        self._ranks = {key: self._number(name, key, value) for name, key, value in self._patterns("rank_pattern")}
        self._alphas = {key: self._number(name, key, value) for name, key, value in self._patterns("alpha_pattern")}
        self._targets = _targets(fields.get("target_modules"))
        self._experts = _parameters(fields)
        layers = fields.get("layers_to_transform")
        self._layers = None if layers in (None, []) else [layers] if type(layers) is int else fields.integers("layers_to_transform")

    def _patterns(self, name: str) -> list[tuple[str, str, Any]]:
        pattern = self._fields.get(name, {})
        if not isinstance(pattern, dict):
            raise ModelError(f"{CONFIG_NAME}: {name} must be an object, got {quoted(pattern)}")
        for key in pattern:
            if not _LITERAL.fullmatch(key):
                raise ModelError(f"{CONFIG_NAME}: {name} has the regular expression {quoted(key)}; only names of modules are supported")
        return [(name, key.strip("^$"), value) for key, value in pattern.items()]

    @staticmethod
    def _number(name: str, key: str, value: Any) -> float:
        return Fields({key: value}, where=f"{CONFIG_NAME}: {name}").number(key)

    def check_target(self, module: str, layer: int | None) -> None:
        """ModelError for tensors of a module that the description does not name: PEFT would leave them out."""
        if self._targets is not None and not self.has_experts(module) and not any(_names(target, module) for target in self._targets):
            raise ModelError(f"{CONFIG_NAME}: target_modules does not name {quoted(module)}, for which the file has tensors")
        if self._layers is not None and layer not in self._layers:
            place = quoted(module) if layer is None else f"layer {layer}"
            raise ModelError(f"{CONFIG_NAME}: layers_to_transform does not have {place}, for which the file has tensors")

    def has_experts(self, module: str) -> bool:
        """Whether the tensors are of a parameter of this module, and not of the module; of two the inner one has a suffix."""
        return any(_names(key, module.removesuffix(_SECOND)) for key in self._experts)

    def rank(self, module: str) -> float:
        return next((rank for key, rank in self._ranks.items() if _names(key, module)), float(self._rank))

    def scale(self, module: str, rank: int) -> float:
        alpha = next((alpha for key, alpha in self._alphas.items() if _names(key, module)), self._alpha)
        return alpha / math.sqrt(rank) if self._rooted else alpha / rank


def _names(key: str, module: str) -> bool:
    """Whether a module is the one of this name, or ends with it."""
    return module == key or module.endswith(f".{key}")


def _targets(value: Any) -> list[str] | None:
    """Names of modules; None where every module may have tensors, or a regular expression decides, which is not evaluated."""
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelError(f"{CONFIG_NAME}: target_modules must be a text or a list of names, got {quoted(value)}")
    return value


def _parameters(fields: Fields) -> list[str]:
    """The modules whose parameters have adapters: experts, of which PEFT takes those of a layer as one parameter."""
    value = fields.get("target_parameters") or []
    if not isinstance(value, list) or not all(isinstance(name, str) and name.endswith(_OF_EXPERTS) for name in value):
        expected = f"a list of names that end with {' or '.join(_OF_EXPERTS)}"
        raise ModelError(f"{CONFIG_NAME}: target_parameters must be {expected}, got {quoted(value)}")
    version = str(fields.get("peft_version"))
    found = re.match(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", version, re.ASCII)
    if value and (found is None or tuple(map(int, found.groups())) < _PARAMETERS_SINCE):
        since = ".".join(map(str, _PARAMETERS_SINCE))
        raise ModelError(
            f"{CONFIG_NAME}: target_parameters of peft_version {quoted(version)} are not supported, as inputs and outputs may be the other "
            f"way around; save the adapter with PEFT {since} or later"
        )
    return [name.rpartition(".")[0] for name in value]


def _refuse_unsupported(values: dict[str, Any]) -> None:
    """ModelError for another kind of adapter, and for settings that change what is computed."""
    if (kind := values.get("peft_type")) != "LORA":
        raise ModelError(f"{CONFIG_NAME}: peft_type {quoted(kind)} is not supported; supported is LORA")
    if (bias := values.get("bias", "none")) != "none":
        raise ModelError(f"{CONFIG_NAME}: bias {quoted(bias)} is not supported; supported is none")
    begin = values.get("init_lora_weights")
    if isinstance(begin, str) and begin.lower().startswith(_OWN_BASE):
        raise ModelError(
            f"{CONFIG_NAME}: init_lora_weights {quoted(begin)} also changes the base model; save the adapter with "
            "path_initial_model_for_weight_conversion, which makes it a plain one"
        )
    for key, value in values.items():
        if key not in _READ | _TRAINING and value not in (None, False, [], {}):
            raise ModelError(
                f"{CONFIG_NAME}: {key} {quoted(value)} is not supported; save an adapter without it, or merge it into the model"
            )


def _modules(settings: _Settings, tensors: Mapping[str, TensorRecord]) -> dict[str, LowRank]:
    found: dict[_Module, dict[str, TensorRecord]] = {}
    for name, record in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"{_SPEAKER}: the tensor {quoted(name)} is not supported; expected lora_A and lora_B of modules of layers")
        layer, part, in_front, matrix = match.groups()
        pair = found.setdefault((None, in_front) if layer is None else (int(layer), part), {})
        if matrix in pair:
            raise FormatError(f"{_SPEAKER}: the tensors {quoted(pair[matrix].name)} and {quoted(name)} are of one module")
        pair[matrix] = record
    if not found:
        raise FormatError(f"{_SPEAKER}: {WEIGHTS_NAME} has no tensors")
    return {low.module: low for low in (_low_rank(settings, *place, pair) for place, pair in found.items())}


def _low_rank(settings: _Settings, layer: int | None, part: str, pair: Mapping[str, TensorRecord]) -> LowRank:
    module = f"model.{part}" if layer is None else f"model.layers.{layer}.{part}"
    if len(pair) != 2:
        raise FormatError(f"{_SPEAKER}: {quoted(module)} has lora_{next(iter(pair))} only")
    settings.check_target(module, layer)
    a, b = pair["A"], pair["B"]
    for record in (a, b):
        if record.format not in _FLOATS or len(record.shape) != 2:
            raise FormatError(
                f"{_SPEAKER}: {quoted(record.name)} is {record.format} {list(record.shape)}; expected a matrix in {', '.join(_FLOATS)}"
            )
    stacked, told = a.shape[0], settings.rank(module)
    matrices = int(stacked // told) if settings.has_experts(module) and told >= 1 else 1
    rank = stacked // max(matrices, 1)
    if matrices * told != stacked or b.shape[1] != stacked:
        raise FormatError(
            f"{_SPEAKER}: {quoted(module)} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, and its rank is {told:g} by {CONFIG_NAME}"
        )
    if not 1 <= rank <= MAX_RANK:
        raise ModelError(f"{_SPEAKER}: {quoted(module)} has rank {rank}; supported are ranks from 1 to {MAX_RANK}")
    return LowRank(module, settings.scale(module, rank), a, b, matrices)


def _numbers(record: TensorRecord) -> np.ndarray:
    require_whole(record.data, f"{_SPEAKER}: tensor {record.name!r}")
    size = {"F32": 4}.get(record.format, 2)
    array = unpack(record.format, record.data.reshape(-1, size)).reshape(record.shape)
    if not np.isfinite(array).all():
        raise FormatError(f"{_SPEAKER}: {quoted(record.name)} has numbers that are not finite")
    return np.ascontiguousarray(array, np.float32)
