"""What every API reports of a finished request: token usage, finish reason, receipt."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import CompletionOutput, Energy, RequestOutput
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.schema import StreamOptions


@dataclass
class TokenUsage:
    """Tokens of one request, and the joules if it asks for them."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    energy: Energy | None = None

    def add_prompt(self, output: RequestOutput) -> None:
        self.prompt += len(output.prompt_token_ids)
        self.cached += output.num_cached_tokens

    def add_completions(self, output: RequestOutput) -> None:
        self.completion += sum(len(part.token_ids) for part in output.outputs)

    def add_energy(self, output: RequestOutput) -> None:
        """Add the energy of one of the request's prompts, which its last output has."""
        if output.energy is not None:
            self.energy = output.energy if self.energy is None else self.energy + output.energy

    def openai(self) -> dict[str, Any]:
        """The usage object of completions and chat completions."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            **({"completion_tokens_details": {"reasoning_tokens": self.reasoning}} if self.reasoning else {}),
            **({} if self.energy is None else {"energy": asdict(self.energy)}),
        }

    def record(self, context: RequestContext) -> None:
        """Report to the access log."""
        context.record |= {"prompt_tokens": self.prompt, "cached_tokens": self.cached, "completion_tokens": self.completion}


def usage_in_stream(config: ServerConfig, options: StreamOptions | None, energy: bool | None) -> tuple[bool, bool]:
    """(whether a stream has its usage, whether every event has it). A request with `energy` has it for that field."""
    if config.enable_force_include_usage:
        return True, True
    include = options is not None and bool(options.include_usage)
    return include or bool(energy), include and options is not None and bool(options.continuous_usage_stats)


def finish_reason_of(part: CompletionOutput) -> tuple[str | None, int | str | None]:
    """(OpenAI's finish_reason, vLLM's stop_reason). A missed deadline counts as "length". Failure if the request failed."""
    if part.finish_reason == "error" and (part.error or "").startswith("structured_outputs:"):
        # a grammar whose state grew beyond its limit while it ran
        raise Failure(400, part.error or "", param="structured_outputs", code="invalid_value")
    if part.finish_reason == "error":
        raise Failure(500, part.error or "the model produced invalid numbers for this request", code="generation_failed")
    if part.finish_reason == "abort":
        raise Failure(503, "the server aborted the request", code="aborted")
    return ("length", "deadline") if part.finish_reason == "deadline" else (part.finish_reason, part.stop_reason)


def timings(output: RequestOutput, predicted: int) -> dict[str, Any]:
    """llama.cpp's speeds: milliseconds of the prompt until the first token, and of the `predicted - 1` steps after it."""
    metrics = output.metrics
    first = metrics.first_token or time.monotonic()
    end = metrics.finished or time.monotonic()
    prompt = len(output.prompt_token_ids) - output.num_cached_tokens
    started = metrics.arrival if metrics.scheduled is None else metrics.scheduled
    return {
        "cache_n": output.num_cached_tokens,
        **_rates("prompt", prompt, prompt, 1000 * max(0.0, first - started)),
        **_rates("predicted", predicted, max(0, predicted - 1), 1000 * max(0.0, end - first)),
    }


def _rates(name: str, tokens: int, steps: int, ms: float) -> dict[str, Any]:
    per_token, per_second = (ms / steps, 1000 * steps / ms) if steps and ms else (0.0, 0.0)
    return {f"{name}_n": tokens, f"{name}_ms": ms, f"{name}_per_token_ms": per_token, f"{name}_per_second": per_second}


def request_metrics(config: ServerConfig, output: RequestOutput | None, num_answers: int, usage: TokenUsage) -> dict[str, Any]:
    """vLLM's times of a request, as the field `metrics`; nothing unless the server reports them, and for several answers."""
    if not config.enable_per_request_metrics or output is None or num_answers != 1:
        return {}
    times = output.metrics
    if times.scheduled is None or times.first_token is None or times.finished is None:
        return {}
    decode = max(0.0, times.finished - times.first_token)
    metrics = {
        "time_to_first_token_ms": 1000 * (times.first_token - times.scheduled),
        "generation_time_ms": 1000 * decode,
        "queue_time_ms": 1000 * max(0.0, times.scheduled - times.arrival),
        "tokens_per_second": usage.completion / decode if decode else 0.0,
    }
    if usage.completion > 1:
        metrics["mean_itl_ms"] = 1000 * decode / (usage.completion - 1)
    return {"metrics": metrics}


def extra_fields(output: RequestOutput | None, with_timings: bool | None = None, usage: TokenUsage | None = None) -> dict[str, Any]:
    """The receipt, the explanation and the timings, if the request asked for them."""
    fields: dict[str, Any] = {}
    if output is not None and with_timings and usage is not None:
        fields["timings"] = timings(output, usage.completion)
    if output is not None and output.receipt is not None:
        fields["receipt"] = asdict(output.receipt)
    if output is not None and output.explanation is not None:
        fields["explanation"] = output.explanation
    return fields
