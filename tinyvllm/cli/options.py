"""The options that several commands share, and what they mean for EngineConfig, ServerConfig and SamplingParams. Loads no model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from tinyvllm.config.engine import CHECKPOINT_QUANTIZATIONS, CPU_STEP_MS, DTYPES, KV_CACHE_DTYPES, LOAD_FORMATS, QUANTIZATIONS, EngineConfig
from tinyvllm.config.values import parse_size
from tinyvllm.errors import ArgumentError
from tinyvllm.request import STRUCTURES, LoRARequest, SamplingParams, StructuredOutputsParams

MAX_TOKENS = {"generate": 256, "chat": 1024}  # defaults; less where the context ends earlier

Option = tuple[str, dict[str, Any]]
SHORT = {  # vLLM's but for -cp
    "--tensor-parallel-size": "-tp",
    "--pipeline-parallel-size": "-pp",
    "--context-parallel-size": "-cp",
    "--data-parallel-size": "-dp",
    "--data-parallel-rank": "-dpn",
}


class AppendModel(argparse.Action):
    """[NAME=]PATH, repeatable. A configuration file may also map names to models, each with options of its own."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), values])


ENGINE_OPTIONS: tuple[Option, ...] = (
    ("--model", {"metavar": "PATH", "help": "folder of a Hugging Face model, GGUF file or hub name; default: the bundled model"}),
    ("--tokenizer", {"metavar": "PATH", "help": "folder of tokenizer files, or GGUF file; default: the model's own"}),
    ("--revision", {"metavar": "R", "help": "branch, tag or commit of a hub name"}),
    (
        "--device",
        {"metavar": "D,...", "help": "auto, CPU, METAL, CUDA, CUDA:1, ...; CUDA,CPU: the CPU has the layers that do not fit the GPU"},
    ),
    (
        "--gpu-layers",
        {"type": int, "metavar": "N", "help": "with --device CUDA,CPU: layers of the GPU; default: as many as its memory holds"},
    ),
    (
        "--tensor-parallel-size",
        {
            "type": int,
            "metavar": "N",
            "help": "processes that share a layer, each with a part of every matrix: 1, 2, 4 or 8, on the CPU or GPUs",
        },
    ),
    (
        "--pipeline-parallel-size",
        {"type": int, "metavar": "N", "help": "runs of layers that the model is divided into, a process each, on the CPU or GPUs"},
    ),
    (
        "--context-parallel-size",
        {"type": int, "metavar": "N", "help": "processes that divide the KV cache of each sequence: 1, 2, 4 or 8, on the CPU or GPUs"},
    ),
    (
        "--data-parallel-size",
        {"type": int, "metavar": "N", "help": "engines with the whole model each, among which requests are divided (serve, batch)"},
    ),
    (
        "--data-parallel-rank",
        {"type": int, "metavar": "R", "help": "which of them this one is, where something else starts the others; default: starts them"},
    ),
    ("--dtype", {"metavar": "T", "help": f"data type of the computation: {', '.join(DTYPES)}"}),
    ("--max-model-len", {"type": int, "metavar": "N", "help": "maximum prompt plus answer, in tokens"}),
    ("--max-num-seqs", {"type": int, "metavar": "N", "help": "maximum number of sequences that run at the same time"}),
    ("--max-num-batched-tokens", {"type": int, "metavar": "N", "help": "maximum number of tokens in one step"}),
    (
        "--max-step-ms",
        {
            "type": int,
            "metavar": "N",
            "help": f"target for a step with decodes and prompts; 0 sets none; default: {CPU_STEP_MS} on the CPU",
        },
    ),
    ("--kv-memory", {"metavar": "SIZE", "help": "size of the KV cache in bytes, such as 2GiB; or give --num-blocks"}),
    ("--num-blocks", {"type": int, "metavar": "N", "help": "size of the KV cache in blocks; or give --kv-memory"}),
    (
        "--block-size",
        {
            "type": int,
            "metavar": "N",
            "help": "tokens of a KV block, a power of two from 8 to 256; with --context-parallel-size 256 a process",
        },
    ),
    (
        "--kv-cache-dtype",
        {"metavar": "T", "help": f"how keys and values are kept: {', '.join(KV_CACHE_DTYPES)}; default: as the weights (auto)"},
    ),
    (
        "--quantization",
        {
            "metavar": "Q",
            "help": f"quantize the matrices while loading: {', '.join(QUANTIZATIONS)}; or the kind that a quantized checkpoint must be: "
            f"{', '.join(CHECKPOINT_QUANTIZATIONS)}",
        },
    ),
    ("--imatrix", {"metavar": "F", "help": "importance matrix of llama.cpp (.dat or GGUF), which weighs the columns in --quantization"}),
    (
        "--num-scheduler-steps",
        {"type": int, "metavar": "N", "help": "decode steps that the device runs before the host reads their tokens"},
    ),
    (
        "--speculative-config",
        {
            "metavar": "JSON",
            "help": 'how to guess tokens ahead, as vLLM writes it, such as {"method": "ngram"}; or a method, auto (the default), or off; '
            "changes no token unless it names a lossy policy",
        },
    ),
    ("--enable-prefix-caching", {"action": argparse.BooleanOptionalAction, "help": "share the KV blocks of prompts with a common prefix"}),
    ("--prefix-cache-dir", {"metavar": "DIR", "help": "folder that keeps the prefix cache over a restart"}),
    (
        "--kv-events-config",
        {"metavar": "JSON", "help": 'publish changes of the prefix cache, as vLLM writes it: {"enable_kv_cache_events": true, ...}'},
    ),
    (
        "--disable-hybrid-kv-cache-manager",
        {"action": argparse.BooleanOptionalAction, "help": "keep KV blocks that have left the sliding window of their layers"},
    ),
    ("--swap-space", {"metavar": "SIZE", "help": "host memory for the blocks of preempted sequences, such as 4GiB"}),
    ("--preemption-mode", {"metavar": "M", "help": "recompute or swap; default: the cheaper one"}),
    ("--max-num-queued-reqs", {"type": int, "metavar": "N", "help": "maximum number of waiting requests; more are refused"}),
    ("--max-num-queued-tokens", {"type": int, "metavar": "N", "help": "maximum number of waiting prompt tokens; more are refused"}),
    ("--async-scheduling", {"action": argparse.BooleanOptionalAction, "help": "launch a step before the tokens of the last one are read"}),
    (
        "--enable-cascade",
        {"action": argparse.BooleanOptionalAction, "help": "read the KV blocks that running sequences share once for all of them"},
    ),
    (
        "--warm-up",
        {
            "action": argparse.BooleanOptionalAction,
            "help": "capture common step shapes ahead of time; on by default in serve, while it is idle",
        },
    ),
    ("--record", {"metavar": "F", "help": "record the traffic in this .jsonl file, for replay"}),
    ("--profile", {"metavar": "F", "help": "write a trace of all steps for Perfetto to this .json file; a table of kernels at the end"}),
    ("--energy", {"action": "store_true", "help": "measure the joules of each request, where counters can be read"}),
    ("--load-format", {"metavar": "F", "help": f"{', '.join(LOAD_FORMATS)}; dummy fills the model with random weights"}),
)

