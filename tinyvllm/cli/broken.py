"""Answers that ended in an error: the engine reports it in the output, and other requests continue."""

from __future__ import annotations

from tinyvllm.errors import ModelError
from tinyvllm.request import RequestOutput


def broken_reason(output: RequestOutput) -> ModelError | None:
    """The error that ended an answer, such as a model without finite logits; None if there is none."""
    part = next((part for part in output.outputs if part.finish_reason == "error"), None)
    return None if part is None else ModelError(part.error or "the answer ended in an error")
