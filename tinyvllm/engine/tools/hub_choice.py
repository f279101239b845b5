"""Which model of a hub's repository fits a machine: the one with the most bytes, by the arithmetic of a plan and by headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tinyvllm.config.engine import EngineConfig
from tinyvllm.engine.tools.plan_sizes import Sizes, open_sizes
from tinyvllm.errors import ModelError
from tinyvllm.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from tinyvllm.weights.hub_files import Pull

MAX_PLANNED = 16  # models of a repository whose headers are fetched


@dataclass(frozen=True)
class Rejected:
    """A model that was not chosen, and why."""

    pull: Pull
    why: str


@dataclass(frozen=True)
class Choice:
    """The model to fetch. `sizes` is its plan, None where its name was the choice, or where it could not be planned.

    quantization  what it needs to fit, None for the formats of its files
    smaller       models that fit, too: those with fewer bytes
    warning       why the only model would not run here
    """

    pull: Pull
    sizes: Sizes | None = None
    quantization: str | None = None
    rejected: tuple[Rejected, ...] = ()
    smaller: tuple[Pull, ...] = ()
    warning: str | None = None


def choose_pull(pulls: Sequence[Pull], config: EngineConfig, available: int, limit: str) -> Choice:
    """The model of a repository for `available` bytes: weights, scratch, and the KV cache of one sequence of the wanted context.

    A folder with safetensors is preferred, then the largest GGUF model that fits; the folder quantized while loading is the last resort.
    The only model is the choice, whatever it takes. ModelError if none of several fits.
    """
    if len(pulls) == 1:
        return _only(config, pulls[0], available, limit)
    rejected: list[Rejected] = []
    quantizable: Choice | None = None
    for number, pull in enumerate(pulls):
        if number - sum(one.why == _TOO_LARGE for one in rejected) == MAX_PLANNED:
            break
        why, sizes = _reason_against(config, pull, available, limit)
        if why is None:
            return Choice(pull, sizes, rejected=tuple(rejected), smaller=tuple(pulls[number + 1 :]))
        if sizes is not None and pull.is_folder and sizes.best is not None:
            quantizable = Choice(pull, sizes, sizes.best.quantization)
        rejected.append(Rejected(pull, why))
    if quantizable is not None:
        return replace(quantizable, rejected=tuple(one for one in rejected if one.pull is not quantizable.pull))
    least = min(rejected, key=lambda one: one.pull.nbytes)
    which = "the smallest" if len(rejected) == len(pulls) else f"the smallest of {MAX_PLANNED} that were planned"
    raise ModelError(
        f"hub: no model of {pulls[0].repo} fits: of {len(pulls)} {which}, {least.pull.name}, {least.why}; choose one by name if "
        "memory will be free, lower --max-model-len, or give --memory"
    )


def _only(config: EngineConfig, pull: Pull, available: int, limit: str) -> Choice:
    why, sizes = _reason_against(config, pull, available, limit)
    if why is not None and sizes is not None and sizes.best is not None:
        return Choice(pull, sizes, sizes.best.quantization)
    return Choice(pull, sizes, warning=why)


_TOO_LARGE = "has more bytes than there is memory"


def _reason_against(config: EngineConfig, pull: Pull, available: int, limit: str) -> tuple[str | None, Sizes | None]:
    """Why a model does not fit, None if it does, and its plan. The headers of a file far beyond the memory are not fetched."""
    from tinyvllm.weights.hub_headers import header_copies

    held = pull.nbytes * (0.5 if pull.is_float else 0.9)  # at least: float32 may be held in 16 bits
    if not pull.is_folder and held > available:
        return _TOO_LARGE, None
    try:
        with header_copies(pull) as path:
            sizes = open_sizes(replace(config, model=str(path), revision=None), available, limit)
    except ModelError as error:
        return f"cannot be planned: {error}", None
    return reason_against(sizes, config.quantization), sizes


def reason_against(sizes: Sizes, quantization: str | None = None) -> str | None:
    """Why an engine of this plan would not start, or would not hold one sequence of the wanted context; None if it would."""
    if sizes.refusal is not None:
        return f"would not start: {sizes.refusal}"
    own = next((one for one in sizes.candidates if one.quantization == quantization), None)
    if own is None or own.fits:
        return None
    return f"leaves room for {own.longest} of {sizes.wanted_context} tokens; {sizes}"
