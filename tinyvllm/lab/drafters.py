"""Drafters and controllers of a sweep: those that `speculative_config` with the same keys gives an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm.config.values import expand_home
from tinyvllm.engine.second_model import open_any_drafter
from tinyvllm.errors import ArgumentError
from tinyvllm.lab.sweep import DrafterSpec
from tinyvllm.speculate.protocol import Drafter
from tinyvllm.speculative import HEADS, LOOKUPS, METHODS, OWN_HEADS, SpeculativeConfig, parse

if TYPE_CHECKING:
    from tinyvllm.engine.engine import Engine


def config_of(spec: DrafterSpec, k: int | None) -> SpeculativeConfig:
    """The `speculative_config` of a drafter and K. ArgumentError for a method, a key or a value that it does not take."""
    if "policy" in dict(spec.options):
        raise ArgumentError(f"drafter {spec.label}: policy is the axis policies")
    if spec.method in METHODS and spec.method not in LOOKUPS + OWN_HEADS and "model" not in dict(spec.options):
        raise ArgumentError(f"drafter {spec.label}: method={spec.method!r} needs a model: write {spec.method}:PATH")
    config = parse(spec.config(k))
    assert config is not None, "a spec without drafts has no configuration"
    return config


def require_files(spec: DrafterSpec) -> None:
    """ArgumentError if its model is a path to nothing. Names of a hub ("org/name") are looked up when the drafter is loaded."""
    if (model := _model_of(spec)) is None or expand_home(f"drafter {spec.label}", model).exists():
        return
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ArgumentError(f"drafter {spec.label}: no such file or folder: {model!r:.200}")


def files_of(spec: DrafterSpec) -> list[list[Any]]:
    """`model_files` of the drafter's model; empty for one without, and for a name of a hub."""
    model = _model_of(spec)
    return [] if model is None else model_files(expand_home(f"drafter {spec.label}", model))


def model_files(model: Path) -> list[list[Any]]:
    """Names, sizes and times of a model's files: changed weights under the same path are another measurement."""
    files = sorted(model.iterdir()) if model.is_dir() else [model] if model.is_file() else []
    return [[one.name, (status := one.stat()).st_size, status.st_mtime_ns] for one in files if one.is_file()]


def _model_of(spec: DrafterSpec) -> str | None:
    model = dict(spec.options).get("model")
    return model if isinstance(model, str) else None


class OpenDrafters:
    """The drafters of the cells that run: the last `most` of them, since each may hold a model and a cache.

    A drafter that is dropped loses what it has captured, some tens of milliseconds a shape. So cells that take turns need one each.
    """

    def __init__(self, most: int = 1) -> None:
        self._most = most
        self._drafters: dict[tuple[DrafterSpec, int | None], Drafter] = {}  # the one that was used least recently first

    def get(self, spec: DrafterSpec, k: int | None, engine: Engine) -> Drafter:
        """It is loaded if it is none of those. Heads are loaded for a K."""
        config = config_of(spec, k)
        key = spec, k if config.method in HEADS else None
        drafter = self._drafters.pop(key, None)
        if drafter is None:
            while len(self._drafters) >= self._most:
                del self._drafters[next(iter(self._drafters))]
            drafter = open_any_drafter(engine.config, config, engine.runner, engine.tokenizer)
        self._drafters[key] = drafter
        return drafter
