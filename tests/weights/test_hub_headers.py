"""`tinyvllm plan` of a model on a hub: it fetches headers by ranges, says what it says of the local files, and bounds what a hub sends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import quantized, small_floats
from tests.tiny.to_gguf import write_gguf
from tests.weights import loopback_hub
from tests.weights.loopback_hub import REPOS, Hub
from tinyvllm import LLM

ROOT = Path(__file__).parents[2]
# Kinds whose small tensors say how matrices are held, and one that has none.
QUANTIZED: dict[str, tuple[dict[str, Any], quantized.Quantize]] = {
    "gptq": (quantized.gptq_settings(4, 32, desc_act=True), quantized.gptq(4, 32, index=quantized.shuffled)),
    "hqq": (quantized.hqq_settings(), quantized.hqq(4, 64)),
    "ct": (quantized.ct_settings("pack-quantized", 4, "group", 32), quantized.packed_ct(4, 32)),
    "nf4": (small_floats.settings("bitsandbytes", load_in_4bit=True), small_floats.bitsandbytes(nested=True)),
    "nvfp4": (quantized.ct_settings("nvfp4-pack-quantized", 4, "tensor_group", 16, type="float"), small_floats.nvfp4(mlx=False)),
    "mlx": (quantized.mlx_settings(4, 64), quantized.mlx(4, 64)),
}
GOLDEN = ROOT / "tests" / "tiny" / "golden"
PLANS = """
import json, sys
from tinyvllm import LLM
from tinyvllm.weights import hub_headers
hub_headers.FIRST, hub_headers._GAP = 1 << 12, 1 << 8  # less than a header: nothing but what is asked for is there
print(json.dumps([LLM(name, device="cpu", memory=1 << 30, speed=False, plan=True).plan.record() for name in sys.argv[1:]]))
"""
PLAN = ("plan", "--device", "cpu", "--no-speed", "--memory", "1G", "--json")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Repositories of a model in safetensors, quantized ones, and one with GGUF files and numbers of positions."""
    folder = tmp_path_factory.mktemp("files")
    plain = {path.name: path.read_bytes() for path in (GOLDEN / "llama2").iterdir() if path.suffix in (".json", ".safetensors")}
    write_gguf(GOLDEN / "llama3.1", folder / "m-Q8_0.gguf", "llama", "Q8_0")
    packed = {"m-Q8_0.gguf": (folder / "m-Q8_0.gguf").read_bytes()}
    for kind, way in QUANTIZED.items():
        (folder / kind).mkdir()
        quantized.write(folder / kind, *way)
    repos = {f"org/{kind}": {path.name: path.read_bytes() for path in (folder / kind / "quantized").iterdir()} for kind in QUANTIZED}
    return {"org/real": plain, "org/gguf": packed} | repos


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, dict[str, bytes]]) -> Iterator[dict[str, str]]:
    """The environment of processes that use the hub."""
    for repo, held in files.items():
        monkeypatch.setitem(REPOS, repo, held)
    with loopback_hub.loopback_hub(tmp_path / "home") as (_, env):
        yield env


def planned(env: dict[str, str], name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, ROOT / "main.py", *PLAN, name], capture_output=True, text=True, env=env, timeout=120)


def record_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def local(path: Path) -> dict[str, Any]:
    return json.loads(json.dumps(LLM(path, device="cpu", memory=1 << 30, speed=False, plan=True).plan.record()))


def test_a_folder_is_planned_by_its_headers(hub: dict[str, str], tmp_path: Path) -> None:
    found = record_of(planned(hub, "org/real"))
    assert found == local(GOLDEN / "llama2") | {"model": "org/real"}
    assert not [*(tmp_path / "home").rglob("*.safetensors")], "the cache of the hub has no weights"
    assert {name for name, _, _ in Hub.ranges} == {"config.json", "model.safetensors"}


def test_a_gguf_file_is_planned_by_its_header(hub: dict[str, str], tmp_path: Path, files: dict[str, dict[str, bytes]]) -> None:
    """Numbers that belong to the description are fetched, too: rope_freqs."""
    found = record_of(planned(hub, "org/gguf"))
    path = tmp_path / "m-Q8_0.gguf"
    path.write_bytes(files["org/gguf"]["m-Q8_0.gguf"])
    assert found == local(path) | {"model": "org/gguf:m-Q8_0.gguf"}
    assert any(start > 0 and end - start < 1024 for _, start, end in Hub.ranges), "the tensor rope_freqs"


def test_quantized_folders_are_planned_by_headers_and_small_tensors(
    hub: dict[str, str], tmp_path: Path, files: dict[str, dict[str, bytes]]
) -> None:
    """As the folders themselves, whose plans are what is then loaded: tests/runner/test_outlined.py."""
    names = [f"org/{kind}" for kind in QUANTIZED]
    done = subprocess.run([sys.executable, "-c", PLANS, *names], capture_output=True, text=True, env=hub, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for name, found in zip(names, json.loads(done.stdout), strict=True):
        (tmp_path / name).mkdir(parents=True)
        for file, data in files[name].items():
            (tmp_path / name / file).write_bytes(data)
        assert found == local(tmp_path / name) | {"model": name}
    largest = max(end - start for name, start, end in Hub.ranges if name == "model.safetensors")
    assert largest < 1 << 15, "matrices are not fetched"


def test_what_cannot_be_planned_by_headers_is_one_line(hub: dict[str, str]) -> None:
    Hub.without_ranges = True
    done = planned(hub, "org/gguf")
    assert done.returncode == 1 and "it answers without ranges" in done.stderr and "tinyvllm pull org/gguf:m-Q8_0.gguf" in done.stderr


def test_a_connection_that_breaks_in_the_header(hub: dict[str, str]) -> None:
    Hub.broken = {"model.safetensors": [50]}
    done = planned(hub, "org/real")
    assert done.returncode == 1 and "model.safetensors" in done.stderr and "try again" in done.stderr and done.stderr.count("\n") == 1


def test_a_token_stays_at_the_hub() -> None:
    import urllib.request
    from email.message import Message

    from tinyvllm.weights.hub_headers import _Redirects

    request = urllib.request.Request("https://hub.test/a", headers={"Authorization": "Bearer secret", "Range": "bytes=0-7"})
    handler = _Redirects()
    for url, kept in (("https://hub.test/b", True), ("https://store.test/b", False)):
        followed = handler.redirect_request(request, None, 302, "", Message(), url)  # type: ignore[arg-type]
        assert followed is not None and followed.has_header("Authorization") == kept and followed.has_header("Range")
    with pytest.raises(OSError, match="a redirect to 'file:///etc/passwd'"):
        handler.redirect_request(request, None, 302, "", Message(), "file:///etc/passwd")  # type: ignore[arg-type]
