"""The wheel: what is in it, and tinyvllm installed from it with pipx and uvx, away from the checkout, with an empty home."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

from tinyvllm.version import VERSION

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "tinyvllm", "kernels")
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout's sources, built from a copy, which setuptools writes to."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    script = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    run(sys.executable, "-W", "ignore", "-c", script, str(folder / "dist"), cwd=folder)
    [path] = (folder / "dist").iterdir()
    return path


def run(*command: str, cwd: Path, env: dict[str, str] | None = None, seconds: float = 300) -> str:
    result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stdout[-1500:]}{result.stderr[-1500:]}"
    return result.stdout


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def test_the_wheel_has_every_source_kernel_and_page(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata, entry] = (archive.read(next(n for n in names if n.endswith(end))).decode() for end in ("METADATA", "entry_points.txt"))
    inside = {name.removeprefix("tinyvllm/") for name in names if name.startswith("tinyvllm/")}
    kernels = {name.removeprefix("kernels/") for name in inside if name.startswith("kernels/")}
    assert kernels == files_below(ROOT / "kernels")
    assert inside - {f"kernels/{name}" for name in kernels} == files_below(ROOT / "tinyvllm")
    assert all(name.startswith(("tinyvllm/", "tinyvllm-")) for name in names)  # no tests, no benchmarks
    assert "tinyvllm = tinyvllm.cli:main" in entry
    assert {"server", "cuda", "clang"} <= set(re.findall(r"^Provides-Extra: (\S+)", metadata, re.MULTILINE))


@pytest.fixture(scope="module")
def packages(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheels that an installation takes, fetched by pip, which reaches an index here; uv may not, with certificates of its own."""
    folder = tmp_path_factory.mktemp("packages")
    run(sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), f"{wheel}[server,clang]", cwd=folder)
    return folder


def clean(home: Path, packages: Path) -> dict[str, str]:
    """The environment of a user without anything: no checkout, no cache, no activated environment; the index is a folder."""
    home.mkdir()
    path = os.pathsep.join(("/usr/local/bin", "/usr/bin", "/bin"))
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages), "UV_OFFLINE": "1", "UV_FIND_LINKS": str(packages)}
    return {**index, "HOME": str(home), "PATH": path, "UV_PYTHON": sys.executable}


def check(finding: str, findings: list[dict[str, str]]) -> dict[str, str]:
    return next(one for one in findings if one["name"] == finding)


@pytest.mark.long
def test_pipx_install(wheel: Path, packages: Path, tmp_path: Path) -> None:
    pytest.importorskip("pipx")
    env = clean(tmp_path / "home", packages)
    run(sys.executable, "-m", "pipx", "install", "--python", sys.executable, f"{wheel}[server,clang]", cwd=tmp_path, env=env)
    command = str(tmp_path / "home" / ".local" / "bin" / "tinyvllm")
    assert run(command, "--version", cwd=tmp_path, env=env).strip() == f"tinyvllm {VERSION}"
    story = run(command, "--prompt", "Once upon a time", "--max-tokens", "8", "--temperature", "0", cwd=tmp_path, env=env)
    assert story == run(sys.executable, "main.py", "--prompt", "Once upon a time", "--max-tokens", "8", "--temperature", "0", cwd=ROOT)
    findings = json.loads(run(command, "doctor", "--json", cwd=tmp_path, env=env))["findings"]
    assert check("kernels", findings)["status"] == "ok" and check("C compiler", findings)["status"] == "ok", findings
    assert (tmp_path / "home" / ".cache" / "tinyvllm" / "kernels").is_dir()
    python = next((tmp_path / "home").rglob("venvs/tinyvllm/bin/python"))
    script = "from tinyvllm.backends.source import kernels_folder; print(kernels_folder())"
    found = Path(run(str(python), "-c", script, cwd=tmp_path, env=env).strip())
    assert found.is_relative_to(tmp_path) and files_below(found) == files_below(ROOT / "kernels")
    check_server(command, tmp_path, env)


def check_server(command: str, folder: Path, env: dict[str, str]) -> None:
    """The installed server has its page, and ends by SIGTERM."""
    arguments = [command, "serve", "--port", "0", "--no-access-log"]
    with subprocess.Popen(arguments, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(found[0] for line in process.stderr if line.startswith("ready:") and (found := re.search(r"http://[\d.:]+", line)))
            for path in ("/", "/page/page.js", "/v1/models"):
                with urllib.request.urlopen(url + path, timeout=30) as response:
                    assert response.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.long
def test_uvx(wheel: Path, packages: Path, tmp_path: Path) -> None:
    uv = pytest.importorskip("uv")
    env = clean(tmp_path / "home", packages)
    uvx = [uv.find_uv_bin(), "tool", "run", "--from", f"{wheel}[clang]", "tinyvllm"]
    assert run(*uvx, "--version", cwd=tmp_path, env=env).strip() == f"tinyvllm {VERSION}"
    assert run(*uvx, "--prompt", "Once upon a time", "--max-tokens", "4", cwd=tmp_path, env=env)
