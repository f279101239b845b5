"""The configuration of an engine: one frozen value, resolved once by `resolve`.

Knows no tensors; of devices only their names, and of a checkpoint only whether it exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from tinyvllm import speculative
from tinyvllm.aliases import VLLM, from_vllm
from tinyvllm.config.devices import check_device, kind_of, parse_devices
from tinyvllm.config.ranks import PARALLEL_SIZES, RankOptions
from tinyvllm.config.switches import environment
from tinyvllm.config.values import expand_home, parse_lora_modules, parse_size
from tinyvllm.errors import ArgumentError, nearest
from tinyvllm.kv_events import config as kv_events
from tinyvllm.kv_events.config import KVEventsConfig
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.quant import mixes
from tinyvllm.speculative import SpeculativeConfig

DEFAULT_MODEL = Path(__file__).parents[1] / "demo" / "model"

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "int8", "int4")
_KV_CACHE_ALIASES = {"fp8": "fp8_e4m3"}  # vLLM's
_KV_CACHE_NEAREST = {
    "fp8_e5m2": "fp8_e4m3",
    "fp8_inc": "fp8_e4m3",
    "q8_0": "int8",
    "q4_0": "int4",
    "q4_1": "int4",
    "iq4_nl": "int4",
    "f16": "auto",
}
LOAD_FORMATS = ("auto", "dummy")
MAX_SCHEDULER_STEPS = 64
PARTITION = 256  # keys that attention sums by themselves (decision 13)
CPU_STEP_MS = 250  # a gap between two tokens that a reader hardly notices
QUANTIZATIONS = tuple(name.lower() for name in mixes.NAMES)
# vLLM's names for the kind that a quantized checkpoint already has: they change nothing, and the checkpoint must be of that kind.
CHECKPOINT_QUANTIZATIONS = ("gptq", "awq", "compressed-tensors", "hqq", "mlx", "fp8", "bitsandbytes", "modelopt", "modelopt_fp4")
CHECKPOINT_ALIASES = {"modelopt_fp4": "modelopt"}  # vLLM's name for modelopt's NVFP4, whose checkpoints say modelopt

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(?P<choice>:[\w./+-]+)?")
_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".bin")


@dataclass(frozen=True)
class EngineConfig(RankOptions):
    """All options of one engine. Always valid: an invalid value is an ArgumentError that names the field.

    model                   folder of Hugging Face files, a GGUF file, or a name on the hub
    served_model_name       the model's name in metrics; None takes `model`
    tokenizer               folder of tokenizer files, or a GGUF file; None takes the model's own
    skip_tokenizer_init     serve token ids only; texts come back empty
    revision                branch, tag or commit of a hub name
    device, dtype           where and in what the model computes; "auto" lets the engine choose
    more_devices            devices that have the layers before those of `device`, each in a process of its own; `resolve` takes a list such
                            as CUDA,CPU apart
    gpu_layers              layers that `device` then has, the last ones; None: as many as its memory holds
    max_model_len           longest prompt plus output in tokens; None takes the model's own up to 8192, limited by memory
    max_num_seqs            sequences that run at the same time
    max_num_batched_tokens  tokens of one step
    max_step_ms             target for a step with decodes and parts of prompts, in milliseconds, by measured rates; 0 sets none. None is
                            CPU_STEP_MS on the CPU and 0 elsewhere
    num_scheduler_steps     decode steps that run back to back on the device before the host reads their tokens
    speculative_config      how drafts are guessed (docs/speculation.md); None: there are none. `resolve` also takes vLLM's dict, JSON text,
                            a method's name, "auto" (the default) and "off"
    block_size              tokens of one block of the KV cache; with context_parallel_size PARTITION of each process, and `resolve` sets it
    kv_cache_dtype          how keys and values are kept: "auto" in the dtype of the weights, else packed; "fp8" is "fp8_e4m3"
    num_blocks, kv_memory   size of the KV cache, in blocks or in bytes; with neither, what the device has free
    quantization            packs the matrices at load, to one of QUANTIZATIONS; None keeps them as in the checkpoint, and so does one of
                            CHECKPOINT_QUANTIZATIONS, which the checkpoint must be
    imatrix                 file of llama-imatrix: how much each column matters to `quantization`; without it all columns weigh the same
    load_format             "dummy" fills the model with random weights, to measure without a checkpoint
    enable_prefix_caching   keep the blocks of finished requests, and reuse them for requests with the same prefix
    prefix_cache_dir        folder that keeps cached blocks across restarts; None keeps nothing
    kv_events_config        where changes of the prefix cache are published (docs/kv-events.md); None publishes none. `resolve` also takes
                            vLLM's dict and JSON text
    disable_hybrid_kv_cache_manager  keep the blocks that have left the window of their layers (docs/kv-cache.md)
    swap_space              bytes of host memory for the blocks of preempted sequences; 0 recomputes them
    max_num_queued_reqs, max_num_queued_tokens  requests, and tokens of prompts, that may wait; more are refused. None is no limit
    preemption_mode         "recompute" or "swap"; None takes the cheaper one by measured rates
    async_scheduling        launch the next decode step before the last one's tokens are read; None does where launches are asynchronous
    tensor_parallel_size    processes that share each layer, each with a part of every matrix: 1, 2, 4 or 8
    pipeline_parallel_size  runs of layers that the model is divided into, each in processes of its own; all three on the CPU or
                            with a GPU for each process
    context_parallel_size   processes that divide each sequence's keys and values, and attention to them: 1, 2, 4 or 8
    data_parallel_size      engines with the whole model each, replicas, among which requests are divided (AsyncLLM, `serve`, `batch`): on
                            the CPU with a part of the cores each, on GPUs with one GPU for each of their ranks
    data_parallel_rank      which of the replicas this engine is, where something else starts the others; None starts them
    enable_lora             serve low-rank adapters (docs/lora.md): up to max_loras at the same time, of ranks up to max_lora_rank
    lora_experts            adapters may also change the experts that rows choose; a large one of those takes gigabytes
    lora_modules            names and folders of the adapters that are loaded at the start, which imply enable_lora. `resolve` also takes a
                            dict, and texts such as "NAME=FOLDER"
    enable_cascade          read a cached prefix that running sequences share once for all of them
    warm_up                 capture common steps ahead of time: LLM at construction, AsyncLLM one at a time while idle
    record                  file to which arrivals and parameters are written, for `replay`
    profile                 file to which a trace of all steps is written (docs/profile.md)
    energy                  measure the joules of each request (docs/energy.md)
    seed                    source of the seeds of requests without their own; None draws from the system
    """

    model: str
    served_model_name: str | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    revision: str | None = None
    device: str = "auto"
    more_devices: tuple[str, ...] = ()
    gpu_layers: int | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_step_ms: int | None = None
    num_scheduler_steps: int = 1
    speculative_config: SpeculativeConfig | None = speculative.AUTO
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    num_blocks: int | None = None
    kv_memory: int | None = None
    quantization: str | None = None
    imatrix: str | None = None
    load_format: str = "auto"
    enable_prefix_caching: bool = True
    prefix_cache_dir: str | None = None
    kv_events_config: KVEventsConfig | None = None
    disable_hybrid_kv_cache_manager: bool = False
    swap_space: int = 0
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    preemption_mode: str | None = None
    async_scheduling: bool | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    lora_experts: bool = False
    lora_modules: tuple[tuple[str, str], ...] = ()
    enable_cascade: bool = True
    warm_up: bool = False
    record: str | None = None
    profile: str | None = None
    energy: bool = False
    seed: int | None = None

    def of_rank(self, rank: int) -> EngineConfig:
        """The configuration as a rank above 0 has it, which knows its own device only."""
        return replace(self, device=self.device_of(rank), more_devices=(), gpu_layers=None)

    @property
    def step_seconds(self) -> float | None:
        """The target for a step with decodes and parts of prompts; None sets none. `device` must have been chosen."""
        default = CPU_STEP_MS if "CPU" in map(kind_of, self.devices) else 0
        milliseconds = default if self.max_step_ms is None else self.max_step_ms
        return milliseconds / 1000 or None

    def __post_init__(self) -> None:
        for name, low, high in _INTEGERS:
            _check_integer(name, getattr(self, name), low, high)
        for name in ("model", "served_model_name", "tokenizer", "revision", "imatrix", "prefix_cache_dir", "record", "profile"):
            _check_text(name, getattr(self, name), optional=name != "model")
        for name in _BOOLEANS:
            if type(getattr(self, name)) is not bool and not (name == "async_scheduling" and self.async_scheduling is None):
                raise ArgumentError(f"{name} must be True or False, got {getattr(self, name)!r}")
        _check_choice("dtype", self.dtype, DTYPES)
        _check_kv_cache_dtype(self.kv_cache_dtype)
        if self.quantization is not None:
            _check_choice("quantization", self.quantization, (*QUANTIZATIONS, *CHECKPOINT_QUANTIZATIONS))
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        if self.preemption_mode is not None:
            _check_choice("preemption_mode", self.preemption_mode, ("recompute", "swap"))
        check_device("device", self.device)
        if not (self.speculative_config is None or isinstance(self.speculative_config, SpeculativeConfig)):
            raise ArgumentError(f"speculative_config must be a SpeculativeConfig or None, got {self.speculative_config!r:.60}")
        if not (self.kv_events_config is None or isinstance(self.kv_events_config, KVEventsConfig)):
            raise ArgumentError(f"kv_events_config must be a KVEventsConfig or None, got {self.kv_events_config!r:.60}")
        self._check_combinations()

    def _check_combinations(self) -> None:
        self.check_devices()
        self.check_ranks()
        self.check_replicas()
        self._check_block_size()
        self._check_adapters()
        if self.prefix_cache_dir is not None and not self.enable_prefix_caching:
            raise ArgumentError(f"prefix_cache_dir={self.prefix_cache_dir!r} contradicts enable_prefix_caching=False: give one of them")
        if self.kv_events_config is not None and not self.enable_prefix_caching:
            raise ArgumentError("kv_events_config contradicts enable_prefix_caching=False: there are no cached blocks to publish")
        if self.imatrix is not None:
            self._check_imatrix(self.imatrix)
        if self.num_blocks is not None and self.kv_memory is not None:
            raise ArgumentError(f"num_blocks={self.num_blocks} and kv_memory={self.kv_memory} both size the KV cache: give one of them")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ArgumentError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "a step must hold a token of every running sequence"
            )
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ArgumentError(f"skip_tokenizer_init contradicts tokenizer={self.tokenizer!r}: give one of them")

    def _check_adapters(self) -> None:
        """ArgumentError for options of adapters that contradict each other."""
        unused = {
            name: getattr(self, name)
            for name in ("max_loras", "max_lora_rank", "lora_experts")
            if getattr(self, name) != getattr(EngineConfig, name)
        }
        if self.lora_modules:
            unused["lora_modules"] = self.lora_modules
        if unused and not self.enable_lora:
            name, value = next(iter(unused.items()))
            raise ArgumentError(f"{name}={value} has no use without enable_lora: give both, or neither")
        if len(self.lora_modules) > self.max_loras:
            raise ArgumentError(f"lora_modules has {len(self.lora_modules)} adapters, and max_loras is {self.max_loras}: give a larger one")
        if self.enable_lora and self.load_format == "dummy":
            raise ArgumentError("enable_lora has no use with load_format=dummy: no adapter belongs to random weights")

    def _check_block_size(self) -> None:
        ranks = self.context_parallel_size
        if ranks > 1 and self.block_size != ranks * PARTITION:
            raise ArgumentError(
                f"block_size={self.block_size} does not work with context_parallel_size={ranks}, whose blocks have {PARTITION} tokens "
                f"of each process: leave it out, or give {ranks * PARTITION}"
            )
        if ranks == 1 and (self.block_size & (self.block_size - 1) or not 8 <= self.block_size <= PARTITION):
            raise ArgumentError(f"block_size must be a power of two from 8 to {PARTITION}, got {self.block_size}")

    def _check_imatrix(self, path: str) -> None:
        if self.quantization is None:
            raise ArgumentError(f"imatrix={path!r} weighs the columns of what is quantized: give quantization too, such as q4_k_m")
        if self.quantization in CHECKPOINT_QUANTIZATIONS:
            raise ArgumentError(
                f"imatrix={path!r} changes nothing of quantization={self.quantization}, which keeps the checkpoint's matrices: leave it out"
            )
        if not takes_imatrix(self.quantization):
            raise ArgumentError(f"imatrix={path!r} changes nothing of quantization={self.quantization}, which has no search: leave it out")
        if self.load_format == "dummy":
            raise ArgumentError(f"imatrix={path!r} has no use with load_format=dummy: random weights are not quantized")


def takes_imatrix(quantization: str) -> bool:
    """Whether the rounding of this one of QUANTIZATIONS has a search, which an importance matrix changes."""
    return not mixes.UNWEIGHTED.issuperset(mixes.formats_of(quantization.upper()))


_BOOLEANS = (
    "skip_tokenizer_init",
    "enable_prefix_caching",
    "disable_hybrid_kv_cache_manager",
    "async_scheduling",
    "enable_cascade",
    "warm_up",
    "energy",
    "enable_lora",
)
_INTEGERS: tuple[tuple[str, int, int | None], ...] = (
    ("max_model_len", 2, None),
    ("max_num_seqs", 1, 4096),
    ("max_num_batched_tokens", 1, None),
    ("max_step_ms", 0, 600_000),
    ("num_scheduler_steps", 1, MAX_SCHEDULER_STEPS),
    ("max_loras", 1, 64),
    ("max_lora_rank", 1, 64),
    ("block_size", 1, None),
    ("num_blocks", 1, None),
    ("kv_memory", 1, None),
    ("swap_space", 0, None),
    ("pipeline_parallel_size", 1, 64),
    ("data_parallel_size", 1, 64),
    ("data_parallel_rank", 0, 63),
    ("gpu_layers", 1, None),
    ("max_num_queued_reqs", 0, None),
    ("max_num_queued_tokens", 0, None),
    ("seed", -(2**63), 2**64 - 1),
)
_OPTIONAL = (
    "max_model_len",
    "max_step_ms",
    "num_blocks",
    "kv_memory",
    "gpu_layers",
    "data_parallel_rank",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "seed",
)


def resolve(model: str | os.PathLike[str] | None = None, *, environ: Mapping[str, str] | None = None, **given: Any) -> EngineConfig:
    """The EngineConfig of `model` and the given fields; None means "not given". Nothing is loaded.

    Without a model it is the bundled one. Device names and sizes are normalized. Raises ArgumentError for an unknown
    field, a contradiction, a local model that does not exist, or an invalid environment switch.
    """
    switches = environment(os.environ if environ is None else environ)
    known = [f.name for f in fields(EngineConfig) if f.name not in ("model", "more_devices")]
    given = from_vllm(given)
    for name in given:
        if name not in known:
            raise ArgumentError(f"unknown engine option {name!r}{nearest(name, [*known, *VLLM])}")
    values = {name: value for name, value in given.items() if value is not None}
    for name in ("tokenizer", "imatrix", "prefix_cache_dir", "record", "profile"):
        if name in values:
            values[name] = os.fspath(values[name])
            expand_home(name, values[name])  # for its error
    devices = parse_devices("device", values.get("device", switches.get("TINYVLLM_DEVICE", "auto"))).split(",")
    values["device"], values["more_devices"] = devices[0], tuple(devices[1:])
    if len(devices) > 1:
        values.setdefault("pipeline_parallel_size", len(devices))
    for name in ("kv_memory", "swap_space"):
        if isinstance(values.get(name), str):
            values[name] = parse_size(name, values[name])
        if isinstance(values.get(name), (int, float)) and 0 < values[name] < 1024:
            raise ArgumentError(f"{name}={values[name]} is a number of bytes (vLLM's swap_space is in GiB): write '{values[name]:g}GiB'")
    if "speculative_config" in values:
        values["speculative_config"] = speculative.parse(values["speculative_config"])
    elif len(devices) > 1 or values.get("pipeline_parallel_size", 1) != 1:
        values["speculative_config"] = None  # does not work with it yet
    if "lora_modules" in values:
        modules = values["lora_modules"] = parse_lora_modules(values["lora_modules"])
        values = {"enable_lora": bool(modules), "max_loras": max(1, len(modules)), **values}
        for name, path in modules:
            if not expand_home("lora_modules", path).is_dir():
                raise ArgumentError(f"lora_modules: the adapter {name!r:.60} has no folder at {path!r}")
    if "kv_events_config" in values:
        values["kv_events_config"] = kv_events.parse(values["kv_events_config"])
    values |= {name: _KV_CACHE_ALIASES.get(str(values[name]), values[name]) for name in ("kv_cache_dtype",) if name in values}
    values.setdefault("block_size", default_block_size(values.get("context_parallel_size", 1)))
    if isinstance(values.get("max_num_seqs"), int):
        values.setdefault("max_num_batched_tokens", max(EngineConfig.max_num_batched_tokens, values["max_num_seqs"]))
    config = EngineConfig(model=_locate(model, values.get("revision")), **values)
    if config.tokenizer is not None:
        _check_tokenizer(config.tokenizer)
    return config


def default_block_size(context_parallel_size: Any) -> int:
    """The tokens of a block where none are given: of several ranks a partition of each."""
    return context_parallel_size * PARTITION if context_parallel_size in PARALLEL_SIZES[1:] else EngineConfig.block_size


def _locate(model: str | os.PathLike[str] | None, revision: str | None) -> str:
    if model is None:
        if not DEFAULT_MODEL.is_dir():
            raise ArgumentError(f"the bundled model is not in this installation ({DEFAULT_MODEL}): give a model")
        model = DEFAULT_MODEL
    if not isinstance(model, (str, os.PathLike)):
        raise ArgumentError(f"model must be a path or a hub name, got {model!r}")
    location = _check_location("model", os.fspath(model))
    if revision is not None and Path(location).exists():
        raise ArgumentError(f"revision={revision!r} is for names on the hub, and model {location!r} is a local path")
    return location


def _check_tokenizer(text: str) -> None:
    path = expand_home("tokenizer", text)
    if not path.is_dir() and not (path.is_file() and path.suffix.lower() == ".gguf"):
        raise ArgumentError(f"tokenizer must be a folder with tokenizer files, or a GGUF file, got {text!r}")


def _check_location(name: str, text: str) -> str:
    """The path with ~ expanded, or a hub name as it is. A name with one slash whose first part is a local folder is meant as a path."""
    path = Path(os.path.expanduser(text))
    if text and os.path.exists(path):  # not Path.exists, which raises for a name that is too long
        return str(path)
    match = _HUB_NAME.fullmatch(text)
    is_file = match is not None and match["choice"] is None and text.endswith(_FILE_ENDINGS)
    if match is None or is_file or ("/" in text and Path(text).parent.is_dir()):
        hint = nearest(path.name, os.listdir(path.parent)) if os.path.isdir(path.parent) else ""
        raise ArgumentError(f"{name}: no file or folder at {text!r}{hint}")
    return text


def _check_integer(name: str, value: object, low: int, high: int | None) -> None:
    if value is None and name in _OPTIONAL:
        return
    if type(value) is not int or value < low or (high is not None and value > high):
        bounds = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise ArgumentError(f"{name} must be an integer {bounds}, got {value!r}")


def _check_text(name: str, value: object, optional: bool) -> None:
    if not (isinstance(value, str) and value.strip()) and not (optional and value is None):
        raise ArgumentError(f"{name} must be a non-empty text, got {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(choices)}, got {value!r}{nearest(str(value), choices)}")


def _check_kv_cache_dtype(value: object) -> None:
    if value not in KV_CACHE_DTYPES:
        near = _KV_CACHE_NEAREST.get(str(value).lower())
        hint = f"; nearest: {near}" if near else nearest(str(value), KV_CACHE_DTYPES)
        raise ArgumentError(f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {value!r}{hint}")
