"""Engine options under vLLM's names: accepted where the meaning is the same, refused by name with the nearest option otherwise.

One table for `LLM(...)`, `AsyncLLM(...)` and the command line, which writes the names with dashes. Names that are spelt the same and mean
the same need no entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinyvllm.errors import ArgumentError
from tinyvllm.lazy_dataclass import dataclass


@dataclass(frozen=True)
class Alias:
    """One option of another program.

    ours     option of the same meaning, which gets the value
    inert    values that ask for what is the case anyway; an option with True or False among them is a switch
    nearest  options to try instead
    why      why other values are refused
    """

    ours: str | None = None
    inert: tuple[Any, ...] = ()
    nearest: tuple[str, ...] = ()
    why: str = "it is not implemented"

    @property
    def is_switch(self) -> bool:
        """Whether the command line gives it without a value."""
        return any(isinstance(value, bool) for value in self.inert)


_NO_IMAGES = Alias(inert=(None,), why="prompts are text only")
_FROM_CHECKPOINT = Alias(inert=(None,), nearest=("max_model_len",), why="the configuration of the checkpoint holds")

VLLM: dict[str, Alias] = {
    "num_gpu_blocks_override": Alias("num_blocks"),
    "kv_cache_memory_bytes": Alias("kv_memory"),
    "gpu_memory_utilization": Alias(
        inert=(None,), nearest=("kv_memory", "num_blocks"), why="the KV cache has a size; without one it takes what the device has free"
    ),
    "prefill_context_parallel_size": Alias("context_parallel_size"),
    "decode_context_parallel_size": Alias(
        inert=(1, None), nearest=("context_parallel_size",), why="contexts are divided among processes of their own, not among tensor ranks"
    ),
    "distributed_executor_backend": Alias(
        inert=(None, "uni", "mp"), nearest=("tensor_parallel_size",), why="an engine starts its processes"
    ),
    "worker_cls": Alias(inert=(None, "auto"), why="an engine runs in one process"),
    "enable_chunked_prefill": Alias(inert=(True, None), nearest=("max_num_batched_tokens",), why="long prompts are always chunked"),
    "max_num_partial_prefills": Alias(inert=(None,), nearest=("max_num_batched_tokens",)),
    "max_long_partial_prefills": Alias(inert=(None,), nearest=("max_num_batched_tokens",)),
    "long_prefill_token_threshold": Alias(inert=(None, 0), nearest=("max_num_batched_tokens",)),
    "scheduling_policy": Alias(inert=("fcfs", "priority", None), why="requests run by priority, in their order within one priority"),
    "disable_sliding_window": Alias(inert=(False, None), nearest=("max_model_len",), why="a window of the model is always used"),
    "trust_remote_code": Alias(inert=(True, False, None), why="no code of a checkpoint is executed"),
    "enforce_eager": Alias(inert=(False, None), nearest=("warm_up",), why="steps are always captured"),
    "max_seq_len_to_capture": Alias(inert=(None,), nearest=("warm_up",), why="steps of every length are captured"),
    "cuda_graph_sizes": Alias(inert=(None,), nearest=("warm_up",), why="the sizes of captured steps are fixed"),
    "compilation_config": Alias(inert=(None,), nearest=("warm_up",)),
    "calculate_kv_scales": Alias(
        inert=(True, False, None), nearest=("kv_cache_dtype",), why="each key and value of a packed KV cache has a scale of its own"
    ),
    "cpu_offload_gb": Alias(
        inert=(0, 0.0, None), nearest=("device", "quantization"), why="the CPU computes the layers that it has: give device=CUDA,CPU"
    ),
    "disable_custom_all_reduce": Alias(inert=(True, False, None), why="ranks add their sums by a kernel of this engine, on any GPUs"),
    "tokenizer_mode": Alias(inert=("auto", None), nearest=("tokenizer",), why="the files of the tokenizer decide its kind"),
    "tokenizer_revision": Alias(inert=(None,), nearest=("revision", "tokenizer")),
    "code_revision": Alias(inert=(None,), nearest=("revision",), why="no code of a checkpoint is executed"),
    "hf_config_path": Alias(inert=(None,), nearest=("model",)),
    "hf_token": Alias(inert=(None,), nearest=("model",), why="the environment variable HF_TOKEN has it"),
    "hf_overrides": _FROM_CHECKPOINT,
    "rope_scaling": _FROM_CHECKPOINT,
    "rope_theta": _FROM_CHECKPOINT,
    "config_format": Alias(inert=("auto", None), nearest=("model",), why="the files of the model decide it"),
    "download_dir": Alias(inert=(None,), nearest=("prefix_cache_dir",), why="downloads are in the cache folder; set TINYVLLM_CACHE"),
    "ignore_patterns": Alias(inert=(None,), nearest=("model",)),
    "task": Alias(inert=("auto", "generate", None), why="every model generates and embeds"),
    "runner": Alias(inert=("auto", "generate", None), why="every model generates and embeds"),
    "convert": Alias(inert=("auto", "none", None), why="every model generates and embeds"),
    "model_impl": Alias(inert=("auto", None), why="there is one implementation"),
    "max_logprobs": Alias(inert=(20, None), why="requests may ask for up to 20"),
    "logprobs_mode": Alias(inert=("raw_logprobs", None), why="log-probabilities are those of the raw logits"),
    "disable_log_stats": Alias(inert=(True, None), why="statistics are at /metrics and /status"),
    "generation_config": Alias(inert=("auto", None), why="the model's recommendation is the default of sampling"),
    "override_generation_config": Alias(inert=(None,), why="give sampling parameters instead"),
    "max_cpu_loras": Alias(inert=(None,), nearest=("max_loras",), why="all loaded adapters are where the model is"),
    "lora_dtype": Alias(inert=("auto", "float32", None), why="adapters are kept and multiplied in float32"),
    "fully_sharded_loras": Alias(inert=(False, None), why="adapters do not work with ranks yet"),
    "speculative_model": Alias(inert=(None,), nearest=("speculative_config",), why="the configuration names the model"),
    "num_speculative_tokens": Alias(inert=(None,), nearest=("speculative_config",), why="the configuration has it"),
    "guided_decoding_backend": Alias(inert=("auto", None), why="there is one grammar engine"),
    "structured_outputs_config": Alias(inert=(None,), why="there is one grammar engine"),
    "limit_mm_per_prompt": _NO_IMAGES,
    "mm_processor_kwargs": _NO_IMAGES,
    "enable_prompt_embeds": Alias(inert=(False, None), why="prompts are text or token ids"),
    "kv_transfer_config": Alias(inert=(None,), nearest=("prefix_cache_dir",)),
    "prefix_caching_hash_algo": Alias(inert=(None,), nearest=("enable_prefix_caching",), why="there is one hash"),
}


def translate(name: str, value: Any, alias: Alias, shown: str, spell: Callable[[str], str] = str) -> tuple[str, Any] | None:
    """(our option, the value) for a value of the same meaning; None for one that asks for what is the case anyway.

    `shown` is the option as the caller wrote it, `spell` writes an option of ours like the caller. ArgumentError for every other value.
    """
    if alias.ours is not None:
        return alias.ours, value
    if any(value is one or str(value).lower() == str(one).lower() for one in alias.inert if one is not None or value is None):
        return None
    hint = f"; nearest: {', '.join(map(spell, alias.nearest))}" if alias.nearest else ""
    accepted = [str(one) for one in alias.inert if one is not None]
    values = f" (accepted: {', '.join(accepted)})" if accepted else ""
    raise ArgumentError(f"{shown}={str(value):.60} has no meaning here: {alias.why}{values}{hint}")


def from_vllm(options: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with vLLM's names replaced by ours. ArgumentError for a name that has no meaning here, or two of the same one."""
    result = {name: value for name, value in options.items() if name not in VLLM}
    for name in options.keys() & VLLM.keys():
        translated = translate(name, options[name], VLLM[name], name)
        if translated is None:
            continue
        if result.get(translated[0]) is not None:
            raise ArgumentError(f"{name} is another name of {translated[0]}: give one of them")
        result[translated[0]] = translated[1]
    return result
