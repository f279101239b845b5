"""The runner on a real tiny checkpoint: dtypes, the pool's size and the longest sequence, the bytes of a step."""

from dataclasses import replace

import numpy as np
import pytest

from tests.conftest import HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, VOCAB
from tinyvllm.config.engine import EngineConfig
from tinyvllm.errors import ArgumentError


def runner(model, **options):
    from tinyvllm.runner.runner import Runner

    return Runner(EngineConfig(model=str(model), **options), "CPU")


def test_context_and_pool_follow_the_model_and_the_request(tiny_model):
    made = runner(tiny_model, max_num_seqs=4)
    assert made.max_model_len == 512 and made.pool.num_blocks == 4 * 512 // 16
    assert runner(tiny_model, num_blocks=3).max_model_len == 48, "no sequence can be longer than the pool"
    assert runner(tiny_model, max_model_len=100, num_blocks=3).max_model_len == 100
    with pytest.raises(ArgumentError, match="513"):
        runner(tiny_model, max_model_len=513)


@pytest.mark.parametrize(("dtype", "itemsize", "format"), [("auto", 4, "F32"), ("float16", 2, "F16"), ("bfloat16", 2, "BF16")])
def test_dtype_of_weights_and_cache(tiny_model, dtype, itemsize, format):
    made = runner(tiny_model, dtype=dtype, num_blocks=4)
    assert made.model.weights.table.format == made.model.blk[1].weights.ffn_down.weight.format == format
    assert made.pool.layers[0].keys.dtype.itemsize == itemsize
    assert made.weight_bytes - made.bytes_per_token == VOCAB * HIDDEN * itemsize, "the input embedding is gathered, not streamed"
    E, keys = HIDDEN, HIDDEN * KV_HEADS // HEADS
    matrices, vectors = 2 * VOCAB * E + 2 * (2 * E * E + 2 * keys * E + 3 * INTERMEDIATE * E), E + 2 * 2 * E
    assert made.weight_bytes == itemsize * matrices + 4 * vectors, "what every op computes with stays float32"


def test_keys_and_values_are_one_memory(tiny_model):
    cache = runner(tiny_model, num_blocks=4).pool.layers[0]
    assert cache.keys.shape == (5, 2, KV_HEADS, 16, HIDDEN // HEADS), "four blocks and the scratch block"
    cache.keys.assign(cache.keys.full_like(3.0)).realize()
    assert (cache.values.numpy() == 3.0).all()


def test_dummy_weights_need_only_the_description(tiny_model, tmp_path):
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    made = runner(tmp_path, load_format="dummy", num_blocks=4)
    assert made.model.blk[0].weights.qkv.weight.dense().numpy().std() > 0


def steps(made, entries):
    """Logits float32 [rows, V] of one step, and the ids of the sequences that its rows belong to."""
    from tinyvllm.bridge import download
    from tinyvllm.scheduler import Schedule

    step = made.prepare(Schedule(entries))
    logits = download(made.launch(step).logits)
    assert len(logits) == step.num_logits >= len(step.logit_rows)
    return logits[: len(step.logit_rows)], [entry.sequence.sequence_id for entry in step.logit_rows]


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_rows_of_several_tokens_are_those_of_one_at_a_time(tiny_model, drafts):
    """The last known token and k drafts in one step, next to a decode and a prompt: the bits of k + 1 steps of one token."""
    from tinyvllm.request import SamplingParams, Sequence
    from tinyvllm.scheduler import Scheduled

    made = runner(tiny_model, num_blocks=16)
    tokens = np.random.default_rng(0).integers(1, 200, (3, 40)).tolist()
    sequences = [Sequence(i, str(i), ids, SamplingParams(), block_table=list(range(4 * i, 4 * i + 4))) for i, ids in enumerate(tokens)]
    start = 19
    for sequence in sequences[:2]:
        steps(made, [Scheduled(sequence, 0, start, 0)])
    alone = np.concatenate([steps(made, [Scheduled(sequences[0], start + i, 1, 1)])[0] for i in range(drafts + 1)])
    together = [
        Scheduled(sequences[1], start, 1, 1),
        Scheduled(sequences[0], start, drafts + 1, drafts + 1),
        Scheduled(sequences[2], 0, 21, 1),
    ]
    logits, ids = steps(made, together)
    assert ids == [1, *[0] * (drafts + 1), 2], "row by row: the decode, the drafts in order of position, the end of the prompt"
    np.testing.assert_array_equal(logits[1:-1], alone)
    np.testing.assert_array_equal(logits[:1], steps(made, [Scheduled(sequences[1], start, 1, 1)])[0])
    np.testing.assert_array_equal(logits[-1:], steps(made, [Scheduled(sequences[2], 0, 21, 1)])[0])


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

    monkeypatch.setenv("TINYVLLM_KERNELS", "all=ref")
    registry.forget_choices()
    made = runner(tiny_model, num_blocks=4)
    registry.forget_choices()
    assert all(cache.keys.uop.has_buffer_identity() for cache in made.pool.layers)


def test_inputs_of_a_new_shape_need_no_compiler(tiny_model, monkeypatch):
    """A fill by tinygrad is a kernel for each size, a tenth of a second each in a fresh process."""
    from tinygrad.runtime.support.compiler_cpu import ClangJITCompiler

    from tinyvllm.runner.prepare import Shape
    from tinyvllm.sampling.sampler import Sampler

    def refuse(compiler, source):
        raise AssertionError(source)

    made, sampler = runner(tiny_model, num_blocks=4), Sampler(264, 45, "CPU")
    monkeypatch.setattr("tinygrad.helpers.CACHELEVEL", 0)
    monkeypatch.setattr(ClangJITCompiler, "compile", refuse)
    made.padded(Shape(43, 1, 48, 48))
    sampler.prepare([], 43)
    made.pool._capture_copy(37)
