"""The draft model of `speculative_config`: loaded next to the target, and refused if its vocabulary is another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tinyvllm.config.engine import EngineConfig
from tinyvllm.engine.drafter_memory import draft_model_config
from tinyvllm.engine.startup import load_model_tokenizer, load_runner
from tinyvllm.errors import ArgumentError
from tinyvllm.speculate.opening import open_drafter
from tinyvllm.speculate.protocol import Drafter
from tinyvllm.speculative import SpeculativeConfig
from tinyvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tinyvllm.runner.runner import Runner


def open_any_drafter(config: EngineConfig, chosen: SpeculativeConfig, target: Runner, tokenizer: Tokenizer | None) -> Drafter:
    """The drafter of any method."""
    return open_draft_model(config, chosen, target, tokenizer) if chosen.method == "draft_model" else open_drafter(chosen, target)


def open_draft_model(config: EngineConfig, chosen: SpeculativeConfig, target: Runner, tokenizer: Tokenizer | None) -> Drafter:
    """The drafter of method "draft_model". Its cache has as many blocks as the target's, which left room for them (drafter_memory.py).

    ArgumentError for another vocabulary; errors of the model's files as they are.
    """
    from tinyvllm.runner.opened import open_model  # tinygrad comes with it
    from tinyvllm.speculate.draft_model import DraftModelDrafter

    own = draft_model_config(config, chosen)
    opened = open_model(own, config.device)
    if opened.config.delta is not None:
        raise ArgumentError(f"speculative_config: the draft model {own.model!r:.200} has recurrent states; give a model without")
    length = min(target.max_model_len, opened.config.max_context)
    own = replace(own, num_blocks=target.pool.num_blocks, max_model_len=length)
    runner = load_runner(own, None, opened)
    if tokenizer is None:
        _require_same_size(own.model, target.config.vocab_size, runner.config.vocab_size)
    else:
        _require_same_tokens(own.model, tokenizer, load_model_tokenizer(own, runner) or tokenizer)
    return DraftModelDrafter(runner, config.max_num_seqs, config.max_num_batched_tokens)


def _require_same_size(model: str, target: int, draft: int) -> None:
    """Without a tokenizer the sizes are all there is to compare."""
    if target != draft:
        raise ArgumentError(
            f"speculative_config: the draft model {model!r:.200} has {draft} tokens in its vocabulary, the target {target}; "
            "give a model with the target's vocabulary"
        )


def _require_same_tokens(model: str, target: Tokenizer, draft: Tokenizer) -> None:
    """Every id that both have must be the same token; ids without a token, and those that only one has, are padding."""
    for number in range(min(target.vocab_size, draft.vocab_size)):
        wanted, got = target.token_bytes(number), draft.token_bytes(number)
        if wanted != got and wanted and got:
            raise ArgumentError(
                f"speculative_config: the draft model {model!r:.200} has another vocabulary: token {number} is {got!r:.60}, "
                f"the target's is {wanted!r:.60}; give a model with the target's tokenizer"
            )
