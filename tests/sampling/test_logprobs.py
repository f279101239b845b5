"""Log-probabilities against a softmax in float64."""

import numpy as np
import pytest

from tinyvllm.sampling.logprobs import logprobs_of


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def test_values_ranks_and_order():
    logits = np.random.default_rng(0).standard_normal((3, 1001)).astype(np.float32) * 10
    tokens, top = [5, 700, int(logits[2].argmax())], [0, 20, 3]
    for row, token, count, found in zip(logits, tokens, top, logprobs_of(logits, tokens, top)):
        order = np.argsort(-row, kind="stable").tolist()
        assert list(found) == list(dict.fromkeys([token, *order[:count]]))
        for t, entry in found.items():
            assert entry.logprob == pytest.approx(log_softmax(row)[t], abs=1e-5)
            assert entry.rank == order.index(t) + 1


def test_ties_share_a_rank_and_the_lower_id_comes_first():
    logits = np.array([[1.0, 2.0, 2.0, 0.0, 2.0]], np.float32)
    (found,) = logprobs_of(logits, [4], [2])
    assert list(found) == [4, 1, 2]
    assert [entry.rank for entry in found.values()] == [1, 1, 1]
    many = np.zeros((1, 2000), np.float32)
    many[0, ::7], many[0, ::300] = 1.0, 2.0  # 286 at 1, of which the first 13 belong to the top 20
    (found,) = logprobs_of(many, [1], [20])
    assert list(found)[1:] == sorted(range(2000), key=lambda t: -many[0, t])[:20]


def test_forbidden_and_extreme_logits_stay_finite_where_they_can():
    logits = np.array([[-np.inf, 1e30, 0.0], [3.0, -np.inf, -np.inf]], np.float32)
    first, second = logprobs_of(logits, [1, 0], [3, 1])
    assert first[1].logprob == 0.0 and first[0].logprob == -np.inf and first[2].rank == 2
    assert list(second) == [0] and second[0].logprob == 0.0


def test_more_than_the_vocabulary_gives_all_of_it():
    (found,) = logprobs_of(np.zeros((1, 3), np.float32), [1], [20])
    assert list(found) == [1, 0, 2]


def test_all_of_the_vocabulary_has_the_ranks_of_few() -> None:
    logits = np.random.default_rng(1).integers(0, 40, (2, 500)).astype(np.float32)  # with ties
    for row, every in zip(logits, logprobs_of(logits, [7, 8], [-1, -1]), strict=True):
        assert len(every) == 500 and [entry.rank for entry in list(every.values())[1:]] == sorted(e.rank for e in list(every.values())[1:])
        for token in range(500):
            (alone,) = logprobs_of(row[None], [token], [0])
            assert every[token] == alone[token]


def test_named_tokens_replace_the_most_probable() -> None:
    logits = np.array([[5.0, 4.0, 3.0, 2.0], [5.0, 4.0, 3.0, 2.0]], np.float32)
    first, second = logprobs_of(logits, [1, 2], [2, 2], [(3, 1), None])
    assert list(first) == [1, 3] and first[3].rank == 4 and list(second) == [2, 0, 1]
