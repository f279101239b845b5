"""The whole draw as one kernel, against the operations that it replaces and against itself.

The tokens are those of the reference (tinyvllm/ops/sample.py) in every draw, not in most: kernel and reference round in the same places
where the processor has fused multiply-add. Rows without it may differ from the reference where two scores are a last bit apart.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tinygrad import Tensor

from tests.kernels.calling import aligned, call
from tinyvllm.backends.cpu.toolchain import cpu_features
from tinyvllm.backends.kernel import Kernel
from tinyvllm.bridge import download
from tinyvllm.config.switches import cache_folder
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.runner.device import start_device
from tinyvllm.sampling.sampler import Column, Sampler, SamplingFlags

FEATURES = ("SAMPLED", "TOP_K", "TOP_P", "MIN_P", "PENALIZED", "BIASED")
ALL = SamplingFlags(*[True] * 6)
TARGETS = ("plain", *(["avx2"] if {"avx2", "fma", "f16c"} <= cpu_features() else []), *(["avx512"] if "avx512f" in cpu_features() else []))
EOS, NEUTRAL, WIDTH = 2, 16, 1000  # no multiple of 16, and a last chunk of 104 tokens
INF, NAN = np.inf, np.nan


@pytest.fixture(scope="module", autouse=True)
def device() -> str:
    return start_device("CPU", cache_folder())


def params(random: np.random.Generator, V: int) -> SamplingParams:
    """Anything that a request may ask for, every feature in about every second row."""
    wants = dict(zip(("greedy", *FEATURES[1:], "min_tokens"), random.random(7) < (0.12, 0.5, 0.5, 0.4, 0.4, 0.4, 0.1), strict=True))
    asks: dict[str, object] = {"seed": int(random.integers(-(2**63), 2**63)), "temperature": float(random.choice([0.3, 1.0, 1.7]))}
    if wants["greedy"]:
        asks["temperature"] = 0.0
    if wants["TOP_K"]:
        asks["top_k"] = int(random.choice([1, 2, 5, 50, V // 20 + 1, V // 2, V]))
    if wants["TOP_P"]:
        asks["top_p"] = float(random.choice([0.05, 0.5, 0.9, 0.999, random.uniform(0.05, 1)]))
    if wants["MIN_P"]:
        asks["min_p"] = float(random.choice([0.001, 0.02, 0.3, 1.0]))
    if wants["PENALIZED"]:
        asks |= {"repetition_penalty": float(random.choice([1.0, 1.3, 0.8])), "presence_penalty": 0.4}
        asks["frequency_penalty"] = float(random.choice([0.2, -0.1]))
    if wants["BIASED"]:
        asks["logit_bias"] = {int(token): float(random.normal(0, 3)) for token in random.integers(0, V, 5)}
    if wants["min_tokens"]:
        asks |= {"min_tokens": 3, "stop_token_ids": (7,)}
    return SamplingParams(**asks)  # type: ignore[arg-type]


def logits_of(random: np.random.Generator, V: int) -> np.ndarray:
    """A row: mostly of a normal distribution, sometimes one that makes searches hard or draws impossible."""
    row = random.standard_normal(V) * random.choice([0.5, 2.0, 6.0])
    kind = random.integers(0, 20)
    if kind == 0:
        row = np.round(row)
    elif kind == 1:
        row[:] = 1.5
    elif kind == 2:
        row[random.random(V) < 0.7] = -INF
    elif kind == 3:
        row = random.choice([-1.0, 1.0], V) * 10.0 ** random.uniform(-37, 37, V)
    elif kind == 4:
        row[random.integers(V)] = NAN
    elif kind == 5:
        row[:] = -INF
    return row.astype(np.float32)


def draws(sampler: Sampler, sequences: list[Sequence], logits: np.ndarray) -> list[int]:
    sampler.prepare(sequences, len(logits))
    return download(sampler.draw(Tensor(logits).realize(), ALL)).tolist()


@pytest.mark.skipif(TARGETS[-1] == "plain", reason="the reference is compiled for this machine, and may fuse what `plain` does not")
@pytest.mark.parametrize(("V", "B", "batches"), [(64, 8, 20), (1000, 1, 20), (1000, 8, 20), (32000, 8, 4), (128256, 3, 2)])
def test_tokens_counts_and_positions_are_the_references(V, B, batches, monkeypatch):
    """Batches of random requests, five steps each."""
    random = np.random.default_rng(V + B)
    samplers = {"ref": Sampler(V, NEUTRAL, "CPU"), TARGETS[-1]: Sampler(V, NEUTRAL, "CPU")}
    everything = SamplingParams(seed=1, temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, presence_penalty=0.1, logit_bias={1: 1.0})
    for sampler in samplers.values():  # its tables are made on demand
        sampler.add(Sequence(0, "0", [1], everything, row=0), (EOS,))
    for _ in range(batches):
        requested, prompt = [params(random, V) for _ in range(B)], random.integers(0, V, 30).tolist()
        sequences = [Sequence(b, str(b), prompt, p, row=int(row)) for b, (p, row) in enumerate(zip(requested, random.permutation(NEUTRAL)))]
        for sampler in samplers.values():
            for sequence in sequences:
                sampler.add(sequence, (EOS,))
        for _ in range(5):
            logits, tokens = np.stack([logits_of(random, V) for _ in range(B)]), {}
            for variant, sampler in samplers.items():
                monkeypatch.setenv("TINYVLLM_KERNELS", f"sample={variant}")
                tokens[variant] = draws(sampler, sequences, logits)
            assert tokens[TARGETS[-1]] == tokens["ref"], requested
            for b, sequence in enumerate(sequences):
                sequence.output_token_ids.append(max(tokens["ref"][b], 0))
        ours, theirs = samplers[TARGETS[-1]], samplers["ref"]
        np.testing.assert_array_equal(download(ours._counts.counts)[:NEUTRAL], download(theirs._counts.counts)[:NEUTRAL])
        np.testing.assert_array_equal(download(ours._inputs[B][1]), download(theirs._inputs[B][1]))
        for sampler in samplers.values():
            for sequence in sequences:
                sampler.remove(sequence.row)


class Rows:
    """Requests as the kernel sees them: a line and a row of each table, which is the neutral one where it asks for nothing there."""

    def __init__(self, count: int, seed: int, needs: tuple[str, ...] = FEATURES):
        random = np.random.default_rng(seed)
        self.logits = (random.standard_normal((count, WIDTH)) * 2).astype(np.float32)
        self.seen = random.integers(0, 3, (NEUTRAL + 1, WIDTH)).astype(np.int32)
        self.prompted = random.integers(0, 2, (NEUTRAL + 1, WIDTH)).astype(np.uint8)
        self.bias = random.standard_normal((NEUTRAL + 1, WIDTH)).astype(np.float32)
        self.lines = np.zeros((count, len(Column)), np.int32)
        has = {name: (random.random(count) < 0.6) & (name in needs) for name in FEATURES}
        floats = self.lines.view(np.float32)
        self.lines[:, Column.SEEN_ROW] = np.where(has["PENALIZED"], np.arange(count), NEUTRAL)
        self.lines[:, Column.BIAS_ROW] = np.where(has["BIASED"], np.arange(count), NEUTRAL)
        self.lines[:, Column.SEED_LOW : Column.POSITION + 1] = random.integers(0, 2**31, (count, 3))
        floats[:, Column.INVERSE_TEMPERATURE] = np.where(has["SAMPLED"], 1.25, 0)
        self.lines[:, Column.TOP_K] = np.where(has["TOP_K"], random.choice([1, 4, 6, 40, 900], count), WIDTH)
        self.lines[:, Column.TOP_P] = np.where(has["TOP_P"], random.integers(2**28, 2**30, count), 2**30)
        floats[:, Column.MIN_P] = np.where(has["MIN_P"], -2.5, -INF)
        floats[:, Column.REPETITION :] = np.where(has["PENALIZED"][:, None], (1.2, 0.5, 0.25), (1, 0, 0))

    def draw(self, which: list[int], features: tuple[str, ...] = FEATURES, target: str = TARGETS[-1], threads: int = 2) -> list[int]:
        """The tokens of these rows as one batch, in a kernel with these features. Nothing of `self` changes."""
        B, on = len(which), {name: int(name in features) for name in FEATURES}
        tables, filtered = on["PENALIZED"] | on["BIASED"], on["TOP_K"] | on["TOP_P"] | on["MIN_P"]
        scratch = aligned((2 * 64 * 192 + 4 * B * (tables * WIDTH + filtered * (WIDTH + -(-WIDTH // 128))),), np.uint8)
        outs = [aligned((B,), np.int32), self.lines[which].copy(), scratch, *([self.seen.copy()] if on["PENALIZED"] else [])]
        ins = [self.logits[which], *([self.prompted] if on["PENALIZED"] else []), *([self.bias] if on["BIASED"] else [])]
        ins.append(np.array([B], np.int32))
        defines = (("V", WIDTH), ("NEUTRAL_ROW", NEUTRAL), *on.items())
        call(Kernel("sample", "cpu", target, defines, len(outs), len(ins)), *outs, *ins, threads=threads)
        return outs[0].tolist()


@pytest.mark.parametrize("target", TARGETS)
def test_a_row_depends_on_nothing_around_it(target):
    """Alone on one thread, in parts on several, more of them than there are parts, and in a batch in another order: the same token."""
    rows, indices = Rows(NEUTRAL, 5), list(range(NEUTRAL))
    alone = [rows.draw([b], target=target, threads=1)[0] for b in indices]
    assert len(set(alone)) > 10 and min(alone) >= 0
    for threads in (2, 3, 11):
        assert [rows.draw([b], target=target, threads=threads)[0] for b in indices[:6]] == alone[:6]
    order = np.random.default_rng(1).permutation(NEUTRAL).tolist()
    for threads in (1, 2, 3):
        for B in (3, 8, NEUTRAL):
            assert rows.draw(order[:B], target=target, threads=threads) == [alone[b] for b in order[:B]]
    assert alone == [rows.draw([b])[0] for b in indices]  # nor, for these seeds, on the processor


COMBINATIONS = [features for n in (0, 1, 2) for features in itertools.combinations(("TOP_K", "TOP_P", "MIN_P", "PENALIZED", "BIASED"), n)]


@pytest.mark.parametrize("features", [(), *(("SAMPLED", *features) for features in COMBINATIONS)], ids="+".join)
def test_what_others_make_the_step_compute_changes_no_token(features):
    """Rows that ask for these features: in a kernel made for them, and in the one with everything."""
    rows = Rows(NEUTRAL, 6, features)
    assert rows.draw(list(range(NEUTRAL)), features) == rows.draw(list(range(NEUTRAL)))


def test_rows_without_a_token_and_ties():
    """Greedy and sampled, filtered and not. A NaN of either sign spoils its row and no other; infinity wins; of equals the first."""
    negative_nan = np.array([0xFFC00000], np.uint32).view(np.float32)[0]
    for needs in ((), ("SAMPLED",), ("SAMPLED", "TOP_K", "TOP_P", "MIN_P")):
        rows = Rows(8, 7, needs)
        good = rows.draw(list(range(8)))
        rows.logits[0, 999] = NAN
        rows.logits[1, 3] = negative_nan
        rows.logits[2] = NAN
        rows.logits[3] = -INF
        rows.logits[4] = -INF
        rows.logits[4, 130] = -5
        rows.logits[5, [200, 400]] = INF
        assert rows.draw(list(range(8))) == [-1, -1, -1, -1, 130, 200, *good[6:]]
    rows = Rows(2, 8, ())
    rows.logits[:, [77, 500, 999]] = 50
    rows.logits[1] = np.where(np.arange(WIDTH) % 2, 0.0, -0.0)
    for threads in (1, 2, 3, 4):
        assert rows.draw([0, 1], threads=threads) == [77, 0]
