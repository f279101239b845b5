"""tinygrad with a compiler, as the engine starts it; the conftest of each folder that runs ops imports the fixture."""

import pytest

from tinyvllm.config.switches import cache_folder
from tinyvllm.runner.device import start_device


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    return start_device("CPU", cache_folder())
