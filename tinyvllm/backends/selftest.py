"""The self-test of kernels: each one runs once on small fixed inputs (cases/) before a model may use it, and what comes out is compared
with recorded answers. A variant that fails is replaced by the next one or by the reference, with a warning. So a wrong compiler, driver or
chip costs speed, not tokens.

`test_kernels` tests a list, at an engine's start. `test_before_first_run` tests the kernels of each captured step before it runs for the
first time, so that the first token does not wait for kernels of other steps.

Results are remembered in the cache folder by device, driver, compiler and sources (verdicts.py): a start whose kernels are known launches
nothing. A variant that TINYVLLM_KERNELS names is not tested. TINYVLLM_SELFTEST=off tests nothing, =always tests at every start.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import field, replace
from pathlib import Path

import numpy as np

from tinyvllm.backends import registry
from tinyvllm.backends.autotune import untuned
from tinyvllm.backends.base import Backend
from tinyvllm.backends.cases import Case, Site, case_of, run, wrong
from tinyvllm.backends.collecting import collecting_kernels
from tinyvllm.backends.kernel import Kernel
from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.registry import Need
from tinyvllm.backends.source import file_digests, kernels_folder
from tinyvllm.backends.verdicts import Verdicts
from tinyvllm.bridge import check_before_first_run, download, mapped, recover_device
from tinyvllm.config.switches import environment
from tinyvllm.errors import KernelError, ReplacedKernelError, ToolchainError
from tinyvllm.host_memory import is_out_of_memory
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import FLOATS, Layout, formats_in
from tinyvllm.quant.kv import KV_FORMATS
from tinyvllm.storage.cache import open_cache
from tinyvllm.version import VERSION

log = logging.getLogger("tinyvllm")

ANSWERS = Path(__file__).with_name("answers.npz")


@dataclass
class Report:
    """What the self-test of one engine did: kernels tested now, kernels known from earlier starts, and replaced ones with the reason."""

    mode: str = "on"
    tested: int = 0
    remembered: int = 0
    replaced: dict[str, str] = field(default_factory=dict)
    untested: str = ""
    seconds: float = 0.0

    def __add__(self, other: Report) -> Report:
        """Both tests as one."""
        untested = self.untested or other.untested
        tested, remembered = self.tested + other.tested, self.remembered + other.remembered
        return Report(other.mode, tested, remembered, self.replaced | other.replaced, untested, self.seconds + other.seconds)

    def __str__(self) -> str:
        if self.mode == "off":
            return "self-test: off (TINYVLLM_SELFTEST)"
        text = f"self-test: {self.tested} tested now, {self.remembered} known from earlier starts, {len(self.replaced)} replaced"
        return f"{text}, {self.seconds:.2f} s" + (f"; not tested: {self.untested}" if self.untested else "")


def test_kernels(placement: Placement, needs: Callable[[], Iterable[Need]]) -> Report:
    """Test what `needs` names and replace what fails. `needs` is called again after a replacement, since other ops may run then."""
    mode, backend = environment(os.environ).get("TINYVLLM_SELFTEST", "on"), registry.backend_for(placement)
    if mode == "off" or backend is None:
        return Report("off")
    return _SelfTest(placement, backend, mode).run(needs)


_lazy: dict[str, _SelfTest] = {}  # by device


def test_before_first_run(placement: Placement) -> Report:
    """From now on, test the kernels of each captured step of a device before it runs for the first time. The report grows with them."""
    mode, backend = environment(os.environ).get("TINYVLLM_SELFTEST", "on"), registry.backend_for(placement)
    tests = mode != "off" and backend is not None
    registry.watch_selected(placement.device, tests)
    if not tests or backend is None:
        _lazy.pop(placement.device, None)
        return Report("off")
    _lazy[placement.device] = _SelfTest(placement, backend, mode)
    return _lazy[placement.device].report


def _test_selected() -> None:
    """Test what was selected since the last call. ReplacedKernelError if a variant that was selected must not run."""
    needs = registry.take_selected()
    for device, test in [*_lazy.items()]:
        if not test.run_once([need for need in needs if need[1].placement.device == device]):
            raise ReplacedKernelError("self-test: a kernel of this step was replaced by another")


check_before_first_run(_test_selected)


def kernels_of_cases(placement: Placement, needs: Iterable[Need]) -> list[Kernel]:
    """The kernels that tests of `needs` will launch and that no earlier call has returned; none of what is known, or not tested."""
    test = _lazy.get(placement.device)
    return [] if test is None else test.kernels(needs)


def needs_by_format(placement: Placement) -> dict[str, list[Need]]:
    """A need of every op that has kernels on a device, by the format of weights or of the KV cache that it is for.

    BF16 is first, with the ops that have no format; then the other formats of weights, then those of caches.
    """
    backend = registry.backend_for(placement)
    if backend is None:
        return {}
    of_weights, of_caches = formats_in(backend.layout), (*FLOATS, *KV_FORMATS)
    found: dict[str, list[Need]] = {name: [] for name in dict.fromkeys((_FIRST, *of_weights, *of_caches))}
    for stem in (stem for stem in registry.STEMS if stem in backend.stems):
        if stem in ("advance", "kv_copy", "sample", "lora_bias", "gated_delta"):
            found[_FIRST].append((stem, ShapeFacts(placement, block_bytes=320, vocabulary=300)))
            if stem == "gated_delta":
                found[_FIRST].append((stem, ShapeFacts(placement, drafts=1)))
        elif stem.startswith("attention") or stem == "kv_append":
            for name in of_caches:
                found[name].append((stem, ShapeFacts(placement, cache_format=name, head_dim=64, block_size=16)))
        else:
            for name in ("F32",) if stem == "norm_route" else of_weights:  # which all routers have
                found[name] += [(stem, facts) for facts in _product_needs(stem, placement, backend.layout, name)]
    return found


def _product_needs(stem: str, placement: Placement, layout: Layout, format: str) -> list[ShapeFacts]:
    """Facts of a product, or of an embedding table, which is the head's matrix or rows of a file."""
    layouts = dict.fromkeys((layout, Layout.ROWS)) if stem == "embed" else (layout,)
    matrices = {"norm_qkv_rope_store": 3, "norm_gate_up_silu": 2, "experts_gate_up_silu": 2}.get(stem, 1) if layout is Layout.ROWS else 1
    facts = ShapeFacts(placement, 256, 64, format, matrices=matrices, cache_format=_FIRST, head_dim=64, block_size=16)
    return [replace(facts, layout=each.value) for each in layouts]


