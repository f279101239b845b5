"""The low-rank adapters of one engine, by name: loaded, used by requests, unloaded. Used in the engine's thread, but for `read`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from tinyvllm.config.values import expand_home
from tinyvllm.errors import ArgumentError, BusyError, RequestError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request.adapter import Adapter, LoRARequest, check_adapter_name

if TYPE_CHECKING:
    from tinyvllm.runner.adapters import AdapterPool, PreparedAdapter
    from tinyvllm.runner.runner import Runner


_RETRY_SECONDS = 1.0  # what is told to wait for a place


@dataclass
class _Loaded:
    adapter: Adapter
    on_demand: bool  # a request has brought it, and another one may replace it
    last_use: int = 0


class Adapters:
    """The loaded adapters. An adapter that is unloaded keeps its place until the requests that use it have ended.

    `runner` has room for them, but without `enable_lora`; `in_use` gives the numbers of the adapters of all requests that have not ended.
    """

    def __init__(self, runner: Runner, in_use: Callable[[], Collection[int]]):
        self._runner: Runner | None = runner
        self._in_use = in_use
        self._loaded: dict[str, _Loaded] = {}
        self._uses = itertools.count(1)
        self.loaded: Mapping[str, Adapter] = {}  # that requests may name now; replaced with each change, so that any thread may read it

    def read(self, path: str) -> PreparedAdapter:
        """The files of an adapter, read and checked for this model. Any thread may call it.

        ArgumentError without `enable_lora`, ModelError or FormatError for files that are missing, damaged, or of another model.
        """
        from tinyvllm.weights.peft import read_adapter

        return self._enabled()[1].prepare(read_adapter(expand_home("lora_path", path)))

    def load(self, name: str, path: str, adapter: PreparedAdapter | None = None, on_demand: bool = False) -> Adapter:
        """Load an adapter under a name; `adapter` is what `read` gave for the path.

        ArgumentError for a name that is in use, or where max_loras are loaded; BusyError while requests use all places that are free.
        """
        check_adapter_name(name)
        if name in self._loaded:
            path = self._loaded[name].adapter.path
            raise ArgumentError(f"lora_name: an adapter {name!r} is loaded, from {path!r}; unload it first, or choose another name")
        (runner, pool), prepared = self._enabled(), self.read(path) if adapter is None else adapter
        number = self._free_number(pool.count, on_demand)
        runner.place_adapter(number, prepared, path)
        loaded = Adapter(name, number, prepared.digest, path)
        self._loaded[name] = _Loaded(loaded, on_demand, next(self._uses))
        self._publish()
        return loaded

    def unload(self, name: str) -> None:
        """No further request can use the adapter. ArgumentError if there is none of this name."""
        if self._loaded.pop(name, None) is None:
            raise ArgumentError(f"lora_name: no adapter {name!r:.200} is loaded; loaded are: {', '.join(self._loaded) or 'none'}")
        self._publish()

    def use(self, request: LoRARequest) -> Adapter:
        """The adapter of a request, loaded now if none of its name is and it has a path; then one that a request had brought and none uses
        may be unloaded for it. Errors of `read` and `load`; ArgumentError for another path than that of the name."""
        self._enabled()
        held = self._loaded.get(request.lora_name)
        if held is None:
            if not request.lora_path:
                raise ArgumentError(f"lora_request: no adapter {request.lora_name!r} is loaded; give its lora_path")
            return self.load(request.lora_name, request.lora_path, on_demand=True)
        if request.lora_path not in ("", held.adapter.path):
            raise ArgumentError(
                f"lora_request: the adapter {request.lora_name!r} was loaded from {held.adapter.path!r}, not from {request.lora_path!r}; "
                "unload it first, or choose another name"
            )
        held.last_use = next(self._uses)
        return held.adapter

    def check(self, adapter: Adapter | None) -> None:
        """RequestError for an adapter that is no longer loaded."""
        if adapter is not None and self.loaded.get(adapter.name) != adapter:
            raise RequestError(f"the adapter {adapter.name!r} was unloaded before the request began; load it again")

    def close(self) -> None:
        """Drop what holds the model's memory."""
        self._runner = None

    def _publish(self) -> None:
        self.loaded = {name: held.adapter for name, held in self._loaded.items()}

    def _enabled(self) -> tuple[Runner, AdapterPool]:
        runner = self._runner
        if runner is None or runner.adapters is None:
            raise ArgumentError("adapters: the engine was started without enable_lora (--enable-lora); start it with that")
        return runner, runner.adapters

    def _free_number(self, count: int, on_demand: bool) -> int:
        used = set(self._in_use())
        if len(self._loaded) >= count:
            idle = [held for held in self._loaded.values() if held.on_demand and held.adapter.number not in used]
            if not (on_demand and idle):
                names = ", ".join(self._loaded)
                raise ArgumentError(f"max_loras={count} adapters are loaded ({names}): unload one, or start with a larger max_loras")
            self.unload(min(idle, key=lambda held: held.last_use).adapter.name)
        taken = used | {held.adapter.number for held in self._loaded.values()}
        free = next((number for number in range(1, count + 1) if number not in taken), None)
        if free is None:
            text = "adapters: requests still use those that were unloaded; try again when they have ended"
            raise BusyError(text, _RETRY_SECONDS, "max_loras")
        return free
