"""Loading a model for the command line: garbage is collected again afterwards, whatever happened."""

from __future__ import annotations

import argparse
import gc

import pytest


def test_garbage_is_collected_again_after_a_load(monkeypatch):
    from tinyvllm.cli import generate
    from tinyvllm.engine import llm

    seen = []

    def fail(**options: object) -> None:
        seen.append(gc.isenabled())
        raise MemoryError

    monkeypatch.setattr(llm, "LLM", fail)
    monkeypatch.setattr(generate, "engine_options", lambda options: {})
    with pytest.raises(MemoryError):
        generate.load(argparse.Namespace(quiet=True))
    assert seen == [False] and gc.isenabled()
