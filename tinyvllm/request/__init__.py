"""Requests and their outputs. No text and no tensors."""

from tinyvllm.request.adapter import Adapter, LoRARequest
from tinyvllm.request.limits import MAX_LOGPROB_ENTRIES, MAX_LOGPROB_TOKEN_IDS
from tinyvllm.request.options import RequestOptions, check_cache_salt
from tinyvllm.request.output import CompletionOutput, Energy, Logprob, Receipt, RequestMetrics, RequestOutput
from tinyvllm.request.params import (
    ALL_LOGPROBS,
    MAX_LOGPROBS,
    STRUCTURES,
    BeamSearchParams,
    LogitsProcessor,
    ReasoningParams,
    SamplingParams,
    StructuredOutputsParams,
)  # fmt: skip
from tinyvllm.request.sequence import ONE_OFF_ROW, SCORED_ROW, Sequence, Status

__all__ = [
    "ALL_LOGPROBS", "Adapter", "BeamSearchParams", "CompletionOutput", "Energy", "LoRARequest", "LogitsProcessor", "Logprob",
    "MAX_LOGPROBS", "MAX_LOGPROB_ENTRIES", "MAX_LOGPROB_TOKEN_IDS", "ONE_OFF_ROW", "Receipt", "RequestMetrics", "RequestOutput",
    "SCORED_ROW", "STRUCTURES", "SamplingParams", "Sequence", "Status", "StructuredOutputsParams", "RequestOptions", "ReasoningParams",
    "check_cache_salt",
]  # fmt: skip
