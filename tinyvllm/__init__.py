"""tinyvllm serves LLaMA-family language models through tinygrad.

The names below are the public interface. They are imported on first use: `import tinyvllm` loads neither tinygrad nor a tokenizer.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tinyvllm.version import VERSION

if TYPE_CHECKING:
    from tinyvllm.engine.async_llm import AsyncLLM
    from tinyvllm.engine.llm import LLM, StreamDelta
    from tinyvllm.engine.segments import Segment
    from tinyvllm.errors import (
        ArgumentError,
        BusyError,
        FormatError,
        InternalError,
        ModelError,
        OutOfMemoryError,
        OutputError,
        RequestError,
        TinyvllmError,
        TokenizerError,
    )
    from tinyvllm.request import (
        BeamSearchParams,
        CompletionOutput,
        Logprob,
        LoRARequest,
        RequestOptions,
        RequestOutput,
        SamplingParams,
        StructuredOutputsParams,
    )

__version__ = VERSION

_MODULES = {
    "LLM": "tinyvllm.engine.llm",
    "Segment": "tinyvllm.engine.segments",
    "StreamDelta": "tinyvllm.engine.llm",
    "AsyncLLM": "tinyvllm.engine.async_llm",
    "SamplingParams": "tinyvllm.request",
    "StructuredOutputsParams": "tinyvllm.request",
    "BeamSearchParams": "tinyvllm.request",
    "RequestOptions": "tinyvllm.request",
    "RequestOutput": "tinyvllm.request",
    "CompletionOutput": "tinyvllm.request",
    "Logprob": "tinyvllm.request",
    "LoRARequest": "tinyvllm.request",
    "TinyvllmError": "tinyvllm.errors",
    "ArgumentError": "tinyvllm.errors",
    "BusyError": "tinyvllm.errors",
    "ModelError": "tinyvllm.errors",
    "FormatError": "tinyvllm.errors",
    "TokenizerError": "tinyvllm.errors",
    "RequestError": "tinyvllm.errors",
    "OutOfMemoryError": "tinyvllm.errors",
    "OutputError": "tinyvllm.errors",
    "InternalError": "tinyvllm.errors",
}

__all__ = [
    "LLM",
    "ArgumentError",
    "AsyncLLM",
    "BeamSearchParams",
    "BusyError",
    "Segment",
    "CompletionOutput",
    "FormatError",
    "InternalError",
    "Logprob",
    "LoRARequest",
    "ModelError",
    "OutOfMemoryError",
    "OutputError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
    "StructuredOutputsParams",
    "RequestOptions",
    "TinyvllmError",
    "TokenizerError",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tinyvllm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value  # the next access finds it in the module
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
