"""Steps run on stand-ins: tensors of the sizes and formats that the loader would hold, without a number of the model's own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyvllm.config.engine import DEFAULT_MODEL, resolve
from tinyvllm.errors import OutOfMemoryError
from tinyvllm.quant.codecs import unpack
from tinyvllm.quant.formats import FLOATS, FORMATS, Layout, formats_in
from tinyvllm.quant.layouts import unpack_panels, unpack_rows, unpack_tiles
from tinyvllm.quant.random_rows import packable_width
from tinyvllm.runner import rehearsed
from tinyvllm.runner.opened import OpenedModel, open_model
from tinyvllm.runner.rehearsed import PATTERN_ROWS, RehearsedModel, RehearsedRunner, StandIns, check_room, stand_in


def opened(path: Path, **options: Any) -> OpenedModel:
    return open_model(resolve(path, device="CPU", **options), "CPU")


@pytest.mark.parametrize("format", FLOATS)
def test_keys_and_values_are_ordinary_numbers(format: str) -> None:
    blocks = 64
    data = rehearsed._pattern()[: blocks * FORMATS[format].nbytes].reshape(blocks, -1)
    numbers = np.abs(unpack(format, data))
    assert np.isfinite(numbers).all() and numbers.max() > 0 and numbers[numbers > 0].min() > np.finfo(np.float32).tiny


LAYOUTS = [(layout, format) for layout in Layout for format in formats_in(layout)]


@pytest.mark.parametrize(("layout", "format"), LAYOUTS, ids=lambda value: getattr(value, "name", value))
def test_weights_are_small_numbers_in_every_format(layout: Layout, format: str) -> None:
    """Beyond the rows that are made, and for a last tile that is not full."""
    O, I = PATTERN_ROWS + 40, packable_width(format, 256)
    memory = stand_in(layout, format, O, I)
    if layout is Layout.ROWS:
        numbers = unpack_rows(format, memory.reshape(O, -1))
    else:
        numbers = (unpack_tiles if layout is Layout.TILES else unpack_panels)(format, memory, O, I)
    assert np.isfinite(numbers).all() and 0.01 < numbers.std() < 0.04 and abs(numbers).max() < 1
    np.testing.assert_array_equal(numbers[PATTERN_ROWS:], numbers[:40])


def test_tensors_of_a_size_share_memory_when_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(DEFAULT_MODEL)
    for distinct, shared in ((1 << 30, False), (0, True)):
        monkeypatch.setattr(rehearsed, "DISTINCT_BYTES", distinct)
        StandIns(model.stored, model.plan).load(model.model, model.recipes)
        first, second, *_ = (block.weights.ffn_down.weight.tensor.uop.base.buffer for block in model.model.blk)
        assert (first is second) == shared


@pytest.mark.parametrize("whole", [True, False])
def test_a_long_prompt_is_one_layer_of_each_kind(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """Layers count as a second each, and those of the second kind as 1.5."""
    model = opened(DEFAULT_MODEL)
    kinds = [0, 1, 0, 0, 1, 0]
    ran: list[list[int]] = []

    def seconds(self: object, inputs: object, blocks: int, layers: Iterable[int]) -> float:
        ran.append(list(layers))
        return sum(1.5 if kinds[layer] else 1.0 for layer in ran[-1])

    monkeypatch.setattr(rehearsed, "layer_kinds", lambda *arguments: kinds)
    monkeypatch.setattr(rehearsed, "WHOLE_SECONDS", 100.0 if whole else 1.0)
    monkeypatch.setattr(RehearsedRunner, "_seconds", seconds)
    runner = RehearsedRunner(resolve(DEFAULT_MODEL, device="CPU", num_blocks=8, max_model_len=128), model, 8 * model.block.nbytes)
    assert runner.long_prefill(32) == (None if whole else pytest.approx(7))
    assert ran == ([[0]] if whole else [[0], [0, 1], [0, 2]])
    assert runner.kept_steps is None  # an engine of these options has other buffers


def test_layers_share_keys_and_values_when_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(DEFAULT_MODEL)
    for distinct, layers in ((1, 1), (2 * 8 * model.block.nbytes, 2)):
        monkeypatch.setattr(rehearsed, "DISTINCT_BYTES", distinct)
        for groups in (None, [range(0, 6, 2), range(1, 6, 2)]):
            pool = RehearsedModel.of(model, 8 * model.block.nbytes).pool(6, 8, groups)
            assert len(pool.layers) == 6 and pool.block_bytes == layers * model.block.nbytes
        assert pool.read([7]).any(), "pages that were never written are one page of zeros, which a cache holds"


def test_too_little_memory_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(DEFAULT_MODEL)
    monkeypatch.setattr(rehearsed, "free_memory", lambda device: 1 << 30)
    with pytest.raises(OutOfMemoryError, match="to measure its steps takes 5[0-9]{2} MiB, more than half of the 1024 MiB"):
        check_room(model, [], 8 * model.block.nbytes)
