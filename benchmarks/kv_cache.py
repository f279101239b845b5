"""What a packed KV cache saves of decoding at a depth: engines with caches of each type take turns within one run.

    python -m benchmarks.kv_cache --weights bf16,q4_k_m --types auto,fp8_e4m3,int8,int4 --context 8192 --batches 1,4,8

A step reads the weights once and the keys and values of every sequence once. How much faster bytes alone would make it is listed next
to the measured ratio: with bf16 weights, one sequence and 8192 tokens, int8 cannot gain more than a few percent.

Prompts are not computed: the blocks of a short beginning, which is, are copied to the others, and the prefix cache is told that they hold
the rest of the prompt. What is timed reads as many blocks as a real context has, all of them different memory. Each engine has weights of
its own. bf16 weights are random numbers, packed ones a GGUF file of random numbers (`--folder` keeps it).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.compare.child import prompt
from benchmarks.harness import Spread, one_round, record, spread, table, take_turns
from benchmarks.latency import numbers
from benchmarks.loading import load
from benchmarks.roof import read_once, read_size, roof_figures
from benchmarks.shapes import SHAPES, checkpoint, parse_formats, write_config
from tinyvllm.engine.tools.stepping import Stepping

BEGINNING = 64  # tokens of a prompt that are computed
MAX_STEPS = 8  # of a round
_WARM = 2
_ROUND_SECONDS = 0.5
_PATIENCE = 3
_SPARE_BLOCKS = 2  # of a sequence


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step reads."""

    weights: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.kv


def traffic(engine: Any, batch: int, context: int) -> Traffic:
    pool = engine.runner.pool
    return Traffic(engine.model_bytes_per_token, batch * context * pool.block_bytes // pool.block_size)


def insert_prompts(stepping: Stepping, prompts: Sequence[list[int]]) -> None:
    """The blocks of the prompts can be found in the prefix cache, as if the engine had computed them.

    A prompt's first BEGINNING tokens are computed; the contents of their blocks are repeated in the rest.
    """
    engine = stepping.engine
    prefix, pool = engine.scheduler.prefix, engine.runner.pool
    size = pool.block_size
    for ids in prompts:
        stepping.prefill(ids[:BEGINNING] + ids[:1])  # one token more: the last one's block is not published
        hashes = prefix.hash_blocks(ids)
        source = prefix.find(hashes[: BEGINNING // size])
        contents = pool.read(source)
        for number in range(len(source), len(hashes)):
            tokens = np.array(ids[number * size : (number + 1) * size], "<i4").tobytes()
            block = prefix.adopt(hashes[number], hashes[number - 1], tokens)
            if block is None:
                raise RuntimeError("kv_cache: the pool has no free block for a prompt")
            pool.write([block], contents[[number % len(source)]])


def open_engine(model: Path, dummy: bool, kv_cache_dtype: str, batch: int, length: int) -> Stepping:
    """An engine whose pool holds `batch` sequences of `length` tokens."""
    blocks = batch * (-(-length // 16) + _SPARE_BLOCKS)
    dtype = {"dtype": "bfloat16"} if dummy else {}
    return Stepping(load(
        model, dummy, max_model_len=length, max_num_seqs=batch, num_blocks=blocks, block_size=16, kv_cache_dtype=kv_cache_dtype,
        enable_prefix_caching=True, **dtype,
    ))  # fmt: skip


def compare(steppings: dict[str, Stepping], batch: int, context: int, rounds: int) -> tuple[dict[str, Spread], Spread]:
    """The spread of a step's seconds of each type, and of `read_once`, in turn."""
    counts = {}
    for name, stepping in steppings.items():
        stepping.begin([prompt(context, b) for b in range(batch)])
        once = one_round(partial(stepping.steps, _WARM)).seconds / _WARM
        counts[name] = max(2, min(round(_ROUND_SECONDS / once), MAX_STEPS))
    ways = {name: partial(stepping.steps, counts[name]) for name, stepping in steppings.items()}
    done = take_turns(ways | {"read": read_once}, rounds, patience=_PATIENCE)
    for stepping in steppings.values():
        stepping.stop()
    return {name: spread(done[name]).divided(counts[name]) for name in steppings}, spread(done["read"])


def measure(steppings: dict[str, Stepping], batch: int, context: int, rounds: int) -> tuple[dict[str, Any], list[Spread]]:
    """The figures of one batch size; the first type is what the others are compared with."""
    steps, reading = compare(steppings, batch, context, rounds)
    read = {name: traffic(stepping.engine, batch, context) for name, stepping in steppings.items()}
    base, bandwidth = next(iter(steppings)), reading.rate(read_size())
    types = {}
    for name, step in steps.items():
        types[name] = {
            "tok_s": step.figures(batch), "weight_bytes": read[name].weights, "kv_bytes": read[name].kv,
            "faster": round(steps[base].median / step.median, 3), "by_bytes": round(read[base].total / read[name].total, 3),
            "of_roof": round(read[name].total / bandwidth / step.median, 3),
        }  # fmt: skip
    return {"batch": batch, "types": types} | roof_figures(reading), list(steps.values())


def rows_of(weights: str, run: dict[str, Any]) -> list[list[object]]:
    """Lines of the table of one batch size."""
    return [
        [f"{weights}, batch {run['batch']}", name, figures["tok_s"]["rate"], f"{figures['faster']:.2f}", f"{figures['by_bytes']:.2f}",
         figures["weight_bytes"] / 1e6, figures["kv_bytes"] / 1e6, f"{figures['of_roof']:.0%}"]
        for name, figures in run["types"].items()
    ]  # fmt: skip


HEADER = ["weights", "KV cache", "tok/s", "times as fast", "by bytes alone", "MB of weights", "MB of KV", "of the roof"]


def run(weights: str, model: Path, options: argparse.Namespace) -> list[list[object]]:
    """Measure and record all batches with one format of weights."""
    length = options.context + (options.rounds * _PATIENCE * MAX_STEPS + _WARM + 16)
    most = max(options.batches)
    steppings: dict[str, Stepping] = {}
    runs, spreads, rows = [], [], []
    try:
        for name in options.types:
            steppings[name] = open_engine(model, weights == "BF16", name, most, length)
            insert_prompts(steppings[name], [prompt(options.context, b) for b in range(most)])
        for batch in options.batches:
            figures, timed = measure(steppings, batch, options.context, options.rounds)
            runs.append(figures)
            spreads += timed
            rows += rows_of(weights, figures)
    finally:
        for stepping in steppings.values():
            stepping.engine.close()
    record("kv_cache", {"shape": options.shape, "weights": weights, "context": options.context, "runs": runs}, spreads)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="decoding with packed KV caches, at a depth")
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama-1.1b")
    parser.add_argument("--weights", type=parse_formats, default=["BF16", "Q4_K_M"])
    parser.add_argument("--types", type=lambda text: text.split(","), default=["auto", "fp8_e4m3", "int8", "int4"])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batches", type=numbers, default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="keeps the GGUF files")
    options = parser.parse_args()
    os.environ["TINYVLLM_KEEP_PANELS"] = "0"  # otherwise the first engine has memory of its own, the others a file's
    read_once()  # touches its memory
    rows: list[list[object]] = []
    with TemporaryDirectory() as folder:
        for weights in options.weights:
            dummy = weights == "BF16"
            config = SHAPES[options.shape]
            model = write_config(config, Path(folder)) if dummy else checkpoint(options.shape, weights, options.folder or Path(folder))
            rows += run(weights, model, options)
    print(f"{options.shape}, {options.context} tokens of context, ratios by the first type of cache")
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
