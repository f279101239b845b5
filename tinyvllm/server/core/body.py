"""Request bodies: strict models whose fields say how far the server supports them.

A field is honoured, limited (only some of its values have an effect) or refused (declared so that the error names it and the reason). Null
always means unset. `api/capabilities.py` publishes these marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, from_json

from tinyvllm.config import nearest
from tinyvllm.server.core.body_errors import field_names, type_name, unknown_field, validation_failure
from tinyvllm.server.core.failures import Failure

_MAX_IGNORED = 1000  # names of dropped fields that are reported


class Body(BaseModel):
    """A JSON object of a request: no type conversions, no unknown names. Validation of a list stops at its first invalid entry."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _make_fail_fast(schema)
        return schema

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True, defer_build=True)


B = TypeVar("B", bound=Body)


def honoured(default: Any = None, *, example: Any = None, says: str = "", **bounds: Any) -> Any:
    """A fully supported field. example: an accepted value, for the documentation and the test of capabilities."""
    return Field(default, description=says or None, json_schema_extra={"x-support": "honoured", "x-example": example}, **bounds)


def limited(default: Any = None, *, says: str, example: Any = None, beyond: Any = None, **bounds: Any) -> Any:
    """A field of which some values are refused or have less effect than elsewhere. beyond: a refused value; None if there is none."""
    marks = {"x-support": "limited", "x-example": example, "x-beyond": beyond}
    return Field(default, description=says, json_schema_extra=marks, **bounds)


def refused(why: str, *, example: Any = True, harmless: Sequence[Any] = ()) -> Any:
    """An unsupported field. harmless: values without effect, which are accepted like null."""
    marks = {"x-support": "refused", "x-example": example, "x-harmless": list(harmless)}
    return Field(None, description=f"Refused: {why}", json_schema_extra=marks)


def parse(model: type[B], raw: bytes, lenient: bool = False) -> tuple[B, dict[str, Any], list[str]]:
    """(the validated body, the same as plain objects, names of the fields dropped).

    lenient: drop unknown and unsupported fields instead of refusing them. Failure 400 names the field that is invalid.
    """
    data = _parse_object(raw)
    ignored: list[str] = []
    if lenient:
        ignored += _drop_refused(model, data)
    elif (name := next((name for name in data if name not in field_names(model)), None)) is not None:
        raise unknown_field(name, nearest(name, field_names(model)))  # here: pydantic would take a second to list fifty thousand of them
    try:
        body = model.model_validate(data, extra="ignore" if lenient else "forbid")
    except ValidationError as error:
        raise validation_failure(model, error, data) from None
    if lenient:
        _drop_unknown(body, data, "", ignored)
    _check_refused(model, data)
    return body, data, ignored


def _parse_object(raw: bytes) -> dict[str, Any]:
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


def _drop_unknown(value: Any, data: Any, path: str, ignored: list[str]) -> None:
    """Remove from plain objects the fields that their model does not declare, and append their names to `ignored`."""
    if isinstance(value, Body):
        names = field_names(type(value))
        for name in [name for name in data if name not in names]:
            del data[name]
            if len(ignored) < _MAX_IGNORED:
                ignored.append(f"{path}.{name}".removeprefix("."))
        for name, field in type(value).model_fields.items():
            if (key := field.alias or name) in data:
                _drop_unknown(getattr(value, name), data[key], f"{path}.{key}", ignored)
    elif isinstance(value, list) and value and isinstance(value[0], (Body, list)):
        for i, one in enumerate(value):
            _drop_unknown(one, data[i], f"{path}[{i}]", ignored)


@cache
def _refused_fields(model: type[Body]) -> dict[str, tuple[str, list[Any]]]:
    """(reason, harmless values) by field."""
    reasons = {}
    for name, field in model.model_fields.items():
        marks = field.json_schema_extra
        if isinstance(marks, dict) and marks.get("x-support") == "refused":
            harmless = marks["x-harmless"]
            assert isinstance(harmless, list)
            reasons[name] = (str(field.description).removeprefix("Refused: "), list(harmless))
    return reasons


def _check_refused(model: type[Body], data: dict[str, Any]) -> None:
    for name, (why, harmless) in _refused_fields(model).items():
        value = data.get(name)
        if value is not None and value not in harmless:
            raise Failure(400, f"{name} is not supported: {why}", param=name, code="unsupported_parameter")


def _drop_refused(model: type[Body], data: dict[str, Any]) -> list[str]:
    names = [n for n, (_, harmless) in _refused_fields(model).items() if data.get(n) is not None and data[n] not in harmless]
    for name in names:
        del data[name]
    return names
