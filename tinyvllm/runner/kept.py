"""What decides the launches of an engine's steps in addition to the model: names of captured steps on disk (bridge/kept.py)."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any

from tinyvllm.backends import autotune, registry
from tinyvllm.backends.cpu.toolchain import processor
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.registry import STEMS, Choice, Need
from tinyvllm.backends.source import file_digests, kernels_folder
from tinyvllm.bridge import KeptSteps, StepNotes, Unkept, tinygrad_settings
from tinyvllm.config.engine import EngineConfig
from tinyvllm.config.switches import environment
from tinyvllm.placement import Placement
from tinyvllm.storage.cache import open_cache

MAX_NEEDS = 1 << 20  # bytes of the list of an engine's needs
_PACKAGE = Path(__file__).parents[1]
# Variables of ours that decide no launch.
_OTHER_VARIABLES = ("TINYVLLM_CACHE", "TINYVLLM_API_KEY", "TINYVLLM_KEEP_STEPS", "TINYVLLM_KEEP_PANELS", "TINYVLLM_DEVICE")
# Options that decide no launch; all others are part of the name.
_OTHER_OPTIONS = (
    "model",
    "served_model_name",
    "tokenizer",
    "skip_tokenizer_init",
    "revision",
    "record",
    "profile",
    "energy",
    "prefix_cache_dir",
    "lora_modules",
    "seed",
    "warm_up",
)


def switches_of_launches() -> dict[str, str]:
    """The environment's switches that decide launches, as they are written. Variables of options are not among them."""
    return {name: os.environ[name] for name in environment(os.environ) if name not in _OTHER_VARIABLES}


def kept_steps(placement: Placement, config: EngineConfig, roots: Mapping[str, object]) -> KeptSteps | None:
    """The steps of an engine on disk; `roots` is what all of them read. None with TINYVLLM_KEEP_STEPS=0."""
    if not environment(os.environ).get("TINYVLLM_KEEP_STEPS", True):
        return None
    options = [(field.name, getattr(config, field.name)) for field in fields(config) if field.name not in _OTHER_OPTIONS]
    backend = registry.backend_for(placement)
    # the CPU's identity names its compiler, which a copied cache folder does without
    gpu = "" if backend is None or placement.is_cpu else backend.identity(placement)
    fixed = (
        sources_digest(),
        processor(),
        gpu,
        registry.architecture_of(placement),
        sorted(switches_of_launches().items()),
        repr(options),
        tinygrad_settings(),
    )

    def identity() -> str:
        return repr((*fixed, registry.replaced_variants(), autotune.figures_digest()))

    return KeptSteps(placement.device, roots, identity, _Choices())


@functools.cache
def sources_digest() -> str:
    """A digest of this package's files and of the kernels' sources."""
    digest = hashlib.sha256()
    for name, content in (*file_digests(_PACKAGE, ".py"), *file_digests(kernels_folder())):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


class _Choices(StepNotes):
    """Which kernels were chosen in a capture; a capture whose kernels wait to be timed is not kept, so that the next process times them."""

    def moment(self) -> tuple[int, int]:
        return registry.selections(), autotune.untimed()

    def since(self, moment: tuple[int, int]) -> list[Any]:
        if autotune.untimed() != moment[1]:
            raise Unkept("its kernels wait to be timed")
        return [[*astuple(choice), facts and _values(facts)] for choice, facts in registry.choices_since(moment[0])]

    def restore(self, notes: list[Any], device: str) -> None:
        for stem, shape, variant, why, values in notes:
            if stem not in STEMS or not all(isinstance(text, str) for text in (shape, variant, why)):
                raise ValueError(f"a choice of {stem!r:.40}")
            facts = None if values is None else _need((stem, values), Placement(device))[1]
            registry.note_choice(device, Choice(stem, shape, variant, why), facts)


def kept_needs(steps: KeptSteps | None, placement: Placement) -> list[Need] | None:
    """What an engine selects kernels for, if an earlier start has found out."""
    content = None if steps is None else open_cache().read(_place(steps), MAX_NEEDS)
    if content is None:
        return None
    try:
        return [_need(entry, placement) for entry in json.loads(content)]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        assert steps is not None
        open_cache().discard(_place(steps), f"{type(error).__name__}: {error}"[:200])
        return None


def keep_needs(steps: KeptSteps | None, needs: Iterable[Need]) -> None:
    """Keep what an engine selects kernels for, to be tested at later starts: nothing where steps are tested before they run."""
    if steps is not None:
        entries = [[stem, _values(facts)] for stem, facts in needs]
        open_cache().write(_place(steps), json.dumps(entries).encode())


def ended_before(steps: KeptSteps | None) -> bool:
    """Whether an engine with these steps has called this before, and has ended."""
    if steps is None:
        return False
    place = steps.place("ended")
    if open_cache().read(place, MAX_NEEDS) is not None:
        return True
    open_cache().write(place, b"before")
    return False


def _place(steps: KeptSteps) -> str:
    return steps.place("needs")


def _values(facts: ShapeFacts) -> dict[str, Any]:
    return {name: value for name, value in asdict(facts).items() if name != "placement"}


def _need(entry: Any, placement: Placement) -> Need:
    stem, values = entry
    types = {field.name: type(field.default) for field in fields(ShapeFacts) if field.name != "placement"}
    if stem not in STEMS or not all(type(value) is types[name] for name, value in values.items()):
        raise ValueError(f"facts of {stem!r:.40}")
    return stem, ShapeFacts(placement, **values)
