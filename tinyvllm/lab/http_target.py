"""OpenAI servers as targets, ours or others': one server a drafter. Streams are timed here; drafts are counted by vLLM's metrics.

Where a server has /metrics with vllm:spec_decode_*, the counts of a batch are their growth, so no other client may use the server. vLLM
counts chains and accepted drafts by position; how many drafts a position had is filled up from the first position.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tinyvllm.errors import RequestError, TinyvllmError, one_line
from tinyvllm.http_client import RETRY_STATUS, authorization, json_events, reason, retry_after, server_address
from tinyvllm.lab.costs import StepCosts
from tinyvllm.lab.sweep import NONE, Cell, DrafterSpec, Sweep
from tinyvllm.lab.target import Answer, DraftCounts, Job, Limits

ATTEMPTS, FIRST_PAUSE, MAX_PAUSE = 6, 0.5, 20.0  # seconds; a server's Retry-After may be longer
MAX_RETRY_AFTER = 300.0  # seconds; beyond it the cell fails
CONNECT_SECONDS, READ_SECONDS = 10.0, 300.0  # the second between two reads of an answer
MAX_BODY = 32 << 20  # bytes of /v1/models, /metrics or an error
MAX_TEXT = 4 << 20  # characters of an answer: 64 for each token of the longest one
_NAMES = "drafts|draft_tokens|accepted_tokens_per_pos"
_METRIC = re.compile(rf"^vllm:spec_decode_num_({_NAMES})_total(\{{[^}}]*\}})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d{1,3})"')
T = TypeVar("T")


class _Retry(Exception):
    """Nothing was received, and a retry may succeed. `after`: the seconds of the server's Retry-After."""

    def __init__(self, text: str, after: float | None = None):
        super().__init__(text)
        self.after = after


