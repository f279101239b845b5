"""The options of every command, and what they mean for EngineConfig and SamplingParams. Reads no file and loads nothing."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tinyvllm.config import DTYPES, LOAD_FORMATS, QUANTIZATIONS, VERSION, nearest, parse_size
from tinyvllm.errors import ArgumentError
from tinyvllm.request import STRUCTURES, SamplingParams, StructuredOutputsParams

COMMANDS = ("generate", "chat", "serve", "batch", "kernels", "verify", "replay")
MAX_TOKENS = {"generate": 256, "chat": 1024}

_ENGINE_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--model", {"metavar": "PATH", "help": "folder of a Hugging Face model, GGUF file or hub name; without it the bundled model"}),
    ("--tokenizer", {"metavar": "PATH", "help": "folder of tokenizer files or GGUF file, where it is not the model's own"}),
    ("--revision", {"metavar": "R", "help": "branch, tag or commit of a hub name"}),
    ("--device", {"metavar": "D", "help": "auto, CPU, METAL, CUDA, CUDA:1, ..."}),
    ("--dtype", {"metavar": "T", "help": f"what the model computes in: {', '.join(DTYPES)}"}),
    ("--max-model-len", {"type": int, "metavar": "N", "help": "longest prompt plus answer, in tokens"}),
    ("--max-num-seqs", {"type": int, "metavar": "N", "help": "sequences that run at the same time"}),
    ("--max-num-batched-tokens", {"type": int, "metavar": "N", "help": "tokens of one step"}),
    ("--kv-memory", {"metavar": "SIZE", "help": "size of the KV cache in bytes, such as 2GiB; this or --num-blocks is enough"}),
    ("--num-blocks", {"type": int, "metavar": "N", "help": "size of the KV cache in blocks; this or --kv-memory is enough"}),
    ("--block-size", {"type": int, "metavar": "N", "help": "tokens of a KV block, a power of two from 8 to 256"}),
    ("--quantization", {"metavar": "Q", "help": f"pack the matrices at load: {', '.join(QUANTIZATIONS)}"}),
    ("--num-scheduler-steps", {"type": int, "metavar": "N", "help": "decode steps between two looks at the tokens"}),
    ("--enable-prefix-caching", {"action": argparse.BooleanOptionalAction, "help": "keep and share the blocks of equal beginnings"}),
    ("--prefix-cache-dir", {"metavar": "DIR", "help": "keep cached blocks there over a restart"}),
    ("--swap-space", {"metavar": "SIZE", "help": "host memory for the blocks of preempted sequences, such as 4GiB"}),
    ("--preemption-mode", {"metavar": "M", "help": "recompute or swap; without it what costs less"}),
    ("--max-num-queued-reqs", {"type": int, "metavar": "N", "help": "refuse requests beyond so many that wait"}),
    ("--max-num-queued-tokens", {"type": int, "metavar": "N", "help": "refuse prompts beyond so many tokens that wait"}),
    ("--async-scheduling", {"action": argparse.BooleanOptionalAction, "help": "launch a step before the last one's tokens are read"}),
    ("--enable-cascade", {"action": argparse.BooleanOptionalAction, "help": "read a prefix that running sequences share once for all"}),
    ("--warm-up", {"action": argparse.BooleanOptionalAction, "help": "capture the usual steps beforehand; serve does, while it is idle"}),
    ("--record", {"metavar": "F", "help": "write arrivals and parameters to this .jsonl file, for replay"}),
    ("--load-format", {"metavar": "F", "help": f"{', '.join(LOAD_FORMATS)}; dummy fills the model with random weights"}),
)

_Option = tuple[str, dict[str, Any]]
_MODELS: _Option = (
    "--model",
    {"action": "append", "metavar": "[NAME=]PATH", "help": "as elsewhere; may be repeated, each then loaded on first use"},
)
_SERVED_MODEL_NAME: _Option = (
    "--served-model-name",
    {"action": "append", "metavar": "NAME", "default": None, "help": "name of the only model; may be repeated"},
)
_LENIENT: _Option = (
    "--lenient",
    {"action": "store_true", "help": "leave unknown fields out and name them in X-Ignored-Fields, instead of refusing them"},
)

_SERVER_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--host", {"metavar": "H", "help": "address to listen on; 0.0.0.0 or :: for all (then set --api-key)"}),
    ("--port", {"type": int, "metavar": "N", "help": "8000 where not given; 0 takes a free one, which the ready line names"}),
    _SERVED_MODEL_NAME,
    ("--unload-idle", {"type": float, "metavar": "S", "default": None, "help": "unload a model that was not used for so many seconds"}),
    ("--chat-template", {"metavar": "F", "default": None, "help": "file with a Jinja template in place of the models' own"}),
    ("--trust-request-chat-template", {"action": "store_true", "help": "let requests bring chat templates"}),
    _LENIENT,
    ("--api-key", {"action": "append", "metavar": "KEY", "default": None, "help": "let in who shows this key; may be repeated"}),
    ("--api-key-file", {"metavar": "F", "default": None, "help": "file of keys, one a line, with name=... and limits behind it"}),
    ("--cors-origin", {"action": "append", "metavar": "URL", "help": "let pages of this origin use the server; * for all; repeatable"}),
    ("--ssl-certfile", {"metavar": "F", "help": "certificate chain in PEM: serve https"}),
    ("--ssl-keyfile", {"metavar": "F", "help": "its key, where the certificate's file does not hold it"}),
    ("--max-body", {"metavar": "SIZE", "help": "longest body of a request; 32MiB where not given"}),
    ("--head-seconds", {"type": float, "metavar": "S", "help": "how long a client may take to send the head of a request; 10"}),
    ("--body-seconds", {"type": float, "metavar": "S", "help": "and its body; 30"}),
    ("--write-seconds", {"type": float, "metavar": "S", "help": "how long a client may leave a stream unread; 60"}),
    ("--beat-seconds", {"type": float, "metavar": "S", "help": "silence in a stream after which a keep-alive comment is sent; 5"}),
    ("--grace-seconds", {"type": float, "metavar": "S", "help": "how long accepted requests may go on after SIGTERM; 30"}),
    ("--access-log", {"action": argparse.BooleanOptionalAction, "help": "a line of JSON on stdout for every request"}),
)

_SAMPLING_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--max-tokens", {"type": int, "metavar": "N", "help": "longest answer"}),
    ("--min-tokens", {"type": int, "metavar": "N", "help": "shortest answer"}),
    ("--temperature", {"type": float, "metavar": "T", "help": "0 always takes the most probable token"}),
    ("--top-k", {"type": int, "metavar": "K", "help": "sample among the K most probable tokens"}),
    ("--top-p", {"type": float, "metavar": "P", "help": "sample among the most probable tokens that together reach P"}),
    ("--min-p", {"type": float, "metavar": "P", "help": "drop tokens less probable than P times the most probable"}),
    ("--seed", {"type": int, "metavar": "S", "help": "the same seed gives the same answer"}),
    ("--repetition-penalty", {"type": float, "metavar": "X", "help": "divide the logits of what was there already; 1 is off"}),
    ("--presence-penalty", {"type": float, "metavar": "X", "help": "subtract from the logits of what was answered already"}),
    ("--frequency-penalty", {"type": float, "metavar": "X", "help": "the same, once for every time"}),
    ("--stop", {"action": "append", "metavar": "S", "help": "end at this text; may be repeated"}),
    ("--stop-token-id", {"action": "append", "type": int, "metavar": "ID", "dest": "stop_token_ids", "help": "the same for a token"}),
    ("--ignore-eos", {"action": "store_true", "help": "go on after the end-of-sequence token"}),
)

_STRUCTURE_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--json-schema", {"metavar": "S", "dest": "json", "help": "the answer is JSON of this schema: a file, or the schema itself"}),
    ("--json-object", {"action": "store_true", "help": "the answer is any JSON object"}),
    ("--regex", {"metavar": "R", "help": "the whole answer matches this regular expression"}),
    ("--choice", {"action": "append", "metavar": "TEXT", "help": "the answer is one of these; repeated"}),
    ("--grammar", {"metavar": "G", "help": "the answer follows this Lark or GBNF grammar: a file, or the grammar itself"}),
)


class Parser(argparse.ArgumentParser):
    """Refuses with an ArgumentError, and suggests the option that was meant."""

    def error(self, message: str) -> NoReturn:
        known = [option for action in self._actions for option in action.option_strings]
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        hint = nearest(unknown[1].partition("=")[0], known) if unknown else ""
        raise ArgumentError(f"{message}{hint}")


def parse(arguments: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """The command and its options. The first argument names the command; without one it is generate."""
    command, rest = "generate", list(arguments)
    if rest and not rest[0].startswith("-"):
        command = rest.pop(0)
        if command not in COMMANDS:
            raise ArgumentError(f"unknown command {command!r}{nearest(command, COMMANDS)}; commands are {', '.join(COMMANDS)}")
    return command, PARSERS[command]().parse_args(rest)


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that were given, by name."""
    given = {name: value for flag, _ in _ENGINE_OPTIONS if (value := getattr(options, name := _field(flag), None)) is not None}
    for flag in ("--kv-memory", "--swap-space"):
        if _field(flag) in given:
            given[_field(flag)] = parse_size(flag, given[_field(flag)])
    return given


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that were given, by name, after checking them."""
    names = [settings.get("dest", _field(flag)) for flag, settings in (*_SAMPLING_OPTIONS, ("--n", {}), ("--logprobs", {}))]
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    structure = {name: getattr(options, name) for name in STRUCTURES if hasattr(options, name)}
    if structure:
        given["structured_outputs"] = StructuredOutputsParams(**{name: _contents(name, value) for name, value in structure.items()})
    SamplingParams(**{"max_tokens": None, **given})
    return given


def server_options(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of ServerConfig that were given, by name."""
    names = [_field(flag) for flag, settings in _SERVER_OPTIONS if settings.get("default", argparse.SUPPRESS) is argparse.SUPPRESS]
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if "max_body" in given:
        given["max_body"] = parse_size("--max-body", given["max_body"])
    if "cors_origin" in given:
        given["cors_origins"] = tuple(given.pop("cors_origin"))
    return given


