"""Grammars over a small vocabulary: every kind, masks, ends, forced tokens, ways back; and grammars made to hurt, which are errors."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.sampling.forcing import BOS, END, EOS, TOKENS, WORDS, V, allowed, force, new_backend
from tests.text.vocabularies import byte_level, llama2_json, metaspace_json, sentencepiece_model, write_folder
from tinyvllm.errors import OutOfMemoryError, RequestError
from tinyvllm.request import StructuredOutputsParams
from tinyvllm.sampling.grammar import AS_DUMPED, Grammar, GrammarBackend, Pool, fill_all
from tinyvllm.sampling.mask_worker import MaskWorker
from tinyvllm.text.load import load_tokenizer

ONE = TOKENS.index(b"1", 256)


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    return new_backend()


def token(text: bytes) -> int:
    return TOKENS.index(text)


KINDS = {
    "regex": ({"regex": r"[ab]+\d?"}, ["a", "abba1"], ["", "1", "a12", "c"]),
    "regex with marks": ({"regex": "^(tr|12)+$"}, ["tr12"], ["t", "tr1"]),
    "choice": ({"choice": ['say "é"\n\\', "yes", "ye"]}, ['say "é"\n\\', "yes", "ye"], ["y", "yess", ""]),
    "json": ({"json": '{"type": "array", "items": {"type": "null"}}'}, ["[null, null]", "[]"], ["[1]", "null", " []"]),
    "json_object": ({"json_object": True}, ['{"a": [1, {"b": null}]}', "{}"], ["[]", "1", '{"a"}']),
    "lark": ({"grammar": 'start: "a" DIGITS? | start "," start\nDIGITS: /[0-9]+/\n'}, ["a", "a12", "a,a1"], ["1", "a,"]),
    "lark with json": ({"grammar": 'start: "x" %json {"const": {"&": 1}} // &\n'}, ['x{"&":1}'], ['{"&":1}', "x"]),
    "lark with names": ({"grammar": 'start: %json {"properties": {"a": {"type": "null"}}}\n'}, ['{"a":null}'], ['{"\\u0061":1}']),
    "lark with JSON as dumped": (
        {"grammar": "start: %json " + json.dumps({"x-guidance": AS_DUMPED, "type": "array"}) + "\n"},
        ["[1, 2]"],
        ["[1,2]", "[ 1]"],
    ),
    "lark with ::= in a literal": ({"grammar": 'start: "a ::= b"\n'}, ["a ::= b"], ["a"]),
    "gbnf": ({"grammar": 'root ::= "a" ("b" | [0-9]+)*\n'}, ["a", "ab12b"], ["b", "a-"]),
    "no whitespace": ({"json_object": True, "disable_any_whitespace": True}, ['{"a":[1,2]}'], ['{"a": 1}', '{"a":[1, 2]}']),
    "default blanks": (
        {"json_object": True},
        [
            '{"a":[1,2]}',
            '{"a": [1, 2]}',
            '{ "a" : [ 1 ] }',
            '{\n  "a": [\n    1,\n    2\n  ]\n}',
            '{\n\t\t"a": 1\n}',
            "{\n" + " " * 20 + '"a":1}',
            "{}",
        ],
        ['{"a":  1}', '{\n\n"a": 1}', '{ \n"a": 1}', "{\n" + " " * 21 + '"a":1}', '{"a":\t1}', '{"a":1\n \n}', '{\r"a":1}', " {}", "{}\n"],
    ),
    "default blanks in a schema": ({"json": {"type": "array"}}, ["[1,\n 2]", "[1, 2]"], ["[1,\n\n2]", "[1,  2]"]),
    "default blanks in a grammar": ({"grammar": 'start: "x" %json {"type": "array"}\n'}, ["x[1, 2]", "x[\n1]"], ["x[1,  2]", "x[\n\n1]"]),
    "other blanks": ({"json_object": True, "whitespace_pattern": r"\s*"}, ['{\n\n\n  "a":\t1}', "{}"], []),
    "one blank": ({"json": {"type": "array"}, "whitespace_pattern": " "}, ["[1, 2]", "[1,2]"], ["[1,  2]", "[1,\n2]"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(backend: GrammarBackend, kind: str) -> None:
    asked, good, bad = KINDS[kind]
    params = StructuredOutputsParams(**asked)
    assert [text for text in good if not force(backend, params, text)] == []
    assert [text for text in bad if force(backend, params, text)] == []


def test_a_mask_holds_every_spelling_and_ends_only_where_the_grammar_may(backend: GrammarBackend) -> None:
    grammar = Grammar(backend.compile(StructuredOutputsParams(regex="(1|tr)2*")))
    assert allowed(grammar) == {ord("1"), ONE, token(b"12"), ord("t"), token(b"tr")}
    assert not grammar.accept(ord("2")) and not grammar.accept(EOS) and not grammar.accept(BOS)
    assert grammar.accept(ONE)
    assert (grammar.accepting, grammar.finished) == (True, False)
    assert allowed(grammar) == {ord("2"), EOS, END}
    assert grammar.accept(END)
    assert (grammar.accepting, grammar.finished, grammar.error) == (True, True, None)
    assert allowed(grammar) == {EOS, END}


def test_the_way_back(backend: GrammarBackend) -> None:
    grammar = Grammar(backend.compile(StructuredOutputsParams(regex="abc|axd")))
    before = allowed(grammar)
    assert [grammar.accept(t) for t in (token(b"ab"), ord("c"), EOS, END)] == [True] * 4
    assert grammar.finished and not grammar.accept(ord("c"))
    grammar.rollback(1)
    assert grammar.finished and allowed(grammar) == {EOS, END}
    grammar.rollback(2)
    assert not grammar.finished and allowed(grammar) == {ord("c")}
    grammar.rollback(1)
    grammar.rollback(0)
    assert allowed(grammar) == before
    with pytest.raises(ValueError, match="cannot be taken back"):
        grammar.rollback(1)


def test_sequences_of_one_grammar_are_independent(backend: GrammarBackend) -> None:
    compiled = backend.compile(StructuredOutputsParams(regex="ab*c"))
    first, second = Grammar(compiled), Grammar(compiled)
    assert first.accept(ord("a")) and first.accept(ord("c"))
    assert first.finished and not second.finished and ord("a") in allowed(second)


def test_compiled_once_for_the_same_content(backend: GrammarBackend) -> None:
    first = backend.compile(StructuredOutputsParams(json={"type": "object", "properties": {"a": {}, "b": {}}}))
    assert backend.compile(StructuredOutputsParams(json={"type": "object", "properties": {"a": {}, "b": {}}})) is first
    assert backend.compile(StructuredOutputsParams(json={"type": "object", "properties": {"b": {}, "a": {}}})) is not first
    assert backend.compile(StructuredOutputsParams(regex="x")) is not backend.compile(StructuredOutputsParams(choice=["x"]))
    for i in range(256):
        backend.compile(StructuredOutputsParams(regex=f"y{i}"))
    assert backend.compile(StructuredOutputsParams(json={"type": "object", "properties": {"a": {}, "b": {}}})) is not first


def test_masks_of_a_batch_in_a_pool_and_in_a_worker(backend: GrammarBackend) -> None:
    grammars = [Grammar(backend.compile(StructuredOutputsParams(regex=f"{letter}+12"))) for letter in "abc"]
    assert grammars[1].accept(ord("b"))
    expected = np.zeros((3, WORDS), np.int32)
    for row, grammar in zip(expected, grammars):
        grammar.fill(row)
    mask = np.full((5, WORDS), 7, np.int32)
    fill_all(grammars, mask, Pool(2))
    np.testing.assert_array_equal(mask, [*expected, *np.full((2, WORDS), 7)])
    worker = MaskWorker(2)
    worker.wait()  # nothing was started
    for _ in range(3):
        mask[:] = 7
        worker.start(zip(grammars, (4, 0, 2)), mask)
        with pytest.raises(RuntimeError, match="not waited for"):
            worker.start([], mask)
        worker.wait()
        np.testing.assert_array_equal(mask, [expected[1], [7] * WORDS, expected[2], [7] * WORDS, expected[0]])
    worker.start([(grammars[0], 9)], mask)  # no such row
    with pytest.raises(Exception, match="(?i)index|row|batch"):
        worker.wait()
    worker.start([(grammars[0], 1)], mask)  # and works after it
    worker.wait()
    np.testing.assert_array_equal(mask[1], expected[0])
    worker.close()
    assert "tinyvllm-masks" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("row", [np.zeros(WORDS + 1, np.int32), np.zeros((WORDS, 2), np.int32)[:, 0], np.zeros(WORDS * 4, np.uint8)[::-1]])
def test_a_mask_of_another_shape_is_refused(backend: GrammarBackend, row: np.ndarray) -> None:
    with pytest.raises(ValueError, match=f"{WORDS} words"):
        Grammar(backend.compile(StructuredOutputsParams(regex="x"))).fill(row)


ERRORS = [
    ({"regex": "("}, r"regex: unclosed group at character 1, in '\(': close it with \), or write \\\( for the character$"),
    ({"regex": r"\bword"}, r"regex: word boundaries .*not supported: leave \\b out"),
    ({"regex": "a/\n(?=b)c"}, r"regex: look-around.* not supported at character 4, in 'a/\\n\(\?=b\)c': write"),
    ({"regex": r"(a)\1"}, r"regex: backreferences are not supported at character 4, in .*: repeat the group"),
    ({"regex": "a\\"}, r"regex: unfinished escape at character 2"),
    ({"regex": "x" * 500 + "("}, r"regex: unclosed group at character 501, in \.\.\.'x{24}\(': "),
    ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace belongs to json and json_object, but regex is given"),
    ({"choice": ["a"], "whitespace_pattern": " "}, "whitespace_pattern belongs to json"),
    ({"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "}, "give disable_any_whitespace or"),
    ({"json_object": True, "whitespace_pattern": "("}, "whitespace_pattern: unclosed group at character 1"),
    ({"json_object": True, "whitespace_pattern": "\\"}, "whitespace_pattern: unfinished escape"),
    ({"choice": ["\ud800"]}, r"choice: a lone surrogate '\\ud800'"),
    (
        {"grammar": "start: a\na: missing\n"},
        "grammar: no rule or terminal is named 'missing' at line 2, character 4, in 'a: missing': define it",
    ),
    ({"grammar": 'start: "a\n'}, "grammar: not a word of the grammar at line 1, character 10, in 'start: \"a': texts are in double quotes"),
    ({"grammar": "start: /(/\n"}, "grammar: a regular expression at line 1, character 8, .*: unclosed group: close it"),
    ({"grammar": 'strt: "a"\n'}, "grammar: no start rule found: name the first rule start"),
    ({"grammar": 'start: %json {"type":\n"null"} missing\n'}, "grammar: no rule or terminal is named 'missing': define it"),
    ({"grammar": "start: " + "x" * 1000}, r"grammar: no rule or terminal is named 'x{40}\.\.\.' at line 1, character 8, "),
    ({"grammar": "root ::= missing\n"}, "grammar: not GBNF: no rule or terminal is named 'missing': define it"),
    ({"grammar": 'root ::= "a" )\n'}, r"grammar: not GBNF: expected name at line 1, before '\)'"),
    ({"grammar": 'root ::= ( "a"\n'}, r"grammar: not GBNF: expected '\)' at line 2, at the end"),
    ({"grammar": 'root ::= "a"{2,1}\n'}, "grammar: range end must be >= start"),
    ({"grammar": "start: A\nA: /a/ & /b/\n"}, "grammar: the operators & and ~"),
    ({"grammar": 'start: a\na[temperature=0.5]: "x"\n'}, "grammar: a rule's temperature"),
    (
        {"grammar": 'start: %json {"containz": {}}\n'},
        "grammar: %json: #/containz: the keyword 'containz' is unknown and looks like a misspelt",
    ),
    ({"grammar": "start: %json {\n"}, "grammar: no JSON after %json"),
    ({"grammar": "start: %json " + json.dumps({"const": "x" * 70_000}) + "y" * 70_000}, "grammar: 70.* characters, at most 65536"),
]


@pytest.mark.parametrize(("asked", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors_name_the_field_and_the_reason(backend: GrammarBackend, asked: dict, message: str) -> None:
    with pytest.raises(RequestError, match=f"^structured_outputs: {message}") as raised:
        backend.compile(StructuredOutputsParams(**asked))
    message = str(raised.value)
    assert len(message) < 400 and not any(
        inside in message for inside in ("\n", " ^", "regex parse", "1 |", "1(")
    )  # the library's own words


def references(n: int, step: str) -> str:
    """A JSON schema whose root reaches a text by n references, each in a schema made of `step`."""
    definitions = [f'"d{i}": {step}'.replace("NEXT", f'{{"$ref": "#/$defs/d{i + 1}"}}') for i in range(n)]
    definitions.append(f'"d{n}": {{"type": "string"}}')
    return f'{{"$ref": "#/$defs/d0", "$defs": {{{", ".join(definitions)}}}}}'


BOMBS = {
    "a nested repetition": {"regex": "((((a{100}){100}){100}){100}){100}"},
    "a long regex": {"regex": "a" * 70_000},
    "brackets": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "stars": {"regex": "a" + "*" * 60_000},
    "doubling rules": {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)) + 'r40: "a"\n'},
    "doubling terminals": {"grammar": "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(40)) + 'R40: "a"\n'},
    "many alternatives": {"grammar": "start: " + " | ".join(f'"k{i}"' for i in range(5_000)) + "\n"},
    "brackets of a grammar": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "brackets of GBNF": {"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "a regex in a grammar": {"grammar": "start: A\nA: (/(.*a.{20})/ & /(.*b.{19})/) & ~/.*c.{30}/\n"},
    "many properties": {"json": {"properties": {f"k{i}": {} for i in range(8_000)}}},
    "many values": {"json": {"enum": list(range(40_000))}},
    "products of alternatives": {
        "json": {"allOf": [{"anyOf": [{"type": "object", "properties": {f"a{i}{j}": {}}} for j in range(6)]} for i in range(10)]}
    },
    "a large multiple": {"json": {"type": "integer", "multipleOf": 99_999_999}},
    "a large multiple in a grammar": {"grammar": 'start: %json {"type": "integer", "multipleOf": 99999999}\n'},
    "references that fork": {"json": references(3_000, '{"anyOf": [NEXT, {"type": "null"}]}')},
    "a loop without an end": {"json": '{"type": "array", "items": {"$ref": "#"}, "minItems": 1}'},
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_errors(backend: GrammarBackend, bomb: str) -> None:
    """At compilation or some tokens later; those that would hang or take the process along fail here as no exception would."""
    try:
        grammar = Grammar(backend.compile(StructuredOutputsParams(**BOMBS[bomb])))
    except RequestError:
        return
    mask = np.zeros(WORDS, np.uint32)
    for _ in range(50):
        grammar.fill(mask)
        if grammar.error is not None:
            assert len(grammar.error) < 400
            return
        grammar.accept(int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]))
    assert bomb == "a loop without an end"  # its output grows as long as it may


@pytest.mark.parametrize("asked", [
    {"json": references(3_000, '{"type": "array", "items": NEXT, "minItems": 1}')},
    {"json": references(5_000, "NEXT")},
    {"grammar": "start: r0\n" + "".join(f'r{i}: r{i + 1} "b"\n' for i in range(3_200)) + 'r3200: "a"\n'},
    {"grammar": "start: R0\n" + "".join(f'R{i}: "b" R{i + 1}\n' for i in range(3_200)) + 'R3200: "a"\n'},
], ids=["arrays", "references", "rules", "terminals"])  # fmt: skip
def test_depth_does_not_overflow_the_stack(asked: dict) -> None:
    """In a process of its own, since it would be its end."""
    code = (
        "import sys; from tests.sampling.forcing import *\n"
        "b = new_backend(); g = Grammar(b.compile(StructuredOutputsParams(**eval(sys.stdin.read()))))\n"
        "m = np.zeros(WORDS, np.int32)\n"
        "for _ in range(5):\n"
        "    g.fill(m); g.accept(int(np.flatnonzero(np.unpackbits(m.view(np.uint8), bitorder='little'))[0]))\n"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", code], input=repr(asked), text=True, cwd=root, capture_output=True)
    assert ran.returncode == 0, ran.stderr[-500:]


def test_a_grammar_that_outgrows_its_limits_harms_no_other(backend: GrammarBackend) -> None:
    """One sequence drives an automaton of 2^26 states to its limit; another of the same grammar continues."""
    compiled = backend.compile(StructuredOutputsParams(regex=".*a.{25}"))
    first, second = Grammar(compiled), Grammar(compiled)
    mask, chance = np.zeros(WORDS, np.int32), random.Random(0)
    while first.accept(chance.choice(b"ab")):
        first.fill(mask)
    assert "too many states" in str(first.error) and not first.accept(EOS) and first.forced() == []
    for _ in range(100):
        assert second.accept(chance.choice(b"ab"))
        second.fill(mask)
    assert second.error is None


def test_memory_that_runs_out_while_the_library_is_imported_is_not_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    class Importer:
        def find_spec(self, name: str, *rest: object) -> None:
            if name == "llguidance":
                raise ImportError("libpython.so: failed to map segment from shared object")

    monkeypatch.delitem(sys.modules, "llguidance", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Importer(), *sys.meta_path])
    with pytest.raises(ImportError, match="failed to map segment"):
        new_backend()


@pytest.mark.parametrize("failing", ["the masks of a step", "a grammar"])
def test_without_memory_a_grammar_is_refused_before_the_library_ends_the_process(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    @contextmanager
    def refuse(nbytes: int, what: str) -> Iterator[None]:
        if what == failing and full:
            raise OutOfMemoryError(f"{what} needs {nbytes}")
        yield

    full = False
    monkeypatch.setattr("tinyvllm.sampling.grammar.native_call", refuse)
    backend = new_backend()
    grammar = Grammar(backend.compile(StructuredOutputsParams(choice=["one"])))
    full = True
    with pytest.raises(OutOfMemoryError, match=failing):
        backend.compile(StructuredOutputsParams(choice=["two"]))
        Pool(1).fill([(grammar, 0)], np.zeros((1, -(-V // 32)), np.int32))
    full = False
    assert Grammar(backend.compile(StructuredOutputsParams(choice=["two"]))).error is None


TOKENIZERS = {
    "byte_level": byte_level,
    "llama2": lambda: llama2_json(sentencepiece_model()),
    "llama2_first": lambda: llama2_json(sentencepiece_model(), legacy=False),
    "metaspace": metaspace_json,
    "sentencepiece": None,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_forced_tokens_are_the_tokenizers_own(name: str, tmp_path: Path) -> None:
    """Over real tokenizers: what is forced spells the text, is what the tokenizer would have chosen, and every mask allows it."""
    make = TOKENIZERS[name]
    files = {"tokenizer.model": sentencepiece_model()} if make is None else {}
    tokenizer = load_tokenizer(write_folder(tmp_path, make() if make else None, **files))
    size, eos = tokenizer.vocab_size, next(iter(sorted(tokenizer.special_ids)))
    tokens = [tokenizer.token_bytes(i) for i in range(size)]
    backend = GrammarBackend(tokens, tokenizer.special_ids, (eos,), size + 7, tokenizer.encode_within)
    text = "the quick brown fox jumps over the lazy dog"
    grammar = Grammar(backend.compile(StructuredOutputsParams(regex=f"{text}(s| again)")))
    forced = grammar.forced()
    spelled = b"".join(tokens[i] for i in forced)
    assert len(spelled) > 20 and text.encode().startswith(spelled)
    assert forced == (tokenizer.encode_within(text) or [])[: len(forced)]
    mask = np.zeros(-(-(size + 7) // 32), np.int32)
    for i in forced:
        grammar.fill(mask)
        assert mask[i // 32] >> (i % 32) & 1
        assert grammar.accept(i)
    grammar.rollback(len(forced))
    assert grammar.forced() == forced


def test_forced_tokens_stop_where_the_model_has_a_choice(backend: GrammarBackend) -> None:
    grammar = Grammar(backend.compile(StructuredOutputsParams(regex="x(tr|a)y")))
    assert grammar.forced() == [ord("x")]
    assert grammar.accept(ord("x")) and grammar.forced() == []
    assert grammar.accept(token(b"tr")) and grammar.forced() == [ord("y")]
    assert grammar.accept(ord("y")) and grammar.forced() == [] and grammar.finished


def test_text_within_a_text(tmp_path: Path) -> None:
    for name, make in TOKENIZERS.items():
        files = {"tokenizer.model": sentencepiece_model()} if make is None else {}
        tokenizer = load_tokenizer(write_folder(tmp_path / name, make() if make else None, **files))
        for text in ("", "fox", " fox", "  two", "fox jumps", "x\n"):
            ids = tokenizer.encode_within(text)
            if ids is None:
                assert name == "metaspace"  # a Unigram vocabulary that lacks the letters
                continue
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        special = tokenizer.token_bytes(next(iter(tokenizer.special_ids))).decode()
        assert tokenizer.encode_within(f"a{special}b") is None


def test_a_model_without_an_end_is_refused() -> None:
    with pytest.raises(RequestError, match="no end of sequence"):
        GrammarBackend(TOKENS, {BOS}, (V + 3,), V)


def test_without_llguidance_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'tinyvllm\[structured\]'"):
        new_backend()
