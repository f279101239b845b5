"""`tinyvllm quality`: what a format of weights or of the KV cache costs, measured against a reference. One table for all of them."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm.cli.new_file import new_file
from tinyvllm.cli.options import engine_options
from tinyvllm.cli.progress import LoadBar, Progress, say
from tinyvllm.cli.quality_plot import plot
from tinyvllm.cli.quality_report import best_line, record, table
from tinyvllm.config.engine import DEFAULT_MODEL, KV_CACHE_DTYPES, QUANTIZATIONS, default_block_size, resolve, takes_imatrix
from tinyvllm.config.values import expand_home, parse_size
from tinyvllm.errors import ArgumentError, FormatError, TinyvllmError, nearest
from tinyvllm.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from tinyvllm.engine.llm import LLM
    from tinyvllm.engine.tools.quality import ScratchLogits, Vocabulary, Windows
    from tinyvllm.engine.tools.token_scores import TokenScores

MAX_TEXT = 16 << 20  # bytes of --text: it is tokenised as a whole
MIN_CONTEXT = 8


@dataclass(frozen=True)
class Candidate:
    """One row: what its weights are called, its KV cache, and the engine options that make it."""

    weights: str
    kv_cache: str
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.weights if self.kv_cache == "auto" else f"{self.weights} with KV {self.kv_cache}"


@dataclass(frozen=True)
class _Shared:
    """What all rows share, once the reference has been scored."""

    windows: Windows
    vocabulary: Vocabulary
    scratch: ScratchLogits
    progress: Progress


def run(options: argparse.Namespace) -> int:
    _check_numbers(options)
    reference, candidates = _rows(options)
    text, source = _read_text(options)
    with contextlib.ExitStack() as files:
        rows = _RowFile(options.output, files)
        picture = files.enter_context(new_file(options.plot)) if options.plot else None
        measurement = _Measurement(options, reference, source, rows.write)
        failed = measurement.measure(candidates, text)
        if picture is not None:
            picture(plot(measurement.records))
    if options.output != "-":
        print("\n\n".join([measurement.about, table(measurement.records), best_line(measurement.records)]).rstrip())
    return 1 if failed else 0


class _RowFile:
    """`--output`: a JSON line for each row as soon as it was measured. An interrupted run leaves the rows so far."""

    def __init__(self, name: str | None, files: contextlib.ExitStack):
        self._publish = files.enter_context(new_file(name)) if name else None
        self._lines, self._streams = "", name == "-"

    def write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row) + "\n"
        self._lines = line if self._streams else self._lines + line
        if self._publish is not None:
            self._publish(self._lines)


class _Measurement:
    """The reference and then each candidate, with one model in memory at a time."""

    def __init__(self, options: argparse.Namespace, reference: Candidate, source: str, report: Callable[[dict[str, Any]], None]):
        """`report` gets each row when it was measured."""
        self._options, self._reference, self._source, self._report = options, reference, source, report
        self.records: list[dict[str, Any]] = []
        self.about = ""

    def measure(self, candidates: Sequence[Candidate], text: str) -> int:
        """The number of candidates that failed, each with a line on stderr. Raises if the reference fails."""
        failed = 0
        with contextlib.ExitStack() as stack:
            shared = self._measure_reference(stack, text, 1 + len(candidates))
            for candidate in candidates:
                try:
                    self._measure_candidate(candidate, shared, text)
                except TinyvllmError as error:
                    failed += 1
                    say(f"quality: {candidate.name}: {error}")
        return failed

    def _measure_reference(self, stack: contextlib.ExitStack, text: str, num_rows: int) -> _Shared:
        options = self._options
        with _loaded(self._reference, options) as llm:
            from tinyvllm.engine.tools.quality import ScratchLogits, Vocabulary, reference_scores, tokenizer_of, windows_of

            windows = windows_of(tokenizer_of(llm.engine), text, options.context, options.windows)
            limit = parse_size("--scratch", options.scratch)
            scratch = stack.enter_context(ScratchLogits(windows, llm.engine.runner.config.vocab_size, limit))
            progress = Progress(len(windows.ids) * num_rows, 0, "windows", options.quiet)
            stack.callback(progress.close)
            shared = _Shared(windows, Vocabulary.of(llm.engine), scratch, progress)
            self._add(self._reference, llm, reference_scores(llm.engine, windows, scratch, progress.add), shared)
        W, C = windows.ids.shape
        counts = (
            f"{W} of {windows.available} windows of {C} tokens, {windows.num_scored} tokens scored (those after the first half of a window)"
        )
        self.about = f"Reference: {self._reference.name}. Text: {self._source}, {counts}."
        return shared

    def _measure_candidate(self, candidate: Candidate, shared: _Shared, text: str) -> None:
        with _loaded(candidate, self._options) as llm:
            from tinyvllm.engine.tools.quality import Vocabulary, model_scores, tokenizer_of, windows_of

            shared.vocabulary.check(Vocabulary.of(llm.engine))
            own = windows_of(tokenizer_of(llm.engine), text, *reversed(shared.windows.ids.shape))
            if own.ids.tolist() != shared.windows.ids.tolist():
                say(f"quality: {candidate.name}: its tokenizer splits this text otherwise; it is scored on the reference's tokens")
            scores = model_scores(llm.engine, shared.windows, shared.scratch, shared.progress.add)
            self._add(candidate, llm, scores, shared)

    def _add(self, candidate: Candidate, llm: LLM, scores: TokenScores, shared: _Shared) -> None:
        from tinyvllm.engine.tools.quality import Footprint, decode_rate
        from tinyvllm.engine.tools.token_scores import figures_of

        rate = decode_rate(llm, shared.windows) if self._options.decode else None
        is_reference = candidate is self._reference
        row = record(candidate.weights, candidate.kv_cache, is_reference, Footprint.of(llm.engine), figures_of(scores), rate)
        text = {"text": self._source, "context": shared.windows.context, "windows": len(shared.windows.ids)}
        self.records.append(row | text)
        self._report(self.records[-1])


@contextlib.contextmanager
def _loaded(candidate: Candidate, options: argparse.Namespace) -> Iterator[LLM]:
    """The candidate's engine, with a KV cache for one window. ArgumentError if a window is longer than the model's context."""
    size = candidate.options.get("block_size") or default_block_size(candidate.options.get("context_parallel_size", 1))
    limits: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": options.context, "num_blocks": options.context // size + 2}
    bar = LoadBar() if sys.stderr.isatty() and not options.quiet else None
    try:
        with _load(candidate, limits, bar) as llm:
            yield llm
    finally:
        if bar is not None:
            bar.close()
        gc.collect()  # the next model needs the memory


def _load(candidate: Candidate, limits: dict[str, Any], bar: LoadBar | None) -> LLM:
    from tinyvllm.engine.llm import LLM

    try:
        return LLM(**candidate.options, **limits, progress=bar)
    except ArgumentError as error:
        raise ArgumentError(f"--context {limits['max_model_len']}: {error}") from error


# --- options


def _check_numbers(options: argparse.Namespace) -> None:
    for flag, value, low in (("--context", options.context, MIN_CONTEXT), ("--windows", options.windows, 1)):
        if value < low:
            raise ArgumentError(f"{flag} must be at least {low}, got {value}")
    parse_size("--scratch", options.scratch)


def _rows(options: argparse.Namespace) -> tuple[Candidate, list[Candidate]]:
    """The reference, and a candidate for each of the weights with each type of KV cache: by default every format, and every type of cache.

    Their options are valid.
    """
    if options.models and options.against is None:
        raise ArgumentError("--against is missing: name the model that MODEL is compared with, usually the same one in bfloat16")
    formats = _listed("--formats", options.formats, QUANTIZATIONS)
    kv_caches = _listed("--kv-cache-dtypes", options.kv_cache_dtypes, KV_CACHE_DTYPES)
    common = engine_options(options)
    imatrix = common.pop("imatrix", None)
    own = (_label(options.against), {"model": options.against})
    weights = [(_label(model), {"model": model}) for model in options.models]
    weights += _quantized(options.against, formats, imatrix)
    if weights:
        pairs = [(one, kv_cache) for one in weights for kv_cache in kv_caches or ["auto"]]
    elif kv_caches:
        pairs = [(own, kv_cache) for kv_cache in kv_caches]
    else:
        pairs = [(one, "auto") for one in _quantized(options.against, QUANTIZATIONS, imatrix)]
        pairs += [(own, kv_cache) for kv_cache in KV_CACHE_DTYPES]
    if options.reference_dtype is None:
        pairs = [pair for pair in pairs if pair != (own, "auto") or own in weights]  # the reference itself
    reference = Candidate(own[0], "auto", {**common, **own[1], "dtype": options.reference_dtype})
    candidates = [Candidate(name, kv, {**common, **made, **_cache_options(kv)}) for (name, made), kv in pairs]
    if not candidates:
        raise ArgumentError("quality: nothing to compare with the reference: give a MODEL, --formats or --kv-cache-dtypes")
    if imatrix is not None and not any("imatrix" in one.options for one in candidates):
        raise ArgumentError(f"--imatrix {imatrix} changes no row: give --formats with a search, such as q4_k_m")
    for one in (reference, *candidates):
        resolve(**one.options)
    return reference, candidates


def _quantized(reference: str | None, formats: Sequence[str], imatrix: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Name and options of the reference in each format; once more with the importance matrix, where the format's rounding uses one."""
    rows = []
    for format in formats:
        plain = {"model": reference, "quantization": format}
        rows.append((format, plain))
        if imatrix is not None and takes_imatrix(format):
            rows.append((f"{format}, imatrix", {**plain, "imatrix": imatrix}))
    return rows


