"""What LLM and AsyncLLM share: the start of an engine, the hand-over of a request, and the request that computes a segment."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tinyvllm.config.engine import EngineConfig
from tinyvllm.engine.observer import EngineObserver
from tinyvllm.engine.prompt import Encoded
from tinyvllm.engine.segments import Segment
from tinyvllm.engine.startup import DEVICE_LOCK, Progress
from tinyvllm.errors import ArgumentError
from tinyvllm.request import BeamSearchParams, LoRARequest, RequestOptions, SamplingParams

if TYPE_CHECKING:
    from tinyvllm.engine.energy import EngineEnergy
    from tinyvllm.engine.engine import Engine
    from tinyvllm.engine.tools.hub_choice import Choice
    from tinyvllm.engine.tools.plan import Plan
    from tinyvllm.engine.tools.plan_sizes import Sizes
    from tinyvllm.engine.tools.trace_output import TraceFile


def start_engine(config: EngineConfig, progress: Progress | None) -> Engine:
    """Load the model, with the observers of its configuration: OutputError if the file of `record` cannot be written, ArgumentError if
    the endpoints of `kv_events_config` cannot be used."""
    from tinyvllm.runner.device import prepare_compiler

    prepare_compiler(config.device)  # in the background
    from tinyvllm.engine.engine import Engine  # tinygrad comes with it, and a wrong option is reported without waiting for that

    observers: list[EngineObserver] = []
    profile: TraceFile | None = None
    try:
        if config.record is not None:  # what is not asked for is not imported: a part of each start
            from tinyvllm.engine.tools.record import record_to

            observers.append(record_to(config.record))
        if config.kv_events_config is not None:
            from tinyvllm.engine.kv_events import CacheEvents

            number = config.data_parallel_rank or 0
            observers.append(CacheEvents(config.kv_events_config.of_replica(number), config.block_size, number))
        if config.profile is not None:
            from tinyvllm.engine.tools.trace_output import TraceFile

            profile = TraceFile(config.profile)
        energy = open_energy(config)
        if energy is not None:
            observers.append(energy)
        engine = Engine(config, progress, observers=observers, energy=energy)
        if profile is not None:
            from tinyvllm.engine.tracing import start_trace

            start_trace(engine, profile, measure=True)
        return engine
    except BaseException:
        if profile is not None:
            profile.close()
        for observer in observers:
            observer.engine_closed()
        raise


def open_energy(config: EngineConfig) -> EngineEnergy | None:
    """The account of energy, if the engine is to have one. The idle machine is measured before anything is loaded."""
    if not config.energy:
        return None
    from tinyvllm.energy.meter import open_account
    from tinyvllm.engine.energy import EngineEnergy
    from tinyvllm.runner.device import choose_device

    chosen = replace(config, device=choose_device(config.device))
    return EngineEnergy(open_account(chosen.device, chosen.num_ranks if chosen.on_gpus else 1))


def plan_engine(config: EngineConfig, memory: int | None = None, speed: bool = True) -> Plan:
    """What the engine of a configuration takes, which kernels it runs and how fast: engine/tools/plan.py. Nothing is loaded."""
    from tinyvllm.engine.tools.plan import make_plan

    with DEVICE_LOCK:
        return make_plan(config, memory, speed)


def plan_memory(config: EngineConfig, memory: int | None = None, limit: str = "--memory") -> Sizes:
    """What the engine of a configuration takes in memory: `plan_engine` without kernels and speed. `limit` says what sets `memory`."""
    from tinyvllm.engine.tools.plan import plan_sizes

    with DEVICE_LOCK:
        return plan_sizes(config, memory, limit)


def plan_download(config: EngineConfig, memory: int | None = None) -> Choice:
    """Which model of a hub's repository fits the machine, or `memory` bytes: engine/tools/hub_choice.py. Only headers are fetched."""
    from tinyvllm.engine.tools.plan import plan_pull

    with DEVICE_LOCK:
        return plan_pull(config, memory)


def submit(
    engine: Engine, request_id: str, encoded: Encoded, params: SamplingParams | BeamSearchParams, options: RequestOptions | None
) -> None:
    """Queue an encoded prompt; the errors of Engine.add, and ArgumentError for two salts, and for segments that the request may not use."""
    options = _with_salt(options, encoded.cache_salt)
    if encoded.segments and options is not None and options.adapter is not None:
        raise ArgumentError(f"segments are computed without an adapter: leave out the segments, or the adapter {options.adapter.name!r}")
    engine.segments.check_use(encoded.segments, options)
    engine.add(request_id, encoded.token_ids, params, encoded.text, options)


def _with_salt(options: RequestOptions | None, salt: str | None) -> RequestOptions | None:
    """The options of a request whose prompt has this salt, or none. ArgumentError if the options have another one."""
    if salt is None:
        return options
    options = options or RequestOptions()
    if options.cache_salt not in (None, salt):
        raise ArgumentError(f"cache_salt: the prompt has {salt!r:.80}, its options {options.cache_salt!r:.80}: give one of them")
    return replace(options, cache_salt=salt)


def with_adapter(engine: Engine, options: RequestOptions | None, lora: LoRARequest | None) -> RequestOptions | None:
    """The options of a request that wants an adapter, which is loaded if it was not. Errors of Adapters.use."""
    if lora is None:
        return options
    return replace(options or RequestOptions(), adapter=engine.adapters.use(lora))


def prefill_options(segment: Segment, options: RequestOptions | None = None) -> RequestOptions:
    """The options of the request that computes a segment: priority and caller of `options`, and the salt of the segment."""
    options = options or RequestOptions()
    return RequestOptions(options.priority, key=options.key, anonymous=options.anonymous, cache_salt=segment.cache_salt)
