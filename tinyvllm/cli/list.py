"""`tinyvllm list`: the models in the local cache of the hub, as `--model` takes them."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from tinyvllm.cli.progress import say


def run(options: argparse.Namespace) -> int:
    from tinyvllm.weights.hub_files import held_models

    held = held_models()
    if options.json:
        sys.stdout.write(json.dumps([asdict(one) for one in held], indent=1) + "\n")
        return 0
    if not held and not options.quiet:
        say("the local cache of the hub has no models; tinyvllm pull ORG/NAME fetches one")
    width = max((len(model) for one in held for model in one.models), default=0)
    for one in held:
        for i, model in enumerate(one.models):
            sys.stdout.write(f"{model.ljust(width)}  {f'{one.nbytes / 1e9:8.2f} GB' if i == 0 else ''}".rstrip() + "\n")
    return 0
