"""The process of a replica above 0: an AsyncLLM that serves what the first replica's process sends (replica_link.py).

python -m tinyvllm.engine.replica_process SOCKET    an open file descriptor, inherited from that process
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.engine.prompt import Encoded
from tinyvllm.engine.replica_link import BEAT_SECONDS, Link, portable
from tinyvllm.errors import RequestError
from tinyvllm.request import BeamSearchParams, LoRARequest, RequestOptions, RequestOutput, SamplingParams
from tinyvllm.runner.rank import end_with_parent

log = logging.getLogger("tinyvllm")


def main(fd: int) -> int:
    end_with_parent()
    link = Link(fd)
    try:
        llm = AsyncLLM.of_config(link.receive())
    except Exception as error:
        link.send(("refused", portable(error)))
        return 1
    link.send(("ready",))
    threading.Thread(target=send_status, args=(llm, link), name="tinyvllm-status", daemon=True).start()
    llm.watch(lambda error: os._exit(1))  # the log has it
    asyncio.run(Server(llm, link).run())
    llm.close()
    return 0


def send_status(llm: AsyncLLM, link: Link) -> None:
    """Say what the engine does, and that this process is not stopped."""
    with contextlib.suppress(OSError):
        while True:
            link.send(("status", llm.status()))
            time.sleep(BEAT_SECONDS)


class Server:
    """Runs what arrives, each request in a task of its own. All outputs of a step leave in one message."""

    def __init__(self, llm: AsyncLLM, link: Link):
        self._llm, self._link = llm, link
        self._outputs: list[tuple[str, RequestOutput | BaseException]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the link is closed, or says so."""
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        threading.Thread(target=self._read, name="tinyvllm-replica-link", daemon=True).start()
        await self._ended.wait()

    def _read(self) -> None:
        try:
            while (message := self._link.receive()) != ("close",):
                self._loop.call_soon_threadsafe(self._take, *message)
        except (EOFError, OSError):
            pass
        except Exception as error:  # requests would wait for ever
            log.critical("replica: a message cannot be read", exc_info=error)
            os._exit(1)
        self._loop.call_soon_threadsafe(self._ended.set)

    def _take(self, kind: str, *rest: Any) -> None:
        if kind == "abort":
            self._llm.abort(*rest)
        else:
            self._run(self._generate(*rest) if kind == "add" else self._answer(*rest))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate(
        self,
        key: str,
        text: str | None,
        token_ids: list[int],
        salt: str | None,
        params: SamplingParams | BeamSearchParams,
        options: RequestOptions | None,
    ) -> None:
        try:
            encoded, options = Encoded(text, token_ids, cache_salt=salt), await self._with_own_adapter(options)
            async with contextlib.aclosing(self._llm.own_outputs(encoded, params, key, options)) as outputs:
                async for output in outputs:
                    self._put(key, output)
        except Exception as error:
            self._put(key, portable(error))

    async def _with_own_adapter(self, options: RequestOptions | None) -> RequestOptions | None:
        """The options with the adapter as this engine has loaded it, now if it was not. RequestError if its files have changed."""
        if options is None or options.adapter is None:
            return options
        wanted = options.adapter
        options = await self._llm.options_with(options, LoRARequest(wanted.name, lora_path=wanted.path))
        if options is not None and options.adapter is not None and options.adapter.digest != wanted.digest:
            raise RequestError(f"the files of adapter {wanted.name!r} have changed since it was loaded; unload it, and load it again")
        return options

    def _put(self, key: str, result: RequestOutput | BaseException) -> None:
        if isinstance(result, RequestOutput) and result.failure is not None:  # outputs of others are in the same message
            result = replace(result, failure=portable(result.failure))
        if not self._outputs:
            self._loop.call_soon(self._send_outputs)
        self._outputs.append((key, result))

    def _send_outputs(self) -> None:
        outputs, self._outputs = self._outputs, []
        with contextlib.suppress(OSError):  # the other process has ended: `_read` notices it, too
            self._link.send(("outputs", outputs))

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "embed": self._llm.embed,
            "metrics": self._metrics,
            "forget_lora": self._forget_lora,
        }
        value, error = None, None
        try:
            value = await methods[method](*arguments)
        except Exception as failed:
            error = portable(failed)
        with contextlib.suppress(OSError):
            self._link.send(("answer", number, value, error))

    async def _metrics(self) -> bytes:
        """Pickled by the engine's thread, which writes them."""
        data: bytes = await self._llm.between_steps(lambda engine: pickle.dumps(engine.metrics))
        return data

    async def _forget_lora(self, name: str) -> None:
        if name in self._llm.adapters:
            await self._llm.unload_lora(name)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
