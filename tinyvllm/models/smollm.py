"""SmolLM3, its differences from LLaMA: layers that do not rotate q and k."""

from __future__ import annotations

from tinyvllm.errors import ModelError
from tinyvllm.foreign import Fields, quoted
from tinyvllm.models import llama
from tinyvllm.models.config import ModelConfig, Source, hf_windows

_EVERY = 4  # layers, one of which has no rotation


def from_hf(source: Source) -> ModelConfig:
    fields = Fields(source.config)
    no_rope, layers = _no_rope(fields), fields.layers()
    windows = hf_windows(fields, layers, default_on=False)
    if fields.get("layer_types") is None:
        windows = tuple(window if layer in no_rope else 0 for layer, window in enumerate(windows))
    defaults = llama.Defaults(theta=2_000_000.0, tied=True)
    return llama.hf_config(fields, defaults, family="smollm3", no_rope=no_rope, windows=windows)


def _no_rope(fields: Fields) -> frozenset[int]:
    """`no_rope_layers` holds 1 for a layer with a rotation, 0 for one without."""
    layers, flags = fields.layers(), fields.integers("no_rope_layers")
    every = fields.integer("no_rope_layer_interval", _EVERY, low=1)
    if not flags:
        return _each(layers, every)
    if len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        expected = f"0 or 1 for each of {layers} layers"
        raise ModelError(f"{fields.where}: no_rope_layers must hold {expected}, got {quoted(fields.get('no_rope_layers'))}")
    return frozenset(layer for layer in range(layers) if not flags[layer])


def _each(layers: int, every: int) -> frozenset[int]:
    return frozenset(layer for layer in range(layers) if (layer + 1) % every == 0)


def from_gguf(source: Source) -> ModelConfig:
    """GGUF has no key for it: every fourth layer, as llama.cpp has it."""
    layers = Fields(source.config, prefix="smollm3.", where="GGUF metadata").layers("block_count")
    return llama.gguf_config(source, family="smollm3", no_rope=_each(layers, _EVERY))
