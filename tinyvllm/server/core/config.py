"""How one server behaves: addresses, limits, timeouts."""

from __future__ import annotations

import re

from tinyvllm.errors import ArgumentError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.server.core.limits import MAX_BODY, MAX_CONNECTIONS

_POSITIVE = ("max_body", "max_connections", "head_seconds", "body_seconds", "write_seconds", "beat_seconds")


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server, in seconds and bytes.

    lenient             drop unknown and unsupported fields and name them in the header X-Ignored-Fields, instead of answering 400
    trust_request_chat_template  allow chat templates in requests (they run in a sandbox, but can be made slow)
    chat_template       Jinja source that replaces the models' own templates
    share_prefixes      API keys share cached prefixes, so that one can measure what others have sent; without it each key has its own
    allow_runtime_lora  load and unload adapters for clients, from folders of this machine that they name
    allow_trace         answer /debug/trace, which shows the sizes and the times of all clients' requests
    store               keep answers of /v1/responses, files and batches in memory for later requests
    return_tokens_as_token_ids  log-probabilities write tokens as "token_id:5" unless the request says otherwise
    enable_force_include_usage  every event of a stream of completions and chat completions has the usage
    enable_per_request_metrics  completions and chat completions have the times of their request
    cors_origins        origins whose pages may call this server; "*" allows all. Pages of localhost always may
    allowed_hosts       names in the Host header that are accepted; localhost and addresses always are. Checked if there are any, and on a
                        loopback address without keys
    root_path           prefix under which a proxy serves this server, such as "/llm"; removed from paths that have it
    max_body            longest request body
    max_connections     open at the same time; further ones wait to be accepted
    head_seconds, body_seconds, write_seconds  time limits for a client to send a request head, to send a body, to accept written data
    beat_seconds        after this much silence a stream sends a comment, so that proxies keep the connection open
    grace_seconds       after SIGTERM, accepted requests may run this long
    access_log          write one line of JSON to stdout for each request
    """

    host: str = "127.0.0.1"
    port: int = 8000
    lenient: bool = False
    trust_request_chat_template: bool = False
    chat_template: str | None = None
    share_prefixes: bool = False
    allow_runtime_lora: bool = False
    allow_trace: bool = False
    store: bool = True
    return_tokens_as_token_ids: bool = False
    enable_force_include_usage: bool = False
    enable_per_request_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    root_path: str = ""
    max_body: int = MAX_BODY
    max_connections: int = MAX_CONNECTIONS
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 60.0
    beat_seconds: float = 5.0
    grace_seconds: float = 30.0
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    access_log: bool = True

    def __post_init__(self) -> None:
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ArgumentError("--ssl-keyfile requires --ssl-certfile")
        if not 0 <= self.port <= 65535:
            raise ArgumentError(f"--port must be between 0 and 65535 (0 picks a free port), got {self.port}")
        if self.root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", self.root_path):
            raise ArgumentError(f"--root-path must be a path like /llm, without a slash at its end, got {self.root_path!r}")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ArgumentError(f"--{name.replace('_', '-')} must be greater than 0, got {getattr(self, name)}")