ADAPTERS: tuple[Option, ...] = (
    (
        "--lora",
        {
            "action": "append",
            "metavar": "NAME=FOLDER",
            "dest": "lora_modules",
            "help": "load an adapter of PEFT's layout; serve: a model of that name, may be repeated",
        },
    ),
    ("--max-lora-rank", {"type": int, "metavar": "N", "help": "largest rank of an adapter, up to 64; default 16"}),
    ("--lora-experts", {"action": "store_true", "help": "leave room for what adapters change of the experts that rows choose"}),
)
ADAPTER_ROOM: tuple[Option, ...] = (
    ("--enable-lora", {"action": "store_true", "help": "leave room for adapters that are loaded later"}),
    ("--max-loras", {"type": int, "metavar": "N", "help": "adapters that are loaded at the same time; default: those of --lora, or 1"}),
)

THREADS: Option = (
    "--threads",
    {"type": int, "metavar": "N", "help": "threads of the CPU's kernels; default: the fast cores that affinity and quotas leave"},
)

OBSERVING = ("--record", "--profile", "--energy")  # what watches requests of a user: commands that run their own do without

MODELS: Option = (
    "--model",
    {
        "action": AppendModel,
        "metavar": "[NAME=]PATH",
        "help": "folder, GGUF file or hub name; may be repeated, then each is loaded on first use",
    },
)
SKIP_TOKENIZER: Option = (
    "--skip-tokenizer-init",
    {"action": "store_true", "help": "serve token ids only: without a tokenizer, prompts are ids and answers have return_token_ids"},
)
SERVED_MODEL_NAME: Option = (
    "--served-model-name",
    {"action": "append", "metavar": "NAME", "default": None, "help": "served name of the only model; may be repeated"},
)
LENIENT: Option = (
    "--lenient",
    {"action": "store_true", "help": "ignore unknown fields and list them in X-Ignored-Fields, instead of refusing the request"},
)

