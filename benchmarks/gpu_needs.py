"""What gpu.sh needs of a machine, looked for before anything runs: one message for everything that is missing. Imports nothing that may be.

python benchmarks/gpu_needs.py A [--dry]
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
OLDEST_PYTHON = (3, 11)
TESTED = ("A", "B", "C")  # the calls that run tests


def requirements(call: str) -> list[str]:
    """As in pyproject.toml: what the package needs, and what the call does."""
    import tomllib  # not in Python 3.10, which gets a message of its own

    own: list[str] = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    return [*own, *(["pytest", "hypothesis"] if call in TESTED else []), *(["gguf"] if call in "EF" else [])]


def missing_packages(call: str) -> list[str]:
    """Packages that are not there, or not in the version that the project is pinned to."""
    found = []
    for requirement in requirements(call):
        name, _, pinned = requirement.partition("==")
        name = name.split(">")[0].strip()
        if importlib.util.find_spec(name) is None:
            found.append(requirement)
        elif pinned and (here := _version(name)) != pinned:
            found.append(f"{requirement} (here is {here})")
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "no version"


def complaints(call: str, dry: bool) -> list[str]:
    """What is missing, with what to try."""
    said = []
    if tuple(sys.version_info) < OLDEST_PYTHON:
        said.append(f"Python 3.11 or later is needed, this is {sys.version.split()[0]}; INTERPRETER names another one")
    elif packages := missing_packages(call):
        said.append(
            f"{sys.executable} lacks {', '.join(packages)}; with network: pip install '.[test,cuda]'; without: bring the wheels, "
            "as docs/gpu.md says, or name another interpreter by INTERPRETER"
        )
    if not dry and not has_driver():
        said.append("no NVIDIA driver: libcuda.so.1 cannot be loaded, or it finds no GPU (nvidia-smi says more); --dry needs none")
    return said


def has_driver() -> bool:
    """Whether NVIDIA's driver is there and has a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def main() -> None:
    call, *options = sys.argv[1:]
    said = complaints(call, "--dry" in options)
    for line in said:
        print(f"gpu.sh: {line}", file=sys.stderr)
    sys.exit(2 if said else 0)


if __name__ == "__main__":
    main()
