"""The processes and devices that share a model: what an engine's options say of them, and what they cannot do yet."""

from __future__ import annotations

from tinyvllm.config.devices import kind_of
from tinyvllm.errors import ArgumentError
from tinyvllm.kv_events.config import KVEventsConfig
from tinyvllm.speculative import SpeculativeConfig

PARALLEL_SIZES = (1, 2, 4, 8)  # of processes that share layers or contexts
SHARED_BY_GPUS = ("CUDA",)  # kinds of devices of which several can share a model
DIVIDED = ("ngram", "suffix")  # methods of guessing that need nothing of the model, which several processes divide
LAYER_DEVICES = ("CUDA", "METAL")  # that may have some of a model's layers, next to the CPU


class RankOptions:
    """The options of an EngineConfig that divide a model, and what follows from them."""

    device: str
    more_devices: tuple[str, ...]
    gpu_layers: int | None
    max_num_seqs: int
    num_scheduler_steps: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_parallel_size: int
    data_parallel_size: int
    data_parallel_rank: int | None
    kv_events_config: KVEventsConfig | None
    speculative_config: SpeculativeConfig | None

    @property
    def starts_replicas(self) -> bool:
        """Whether the engine has other replicas, which it starts itself."""
        return self.data_parallel_size > 1 and self.data_parallel_rank is None

    @property
    def all_seqs(self) -> int:
        """Sequences that the engine and the replicas that it starts run at the same time."""
        return self.max_num_seqs * (self.data_parallel_size if self.starts_replicas else 1)

    @property
    def num_ranks(self) -> int:
        """The processes that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that share the layers, from the last layers to the first: that of rank 0, then those of the other stages."""
        return (self.device, *self.more_devices)

    @property
    def device_names(self) -> str:
        """`devices` as a user writes them."""
        return ",".join(self.devices)

    def device_of(self, rank: int) -> str:
        """The device that a rank computes on."""
        return self.devices[rank] if self.more_devices else self.device

    @property
    def on_gpus(self) -> bool:
        """Whether each of several ranks has a GPU of its own."""
        return self.num_ranks > 1 and not self.more_devices and kind_of(self.device) in SHARED_BY_GPUS

    @property
    def memories(self) -> tuple[str, ...]:
        """The device of each memory that the model takes some of."""
        return (self.device,) * self.num_ranks if self.on_gpus else self.devices

    @property
    def cpu_ranks(self) -> int:
        """The processes that share the cores of the CPU, those of all replicas."""
        of_one = len([device for device in self.devices if kind_of(device) == "CPU"]) if self.more_devices else self.num_ranks
        return of_one * self.data_parallel_size

    def check_devices(self) -> None:
        """ArgumentError for devices that cannot share the layers of a model."""
        names = self.device_names
        if not self.more_devices:
            if self.gpu_layers is not None:
                raise ArgumentError(
                    f"gpu_layers={self.gpu_layers} divides the layers between two devices, got device={names}: give device=CUDA,CPU or "
                    "METAL,CPU, or leave it out"
                )
            return
        if len(self.devices) > 2 or kind_of(self.device) not in LAYER_DEVICES or self.more_devices[0] != "CPU":
            gpus = f"; for {len(self.devices)} GPUs give CUDA and --tensor-parallel-size {len(self.devices)}"
            several = {kind_of(device) for device in self.devices} <= {*SHARED_BY_GPUS}
            raise ArgumentError(
                f"device={names}: expected a GPU, then the CPU, which has the layers that do not fit the GPU: CUDA,CPU{gpus * several}"
            )
        for name in ("tensor_parallel_size", "context_parallel_size"):
            if getattr(self, name) != 1:
                raise ArgumentError(f"{name}={getattr(self, name)} does not work with device={names} yet: leave one of them out")
        if self.pipeline_parallel_size != len(self.devices):
            raise ArgumentError(
                f"pipeline_parallel_size={self.pipeline_parallel_size} contradicts device={names}, of which each is a stage: leave it out"
            )

    def require_one_engine(self) -> None:
        """ArgumentError where the configuration wants replicas, for what has one engine."""
        if self.starts_replicas:
            raise ArgumentError(
                f"data_parallel_size={self.data_parallel_size} is for AsyncLLM, serve and batch, which divide requests among engines, and "
                "here is one: leave it out"
            )

    def check_replicas(self) -> None:
        """ArgumentError for what replicas of an engine cannot do yet."""
        size, rank = self.data_parallel_size, self.data_parallel_rank
        if rank is not None and rank >= size:
            raise ArgumentError(f"data_parallel_rank={rank} must be below data_parallel_size={size}: replicas are counted from 0")
        if size == 1:
            return
        if self.more_devices or self.device not in ("auto", "CPU", *SHARED_BY_GPUS):
            raise ArgumentError(
                f"data_parallel_size={size}: replicas run on the CPU, or on GPUs of their own with device=CUDA (CUDA_VISIBLE_DEVICES says "
                f"which), got device={self.device_names}: leave one of them out"
            )
        if self.kv_events_config is not None:
            self.kv_events_config.check_replicas(size)
        for name in ("record", "profile", "energy", "prefix_cache_dir"):
            if self.starts_replicas and getattr(self, name):
                raise ArgumentError(f"{name} is of one engine, and data_parallel_size={size} starts several: leave one of them out")

    def check_ranks(self) -> None:
        """ArgumentError for what several ranks cannot do yet."""
        for name in ("tensor_parallel_size", "context_parallel_size"):
            size = getattr(self, name)
            if type(size) is not int or size not in PARALLEL_SIZES:
                raise ArgumentError(f"{name} must be one of {', '.join(map(str, PARALLEL_SIZES))}, got {size!r}")
        if self.num_ranks == 1:
            return
        sizes = {name: getattr(self, name) for name in ("context_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")}
        given = next(f"{name}={size}" for name, size in sizes.items() if size > 1)
        if self.more_devices:
            given = f"device={self.device_names}"
        elif self.device not in ("auto", "CPU", *SHARED_BY_GPUS):
            how = f", and ranks have the first GPUs: choose them by CUDA_VISIBLE_DEVICES={self.device.partition(':')[2]},..."
            on = f"the CPU and on {', '.join(SHARED_BY_GPUS)}{how * (kind_of(self.device) in SHARED_BY_GPUS)}"
            raise ArgumentError(f"{given} runs on {on}, got device={self.device}: leave one of them out")
        self._check_drafts(given)
        refused = ["swap_space", "prefix_cache_dir", "async_scheduling", "imatrix"]
        if self.more_devices or self.context_parallel_size > 1:
            refused.append("enable_lora")
        for name in refused:
            if getattr(self, name):
                raise ArgumentError(f"{name} does not work with {given} yet: leave one of them out")
        if self.num_scheduler_steps != 1:
            raise ArgumentError(f"num_scheduler_steps={self.num_scheduler_steps} is not supported with {given}: use 1")

    def _check_drafts(self, given: str) -> None:
        """ArgumentError for drafters that several ranks cannot have yet. `given`: the option that asks for ranks."""
        chosen = self.speculative_config
        if chosen is None:
            return
        if self.pipeline_parallel_size > 1:  # several steps are in flight, and drafts follow what the last one drew
            stages = given if self.more_devices else f"pipeline_parallel_size={self.pipeline_parallel_size}"
            raise ArgumentError(f"speculative_config does not work with {stages} yet: leave one of them out")
        alone = DIVIDED if self.context_parallel_size > 1 else (*DIVIDED, "draft_model")
        if chosen.method not in alone:
            raise ArgumentError(
                f"speculative_config: method={chosen.method} does not work with {given} yet: no process has what it reads of the model; "
                f"use one of {', '.join(alone)}, or leave one of them out"
            )
