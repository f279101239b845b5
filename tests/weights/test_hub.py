"""Names of models: what is a path, what is a hub's, and the hub's own part against a small HTTP server on loopback that plays it.

huggingface_hub reads its environment when it is imported, so everything that reaches it runs in a process of its own.
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pytest

from tinyvllm.errors import ArgumentError, ModelError
from tinyvllm.weights.hub import resolve_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
import sys
from tinyvllm.errors import ModelError
from tinyvllm.weights.hub import resolve_model
try:
    print(resolve_model(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
except ModelError as error:
    print("ModelError:", error)
"""
REPOS = {
    "org/tiny": {"config.json": b'{"a": 1}', "model.safetensors": b"S" * 3000, "tokenizer.model": b"T", "chat_template.jinja": b"J",
                 "pytorch_model.bin": b"P", "README.md": b"R", "original/config.json": b"O", "consolidated.safetensors": b"C"},
    "org/packed": {"m-Q4_K_M.gguf": b"4", "m-Q4_K_S.gguf": b"s", "m-q8_0.gguf": b"8", "mmproj-m-Q8_0.gguf": b"p", "config.json": b"{}",
                   "BF16/m-BF16-00001-of-00002.gguf": b"1", "BF16/m-BF16-00002-of-00002.gguf": b"2",
                   "a-F16.gguf": b"a", "b-F16.gguf": b"b"},
    "org/gated": {"config.json": b"{}", "model.safetensors": b"S"},
}  # fmt: skip


class Hub(http.server.BaseHTTPRequestHandler):
    """The few answers of a hub that a download needs: a repository's commit, its list of files, a file's head and body."""

    fetched: list[str] = []

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        parts = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if api else parts[:2])
        if repo not in REPOS:
            return self.send(401, b'{"error": "Invalid username or password."}', body, {"X-Error-Code": "RepoNotFound"})
        rest = parts[4:] if api else parts[2:]
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return self.send(404, b'{"error": "Invalid rev id"}', body, {"X-Error-Code": "RevisionNotFound"})
        if api:
            return self.send(200, json.dumps(self.tree(repo) if rest[0] == "tree" else self.info(repo)).encode(), body)
        self.file(repo, "/".join(rest[2:]), body)

    def info(self, repo):
        return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in REPOS[repo]]}

    def tree(self, repo):
        blob = {name: hashlib.sha1(data).hexdigest() for name, data in REPOS[repo].items()}
        return [{"type": "file", "path": name, "size": len(data), "oid": blob[name]} for name, data in REPOS[repo].items()]

    def file(self, repo, name, body):
        if repo == "org/gated":
            return self.send(403, b'{"error": "gated"}', body, {"X-Error-Code": "GatedRepo"})
        data = REPOS[repo][name]
        if body:
            self.fetched.append(name)
        etag = hashlib.sha1(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if body and (span := self.headers.get("Range")):
            start = int(span.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return self.send(206, data[start:], body, headers)
        self.send(200, data, body, headers)

    def send(self, status, data, body, headers=()):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for key, value in dict(headers).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub(tmp_path):
    """Starts the server; returns a function that runs resolve_model against it, with a cache of its own."""
    Hub.fetched = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    env = kept | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home"),
                  "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # fmt: skip

    def resolve(*args, **more):
        done = subprocess.run([sys.executable, "-c", SCRIPT, *args], capture_output=True, text=True, env=env | more, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1, done.stdout
        return done.stdout.strip()

    resolve.stop = lambda: (server.shutdown(), server.server_close())
    yield resolve
    resolve.stop()


def names(folder):
    return {p for p in os.listdir(folder)}


def test_downloads_what_is_needed_and_then_works_from_the_cache(hub):
    folder = hub("org/tiny")
    assert names(folder) == {"config.json", "model.safetensors", "tokenizer.model", "chat_template.jinja"}
    assert Path(folder, "model.safetensors").read_bytes() == b"S" * 3000
    assert sorted(Hub.fetched) == sorted(names(folder))
    assert hub("org/tiny", COMMIT) == folder and len(Hub.fetched) == 4
    hub.stop()
    assert hub("org/tiny") == folder
    assert hub("org/tiny", HF_HUB_OFFLINE="1") == folder
    assert "org/packed is not completely in the local cache and HF_HUB_OFFLINE is set" in hub("org/packed", HF_HUB_OFFLINE="1")
    assert "cannot be reached; check the network or HF_ENDPOINT" in hub("org/packed")


def test_picks_a_gguf_file(hub):
    assert hub("org/packed:m-Q4_K_S.gguf").endswith(f"snapshots/{COMMIT}/m-Q4_K_S.gguf")
    assert hub("org/packed:Q4_K_M").endswith("/m-Q4_K_M.gguf")
    assert hub("org/packed:Q8_0").endswith("/m-q8_0.gguf")
    assert Hub.fetched == ["m-Q4_K_S.gguf", "m-Q4_K_M.gguf", "m-q8_0.gguf"]
    assert hub("org/packed:BF16").endswith("/BF16/m-BF16-00001-of-00002.gguf")
    assert hub("org/packed:BF16/m-BF16-00002-of-00002.gguf").endswith("/BF16/m-BF16-00001-of-00002.gguf")
    assert sorted(Hub.fetched[3:]) == ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf"]


def test_one_line_for_what_the_hub_cannot_give(hub):
    assert "'org/none' is neither a file or folder here nor a public model on http://127.0.0.1" in hub("org/none")
    assert "org/tiny on http://127.0.0.1:" in (line := hub("org/tiny", "v9")) and line.endswith("has no revision 'v9'")
    assert "org/gated is gated: request access" in hub("org/gated")
    assert "org/packed has no safetensors; if it has GGUF files, choose one" in hub("org/packed")
    assert "has no GGUF file 'Q2_K'" in hub("org/packed:Q2_K")
    assert "'F16' matches several files of org/packed; name one of them: a-F16.gguf, b-F16.gguf" in hub("org/packed:F16")
    assert "nor a possible name of a model on a hub" in hub("org/a..b")


def test_a_path_is_itself(tmp_path, monkeypatch):
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("org").name == "org" and resolve_model("org/m.gguf").is_file()
    assert resolve_model("~/org") == tmp_path / "org" and resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ArgumentError, match="revision 'v1' needs the name of a model on a hub"):
        resolve_model("org", "v1")


@pytest.mark.parametrize(
    "name",
    ["./x", "../x", "/x", "~/x", "x.gguf", "x/y.gguf", "a/b/c", "x.safetensors", "x/", "", "a b", "x:", "\0", "-x", "n" * 5000 + "/a/b"],
)
def test_what_looks_like_a_path_is_not_looked_up(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="no such file or folder"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["org/name", "org/name:Q4_K_M", "gpt2"])
def test_a_hub_name_without_the_package(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match="is no file or folder here, and hub names need the package huggingface_hub"):
        resolve_model(name)
