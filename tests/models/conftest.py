"""Families are compared with recorded answers by programs that tinygrad did not optimize."""

from collections.abc import Iterator

import pytest
from tinygrad.helpers import Context


@pytest.fixture(autouse=True)
def programs_as_written(request: pytest.FixtureRequest) -> Iterator[None]:
    """tinygrad's optimizer was half of the time of a family: each has dozens of programs of its own. Formulas, names and keys do not
    depend on it; the long tests of the other families, and those of ops and of the engine, run what it makes.
    """
    with Context(NOOPT=int(request.node.get_closest_marker("long") is None)):
        yield
