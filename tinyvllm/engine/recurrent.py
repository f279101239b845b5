"""What an engine does without where a model has recurrent states (gated DeltaNet): a state is that after one token, and in no block."""

from __future__ import annotations

import logging
from dataclasses import replace

from tinyvllm import speculative
from tinyvllm.config.engine import EngineConfig
from tinyvllm.errors import ArgumentError

log = logging.getLogger("tinyvllm")

_WHY = "the model has recurrent states (gated DeltaNet)"


def fitted_to_states(config: EngineConfig, recurrent: bool) -> EngineConfig:
    """The configuration without what such a model cannot have; what is on by default is switched off, and the log says so.

    ArgumentError for what was asked for.
    """
    if not recurrent:
        return config
    asked = {
        "speculative_config": config.speculative_config not in (None, speculative.AUTO),
        "swap_space": config.swap_space > 0,
        "prefix_cache_dir": config.prefix_cache_dir is not None,
        "kv_events_config": config.kv_events_config is not None,
        "enable_lora": config.enable_lora,
    }
    if wanted := [name for name, given in asked.items() if given]:
        raise ArgumentError(f"{', '.join(wanted)}: not supported yet where {_WHY}; leave it out")
    if config.speculative_config is not None:
        log.info("speculation is off: %s, and a draft that is refused cannot be taken out of one", _WHY)
    return replace(config, speculative_config=None)
