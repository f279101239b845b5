"""A few examples of every operation of the OpenAPI document, the same every time: no 500, and errors in the API's shape.

`python -m tests.server.soak_schema` tries as many as there is time for.
"""

from __future__ import annotations

import pytest

pytest.importorskip("schemathesis")

from tests.server.conftest import Running
from tests.server.soak_schema import examine


@pytest.mark.long
def test_no_operation_fails(server: Running) -> None:
    seen, wrong = examine(server.url, examples=8, random=False)
    assert not wrong, "\n".join(wrong[:5])
    tried = {what.rpartition(" ")[0] for what in seen if what[-3:].isdecimal()}
    assert {"POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses", "POST /v1/messages", "GET /v1/models"} <= tried
    assert any(what.startswith("POST") and what.endswith("200") for what in seen)
