"""The process of a rank above 0 on an emulated GPU of its own, in place of tinyvllm.runner.rank: see `on_gpus`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.emulator.driver import Driver, cuda_device

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def on_gpus(count: int, **options: object) -> Iterator[Driver]:
    """An emulated GPU here, and one in each rank that engines start within: `count` in all."""
    from tinyvllm.distributed import ranks

    before, path = ranks.PROGRAM, os.environ.get("PYTHONPATH")
    ranks.PROGRAM = "tests.emulator.rank"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([path] if path else [])])
    try:
        with cuda_device(gpus=count, **options) as driver:
            yield driver
    finally:
        ranks.PROGRAM = before
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path


if __name__ == "__main__":
    from tinyvllm.runner.rank import main

    with cuda_device(eager=True, races=False):
        main(int(sys.argv[1]), int(sys.argv[2]))
