"""The sampler through its public methods: sequences with parameters in, tokens out. V is 67, which nothing divides."""

from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Device, Tensor

from tinyvllm.bridge import download
from tinyvllm.errors import ArgumentError
from tinyvllm.ops import sample as ops
from tinyvllm.request import SamplingParams, Sequence, StructuredOutputsParams
from tinyvllm.sampling.sampler import Sampler, SamplingFlags

V, EOS = 67, 2
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def shared() -> Sampler:
    """One sampler for all tests: its captured steps are the slow part, and rows must not remember earlier sequences."""
    return Sampler(V, 16, Device.DEFAULT)


class Batch:
    """Sequences that have joined the first rows of a sampler; they leave at the end."""

    def __init__(self, sampler: Sampler, *params: SamplingParams, prompt: tuple[int, ...] = (1, 5), rows: list[int] | None = None):
        rows = rows or list(range(len(params)))
        self.sampler = sampler
        self.sequences = [Sequence(i, str(i), list(prompt), p, row=row) for i, (p, row) in enumerate(zip(params, rows))]

    def __enter__(self) -> Batch:
        for sequence in self.sequences:
            self.sampler.add(sequence, (EOS,))
        return self

    def __exit__(self, *_: object) -> None:
        for sequence in self.sequences:
            self.sampler.remove(sequence.row)

    def draw(self, logits: np.ndarray, padding: int = 0) -> list[int]:
        """One step: logits [B, V]; every sequence gets its token."""
        rows = np.concatenate([logits, np.zeros((padding, V))]).astype(np.float32)
        flags = self.sampler.prepare(self.sequences, len(rows))
        tokens = download(self.sampler.draw(Tensor(rows).realize(), flags))[: len(self.sequences)].tolist()
        for sequence, token in zip(self.sequences, tokens):
            sequence.output_token_ids.append(token)
        return tokens


def logits_of(seed: int, rows: int = 1, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, V)) * scale).astype(np.float32)


def noise(seeds: list[int], positions: range) -> np.ndarray:
    """[seeds, positions, V], in one evaluation."""
    pairs = [(seed, position) for seed in seeds for position in positions]
    words = [(seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, position) for seed, position in pairs]
    columns = [Tensor(np.array(c, np.uint32).reshape(-1, 1)) for c in zip(*words)]
    return ops.gumbel(*columns, V).numpy().reshape(len(seeds), len(positions), V)


