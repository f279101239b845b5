"""Segments: pieces of context whose keys and values stay in the cache until they are released. Knows token ids and blocks, no text.

The key of a token depends on its position and on every token before it. So the blocks of a segment hold its tokens after one particular
context, and a prompt reuses them if it begins with the same tokens from the first one on. After any other context they are computed again
(and then are in the prefix cache, as everything that is computed). Only full blocks are held: the tokens after the last full block of a
segment are computed by each request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tinyvllm.engine.observer import EngineObserver
from tinyvllm.errors import ArgumentError, OutOfMemoryError, RequestError
from tinyvllm.request import RequestOptions, RequestOutput, SamplingParams
from tinyvllm.scheduler import Scheduler

MAX_TRIES = 3  # how often a segment is computed until all of its blocks are still cached when they are to be held
PREFILL_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)  # of the request that computes a segment


class SegmentRoomError(RequestError):
    """The segment would hold more blocks than segments may hold together."""


class Segment:
    """A piece of context. `segment + "text"` (or token ids) is the prompt that continues its context.

    token_ids    its own tokens, without those that a tokenizer puts before a text
    leading_ids  the tokens that the tokenizer puts before it where it is the first of a prompt: BOS
    after        the segment that it was registered after, or None at the beginning of a context
    cache_salt   of the requests that may use it
    held         False once it was released: prompts may still use it, but the cache may have evicted it
    end          tokens of its context, itself included
    number       counts the segments of an engine in the order of their registration
    table        blocks of its whole context, with one reference each while it is held; where blocks are freed after a window, those that
                 the query after it sees
    """

    def __init__(
        self,
        segments: Segments,
        number: int,
        token_ids: Sequence[int],
        leading_ids: Sequence[int],
        after: Segment | None,
        cache_salt: str | None,
    ):
        self.segments = segments
        self.number = number
        self.token_ids = list(token_ids)
        self.leading_ids = list(leading_ids)
        self.after = after
        self.cache_salt = cache_salt
        self.held = False
        self.table: list[int] = []
        self.end: int = len(self.token_ids) + (after.end if after else len(self.leading_ids))

    @property
    def chain(self) -> tuple[Segment, ...]:
        """The segments of its context in their order, itself the last."""
        return (*self.after.chain, self) if self.after else (self,)

    @property
    def context(self) -> list[int]:
        """Token ids from the beginning of the context to its end."""
        return concat_token_ids(self.chain)

    @property
    def num_tokens(self) -> int:
        """Its tokens, with the leading ones if it begins a context."""
        return self.end - self._start

    @property
    def blocks(self) -> int:
        """KV blocks that it holds in addition to those of the segment before it; 0 once it was released."""
        size = self.segments.block_size
        return self.segments.groups.num_seen(self.end // size, self._start // size) if self.table else 0

    @property
    def bytes(self) -> int:
        """Bytes of these blocks in all layers."""
        return self.blocks * self.segments.block_bytes

    @property
    def _start(self) -> int:
        return self.after.end if self.after else 0

    def release(self) -> None:
        """Give its blocks up; a second call does nothing.

        The blocks stay while a segment after it holds them, and then until the cache needs room.
        """
        self.segments.submit(lambda: self.segments.release(self))

    @property
    def block_aligned_ids(self) -> list[int]:
        """Token ids of its context up to the end of the last full block."""
        return self.context[: self.end // self.segments.block_size * self.segments.block_size]

    def __add__(self, more: str | Sequence[int]) -> dict[str, Any]:
        if isinstance(more, str):
            return {"segments": list(self.chain), "prompt": more}
        if isinstance(more, Sequence):
            return {"segments": list(self.chain), "prompt_token_ids": list(more)}
        return NotImplemented

    def __repr__(self) -> str:
        return f"Segment({self.num_tokens} tokens after {self._start}, {self.blocks} blocks, {self.bytes} bytes)"


def concat_token_ids(segments: Sequence[Segment]) -> list[int]:
    """The token ids of segments in a row, as each was tokenised; the first one brings its leading tokens."""
    return [*segments[0].leading_ids, *(token for segment in segments for token in segment.token_ids)] if segments else []


def output_token_ids(output: RequestOutput, index: int, after: Segment | None) -> list[int]:
    """Token ids of a finished prompt and its answer `index`, without the context of `after`, which they must begin with.

    ArgumentError if they do not, if there is no such answer or if the request still runs.
    """
    if not output.finished:
        raise ArgumentError(f"segment_of: request {output.request_id} is still running; take its last output")
    if not 0 <= index < len(output.outputs):
        raise ArgumentError(f"segment_of: request {output.request_id} has {len(output.outputs)} answers, got index {index}")
    token_ids, before = output.prompt_token_ids + output.outputs[index].token_ids, after.context if after else []
    if token_ids[: len(before)] != before:
        raise ArgumentError(f"segment_of: request {output.request_id} does not begin with {after!r}; leave after out")
    return token_ids[len(before) :]


def raise_if_failed(output: RequestOutput) -> None:
    """RequestError if the request that computes a segment has failed."""
    if (error := output.outputs[0].error) is not None:
        raise RequestError(f"segment: {error}")


def eviction_error(segment: Segment) -> OutOfMemoryError:
    """The error for a segment whose blocks were evicted MAX_TRIES times before they could be held."""
    return OutOfMemoryError(
        f"segment: running requests leave the KV cache no room for {segment.end} tokens; "
        "enlarge it (num_blocks, kv_memory) or try again later"
    )


class Segments:
    """The segments that one engine holds.

    They may hold `max_blocks` together: requests keep what one sequence of full length holds, or half of the pool if that is less.
    An engine in a thread of its own replaces `submit`, which runs a function between two steps.
    """

    def __init__(self, scheduler: Scheduler, block_bytes: int, observer: EngineObserver):
        pool = scheduler.pool
        self.block_size, self.block_bytes, self.groups = pool.block_size, block_bytes, scheduler.tables.groups
        needed = scheduler.tables.most_blocks(scheduler.limits.max_model_len)
        self.max_blocks = pool.num_blocks - min(needed, -(-pool.num_blocks // 2))
        self.submit: Callable[[Callable[[], None]], None] = lambda function: function()
        self._scheduler, self._observer = scheduler, observer
        self._numbers = itertools.count()
        self._held: list[Segment] = []

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_blocks(self) -> int:
        """Blocks that are held; a block of several segments counts once."""
        return len(self._scheduler.pinned)

    def status(self) -> dict[str, int]:
        """How many are held, and their blocks and bytes, for Engine.status."""
        return {"count": len(self), "blocks": self.num_blocks, "bytes": self.num_blocks * self.block_bytes}

    def new(self, token_ids: Sequence[int], leading_ids: Sequence[int], after: Segment | None, cache_salt: str | None) -> Segment:
        """A segment that holds nothing yet. ArgumentError if it cannot follow `after`, RequestError without a prefix cache."""
        if self._scheduler.prefix is None:
            raise RequestError("segment: segments are kept in the prefix cache, and enable_prefix_caching is False: leave it on")
        if self._scheduler.limits.recurrent:
            raise RequestError("segment: not supported where the model has recurrent states (gated DeltaNet), which no block holds")
        if not token_ids:
            raise ArgumentError("segment: a segment needs at least one token, got an empty text or list")
        if after is not None:
            if not isinstance(after, Segment) or after.segments is not self:
                raise ArgumentError(f"segment: after must be a segment of this engine, got {after!r:.80}")
            if cache_salt not in (None, after.cache_salt):
                raise ArgumentError(
                    f"segment: cache_salt must be that of the segment before it, {after.cache_salt!r}, got {cache_salt!r}: leave it out"
                )
            cache_salt = after.cache_salt
        num_tokens, max_len = (after.end if after else len(leading_ids)) + len(token_ids), self._scheduler.limits.max_model_len
        if num_tokens >= max_len:
            raise RequestError(
                f"segment: a context of {num_tokens} tokens leaves no room for an answer in max_model_len={max_len}; shorten it"
            )
        return Segment(self, next(self._numbers), token_ids, leading_ids, after, cache_salt)

    def hold(self, segment: Segment) -> bool:
        """Take a reference to every full block of its context that the query after it sees; False, and none, if the cache lacks one.

        SegmentRoomError if segments would hold too many.
        """
        prefix, pinned = self._scheduler.prefix, self._scheduler.pinned
        assert prefix is not None and not segment.held
        hashes = prefix.hash_blocks(segment.context, segment.cache_salt)
        found = prefix.match(hashes)
        table, needed = prefix.held(found), self.groups.num_seen(len(hashes))
        num_more = needed - sum(block in pinned for block in table)
        complete = self.groups.num_rows(found) == len(hashes) and len(pinned) + num_more <= self.max_blocks
        self._observer.segment_tried(segment.number, segment.context, segment.cache_salt, complete)
        if not complete:
            prefix.pool.release(table)
            self._check_room(len(pinned), num_more)
            return False
        segment.table, segment.held = table, True
        pinned.update(table)
        self._held.append(segment)
        return True

    def _check_room(self, num_held: int, num_more: int) -> None:
        if num_held + num_more > self.max_blocks:
            raise SegmentRoomError(
                f"segment: segments hold {num_held} KV blocks, this one needs {num_more} more, and requests leave them at most "
                f"{self.max_blocks} of {self._scheduler.pool.num_blocks}; release a segment, or enlarge the cache (num_blocks, kv_memory)"
            )

    def release(self, segment: Segment) -> None:
        """Give the blocks of a segment up, if it is held."""
        if not segment.held:
            return
        self._observer.segment_released(segment.number)
        pinned = self._scheduler.pinned
        pinned.subtract(segment.table)
        for block in segment.table:
            if not pinned[block]:
                del pinned[block]
        self._scheduler.pool.release(segment.table)
        segment.table, segment.held = [], False
        self._held.remove(segment)

    def check_use(self, segments: Sequence[Segment], options: RequestOptions | None) -> None:
        """ArgumentError for a prompt with segments of another engine, or of another cache_salt than that of its options."""
        salt = options.cache_salt if options else None
        for segment in segments:
            if segment.segments is not self:
                raise ArgumentError(f"{segment!r} belongs to another engine: register its text here")
            if segment.cache_salt != salt:
                raise ArgumentError(f"{segment!r} is for cache_salt {segment.cache_salt!r}, the request has {salt!r}: give both the same")
