"""`tinyvllm pull`: a model from the hub into the local cache, by the arithmetic of `plan` the one that fits this machine."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from tinyvllm.cli.options import engine_options
from tinyvllm.cli.plan import size_of
from tinyvllm.cli.progress import say
from tinyvllm.config.engine import resolve
from tinyvllm.config.values import parse_size

if TYPE_CHECKING:
    from tinyvllm.engine.tools.hub_choice import Choice

_SHOWN = 6  # models that a line names


def run(options: argparse.Namespace) -> int:
    revision = getattr(options, "revision", None)
    given = {name: value for name, value in engine_options(options).items() if name != "revision"}
    config = replace(resolve(**given), model=options.name, revision=revision)
    memory = None if options.memory is None else parse_size("--memory", options.memory)
    from tinyvllm.engine.frontend import plan_download
    from tinyvllm.weights.hub_files import fetch

    choice = plan_download(config, memory)
    if not options.quiet:
        for line in lines_of(choice):
            say(line)
    path = fetch(choice.pull)
    if not options.quiet:
        how = "" if choice.quantization is None else f" --quantization {choice.quantization}"
        say(f"run it with: tinyvllm --model {choice.pull.name}{how}")
    sys.stdout.write(f"{path}\n")
    return 0


def lines_of(choice: Choice) -> list[str]:
    """What is fetched, why, and what else there is."""
    pull = choice.pull
    lines = [f"{pull.name}: {len(pull.files)} files, {pull.nbytes / 1e9:.2f} GB, commit {pull.commit[:12]}"]
    if choice.warning is not None:
        lines.append(f"warning: it may not run here: it {choice.warning}")
    elif choice.sizes is not None:
        first = "what fits with the most bytes" if choice.quantization is None else f"it fits with --quantization {choice.quantization}"
        lines.append(f"{first}; {choice.sizes}")
    lines += [f"not {one.pull.name} ({size_of(one.pull.nbytes)}): it {one.why}" for one in choice.rejected[:_SHOWN]]
    if len(choice.rejected) > _SHOWN:
        lines.append(f"nor {len(choice.rejected) - _SHOWN} more")
    if choice.smaller:
        names = ", ".join(f"{one.name.partition(':')[2]} ({size_of(one.nbytes)})" for one in choice.smaller[:_SHOWN])
        more = f" and {len(choice.smaller) - _SHOWN} more" if len(choice.smaller) > _SHOWN else ""
        lines.append(f"smaller ones fit, too: {names}{more}")
    return lines
