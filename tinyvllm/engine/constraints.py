"""Host-side constraints on the next token: grammars, banned words, logits processors, reasoning budgets, forced tokens.

An exception on behalf of one sequence ends that sequence only. The masks of grammars are computed while the device runs the forward pass.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import field
from typing import TYPE_CHECKING

from tinyvllm.engine.reasoning import Reasoning, ReasoningMarks, initial_state, model_marks
from tinyvllm.errors import RequestError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.metrics import EngineMetrics, NoMetrics
from tinyvllm.request import LogitsProcessor, SamplingParams, Sequence
from tinyvllm.sampling.bad_words import BadWords
from tinyvllm.sampling.penalties import has_penalties, needs_mask
from tinyvllm.text.detokenize import stop_automaton
from tinyvllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from tinygrad import Tensor

    from tinyvllm.sampling.grammar import CompiledGrammar, Grammar, GrammarBackend
    from tinyvllm.sampling.mask_worker import MaskWorker
    from tinyvllm.sampling.sampler import Rows, Sampler

Failures = dict[int, str]  # by sequence id
MAX_MARKS = 16  # pairs of reasoning marks that are kept
MAX_WORD_LISTS = 16  # tokenised lists of bad words that are kept


@dataclass(frozen=True)
class Accepted:
    """What follows from a token: tokens that are forced after it, and the reason (and error) if it was the last one."""

    forced: list[int] = field(default_factory=list)
    reason: str | None = None
    error: str | None = None


UNCONSTRAINED = Accepted()


@dataclass
class _Constraint:
    """The constraints of one sequence. `on_device`: the banned tokens that its mask has there, or the only one that it allows."""

    grammar: Grammar | None
    processors: tuple[LogitsProcessor, ...]
    bad_words: BadWords | None
    reasoning: Reasoning | None
    masked: bool  # the sampler has a mask for it
    may_jump: bool  # tokens that the grammar forces may be appended without a draw
    may_close: bool  # the same for the closing mark of its reasoning
    on_device: frozenset[int] | int | None = None

    @property
    def each_token(self) -> bool:
        """Whether the host must have every token before the next is drawn."""
        looks_back = self.bad_words is not None and self.bad_words.looks_back
        return looks_back or bool(self.processors) or self.grammar is not None or self.reasoning is not None

    @property
    def uses_grammar(self) -> bool:
        """Whether the grammar restricts the next token."""
        return self.grammar is not None and (self.reasoning is None or self.reasoning.uses_grammar)

    @property
    def forced(self) -> list[int]:
        """The tokens that come next without a draw."""
        if self.reasoning is not None and not self.reasoning.over:
            return self.reasoning.must.copy() if self.may_close else []
        return self.grammar.forced() if self.grammar is not None and self.may_jump else []


class TokenConstraints:
    """The constraints of one engine's sequences.

    `add` the sequences of a request, `start_masks` before a launch, `apply` after it, `accept` each token, `remove` a sequence at its end.
    """

    def __init__(self, sampler: Sampler, tokenizer: Tokenizer | None, eos_ids: Iterable[int], metrics: EngineMetrics | NoMetrics):
        self._sampler, self._tokenizer, self._eos_ids, self._metrics = sampler, tokenizer, tuple(eos_ids), metrics
        self._constraints: dict[int, _Constraint] = {}  # by sequence id
        self._backend: GrammarBackend | None = None
        self._marks: dict[tuple[str, str] | None, ReasoningMarks | None] = {}  # None: the model's own
        self._words: dict[tuple[str, ...], BadWords] = {}
        self._building = threading.Lock()
        self._worker: MaskWorker | None = None
        self._masked: list[Sequence] = []  # those whose masks are being computed

    def __len__(self) -> int:
        return len(self._constraints)

    def prepare(self, params: SamplingParams) -> None:
        """Do what takes long for a request with these parameters, so that `add` finds it done; from any thread. RequestError as `add`.

        A grammar may take half a second, the longest bad words and stop strings tens of milliseconds: in the engine's thread, all requests
        would wait for them.
        """
        self.compile(params)
        self._bad_words(params)
        if params.stop:
            stop_automaton(tuple(params.stop))

    def compile(self, params: SamplingParams) -> CompiledGrammar | None:
        """The grammar that a request wants, kept for the next request with it; from any thread. RequestError if it cannot be enforced."""
        if params.structured_outputs is None:
            return None
        if self._tokenizer is None:
            raise RequestError("structured_outputs: this engine has no tokenizer (skip_tokenizer_init), so no text can be enforced")
        start = time.perf_counter()
        compiled = self._grammars().compile(params.structured_outputs)
        if not params.structured_outputs.enable_in_reasoning and (marks := self._marks_of(params)) is not None:
            marks.scan_vocabulary()
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

    def _marks_of(self, params: SamplingParams) -> ReasoningMarks | None:
        """The reasoning marks that apply to a request; None if neither the request nor the model has any."""
        tokenizer, own = self._tokenizer, params.reasoning
        key = None if own is None else (own.opening, own.closing)
        with self._building:
            if key not in self._marks:
                if len(self._marks) >= MAX_MARKS:
                    self._marks.clear()
                pair = key or (model_marks(tokenizer) if tokenizer is not None else None)
                marks = ReasoningMarks(tokenizer, *pair, self._eos_ids) if tokenizer is not None and pair is not None else None
                self._marks[key] = marks
            return self._marks[key]

    def add(self, sequences: list[Sequence]) -> None:
        """Take in the sequences of a request before it is queued. RequestError if its constraints cannot be enforced."""
        params = sequences[0].params
        if params.stop and self._tokenizer is None:
            raise RequestError("stop: this engine has no tokenizer (skip_tokenizer_init), so it has no texts: use stop_token_ids")
        options = (params.structured_outputs, params.logits_processors, params.bad_words, params.thinking_token_budget)
        if all(option is None for option in options):
            return
        compiled, words, processors = self.compile(params), self._bad_words(params), tuple(params.logits_processors or ())
        marks, prompt = self._marks_to_enforce(params), sequences[0].prompt_token_ids
        state = "" if marks is None or self._tokenizer is None else initial_state(self._tokenizer, params, marks, prompt)
        may_jump = not params.wants_logprobs and not has_penalties(params)  # both count only tokens that were drawn
        may_close = may_jump or params.allowed_token_ids is not None  # these may lack the mark, which then cannot be drawn
        for sequence in sequences:
            constraint = _Constraint(None, processors, words, None, needs_mask(params), may_jump, may_close)
            if compiled is not None:
                from tinyvllm.sampling.grammar import Grammar

                constraint.grammar = Grammar(compiled)
            if marks is not None:
                constraint.reasoning = Reasoning(marks, state, params.thinking_token_budget, constraint.grammar)
            self._constraints[sequence.sequence_id] = constraint

    def _marks_to_enforce(self, params: SamplingParams) -> ReasoningMarks | None:
        """The marks of a request with a budget for its reasoning, or with a structure that begins after its reasoning."""
        structure, budget = params.structured_outputs, params.thinking_token_budget
        if budget is None and (structure is None or structure.enable_in_reasoning):
            return None
        marks = self._marks_of(params)
        if budget is None:
            return marks
        if self._tokenizer is None:
            raise RequestError("thinking_token_budget: this engine has no tokenizer (skip_tokenizer_init), so no marks are known")
        if structure is not None and structure.enable_in_reasoning:
            raise RequestError("thinking_token_budget: enable_in_reasoning leaves no reasoning to bound: send one of them")
        if marks is None:
            raise RequestError("thinking_token_budget: this model's chat template and vocabulary have no marks of reasoning")
        if not marks.closing_ids:
            raise RequestError(f"thinking_token_budget: the vocabulary cannot write {marks.closing.decode()!r}")
        return marks

    def _bad_words(self, params: SamplingParams) -> BadWords | None:
        if params.bad_words is None:
            return None
        if self._tokenizer is None:
            raise RequestError("bad_words: this engine has no tokenizer (skip_tokenizer_init), so no words are known")
        key = tuple(params.bad_words)
        if (words := self._words.get(key)) is None:
            words = BadWords.of(key, self._tokenizer.encode_within)
            with self._building:
                if len(self._words) >= MAX_WORD_LISTS:
                    self._words.clear()
                self._words[key] = words
        return words

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._constraints.pop(sequence.sequence_id, None)

    def need_host(self, sequences: list[Sequence]) -> bool:
        """Whether the host must have the token of one of them before its next is drawn."""
        known = self._constraints
        return bool(known) and any((c := known.get(s.sequence_id)) is not None and c.each_token for s in sequences)

    def edit_logits(self, sequences: Rows) -> bool:
        """Whether the host edits the logits of one of them, so that no kernel may choose its token."""
        known = self._constraints
        return bool(known) and any(s is not None and (c := known.get(s.sequence_id)) is not None and c.processors for s in sequences)

    def forget_device_state(self, sequence: Sequence) -> None:
        """The sampler gave the sequence a new row: the banned tokens that the device had for it are gone."""
        if (constraint := self._constraints.get(sequence.sequence_id)) is not None:
            constraint.on_device = None

    def forget_masks(self) -> None:
        """The step that started masks failed before it sent them."""
        self._masked = []
        if self._worker is not None:
            with contextlib.suppress(Exception):  # it was reported, or is no longer of interest
                self._worker.wait()

    def start_masks(self, sequences: list[Sequence]) -> None:
        """Start to compute the masks of the next draw, and send those that are known; before the forward pass is launched."""
        if not self._constraints:
            return
        jobs: list[tuple[Grammar, Sequence]] = []
        for sequence in sequences:
            constraint = self._constraints.get(sequence.sequence_id)
            if constraint is not None and constraint.grammar is not None and constraint.uses_grammar:
                jobs.append((constraint.grammar, sequence))
                constraint.on_device = None
            elif constraint is not None and constraint.masked:
                self._send_bans(sequence, constraint)
        self._masked = [sequence for _, sequence in jobs]
        if jobs:
            if self._worker is None:
                from tinyvllm.sampling.mask_worker import MaskWorker

                self._worker = MaskWorker()
            self._worker.start([(grammar, sequence.row) for grammar, sequence in jobs], self._sampler.masks.host)

    def _send_bans(self, sequence: Sequence, constraint: _Constraint) -> None:
        """Send the tokens that must not come next, or the only one that may, unless the device has them."""
        reasoning, row, masks = constraint.reasoning, sequence.row, self._sampler.masks
        if reasoning is not None and reasoning.must and not constraint.may_close:
            if constraint.on_device != reasoning.must[0]:
                masks.host[row] = 0
                masks.allow(row, reasoning.must[:1])
                self._sampler.send_masks([row])
                constraint.on_device = reasoning.must[0]
            return
        banned = frozenset() if constraint.bad_words is None else constraint.bad_words.banned(sequence.output_token_ids)
        if reasoning is not None:
            banned |= reasoning.banned
        if banned != constraint.on_device:
            masks.reset(row)
            self._sampler.send_masks([row], {row: banned})
            constraint.on_device = banned

    def apply(self, logits: Tensor, sequences: Rows) -> Failures:
        """Before the draw: send the masks and run the processors on their rows of `logits` [B, V]. The sequences that failed, and why."""
        failures: Failures = {}
        if not self._constraints:
            return failures
        if self._masked:
            self._send_masks(failures)
        for b, sequence in enumerate(sequences):
            constraint = None if sequence is None else self._constraints.get(sequence.sequence_id)
            if sequence is not None and constraint is not None and constraint.processors:
                self._process(logits, b, sequence, constraint.processors, failures)
        return failures

    def _send_masks(self, failures: Failures) -> None:
        assert self._worker is not None
        self._worker.wait()
        banned: dict[int, frozenset[int]] = {}
        for sequence in self._masked:
            constraint = self._constraints[sequence.sequence_id]
            assert constraint.grammar is not None
            if constraint.grammar.error is not None:
                failures[sequence.sequence_id] = f"structured_outputs: {constraint.grammar.error}"
            if constraint.reasoning is not None and (extra := constraint.reasoning.extra_tokens):
                self._sampler.masks.allow(sequence.row, extra)
            if constraint.bad_words is not None:
                banned[sequence.row] = constraint.bad_words.banned(sequence.output_token_ids)
        self._sampler.send_masks([sequence.row for sequence in self._masked], banned or None)
        self._masked = []

    def _process(self, logits: Tensor, b: int, sequence: Sequence, processors: tuple[LogitsProcessor, ...], failures: Failures) -> None:
        def change(row: np.ndarray) -> np.ndarray:
            for processor in processors:
                row = processor(sequence.prompt_token_ids, sequence.output_token_ids, row)
            return row

        try:
            self._sampler.change_row(logits, b, change)
        except Exception as error:  # the caller's code may raise anything
            failures[sequence.sequence_id] = f"logits processor: {type(error).__name__}: {error}"

    def accept(self, sequence: Sequence) -> Accepted:
        """Take in the last token of a sequence's output."""
        constraint = self._constraints.get(sequence.sequence_id)
        if constraint is None:
            return UNCONSTRAINED
        token, grammar, reasoning = sequence.output_token_ids[-1], constraint.grammar, constraint.reasoning
        if reasoning is not None and not reasoning.over:
            allowed = reasoning.accept(token)
        else:
            allowed = grammar is None or grammar.accept(token)
        if grammar is not None and not allowed:
            return Accepted([], "error", f"structured_outputs: {grammar.error or f'the grammar does not allow token {token}'}")
        if grammar is not None and constraint.uses_grammar and grammar.finished:
            return Accepted([], "stop")
        return Accepted(constraint.forced)

    def initial_tokens(self, sequence: Sequence) -> list[int]:
        """Forced tokens at the beginning of its output, as far as they do not end it before it has been scheduled."""
        constraint = self._constraints.get(sequence.sequence_id)
        forced = [] if constraint is None else constraint.forced
        if constraint is None or not forced:
            return []
        if self._would_stop(sequence.params, forced):
            constraint.may_close = constraint.may_close and not constraint.masked
            return []
        if constraint.uses_grammar and constraint.grammar is not None and constraint.grammar.ends_after(forced):
            return forced[:-1]
        return forced

    def _would_stop(self, params: SamplingParams, tokens: list[int]) -> bool:
        if params.stop_token_ids and not set(params.stop_token_ids).isdisjoint(tokens):
            return True
        if not params.stop or self._tokenizer is None:
            return False
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return any(stop in text for stop in params.stop)

    def close(self) -> None:
        """End the thread that computes masks."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
