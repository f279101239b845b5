"""Web pages: which may use the server, what its own page may do, and the spellings of paths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running, running
from tinyvllm.errors import ArgumentError
from tinyvllm.server.api.routes import ENDPOINTS, RESOURCES
from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.keys import read_keys
from tinyvllm.server.http.origins import is_loopback
from tinyvllm.server.http.paths import Paths

ASK = {"prompt": "Once", "max_tokens": 1}
RAW = json.dumps(ASK).encode()
FOREIGN = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}


def post(server: Running, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    """A request with these headers alone: without a Content-Type unless it is among them."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(server.url + path, content=RAW, headers=named, timeout=60, trust_env=False)


def get(server: Running, path: str, **headers: str) -> httpx.Response:
    return httpx.get(
        server.url + path, headers={name.replace("_", "-"): value for name, value in headers.items()}, timeout=60, trust_env=False
    )


def code(answer: httpx.Response) -> Any:
    return (answer.status_code, answer.json()["error"]["code"])


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/x-www-form-urlencoded", ""])
def test_pages_of_other_origins_are_refused(server: Running, kind: str) -> None:
    refused = httpx.post(
        server.url + "/v1/completions", content=RAW, headers={**FOREIGN, "Content-Type": kind}, timeout=60, trust_env=False
    )
    assert code(refused) == (403, "forbidden_origin") and "--cors-origin https://evil.example" in refused.text
    assert "access-control-allow-origin" not in refused.headers
    for origin in ("null", "http://localhost.evil.example", "http://127.0.0.1.evil.example", "https://evil.example/localhost", "file://"):
        assert code(post(server, Origin=origin, Content_Type=kind)) == (403, "forbidden_origin")


def test_requests_without_an_origin(server: Running) -> None:
    """Images and scripts of other sites are refused, links to a document are not."""
    cross = {"Sec_Fetch_Site": "cross-site"}
    for path in ("/tokenizer_info", "/status", "/v1/models", "/health"):
        assert code(get(server, path, **cross, Sec_Fetch_Dest="image", Sec_Fetch_Mode="no-cors")) == (403, "forbidden_origin")
    assert get(server, "/", **cross, Sec_Fetch_Dest="document", Sec_Fetch_Mode="navigate").status_code == 200
    assert code(post(server, **cross, Sec_Fetch_Dest="document")) == (403, "forbidden_origin")
    assert get(server, "/", Sec_Fetch_Site="none", Sec_Fetch_Dest="document").status_code == 200


def test_own_and_local_pages_may_use_the_server(server: Running) -> None:
    json_type = {"Content_Type": "application/json"}
    for origin in (server.url, "http://localhost:3000", "https://app.localhost", "http://127.0.0.1:5173", "http://[::1]:8080"):
        answer = post(server, Origin=origin, Sec_Fetch_Site="same-site", **json_type)
        assert answer.status_code == 200 and answer.headers.get("access-control-allow-origin") == origin
    asked = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    preflight = httpx.options(server.url + "/v1/chat/completions", headers=asked, timeout=60, trust_env=False)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == asked["Origin"]
    refused = httpx.options(
        server.url + "/v1/chat/completions", headers={**asked, "Origin": "https://evil.example"}, timeout=60, trust_env=False
    )
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_forms_count_as_json_except_from_browsers(server: Running, kind: str | None) -> None:
    """`curl -d` sends application/x-www-form-urlencoded; a page of the own origin may not, since other origins could."""
    typed = {} if kind is None else {"Content_Type": kind}
    assert post(server, **typed).status_code == 200
    assert code(post(server, **typed, Origin=server.url)) == (415, "unsupported_media_type")
    assert code(post(server, **typed, Sec_Fetch_Site="same-origin")) == (415, "unsupported_media_type")
    assert post(server, Origin=server.url, Content_Type="application/json; charset=utf-8").status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "app.localhost", "127.0.0.1:80", "[::1]:80", "192.168.1.5", "localhost."])
def test_own_hosts(server: Running, host: str) -> None:
    assert get(server, "/version", Host=host).status_code == post(server, Host=host).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "localhost@evil"]
)
def test_foreign_hosts_on_loopback(server: Running, host: str) -> None:
    for path in ("/", "/status", "/v1/models", "/health", "//status/"):
        assert code(get(server, path, Host=host)) == (403, "forbidden_host")
    refused = post(server, Host=host, Origin=f"http://{host}", Content_Type="application/json")
    assert code(refused) == (403, "forbidden_host") and f"--allowed-host {host.partition(':')[0]}" in refused.text


