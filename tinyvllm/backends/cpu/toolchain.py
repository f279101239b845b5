"""Finds the C compiler that tinygrad's CPU device needs, before tinygrad looks for one.

A clang of version 16 or later on the PATH is taken; otherwise the whole clang inside the wheel `ziglang`. An older clang cannot compile
tinygrad's bfloat16 casts.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tinyvllm.errors import TinyvllmError
from tinyvllm.storage.cache import open_cache, read_believed, write_whole
from tinyvllm.storage.folders import Refusal, reason_of, warn_once

OLDEST_CLANG = 16


def provide_compiler(cache: Path) -> str:
    """Set `CC`, which tinygrad reads at its first compile, to a clang that can do the work, unless the user has; returns the choice."""
    if "CC" not in os.environ:
        os.environ["CC"] = _recent_clang() or _zig_clang(cache) or _none_found()
    return os.environ["CC"]


def has_compiler(cache: Path) -> bool:
    """Whether `provide_compiler` would find one."""
    return "CC" in os.environ or (_recent_clang() or _zig_clang(cache)) is not None


def _recent_clang() -> str | None:
    path = shutil.which("clang")
    if path is None:
        return None
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r"version (\d+)", said)
    # Apple counts its own versions: its 15 is LLVM's 16
    oldest = 15 if "Apple" in said else OLDEST_CLANG
    return path if version and int(version[1]) >= oldest else None


def _zig_clang(cache: Path) -> str | None:
    """A two-line script that calls the wheel's `zig clang`: CC must be one word, and starting Python for every kernel would cost more.

    Called so, zig's clang looks for its own headers, the intrinsics among them, where they are not.
    """
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    zig = Path(spec.submodule_search_locations[0]) / "zig"
    if not zig.is_file():
        return None
    headers = zig.parent / "lib" / "include"
    return _script(open_cache(cache).path, f'#!/bin/sh\nexec "{zig}" clang -isystem "{headers}" "$@"\n')


def _script(folder: Path | None, text: str) -> str | None:
    """The path of a script in the cache folder with this text; written again if another text is there, None if it cannot be written."""
    if folder is None:
        return None
    script = folder / "zig-clang"
    try:
        if read_believed(script) == text.encode() and os.access(script, os.X_OK):
            return str(script)
    except (FileNotFoundError, Refusal):
        pass
    try:
        write_whole(script, text.encode(), 0o700)
    except OSError as error:
        warn_once("zig-clang", f"toolchain: {script}, which calls the compiler, cannot be written: {reason_of(error)}")
        return None
    return str(script)


def _none_found() -> str:
    raise TinyvllmError(
        f"toolchain: no C compiler for the CPU device: expected clang {OLDEST_CLANG} or later on the PATH, or the wheel ziglang; "
        "try `pip install ziglang`"
    )


# What each row of the CPU kernels is compiled for. `plain` is the base of the machine's own architecture.
CPU_TARGETS: dict[str, tuple[str, ...]] = {
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "neon": ("-march=armv8.2-a+fp16",),
    "plain": (),
}
_EXTENSIONS = {
    "avx512": {"avx512_bf16": "-mavx512bf16", "avx512_vnni": "-mavx512vnni"},
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


def _apple_features() -> frozenset[str]:
    asked = {"hw.optional.AdvSIMD": "asimd", "hw.optional.arm.FEAT_DotProd": "asimddp", "hw.optional.arm.FEAT_BF16": "bf16"}
    asked |= {"hw.optional.avx2_0": "avx2", "hw.optional.fma": "fma", "hw.optional.avx512f": "avx512f"}
    said = subprocess.run(["sysctl", *asked], capture_output=True, text=True).stdout
    return frozenset(asked[name] for name, value in re.findall(r"^(\S+): (\d)$", said, re.MULTILINE) if value == "1" and name in asked)