SERVER_OPTIONS: tuple[Option, ...] = (
    ("--host", {"metavar": "H", "help": "address to listen on; 0.0.0.0 or :: for all (then set --api-key)"}),
    ("--port", {"type": int, "metavar": "N", "help": "default 8000; 0 takes a free port, which the ready line has"}),
    SERVED_MODEL_NAME,
    ("--unload-idle", {"type": float, "metavar": "S", "default": None, "help": "unload a model after S seconds without requests"}),
    (
        "--memory-budget",
        {
            "metavar": "SIZE",
            "default": None,
            "help": "memory of all models together, such as 16G: idle ones are unloaded, the least recently used first, before another is "
            "loaded; default: the machine's",
        },
    ),
    ("--chat-template", {"metavar": "F", "default": None, "help": "file with a Jinja template that replaces the models' own"}),
    ("--trust-request-chat-template", {"action": "store_true", "help": "accept chat templates in requests"}),
    LENIENT,
    (
        "--allow-lossy-speculation",
        {"action": "store_true", "default": False, "help": "accept a policy of --speculative-config that changes answers"},
    ),
    (
        "--api-key",
        {
            "action": "append",
            "metavar": "KEY",
            "default": None,
            "help": "accept requests with this key, as of TINYVLLM_API_KEY; repeatable",
        },
    ),
    ("--api-key-file", {"metavar": "F", "default": None, "help": "file of keys, one a line, followed by name=... and limits"}),
    ("--store", {"action": argparse.BooleanOptionalAction, "help": "keep answers of /v1/responses, files and batches in memory"}),
    ("--allow-runtime-lora", {"action": "store_true", "help": "let clients load and unload adapters from folders of this machine"}),
    ("--allow-trace", {"action": "store_true", "help": "answer /debug/trace?steps=N with a trace of the next steps"}),
    ("--share-prefixes", {"action": "store_true", "help": "API keys share cached prefixes; without it each key has its own"}),
    ("--return-tokens-as-token-ids", {"action": "store_true", "help": 'log-probabilities write tokens as "token_id:5"'}),
    ("--enable-force-include-usage", {"action": "store_true", "help": "every event of a stream has the usage"}),
    ("--enable-per-request-metrics", {"action": "store_true", "help": "answers have the times of their request"}),
    (
        "--cors-origin",
        {"action": "append", "metavar": "URL", "help": "allow pages of this origin to use the server; * for all; may be repeated"},
    ),
    (
        "--allowed-host",
        {"action": "append", "metavar": "NAME", "help": "accept requests with this name in their Host header; may be repeated"},
    ),
    ("--root-path", {"metavar": "PATH", "help": "prefix under which a proxy serves this server, such as /llm"}),
    ("--ssl-certfile", {"metavar": "F", "help": "certificate chain in PEM: serve https"}),
    ("--ssl-keyfile", {"metavar": "F", "help": "private key, if it is not in the certificate's file"}),
    ("--max-body", {"metavar": "SIZE", "help": "maximum body of a request; default 4MiB"}),
    ("--max-connections", {"type": int, "metavar": "N", "help": "connections at the same time, further ones wait; default 2000"}),
    ("--head-seconds", {"type": float, "metavar": "S", "help": "time for a client to send the head of a request; default 10"}),
    ("--body-seconds", {"type": float, "metavar": "S", "help": "time for a client to send the body of a request; default 30"}),
    ("--write-seconds", {"type": float, "metavar": "S", "help": "time that a client may leave a stream unread; default 60"}),
    ("--beat-seconds", {"type": float, "metavar": "S", "help": "silence in a stream after which a keep-alive comment is sent; default 5"}),
    ("--grace-seconds", {"type": float, "metavar": "S", "help": "time for accepted requests to finish after SIGTERM; default 30"}),
    ("--access-log", {"action": argparse.BooleanOptionalAction, "help": "write a line of JSON to stdout for every request"}),
)

