"""The options of every command, and what they mean for EngineConfig and SamplingParams. Reads no file and loads nothing."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tinyvllm.cli.aliases import translated
from tinyvllm.config import (
    CHECKPOINT_QUANTIZATIONS,
    CPU_STEP_MS,
    DTYPES,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    QUANTIZATIONS,
    VERSION,
    parse_size,
)
from tinyvllm.errors import ArgumentError, nearest
from tinyvllm.request import STRUCTURES, SamplingParams, StructuredOutputsParams

COMMANDS = ("generate", "chat", "serve", "batch", "kernels", "verify", "quality", "replay", "lab")
MAX_TOKENS = {"generate": 256, "chat": 1024}  # defaults; less where the context ends earlier

_ENGINE_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--model", {"metavar": "PATH", "help": "folder of a Hugging Face model, GGUF file or hub name; default: the bundled model"}),
    ("--tokenizer", {"metavar": "PATH", "help": "folder of tokenizer files, or GGUF file; default: the model's own"}),
    ("--revision", {"metavar": "R", "help": "branch, tag or commit of a hub name"}),
    ("--device", {"metavar": "D", "help": "auto, CPU, METAL, CUDA, CUDA:1, ..."}),
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
    ("--block-size", {"type": int, "metavar": "N", "help": "tokens of a KV block, a power of two from 8 to 256"}),
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
            "help": 'how to guess tokens ahead, as vLLM writes it, such as {"method": "ngram"}; or a method, auto or off; '
            "changes no token unless it names a lossy policy",
        },
    ),
    ("--enable-prefix-caching", {"action": argparse.BooleanOptionalAction, "help": "share the KV blocks of prompts with a common prefix"}),
    ("--prefix-cache-dir", {"metavar": "DIR", "help": "folder that keeps the prefix cache over a restart"}),
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
    ("--load-format", {"metavar": "F", "help": f"{', '.join(LOAD_FORMATS)}; dummy fills the model with random weights"}),
)

_Option = tuple[str, dict[str, Any]]
_MODELS: _Option = (
    "--model",
    {
        "action": "append",
        "metavar": "[NAME=]PATH",
        "help": "folder, GGUF file or hub name; may be repeated, then each is loaded on first use",
    },
)
_SKIP_TOKENIZER: _Option = (
    "--skip-tokenizer-init",
    {"action": "store_true", "help": "serve token ids only: without a tokenizer, prompts are ids and answers have return_token_ids"},
)
_SERVED_MODEL_NAME: _Option = (
    "--served-model-name",
    {"action": "append", "metavar": "NAME", "default": None, "help": "served name of the only model; may be repeated"},
)
_LENIENT: _Option = (
    "--lenient",
    {"action": "store_true", "help": "ignore unknown fields and list them in X-Ignored-Fields, instead of refusing the request"},
)

_SERVER_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--host", {"metavar": "H", "help": "address to listen on; 0.0.0.0 or :: for all (then set --api-key)"}),
    ("--port", {"type": int, "metavar": "N", "help": "default 8000; 0 takes a free port, which the ready line has"}),
    _SERVED_MODEL_NAME,
    ("--unload-idle", {"type": float, "metavar": "S", "default": None, "help": "unload a model after S seconds without requests"}),
    ("--chat-template", {"metavar": "F", "default": None, "help": "file with a Jinja template that replaces the models' own"}),
    ("--trust-request-chat-template", {"action": "store_true", "help": "accept chat templates in requests"}),
    _LENIENT,
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

_SAMPLING_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
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

_STRUCTURE_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--json-schema", {"metavar": "S", "dest": "json", "help": "the answer is JSON of this schema: a file, or the schema itself"}),
    ("--json-object", {"action": "store_true", "help": "the answer is any JSON object"}),
    ("--regex", {"metavar": "R", "help": "the whole answer matches this regular expression"}),
    ("--choice", {"action": "append", "metavar": "TEXT", "help": "the answer is one of these; repeated"}),
    ("--grammar", {"metavar": "G", "help": "the answer follows this Lark or GBNF grammar: a file, or the grammar itself"}),
)


class Parser(argparse.ArgumentParser):
    """Raises ArgumentErrors, with the closest known option as a suggestion."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        raise ArgumentError(f"{message}{self._hint(unknown[1].partition('=')[0]) if unknown else ''}")

    def known_options(self) -> set[str]:
        """The options of this command, with their dashes."""
        return {option for action in self._actions for option in action.option_strings}

    def _hint(self, unknown: str) -> str:
        """The nearest option. The dashes are not compared: they would make every option similar to every other."""
        if not unknown.startswith("-"):
            model = any(action.dest == "model" for action in self._actions)
            return "; a model is given as --model PATH" if model else ""
        names = {option.lstrip("-"): option for option in sorted(self.known_options())}
        hint = nearest(unknown.lstrip("-"), names)
        return re.sub(r"'(.*)'", lambda match: f"'{names[match[1]]}'", hint)


