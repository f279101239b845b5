"""The options of every command, and what they mean for EngineConfig and SamplingParams. Reads no file and loads nothing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import tinyvllm
from tinyvllm.config import DTYPES, LOAD_FORMATS, QUANTIZATIONS, nearest, parse_size
from tinyvllm.errors import ArgumentError
from tinyvllm.request import SamplingParams

COMMANDS = ("generate", "chat", "kernels")
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
    ("--max-num-queued-reqs", {"type": int, "metavar": "N", "help": "refuse requests beyond so many that wait"}),
    ("--max-num-queued-tokens", {"type": int, "metavar": "N", "help": "refuse prompts beyond so many tokens that wait"}),
    ("--async-scheduling", {"action": argparse.BooleanOptionalAction, "help": "launch a step before the last one's tokens are read"}),
    ("--record", {"metavar": "F", "help": "write arrivals and parameters to this .jsonl file, for replay"}),
    ("--load-format", {"metavar": "F", "help": f"{', '.join(LOAD_FORMATS)}; dummy fills the model with random weights"}),
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
    SamplingParams(**{"max_tokens": None, **given})
    return given


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _add(parser: Parser, title: str, table: Sequence[tuple[str, dict[str, Any]]]) -> None:
    group = parser.add_argument_group(title)
    for flag, settings in table:
        group.add_argument(flag, **{"default": argparse.SUPPRESS, **settings})


def _common(command: str, description: str, epilog: str | None = None) -> Parser:
    name = "tinyvllm" if command == "generate" else f"tinyvllm {command}"
    parser = Parser(prog=name, description=description, epilog=epilog, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tinyvllm {tinyvllm.__version__}")
    parser.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    return parser


def _generate_parser() -> Parser:
    parser = _common(
        "generate",
        "Continue prompts with a language model. One prompt is answered on stdout as it comes.",
        "Other commands: tinyvllm chat, tinyvllm kernels (see their --help).",
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
    _add(parser, "sampling (the model's own recommendation where not given)", _SAMPLING_OPTIONS)
    _add(parser, "engine", _ENGINE_OPTIONS)
    return parser


def _kernels_parser() -> Parser:
    parser = _common("kernels", "Show which kernel runs each op of a model on this machine, and why. Loads the model and runs two steps.")
    _add(parser, "engine", _ENGINE_OPTIONS)
    return parser


PARSERS = {"generate": _generate_parser, "chat": _chat_parser, "kernels": _kernels_parser}
