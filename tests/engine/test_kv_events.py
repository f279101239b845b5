"""kv_events_config: the index of a subscriber is the engine's prefix cache, through evictions, preemption, a clear and losses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cache.test_prefix import publish
from tests.kv_events.subscriber import AllBlocksCleared, Subscriber
from tinyvllm import LLM, RequestOptions, SamplingParams
from tinyvllm.cache.blocks import BlockPool
from tinyvllm.cache.prefix import PrefixCache
from tinyvllm.engine.kv_events import CacheEvents, batches_of
from tinyvllm.kv_events.config import KVEventsConfig
from tinyvllm.kv_events.events import AllBlocksCleared as Cleared
from tinyvllm.kv_events.events import BlockStored, public_hash
from tinyvllm.kv_events.publisher import Publisher

FREE = "tcp://127.0.0.1:*"
EVENTS = {"enable_kv_cache_events": True, "endpoint": FREE, "replay_endpoint": FREE}
SMALL = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 32, "num_blocks": 12}
SIZE = 2  # tokens of a block of a bare cache


def subscriber_of(publisher: Publisher) -> Subscriber:
    return Subscriber(publisher.endpoint, publisher.replay_endpoint)


def contents(cache: PrefixCache) -> dict[int, tuple[int, ...]]:
    """The tokens of each cached block, by its hash on the wire."""
    return {public_hash(e.hash): tuple(np.frombuffer(e.tokens, "<i4").tolist()) for e in cache.entries()}


def catch_up(subscriber: Subscriber, publisher: Publisher) -> dict[int, tuple[int, ...]]:
    """The tokens of each block of the index, once it has every batch."""
    while subscriber.next < publisher._next:
        for number, payload in subscriber.replay(subscriber.next):
            subscriber._apply(number, payload)
    return {hash: tokens for hash, (_, tokens, _) in subscriber.blocks.items()}


def run(llm: LLM, seed: int, count: int = 12, **options: str) -> int:
    """Prompts of 1 to 90 tokens, half of them with a common beginning; how many preemptions they had."""
    random = np.random.default_rng(seed)
    common = random.integers(32, 127, 48).tolist()
    prompts = []
    for i in range(count):
        tail = random.integers(32, 127, int(random.integers(1, 40))).tolist()
        prompts.append({"prompt_token_ids": [256, *(common if i % 2 else []), *tail]})
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompts, params, options=RequestOptions(**options))
    return sum(output.metrics.preemptions for output in outputs)


def test_the_index_of_a_subscriber_is_the_prefix_cache(tiny_model: Path) -> None:
    """Read live, in a thread, while the engine runs; what came before the subscription by replay."""
    with LLM(tiny_model, kv_events_config=EVENTS, **SMALL) as llm:
        (events,) = [one for one in llm.engine.observer._observers if isinstance(one, CacheEvents)]
        publisher, prefix, done = events.publisher, llm.engine.scheduler.prefix, threading.Event()
        with subscriber_of(publisher) as subscriber:

            def read() -> None:
                while not done.is_set() or subscriber.next < publisher._next:
                    if subscriber.has_message(20):
                        subscriber.read_to(subscriber.next)

            reader = threading.Thread(target=read)
            reader.start()
            preemptions = run(llm, 1)
            preemptions += run(llm, 2, cache_salt="tenant")
            assert preemptions and prefix.evictions > 20, "the test is meant to preempt and to evict"
            prefix.reset()
            run(llm, 3, count=3)
            done.set()
            reader.join()
            assert {hash: tokens for hash, (_, tokens, _) in subscriber.blocks.items()} == contents(prefix) != {}
            assert subscriber.gaps <= 1, "before the subscription, and never after it"
            assert publisher.num_lost == 0 and prefix.evictions > 20
            salts = {keys[0][0] for b in subscriber.batches for e in b.events if (keys := getattr(e, "extra_keys", None))}
            assert len(salts) == 1 and "tenant" not in salts
            parents = {parent for parent, _, _ in subscriber.blocks.values()}
            assert None in parents and parents - {None} <= set(subscriber.blocks) | {None, *parents}
            llm.close()
            subscriber.read_to(publisher._next - 1)
            assert not subscriber.blocks, "the blocks end with the engine"
    assert not publisher._thread.is_alive() and prefix.listener is None


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(BlockPool(64, SIZE), b"a key")


@pytest.fixture
def opened(cache: PrefixCache, request: pytest.FixtureRequest) -> Iterator[CacheEvents]:
    """The events of a cache that has three blocks already, as from disk."""
    cache.pool.release(publish(cache, [1, 2, 3, 4]))
    cache.pool.release(publish(cache, [5, 6], "mine"))
    options = getattr(request, "param", {})
    events = CacheEvents(KVEventsConfig(endpoint=FREE, replay_endpoint=FREE, **options), SIZE)
    events.cache_opened(cache)
    yield events
    events.engine_closed()


def change(cache: PrefixCache, events: CacheEvents, number: int) -> None:
    """One step that stores a block."""
    cache.pool.release(publish(cache, [100 + number, 7]))
    events.step_finished()


def test_the_first_batch_clears_and_states_what_came_from_disk(cache: PrefixCache, opened: CacheEvents) -> None:
    with subscriber_of(opened.publisher) as subscriber:
        assert catch_up(subscriber, opened.publisher) == contents(cache) and len(subscriber.blocks) == 3
        (batch,) = subscriber.batches
        assert isinstance(batch.events[0], AllBlocksCleared)
        opened.step_finished()
        assert opened.publisher._next == 1, "a step without a change publishes nothing"
        change(cache, opened, 0)
        assert catch_up(subscriber, opened.publisher) == contents(cache) and len(subscriber.batches) == 2


@pytest.mark.parametrize("opened", [{"max_queue_size": 3}], indirect=True)
def test_after_a_loss_the_whole_cache_is_stated_again(cache: PrefixCache, opened: CacheEvents, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, sending, send = opened.publisher, threading.Event(), Publisher._send_batches
    with subscriber_of(publisher) as subscriber:
        while not subscriber.replay(0):
            pass
        monkeypatch.setattr(Publisher, "_send_batches", lambda self: sending.wait() and send(self))
        for number in range(10):
            change(cache, opened, number)
        assert publisher.num_lost == 1 and opened._restates, "one number shows the gap, and later steps wait for room"
        sending.set()
        while not publisher.has_room or publisher._queue:
            pass
        change(cache, opened, 10)
        assert catch_up(subscriber, publisher) == contents(cache) and len(subscriber.blocks) == 14


@pytest.mark.parametrize("opened", [{"buffer_steps": 2}], indirect=True)
def test_a_subscriber_that_comes_late_gets_the_whole_cache_again(cache: PrefixCache, opened: CacheEvents) -> None:
    publisher = opened.publisher
    for number in range(5):
        change(cache, opened, number)
    with subscriber_of(publisher) as subscriber:
        while not subscriber.replay(5):
            pass
        assert not publisher.wants_all
        assert [number for number, _ in subscriber.replay(0)] == [4, 5] and publisher.wants_all
        subscriber.next = publisher._next
        opened.step_finished()
        assert catch_up(subscriber, publisher) == contents(cache) and len(subscriber.blocks) == 8
        subscriber.replay(0)
        assert publisher.wants_all
        count = publisher._next
        opened.step_finished()
        assert publisher._next == count and publisher.wants_all, "not again at once"


def test_without_the_option_nothing_listens(tiny_model: Path) -> None:
    with LLM(tiny_model, **SMALL) as llm:
        assert llm.engine.scheduler.prefix.listener is None
        assert not any(isinstance(one, CacheEvents) for one in llm.engine.observer._observers)
    assert not any(thread.name == "tinyvllm-kv-events" for thread in threading.enumerate())


def test_a_failed_start_closes_the_sockets(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no scheduler")

    monkeypatch.setattr("tinyvllm.engine.engine.new_scheduler", fail)
    with pytest.raises(RuntimeError, match="no scheduler"):
        LLM(tiny_model, kv_events_config=EVENTS, **SMALL)
    assert not any(thread.name == "tinyvllm-kv-events" for thread in threading.enumerate())


def test_large_statements_are_several_batches() -> None:
    events = [Cleared(), *(BlockStored(None, None, [bytes(16)] * 1500, [b""] * 1500) for _ in range(7))]
    assert [len(batch) for batch in batches_of(events)] == [4, 3, 1] and batches_of([]) == []
    assert sum(batches_of(events), []) == events
