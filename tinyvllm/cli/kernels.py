"""`tinyvllm kernels`: the kernel variant that runs each op of a model here, and the reason."""

from __future__ import annotations

import argparse

from tinyvllm.cli.options import engine_options
from tinyvllm.cli.tables import table

HEADINGS = ("op", "shape", "kernel", "why")


def run(options: argparse.Namespace) -> int:
    from tinyvllm.engine.llm import LLM
    from tinyvllm.engine.tools.one_off import kernel_choices

    with LLM(**engine_options(options), skip_tokenizer_init=True) as llm:
        engine = llm.engine
        for line in table(HEADINGS, kernel_choices(engine)):
            print(line)
        if not options.quiet:
            print(engine.runner.self_test)
            machine = [f"device {engine.config.device_names}, {engine.runner.threads_in_words()}", *engine.runner.skipped_variants()]
            print("; ".join([*machine, "TINYVLLM_KERNELS=OP=VARIANT,... overrides the choice"]))
    return 0
