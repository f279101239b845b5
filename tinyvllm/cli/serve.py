"""`tinyvllm serve`: an OpenAI server until SIGTERM. The ready line goes to stderr, the access log to stdout."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm.cli.options import engine_options, server_options
from tinyvllm.cli.values import NamedModel
from tinyvllm.config.values import parse_lora_modules, parse_size
from tinyvllm.errors import ArgumentError
from tinyvllm.lean_imports import import_numpy

if TYPE_CHECKING:
    from tinyvllm.engine.async_llm import AsyncLLM
    from tinyvllm.server.core.config import ServerConfig

_BUNDLED = "tinyvllm"


def run(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    names = options.served_model_name or []
    specs = model_specs(getattr(options, "model", None), names[:1], engine_options(options))
    publishing = [name for name, spec in specs.items() if "kv_events_config" in spec]
    if len(publishing) > 1:
        raise ArgumentError(f"--kv-events-config is for one model: {len(publishing)} would share its endpoint; start a server each")
    check_profile(specs)
    check_adapters([*specs, *names[1:]], specs)
    budget = None if options.memory_budget is None else parse_size("--memory-budget", options.memory_budget)
    for spec in specs.values():
        _check(spec, options.allow_lossy_speculation)
    try:
        import_numpy()
        from tinyvllm.server.core.config import ServerConfig
        from tinyvllm.server.core.keys import read_keys
        from tinyvllm.server.core.memory_budget import MemoryBudget
        from tinyvllm.server.core.models import Models
        from tinyvllm.server.http.app import create_app
        from tinyvllm.server.http.listen import bind, serve, url_of
    except ImportError as error:
        raise ArgumentError(f"serve needs the packages of the extra 'server': pip install 'tinyvllm[server]' ({error})") from error
    config = ServerConfig(**server_options(options), chat_template=_template(options.chat_template))
    keys = read_keys([*(options.api_key or []), *_environment_key()], options.api_key_file)
    if config.share_prefixes and not keys:
        raise ArgumentError("--share-prefixes is for API keys, and there are none: all requests share prefixes already; leave it out")
    sock = bind(config)

    def ready() -> None:
        if not options.quiet:
            line = ready_line(url_of(config, sock), [*specs, *names[1:]], time.perf_counter() - start, config)
            print(line, file=sys.stderr, flush=True)

    aliases = {name: names[0] for name in names[1:]}

    def models() -> Models:
        models = Models(specs, options.unload_idle, aliases, budget=None if budget is None else MemoryBudget(budget))
        models.on_unload = partial(say_profile, options.quiet)
        return models

    with contextlib.closing(sock):  # also where a model cannot be loaded
        serve(lambda: create_app(config, models(), keys), sock, ready)
    return 0


def check_profile(specs: Mapping[str, Mapping[str, Any]]) -> None:
    """ArgumentError if several models would share the file of a profile."""
    files = [spec["profile"] for spec in specs.values() if "profile" in spec]
    if len(set(files)) < len(files):
        raise ArgumentError(f"--profile is for one model: {len(files)} would share {files[0]}; start a server each, or use /debug/trace")


def check_adapters(names: Sequence[str], specs: Mapping[str, Mapping[str, Any]]) -> None:
    """ArgumentError for an adapter that has the name of a model, or of an adapter of another model: requests name both as `model`."""
    taken = set(names)
    for spec in specs.values():
        for name, _ in parse_lora_modules(spec.get("lora_modules", ())):
            if name in taken:
                raise ArgumentError(f"--lora: the name {name!r} is taken by a model, or by an adapter of another model; choose another")
            taken.add(name)


def say_profile(quiet: bool, name: str, llm: AsyncLLM) -> None:
    """The table of kernels of an engine that has ended, on stderr."""
    if llm.profile_table is not None and not quiet:
        print(llm.profile_table, file=sys.stderr, flush=True)


def ready_line(url: str, served: Sequence[str], seconds: float, config: ServerConfig) -> str:
    """The line on stderr when the server accepts requests: its address, its models, and sharing that the user should know about."""
    shared = "; API keys share cached prefixes (--share-prefixes)" if config.share_prefixes else ""
    pages = "" if config.cors_origins else "; pages of other origins than localhost need --cors-origin"
    return f"ready: {url}{config.root_path} serves {', '.join(served)} ({seconds:.1f} s){shared}{pages}"


def _environment_key() -> list[str]:
    """The key of TINYVLLM_API_KEY: unlike arguments, other users of the machine cannot read it."""
    key = os.environ.get("TINYVLLM_API_KEY")
    return [key] if key else []


def model_specs(given: list[str | NamedModel] | None, names: list[str] | None, engine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Options of AsyncLLM by the served name of each model: NAME=PATH, PATH under its own name, a NamedModel, or the bundled one."""
    rest = {name: value for name, value in engine.items() if name != "model"}
    specs: dict[str, dict[str, Any]] = {}
    for text in given or [""]:
        if isinstance(text, NamedModel):
            specs[text.name] = {**rest, **text.fields()}
            continue
        name, equals, path = text.partition("=")
        if not equals:
            name, path = text, text
        if equals and not (name and path):
            raise ArgumentError(f"--model must be PATH or NAME=PATH, got {text!r}")
        if name in specs or (not name and _BUNDLED in specs):
            raise ArgumentError(f"--model: two models have the name {name!r}: give them names with NAME=PATH")
        specs[name or _BUNDLED] = {**rest, **({"model": path} if path else {})}
    if names:
        if len(specs) != 1:
            raise ArgumentError("--served-model-name is for a single model; give several models names with --model NAME=PATH")
        specs = {names[0]: next(iter(specs.values()))}
    return specs


def _check(spec: Mapping[str, Any], allow_lossy: bool) -> None:
    """Report a wrong path or option now and not at the first request, and a policy of speculation that changes answers."""
    from tinyvllm.config.engine import resolve

    config = resolve(**spec).speculative_config
    if config is None:
        return
    from tinyvllm.speculate.policies import parse_policy

    policy = parse_policy(config.policy)
    if policy.lossy and not allow_lossy:
        raise ArgumentError(
            f"speculative_config: policy={config.policy!r} ({policy.label}) changes what the model answers; "
            "a server needs --allow-lossy-speculation for it, or take exact"
        )


def _template(given: str | None) -> str | None:
    if given is None:
        return None
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--chat-template {given}: {error}") from error
