"""Where answers go: a file or stdout as JSON lines in the order in which they are ready, or stdout as texts in the order of the prompts."""

from __future__ import annotations

import sys
from collections.abc import Collection, Container
from typing import Protocol

from tinyvllm.cli.jsonl import BadLine, Job, answer_line, key_of
from tinyvllm.cli.lines import AnswerFile
from tinyvllm.cli.progress import say
from tinyvllm.errors import TinyvllmError
from tinyvllm.request import RequestOutput

Answer = RequestOutput | TinyvllmError


class Answers(Protocol):
    """Takes the answers of a run."""

    output_kind: str  # of the requests: whether growing outputs are wanted

    @property
    def done(self) -> Collection[str]:
        """Keys of the answers of an earlier run."""

    def take(self, index: int, job: Job | BadLine, answer: Answer) -> None:
        """A growing or finished output of the prompt `index`, or its error."""

    def after_step(self) -> None:
        """Called after every step of the engine."""

    def close(self) -> None:
        """The run has ended."""


class FileAnswers:
    """JSON lines in a file, which a later run continues."""

    output_kind = "final_only"

    def __init__(self, name: str, wanted: Container[str]):
        self._file = AnswerFile(name, wanted, key_of)

    @property
    def done(self) -> Collection[str]:
        return self._file.done

    def take(self, index: int, job: Job | BadLine, answer: Answer) -> None:
        self._file.write(answer_line(index, job, answer))

    def after_step(self) -> None:
        self._file.sync_if_due()

    def close(self) -> None:
        self._file.close()


class StdoutAnswers:
    """JSON lines on stdout."""

    output_kind = "final_only"
    done: Collection[str] = ()

    def take(self, index: int, job: Job | BadLine, answer: Answer) -> None:
        sys.stdout.write(answer_line(index, job, answer).decode())
        sys.stdout.flush()

    def after_step(self) -> None:
        pass

    def close(self) -> None:
        pass


class PrintedAnswers:
    """Texts on stdout. The answer whose turn it is streams; later ones are printed when it is theirs. An error is a line on stderr."""

    output_kind = "cumulative"
    done: Collection[str] = ()

    def __init__(self, count: int):
        self._titled = count > 1
        self._latest: dict[int, tuple[Job | BadLine, Answer]] = {}  # of the prompts from `_turn` on
        self._turn = 0  # the index of the prompt whose answer streams
        self._part = 0  # of its answers
        self._shown: int | None = None  # characters of this part; None before its title

    def take(self, index: int, job: Job | BadLine, answer: Answer) -> None:
        self._latest[index] = job, answer
        while self._turn in self._latest and self._print(*self._latest[self._turn]):
            del self._latest[self._turn]
            self._turn, self._part = self._turn + 1, 0
        sys.stdout.flush()

    def _print(self, job: Job | BadLine, answer: Answer) -> bool:
        """Print what is new in an answer; whether it is finished."""
        if isinstance(answer, TinyvllmError):
            if self._titled:
                say(str(answer))
            return True
        for part in answer.outputs[self._part :]:
            if self._shown is None:
                self._print_title(job, part.index, len(answer.outputs))
                self._shown = 0
            sys.stdout.write(part.text[self._shown :])
            self._shown = len(part.text)
            if part.finish_reason is None:
                return False
            sys.stdout.write("\n")
            self._part, self._shown = self._part + 1, None
        return answer.finished

    def _print_title(self, job: Job | BadLine, index: int, count: int) -> None:
        if self._titled or count > 1:
            print(f"=== {_title(job)}" + (f" ({index + 1}/{count})" if count > 1 else ""))

    def after_step(self) -> None:
        pass

    def close(self) -> None:
        if self._shown:
            print()  # the end of an answer that was interrupted


def _title(job: Job | BadLine) -> str:
    """The prompt on one line, shortened."""
    text = " ".join(job.prompt.split()) if isinstance(job, Job) and isinstance(job.prompt, str) else job.source
    return text if len(text) <= 70 else text[:67] + "..."