def parse(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """The command and its options. The first argument names the command; without one it is generate."""
    command, rest = "generate", list(arguments)
    if rest and not rest[0].startswith("-"):
        command = rest.pop(0)
        if command not in COMMANDS:
            raise ArgumentError(f"unknown command {command!r}{nearest(command, COMMANDS)}; commands are {', '.join(COMMANDS)}")
    parser = PARSERS[command]()
    return command, parser.parse_args(list(translated(rest, parser.known_options())))


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig on the command line, by name."""
    flags = [flag for flag, _ in (*_ENGINE_OPTIONS, _SKIP_TOKENIZER)]
    fields = {name: value for flag in flags if (value := getattr(options, name := _field(flag), None)) is not None}
    for flag in ("--kv-memory", "--swap-space"):
        if _field(flag) in fields:
            fields[_field(flag)] = parse_size(flag, fields[_field(flag)])
    return fields


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams on the command line, by name, validated."""
    names = [settings.get("dest", _field(flag)) for flag, settings in (*_SAMPLING_OPTIONS, ("--n", {}), ("--logprobs", {}))]
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    structure = {name: getattr(options, name) for name in STRUCTURES if hasattr(options, name)}
    if structure:
        given["structured_outputs"] = StructuredOutputsParams(**{name: _contents(name, value) for name, value in structure.items()})
    SamplingParams(**{"max_tokens": None, **given})
    return given


def server_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ServerConfig on the command line, by name."""
    names = [_field(flag) for flag, settings in _SERVER_OPTIONS if settings.get("default", argparse.SUPPRESS) is argparse.SUPPRESS]
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


def _add(parser: Parser, title: str, table: Sequence[tuple[str, dict[str, Any]]]) -> None:
    group = parser.add_argument_group(title)
    for flag, settings in table:
        group.add_argument(flag, **{"default": argparse.SUPPRESS, **settings})


def _common(command: str, description: str, epilog: str | None = None) -> Parser:
    name = "tinyvllm" if command == "generate" else f"tinyvllm {command}"
    parser = Parser(prog=name, description=description, epilog=epilog, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tinyvllm {VERSION}")
    parser.add_argument("--quiet", action="store_true", help="only errors on stderr")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _generate_parser() -> Parser:
    parser = _common(
        "generate",
        "Continue prompts with a language model. The answer to a single prompt is streamed to stdout.",
        "Other commands: tinyvllm chat, serve, batch, kernels, verify, quality, replay, lab (see their --help).",
    )
    prompts: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--prompt", {"action": "append", "metavar": "TEXT", "help": "the text to continue; may be repeated; - reads stdin"}),
        ("--prompts-file", {"metavar": "F", "help": "more prompts: one a line (.txt), or JSON objects (.jsonl)"}),
        (
            "--output",
            {
                "metavar": "F",
                "help": "write a JSON line for each answer when it is ready to this .jsonl file (- is stdout); a second run continues it",
            },
        ),
        ("--skip-bad", {"action": "store_true", "help": "a line of --prompts-file that is no prompt gets an error in its place"}),
    )
    group = parser.add_argument_group("prompts")
    for flag, settings in prompts:
        group.add_argument(flag, **settings)
    _add(parser, "sampling (default: the model's own recommendation)", _SAMPLING_OPTIONS)
    _add(parser, "structure of the answer (one of them)", _STRUCTURE_OPTIONS)
    more: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--n", {"type": int, "metavar": "N", "help": "number of answers to each prompt"}),
        (
            "--logprobs",
            {"type": int, "metavar": "N", "help": "log-probabilities of the N most probable tokens at each position, in --output"},
        ),
    )
    _add(parser, "output", more)
    _add(parser, "engine", _ENGINE_OPTIONS)
    return parser


def _chat_parser() -> Parser:
    parser = _common("chat", "Talk to a language model. /help lists the commands of the conversation.")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--url", metavar="URL", help="use an OpenAI server, such as http://localhost:8000; --model is then the name of its model"
    )
    parser.add_argument("--api-key", metavar="KEY", help="API key for that server")
    _add(parser, "sampling (default: the model's own recommendation)", _SAMPLING_OPTIONS)
    _add(parser, "structure of the answer (one of them)", _STRUCTURE_OPTIONS)
    _add(parser, "engine", _ENGINE_OPTIONS)
    return parser


def _serve_parser() -> Parser:
    parser = _common("serve", "Serve models over HTTP as OpenAI and Anthropic do. SIGTERM lets accepted requests finish.")
    _add(parser, "server", _SERVER_OPTIONS)
    _add(parser, "engine (of every model)", (_MODELS, *_others("--model"), _SKIP_TOKENIZER))
    return parser


def _batch_parser() -> Parser:
    parser = _common(
        "batch", "Answer a file of requests in OpenAI's batch format. Continues where an earlier run of the same command ended."
    )
    parser.add_argument("input", metavar="IN.jsonl", help="a request a line: custom_id, method, url and body")
    parser.add_argument("-o", "--output", metavar="OUT.jsonl", required=True, help="an answer a line, in the order in which they finish")
    own: tuple[tuple[str, dict[str, Any]], ...] = (
        (
            "--concurrency",
            {"type": int, "metavar": "N", "default": None, "help": "requests at the same time; default: twice --max-num-seqs"},
        ),
        _SERVED_MODEL_NAME,
        _LENIENT,
    )
    _add(parser, "batch", own)
    _add(parser, "engine (of every model)", (_MODELS, *_others("--model")))
    return parser


def _kernels_parser() -> Parser:
    parser = _common("kernels", "Show which kernel runs each op of a model on this machine, and why. Loads the model and runs two steps.")
    _add(parser, "engine", _ENGINE_OPTIONS)
    return parser


def _verify_parser() -> Parser:
    parser = _common("verify", "Compare a model's hand-written kernels with the reference, layer by layer. Exit code 1 if they diverge.")
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="as --model elsewhere")
    own: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--prompt", {"action": "append", "metavar": "TEXT", "default": None, "help": "prompt to compare; may be repeated"}),
        ("--steps", {"type": int, "metavar": "N", "default": 8, "help": "decode steps after the prompts"}),
        ("--tolerance", {"type": float, "metavar": "X", "default": None, "help": "maximum relative error of one layer"}),
        ("--json", {"action": "store_true", "default": False, "help": "all figures as one JSON object"}),
    )
    _add(parser, "comparison", own)
    _add(parser, "engine", _others("--model", "--record"))
    return parser


def _quality_parser() -> Parser:
    parser = _common(
        "quality",
        "Measure what a format of weights or of the KV cache costs: perplexity, KL divergence from a reference, bytes and tokens a second.",
        "Without MODEL, --formats and --kv-cache-dtypes: every format, and every type of KV cache. Exit code 1 if a row failed.",
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a model to measure, as --model elsewhere; may be repeated")
    own: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--against", {"metavar": "MODEL", "help": "the reference, as --model elsewhere; default: the bundled model"}),
        ("--text", {"metavar": "F", "help": "UTF-8 text; default, for the bundled model only: text held out of its training"}),
        (
            "--formats",
            {"metavar": "Q,...", "help": f"measure the reference quantized while loading: all, or of {', '.join(QUANTIZATIONS)}"},
        ),
        (
            "--kv-cache-dtypes",
            {"metavar": "T,...", "help": "measure each of the weights, or the reference's, with these types of KV cache"},
        ),
        ("--reference-dtype", {"metavar": "T", "help": "--dtype of the reference, such as float32"}),
        ("--context", {"type": int, "metavar": "N", "default": 512, "help": "tokens of a window; those after its first half are scored"}),
        ("--windows", {"type": int, "metavar": "N", "default": 32, "help": "maximum number of windows of the text"}),
        ("--scratch", {"metavar": "SIZE", "default": "16GiB", "help": "maximum size of the temporary file of the reference's logits"}),
        ("--decode", {"action": argparse.BooleanOptionalAction, "default": True, "help": "measure the speed of decoding, too"}),
        ("--output", {"metavar": "F", "help": "write a JSON line for each row to this file; - is stdout, in place of the table"}),
        ("--plot", {"metavar": "F.svg", "help": "draw bytes against divergence"}),
    )
    group = parser.add_argument_group("comparison")
    for flag, settings in own:
        group.add_argument(flag, **settings)
    _add(parser, "engine", _only("--device", "--tokenizer", "--block-size", "--imatrix"))
    return parser


def _replay_parser() -> Parser:
    parser = _common("replay", "Replay a recording, with its arrivals. Exit code 1 if tokens or schedule differ.")
    parser.add_argument("file", metavar="RUN.jsonl", help="a file that --record wrote")
    own: tuple[tuple[str, dict[str, Any]], ...] = (
        (
            "--tokens-only",
            {
                "action": "store_true",
                "default": False,
                "help": "compare tokens only: the schedule may differ, as with other engine options",
            },
        ),
    )
    _add(parser, "comparison", own)
    _add(parser, "engine (replaces the recorded options)", _others("--record"))
    return parser


def _lab_parser() -> Parser:
    parser = _common(
        "lab",
        "Measure speculative decoding: every combination of drafter, K, policy, batch size, temperature and prompts, against none.",
        "Options replace keys of SWEEP. Exit code 1 if a cell failed, or if an exact policy changed a token.",
    )
    parser.add_argument(
        "sweep", nargs="?", metavar="SWEEP", help="description of a sweep: .yaml or .json; default: ngram on all prompt sets"
    )
    axes: tuple[_Option, ...] = (
        ("--drafters", {"metavar": "D,...", "help": "ways of guessing, as the method of speculative_config: ngram, suffix, ..."}),
        ("--k", {"metavar": "K,...", "help": "drafts a step; auto lets the engine choose"}),
        ("--policies", {"metavar": "P;...", "help": "rules of acceptance, such as 'exact;typical;confidence:tau=0.3'"}),
        ("--batch-sizes", {"metavar": "B,...", "help": "sequences at the same time"}),
        ("--temperatures", {"metavar": "T,...", "help": "sampling temperatures"}),
        ("--prompts", {"metavar": "SET,...", "help": "copy, code, chat, story, or files of JSON lines"}),
        ("--num-prompts", {"type": int, "metavar": "N", "help": "prompts of each of those sets"}),
        ("--max-tokens", {"type": int, "metavar": "N", "help": "maximum number of generated tokens of an answer"}),
        ("--repeats", {"type": int, "metavar": "N", "help": "measured repeats of a cell"}),
        ("--warmup", {"type": int, "metavar": "N", "help": "repeats before them that are not measured"}),
        ("--seed", {"type": int, "metavar": "S", "help": "seed of prompts and draws"}),
        ("--ignore-eos", {"action": "store_true", "help": "continue after the end-of-sequence token"}),
        ("--quality", {"action": argparse.BooleanOptionalAction, "help": "perplexity and KL divergence, too"}),
        ("--paired", {"action": argparse.BooleanOptionalAction, "help": "run each repeat without drafts, too: speed-ups within a repeat"}),
    )
    _add(parser, "sweep", axes)
    parser.add_argument("--traffic", metavar="RUN.jsonl", help="instead: what drafters would have gained on recorded traffic")
    servers: tuple[_Option, ...] = (
        (
            "--url",
            {"action": "append", "metavar": "[NAME=]URL", "help": "measure this OpenAI server; repeatable; none=URL has no drafts"},
        ),
        ("--served-model", {"metavar": "NAME", "help": "its model; default: the first that it lists"}),
        ("--api-key", {"metavar": "KEY", "help": "API key for the servers"}),
    )
    group = parser.add_argument_group("servers")
    for flag, settings in servers:
        group.add_argument(flag, **settings)
    group = parser.add_argument_group("results")
    for flag, settings in _LAB_RESULTS:
        group.add_argument(flag, **settings)
    _add(parser, "engine", _others("--record"))
    return parser


_LAB_RESULTS: tuple[_Option, ...] = (
    ("--output", {"metavar": "F", "help": "JSON lines, one a cell as it is measured; a second run continues the file"}),
    ("--table", {"metavar": "F.md", "help": "write the table to this file, too"}),
    ("--plots", {"metavar": "DIR", "help": "draw acceptance, speed over K, predicted against measured speed and break-even there"}),
    ("--plot-format", {"metavar": "F", "default": "svg", "help": "svg, or with matplotlib png or pdf"}),
    ("--plan", {"action": "store_true", "help": "list the cells that would be measured, and measure none"}),
)


def _others(*flags: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """The engine's options except these."""
    return tuple(option for option in _ENGINE_OPTIONS if option[0] not in flags)


def _only(*flags: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """These of the engine's options."""
    return tuple(option for option in _ENGINE_OPTIONS if option[0] in flags)


PARSERS = {
    "generate": _generate_parser,
    "chat": _chat_parser,
    "serve": _serve_parser,
    "batch": _batch_parser,
    "kernels": _kernels_parser,
    "verify": _verify_parser,
    "quality": _quality_parser,
    "replay": _replay_parser,
    "lab": _lab_parser,
}