def test_allowed_hosts_and_keys() -> None:
    config = ServerConfig(port=0, access_log=False, allowed_hosts=("Models.example",), cors_origins=("https://page.example",))
    with running(config) as server:
        assert post(server, Host="models.example:8000").status_code == 200
        assert code(post(server, Host="other.example")) == (403, "forbidden_host")
        typed = {"Content_Type": "application/json"}
        assert post(server, Origin="https://page.example", **typed).status_code == 200
        assert code(post(server, Origin="https://other.example", **typed)) == (403, "forbidden_origin")
    with running(ServerConfig(port=0, access_log=False), keys=read_keys(["sk-1234"])) as server:
        assert get(server, "/v1/models", Host="evil.example").status_code == 401  # a page does not know the key


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.5", "models.example")))


def test_headers_of_the_page(server: Running) -> None:
    for path in ("/", "/page/page.js", "/page/style.css"):
        headers = get(server, path).headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"] and "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"
    assert (
        get(server, "/status").headers["x-content-type-options"] == get(server, "/nothing").headers["x-content-type-options"] == "nosniff"
    )


@pytest.mark.parametrize(
    ("spelling", "path"),
    [
        ("/v1/models", "/v1/models"), ("/models", "/v1/models"), ("//v1//models//", "/v1/models"), ("/v1/v1/models", "/v1/models"),
        ("/chat/completions/", "/v1/chat/completions"), ("/messages/count_tokens", "/v1/messages/count_tokens"), ("/", "/"), ("//", "/"),
        ("/status/", "/status"), ("/tokenize", "/tokenize"), ("/v1/tokenize", "/v1/tokenize"), ("/page/page.js", "/page/page.js"),
        ("/nothing", "/nothing"), ("/modelsx", "/modelsx"), ("/llm/models", "/v1/models"), ("/llm/", "/"), ("/llmx", "/llmx"),
        ("/llm/llm/status", "/llm/status"), ("/models/org/name", "/v1/models/org/name"),
    ],
)  # fmt: skip
def test_spellings_of_paths(spelling: str, path: str) -> None:
    assert Paths([route.path for route in (*ENDPOINTS, *RESOURCES)], "/llm").canonical(spelling) == path


def test_paths_without_v1_and_with_slashes(server: Running) -> None:
    for path in ("/completions", "/v1/completions/", "//v1//completions", "/v1/v1/completions"):
        assert post(server, path).status_code == 200
    assert post(server, "/chat/completions").json()["error"]["param"] == "prompt"
    assert post(server, "/messages").json()["type"] == "error"
    assert get(server, "/models/").json()["data"] and get(server, "/status//").json()["models"]


@pytest.fixture
def prefixed() -> Iterator[Running]:
    with running(ServerConfig(port=0, access_log=False, root_path="/llm/a"), keys=read_keys(["sk-1234"])) as server:
        yield server


def test_a_prefix(prefixed: Running) -> None:
    """Of a proxy that keeps it, and of one that removes it. Keys are checked for every spelling."""
    bearer = {"Authorization": "Bearer sk-1234"}
    for path in ("/llm/a/v1/models", "/v1/models", "/llm/a/models", "//llm//a//v1/models/"):
        assert get(prefixed, path, **bearer).status_code == 200 and get(prefixed, path).status_code == 401
    assert get(prefixed, "/llm/a/").text.startswith("<!doctype") and get(prefixed, "/llm/a/page/page.js").status_code == 200
    moved = get(prefixed, "/llm/a")
    assert moved.status_code == 308 and moved.headers["location"] == "/llm/a/"
    assert get(prefixed, "/llm/a/openapi.json", **bearer).json()["servers"] == [{"url": "/llm/a"}]


@pytest.mark.parametrize("path", ["llm", "/llm/", "//llm", "/", "/l m", "/llm?a"])
def test_invalid_prefixes(path: str) -> None:
    with pytest.raises(ArgumentError, match="--root-path must be a path like /llm"):
        ServerConfig(root_path=path)
