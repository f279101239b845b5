"""Everything that tinyvllm raises on purpose.

A message is one line that says who is speaking, what was expected, what came and what to try. `exit_code` is what the command
line returns for it: 2 for what the caller typed, 1 for what the world did.
"""


class TinyvllmError(Exception):
    """Base of every error that a caller may want to catch."""

    exit_code = 1


class ArgumentError(TinyvllmError, ValueError):
    """An option, a sampling parameter or an environment switch with a value that cannot be meant."""

    exit_code = 2


class ModelError(TinyvllmError):
    """A model that cannot be loaded: unknown architecture, missing tensor, a shape that contradicts the configuration."""


class FormatError(ModelError):
    """A file that is not what its name says, or is truncated or corrupt."""


class TokenizerError(TinyvllmError):
    """A tokenizer or chat template that is absent, unreadable or refuses its input."""


class RequestError(TinyvllmError, ValueError):
    """A request that this engine can never serve, such as a prompt beyond the context."""

    exit_code = 2


class BusyError(TinyvllmError):
    """A request that the engine will not queue now: too many wait, or its deadline cannot be met.

    `retry_after` is in seconds, as predicted; `reason` is the limit: max_num_queued_reqs, max_num_queued_tokens or deadline.
    """

    def __init__(self, message: str, retry_after: float, reason: str):
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason


class OutOfMemoryError(TinyvllmError):
    """The device or the host has not enough memory for what was asked."""


class OutputError(TinyvllmError):
    """A file that cannot be written."""


class KernelError(TinyvllmError):
    """A hand-written kernel that is missing, does not compile, or was asked for where it cannot run."""
