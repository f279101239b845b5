"""The figures of `quality` against plain float64 sums, the windows against llama.cpp's rule, and logits that wait in a file unrounded."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tinyvllm import LLM
from tinyvllm.config.engine import KV_CACHE_DTYPES
from tinyvllm.engine.tools import quality
from tinyvllm.engine.tools.one_off import prompt_logits_by_chunk
from tinyvllm.engine.tools.quality import ScratchLogits, Vocabulary, Windows, model_scores, reference_scores, windows_of
from tinyvllm.engine.tools.token_scores import MAX_ELEMENTS, figures_of, score
from tinyvllm.errors import ArgumentError, ModelError, OutputError

GOLDEN = Path(__file__).parents[2] / "tiny" / "golden" / "llama2"
TEXT = "Once upon a time there was a little fox that lived at the edge of a forest. " * 4


def probabilities(logits: np.ndarray) -> list[float]:
    """softmax of one row, term by term."""
    exponentials = [math.exp(float(x) - float(max(logits))) for x in logits]
    return [e / math.fsum(exponentials) for e in exponentials]


def one_window(ids: list[int]) -> Windows:
    return Windows(np.array([ids], np.int64), 1)


def standard_error(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))


def test_figures_are_the_plain_sums() -> None:
    rng = np.random.default_rng(5)
    reference = (3 * rng.standard_normal((41, 50))).astype(np.float32)
    logits = reference + (0.3 * rng.standard_normal(reference.shape)).astype(np.float32)
    tokens = rng.integers(0, 50, 41)
    p, q = [probabilities(row) for row in reference], [probabilities(row) for row in logits]
    nll = [-math.log(q[i][t]) for i, t in enumerate(tokens)]
    base = [-math.log(p[i][t]) for i, t in enumerate(tokens)]
    kl = [math.fsum(a * math.log(a / b) for a, b in zip(p[i], q[i], strict=True)) for i in range(41)]
    dp = [q[i][t] - p[i][t] for i, t in enumerate(tokens)]
    same = [float(p[i].index(max(p[i])) == q[i].index(max(q[i]))) for i in range(41)]
    figures = figures_of(score(reference, logits, tokens))

    perplexity, ratio = math.exp(math.fsum(nll) / 41), math.exp(math.fsum(a - b for a, b in zip(nll, base, strict=True)) / 41)
    rms = math.sqrt(math.fsum(x * x for x in dp) / 41)
    expected = {
        "perplexity": (perplexity, perplexity * standard_error(nll)),
        "perplexity_ratio": (ratio, ratio * standard_error([a - b for a, b in zip(nll, base, strict=True)])),
        "kl": (math.fsum(kl) / 41, standard_error(kl)),
        "same_top": (math.fsum(same) / 41, standard_error(same)),
        "mean_dp": (math.fsum(dp) / 41, standard_error(dp)),
        "rms_dp": (rms, standard_error([x * x for x in dp]) / (2 * rms)),
    }
    assert 0 < figures.same_top.value < 1 and figures.tokens == 41
    for name, pair in expected.items():
        estimate = getattr(figures, name)
        assert (estimate.value, estimate.error) == pytest.approx(pair, rel=1e-10), name
    ordered = sorted(kl)
    tenth = ordered[36]  # 41 numbers: percentile 90 is number 0.9 * 40 exactly
    assert figures.kl_percentiles[50] == pytest.approx(ordered[20]) and figures.kl_percentiles[90] == pytest.approx(tenth)
    assert figures.kl_percentiles[99] == pytest.approx(0.4 * ordered[39] + 0.6 * ordered[40])
    assert figures.kl_max == pytest.approx(ordered[40])


def test_a_large_vocabulary_is_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(6)
    reference, logits = rng.standard_normal((2, 9, 32)).astype(np.float32)
    tokens = rng.integers(0, 32, 9)
    whole = score(reference, logits, tokens)
    monkeypatch.setattr("tinyvllm.engine.tools.token_scores.MAX_ELEMENTS", 64)
    parts = score(reference, logits, tokens)
    assert MAX_ELEMENTS >= 9 * 32 and all(np.array_equal(getattr(whole, name), getattr(parts, name)) for name in vars(whole))


def test_perplexity_is_that_of_transformers(tmp_path: Path) -> None:
    """The golden logits are transformers' own, at positions 12 to 20 of this prompt."""
    with np.load(GOLDEN / "golden.npz") as data:
        ids, golden = data["prompt_0"].tolist(), dict(zip(data["positions_0"].tolist(), data["logits_0"], strict=True))
    windows = one_window(ids)
    rows = [row for row in range(windows.first, len(ids) - 1) if row in golden]
    with (
        LLM(GOLDEN, dtype="float32", device="CPU", max_model_len=32, max_num_seqs=1, num_blocks=4, skip_tokenizer_init=True) as llm,
        ScratchLogits(windows, 256, 1 << 20) as scratch,
    ):
        scores = reference_scores(llm.engine, windows, scratch, lambda: None)
    assert len(scores.nll) == windows.num_scored == 10 and len(rows) == 8
    expected = [-math.log(probabilities(golden[row])[ids[row + 1]]) for row in rows]
    assert [scores.nll[row - windows.first] for row in rows] == pytest.approx(expected, abs=1e-4)


