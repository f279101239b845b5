"""The command line without an installation: passes its arguments to tinyvllm.cli."""

import sys

from tinyvllm.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
