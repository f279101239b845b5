"""tinygrad with a compiler, as the engine would have it."""

import pytest

from tinyvllm.config import cache_folder
from tinyvllm.runner.device import start_device


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    return start_device("CPU", cache_folder())
