"""What a start compiles ahead, in which order, what it leaves alone, and what it notes for later ones."""

from dataclasses import replace

import pytest

from tests.engine.starts import use_own_steps
from tinyvllm.config.engine import EngineConfig


def test_a_start_compiles_the_kernels_of_the_first_answers_in_the_order_of_their_use(tiny_model, monkeypatch):
    from tinyvllm.backends.cpu.call import CpuBackend
    from tinyvllm.backends.registry import usable_variants
    from tinyvllm.placement import Placement
    from tinyvllm.runner.opened import open_model
    from tinyvllm.runner.runner import Runner
    from tinyvllm.sampling.parameters import SamplingFlags

    compiled = []
    monkeypatch.setattr(CpuBackend, "compile_ahead", lambda self, kernels, placement: compiled.extend(kernels))
    config = EngineConfig(model=str(tiny_model), num_blocks=4)
    Runner(config, "CPU", opened=replace(open_model(config, "CPU"), likely_draw=SamplingFlags(sampled=True, top_p=True)))
    if usable_variants(Placement("CPU"))[0] == "ref":
        pytest.skip("no kernels for this processor")
    stems = list(dict.fromkeys(kernel.stem for kernel in compiled))
    assert {"embed", "norm_head", "sample", "advance", "kv_copy"} <= set(stems)
    assert max(map(stems.index, ("embed", "norm_head"))) < stems.index("sample") < stems.index("advance") < stems.index("kv_copy")
    draw = dict(next(kernel.defines for kernel in compiled if kernel.stem == "sample"))
    assert (draw["SAMPLED"], draw["TOP_P"], draw["TOP_K"]) == (1, 1, 0)


def test_a_start_on_the_reference_computes_nothing_ahead(tiny_model, monkeypatch):
    """A copy of blocks would be an assignment to the pool."""
    from tinyvllm.backends import registry
    from tinyvllm.runner.runner import Runner

    monkeypatch.setenv("TINYVLLM_KERNELS", "all=ref")
    registry.forget_choices()
    made = Runner(EngineConfig(model=str(tiny_model), num_blocks=4), "CPU")
    registry.forget_choices()
    assert all(cache.keys.uop.has_buffer_identity() for cache in made.pool.layers)


def test_starts_that_decode_nothing_compile_ahead_twice(tiny_model, tmp_path, monkeypatch):
    """As with one token an answer: each such start compiled ahead, and ended before the slowest kernel was done."""
    from tinyvllm.backends.cpu.call import CpuBackend
    from tinyvllm.runner.runner import Runner

    use_own_steps(monkeypatch, tmp_path)
    compiled, config = [], EngineConfig(model=str(tiny_model), num_blocks=4)
    monkeypatch.setattr(CpuBackend, "compile_ahead", lambda self, kernels, placement: compiled.extend(kernels))
    for ahead in (True, True, False):
        compiled.clear()
        Runner(config, "CPU").close()
        assert bool(compiled) == ahead
