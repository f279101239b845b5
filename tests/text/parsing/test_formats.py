"""The dialect detected for a chat template, with the characteristic lines of real templates."""

from __future__ import annotations

import pytest

from tinyvllm.text.parsing import parser_for

QWEN = """{%- if tools %}{{- "within <tool_call></tool_call>:\\n<tool_call>\\n{\\"name\\": ..., \\"arguments\\": ...}\\n</tool_call>" }}"""
CODER = "{% if tools %}<tool_call>\\n<function=example>\\n<parameter=p1>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>{% endif %}"
LLAMA31 = """{{- 'Respond in the format {"name": function name, "parameters": dictionary}.' }}{% if builtin_tools %}<|python_tag|>"""
LLAMA32 = """{%- if tools is not none %}{{- 'Respond in the format {"name": function name, "parameters": dictionary}.' }}"""
LLAMA4 = "{% if tools %}[func_name1(params_name1=params_value1), func_name2(params)]{% endif %}"
MISTRAL = "{%- if tools %}{{- '[AVAILABLE_TOOLS]' }}{%- endif %}{{- '[TOOL_CALLS][' }}"
MISTRAL11 = "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"
HARMONY = "{% if tools %}<|start|>developer<|message|>{% endif %}<|start|>assistant<|channel|>final<|message|>"
LFM2 = "{% if tools %}<|tool_list_start|>{% endif %}<|tool_call_start|>"


@pytest.mark.parametrize(
    ("template", "special", "name"),
    [
        (QWEN, {}, "hermes"),
        (CODER, {}, "qwen_xml"),
        (LLAMA31, {}, "llama3"),
        (LLAMA32, {}, "llama3"),
        (LLAMA4, {}, "pythonic"),
        (LFM2, {}, "pythonic"),
        (MISTRAL, {}, "mistral"),
        (HARMONY, {}, "harmony"),
        ("{{ tools | tojson }}", {"<tool_call>": 9}, "hermes"),
        ("{{ tools | tojson }}", {"[TOOL_CALLS]": 9}, "mistral"),
        ("{{ messages }}", {"<|python_tag|>": 9}, "none"),
        ("{{ messages }}", {}, "none"),
        (None, {}, "none"),
    ],
)
def test_dialects(template: str | None, special: dict[str, int], name: str) -> None:
    assert parser_for(template, special).name == name


def test_marks_that_are_special_tokens_must_reach_the_parser() -> None:
    found = parser_for(MISTRAL11, {"[TOOL_CALLS]": 9, "[ARGS]": 32, "</s>": 2})
    assert found.special == {"[TOOL_CALLS]": 9, "[ARGS]": 32} and found.keep_special_tokens and found.named_arguments
    assert not parser_for(QWEN, {"<|im_end|>": 2}).keep_special_tokens
    assert parser_for(HARMONY, {"<|channel|>": 7, "<|end|>": 8}).special == {"<|channel|>": 7, "<|end|>": 8}
    assert parser_for(QWEN, {"<think>": 5, "</think>": 6}).special == {"<think>": 5, "</think>": 6}


def test_reasoning_that_the_prompt_opens() -> None:
    found = parser_for("{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>{% endif %}")
    assert found.think == ("<think>", "</think>")
    assert found.opened("<|im_start|>assistant\n<think>\n")
    assert not found.opened("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not found.opened("user says <think> and the assistant:")  # a person cannot open it
    assert found.opened("<think>first I", continued=True) and not found.opened("<think>a</think>b", continued=True)
    assert not parser_for("x").opened("<think>")
    assert parser_for("", {"[THINK]": 3, "[/THINK]": 4}).think == ("[THINK]", "[/THINK]")


def test_without_a_dialect_forced_calls_are_json() -> None:
    assert parser_for("x").forced().name == "llama3" and parser_for(QWEN).forced() == parser_for(QWEN)
