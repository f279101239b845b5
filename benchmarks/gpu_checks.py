"""Whether everything runs on this GPU: versions, compilation, the self-test of every kernel and format, and what the tests have found."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.gpu_figures import emit, lines_of, restart, start
from benchmarks.harness import table
from tinyvllm.quant.formats import Layout

MAX_BROKEN = 8  # kernels that may break the device or never end, each in a process of its own, before the self-test is given up
DRY_FORMATS, DRY_CACHES = ("BF16", "Q4_K", "FP8_G128", "NF4"), ("BF16", "KV_INT4")  # a dry run compiles the cases of these
COLUMNS = 256  # of matrices: whole blocks of every format
MIXED = ("Q4_K+Q6_K", "INT4_G64+Q6_K", "F16+MXFP4")  # v in another format than q and k


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


# --- compilation


def environment(o: argparse.Namespace) -> None:
    """Versions; one kernel of each source compiled for this GPU: how long, and that nothing spills."""
    from tinyvllm.backends.cpu.toolchain import has_compiler, provide_compiler
    from tinyvllm.backends.cuda import nvrtc
    from tinyvllm.backends.cuda.driver import gpu_attribute
    from tinyvllm.config.switches import cache_folder

    start(o)
    device, described = o.machine.device, o.machine.describe()
    processors = gpu_attribute(device, "MULTIPROCESSOR_COUNT")
    print(f"GPU: {described['gpu']}, {_arch(device)}, {processors} multiprocessors; driver {described['driver']}")
    print(f"python {sys.version.split()[0]}, tinygrad {version_of('tinygrad')}, {nvrtc.version()}")
    print(f"numpy {version_of('numpy')}, C compiler {provide_compiler(cache_folder()) if has_compiler() else 'none'}")
    print(f"torch {version_of('torch')}, transformers {version_of('transformers')} in this interpreter", flush=True)
    kernels = _samples(device)
    first = {name.split()[0]: name for name in reversed(kernels)}
    _compile_all(o, {name: kernels[name] for name in first.values()}, "sources compiled")


def compile_kernels(o: argparse.Namespace) -> None:
    """Every kernel at the sizes of real models, compiled for this GPU: that nothing spills with its compiler."""
    if o.dry:
        print("left out: tests/kernels/cuda/test_builds.py compiles all of them")
        return
    start(o)
    _compile_all(o, _samples(o.machine.device), "kernels compiled")


def _arch(device: str) -> str:
    from tinygrad import Device

    return str(Device[device].arch)


def _samples(device: str) -> dict[str, Any]:
    from tinygrad import Tensor

    from tests.kernels.cuda.samples import samples
    from tinyvllm.backends.cuda.driver import gpu_at

    return samples(gpu_at(Tensor.empty(1, device=device)), _arch(device))


def _compile_all(o: argparse.Namespace, kernels: dict[str, Any], what: str) -> None:
    begin, arch = time.perf_counter(), _arch(o.machine.device)
    # processes: whether NVRTC compiles several texts at once in one is not known (decision 29)
    with ProcessPoolExecutor(min(len(kernels), os.cpu_count() or 1), get_context("spawn")) as pool:
        compiled = dict(zip(kernels, pool.map(_compile, kernels.values(), [arch] * len(kernels)), strict=True))
    failed = {name: report for name, report in compiled.items() if isinstance(report, str)}
    spilled = {name: report for name, report in compiled.items() if not isinstance(report, str) and report}
    for name, why in failed.items():
        print(f"does not compile: {name}: {why}")
    for name, count in spilled.items():
        print(f"spills: {name}: {count} bytes")
    seconds = round(time.perf_counter() - begin, 1)
    emit(o, what, len(compiled) - len(failed), "kernels", seconds=seconds, spilling=len(spilled))
    if failed:
        raise SystemExit(f"gpu: {len(failed)} kernels do not compile")


def _compile(kernel: Any, arch: str) -> int | str:
    """Bytes that spill, by the assembler's report; or why there is none."""
    from tinyvllm.backends.cuda import nvrtc
    from tinyvllm.errors import KernelError

    try:
        return nvrtc.report(kernel, arch).spilled
    except KernelError as error:
        return str(error)


# --- self-test


def selftest(o: argparse.Namespace) -> None:
    """Each kernel once in every format, packed KV types and mixed products, against recorded answers: the self-test of an engine's
    start, for what any model may select. A kernel that breaks the device, or never ends, is counted, and another process continues.
    """
    start(o)
    os.environ["TINYVLLM_SELFTEST"] = "on"
    from tinyvllm.backends.selftest import test_kernels
    from tinyvllm.errors import KernelError
    from tinyvllm.placement import Placement

    placement = Placement(o.machine.device)
    needs = list(_needs(placement, o.dry))
    if o.dry:
        _call_cases(placement, needs)
        return
    if o.failed >= MAX_BROKEN:
        raise SystemExit(f"{o.machine.module}: {o.failed} kernels broke the device or never ended; the first of them is named above")
    with _ending(o):
        try:
            report = test_kernels(placement, lambda: needs)
        except KernelError as error:
            restart(o, str(error))
            return
    print(report)
    for name, reason in report.replaced.items():
        print(f"wrong: {name}: {reason}")
    total = report.tested + report.remembered
    emit(o, "kernels as recorded", total - len(report.replaced), f"of {total}", seconds=round(report.seconds, 1))
    o.failed = len(report.replaced)


