"""What all parts of gpu.py and mac.py share: figures and their roofs, measurements that may fail, and what other interpreters answer."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import record

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Machine:
    """What the parts must know of a kind of GPU.

    device     tinygrad's name
    module     what runs its parts, and gives the figures their file in results/
    describe   what it is, for records
    roof       the figures of bandwidth, of which the largest is the roof
    roof_name  what shares of it are called
    compute    the figure of 10^12 operations a second that prompts are held against
    """

    device: str
    module: str
    describe: Callable[[], dict[str, Any]]
    roof: tuple[str, ...]
    roof_name: str
    compute: str


# --- figures


def emit(o: argparse.Namespace, what: str, value: float, unit: str, of: str = "", roof: float | None = None, **more: Any) -> None:
    """One figure: shown, added to the run, recorded. `roof` is what `value` would be at best, by the run's own measure named `of`."""
    share = round(value / roof, 4) if roof else None
    line = {"part": o.part, "what": what, "value": round(value, 4), "unit": unit, "share": share, "of": of if roof else "", **more}
    described = o.machine.describe()
    print(f"{what}: {value:.5g} {unit}" + (f", {share:.1%} of {of}" if share is not None else ""), flush=True)
    if o.run is not None:
        with open(o.run, "a") as file:
            file.write(json.dumps({**described, **line}) + "\n")
    if not o.tiny and not o.unrecorded:
        with contextlib.redirect_stdout(io.StringIO()):  # it says where, figure by figure
            record(o.machine.module, {**described, **line})


@functools.cache
def gpu() -> dict[str, str]:
    """Name and driver of the GPU that is used, as far as nvidia-smi is there to say."""
    if shutil.which("nvidia-smi") is None:
        return {"gpu": "unknown", "driver": "unknown"}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", "-i", first, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True).stdout.strip().split("\n")[0]
    name, _, driver = said.partition(", ")
    return {"gpu": name or "unknown", "driver": driver or "unknown"}


def lines_of(run: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.read_text().splitlines()] if run is not None and run.exists() else []


def measured(o: argparse.Namespace, what: str) -> float | None:
    """The newest figure of this name in the run."""
    return next((float(line["value"]) for line in reversed(lines_of(o.run)) if line["what"] == what), None)


def bandwidth_of(o: argparse.Namespace) -> float | None:
    """Bytes a second: the best that was measured of the machine's roof."""
    found = [value for value in (measured(o, what) for what in o.machine.roof) if value is not None]
    return 1e9 * max(found) if found else None


def computing(o: argparse.Namespace) -> float | None:
    """10^12 operations a second."""
    return measured(o, o.machine.compute)


def effort(o: argparse.Namespace) -> Any:
    from benchmarks.gpu_ops import Effort

    return Effort(1, 0.0) if o.tiny else Effort()


def start(o: argparse.Namespace) -> None:
    from tinyvllm.config.switches import cache_folder
    from tinyvllm.errors import ArgumentError, KernelError
    from tinyvllm.runner.device import start_device

    try:
        start_device(o.machine.device, cache_folder())
    except (ArgumentError, KernelError) as error:
        raise SystemExit(f"{o.machine.module}: {error}") from None


# --- measurements


def attempt(o: argparse.Namespace, work: Callable[..., object], *arguments: Any) -> None:
    """One measurement of several, `work(*arguments)`: a failure is reported and counted at the end of the part, and the others continue.

    If the failure broke the device, or the measurement never ends, they continue in a new process.
    """
    o.tried += 1
    if o.tried <= o.skip:
        return
    watch = threading.Timer(o.limit, restart, (o, f"it took more than {o.limit:.0f} s"))
    watch.daemon = True
    if o.part != "peers":
        watch.start()
    try:
        work(*arguments)
    except Exception as error:  # whatever it is, the next measurement may work
        if o.strict:
            raise
        watch.cancel()
        if o.part != "peers" and device_broken():
            restart(o, f"{type(error).__name__}: {error}")
        else:
            o.failed += 1
            print(f"FAILED: {type(error).__name__}: {error}", flush=True)
    finally:
        watch.cancel()


def restart(o: argparse.Namespace, why: str) -> None:
    """Become a new process, which opens the device again and begins after the measurement that just failed."""
    print(f"FAILED: {why}; a new process continues", flush=True)
    again = [*o.words, "--skip", str(o.tried), "--failed", str(o.failed + 1)]
    os.execv(sys.executable, [sys.executable, "-m", f"benchmarks.{o.machine.module}", *again])


def device_broken() -> bool:
    from benchmarks.gpu_ops import broken

    return broken()


def peer(o: argparse.Namespace, *words: str) -> dict[str, Any]:
    """What gpu_peers answers in the interpreter that has torch; nothing, with the reason printed, where it cannot."""
    return ask(o, "torch", o.torch_python, "benchmarks.gpu_peers", *words)


def ask(o: argparse.Namespace, peer_name: str, interpreter: str, module: str, *words: str) -> dict[str, Any]:
    """The JSON object that a module prints in another interpreter; an empty one, with the reason printed, where it has none."""
    try:
        done = subprocess.run([interpreter, "-m", module, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=o.patience)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"no {peer_name}: {error}", flush=True)
        return {}
    said = done.stdout.strip() if done.returncode == 0 else ""
    answer: dict[str, Any] = json.loads(said) if said else {"missing": f"its process ended with status {done.returncode}"}
    if "missing" in answer:
        print(f"no {peer_name}: {answer['missing']}; left out", flush=True)
        return {}
    return answer