class Server:
    """One server. Methods may be called from several threads."""

    def __init__(self, url: str, api_key: str | None, pause: Callable[[float], None] = time.sleep):
        address = server_address(url, "servers")
        self.url, self._pause = url, pause
        self._kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
        self._address, self._root = (address.host, address.port), address.root
        self._headers = {"Content-Type": "application/json"} | authorization(api_key)

    def model(self) -> str:
        """The first model that it lists: also the check that it is up. TinyvllmError if it is none after all attempts."""
        try:
            name = json.loads(self.with_retries(lambda: self._get("/v1/models")))["data"][0]["id"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise TinyvllmError(f"{self.url}: /v1/models gives no list of models: is this an OpenAI server?") from error
        return str(name)

    def metrics(self) -> str | None:
        """The text of /metrics; None where there is none."""
        try:
            return self.with_retries(lambda: self._get("/metrics")).decode("utf-8", "replace")
        except RequestError:
            return None

    def with_retries(self, attempt: Callable[[], T]) -> T:
        """The result of the first `attempt` that does not raise _Retry, after pauses that grow."""
        for number in range(1, ATTEMPTS + 1):
            try:
                return attempt()
            except _Retry as failure:
                if number == ATTEMPTS or (failure.after or 0) > MAX_RETRY_AFTER:
                    raise TinyvllmError(f"{self.url}: {failure}; tried {number} times") from failure
                growing = random.uniform(0.5, 1.0) * min(MAX_PAUSE, FIRST_PAUSE * 2 ** (number - 1))
                self._pause(max(failure.after or 0.0, growing))
        raise AssertionError("the last attempt returns or raises")

    def stream(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Post a request and time its answer. Retried as long as nothing of it has come."""
        return self.with_retries(lambda: self._stream(path, json.dumps(body).encode()))

    def _stream(self, path: str, body: bytes) -> Answer:
        start = time.monotonic()
        first = last = None
        text, size, count, finished = list[str](), 0, None, False
        try:
            for event in json_events(*self._request("POST", path, body)):
                piece, ended, usage = _read_event(event)
                finished, count = finished or ended, usage if usage is not None else count
                if piece:
                    last = time.monotonic()
                    first = last if first is None else first
                    text.append(piece)
                    size += len(piece)
                if size > MAX_TEXT:
                    raise TinyvllmError(f"{self.url}: an answer of more than {MAX_TEXT >> 20} Mi characters: does it know max_tokens?")
        except (OSError, http.client.HTTPException) as error:
            kind = _Retry if first is None else TinyvllmError
            raise kind(f"{self.url}: the connection broke ({reason(error)})") from error
        if first is None or last is None or not finished:
            raise TinyvllmError(f"{self.url}: an answer without text or finish_reason")
        return Answer((), tuple("".join(text).split()), first - start, last - start, len(text) if count is None else count)

    def _get(self, path: str) -> bytes:
        connection, response = self._request("GET", path, None)
        with contextlib.closing(connection), contextlib.closing(response):
            try:
                data = response.read(MAX_BODY + 1)
            except (OSError, http.client.HTTPException) as error:
                raise _Retry(f"no answer to {path} ({reason(error)})") from error
        if len(data) > MAX_BODY:
            raise TinyvllmError(f"{self.url}: {path} has more than {MAX_BODY >> 20} MiB")
        return data

    def _request(self, method: str, path: str, body: bytes | None) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The head of the response, whose status is 200. _Retry for what may pass, RequestError for what the server refuses."""
        connection = self._kind(*self._address, timeout=CONNECT_SECONDS)
        try:
            try:
                connection.connect()
                connection.sock.settimeout(READ_SECONDS)
                connection.request(method, self._root + path, body, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    self._refuse(path, response)
            except ssl.SSLCertVerificationError as error:
                raise TinyvllmError(f"{self.url}: its certificate cannot be verified: {error.verify_message}") from error
            except (OSError, http.client.HTTPException) as error:
                raise _Retry(f"no answer ({reason(error)})") from error
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _refuse(self, path: str, response: http.client.HTTPResponse) -> None:
        with contextlib.closing(response):  # it owns the socket of a connection that is not kept
            text = one_line(response.read(1 << 16).decode("utf-8", "replace"))
        if response.status in RETRY_STATUS:
            raise _Retry(f"{path}: {response.status} {text}", retry_after(response.getheader("Retry-After")))
        raise RequestError(f"{self.url}: {path}: {response.status} {text}")


def _read_event(event: Mapping[str, Any]) -> tuple[str, bool, int | None]:
    """Text, whether the answer has ended, and the number of its tokens, of an event of either API."""
    choices = event.get("choices") or [{}]
    choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else {}
    delta = choice["delta"] if isinstance(choice.get("delta"), dict) else {}
    piece = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
    usage = event.get("usage") or {}
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return str(piece), bool(choice.get("finish_reason")), count if type(count) is int else None


class HttpTarget:
    """The servers of a sweep by name."""

    reports_tokens = False

    def __init__(self, sweep: Sweep, api_key: str | None = None, model: str | None = None, pause: Callable[[float], None] = time.sleep):
        self._servers = {name: Server(url, api_key, pause) for name, url in sweep.servers}
        self._model, self._models = model, dict[str, str]()

    def about(self) -> Mapping[str, Any]:
        urls = {name: server.url for name, server in self._servers.items()}
        return {"target": "http", "servers": json.dumps(urls, sort_keys=True), "model": self._model or ""}

    def about_drafter(self, drafter: DrafterSpec) -> Mapping[str, Any]:
        return {}

    def check(self, cells: Sequence[Cell]) -> None:
        """Cells are made from the servers."""

    def run(self, cell: Cell, jobs: Sequence[Job], limits: Limits, trial: str) -> tuple[list[Answer], DraftCounts]:
        server = self._servers[NONE if cell.is_baseline else cell.drafter.label]
        model = self._model_of(server)
        bodies = [_request_of(job, cell, limits, model) for job in jobs]
        before = counts_of(server.metrics())
        with ThreadPoolExecutor(len(jobs)) as pool:
            answers = list(pool.map(lambda one: server.stream(*one), bodies))
        return answers, _growth(before, counts_of(server.metrics()))

    def _model_of(self, server: Server) -> str:
        if self._model is not None:
            return self._model
        if server.url not in self._models:
            self._models[server.url] = server.model()
        return self._models[server.url]

    def costs(self, rows: Sequence[int]) -> StepCosts | None:
        """Steps cannot be seen from outside: give `costs` in the sweep."""
        return None

    def logits(self, prompt_ids: Sequence[int], tokens: Sequence[int]) -> None:
        return None

    def close(self) -> None:
        pass


def _request_of(job: Job, cell: Cell, limits: Limits, model: str) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": model, "max_tokens": limits.max_tokens, "temperature": cell.temperature, "seed": job.seed}
    body |= {"stream": True, "stream_options": {"include_usage": True}} | ({"ignore_eos": True} if limits.ignore_eos else {})
    if job.prompt.messages is not None:
        return "/v1/chat/completions", body | {"messages": job.prompt.conversation()}
    return "/v1/completions", body | {"prompt": job.prompt.text if job.prompt.token_ids is None else list(job.prompt.token_ids)}


Counted = Mapping[tuple[str, int], float]


def counts_of(text: str | None) -> Counted:
    """vLLM's counters of drafts by (name, position), summed over engines; position -1 where there is none."""
    found: dict[tuple[str, int], float] = {}
    for name, labels, value in _METRIC.findall(text or ""):
        position = _POSITION.search(labels)
        key = (name, -1 if position is None else int(position[1]))
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(value)):
                found[key] = found.get(key, 0.0) + number
    return found


def _growth(before: Counted, after: Counted) -> DraftCounts:
    """TinyvllmError where a counter is lower than before."""
    grown = {key: round(value - before.get(key, 0.0)) for key, value in after.items()}
    if any(number < 0 for number in grown.values()):
        raise TinyvllmError("the server's counts of drafts went back while a batch ran: it was started again; measure the cell once more")
    chains, tokens = grown.get(("drafts", -1), 0), grown.get(("draft_tokens", -1), 0)
    last = max((position for name, position in grown if name == "accepted_tokens_per_pos"), default=-1)
    accepted = [grown.get(("accepted_tokens_per_pos", i), 0) for i in range(last + 1)]
    drafted = []
    for _ in accepted:
        drafted.append(min(chains, tokens))
        tokens -= drafted[-1]
    return DraftCounts(chains, drafted, accepted, turns=None)
