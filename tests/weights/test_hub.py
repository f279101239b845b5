"""Names of models: what is a path, what is a hub's, and the hub's own part against a small HTTP server on loopback that plays it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.weights.loopback_hub import COMMIT, Hub, loopback_hub
from tinyvllm.errors import ArgumentError, ModelError
from tinyvllm.weights.hub import resolve_model

SCRIPT = """
import sys
from tinyvllm.errors import ModelError
from tinyvllm.weights.hub import resolve_model
try:
    print(resolve_model(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
except ModelError as error:
    print("ModelError:", error)
"""


@pytest.fixture
def hub(tmp_path):
    """Starts the server; returns a function that runs resolve_model against it, with a cache of its own."""
    with loopback_hub(tmp_path / "home") as (server, env):

        def resolve(*args, **more):
            done = subprocess.run([sys.executable, "-c", SCRIPT, *args], capture_output=True, text=True, env=env | more, timeout=60)
            assert done.returncode == 0, done.stderr
            assert done.stdout.count("\n") == 1, done.stdout
            return done.stdout.strip()

        resolve.stop = lambda: (server.shutdown(), server.server_close())
        yield resolve


def names(folder):
    return {p for p in os.listdir(folder)}


def test_downloads_what_is_needed_and_then_works_from_the_cache(hub):
    folder = hub("org/tiny")
    assert names(folder) == {"config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja"}
    assert Path(folder, "model.safetensors").read_bytes() == b"S" * 3000
    assert sorted(Hub.fetched) == sorted(names(folder))
    assert hub("org/tiny", COMMIT) == folder and len(Hub.fetched) == 4
    hub.stop()
    assert hub("org/tiny") == folder
    assert hub("org/tiny", HF_HUB_OFFLINE="1") == folder
    assert "org/packed is not completely in the local cache and HF_HUB_OFFLINE is set" in hub("org/packed", HF_HUB_OFFLINE="1")
    assert "cannot be reached; check the network or HF_ENDPOINT" in hub("org/packed")


def test_picks_a_gguf_file(hub):
    assert hub("org/packed:m-Q4_K_S.gguf").endswith(f"snapshots/{COMMIT}/m-Q4_K_S.gguf")
    assert hub("org/packed:Q4_K_M").endswith("/m-Q4_K_M.gguf")
    assert hub("org/packed:Q8_0").endswith("/m-q8_0.gguf")
    assert Hub.fetched == ["m-Q4_K_S.gguf", "m-Q4_K_M.gguf", "m-q8_0.gguf"]
    assert hub("org/packed:BF16").endswith("/BF16/m-BF16-00001-of-00002.gguf")
    assert hub("org/packed:BF16/m-BF16-00002-of-00002.gguf").endswith("/BF16/m-BF16-00001-of-00002.gguf")
    assert sorted(Hub.fetched[3:]) == ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]


def test_one_line_for_what_the_hub_cannot_give(hub):
    assert "'org/none' is neither a file or folder here nor a public model on http://127.0.0.1" in hub("org/none")
    assert "org/tiny on http://127.0.0.1:" in (line := hub("org/tiny", "v9")) and line.endswith("has no revision 'v9'")
    assert "org/gated is gated: request access" in hub("org/gated")
    assert "org/packed has no safetensors; if it has GGUF files, choose one" in hub("org/packed")
    assert "has no GGUF file 'Q2_K'" in hub("org/packed:Q2_K")
    assert "'F16' matches several files of org/packed; name one of them: a-F16.gguf, b-F16.gguf" in hub("org/packed:F16")
    assert "nor a possible name of a model on a hub" in hub("org/a..b")


def test_a_path_is_itself(tmp_path, monkeypatch):
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("org").name == "org" and resolve_model("org/m.gguf").is_file()
    assert resolve_model("~/org") == tmp_path / "org" and resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ArgumentError, match="revision 'v1' needs the name of a model on a hub"):
        resolve_model("org", "v1")


@pytest.mark.parametrize(
    "name",
    ["./x", "../x", "/x", "~/x", "x.gguf", "x/y.gguf", "a/b/c", "x.safetensors", "x/", "", "a b", "x:", "\0", "-x", "n" * 5000 + "/a/b"],
)
def test_what_looks_like_a_path_is_not_looked_up(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["org/name", "org/name:Q4_K_M", "gpt2"])
def test_a_hub_name_without_the_package(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="is no file or folder here, and hub names need the package huggingface_hub"):
        resolve_model(name)
