"""Options that users of vLLM and llama.cpp type: replaced by ours where the meaning is the same, else refused with the nearest of ours."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from tinyvllm.aliases import VLLM, Alias, translate
from tinyvllm.errors import ArgumentError

_ONE_CACHE_TYPE = Alias(nearest=("--kv-cache-dtype",), why="keys and values have one type here: int8 is nearest to q8_0, int4 to q4_0")
_CHAT = Alias(why="conversations are a command: tinyvllm chat")
_LOG = Alias(nearest=("--quiet", "--no-access-log"), why="the log has one form")
_FROM_TEMPLATE = Alias(why="the form of calls and of reasoning is read from the chat template; leave it out")

# vLLM's options of the command line that are no fields of its engine
_VLLM: dict[str, Alias] = {
    "--enable-auto-tool-choice": Alias(inert=(True,), why="tools are chosen automatically where a request has them"),
    "--tool-call-parser": _FROM_TEMPLATE,
    "--reasoning-parser": _FROM_TEMPLATE,
    "--enable-reasoning": Alias(inert=(True,)),
    "--chat-template-content-format": Alias(inert=("auto",), why="the template decides it"),
    "--allowed-origins": Alias(nearest=("--cors-origin",), why="origins are given one by one"),
    "--disable-log-requests": Alias(inert=(True,), why="prompts are in no log"),
    "--enable-log-requests": _LOG,
    "--uvicorn-log-level": _LOG,
    "--disable-uvicorn-access-log": Alias(nearest=("--no-access-log",), why="it has another name"),
    "--max-log-len": Alias(why="prompts are in no log"),
    "--disable-fastapi-docs": Alias(inert=(True,), why="there are no pages of documentation, only /openapi.json"),
    "--enable-prompt-tokens-details": Alias(inert=(True,), why="cached tokens are always in the usage"),
    "--enable-request-id-headers": Alias(inert=(True,), why="X-Request-Id is in every answer"),
    "--enable-server-load-tracking": Alias(inert=(True,), why="/load is always served"),
    "--api-server-count": Alias(inert=(1,), why="one process serves"),
    "--response-role": Alias(inert=("assistant",), why="answers are the assistant's"),
    # of its benchmark
    "--backend": Alias(inert=("vllm", "openai", "openai-chat"), nearest=("--endpoint",), why="it measures servers of OpenAI's API"),
    "--dataset-name": Alias(inert=("random", "custom"), nearest=("--dataset",), why="a data set is random, or a file of prompts"),
    "--dataset-path": Alias("--dataset"),
    "--custom-output-len": Alias("--output-len"),
    "--random-range-ratio": Alias(nearest=("--random-input-len", "--random-output-len"), why="they take ranges, such as 16-128"),
    "--save-result": Alias(nearest=("--output", "--output-format"), why="results go to stdout, or to a file"),
    "--result-filename": Alias("--output"),
}

# llama.cpp's options of llama-cli and llama-server
_LLAMA: dict[str, Alias] = {
    "-m": Alias("--model"),
    "-hf": Alias("--model"),
    "-hfr": Alias("--model"),
    "--hf-repo": Alias("--model"),
    "-p": Alias("--prompt"),
    "-f": Alias(nearest=("--prompt -", "--prompts-file"), why="a prompt from a file comes through stdin"),
    "--file": Alias(nearest=("--prompt -", "--prompts-file"), why="a prompt from a file comes through stdin"),
    "-n": Alias("--max-tokens"),
    "--predict": Alias("--max-tokens"),
    "--n-predict": Alias("--max-tokens"),
    "-c": Alias("--max-model-len"),
    "--ctx-size": Alias("--max-model-len"),
    "-t": Alias("--threads"),
    "-tb": Alias(nearest=("--threads",), why="prompts and decodes have the same threads"),
    "--threads-batch": Alias(nearest=("--threads",), why="prompts and decodes have the same threads"),
    "--temp": Alias("--temperature"),
    "-s": Alias("--seed"),
    "-sys": Alias("--system"),
    "--system-prompt": Alias("--system"),
    "-a": Alias("--served-model-name"),
    "--alias": Alias("--served-model-name"),
    "-np": Alias("--max-num-seqs"),
    "--parallel": Alias("--max-num-seqs"),
    "-b": Alias(nearest=("--max-num-batched-tokens",), why="a step has one size"),
    "--batch-size": Alias(nearest=("--max-num-batched-tokens",), why="a step has one size"),
    "-ub": Alias(nearest=("--max-num-batched-tokens",), why="a step has one size"),
    "--ubatch-size": Alias(nearest=("--max-num-batched-tokens",), why="a step has one size"),
    "-ngl": Alias("--gpu-layers"),
    "--n-gpu-layers": Alias("--gpu-layers"),
    "-dev": Alias("--device"),
    "-sm": Alias(inert=("none",), nearest=("--device",), why="an engine runs on one GPU"),
    "-ts": Alias(nearest=("--device", "--gpu-layers"), why="an engine runs on one GPU"),
    "--tensor-split": Alias(nearest=("--device", "--gpu-layers"), why="an engine runs on one GPU"),
    "--repeat-penalty": Alias(nearest=("--repetition-penalty",), why="its window is the whole prompt and answer here"),
    "--repeat-last-n": Alias(nearest=("--repetition-penalty",), why="its window is the whole prompt and answer here"),
    "--grammar-file": Alias("--grammar"),
    "-j": Alias("--json-schema"),
    "-r": Alias("--stop"),
    "--reverse-prompt": Alias("--stop"),
    "-cnv": _CHAT,
    "--conversation": _CHAT,
    "-i": _CHAT,
    "--interactive": _CHAT,
    "-fa": Alias(inert=("on", "auto"), why="attention is always computed in blocks"),
    "--flash-attn": Alias(inert=("on", "auto"), why="attention is always computed in blocks"),
    "-cb": Alias(inert=(True,), why="requests are always batched continuously"),
    "--cont-batching": Alias(inert=(True,), why="requests are always batched continuously"),
    "-ctk": _ONE_CACHE_TYPE,
    "-ctv": _ONE_CACHE_TYPE,
    "--cache-type-k": _ONE_CACHE_TYPE,
    "--cache-type-v": _ONE_CACHE_TYPE,
    "--mlock": Alias(why="weights are not pinned in memory"),
    "--no-mmap": Alias(why="the files of weights are always mapped"),
    "--jinja": Alias(inert=(True,), why="chat templates are always rendered by Jinja"),
    "--embedding": Alias(inert=(True,), why="every model also embeds"),
    "--embeddings": Alias(inert=(True,), why="every model also embeds"),
    "--metrics": Alias(inert=(True,), why="/metrics is always served"),
    "--slots": Alias(nearest=("--max-num-seqs",), why="/status shows the load"),
    "--lora-modules": Alias("--lora"),
    "--mmproj": Alias(why="prompts are text only"),
    "-v": Alias(nearest=("--debug",), why="the log has one form"),
    "--verbose": Alias(nearest=("--debug",), why="the log has one form"),
}

ALIASES: dict[str, Alias] = {**{f"--{name.replace('_', '-')}": alias for name, alias in VLLM.items()}, **_VLLM, **_LLAMA}


def translated(arguments: list[str], known: Collection[str]) -> Iterator[str]:
    """The arguments of a command in our names; `known` are its options. ArgumentError for one that has no meaning here."""
    waiting = list(reversed(arguments))
    while waiting:
        argument = waiting.pop()
        if argument == "--":
            yield argument
            yield from reversed(waiting)
            return
        option, equals, value = argument.partition("=")
        if not argument.startswith("-") or option in known or re.fullmatch(r"-\d.*|-", argument):
            yield argument
            continue
        spelt = _spelling(option, known)
        if spelt in known or spelt not in ALIASES:
            yield spelt + equals + value if spelt in known else argument
            continue
        alias, has_value = ALIASES[spelt], bool(equals)
        if not alias.is_switch and not has_value and waiting and not re.match(r"-\D", waiting[-1]):
            value, has_value = waiting.pop(), True
        yield from _replaced(option, spelt, alias, value if has_value else None, known)


def _spelling(option: str, known: Collection[str]) -> str:
    """vLLM also takes underscores, and --no-X for a switch X."""
    dashed = option if option in ALIASES else "--" + option[2:].replace("_", "-") if option.startswith("--") else option
    positive = "--" + dashed.removeprefix("--no-")
    return positive if dashed not in ALIASES and dashed not in known and positive in ALIASES and ALIASES[positive].is_switch else dashed


def _replaced(option: str, spelt: str, alias: Alias, value: str | None, known: Collection[str]) -> Iterator[str]:
    if alias.is_switch and value is None:
        value = str(not option.startswith("--no-") or spelt.startswith("--no-"))
    result = translate(spelt, value, alias, option, _flag)
    if result is None:
        return
    ours = _flag(result[0])
    if ours not in known:
        raise ArgumentError(f"{option} is {ours} here, which this command does not have")
    yield ours
    if value is not None:
        yield value


def _flag(name: str) -> str:
    return name if name.startswith("-") else f"--{name.replace('_', '-')}"
