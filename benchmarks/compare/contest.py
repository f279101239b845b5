"""The side of the comparison: starts contestants, lets them do the same thing in turn, and never two at once.

All are loaded at the same time, so that they can take turns within one run; while one computes the others wait for their next line. Some
libraries let their threads spin for a while after the last call, so there is a pause before each turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Spread, spread, take_turns
from benchmarks.roof import read_once

ROOT = Path(__file__).parents[2]
READING = "reading"  # the roof, among the contestants' names
PAUSE = 0.25  # seconds; OpenMP's threads spin for up to 0.2 after their work


@dataclass
class Contestant:
    """A process that answers. `missing` says why there is none."""

    name: str
    process: subprocess.Popen[str] | None
    missing: str | None = None
    load_seconds: float = 0.0
    notes: dict[str, str] = field(default_factory=dict)
    settings: str = ""  # chosen by `tune`

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def ask(self, *command: object) -> dict[str, Any]:
        """Send one command, or none at the beginning; the answer. A process that ended answers with an error."""
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        try:
            if command:
                self.process.stdin.write(json.dumps(command) + "\n")
                self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        return json.loads(line) if line else {"error": f"its process ended with status {self.process.wait()}"}

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()


def start(
    name: str,
    player: str,
    python: str,
    model: Path,
    limits: dict[str, int],
    log: Path,
    engine: dict[str, Any] | None = None,
    switches: dict[str, str] | None = None,
) -> Contestant:
    """A contestant with its model loaded, or one that says what is missing. Its output is in `log`; `engine` are options of tinyvllm's,
    `switches` variables of its environment.
    """
    command = [python, "-m", f"benchmarks.compare.{player}", str(model), *(w for k, v in limits.items() for w in (f"--{k}", str(v)))]
    command += ["--engine", json.dumps(engine)] if engine else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(limits["threads"]), "TOKENIZERS_PARALLELISM": "false"}
    environment |= switches or {}
    with open(log, "w") as errors:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment
            )
        except OSError as error:
            return Contestant(name, None, f"{python}: {error.strerror}")
    contestant = Contestant(name, process)
    answer = contestant.ask()
    if "seconds" not in answer:
        last = next((line for line in reversed(log.read_text().splitlines()) if line.strip()), "")
        contestant.close()
        return Contestant(name, None, answer.get("missing") or f"{answer['error']}: {last}")
    contestant.load_seconds = answer["seconds"]
    return contestant


def contest(
    contestants: list[Contestant],
    test: str,
    before: tuple[object, ...] | None,
    commands: dict[str, tuple[object, ...]],
    warm: int,
    rounds: int,
) -> dict[str, Spread]:
    """The spread of the seconds that each contestant takes for its command. `before` is done once, untimed; the command `warm` times.

    Reading memory (`READING`, see benchmarks.roof) takes turns with them. A contestant that has no command, cannot run the test,
    or fails, is left out; the reason is in its notes under the name of the test.
    """
    able = []
    for one in contestants:
        if one.process is not None and one.name in commands:
            first = [*([before] if before else []), *[commands[one.name]] * warm]
            if all(_done(one, test, command) for command in first):
                able.append(one)
    turns = {one.name: _turn(one, test, commands[one.name]) for one in able} | {READING: read_once}
    done = take_turns(turns, rounds, [one.pid for one in able])
    failed = {one.name for one in able if test in one.notes}
    return {name: spread(each) for name, each in done.items() if name not in failed}


def tune(contestants: list[Contestant], test: str, batch: int, tokens: int) -> None:
    """Each contestant, alone, chooses the fastest of its settings for a test."""
    for one in contestants:
        if one.process is not None:
            answer = one.ask("tune", test, batch, tokens)
            one.settings = answer.get("settings", "")
            if "error" in answer:
                one.notes[test] = answer["error"]
                print(f"{one.name}: {test}: {answer['error']}", file=sys.stderr)


def steps_of_a_round(contestants: list[Contestant], test: str, begin: tuple[object, ...], seconds: float, most: int) -> dict[str, int]:
    """How many steps take each contestant `seconds`: at least 2, at most `most`."""
    counts = {}
    for one in contestants:
        if one.process is not None and _done(one, test, begin) and _done(one, test, ("steps", 2)):
            step = (_ask_or_note(one, test, ("steps", 2)) or seconds) / 2
            counts[one.name] = max(2, min(round(seconds / step), most))
    return counts


def _done(one: Contestant, test: str, command: tuple[object, ...]) -> bool:
    return _ask_or_note(one, test, command) is not None


def _ask_or_note(one: Contestant, test: str, command: tuple[object, ...]) -> float | None:
    if test in one.notes:
        return None
    answer = one.ask(*command)
    if "seconds" in answer:
        return float(answer["seconds"])
    one.notes[test] = answer.get("unable") or answer["error"]
    if "error" in answer:
        print(f"{one.name}: {test}: {answer['error']}", file=sys.stderr)
    return None


def _turn(one: Contestant, test: str, command: tuple[object, ...]) -> Callable[[], float]:
    def turn() -> float:
        time.sleep(PAUSE)
        seconds = _ask_or_note(one, test, command)
        return float("inf") if seconds is None else seconds

    return turn
