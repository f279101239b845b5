"""Tool calls and reasoning in a model's output: parsed while it streams, and enforced if a call is required.

    format = parser_for(template, special)            the dialect, from the chat template and the special tokens
    parser = StreamParser(format, tools)              then parser.add(text) -> events, ..., parser.finish(cut) -> events
    lark = grammar_for(format.forced(), tools)        the grammar of a required call

Standard library only; knows no HTTP and no engine.
"""

from tinyvllm.text.parsing.formats import Format, parser_for
from tinyvllm.text.parsing.grammars import grammar_for
from tinyvllm.text.parsing.stream import Event, StreamParser
from tinyvllm.text.parsing.tools import Tool, read_tools

__all__ = ["Event", "Format", "StreamParser", "Tool", "grammar_for", "parser_for", "read_tools"]
