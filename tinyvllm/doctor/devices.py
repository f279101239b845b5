"""Checks of compilers and drivers, and of the device that an engine would use."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from tinyvllm.backends.cpu.tiles import BY_SYSTEM
from tinyvllm.backends.cpu.toolchain import compiler_command
from tinyvllm.config.switches import cache_folder
from tinyvllm.doctor.machine import Finding, Machine, Status
from tinyvllm.errors import KernelError, TinyvllmError, ToolchainError

OLDEST_MACOS = 13
COMPILER_SECONDS = 10


def check_compiler(machine: Machine) -> Iterator[Finding]:
    try:
        command = compiler_command()
        done = subprocess.run([*command[:2], "--version"] if len(command) > 1 else [*command, "--version"],
                              capture_output=True, text=True, timeout=COMPILER_SECONDS)  # fmt: skip
    except ToolchainError as error:
        yield Finding("C compiler", Status.ERROR, str(error), "pip install ziglang, or install clang 16 or later")
        return
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("C compiler", Status.ERROR, f"{command[0]} does not run: {error}", "set CC to another, or unset it")
        return
    version = next(iter(done.stdout.splitlines()), "")
    if done.returncode:
        text = f"{command[0]} --version ended with code {done.returncode}"
        yield Finding("C compiler", Status.ERROR, text, "set CC to another, or unset it")
    else:
        yield Finding("C compiler", Status.OK, f"{version or 'no version'} ({command[0]})")


def check_cuda(machine: Machine) -> Iterator[Finding]:
    """The driver and NVRTC; nothing where there is no NVIDIA GPU."""
    module = machine.text(machine.proc / "driver" / "nvidia" / "version")
    wanted = machine.device.upper().startswith("CUDA")
    try:
        machine.load("libcuda.so.1")
    except OSError as error:
        if module is None and not wanted:
            return
        held = "the kernel has a driver of NVIDIA" if module is not None else "--device CUDA asks for one"
        status = Status.ERROR if wanted else Status.WARNING
        advice = "install the driver's libcuda, in a container with --gpus all; " + (
            "or use --device CPU" if wanted else "the CPU is used without it"
        )
        yield Finding("CUDA driver", status, f"libcuda.so.1 cannot be loaded ({error}), but {held}", advice)
        return
    first = next(iter((module or "").splitlines()), "") or "libcuda.so.1 is there"
    yield Finding("CUDA driver", Status.OK, first)
    yield _nvrtc(used=machine.choose(machine.device).startswith("CUDA"))


def _nvrtc(used: bool) -> Finding:
    from tinyvllm.backends.cuda import nvrtc

    try:
        return Finding("NVRTC", Status.OK, nvrtc.version())
    except KernelError as error:
        return Finding("NVRTC", Status.ERROR if used else Status.WARNING, str(error), "pip install tinyvllm[cuda], or set NVRTC_PATH")


def check_metal(machine: Machine) -> Iterator[Finding]:
    if machine.system != "darwin":
        return
    number = machine.macos.partition(".")[0]
    if not number.isdecimal() or int(number) < OLDEST_MACOS:
        text = f"macOS {machine.macos or 'of an unknown version'} is older than {OLDEST_MACOS}, whose Metal 3 the kernels use"
        yield Finding("Metal", Status.ERROR, text, "update macOS, or use --device CPU")
    else:
        yield Finding("Metal", Status.OK, f"macOS {machine.macos}")


def check_device(machine: Machine) -> Iterator[Finding]:
    """Open the device that an engine would use, and name its variant of kernels."""
    from tinyvllm.runner.device import start_device

    try:
        device = start_device(machine.device, cache_folder(machine.environ))
    except TinyvllmError as error:
        yield Finding("device", Status.ERROR, str(error), "use --device CPU, or mend what the line says")
        return
    from tinyvllm.backends.registry import REFERENCE, architecture_of, usable_variants, variants
    from tinyvllm.placement import Placement

    placement = Placement(device)
    usable = [*usable_variants(placement), REFERENCE]
    text = f"{device} ({architecture_of(placement)}), kernels: {usable[0]}"
    refused = [f"not {name}: {why}" for name, why in variants(placement).items() if why is not None and why.startswith(BY_SYSTEM)]
    text += "".join(f" ({why})" for why in refused)
    if usable[0] == REFERENCE:
        lacking = "; ".join(f"{name}: {reason}" for name, reason in variants(placement).items()) or "there are none for this device"
        yield Finding("device", Status.WARNING, f"{text}, many times slower: {lacking}", "use another device")
    elif usable[0] == "plain":
        advice = "use a processor with AVX2 or NEON, or another kind of virtual machine"
        yield Finding("device", Status.WARNING, f"{text}: the processor has no vectors that kernels are written for", advice)
    else:
        yield Finding("device", Status.OK, text)
