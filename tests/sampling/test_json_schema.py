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
from tinyvllm.sampling.json_schema import ANNOTATIONS, ENFORCED, FORMATS, REFUSED, check, read_schema

PAGE = Path(__file__).parents[2] / "docs" / "structured.md"

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
    ],
    "$defs": [({"$defs": {"digit": {"enum": [1, 2]}}, "type": "array", "items": {"$ref": "#/$defs/digit"}}, [[], [1, 2]], [[3], 1])],
    "definitions": [({"definitions": {"n": {"type": "null"}}, "$ref": "#/definitions/n"}, [None], [0])],
    "allOf": [({"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6, "4"])],
    "anyOf": [({"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 2}]}, [1, "ab"], ["a", None])],
    "oneOf": [
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None, []]),
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
    ],
    "maxProperties": [({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 1}])],
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

REFUSED_VALUES: dict[str, Any] = {
    "uniqueItems": True, "if": {"type": "null"}, "not": {"type": "null"}, "dependentRequired": {"a": ["b"]}, "minContains": 1,
    "maxContains": 1, "$dynamicRef": "#a", "$recursiveRef": "#",
}  # fmt: skip


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


@pytest.mark.parametrize("keyword", REFUSED)
def test_unsupported_keyword_is_named_with_its_place(keyword: str) -> None:
    inner = {keyword: REFUSED_VALUES.get(keyword, {})}
    schema = {"properties": {"a/b": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/x"}}]}}, "$defs": {"x": inner}}
    with pytest.raises(RequestError) as raised:
        read_schema(schema)
    assert f"json: #/$defs/x/{keyword}: the keyword {keyword} is not supported" in str(raised.value)
    unreached = {"$defs": {"x": inner}, "type": "null"}  # what no $ref reaches holds nothing
    assert json.loads(read_schema(unreached)[0]) == unreached


@pytest.mark.parametrize("keyword", ANNOTATIONS)
def test_annotations_change_nothing(backend: GrammarBackend, keyword: str) -> None:
    value = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/a"}.get(keyword, "x")
    params = StructuredOutputsParams(json={keyword: value, "type": "integer"})
    assert force(backend, params, "12")
    assert not force(backend, params, '"x"')


WRONG: list[tuple[Any, str]] = [
    ({"properties": {"a": {"minLenght": 1}}}, "#/properties/a/minLenght: the keyword minLenght is unknown"),
    ({"nullable": True}, "the keyword nullable is unknown"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "the keyword x-guidance is unknown"),
    ({"type": "integer", "format": "int64"}, "#/format: the format is not supported; known are date, "),
    ({"type": "text"}, "#/type: type must be one or several of array, "),
    ({"type": []}, "#/type"),
    ({"enum": []}, "#/enum: enum must name at least one value"),
    ({"required": "a"}, "#/required: a list of names is expected; got 'a'"),
    ({"minLength": -1}, "#/minLength: a count must be an integer of 0 or more; got -1"),
    ({"maxItems": True}, "#/maxItems"),
    ({"minimum": "3"}, "#/minimum: a number is expected"),
    ({"multipleOf": 0}, "#/multipleOf"),
    ({"pattern": 3}, "#/pattern: a text is expected"),
    ({"pattern": "(?=a)b"}, "json: .*look-around"),
    ({"properties": []}, "#/properties: an object of schemas is expected"),
    ({"anyOf": {}}, "#/anyOf: a list of schemas is expected"),
    ({"anyOf": [3]}, "#/anyOf/0: a schema must be an object"),
    ({"$ref": "#/$defs/a"}, "#/\\$ref: \\$ref leads nowhere"),
    ({"$ref": "https://example.com/schema"}, "#/\\$ref: \\$ref must be # or a JSON pointer"),
    ({"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}, "#/\\$ref: \\$ref must be"),
    ({"items": {"$id": "b"}}, "#/items/\\$id: \\$id is supported at the root only"),
    ({"$schema": "http://json-schema.org/draft-03/schema#"}, "#/\\$schema: \\$schema must name one of draft-04, "),
    ({"type": "object", "minProperties": 2, "required": ["a", "a"]}, "#/minProperties: minProperties above 1"),
    ({"properties": {str(i): {} for i in range(481)}}, "#/properties: at most 480 properties may be optional"),
    ({"oneOf": [{"minLength": 2}, {"type": "string"}]}, "oneOf"),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "not disjoint"),
    ({"type": "string", "enum": [1, 2]}, "Unsatisfiable"),
    ({"$ref": "#"}, "nothing matches it"),
    ({"properties": {"a": {"enum": ["x", {"\u0001": 1}]}}}, "#/properties/a/enum: control characters cannot be written"),
    ({"const": float("nan")}, "not JSON"),
    ({"const": {1, 2}}, "not JSON"),
    ({"const": "\ud800"}, "json: "),
    ("{", "not JSON: Expecting property name"),
    ('{"const": NaN}', "not JSON: NaN is no number"),
    ("false", "#: a schema must be an object"),
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
        check(schema)


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
    rows += [f"| `{keyword}` | refused | |" for keyword in sorted(REFUSED)]
    table = PAGE.read_text().partition("| keyword | | how far |\n|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
    assert [" ".join(row.split()) for row in table] == [" ".join(row.split()) for row in rows]


def test_every_keyword_has_its_cases() -> None:
    assert set(CASES) == set(ENFORCED)
    assert set(SPELLINGS) == set(FORMATS)
    assert not set(ENFORCED) & set(ANNOTATIONS) and not set(REFUSED) & (set(ENFORCED) | set(ANNOTATIONS))