def test_a_quantized_model_is_compared_with_unrounded_logits(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of several chunks, whose borders are inside of the context and of the scored half."""
    monkeypatch.setattr(quality, "CHUNK", 7)
    options = {"device": "CPU", "max_model_len": 48, "max_num_seqs": 1, "num_blocks": 6}
    with LLM(tiny_model, **options) as llm:
        assert llm.engine.tokenizer is not None
        windows = windows_of(llm.engine.tokenizer, TEXT, 40, 3)
        with ScratchLogits(windows, 264, 1 << 20) as scratch:
            seen: list[int] = []
            own = reference_scores(llm.engine, windows, scratch, lambda: seen.append(1))
            again = model_scores(llm.engine, windows, scratch, lambda: None)
            reference = [llm.prompt_logits(ids.tolist()) for ids in windows.ids]
            with LLM(tiny_model, quantization="q4_0", **options) as packed:
                scores = model_scores(packed.engine, windows, scratch, lambda: None)
                logits = [packed.prompt_logits(ids.tolist()) for ids in windows.ids]
    assert len(seen) == 3 and len(scores.kl) == windows.num_scored == 3 * 19
    assert not again.kl.any() and again.same_top.all() and np.array_equal(again.nll, own.nll) and np.array_equal(own.nll, own.reference_nll)
    expected_kl, expected_nll = [], []
    for window, ids in enumerate(windows.ids):
        for row in range(20, 39):
            p, q = probabilities(reference[window][row]), probabilities(logits[window][row])
            expected_kl.append(math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
            expected_nll.append(-math.log(q[ids[row + 1]]))
    assert scores.kl.tolist() == pytest.approx(expected_kl, rel=1e-6, abs=1e-12)
    assert scores.nll.tolist() == pytest.approx(expected_nll, rel=1e-9) and min(expected_kl) > 0


@pytest.mark.parametrize(("quantization", "kv_cache"), [("q4_0", "auto"), *((None, kv_cache) for kv_cache in KV_CACHE_DTYPES)])
def test_logits_of_decode_steps_have_the_same_bits(tiny_model: Path, quantization: str | None, kv_cache: str) -> None:
    """A chunk of one token runs as a decode does. What is measured of prefill is therefore true of decoding."""
    ids, options = list(range(40, 73)), {"quantization": quantization, "kv_cache_dtype": kv_cache}
    with LLM(tiny_model, device="CPU", max_model_len=48, max_num_seqs=1, num_blocks=6, **options) as llm:
        chunks, steps = (np.concatenate([*prompt_logits_by_chunk(llm.engine, ids, size)]) for size in (16, 1))
    assert chunks.tobytes() == steps.tobytes()


def test_windows_are_those_of_llama_cpp(tiny_model: Path) -> None:
    """BOS and the text, cut into windows; BOS replaces the first token of each. The first half is context."""
    with LLM(tiny_model, device="CPU", max_model_len=32, max_num_seqs=1, num_blocks=4) as llm:
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode(TEXT)
        windows = windows_of(tokenizer, TEXT, 10, 4)
        assert windows.available == len(ids) // 10 and windows.ids.shape == (4, 10) and windows.first == 5
        assert windows.ids.tolist() == [[256, *ids[start + 1 : start + 10]] for start in range(0, 40, 10)]
        assert windows.num_scored == 4 * 4
        assert len(windows_of(tokenizer, TEXT, 10, 10**9).ids) == windows.available
        with pytest.raises(ArgumentError, match="the text has 3 tokens; expected at least 10, one window"):
            windows_of(tokenizer, "ab", 10, 4)


def test_vocabularies_must_agree() -> None:
    mine = Vocabulary(4, [b"a", b"b", b""])
    mine.check(Vocabulary(4, [b"a", b"b", b"[PAD]", b"more"]))  # a name for an id that has no token
    with pytest.raises(ArgumentError, match="it has logits for 5 tokens, the reference for 4"):
        mine.check(Vocabulary(5, [b"a", b"b", b""]))
    with pytest.raises(ArgumentError, match="token 1 is b'c', and the reference's is b'b'"):
        mine.check(Vocabulary(4, [b"a", b"c", b""]))


def test_the_file_of_logits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows(np.zeros((10, 8), np.int64), 10)  # 30 rows
    with pytest.raises(ArgumentError, match=r"take 0.1 MB, --scratch is 0.1 MB: --windows 6 fits"):
        ScratchLogits(windows, 1000, 6 * 3 * 4000 + 1)
    with pytest.raises(ArgumentError, match="raise --scratch"):
        ScratchLogits(windows, 1000, 100)
    monkeypatch.setattr(quality.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 119_999}))
    with pytest.raises(OutputError, match="temporary file: they take 0.1 MB, 0.1 MB are free; set TMPDIR"):
        ScratchLogits(windows, 1000, 1 << 30)


def test_logits_that_are_not_finite_are_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = one_window(list(range(40, 60)))
    with (
        LLM(tiny_model, device="CPU", max_model_len=32, max_num_seqs=1, num_blocks=4) as llm,
        ScratchLogits(windows, 264, 1 << 20) as scratch,
    ):
        monkeypatch.setattr(llm.engine.runner, "prompt_logits", lambda entry: np.full((entry.num_tokens, 264), np.nan, np.float32))
        with pytest.raises(ModelError, match="its logits of window 1 are not finite"):
            model_scores(llm.engine, windows, scratch, lambda: None)
        assert llm.engine.scheduler.pool.num_free == 4  # the blocks came back
