"""`tinyvllm pull`, `list` and `remove` against a hub on loopback: the choice by size, broken connections, wrong bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.weights.loopback_hub import COMMIT, REPOS, WEIGHTS, Hub, loopback_hub

ROOT = Path(__file__).parents[2]
SIZE = len(WEIGHTS)
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs a command of tinyvllm against the hub, with a cache of its own."""
    with loopback_hub(tmp_path / "home") as (_, env):

        def command(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, ROOT / "main.py", *arguments], capture_output=True, text=True, env=env, timeout=120, cwd=tmp_path
            )

        yield command


def memory(files: float) -> list[str]:
    """The option with room for this many files of SIZE bytes, and the tenth that stays free."""
    return ["--memory", str(int(SIZE * files / 0.9) + 10)]


def pulled(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.mark.parametrize(
    ("room", "chosen"), [(1, "m-Q2_K.gguf"), (3, "m-Q4_K_M-00001-of-00002.gguf"), (4, "m-Q8_0.gguf"), (1000, "m-Q8_0.gguf")]
)
def test_the_largest_packed_model_that_fits_is_chosen(run: Run, room: int, chosen: str) -> None:
    path = pulled(done := run("pull", "org/sizes", *memory(room)))
    assert path.name == chosen and path.parent.name == COMMIT and path.read_bytes() == REPOS["org/sizes"][chosen]
    assert f"tinyvllm --model org/sizes:{chosen}" in done.stderr
    parts = [name for name in REPOS["org/sizes"] if name.startswith(chosen.removesuffix("-00001-of-00002.gguf"))]
    assert sorted(Hub.fetched) == sorted(parts), "all parts, and nothing else"


def test_no_model_fits(run: Run) -> None:
    done = run("pull", "org/sizes", *memory(0.5))
    assert done.returncode == 1 and "no GGUF model of org/sizes fits: the smallest, m-Q2_K.gguf, has" in done.stderr and not Hub.fetched


def test_a_broken_connection_continues_where_it_ended(run: Run) -> None:
    Hub.broken["m-Q8_0.gguf"] = [SIZE, SIZE // 2]
    path = pulled(run("pull", "org/sizes:Q8_0"))
    assert path.read_bytes() == WEIGHTS * 4 and not Hub.broken["m-Q8_0.gguf"]


def test_wrong_bytes_are_removed_and_pulled_again(run: Run) -> None:
    """huggingface_hub compares sizes alone."""
    Hub.damaged.add("m-Q2_K.gguf")
    done = run("pull", "org/sizes:Q2_K")
    assert done.returncode == 1 and "m-Q2_K.gguf has the SHA-256 " in done.stderr and "was removed; pull it again" in done.stderr
    Hub.damaged.clear()
    assert pulled(run("pull", "org/sizes:Q2_K")).read_bytes() == WEIGHTS


def test_a_folder_is_pulled_listed_and_removed(run: Run) -> None:
    folder = pulled(run("pull", "org/tiny"))
    assert sorted(path.name for path in folder.iterdir()) == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.model"]
    pulled(run("pull", "org/packed:Q8_0", "--quiet"))
    held: list[dict[str, Any]] = json.loads(run("list", "--json").stdout)
    assert {one["repo"]: one["models"] for one in held} == {"org/tiny": ["org/tiny"], "org/packed": ["org/packed:m-q8_0.gguf"]}
    assert "org/packed:m-q8_0.gguf" in run("list").stdout
    done = run("remove", "org/tiny")
    assert done.returncode == 0 and "freed" in done.stderr and not folder.exists()
    assert run("list").stdout.split()[0] == "org/packed:m-q8_0.gguf"
    gone = run("remove", "org/tiny")
    assert gone.returncode == 1 and "'org/tiny' is not in the local cache, which has org/packed" in gone.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./here", "expected the name of a model on a hub, such as org/name or org/name:Q4_K_M, got './here'"),
        ("org/none", "'org/none' is neither a file or folder here nor a public model"),
        ("org/packed:F16", "org/packed:F16 matches several models: a-F16.gguf, b-F16.gguf; org/packed has"),
        ("org/sizes:Q3_K", "matches no GGUF file; org/sizes has m-F16.gguf, m-Q2_K.gguf"),
        ("org/gated", "org/gated is gated: request access"),
    ],
)
def test_one_line_for_what_cannot_be_pulled(run: Run, name: str, expected: str) -> None:
    done = run("pull", name, "--quiet")
    assert done.returncode in (1, 2) and expected in done.stderr and done.stderr.count("\n") == 1
