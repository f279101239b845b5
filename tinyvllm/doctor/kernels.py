"""What the device does: bytes and operations a second, and the self-test of its kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tinyvllm.config.switches import cache_folder
from tinyvllm.doctor.machine import Finding, Machine, Status
from tinyvllm.errors import TinyvllmError

if TYPE_CHECKING:
    from tinyvllm.backends.selftest import Report

# Seconds from the first check to the end: after the first format the self-test begins with none that would end later, if it takes as long
# as the longest so far. Verdicts are kept, so that a second run tests the next ones.
LIMIT = 9.0


def _opened(machine: Machine) -> str | None:
    """The device, None if it cannot be opened, which has a line of its own."""
    from tinyvllm.runner.device import start_device

    try:
        return start_device(machine.device, cache_folder(machine.environ))
    except TinyvllmError:
        return None


def _unchecked(name: str) -> Finding:
    return Finding(name, Status.ERROR, "not checked: the device cannot be opened", "do what the line of the device says")


def check_speed(machine: Machine) -> Iterator[Finding]:
    from tinyvllm.runner.roof import MIN_BYTES, measured_roof

    device = _opened(machine)
    if device is None:
        yield _unchecked("speed")
        return
    try:
        roof = measured_roof(device, ["BF16"], MIN_BYTES)
    except TinyvllmError as error:
        yield Finding("speed", Status.ERROR, str(error), "mend what the line says: an engine compiles the same kernels")
        return
    operations = roof.products["BF16"].operations_per_second
    text = f"memory is read at {roof.bandwidth / 1e9:.1f} GB/s, bfloat16 multiplied at {operations / 1e9:.0f} GFLOP/s"
    yield Finding("speed", Status.OK, text)


def check_kernels(machine: Machine, clock: Callable[[], float] = time.monotonic) -> Iterator[Finding]:
    """The self-test of every op with every format of weights and of KV cache, format by format within LIMIT."""
    from tinyvllm.backends.selftest import Report, needs_by_format, test_kernels
    from tinyvllm.placement import Placement

    device = _opened(machine)
    if device is None:
        yield _unchecked("kernels")
        return
    placement = Placement(device)
    report, longest, left = Report(), 0.0, list[str]()
    for format, needs in needs_by_format(placement).items():
        start = clock()
        if report.tested and start - machine.began + longest > LIMIT and not machine.every_format:
            left.append(format)
            continue
        report += test_kernels(placement, lambda needs=needs: needs)  # type: ignore[misc]
        longest = max(longest, clock() - start)
        if report.mode == "off":
            break
    yield _verdict(report, left)


def _verdict(report: Report, left: list[str]) -> Finding:
    text = str(report)
    if report.mode == "off":
        return Finding("kernels", Status.WARNING, "the self-test is off, or the device has no kernels", "unset TINYVLLM_SELFTEST")
    if report.replaced:
        text += ": wrong are " + ", ".join(f"{name} ({reason})" for name, reason in report.replaced.items())
    if left:
        names = ", ".join(left[:4]) + (" ..." if len(left) > 4 else "")
        text += f"; for time not tested: {names} (a second run tests these; --all tests all at once)"
    if report.untested:
        return Finding("kernels", Status.ERROR, text, "mend what the line says: without kernels the reference runs, many times slower")
    if report.replaced:
        advice = "tokens are right without them, but slower; please report it, with compiler and driver"
        return Finding("kernels", Status.WARNING, text, advice)
    return Finding("kernels", Status.OK, text)
