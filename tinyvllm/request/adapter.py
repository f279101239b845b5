"""Low-rank adapters as requests name them. No tensors."""

from __future__ import annotations

from tinyvllm.errors import ArgumentError
from tinyvllm.lazy_dataclass import dataclass
from tinyvllm.request.limits import brief

MAX_ADAPTER_NAME = 256  # characters
SALT_MARK = "\0lora:"  # no cache_salt of a request begins with it


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request, as vLLM's class: a name, a number above 0 that vLLM wants and nothing here needs, and its folder.

    The folder is read when no adapter of this name is loaded; it may be left out if one is.
    """

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    def __post_init__(self) -> None:
        check_adapter_name(self.lora_name)
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise ArgumentError(f"lora_int_id must be an integer above 0, got {brief(self.lora_int_id)}")
        if not isinstance(self.lora_path, str):
            raise ArgumentError(f"lora_path must be a text, got {brief(self.lora_path)}")


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter: its name, the number by which steps know it, the digest of its content, and where it came from."""

    name: str
    number: int
    digest: str
    path: str = ""

    def salt(self, salt: str | None) -> str:
        """The salt of prefixes that were computed with it, for requests with `salt`."""
        return f"{SALT_MARK}{self.digest}:{salt or ''}"


def check_adapter_name(name: object) -> None:
    """ArgumentError for a name that no adapter can have."""
    if not isinstance(name, str) or not 0 < len(name.strip()) <= len(name) <= MAX_ADAPTER_NAME or not name.isprintable():
        raise ArgumentError(f"the name of an adapter must be a printable text of up to {MAX_ADAPTER_NAME} characters, got {brief(name)}")
