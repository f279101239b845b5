"""The house of docs/tour.md: which room may import which, what stays out of where, and that the wheel's list of rooms is whole."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tinyvllm"

# A room may always import itself.
DOORS = {
    "errors": set(),
    "metrics": set(),
    "batch": set(),
    "placement": set(),
    "config": {"quant", "errors"},
    "request": {"errors"},
    "quant": {"errors"},
    "cache": {"errors"},
    "text": {"request", "errors"},
    "bridge": {"placement", "backends", "batch", "config", "errors"},
    "backends": {"placement", "bridge", "ops", "batch", "quant", "config", "errors"},
    "ops": {"placement", "backends", "bridge", "batch", "quant", "config", "errors"},
    "scheduler": {"request", "cache", "config", "errors"},
    "weights": {"quant", "errors"},
    "models": {"ops", "bridge", "batch", "quant", "errors"},
    "sampling": {"ops", "bridge", "request", "errors"},
    "runner": {
        "placement",
        "models",
        "weights",
        "sampling",
        "scheduler",
        "ops",
        "backends",
        "bridge",
        "quant",
        "batch",
        "config",
        "errors",
    },
    "engine": {"text", "cache", "scheduler", "runner", "sampling", "metrics", "request", "config", "errors"},
    "server": {"engine", "text", "request", "metrics", "config", "errors"},
    "cli": {"server", "engine", "text", "request", "config", "errors"},
    "demo": set(),
    "kernels": set(),
}
# Device files of a backend that still see below tinygrad's surface; they move behind the bridge next.
BELOW = {PACKAGE / "backends" / p for p in ("cpu/graph.py", "cuda/graph.py", "cuda/driver.py", "metal/icb.py", "metal/queue.py")}
PUBLIC_TINYGRAD = {"tinygrad", "tinygrad.llm.model"}
PUBLIC_NAMES = {"Tensor", "dtypes", "Device", "TinyJit", "nn", "Variable", "Context", "UOp"}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.stem != "__init__")


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[int, str, set[str]]]:
    """(line, module, names) of every import in a file, also those inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, set()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.lineno, node.module or "", {alias.name for alias in node.names}))
    return found


def ours(path: Path) -> list[tuple[int, str]]:
    """(line, room) of every import of our own."""
    found = []
    for line, module, names in imports(path):
        if module == "tinyvllm":
            found += [(line, name) for name in names if (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists()]
        elif module.startswith("tinyvllm."):
            found.append((line, module.split(".")[1]))
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_doors(path):
    me = room(path)
    assert me in DOORS, f"{path}: a new room; give it a row in the table of doors"
    wrong = [f"{path}:{line}: {me} imports {other}" for line, other in ours(path) if other != me and other not in DOORS[me]]
    assert not wrong, "\n".join(wrong)


def test_runner_takes_only_the_schedule_from_the_scheduler():
    for path in (PACKAGE / "runner").glob("*.py"):
        for line, module, names in imports(path):
            if module == "tinyvllm.scheduler":
                assert names <= {"Schedule", "Scheduled"}, f"{path}:{line}: {names}"


def test_only_launch_sees_below_tinygrads_surface():
    for path in modules():
        if room(path) == "bridge" or path in BELOW:
            continue
        for line, module, names in imports(path):
            assert not module.startswith("tinyvllm.bridge."), f"{path}:{line}: what others may use is named in tinyvllm/bridge"
            if module.split(".")[0] == "tinygrad":
                types_only = module == "tinygrad.dtype" and names == {"DType"}  # the type of the public dtypes has no public name
                public = module in PUBLIC_TINYGRAD and (module != "tinygrad" or names <= PUBLIC_NAMES)
                assert public or types_only, f"{path}:{line}: {module} {sorted(names)}"


@pytest.mark.parametrize("name", ["tinyvllm", "tinyvllm.text.tokenizer", "tinyvllm.cache.blocks", "tinyvllm.scheduler", "tinyvllm.request",
                                  "tinyvllm.config", "tinyvllm.cli"])  # fmt: skip
def test_imports_without_tinygrad(name):
    code = f"import sys, {name}; sys.exit('tinygrad' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("name", ["models", "ops"])
def test_models_and_ops_know_no_requests_and_no_text(name):
    for path in (PACKAGE / name).rglob("*.py"):
        used = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not used & {"Request", "Sequence", "SamplingParams", "Tokenizer"}, path


def test_every_room_is_in_the_wheel():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    rooms = {"tinyvllm"} | {f"tinyvllm.{p.parent.relative_to(PACKAGE).as_posix().replace('/', '.')}" for p in PACKAGE.glob("*/**/*.py")}
    assert listed == rooms | {"tinyvllm.kernels"}


def test_no_names_that_say_nothing():
    for path in modules():
        assert path.stem not in ("utils", "helpers", "misc", "common"), path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert not node.name.endswith(("Manager", "Helper", "Utils")), f"{path}:{node.lineno}: {node.name}"
