"""The layout as tests: which room may import which, no cycle between files, what stays out of where, and that lists are whole.

A room is a folder or a file right below `tinyvllm/`. `docs/architecture.md` shows the table below as a drawing and as a table; `python
docs/draw_rooms.py` writes both.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shares import SHARES

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tinyvllm"

# Room -> the rooms that it may import. Itself it always may.
IMPORTS: dict[str, set[str]] = {
    "lazy_dataclass": set(),
    "lean_imports": set(),
    "version": set(),
    "errors": set(),
    "foreign": {"errors"},
    "yaml_file": {"foreign", "errors"},
    "metrics": {"lazy_dataclass"},
    "distributed": {"lazy_dataclass", "errors"},
    "aliases": {"lazy_dataclass", "errors"},
    "speculative": {"lazy_dataclass", "errors"},
    "http_client": {"errors"},
    "bench_serve": {"errors", "foreign", "http_client"},
    "kv_events": {"lazy_dataclass", "errors"},
    "config": {"lazy_dataclass", "aliases", "errors", "kv_events", "quant", "speculative"},
    "request": {"lazy_dataclass", "errors"},
    "quant": {"lazy_dataclass", "errors"},
    "storage": {"lazy_dataclass", "config", "errors"},
    "cache": {"lazy_dataclass", "storage", "windows", "errors"},
    "text": {"lazy_dataclass", "request", "foreign", "errors", "host_memory"},
    "energy": {"lazy_dataclass"},
    "batch": {"lazy_dataclass"},
    "placement": {"lazy_dataclass"},
    "host_memory": {"lazy_dataclass", "errors"},
    "integers": set(),
    "windows": {"lazy_dataclass", "integers"},
    "bridge": {"lazy_dataclass", "lean_imports", "storage", "placement", "integers", "batch", "config", "errors", "host_memory"},
    "backends": {
        "version",
        "lazy_dataclass",
        "storage",
        "placement",
        "integers",
        "bridge",
        "batch",
        "quant",
        "config",
        "errors",
        "host_memory",
    },
    "ops": {"lazy_dataclass", "placement", "integers", "backends", "bridge", "batch", "quant", "errors"},
    "weights": {"lazy_dataclass", "storage", "placement", "quant", "foreign", "errors"},
    "models": {"lazy_dataclass", "ops", "bridge", "batch", "quant", "foreign", "errors"},
    "scheduler": {"lazy_dataclass", "request", "cache", "windows", "errors"},
    "sampling": {"lazy_dataclass", "ops", "bridge", "request", "host_memory", "errors"},
    "runner": {
        "version",
        "lazy_dataclass",
        "distributed",
        "speculative",
        "windows",
        "placement",
        "integers",
        "host_memory",
        "models",
        "weights",
        "storage",
        "sampling",
        "scheduler",
        "ops",
        "backends",
        "bridge",
        "quant",
        "batch",
        "request",
        "config",
        "errors",
    },
    "speculate": {
        "lazy_dataclass",
        "speculative",
        "foreign",
        "runner",
        "sampling",
        "scheduler",
        "cache",
        "models",
        "ops",
        "bridge",
        "weights",
        "batch",
        "request",
        "config",
        "errors",
    },
    "engine": {
        "version",
        "lazy_dataclass",
        "distributed",
        "energy",
        "kv_events",
        "speculate",
        "speculative",
        "text",
        "storage",
        "weights",
        "cache",
        "scheduler",
        "runner",
        "sampling",
        "metrics",
        "request",
        "config",
        "foreign",
        "errors",
        "host_memory",
    },
    "server": {"version", "lazy_dataclass", "engine", "text", "request", "metrics", "config", "errors", "host_memory"},
    "lab": {
        "version",
        "yaml_file",
        "http_client",
        "engine",
        "scheduler",
        "speculative",
        "speculate",
        "config",
        "request",
        "demo",
        "foreign",
        "errors",
    },
    "doctor": {"runner", "backends", "storage", "placement", "host_memory", "config", "errors"},
    "cli": {
        "version",
        "lazy_dataclass",
        "lean_imports",
        "weights",
        "doctor",
        "yaml_file",
        "foreign",
        "http_client",
        "speculate",
        "server",
        "lab",
        "metrics",
        "engine",
        "text",
        "placement",
        "request",
        "config",
        "aliases",
        "bench_serve",
        "errors",
        "host_memory",
        "demo",
    },
    "integrations": {"server", "engine", "config", "distributed", "request", "errors"},
    "demo": set(),
    "kernels": set(),
}
# Rooms of the next steps; each gets its folder with its first resident.
RESERVED: dict[str, set[str]] = {}
# One file of a room that another room may import, where it may not import the room.
ONLY: dict[tuple[str, str], set[str]] = {
    ("server", "engine"): {"tinyvllm.engine.api"},
    ("cli", "demo"): {"tinyvllm.demo.corpus"},
    ("cli", "speculate"): {"tinyvllm.speculate.policies"},
    ("cli", "weights"): {"tinyvllm.weights.hub_files"},
    ("lab", "demo"): {"tinyvllm.demo.corpus"},
    ("runner", "scheduler"): {"tinyvllm.scheduler"},
}
WITHOUT_TINYGRAD = (
    "tinyvllm",
    "tinyvllm.text.tokenizer",
    "tinyvllm.cache.blocks",
    "tinyvllm.scheduler",
    "tinyvllm.request",
    "tinyvllm.config.engine",
    "tinyvllm.cli",
    "tinyvllm.lab.run",
    "tinyvllm.lab.fake",
)
PUBLIC_TINYGRAD = {"tinygrad", "tinygrad.llm.model"}
PUBLIC_NAMES = {"Tensor", "dtypes", "Device", "TinyJit", "nn", "Variable", "Context", "UOp"}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.stem != "__init__")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


LOOKED_AT = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.Tuple, ast.List, ast.Set)


@functools.cache
def nodes_of(path: Path) -> list[Any]:
    """A file's nodes of the kinds that tests of all files look at: to parse all files takes seconds, and their trees much memory."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, LOOKED_AT)]


