"""Which kernel runs an op here: a hand-written one, or the reference in plain tinygrad. Every choice is remembered with its reason.

A backend's variants are ordered, best first. The first one whose needs this machine meets is taken, unless the backend does not support
the shape, or `TINYVLLM_KERNELS=attention_decode=ref,matmul=avx2,all=plain` says otherwise. A forced choice that is not possible is an
error.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
from collections.abc import Iterator

from tinyvllm.backends.base import Backend
from tinyvllm.backends.cases import Case, case_of
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.outline import Outline
from tinyvllm.bridge import architecture, opened_device
from tinyvllm.config.switches import environment
from tinyvllm.errors import ArgumentError, KernelError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.placement import Placement

REFERENCE = "ref"


def _cpu() -> Backend:
    from tinyvllm.backends.cpu.call import CpuBackend

    return CpuBackend()


def _cuda() -> Backend:
    from tinyvllm.backends.cuda.call import CudaBackend

    return CudaBackend()


def _metal() -> Backend:
    from tinyvllm.backends.metal.call import MetalBackend

    return MetalBackend()


# The one table of backends, by tinygrad's kind of device.
_MAKERS = {"CPU": _cpu, "CUDA": _cuda, "METAL": _metal}


class _Backends(dict[str, Backend]):
    """One backend a kind, made when it is first asked for: most processes have one kind of device, and importing the others takes 8 ms."""

    def __missing__(self, kind: str) -> Backend:
        return self.setdefault(kind, _MAKERS[kind]())


BACKENDS = _Backends()

# The ops that have kernels, by the stem of their source.
STEMS = (
    "embed",
    "norm_qkv_rope_store",
    "kv_append",
    "attention_decode",
    "attention_prefill",
    "matmul",
    "lora_bias",
    "gated_delta",
    "norm_gate_up_silu",
    "norm_route",
    "experts_gate_up_silu",
    "experts_down",
    "norm_head",
    "advance",
    "kv_copy",
    "sample",
    "pack_tiles",
)


@dataclass(frozen=True)
class Choice:
    """What runs an op of one shape: `variant` is the kernel variant's name or "ref", `why` the reason in words."""

    stem: str
    shape: str
    variant: str
    why: str


@dataclass(frozen=True)
class Selection:
    """A kernel variant that was selected for an op, and the backend that has it."""

    backend: Backend
    variant: str


Need = tuple[str, ShapeFacts]  # an op's stem, and the facts of its shape

_choices: dict[tuple[str, str, str], Choice] = {}
_numbers = itertools.count()
_selected: dict[tuple[str, str, str], int] = {}  # the number of a choice when it was made last
_failures: dict[tuple[str, str, Case], str] = {}  # why a variant's kernel of a case must not run on a device: selftest.py
_facts: dict[tuple[str, str, str], ShapeFacts] = {}  # those of a choice that has some
_watched: set[str] = set()  # devices of which `take_selected` is asked
_fresh: dict[Need, None] = {}  # selected there since it was asked last
_needs: list[dict[Need, Choice]] = []  # the innermost `collecting_needs` is the last


def backend_for(placement: Placement) -> Backend | None:
    """The backend of a device, None for a kind of device that has no kernels."""
    return BACKENDS[placement.kind] if placement.kind in _MAKERS else None


def open_device(placement: Placement) -> None:
    """Open the device; raises what tinygrad's device raises if it cannot be opened."""
    backend = backend_for(placement)
    if backend is None:
        opened_device(placement.device)
    else:
        backend.open(placement)


def select(stem: str, placement: Placement, shape: str, facts: ShapeFacts | None = None) -> Selection | None:
    """The kernel variant that runs this op at `placement`, or None for the reference.

    `shape` describes the shape in the list of choices; `facts` is what the backend's limits are checked against, None for no check.
    """
    choice = _choose(stem, placement, shape, facts, _forced(os.environ.get("TINYVLLM_KERNELS", "")))
    if _needs and facts is not None:
        _needs[-1][stem, facts] = choice
        return None if choice.variant == REFERENCE else Selection(Outline(), choice.variant)
    note_choice(placement.device, choice, facts)
    backend = backend_for(placement)
    return None if backend is None or choice.variant == REFERENCE else Selection(backend, choice.variant)


