"""tinygrad's scheduler and code generator are imported when something needs them, in an order in which that works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import importlib, sys
import {entry}
later = ("tinygrad.codegen", "tinygrad.schedule", "tinygrad.uop.symbolic", "tinygrad.uop.spec")
assert not [name for name in sys.modules if name.startswith(later)]
from tinyvllm.bridge import deferred, programs
from tinyvllm.config.switches import cache_folder
from tinyvllm.runner.device import start_device
opt, tc = (deferred._finder.modules["tinygrad.codegen.opt" + end] for end in ("", ".tc"))
start_device("CPU", cache_folder())
importlib.import_module("{first}")
import tinygrad.codegen.opt.tc, tinygrad.schedule, tinygrad.schedule.memory
assert tinygrad.codegen.opt is opt and opt.tc is tc and not deferred._finder.modules
for cache in (tinygrad.codegen.to_program_cache, tinygrad.schedule.schedule_cache):
    assert type(cache) is programs.DiskTable
from tinygrad import Tensor, TinyJit
step = TinyJit(lambda x: (x * 2).sum().realize())
assert [step(Tensor([1.0, 2, n]).contiguous().realize()).item() for n in range(4)] == [6, 8, 10, 12]
"""
# Whichever of these comes first. Five of them import each other in a way that works in tinygrad's own order only.
MODULES = ("codegen", "codegen.opt.postrange", "codegen.opt.search", "codegen.late.expander", "schedule", "schedule.rangeify")
MODULES = (*MODULES, "schedule.memory", "uop.spec", "uop.symbolic", "callify", "renderer.llvmir")


@pytest.mark.parametrize("first", MODULES)
def test_whichever_module_comes_first(first: str) -> None:
    _run("tinyvllm.bridge", f"tinygrad.{first}")


@pytest.mark.parametrize("entry", ["tinyvllm.engine.llm", "tinyvllm.engine.engine", "tinyvllm.runner.rank"])
def test_no_entry_imports_tinygrad_before_the_bridge(entry: str) -> None:
    _run(entry, "tinygrad.schedule")


def _run(entry: str, first: str) -> None:
    done = subprocess.run([sys.executable, "-c", CODE.format(entry=entry, first=first)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_caches_that_others_replaced_are_ours_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an emulated device does: what was put there while the package was imported is gone afterwards."""
    from tinygrad import codegen, schedule

    from tinyvllm.bridge import programs

    compiled = codegen.do_to_program
    monkeypatch.setattr(codegen, "do_to_program", compiled)
    monkeypatch.setattr(codegen, "to_program_cache", {})
    monkeypatch.setattr(schedule, "schedule_cache", {})
    programs.enable_program_cache(programs._machine)
    assert type(codegen.to_program_cache) is type(schedule.schedule_cache) is programs.DiskTable
    stripping = codegen.do_to_program
    assert stripping is not compiled
    programs.enable_program_cache(programs._machine)
    assert codegen.do_to_program is stripping, "once"


WARM = """
import sys
from tinyvllm.cli import main
assert main(["--prompt", "Once", "--max-tokens", "3", "--temperature", "0"]) == 0
late = ("tinygrad.codegen", "tinygrad.schedule", "tinygrad.callify", "tinygrad.uop.symbolic", "tinygrad.uop.upat", "sqlite3", "difflib")
print([name for name in sys.modules if name.startswith(late)], file=sys.stderr)
"""


def test_a_second_start_schedules_nothing() -> None:
    """Its steps are on disk: what would import the scheduler is no part of it."""
    environment = {name: value for name, value in os.environ.items() if name != "TINYVLLM_KEEP_STEPS"}
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


FIRST = """
import tinyvllm.runner.lean_tinygrad
import tinygrad.codegen
def generate(*arguments, **named):
    raise AssertionError("a kernel is generated")
tinygrad.codegen.full_rewrite_to_sink = generate
from tinyvllm.cli import main
assert main(["--prompt", "Once", "--max-tokens", "3", "--temperature", "0"]) == 0
"""


def test_a_first_start_generates_no_kernel(tmp_path: Path) -> None:
    """All of a step is hand-written: nothing of it waits for tinygrad's code generator and one more compiler."""
    environment = os.environ | {"TINYVLLM_CACHE": str(tmp_path)}
    tmp_path.chmod(0o700)
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
