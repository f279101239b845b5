"""Grammars of required calls in each dialect, in llguidance's variant of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tinyvllm.errors import RequestError
from tinyvllm.text.parsing.formats import CHANNEL, CONSTRAIN, MESSAGE, START, Format
from tinyvllm.text.parsing.tools import Tool, read_tools

_STRING = r'/"([^"\\\x00-\x1F]|\\["\\nt])*"/'  # the same in JSON and Python

_AS_DUMPED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_for(
    format: Format,
    tools: Sequence[Mapping[str, Any]],
    named: str | None = None,
    parallel: bool = True,
) -> str:
    """A grammar of exactly one call; with `parallel` and no `named`, of one or several.

    format  a dialect with calls (Format.forced)
    named   the only tool that may be called

    RequestError for missing or unknown tools. Reasoning may precede the calls: the engine applies a grammar after reasoning has ended.
    """
    known = read_tools(tools)
    if named is not None:
        if named not in known:
            raise RequestError(f"tool_choice names {named!r}, which is not one of the tools ({', '.join(known) or 'there are none'})")
        known = {named: known[named]}
    if format.name not in _DIALECTS:
        raise RequestError(f"tool_choice: calls cannot be required of a model with the tool format {format.name!r}")
    if not known:
        raise RequestError("tool_choice: requires a call, but the request has no tools")
    rules = _Rules(format, list(known.values()), parallel and named is None)
    calls = _DIALECTS[format.name](rules)
    return "\n".join([f"start: {calls}", *rules.lines]) + "\n"


class _Rules:
    """The rules of a grammar; the method of a dialect adds them and returns the expression of its calls."""

    def __init__(self, format: Format, tools: list[Tool], many: bool):
        self.format = format
        self.tools = tools
        self.many = many
        self.lines: list[str] = []

    def hermes(self) -> str:
        self._objects("arguments")
        return self._some(f'({self._mark("<tool_call>")} "\\n" call "\\n" {self._mark("</tool_call>")})', "\n")

    def llama3(self) -> str:
        self._objects("parameters")
        return self._some("call", "; ")

    def mistral(self) -> str:
        mark = self._mark("[TOOL_CALLS]")
        if not self.format.named_arguments:
            self._objects("arguments")
            return f'{mark} "[" {self._some("call", ", ")} "]"'
        for number, tool in enumerate(self.tools):
            self.lines.append(f"call{number}: {mark} {_quoted(tool.name)} {self._mark('[ARGS]')} arguments{number}")
            self.lines.append(f"arguments{number}: %json {_json(_object(tool))}")
        self._any_call()
        return self._some("call", "")

    def pythonic(self) -> str:
        for number, tool in enumerate(self.tools):
            items = {key: f"{_quoted(key + '=')} {self._python(number, index, tool, key)}" for index, key in enumerate(_keys(tool))}
            self.lines.append(f"call{number}: {_quoted(tool.name + '(')} first{number}_0 {_quoted(')')}")
            self._separated(number, items, tool, ", ")
        self._any_call()
        calls = f'"[" {self._some("call", ", ")} "]"'
        if self.format.marks and self.format.closing:
            return f"{self._mark(self.format.marks[0])} {calls} {self._mark(self.format.closing)}"
        return calls

    def qwen_xml(self) -> str:
        for number, tool in enumerate(self.tools):
            parts = []
            for index, key in enumerate(_keys(tool)):
                self._xml(f"value{number}_{index}", tool, key)
                part = f"{_quoted(f'<parameter={key}>' + chr(10))} value{number}_{index}"
                parts.append(part if key in _required(tool) else f"({part})?")
            head, tail = _quoted(f"<function={tool.name}>\n"), _quoted("</function>\n")
            self.lines.append(f"call{number}: {' '.join([head, *parts, tail])}")
        self._any_call()
        return self._some(f'({self._mark("<tool_call>")} "\\n" call {self._mark("</tool_call>")})', "\n")

    def harmony(self) -> str:
        """One call, which ends the answer. Its message may have no start: the prompt has that of the first."""
        start, channel, constrain, message = (self._mark(mark) for mark in (START, CHANNEL, CONSTRAIN, MESSAGE))
        for number, tool in enumerate(self.tools):
            head = f'{channel} {_quoted(f"commentary to=functions.{tool.name} ")} {constrain} "json" {message}'
            self.lines += [f"call{number}: {head} arguments{number}", f"arguments{number}: %json {_json(_object(tool))}"]
        self._any_call()
        return f'({start} "assistant")? call'

    def _xml(self, name: str, tool: Tool, key: str) -> None:
        """Add a rule for a value and the mark after it."""
        end, types = "\n</parameter>\n", tool.types(key)
        values = tool.schema_of(key).get("enum")
        if types <= {"string"} and isinstance(values, list) and all(isinstance(value, str) for value in values):
            self.lines.append(f"{name}: ({' | '.join(map(_quoted, values))}) {_quoted(end)}")
        elif types <= {"string"}:
            mark, rest = _quoted(end.strip()), _quoted(end[-1])
            self.lines += [f"{name}: {name}_text {rest}", f"{name}_text[suffix={mark}]: " + r"/(.|\n)*/"]
        else:
            self.lines += [f"{name}: {name}_json {_quoted(end)}", f"{name}_json: %json {_json(_part(tool, key))}"]

    def _python(self, number: int, index: int, tool: Tool, key: str) -> str:
        """Add a rule for one argument's literal, and return its name."""
        name, schema, types = f"value{number}_{index}", tool.schema_of(key), tool.types(key)
        values = schema.get("enum")
        if isinstance(values, list) and values:
            self.lines.append(f"{name}: {' | '.join(_quoted(repr(value)) for value in values)}")
        elif types == {"boolean"}:
            self.lines.append(f'{name}: "True" | "False"')
        elif types == {"string"}:
            self.lines.append(f"{name}: {_STRING}")
        else:
            self.lines.append(f"{name}: %json {_json(_part(tool, key))}")
        return name

    def _separated(self, number: int, items: dict[str, str], tool: Tool, between: str) -> None:
        """Add rules for all required items and any optional ones, in order: first_i has no item before it, later_i has one."""
        for index, (key, item) in enumerate(items.items()):
            for name, before in (("first", ""), ("later", _quoted(between) + " ")):
                skip = "" if key in _required(tool) else f" | {name}{number}_{index + 1}"
                self.lines.append(f"{name}{number}_{index}: {before}{item} later{number}_{index + 1}{skip}")
        self.lines += [f'{name}{number}_{len(items)}: ""' for name in ("first", "later")]

    def _objects(self, arguments: str) -> None:
        for number, tool in enumerate(self.tools):
            head = _quoted(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": ')
            self.lines += [f'call{number}: {head} arguments{number} "}}"', f"arguments{number}: %json {_json(_object(tool))}"]
        self._any_call()

    def _any_call(self) -> None:
        self.lines.append("call: " + " | ".join(f"call{number}" for number in range(len(self.tools))))

    def _some(self, call: str, between: str) -> str:
        return f"{call} ({_quoted(between) + ' ' if between else ''}{call})*" if self.many else call

    def _mark(self, mark: str) -> str:
        return f"<[{self.format.special[mark]}]>" if mark in self.format.special else _quoted(mark)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    """A schema for %json, with the separators of json.dumps: if whitespace were free, small models would write it without end."""
    return json.dumps({"x-guidance": _AS_DUMPED, **schema}, ensure_ascii=False)


def _keys(tool: Tool) -> list[str]:
    properties = tool.parameters.get("properties")
    return list(properties) if isinstance(properties, Mapping) else []


def _required(tool: Tool) -> Sequence[str]:
    required = tool.parameters.get("required")
    return required if isinstance(required, list) else ()


def _object(tool: Tool) -> Mapping[str, Any]:
    """The schema of all arguments; an empty object for a tool that declares none."""
    if not tool.parameters.get("properties") and set(tool.parameters) <= {"type", "properties", "required"}:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **tool.parameters}


def _part(tool: Tool, key: str) -> Mapping[str, Any]:
    """The schema of one argument, with the definitions that it may refer to."""
    return {**tool.schema_of(key), **{name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}}


_DIALECTS: Mapping[str, Callable[[_Rules], str]] = {
    "hermes": _Rules.hermes,
    "llama3": _Rules.llama3,
    "mistral": _Rules.mistral,
    "pythonic": _Rules.pythonic,
    "harmony": _Rules.harmony,
    "qwen_xml": _Rules.qwen_xml,
}
