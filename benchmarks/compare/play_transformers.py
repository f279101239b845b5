"""transformers on PyTorch, eager, with its DynamicCache: a forward pass a token, argmax on its logits.

In bfloat16 or float32, whichever is faster in a test: without instructions for bfloat16 PyTorch is many times slower in it. With
ATEN_CPU_CAPABILITY=avx2 and ONEDNN_MAX_CPU_ISA=AVX2 it keeps to AVX2. Weights from a Hugging Face folder. Batches are rows of one tensor,
all of the same length, so nothing is padded.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.compare.child import prompt, serve


class Transformers:
    def __init__(self, options: argparse.Namespace):
        import torch
        import transformers

        self.torch, self.library = torch, transformers
        torch.set_num_threads(options.threads)
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.path, self.chunk = options.model, options.chunk
        self._load(torch.bfloat16)

    def _load(self, dtype: Any) -> None:
        self.model: Any = None  # before the next one takes its memory
        self.model = self.library.AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype).eval()
        self._fresh()

    def tune(self, test: str, batch: int, tokens: int) -> str:
        """The faster of two dtypes at a test, loaded; the second of two turns each. `tokens`: of the prompt, or the context."""
        seconds = {}
        for dtype in (self.torch.float32, self.torch.bfloat16):
            self._load(dtype)
            if test != "prefill":
                self.begin(batch, tokens)
            for _ in range(2):
                start = time.perf_counter()
                if test == "prefill":
                    self.prefill(tokens)
                else:
                    self.steps(2)
                seconds[dtype] = time.perf_counter() - start
                if seconds[dtype] > 4 * min(seconds.values()):
                    break
        best = min(seconds, key=lambda dtype: seconds[dtype])
        if self.model.dtype != best:
            self._load(best)
        return f"{str(best).removeprefix('torch.')} {self.torch.backends.cpu.get_cpu_capability()}"

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
