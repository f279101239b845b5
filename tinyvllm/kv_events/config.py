"""`kv_events_config`: where changes of the prefix cache are published, in vLLM's spelling. Checked before anything is loaded."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace

from tinyvllm.errors import ArgumentError, nearest
from tinyvllm.lazy_dataclass import dataclass

PUBLISHERS = ("zmq", "null")
MAX_TEXT = 10_000  # characters of JSON
MAX_TOPIC = 512  # bytes
MAX_BATCHES = 1_000_000  # of a queue or of the buffer for replays
_WILDCARDS = ("*", "0.0.0.0", "::")
_TCP = re.compile(r"tcp://(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^:/\[\]\s]+)):(?P<port>\d{1,5}|\*)")
_IPC = re.compile(r"ipc://(/[^\s\0]{1,100})")


@dataclass(frozen=True)
class Endpoint:
    """An address of ZeroMQ.

    address  in ZeroMQ's spelling
    binds    whether the engine listens there; else it connects, as vLLM does to the name of another machine
    local    whether only this machine can reach it
    """

    address: str
    binds: bool
    local: bool


def parse_endpoint(name: str, text: object) -> Endpoint:
    """tcp://HOST:PORT or ipc:///PATH. The engine binds a wildcard, a loopback address or a path, and connects to anything else.

    The port * is a free one. ArgumentError for anything else.
    """
    if isinstance(text, str) and (match := _IPC.fullmatch(text)):
        return Endpoint(text, binds=True, local=True)
    match = _TCP.fullmatch(text) if isinstance(text, str) else None
    if match is None or (match["port"] != "*" and not 1 <= int(match["port"]) <= 65535):
        raise ArgumentError(
            f"kv_events_config: {name} must be tcp://HOST:PORT or ipc:///PATH, such as tcp://127.0.0.1:5557, got {text!r:.120}"
        )
    host = match["six"] or match["host"]
    local = _is_loopback(host)
    if local and host.lower() == "localhost":
        host = "127.0.0.1"  # ZeroMQ binds addresses and interfaces, not names
    shown = f"[{host}]" if ":" in host else host
    return Endpoint(f"tcp://{shown}:{match['port']}", binds=local or host in _WILDCARDS, local=local)


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class KVEventsConfig:
    """Where the events of the prefix cache go. Always valid: an invalid value is an ArgumentError that names the field.

    endpoint         address of the PUB socket
    replay_endpoint  address of a ROUTER socket that repeats earlier batches; None for none
    buffer_steps     batches that are kept for it, and at most `publisher.MAX_BUFFER_BYTES` of them
    hwm              batches that may wait for one subscriber; what comes after that is missing from its stream
    max_queue_size   batches that may wait for the publisher's thread
    topic            first frame of each message
    allow_remote     accept endpoints that other machines reach: the events have the token ids of prompts, and no password. Not in vLLM
    """

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 10_000
    max_queue_size: int = 10_000
    topic: str = ""
    allow_remote: bool = False

    def __post_init__(self) -> None:
        if type(self.allow_remote) is not bool:
            raise ArgumentError(f"kv_events_config: allow_remote must be true or false, got {self.allow_remote!r:.60}")
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_BATCHES:
                raise ArgumentError(f"kv_events_config: {name} must be an integer from 1 to {MAX_BATCHES}, got {value!r:.60}")
        if not isinstance(self.topic, str) or len(self.topic.encode("utf-8", "replace")) > MAX_TOPIC:
            raise ArgumentError(f"kv_events_config: topic must be a text of at most {MAX_TOPIC} bytes, got {self.topic!r:.60}")
        self._check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            if not self._check_endpoint("replay_endpoint", self.replay_endpoint).binds:
                raise ArgumentError(
                    f"kv_events_config: replay_endpoint={self.replay_endpoint!r} must be an address of this machine, where subscribers "
                    "ask for batches; use tcp://127.0.0.1:PORT, or tcp://*:PORT with allow_remote"
                )
            if self.replay_endpoint == self.endpoint and not self.endpoint.endswith(":*"):
                raise ArgumentError(f"kv_events_config: endpoint and replay_endpoint are both {self.endpoint!r}: give each its own port")

    def of_replica(self, number: int) -> KVEventsConfig:
        """The addresses of a replica, as vLLM counts them: ports from those of the first one on, paths with a suffix."""
        replay = None if self.replay_endpoint is None else _of_replica(self.replay_endpoint, number)
        return replace(self, endpoint=_of_replica(self.endpoint, number), replay_endpoint=replay)

    def check_replicas(self, count: int) -> None:
        """ArgumentError if replicas would share an address."""
        names = [name for name in (self.endpoint, self.replay_endpoint) if name is not None and not name.endswith(":*")]
        taken = [parse_endpoint("endpoint", _of_replica(name, number)).address for name in names for number in range(count)]
        if len(set(taken)) < len(taken):
            raise ArgumentError(
                f"kv_events_config: {count} replicas take as many ports from endpoint={self.endpoint!r} and replay_endpoint="
                f"{self.replay_endpoint!r} on, and these overlap: give ports that are {count} or more apart"
            )

    def _check_endpoint(self, name: str, text: object) -> Endpoint:
        endpoint = parse_endpoint(name, text)
        if not endpoint.local and not self.allow_remote:
            raise ArgumentError(
                f"kv_events_config: {name}={text!r} is reached by other machines, and the events have the token ids of all prompts: "
                'use tcp://127.0.0.1:PORT, or add "allow_remote": true if the network is private'
            )
        return endpoint


def _of_replica(address: str, number: int) -> str:
    if number == 0 or address.endswith(":*"):
        return address
    if address.startswith("ipc:"):
        return f"{address}_dp{number}"
    head, _, port = address.rpartition(":")
    return f"{head}:{int(port) + number}"


def parse(value: object) -> KVEventsConfig | None:
    """The configuration of a dict or of JSON text; None where it publishes nothing. ArgumentError for anything else."""
    if isinstance(value, KVEventsConfig):
        return value
    if isinstance(value, str):
        value = _from_text(value)
    if not isinstance(value, Mapping):
        raise ArgumentError(f'kv_events_config must be a dict or JSON text such as {{"enable_kv_cache_events": true}}, got {value!r:.60}')
    values = dict(value)
    known = [field.name for field in fields(KVEventsConfig)]
    enabled, publisher = values.pop("enable_kv_cache_events", False), values.pop("publisher", None)
    for name in values:
        if name not in known:
            everything = ["enable_kv_cache_events", "publisher", *known]
            hint = nearest(str(name), everything)
            raise ArgumentError(f"kv_events_config: unknown key {str(name)!r:.60}{hint}; known are {', '.join(everything)}")
    if type(enabled) is not bool:
        raise ArgumentError(f"kv_events_config: enable_kv_cache_events must be true or false, got {enabled!r:.60}")
    if publisher is not None and publisher not in PUBLISHERS:
        hint = nearest(str(publisher), PUBLISHERS)
        raise ArgumentError(f"kv_events_config: publisher must be one of {', '.join(PUBLISHERS)}, got {publisher!r:.60}{hint}")
    config = KVEventsConfig(**{name: one for name, one in values.items() if one is not None})  # its errors come in any case
    return config if enabled and publisher != "null" else None


def _from_text(text: str) -> object:
    if len(text) > MAX_TEXT:
        raise ArgumentError(f"kv_events_config must have at most {MAX_TEXT} characters, got {len(text)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"kv_events_config is not JSON: {error}; got {text!r:.60}") from error
