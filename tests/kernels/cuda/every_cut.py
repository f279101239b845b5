"""Compiles every cut of large products for every packed format and both architectures, and lists those that spill registers.

    python -m tests.kernels.cuda.every_cut [--formats INT4_G64,INT2_G32] [--archs sm_80,sm_90] [--splits 1,4] [--processes N]

The long tests of test_builds.py take the formats of tests/formats.py; this takes all of them, some thousand kernels of 1 to 10 seconds.
Prints a line a format, and one for each kernel that spills; exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.kernels.cuda.samples import GPUS
from tinyvllm.backends.cuda import nvrtc
from tinyvllm.backends.cuda import plan as records
from tinyvllm.backends.shapes import Product
from tinyvllm.quant.formats import Layout, packed_in

SPLITS = (1, 4)
Way = tuple[str, str, int]  # format, architecture, blocks of threads that share the columns


def cuts_of(format: str, arch: str, split: int) -> list[records.Cut]:
    """The cuts that the planner may choose."""
    fit = [cut for cut in records.CUTS if records.stages_of(cut, format, GPUS[arch]) >= 2]
    return [cut for cut in fit if records.has_registers(cut, split, format)]


def fault(cut: records.Cut, format: str, arch: str, split: int) -> str | None:
    """What is wrong with a product of 256 rows in this cut, by the assembler's report; None for nothing."""
    kernel = records.matmul("sm_80", Product(format, 256, 2048, 2048, residual=True), GPUS[arch], chosen=(cut, split))[0]
    said = nvrtc.report(kernel, arch)
    if said.spilled or said.stack:
        return f"{said.spilled} bytes spilled, a stack of {said.stack}, {said.registers} registers"
    if said.shared + kernel.shared > GPUS[arch].shared:
        return f"{said.shared + kernel.shared} bytes of shared memory of {GPUS[arch].shared}"
    return None


def _faults(way: Way) -> tuple[Way, int, list[str]]:
    found = [(cut, fault(cut, *way)) for cut in cuts_of(*way)]
    return way, len(found), [f"{cut}: {what}" for cut, what in found if what is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description="every cut of large products, compiled")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(packed_in(Layout.TILES)))
    parser.add_argument("--archs", type=lambda text: text.split(","), default=list(GPUS))
    parser.add_argument("--splits", type=lambda text: [int(word) for word in text.split(",")], default=list(SPLITS))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    ways = [(format, arch, split) for arch in options.archs for split in options.splits for format in options.formats]
    broken = 0
    with ProcessPoolExecutor(options.processes) as pool:
        for (format, arch, split), count, faults in pool.map(_faults, ways):
            print(f"{format} {arch} split {split}: {count} cuts, {len(faults)} with faults", *faults, sep="\n  ", flush=True)
            broken += len(faults)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
