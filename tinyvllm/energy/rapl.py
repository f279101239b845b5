"""RAPL (running average power limit): the energy counters of x86 processors, as Linux shows them in its powercap tree.

A zone is a folder with `name`, `energy_uj` (microjoules, wraps around) and `max_energy_range_uj`. Intel's and AMD's are both called
`intel-rapl:N`, and their parts `intel-rapl:N:M`. A zone `package-N` is a processor; of its parts only `dram` is outside of what the package
counts. `psys` (the whole board) contains the packages, and `intel-rapl-mmio:N` is another view of the same counters: neither is added.
Source: Linux, Documentation/power/powercap/powercap.rst and Documentation/ABI/testing/sysfs-class-powercap.
"""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

from tinyvllm.energy.counters import CounterError

POWERCAP = Path("/sys/class/powercap")
MAX_ENTRIES = 1024  # of the powercap folder; a machine of 16 processors has about 100
MAX_BYTES = 64  # of a file; the largest counter has 20 digits
_ZONE = re.compile(r"intel-rapl:(\d+)(:\d+)?")


class RaplCounter:
    """One zone. Its counter wraps around after minutes to hours at full power, so it is to be read about once a minute."""

    def __init__(self, name: str, zone: Path):
        """CounterError if the zone cannot be read."""
        self.name = name
        self._path = zone / "energy_uj"
        self._range = _number(zone / "max_energy_range_uj", _contents(zone / "max_energy_range_uj"))
        if self._range == 0:
            raise CounterError(f"{zone / 'max_energy_range_uj'} is 0; expected the value at which energy_uj wraps around")
        self._file = _open(self._path)
        try:
            self._last = self._microjoules()
        except CounterError:
            self.close()
            raise

    def joules(self) -> float:
        now = self._microjoules()
        difference, self._last = now - self._last, now
        return (difference if difference >= 0 else difference + self._range) / 1e6

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _microjoules(self) -> int:
        value = _number(self._path, _read(self._path, self._file))  # in sysfs each read from a file's start is a new value
        if value > self._range:
            raise CounterError(f"{self._path} is {value}, above its max_energy_range_uj of {self._range}")
        return value


def open_packages(root: Path) -> tuple[list[RaplCounter], dict[str, str]]:
    """The counters of all processors and of their memory, or why there is none: the sum of some of them would be no figure of the host."""
    counters: list[RaplCounter] = []
    try:
        for name, zone in _zones(root):
            counters.append(RaplCounter(f"cpu {name}", zone))
    except CounterError as error:
        for counter in counters:
            counter.close()
        return [], {"cpu": str(error)}
    if not counters:
        reason = "a virtual machine or container may hide them, or the kernel module intel_rapl_msr is not loaded"
        return [], {"cpu": f"there are no RAPL packages in {root}: {reason}"}
    return counters, {}


def _zones(root: Path) -> list[tuple[str, Path]]:
    """Packages, and memory that no package counts, each with its name."""
    try:
        with os.scandir(root) as entries:
            matches = [match for entry in islice(entries, MAX_ENTRIES) if (match := _ZONE.fullmatch(entry.name))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CounterError(f"{root}: {error.strerror or error}") from error
    zones = []
    for match in sorted(matches, key=lambda match: match[0]):
        path = root / match[0]
        name = _contents(path / "name").decode("ascii", "replace").strip()
        if match[2] is None and re.fullmatch(r"package-\d{1,4}(-die-\d{1,4})?", name):
            zones.append((name, path))
        elif match[2] is not None and name == "dram":
            zones.append((f"dram-{match[1]}", path))
    return zones


def _contents(path: Path) -> bytes:
    file = _open(path)
    try:
        return _read(path, file)
    finally:
        os.close(file)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        raise CounterError(
            f"reading {path} is not permitted: since 2020 Linux shows it to root alone, as it betrays secrets of other processes "
            "(CVE-2020-8694); where that does not matter, `chmod a+r` on it as root permits it until the next boot"
        ) from error
    except OSError as error:
        raise CounterError(f"{path}: {error.strerror or error}") from error


def _read(path: Path, file: int) -> bytes:
    try:
        return os.pread(file, MAX_BYTES, 0)
    except OSError as error:
        raise CounterError(f"{path}: {error.strerror or error}") from error


def _number(path: Path, text: bytes) -> int:
    digits = text.strip()
    if not digits.isdigit() or len(digits) > 20:
        raise CounterError(f"{path} is {text[:24]!r}; expected a whole number of microjoules")
    return int(digits)
