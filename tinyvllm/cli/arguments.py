"""The commands and the options of each. Reads no file but the one of --config."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from typing import NoReturn

from tinyvllm.cli.bench_serve_options import BENCH_SERVE_OPTIONS
from tinyvllm.cli.configuration import Configuration, configure
from tinyvllm.cli.options import (
    ADAPTER_ROOM,
    ADAPTERS,
    ENGINE_OPTIONS,
    LENIENT,
    MODELS,
    OBSERVING,
    SAMPLING_OPTIONS,
    SERVED_MODEL_NAME,
    SERVER_OPTIONS,
    SHORT,
    SKIP_TOKENIZER,
    STRUCTURE_OPTIONS,
    THREADS,
    Option,
    engine_options_among,
    engine_options_except,
)
from tinyvllm.config.engine import QUANTIZATIONS
from tinyvllm.errors import ArgumentError, nearest
from tinyvllm.version import VERSION

LAB_DRAFTERS = (
    "ways of guessing: none, ngram, suffix, medusa_lite, eagle_lite, mtp, and with a model or heads draft_model:PATH, medusa:PATH, "
    "eagle:PATH, eagle3:PATH"
)
SHELLS = ("bash", "zsh", "fish")


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
    """The command and its options, also those of --config and the environment. Without the name of a command it is generate."""
    command, rest = "generate", list(arguments)
    if rest and not rest[0].startswith("-"):
        command, rest = split_command(rest)
    if command != "show-config":
        return command, configured(command, rest).options
    own = next((number for number, word in enumerate(rest, 1) if not word.startswith("-")), len(rest))
    options = configured(command, rest[:own]).options
    options.arguments = rest[own:]
    return command, options


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command that words begin with, and its arguments. ArgumentError, with the nearest one, for any other."""
    if (name := TWO_WORDS.get((words[0], words[1] if len(words) > 1 else ""))) is not None:
        return name, [*words[2:]]
    if words[0] not in COMMANDS:
        raise ArgumentError(f"unknown command {words[0]!r}{nearest(words[0], COMMANDS)}; commands are {', '.join(COMMANDS)}")
    return words[0], [*words[1:]]


def configured(command: str, arguments: Sequence[str]) -> Configuration:
    """The options of a command from its arguments, the environment and a configuration file, each with its origin."""
    return configure(command, arguments, PARSERS, os.environ)


def _add(parser: Parser, title: str, table: Sequence[Option]) -> None:
    group = parser.add_argument_group(title)
    for flag, settings in table:
        flags = [SHORT[flag], flag] if flag in SHORT else [flag]
        group.add_argument(*flags, **{"default": argparse.SUPPRESS, **settings})


def _add_engine(parser: Parser, title: str, table: Sequence[Option]) -> None:
    """Options of an engine, and those of its process."""
    _add(parser, title, table)
    _add(parser, "process", (THREADS,))