MIXED = (
    GREEDY,
    SamplingParams(seed=11),
    SamplingParams(seed=11, temperature=0.7, top_k=5),
    SamplingParams(seed=12, top_p=0.8, logit_bias={3: 2.0, 9: -100.0}),
    SamplingParams(seed=2**63 + 5, min_p=0.2, temperature=1.5),
    SamplingParams(seed=-3, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    SamplingParams(temperature=0.0, frequency_penalty=1.5),
    SamplingParams(seed=13, min_tokens=4, stop_token_ids=(7,)),
)


def test_a_row_depends_on_nothing_in_its_batch(shared):
    """Each of eight mixed sequences alone, then all together in another order, on other rows, padded: the same tokens, step by step."""
    STEPS = 6
    logits = [logits_of(i, STEPS) for i in range(len(MIXED))]
    alone = []
    for params, own in zip(MIXED, logits):
        with Batch(shared, params) as batch:
            alone.append([batch.draw(own[s : s + 1])[0] for s in range(STEPS)])
    order = [5, 0, 7, 2, 1, 6, 3, 4]
    with Batch(shared, *(MIXED[i] for i in order), rows=[3, 15, 9, 0, 4, 8, 1, 7]) as batch:
        together = [batch.draw(np.stack([logits[i][s] for i in order]), padding=1) for s in range(STEPS)]
    assert [[step[order.index(i)] for step in together] for i in range(len(MIXED))] == alone
    assert alone[0] == logits[0].argmax(1).tolist()


def test_a_seed_fixes_the_tokens_and_another_changes_them(shared):
    logits = logits_of(0, 1, 1.0)

    def tokens(seed: int) -> list[int]:
        with Batch(shared, SamplingParams(seed=seed)) as batch:
            return [batch.draw(logits)[0] for _ in range(20)]

    once = tokens(1)
    assert tokens(1) == once
    assert len(set(once)) > 5  # the position counts
    for other in (2, 1 + 2**32, -1):
        assert tokens(other) != once


def test_the_token_depends_on_seed_position_and_logits_alone(shared):
    """Two sequences of one seed with different pasts of one length draw the same; and the draw is the argmax of logits plus noise."""
    logits = logits_of(1)
    with Batch(shared, SamplingParams(seed=77, temperature=0.8)) as batch:
        fresh = [batch.draw(logits)[0] for _ in range(4)]
    assert fresh == (logits[0] * np.float32(1 / 0.8) + noise([77], range(4))[0]).argmax(1).tolist()
    resumed = Batch(shared, SamplingParams(seed=77, temperature=0.8), prompt=(9, 9, 9))
    resumed.sequences[0].output_token_ids = [0, 0, 0]
    with resumed:
        assert resumed.draw(logits) == fresh[3:]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(shared, temperature):
    """Chi-square over 1600 draws; the seed is fixed, so this cannot fail by chance."""
    logits = logits_of(2, 1, 1.0)
    p = np.exp(logits[0].astype(np.float64) / temperature)
    p /= p.sum()
    counts = np.zeros(V)
    with Batch(shared, *(SamplingParams(seed=1000 + i, temperature=temperature) for i in range(16))) as batch:
        for _ in range(100):
            np.add.at(counts, batch.draw(np.repeat(logits, 16, 0)), 1)
    expected = p * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    chi_square = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    freedom = len(observed) - 1
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


def allowed_tokens(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """By sorting, in the documented order: temperature, min_p, top_k, then top_p over what is left."""
    p = np.exp(logits.astype(np.float64) / params.temperature)
    alive = p >= params.min_p * p.max()
    if params.top_k > 0:
        alive &= logits >= np.sort(logits)[-min(params.top_k, V)]
    order = [v for v in np.argsort(-logits, kind="stable") if alive[v]]
    cumulative = np.cumsum(p[order]) / p[order].sum()
    last = order[min(int(np.searchsorted(cumulative, params.top_p - 1e-9)), len(order) - 1)]
    return np.flatnonzero(alive & (logits >= logits[last]))


FILTERS = (
    {"top_k": 1}, {"top_k": 3}, {"top_k": V + 50}, {"top_k": -1}, {"top_p": 1e-9}, {"top_p": 0.6}, {"min_p": 1.0}, {"min_p": 0.3},
    {"top_k": 4, "top_p": 0.7}, {"top_k": 6, "min_p": 0.2}, {"top_p": 0.5, "min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
)  # fmt: skip


def test_filters_leave_exactly_the_tokens_they_should(shared):
    """Twelve settings side by side; each token is the best by logits plus noise of those that sorting allows."""
    logits = logits_of(3)[0]
    logits[10:13] = logits.max()  # ties at the top
    logits[40] = -np.inf
    params = [SamplingParams(temperature=1.7, seed=i, **settings) for i, settings in enumerate(FILTERS)]
    allowed = [allowed_tokens(logits, p) for p in params]
    assert [len(a) for a in allowed[:5]] == [4, 4, V - 1, V - 1, 4]
    scores = logits * np.float32(1 / 1.7) + noise(list(range(len(params))), range(25))
    with Batch(shared, *params) as batch:
        for step in range(25):
            tokens = batch.draw(np.repeat(logits[None], len(params), 0))
            assert tokens == [int(ids[scores[i, step, ids].argmax()]) for i, ids in enumerate(allowed)]


def test_penalties_over_a_whole_output_and_a_preemption(shared):
    """Greedy with all three penalties against the formula in Python; after 10 tokens the sequence moves to another row."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.25)
    logits = logits_of(4)[0] + 1
    prompt, output = [3, 3, int(logits.argmax())], []
    batch = Batch(shared, params, GREEDY, prompt=tuple(prompt))
    with batch:
        for step in range(20):
            if step == 10:
                shared.remove(batch.sequences[0].row)
                batch.sequences[0].row = 11
                shared.add(batch.sequences[0], (EOS,))
            scores = []
            for v in range(V):
                x = float(logits[v])
                if v in prompt or v in output:
                    x = x / 1.4 if x > 0 else x * 1.4
                scores.append(x - 0.3 * (v in output) - 0.25 * output.count(v))
            token, neighbour = batch.draw(np.stack([logits, logits]))
            assert token == int(np.argmax(scores)), step
            assert neighbour == int(logits.argmax())
            output.append(token)
    assert len(set(output)) > 4


def test_a_row_forgets_its_last_sequence(shared):
    """Counts and biases of a row's former sequence touch neither an unpenalised nor a penalised successor."""
    logits = logits_of(5)
    best = int(logits.argmax())
    strong = SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias={best: -100.0})
    with Batch(shared, strong, strong) as batch:
        assert best not in batch.draw(np.repeat(logits, 2, 0))
    mild = [SamplingParams(temperature=0.0, frequency_penalty=0.001), SamplingParams(temperature=0.0, logit_bias={0: 0.5})]
    with Batch(shared, *mild) as batch:
        assert batch.draw(np.repeat(logits, 2, 0)) == [best, best]


def test_padding_counts_for_no_sequence(shared):
    """The batch shrinks, and its last line is padding where the sequence that is now first was before."""
    penalized = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    logits = np.zeros((2, V), np.float32)
    logits[:, 5], logits[:, 0] = 9.0, 4.5
    with Batch(shared, penalized, penalized) as batch:
        batch.draw(logits)
        shared.remove(batch.sequences.pop(0).row)
        assert [batch.draw(logits[:1], padding=1)[0] for _ in range(4)] == [5, 5, 0, 5]


def test_logit_bias_forces_and_forbids(shared):
    logits = logits_of(6)
    best = int(logits.argmax())
    with Batch(shared, *(SamplingParams(logit_bias={30: 100.0}, seed=s) for s in range(8))) as batch:
        assert batch.draw(np.repeat(logits, 8, 0)) == [30] * 8
    with Batch(shared, *(SamplingParams(logit_bias={best: -100}, seed=s) for s in range(8))) as batch:
        for _ in range(5):
            assert best not in batch.draw(np.repeat(logits, 8, 0))


def test_min_tokens_keeps_the_end_away_until_they_are_there(shared):
    logits = np.zeros((1, V), np.float32)
    logits[0, [EOS, 7, 20]] = 9.0, 8.0, 7.0
    stops = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (7, 10**6)}
    with Batch(shared, SamplingParams(**stops), SamplingParams(**stops, ignore_eos=True), GREEDY) as batch:
        steps = [batch.draw(np.repeat(logits, 3, 0)) for _ in range(5)]
    assert [step[0] for step in steps] == [20, 20, 20, EOS, EOS]
    assert [step[1] for step in steps] == [EOS] * 5  # an end that is ignored is a token like others
    assert [step[2] for step in steps] == [EOS] * 5
    biased = [SamplingParams(temperature=0.0, min_tokens=1, logit_bias=bias) for bias in ({EOS: -5.0}, {EOS: -1.5, 7: -5.0})]
    with Batch(shared, *biased) as batch:  # the bias outlives the minimum
        assert [batch.draw(np.repeat(logits, 2, 0)) for _ in range(2)] == [[7, 20], [7, EOS]]
    resumed = Batch(shared, SamplingParams(temperature=0.0, min_tokens=2))
    resumed.sequences[0].output_token_ids = [4]
    with resumed:
        assert [resumed.draw(logits)[0] for _ in range(2)] == [7, EOS]


def bits_of(*tokens: int) -> np.ndarray:
    """The words of a mask that allows these tokens."""
    return np.packbits(np.isin(np.arange(96), tokens), bitorder="little").view(np.int32)


def test_masks_leave_only_what_they_allow(shared):
    """Greedy and sampled rows next to rows without a mask, with penalties and bias, over steps whose masks differ; padded."""
    logits = logits_of(10)
    logits[0, :3] = 20.0
    structured = StructuredOutputsParams(regex="x")
    asks = [
        SamplingParams(temperature=0.0, structured_outputs=structured),
        GREEDY,
        SamplingParams(seed=4, temperature=2.0, structured_outputs=structured, repetition_penalty=1.5, logit_bias={66: 5.0}),
        SamplingParams(temperature=0.0, allowed_token_ids=[31, 32, 66]),
    ]
    best = int(logits[0, [31, 32, 66]].argmax())
    with Batch(shared, *asks, rows=[3, 2, 9, 4]) as batch:
        assert [shared.flags([sequence]).masked for sequence in batch.sequences] == [True, False, True, True]
        for tokens in ((5, 63), (66,), (0, 64, 65)):
            shared.mask(3)[:] = bits_of(*tokens)
            shared.mask(9)[:] = bits_of(*tokens)
            shared.send_masks([3, 9])
            drawn = batch.draw(np.repeat(logits, 4, 0), padding=2)
            assert drawn[0] == max(tokens, key=lambda t: logits[0, t])
            assert drawn[1] == int(logits.argmax())
            assert drawn[2] in tokens
            assert drawn[3] == [31, 32, 66][best]


def test_a_mask_that_allows_nothing_gives_no_token(shared):
    with Batch(shared, SamplingParams(seed=1, allowed_token_ids=[1]), GREEDY) as batch:
        shared.write_mask(0, bits_of())
        assert batch.draw(np.repeat(logits_of(11), 2, 0)) == [-1, int(logits_of(11).argmax())]


def test_masks_are_captured_once_and_forgotten_with_their_sequence(shared, monkeypatch):
    logits = logits_of(12)
    order = np.argsort(-logits[0])
    limited = SamplingParams(temperature=0.0, allowed_token_ids=order[1:].tolist(), bad_words=["x"])
    with Batch(shared, limited) as batch:
        assert batch.draw(logits) == [order[1]]
        monkeypatch.setattr("tinyvllm.sampling.sampler.Captured", lambda _: pytest.fail("captured again"))
        shared.send_masks([0], {0: [int(order[1])]})
        assert batch.draw(logits) == [order[2]]
        shared.mask(0)[:] = -1  # what a request allows all along stays the most
        shared.send_masks([0])
        assert batch.draw(logits) == [order[1]]
    with Batch(shared, SamplingParams(temperature=0.0, bad_words=["x"])) as batch:
        assert batch.draw(logits) == [order[0]]


def test_masks_before_the_first_masked_sequence_are_refused():
    with pytest.raises(ArgumentError, match="no masks"):
        Sampler(V, 2, Device.DEFAULT).mask(0)


def test_flags_name_what_a_batch_needs(shared):
    with Batch(shared, *MIXED) as batch:
        first = [shared.flags([sequence]) for sequence in batch.sequences]
        assert shared.flags(batch.sequences) == SamplingFlags(*([True] * 6))
        assert shared.flags(batch.sequences[:2]) == SamplingFlags(sampled=True)
    assert first[0] == SamplingFlags() and not first[0].filtered
    assert first[2] == SamplingFlags(sampled=True, top_k=True)
    assert first[3] == SamplingFlags(sampled=True, top_p=True, biased=True)
    assert first[4] == SamplingFlags(sampled=True, min_p=True)
    assert first[6] == SamplingFlags(penalized=True)
    assert first[7] == SamplingFlags(sampled=True, biased=True)
    off = SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5)  # a greedy row filters nothing
    with Batch(shared, off, SamplingParams(seed=1, top_k=-1, temperature=1e-6)) as batch:
        assert shared.flags(batch.sequences) == SamplingFlags()
    assert shared.flags([]) == SamplingFlags()