_FIRST = "BF16"


class _SelfTest:
    def __init__(self, placement: Placement, backend: Backend, mode: str):
        self._placement, self._backend, self._always = placement, backend, mode == "always"
        identity = backend.identity(placement)
        self._where = f"{placement.device} ({registry.architecture_of(placement)})"
        self._verdicts = Verdicts(open_cache(), f"{backend.name} {_digest(backend.name, identity)}")
        self._done: set[str] = set()  # tested by this process
        self._compiling: set[tuple[str, Case]] = set()  # whose kernels the backend was told to compile
        self.report = Report(mode)

    def run(self, needs: Callable[[], Iterable[Need]]) -> Report:
        while not self.run_once(needs()):  # each round replaces a variant of an op, so there is an end
            pass
        return self.report

    def run_once(self, needs: Iterable[Need]) -> bool:
        """Test what is not known yet; False if a variant was replaced, so that other ops may run now."""
        start, wanted, before = time.perf_counter(), list(dict.fromkeys(needs)), len(registry.replaced_variants())
        if untested := self._settle(wanted, test=False):
            with untuned(), self._verdicts.turn():
                if self._always and not self._done:
                    self._verdicts.forget()
                self._compile(untested)
                self._settle(wanted, test=True)
                self._verdicts.save()
        self.report.seconds += time.perf_counter() - start
        return len(registry.replaced_variants()) == before

    def kernels(self, needs: Iterable[Need]) -> list[Kernel]:
        """The kernels that tests of these needs will launch."""
        return self._collected([case for need in dict.fromkeys(needs) for case in self._settle([need], test=False)])

    def _settle(self, needs: list[Need], test: bool) -> list[tuple[str, Case]]:
        """Replace the variants that fail, and return those without a verdict; with `test` they are tested."""
        untested = []
        for stem, facts in needs:
            case = case_of(stem, facts)
            while case is not None and (variant := registry.replaceable_variant(stem, self._placement, facts)) is not None:
                name = f"{variant} {case.name}"
                if not self._knows(name):
                    if not test:
                        untested.append((variant, case))
                        break
                    self._test(name, variant, case)
                elif name not in self._done:
                    self._done.add(name)
                    self.report.remembered += 1
                if name not in self._verdicts.failed:
                    break
                self._replace(name, variant, case, facts)
        return list(dict.fromkeys(untested))

    def _knows(self, name: str) -> bool:
        return name in self._done or not self._always and self._verdicts.knows(name)

    def _test(self, name: str, variant: str, case: Case) -> None:
        """Launch a case and keep the verdict."""
        self._done.add(name)
        try:
            with self._verdicts.testing(name):
                reason = wrong(case, run(case, self._site(variant)), _answers())
        except ToolchainError as error:
            self.report.untested = str(error)
            return
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            self._verdicts.keep(name, reason)
            self._require_device(name)
        self.report.tested += 1
        self._verdicts.keep(name, reason)

    def _require_device(self, name: str) -> None:
        """After a failed launch: KernelError if the device does not work any more, as after an illegal access on a GPU."""
        device, numbers = self._placement.device, np.arange(64, dtype=np.int32)
        try:
            recover_device(device)
            intact = bool((download(mapped(numbers, device)) == numbers).all())
        except Exception:
            intact = False
        if not intact:
            self._verdicts.save()
            raise KernelError(f"self-test: {self._where} does not work any more after {name}; start again: that kernel is not used then")

    def _replace(self, name: str, variant: str, case: Case, facts: ShapeFacts) -> None:
        """Take the variant out of the choice, and warn."""
        reason = self._verdicts.failed[name]
        registry.replace_variant(self._placement, variant, case, reason)
        if name in self.report.replaced:
            return
        self.report.replaced[name] = reason
        instead = registry.replaceable_variant(case.stem, self._placement, facts) or registry.REFERENCE
        log.warning(
            "self-test: the kernel %s, variant %s, is wrong on %s: %s; %s is used instead, which may be slower. Please report it. "
            "TINYVLLM_SELFTEST=always tests it again, TINYVLLM_KERNELS=%s=%s uses it all the same",
            case.name, variant, self._where, reason, instead, case.stem, variant,
        )  # fmt: skip

    def _site(self, variant: str) -> Site:
        return Site(self._backend, variant, self._placement.device)

    def _compile(self, untested: list[tuple[str, Case]]) -> None:
        """Start the compilers of all tests at once, where the backend compiles in the background."""
        self._backend.compile_ahead(self._collected(untested), self._placement)

    def _collected(self, cases: Iterable[tuple[str, Case]]) -> list[Kernel]:
        fresh = [pair for pair in dict.fromkeys(cases) if pair not in self._compiling]
        self._compiling.update(fresh)
        with collecting_kernels() as kernels:
            for variant, case in fresh:
                try:
                    run(case, self._site(variant))
                except Exception as error:  # the test itself will say so
                    log.debug("self-test: %s %s: %s", variant, case.name, error)
        return kernels


@functools.cache
def _answers() -> dict[str, np.ndarray]:
    with np.load(ANSWERS, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@functools.cache
def _digest(backend: str, identity: str) -> str:
    """A key that changes with the device, its driver and compiler, the version, the sources of its kernels, and what launches them."""
    digest = hashlib.sha256(f"{VERSION}\0{identity}".encode() + hashlib.sha256(ANSWERS.read_bytes()).digest())
    launches = [(name, content) for name, content in file_digests(Path(__file__).parent, ".py") if Path(name).parent.name in ("", backend)]
    kernels = [(name, content) for name, content in file_digests(kernels_folder()) if name.split(os.sep)[0] in (backend, "include")]
    for name, content in (*launches, *kernels):
        digest.update(b"\0" + name.encode() + b"\0" + content)
    return digest.hexdigest()[:24]
