"""The runner on a real tiny checkpoint: the bits of a step, and what a new shape needs."""

import numpy as np
import pytest

from tinyvllm.config.engine import EngineConfig


def runner(model, **options):
    from tinyvllm.runner.runner import Runner

    return Runner(EngineConfig(model=str(model), **options), "CPU")


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
