"""Request bodies: strict models whose fields say how far the server supports them.

A field is honoured, limited (only some of its values have an effect) or refused (declared so that the error names it and the reason). Null
always means unset. `api/capabilities.py` publishes these marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, from_json

from tinyvllm.errors import nearest
from tinyvllm.server.core.body_errors import field_names, type_name, unknown_field, validation_failure
from tinyvllm.server.core.failures import Failure
from tinyvllm.server.core.limits import check_values

_MAX_IGNORED = 1000  # names of dropped fields that are reported
_MAX_UNKNOWN_NAMES = 100  # distinct names of fields that echoed objects may have in addition to their own
_MISSPELT = 0.8  # similarity from which a name is a misspelt one; reasoning_details is 0.71 of reasoning_content
_MAX_NAME = 64  # characters of a name that are compared with the declared names


class Body(BaseModel):
    """A JSON object of a request: no type conversions, no unknown names. Validation of a list stops at its first invalid entry."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _make_fail_fast(schema)
        return schema

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True, defer_build=True)


class EchoedBody(Body):
    """An object that clients send back as they, or other servers, made it: fields that it does not declare are dropped and named.

    A name close to a declared one is a mistake and refused like any unknown field.
    """

    model_config = ConfigDict(extra="ignore")


B = TypeVar("B", bound=Body)


def honoured(default: Any = None, *, example: Any = None, says: str = "", **bounds: Any) -> Any:
    """A fully supported field. example: an accepted value, for the documentation and the test of capabilities."""
    return Field(default, description=says or None, json_schema_extra={"x-support": "honoured", "x-example": example}, **bounds)


def limited(default: Any = None, *, says: str, example: Any = None, beyond: Any = None, **bounds: Any) -> Any:
    """A field of which some values are refused or have less effect than elsewhere. beyond: a refused value; None if there is none."""
    marks = {"x-support": "limited", "x-example": example, "x-beyond": beyond}
    return Field(default, description=says, json_schema_extra=marks, **bounds)


def unheeded(*, says: str, heeded: Sequence[Any] = (), example: Any, **bounds: Any) -> Any:
    """A field that is accepted although its values, except `heeded`, have no effect here: the header X-Ignored-Fields names it then.

    example: a value without effect.
    """
    marks = {"x-support": "limited", "x-example": heeded[0] if heeded else None, "x-heeded": list(heeded), "x-ignored": example}
    return Field(
        None,
        description=f"{says}; other values are accepted, have no effect and are named in X-Ignored-Fields"
        if heeded
        else f"{says}: accepted, without effect, and named in X-Ignored-Fields",
        json_schema_extra=marks,
        **bounds,
    )


def refused(why: str, *, example: Any = True, harmless: Sequence[Any] = (), details: Mapping[str, Any] | None = None) -> Any:
    """An unsupported field. harmless: values without effect, which are accepted like null. details: of Anthropic's form of the error."""
    marks = {"x-support": "refused", "x-example": example, "x-harmless": list(harmless), "x-details": dict(details or {})}
    return Field(None, description=f"Refused: {why}", json_schema_extra=marks)


def validate(model: type[B], data: dict[str, Any], lenient: bool = False) -> tuple[B, list[str]]:
    """(the validated body, names of the fields dropped). What is dropped leaves `data`, too.

    lenient: drop unknown and unsupported fields instead of refusing them. Failure 400 names the field that is invalid.
    """
    ignored: list[str] = []
    if lenient:
        ignored += _drop_refused(model, data)
    elif (name := next((name for name in data if name not in field_names(model)), None)) is not None:
        raise unknown_field(name, nearest(name, field_names(model)))  # here: pydantic would take a second to list fifty thousand of them
    try:
        body = model.model_validate(data, extra="ignore" if lenient else None)
    except ValidationError as error:
        raise validation_failure(model, error, data) from None
    _IgnoredFields(lenient, ignored).drop(body, data, "")
    _check_refused(model, data)
    return body, ignored


