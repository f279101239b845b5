"""mlx-lm's side of the Mac measurements, run by whatever interpreter has it; prints one JSON line on standard output.

    python -m benchmarks.mac_peers FOLDER --bits 4 --batches 1,16 --context 128 --steps 64 --prompt 512

A model made from a config.json with random weights, in bfloat16 or quantised by mlx at its usual group of 64, decodes greedily the way
mlx-lm's own generator does: a step is started before the last one's token is looked at. Imports no tinyvllm and no tinygrad.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

GROUP = 64  # weights that share a scale and a bias: 4.5 and 8.5 bits a weight with them, as Q4_0 and Q8_0 have
WARM = 8  # steps that are not timed
ROUNDS = 3


def build(config: dict[str, Any], bits: int) -> Any:
    import mlx.core as mx
    import mlx.nn as nn

    family = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = family.Model(family.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if bits:
        nn.quantize(model, group_size=GROUP, bits=bits)
    mx.eval(model.parameters())
    return model


class Decoding:
    """Sequences of one length in the middle of their answers."""

    def __init__(self, model: Any, batch: int, context: int):
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        self._mx, self._model, self._cache = mx, model, make_prompt_cache(model)
        self._token = self._best(mx.random.randint(3, 1000, (batch, context)))
        mx.eval(self._token)

    def _best(self, tokens: Any) -> Any:
        return self._mx.argmax(self._model(tokens, cache=self._cache)[:, -1], axis=-1, keepdims=True)

    def steps(self, count: int) -> float:
        """Seconds for each sequence to get `count` tokens, all of which Python sees."""
        begin = time.perf_counter()
        for _ in range(count):
            following = self._best(self._token)
            self._mx.async_eval(following)
            self._token.tolist()
            self._token = following
        self._mx.eval(self._token)
        return time.perf_counter() - begin


def prompt_seconds(model: Any, tokens: int) -> float:
    """Seconds from a prompt to its first token."""
    begin = time.perf_counter()
    Decoding(model, 1, tokens)
    return time.perf_counter() - begin


def figures(options: argparse.Namespace) -> dict[str, Any]:
    model = build(json.loads((options.model / "config.json").read_text()), options.bits)
    found: dict[str, Any] = {"version": version("mlx-lm")}
    for batch in options.batches:
        decoding = Decoding(model, batch, options.context)
        decoding.steps(WARM)
        seconds = median(decoding.steps(options.steps) for _ in range(ROUNDS))
        found[f"decode_{batch}"] = batch * options.steps / seconds
    if options.prompt:
        prompt_seconds(model, options.prompt)
        found["prefill"] = options.prompt / median(prompt_seconds(model, options.prompt) for _ in range(ROUNDS))
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="mlx-lm's side of the Mac measurements")
    parser.add_argument("model", type=Path)
    parser.add_argument("--bits", type=int, choices=(0, 4, 8), default=0, help="of a weight; 0 is bfloat16")
    parser.add_argument("--batches", type=lambda text: [int(word) for word in text.split(",")], default=[1])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt that is timed as well; 0 for none")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print
    try:
        found = figures(options)
    except ImportError as error:
        found = {"missing": str(error)}
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
