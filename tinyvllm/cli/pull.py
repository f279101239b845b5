"""`tinyvllm pull`: a model from the hub into the local cache, the one that fits this machine where a repository has several."""

from __future__ import annotations

import argparse
import sys

from tinyvllm.cli.progress import say
from tinyvllm.config import parse_size
from tinyvllm.host_memory import headroom

RESERVE = 0.1  # of the memory, for the KV cache and the results of steps


def run(options: argparse.Namespace) -> int:
    from tinyvllm.weights.hub_files import fetch, plan_pull

    memory = headroom()
    room = memory.bytes - memory.run_bytes if options.memory is None else parse_size("--memory", options.memory)
    pull = plan_pull(options.name, options.revision, int(room * (1 - RESERVE)))
    if not options.quiet:
        say(f"{pull.name}: {len(pull.files)} files, {pull.nbytes / 1e9:.2f} GB, commit {pull.commit[:12]}")
    path = fetch(pull)
    if not options.quiet:
        say(f"run it with: tinyvllm --model {pull.name}")
    sys.stdout.write(f"{path}\n")
    return 0
