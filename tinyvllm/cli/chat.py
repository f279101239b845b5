"""`tinyvllm chat`: a conversation with history. Answers go to stdout, everything else to stderr, so that it also works in a pipe."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from tinyvllm.cli.generate import check_engine_options, load
from tinyvllm.cli.jsonl import sampling_value
from tinyvllm.cli.new_file import new_file
from tinyvllm.cli.options import engine_options, sampling_options
from tinyvllm.cli.partner import ContextFull, Local, Message, Partner, Piece
from tinyvllm.cli.progress import say
from tinyvllm.config.values import expand_home
from tinyvllm.errors import ArgumentError, FormatError, TinyvllmError, TokenizerError, nearest
from tinyvllm.request import SamplingParams

_SETTINGS = tuple(f.name for f in fields(SamplingParams) if f.name not in ("n", "logprobs"))  # a conversation shows one answer, as text


def run(options: argparse.Namespace) -> int:
    """Answer until the end of input. The exit code is 1 if a line from a pipe failed, for the script that wrote it."""
    chosen = sampling_options(options)
    if options.url is not None:
        return _talk_to_server(options, chosen)
    if options.api_key is not None:
        raise ArgumentError("--api-key is for the server of --url, which is not given")
    check_engine_options(options)
    with load(options) as llm:
        if llm.engine.tokenizer is None or not llm.engine.tokenizer.chat_templates:
            raise TokenizerError(
                f"chat: {llm.config.model} has no chat template, it may be a model without chat training: try --prompt TEXT"
            )
        tell = _teller(options)
        status = _talk(Chat(Local(llm, tell), chosen, options.system, tell, _thinker(options)), options.quiet)
        if llm.engine.trace is not None and not options.quiet:
            say(llm.engine.trace.table.text())
        llm.settle()  # after the conversation: nothing waits for it
        return status


def _talk_to_server(options: argparse.Namespace, chosen: dict[str, Any]) -> int:
    engine = [name for name in engine_options(options) if name != "model"]
    if engine:
        raise ArgumentError(
            f"--{engine[0].replace('_', '-')} is an option of the engine, which the server has: with --url give only --model NAME"
        )
    from tinyvllm.cli.remote import Remote

    tell = _teller(options)
    remote = Remote(options.url, options.api_key or os.environ.get("TINYVLLM_API_KEY") or None, getattr(options, "model", None), tell)
    return _talk(Chat(remote, chosen, options.system, tell, _thinker(options)), options.quiet)


def _teller(options: argparse.Namespace) -> Callable[[str], None]:
    """A function for lines that are no errors."""
    return (lambda text: None) if options.quiet else say


def _thinker(options: argparse.Namespace) -> Callable[[str], None]:
    """A function for pieces of reasoning: to stderr, dimmed on a terminal."""
    before, after = ("\033[2m", "\033[22m") if sys.stderr.isatty() else ("", "")

    def write(text: str) -> None:
        sys.stderr.write(f"{before}{text}{after}")
        sys.stderr.flush()

    return (lambda text: None) if options.quiet else write


def _talk(chat: Chat, quiet: bool) -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() editing and history
        if not quiet:
            say("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends")
    return converse(chat, interactive)


def converse(chat: Chat, interactive: bool) -> int:
    """Read lines of stdin, answer them and run their commands, until /exit or the end."""
    failed = False
    while not chat.over:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            break
        except KeyboardInterrupt:
            if not interactive:
                raise
            say("\n(Ctrl-D or /exit ends)")
            continue
        try:
            chat.read(line)
        except TinyvllmError as error:
            failed = True
            say(f"tinyvllm: {error}")
    return 1 if failed and not interactive else 0


class Chat:
    """One conversation: its messages, its sampling parameters, and the commands that change them. `tell` gets remarks for the user,
    `think` the pieces of a model's reasoning, which is no part of the conversation.
    """

    def __init__(
        self,
        partner: Partner,
        chosen: Mapping[str, Any],
        system: str | None = None,
        tell: Callable[[str], None] = lambda text: None,
        think: Callable[[str], None] = lambda text: None,
    ):
        self.partner = partner
        self.chosen = dict(chosen)
        self.params = replace(partner.default_params, **chosen)
        self.system = system
        self.tell, self.think = tell, think
        self.history: list[Message] = []
        self.over = False

    @property
    def messages(self) -> list[Message]:
        """The conversation as the chat template gets it."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.history

    def read(self, line: str) -> None:
        """One line of input: a command, a message to answer, or nothing."""
        if line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            name = ALIASES.get(name, name)
            if name not in COMMANDS:
                known = [f"/{command}" for command in COMMANDS]
                raise ArgumentError(f"unknown command '/{name}'{nearest('/' + name, known)}; /help lists them")
            COMMANDS[name][0](self, rest.strip())
        elif line.strip():
            self.answer(line)

    def answer(self, text: str) -> None:
        """Stream an answer and keep both in the history; neither if there is an error."""
        before = list(self.history)
        self.history.append({"role": "user", "content": text})
        try:
            answer = self._stream()
        except BaseException:
            self.history = before
            raise
        if answer is None:
            self.history.pop()
            return
        self.history.append({"role": "assistant", "content": answer})
        if cut := self.partner.cut():
            self.tell(f"(the answer is cut by {cut})")

    def _stream(self) -> str | None:
        """The answer up to its end or an interrupt; None if the interrupt came before any text."""
        pieces: list[str] = []
        reasons = False
        try:
            with contextlib.closing(self._begin()) as answer:
                for piece in answer:
                    if piece.reasoning or reasons:
                        self.think(piece.text if piece.reasoning else "\n")
                    reasons = piece.reasoning
                    if not reasons:
                        pieces.append(piece.text)
                        sys.stdout.write(piece.text)
                        sys.stdout.flush()
        except KeyboardInterrupt:
            if not self.partner.breakable:
                raise
            if not pieces:
                return None
        finally:
            if reasons:
                self.think("\n")
            if pieces:
                sys.stdout.write("\n")
                sys.stdout.flush()
        return "".join(pieces)

    def _begin(self) -> Generator[Piece, None, None]:
        """The pieces of the answer. The oldest turns leave the history until the rest fits into the context."""
        dropped, counts = 0, ""
        while True:
            with contextlib.closing(self.partner.answer(self.messages, self.params, self.chosen)) as answer:
                try:
                    first = next(answer, None)
                except ContextFull as full:
                    if full.counts is not None and not dropped:
                        counts = f"it holds {full.counts[1]} tokens and the conversation has {full.counts[0]}: "
                    turns = self._drop_turns(1 + dropped // 8)  # a long conversation from a file leaves in few tries
                    if not turns:
                        raise
                    dropped += turns
                    continue
                if dropped:
                    leaving = "turn leaves" if dropped == 1 else f"{dropped} turns leave"
                    self.tell(f"(the context is full: {counts}the oldest {leaving} the conversation; /reset starts over)")
                if first is not None:
                    yield first
                    yield from answer
                return

    def _drop_turns(self, count: int) -> int:
        """Drop up to `count` of the oldest turns (a question and its answer), not the last question; returns the number dropped."""
        starts = [i for i, message in enumerate(self.history) if message["role"] == "user"]
        count = min(count, len(starts) - 1)
        if count > 0:
            del self.history[: starts[count]]
        return count

    def help(self, rest: str) -> None:
        """this list"""
        for name, (_, usage, meaning) in COMMANDS.items():
            say(f"/{name} {usage}".ljust(20) + meaning)

    def reset(self, rest: str) -> None:
        """forget the conversation, keep the system message"""
        self.history.clear()

    def undo(self, rest: str) -> None:
        """forget the last question and its answer"""
        if not self.history:
            raise ArgumentError("/undo: the conversation is empty")
        while self.history and self.history.pop()["role"] != "user":
            pass

    def set_system(self, rest: str) -> None:
        """set the system message; without TEXT there is none"""
        self.system = rest or None

    def set(self, rest: str) -> None:
        """change a sampling setting; VALUE null removes it"""
        name, _, value = rest.partition(" ")
        if name not in _SETTINGS or not value:
            hint = nearest(name, _SETTINGS) if name not in _SETTINGS else ""
            raise ArgumentError(f"/set needs NAME VALUE, with NAME one of {', '.join(_SETTINGS)}; got {rest!r}{hint}")
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = value  # a stop string need not be quoted
        self.params = replace(self.params, **{name: sampling_value(name, parsed)})
        self.chosen[name] = parsed

    def show(self, rest: str) -> None:
        """show the settings, the system message and the number of messages"""
        settings = asdict(self.params)
        say("\n".join(f"{name} = {json.dumps(settings[name])}" for name in _SETTINGS))
        say(f"system = {json.dumps(self.system, ensure_ascii=False)}\nmessages = {len(self.history)}")

    def save(self, rest: str) -> None:
        """write the conversation to FILE as JSON"""
        if not rest:
            raise ArgumentError("/save needs the name of a file")
        with new_file(rest) as publish:
            publish(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n")

    def load(self, rest: str) -> None:
        """take the conversation from FILE"""
        messages = _read_messages(rest)
        self.system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
        self.history = messages

    def stats(self, rest: str) -> None:
        """tokens and speed of the last answer"""
        figures = self.partner.figures()
        if figures is None:
            raise ArgumentError("/stats: there is no answer yet")
        say(figures)

    def exit(self, rest: str) -> None:
        """end the conversation; also /quit and /bye"""
        self.over = True


ALIASES = {"quit": "exit", "bye": "exit"}


def _meaning(method: Callable[[Chat, str], None]) -> str:
    return method.__doc__ or ""


COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str, str]] = {
    name: (method, usage, _meaning(method))
    for name, method, usage in (
        ("help", Chat.help, ""),
        ("reset", Chat.reset, ""),
        ("undo", Chat.undo, ""),
        ("system", Chat.set_system, "TEXT"),
        ("set", Chat.set, "NAME VALUE"),
        ("show", Chat.show, ""),
        ("save", Chat.save, "FILE"),
        ("load", Chat.load, "FILE"),
        ("stats", Chat.stats, ""),
        ("exit", Chat.exit, ""),
    )
}


def _read_messages(name: str) -> list[Message]:
    if not name:
        raise ArgumentError("/load needs the name of a file")
    path = expand_home("/load", name)
    try:
        messages: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"/load {name}: {error.strerror or error}") from error
    except ValueError as error:
        raise FormatError(f"{name}: not JSON: {error}") from error
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise FormatError(f"{name}: expected a JSON list of messages with role and content")
    return messages


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
