"""`kv_events_config`: an observer that publishes what the prefix cache stores and removes, a batch a step."""

from __future__ import annotations

import time

from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.engine.observer import EngineObserver
from tinyvllm.kv_events.config import KVEventsConfig
from tinyvllm.kv_events.events import AllBlocksCleared, BlockStored, Event, EventCollector
from tinyvllm.kv_events.publisher import Publisher

MAX_BATCH_BLOCKS = 4096  # of the stored blocks in one batch; a chain is not split
RESTATE_SECONDS = 10.0  # between two statements of the whole cache that subscribers ask for


class CacheEvents(EngineObserver):
    """Publishes the changes of one engine's prefix cache.

    The first batch clears what subscribers know of an earlier process and has the blocks that came from disk. After a loss, and when a
    subscriber asks for batches that are no longer kept, the whole cache is stated again in the same way.
    """

    def __init__(self, config: KVEventsConfig, block_size: int, rank: int = 0) -> None:
        """Opens the sockets: ArgumentError if that fails. `rank` is the number of the replica, which batches have."""
        self.publisher = Publisher(config, block_size, rank)
        self._collector = EventCollector()
        self._cache: PrefixCache | None = None
        self._restates = False
        self._restated = -RESTATE_SECONDS

    def cache_opened(self, cache: PrefixCache | None) -> None:
        assert cache is not None, "kv_events_config without a prefix cache"
        self._cache = cache
        cache.listener = self._collector
        self._restates = True
        self.step_finished()

    def step_finished(self) -> None:
        if self.publisher.wants_all and time.monotonic() - self._restated >= RESTATE_SECONDS:
            self.publisher.wants_all, self._restates = False, True
            self._restated = time.monotonic()
        events = self._collector.take()
        if self._restates:
            if not self.publisher.has_room:
                return
            events = self._whole_cache()
            self._restates = False
        for batch in batches_of(events):
            if not self.publisher.publish(batch):
                self._restates = True  # once the queue has room again

    def engine_closed(self) -> None:
        if self._cache is not None:
            self._cache.listener = None
            self._cache = None
            self.publisher.publish([AllBlocksCleared()])
        self.publisher.close()

    def _whole_cache(self) -> list[Event]:
        assert self._cache is not None
        collector = EventCollector()
        collector.cleared()
        self._cache.describe(collector)
        return collector.take()


def batches_of(events: list[Event]) -> list[list[Event]]:
    """The events in order, in batches of about MAX_BATCH_BLOCKS stored blocks; none for no events."""
    batches: list[list[Event]] = []
    blocks = MAX_BATCH_BLOCKS
    for event in events:
        if blocks >= MAX_BATCH_BLOCKS:
            batches.append([])
            blocks = 0
        batches[-1].append(event)
        blocks += len(event.hashes) if isinstance(event, BlockStored) else 0
    return batches
