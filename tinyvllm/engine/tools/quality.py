"""`quality`: what quantization costs. Scores the tokens of a text by a reference and by other models, one model in memory at a time.

The text is cut into windows of `context` tokens. The first half of a window is context only, the tokens after it are scored: so does
llama.cpp's perplexity tool, and figures compare. Logits are those of prefill, whose kernels serve requests; a decode step has the same
bits (docs/quality.md).

The reference's logits for the scored tokens wait in a temporary file as they are, float32 [N, V]: rounding them would be part of the
result. Memory is a model, a KV cache of one window, and the logits of a chunk of CHUNK tokens.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Callable, Iterator
from statistics import median
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from tinyvllm.engine.engine import Engine
from tinyvllm.engine.llm import LLM
from tinyvllm.engine.tools.one_off import prompt_logits_by_chunk
from tinyvllm.engine.tools.token_scores import TokenScores, joined, score
from tinyvllm.errors import ArgumentError, ModelError, OutputError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import SamplingParams
from tinyvllm.text.tokenizer import Tokenizer

CHUNK = 128  # tokens; their logits over a vocabulary of 128 k are 64 MiB
DECODE_ROUNDS, DECODE_TOKENS = 3, 64


@dataclass(frozen=True)
class Windows:
    """Token ids [W, C] of the first W of `available` windows of a text. The rows from `first` to C - 2 score the token after them."""

    ids: np.ndarray
    available: int

    @property
    def context(self) -> int:
        return int(self.ids.shape[1])

    @property
    def first(self) -> int:
        return self.context // 2

    @property
    def num_scored(self) -> int:
        return len(self.ids) * (self.context - 1 - self.first)


def windows_of(tokenizer: Tokenizer, text: str, context: int, limit: int) -> Windows:
    """The first `limit` windows of a text. Each begins with what the tokenizer puts before a text, in place of its first tokens."""
    prefix = tokenizer.prefix_ids
    ids = [*prefix, *tokenizer.encode(text, add_special_tokens=False)]
    available = len(ids) // context
    if not available:
        raise ArgumentError(
            f"the text has {len(ids)} tokens; expected at least {context}, one window: give a longer one, or lower --context"
        )
    windows = np.array(ids[: min(available, limit) * context], np.int64).reshape(-1, context)
    windows[:, : len(prefix)] = prefix
    return Windows(windows, available)


@dataclass(frozen=True)
class Vocabulary:
    """What two models must have in common: the width of their logits, and the bytes of each token (empty where an id has none)."""

    size: int
    tokens: list[bytes]

    @staticmethod
    def of(engine: Engine) -> Vocabulary:
        tokenizer = tokenizer_of(engine)
        return Vocabulary(engine.runner.config.vocab_size, [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)])

    def check(self, other: Vocabulary) -> None:
        """ArgumentError if `other`, the vocabulary of a model, is not that of this reference."""
        if other.size != self.size:
            raise ArgumentError(f"it has logits for {other.size} tokens, the reference for {self.size}: {_ADVICE}")
        for i, (mine, its) in enumerate(zip(self.tokens, other.tokens)):
            if mine != its and mine and its:  # an id without a token, as of padding, has a name in some files
                raise ArgumentError(f"token {i} is {its!r:.60}, and the reference's is {mine!r:.60}: {_ADVICE}")


_ADVICE = "only models with one vocabulary can be compared"


def tokenizer_of(engine: Engine) -> Tokenizer:
    """The engine's tokenizer; ModelError without one."""
    if engine.tokenizer is None:
        raise ModelError("quality: this engine has no tokenizer, and a text must become tokens")
    return engine.tokenizer


