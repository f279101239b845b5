"""tinygrad's own LLM (tinygrad.llm), on a GGUF file: its generator, one sequence, greedy. Its prompts go through in pieces of its choice.

It takes the first prompt's context for its KV cache, one for all; batches it does not do.
"""

from __future__ import annotations

import argparse
import os

from benchmarks.compare.child import Unable, prompt, serve


class Tinygrad:
    def __init__(self, options: argparse.Namespace):
        from pathlib import Path

        from tinyvllm.backends.cpu.toolchain import provide_compiler
        from tinyvllm.config.switches import cache_folder

        os.environ.setdefault("DEV", "CPU")
        provide_compiler(cache_folder())
        from tinygrad import Tensor
        from tinygrad.llm.model import Transformer

        self.model, _ = Transformer.from_gguf(Tensor(Path(options.model)), options.length)
        self.stream = iter(())

    def _start(self, tokens: int, sequence: int) -> None:
        self.model._cached_tokens = []  # nothing of the last prompt may be taken over
        self.stream = self.model.generate(prompt(tokens, sequence))
        next(self.stream)

    def begin(self, batch: int, context: int) -> None:
        if batch > 1:
            raise Unable("one sequence at a time")
        self._start(context, 0)

    def steps(self, count: int) -> None:
        for _ in range(count):
            next(self.stream)

    def prefill(self, tokens: int) -> None:
        self._start(tokens, 0)


if __name__ == "__main__":
    serve(Tinygrad)
