"""Drafts by a second, smaller model with the same vocabulary: method "draft_model".

Each draft is drawn as the target draws: by the request's seed and position, with its temperature and filters, so that both take the same
noise and agree wherever their distributions mostly do (Daliri et al. 2024, arXiv:2408.07978: at least (1 - TV) / (1 + TV) of the time).
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence as Row
from typing import TYPE_CHECKING

from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.runner.drawing import draw_tokens
from tinyvllm.runner.warmup import capture_step
from tinyvllm.sampling.sampler import Sampler
from tinyvllm.scheduler import Schedule, Scheduled
from tinyvllm.speculate.protocol import Draft, DraftRequest

if TYPE_CHECKING:
    from tinygrad import Tensor

    from tinyvllm.runner.prepare import Shape
    from tinyvllm.runner.runner import Runner

MAX_ROWS = 4  # missing tokens of a sequence that are computed as rows of a decode; more are a chunk


class DraftModelDrafter:
    """Runs its own model over copies of the sequences, with its own blocks: `runner` for the model, at most `max_num_seqs` copies.

    A copy has the target's tokens, and after them its last drafts. When the target's tokens are known, what they have in common is kept
    and the rest is overwritten. A sequence whose tokens are not computed yet gets them, `max_tokens` of all sequences a call, and no drafts
    meanwhile. One without free blocks, or at the end of the draft model's context, gets none.

    Its prefix cache has the blocks of what copies have computed, prompts and confirmed output, for sequences of the same tenant: the next
    turn of a conversation computes what is new.
    """

    method = "draft_model"
    looks_up = False

    def __init__(self, runner: Runner, max_num_seqs: int, max_tokens: int = 512):
        self.runner, self.max_tokens = runner, max_tokens
        runner.rounds_in_background = False  # `propose` waits for all of them
        self._sampler = Sampler(runner.config.vocab_size, max_num_seqs, runner.device)
        self._blocks = BlockPool(runner.pool.num_blocks, runner.pool.block_size)
        self._prefix = PrefixCache(self._blocks, secrets.token_bytes(32))
        self._rows = list(range(max_num_seqs - 1, -1, -1))  # free ones
        self._copies: OrderedDict[int, Sequence] = OrderedDict()  # by the target's sequence id; the least recently used first
        self._tenants: dict[int, str] = {}
        self._confirmed: dict[int, int] = {}  # how many of a copy's output tokens are the target's

    @property
    def num_free_blocks(self) -> int:
        """Blocks of the draft model's cache that no sequence holds, those of the prefix cache included."""
        return self._blocks.num_free

    def propose(self, requests: Row[DraftRequest]) -> list[Draft]:
        """Drafts without confidences, of all sequences in the same passes."""
        wanted = {request.sequence.sequence_id for request in requests}
        count = max((request.max_drafts for request in requests), default=0)
        copies = [self._prepare_copy(request, count, wanted) for request in requests]
        late = [copy for copy in copies if copy is not None and len(copy) - copy.num_computed > MAX_ROWS]
        self._catch_up(late)
        ready = [copy for copy in copies if copy is not None and len(copy) - copy.num_computed <= MAX_ROWS]
        drafts = self._draw(ready, count) if ready else {}
        return [Draft(drafts.get(r.sequence.sequence_id, [])[: r.max_drafts]) for r in requests]

    def observe(self, sequence: Sequence, num_new: int) -> None:
        """Nothing: `propose` compares the copy with the sequence."""

    def forget(self, sequence: Sequence) -> None:
        """Free the copy's blocks; the prefix cache keeps what is full."""
        copy = self._copies.get(sequence.sequence_id)
        if copy is not None:
            self._follow(copy, sequence)
            self._drop(sequence.sequence_id)

    def capture(self, shape: Shape, states: Tensor | None) -> None:
        """The draft model's own step of this shape: one decode, or a chunk of a prompt."""
        step = self.runner.padded(shape)
        if step is not None:
            capture_step(self.runner, self._sampler, step)

    def drop_captures(self) -> None:
        self.runner.drop_slower_captures()

    # ---- copies ----

    def _prepare_copy(self, request: DraftRequest, count: int, wanted: set[int]) -> Sequence | None:
        """The sequence's copy with its tokens, and blocks for `count` drafts; None if there is no room."""
        sequence = request.sequence
        if len(sequence) + count > self.runner.max_model_len:
            return None
        copy = self._copies.get(sequence.sequence_id)
        if copy is None:
            if not self._rows and not self._drop_idle(wanted):
                return None
            copy = self._add(request)
        self._copies.move_to_end(sequence.sequence_id)
        self._follow(copy, sequence)
        missing = self._blocks.blocks_for(len(copy) + count) - len(copy.block_table)
        while missing > self._blocks.num_free:
            if not self._drop_idle(wanted):
                return None
        if missing > 0:
            copy.block_table += self._blocks.allocate(missing)
        return copy

    def _add(self, request: DraftRequest) -> Sequence:
        """A new copy, with the blocks of its prompt that the prefix cache has."""
        sequence, prompt = request.sequence, self._known(request.sequence.prompt_token_ids)
        copy = Sequence(sequence.sequence_id, sequence.request_id, prompt, _draft_params(sequence.params))
        self._tenants[sequence.sequence_id] = request.tenant
        self._hash(copy, len(prompt) - 1)  # the last token is computed in any case
        copy.block_table = self._prefix.match(copy.block_hashes)
        copy.num_published = len(copy.block_table)
        copy.num_computed = copy.num_published * self._blocks.block_size
        copy.row = self._rows.pop()
        self._sampler.add(copy, ())
        self._copies[sequence.sequence_id], self._confirmed[sequence.sequence_id] = copy, 0
        return copy

    def _follow(self, copy: Sequence, sequence: Sequence) -> None:
        """Give the copy the sequence's tokens. Keys and values of drafts that were accepted stay."""
        ours, output = copy.output_token_ids, sequence.output_token_ids
        same = self._confirmed[sequence.sequence_id]
        while same < min(len(ours), len(output)) and ours[same] == output[same]:
            same += 1
        ours[same:] = self._known(output[same:])
        self._confirmed[sequence.sequence_id] = len(ours)
        # the last token is computed again if need be, for its logits
        copy.num_computed = min(copy.num_computed, len(copy.prompt_token_ids) + same, len(copy) - 1)

    def _known(self, tokens: list[int]) -> list[int]:
        """The tokens, with 0 for those beyond the draft model's vocabulary: models of one family pad theirs differently."""
        V = self.runner.config.vocab_size
        return tokens if max(tokens, default=0) < V else [token if token < V else 0 for token in tokens]

    def _drop_idle(self, wanted: set[int]) -> bool:
        """Drop the copy that was not used for longest, none of `wanted`; False if there is none."""
        idle = next((number for number in self._copies if number not in wanted), None)
        if idle is None:
            return False
        self._drop(idle)
        return True

    def _hash(self, copy: Sequence, num_tokens: int) -> int:
        """Hash the full blocks of its first tokens; their number."""
        blocks = num_tokens // self._blocks.block_size
        self._prefix.extend(copy.block_hashes, copy.token_ids, blocks, self._tenants[copy.sequence_id])
        return blocks

    def _publish(self, copy: Sequence) -> None:
        """Let other sequences find the copy's full blocks of tokens that are the target's: those are not written any more."""
        confirmed = len(copy.prompt_token_ids) + self._confirmed[copy.sequence_id]
        blocks = self._hash(copy, min(copy.num_computed, confirmed))
        tokens, salt = copy.token_ids, self._tenants[copy.sequence_id]
        self._prefix.publish(copy.block_hashes, copy.block_table, copy.num_published, blocks, tokens, salt)
        copy.num_published = max(copy.num_published, blocks)

    def _drop(self, number: int) -> None:
        self._publish(self._copies[number])
        copy = self._copies.pop(number)
        del self._confirmed[number], self._tenants[number]
        self._blocks.release(copy.block_table)
        self._sampler.remove(copy.row)
        self._rows.append(copy.row)

    # ---- passes ----

    def _catch_up(self, late: list[Sequence]) -> None:
        """Compute missing tokens, all but the last of each, in one step of `max_tokens` tokens at most."""
        room, entries = self.max_tokens, []
        for copy in late:
            if count := min(room, len(copy) - 1 - copy.num_computed):
                entries.append(Scheduled(copy, copy.num_computed, count, 0))
                room -= count
        if entries:
            self.runner.launch(self.runner.prepare(Schedule(entries)))
            for entry in entries:
                entry.sequence.num_computed += entry.num_tokens
                self._publish(entry.sequence)

    def _draw(self, copies: list[Sequence], count: int) -> dict[int, list[int]]:
        """`count` drafts of each copy, which follow its tokens in it, too."""
        lengths = {copy.sequence_id: len(copy) for copy in copies}
        if all(copy.num_computed == len(copy) - 1 for copy in copies):
            self._run(copies, count)
        else:  # where all drafts were accepted, the last of them is not computed yet
            self._run_missing(copies)
            if count > 1:
                self._run(copies, count - 1)
        return {copy.sequence_id: copy.token_ids(lengths[copy.sequence_id], len(copy)) for copy in copies}

    def _run_missing(self, copies: list[Sequence]) -> None:
        """Compute the missing tokens of each, and draw one."""
        inputs = self.runner.prepare(Schedule([_missing(copy) for copy in copies]))
        entries = inputs.logit_rows
        last = [r + 1 == len(entries) or entries[r + 1] is not entry for r, entry in enumerate(entries)]
        rows = [entry.sequence if is_last else None for entry, is_last in zip(entries, last, strict=True)]
        flags = self._sampler.prepare(rows, inputs.num_logits)
        logits = self.runner.launch(inputs)
        (tokens,) = draw_tokens(self.runner, self._sampler, inputs, logits, flags, 1, use_best=True, advance=False)
        for copy, token in zip(rows, tokens[0].tolist(), strict=False):
            if copy is not None:
                copy.num_computed = len(copy)
                copy.output_token_ids.append(max(0, token))  # -1: its logits are no numbers

    def _run(self, copies: list[Sequence], count: int) -> None:
        """Draw `count` tokens of each from its last one; the device runs the passes in a row."""
        inputs = self.runner.prepare(Schedule([Scheduled(copy, len(copy) - 1, 1, 1) for copy in copies]))
        rows = [entry.sequence for entry in inputs.logit_rows]
        flags = self._sampler.prepare(rows, inputs.num_logits)
        logits = self.runner.launch(inputs)
        for tokens in draw_tokens(self.runner, self._sampler, inputs, logits, flags, count, use_best=True, advance=True):
            for b, copy in enumerate(rows):
                copy.output_token_ids += tokens[:, b].tolist()
        for copy in rows:
            copy.num_computed = len(copy) - 1
        inputs.plan.inputs.forget_advanced()  # the device would continue from its last draft, which may be rejected


def _missing(copy: Sequence) -> Scheduled:
    """Its tokens that are not computed, as rows of one token each."""
    start, count = copy.num_computed, len(copy) - copy.num_computed
    return Scheduled(copy, start, count, count, tuple(copy.token_ids(start + 1, len(copy))))


def _draft_params(params: SamplingParams) -> SamplingParams:
    """What a draft is drawn with: all that does not change with the tokens. Penalties would have to be taken back with rejected drafts."""
    return SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        logit_bias=params.logit_bias,
    )
