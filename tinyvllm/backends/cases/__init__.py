"""Small fixed calls of every op, for the self-test (selftest.py): inputs, the launch on a backend, and what came out, as numpy arrays.

Inputs are made by integer arithmetic, so they have the same bits on every machine and need no library of random numbers. Where a product
rounds its activations, inputs are chosen so that nothing is rounded: numbers are k / 64, each block of 32 contains 127 / 64, and the mean
square of a row plus EPS is 1. So every format has an exact answer, and tolerances are those of float32.

The answers are recorded in answers.npz: `python -m tests.kernels.answers` writes it from float64 arithmetic. Row t of an input repeats row
t modulo PERIOD, so that few and many rows, which GPUs compute with other kernels, have the same answers.
"""

from __future__ import annotations

from tinyvllm.backends.cases.case import Case, case_of
from tinyvllm.backends.cases.run import CASES, run, wrong
from tinyvllm.backends.cases.site import Site

__all__ = ["CASES", "Case", "Site", "case_of", "run", "wrong"]
