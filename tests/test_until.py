"""The end that .ci/run gives the long tests."""

import time

import pytest

from tests.conftest import pytest_runtest_setup


def test_a_test_that_would_begin_too_late_is_skipped(monkeypatch, request):
    monkeypatch.setenv("TESTS_UNTIL", str(time.time() + 60))
    pytest_runtest_setup(request.node)
    monkeypatch.setenv("TESTS_UNTIL", str(time.time() - 1))
    with pytest.raises(pytest.skip.Exception, match="the time for these tests is over"):
        pytest_runtest_setup(request.node)
