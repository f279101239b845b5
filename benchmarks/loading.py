"""The LLM of a benchmark that drives its steps."""

from __future__ import annotations

import os
from typing import Any


def load(model: str | os.PathLike[str], dummy: bool = False, **options: Any) -> Any:
    """An LLM without its tokenizer and without drafts: a step is a token. `dummy` fills the shapes of a config.json with random weights."""
    from tinyvllm.engine.llm import LLM

    return LLM(model, load_format="dummy" if dummy else "auto", skip_tokenizer_init=True, speculative_config="off", **options)