def first_variant(placement: Placement) -> Selection:
    """The best variant of a device that has kernels, for an op that has no reference: nothing is chosen."""
    backend = backend_for(placement)
    assert backend is not None, "only kernels compute this op"
    return Selection(Outline() if _needs else backend, usable_variants(placement)[0])


@contextlib.contextmanager
def collecting_needs() -> Iterator[dict[Need, Choice]]:
    """Within it, ops launch nothing and return empty tensors; the dict has what they selected kernels for, and which."""
    needs: dict[Need, Choice] = {}
    _needs.append(needs)
    try:
        yield needs
    finally:
        _needs.pop()


def choice_of(stem: str, shape: str, facts: ShapeFacts) -> Choice:
    """What `select` would choose."""
    return _choose(stem, facts.placement, shape, facts, _forced(os.environ.get("TINYVLLM_KERNELS", "")))


def replaceable_variant(stem: str, placement: Placement, facts: ShapeFacts) -> str | None:
    """The variant that runs an op, if another one may: not the reference, and not what TINYVLLM_KERNELS names."""
    forced = _forced(os.environ.get("TINYVLLM_KERNELS", ""))
    if stem in forced or "all" in forced:
        return None
    variant = _choose(stem, placement, "", facts, forced).variant
    return None if variant == REFERENCE else variant


def replace_variant(placement: Placement, variant: str, case: Case, reason: str) -> None:
    """From now on, do not choose this variant where `case` is the case of the shape, because of `reason`."""
    _failures[placement.device, variant, case] = reason


def forget_replaced() -> None:
    """Choose as if no variant had failed."""
    _failures.clear()


def choices(device: str | None = None) -> list[Choice]:
    """All choices of this process in their order, or those of one device."""
    return [choice for (_, at, _), choice in _choices.items() if device in (None, at)]


def note_choice(device: str, choice: Choice, facts: ShapeFacts | None) -> None:
    """Remember a choice, as that of a step which an earlier process has captured."""
    key = choice.stem, device, choice.shape
    _choices[key], _selected[key] = choice, next(_numbers)
    if facts is not None:
        _facts[key] = facts
        if device in _watched and choice.variant != REFERENCE:
            _fresh[choice.stem, facts] = None


def watch_selected(device: str, on: bool) -> None:
    """Whether `take_selected` has what is selected for this device from now on."""
    (_watched.add if on else _watched.discard)(device)


def take_selected() -> list[Need]:
    """What kernels were selected for since the last call, on the devices that are watched."""
    needs = list(_fresh)
    _fresh.clear()
    return needs


def selections() -> int:
    """A number that grows with every choice."""
    return next(_numbers)


def choices_since(count: int) -> list[tuple[Choice, ShapeFacts | None]]:
    """The choices made after `selections` returned `count`, with the facts of their shapes."""
    return [(_choices[key], _facts.get(key)) for key, number in _selected.items() if number > count and key in _choices]


def replaced_variants() -> list[str]:
    """Which variants do not run which cases on which device."""
    return sorted(f"{device} {variant} {case}" for device, variant, case in _failures)


def forget_choices() -> None:
    """Empty the list of choices, to see those of one engine."""
    _choices.clear()


def variants(placement: Placement, stem: str | None = None) -> dict[str, str | None]:
    """The kernel variants at a placement, best first, each with what this machine lacks for it, or None.

    With `stem`, also those that only this op has.
    """
    backend = backend_for(placement)
    return {} if backend is None else backend.variants(placement, stem)


def architecture_of(placement: Placement) -> str:
    """What a placement computes with: "sm_90", "Apple9", "x86_64 avx512". The order of rounded sums, and so a token, may depend on it."""
    if not placement.is_cpu:
        return architecture(placement.device)
    return " ".join([platform.machine(), *usable_variants(placement)[:1]])


def usable_variants(placement: Placement, stem: str | None = None) -> list[str]:
    """Names of the variants that this machine can run, best first."""
    return [name for name, lacking in variants(placement, stem).items() if lacking is None]


