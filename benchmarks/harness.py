"""What every benchmark shares: a machine's description, rounds taken in turn, medians with quartiles, one JSON line a result.

Machines that measure are seldom alone. Two things keep figures honest all the same: contestants take turns, so that what else the
machine does affects all of them equally, and every round notes how many processors other processes kept busy meanwhile. If enough rounds
were quiet, only they count; the share is recorded either way.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
QUIET = 0.1  # processors that others may keep busy in a round that counts as quiet
ENOUGH = 3  # quiet rounds, for the others to be left out
_TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def machine() -> dict[str, object]:
    """Processor, cores, system, Python and the commit measured; `forced`, the kernels that TINYVLLM_KERNELS names, if it is set."""
    forced = {"forced": os.environ["TINYVLLM_KERNELS"]} if os.environ.get("TINYVLLM_KERNELS") else {}
    info = Path("/proc/cpuinfo")
    told = cpuinfo(info.read_text()) if info.exists() else {}
    return {
        "cpu": told.get("model name") or platform.processor() or platform.machine(),
        "core": core(told),
        "isa": isa(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "commit": commit(),
        **forced,
    }


def cpuinfo(text: str) -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo, by name."""
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


_INTEL = {143: "Sapphire Rapids", 207: "Emerald Rapids"}  # models of family 6


def core(told: dict[str, str]) -> str:
    """The core's generation, which a virtual machine's model name lacks: "Zen 4", or "family 6 model 85"; empty if unknown.

    AMD's families: 0x17 is Zen to Zen 2, 0x19 Zen 3 and, in models 0x10 to 0x1f and from 0x60 on, Zen 4, 0x1a Zen 5.
    """
    if "cpu family" not in told or "model" not in told:
        return ""
    family, model = int(told["cpu family"]), int(told["model"])
    if told.get("vendor_id") == "GenuineIntel" and family == 6 and model in _INTEL:
        return _INTEL[model]
    if told.get("vendor_id") != "AuthenticAMD" or family not in (0x17, 0x19, 0x1A):
        return f"family {family} model {model}"
    if family == 0x19:
        return "Zen 4" if 0x10 <= model < 0x20 or model >= 0x60 else "Zen 3"
    return {0x17: "Zen 2" if model >= 0x30 else "Zen", 0x1A: "Zen 5"}[family]


def isa() -> str:
    """The processor's extensions that decide which kernels run: machines of one name differ. Empty where the system does not list them."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return ""
    return " ".join(
        flag for flag in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "i8mm", "bf16") if flag in flags
    )


def commit() -> str:
    """The commit measured, with `-dirty` where a tracked file other than a result differs from it; empty without git."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parents[1]).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")
    except OSError:  # a machine that has a copy of the files, and no git
        return ""


@dataclass(frozen=True)
class Round:
    """One run: its seconds, and how many processors other processes used meanwhile (0 where the system does not say)."""

    seconds: float
    others: float


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some rounds. `quiet` of `rounds` were quiet; where those were enough, the rest is left out."""

    median: float
    low: float
    high: float
    rounds: int
    quiet: int
    others: float

    @property
    def disturbed(self) -> bool:
        """Whether other processes took part in what was timed."""
        return self.quiet < min(ENOUGH, self.rounds)

    def rate(self, units: float) -> float:
        """Units a second, if a round does `units`."""
        return units / self.median

    def divided(self, parts: int) -> Spread:
        """The spread of one part of a round."""
        return replace(self, median=self.median / parts, low=self.low / parts, high=self.high / parts)

    def figures(self, units: float, digits: int = 2) -> dict[str, float]:
        """The same as rates, ready for a record; the quartiles change places."""
        rates = {"rate": units / self.median, "low": units / self.high, "high": units / self.low}
        rounded = {name: round(value, digits) for name, value in rates.items()}
        return rounded | {"rounds": self.rounds, "quiet": self.quiet, "others": self.others}


def spread(rounds: list[Round]) -> Spread:
    quiet = [r for r in rounds if r.others < QUIET]
    seconds = sorted(r.seconds for r in (quiet if len(quiet) >= ENOUGH else rounds))
    others = round(median(r.others for r in rounds), 2)
    return Spread(median(seconds), _quantile(seconds, 0.25), _quantile(seconds, 0.75), len(rounds), len(quiet), others)


def _quantile(ordered: list[float], share: float) -> float:
    """Linear between the neighbours, as numpy has it."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def take_turns(
    functions: Mapping[str, Callable[[], float | None]], rounds: int, own: Iterable[int] = (), patience: float = 3.0
) -> dict[str, list[Round]]:
    """Run the functions in turn, `rounds` times each. One that returns seconds has timed itself.

    `own` are the other processes that do the work. While quiet rounds are too few for every function, up to `patience` times
    as many rounds are run.
    """
    done: dict[str, list[Round]] = {name: [] for name in functions}
    for number in range(max(rounds, int(rounds * patience))):
        if number >= rounds and all(sum(r.others < QUIET for r in each) >= ENOUGH for each in done.values()):
            break
        for name, function in functions.items():
            done[name].append(one_round(function, own))
    return done


def one_round(function: Callable[[], float | None], own: Iterable[int] = ()) -> Round:
    before, start = _others_seconds(own), time.perf_counter()
    seconds = function()
    elapsed = time.perf_counter() - start
    return Round(elapsed if seconds is None else seconds, max(0.0, _others_seconds(own) - before) / elapsed)


def _others_seconds(own: Iterable[int]) -> float:
    """Processor seconds since the start of the machine that were spent neither in this process nor in `own`."""
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0
    busy = sum(fields) - fields[3] - fields[4]  # but idle and waiting for disks
    mine = os.times()  # with children that have ended
    return busy / _TICK - sum(mine[:4]) - sum(_seconds_of(pid) for pid in own)


def _seconds_of(pid: int) -> float:
    """Of a process and its children, those that have ended too."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        children = {child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()}
    except OSError:
        return 0.0
    return sum(map(int, words[11:15])) / _TICK + sum(_seconds_of(int(child)) for child in children)


def record(name: str, figures: Mapping[str, Any], spreads: Iterable[Spread] = ()) -> None:
    """Append a result to results/NAME.jsonl, unless it is said why not: changes in no commit, or a disturbed spread."""
    line = {"date": time.strftime("%Y-%m-%d"), **machine(), **figures}
    if str(line["commit"]).endswith("-dirty"):
        print("not recorded: tracked files have changes; commit them first, so that the figures belong to a commit\n", flush=True)
        return
    disturbed = [s for s in spreads if s.disturbed]
    if disturbed:
        most = max(s.others for s in disturbed)
        print(f"not recorded: other processes kept up to {most:.1f} processors busy meanwhile; these figures say little\n", flush=True)
        return
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"recorded in results/{name}.jsonl\n", flush=True)


def table(header: list[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table with columns of one width; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[c]) for row in [header, *cells]) for c in range(len(header))]
    right = [c > 0 for c in range(len(header))]

    def line(row: list[str]) -> str:
        return "| " + " | ".join(t.rjust(w) if r else t.ljust(w) for t, w, r in zip(row, widths, right, strict=True)) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)) + "|"
    return "\n".join([line(header), rule, *map(line, cells)])


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)