def test_a_step_is_captured_once_and_answers_in_one_buffer(shared, monkeypatch):
    with Batch(shared, SamplingParams(seed=1)) as batch:
        batch.draw(logits_of(7))
        monkeypatch.setattr("tinyvllm.sampling.sampler.Captured", lambda _: pytest.fail("captured again"))
        flags = shared.prepare(batch.sequences, 1)
        answers = {id(shared.draw(Tensor(logits_of(seed)).realize(), flags)) for seed in range(4)}
    assert len(answers) == 1


def test_rows_without_a_token_are_minus_one_and_harm_no_other(shared):
    """NaNs in one row: its neighbours draw as ever, and the count of tokens seen is not written out of bounds."""
    penalized = SamplingParams(temperature=0.0, presence_penalty=0.5)
    logits = logits_of(8, 2)
    best = logits.argmax(1)
    logits[0] = np.nan
    with Batch(shared, penalized, penalized, rows=[1, 0]) as batch:
        assert batch.draw(logits) == [-1, best[1]]
        batch.sequences[0].output_token_ids = [0]
        logits[0] = 0.0
        assert batch.draw(logits)[0] == 1


def test_a_sampled_sequence_without_a_seed_is_refused(shared):
    with pytest.raises(ArgumentError, match="sequence 3 .* no seed"):
        shared.add(Sequence(3, "a", [1], SamplingParams(), row=0), (EOS,))


