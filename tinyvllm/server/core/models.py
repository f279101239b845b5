"""The models of a server by name: loaded on first use, unloaded when idle or when another model needs their memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import field
from functools import partial
from typing import Any

from tinyvllm.config.values import parse_lora_modules
from tinyvllm.engine.api import AsyncLLM
from tinyvllm.errors import OutOfMemoryError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request import Adapter
from tinyvllm.server.core.failures import Failure, bad_field
from tinyvllm.server.core.memory_budget import MemoryBudget


@dataclass(eq=False)
class Model:
    """A model that the server offers: its load options, and the engine while it is loaded."""

    name: str
    options: Mapping[str, Any]
    llm: AsyncLLM | None = None
    users: int = 0  # requests
    idle_since: float = 0.0
    loading: asyncio.Task[AsyncLLM] | None = None
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class Models:
    """All models of a server. Belongs to one event loop.

    specs         options of AsyncLLM by model name; the first model is the default
    idle_seconds  unload a model that no request has used for this time; None never unloads
    aliases       further names
    load          makes an engine of the options; runs in a thread
    budget        memory of all models together; None bounds them by the machine's alone
    """

    def __init__(
        self,
        specs: Mapping[str, Mapping[str, Any]],
        idle_seconds: float | None = None,
        aliases: Mapping[str, str] | None = None,
        load: Callable[..., AsyncLLM] = AsyncLLM,
        budget: MemoryBudget | None = None,
    ):
        self._models = {name: Model(name, options) for name, options in specs.items()}
        self._by_name = {**self._models, **{alias: self._models[name] for alias, name in (aliases or {}).items()}}
        self._idle_seconds = idle_seconds
        self._load_engine = load
        self._budget = budget
        self.on_failure: Callable[[str, BaseException], None] = lambda name, error: None  # called in the event loop: an engine has ended
        self.on_unload: Callable[[str, AsyncLLM], None] = lambda name, llm: None  # called when an engine has ended
        self._memory = asyncio.Lock()  # held while a model is loaded or unloaded
        self._unload_tasks: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        """All names and aliases, the default first; not those of adapters."""
        return list(self._by_name)

    @property
    def adapters(self) -> dict[str, str]:
        """The names that requests may use for adapters, each with the model that it belongs to."""
        return {name: model.name for model in self._models.values() for name in _adapters_of(model) if name not in self._by_name}

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter that a request names, whose model is in use; None for the name of a model. Failure 404 if it is gone meanwhile."""
        if name is None or name in self._by_name:
            return None
        for llm in self.loaded().values():
            if name in llm.adapters:
                return llm.adapters[name]
        raise self._unknown(name)

    def _unknown(self, name: str | None) -> Failure:
        text = f"there is no model {name!r:.200}; available: {', '.join([*self._by_name, *self.adapters])}"
        return Failure(404, text, param="model", code="model_not_found")

    def refuse_adapter(self, name: str | None, what: str) -> None:
        """Failure 400 for the name of an adapter where only the model itself computes something."""
        if name in self.adapters:
            raise bad_field("model", f"model: {what} without an adapter; send {self.adapters[name]!r} instead of {name!r:.200}")

    def path(self, name: str) -> str:
        """The last part of a model's path, for the model list; the rest of the path is private to the server."""
        return os.path.basename(str(self._by_name[name].options.get("model") or name).rstrip("/"))

    def loaded(self) -> dict[str, AsyncLLM]:
        """The engines in memory, by model name."""
        return {model.name: model.llm for model in self._models.values() if model.llm is not None}

    async def start(self) -> None:
        """Load the model if there is only one; with several, each is loaded on first use."""
        if len(self._models) == 1:
            (model,) = self._models.values()
            await self._engine(model)

    async def close(self) -> None:
        """Unload all models, and wait for unloads in progress."""
        for model in self._models.values():
            if model.loading is not None:
                with contextlib.suppress(Exception):
                    await model.loading
            await self._unload(model)
        await asyncio.gather(*self._unload_tasks)

    @contextlib.asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[tuple[str, AsyncLLM]]:
        """(name, engine) of a model, or of an adapter and the model's engine, which stays loaded inside the block; None is the default
        model. Failure 404 for an unknown name."""
        model = next(iter(self._models.values())) if name is None else self._by_name.get(self.adapters.get(name, name))
        if model is None:
            raise self._unknown(name)
        model.users += 1
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        try:
            llm = await self._engine(model)
            yield model.name if name is None or name in self._by_name else name, llm
        finally:
            model.users -= 1
            if not model.users:
                self._start_idle_timer(model)

    def _start_idle_timer(self, model: Model) -> None:
        model.idle_since = time.monotonic()
        if self._idle_seconds is not None and model.llm is not None:
            model.timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._on_idle, model)

    def _on_idle(self, model: Model) -> None:
        task = asyncio.create_task(self._unload_if_idle(model))
        self._unload_tasks.add(task)
        task.add_done_callback(self._unload_tasks.discard)

    async def _unload_if_idle(self, model: Model) -> None:
        async with self._memory:
            if not model.users:
                await self._unload(model)

    async def _engine(self, model: Model) -> AsyncLLM:
        if model.llm is not None:
            return model.llm
        if model.loading is None:
            model.loading = asyncio.create_task(self._load(model))
        return await asyncio.shield(model.loading)  # the first requester may disconnect while others wait for the same load

    async def _load(self, model: Model) -> AsyncLLM:
        try:
            async with self._memory:
                options = {"served_model_name": model.name, **await self._make_room(model)}
                while True:
                    try:
                        llm = await asyncio.to_thread(self._load_engine, **options)
                        llm.watch(partial(self._call_on_failure, asyncio.get_running_loop(), model.name))
                        model.llm = llm
                        return llm
                    except OutOfMemoryError:
                        if not await self._unload_least_recent():
                            raise
        finally:
            model.loading = None
            if not model.users:
                self._start_idle_timer(model)

    async def _make_room(self, model: Model) -> Mapping[str, Any]:
        """Unload idle models until the budget holds one more; its options, with the KV cache that the budget counts.

        OutOfMemoryError if the budget is too small for it, or others are in use.
        """
        if self._budget is None:
            return model.options
        need = await asyncio.to_thread(self._budget.need, model.name, model.options)
        while not self._budget.fits(model.name, self.loaded()):
            if not await self._unload_least_recent():
                raise self._budget.refusal(model.name, self.loaded())
        return need.options

    async def _unload_least_recent(self) -> bool:
        """Unload the model that has been idle for the longest time; False if none is idle."""
        idle = [model for model in self._models.values() if model.llm is not None and not model.users]
        if idle:
            await self._unload(min(idle, key=lambda model: model.idle_since))
        return bool(idle)

    def _call_on_failure(self, loop: asyncio.AbstractEventLoop, name: str, error: BaseException) -> None:
        """In the engine's thread: tell the event loop, unless it is closed."""
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: self.on_failure(name, error))

    async def _unload(self, model: Model) -> None:
        llm, model.llm = model.llm, None
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        if llm is not None:
            await asyncio.to_thread(llm.close)
            self.on_unload(model.name, llm)


def _adapters_of(model: Model) -> list[str]:
    """The names of a model's adapters: those that its engine has, or will begin with."""
    if model.llm is not None:
        return list(model.llm.adapters)
    return [name for name, _ in parse_lora_modules(model.options.get("lora_modules", ()))]
