"""The models of a server by name: loaded on first use, unloaded when they have been idle or when another needs their memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tinyvllm.engine.async_llm import AsyncLLM
from tinyvllm.errors import OutOfMemoryError
from tinyvllm.server.core.failures import Failure


@dataclass(eq=False)
class Model:
    """One model that can be served: what loads it, and the engine while it is loaded."""

    name: str
    options: Mapping[str, Any]
    llm: AsyncLLM | None = None
    users: int = 0
    idle_since: float = 0.0
    loading: asyncio.Task[AsyncLLM] | None = None
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)


class Models:
    """`specs`: options of AsyncLLM by the name under which each is served; the first is the default. Belongs to one event loop.

    aliases: further names. idle_seconds: unload a model that nobody has used for so long; None keeps it. `load` makes an engine of the
    options, in a thread.
    """

    def __init__(
        self,
        specs: Mapping[str, Mapping[str, Any]],
        idle_seconds: float | None = None,
        aliases: Mapping[str, str] | None = None,
        load: Callable[..., AsyncLLM] = AsyncLLM,
    ):
        self._models = {name: Model(name, options) for name, options in specs.items()}
        self._named = {**self._models, **{alias: self._models[name] for alias, name in (aliases or {}).items()}}
        self._idle_seconds = idle_seconds
        self._load_engine = load
        self._memory = asyncio.Lock()  # held by whoever loads or unloads
        self._closings: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        """Every name that is served, the default first."""
        return list(self._named)

    def path(self, name: str) -> str:
        """Where a model comes from, for the list of models; only the last part, since the rest is the server's own business."""
        return os.path.basename(str(self._named[name].options.get("model") or name).rstrip("/"))

    def loaded(self) -> dict[str, AsyncLLM]:
        """The engines that are in memory, by name."""
        return {model.name: model.llm for model in self._models.values() if model.llm is not None}

    async def start(self) -> None:
        """Load the model if there is only one; several wait for their first use."""
        if len(self._models) == 1:
            (model,) = self._models.values()
            await self._ready(model)

    async def close(self) -> None:
        """End all engines, and wait for those that are ending."""
        for model in self._models.values():
            if model.loading is not None:
                with contextlib.suppress(Exception):
                    await model.loading
            await self._unload(model)
        await asyncio.gather(*self._closings)

    @contextlib.asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[tuple[str, AsyncLLM]]:
        """(name, engine) of a model that stays in memory meanwhile. Failure 404 for a name that is not served."""
        model = next(iter(self._models.values())) if name is None else self._named.get(name)
        if model is None:
            raise Failure(404, f"there is no model {name!r:.200}; served: {', '.join(self._named)}", param="model", code="model_not_found")
        model.users += 1
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        try:
            yield model.name, await self._ready(model)
        finally:
            model.users -= 1
            if not model.users:
                self._rest(model)

    def _rest(self, model: Model) -> None:
        model.idle_since = time.monotonic()
        if self._idle_seconds is not None and model.llm is not None:
            model.timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._tire, model)

    def _tire(self, model: Model) -> None:
        task = asyncio.create_task(self._unload_if_idle(model))
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    async def _unload_if_idle(self, model: Model) -> None:
        async with self._memory:
            if not model.users:
                await self._unload(model)

    async def _ready(self, model: Model) -> AsyncLLM:
        if model.llm is not None:
            return model.llm
        if model.loading is None:
            model.loading = asyncio.create_task(self._load(model))
        return await asyncio.shield(model.loading)  # who asked first may leave: others wait for it too

    async def _load(self, model: Model) -> AsyncLLM:
        try:
            async with self._memory:
                while True:
                    try:
                        model.llm = await asyncio.to_thread(self._load_engine, **{"served_model_name": model.name, **model.options})
                        return model.llm
                    except OutOfMemoryError:
                        idle = [m for m in self._models.values() if m.llm is not None and not m.users]
                        if not idle:
                            raise
                        await self._unload(min(idle, key=lambda m: m.idle_since))
        finally:
            model.loading = None
            if not model.users:
                self._rest(model)

    async def _unload(self, model: Model) -> None:
        llm, model.llm = model.llm, None
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        if llm is not None:
            await asyncio.to_thread(llm.close)