def parse_object(raw: bytes) -> dict[str, Any]:
    """A JSON object. Failure 400 for everything else."""
    check_values(raw)
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Failure(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise Failure(400, f"the body must be a JSON object, got {type_name(data)}", code="invalid_type")
    return data


def _make_fail_fast(schema: Any) -> None:
    """Make validation of the lists in a core schema stop at the first invalid entry."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _make_fail_fast(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            _make_fail_fast(part)


def stop_at_first_value(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """A WrapValidator that reports only the first invalid value of an object with free names."""
    try:
        return check(value)
    except ValidationError as error:
        if isinstance(value, dict) and error.error_count() > 1:
            for name, one in value.items():
                check({name: one})
        raise


class _IgnoredFields:
    """Removes what a body's models do not declare from the plain objects.

    The paths of these fields, and of values that have no effect, are appended to `ignored`.
    """

    def __init__(self, lenient: bool, ignored: list[str]):
        self._lenient = lenient
        self._ignored = ignored
        self._checked: set[tuple[type[Body], str]] = set()

    def drop(self, value: Any, data: Any, path: str) -> None:
        """Remove the unknown fields of `data`, validated as `value`. Failure for one that is a misspelt field unless all are ignored."""
        if isinstance(value, Body):
            names = field_names(type(value))
            for name in [name for name in data if name not in names]:
                if data[name] is not None or self._lenient:
                    self._add(f"{path}.{name}")
                    self._check_name(type(value), f"{path}.{name}".removeprefix("."), name)
                del data[name]
            for name, heeded in _unheeded_fields(type(value)).items():
                if data.get(name) is not None and data[name] not in heeded:
                    self._add(f"{path}.{name}")
            for name, field in type(value).model_fields.items():
                if (key := field.alias or name) in data:
                    self.drop(getattr(value, name), data[key], f"{path}.{key}")
        elif isinstance(value, list) and value and isinstance(value[0], (Body, list)):
            for i, one in enumerate(value):
                self.drop(one, data[i], f"{path}[{i}]")

    def _add(self, path: str) -> None:
        if len(self._ignored) < _MAX_IGNORED:
            self._ignored.append(path.removeprefix("."))

    def _check_name(self, model: type[Body], path: str, name: str) -> None:
        """Failure for the misspelt name of a declared field, and for a client that sends ever new names."""
        if self._lenient or (model, name) in self._checked:
            return
        self._checked.add((model, name))
        if len(self._checked) > _MAX_UNKNOWN_NAMES:
            raise unknown_field(path, f", after {_MAX_UNKNOWN_NAMES} other unknown names")
        if close := get_close_matches(name[:_MAX_NAME], field_names(model), 1, _MISSPELT):
            raise unknown_field(path, f", did you mean {close[0]!r}?")


@cache
def _refused_fields(model: type[Body]) -> dict[str, tuple[str, list[Any], dict[str, Any]]]:
    """(reason, harmless values, details of the error) by field."""
    reasons = {}
    for name, field in model.model_fields.items():
        marks = field.json_schema_extra
        if isinstance(marks, dict) and marks.get("x-support") == "refused":
            harmless, details = marks["x-harmless"], marks["x-details"]
            assert isinstance(harmless, list) and isinstance(details, dict)
            reasons[name] = (str(field.description).removeprefix("Refused: "), list(harmless), dict(details))
    return reasons


@cache
def _unheeded_fields(model: type[Body]) -> dict[str, list[Any]]:
    """The values that have an effect, by field, of fields whose other values have none."""
    marks = {name: field.json_schema_extra for name, field in model.model_fields.items()}
    return {name: list(mark["x-heeded"]) for name, mark in marks.items() if isinstance(mark, dict) and "x-heeded" in mark}  # type: ignore[arg-type]


def _check_refused(model: type[Body], data: dict[str, Any]) -> None:
    for name, (why, harmless, details) in _refused_fields(model).items():
        value = data.get(name)
        if value is not None and value not in harmless:
            text = f"{name} is not supported: {why}"
            raise Failure(400, text, param=name, code="unsupported_parameter", anthropic_details=details)


def _drop_refused(model: type[Body], data: dict[str, Any]) -> list[str]:
    names = [n for n, (_, harmless, _) in _refused_fields(model).items() if data.get(n) is not None and data[n] not in harmless]
    for name in names:
        del data[name]
    return names
