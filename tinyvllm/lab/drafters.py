"""Drafters and controllers of a sweep: those that `speculative_config` with the same keys gives an engine."""

from __future__ import annotations

from tinyvllm.errors import ArgumentError
from tinyvllm.lab.sweep import DrafterSpec
from tinyvllm.speculative import SpeculativeConfig, parse


def config_of(spec: DrafterSpec, k: int | None) -> SpeculativeConfig:
    """The `speculative_config` of a drafter and K. ArgumentError for a method, a key or a value that it does not take."""
    if "policy" in dict(spec.options):
        raise ArgumentError(f"drafter {spec.label}: policy is the axis policies")
    config = parse(spec.config(k))
    assert config is not None, "a spec without drafts has no configuration"
    return config
