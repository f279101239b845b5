"""Tokenizers and chat templates against transformers, on folders that transformers itself loads. Needs `make test-peers`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is installed by `make test-peers` only")

from transformers import AutoTokenizer

from tests.text.vocabularies import NASTY, SPECIALS, byte_level, llama2_json, sentencepiece_model, tiktoken_lines, write_folder
from tinyvllm.errors import TokenizerError
from tinyvllm.text.chat import render_chat
from tinyvllm.text.load import load_tokenizer

PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True}
BYTE_LEVEL = PLAIN | {"bos_token": SPECIALS[0], "eos_token": SPECIALS[2]}
LLAMA2 = PLAIN | {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
ADDED = {
    "added_tokens_decoder": {
        str(byte_level().get_vocab_size()): {"content": "<|user|>", "special": True, "rstrip": True},
        str(byte_level().get_vocab_size() + 1): {"content": "<think>", "special": False},
    }
}
TEXTS = (*NASTY, "<s>the fox</s> the", "a<|eot_id|> b<|begin_of_text|>", "<|user|> \n the <think>fox", "a . b , c ! don 't")


def folder_of(kind: str, folder: Path) -> Path:
    if kind == "byte-level":
        return write_folder(folder, byte_level(), tokenizer_config=BYTE_LEVEL)
    if kind == "byte-level without bos":
        return write_folder(folder, byte_level(), tokenizer_config=BYTE_LEVEL | {"add_bos_token": False})
    if kind == "byte-level, bos and eos":
        return write_folder(folder, byte_level(), tokenizer_config=BYTE_LEVEL | {"add_bos_token": True, "add_eos_token": True})
    if kind == "byte-level, more tokens":
        return write_folder(folder, byte_level(), tokenizer_config=BYTE_LEVEL | ADDED)
    if kind == "llama 2":
        return write_folder(folder, llama2_json(sentencepiece_model()), tokenizer_config=LLAMA2)
    assert kind == "llama 2, not legacy"
    return write_folder(folder, llama2_json(sentencepiece_model(), legacy=False), tokenizer_config=LLAMA2)


@pytest.mark.parametrize(
    "kind",
    ["byte-level", "byte-level without bos", "byte-level, bos and eos", "byte-level, more tokens", "llama 2", "llama 2, not legacy"],
)
def test_tokenizer_json(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path)
    reference, tokenizer = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert tokenizer.bos_id == reference.bos_token_id
    assert tokenizer.eos_ids == (reference.eos_token_id,)
    assert tokenizer.special_ids == set(reference.all_special_ids) | {i for i, t in reference.added_tokens_decoder.items() if t.special}
    assert tokenizer.vocab_size == len(reference)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), text
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize("legacy", [True, False])
def test_sentencepiece_model(legacy: bool, tmp_path: Path) -> None:
    config = LLAMA2 | {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, "add_bos_token": True}
    folder = write_folder(tmp_path, **{"tokenizer.model": sentencepiece_model(), "tokenizer_config": config})
    reference, tokenizer = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in TEXTS:
        if re.search("^[ ▁]" if not legacy else "(^|<s>|</s>|<unk>)[ ▁]", text):
            continue  # the conversion puts no second space in front of such texts; sentencepiece does, and so do we
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), text
        if "<unk>" not in text:
            assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True), text


def test_tiktoken_model(tmp_path: Path) -> None:
    count = len(tiktoken_lines(byte_level()).splitlines())
    added = {str(count + i): {"content": token, "special": True} for i, token in enumerate(SPECIALS)}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
        "added_tokens_decoder": added,
    }
    folder = write_folder(tmp_path, **{"tokenizer.model": tiktoken_lines(byte_level()), "tokenizer_config": config})
    reference, tokenizer = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False), text
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


MESSAGES = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hello <b>&amp; 'you' 日本\n\n"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "é<"}}}]},
    {"role": "tool", "content": "3"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object", "properties": {}}}}]
CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}{% set ns.last = loop.index0 %}{% break %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim }}
    {%- if message.tool_calls %}{% for call in message.tool_calls %}
        {{- '\\n<tool_call>' }}{{ call.function.arguments | tojson(indent=1) }}
    {%- endfor %}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}{% if thinking is defined and thinking is false %}{{ '<think></think>' }}{% endif %}
{%- endif %}
  {{ ns.last }} {{ dict(a=1) | tojson }} {{ bos_token }} {{ strftime_now('%d %b %Y') }}
"""


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"add_generation_prompt": False}, {"thinking": False}])
@pytest.mark.parametrize("named", [False, True])
def test_chat_template(options: dict[str, Any], named: bool, tmp_path: Path) -> None:
    template: Any = CHATML
    if named:
        template = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "tools!" + CHATML}]
    folder = write_folder(tmp_path, byte_level(), tokenizer_config=BYTE_LEVEL | {"chat_template": template})
    reference, tokenizer = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    ours = render_chat(tokenizer, MESSAGES, **options)
    theirs = reference.apply_chat_template(MESSAGES, tokenize=False, **({"add_generation_prompt": True} | options))
    assert ours == theirs
    ids = tokenizer.encode(ours, add_special_tokens=False)
    assert ids == reference.apply_chat_template(MESSAGES, return_dict=False, **({"add_generation_prompt": True} | options))


def test_both_refuse(tmp_path: Path) -> None:
    template = "{{ raise_exception('no system message, please') }}"
    folder = write_folder(tmp_path, byte_level(), tokenizer_config=BYTE_LEVEL | {"chat_template": template})
    with pytest.raises(Exception, match="no system message, please"):
        AutoTokenizer.from_pretrained(folder).apply_chat_template(MESSAGES, tokenize=False)
    with pytest.raises(TokenizerError, match="no system message, please"):
        render_chat(load_tokenizer(folder), MESSAGES)