def _contents(name: str, value: Any) -> Any:
    """What a file holds, where a schema or a grammar names one."""
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
    parser.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    return parser


def _generate_parser() -> Parser:
    parser = _common(
        "generate",
        "Continue prompts with a language model. One prompt is answered on stdout as it comes.",
        "Other commands: tinyvllm chat, serve, batch, kernels, verify, replay (see their --help).",
    )
    prompts: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--prompt", {"action": "append", "metavar": "TEXT", "help": "what to continue; may be repeated; - reads stdin"}),
        ("--prompts-file", {"metavar": "F", "help": "more prompts: one a line (.txt), or JSON objects (.jsonl)"}),
        ("--output", {"metavar": "F", "help": "write one JSON line a prompt to this .jsonl file (- is stdout)"}),
    )
    group = parser.add_argument_group("prompts")
    for flag, settings in prompts:
        group.add_argument(flag, **settings)
    _add(parser, "sampling (the model's own recommendation where not given)", _SAMPLING_OPTIONS)
    _add(parser, "structure of the answer (one of them)", _STRUCTURE_OPTIONS)
    more: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--n", {"type": int, "metavar": "N", "help": "answers to every prompt"}),
        ("--logprobs", {"type": int, "metavar": "N", "help": "log probabilities of the N best tokens of every step, in --output"}),
    )
    _add(parser, "output", more)
    _add(parser, "engine", _ENGINE_OPTIONS)
    return parser