class ScratchLogits:
    """Logits float32 [N, V] in a temporary file without a name: written once, then read any number of times, in the same order.

    ArgumentError beyond `limit` bytes, OutputError if the disk has no room for them.
    """

    def __init__(self, windows: Windows, vocab_size: int, limit: int):
        self._row_bytes, self._V = 4 * vocab_size, vocab_size
        size, each = windows.num_scored * self._row_bytes, windows.num_scored // len(windows.ids) * self._row_bytes
        if size > limit:
            hint = f"--windows {limit // each} fits, or raise --scratch" if limit >= each else "raise --scratch"
            raise ArgumentError(f"the reference's logits take {_mb(size)}, --scratch is {_mb(limit)}: {hint}")
        with _writing():
            free = shutil.disk_usage(tempfile.gettempdir()).free
            if free < size:
                raise OSError(errno.ENOSPC, f"they take {_mb(size)}, {_mb(free)} are free")
            self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by __exit__

    def write(self, logits: np.ndarray) -> None:
        """Append rows [n, V]."""
        with _writing():
            self._file.write(np.ascontiguousarray(logits, np.float32).data)
            self._file.flush()

    def rewind(self) -> None:
        """The next `read` begins with the first row."""
        self._file.seek(0)

    def read(self, rows: int) -> np.ndarray:
        """The next rows [rows, V]."""
        data = self._file.read(rows * self._row_bytes)
        return np.frombuffer(data, np.float32).reshape(rows, self._V)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "set TMPDIR to a folder on another disk, or lower --windows"
        raise OutputError(f"cannot write the reference's logits to a temporary file: {error.strerror or error}; {advice}") from error


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


Advance = Callable[[], None]  # called after each window


def reference_scores(engine: Engine, windows: Windows, scratch: ScratchLogits, advance: Advance) -> TokenScores:
    """Score the text by the reference, whose logits are written to `scratch`."""

    def keep(tokens: np.ndarray, logits: np.ndarray) -> TokenScores:
        scratch.write(logits)
        return score(logits, logits, tokens)

    return joined(keep(*part) for part in _scored_rows(engine, windows, advance))


def model_scores(engine: Engine, windows: Windows, scratch: ScratchLogits, advance: Advance) -> TokenScores:
    """Score the text by a model, versus the logits in `scratch`. ModelError if it gives logits that are not finite."""
    scratch.rewind()
    return joined(score(scratch.read(len(tokens)), logits, tokens) for tokens, logits in _scored_rows(engine, windows, advance))


def _scored_rows(engine: Engine, windows: Windows, advance: Advance) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens [n], logits of them [n, V]) of the scored half of every window, chunk by chunk."""
    for number, ids in enumerate(windows.ids):
        start = 0
        for logits in prompt_logits_by_chunk(engine, ids.tolist(), CHUNK):
            rows = slice(max(windows.first, start), min(windows.context - 1, start + len(logits)))
            part = logits[rows.start - start : rows.stop - start] if rows.start < rows.stop else logits[:0]
            start += len(logits)
            if not np.isfinite(part).all():
                raise ModelError(f"its logits of window {number + 1} are not finite: its weights or its configuration are broken")
            if len(part):
                yield ids[rows.start + 1 : rows.stop + 1], part
        advance()


def decode_rate(llm: LLM, windows: Windows) -> float:
    """Tokens a second of greedy decoding of one sequence after half of a window, of up to DECODE_TOKENS: the median of DECODE_ROUNDS."""
    prompt, count = windows.ids[0, : windows.first].tolist(), min(DECODE_TOKENS, windows.context - windows.first)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    rates = []
    for _ in range(DECODE_ROUNDS + 1):  # the first captures the steps
        (output,) = llm.generate({"prompt_token_ids": prompt}, params)
        metrics = output.metrics
        assert metrics.first_token is not None and metrics.finished is not None
        rates.append((count - 1) / max(metrics.finished - metrics.first_token, 1e-9))
    return median(rates[1:])


@dataclass(frozen=True)
class Footprint:
    """What a loaded model takes: bytes of its weights and of the KV cache of one token, and the formats of its matrices."""

    weight_bytes: int
    kv_bytes_per_token: int
    formats: tuple[str, ...]

    @staticmethod
    def of(engine: Engine) -> Footprint:
        runner: Any = engine.runner
        return Footprint(runner.weight_bytes, runner.kv_token_bytes, tuple(sorted(runner.weight_formats)))
