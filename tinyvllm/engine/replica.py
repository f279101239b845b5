"""The other replicas of an engine, as the process of the first one sees them, and which replica a request goes to."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tinyvllm.config.engine import EngineConfig
from tinyvllm.distributed.prefix_map import PrefixMap, token_hashes
from tinyvllm.engine.mailbox import Mailbox, deliver
from tinyvllm.engine.prompt import Encoded
from tinyvllm.engine.replica_link import BEAT_SECONDS, Link
from tinyvllm.errors import RankError, TinyvllmError
from tinyvllm.metrics import EngineMetrics
from tinyvllm.request import BeamSearchParams, RequestOptions, RequestOutput, SamplingParams

log = logging.getLogger("tinyvllm")

PROGRAM = "tinyvllm.engine.replica_process"
START_SECONDS = 600.0  # to load the model
SILENT_SECONDS = 10.0  # without a message, after which a replica counts as hanging
END_SECONDS = 5.0  # to close an engine
OWN = "0"  # the replica of this process


class Replica:
    """A process with an engine of its own. `on_failure` is called, in a thread of this object, with the error of one that has ended."""

    def __init__(self, number: int, config: EngineConfig, environment: Mapping[str, str], on_failure: Callable[[RankError], None]):
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", PROGRAM, str(theirs.fileno())]
        self.number, self._on_failure = number, on_failure
        self.process = subprocess.Popen(
            command, pass_fds=(theirs.fileno(),), env=os.environ | environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self._link = Link(ours.detach())
        self._lock = threading.Lock()
        self._mailboxes: dict[str, Mailbox] = {}  # by key; guarded by _lock
        self._answers: dict[int, asyncio.Future[Any]] = {}  # guarded by _lock
        self._numbers = itertools.count()
        self._closing = False
        self._failure: BaseException | None = None  # guarded by _lock
        self.status: dict[str, Any] = {}
        with contextlib.suppress(OSError):  # it has ended: `wait_until_ready` says so
            self._link.send(config)

    def wait_until_ready(self) -> None:
        """The error of an engine that cannot start; RankError for a process that has ended. Then the link is read by a thread."""
        try:
            kind, *rest = self._link.receive() if self._link.arrives(START_SECONDS) else ("silent",)
        except (EOFError, OSError):
            kind, rest = "ended", []
        if kind == "refused":
            raise rest[0]
        if kind != "ready":
            raise self._error("did not start; its message is above")
        threading.Thread(target=self._read, name=f"tinyvllm-replica-{self.number}", daemon=True).start()

    @property
    def running(self) -> int:
        """Its requests that have not ended."""
        return len(self._mailboxes)

    async def outputs(
        self, mailbox: Mailbox, encoded: Encoded, params: SamplingParams | BeamSearchParams, options: RequestOptions | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, until the last one. Leaving them aborts it. Errors as of AsyncLLM.generate."""
        with self._lock:
            self._check()
            self._mailboxes[mailbox.key] = mailbox
        try:
            self._send("add", mailbox.key, encoded.text, encoded.token_ids, encoded.cache_salt, params, options)
            async for output in mailbox.outputs():
                yield output
        finally:
            self._drop(mailbox)

    def abort(self, key: str) -> None:
        """End a request, if it still runs."""
        with contextlib.suppress(RankError):
            self._send("abort", key)

    async def call(self, method: str, *arguments: Any) -> Any:
        """What a method of replica_process.py returns, or raises."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        with self._lock:
            self._check()
            self._answers[number] = answer
        try:
            self._send("call", number, method, arguments)
            return await answer
        finally:
            with self._lock:
                self._answers.pop(number, None)

    def close(self) -> None:
        """End the process: what it still has to write it writes. Again: nothing."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._link.send(("close",))
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._fail(self._error("was closed while the request ran"))

    def kill(self, error: BaseException) -> None:
        """End the process at once; its requests end with this error."""
        self._closing = True
        self._fail(error)
        self.process.kill()
        self.process.wait()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _send(self, *message: Any) -> None:
        try:
            self._link.send(message)
        except OSError as error:
            raise self._failure or self._error("has ended") from error

    def _drop(self, mailbox: Mailbox) -> None:
        with self._lock:
            self._mailboxes.pop(mailbox.key, None)
        if not mailbox.over:
            self.abort(mailbox.key)

    def _read(self) -> None:
        """Take what arrives until the process ends, or is silent. Time in which this process did not run itself does not count."""
        silent = 0.0
        while True:
            start = time.monotonic()
            try:
                if self._link.arrives(BEAT_SECONDS):
                    silent = 0.0
                    self._take(*self._link.receive())
                    continue
            except (EOFError, OSError):
                return self._fail(self._error(self._ended()))
            except Exception as error:  # it would be silent for ever
                log.error("replica %d has sent what cannot be read", self.number, exc_info=error)
                self.process.kill()
                return self._fail(self._error(f"has sent what cannot be read: {type(error).__name__}"))
            silent += min(time.monotonic() - start, BEAT_SECONDS)
            if silent > SILENT_SECONDS:
                self.process.kill()
                return self._fail(self._error(f"(process {self.process.pid}) hangs: no message for {silent:.0f} s"))

    def _take(self, kind: str, *rest: Any) -> None:
        if kind == "status":
            self.status = rest[0]
        elif kind == "outputs":
            with self._lock:
                found = [(self._mailboxes.get(key), result) for key, result in rest[0]]
            self._deliver([(mailbox, result) for mailbox, result in found if mailbox is not None])
        else:
            number, value, error = rest
            with self._lock:
                answer = self._answers.get(number)
            if answer is not None:
                _settle(answer, value, error)

    def _deliver(self, results: list[tuple[Mailbox, RequestOutput | TinyvllmError]]) -> None:
        found: list[tuple[Mailbox, RequestOutput | BaseException]] = []
        for mailbox, result in results:
            found.append((mailbox, mailbox.result(result) if isinstance(result, RequestOutput) else mailbox.in_callers_words(result)))
        for mailbox in deliver(found):
            self._drop(mailbox)

    def _ended(self) -> str:
        try:
            return f"(process {self.process.pid}) ended with code {self.process.wait(1)}"
        except subprocess.TimeoutExpired:
            return f"(process {self.process.pid}) ended its work"

    def _error(self, reason: str) -> RankError:
        return RankError(f"engine: replica {self.number} {reason}")

    def _fail(self, error: BaseException) -> None:
        """Its requests and calls end with an error, and further ones have it at once; the first one counts."""
        with self._lock:
            first, self._failure = self._failure is None, self._failure or error
            mailboxes, self._mailboxes = list(self._mailboxes.values()), {}
            answers, self._answers = list(self._answers.values()), {}
        deliver([(mailbox, self._failure) for mailbox in mailboxes])
        for answer in answers:
            _settle(answer, None, self._failure)
        if first and not self._closing and isinstance(error, RankError):
            self._on_failure(error)


