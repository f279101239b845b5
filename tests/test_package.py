"""What `import tinyvllm` gives, and what it does not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_importing_the_package_is_light() -> None:
    """`import tinyvllm` and the names that need no model load neither tinygrad nor numpy nor a tokenizer."""
    code = "import sys, tinyvllm, tinyvllm.config.engine; tinyvllm.SamplingParams(); tinyvllm.RequestError; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert not {"tinygrad", "numpy", "tokenizers", "jinja2", "tqdm"} & set(done.stdout.split())


def test_the_public_names_are_there() -> None:
    import tinyvllm
    from tinyvllm.request import SamplingParams

    assert tinyvllm.SamplingParams is SamplingParams
    assert dir(tinyvllm) == sorted(tinyvllm.__all__) and set(tinyvllm.__all__) == set(tinyvllm._MODULES)
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        tinyvllm.LLMM  # noqa: B018