def test_logprobs_go_to_sequences_that_want_them(shared):
    logits = logits_of(9, 3)
    with Batch(shared, *[GREEDY] * 3) as batch:
        for sequence, asked in zip(batch.sequences, (None, 0, 3)):
            sequence.logprobs = asked
        tokens = batch.draw(logits)
        found = shared.logprobs(Tensor(logits).realize(), batch.sequences, tokens)
    assert found[0] is None
    assert list(found[1]) == [tokens[1]]
    assert list(found[2]) == np.argsort(-logits[2])[:3].tolist()


# --- several rows of logits of one sequence, as the check of drafts wants them


def test_rows_of_one_sequence_draw_its_next_tokens(shared):
    """Three rows of one sequence between two others: the tokens of three single draws, because each row has its own position."""
    logits = logits_of(13, 5, 1.0)
    asks = GREEDY, SamplingParams(seed=5, temperature=1.3, top_p=0.95, logit_bias={4: 1.0}), SamplingParams(seed=5, top_k=30)
    for start in (0, 3):
        with Batch(shared, *asks, rows=[2, 7, 0]) as batch:
            for sequence in batch.sequences:
                sequence.output_token_ids = [1] * start
            first, second, third = batch.sequences
            flags = shared.prepare([first, second, second, second, third], 8)
            rows = np.concatenate([logits, np.zeros((3, V), np.float32)])
            together = download(shared.draw(Tensor(rows).realize(), flags)).tolist()[:5]
            alone = [batch.draw(logits[[0, 1, 4]])]
            batch.sequences = [second]
            alone += [batch.draw(logits[r : r + 1]) for r in (2, 3)]
            batch.sequences = [first, second, third]
        assert together == [alone[0][0], alone[0][1], alone[1][0], alone[2][0], alone[0][2]]


