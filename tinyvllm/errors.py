"""Everything that tinyvllm raises on purpose.

A message is one line: the speaker, what is wrong, what was expected, what was given, what to try. `exit_code` is the exit code of the
command line: 2 for arguments that the caller typed, 1 for failures of files, devices or the network.
"""

from collections.abc import Iterable

MAX_MESSAGE = 300  # characters of an error about a file


def one_line(text: str, limit: int = MAX_MESSAGE) -> str:
    """The text on one line of printable characters, at most `limit` of them: the middle of a longer one is left out.

    Files hold line feeds, control characters, lone surrogates (which no terminal or log can encode) and names of megabytes.
    """
    if len(text) > 2 * limit:
        text = f"{text[:limit]} ... {text[-limit:]}"
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(text.split()))
    head = limit * 2 // 3
    return text if len(text) <= limit else f"{text[:head]} ... {text[head + 5 - limit :]}"


def nearest(word: str, known: Iterable[str]) -> str:
    """ ", did you mean 'x'?" for the closest of the known words, or the empty string."""
    import difflib  # with what it imports, for errors only

    close = difflib.get_close_matches(word[:MAX_MESSAGE], list(known), 1, 0.6)
    return f", did you mean {close[0]!r}?" if close else ""


class TinyvllmError(Exception):
    """Base of every error that a caller may want to catch."""

    exit_code = 1


class ArgumentError(TinyvllmError, ValueError):
    """An option, a sampling parameter or an environment switch with an invalid value."""

    exit_code = 2


class FileError(TinyvllmError):
    """Base of the errors about files of a model. Their messages quote what a file holds, so they are bounded here: see `one_line`."""

    def __init__(self, message: str, limit: int = MAX_MESSAGE):
        super().__init__(one_line(message, limit))


class ModelError(FileError):
    """A model that cannot be loaded: unknown architecture, missing tensor, a shape that contradicts the configuration."""


class FormatError(ModelError):
    """A file that is not what its name says, or is truncated or corrupt."""


class TokenizerError(FileError):
    """A tokenizer or chat template that is missing, unreadable or rejects its input."""


class RequestError(TinyvllmError, ValueError):
    """A request that this engine can never serve, such as a prompt beyond the context."""

    exit_code = 2


class BusyError(TinyvllmError):
    """A request that the engine does not queue now: the queue is full, or its deadline cannot be met.

    `retry_after` is the predicted wait in seconds; `reason` names the limit: max_num_queued_reqs, max_num_queued_tokens,
    deadline or max_loras.
    """

    def __init__(self, message: str, retry_after: float, reason: str):
        super().__init__(message)
        self.retry_after = retry_after
        self.reason = reason

    def __reduce__(self) -> tuple[type["BusyError"], tuple[str, float, str]]:
        return BusyError, (str(self), self.retry_after, self.reason)


class OutOfMemoryError(TinyvllmError):
    """The device or the host does not have enough memory for the requested size."""


class InternalError(TinyvllmError):
    """A defect of tinyvllm that ended one request; the engine continues. The log has the traceback."""


class RankError(TinyvllmError):
    """A process of an engine, a rank or a replica, ended, hangs or could not start: the engine ends, and its requests with it."""


class OutputError(TinyvllmError):
    """A file that cannot be written."""


class KernelError(TinyvllmError):
    """A hand-written kernel that is missing, does not compile, or was requested on a device where it cannot run."""


class ToolchainError(KernelError):
    """There is no compiler for kernels, or it cannot be started. Says nothing about the kernels."""


class ReplacedKernelError(KernelError):
    """A kernel turned out not to run on this device, and is not chosen any more: the same call again uses another one."""
