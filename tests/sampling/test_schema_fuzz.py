"""Schemas made at random: each is read, or refused with a RequestError that names a place; what its grammar writes is an instance of it."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sampling.forcing import PIECES, TOKENS, allowed, new_backend
from tinyvllm.errors import RequestError
from tinyvllm.request import StructuredOutputsParams
from tinyvllm.sampling.grammar import Grammar
from tinyvllm.sampling.schema import ANNOTATIONS, ENFORCED, read_schema

BACKEND = new_backend()
NAMES = st.sampled_from(["a", "b", "c", "$ref", "~", "/"])
SMALL = st.integers(0, 4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-3, 3, allow_nan=False) | st.sampled_from(["", "a", "ab", "é", "\n"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)
TYPES = st.sampled_from(["array", "boolean", "integer", "null", "number", "object", "string"])
REFERENCES = st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#here", "#/nowhere"])
PATTERNS = st.sampled_from(["^a", "b$", "^[a-c]+$", "^(?=a).{1,3}$", r"\S", "", "^$", ".*"])


def by_keyword(schemas: Any) -> dict[str, Any]:
    """A strategy of values for each keyword."""
    some, named = st.lists(schemas, min_size=1, max_size=3), st.dictionaries(NAMES, schemas, max_size=3)
    return {
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), some),
        **dict.fromkeys(("not", "if", "then", "else", "items", "contains", "propertyNames", "additionalProperties"), schemas),
        **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), schemas),
        **dict.fromkeys(("properties", "$defs", "dependentSchemas"), named),
        **dict.fromkeys(
            ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"), SMALL
        ),
        **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), st.integers(-5, 5) | st.just(0.5)),
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=3),
        "const": VALUES,
        "enum": st.lists(VALUES, min_size=1, max_size=4),
        "required": st.lists(NAMES, max_size=2),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2), max_size=2),
        "patternProperties": st.dictionaries(PATTERNS, schemas, max_size=2),
        "pattern": PATTERNS,
        "format": st.sampled_from(["date", "int8", "uint64", "color"]),
        "multipleOf": st.sampled_from([1, 2, 0.5]),
        "uniqueItems": st.booleans(),
        "$ref": REFERENCES,
        "$anchor": st.just("here"),
        "x-note": VALUES,
    }


def some_keywords(schemas: Any) -> Any:
    strategies = by_keyword(schemas)

    def build(names: list[str]) -> Any:
        return st.fixed_dictionaries({name: strategies[name] for name in names})

    return st.lists(st.sampled_from(sorted(strategies)), max_size=4, unique=True).flatmap(build)


SCHEMAS = st.recursive(st.booleans() | st.fixed_dictionaries({"type": TYPES}), some_keywords, max_leaves=8)
WILD = st.dictionaries(st.sampled_from([*ENFORCED, *ANNOTATIONS, "x"]), VALUES, max_size=4)  # values of wrong types


def write(grammar: Grammar, chance: random.Random) -> bytes | None:
    """A text that the grammar allows; None if it did not end within 120 tokens, or ran into a limit."""
    text = b""
    for _ in range(120):
        tokens = sorted(allowed(grammar))
        if grammar.error is not None:
            return None
        tokens = [t for t in tokens if t < 256 + len(PIECES)]
        if grammar.accepting and (grammar.finished or chance.random() < 0.6):
            return text
        tokens = [t for t in tokens if TOKENS[t].isascii()] or tokens
        closing = [t for t in tokens if TOKENS[t] in (b'"', b"}", b"]", b"1", b'":', b":")]
        token = chance.choice(closing if closing and chance.random() < 0.7 else tokens)
        assert grammar.accept(token)
        text += TOKENS[token]
    return None


@settings(max_examples=250, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 1000))
def test_what_a_random_schema_writes_is_an_instance_of_it(schema: Any, seed: int) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    try:
        compiled = BACKEND.compile(StructuredOutputsParams(json=json.dumps(schema)))
    except RequestError as error:
        assert str(error).startswith("structured_outputs: json: ") and len(str(error)) < 500
        return
    text = write(Grammar(compiled), random.Random(seed))
    if text is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        except RecursionError:  # a reference to itself, which the validator follows for ever
            return
        except Exception as error:  # noqa: BLE001  a reference that leads nowhere, and that the grammar never needed
            assert "Unresolvable" in type(error).__name__ or "Unresolvable" in str(error)
            return
    assert valid, (schema, text)


@settings(max_examples=250, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS | WILD | st.dictionaries(NAMES, WILD, max_size=2).map(lambda named: {"properties": named}))
def test_a_random_schema_is_read_or_refused(schema: Any) -> None:
    for lenient in (False, True):
        try:
            read = read_schema(json.dumps(schema), lenient)
        except RequestError as error:
            assert str(error).startswith("structured_outputs: json: ") and len(str(error)) < 500
        else:
            json.loads(read.text)
            assert all(place.startswith("#/") for place in read.ignored)
