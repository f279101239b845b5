"""Speculative decoding: ways of guessing the next tokens, and how many guesses pay."""

from tinyvllm.speculate.protocol import Draft, Drafter, DraftRequest

__all__ = ["Draft", "DraftRequest", "Drafter"]