def _plain(command: str, description: str, epilog: str | None = None) -> Parser:
    """A command without --config."""
    name = "tinyvllm" if command == "generate" else f"tinyvllm {command}"
    parser = Parser(prog=name, description=description, epilog=epilog, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"tinyvllm {VERSION}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _common(command: str, description: str, epilog: str | None = None) -> Parser:
    parser = _plain(command, description, epilog)
    parser.add_argument("--quiet", action="store_true", help="only errors on stderr")
    parser.add_argument("--config", metavar="F.yaml", help="read options from this file; environment variables and arguments replace them")
    parser.add_argument("--preset", metavar="NAME", help="use this one of the file's presets, too")
    return parser


def _generate_parser() -> Parser:
    parser = _common(
        "generate",
        "Continue prompts with a language model. The answer to a single prompt is streamed to stdout.",
        f"Other commands: tinyvllm {', '.join(COMMANDS[1:])} (see their --help).",
    )
    prompts: tuple[Option, ...] = (
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
    _add(parser, "sampling (default: the model's own recommendation)", SAMPLING_OPTIONS)
    _add(parser, "structure of the answer (one of them)", STRUCTURE_OPTIONS)
    more: tuple[Option, ...] = (
        ("--n", {"type": int, "metavar": "N", "help": "number of answers to each prompt"}),
        (
            "--logprobs",
            {"type": int, "metavar": "N", "help": "log-probabilities of the N most probable tokens at each position, in --output"},
        ),
    )
    _add(parser, "output", more)
    _add_engine(parser, "engine", (*ENGINE_OPTIONS, *ADAPTERS))
    return parser


def _chat_parser() -> Parser:
    parser = _common("chat", "Talk to a language model. /help lists the commands of the conversation.")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--url", metavar="URL", help="use an OpenAI server, such as http://localhost:8000; --model is then the name of its model"
    )
    parser.add_argument("--api-key", metavar="KEY", help="API key for that server")
    _add(parser, "sampling (default: the model's own recommendation)", SAMPLING_OPTIONS)
    _add(parser, "structure of the answer (one of them)", STRUCTURE_OPTIONS)
    _add_engine(parser, "engine", (*ENGINE_OPTIONS, *ADAPTERS))
    return parser


def _serve_parser() -> Parser:
    parser = _common("serve", "Serve models over HTTP as OpenAI and Anthropic do. SIGTERM lets accepted requests finish.")
    _add(parser, "server", SERVER_OPTIONS)
    _add_engine(parser, "engine (of every model)", (MODELS, *engine_options_except("--model"), SKIP_TOKENIZER, *ADAPTERS, *ADAPTER_ROOM))
    parser.set_defaults(warm_up=True)
    return parser


def _batch_parser() -> Parser:
    parser = _common(
        "batch", "Answer a file of requests in OpenAI's batch format. Continues where an earlier run of the same command ended."
    )
    parser.add_argument("input", metavar="IN.jsonl", help="a request a line: custom_id, method, url and body")
    parser.add_argument("-o", "--output", metavar="OUT.jsonl", required=True, help="an answer a line, in the order in which they finish")
    own: tuple[Option, ...] = (
        (
            "--concurrency",
            {"type": int, "metavar": "N", "default": None, "help": "requests at the same time; default: twice --max-num-seqs"},
        ),
        SERVED_MODEL_NAME,
        LENIENT,
    )
    _add(parser, "batch", own)
    _add_engine(parser, "engine (of every model)", (MODELS, *engine_options_except("--model"), *ADAPTERS, *ADAPTER_ROOM))
    return parser


def _kernels_parser() -> Parser:
    parser = _common("kernels", "Show which kernel runs each op of a model on this machine, and why. Loads the model and runs two steps.")
    _add_engine(parser, "engine", engine_options_except(*OBSERVING))
    return parser


def _plan_parser() -> Parser:
    parser = _common(
        "plan",
        "Show what a model takes in memory, what fits, which kernels run and how fast it can be. Reads headers of files and loads nothing.",
        "Exit code 1 if an engine with these options would refuse to start for memory.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="as --model elsewhere; of a hub's only headers are fetched"
    )
    own: tuple[Option, ...] = (
        ("--memory", {"metavar": "SIZE", "default": None, "help": "plan for this much free memory, such as 16G; default: this machine's"}),
        (
            "--speed",
            {
                "action": argparse.BooleanOptionalAction,
                "default": True,
                "help": "predict tokens a second: runs steps without weights",
            },
        ),
        ("--json", {"action": "store_true", "default": False, "help": "all figures as one JSON object"}),
    )
    _add(parser, "plan", own)
    _add_engine(parser, "engine", engine_options_except("--model", *OBSERVING))
    return parser


def _doctor_parser() -> Parser:
    parser = _common("doctor", "Check this machine before an engine starts, with what to do. Exit code 1 for an error.")
    own: tuple[Option, ...] = (
        ("--device", {"metavar": "D", "default": "auto", "help": "auto, CPU, METAL, CUDA, CUDA:1, ..."}),
        ("--all", {"action": "store_true", "default": False, "help": "test the kernels of all formats, which may take a minute once"}),
        ("--json", {"action": "store_true", "default": False, "help": "all findings as one JSON object"}),
    )
    _add(parser, "checks", own)
    return parser


def _verify_parser() -> Parser:
    parser = _common("verify", "Compare a model's hand-written kernels with the reference, layer by layer. Exit code 1 if they diverge.")
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="as --model elsewhere")
    own: tuple[Option, ...] = (
        ("--prompt", {"action": "append", "metavar": "TEXT", "default": None, "help": "prompt to compare; may be repeated"}),
        ("--steps", {"type": int, "metavar": "N", "default": 8, "help": "decode steps after the prompts"}),
        ("--tolerance", {"type": float, "metavar": "X", "default": None, "help": "maximum relative error of one layer"}),
        ("--json", {"action": "store_true", "default": False, "help": "all figures as one JSON object"}),
    )
    _add(parser, "comparison", own)
    _add_engine(parser, "engine", engine_options_except("--model", *OBSERVING))
    return parser


