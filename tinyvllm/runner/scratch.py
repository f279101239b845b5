"""What the steps of a model take next to weights and KV cache, and the longest sequence that they are made for."""

from __future__ import annotations

from typing import Any

from tinyvllm.config.engine import EngineConfig
from tinyvllm.errors import ArgumentError
from tinyvllm.models.config import ModelConfig

# If no length is given. Scores of a chunk are laid out for the longest context: 32 heads by 512 queries by 131072 keys are 8 GiB.
DEFAULT_CONTEXT = 8192


def wanted_context(config: EngineConfig, model: ModelConfig) -> int:
    """The longest sequence that is wanted: as given, else the model's own context up to DEFAULT_CONTEXT. ArgumentError beyond it."""
    longest = model.max_context
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ArgumentError(f"max_model_len={config.max_model_len} is beyond the {longest} tokens that the model was made for")
    return config.max_model_len or min(longest, DEFAULT_CONTEXT)


def step_bytes(config: EngineConfig, c: ModelConfig, model: Any, max_model_len: int) -> int:
    """Bytes of what steps read and write, all in float32: the tables of positions, exactly, and the results of the largest step: those of
    one layer, which the next layer uses again, and the logits.
    """
    constants = model.constants(max_model_len, config.max_model_len or c.max_context)
    kinds = [c.of_layer(layer) for layer in {0, c.num_blocks - 1}]
    heads = max((2 * each.n_heads + 2 * each.n_kv_heads) * each.head_dim for each in kinds)
    row = 2 * c.dim + heads + 2 * max(each.hidden_dim for each in kinds) + 2 * c.num_blocks * c.layer_input_dim
    results = 4 * (config.max_num_batched_tokens * row + config.max_num_seqs * c.vocab_size)
    return int(sum(array.nbytes for array in constants.values())) + results
