"""What each format costs on the bundled model: `tinyvllm quality` with its defaults, recorded for docs/quality.md.

    python -m benchmarks.quality [--decode]

Divergence and perplexity do not depend on what else the machine does; tokens a second do, so they are measured with `--decode` only, on a
machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import record

_MAIN = Path(__file__).parents[1] / "main.py"


def main() -> None:
    parser = argparse.ArgumentParser(description="quality of every format on the bundled model")
    parser.add_argument("--decode", action="store_true", help="measure the speed of decoding, too")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        lines = Path(folder) / "rows.jsonl"
        decode = "--decode" if options.decode else "--no-decode"
        subprocess.run([sys.executable, str(_MAIN), "quality", decode, "--output", str(lines)], check=True)
        record("quality", {"rows": [json.loads(line) for line in lines.read_text().splitlines()]})


if __name__ == "__main__":
    main()
