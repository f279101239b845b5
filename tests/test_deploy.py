"""docs/install.md and docs/deploy: what the container file, the unit and the formula name exists here. No image is built."""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tinyvllm.cli.arguments import parse

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "docs" / "deploy"
PAGE = (ROOT / "docs" / "install.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNIT = DEPLOY / "tinyvllm.service"
GRACE_SECONDS = 30.0
DEVELOPMENT = {"train", "test", "lint", "bench", "peers"}  # extras for work on tinyvllm


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments) of the container file, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest.strip()) for name, rest in re.findall(r"^(\S+)\s+(.*)$", text, re.MULTILINE)]


def arguments_of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def variables() -> dict[str, str]:
    return dict(word.split("=", 1) for line in arguments_of("ENV") for word in shlex.split(line))


def named_in_source(variable: str) -> bool:
    return any(f'"{variable}"' in path.read_text() for path in (ROOT / "tinyvllm").rglob("*.py"))


def as_version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def options_under(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: list[str]) -> Any:
    for name in [name for name in os.environ if name.startswith("TINYVLLM_ARG_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        if name.startswith("TINYVLLM_ARG_"):
            monkeypatch.setenv(name, value)
    return parse(words)


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert patterns[0] == "*"
    allowed = {line.removeprefix("!") for line in patterns if line.startswith("!")}
    assert all((ROOT / name).exists() for name in allowed)
    copied = {word for line in arguments_of("COPY") if not line.startswith("--from") for word in line.split()[:-1]}
    assert copied == allowed  # all of it, and nothing that is not used
    wheel = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "tinyvllm", "kernels"}
    assert wheel <= copied
    assert not any(fnmatch.fnmatch(name, pattern) for name in allowed for pattern in patterns[1:] if not pattern.startswith("!"))


def test_stages_extras_and_versions_exist() -> None:
    stages = [line.split() for line in arguments_of("FROM")]
    names = [words[-1] for words in stages]
    assert [words[1] for words in stages] == ["AS"] * len(stages) and names[-1] == "cpu"  # what is built without --target
    assert all(words[0] in names[:i] or words[0] == "python:${PYTHON}-slim" for i, words in enumerate(stages))
    assert all(re.match(r"--from=([\w-]+) ", line)[1] in names for line in arguments_of("COPY") if line.startswith("--from"))  # type: ignore[index]
    extras = set(re.findall(r"\.\[([\w,]+)\]", " ".join(arguments_of("RUN"))))
    assert extras == {"cuda"} and extras <= set(PROJECT["optional-dependencies"])
    [python] = arguments_of("ARG")
    assert as_version(python.removeprefix("PYTHON=")) >= as_version(PROJECT["requires-python"].removeprefix(">="))
    for target in re.findall(r"--target (\w+)", PAGE):
        assert target in names


def test_the_image_starts_a_server_without_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = variables()
    [entry], [command], [volume], [port], [user] = map(arguments_of, ("ENTRYPOINT", "CMD", "VOLUME", "EXPOSE", "USER"))
    assert json.loads(entry) == [*PROJECT["scripts"]]
    name, options = options_under(monkeypatch, environment, json.loads(command))
    assert name == "serve" and options.host == "0.0.0.0" and options.port == int(port) == 8000
    assert environment["TINYVLLM_CACHE"] == volume and environment["HF_HOME"].startswith(volume + "/")
    assert all(named_in_source(key) for key in environment if key.startswith("TINYVLLM_") and not key.startswith("TINYVLLM_ARG_"))
    uid, gid = user.split(":")
    assert int(uid) > 0 and int(gid) > 0 and f"--uid {uid}" in " ".join(arguments_of("RUN"))


def test_the_health_check_is_a_probe_of_the_server() -> None:
    routes = pytest.importorskip("tinyvllm.server.api.routes")
    [check] = arguments_of("HEALTHCHECK")
    python, flag, script = json.loads(check[check.index("[") :])
    address = re.search(r"http://127\.0\.0\.1:(\d+)(/\w+)", script)
    assert (python, flag) == ("python", "-c") and ast.parse(script) and address
    assert address[1] in arguments_of("EXPOSE") and address[2] in {resource.path for resource in routes.RESOURCES}


def test_the_unit_is_valid_and_hardened(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/tinyvllm/bin/tinyvllm", sys.executable))
    result = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and not [line for line in result.stderr.splitlines() if UNIT.name in line], result.stderr
    security = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(copy)], capture_output=True, timeout=60
    )
    assert security.returncode == 0, security.stdout.decode()[-300:]


def test_the_unit_starts_the_server_and_waits_for_its_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#")]
    settings = dict(line.split("=", 1) for line in lines)
    words = shlex.split(settings["ExecStart"])
    assert words[0] == "/opt/tinyvllm/bin/" + next(iter(PROJECT["scripts"]))
    assert options_under(monkeypatch, {"TINYVLLM_ARG_MODEL": "/srv/models/llama"}, words[1:])[0] == "serve"
    environment = dict(word.split("=", 1) for word in shlex.split(settings["Environment"]))
    assert environment["TINYVLLM_CACHE"] == f"/var/cache/{settings['CacheDirectory']}" and named_in_source("TINYVLLM_CACHE")
    assert int(settings["TimeoutStopSec"]) >= GRACE_SECONDS + 10 and settings["Restart"] == "on-failure"
    config = pytest.importorskip("tinyvllm.server.core.config")
    assert config.ServerConfig().grace_seconds == GRACE_SECONDS  # else docs/install.md, the unit and --stop-timeout change, too
    assert f"--stop-timeout {settings['TimeoutStopSec']}" in PAGE


def test_the_page_names_the_extras_and_the_wheel() -> None:
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert listed | DEVELOPMENT == set(PROJECT["optional-dependencies"])
    for extras in re.findall(r"\[([a-z]+(?:,[a-z]+)*)\]'", PAGE):
        assert set(extras.split(",")) <= listed
    assert set(re.findall(r"tinyvllm-[\d.]+(?=-py3|\.tar)", PAGE)) == {f"tinyvllm-{PROJECT['version']}"}
