"""A decode's state after its tokens were drawn, by the kernel and by the reference, against the numbers spelled out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tinygrad import Tensor

from tests.ops.inputs import VARIANTS, int32, realized
from tinyvllm.backends import registry
from tinyvllm.batch import NO_SLOT, Batch
from tinyvllm.bridge import Captured, download, upload
from tinyvllm.ops.advance import History, advance

S = 8
TABLES = np.array([[1, 2], [3, 4], [5, 6], [7, 8], [9, 9]], np.int32)


def batch(count: int) -> Batch:
    """Sequence 0 within a block, 1 at its end, 2 at the end of all its blocks, 3 at its first token; 4 is padding."""
    none = int32(0)
    tokens, positions = int32(10, 11, 12, 13, 14), int32(2, 7, 15, 0, 3)
    slots, contexts = int32(10, 31, 55, 56, NO_SLOT), int32(3, 8, 16, 1, 0)
    return Batch(tokens, positions, slots, realized(TABLES), none, contexts, int32(5), int32(count), none, none, none, 1, 5, 1)


def history(N: int) -> History:
    return History(realized(np.full((N, 5), -1, np.int32)), int32(0))


def state(b: Batch, h: History) -> dict[str, list]:
    arrays = {name: download(getattr(b, name)).tolist() for name in ("tokens", "positions", "slots", "context_lens")}
    return arrays | {"history": download(h.tokens).tolist(), "round": download(h.round).tolist()}


@pytest.fixture(params=[*VARIANTS, "ref"])
def forced(request, monkeypatch):
    monkeypatch.setenv("TINYVLLM_KERNELS", f"advance={request.param}")
    registry.forget_choices()
    yield
    assert {choice.variant for choice in registry.choices()} == {request.param}


def test_two_rounds(forced):
    b, h = batch(4), history(3)
    advance(b, int32(20, 21, -1, 23, 24), h, S)
    assert state(b, h) == {
        "tokens": [20, 21, 0, 23, 14],  # a sequence without a token continues with token 0: the host reads the -1
        "positions": [3, 8, 16, 1, 3],
        "slots": [8 + 3, 4 * 8, NO_SLOT, 7 * 8 + 1, NO_SLOT],
        "context_lens": [4, 9, 17, 2, 0],
        "history": [[20, 21, -1, 23, -1], [-1] * 5, [-1] * 5],
        "round": [1],
    }
    advance(b, int32(30, 31, 32, 33, 34), h, S)
    after = state(b, h)
    assert after["history"] == [[20, 21, -1, 23, -1], [30, 31, 32, 33, -1], [-1] * 5] and after["round"] == [2]
    assert after["tokens"] == [30, 31, 32, 33, 14] and after["slots"] == [12, 33, NO_SLOT, 58, NO_SLOT]


def test_rounds_that_history_has_no_room_for_are_not_recorded(forced):
    b, h = batch(1), history(1)
    for token in (20, 21, 22):
        advance(b, int32(token, 0, 0, 0, 0), h, S)
    after = state(b, h)
    assert after["history"] == [[20, -1, -1, -1, -1]] and after["round"] == [3] and after["positions"][0] == 5


def test_in_a_captured_step(forced):
    """It uses the batch's own buffers: every replay continues from the state that the previous one wrote."""
    b, h, sampled = batch(4), history(4), int32(20, 21, 22, 23, 24)

    def function(tokens: Tensor) -> Tensor:
        advance(b, tokens, h, S)
        return h.round

    step = Captured(function)
    for round in range(4):
        upload(sampled, np.arange(5, dtype=np.int32) + 20 + 10 * round)
        step(sampled)
    after = state(b, h)
    assert after["round"] == [4] and after["positions"] == [6, 11, 19, 4, 3]
    assert after["history"] == [[20 + 10 * r + i for i in range(4)] + [-1] for r in range(4)]
    assert after["slots"][:2] == [8 + 6, 32 + 3]


def test_kernel_and_reference_agree_on_random_states(monkeypatch):
    random = np.random.default_rng(0)
    for count in (0, 1, 5):
        drawn = [random.integers(-1, 50, 5).astype(np.int32) for _ in range(3)]
        start = random.integers(0, 2 * S, 5).astype(np.int32)
        states = []
        for variant in (VARIANTS[0], "ref"):
            monkeypatch.setenv("TINYVLLM_KERNELS", f"advance={variant}")
            b, h = dataclasses.replace(batch(count), positions=realized(start)), history(3)
            for tokens in drawn:
                advance(b, realized(tokens), h, S)
            states.append(state(b, h))
        assert states[0] == states[1]


def test_other_groups_of_layers_get_slots_in_their_own_blocks(forced):
    b, h = batch(4), history(3)
    others = tuple(dataclasses.replace(b, slots=int32(0, 0, 0, 0, NO_SLOT), block_tables=realized(TABLES + n)) for n in (10, 20))
    advance(dataclasses.replace(b, others=others), int32(20, 21, -1, 23, 24), h, S)
    assert download(b.slots).tolist() == [8 + 3, 4 * 8, NO_SLOT, 7 * 8 + 1, NO_SLOT]
    for n, other in zip((10, 20), others, strict=True):
        assert download(other.slots).tolist() == [(1 + n) * 8 + 3, (4 + n) * 8, NO_SLOT, (7 + n) * 8 + 1, NO_SLOT]
