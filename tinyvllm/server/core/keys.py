"""API keys and their rate limits. Keys are compared in constant time and never written to a log.

A key file has one key on each line, followed by its limits: `sk-secret name=alice requests_per_minute=60 tokens_per_minute=90000
concurrent=4`.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable
from dataclasses import field
from pathlib import Path

from tinyvllm.errors import ArgumentError, nearest
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.server.core.failures import Failure, busy

_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent")
_MINUTE = 60.0


@dataclass(frozen=True)
class Limits:
    """Limits of one key; None is unlimited. Tokens are those of prompts and outputs together."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


@dataclass
class TokenBucket:
    """A per-minute limit that refills evenly. Overdrawing it leaves a debt that later requests wait for."""

    size: int
    level: float
    refilled: float  # time of the last refill

    def refill(self, now: float) -> None:
        self.level = min(float(self.size), self.level + (now - self.refilled) * self.size / _MINUTE)
        self.refilled = now

    def seconds_until(self, amount: float, now: float) -> float:
        """Seconds until `amount` is available; 0 if it is now."""
        self.refill(now)
        return max(0.0, (amount - self.level) * _MINUTE / self.size)


@dataclass
class Key:
    """One accepted key: its name for logs and for fair scheduling, its limits, and its use."""

    name: str
    digest: bytes
    limits: Limits = field(default_factory=Limits)
    running: int = 0

    def __post_init__(self) -> None:
        now = time.monotonic()
        self._requests = _bucket(self.limits.requests_per_minute, now)
        self._tokens = _bucket(self.limits.tokens_per_minute, now)

    @property
    def anonymous(self) -> bool:
        """Whether it names no caller: of servers without keys, and of paths that need none."""
        return not self.digest

    def private_salt(self, requested: str | None) -> str | None:
        """The salt that keeps cached prefixes of this key apart from those of other keys, and of other salts that a request may name.

        It depends on the secret and not on the name, so that a prefix cache on disk serves no later key of the same name.
        """
        if self.anonymous:
            return requested
        salt = hashlib.sha256(b"tinyvllm prefix cache:" + self.digest).hexdigest()
        return salt if requested is None else f"{salt}:{requested}"

    def enter(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Count a new request that works; Failure 429 if it exceeds a limit. Each successful call needs a call of `leave`."""
        if self.limits.concurrent is not None and self.running >= self.limits.concurrent:
            raise busy(f"key {self.name}: {self.running} concurrent requests, the limit is {self.limits.concurrent}", 1.0)
        self._check_tokens(1, clock())
        self.count_request(clock)
        self.running += 1

    def leave(self) -> None:
        """A request that entered has ended."""
        self.running -= 1

    def count_request(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Count a request of any kind; Failure 429 if it exceeds the limit."""
        if self._requests is not None:
            if (wait := self._requests.seconds_until(1.0, clock())) > 0:
                raise busy(f"key {self.name}: the limit is {self.limits.requests_per_minute} requests a minute", wait)
            self._requests.level -= 1.0

    def reserve(self, tokens: int, clock: Callable[[], float] = time.monotonic) -> int:
        """Take tokens of the limit before they are used; Failure 429 if they are not available.

        Returns their number: never more than a whole minute's, so that a request for more can run when no other one has.
        """
        if self._tokens is None:
            return tokens
        tokens = min(tokens, self._tokens.size)
        self._check_tokens(tokens, clock())
        self._tokens.level -= tokens
        return tokens

    def charge(self, tokens: int) -> None:
        """Count tokens beyond the reserved ones; a negative number gives reserved ones back."""
        if self._tokens is not None:
            self._tokens.level -= tokens

    def _check_tokens(self, tokens: int, now: float) -> None:
        if self._tokens is not None and (wait := self._tokens.seconds_until(tokens, now)) > 0:
            text = f"key {self.name}: the limit is {self.limits.tokens_per_minute} tokens a minute"
            raise busy(f"{text}, and this request needs {tokens} (its prompt and max_tokens)" if tokens > 1 else text, wait)


def _bucket(size: int | None, now: float) -> TokenBucket | None:
    return None if size is None else TokenBucket(size, float(size), now)


class Keys:
    """The keys of a server. Without any, every request is anonymous."""

    def __init__(self, keys: Iterable[Key] = ()):
        self._keys = list(keys)
        names = [key.name for key in self._keys]
        for name in names:
            if names.count(name) > 1:
                raise ArgumentError(f"api keys: two keys have the name {name!r}; give each its own name=...")
        self.anonymous = Key("", b"")

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, secret: str | None) -> Key:
        """The key with this secret; Failure 401 if there is none. All keys are compared, so that the time tells nothing."""
        if not self._keys:
            return self.anonymous
        if not secret:
            text = "missing API key; send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            raise Failure(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        digest, match = _digest(secret), None
        for key in self._keys:
            if hmac.compare_digest(digest, key.digest):
                match = key
        if match is None:
            raise Failure(401, "unknown API key", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return match


def read_keys(secrets: Iterable[str], path: str | None = None) -> Keys:
    """The keys of --api-key and TINYVLLM_API_KEY, named key-1, key-2, ..., and those of a key file. ArgumentError for an invalid line."""
    keys = [
        Key(f"key-{number}", _digest(_checked_secret("--api-key or TINYVLLM_API_KEY", secret))) for number, secret in enumerate(secrets, 1)
    ]
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"--api-key-file {path}: {error}") from error
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                keys.append(_parse(f"{path}:{number}", line.split()))
        if not keys:
            raise ArgumentError(f"--api-key-file {path} contains no key, so the server would accept every request; add a key")
    return Keys(keys)


def _parse(source: str, words: list[str]) -> Key:
    secret, *options = words
    values: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in ("name", *_LIMITS) or not equals or not value:
            raise ArgumentError(f"{source}: expected name=... or a limit, got {option!r}{nearest(name, ('name', *_LIMITS))}")
        values[name] = value
    limits = {}
    for name in _LIMITS:
        if name in values:
            if not values[name].isdecimal() or int(values[name]) < 1:
                raise ArgumentError(f"{source}: {name} must be an integer of at least 1, got {values[name]!r}")
            limits[name] = int(values[name])
    return Key(values.get("name", "line-" + source.rpartition(":")[2]), _digest(_checked_secret(source, secret)), Limits(**limits))


def _checked_secret(source: str, secret: str) -> str:
    if not secret.isascii() or not secret.isprintable() or " " in secret or len(secret) < 4:
        raise ArgumentError(f"{source}: a key must have at least 4 printable ASCII characters and no spaces")
    return secret


def _digest(secret: str) -> bytes:
    """A hash, so that compared values have equal lengths."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
