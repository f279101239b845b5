"""What one user feels: tokens a second while decoding, at a context; time to the first token, and prompt tokens a second.

Decoding streams every weight once a step, so its roof is read bandwidth / weight bytes, and a batch shares that stream. What is timed:
steps of the engine, greedy, sequences in the middle of their answers; for a prompt, from `add` to its first token. `host` is the processor
time of the engine's thread in a step: scheduling, laying out the batch, launching, outputs.

    python -m benchmarks.latency --shape tinyllama-1.1b --batches 1,4,16 --prompts 16,128,512 --contexts 16,2048
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.compare.child import prompt
from benchmarks.harness import Spread, one_round, record, spread, table, take_turns
from benchmarks.host_time import host_seconds
from benchmarks.loading import load
from benchmarks.roof import read_once, read_size, roof_figures
from benchmarks.shapes import SHAPES, write_config
from tinyvllm.engine.tools.stepping import Stepping

ROUND_SECONDS = 0.5


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """--shape fills a named shape with random weights; --model measures a checkpoint."""
    parser.add_argument("--shape", choices=SHAPES, default="tiny160m")
    parser.add_argument("--model", help="a folder or GGUF file instead of a shape with random weights")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--rounds", type=int, default=7)


def load_model(options: argparse.Namespace, **limits: Any) -> Any:
    """The LLM of `model_arguments`; `limits` are engine options."""
    given = limits | ({"dtype": options.dtype} if options.dtype else {})
    if options.model:
        return load(options.model, **given)
    with TemporaryDirectory() as folder:
        return load(write_config(SHAPES[options.shape], Path(folder)), dummy=True, **{"dtype": "bfloat16"} | given)


def model_name(options: argparse.Namespace) -> str:
    """What was measured, for a record that others read: a checkpoint by its own name, not by its path."""
    return Path(options.model).resolve().name if options.model else options.shape


def decoding(stepping: Stepping, batch: int, context: int, rounds: int) -> tuple[Spread, Spread, float]:
    """The spread of one step's seconds, of `read_once` in turn with it, and the host's median seconds in a step."""
    stepping.begin([prompt(context, b) for b in range(batch)])
    stepping.steps(2)
    count = max(2, round(ROUND_SECONDS / (one_round(lambda: stepping.steps(4)).seconds / 4)))
    timed = take_turns({"steps": lambda: stepping.steps(count), "read": read_once}, rounds)
    host = median(_host_seconds(stepping) for _ in range(16))
    stepping.stop()
    return spread(timed["steps"]).divided(count), spread(timed["read"]), host


def _host_seconds(stepping: Stepping) -> float:
    return host_seconds(lambda: stepping.steps(1))


def main() -> None:
    parser = argparse.ArgumentParser(description="decoding rate, time to first token, prefill rate")
    model_arguments(parser)
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--contexts", type=numbers, default=[16])
    parser.add_argument("--prompts", type=numbers, default=[16, 128, 512])
    options = parser.parse_args()
    room = 64 * options.rounds * 3
    longest = max(max(options.contexts) + room, max(options.prompts) + 1)
    blocks = max(options.batches) * (-(-longest // 16) + 1)
    llm = load_model(options, max_model_len=longest, max_num_seqs=max(options.batches), num_blocks=blocks)
    stepping, weights = Stepping(llm), llm.engine.model_bytes_per_token
    read_once()  # touches its memory
    rows: list[list[object]] = []
    figures: list[dict[str, object]] = []
    spreads: list[Spread] = []
    for context in options.contexts:
        for batch in options.batches:
            step, reading, host = decoding(stepping, batch, context, options.rounds)
            roof = reading.rate(read_size()) / weights * batch
            rate = step.rate(batch)
            rows.append([f"decode {batch} x {context}", rate, batch / step.high, batch / step.low, f"{rate / roof:.0%}", 1e3 * host])
            figures.append({"batch": batch, "context": context, "tok_s": step.figures(batch), "of_roof": round(rate / roof, 3),
                            **roof_figures(reading), "host_ms": round(1e3 * host, 3)})  # fmt: skip
            spreads.append(step)
    for tokens in options.prompts:
        prompts = (prompt(tokens, number) for number in itertools.count())  # each its own: a repeated one is in the prefix cache
        stepping.prefill(next(prompts))
        timed = spread(take_turns({"": lambda: stepping.prefill(next(prompts))}, options.rounds)[""])  # noqa: B023
        rates = timed.rate(tokens), tokens / timed.high, tokens / timed.low
        rows.append([f"prompt of {tokens}: {1e3 * timed.median:.1f} ms", *rates, None, None])
        figures.append({"prompt": tokens, "first_token_ms": round(1e3 * timed.median, 2), "tok_s": timed.figures(tokens)})
        spreads.append(timed)
    name = model_name(options)
    print(f"{name}: {weights / 1e9:.3f} GB of weights a step; the roof is reading them, measured in turn with the steps")
    print(table(["", "tok/s", "low", "high", "of the roof", "host ms"], rows))
    record("latency", {"model": name, "dtype": llm.config.dtype, "weight_bytes": weights, "runs": figures}, spreads)  # fmt: skip


if __name__ == "__main__":
    main()
