"""One spelling of each path, before keys are checked and routes are found.

Clients append paths to base URLs with and without /v1, and with a slash too many. Proxies pass on a prefix or remove it (--root-path).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_VERSION = "/v1"


class Paths:
    """The paths of one server. root_path: the prefix under which a proxy serves it, "" for none."""

    def __init__(self, routes: Iterable[str], root_path: str = ""):
        self._root_path = root_path
        names = [route.split("/") for route in routes]
        own = {parts[1] for parts in names if parts[1] != _VERSION[1:]}
        self._versioned = {parts[2] for parts in names if parts[1] == _VERSION[1:]} - own

    def canonical(self, path: str) -> str:
        """The path of the route: /v1/models for //v1/models/, /models, /v1/v1/models and, below a prefix, /prefix/v1/models."""
        path = re.sub("/{2,}", "/", path)
        if self._root_path and (path + "/").startswith(self._root_path + "/"):
            path = path[len(self._root_path) :]
        path = path.rstrip("/") or "/"
        while path.startswith(f"{_VERSION}{_VERSION}/"):
            path = path[len(_VERSION) :]
        return _VERSION + path if path.split("/")[1] in self._versioned else path

    def redirect(self, path: str) -> str | None:
        """Where to send the browser of a client that left out the slash after the prefix, on which the page's own links depend."""
        return f"{self._root_path}/" if self._root_path and path == self._root_path else None
