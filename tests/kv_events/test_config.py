"""kv_events_config: vLLM's keys, safe defaults, and errors that name the key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tinyvllm.config.engine import resolve
from tinyvllm.errors import ArgumentError
from tinyvllm.kv_events.config import Endpoint, KVEventsConfig, parse, parse_endpoint

ON = {"enable_kv_cache_events": True}


def test_what_vllm_writes_is_accepted() -> None:
    text = json.dumps(ON | {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"})
    text = text[:-1] + ', "buffer_steps": 7, "hwm": 8, "max_queue_size": 9, "topic": "kv@pod@model"}'
    config = parse(text)
    assert config == KVEventsConfig("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", 7, 8, 9, "kv@pod@model")
    assert parse(config) is config and resolve(kv_events_config=text).kv_events_config == config


@pytest.mark.parametrize("value", [{}, {"enable_kv_cache_events": False}, ON | {"publisher": "null"}, {"publisher": "zmq"}])
def test_off(value: dict[str, Any]) -> None:
    assert parse(value) is None and resolve(kv_events_config=value).kv_events_config is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp://127.0.0.1:5557", Endpoint("tcp://127.0.0.1:5557", True, True)),
        ("tcp://localhost:*", Endpoint("tcp://127.0.0.1:*", True, True)),
        ("tcp://[::1]:5557", Endpoint("tcp://[::1]:5557", True, True)),
        ("ipc:///run/kv", Endpoint("ipc:///run/kv", True, True)),
        ("tcp://*:5557", Endpoint("tcp://*:5557", True, False)),
        ("tcp://0.0.0.0:5557", Endpoint("tcp://0.0.0.0:5557", True, False)),
        ("tcp://[::]:5557", Endpoint("tcp://[::]:5557", True, False)),
        ("tcp://router.example:5557", Endpoint("tcp://router.example:5557", False, False)),
        ("tcp://10.0.0.7:5557", Endpoint("tcp://10.0.0.7:5557", False, False)),
        ("tcp://127.0.0.1.example:5557", Endpoint("tcp://127.0.0.1.example:5557", False, False)),
    ],
)
def test_endpoints(text: str, expected: Endpoint) -> None:
    assert parse_endpoint("endpoint", text) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[1", ["not JSON"]),
        ("[1]", ["dict", "[1]"]),
        ("x" * 10_001, ["10000"]),
        (3, ["dict", "3"]),
        ({"enable_kv_cache_events": "yes"}, ["enable_kv_cache_events", "'yes'"]),
        (ON | {"endpont": "tcp://*:1"}, ["'endpont'", "did you mean 'endpoint'"]),
        (ON | {"publisher": "kafka"}, ["publisher", "zmq, null", "'kafka'"]),
        (ON | {"endpoint": "inproc://x"}, ["endpoint", "tcp://HOST:PORT", "inproc"]),
        (ON | {"endpoint": "tcp://127.0.0.1:70000"}, ["endpoint", "70000"]),
        (ON | {"endpoint": 5557}, ["endpoint", "5557"]),
        (ON | {"endpoint": "tcp://*:5557"}, ["other machines", "token ids", "allow_remote"]),
        (ON | {"replay_endpoint": "tcp://10.1.1.1:5557"}, ["replay_endpoint", "allow_remote"]),
        (ON | {"replay_endpoint": "tcp://10.1.1.1:5557", "allow_remote": True}, ["replay_endpoint", "this machine"]),
        (ON | {"replay_endpoint": "tcp://127.0.0.1:5557"}, ["both", "its own port"]),
        (ON | {"allow_remote": 1}, ["allow_remote", "1"]),
        (ON | {"buffer_steps": 0}, ["buffer_steps", "from 1 to"]),
        (ON | {"hwm": True}, ["hwm", "True"]),
        (ON | {"max_queue_size": 10**9}, ["max_queue_size"]),
        (ON | {"topic": "x" * 600}, ["topic", "512"]),
        ({"endpoint": "tcp://*:5557"}, ["allow_remote"]),  # also where it is off: the next edit switches it on
    ],
)
def test_what_is_refused(value: object, words: list[str]) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse(value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_wildcard_needs_permission() -> None:
    config = parse(ON | {"endpoint": "tcp://*:5557", "allow_remote": True})
    assert config is not None and config.endpoint == "tcp://*:5557"


def test_without_a_prefix_cache_there_is_nothing_to_publish() -> None:
    with pytest.raises(ArgumentError, match="kv_events_config contradicts enable_prefix_caching=False"):
        resolve(kv_events_config=ON, enable_prefix_caching=False)


def test_replicas_have_addresses_of_their_own() -> None:
    config = KVEventsConfig("tcp://127.0.0.1:5557", "ipc:///run/kv")
    assert config.of_replica(0) == config
    assert config.of_replica(2) == KVEventsConfig("tcp://127.0.0.1:5559", "ipc:///run/kv_dp2")
    free = KVEventsConfig("tcp://[::1]:*", "tcp://127.0.0.1:*")
    assert free.of_replica(3) == free
    free.check_replicas(64)
    KVEventsConfig("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5560").check_replicas(3)
    with pytest.raises(ArgumentError, match="4 replicas .* overlap"):
        KVEventsConfig("tcp://127.0.0.1:5557", "tcp://localhost:5560").check_replicas(4)
    with pytest.raises(ArgumentError, match="65536"):
        KVEventsConfig("tcp://127.0.0.1:65535").check_replicas(2)
