"""What the host does between logits and tokens for those that ask: grammars, banned words, processors, forced tokens.

Whatever is raised on behalf of one sequence ends that sequence only. A grammar's masks are made while the device is at the forward pass.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinyvllm.engine.reasoning import Marks, Reasoning, begins_of, own_marks
from tinyvllm.errors import RequestError
from tinyvllm.metrics import EngineMetrics, NoMetrics
from tinyvllm.request import LogitsProcessor, SamplingParams, Sequence
from tinyvllm.sampling.bad_words import BadWords
from tinyvllm.sampling.penalties import has_penalties, needs_mask
from tinyvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from tinygrad import Tensor

    from tinyvllm.sampling.grammar import CompiledGrammar, Grammar, GrammarBackend
    from tinyvllm.sampling.mask_worker import MaskWorker
    from tinyvllm.sampling.sampler import Sampler

Failures = dict[int, str]  # by sequence id
_KEPT_MARKS = 16  # pairs of marks


@dataclass
class _Shape:
    """What one sequence has to keep to. `told` is what the device knows: the tokens that are banned, or the one that must come."""

    grammar: Grammar | None
    processors: tuple[LogitsProcessor, ...]
    bad_words: BadWords | None
    thoughts: Reasoning | None
    masked: bool  # the sampler has a mask for it
    jumps: bool  # tokens that the grammar forces may be appended undrawn
    closes: bool  # the same of marks
    told: frozenset[int] | int | None = None

    @property
    def each_token(self) -> bool:
        """Whether the host must see every token before the next is drawn."""
        back = self.bad_words is not None and self.bad_words.looks_back
        return back or bool(self.processors) or self.grammar is not None or self.thoughts is not None

    @property
    def bound(self) -> bool:
        """Whether the grammar narrows the next token."""
        return self.grammar is not None and (self.thoughts is None or self.thoughts.bound)

    @property
    def forced(self) -> list[int]:
        """The tokens that come next without being drawn."""
        if self.thoughts is not None and not self.thoughts.over:
            return self.thoughts.must.copy() if self.closes else []
        return self.grammar.forced() if self.grammar is not None and self.jumps else []


class TokenConstraints:
    """One engine's. `admit` a sequence, `begin` before a launch, `finish` behind it, `took` for each token, `leave` at its end."""

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer | None, eos_ids: Iterable[int], metrics: EngineMetrics | NoMetrics):
        self._sampler, self._tokenizer, self._eos_ids, self._metrics = sampler, tokenizer, tuple(eos_ids), metrics
        self._shapes: dict[int, _Shape] = {}  # by sequence id
        self._backend: GrammarBackend | None = None
        self._marks: dict[tuple[str, str] | None, Marks | None] = {}  # None: the model's own
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
        if not params.structured_outputs.enable_in_reasoning and (marks := self._marks_of(params)) is not None:
            marks.survey()
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

    def _marks_of(self, params: SamplingParams) -> Marks | None:
        """The marks of thoughts that count for a request; None where the model has none."""
        tokenizer, own = self._tokenizer, params.thinking
        given = None if own is None else (own.opening, own.closing)
        with self._building:
            if given not in self._marks:
                if len(self._marks) >= _KEPT_MARKS:
                    self._marks.clear()
                pair = given or (own_marks(tokenizer) if tokenizer is not None else None)
                self._marks[given] = Marks(tokenizer, *pair, self._eos_ids) if tokenizer is not None and pair is not None else None
            return self._marks[given]

    def admit(self, sequences: list[Sequence]) -> None:
        """Take in the sequences of a request before it is queued. RequestError if what it asks for cannot be."""
        params = sequences[0].params
        wanted = (params.structured_outputs, params.logits_processors, params.bad_words, params.thinking_token_budget)
        if all(one is None for one in wanted):
            return
        compiled, words, processors = self.compile(params), self._bad_words(params), tuple(params.logits_processors or ())
        marks, prompt = self._marks_to_keep(params), sequences[0].prompt_token_ids
        begins = "" if marks is None or self._tokenizer is None else begins_of(self._tokenizer, params, marks, prompt)
        jumps = not params.wants_logprobs and not has_penalties(params)  # both know only tokens that were drawn
        closes = jumps or params.allowed_token_ids is not None  # among which the mark may not be
        for sequence in sequences:
            shape = _Shape(None, processors, words, None, needs_mask(params), jumps, closes)
            if compiled is not None:
                from tinyvllm.sampling.grammar import Grammar

                shape.grammar = Grammar(compiled)
            if marks is not None:
                shape.thoughts = Reasoning(marks, begins, params.thinking_token_budget, shape.grammar)
            self._shapes[sequence.sequence_id] = shape

    def _marks_to_keep(self, params: SamplingParams) -> Marks | None:
        """The marks of a request that has a budget for its thoughts, or a structure that waits for their end."""
        structure, budget = params.structured_outputs, params.thinking_token_budget
        if budget is None and (structure is None or structure.enable_in_reasoning):
            return None
        marks = self._marks_of(params)
        if budget is None:
            return marks
        if self._tokenizer is None:
            raise RequestError("thinking_token_budget: this engine has no tokenizer (skip_tokenizer_init), so no marks are known")
        if structure is not None and structure.enable_in_reasoning:
            raise RequestError("thinking_token_budget: enable_in_reasoning leaves no thoughts to bound: send one of them")
        if marks is None:
            raise RequestError("thinking_token_budget: this model's chat template and vocabulary have no marks of thinking")
        if not marks.closing_ids:
            raise RequestError(f"thinking_token_budget: the vocabulary cannot write {marks.closing.decode()!r}")
        return marks

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
        jobs: list[tuple[Grammar, Sequence]] = []
        for sequence in sequences:
            shape = self._shapes.get(sequence.sequence_id)
            if shape is not None and shape.grammar is not None and shape.bound:
                jobs.append((shape.grammar, sequence))
                shape.told = None
            elif shape is not None and shape.masked:
                self._narrow(sequence, shape)
        self._masked = [sequence for _, sequence in jobs]
        if jobs:
            if self._worker is None:
                from tinyvllm.sampling.mask_worker import MaskWorker

                self._worker = MaskWorker()
            self._worker.start([(grammar, sequence.row) for grammar, sequence in jobs], self._sampler.masks.host)

    def _narrow(self, sequence: Sequence, shape: _Shape) -> None:
        """Tell the device, if it does not know, what must not come next, or the one token that must."""
        thoughts, row, masks = shape.thoughts, sequence.row, self._sampler.masks
        if thoughts is not None and thoughts.must and not shape.closes:
            if shape.told != thoughts.must[0]:
                masks.host[row] = 0
                masks.allow(row, thoughts.must[:1])
                self._sampler.send_masks([row])
                shape.told = thoughts.must[0]
            return
        banned = frozenset() if shape.bad_words is None else shape.bad_words.banned(sequence.output_token_ids)
        if thoughts is not None:
            banned |= thoughts.banned
        if banned != shape.told:
            masks.reset(row)
            self._sampler.send_masks([row], {row: banned})
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
            if shape.thoughts is not None and (beside := shape.thoughts.beside):
                self._sampler.masks.allow(sequence.row, beside)
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
        token, grammar, thoughts = sequence.output_token_ids[-1], shape.grammar, shape.thoughts
        if thoughts is not None and not thoughts.over:
            allowed = thoughts.took(token)
        else:
            allowed = grammar is None or grammar.accept(token)
        if grammar is not None and not allowed:
            return [], "error", f"structured_outputs: {grammar.error or f'token {token} is not what the grammar allows'}"
        if grammar is not None and shape.bound and grammar.finished:
            return [], "stop", None
        return shape.forced, None, None

    def begun(self, sequence: Sequence) -> list[int]:
        """Tokens that its output begins with, undrawn: so many that they do not end it before it has been scheduled."""
        shape = self._shapes.get(sequence.sequence_id)
        forced = [] if shape is None else shape.forced
        if shape is None or not forced:
            return []
        if self._ends(sequence.params, forced):
            shape.closes = shape.closes and not shape.masked
            return []
        return forced[:-1] if shape.bound and shape.grammar is not None and shape.grammar.ends_behind(forced) else forced

    def _ends(self, params: SamplingParams, tokens: list[int]) -> bool:
        if params.stop_token_ids and not set(params.stop_token_ids).isdisjoint(tokens):
            return True
        if not params.stop or self._tokenizer is None:
            return False
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return any(stop in text for stop in params.stop)

    def close(self) -> None:
        """End the thread that makes masks."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
