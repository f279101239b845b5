"""Conformance of JSON schemas, keyword by keyword: what is enforced, what only describes, what is refused; and the table that says so."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.sampling.forcing import EOS, PIECES, TOKENS, allowed, force, new_backend
from tinyvllm.errors import RequestError
from tinyvllm.request import StructuredOutputsParams
from tinyvllm.sampling.grammar import Grammar, GrammarBackend
from tinyvllm.sampling.schema import ANNOTATIONS, ENFORCED, FORMATS, MAX_CHARS, read_schema

PAGE = Path(__file__).parents[2] / "docs" / "structured.md"

DRAFT_4, DRAFT_7 = (f"http://json-schema.org/draft-0{n}/schema#" for n in (4, 7))
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"

# keyword -> (schema, instances that it allows, instances that it does not)
CASES: dict[str, list[tuple[dict[str, Any], list[Any], list[Any]]]] = {
    "type": [
        ({"type": "integer"}, [0, -12, 345], [1.5, "1", None, True]),
        ({"type": ["null", "string"]}, [None, "", "ab"], [0, [], {}]),
        ({"type": "boolean"}, [True, False], [0, "true"]),
        ({"type": "number"}, [0, -1.5, 1e30], ["1", []]),
    ],
    "enum": [({"enum": [1, "a", None, [2, {"b": 3}]]}, [1, "a", None, [2, {"b": 3}]], [2, "b", False, [2]])],
    "const": [
        ({"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1]}, {}, "a"]),
        ({"const": "tab\tbell\u0007"}, ["tab\tbell\u0007"], ["tab"]),
    ],
    "$ref": [
        ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"$ref": "#/properties/a"}}}, [{"b": None}], [{"b": 1}]),
        (
            {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
            [{}, {"next": {"next": {}}}],
            [{"next": 1}, {"next": {"other": 1}}],
        ),
        ({"$defs": {"a/b~c%": {"type": "null"}}, "$ref": "#/$defs/a~1b~0c%25"}, [None], [1]),
        ({"$defs": {"a": {"$anchor": "here", "type": "null"}}, "$ref": "#here"}, [None], [1]),
        (
            {
                "$id": "http://x.test/root",
                "$defs": {"a": {"$id": "inner", "$defs": {"n": {"type": "null"}}, "items": {"$ref": "#/$defs/n"}, "type": "array"}},
                "$ref": "inner",
            },
            [[], [None]],
            [[1], None],
        ),
        ({"$schema": DRAFT_4, "definitions": {"a": {"id": "#here", "type": "null"}}, "$ref": "#here"}, [None], [1]),
        ({"$schema": DRAFT_7, "definitions": {"a": {"type": "null"}}, "$ref": "#/definitions/a", "const": 1}, [None], [1]),
        ({"$ref": "#/x-types/n", "x-types": {"n": {"type": "null"}}}, [None], [1]),
    ],
    "$defs": [({"$defs": {"digit": {"enum": [1, 2]}}, "type": "array", "items": {"$ref": "#/$defs/digit"}}, [[], [1, 2]], [[3], 1])],
    "definitions": [({"definitions": {"n": {"type": "null"}}, "$ref": "#/definitions/n"}, [None], [0])],
    "allOf": [({"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6, "4"])],
    "anyOf": [({"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 2}]}, [1, "ab"], ["a", None])],
    "oneOf": [
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None, []]),
        ({"oneOf": [{"type": "string", "maxLength": 1}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"minLength": 2}}}, ["a", "ab", 1], []),
        ({"type": "integer", "oneOf": [{"maximum": 3}, {"minimum": 3}]}, [2, 4], [3]),
        ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
        ({"anyOf": [{"type": "null"}, {"type": "string"}], "oneOf": [{"enum": ["a", None]}, {"enum": ["a", "b"]}]}, [None, "b"], ["a"]),
        (
            {
                "oneOf": [
                    {"type": "object", "properties": {"kind": {"const": kind}, "x": {"type": t}}, "required": ["kind", "x"]}
                    for kind, t in (("a", "null"), ("b", "boolean"))
                ]
            },
            [{"kind": "a", "x": None}, {"kind": "b", "x": True}],
            [{"kind": "a", "x": True}, {"kind": "c", "x": None}],
        ),
    ],
    "not": [
        ({"not": {"type": ["object", "array"]}}, [1, "a", None], [{}, []]),
        ({"type": "string", "not": {"enum": ["ab", "a", "b\n"]}}, ["", "abc", "b", "ac", "bb"], ["a", "ab", "b\n"]),
        ({"type": "integer", "not": {"enum": [0, 7]}}, [1, -1, 8, 70], [0, 7]),
        ({"type": "object", "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}], [{"a": 1, "b": 2}]),
        ({"type": "object", "not": {"properties": {"a": {"const": None}}}}, [{"a": 1}], [{}, {"a": None}]),
        ({"type": ["string", "null"], "not": {"not": {"minLength": 2}}}, ["ab", None], ["a"]),
        ({"type": "array", "not": {"minItems": 2}}, [[], [1]], [[1, 2]]),
        ({"not": False, "type": "null"}, [None], [1]),
    ],
    "if": [
        (
            {
                "type": "object",
                "properties": {"kind": {"enum": ["a", "b"]}, "x": {"type": "null"}},
                "if": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]},
                "then": {"required": ["x"]},
                "additionalProperties": False,
            },
            [{}, {"kind": "b"}, {"kind": "a", "x": None}, {"kind": "b", "x": None}],
            [{"kind": "a"}, {"kind": "c"}],
        ),
        ({"type": ["integer", "null"], "if": {"type": "null"}, "then": True, "else": {"minimum": 3}}, [None, 3], [2]),
        ({"type": "null", "if": {"pattern": "no effect without then and else"}}, [None], [1]),
    ],
    "then": [({"type": "integer", "if": {"minimum": 10}, "then": {"multipleOf": 10}}, [9, 10, 20], [11])],
    "else": [({"type": "integer", "if": {"minimum": 10}, "else": {"const": 5}}, [10, 11, 5], [9, 0])],
    "dependentRequired": [
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
        ({"type": "object", "required": ["a"], "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 2}], [{"a": 1}, {}]),
    ],
    "dependentSchemas": [
        ({"type": "object", "dependentSchemas": {"a": {"maxProperties": 1}}}, [{}, {"a": 1}, {"b": 1, "c": 2}], [{"a": 1, "b": 2}]),
    ],
    "dependencies": [
        (
            {"$schema": DRAFT_7, "type": "object", "dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
            [{"a": 1, "b": 2}, {"c": 1, "d": 1}, {}],
            [{"a": 1}, {"c": 1}],
        )
    ],
    "propertyNames": [
        ({"type": "object", "propertyNames": {"type": "string"}}, [{}, {"a": 1}], [1]),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{}, {"a": 1, "b": 2}], [{"c": 1}]),
        ({"type": "object", "propertyNames": {"pattern": "^[ab]+$"}, "properties": {"c": {}}}, [{}, {"ab": 1}], [{"c": 1}, {"d": 1}]),
        ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": 1, "abc": 2}], [{"a": 1}, {"abcd": 1}]),
    ],
    "uniqueItems": [
        ({"type": "array", "uniqueItems": False, "items": {"type": "null"}}, [[None, None]], [[1]]),
        ({"type": "array", "items": {"enum": ["x", "y", "z"]}, "uniqueItems": True}, [[], ["z", "x"], ["y", "z", "x"]], [["x", "x"], [1]]),
        ({"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True, "minItems": 1, "maxItems": 1}, [["y"]], [[], ["x", "y"]]),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, [[True, False], []], [[True, True]]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], ["a"]], [["a", "b"]]),
        ({"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "uniqueItems": True}, [[1, 3, 5], []], [[1, 1], [6]]),
    ],
    "contains": [
        ({"type": "array", "contains": {"const": 1}}, [[1], [1, 2]], [[], [2]]),
        ({"type": "array", "contains": {}}, [[1]], [[]]),
        ({"type": "array", "contains": {"const": 1}, "minContains": 0}, [[], [2]], [1]),
    ],
    "minContains": [({"type": "array", "contains": {"const": 1}, "minContains": 2}, [[1, 1], [1, 1, 0]], [[1], [1, 2]])],
    "maxContains": [({"type": "array", "contains": {"const": 1}, "maxContains": 1}, [[1], [1, 2]], [[1, 1], []])],
    "unevaluatedProperties": [
        (
            {"type": "object", "properties": {"b": {}}, "allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
            [{}, {"b": 1}, {"b": 1, "a": 1}],
            [{"c": 1}],
        )
    ],
    "unevaluatedItems": [({"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False}, [[], [None]], [[None, 1]])],
    "$dynamicRef": [({"$defs": {"n": {"$dynamicAnchor": "n", "type": "null"}}, "$dynamicRef": "#n"}, [None], [1])],
    "$recursiveRef": [
        (
            {"$schema": DRAFT_2019, "type": "object", "properties": {"a": {"$recursiveRef": "#"}}, "additionalProperties": False},
            [{}, {"a": {}}],
            [{"b": 1}, {"a": 1}],
        )
    ],
    "properties": [
        ({"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}}, [{}, {"a": 1, "b": None}, {"b": None}], [{"a": "x"}]),
        ({"properties": {"\u0001\u007f": {"type": "null"}}}, [{"\u0001\u007f": None}, {"x": 1}, 7], [{"\u0001\u007f": 1}]),
    ],
    "required": [({"type": "object", "required": ["a", "b"]}, [{"a": 1, "b": None}], [{}, {"a": 1}, {"b": 1}])],
    "additionalProperties": [
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"x": 1, "y": 2}], [{"x": "1"}]),
    ],
    "patternProperties": [
        (
            {"type": "object", "patternProperties": {"^n_": {"type": "integer"}, "^s_": {"type": "string"}}, "additionalProperties": False},
            [{"n_a": 1, "s_": "x"}],
            [{"n_a": "1"}, {"x": 1}],
        )
    ],
    "minProperties": [
        ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
        ({"type": "object", "minProperties": 2, "required": ["a", "b"]}, [{"a": 1, "b": 1}], [{"a": 1}]),
        ({"type": "object", "minProperties": 0}, [{}, {"a": 1}], [1]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, [{"a": 1}, {"b": 1}, {"c": 1}, {"a": 1, "b": 1}], [{}]),
        (
            {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "additionalProperties": False},
            [{"a": 1, "b": 1}, {"b": 1, "c": 1}, {"a": 1, "b": 1, "c": 1}],
            [{}, {"a": 1}],
        ),
    ],
    "maxProperties": [
        ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 1}]),
        (
            {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "maxProperties": 2},
            [{}, {"a": 1, "c": 1}, {"b": 1, "x": 1}, {"x": 1}],
            [{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1, "x": 1}],
        ),
    ],
    "items": [
        ({"type": "array", "items": {"type": "null"}}, [[], [None, None]], [[1], [None, 1]]),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"type": "null"}]}, [[], [None, 1]], [[1]]),
    ],
    "prefixItems": [
        ({"type": "array", "prefixItems": [{"type": "null"}, {"const": 1}], "items": False}, [[], [None], [None, 1]], [[1], [None, 1, 2]])
    ],
    "additionalItems": [
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "array",
                "items": [{"type": "null"}],
                "additionalItems": {"type": "integer"},
            },
            [[None, 1, 2]],
            [[None, "1"]],
        )
    ],
    "minItems": [({"type": "array", "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]])],
    "maxItems": [({"type": "array", "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]])],
    "minLength": [({"type": "string", "minLength": 2}, ["ab", "日本", "\n\n", "abc"], ["", "é"])],
    "maxLength": [({"type": "string", "maxLength": 2}, ["", "ab", "😀😀", '""'], ["abc", "日本語"])],
    "pattern": [
        ({"type": "string", "pattern": "^[a-c]+$"}, ["a", "abc"], ["", "d", "ab "]),
        ({"type": "string", "pattern": "b"}, ["b", "abc"], ["", "ac"]),
        ({"type": "string", "pattern": "^(?=.*[0-9])(?=.*[a-z]).{2,3}$"}, ["a1", "1a-"], ["ab", "12", "a1--"]),
    ],
    "format": [],  # below
    "minimum": [
        ({"type": "integer", "minimum": -3}, [-3, 0, 1000], [-4, -10]),
        ({"type": "number", "minimum": 0.5}, [0.5, 1, 7.25], [0.4, 0, -1]),
    ],
    "maximum": [
        ({"type": "integer", "maximum": 12}, [12, -5], [13, 100]),
        ({"type": "number", "maximum": 2.5}, [2.5, -9], [2.6, 3]),
    ],
    "exclusiveMinimum": [
        ({"type": "integer", "exclusiveMinimum": 3}, [4, 40], [3, -4]),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    ],
    "exclusiveMaximum": [({"type": "number", "exclusiveMaximum": 3}, [2.9, -1], [3, 3.1])],
    "multipleOf": [
        ({"type": "integer", "multipleOf": 7}, [0, 14, -21, 7007], [1, 15]),
        ({"type": "number", "multipleOf": 0.5}, [0.5, 1, -2.5], [0.3, 1.25]),
        ({"type": "number", "multipleOf": 0.25}, [1, 2.75], [0.3, 1.1]),
    ],
}  # fmt: skip

SPELLINGS: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29", "1999-12-31"], ["2024-13-01", "2024-02-30", "24-01-01"]),
    "date-time": (["2024-02-29T23:59:59Z", "1990-01-01T00:00:00.25+01:30"], ["2024-02-29", "2024-02-29 10:00:00Z", "2024-01-01T25:00:00Z"]),
    "duration": (["P1DT2H", "P3W", "PT0S"], ["1D", "P", "PT1D"]),
    "email": (["a.b+c@example.com"], ["a", "@b.c", "a b@c.d"]),
    "hostname": (["example.com", "a-b.c"], ["-a.com", "a_b", ""]),
    "ipv4": (["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
    "ipv6": (["::1", "fe80::a:b", "1:2:3:4:5:6:7:8"], ["12345::", "1:2:3", ":::"]),
    "time": (["12:34:56Z", "00:00:00.5-08:00"], ["12:34", "24:00:00Z"]),
    "uri": (["http://a.b/c?d#e", "urn:x:y"], ["//a.b/c", "a b", "no-scheme"]),
    "uuid": (["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638"]),
}

# what cannot be enforced, and why; a lenient reading leaves it out
UNENFORCED: list[tuple[dict[str, Any], str]] = [
    ({"uniqueItems": True, "items": {"type": "string"}}, "uniqueItems: unique items are supported where"),
    ({"if": {"pattern": "a"}, "then": {"minLength": 3}}, "if: the condition has no opposite"),
    ({"not": {"pattern": "a"}}, "not: what this excludes has no opposite"),
    ({"not": {"type": "integer"}}, "not: what this excludes has no opposite"),
    ({"oneOf": [{"minLength": 2}, {"type": "string", "format": "uri"}]}, "oneOf: the alternatives 0 and 1 cannot be told apart"),
    ({"propertyNames": {"format": "uri"}}, "propertyNames: names can be bounded by"),
    (
        {"minProperties": 3, "required": ["a", "a"]},
        "minProperties: this needs more than 64 choices of properties, or names that might repeat",
    ),
    ({"$dynamicRef": "#n", "$defs": {"a": {"$dynamicAnchor": "n"}, "b": {"$dynamicAnchor": "n"}}}, "$dynamicRef: $dynamicRef depends on"),
    ({"anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "unevaluatedProperties: which properties are evaluated"),
    ({"contains": {"const": 1}, "unevaluatedItems": False}, "unevaluatedItems: which items are evaluated"),
    ({"contains": {"const": 1}, "minContains": 33}, "contains: minContains above 32"),
    ({"contains": {"pattern": "a"}, "maxContains": 2}, "contains: what maxContains counts has no opposite"),
    (
        {"pattern": "a(?!b)"},
        "pattern: the pattern cannot be enforced: look-around is not supported, except (?=...) right after ^, at character 2",
    ),
    ({"pattern": r"(a)\1"}, "pattern: the pattern cannot be enforced: back references are not supported at character 4"),
    ({"pattern": r"\bword"}, "pattern: the pattern cannot be enforced: word boundaries are not supported at character 1"),
    ({"patternProperties": {"(?=a)b": {}}}, "patternProperties/(?=a)b: the pattern cannot be enforced: look-around"),
]


@pytest.fixture(scope="module")
def backend() -> GrammarBackend:
    return new_backend()


def written(value: Any) -> list[str]:
    """The canonical text of an instance, and one with blanks."""
    return [json.dumps(value, ensure_ascii=False, separators=(",", ":")), json.dumps(value, ensure_ascii=False, indent=1)]


@pytest.mark.parametrize("keyword", CASES)
def test_keyword_allows_exactly_what_it_should(backend: GrammarBackend, keyword: str) -> None:
    for schema, valid, invalid in CASES[keyword]:
        params = StructuredOutputsParams(json=schema)
        for instance in valid:
            assert all(force(backend, params, text) for text in written(instance)), (schema, instance)
        for instance in invalid:
            assert not any(force(backend, params, text) for text in written(instance)), (schema, instance)


@pytest.mark.parametrize("name", FORMATS)
def test_format_allows_its_spelling_only(backend: GrammarBackend, name: str) -> None:
    params = StructuredOutputsParams(json={"type": "string", "format": name})
    valid, invalid = SPELLINGS[name]
    assert [force(backend, params, json.dumps(text)) for text in valid] == [True] * len(valid)
    assert [force(backend, params, json.dumps(text)) for text in invalid] == [False] * len(invalid)


def test_the_cases_are_right() -> None:
    """An independent validator says the same of every instance."""
    jsonschema = pytest.importorskip("jsonschema")
    for cases in CASES.values():
        for schema, valid, invalid in cases:
            validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
            assert all(validator.is_valid(instance) for instance in valid), schema
            assert not any(validator.is_valid(instance) for instance in invalid), schema


@pytest.mark.parametrize("keyword", CASES)
def test_whatever_comes_out_is_an_instance(backend: GrammarBackend, keyword: str) -> None:
    """Walks at random through the masks, told to end soon; an independent validator takes each that ends."""
    jsonschema = pytest.importorskip("jsonschema")
    for number, (schema, _, _) in enumerate(CASES[keyword]):
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
        compiled = backend.compile(StructuredOutputsParams(json=schema))
        ended = [text for seed in range(12) if (text := walk(Grammar(compiled), random.Random(100 * number + seed))) is not None]
        assert len(ended) > 3, schema
        for text in ended:
            validator.validate(json.loads(text))


def walk(grammar: Grammar, chance: random.Random) -> bytes | None:
    """A text that the grammar allows, None if it did not end within 200 tokens."""
    text = b""
    for _ in range(200):
        tokens = sorted(allowed(grammar))
        if EOS in tokens and (grammar.finished or chance.random() < 0.5):
            return text
        tokens = [t for t in tokens if t < 256 + len(PIECES) and TOKENS[t].isascii()]
        closing = [t for t in tokens if TOKENS[t] in (b'"', b"}", b"]", b"1", b'":', b":")]
        token = chance.choice(closing if closing and chance.random() < 0.6 else tokens)
        assert grammar.accept(token)
        text += TOKENS[token]
    return None


@pytest.mark.parametrize(("inner", "message"), UNENFORCED, ids=range(len(UNENFORCED)))
def test_what_has_no_equal_is_named_or_left_out(inner: dict[str, Any], message: str) -> None:
    schema = {
        "properties": {"a/b": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/x"}}]}},
        "$defs": {"x": inner, **inner.get("$defs", {})},
    }
    with pytest.raises(RequestError) as raised:
        read_schema(schema)
    keyword = message.partition(":")[0]
    assert f"json: #/$defs/x/{message}" in str(raised.value)
    assert "it is not ignored unless a lenient reading is requested; got " in str(raised.value)
    lenient = read_schema(schema, lenient=True)
    assert lenient.ignored[0] == f"#/$defs/x/{keyword}"
    unreached = {"$defs": {"x": inner}, "type": "null"}  # what no $ref reaches holds nothing
    assert json.loads(read_schema(unreached).text) == {"type": "null"}


def test_a_lenient_reading_takes_one_of_for_any_of(backend: GrammarBackend) -> None:
    schema = {"oneOf": [{"type": "string", "minLength": 1}, {"type": "string", "pattern": "^a*$"}]}
    with pytest.raises(RequestError, match="cannot be told apart"):
        backend.compile(StructuredOutputsParams(json=schema))
    compiled = backend.compile(StructuredOutputsParams(json=schema, lenient=True))
    assert compiled.ignored == ("#/oneOf",)
    assert force(backend, StructuredOutputsParams(json=schema, lenient=True), '"a"')  # matches both alternatives
    assert not force(backend, StructuredOutputsParams(json=schema, lenient=True), "1")


def test_unknown_keywords_and_formats_are_annotations_and_named(backend: GrammarBackend) -> None:
    schema = {
        "$schema": "https://example.com/own",
        "x-order": 1,
        "readonly": True,
        "_format": "date",
        "properties": {"a~b": {"nullable": False, "type": "string", "format": "color"}, "n": {"type": "null", "min": 3}},
    }
    places = (
        "#/$schema",
        "#/x-order",
        "#/readonly",
        "#/_format",
        "#/properties/a~0b/nullable",
        "#/properties/a~0b/format",
        "#/properties/n/min",
    )
    assert read_schema(schema).ignored == places
    assert backend.compile(StructuredOutputsParams(json=schema)).ignored == places
    assert force(backend, StructuredOutputsParams(json=schema), '{"a~b":"x","n":null}')
    assert not force(backend, StructuredOutputsParams(json=schema), '{"a~b":1}')


MISSPELT = {
    "minLenght": "minLength", "additonalProperties": "additionalProperties", "additional_properties": "additionalProperties",
    "anyof": "anyOf", "Required": "required", "item": "items", "tpye": "type", "propertys": "properties", "max-items": "maxItems",
    "$reff": "$ref",
}  # fmt: skip


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_keyword_is_refused_with_the_likely_one(name: str) -> None:
    for lenient in (False, True):
        with pytest.raises(
            RequestError,
            match=rf"#/properties/a/{name.replace('$', '.')}: .*looks like a misspelt {MISSPELT[name].replace('$', '.')}: write",
        ):
            read_schema({"properties": {"a": {name: 1}}}, lenient)


@pytest.mark.parametrize(
    "name", ["name", "note", "min", "form", "when", "tag", "decription", "readOnyl", "exampls", "x-minLength", "_type", "$def", ""]
)
def test_other_names_are_no_misspellings(name: str) -> None:
    assert read_schema({name: 1, "type": "null"}).ignored == (f"#/{name}",)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("int8", -128, 127), ("uint8", 0, 255), ("int32", -(2**31), 2**31 - 1), ("uint32", 0, 2**32 - 1)]
)
def test_integer_formats_are_bounds(backend: GrammarBackend, name: str, low: int, high: int) -> None:
    params = StructuredOutputsParams(json={"type": "integer", "format": name})
    assert [force(backend, params, str(n)) for n in (low - 1, low, 0, high, high + 1)] == [False, True, True, True, False]
    text = StructuredOutputsParams(json={"type": "string", "format": name})
    assert force(backend, text, '"abc"')


@pytest.mark.parametrize(("name", "inside", "outside"), [
    ("int64", [2**63 - 1024, 1024 - 2**63, 0], [2**63, -(2**63) - 1]),
    ("uint64", [0, 2**63 - 1024], [-1, 2**64]),
])  # fmt: skip
def test_integers_of_64_bits_stay_in_their_bounds(backend: GrammarBackend, name: str, inside: list[int], outside: list[int]) -> None:
    params = StructuredOutputsParams(json={"type": "integer", "format": name})
    assert all(force(backend, params, str(n)) for n in inside) and not any(force(backend, params, str(n)) for n in outside)


def test_bounds_beyond_floating_point_are_kept(backend: GrammarBackend) -> None:
    params = StructuredOutputsParams(json={"type": "integer", "minimum": 2**53 + 1, "maximum": 2**54 + 3})
    assert not any(force(backend, params, str(n)) for n in (2**53, 2**54 + 4)) and force(backend, params, str(2**53 + 2))


@pytest.mark.parametrize("keyword", ANNOTATIONS)
def test_annotations_change_nothing(backend: GrammarBackend, keyword: str) -> None:
    value = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/a"}.get(keyword, "x")
    params = StructuredOutputsParams(json={keyword: value, "type": "integer"})
    assert force(backend, params, "12")
    assert not force(backend, params, '"x"')


WRONG: list[tuple[Any, str]] = [
    ({"x-guidance": {"lenient": True}, "not": {}}, "Unsatisfiable"),
    ({"type": "string", "format": "date_time"}, "#/format: the format is unknown and looks like a misspelt date-time"),
    ({"const": 2**53 + 1}, "#/const: an integer beyond 2.53 is not exact"),
    ({"uniqueItems": 1}, "#/uniqueItems: true or false is expected"),
    ({"dependencies": {"a": 1}}, "#/dependencies/a: a schema must be"),
    ({"dependentRequired": {"a": [1]}}, "#/dependentRequired/a: a list of names"),
    ({"items": [{}], "prefixItems": [{}]}, "#/items: a list of items cannot be next to prefixItems"),
    ({"minItems": 2**31}, "#/minItems: a count must be below"),
    ({"type": "text"}, "#/type: type must be one or several of array, "),
    ({"type": []}, "#/type"),
    ({"enum": []}, "#/enum: enum must name at least one value"),
    ({"required": "a"}, "#/required: a list of names is expected; got 'a'"),
    ({"minLength": -1}, "#/minLength: a count must be an integer of 0 or more; got -1"),
    ({"maxItems": True}, "#/maxItems"),
    ({"minimum": "3"}, "#/minimum: a number is expected"),
    ({"multipleOf": 0}, "#/multipleOf"),
    ({"pattern": 3}, "#/pattern: a text is expected"),
    ({"properties": []}, "#/properties: an object of schemas is expected"),
    ({"anyOf": {}}, "#/anyOf: a list of schemas is expected"),
    ({"anyOf": [3]}, "#/anyOf/0: a schema must be an object"),
    ({"$ref": "#/$defs/a"}, "#/\\$ref: \\$ref leads nowhere"),
    ({"$ref": "https://example.com/schema"}, "#/\\$ref: \\$ref leads outside this schema, and nothing is fetched"),
    ({"$ref": "http://["}, "#/\\$ref: \\$ref leads outside this schema"),
    ({"$ref": "#name"}, "#/\\$ref: \\$ref leads nowhere in this schema: it has no anchor 'name'"),
    ({"$ref": 1}, "#/\\$ref: \\$ref must be a text"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, "#/\\$schema: \\$schema must name one of draft-04, "),
    ({"properties": {str(i): {} for i in range(481)}}, "#/properties: at most 480 properties may be optional"),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "not disjoint"),
    ({"type": "string", "enum": [1, 2]}, "Unsatisfiable"),
    ({"pattern": "a(^b|c$)d"}, "a pattern has \\^ or \\$ inside: put them at its ends only"),
    ({"pattern": r"\p{Nowhere}"}, "Unicode property not found"),
    ({"type": "object", "properties": {"a": {"$ref": "#", "type": "object", "minProperties": 1}}}, "write the keywords next to"),
    ({"$ref": "#"}, "nothing matches it"),
    ({"properties": {"a": {"enum": ["x", {"\u0001": 1}]}}}, "control characters of const and enum cannot be written"),
    ({"const": float("nan")}, "not JSON"),
    ({"const": {1, 2}}, "not JSON"),
    ({"const": "\ud800"}, "json: "),
    ("{", "not JSON: Expecting property name"),
    ('{"const": NaN}', "not JSON: NaN is no number"),
    ("false", "#: the schema allows nothing"),
    ("[]", "#: a schema must be an object"),
    ('{"items":' * 5000 + "{}" + "}" * 5000, "(the schema is nested too deeply|.*flatten the schema)"),
    ('{"items":' * 200 + "{}" + "}" * 200, "flatten the schema"),
    ({"const": "x" * 300_000}, "300.* characters, at most 262144 are read"),
]


@pytest.mark.parametrize(("schema", "message"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_enforced_is_an_error(backend: GrammarBackend, schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=f"^structured_outputs: json: .*{message.removeprefix('json: ')}"):
        backend.compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize("schema", [
    {"type": "integer", "multipleOf": 99_999_999},
    {"allOf": [{"multipleOf": 9_999}, {"multipleOf": 9.998}]},
    {"type": "number", "multipleOf": 1e-300},
    {"type": "number", "multipleOf": 10**300},
])  # fmt: skip
def test_multiples_that_would_hang_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="multipleOf.* remainders"):
        read_schema(schema)


ECMASCRIPT = [
    ("^[[a&&b~~{]+$", ["[a", "&b~{"], ["c", "]"]),
    (r"^(?<n>a{)\/\x41\u00e9[^\d\-]\cI?$", ["a{/A\u00e9x", "a{/A\u00e9x\t"], ["a{/A\u00e91", "a{/A\u00e9-"]),
    (r"^\uD83D\uDE00\u{41}]}$", ["\U0001f600A]}"], ["A]}"]),
    (r"^[^]$", ["a", "\n"], ["", "ab"]),
    ("^[a-]$", ["a", "-"], ["b"]),
    (r"^[\w-.]$", ["_", "-", "."], ["/"]),
    (r"^.\s$", ["a\u00a0", "a\t"], ["a\ufeff", "\u2028 ", "a\u0085"]),
    (r"^a.\S$", ["abc"], ["a\nb", "ab ", "ab\ufeff"]),
    ("(?s)^.$", ["\n"], ["ab"]),
    (r"^\p{Lu}\D$", ["Éa"], ["éa", "É1"]),
    ("^(a|b)*?c+$", ["abac", "c"], ["d"]),
]


@pytest.mark.parametrize(("pattern", "valid", "invalid"), ECMASCRIPT, ids=range(len(ECMASCRIPT)))
def test_patterns_are_ecmascripts(backend: GrammarBackend, pattern: str, valid: list[str], invalid: list[str]) -> None:
    """Where Rust's syntax, which the grammar reads, means something else: classes in classes, spaces, dots, braces, escapes."""
    for schema in ({"type": "string", "pattern": pattern}, {"propertyNames": {"pattern": pattern}}):
        wrap = (lambda text: {text: 1}) if "propertyNames" in schema else (lambda text: text)
        params = StructuredOutputsParams(json={"type": "object", **schema} if "propertyNames" in schema else schema)
        allowed_texts = [
            force(backend, params, json.dumps(wrap(text), ensure_ascii=False, separators=(",", ":"))) for text in valid + invalid
        ]
        assert allowed_texts == [True] * len(valid) + [False] * len(invalid), schema


