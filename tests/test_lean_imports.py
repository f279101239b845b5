"""tinyvllm/lean_imports.py: modules that stand in for others, and numpy without what a start never uses."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

from tinyvllm.lean_imports import LaterModule, standing_in


def test_a_stand_in_is_found_within_the_block_alone() -> None:
    stub, known = ModuleType("no_such_module"), ModuleType("json")
    with standing_in({"no_such_module": stub, "json": known}):
        import json

        import no_such_module  # type: ignore[import-not-found]

        assert no_such_module is stub and json is not known  # what is imported already stays
    assert "no_such_module" not in sys.modules


def test_it_is_gone_after_an_error() -> None:
    with pytest.raises(ValueError), standing_in({"no_such_module": ModuleType("no_such_module")}):
        raise ValueError
    assert "no_such_module" not in sys.modules


def test_a_later_module_is_imported_when_it_is_used() -> None:
    later = LaterModule("colorsys")
    sys.modules.pop("colorsys", None)
    assert later.rgb_to_hsv(1, 0, 0) == (0.0, 1.0, 1.0) and "colorsys" in sys.modules
    with pytest.raises(AttributeError, match="no_such_name"):
        later.no_such_name  # noqa: B018
    sys.modules.pop("colorsys")
    with standing_in({"colorsys": LaterModule("colorsys")}):
        from colorsys import hsv_to_rgb

        assert hsv_to_rgb(0, 1, 1) == (1.0, 0.0, 0.0)
    assert not isinstance(sys.modules["colorsys"], LaterModule)


NUMPY = """
import os, sys, threading
from tinyvllm.lean_imports import import_numpy
import_numpy()
import numpy as np
assert "numpy._typing" not in sys.modules and os.environ.get("OPENBLAS_NUM_THREADS") == GIVEN
print(len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1)
import numpy.typing as npt
assert npt.NDArray[np.float32] != npt.NDArray[np.int8]
assert sys.modules["numpy._typing"].__file__
assert np.allclose(np.linalg.eigh(np.eye(3)).eigenvalues, 1) and np.einsum("ij,jk->ik", np.eye(2), np.eye(2)).sum() == 2
"""


@pytest.mark.parametrize("given", [None, "2"])
def test_numpy_is_whole_but_for_its_texts_and_threads(given: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    environment |= {} if given is None else {"OPENBLAS_NUM_THREADS": given}
    done = subprocess.run([sys.executable, "-c", NUMPY.replace("GIVEN", repr(given))], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= (1 if given is None else 2)