@functools.cache
def imports_of(path: Path) -> list[tuple[int, str, set[str]]]:
    """(line, module, names) of every import in a file: also those inside functions and for types alone."""
    found: list[tuple[int, str, set[str]]] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, set()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.lineno, node.module or "", {alias.name for alias in node.names}))
    return found


@functools.cache
def own_imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import of this package; `from package import module` counts as that module."""
    found = []
    for line, module, names in imports_of(path):
        if module.split(".")[0] == "tinyvllm":
            folder = ROOT.joinpath(*module.split("."))
            files = {name for name in names if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()}
            found += [(line, f"{module}.{name}") for name in sorted(files)]
            if names - files or not names:
                found.append((line, module))
    return found


def forbidden_imports(path: Path) -> Iterator[str]:
    room = room_of(path)
    table = IMPORTS | RESERVED
    for line, module in own_imports_of(path):
        other = module.split(".")[1] if "." in module else "the package itself"
        if other != room and other not in table[room]:
            yield f"{path}:{line}: {room} imports {other}"
        elif module not in (only := ONLY.get((room, other), {module})):
            yield f"{path}:{line}: of {other}, {room} may import {', '.join(sorted(only))}"


@pytest.mark.parametrize("room", sorted({room_of(path) for path in modules()}))
def test_imports_of_rooms(room: str) -> None:
    assert room in IMPORTS | RESERVED, f"{room}: a new room; give it a row in IMPORTS"
    wrong = [said for path in modules() if room_of(path) == room for said in forbidden_imports(path)]
    assert not wrong, "\n".join(wrong)


def test_rooms_are_in_order() -> None:
    """The table itself has no cycle: each room imports rooms that need nothing of it."""
    table, done = dict(IMPORTS | RESERVED), set[str]()
    while table:
        ready = {room for room, needs in table.items() if needs <= done}
        assert ready, f"a cycle among {', '.join(sorted(table))}"
        done |= ready
        table = {room: needs for room, needs in table.items() if room not in ready}


def test_no_cycle_between_files() -> None:
    """Imports inside functions and under TYPE_CHECKING count: they hide a cycle from Python, not from a reader."""
    files = {module_of(path): {module for _, module in own_imports_of(path)} for path in [*modules(), PACKAGE / "__init__.py"]}
    needs = {name: {n for n in wanted if n in files and n != name and n != "tinyvllm"} for name, wanted in files.items()}
    while ready := {name for name, wanted in needs.items() if not wanted & needs.keys()}:
        needs = {name: wanted for name, wanted in needs.items() if name not in ready}
    tied = {name: sorted(wanted & needs.keys()) for name, wanted in needs.items()}
    assert not tied, "\n".join(f"{name} imports {', '.join(wanted)}" for name, wanted in tied.items())


def test_reserved_rooms_are_empty() -> None:
    for room in RESERVED:
        assert not (PACKAGE / room).exists(), f"{room} has a resident: move its row from RESERVED to IMPORTS"


def test_runner_takes_only_the_schedule_from_the_scheduler() -> None:
    for path in (PACKAGE / "runner").glob("*.py"):
        for line, module, names in imports_of(path):
            if module == "tinyvllm.scheduler":
                assert names <= {"Schedule", "Scheduled"}, f"{path}:{line}: {names}"


def test_only_the_bridge_imports_tinygrads_internals() -> None:
    for path in modules():
        if room_of(path) == "bridge":
            continue
        for line, module, names in imports_of(path):
            assert not module.startswith("tinyvllm.bridge."), f"{path}:{line}: what others may use is named in tinyvllm/bridge/__init__.py"
            if module.split(".")[0] == "tinygrad":
                types_only = module == "tinygrad.dtype" and names == {"DType"}  # the type of the public dtypes has no public name
                public = module in PUBLIC_TINYGRAD and (module != "tinygrad" or names <= PUBLIC_NAMES)
                assert public or types_only, f"{path}:{line}: {module} {sorted(names)}"


@pytest.mark.parametrize("name", WITHOUT_TINYGRAD)
def test_imports_without_tinygrad(name: str) -> None:
    code = f"import sys, {name}; sys.exit('tinygrad' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("name", ["models", "ops"])
def test_models_and_ops_know_no_requests_and_no_text(name: str) -> None:
    for path in (PACKAGE / name).rglob("*.py"):
        used = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not used & {"Request", "Sequence", "SamplingParams", "Tokenizer"}, path


def test_ops_name_no_backend() -> None:
    for path in (PACKAGE / "ops").glob("*.py"):
        for line, module in own_imports_of(path):
            assert not re.match(r"tinyvllm\.backends\.(cpu|cuda|metal)\b", module), f"{path}:{line}: {module}"
        strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not strings & {"CPU", "CUDA", "METAL"}, f"{path} names a backend"


def test_names_of_formats_are_in_one_table() -> None:
    """A list of names of formats outside quant/ is a second table. Converters that read foreign files name what those files say."""
    packed = re.compile(r"[IT]?Q\d+_(\d|K|XS|NL)$|MXFP4$")
    for path in modules():
        if room_of(path) in ("quant", "demo"):
            continue
        for node in nodes_of(path):
            if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
                names = [e.value for e in node.elts if isinstance(e, ast.Constant) and isinstance(e.value, str) and packed.match(e.value)]
                assert len(names) < 2, f"{path}:{node.lineno}: {', '.join(names)}: take them from tinyvllm/quant/formats.py"


def test_methods_of_the_two_largest_classes() -> None:
    """Engine and Scheduler were 43 and 37 methods each, and nothing could be added without touching them."""
    for file, name in (("engine/engine.py", "Engine"), ("scheduler/scheduler.py", "Scheduler")):
        classes = [n for n in ast.parse((PACKAGE / file).read_text()).body if isinstance(n, ast.ClassDef) and n.name == name]
        methods = [node.name for node in classes[0].body if isinstance(node, ast.FunctionDef)]
        assert len(methods) <= 22, f"{name} has {len(methods)} methods: {', '.join(methods)}"


def test_every_room_is_in_the_wheel() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    rooms = {"tinyvllm"} | {f"tinyvllm.{p.parent.relative_to(PACKAGE).as_posix().replace('/', '.')}" for p in PACKAGE.glob("*/**/*.py")}
    assert listed == rooms | {"tinyvllm.kernels"}


def test_no_names_that_say_nothing() -> None:
    for path in modules():
        assert path.stem not in ("utils", "helpers", "misc", "common"), path
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                assert not node.name.endswith(("Manager", "Helper", "Utils")), f"{path}:{node.lineno}: {node.name}"


# --- kernels

ENDINGS = {"cpu": ".c", "cuda": ".cu", "metal": ".metal"}
SOURCES = sorted(path for backend, ending in ENDINGS.items() for path in (ROOT / "kernels" / backend).glob(f"*{ending}"))
NOT_A_KERNEL = {"thread_pool"}  # the loop of the CPU's threads, a library of its own


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "kernels")))
def test_a_kernel_begins_with_its_contract_and_its_entry(path: Path) -> None:
    """First the comment with the formula and a line for each argument; then constants and the entry, helpers after it."""
    lines = path.read_text().splitlines()
    head = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    assert head >= 3, f"{path.name}: it begins with its contract: formula, arguments with shape and dtype, unit of work"
    if path.stem in NOT_A_KERNEL:
        return
    kinds = r"\[[^\]]*\]\s+(?:float|int|uint|bf|half|bytes|bool|CACHE|WEIGHT|u?int)|are those of \w+\.metal"
    assert any(re.search(kinds, line) for line in lines[:head]), f"{path.name}: the contract gives shape and dtype of each argument"
    entry = re.compile(rf"\b{path.stem}\s*\(")
    code = [(i, line) for i, line in enumerate(lines[head:], head) if not line.lstrip().startswith("//")]
    first = next((i for i, line in code if entry.search(line)), None)
    assert first is not None, f"{path.name}: its entry is called {path.stem}"
    helper = re.compile(r"(?:static|template|__device__|inline|DEVICE|INLINE|DEVICE_FN)\b[^;]*\)\s*(?:const\s*)?\{")
    helpers = [(i, line) for i, line in code if i < first and helper.match(line)]
    long = [i for i, line in helpers if not line.rstrip().endswith("}")]
    assert not long, f"{path.name}:{long[0] + 1}: a function before the entry (line {first + 1}); put it after, or into include/"
    assert len(helpers) <= 4, f"{path.name}: {len(helpers)} functions before the entry; put them after, or into include/"


def test_every_stem_has_sources_tests_and_a_benchmark() -> None:
    """A stem of the registry names a source in each backend that has it, the tests of that backend, and a row of a benchmark."""
    registry = importlib.import_module("tinyvllm.backends.registry")
    benchmarks = "\n".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    for stem in registry.STEMS:
        assert re.search(rf"\b{stem}\b", benchmarks), f"{stem}: no benchmark names it"
        assert f"`{stem}`" in (ROOT / "docs" / "kernels.md").read_text(), f"docs/kernels.md has no row for {stem}"
    for path in SOURCES:
        folder = ROOT / "tests" / "kernels" / ("" if path.suffix == ".c" else path.parent.name)
        tests = "\n".join(test.read_text() for test in folder.glob("*.py"))
        assert re.search(rf"\b{path.stem}\b", tests), f"{path.relative_to(ROOT)}: no test in {folder.relative_to(ROOT)} names it"


def test_drawing_is_fresh() -> None:
    """docs/architecture.md shows the table above as it is."""
    spec = importlib.util.spec_from_file_location("draw_rooms", ROOT / "docs" / "draw_rooms.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert script.with_drawing(page, IMPORTS, RESERVED) == page, "stale: run `python docs/draw_rooms.py`"


def test_shares_are_of_tests_that_there_are() -> None:
    """A function that was renamed would be in the plain suite again, whole."""
    for name in SHARES:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), f"tests/shares.py: there is no {name}"
