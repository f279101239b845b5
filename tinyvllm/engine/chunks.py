"""Chunks: pieces of context whose keys and values stay in the cache until they are released. Knows token ids and blocks, no text.

A key depends on its position and on every token before it. So a chunk's blocks stand for its tokens behind one particular beginning, and
they are reused where a prompt begins with the same tokens from the first to there; behind anything else they are computed anew (and lie in
the prefix cache then, as whatever is computed does). Only full blocks are kept: what is behind a chunk's last one is computed each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tinyvllm.engine.tools.record import Recorder
from tinyvllm.errors import ArgumentError, OutOfMemoryError, RequestError
from tinyvllm.request import RequestOptions, RequestOutput, SamplingParams
from tinyvllm.scheduler import Scheduler

TRIES = 3  # to have a chunk computed, and still cached when it is to be held
COMPUTE = SamplingParams(temperature=0.0, max_tokens=1)  # the request that computes one


class ChunkRoomError(RequestError):
    """More blocks would be held than may be, so that requests have room."""


class Chunk:
    """A piece of context. `chunk + "text"` (or token ids) is the prompt that goes on from where it was registered.

    token_ids   its own tokens, without those that a tokenizer puts before a text
    after       the chunk that it was registered behind, or None at the beginning
    cache_salt  of the requests that it is for
    held        False once it was released: it may still be used in prompts, but the cache may have forgotten it
    """

    def __init__(
        self, chunks: Chunks, number: int, token_ids: Sequence[int], head: Sequence[int], after: Chunk | None, cache_salt: str | None
    ):
        self.number = number  # among those of its engine, in the order in which they were made
        self.token_ids = list(token_ids)
        self.head = list(head)  # what its text begins with where it stands first: BOS
        self.after = after
        self.cache_salt = cache_salt
        self.held = False
        self.table: list[int] = []  # blocks of the whole context, with a reference each while it is held
        self.end: int = after.end + len(self.token_ids) if after else len(self.head) + len(self.token_ids)  # tokens up to here
        self.chunks = chunks

    @property
    def chain(self) -> tuple[Chunk, ...]:
        """Itself and what it stands behind, the first first."""
        return (*self.after.chain, self) if self.after else (self,)

    @property
    def context(self) -> list[int]:
        """Token ids from the beginning of the context to its end."""
        return joined(self.chain)

    @property
    def num_tokens(self) -> int:
        """Its tokens, with what is put before them where it stands at the beginning."""
        return self.end - self._start

    @property
    def blocks(self) -> int:
        """KV blocks that it holds beyond those of the chunk before it; 0 once it was released."""
        return len(self.table) - self._start // self.chunks.block_size if self.held else 0

    @property
    def bytes(self) -> int:
        """Of these blocks in all layers."""
        return self.blocks * self.chunks.block_bytes

    @property
    def _start(self) -> int:
        return self.after.end if self.after else 0

    def release(self) -> None:
        """Give its blocks up. They stay as long as a chunk behind it holds them, and then until the cache needs room. Twice is once."""
        if self.chunks.post is None:
            self.chunks.release(self)
        else:
            self.chunks.post(lambda: self.chunks.release(self))

    @property
    def full_blocks(self) -> list[int]:
        """The token ids of its context as far as blocks of it can be held."""
        return self.context[: self.end // self.chunks.block_size * self.chunks.block_size]

    def __add__(self, more: str | Sequence[int]) -> dict[str, Any]:
        if isinstance(more, str):
            return {"chunks": list(self.chain), "prompt": more}
        if isinstance(more, Sequence):
            return {"chunks": list(self.chain), "prompt_token_ids": list(more)}
        return NotImplemented

    def __repr__(self) -> str:
        return f"Chunk({self.num_tokens} tokens behind {self._start}, {self.blocks} blocks, {self.bytes} bytes)"


def joined(chunks: Sequence[Chunk]) -> list[int]:
    """The token ids of chunks one behind the other, as each was tokenised; the first begins as its text would alone."""
    return [*chunks[0].head, *(token for chunk in chunks for token in chunk.token_ids)] if chunks else []


def kept_of(output: RequestOutput, index: int, after: Chunk | None) -> list[int]:
    """Token ids of a finished prompt and its answer `index`, or what of them stands behind `after`. ArgumentError if they do not."""
    if not output.finished:
        raise ArgumentError(f"chunk_of: request {output.request_id} is still running; take its last output")
    if not 0 <= index < len(output.outputs):
        raise ArgumentError(f"chunk_of: index {index}, request {output.request_id} has {len(output.outputs)} answers")
    token_ids, before = output.prompt_token_ids + output.outputs[index].token_ids, after.context if after else []
    if token_ids[: len(before)] != before:
        raise ArgumentError(f"chunk_of: request {output.request_id} does not begin with {after!r}; leave after out")
    return token_ids[len(before) :]


def refuse_broken(output: RequestOutput) -> None:
    """RequestError where the request that was to compute a chunk has failed."""
    if (error := output.outputs[0].error) is not None:
        raise RequestError(f"chunk: {error}")


def no_room(chunk: Chunk) -> OutOfMemoryError:
    return OutOfMemoryError(f"chunk: what runs beside it leaves the KV cache no room for {chunk.end} tokens; enlarge it or try again later")


class Chunks:
    """Those of one engine. `most` blocks may be held: for what is not a chunk the blocks of one sequence of full length stay, or half."""

    def __init__(self, scheduler: Scheduler, block_bytes: int, recorder: Recorder | None = None):
        pool = scheduler.pool
        self.block_size, self.block_bytes = pool.block_size, block_bytes
        self.most = pool.num_blocks - min(pool.blocks_for(scheduler.limits.max_model_len), -(-pool.num_blocks // 2))
        self.post: Callable[[Callable[[], None]], None] | None = None  # has something done in the engine's thread, if it has its own
        self._scheduler, self._recorder = scheduler, recorder
        self._numbers = itertools.count()
        self._held: list[Chunk] = []

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_blocks(self) -> int:
        """Blocks that are held, those of several chunks once."""
        return len(self._scheduler.pinned)

    def status(self) -> dict[str, int]:
        return {"count": len(self), "blocks": self.num_blocks, "bytes": self.num_blocks * self.block_bytes}

    def new(self, token_ids: Sequence[int], head: Sequence[int], after: Chunk | None, cache_salt: str | None) -> Chunk:
        """A chunk that holds nothing yet. ArgumentError where it cannot stand behind `after`, RequestError without a prefix cache."""
        if self._scheduler.prefix is None:
            raise RequestError("chunk: chunks are kept in the prefix cache, and enable_prefix_caching is False: leave it on")
        if not token_ids:
            raise ArgumentError("chunk: a chunk needs at least one token, got an empty text or list")
        if after is not None:
            if not isinstance(after, Chunk) or after.chunks is not self:
                raise ArgumentError(f"chunk: after must be a chunk of this engine, got {after!r:.80}")
            if cache_salt not in (None, after.cache_salt):
                raise ArgumentError(f"chunk: cache_salt {cache_salt!r} cannot stand behind a chunk of {after.cache_salt!r}: leave it out")
            cache_salt = after.cache_salt
        tokens, longest = (after.end if after else len(head)) + len(token_ids), self._scheduler.limits.max_model_len
        if tokens >= longest:
            raise RequestError(f"chunk: a context of {tokens} tokens leaves no room for an answer in max_model_len={longest}; shorten it")
        return Chunk(self, next(self._numbers), token_ids, head, after, cache_salt)

    def hold(self, chunk: Chunk) -> bool:
        """Take references to all full blocks of its context; False, and none, where the cache lacks one. ChunkRoomError for too many."""
        prefix, pinned = self._scheduler.prefix, self._scheduler.pinned
        assert prefix is not None and not chunk.held
        hashes = prefix.hash_blocks(chunk.context, chunk.cache_salt)
        table = prefix.match(hashes)
        more = len(hashes) - sum(block in pinned for block in table)
        whole = len(table) == len(hashes) and len(pinned) + more <= self.most
        if self._recorder is not None:
            self._recorder.tried(chunk.number, chunk.context, chunk.cache_salt, whole)
        if not whole:
            prefix.pool.release(table)
            self._refuse_beyond(len(pinned), more)
            return False
        chunk.table, chunk.held = table, True
        pinned.update(table)
        self._held.append(chunk)
        return True

    def _refuse_beyond(self, held: int, more: int) -> None:
        if held + more > self.most:
            raise ChunkRoomError(
                f"chunk: {more} more KV blocks would be held beside {held}, and at most {self.most} of {self._scheduler.pool.num_blocks} "
                "may be, so that requests have room; release a chunk, or enlarge the cache (num_blocks, kv_memory)"
            )

    def release(self, chunk: Chunk) -> None:
        if not chunk.held:
            return
        if self._recorder is not None:
            self._recorder.released(chunk.number)
        pinned = self._scheduler.pinned
        pinned.subtract(chunk.table)
        for block in chunk.table:
            if not pinned[block]:
                del pinned[block]
        self._scheduler.pool.release(chunk.table)
        chunk.table, chunk.held = [], False
        self._held.remove(chunk)

    def refuse_foreign(self, chunks: Sequence[Chunk], options: RequestOptions | None) -> None:
        """ArgumentError for a prompt of chunks of another engine, or of another salt than its terms."""
        salt = options.cache_salt if options else None
        for chunk in chunks:
            if chunk.chunks is not self:
                raise ArgumentError(f"{chunk!r} belongs to another engine: register its text here")
            if chunk.cache_salt != salt:
                raise ArgumentError(f"{chunk!r} is for cache_salt {chunk.cache_salt!r}, the request's is {salt!r}: give both the same")
