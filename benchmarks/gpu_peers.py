"""PyTorch's side of the GPU measurements, run by whatever interpreter has torch and transformers; prints one JSON line on standard output.

    python -m benchmarks.gpu_peers cublas --sizes 4096,8192
    python -m benchmarks.gpu_peers decode FOLDER --batch 64 --context 128 --steps 200

`decode` is transformers at its fastest by its own means: a model made from a config.json with random bfloat16 weights, a static cache,
and one decode step (forward, argmax) compiled with mode "reduce-overhead", that is as a CUDA graph. The host looks at no token before the
end, which favours it: servers must look. Imports no tinyvllm and no tinygrad.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

PROMPT = 3  # decode's compiled steps that are not timed: tracing, recording the graph, its first replay


def cublas(options: argparse.Namespace) -> dict[str, Any]:
    """10^12 operations a second of torch's bfloat16 product of square matrices, by size."""
    import torch

    return {"torch": torch.__version__} | {f"tflops_{size}": _square_product(torch, size, options) for size in options.sizes}


def _square_product(torch: Any, size: int, options: argparse.Namespace) -> float:
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=options.device) for _ in range(2))
    times = max(1, min(300, round(2e13 / size**3)))
    for _ in range(times):  # clocks rise, cuBLAS chooses
        a @ b
    return round(2 * size**3 / median(_seconds(torch, lambda: a @ b, times) for _ in range(5)) / 1e12, 1)


def _seconds(torch: Any, work: Any, times: int) -> float:
    _wait(torch)
    start = time.perf_counter()
    for _ in range(times):
        work()
    _wait(torch)
    return (time.perf_counter() - start) / times


def _wait(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def decode(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one decode step."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_default_dtype(torch.bfloat16)
    config = transformers.AutoConfig.from_pretrained(options.model)
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    cache = static_cache(torch, transformers, model, options.batch, options.context + options.steps + PROMPT, options.device)
    step = Step(torch, model, cache, bool(options.compile))
    with torch.inference_mode():
        token = step.prompt(options.batch, options.context, options.device)
        for i in range(PROMPT):
            token = step(token, options.context + i)
        _wait(torch)
        start = time.perf_counter()
        for i in range(PROMPT, PROMPT + options.steps):
            token = step(token, options.context + i)
        token.tolist()
        seconds = (time.perf_counter() - start) / options.steps
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return versions | {"batch": options.batch, "compiled": bool(options.compile), "step_seconds": seconds}


def static_cache(torch: Any, transformers: Any, model: Any, batch: int, length: int, device: str) -> Any:
    """A StaticCache by whatever arguments this version takes."""
    known = inspect.signature(transformers.StaticCache.__init__).parameters
    given = {"config": model.config, "max_batch_size": batch, "max_cache_len": length, "device": device, "dtype": torch.bfloat16}
    return transformers.StaticCache(**{name: value for name, value in given.items() if name in known})


class Step:
    """One token of each sequence further."""

    def __init__(self, torch: Any, model: Any, cache: Any, compiled: bool):
        self._torch, self._model, self._cache = torch, model, cache
        self._takes = inspect.signature(model.forward).parameters
        self._forward = torch.compile(self._best, mode="reduce-overhead", fullgraph=True) if compiled else self._best

    def _best(self, ids: Any, places: Any) -> Any:
        positions = {"cache_position": places} if "cache_position" in self._takes else {}
        out = self._model(
            input_ids=ids, position_ids=places.unsqueeze(0), past_key_values=self._cache, use_cache=True, logits_to_keep=1, **positions
        )
        return out.logits[:, -1:].argmax(-1)

    def prompt(self, batch: int, tokens: int, device: str) -> Any:
        ids = self._torch.randint(3, 1000, (batch, tokens), device=device)
        return self._best(ids, self._torch.arange(tokens, device=device))

    def __call__(self, token: Any, place: int) -> Any:
        places = self._torch.full((1,), place, device=token.device, dtype=self._torch.long)
        return self._forward(token, places).clone()  # the graph's own result is overwritten by its next replay


def sizes(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PyTorch's side of the GPU measurements")
    parser.add_argument("--device", default="cuda")
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("cublas")
    one.add_argument("--sizes", type=sizes, default=[4096, 8192])
    two = parts.add_parser("decode")
    two.add_argument("model", type=Path)
    two.add_argument("--batch", type=int, default=1)
    two.add_argument("--context", type=int, default=128)
    two.add_argument("--steps", type=int, default=200)
    two.add_argument("--compile", type=int, choices=(0, 1), default=1)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print
    try:
        figures = {"cublas": cublas, "decode": decode}[options.part](options)
    except ImportError as error:
        figures = {"missing": str(error)}
    print(json.dumps(figures), file=answers, flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
