"""Compile every Metal kernel by Apple's compiler: `python -m tests.metal.compile_all`. Needs macOS with Xcode's command line tools.

Every sample of tests/kernels/metal is written to a file and compiled by `xcrun metal`. The exit status is 1 if one does not compile.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kernels.metal.samples import samples
from tinyvllm.backends.source import kernel_text

COMPILER = "xcrun -sdk macosx metal -std=metal3.0 -fno-fast-math -c"


def failures(compiler: list[str]) -> dict[str, str]:
    """By sample: what the compiler said about it. `compiler` gets the options -o OBJECT SOURCE."""
    failed = {}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.metal", Path(folder) / "kernel.air"
        for name, kernel in samples().items():
            source.write_text(kernel_text(kernel))
            done = subprocess.run([*compiler, "-o", str(target), str(source)], capture_output=True, text=True, timeout=120)
            if done.returncode != 0:
                failed[name] = done.stderr.strip() or f"status {done.returncode}"
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--compiler", default=COMPILER, help=f"command before -o OBJECT SOURCE (default: {COMPILER})")
    failed = failures(shlex.split(parser.parse_args().compiler))
    for name, message in failed.items():
        print(f"{name}: {message}", file=sys.stderr)
    print(f"{len(samples()) - len(failed)} of {len(samples())} kernels compile")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
