"""The environment variables that tinyvllm reads, in one table, and the cache folder, which follows from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tinyvllm.config.devices import parse_devices
from tinyvllm.config.values import expand_home
from tinyvllm.errors import ArgumentError, nearest
from tinyvllm.lazy_dataclass import dataclass

OPTION_PREFIX = "TINYVLLM_ARG_"  # of variables that are options of the command line, which alone reads them: tinyvllm/cli/configuration.py


@dataclass(frozen=True)
class Switch:
    """One environment variable that tinyvllm reads. `parse(name, text)` raises an ArgumentError for an invalid value."""

    name: str
    meaning: str
    parse: Callable[[str, str], Any]


def _parse_folder(name: str, text: str) -> Path:
    folder = expand_home(name, text)
    if not text.strip() or (os.path.exists(folder) and not os.path.isdir(folder)):
        raise ArgumentError(f"{name} must name a folder, got {text!r}")
    return folder


def _parse_kernels(name: str, text: str) -> dict[str, str]:
    """ "attention_decode=ref,all=avx2" as a dict; the registry checks the words."""
    pairs = [pair.strip().split("=") for pair in text.split(",") if pair.strip()]
    if not pairs or any(len(pair) != 2 or not all(pair) for pair in pairs):
        raise ArgumentError(f"{name} must be like attention_decode=ref,matmul=avx2 or all=ref, got {text!r}")
    return {op: row for op, row in pairs}


def _parse_switch(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ArgumentError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def _parse_selftest(name: str, text: str) -> str:
    if text not in ("off", "on", "always"):
        raise ArgumentError(f"{name} must be off, on or always, got {text!r}")
    return text


def parse_count(name: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise ArgumentError(f"{name} must be a number from 1 to 64, got {text!r}")
    return int(text)


SWITCHES: tuple[Switch, ...] = (
    Switch(
        "TINYVLLM_CACHE", "folder for files that can be made again; default $XDG_CACHE_HOME/tinyvllm or ~/.cache/tinyvllm", _parse_folder
    ),
    Switch("TINYVLLM_KERNELS", "which kernel runs an op: OP=ROW,..., OP may be all, ROW may be ref; see `kernels`", _parse_kernels),
    Switch(
        "TINYVLLM_SHARE_GPUS",
        "1 to let ranks share GPUs where there are fewer than ranks: for tests, as they wait for each other",
        _parse_switch,
    ),
    Switch("TINYVLLM_PEER_ACCESS", "0 to let GPUs that share a model meet in memory of the host, not in each other's", _parse_switch),
    Switch("TINYVLLM_KEEP_PANELS", "0 to pack weights at every start instead of keeping them packed in the cache folder", _parse_switch),
    Switch(
        "TINYVLLM_KEEP_STEPS",
        "0 to capture every step in each process instead of keeping captured steps in the cache folder",
        _parse_switch,
    ),
    Switch("TINYVLLM_AUTOTUNE", "0 to use every kernel's default work split, instead of timing candidates while idle", _parse_switch),
    Switch("TINYVLLM_SELFTEST", "off to start without the self-test of kernels, always to test at every start", _parse_selftest),
    Switch("TINYVLLM_THREADS", "threads of the CPU kernels; default the fast cores that affinity and quotas leave", parse_count),
    Switch("TINYVLLM_BIND", "0 to let ranks and replicas on the CPU run on all memory nodes, instead of each on its own", _parse_switch),
    Switch("TINYVLLM_DEVICE", "the default device: auto, CPU, METAL, CUDA, CUDA:1, ..., or two: CUDA,CPU", parse_devices),
    Switch("TINYVLLM_API_KEY", "a key that `serve` requires and `chat --url` sends, out of the process list", lambda name, text: text),
)


def environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The parsed values of the switches that are set; an unknown TINYVLLM_* or a malformed one is an ArgumentError."""
    table = {switch.name: switch for switch in SWITCHES}
    values = {}
    for name in sorted(n for n in environ if n.startswith("TINYVLLM_") and not n.startswith(OPTION_PREFIX)):
        if name not in table:
            raise ArgumentError(f"environment variable {name} is not known{nearest(name, table)}; known are {', '.join(table)}")
        values[name] = table[name].parse(name, environ[name])
    return values


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where files that can be made again should be. Not created or checked here: `storage.cache.open_cache` does that."""
    environ = os.environ if environ is None else environ
    folder: Path | None = environment(environ).get("TINYVLLM_CACHE")
    if folder is not None:
        return folder
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base) / "tinyvllm"
    home = os.path.expanduser("~/.cache/tinyvllm")
    if home.startswith("~"):  # neither HOME nor an entry in the table of users
        return Path(environ.get("TMPDIR") or "/tmp") / f"tinyvllm-{os.getuid()}"
    return Path(home)
