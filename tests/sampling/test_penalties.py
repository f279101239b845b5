"""The rows that the host writes."""

import numpy as np
from tinygrad import Device

from tinyvllm.bridge import download
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.sampling.penalties import LogitBias, TokenCounts, TokenMasks, has_penalties


def test_seen_tokens_counts_outputs_and_marks_the_prompt():
    seen = TokenCounts(3, 5, Device.DEFAULT)
    seen.write(Sequence(0, "a", [0, 4, 4], SamplingParams(), row=0, output_token_ids=[1, 1, 1]))
    seen.write(Sequence(1, "b", [2, 2], SamplingParams(), row=1, output_token_ids=[3, 0, 3]))
    np.testing.assert_array_equal(download(seen.counts), [[0, 3, 0, 0, 0], [1, 0, 0, 2, 0], [0] * 5])
    np.testing.assert_array_equal(download(seen.prompted), [[1, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0] * 5])
    seen.write(Sequence(2, "c", [1], SamplingParams(), row=1))
    np.testing.assert_array_equal(download(seen.counts), [[0, 3, 0, 0, 0], [0] * 5, [0] * 5])
    np.testing.assert_array_equal(download(seen.prompted), [[1, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0] * 5])


def test_bias_is_written_whole():
    bias = LogitBias(2, 4, Device.DEFAULT)
    bias.write(1, {0: 2.5, 3: -100}, {2, 3, 99})
    np.testing.assert_array_equal(download(bias.table), [[0, 0, 0, 0], [2.5, 0, -np.inf, -np.inf]])
    bias.write(1, None, ())
    np.testing.assert_array_equal(download(bias.table), np.zeros((2, 4)))


def allowed(words: np.ndarray, V: int) -> list[list[int]]:
    return [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:V]).tolist() for row in words]


def test_masks_are_sent_by_rows():
    masks = TokenMasks(5, 40, Device.DEFAULT)
    masks.start(3, [0, 31, 32, 99])
    assert allowed(download(masks.table), 40) == [list(range(40))] * 3 + [[0, 31, 32], list(range(40))]
    masks.host[[0, 1, 3]] = np.array([0x80000001, 0x81], np.uint32).view(np.int32)  # tokens 0, 31, 32, 39
    masks.send([3, 0, 1], {1: [31, 39, 99], 0: []})
    sent = [[0, 31, 32, 39], [0, 32], list(range(40)), [0, 31, 32], list(range(40))]
    assert allowed(download(masks.table), 40) == sent
    masks.host[4] = 0  # is not sent
    masks.start(3, None)
    assert allowed(download(masks.table), 40)[3:] == [list(range(40))] * 2


def test_has_penalties_is_true_when_any_penalty_is_set():
    assert not has_penalties(SamplingParams())
    for one in ({"repetition_penalty": 1.1}, {"presence_penalty": -0.1}, {"frequency_penalty": 0.1}):
        assert has_penalties(SamplingParams(**one))
