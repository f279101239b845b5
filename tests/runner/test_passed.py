"""In which order the ranks of the last stage take what the stage before passes on."""

from __future__ import annotations

from typing import Any

from tinyvllm.runner.passed import PassedMessages


def test_one_aside_leaves_what_is_before_it_as_it_is() -> None:
    """An adapter of the same number is no step."""
    step, done = [{"do": "step", "number": number} for number in range(4)], list[Any]()
    others = [{"do": "copy", "pairs": [[1, 2]]}, {"do": "adapter", "number": 2}]
    arriving = iter([step[0], *others, step[1], step[2], step[3]])
    passed = PassedMessages(lambda: next(arriving), done.append)
    assert passed.take(2, aside=True) == step[2] and not done
    assert passed.take(0, aside=False) == step[0] and not done
    assert passed.take(1, aside=False) == step[1] and done == others
    assert passed.take(3, aside=False) == step[3]
