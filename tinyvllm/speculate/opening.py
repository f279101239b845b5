"""From `speculative_config` to a drafter, a controller and a policy. What a drafter needs is imported only where it is chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tinyvllm.errors import ArgumentError
from tinyvllm.speculate.policies import Policy, parse_policy
from tinyvllm.speculate.protocol import Controller, Drafter
from tinyvllm.speculative import HEADS, SpeculativeConfig

if TYPE_CHECKING:
    from tinyvllm.config.engine import EngineConfig
    from tinyvllm.runner.memory import DrafterMemory
    from tinyvllm.runner.opened import OpenedModel
    from tinyvllm.runner.runner import Runner
    from tinyvllm.speculate.cost_curve import StepCosts


def open_drafter(config: SpeculativeConfig, runner: Runner) -> Drafter:
    """The drafter of a method. ArgumentError if this version has none; errors of its model's files as they are."""
    if config.method not in _DRAFTERS:
        raise ArgumentError(f"speculative_config: method={config.method!r} is not implemented yet; expected one of {', '.join(_DRAFTERS)}")
    return _DRAFTERS[config.method](config, runner)


def open_controller(config: SpeculativeConfig, drafter: Drafter, costs: StepCosts | None = None) -> Controller:
    """What decides how many drafts a sequence gets; `costs` are what it begins with and learns, if it learns any."""
    from tinyvllm.speculate.controller import AdaptiveController, FixedController, WindowController

    K = config.max_drafts
    if config.controls == "fixed":
        return FixedController(K)
    return WindowController(K) if config.controls == "window" else AdaptiveController(K, costs, drafter.looks_up)


def open_policy(config: SpeculativeConfig) -> Policy:
    """When a draft is accepted."""
    return parse_policy(config.policy)


def open_lookup(config: SpeculativeConfig) -> Drafter:
    """The drafter of a method of LOOKUPS, which needs no runner."""
    from tinyvllm.speculate.ngram import NgramDrafter
    from tinyvllm.speculate.suffix import FIRST_MATCH, SuffixDrafter

    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_max, config.prompt_lookup_min)
    return SuffixDrafter(first_match=FIRST_MATCH)


def _ngram(config: SpeculativeConfig, runner: Runner) -> Drafter:
    return open_lookup(config)


def _suffix(config: SpeculativeConfig, runner: Runner) -> Drafter:
    return open_lookup(config)


def heads_memory(config: SpeculativeConfig, opened: OpenedModel, engine: EngineConfig) -> DrafterMemory:
    """What the heads of a method of HEADS take next to the target. Errors as `open_drafter`; nothing is loaded."""
    from tinyvllm.speculate import self_drafting

    return self_drafting.heads_memory(config.method, _folder(config), opened, engine, config.num_speculative_tokens, _format(config))


def _heads(config: SpeculativeConfig, runner: Runner) -> Drafter:
    from tinyvllm.speculate.self_drafting import self_drafter

    return self_drafter(config.method, _folder(config), runner, config.num_speculative_tokens, _format(config))


def _folder(config: SpeculativeConfig) -> Path | None:
    """The folder of the heads, if the method has one."""
    from tinyvllm.weights.hub import resolve_model

    return None if config.model is None else resolve_model(config.model, config.revision)


def _format(config: SpeculativeConfig) -> str | None:
    """The format that matrices of heads are packed to at load; None keeps them as stored."""
    from tinyvllm.config.engine import QUANTIZATIONS

    name = config.quantization
    if name is not None and name not in QUANTIZATIONS:
        expected = ", ".join(QUANTIZATIONS)
        raise ArgumentError(f"speculative_config: quantization of heads must be one of {expected}, got {name!r:.60}")
    return None if name is None else name.upper()


_DRAFTERS: dict[str, Callable[[SpeculativeConfig, Runner], Drafter]] = {"ngram": _ngram, "suffix": _suffix, **dict.fromkeys(HEADS, _heads)}
