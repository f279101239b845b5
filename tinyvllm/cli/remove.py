"""`tinyvllm remove`: deletes a repository from the local cache of the hub."""

from __future__ import annotations

import argparse

from tinyvllm.cli.progress import say


def run(options: argparse.Namespace) -> int:
    from tinyvllm.weights.hub_files import remove

    freed = remove(options.name)
    if not options.quiet:
        say(f"{options.name}: {freed / 1e9:.2f} GB freed")
    return 0
