"""Captured steps of an engine on disk (bridge/kept.py): a second start runs no model, unless something that decides its kernels differs."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.engine.starts import Start, check_second_start, use_own_steps

OPTIONS: dict[str, Any] = dict(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_second_start_runs_no_model(tiny_model, tmp_path, monkeypatch, ahead):
    first = check_second_start(monkeypatch, tmp_path, tiny_model, "CPU", async_scheduling=ahead, **OPTIONS)
    monkeypatch.setenv("TINYVLLM_KEEP_STEPS", "0")
    fresh = Start(monkeypatch, tiny_model, "CPU", async_scheduling=ahead, **OPTIONS)
    assert (fresh.tokens, fresh.captures) == (first.tokens, first.captures + first.loaded), "two draws may have the same advance"


@pytest.fixture
def started(tiny_model, tmp_path, monkeypatch):
    """A first start, whose steps are kept."""
    use_own_steps(monkeypatch, tmp_path)
    return Start(monkeypatch, tiny_model, "CPU", **OPTIONS)


@pytest.mark.parametrize("changed", ["kernels", "package", "option", "variant", "failed kernel", "figures"])
def test_a_start_with_something_changed_captures(started, tiny_model, tmp_path, monkeypatch, changed):
    from tinyvllm.backends import autotune, registry
    from tinyvllm.runner import kept

    options = dict(OPTIONS)
    if changed in ("kernels", "package"):
        monkeypatch.setattr(kept, "sources_digest", lambda: f"another {changed}")
    elif changed == "option":
        options["enable_cascade"] = False
    elif changed == "variant":
        monkeypatch.setenv("TINYVLLM_KERNELS", "all=plain")
    elif changed == "failed kernel":
        monkeypatch.setitem(registry._failures, ("CPU", "plain", "a case"), "it was wrong")
    else:
        monkeypatch.setattr(autotune, "figures_digest", lambda: "another")
    again = Start(monkeypatch, tiny_model, "CPU", **options)
    assert again.tokens[0] == started.tokens[0] or changed == "variant"
    assert again.captures == started.captures and again.loaded == started.loaded and again.model_calls


def test_the_digest_of_sources_changes_with_every_file(tmp_path, monkeypatch):
    from tinyvllm.backends.source import file_digests, kernels_folder
    from tinyvllm.runner import kept

    kernels, package = tmp_path / "kernels", tmp_path / "package"
    shutil.copytree(kernels_folder(), kernels)
    shutil.copytree(kept._PACKAGE / "ops", package)
    monkeypatch.setattr(kept, "kernels_folder", lambda: kernels)
    monkeypatch.setattr(kept, "_PACKAGE", package)

    def digest() -> str:
        file_digests.cache_clear()
        return kept.sources_digest.__wrapped__()

    before = digest()
    assert digest() == before
    for path in (kernels / "cpu" / "matmul.c", kernels / "cuda" / "include", package / "linear.py"):
        path = next(path.iterdir()) if path.is_dir() else path
        path.write_text(path.read_text() + "\n")
        assert digest() != before
        before = digest()


def test_other_weights_of_the_same_model_share_its_steps(started, tiny_model, tmp_path, monkeypatch):
    """Launches depend on shapes, not on contents; tokens depend on the weights."""
    from tests.conftest import write_weights

    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    write_weights(other, seed=1)
    monkeypatch.setenv("TINYVLLM_KEEP_STEPS", "0")
    expected = Start(monkeypatch, other, "CPU", **OPTIONS)
    monkeypatch.setenv("TINYVLLM_KEEP_STEPS", "1")
    start = Start(monkeypatch, other, "CPU", **OPTIONS)
    assert start.captures == 0 and start.tokens == expected.tokens != started.tokens


def test_damaged_needs_are_collected_again(started, tiny_model, tmp_path, monkeypatch, caplog):
    from tinyvllm.storage.cache import open_cache

    cache = open_cache()
    places = [f"steps/{path.name}" for path in (tmp_path / "steps").iterdir() if path.suffix != ".code"]
    needs = [place for place in places if cache.read(place) == b"[]"]  # on the CPU nothing is tested from this list
    assert len(needs) == 1
    for content in (b'[["matmul", {"inputs": "64"}]]', b'[["system", {}]]', b"{", b"[" * 100_000):
        cache.write(needs[0], content)
        again = Start(monkeypatch, tiny_model, "CPU", **OPTIONS)
        assert again.tokens == started.tokens and again.model_calls and not again.captures
    assert "it is built again" in caplog.text
