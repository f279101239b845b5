"""Every kernel waits for the one before it, and before that it reads nothing but weights: what the emulator, which runs kernels one after
the other, cannot see in results.

That a kernel neither writes nor returns earlier is checked by the emulator whenever it runs one (tests/emulator/test_faults.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "kernels/cuda"
SOURCES = sorted(KERNELS.glob("*.cu"))
WAIT = "await_previous();"
CONSTANT = {"weight", "norm"}  # parameters that no kernel of a step writes


def entries(text: str) -> list[tuple[str, str]]:
    """(parameters, the text before the wait) of each entry; where a branch waits by itself, it is left out."""
    found = []
    for start in (match.end() for match in re.finditer(r'extern "C" __global__', text)):
        body = text.index(" {\n", start)
        end = re.search(r"^}", text[body:], re.MULTILINE)
        assert end is not None
        whole = text[body : body + end.start()]
        if whole.count(WAIT) > 1:
            whole = re.sub(rf"{re.escape(WAIT)}.*?return;", "", whole, count=1, flags=re.DOTALL)
        found.append((text[start:body], whole[: whole.index(WAIT)] if WAIT in whole else ""))
    return found


def read_early(text: str) -> set[str]:
    """Parameters of a kernel's entries that are used before the wait, and may be written by another kernel."""
    used = set()
    for parameters, before in entries(text):
        assert before, f"no {WAIT}"
        # what is no use: comments, conditions, the rest of a signature, parameters that this variant does not have
        before = re.sub(r"^#.*|//.*|^ {8,}.*\{$|^.*= nullptr;$", "", before, flags=re.MULTILINE)
        names = set(re.findall(r"(\w+)(?=\s*(?:,|\)|$))", parameters)) - CONSTANT
        used |= {name for name in names if name.islower() and re.search(rf"(?<!\.)\b{name}\b", before)}
    return used


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_nothing_but_weights_is_read_before_the_wait(path: Path) -> None:
    assert not read_early(path.read_text())


def test_a_read_before_the_wait_is_found() -> None:
    text = (KERNELS / "matvec.cu").read_text()
    early = text.replace("  load_first(ring, walk, weight);\n", "  load_first(ring, walk, weight);\n  const int n = rows[0];\n")
    assert read_early(early) == {"rows"}
