"""How a request is served: urgency, fairness key, sharing of cached prefixes, and what is reported about it."""

from __future__ import annotations

from tinyvllm.errors import ArgumentError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request.adapter import SALT_MARK, Adapter
from tinyvllm.request.limits import MAX_DEADLINE_MS, MAX_NAME, MAX_PRIORITY, brief


@dataclass(frozen=True)
class RequestOptions:
    """What concerns the queue and not the tokens.

    priority          lower is served first, and may take blocks and rows from higher (vLLM's meaning)
    deadline_ms       milliseconds from arrival to the end of the answer; refused at once if measured rates predict more
    ttft_deadline_ms  milliseconds from arrival to the first token
    key               the client or user: keys of one priority get equal shares of the tokens
    anonymous         the caller is unknown (HTTP without API keys): its prompts are shown to no caller, and none to it
    cache_salt        requests share cached prefixes only with those of the same salt
    receipt, explain  whether the last output has a receipt of its cost, and an explanation of its prefix cache hits, which compares
                      it with cached prompts of the same key only
    energy            whether the last output has the joules of the request; a receipt has them, too
    adapter           the loaded adapter that computes it: callers give a LoRARequest, which the engine looks up
    """

    priority: int = 0
    deadline_ms: float | None = None
    ttft_deadline_ms: float | None = None
    key: str = ""
    anonymous: bool = False
    cache_salt: str | None = None
    receipt: bool = False
    explain: bool = False
    energy: bool = False
    adapter: Adapter | None = None

    @property
    def prefix_salt(self) -> str | None:
        """What cached prefixes are kept apart by: keys and values depend on the adapter."""
        return self.cache_salt if self.adapter is None else self.adapter.salt(self.cache_salt)

    @property
    def wants_energy(self) -> bool:
        return self.energy or self.receipt

    @property
    def owner(self) -> str | None:
        """The key that may read cached tokens of this request in an explanation; None for no key."""
        return None if self.anonymous else self.key

    def __post_init__(self) -> None:
        if type(self.priority) is not int or abs(self.priority) > MAX_PRIORITY:
            raise ArgumentError(f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {brief(self.priority)}")
        for name in ("deadline_ms", "ttft_deadline_ms"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value <= MAX_DEADLINE_MS):
                raise ArgumentError(f"{name} must be a number above 0 and up to {MAX_DEADLINE_MS:g}, got {brief(value)}")
        if not isinstance(self.key, str) or len(self.key) > MAX_NAME:
            raise ArgumentError(f"key must be a text of at most {MAX_NAME} characters, got {brief(self.key)}")
        check_cache_salt(self.cache_salt)


def check_cache_salt(salt: object) -> None:
    """ArgumentError for what is neither None nor a `cache_salt`."""
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_NAME):
        raise ArgumentError(f"cache_salt must be a non-empty text of at most {MAX_NAME} characters, got {brief(salt)}")
    if isinstance(salt, str) and salt.startswith(SALT_MARK):
        raise ArgumentError(f"cache_salt must not begin with {SALT_MARK!r}, got {brief(salt)}")
