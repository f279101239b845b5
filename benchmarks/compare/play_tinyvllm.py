"""tinyvllm, by LLM's engine: a step a token. Weights from a Hugging Face folder in bfloat16 or from a GGUF file."""

from __future__ import annotations

import argparse
import itertools

from benchmarks.compare.child import prompt, serve


class Tinyvllm:
    def __init__(self, options: argparse.Namespace):
        from benchmarks.loading import load
        from tinyvllm.engine.tools.stepping import Stepping

        size = 256 * options.engine["context_parallel_size"] if "context_parallel_size" in options.engine else 16
        blocks = options.batch * -(-options.length // size) + 1  # no more memory than the others take
        llm = load(
            options.model, max_model_len=options.length, max_num_seqs=options.batch, num_blocks=blocks,
            max_num_batched_tokens=max(options.chunk, options.batch), **options.engine,
        )  # fmt: skip
        self.stepping = Stepping(llm)
        self.prompts = itertools.count()

    def begin(self, batch: int, context: int) -> None:
        self.stepping.begin([prompt(context, b) for b in range(batch)])

    def steps(self, count: int) -> None:
        self.stepping.steps(count)

    def prefill(self, tokens: int) -> None:
        self.stepping.prefill(prompt(tokens, next(self.prompts)))  # a repeated prompt is in the prefix cache


if __name__ == "__main__":
    serve(Tinyvllm)