def test_rows_of_one_sequence_differ_in_position_alone(shared):
    """Equal logits in twelve rows: a seeded sequence draws different tokens, a greedy one the same."""
    logits = Tensor(np.repeat(logits_of(14, 1, 0.5), 12, 0)).realize()
    with Batch(shared, SamplingParams(seed=8), GREEDY) as batch:
        sampled, greedy = batch.sequences
        drawn = download(shared.draw(logits, shared.prepare([sampled] * 6 + [greedy] * 6, 12))).tolist()
    assert len(set(drawn[:6])) > 3 and len(set(drawn[6:])) == 1


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=0.0, presence_penalty=0.5), SamplingParams(temperature=0.0, min_tokens=3)],
    ids=["penalties", "min_tokens"],
)
def test_what_changes_with_every_token_takes_one_row_a_draw(shared, params):
    with Batch(shared, params) as batch:
        assert shared.changes_with_tokens(batch.sequences[0])
        shared.prepare(batch.sequences, 2)
        with pytest.raises(ArgumentError, match="several rows"):
            shared.prepare(batch.sequences * 2, 2)


def test_a_mask_that_lasts_holds_for_every_row(shared):
    allowed = [3, 4, 9]
    with Batch(shared, SamplingParams(seed=3, allowed_token_ids=allowed), GREEDY) as batch:
        masked, free = batch.sequences
        assert not shared.changes_with_tokens(masked)
        logits = Tensor(logits_of(16, 8, 0.3)).realize()
        drawn = download(shared.draw(logits, shared.prepare([masked] * 7 + [free], 8))).tolist()
    assert set(drawn[:7]) <= {*allowed} and len(set(drawn[:7])) > 1 and drawn[7] == int(download(logits)[7].argmax())


def test_rows_of_no_sequence_draw_nothing(shared):
    """A sequence with penalties draws the middle row of three, one draw a row: its counts grow by its own tokens only."""
    logits = logits_of(17, 3)
    with Batch(shared, SamplingParams(temperature=0.0, frequency_penalty=1.9, repetition_penalty=1.5), GREEDY) as batch:
        penalised, other = batch.sequences
        expected = []
        for r in range(3):
            expected.append(batch.draw(np.stack([logits[r], logits[0]]))[0])
    with Batch(shared, SamplingParams(temperature=0.0, frequency_penalty=1.9, repetition_penalty=1.5), GREEDY) as batch:
        penalised, other = batch.sequences
        rows = Tensor(np.concatenate([logits, logits[:1]])).realize()
        for r in range(3):
            turn = [penalised if n == r else None for n in range(3)]
            drawn = download(shared.draw(rows, shared.prepare([*turn, None if r else other], 4))).tolist()
            assert drawn[r] == expected[r] and (r or drawn[3] == int(logits[0].argmax()))
            penalised.output_token_ids.append(drawn[r])


def test_logprobs_of_several_rows(shared):
    logits = logits_of(15, 3)
    with Batch(shared, GREEDY, GREEDY) as batch:
        batch.sequences[1].logprobs = 1
        found = shared.logprobs(Tensor(logits).realize(), [batch.sequences[n] for n in (0, 1, 1)], [0, 1, 2])
    assert found[0] is None and [next(iter(entry)) for entry in found[1:]] == [1, 2]
