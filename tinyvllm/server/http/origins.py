"""Which web pages may use the server. A browser sends requests to a local server for any page that asks it to.

Three ways are closed: requests of pages from other origins, forms that need no CORS permission, and names that an attacker's DNS server
points at this machine (DNS rebinding). Programs other than browsers send neither Origin nor Sec-Fetch headers and notice nothing.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from tinyvllm.server.core.config import ServerConfig
from tinyvllm.server.core.context import RequestContext
from tinyvllm.server.core.failures import Failure

LOCAL_ORIGINS = r"https?://([a-z0-9-]+\.)*localhost(:\d+)?|https?://127(\.\d+){3}(:\d+)?|https?://\[::1\](:\d+)?"  # need no permission
_FORM_TYPES = ("", "text/plain", "application/x-www-form-urlencoded")  # what `curl -d` sends, and what forms of pages may send, too


def is_loopback(host: str) -> bool:
    """Whether a host of --host is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return _is_local_name(host)


class Origins:
    """The checks of one server."""

    def __init__(self, config: ServerConfig, has_keys: bool):
        self._config = config
        self._checks_host = bool(config.allowed_hosts) or (is_loopback(config.host) and not has_keys)
        self._allowed_hosts = {host.lower() for host in config.allowed_hosts}

    def check(self, context: RequestContext) -> None:
        """Failure 403 for the request of a page that may not use the server, or for a name that is not the server's."""
        if self._checks_host:
            self._check_host(context.header(b"host"))
        origin = context.header(b"origin")
        if origin is None:
            self._check_site(context)
        elif not (self._is_own(origin, context.header(b"host")) or self._is_allowed(origin)):
            text = f"pages of origin {origin!r:.200} may not use this server; start it with --cors-origin {origin[:200]} to allow them"
            raise Failure(403, text, code="forbidden_origin")

    def _check_host(self, host: str | None) -> None:
        name = _name_of(host or "")
        if host is None or _is_address(name) or _is_local_name(name) or name in self._allowed_hosts:
            return  # a page cannot have an address as its name and be another's
        text = f"the host {name!r:.200} is not a name of this server; start it with --allowed-host {name[:200]} if it is"
        raise Failure(403, text, code="forbidden_host")

    def _check_site(self, context: RequestContext) -> None:
        """Browsers send no Origin with images, scripts and links. Links to the chat page and other documents are harmless."""
        if context.header(b"sec-fetch-site") != "cross-site" or "*" in self._config.cors_origins:
            return
        if not (context.scope["method"] in ("GET", "HEAD") and context.header(b"sec-fetch-dest") == "document"):
            text = "pages of other sites may not use this server; --cors-origin allows them, if they send an Origin header"
            raise Failure(403, text, code="forbidden_origin")

    def _is_own(self, origin: str, host: str | None) -> bool:
        return host is not None and urlsplit(origin).netloc.lower() == host.lower()

    def _is_allowed(self, origin: str) -> bool:
        return bool({"*", origin} & set(self._config.cors_origins)) or re.fullmatch(LOCAL_ORIGINS, origin) is not None


def check_content_type(context: RequestContext) -> None:
    """Failure 415 for a body that is not JSON. Without a browser, the types that `curl -d` and simple clients send count as JSON."""
    kind = (context.header(b"content-type") or "").partition(";")[0].strip().lower()
    if kind == "application/json" or kind.endswith("+json"):
        return
    if kind in _FORM_TYPES and not _is_browser(context):
        return
    text = f"the content type must be application/json, got {kind[:80]!r}"
    raise Failure(415, text, code="unsupported_media_type", headers={"Connection": "close"})  # the body is not read


def _is_browser(context: RequestContext) -> bool:
    return any(name == b"origin" or name.startswith(b"sec-fetch-") for name, _ in context.scope["headers"])


def _name_of(host: str) -> str:
    """The name or address of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_local_name(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")
