"""API keys: who may come in, and how much each may ask for. Keys are compared in constant time and never written to a log.

A file of keys has one a line, with what limits it: `sk-secret name=alice requests_per_minute=60 tokens_per_minute=90000 concurrent=4`.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tinyvllm.config import nearest
from tinyvllm.errors import ArgumentError
from tinyvllm.server.core.failures import Failure, busy

_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent")
_MINUTE = 60.0


@dataclass(frozen=True)
class Limits:
    """What one key may ask for; None sets no limit. Tokens are those of prompts and answers together."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


@dataclass
class Bucket:
    """A minute's allowance that fills up evenly. What is taken beyond it is a debt that is waited for."""

    size: int
    level: float
    at: float

    def refill(self, now: float) -> None:
        self.level = min(float(self.size), self.level + (now - self.at) * self.size / _MINUTE)
        self.at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """How long until `amount` is there; 0 if it is."""
        self.refill(now)
        return max(0.0, (amount - self.level) * _MINUTE / self.size)


@dataclass
class Key:
    """One key that is let in: its name for logs and for fair shares, and what it has used."""

    name: str
    digest: bytes
    limits: Limits = field(default_factory=Limits)
    running: int = 0

    def __post_init__(self) -> None:
        now = time.monotonic()
        self._requests = self._bucket(self.limits.requests_per_minute, now)
        self._tokens = self._bucket(self.limits.tokens_per_minute, now)

    @staticmethod
    def _bucket(size: int | None, now: float) -> Bucket | None:
        return None if size is None else Bucket(size, float(size), now)

    def enter(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Count a request in; Failure 429 if it is one too many. `leave` must follow."""
        now = clock()
        if self.limits.concurrent is not None and self.running >= self.limits.concurrent:
            raise busy(f"key {self.name}: {self.running} requests run at the same time, the limit is {self.limits.concurrent}", 1.0)
        if self._requests is not None and (wait := self._requests.seconds_until(1.0, now)) > 0:
            raise busy(f"key {self.name}: the limit is {self.limits.requests_per_minute} requests a minute", wait)
        if self._tokens is not None and (wait := self._tokens.seconds_until(1.0, now)) > 0:
            raise busy(f"key {self.name}: the limit is {self.limits.tokens_per_minute} tokens a minute", wait)
        if self._requests is not None:
            self._requests.level -= 1.0
        self.running += 1

    def leave(self, tokens: int) -> None:
        """A request is over and has cost so many tokens."""
        self.running -= 1
        if self._tokens is not None:
            self._tokens.level -= tokens


class Keys:
    """The keys of a server. Without any, everybody comes in under the empty name."""

    def __init__(self, keys: Iterable[Key] = ()):
        self._keys = list(keys)
        names = [key.name for key in self._keys]
        for name in names:
            if names.count(name) > 1:
                raise ArgumentError(f"api keys: two keys are named {name!r}")
        self.nobody = Key("", b"")  # who needs no key

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str | None) -> Key:
        """The key that was shown; Failure 401 if none fits. Every key is compared, whichever fits."""
        if not self._keys:
            return self.nobody
        if not secret:
            text = "no API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            raise Failure(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        shown, found = _digest(secret), None
        for key in self._keys:
            if hmac.compare_digest(shown, key.digest):
                found = key
        if found is None:
            raise Failure(401, "this API key is not known here", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found


def read_keys(secrets: Iterable[str], path: str | None = None) -> Keys:
    """Keys given one by one, named key-1, key-2, ..., and those of a file. ArgumentError for a line that cannot be meant."""
    keys = [Key(f"key-{number}", _digest(_checked("--api-key", secret))) for number, secret in enumerate(secrets, 1)]
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"--api-key-file {path}: {error}") from error
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                keys.append(_parse(f"{path}:{number}", line.split()))
        if not keys:
            raise ArgumentError(f"--api-key-file {path} holds no key: everybody would be let in")
    return Keys(keys)


def _parse(source: str, words: list[str]) -> Key:
    secret, *options = words
    given: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in ("name", *_LIMITS) or not equals or not value:
            raise ArgumentError(f"{source}: expected name=... or a limit, got {option!r}{nearest(name, ('name', *_LIMITS))}")
        given[name] = value
    limits = {}
    for name in _LIMITS:
        if name in given:
            if not given[name].isdecimal() or int(given[name]) < 1:
                raise ArgumentError(f"{source}: {name} must be a number of 1 or more, got {given[name]!r}")
            limits[name] = int(given[name])
    return Key(given.get("name", "line-" + source.rpartition(":")[2]), _digest(_checked(source, secret)), Limits(**limits))


def _checked(source: str, secret: str) -> str:
    if not secret.isascii() or not secret.isprintable() or " " in secret or len(secret) < 4:
        raise ArgumentError(f"{source}: a key must be at least 4 printable ASCII characters without blanks")
    return secret


def _digest(secret: str) -> bytes:
    """Equal lengths for the comparison, whatever was sent."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
