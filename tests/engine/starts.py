"""Two starts of an engine with one cache folder: what the second one computes again."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from tinyvllm import LLM, SamplingParams

PARAMS = [SamplingParams(temperature=t, seed=4, max_tokens=5, ignore_eos=True) for t in (0.0, 0.8)]


def use_own_steps(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep steps in `folder`, and what is compiled in the folder of all tests: every start would compile."""
    from tinyvllm.config.switches import cache_folder

    for room in ("kernels", "tinygrad"):
        (shared := cache_folder() / room).mkdir(parents=True, exist_ok=True)
        (folder / room).symlink_to(shared)
    monkeypatch.setenv("TINYVLLM_CACHE", str(folder))
    monkeypatch.setenv("TINYVLLM_KEEP_STEPS", "1")


class Start:
    """One start: the tokens of a greedy and of a sampled request, and how often things that cost time were done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any, device: str, params: list[SamplingParams] = PARAMS, **options: Any):
        from tinygrad import tensor

        from tinyvllm.bridge import capture_work
        from tinyvllm.models.llama import Llama

        self.model_calls = self.schedules = 0
        states, create = Llama.states, tensor.create_linear_with_vars

        def count_states(*arguments: Any, **constants: Any) -> Any:
            self.model_calls += 1
            return states(*arguments, **constants)

        def count_schedule(sink: Any) -> Any:
            self.schedules += 1
            return create(sink)

        before = capture_work()
        with monkeypatch.context() as patch:
            patch.setattr(Llama, "states", count_states)
            patch.setattr(tensor, "create_linear_with_vars", count_schedule)
            with LLM(model, device=device, **options) as llm:
                self.schedules = 0  # a GPU's weights and cache are placed by tinygrad
                prompt = {"prompt_token_ids": [1, 7, 8, 9, 10]}
                self.tokens = [llm.generate([prompt], [each])[0].outputs[0].token_ids for each in params]
                self.choices = {choice.stem for choice in llm.engine.runner.choices()}
        gc.collect()  # an emulated device may be gone before the engine is
        after = capture_work()
        self.captures, self.loaded = after.count - before.count, after.loaded - before.loaded


def check_second_start(monkeypatch: pytest.MonkeyPatch, folder: Path, model: Any, device: str, **options: Any) -> Start:
    """The second start runs neither the model nor tinygrad's scheduler, and gets the same tokens; the first start."""
    from tinyvllm.backends import registry

    use_own_steps(monkeypatch, folder)
    registry.forget_choices()
    first = Start(monkeypatch, model, device, **options)
    assert first.captures > first.loaded and first.model_calls
    registry.forget_choices()
    second = Start(monkeypatch, model, device, **options)
    assert second.tokens == first.tokens
    assert (second.captures, second.loaded) == (0, first.captures + first.loaded)
    assert (second.model_calls, second.schedules) == (0, 0)
    assert first.choices - second.choices <= {"kv_copy"}, "`kernels` lists them; blocks were not copied"
    return first