SAMPLING_OPTIONS: tuple[Option, ...] = (
    ("--max-tokens", {"type": int, "metavar": "N", "help": "maximum number of generated tokens"}),
    ("--min-tokens", {"type": int, "metavar": "N", "help": "minimum number of generated tokens"}),
    ("--temperature", {"type": float, "metavar": "T", "help": "0 is greedy: always the most probable token"}),
    ("--top-k", {"type": int, "metavar": "K", "help": "sample among the K most probable tokens"}),
    ("--top-p", {"type": float, "metavar": "P", "help": "sample among the most probable tokens that together reach P"}),
    ("--min-p", {"type": float, "metavar": "P", "help": "drop tokens less probable than P times the most probable"}),
    ("--seed", {"type": int, "metavar": "S", "help": "the same seed gives the same answer"}),
    ("--repetition-penalty", {"type": float, "metavar": "X", "help": "divide the logits of tokens in the prompt or the answer; 1 is off"}),
    ("--presence-penalty", {"type": float, "metavar": "X", "help": "subtract from the logits of tokens in the answer"}),
    ("--frequency-penalty", {"type": float, "metavar": "X", "help": "the same, once for each occurrence"}),
    ("--stop", {"action": "append", "metavar": "S", "help": "stop at this text; may be repeated"}),
    (
        "--stop-token-id",
        {"action": "append", "type": int, "metavar": "ID", "dest": "stop_token_ids", "help": "stop at this token; may be repeated"},
    ),
    ("--ignore-eos", {"action": "store_true", "help": "continue after the end-of-sequence token"}),
)

STRUCTURE_OPTIONS: tuple[Option, ...] = (
    ("--json-schema", {"metavar": "S", "dest": "json", "help": "the answer is JSON of this schema: a file, or the schema itself"}),
    ("--json-object", {"action": "store_true", "help": "the answer is any JSON object"}),
    ("--regex", {"metavar": "R", "help": "the whole answer matches this regular expression"}),
    ("--choice", {"action": "append", "metavar": "TEXT", "help": "the answer is one of these; repeated"}),
    ("--grammar", {"metavar": "G", "help": "the answer follows this Lark or GBNF grammar: a file, or the grammar itself"}),
)


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig on the command line, by name."""
    names = [settings.get("dest", _field(flag)) for flag, settings in (*ENGINE_OPTIONS, SKIP_TOKENIZER, *ADAPTERS, *ADAPTER_ROOM)]
    fields = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    for flag in ("--kv-memory", "--swap-space"):
        if _field(flag) in fields:
            fields[_field(flag)] = parse_size(flag, fields[_field(flag)])
    return fields


def only_adapter(config: EngineConfig) -> LoRARequest | None:
    """The adapter of a command in which one computes all prompts. ArgumentError for several."""
    if len(config.lora_modules) > 1:
        raise ArgumentError("--lora: one adapter computes all prompts; give it once, or use serve, where requests name theirs")
    return LoRARequest(config.lora_modules[0][0]) if config.lora_modules else None


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams on the command line, by name, validated."""
    names = [settings.get("dest", _field(flag)) for flag, settings in (*SAMPLING_OPTIONS, ("--n", {}), ("--logprobs", {}))]
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    structure = {name: getattr(options, name) for name in STRUCTURES if hasattr(options, name)}
    if structure:
        given["structured_outputs"] = StructuredOutputsParams(**{name: _contents(name, value) for name, value in structure.items()})
    SamplingParams(**{"max_tokens": None, **given})
    return given


def server_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ServerConfig on the command line, by name."""
    names = [_field(flag) for flag, settings in SERVER_OPTIONS if settings.get("default", argparse.SUPPRESS) is argparse.SUPPRESS]
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if "max_body" in given:
        given["max_body"] = parse_size("--max-body", given["max_body"])
    for name in ("cors_origin", "allowed_host"):
        if name in given:
            given[f"{name}s"] = tuple(given.pop(name))
    return given


def _contents(name: str, value: Any) -> Any:
    """The contents of a file, if a schema or a grammar is the name of one."""
    if name not in ("json", "grammar") or len(value) > 4096 or not os.path.isfile(value):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{value}: {error}") from error


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def engine_options_except(*flags: str) -> tuple[Option, ...]:
    """The engine's options except these."""
    return tuple(option for option in ENGINE_OPTIONS if option[0] not in flags)


def engine_options_among(*flags: str) -> tuple[Option, ...]:
    """These of the engine's options."""
    return tuple(option for option in ENGINE_OPTIONS if option[0] in flags)
