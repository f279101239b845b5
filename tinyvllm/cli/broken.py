"""Answers that a broken model ended: the engine reports them in the output, and other requests continue."""

from __future__ import annotations

from tinyvllm.errors import ModelError
from tinyvllm.request import RequestOutput


def is_broken(output: RequestOutput) -> bool:
    """Whether an answer ended in an error of the model."""
    return any(part.finish_reason == "error" for part in output.outputs)


def no_logits(source: str) -> ModelError:
    """The error for a broken answer to the prompt that `source` names."""
    return ModelError(f"{source}: the model gave no finite logits; its weights or configuration are broken")
