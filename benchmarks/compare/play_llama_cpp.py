"""llama.cpp, by the low-level face of llama-cpp-python: `llama_decode`, then numpy's argmax over the logits. Weights from a GGUF file.

The best of its settings counts: before a test, `tune` times flash attention on and off, with the file mapped and read into memory, and
keeps the fastest. A KV cache in float16, weights repacked for the processor when it can. Batches are its own batches: several sequences in
one `llama_decode`.
"""

from __future__ import annotations

import argparse
import ctypes
import time

import numpy as np

from benchmarks.compare.child import prompt, serve

SETTINGS = [(mmap, flash) for mmap in (True, False) for flash in (0, 1)]  # llama_flash_attn_type: 0 disabled, 1 enabled


class Llama:
    def __init__(self, options: argparse.Namespace):
        import llama_cpp

        self.api = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.options = options
        self.model = self.context = None
        self._load(*SETTINGS[0])
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.chunk = options.chunk
        self.batch = llama_cpp.llama_batch_init(max(options.chunk, options.batch), 0, 1)
        self.tokens: list[int] = []
        self.position = 0

    def _load(self, mmap: bool, flash: int) -> str:
        """The model and a context with these settings, in place of those before; the settings' names."""
        api, options = self.api, self.options
        if self.context:
            api.llama_free(self.context)
        if self.model:
            api.llama_model_free(self.model)
        model = api.llama_model_default_params()
        model.use_mmap = mmap
        self.model = api.llama_model_load_from_file(options.model.encode(), model)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {options.model}")
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = options.batch * options.length, options.batch
        params.n_batch = params.n_ubatch = max(options.chunk, options.batch)
        params.n_threads = params.n_threads_batch = options.threads
        params.flash_attn_type = flash
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        return f"mmap={int(mmap)} flash_attn={flash} {self._instructions()}"

    def _instructions(self) -> str:
        """The widest instruction set that it was built for."""
        flags = set(self.api.llama_print_system_info().decode().replace(" = 1", "").split(" | "))
        words = {word for flag in flags for word in flag.split()}
        return next((name for name in ("AVX512_BF16", "AVX512_VNNI", "AVX512", "AVX_VNNI", "AVX2", "NEON") if name in words), "")

    def tune(self, test: str, batch: int, tokens: int) -> str:
        """The fastest of SETTINGS at a test, loaded; best of three turns each. `tokens`: of the prompt, or the context."""
        seconds = {}
        for settings in SETTINGS:
            self._load(*settings)
            if test != "prefill":
                self.begin(batch, tokens)
            self._turn(test, tokens)
            seconds[settings] = min(self._turn(test, tokens) for _ in range(3))
        return self._load(*min(seconds, key=lambda settings: seconds[settings]))

    def _turn(self, test: str, tokens: int) -> float:
        start = time.perf_counter()
        if test == "prefill":
            self.prefill(tokens)
        else:
            self.steps(4)
        return time.perf_counter() - start

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """One llama_decode of (token, position, sequence, wanted) entries; the most likely next tokens of those wanted."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        status = self.api.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        return [self._best(i) for i, entry in enumerate(entries) if entry[3]]

    def _best(self, i: int) -> int:
        logits = self.api.llama_get_logits_ith(self.context, i)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def _prompt(self, tokens: int, sequence: int) -> int:
        ids, best = prompt(tokens, sequence), []
        for start in range(0, tokens, self.chunk):
            piece = ids[start : start + self.chunk]
            best = self._decode([(t, start + i, sequence, start + i == tokens - 1) for i, t in enumerate(piece)])
        return best[0]

    def _forget(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

    def begin(self, batch: int, context: int) -> None:
        self._forget()
        self.tokens, self.position = [self._prompt(context, b) for b in range(batch)], context

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.tokens = self._decode([(token, self.position, b, True) for b, token in enumerate(self.tokens)])
            self.position += 1

    def prefill(self, tokens: int) -> None:
        self._forget()
        self._prompt(tokens, 0)


if __name__ == "__main__":
    serve(Llama)
