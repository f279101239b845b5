"""Kernels that are compiled ahead and tested before what launches them runs: those of an engine's steps, and those that pack weights.

What a first start has compiled or found out, later ones find in the cache folder.
"""

from __future__ import annotations

from tinyvllm.backends.limits import ShapeFacts
from tinyvllm.backends.registry import Need
from tinyvllm.backends.selftest import Report, test_before_first_run, test_kernels
from tinyvllm.bridge import KeptSteps, captures_steps
from tinyvllm.config.engine import EngineConfig
from tinyvllm.placement import Placement
from tinyvllm.quant.formats import Layout, formats_in
from tinyvllm.quant.layouts import BLOCK
from tinyvllm.quant.random_rows import packable_width
from tinyvllm.runner.ahead import StepOutlines
from tinyvllm.runner.kept import ended_before, keep_needs, kept_needs
from tinyvllm.runner.weight_plan import WeightPlan
from tinyvllm.sampling.parameters import SamplingFlags


class StepKernels:
    """The kernels of an engine's steps.

    On the CPU each step's kernels are tested before it runs for the first time: compiling those of the tests takes as long as those of
    the model. There a first start only notes that it was one, once all that it compiles ahead is used soon.
    """

    def __init__(self, placement: Placement, kept: KeptSteps | None):
        """`kept` are the steps that were captured by earlier starts."""
        self._placement, self._kept, self._compiles_ahead = placement, kept, False

    def test(self, outlines: StepOutlines, config: EngineConfig, draw: SamplingFlags) -> Report:
        """Compile what steps will launch, with a draw of these filters, and test it. The report of the CPU grows with the steps."""
        placement, needs = self._placement, kept_needs(self._kept, self._placement)
        if placement.is_cpu and captures_steps():
            report = test_before_first_run(placement)
            if needs is None:
                outlines.compile_ahead(config, draw)
            self._compiles_ahead = needs is None
            return report
        if needs is None and (placement.is_cpu or placement.is_cuda):
            outlines.compile_ahead(config, draw)
        collected: list[list[Need]] = [] if needs is None else [needs]

        def next_needs() -> list[Need]:
            return collected.pop() if collected else outlines.kernel_needs()

        report = test_kernels(placement, next_needs)
        if needs is None:
            keep_needs(self._kept, outlines.kernel_needs())
        return report

    def close(self) -> None:
        """A start that decodes nothing cuts its compilers off: the next one compiles ahead again, but not all that follow. A kernel that
        takes longer than such a process would never be done.
        """
        if self._compiles_ahead and ended_before(self._kept):
            self.note_first_start()

    def note_first_start(self) -> None:
        """Later starts need not compile ahead."""
        if self._compiles_ahead:
            self._compiles_ahead = False
            keep_needs(self._kept, ())


def test_packing(plan: WeightPlan, formats: set[str]) -> Report:
    """The self-test of the kernels that pack weights of these formats, before they do."""
    if plan.layout is not Layout.TILES:
        return Report()
    packed = sorted(formats & {*formats_in(Layout.TILES)})
    facts = [ShapeFacts(plan.placement, inputs=packable_width(format, BLOCK), format=format) for format in packed]
    return test_kernels(plan.placement, lambda: [("pack_tiles", each) for each in facts])
