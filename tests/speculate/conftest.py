"""Tests of drafters with a model run on a started CPU device."""

import pytest

from tests.started import device

__all__ = ["device"]


@pytest.fixture(scope="session")
def draft_folder():
    """The bundled draft model."""
    from pathlib import Path

    import tinyvllm.demo

    return Path(tinyvllm.demo.__file__).parent / "draft"
