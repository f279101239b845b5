"""The process of a rank above 0 on an emulated GPU of its own, in place of tinyvllm.runner.rank: see `on_gpus`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.emulator.driver import Driver, cuda_device

ROOT = Path(__file__).parents[2]
PEERS = "RANKS_OF_TESTS_REACH"  # in the environment of ranks: `peers` of their drivers


@contextlib.contextmanager
def on_gpus(count: int, **options: object) -> Iterator[Driver]:
    """An emulated GPU here, and one in each rank and replica that engines start within: `count` in all."""
    from tinyvllm.distributed import ranks
    from tinyvllm.engine import replica

    before, path = (ranks.PROGRAM, replica.PROGRAM), os.environ.get("PYTHONPATH")
    ranks.PROGRAM, replica.PROGRAM = "tests.emulator.rank", "tests.emulator.replica"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([path] if path else [])])
    try:
        with cuda_device(gpus=count, **options) as driver:
            yield driver
    finally:
        ranks.PROGRAM, replica.PROGRAM = before
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path


if __name__ == "__main__":
    from tinyvllm.runner.rank import main

    with cuda_device(eager=True, races=False, peers=os.environ.get(PEERS, "reached")):
        main(int(sys.argv[1]), int(sys.argv[2]))
