"""Which of a repository's models is chosen, by plans that are given here; tests/weights/test_hub_files.py has real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tinyvllm.config.engine import resolve
from tinyvllm.engine.tools import hub_choice
from tinyvllm.engine.tools.hub_choice import MAX_PLANNED, Choice, choose_pull
from tinyvllm.errors import ModelError
from tinyvllm.weights.hub_files import HubFile, Pull

ROOM = 1000


def pull(name: str, nbytes: int) -> Pull:
    return Pull("org/m", "c", name, (HubFile(name.partition(":")[2] or "model.safetensors", nbytes, None),))


def chosen(monkeypatch: pytest.MonkeyPatch, pulls: list[Pull], *fitting: str, quantization: str | None = None) -> tuple[Choice, list[str]]:
    """The choice where the plans of `fitting` fit, and that of a folder with a quantization; and the models that were planned."""
    planned: list[str] = []

    def open_sizes(config: Any, available: int, limit: str) -> Any:
        name = str(config.model)
        planned.append(name)
        fits, best = name in fitting, SimpleNamespace(quantization=quantization) if quantization else None
        own = SimpleNamespace(quantization=None, fits=fits, longest=5)
        return SimpleNamespace(refusal=None, candidates=[own], best=best, wanted_context=9)

    class Copies:
        def __init__(self, pull: Pull):
            self.path = pull.name

        def __enter__(self) -> str:
            return self.path

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(hub_choice, "open_sizes", open_sizes)
    monkeypatch.setattr("tinyvllm.weights.hub_headers.header_copies", Copies)
    return choose_pull(pulls, resolve(), ROOM, "test"), planned


def test_the_folder_then_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    pulls = [pull("org/m", 5000), *(pull(f"org/m:{size}.gguf", size) for size in (2000, 900, 800, 700))]
    assert chosen(monkeypatch, pulls, "org/m", "org/m:900.gguf")[0].pull.name == "org/m"
    choice, planned = chosen(monkeypatch, pulls, "org/m:800.gguf", "org/m:700.gguf")
    assert choice.pull.name == "org/m:800.gguf" and [one.name for one in choice.smaller] == ["org/m:700.gguf"]
    assert planned == ["org/m", "org/m:900.gguf", "org/m:800.gguf"], "2000 bytes of weights need no plan"
    assert [one.pull.nbytes for one in choice.rejected] == [5000, 2000, 900] and "5 of 9 tokens" in choice.rejected[2].why


def test_a_folder_that_fits_quantized_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    pulls = [pull("org/m", 5000), pull("org/m:900.gguf", 900)]
    choice, _ = chosen(monkeypatch, pulls, quantization="q4_k_m")
    assert (choice.pull.name, choice.quantization) == ("org/m", "q4_k_m") and [one.pull.nbytes for one in choice.rejected] == [900]
    assert chosen(monkeypatch, pulls, "org/m:900.gguf", quantization="q4_k_m")[0].pull.name == "org/m:900.gguf"
    alone, _ = chosen(monkeypatch, pulls[:1], quantization="q4_k_m")
    assert alone.quantization == "q4_k_m" and alone.warning is None
    misfit, _ = chosen(monkeypatch, pulls[:1])
    assert misfit.quantization is None and misfit.warning is not None and "5 of 9 tokens" in misfit.warning


def test_the_headers_of_few_models_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    pulls = [pull(f"org/m:{size}.gguf", size) for size in range(2020, 0, -10)]
    with pytest.raises(ModelError, match="no model of org/m fits: of 202 the smallest of 16 that were planned, org/m:.*choose one by name"):
        chosen(monkeypatch, pulls)
    assert len([one for one in pulls if one.nbytes * 0.9 <= ROOM]) > MAX_PLANNED
    choice, planned = chosen(monkeypatch, pulls, "org/m:1000.gguf")
    assert choice.pull.nbytes == 1000 and len(planned) <= MAX_PLANNED
