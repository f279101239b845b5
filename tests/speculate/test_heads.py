"""Drafts of published heads against the oracle: which tokens, how probable, in batches, over steps, by greedy and sampled draws."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tinygrad import Tensor

from tests.speculate import heads as tiny
from tests.speculate.heads import BLOCK, LAYOUTS, E, Ends, Layout, Oracle, V
from tinyvllm.bridge import Captured
from tinyvllm.request import SamplingParams, Sequence, Status
from tinyvllm.runner import arrays, prepare
from tinyvllm.runner.arrays import PackedArrays
from tinyvllm.speculate import picks
from tinyvllm.speculate.eagle import load_eagle, read_eagle, read_eagle3
from tinyvllm.speculate.eagle_drafter import EagleDrafter
from tinyvllm.speculate.head_files import Target, open_heads
from tinyvllm.speculate.medusa import MedusaDrafter, MedusaLiteDrafter, load_medusa
from tinyvllm.speculate.mtp import mtp_file, read_mtp
from tinyvllm.speculate.protocol import DraftRequest, StateDrafter, StateRows
from tinyvllm.weights.checkpoint import open_checkpoint

K = 4  # guesses


class Text:
    """A sequence whose target is random: a state for each token, by its position, and blocks of its own."""

    def __init__(self, number: int, length: int, width: int, params: SamplingParams | None = None):
        rng = np.random.default_rng(100 + number)
        self.states = rng.normal(0, 1, (96, width)).astype(np.float32)
        tokens = rng.integers(0, V, length).tolist()
        self.sequence = Sequence(number, f"r{number}", tokens, params or SamplingParams(temperature=0.0), status=Status.RUNNING)
        self.sequence.block_table = [number * 20 + i for i in range(-(-length // BLOCK))]
        self.computed = 0  # tokens whose states were delivered

    @property
    def tokens(self) -> list[int]:
        return self.sequence.token_ids(0, len(self.sequence))

    def append(self, tokens: list[int]) -> None:
        self.sequence.output_token_ids += tokens
        while len(self.sequence.block_table) * BLOCK < len(self.sequence):
            self.sequence.block_table.append(self.sequence.sequence_id * 20 + len(self.sequence.block_table))


def deliver(drafter: StateDrafter, texts: list[Text], counts: list[int], padding: int = 3) -> None:
    """A step that has computed the next `counts` tokens, those that it has drawn being appended; rubbish is before, between and after."""
    width = texts[0].states.shape[1]
    flat, rows = [np.full((1, width), 7.0, np.float32)], []
    for text, count in zip(texts, counts, strict=True):
        rows.append(StateRows(text.sequence, text.computed, sum(map(len, flat)), count))
        flat.append(text.states[text.computed : text.computed + count])
        flat.append(np.full((padding, width), np.nan, np.float32))
        text.computed += count
    drafter.observe_states(Tensor(np.concatenate(flat)).realize(), rows)


def drafts(drafter: StateDrafter, texts: list[Text], count: int = K) -> list[tuple[list[int], list[float]]]:
    found = drafter.propose([DraftRequest(text.sequence, count) for text in texts])
    return [(draft.tokens, draft.confidences) for draft in found]


def eagle_drafter(folder: Path, layout: Layout, ends: Ends) -> tuple[EagleDrafter, Oracle]:
    tensors, runner = tiny.tensors_of(layout), tiny.runner_of(ends)
    if layout.mtp:
        file = mtp_file(open_checkpoint(tiny.write_heads(folder / layout.name, {}, tiny.published_mtp(tensors))))
        config = read_mtp(file, replace(runner.config, n_kv_heads=layout.kv_heads))
        assert config.state_layers == (tiny.LAYERS,)
    else:
        file = open_heads(tiny.write_heads(folder / layout.name, tiny.config_of(layout), tensors))
        config = (read_eagle3 if layout.eagle3 else read_eagle)(file, Target.of(runner.config))
        assert config.state_layers == (layout.aux_layers or (-1,))
    return EagleDrafter(runner, load_eagle(file, runner, config), 8), Oracle(layout, tensors, ends)


def expect(oracle: Oracle, text: Text, found: tuple[list[int], list[float]], count: int = K) -> None:
    tokens, logits = oracle.guesses(text.tokens, text.states, count)
    assert found[0] == tokens
    own = [int(np.flatnonzero(oracle.targets == token)[0]) for token in tokens]
    expected = [tiny.softmax(row)[index] for row, index in zip(logits, own, strict=True)]
    np.testing.assert_allclose(found[1], expected, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=layout.name, marks=() if layout.name == "eagle3" else pytest.mark.long) for layout in (*LAYOUTS, tiny.MTP)],
)
def test_eagle_heads_guess_what_their_formulas_say(layout: Layout, tmp_path: Path) -> None:
    """A prompt in two chunks, then steps with none, some and all guesses accepted; a second text joins on the way."""
    drafter, oracle = eagle_drafter(tmp_path, layout, Ends.random())
    width = len(drafter.state_layers) * E
    first, second = Text(0, 22, width), Text(1, 5, width)
    deliver(drafter, [first], [18])
    assert drafts(drafter, [first]) == [([], [])]  # in the middle of its prompt
    first.append([3])
    deliver(drafter, [first], [4])
    expect(oracle, first, drafts(drafter, [first])[0])
    first.append([8])
    second.append([11])
    deliver(drafter, [first, second], [1, 5])
    for text, found in zip([second, first], drafts(drafter, [second, first]), strict=True):
        expect(oracle, text, found)
    for accepted in ([2, 0], [4, 3]):  # the guesses' own entries were of other tokens: true ones take their place
        for text, count in zip([first, second], accepted, strict=True):
            text.append([*range(20, 20 + count), 40])
        deliver(drafter, [first, second], [count + 1 for count in accepted])
        for text, found in zip([first, second], drafts(drafter, [first, second]), strict=True):
            expect(oracle, text, found)
    assert drafts(drafter, [first, second]) == drafts(drafter, [first, second])  # asked twice, the same


def test_medusa_heads_guess_what_their_formulas_say(tmp_path: Path) -> None:
    tensors = tiny.medusa_tensors(3, 2)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "x"}
    runner = tiny.runner_of(Ends.random())
    drafter = MedusaDrafter(runner, load_medusa(open_heads(tiny.write_heads(tmp_path / "m", config, tensors)), runner))
    texts = [Text(0, 9, E), Text(1, 4, E), Text(2, 1, E)]
    for text in texts:
        text.append([5])
    deliver(drafter, texts, [9, 4, 1])
    for text, (tokens, confidences) in zip(texts, drafts(drafter, texts), strict=True):
        logits = tiny.medusa_logits(tensors, 3, 2, text.states[text.computed - 1])
        assert tokens == [int(row.argmax()) for row in logits]  # 3 heads, so 3 guesses
        np.testing.assert_allclose(confidences, [tiny.softmax(row).max() for row in logits], rtol=1e-3)


def test_medusa_lite_guesses_the_runners_up() -> None:
    ends = Ends.random()
    drafter, text = MedusaLiteDrafter(tiny.runner_of(ends), 3), Text(0, 6, E)
    ranked = np.argsort(-(ends.head.astype(np.float64) @ text.states[5]))
    text.append([int(ranked[1])])
    deliver(drafter, [text], [6])
    ((tokens, _),) = drafts(drafter, [text])
    assert tokens == [int(token) for token in (ranked[0], ranked[2], ranked[3])]


def test_guesses_are_one_copy_in_and_none_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: on the CPU they are read where the captured step has written them. A step's entries are two copies in."""
    drafter, _ = eagle_drafter(tmp_path, LAYOUTS[2], Ends.random())
    text = Text(0, 6, len(drafter.state_layers) * E)
    text.append([3])
    deliver(drafter, [text], [6])
    expected = drafts(drafter, [text], 8)
    copies: list[int] = []
    upload = PackedArrays.upload
    monkeypatch.setattr(PackedArrays, "upload", lambda arrays: copies.append(arrays.host.size) or upload(arrays))
    for module, name in ((arrays, "upload"), (picks, "upload"), (picks, "download"), (prepare, "upload"), (prepare, "download")):
        monkeypatch.setattr(module, name, lambda *values: pytest.fail("a copy by tinygrad's buffers"))
    assert drafts(drafter, [text], 8) == expected and len(copies) == 1
    text.append([5])
    deliver(drafter, [text], [1])
    assert len(copies) == 3


def test_all_guesses_are_one_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And fewer guesses than the usual number share a few captures."""
    drafter, _ = eagle_drafter(tmp_path, LAYOUTS[2], Ends.random())
    text = Text(0, 6, len(drafter.state_layers) * E)
    text.append([3])
    deliver(drafter, [text], [6])
    captures, first = [], Captured._first
    monkeypatch.setattr(Captured, "_first", lambda self, *tensors, **values: captures.append(self) or first(self, *tensors, **values))
    longest = drafts(drafter, [text], 8)[0]
    assert len(captures) == 1 and len(longest[0]) == 8
    assert drafts(drafter, [text], 7)[0] == (longest[0][:7], longest[1][:7]) and len(captures) == 1
    drafter.drop_captures()
    assert drafts(drafter, [text], 8) == [([], [])], "what was kept belonged to a capture"
