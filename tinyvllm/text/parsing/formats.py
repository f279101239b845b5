"""The dialect of tool calls and reasoning of a model, detected from its chat template and special tokens.

Dialects, and models that write them:
    hermes     <tool_call>{"name": ..., "arguments": {...}}</tool_call>                        Hermes 2 and 3, Qwen2.5, Qwen3
    llama3     {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>, joined by ;     Llama 3.1 to 3.3
    mistral    [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...}    Mistral, from tokenizer v3, v11
    qwen_xml   <tool_call><function=name><parameter=key>value</parameter></function></tool_call>  Qwen3-Coder
    pythonic   [name(key=value), ...], perhaps between marks                                    Llama 4, LFM2, ToolACE
    harmony    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>     gpt-oss
    none       the template accepts no tools: all text is content
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import field, replace

from tinyvllm.lazy_dataclass import dataclass

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"  # harmony's (harmony.py)
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
ANALYSIS, FINAL = f"{CHANNEL}analysis{MESSAGE}", f"{START}assistant{CHANNEL}final{MESSAGE}"
_REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_PYTHONIC_MARKS = (("<|python_start|>", "<|python_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>"))
_PYTHONIC_EXAMPLE = re.compile(r"\[\s*\w+\(\s*\w+\s*=")  # templates show the model an example
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Format:
    """A dialect.

    marks    texts that start a call anywhere in the output
    bare     a character that can start a call where no other content precedes it
    closing  a text that may follow the calls and is not content
    think    the marks around reasoning
    answer   what is between reasoning and a structure that must come after it
    special  ids of those marks that are special tokens; skip_special_tokens=True would remove them before the parser sees them
    """

    name: str
    marks: tuple[str, ...] = ()
    bare: str = ""
    closing: str = ""
    think: tuple[str, str] | None = None
    answer: str = ""
    special: Mapping[str, int] = field(default_factory=dict, hash=False)
    named_arguments: bool = False  # mistral: name[ARGS]{...} instead of a list of objects

    @property
    def keep_special_tokens(self) -> bool:
        """Whether the text must be decoded with skip_special_tokens=False, because marks are special tokens."""
        return bool(self.special)

    def new_id(self) -> str:
        """A new id for a call. Mistral's templates accept only ids of nine letters and digits."""
        if self.name == "mistral":
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def opened(self, prompt: str, continued: bool = False) -> bool:
        """Whether the answer to this prompt starts inside reasoning: some templates end with the opening mark.

        Only a mark at the very end counts, since a user may have written one. continued: `prompt` is the start of the answer itself
        (continue_final_message), where an open mark counts anywhere.
        """
        if self.think is None:
            return False
        before, mark, after = prompt.rpartition(self.think[0])
        return bool(mark) and (self.think[1] not in after if continued else not after.strip())

    def forced(self) -> Format:
        """The dialect for calls that a grammar enforces: itself, or plain JSON calls if the template supports no tools."""
        return self if self.name != "none" else replace(self, name="llama3", bare="{")


def parser_for(chat_template: str | None, special: Mapping[str, int] | None = None) -> Format:
    """The dialect of a model. special: its special tokens, id by text; they decide if the template shows no dialect."""
    special = special or {}
    template = chat_template or ""
    think = next((pair for pair in _REASONING if pair[1] in template or all(mark in special for mark in pair)), None)
    if all(mark in template for mark in (CHANNEL, MESSAGE)) or (not template and all(mark in special for mark in MARKS)):
        own = {mark: special[mark] for mark in MARKS if mark in special}
        return Format("harmony", think=(ANALYSIS, ENDS[0]), answer=FINAL, special=own)
    dialect = replace(_dialect(template, special), think=think)
    marks = {*dialect.marks, dialect.closing, *(think or ()), *(("[ARGS]", "[CALL_ID]") if dialect.name == "mistral" else ())}
    return replace(dialect, special={mark: special[mark] for mark in sorted(marks) if mark in special})


def _dialect(template: str, special: Mapping[str, int]) -> Format:
    if "<function=" in template and "<parameter=" in template:
        return Format("qwen_xml", ("<tool_call>", "<function="))
    if "<tool_call>" in template:
        return Format("hermes", ("<tool_call>",), closing="</tool_call>")
    if "[TOOL_CALLS]" in template:
        return Format("mistral", ("[TOOL_CALLS]",), named_arguments="[ARGS]" in template)
    for start, end in _PYTHONIC_MARKS:
        if start in template and "tools" in template:
            return Format("pythonic", (start,), "[", end)
    if "tools" in template and _PYTHONIC_EXAMPLE.search(template):
        return Format("pythonic", (), "[")
    if "<|python_tag|>" in template or ('"parameters"' in template and '"name"' in template and "tools" in template):
        return Format("llama3", ("<|python_tag|>",), "{")
    for mark, dialect in (
        ("<tool_call>", Format("hermes", ("<tool_call>",), closing="</tool_call>")),
        ("[TOOL_CALLS]", Format("mistral", ("[TOOL_CALLS]",), named_arguments="[ARGS]" in special)),
        ("<|python_tag|>", Format("llama3", ("<|python_tag|>",), "{")),
    ):
        if "tools" in template and mark in special:
            return dialect
    return Format("none")
