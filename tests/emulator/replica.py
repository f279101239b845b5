"""The process of a replica above 0 on emulated GPUs of its own, in place of tinyvllm.engine.replica_process: see rank.py."""

from __future__ import annotations

import os
import sys

from tests.emulator.rank import on_gpus

if __name__ == "__main__":
    from tinyvllm.engine.replica_process import main

    with on_gpus(len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")), eager=True, races=False):
        sys.exit(main(int(sys.argv[1])))