def _cache_options(kv_cache: str) -> dict[str, str]:
    return {} if kv_cache == "auto" else {"kv_cache_dtype": kv_cache}


def _listed(flag: str, text: str | None, choices: Sequence[str]) -> list[str]:
    """The names of a list with commas, each once; "all" is every choice."""
    names = list(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))
    for name in names:
        if name not in (*choices, "all"):
            raise ArgumentError(f"{flag}: expected all, or some of {', '.join(choices)}, got {name!r}{nearest(name, choices)}")
    return list(choices) if "all" in names else names


def _label(model: str | None) -> str:
    """What a model is called in the table: the last part of its path or name."""
    path = DEFAULT_MODEL if model is None else Path(model)
    return "the bundled model" if path == DEFAULT_MODEL else path.name or str(path)


def _read_text(options: argparse.Namespace) -> tuple[str, str]:
    """The text to score and its name: a file, or what was held out of the bundled model's training."""
    if options.text is None:
        if _label(options.against) != _label(None):
            raise ArgumentError(
                "--text is missing: the held-out text of the bundled model says nothing of another; give a file, such as wiki.test.raw"
            )
        from tinyvllm.demo.corpus import held_out_text

        return held_out_text(), "held out of the bundled model's training"
    path = expand_home("--text", options.text)
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_TEXT + 1)
    except OSError as error:
        raise ArgumentError(f"--text {options.text}: {error.strerror or error}") from error
    if len(raw) > MAX_TEXT:
        raise ArgumentError(f"--text {options.text}: it is longer than {MAX_TEXT >> 20} MiB; give its beginning")
    try:
        return raw.decode("utf-8-sig"), path.name
    except UnicodeDecodeError as error:
        raise FormatError(f"--text {options.text}: not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}") from error