def _quality_parser() -> Parser:
    parser = _common(
        "quality",
        "Measure what a format of weights or of the KV cache costs: perplexity, KL divergence from a reference, bytes and tokens a second.",
        "Without MODEL, --formats and --kv-cache-dtypes: every format, and every type of KV cache. Exit code 1 if a row failed.",
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a model to measure, as --model elsewhere; may be repeated")
    own: tuple[Option, ...] = (
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
    _add_engine(parser, "engine", engine_options_among("--device", "--tokenizer", "--block-size", "--imatrix"))
    return parser


def _bench_parser() -> Parser:
    parser = _common(
        "bench",
        "Measure tokens a second of prompts and of decoding, in llama-bench's tests, each next to what the machine's memory allows.",
        "Every depth is combined with every batch. Drafts are off.",
    )
    tests: tuple[Option, ...] = (
        ("--n-prompt", {"metavar": "N,...", "default": "512", "help": "tokens of a prompt; 0 for none; default 512"}),
        ("--n-gen", {"metavar": "N,...", "default": "128", "help": "tokens that a sequence decodes; 0 for none; default 128"}),
        ("--n-depth", {"metavar": "N,...", "default": "0", "help": "tokens of context before them; default 0"}),
        ("--batch", {"metavar": "N,...", "default": "1", "help": "sequences together; default 1"}),
        ("--repetitions", {"type": int, "metavar": "N", "default": 5, "help": "timed repetitions of a test; default 5"}),
        ("--output-format", {"metavar": "F", "default": "md", "help": "md, json or csv"}),
    )
    short = {"--n-prompt": "-p", "--n-gen": "-n", "--n-depth": "-d", "--batch": "-b", "--repetitions": "-r", "--output-format": "-o"}
    group = parser.add_argument_group("tests")
    for flag, settings in tests:
        group.add_argument(short[flag], flag, **settings)
    set_by_tests = ("--max-model-len", "--max-num-seqs", "--num-blocks", "--kv-memory", "--speculative-config", "--warm-up")
    _add_engine(
        parser, "engine", engine_options_except(*OBSERVING, *set_by_tests, "--prefix-cache-dir", "--enable-prefix-caching", "--tokenizer")
    )
    return parser


def _bench_serve_parser() -> Parser:
    parser = _common(
        "bench serve",
        "Measure latency against load of an OpenAI server: every request rate with every limit of concurrency, in the figures of vLLM.",
        "Exit code 1 if no request of a load succeeded.",
    )
    for title, table in BENCH_SERVE_OPTIONS.items():
        group = parser.add_argument_group(title)
        for flag, settings in table:
            group.add_argument(*(("-o", flag) if flag == "--output-format" else (flag,)), **settings)
    return parser


def _pull_parser() -> Parser:
    parser = _common(
        "pull",
        "Download a model from the hub into its local cache, and check its bytes. Prints the path. Continues an interrupted download.",
        "Without a choice: the safetensors, or the largest GGUF model, that fits this machine by the arithmetic of plan, with the KV cache "
        "of one sequence of the longest context.",
    )
    parser.add_argument("name", metavar="NAME", help="org/name, org/name:Q4_K_M or org/name:file.gguf")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit")
    parser.add_argument("--memory", metavar="SIZE", help="choose for this much free memory, such as 16GiB; default: this machine's")
    _add(
        parser, "engine (that the model is chosen for)", engine_options_among("--device", "--dtype", "--max-model-len", "--kv-cache-dtype")
    )
    return parser


def _list_parser() -> Parser:
    parser = _common("list", "List the models in the local cache of the hub, as --model takes them, and the bytes of their repositories.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _remove_parser() -> Parser:
    parser = _common("remove", "Delete a repository, with all of its models, from the local cache of the hub.")
    parser.add_argument("name", metavar="NAME", help="org/name, as tinyvllm list has it")
    return parser


def _replay_parser() -> Parser:
    parser = _common("replay", "Replay a recording, with its arrivals. Exit code 1 if tokens or schedule differ.")
    parser.add_argument("file", metavar="RUN.jsonl", help="a file that --record wrote")
    own: tuple[Option, ...] = (
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
    _add_engine(parser, "engine (replaces the recorded options)", engine_options_except(*OBSERVING))
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
    axes: tuple[Option, ...] = (
        ("--drafters", {"metavar": "D,...", "help": LAB_DRAFTERS}),
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
    servers: tuple[Option, ...] = (
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
    _add_engine(parser, "engine", engine_options_except(*OBSERVING))
    return parser


_LAB_RESULTS: tuple[Option, ...] = (
    ("--output", {"metavar": "F", "help": "JSON lines, one a cell as it is measured; a second run continues the file"}),
    ("--table", {"metavar": "F.md", "help": "write the table to this file, too"}),
    ("--plots", {"metavar": "DIR", "help": "draw acceptance, speed over K, predicted against measured speed and break-even there"}),
    ("--plot-format", {"metavar": "F", "default": "svg", "help": "svg, or with matplotlib png or pdf"}),
    ("--plan", {"action": "store_true", "help": "list the cells that would be measured, and measure none"}),
)


def _show_config_parser() -> Parser:
    parser = _plain(
        "show-config",
        "Show the options that a command would run with, and where each is from: as YAML that --config reads. Loads no model.",
    )
    parser.usage = "tinyvllm show-config [--json] COMMAND ARGUMENTS...\n       tinyvllm show-config --schema"
    parser.add_argument("target", nargs="?", metavar="COMMAND", help="a command, followed by its arguments")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--schema", action="store_true", help="instead: the JSON schema of configuration files, for editors")
    return parser


def _completion_parser() -> Parser:
    parser = _plain("completion", "Print a script with which a shell completes commands and options.")
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    return parser


PARSERS = {
    "generate": _generate_parser,
    "chat": _chat_parser,
    "serve": _serve_parser,
    "batch": _batch_parser,
    "kernels": _kernels_parser,
    "plan": _plan_parser,
    "doctor": _doctor_parser,
    "verify": _verify_parser,
    "quality": _quality_parser,
    "bench": _bench_parser,
    "bench-serve": _bench_serve_parser,
    "pull": _pull_parser,
    "list": _list_parser,
    "remove": _remove_parser,
    "replay": _replay_parser,
    "lab": _lab_parser,
    "show-config": _show_config_parser,
    "completion": _completion_parser,
}
COMMANDS = tuple(PARSERS)
TWO_WORDS = {("bench", "serve"): "bench-serve"}  # spellings of commands