def _settle(answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    """From any thread."""

    def settle() -> None:
        if not answer.done():
            answer.set_result(value) if error is None else answer.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop was closed, and its callers are gone
        answer.get_loop().call_soon_threadsafe(settle)


class Replicas:
    """The replicas above 0 of an engine, and the choice among all. They start at the same time, once the first one is loaded: its packed
    weights are kept by then, and they map the same pages.
    """

    def __init__(
        self, config: EngineConfig, num_blocks: int, environments: Sequence[dict[str, str]], on_failure: Callable[[RankError], None]
    ):
        """`num_blocks` is the size of the first one's KV cache, which the others take over; `environments` has what the process of each has
        in its environment. Errors of `Replica.wait_until_ready`.
        """
        self._prefixes = PrefixMap() if config.enable_prefix_caching else None
        self._names: dict[str, tuple[Replica, str]] = {}  # by request id: the replica and the key there
        self._all: list[Replica] = []
        try:
            for number in range(1, config.data_parallel_size):
                self._all.append(Replica(number, _config_of(config, number, num_blocks), environments[number], on_failure))
            for replica in self._all:
                replica.wait_until_ready()
        except BaseException as error:
            self.kill(error)
            raise

    def choose(self, encoded: Encoded, params: object, options: RequestOptions | None, own_running: int) -> Replica | None:
        """The replica that a request goes to; None is the first one.

        It is the one that has computed the longest beginning of the prompt, unless it is too busy (PrefixMap). Segments are blocks of the
        first one, which also has requests with functions: these cannot be sent.
        """
        if encoded.segments or getattr(params, "logits_processors", None):
            return None
        salt = encoded.cache_salt if options is None else options.prefix_salt or encoded.cache_salt
        hashes = [] if self._prefixes is None else token_hashes(encoded.token_ids, salt)
        loads = {OWN: own_running} | {str(replica.number): replica.running for replica in self._all}
        if self._prefixes is None:
            chosen = min(loads, key=lambda name: (loads[name], name))
        else:
            chosen = self._prefixes.rank(hashes, loads)[0]
            self._prefixes.routed(hashes, chosen)
        return None if chosen == OWN else self._all[int(chosen) - 1]

    def __contains__(self, name: str) -> bool:
        return name in self._names

    async def outputs(
        self,
        replica: Replica,
        mailbox: Mailbox,
        encoded: Encoded,
        params: SamplingParams | BeamSearchParams,
        options: RequestOptions | None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Replica.outputs, under a name that `abort` knows meanwhile."""
        self._names[mailbox.name] = replica, mailbox.key
        try:
            async with contextlib.aclosing(replica.outputs(mailbox, encoded, params, options)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            del self._names[mailbox.name]

    def abort(self, name: str) -> None:
        if (found := self._names.get(name)) is not None:
            replica, key = found
            replica.abort(key)

    async def embed(self, prompts: list[list[list[int]]], pooling: str, normalize: bool) -> list[np.ndarray]:
        """Embeddings of the prompts for each replica."""
        calls = [replica.call("embed", own, pooling, normalize) for replica, own in zip(self._all, prompts, strict=True) if own]
        return list(await asyncio.gather(*calls))

    async def forget_lora(self, name: str) -> None:
        """Unload an adapter where a request has brought it."""
        await asyncio.gather(*(replica.call("forget_lora", name) for replica in self._all))

    async def metrics(self) -> list[EngineMetrics]:
        """Those of each replica, as they are now."""
        return [pickle.loads(data) for data in await asyncio.gather(*(replica.call("metrics") for replica in self._all))]

    def together(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """The status of all: what can be added is, the rest is the first one's; `replicas` has each."""
        each = [own, *(replica.status for replica in self._all if replica.status)]
        return {**combined(each), "replicas": each}

    def predicted_wait(self, own: float) -> float:
        """The shortest."""
        waits: list[float] = [own, *(replica.status.get("predicted_wait", own) for replica in self._all)]
        return min(waits)

    def close(self) -> None:
        for replica in self._all:
            replica.close()

    def kill(self, error: BaseException) -> None:
        for replica in self._all:
            replica.kill(error)


def combined(each: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One status of those of several engines: counts are added."""
    first, total = each[0], {name: sum(one[name] for one in each) for name in ("running", "waiting", "steps", "tokens")}
    for name in ("blocks", "prefix"):
        if first[name] is not None:
            total[name] = {key: sum(one[name][key] for one in each) for key in first[name]}
    return {**first, **total}


def _config_of(config: EngineConfig, number: int, num_blocks: int) -> EngineConfig:
    """A seed is the source of seeds: each replica has its own, or the n-th requests of all would have the same."""
    seed = None if config.seed is None else (config.seed + number) % 2**63
    return replace(config, data_parallel_rank=number, num_blocks=num_blocks, kv_memory=None, seed=seed)
