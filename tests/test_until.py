"""The end that .ci/run gives the long tests."""

import time
from pathlib import Path

import pytest

from tests import conftest
from tests.conftest import pytest_runtest_setup


def test_files_with_few_long_tests_go_first(monkeypatch):
    """In their order where there is no end."""

    class Item:
        def __init__(self, name: str, long: bool):
            self.path, self.nodeid, self._long = Path(conftest.__file__).parent / name, f"tests/{name}::test_it", long

        def get_closest_marker(self, name: str) -> bool:
            return name == "long" and self._long

    many, few, none = "lab/test_a.py", "lab/test_b.py", "lab/test_c.py"
    items = [Item(name, long) for name, long in ((many, True), (many, True), (few, True), (few, False), (none, False))]
    monkeypatch.setattr(conftest, "divide", lambda items: None)
    monkeypatch.delenv("TESTS_UNTIL", raising=False)
    conftest.pytest_collection_modifyitems(given := [*items])
    assert given == items
    monkeypatch.setenv("TESTS_UNTIL", "0")
    conftest.pytest_collection_modifyitems(given)
    assert given == [items[4], items[2], items[3], items[0], items[1]]


def test_a_test_that_would_begin_too_late_is_skipped(monkeypatch, request):
    monkeypatch.setenv("TESTS_UNTIL", str(time.time() + 60))
    pytest_runtest_setup(request.node)
    monkeypatch.setenv("TESTS_UNTIL", str(time.time() - 1))
    with pytest.raises(pytest.skip.Exception, match="the time for these tests is over"):
        pytest_runtest_setup(request.node)
