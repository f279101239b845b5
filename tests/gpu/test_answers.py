"""The recorded answers are the CPU's, and are used where there is no C compiler."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu import answers
from tests.gpu.test_tokens import CLOSE
from tinyvllm import LLM
from tinyvllm.backends.cpu.toolchain import has_compiler
from tinyvllm.config.engine import DEFAULT_MODEL

needs_cpu = pytest.mark.skipif(not has_compiler(), reason="no C compiler for the CPU's kernels")


@needs_cpu
def test_the_recorded_answers_are_the_cpus():
    """A change of the bundled model is recorded by `python -m tests.gpu.answers`. Another processor's last bits may differ."""
    recorded = answers.RecordedAnswers()
    with LLM(DEFAULT_MODEL, device="CPU", dtype="bfloat16") as llm:
        computed = answers.ComputedAnswers(llm, answers.PROMPTS, answers.TOKENS)
        for i in range(len(answers.PROMPTS)):
            got, expected = computed.tokens(i), recorded.tokens(i)
            same = next((place for place, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), None)
            assert same is None or recorded.margin(i, same) < CLOSE
            columns, logits, deviation = recorded.logits(i)
            np.testing.assert_allclose(computed.logits(i)[1][:, columns], logits, atol=0.05 * deviation)
        assert computed.margin(0, 5) == pytest.approx(recorded.margin(0, 5), abs=0.05)


@needs_cpu
@pytest.mark.parametrize("kind", answers.FLAGS)
def test_the_recorded_draws_are_the_cpus(kind, monkeypatch):
    computed = answers.cpu_draws(answers.VOCABULARY, 3, kind)
    monkeypatch.setattr(answers, "has_compiler", lambda: False)
    np.testing.assert_array_equal(answers.cpu_draws(answers.VOCABULARY, 3, kind), computed)
    with pytest.raises(pytest.skip.Exception, match="nothing is recorded for 2 rows of 77 logits"):
        answers.cpu_draws(77, 2, kind)
