"""transformers on PyTorch, eager, bfloat16, with its DynamicCache: a forward pass a token, argmax on its logits.

Weights from a Hugging Face folder. Batches are rows of one tensor, all of the same length, so nothing is padded.
"""

from __future__ import annotations

import argparse

from benchmarks.compare.child import prompt, serve


class Transformers:
    def __init__(self, options: argparse.Namespace):
        import torch
        import transformers

        self.torch, self.library = torch, transformers
        torch.set_num_threads(options.threads)
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
        self.chunk = options.chunk
        self._fresh()

    def _fresh(self) -> None:
        self.past = self.library.DynamicCache(config=self.model.config)

    def _forward(self, ids: object) -> None:
        with self.torch.inference_mode():
            logits = self.model(input_ids=ids, past_key_values=self.past, use_cache=True, logits_to_keep=1).logits
            self.token = logits[:, -1:].argmax(-1)
            self.token.tolist()

    def begin(self, batch: int, context: int) -> None:
        self._fresh()
        ids = self.torch.tensor([prompt(context, b) for b in range(batch)])
        chunk = max(1, self.chunk // batch)
        for start in range(0, context, chunk):
            self._forward(ids[:, start : start + chunk])

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._forward(self.token)

    def prefill(self, tokens: int) -> None:
        self._fresh()
        ids = self.torch.tensor([prompt(tokens)])
        for start in range(0, tokens, self.chunk):
            self._forward(ids[:, start : start + self.chunk])


if __name__ == "__main__":
    serve(Transformers)