def skipped_variants(placement: Placement) -> list[str]:
    """Why this machine runs no better variant than its best, such as "not amx: the processor has no amx_tile". Nothing where it can run
    none: there each choice has the reasons.
    """
    skipped: list[str] = []
    for name, lacking in variants(placement).items():
        if lacking is None:
            return skipped
        skipped.append(f"not {name}: {lacking}")
    return []


def _choose(stem: str, placement: Placement, shape: str, facts: ShapeFacts | None, forced: dict[str, str]) -> Choice:
    assert stem in STEMS, stem
    backend, wanted, kind = backend_for(placement), forced.get(stem, forced.get("all")), placement.kind
    if wanted == REFERENCE:
        return Choice(stem, shape, REFERENCE, "TINYVLLM_KERNELS asks for it")
    if backend is None:
        if wanted is not None:
            raise KernelError(f"kernels: TINYVLLM_KERNELS wants {stem}={wanted}, but there are no kernels for {kind} yet; only {REFERENCE}")
        return Choice(stem, shape, REFERENCE, f"there are no kernels for {kind} yet")
    reason = f"{kind} has no kernel for it" if stem not in backend.stems else None if facts is None else backend.unsupported(stem, facts)
    if reason is not None:
        if stem in forced:
            raise KernelError(f"kernels: TINYVLLM_KERNELS wants {stem}={wanted}, which cannot run {shape}: {reason}")
        return Choice(stem, shape, REFERENCE, reason)
    available = backend.variants(placement, stem)
    if wanted is None:
        return _best(stem, shape, available, backend.variants(placement), _failed(stem, placement, facts))
    return _wanted(stem, placement, shape, wanted, available)


def _failed(stem: str, placement: Placement, facts: ShapeFacts | None) -> dict[str, str]:
    """The variants that failed their self-test for these facts, with the reason."""
    if not _failures:
        return {}
    case = case_of(stem, facts)
    return {variant: reason for (device, variant, of), reason in _failures.items() if (device, of) == (placement.device, case)}


def _best(stem: str, shape: str, available: dict[str, str | None], of_machine: dict[str, str | None], failed: dict[str, str]) -> Choice:
    """The first variant that this machine can run and that has not failed its self-test. Which variants it lacks for all ops,
    `skipped_variants` says once.
    """
    replaced: list[str] = []
    skipped: dict[str, str] = {}
    for name, lacking in available.items():
        if lacking is None and name in failed:
            replaced.append(f"replaced: {name} failed its self-test: {failed[name]}")
            continue
        if lacking is None:
            own = [reason for other, reason in skipped.items() if of_machine.get(other) is None]
            return Choice(stem, shape, name, "; ".join(replaced + own) or "the best variant for this processor")
        skipped[name] = f"not {name}: {lacking}"
    return Choice(stem, shape, REFERENCE, "; ".join([*replaced, *skipped.values()]))


def _wanted(stem: str, placement: Placement, shape: str, wanted: str, available: dict[str, str | None]) -> Choice:
    """The variant that TINYVLLM_KERNELS names; KernelError if this machine cannot run it."""
    if wanted not in available:
        known = ", ".join(available)
        raise KernelError(f"kernels: TINYVLLM_KERNELS wants {stem}={wanted}; {placement} here has {known}, and {REFERENCE}")
    if (lacking := available[wanted]) is not None:
        raise KernelError(f"kernels: TINYVLLM_KERNELS wants {stem}={wanted}, but {lacking}")
    return Choice(stem, shape, wanted, "TINYVLLM_KERNELS asks for it")


@functools.cache
def _forced(text: str) -> dict[str, str]:
    forced: dict[str, str] = environment({"TINYVLLM_KERNELS": text}).get("TINYVLLM_KERNELS", {}) if text else {}
    variants = [name for kind in _MAKERS for name in BACKENDS[kind].variant_names] if forced else []
    for stem, variant in forced.items():
        if stem not in (*STEMS, "all"):
            raise ArgumentError(f"TINYVLLM_KERNELS: there is no op {stem!r}; there are {', '.join(STEMS)}, and all")
        if variant not in (*variants, REFERENCE):
            known = ", ".join(variants)
            raise ArgumentError(f"TINYVLLM_KERNELS: there is no variant {variant!r} for {stem}; there are {known}, and {REFERENCE}")
    return forced
