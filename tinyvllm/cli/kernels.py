"""`tinyvllm kernels`: the kernel variant that runs each op of a model here, and the reason."""

from __future__ import annotations

import argparse

from tinyvllm.cli.options import engine_options

HEADINGS = ("op", "shape", "kernel", "why")


def run(options: argparse.Namespace) -> int:
    from tinyvllm.engine.llm import LLM
    from tinyvllm.engine.tools.one_off import kernel_choices

    with LLM(**engine_options(options), skip_tokenizer_init=True) as llm:
        engine = llm.engine
        for line in table(kernel_choices(engine)):
            print(line)
        if not options.quiet:
            print(engine.runner.self_test)
            num_threads = engine.runner.num_threads()
            print(f"device {engine.config.device}, {num_threads} threads; TINYVLLM_KERNELS=OP=VARIANT,... overrides the choice")
    return 0


def table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    """Lines of left-aligned columns under their headings."""
    widths = [max(len(row[i]) for row in [HEADINGS, *rows]) for i in range(len(HEADINGS) - 1)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]) for row in [HEADINGS, *rows]]
