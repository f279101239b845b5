"""Drafters and controllers of the engine by the names of a sweep."""

from __future__ import annotations

from collections.abc import Callable

from tinyvllm.errors import ArgumentError, nearest
from tinyvllm.lab.sweep import DrafterSpec
from tinyvllm.speculate.controller import MAX_DRAFTS, AdaptiveController, FixedController
from tinyvllm.speculate.ngram import NgramDrafter
from tinyvllm.speculate.protocol import Controller, Drafter
from tinyvllm.speculate.suffix import SuffixDrafter


def _ngram(prompt_lookup_max: int | None = None, prompt_lookup_min: int | None = None) -> Drafter:
    return NgramDrafter(prompt_lookup_max, prompt_lookup_min)


def _suffix() -> Drafter:
    return SuffixDrafter()


METHODS: dict[str, tuple[Callable[..., Drafter], tuple[str, ...]]] = {
    "ngram": (_ngram, ("prompt_lookup_max", "prompt_lookup_min")),
    "suffix": (_suffix, ()),
}


def check_drafter(spec: DrafterSpec, k: int | None) -> None:
    """ArgumentError for a method or an option that is not known, or too many drafts. Builds nothing."""
    if spec.method not in METHODS:
        raise ArgumentError(f"drafters: expected none or one of {', '.join(METHODS)}, got {spec.method!r}{nearest(spec.method, METHODS)}")
    known = METHODS[spec.method][1]
    for name, _ in spec.options:
        if name not in known:
            expected = f"expected {', '.join(known)}" if known else "it has none"
            raise ArgumentError(f"drafter {spec.label}: unknown option {name!r}{nearest(name, known)}; {expected}")
    if k is not None and k > MAX_DRAFTS:
        raise ArgumentError(f"k: the engine verifies at most {MAX_DRAFTS} drafts of a sequence in a step, got {k}")


def new_drafter(spec: DrafterSpec) -> Drafter:
    """A drafter that has learned nothing yet."""
    return METHODS[spec.method][0](**dict(spec.options))


def new_controller(k: int | None, looks_up: bool) -> Controller:
    """Always k drafts; for None the engine's own choice."""
    return AdaptiveController(MAX_DRAFTS, looks_up=looks_up) if k is None else FixedController(k)
