"""`quality` against llama.cpp on the same GGUF files and the same tokens: the figures of its perplexity tool, from its own logits.

Needs llama-cpp-python (`pip install .[bench]`). The tool itself is not in the wheel; its rule is three lines: windows of n_ctx tokens, the
first token of each replaced by BOS, logits of the rows from n_ctx / 2 to n_ctx - 2 scored with the token after them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is installed by `pip install .[bench]` only")

from tests.tiny.to_gguf import write_gguf  # noqa: E402
from tinyvllm import LLM  # noqa: E402
from tinyvllm.config.engine import DEFAULT_MODEL  # noqa: E402
from tinyvllm.demo.corpus import held_out_text  # noqa: E402
from tinyvllm.engine.tools.quality import ScratchLogits, Windows, model_scores, reference_scores, windows_of  # noqa: E402
from tinyvllm.engine.tools.token_scores import Figures, figures_of  # noqa: E402
from tinyvllm.text.load import load_tokenizer  # noqa: E402

CONTEXT, WINDOWS = 128, 6
KINDS = ("F32", "Q8_0", "Q4_0")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled model as GGUF files. Their vocabulary is not the model's: only token ids are used."""
    folder = tmp_path_factory.mktemp("quality")
    shutil.copytree(DEFAULT_MODEL, folder / "model")
    config = json.loads((DEFAULT_MODEL / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    for kind in KINDS:
        write_gguf(folder / "model", folder / f"{kind}.gguf", "llama", kind)
    return {kind: folder / f"{kind}.gguf" for kind in KINDS}


@pytest.fixture(scope="module")
def windows() -> Windows:
    return windows_of(load_tokenizer(DEFAULT_MODEL), held_out_text(), CONTEXT, WINDOWS)


def theirs(path: Path, windows: Windows) -> np.ndarray:
    """llama.cpp's float64 log-probabilities of the scored rows [N, V]."""
    model = llama_cpp.Llama(str(path), n_ctx=CONTEXT, n_batch=CONTEXT, n_threads=1, logits_all=True, verbose=False)
    parts = []
    for ids in windows.ids:
        model.reset()
        model.eval(ids.tolist())
        parts.append(np.array(model.scores[CONTEXT // 2 : CONTEXT - 1], np.float64))
    logits = np.concatenate(parts)
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


@pytest.fixture(scope="module")
def ours(files: dict[str, Path], windows: Windows) -> dict[str, Figures]:
    figures = {}
    with ScratchLogits(windows, 3072, 1 << 30) as scratch:
        for kind, path in files.items():
            dtype = "float32" if kind == "F32" else "auto"
            with LLM(path, dtype=dtype, device="CPU", max_model_len=CONTEXT, max_num_seqs=1, num_blocks=10) as llm:
                scores = reference_scores if kind == "F32" else model_scores
                figures[kind] = figures_of(scores(llm.engine, windows, scratch, lambda: None))
    return figures


@pytest.fixture(scope="module")
def reference(files: dict[str, Path], windows: Windows) -> np.ndarray:
    return theirs(files["F32"], windows)


def perplexity(log_probabilities: np.ndarray, windows: Windows) -> float:
    tokens = windows.ids[:, CONTEXT // 2 + 1 :].ravel()
    return float(np.exp(-log_probabilities[np.arange(len(tokens)), tokens].mean()))


def test_perplexity_of_float_weights_is_theirs(ours: dict[str, Figures], reference: np.ndarray, windows: Windows) -> None:
    assert ours["F32"].tokens == len(reference) == WINDOWS * (CONTEXT - 1 - CONTEXT // 2)
    assert ours["F32"].perplexity.value == pytest.approx(perplexity(reference, windows), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_figures_of_packed_weights_are_close_to_theirs(
    kind: str, ours: dict[str, Figures], files: dict[str, Path], reference: np.ndarray, windows: Windows
) -> None:
    """Both round activations to int8 in blocks of 32, so most of the divergence is the same."""
    packed = theirs(files[kind], windows)
    kl = float((np.exp(reference) * (reference - packed)).sum(1).mean())
    same_top = float((reference.argmax(1) == packed.argmax(1)).mean())
    assert ours[kind].perplexity.value == pytest.approx(perplexity(packed, windows), rel=3e-3)
    assert ours[kind].kl.value == pytest.approx(kl, rel=0.25), (ours[kind].kl, kl)
    assert ours[kind].same_top.value == pytest.approx(same_top, abs=0.02)
