"""`tinyvllm pull`, `list` and `remove` against a hub on loopback: the choice by plan, broken connections, wrong bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny.to_gguf import write_gguf
from tests.weights.loopback_hub import COMMIT, REPOS, WEIGHTS, Hub, loopback_hub
from tinyvllm import LLM

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "tiny" / "golden" / "llama2"
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


def pulled(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Repositories of one model: GGUF files in four formats; and its safetensors, with one of them."""
    folder = tmp_path_factory.mktemp("models")
    files = {}
    for kind in ("Q4_0", "Q5_0", "Q8_0", "F16"):
        write_gguf(GOLDEN, folder / f"m-{kind}.gguf", "llama", kind)
        files[f"m-{kind}.gguf"] = (folder / f"m-{kind}.gguf").read_bytes()
    plain = {path.name: path.read_bytes() for path in GOLDEN.iterdir() if path.suffix in (".json", ".safetensors")}
    return {"org/fits": files, "org/both": plain | {"m-Q4_0.gguf": files["m-Q4_0.gguf"]}, "org/alone": plain}


@pytest.fixture
def fits(run: Run, models: dict[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch) -> Run:
    for repo, files in models.items():
        monkeypatch.setitem(REPOS, repo, files)
    return run


def needed(path: Path) -> int:
    """Bytes that one sequence of the whole context takes of a machine, by a plan of the local files."""
    memory = LLM(path, device="cpu", memory="1G", speed=False, plan=True).plan.sizes.memory
    return memory.fixed + (256 + 16) * memory.kv_token  # a context of 256 tokens, and the block that padded rows use


def test_the_largest_model_that_fits_by_its_plan_is_chosen(fits: Run, models: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    """To the byte, with the KV cache of the context; only that model is downloaded, and of it and of larger ones the headers are read."""
    (tmp_path / "m-Q8_0.gguf").write_bytes(models["org/fits"]["m-Q8_0.gguf"])
    eight = needed(tmp_path / "m-Q8_0.gguf")
    pull = ("pull", "org/fits", "--device", "cpu", "--memory")
    for memory, chosen in ((eight - 1, "m-Q5_0.gguf"), (eight, "m-Q8_0.gguf")):
        Hub.fetched.clear()
        Hub.ranges.clear()
        path = pulled(done := fits(*pull, str(memory)))
        assert path.name == chosen and path.read_bytes() == models["org/fits"][chosen]
        assert "what fits with the most bytes; plan: weights" in done.stderr and f"tinyvllm --model org/fits:{chosen}" in done.stderr
        assert ("not org/fits:m-Q8_0.gguf" in done.stderr) == (chosen != "m-Q8_0.gguf"), done.stderr
        assert "smaller ones fit, too: " in done.stderr and "m-Q4_0.gguf (" in done.stderr and "F16" not in done.stderr
        assert {name for name, _, _ in Hub.ranges} == {"m-Q8_0.gguf", chosen}


@pytest.mark.long
def test_a_shorter_context_needs_less(fits: Run, models: dict[str, dict[str, bytes]], tmp_path: Path) -> None:
    (tmp_path / "m-Q8_0.gguf").write_bytes(models["org/fits"]["m-Q8_0.gguf"])
    room = needed(tmp_path / "m-Q8_0.gguf") - 100 * 256
    done = fits("pull", "org/fits", "--device", "cpu", "--max-model-len", "128", "--memory", str(room))
    assert pulled(done).name == "m-Q8_0.gguf"


def test_no_model_fits(fits: Run) -> None:
    done = fits("pull", "org/fits", "--device", "cpu", "--memory", "60M")
    assert done.returncode == 1 and len(Hub.fetched) == len(Hub.ranges), "headers alone"
    text = "no model of org/fits fits: of 3 the smallest, org/fits:m-Q4_0.gguf, would not start: memory: the weights need"
    assert text in done.stderr


def test_a_folder_is_preferred_where_it_fits(fits: Run, tmp_path: Path) -> None:
    need = needed(GOLDEN)
    pull = ("pull", "org/both", "--device", "cpu", "--memory")
    assert (pulled(fits(*pull, str(need))) / "model.safetensors").is_file()
    path = pulled(done := fits(*pull, str(need - 1)))
    assert path.name == "m-Q4_0.gguf" and "not org/both (" in done.stderr and f"of {256} tokens" in done.stderr


def test_a_folder_alone_says_how_it_fits(fits: Run) -> None:
    """It is pulled in any case: there is nothing to choose but a quantization while loading."""
    pull = ("pull", "org/alone", "--device", "cpu", "--memory", str(needed(GOLDEN) - 1))
    done = fits(*pull)
    assert pulled(done).is_dir() and "it fits with --quantization " in done.stderr
    assert "tinyvllm --model org/alone --quantization " in done.stderr


def test_a_split_model_is_all_its_parts(run: Run) -> None:
    path = pulled(run("pull", "org/sizes:Q4_K_M"))
    assert path.name == "m-Q4_K_M-00001-of-00002.gguf" and path.parent.name == COMMIT
    assert sorted(Hub.fetched) == [name for name in sorted(REPOS["org/sizes"]) if "Q4_K_M" in name]


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
    assert (empty := run("list")).stdout == "" and "has no models; tinyvllm pull ORG/NAME" in empty.stderr
    folder = pulled(done := run("pull", "org/tiny"))
    assert "warning: it may not run here: it cannot be planned: " in done.stderr
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
