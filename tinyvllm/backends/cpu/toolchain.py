"""Finds a C compiler for our kernels and for those that tinygrad generates for the CPU device.

What CC names, unless it is GCC, as many environments have it for other builds; else a clang of version 16 or later on the PATH; else the
whole clang inside the wheel `ziglang`. An older clang cannot compile tinygrad's bfloat16 casts, and GCC writes no object file to a pipe. It
is looked for when something is compiled: with a filled cache folder none is needed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tinyvllm.errors import ToolchainError
from tinyvllm.storage.cache import write_whole
from tinyvllm.storage.folders import warn_once

OLDEST_CLANG = 16
_GCC = "see the source for copying conditions"  # of what it says of its version, under whatever name it is called


def compiler_command() -> list[str]:
    """The compiler as the first words of a command line. ToolchainError if there is none."""
    return _named() or _recent_clang() or _zig_clang() or _none_found()


def has_compiler() -> bool:
    """Whether `compiler_command` would find one."""
    return bool(_named() or _recent_clang() or _zig_clang())


def provide_compiler(cache: Path) -> str:
    """The compiler as one word, set as CC: for tests and benchmarks that start tools of their own. zig's becomes a script in `cache`."""
    command = compiler_command()
    if len(command) > 1:
        script = cache / "zig-clang"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(script, f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'.encode(), 0o700)
        command = [str(script)]
    os.environ["CC"] = command[0]
    return command[0]


def _named() -> list[str] | None:
    named = os.environ.get("CC")
    if not named:
        return None
    if _GCC not in _version_of(named):
        return [named]
    warn_once(f"CC {named}", f"toolchain: CC={named} is GCC, which cannot compile the CPU's kernels; looking for clang instead")
    return None


def _recent_clang() -> list[str] | None:
    path = shutil.which("clang")
    return [path] if path is not None and _is_recent(path) else None


@functools.cache
def _version_of(path: str) -> str:
    """What a compiler says of itself; "" where it cannot be started."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _is_recent(path: str) -> bool:
    said = _version_of(path)
    version = re.search(r"version (\d+)", said)
    # Apple counts its own versions: its 15 is LLVM's 16
    oldest = 15 if "Apple" in said else OLDEST_CLANG
    return version is not None and int(version[1]) >= oldest


def _zig_clang() -> list[str] | None:
    """The wheel's clang by its file: starting Python for every kernel would cost more.

    Called so, zig's clang looks for its own headers, the intrinsics among them, where they are not.
    """
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    zig = Path(spec.submodule_search_locations[0]) / "zig"
    return [str(zig), "clang", "-isystem", str(zig.parent / "lib" / "include")] if zig.is_file() else None


def _instead_of() -> str:
    return f" (CC={os.environ['CC']} is GCC)" if os.environ.get("CC") else ""


def _none_found() -> list[str]:
    raise ToolchainError(
        f"toolchain: no C compiler for the CPU device{_instead_of()}: expected clang {OLDEST_CLANG} or later on the PATH, "
        "or the wheel ziglang; try `pip install ziglang`"
    )


# What each row of the CPU kernels is compiled for. `plain` is the base of the machine's own architecture.
CPU_TARGETS: dict[str, tuple[str, ...]] = {
    "amx": ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi", "-mprfchw", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "avx512": ("-march=x86-64-v4",),
    "avxvnni": ("-march=x86-64-v3", "-mavxvnni"),
    "avx2": ("-march=x86-64-v3",),
    "neon": ("-march=armv8.2-a+fp16",),
    "plain": (),
}
_EXTENSIONS = {
    "avx512": {"avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni", "avx512vbmi": "-mavx512vbmi"},
    "neon": {"asimddp": "dotprod", "bf16": "bf16", "i8mm": "i8mm"},
}


def target_flags(target: str) -> tuple[str, ...]:
    """The compiler's flags for one row, with the extensions that this processor has."""
    flags = CPU_TARGETS[target]
    has = [flag for name, flag in _EXTENSIONS.get(target, {}).items() if name in cpu_features()]
    if target == "neon":
        return ("+".join([*flags, *has]),)
    return (*flags, *has)


@functools.cache
def cpu_features() -> frozenset[str]:
    """The processor's features by Linux's names (avx2, fma, avx512f, avx512_bf16, asimddp, bf16, ...)."""
    if sys.platform == "darwin":
        return _apple_features()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def processor() -> str:
    """What code may be compiled for that runs on this processor only: its architecture and its features."""
    return " ".join([sys.platform, platform.machine(), *sorted(cpu_features())])


def processor_name() -> str:
    """The processor's model as the system names it, or the empty string."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return " ".join(value for _, value in re.findall(r"^(model name|CPU implementer|CPU part|microcode)\s*: (.*)$", text, re.MULTILINE)[:3])


def compiler_state() -> str:
    """A text that changes when another compiler would be used, or it was replaced; nothing is started for it."""
    places = [os.environ.get("CC", ""), shutil.which("clang") or "", *(_zig_clang() or [])[:1]]
    return " ".join(f"{place}:{_state(shutil.which(place) or place)}" for place in places if place)


def _state(path: str) -> str:
    try:
        state = os.stat(path)
    except OSError:
        return ""
    return f"{state.st_size}.{state.st_mtime_ns}"


def _apple_features() -> frozenset[str]:
    asked = {"hw.optional.AdvSIMD": "asimd", "hw.optional.arm.FEAT_DotProd": "asimddp", "hw.optional.arm.FEAT_BF16": "bf16"}
    asked |= {"hw.optional.avx2_0": "avx2", "hw.optional.fma": "fma", "hw.optional.avx512f": "avx512f"}
    said = subprocess.run(["sysctl", *asked], capture_output=True, text=True).stdout
    return frozenset(asked[name] for name, value in re.findall(r"^(\S+): (\d)$", said, re.MULTILINE) if value == "1" and name in asked)