@contextlib.contextmanager
def _ending(o: argparse.Namespace) -> Iterator[None]:
    """Another process continues if nothing comes back for `limit` seconds: it takes the kernel that was running for a failure."""
    watch = threading.Timer(o.limit, restart, (o, f"nothing came back for {o.limit:.0f} s; the kernel that ran is named as failed below"))
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def _needs(placement: Any, dry: bool) -> Iterator[tuple[str, Any]]:
    """What models select kernels for: (op, facts of its shape)."""
    from tests.formats import sampled_formats
    from tinyvllm.backends.limits import ShapeFacts
    from tinyvllm.backends.registry import backend_for
    from tinyvllm.quant.kv import KV_FORMATS

    backend = backend_for(placement)
    assert backend is not None
    layout = backend.layout
    formats = [format for format in sampled_formats(layout) if not dry or format in DRY_FORMATS]
    product: dict[str, Any] = {"inputs": COLUMNS, "outputs": 64, "layout": str(layout)}
    cached: dict[str, Any] = {"block_size": 16, "query_heads": 4, "kv_heads": 2}
    caches = DRY_CACHES if dry else ("BF16", "F16", "F32", *KV_FORMATS)
    yield from ((stem, ShapeFacts(placement, block_bytes=320, vocabulary=300)) for stem in ("advance", "kv_copy", "sample"))
    yield "lora_bias", ShapeFacts(placement, inputs=COLUMNS, outputs=64)
    yield from (("gated_delta", ShapeFacts(placement, head_dim=32, outputs=48, drafts=drafts)) for drafts in (0, 3))
    for format in formats:
        facts = ShapeFacts(placement, format=format, **product)
        yield from ((stem, facts) for stem in ("pack_tiles", "embed", "matmul", "norm_gate_up_silu", "norm_head"))
        yield from ((stem, facts) for stem in ("experts_gate_up_silu", "experts_down") if stem in backend.stems)
    if "norm_route" in backend.stems:
        yield "norm_route", ShapeFacts(placement, format="F32", **product)
    mixed = [_named_parts(names, layout) for names in (MIXED[:1] if dry else MIXED)]
    for format, cache in [*((format, "BF16") for format in (*formats, *mixed)), *(("BF16", cache) for cache in caches[1:])]:
        yield "norm_qkv_rope_store", ShapeFacts(placement, format=format, cache_format=cache, head_dim=64, **product, **cached)
    for cache in caches:
        for head_dim in (64, 512) if dry else (64, 96, 128, 512):
            facts = ShapeFacts(placement, cache_format=cache, head_dim=head_dim, **cached)
            yield from ((stem, facts) for stem in ("kv_append", "attention_decode", "attention_prefill"))


def _named_parts(names: str, layout: Layout) -> str:
    """Formats of q and k, and of v, as a backend with this layout names them: matrices in rows are named one by one."""
    first, last = names.split("+")
    return f"{first}+{first}+{last}" if layout is Layout.ROWS else names


def _call_cases(placement: Any, needs: Iterable[tuple[str, Any]]) -> None:
    """Compile and launch each case, and do not compare: a dry run has zeros."""
    from tinyvllm.backends import registry
    from tinyvllm.backends.cases import Site, case_of, run

    backend = registry.backend_for(placement)
    assert backend is not None
    calls = {(variant, case_of(stem, facts)) for stem, facts in needs if (variant := registry.replaceable_variant(stem, placement, facts))}
    for variant, case in calls:
        if case is not None:
            run(case, Site(backend, variant, placement.device))
    print(f"{len(calls)} cases compiled and launched")


# --- tests


def checks(path: Path | None) -> str:
    """How many tests of each file passed and failed, and which failed, by what tests/gpu/attempts.py has written."""
    last: dict[str, dict[str, str]] = {}
    for line in lines_of(path):
        last[line["test"]] = line
    count = Counter((test.split("::")[0], line["outcome"]) for test, line in last.items())
    outcomes = ("passed", "failed", "skipped", "never ended")
    rows: list[list[object]] = [[file, *(count[file, outcome] for outcome in outcomes)] for file in sorted({file for file, _ in count})]
    if not rows:
        return "No check has run."
    bad = [f"- `{test}` {line['outcome']}: {line['why']}" for test, line in last.items() if line["outcome"] in outcomes[1::2]]
    return "\n".join([table(["checks", *outcomes], rows), *([""] if bad else []), *bad])