def _chat_parser() -> Parser:
    parser = _common("chat", "Talk to a language model. /help lists the commands of the conversation.")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--url", metavar="URL", help="talk to an OpenAI server, as http://localhost:8000; --model then names its model")
    parser.add_argument("--api-key", metavar="KEY", help="what to show to that server")
    _add(parser, "sampling (the model's own recommendation where not given)", _SAMPLING_OPTIONS)
    _add(parser, "structure of the answer (one of them)", _STRUCTURE_OPTIONS)
    _add(parser, "engine", _ENGINE_OPTIONS)
    return parser


def _serve_parser() -> Parser:
    parser = _common("serve", "Serve models over HTTP as OpenAI and Anthropic do. SIGTERM lets accepted requests finish.")
    _add(parser, "server", _SERVER_OPTIONS)
    _add(parser, "engine (of every model)", (_MODELS, *_others("--model")))
    return parser


def _batch_parser() -> Parser:
    parser = _common("batch", "Answer a file of requests in OpenAI's batch format. Goes on where an earlier run of the same command ended.")
    parser.add_argument("input", metavar="IN.jsonl", help="a request a line: custom_id, method, url and body")
    parser.add_argument("-o", "--output", metavar="OUT.jsonl", required=True, help="an answer a line, in the order of their coming")
    own: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--concurrency", {"type": int, "metavar": "N", "default": None, "help": "requests at the same time; twice --max-num-seqs"}),
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
        ("--prompt", {"action": "append", "metavar": "TEXT", "default": None, "help": "what to run; may be repeated"}),
        ("--steps", {"type": int, "metavar": "N", "default": 8, "help": "decode steps behind the prompts"}),
        ("--tolerance", {"type": float, "metavar": "X", "default": None, "help": "of a layer's own relative error"}),
        ("--json", {"action": "store_true", "default": False, "help": "all figures as one JSON object"}),
    )
    _add(parser, "comparison", own)
    _add(parser, "engine", _others("--model", "--record"))
    return parser


def _replay_parser() -> Parser:
    parser = _common("replay", "Run a recorded file again, arrivals and all. Exit code 1 if tokens or schedule differ.")
    parser.add_argument("file", metavar="RUN.jsonl", help="what --record has written")
    own: tuple[tuple[str, dict[str, Any]], ...] = (
        ("--tokens-only", {"action": "store_true", "default": False, "help": "let the schedule differ, as with another engine option"}),
    )
    _add(parser, "comparison", own)
    _add(parser, "engine (in place of what was recorded)", _others("--record"))
    return parser


def _others(*flags: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """The engine's options without these."""
    return tuple(option for option in _ENGINE_OPTIONS if option[0] not in flags)


PARSERS = {
    "generate": _generate_parser,
    "chat": _chat_parser,
    "serve": _serve_parser,
    "batch": _batch_parser,
    "kernels": _kernels_parser,
    "verify": _verify_parser,
    "replay": _replay_parser,
}
