"""A hub on loopback that plays Hugging Face's for downloads: a repository's commit, its list of files, a file's head and body.

huggingface_hub reads its environment when it is imported, so whatever reaches this hub runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = bytes(range(256)) * 3000
REPOS = {
    "org/tiny": {"config.json": b'{"a": 1}', "model.safetensors": b"S" * 3000, "tokenizer.model": b"T", "chat_template.jinja": b"J",
                 "pytorch_model.bin": b"P", "README.md": b"R", "original/config.json": b"O", "consolidated.safetensors": b"C"},
    "org/packed": {"m-Q4_K_M.gguf": b"4", "m-Q4_K_S.gguf": b"s", "m-q8_0.gguf": b"8", "mmproj-m-Q8_0.gguf": b"p", "config.json": b"{}",
                   "BF16/m-BF16-00001-of-00002.gguf": b"1", "BF16/m-BF16-00002-of-00002.gguf": b"2",
                   "a-F16.gguf": b"a", "b-F16.gguf": b"b"},
    "org/sizes": {"m-Q2_K.gguf": WEIGHTS, "m-Q4_K_M-00001-of-00002.gguf": WEIGHTS, "m-Q4_K_M-00002-of-00002.gguf": WEIGHTS[::-1],
                  "m-Q8_0.gguf": WEIGHTS * 4, "m-F16.gguf": WEIGHTS * 5, "mmproj-m.gguf": b"p", "README.md": b"R"},
    "org/gated": {"config.json": b"{}", "model.safetensors": b"S"},
}  # fmt: skip


class Hub(http.server.BaseHTTPRequestHandler):
    """The few answers of a hub that a download needs: a repository's commit, its list of files, a file's head and body."""

    fetched: list[str] = []  # a name a request for a body
    broken: dict[str, list[int]] = {}  # name -> after how many bytes the connection of its next requests ends
    damaged: set[str] = set()  # names whose last byte is wrong
    ranges: list[tuple[str, int, int]] = []  # name, first byte and end of the requests for a part
    without_ranges = False

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
            return self.send(200, json.dumps(self.tree(repo) if rest[:1] == ["tree"] else self.info(repo)).encode(), body)
        self.file(repo, "/".join(rest[2:]), body)

    def info(self, repo):
        return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": [self.sibling(repo, name) for name in REPOS[repo]]}

    def sibling(self, repo, name):
        data = REPOS[repo][name]
        lfs = {"lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}}
        return {"rfilename": name, "size": len(data)} | (lfs if name.endswith((".gguf", ".safetensors")) else {})

    def tree(self, repo):
        blob = {name: hashlib.sha1(data).hexdigest() for name, data in REPOS[repo].items()}
        return [{"type": "file", "path": name, "size": len(data), "oid": blob[name]} for name, data in REPOS[repo].items()]

    def file(self, repo, name, body):
        if repo == "org/gated":
            return self.send(403, b'{"error": "gated"}', body, {"X-Error-Code": "GatedRepo"})
        data = REPOS[repo][name]
        if body:
            self.fetched.append(name)
        if name in self.damaged:
            data = data[:-1] + b"?"
        self.cut = self.broken[name].pop(0) if body and self.broken.get(name) else None
        etag = hashlib.sha1(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if body and (span := self.headers.get("Range")):
            start, _, last = span.removeprefix("bytes=").partition("-")
            end = min(int(last or len(data)) + 1, len(data))
            self.ranges.append((name, int(start), end))
            if self.without_ranges:
                return self.send(200, data, body, headers)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            return self.send(206, data[int(start) : end], body, headers)
        self.send(200, data, body, headers)

    def send(self, status, data, body, headers=()):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for key, value in dict(headers).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data[: getattr(self, "cut", None)])
            self.close_connection = True


@contextlib.contextmanager
def loopback_hub(home: Path) -> Iterator[tuple[http.server.ThreadingHTTPServer, dict[str, str]]]:
    """The running server, and the environment of a process that uses it, with its cache below `home`."""
    Hub.fetched, Hub.broken, Hub.damaged, Hub.ranges, Hub.without_ranges = [], {}, set(), [], False
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    yield server, kept | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    server.shutdown()
    server.server_close()
