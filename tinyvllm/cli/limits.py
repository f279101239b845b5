"""max_tokens and the context: an explicit value beyond it is limited, and said; the default of a command just fits."""

from __future__ import annotations

from dataclasses import replace

from tinyvllm.request import SamplingParams


class TokenLimit:
    """Limits max_tokens to what a prompt leaves of the context, and counts where that changed a value that the user set."""

    def __init__(self, context: int):
        self.context = context
        self.count = 0
        self._first = ""

    def apply(self, params: SamplingParams, prompt_tokens: int, source: str, explicit: bool) -> SamplingParams:
        """`params` with a max_tokens that fits after the prompt; as they are if the prompt itself does not fit."""
        room = self.context - prompt_tokens
        if params.max_tokens is None or params.max_tokens <= room or room < 1:
            return params
        if explicit:
            self.count += 1
            self._first = self._first or f"{source}: from {params.max_tokens} to {room}"
        return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))

    def line(self) -> str | None:
        """A line for the user; None if nothing was limited."""
        if not self.count:
            return None
        more = f", and {self.count - 1} more" if self.count > 1 else ""
        return f"max_tokens is limited by the context of {self.context} tokens ({self._first}{more})"
