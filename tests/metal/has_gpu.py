"""Exit status 0 if tinygrad's METAL device can be opened here, else 1: `python -m tests.metal.has_gpu`."""

from __future__ import annotations

import sys


def main() -> int:
    from tinyvllm.config.switches import cache_folder
    from tinyvllm.errors import TinyvllmError
    from tinyvllm.runner.device import start_device

    try:
        start_device("METAL", cache_folder())
    except (TinyvllmError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
