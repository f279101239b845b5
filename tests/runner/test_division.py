"""How layers are divided between a GPU and the CPU by the memory of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tinyvllm.errors import ModelError
from tinyvllm.runner.division import DeviceLayers, Division

# a table of 30 before the first layer, a head of 20 after the last; layers of 10 on the GPU, 12 on the CPU; a block of 1 a layer
GPU, CPU = DeviceLayers("CUDA", (40, 10, 10, 10, 10, 30), 5, 100), DeviceLayers("CPU", (42, 12, 12, 12, 12, 32), 7, 1000)
WEIGHTS = Division(GPU, CPU, 1, shared=False)


def with_free(gpu: int, cpu: int = 1000) -> Division:
    return replace(WEIGHTS, gpu=replace(WEIGHTS.gpu, free=gpu), cpu=replace(WEIGHTS.cpu, free=cpu))


def test_the_gpu_has_the_last_layers_and_as_many_as_fit() -> None:
    frees = (5 + 30 + 4, 5 + 40 + 7, 5 + 40 + 8, 5 + 70 + 20, 10_000)
    assert [with_free(free).choose(None, 4, sized=True) for free in frees] == [1, 1, 2, 5, 5]
    assert with_free(0).choose(None, 4, sized=True) == 1, "what does not fit is refused where its memory is checked"
    gpu, cpu = WEIGHTS.uses(2)
    assert (gpu.weights, gpu.block, cpu.weights, cpu.block) == (40, 2, 42 + 3 * 12, 4)
    assert (gpu.left, cpu.left) == (60, 1000 - 78)


def test_a_cache_without_a_size_takes_half_of_what_the_weights_leave() -> None:
    """So that the pool, which takes no more than that, holds the sequence for which the layers were divided."""
    assert [with_free(free).choose(None, 4, sized=False) for free in (5 + 40 + 15, 5 + 40 + 16)] == [1, 2]


def test_a_number_of_layers_is_taken_or_refused() -> None:
    assert with_free(0).choose(3, 4, sized=True) == 3
    with pytest.raises(ModelError, match="gpu_layers=6: the model has 6 layers, of which CUDA may have up to 5 here; .* --device CUDA"):
        WEIGHTS.choose(6, 4, sized=True)


def test_memory_of_both_is_counted_once_where_it_is_one() -> None:
    gpu, cpu = replace(WEIGHTS, shared=True).uses(2)
    assert gpu == WEIGHTS.uses(2)[0] and (cpu.weights, cpu.block, cpu.run) == (78 + 40, 6, 12)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("gpu", "cpu"), [(60, 300), (200, 120), (100, 100), (34, 1000), (10, 10)])
def test_the_largest_cache_with_any_division(gpu: int, cpu: int, shared: bool) -> None:
    division = replace(with_free(gpu, cpu), shared=shared)

    def fits(blocks: int, count: int) -> bool:
        return all(use.holds(blocks) for use in division.uses(count))

    for asked in (None, 3):
        counts = range(1, 6) if asked is None else [asked]
        most = max((blocks for blocks in range(1000) if any(fits(blocks, count) for count in counts)), default=-1)
        assert division.most_blocks(asked) == most


def test_whether_one_device_would_do() -> None:
    assert with_free(5 + 110 + 4 * 6).holds_all(4) and not with_free(5 + 110 + 4 * 6 - 1).holds_all(4)
