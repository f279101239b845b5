"""Attacks on every kind of cached file: the engine starts, its answers are right, and each damaged folder is one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
from tinygrad.uop import Ops

from tests.notices import without_notices
from tests.storage.attacks import ATTACKS
from tinyvllm.backends.autotune import FILE, Tuner
from tinyvllm.backends.cpu import compile as compile_module
from tinyvllm.backends.cpu.compile import function_code, kernel_code
from tinyvllm.backends.kernel import Kernel
from tinyvllm.bridge import programs
from tinyvllm.storage import folders
from tinyvllm.storage.cache import open_cache

MARK = "planted"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own; the process logs as a new one does."""
    monkeypatch.setenv("TINYVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "_logged", set())
    return tmp_path / "cache"


# --- each kind by itself


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is compiled; the compiler is not started."""
    names: list[str] = []

    def compile_once(text: str, flags: tuple[str, ...], name: str) -> bytes:
        names.append(name)
        return f"object of {name}".encode() * 100

    monkeypatch.setattr(compile_module, "_compile", compile_once)
    return names


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("code", [lambda: kernel_code(Kernel("kv_copy", "cpu", "plain", (("BLOCK_BYTES", 64),), 1, 2)),
                                  lambda: function_code("thread_pool")], ids=["kernel", "thread pool"])  # fmt: skip
def test_an_object_is_compiled_again(attack: str, code: Callable[[], bytes], cache, compiled, caplog):
    first = code()
    (path,) = (cache / "kernels").iterdir()
    ATTACKS[attack](path)
    assert code() == first and code() == first and len(compiled) == 2
    assert len(caplog.messages) == 1 and "built again" in caplog.messages[0]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_value_of_tinygrad_is_computed_again(attack: str, cache, caplog):
    programs._keep("compile", "source", b"machine code")
    (path,) = (cache / "tinygrad").iterdir()
    ATTACKS[attack](path)
    assert programs._load("compile", "source") is None
    assert len(caplog.messages) == 1 and "built again" in caplog.messages[0]
    programs._keep("compile", "source", b"machine code")
    assert programs._load("compile", "source") == b"machine code"


@pytest.mark.parametrize("attack", ATTACKS)
def test_figures_are_timed_again(attack: str, cache, caplog):
    from tinyvllm.backends import autotune

    autotune._write(open_cache(), "GPU", "matvec", {"rows=4": 0.5})
    ATTACKS[attack](cache / FILE)
    assert Tuner("GPU", open_cache())._figures == {}
    assert len(caplog.messages) == 1 and "built again" in caplog.messages[0]


class Planted:
    """A pickle that runs a program when it is read."""

    def __init__(self, mark: Path):
        self._mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self._mark}",)


def test_a_planted_pickle_is_not_run_even_with_a_valid_digest(cache, tmp_path, caplog):
    place = programs._place("programs", "key")
    assert open_cache().write(place, pickle.dumps(Planted(tmp_path / MARK)))
    assert programs._load("programs", "key") is None and not (tmp_path / MARK).exists()
    assert len(caplog.messages) == 1 and "it names posix.system" in caplog.messages[0]
    assert programs._load("programs", "key") is None and not (cache / place).exists()


ODD_PICKLES = (
    b"",
    b"\x80\x04.",
    b"\x80\x04]" * 5000,
    pickle.dumps({"a": print}),
    b"ctinygrad.helpers\nfetch\n(S'/etc'\ntR.",
    b"\x80\x05K\x01.",
    b"cbuiltins\ngetattr\n(ctinygrad.uop.ops\nUOp\nS'sink'\ntR.",  # no member of an enumeration
)


def test_members_of_enumerations_are_read_as_any_python_writes_them(cache):
    open_cache().write(programs._place("programs", "key"), b"cbuiltins\ngetattr\n(ctinygrad.uop\nOps\nS'ADD'\ntR.")
    assert programs._load("programs", "key") is Ops.ADD


@pytest.mark.parametrize("content", ODD_PICKLES)
def test_odd_pickles_raise_nothing(cache, content):
    open_cache().write(programs._place("programs", "key"), content)
    assert programs._load("programs", "key") in (None, 1)


KEPT = """
from tinyvllm.config.switches import cache_folder
from tinyvllm.runner.device import start_device
start_device("CPU", cache_folder())
from tinygrad import Tensor, codegen, schedule
from tinyvllm.bridge import programs
(Tensor.ones(3, 1007).contiguous().realize() * 2).sum(0).realize()
for table, name in ((codegen.to_program_cache, "programs"), (schedule.schedule_cache, "schedules")):
    print(name, len(table) > 0 and all(programs._load(name, key) is not None for key in table))
"""


def test_what_tinygrad_keeps_is_of_the_classes_that_may_be_read(tmp_path):
    """Schedules and programs of a new process with an empty cache folder are read back."""
    variables = os.environ | {"TINYVLLM_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", KEPT], env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["programs True", "schedules True"]), done.stderr


# --- whole starts

START = """
import json, resource, sys
if len(sys.argv) > 3:
    import pwd
    def no_entry(uid):
        raise KeyError(uid)
    pwd.getpwuid = no_entry
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from tinyvllm.runner import weight_cache
from tinyvllm.storage import digests
weight_cache.MIN_BYTES = 0
digests._SETTLED_NS = 0  # the test has just written the model: its digest is remembered all the same
from tinyvllm import LLM, SamplingParams
with LLM(sys.argv[1], num_blocks=24, prefix_cache_dir=sys.argv[2]) as llm:
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    output = llm.generate("the rules of this shop are these, and they are many", greedy)
from tinygrad import Tensor
for n in range(2, 8):  # a model's step has no kernel that tinygrad generates
    assert (Tensor(list(range(n))) * 3).tolist() == [3 * i for i in range(n)]
print(json.dumps(output[0].outputs[0].token_ids))
"""


def start(model: Path, folder: Path, poor: bool = False, **environ: str) -> tuple[list[int], list[str]]:
    """The tokens of a process with this cache folder, and its lines on stderr without notices.

    A `poor` one can write no file, and has no home or name; nor may Python (-B), which would leave truncated .pyc files.
    """
    words = [sys.executable, "-B", "-c", START, str(model), str(folder / "prefixes"), *(["poor"] if poor else [])]
    variables = os.environ | {"TINYVLLM_CACHE": str(folder / "cache"), "XDG_CACHE_HOME": str(folder / "xdg")} | environ
    for name in ("CACHEDB", *(("HOME", "USER", "LOGNAME") if poor else ())):
        variables.pop(name, None)
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), without_notices(done.stderr.splitlines())


@pytest.fixture(scope="module")
def started(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A folder with the caches that a first start left, and its tokens."""
    folder = tmp_path_factory.mktemp("started")
    tokens, lines = start(tiny_model, folder)
    assert lines == []
    return folder, tokens


def files_of(folder: Path) -> list[Path]:
    kept = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert {path.parent.name for path in kept} >= {"kernels", "tinygrad", "weights", "digests"}
    return kept


def plant_database(folder: Path) -> Path:
    """tinygrad's own database at its usual place, with a pickle in every table that it reads, and garbage after it."""
    path = folder / "xdg" / "tinygrad" / "cache.db"
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as database:
        for table in ("compile_clang_jit_x86_64_native_22", "tinyvllm_programs_tinygrad_0_13_0_a_22"):
            database.execute(f"CREATE TABLE '{table}' (key text, val blob, PRIMARY KEY (key))")
            database.execute(f"INSERT INTO '{table}' VALUES ('', ?)", (pickle.dumps(Planted(folder / MARK)),))
    database.close()
    return path


def test_a_start_over_damaged_caches(started, tiny_model, tmp_path):
    """Every attack on some file of every kind; tinygrad's own database is planted, and then garbage."""
    folder, tokens = started
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    database = plant_database(tmp_path)
    attacks = cycle(ATTACKS.values())
    attacked = [path for path in files_of(tmp_path) if path.parent.name in ("cache", "weights", "digests") or path.suffix == ".kv"]
    for room in ("kernels", "tinygrad"):
        attacked += sorted((tmp_path / "cache" / room).iterdir())[:: 1 if room == "kernels" else 3][: len(ATTACKS)]
    for path in attacked:
        next(attacks)(path)
    rooms = {path.parent for path in attacked}
    content = database.read_bytes()
    again, lines = start(tiny_model, tmp_path)
    assert again == tokens and not (tmp_path / MARK).exists() and database.read_bytes() == content
    assert 0 < len(lines) <= len(rooms) + 1, lines
    database.write_bytes(b"garbage")
    assert start(tiny_model, tmp_path) == (tokens, []), "the third start finds everything whole"


def test_a_start_without_a_place_for_caches(started, tiny_model, tmp_path):
    """A folder that all can write to: nothing of it is used, one line, and the temporary folder is gone afterwards."""
    folder, tokens = started
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "cache").chmod(0o777)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    (tmp_path / "tmp").mkdir()
    again, lines = start(tiny_model, tmp_path, TMPDIR=str(tmp_path / "tmp"))
    assert again == tokens and len(lines) == 1 and "every user can write to it" in lines[0]
    assert not any((tmp_path / "tmp").iterdir())
    changed = {path for path, time in before.items() if path.exists() and path.stat().st_mtime_ns != time}
    assert not {path for path in changed if "cache" in path.parts}


def test_a_copied_folder_needs_no_compiler_and_no_space(started, tiny_model, tmp_path):
    """As in a container image without a compiler, on a full disk, under a user without a name."""
    folder, tokens = started
    shutil.copytree(folder / "cache", tmp_path / "cache")
    again, lines = start(tiny_model, tmp_path, poor=True, CC="/no/such/compiler")
    assert again == tokens
    assert len(lines) <= 3 and all("File too large" in line or "cannot be written" in line for line in lines), lines


@pytest.mark.long  # a start for each attack and room
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("room", ["kernels", "tinygrad", "weights", "digests", "prefixes"])
def test_a_start_over_a_damaged_room(started, tiny_model, tmp_path, room, attack):
    folder, tokens = started
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    attacked = [path for path in files_of(tmp_path) if room in path.parts]
    assert attacked
    for path in attacked:
        ATTACKS[attack](path)
    again, lines = start(tiny_model, tmp_path)
    assert again == tokens and len(lines) <= 2, lines