BAD_PATTERNS = {
    "(a": "unclosed group at character 3", "a)": "unopened group at character 2", "[a": "unclosed character class at character 1",
    "a\\": "unfinished escape", "[b-a]": "a range that ends before it starts at character 2", r"\q": r"the escape \q is not supported",
    r"\ud800": "an escape of no character", "(?>a)": "this kind of group", "x" * 20_000: "20000 characters, at most 16384",
    "^(?=a)b|c": "look-ahead is not supported here: give each alternative a pattern of its own",
}  # fmt: skip


@pytest.mark.parametrize("pattern", BAD_PATTERNS, ids=range(len(BAD_PATTERNS)))
def test_a_bad_pattern_says_where(pattern: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_schema({"pattern": pattern})
    assert f"#/pattern: the pattern cannot be enforced: {BAD_PATTERNS[pattern]}" in str(raised.value)
    assert len(str(raised.value)) < 400


def hostile_schemas() -> dict[str, Any]:
    """Schemas that are cheap to send and could be dear to read."""
    doubling: Any = {"required": ["a"]}
    for _ in range(60):
        doubling = {"oneOf": [doubling, {"required": ["b"]}]}
    return {
        "alternatives": {"oneOf": [{"minLength": i} for i in range(4_000)]},
        "nested oneOf": doubling,
        "conditions": {"allOf": [{"if": {"required": [f"a{i}"]}, "then": {"required": [f"b{i}"]}} for i in range(1_000)]},
        "choices": {"properties": {str(i): {} for i in range(400)}, "minProperties": 200},
        "nested nots": json.loads('{"not":' * 400 + "{}" + "}" * 400),
        "copies": {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}/x"}]} for i in range(500)}},
        "a long word": {"not": {"const": "x" * 100_000}},
        "long words": {"not": {"enum": [f"{i}" * 100 for i in range(60)]}},
        "a long pattern": {"pattern": "^" + "(?=a)" * 3_000},
        "a large count": {"type": "array", "maxItems": 10**9, "items": {"maxItems": 10**400, "minItems": 10**9}},
        "a large number": {"maximum": 10**400, "minimum": -(10**400)},
        "references": {"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"not": {"$ref": "#/a"}}},
        "itself": {"oneOf": [{"$ref": "#"}, {"not": {"$ref": "#"}}]},
    }


@pytest.mark.parametrize("name", hostile_schemas())
def test_hostile_schemas_end_in_an_error_or_a_grammar(backend: GrammarBackend, name: str) -> None:
    schema = hostile_schemas()[name]
    for lenient in (False, True):
        try:
            read = read_schema(schema, lenient)
        except RequestError as error:
            assert len(str(error)) < 500
            continue
        assert len(read.text) < 4 * MAX_CHARS + 1
    try:
        backend.compile(StructuredOutputsParams(json=schema, lenient=True))
    except RequestError as error:
        assert len(str(error)) < 500


def test_a_name_cannot_hide_in_an_escape(backend: GrammarBackend) -> None:
    r"""The name "\u0061" is "a": as an additional property it would escape what the schema says of "a"."""
    named = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    assert force(backend, named, '{"b":"\\n"}')
    assert not force(backend, named, '{"\\u0061":"x"}')
    assert not force(backend, named, '{"a":1,"a":"x"}')
    assert force(backend, StructuredOutputsParams(json={"type": "object"}), '{"\\u0001":"x"}')


def test_true_and_the_empty_schema_allow_all_json(backend: GrammarBackend) -> None:
    for schema in ("true", "{}"):
        assert all(force(backend, StructuredOutputsParams(json=schema), text) for text in ("1", "null", '[{"a":[]}]'))


def test_the_page_holds_the_table() -> None:
    rows = [f"| `{keyword}` | enforced | {note} |" for keyword, note in sorted(ENFORCED.items())]
    rows += [f"| `{keyword}` | annotation | |" for keyword in sorted(ANNOTATIONS)]
    table = PAGE.read_text().partition("| keyword | | how far |\n|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert [" ".join(row.split()) for row in table] == [" ".join(row.split()) for row in rows]


def test_every_keyword_has_its_cases() -> None:
    assert set(CASES) == set(ENFORCED)
    assert set(SPELLINGS) == set(FORMATS)
    assert not set(ENFORCED) & set(ANNOTATIONS)
