"""What an engine does without where a model has recurrent states (gated DeltaNet): a state is that after one token, and in no block."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from tinyvllm import speculative
from tinyvllm.config.engine import EngineConfig
from tinyvllm.errors import ArgumentError

if TYPE_CHECKING:
    from tinyvllm.runner.opened import OpenedModel
    from tinyvllm.runner.runner import Runner

log = logging.getLogger("tinyvllm")

_WHY = "the model has recurrent states (gated DeltaNet)"


def fitted_to_states(config: EngineConfig, model: OpenedModel | Runner) -> EngineConfig:
    """The configuration without what such a model cannot have, and without the default drafts where they would cost more than they gain:
    the log says so.

    ArgumentError for what was asked for.
    """
    if model.config.delta is None:
        return config
    asked = {
        "swap_space": config.swap_space > 0,
        "prefix_cache_dir": config.prefix_cache_dir is not None,
        "kv_events_config": config.kv_events_config is not None,
    }
    if wanted := [name for name, given in asked.items() if given]:
        raise ArgumentError(f"{', '.join(wanted)}: not supported yet where {_WHY}; leave it out")
    return _without_slow_drafts(config, model)


def _without_slow_drafts(config: EngineConfig, model: OpenedModel | Runner) -> EngineConfig:
    """The reference computes every draft that a state could keep, in each step."""
    from tinyvllm.runner.states import drafts_by_kernel  # tinygrad comes with it

    if config.speculative_config is not speculative.AUTO or drafts_by_kernel(config, model.config):
        return config
    log.info("speculation is off: %s, which no kernel of %s computes with drafts; --speculative-config switches it on", _WHY, config.device)
    return replace(config, speculative_config=None)
