"""What the host does between logits and tokens for those that ask: grammars, banned words, processors, forced tokens.

Whatever is raised on behalf of one sequence ends that sequence only. A grammar's masks are made while the device is at the forward pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyvllm.engine.thinking import ThinkingBudget
from tinyvllm.errors import RequestError
from tinyvllm.metrics import EngineMetrics, NoMetrics
from tinyvllm.request import LogitsProcessor, SamplingParams, Sequence
from tinyvllm.sampling.bad_words import BadWords
from tinyvllm.sampling.penalties import penalizes
from tinyvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from tinygrad import Tensor

    from tinyvllm.sampling.grammar import CompiledGrammar, Grammar, GrammarBackend
    from tinyvllm.sampling.mask_worker import MaskWorker
    from tinyvllm.sampling.sampler import Sampler

Failures = dict[int, str]  # by sequence id


@dataclass
class _Shape:
    """What one sequence has to keep to. `told` is what the device knows of its banned words."""

    grammar: Grammar | None
    processors: tuple[LogitsProcessor, ...]
    bad_words: BadWords | None
    thinking: ThinkingBudget | None
    jumps: bool  # forced tokens may be appended undrawn
    told: frozenset[int] | None = None

    @property
    def each_token(self) -> bool:
        """Whether the host must see every token before the next is drawn."""
        back = self.bad_words is not None and self.bad_words.looks_back
        return back or bool(self.processors) or self.grammar is not None or self.thinking is not None


class Shaping:
    """One engine's. `admit` a sequence, `begin` before a launch, `finish` behind it, `took` for each token, `leave` at its end."""

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer | None, eos_ids: Iterable[int], metrics: EngineMetrics | NoMetrics):
        self._sampler, self._tokenizer, self._eos_ids, self._metrics = sampler, tokenizer, tuple(eos_ids), metrics
        self._shapes: dict[int, _Shape] = {}  # by sequence id
        self._backend: GrammarBackend | None = None
        self._building = threading.Lock()
        self._worker: MaskWorker | None = None
        self._masked: list[Sequence] = []  # those whose masks are being made

    def compile(self, params: SamplingParams) -> CompiledGrammar | None:
        """The grammar that a request asks for, kept for the next that does; from any thread. RequestError if it cannot be."""
        if params.structured_outputs is None:
            return None
        if self._tokenizer is None:
            raise RequestError("structured_outputs: this engine has no tokenizer (skip_tokenizer_init), so no text can be enforced")
        start = time.perf_counter()
        compiled = self._grammars().compile(params.structured_outputs)
        self._metrics.grammar_compiled(time.perf_counter() - start)
        return compiled

    def _grammars(self) -> GrammarBackend:
        with self._building:
            if self._backend is None:
                from tinyvllm.sampling.grammar import GrammarBackend  # llguidance comes with it

                tokenizer = self._tokenizer
                assert tokenizer is not None
                tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
                V = self._sampler.vocab_size
                self._backend = GrammarBackend(tokens, tokenizer.special_ids, self._eos_ids, V, tokenizer.encode_within)
            return self._backend

    def admit(self, sequences: list[Sequence], prompt: str | None) -> None:
        """Take in the sequences of a request before it is queued. RequestError if what it asks for cannot be."""
        params = sequences[0].params
        wanted = (params.structured_outputs, params.logits_processors, params.bad_words, params.thinking_token_budget)
        if all(one is None for one in wanted):
            return
        compiled, words, processors = self.compile(params), self._bad_words(params), tuple(params.logits_processors or ())
        jumps = not params.wants_logprobs and not penalizes(params)  # both know only tokens that were drawn
        for sequence in sequences:
            thinking = None
            if params.thinking_token_budget is not None:
                thinking = ThinkingBudget(params.thinking_token_budget, self._tokenizer, prompt, sequence.prompt_token_ids)
            shape = _Shape(None, processors, words, thinking, jumps)
            if compiled is not None:
                from tinyvllm.sampling.grammar import Grammar

                shape.grammar = Grammar(compiled)
            self._shapes[sequence.sequence_id] = shape

    def _bad_words(self, params: SamplingParams) -> BadWords | None:
        if params.bad_words is None:
            return None
        if self._tokenizer is None:
            raise RequestError("bad_words: this engine has no tokenizer (skip_tokenizer_init), so no words are known")
        return BadWords.of(params.bad_words, self._tokenizer.encode_within)

    def leave(self, sequence: Sequence) -> None:
        """It is over."""
        self._shapes.pop(sequence.sequence_id, None)

    def looks_at_each(self, sequences: list[Sequence]) -> bool:
        """Whether one of them must be looked at before its next token is drawn."""
        shapes = self._shapes
        return bool(shapes) and any((shape := shapes.get(s.sequence_id)) is not None and shape.each_token for s in sequences)

    def processes(self, sequences: list[Sequence]) -> bool:
        """Whether logits of one of them go through the host, so that no kernel's own choice of a token counts."""
        return bool(self._shapes) and any((shape := self._shapes.get(s.sequence_id)) is not None and shape.processors for s in sequences)

    def joined(self, sequence: Sequence) -> None:
        """The sampler has taken it in: what it told the device of banned words is gone."""
        if (shape := self._shapes.get(sequence.sequence_id)) is not None:
            shape.told = None

    def begin(self, sequences: list[Sequence]) -> None:
        """Start the masks of the next draw, and send those that are known; before the forward pass is launched."""
        if not self._shapes:
            return
        for sequence in sequences:
            shape = self._shapes.get(sequence.sequence_id)
            if shape is not None and shape.bad_words is not None and shape.grammar is None:
                self._ban(sequence, shape, shape.bad_words)
        found = [(self._shapes[s.sequence_id].grammar, s) for s in sequences if s.sequence_id in self._shapes]
        jobs = [(grammar, sequence) for grammar, sequence in found if grammar is not None]
        self._masked = [sequence for _, sequence in jobs]
        if jobs:
            if self._worker is None:
                from tinyvllm.sampling.mask_worker import MaskWorker

                self._worker = MaskWorker()
            self._worker.start([(grammar, sequence.row) for grammar, sequence in jobs], self._sampler.masks.host)

    def _ban(self, sequence: Sequence, shape: _Shape, words: BadWords) -> None:
        banned = words.banned(sequence.output_token_ids)
        if banned != shape.told:
            self._sampler.masks.reset(sequence.row)
            self._sampler.send_masks([sequence.row], {sequence.row: banned})
            shape.told = banned

    def finish(self, logits: Tensor, sequences: list[Sequence]) -> Failures:
        """Before the draw: send the masks, run the processors on their rows of `logits` [B, V]. Whom it failed for, and why."""
        failures: Failures = {}
        if not self._shapes:
            return failures
        if self._masked:
            self._send_masks(failures)
        for b, sequence in enumerate(sequences):
            shape = self._shapes.get(sequence.sequence_id)
            if shape is not None and shape.processors:
                self._process(logits, b, sequence, shape.processors, failures)
        return failures

    def _send_masks(self, failures: Failures) -> None:
        assert self._worker is not None
        self._worker.wait()
        banned: dict[int, frozenset[int]] = {}
        for sequence in self._masked:
            shape = self._shapes[sequence.sequence_id]
            assert shape.grammar is not None
            if shape.grammar.error is not None:
                failures[sequence.sequence_id] = f"structured_outputs: {shape.grammar.error}"
            if shape.bad_words is not None:
                banned[sequence.row] = shape.bad_words.banned(sequence.output_token_ids)
        self._sampler.send_masks([sequence.row for sequence in self._masked], banned or None)
        self._masked = []

    def _process(self, logits: Tensor, b: int, sequence: Sequence, processors: tuple[LogitsProcessor, ...], failures: Failures) -> None:
        def change(row: np.ndarray) -> np.ndarray:
            for processor in processors:
                row = processor(sequence.prompt_token_ids, sequence.output_token_ids, row)
            return row

        try:
            self._sampler.change_row(logits, b, change)
        except Exception as error:  # somebody else's code
            failures[sequence.sequence_id] = f"logits processor: {type(error).__name__}: {error}"

    def took(self, sequence: Sequence) -> tuple[list[int], str | None, str | None]:
        """Its output has one token more: the tokens that must follow, and the reason and the error if it was the last."""
        shape = self._shapes.get(sequence.sequence_id)
        if shape is None:
            return [], None, None
        token = sequence.output_token_ids[-1]
        if shape.grammar is not None:
            if not shape.grammar.accept(token):
                reason = shape.grammar.error or f"token {token} is not what the grammar allows"
                return [], "error", f"structured_outputs: {reason}"
            if shape.grammar.finished:
                return [], "stop", None
            return (shape.grammar.forced() if shape.jumps else []), None, None
        return (shape.thinking.took(sequence.output_token_ids) if shape.thinking is not None else []), None, None

    def begun(self, sequence: Sequence) -> list[int]:
        """Tokens that its output must begin with."""
        shape = self._shapes.get(sequence.sequence_id)
        if shape is None:
            return []
        if shape.grammar is not None:
            return shape.grammar.forced() if shape.jumps else []
        return shape.thinking.begun() if shape.thinking is not None else []

    def close(self) -> None:
        """End the thread that makes masks."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
