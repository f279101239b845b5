"""What every request body has in common: strict models whose fields say how far they are honoured, and errors that name the field.

A field is honoured, limited (only some values mean something here) or refused (declared so that it is refused by name and reason). A null
is always "not given". `capabilities` reads the marks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, from_json

from tinyvllm.config import nearest
from tinyvllm.server.core.failures import Failure

_LONGEST_SHOWN = 120
_MOST_ERRORS = 100  # that pydantic is asked to tell: it takes microseconds for each
_MOST_IGNORED = 1000  # names of fields that were left out
_MOST_ALSO = 3  # further fields that a message names


class Body(BaseModel):
    """A JSON object of a request: no conversions, no unknown names. Lists are checked up to their first entry that is wrong."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_first(schema)
        return schema

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), hide_input_in_errors=True, defer_build=True)


B = TypeVar("B", bound=Body)


def honoured(default: Any = None, *, example: Any = None, says: str = "", **bounds: Any) -> Any:
    """A field that does what its name says. `example`: a value that is taken, for the documents and the test of capabilities."""
    return Field(default, description=says or None, json_schema_extra={"x-support": "honoured", "x-example": example}, **bounds)


def limited(default: Any = None, *, says: str, example: Any = None, beyond: Any = None, **bounds: Any) -> Any:
    """A field of which some values are refused, or mean less than elsewhere. `beyond`: one that is refused, None where none is."""
    marks = {"x-support": "limited", "x-example": example, "x-beyond": beyond}
    return Field(default, description=says, json_schema_extra=marks, **bounds)


def refused(why: str, *, example: Any = True, harmless: Sequence[Any] = ()) -> Any:
    """A field that is not served. `harmless` values, which ask for nothing, are let through as null is."""
    marks = {"x-support": "refused", "x-example": example, "x-harmless": list(harmless)}
    return Field(None, description=f"Refused: {why}", json_schema_extra=marks)


def parse(model: type[B], raw: bytes, lenient: bool = False) -> tuple[B, dict[str, Any], list[str]]:
    """(the checked body, the same as plain objects, names of the fields that were left out because `lenient` lets unknown ones pass).

    Failure 400, naming the field, for everything that is not what `model` says.
    """
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise Failure(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise Failure(400, f"the body must be a JSON object, got {_kind(data)}", code="invalid_type")
    ignored: list[str] = []
    if lenient:
        ignored += _drop_refused(model, data)
    elif (name := next((name for name in data if name not in _names(model)), None)) is not None:
        raise _unknown(name, nearest(name, _names(model)))  # here, since of fifty thousand pydantic would take a second to tell
    try:
        body = model.model_validate(data, extra="ignore" if lenient else "forbid")
    except ValidationError as error:
        raise _failure(model, error, data) from None
    if lenient:
        _strip(body, data, "", ignored)
    _refuse(model, data)
    return body, data, ignored


def _stop_at_first(schema: Any) -> None:
    """Make the lists of a core schema end their check at the first entry that is wrong."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_at_first(part)
    elif isinstance(schema, (list, tuple)):
        for part in schema:
            _stop_at_first(part)


def stop_at_first_value(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """The same of an object whose names are free, as a WrapValidator."""
    try:
        return check(value)
    except ValidationError as error:
        if isinstance(value, dict) and error.error_count() > 1:
            for name, one in value.items():
                check({name: one})
        raise


def _strip(value: Any, data: Any, path: str, ignored: list[str]) -> None:
    """Take out of plain objects what their model does not know, and name it."""
    if isinstance(value, Body):
        names = _names(type(value))
        for name in [name for name in data if name not in names]:
            del data[name]
            if len(ignored) < _MOST_IGNORED:
                ignored.append(f"{path}.{name}".removeprefix("."))
        for name, field in type(value).model_fields.items():
            if (given := field.alias or name) in data:
                _strip(getattr(value, name), data[given], f"{path}.{given}", ignored)
    elif isinstance(value, list) and value and isinstance(value[0], (Body, list)):
        for i, one in enumerate(value):
            _strip(one, data[i], f"{path}[{i}]", ignored)


@cache
def _refusals(model: type[Body]) -> dict[str, tuple[str, list[Any]]]:
    found = {}
    for name, field in model.model_fields.items():
        marks = field.json_schema_extra
        if isinstance(marks, dict) and marks.get("x-support") == "refused":
            harmless = marks["x-harmless"]
            assert isinstance(harmless, list)
            found[name] = (str(field.description).removeprefix("Refused: "), list(harmless))
    return found


def _refuse(model: type[Body], data: dict[str, Any]) -> None:
    for name, (why, harmless) in _refusals(model).items():
        value = data.get(name)
        if value is not None and value not in harmless:
            raise Failure(400, f"{name} is not supported here: {why}", param=name, code="unsupported_parameter")


def _drop_refused(model: type[Body], data: dict[str, Any]) -> list[str]:
    names = [n for n, (_, harmless) in _refusals(model).items() if data.get(n) is not None and data[n] not in harmless]
    for name in names:
        del data[name]
    return names


def _failure(model: type[Body], error: ValidationError, data: dict[str, Any]) -> Failure:
    """The error that says most: an unknown field first, then the one that lies deepest (of a union's branches the one that nearly fit)."""
    errors = _errors(model, error, data)
    worst = min(errors, key=lambda e: (not _tells_type(e), e["type"] != "extra_forbidden", -len(e["loc"])))
    kind = worst["type"]
    param = _path(worst["loc"], data, missing=kind == "missing")
    if kind == "extra_forbidden":
        hint = nearest(param, model.model_fields) if len(worst["loc"]) == 1 else ""
        return _unknown(param, hint, _also(worst, errors, data))
    if kind == "missing":
        return Failure(400, f"missing field {param}{_also(worst, errors, data)}", param=param, code="missing_required_parameter")
    if not param:  # of the whole body: our own validators name the field by the kind of their error
        return Failure(400, worst["msg"], param=kind if kind in model.model_fields else None, code="invalid_value")
    same = [e["msg"] for e in errors if _path(e["loc"], data) == param]
    says = " or ".join(dict.fromkeys(_decapitalized(_in_json(text).removeprefix("Input ")) for text in same))
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    got = _kind(_at(worst["loc"], data))
    return Failure(400, f"{param}: {says}, got {got}{_also(worst, errors, data)}", param=param, code=code)


def _errors(model: type[Body], error: ValidationError, data: dict[str, Any]) -> list[Any]:
    """What is wrong. Of thousands of unknown names in one object, those among the first."""
    if error.error_count() > _MOST_ERRORS:
        try:
            model.model_validate(_shortened(data))
        except ValidationError as shorter:
            error = shorter
    return list(error.errors(include_url=False, include_input=False))


def _shortened(data: Any) -> Any:
    """The same without what objects hold beyond their first names, which are more than any model has."""
    if isinstance(data, dict):
        return {name: _shortened(value) for name, value in islice(data.items(), _MOST_ERRORS)}
    return [_shortened(value) for value in data] if isinstance(data, list) else data


def _also(worst: Any, errors: list[Any], data: dict[str, Any]) -> str:
    """What else is wrong, and how much nobody has looked at, for the end of a message."""
    here = _path(worst["loc"], data, missing=True)
    inside = here.rpartition(".")[0] if _tells_type(worst) else here
    paths = dict.fromkeys(_path(e["loc"], data, missing=e["type"] == "missing") for e in errors)
    others = [path for path in paths if path and not path.startswith(inside) and not here.startswith(path)]
    text = ""
    if others:
        text = "; also wrong: " + ", ".join(map(_shown, others[:_MOST_ALSO])) + (" and more" if len(others) > _MOST_ALSO else "")
    steps, _ = _walk(worst["loc"], data)
    for n, step in enumerate(steps):
        if isinstance(step, int) and (left := len(_at(steps[:n], data)) - step - 1):
            whole = _path(steps[:n], data)
            return f"{text}; {left} {'entry' if left == 1 else 'entries'} of {whole} behind it were not looked at, more may follow"
    return text


@cache
def _names(model: type[Body]) -> dict[str, None]:
    """What a body calls its fields."""
    return {field.alias or name: None for name, field in model.model_fields.items()}


def _unknown(name: str, hint: str, also: str = "") -> Failure:
    text = f"unknown field {_shown(name)}{hint}; this server refuses what it does not know (--lenient lets it pass){also}"
    return Failure(400, text, param=_shown(name), code="unknown_parameter")


def _tells_type(error: Any) -> bool:
    """Whether a part is of a kind that is not known: then what else it holds does not matter."""
    return error["type"] == "literal_error" and error["loc"][-1] == "type"


def _in_json(text: str) -> str:
    """pydantic's words in JSON's."""
    text = re.sub(r"Input tag ('[^']*') found using \S+ does not match any of the expected tags:", r"type \1 is none of", text)
    return re.sub(r"a valid dictionary( or instance of \w+)?", "an object", text).replace("a valid list", "an array")


def _walk(loc: Sequence[Any], data: Any, missing: bool = False) -> tuple[list[int | str], Any]:
    """(the steps of a pydantic location that exist in the data, what lies there). Between them are names of union branches and types."""
    steps: list[int | str] = []
    for i, step in enumerate(loc):
        there = isinstance(data, dict) and step in data
        if there or (isinstance(data, list) and isinstance(step, int) and step < len(data)):
            steps.append(step)
            data = data[step]
        elif missing and i == len(loc) - 1:
            steps.append(step)
    return steps, data


def _path(loc: Sequence[int | str], data: Any, missing: bool = False) -> str:
    steps, _ = _walk(loc, data, missing)
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return text.removeprefix(".")


def _at(loc: Sequence[int | str], data: Any) -> Any:
    return _walk(loc, data)[1]


def _decapitalized(text: str) -> str:
    return text[:1].lower() + text[1:]


def _shown(text: str) -> str:
    """A name that a client chose, as far as a message and a log line should hold it."""
    plain = text.encode("ascii", "backslashreplace").decode()
    return "".join(c if c.isprintable() else "?" for c in plain)[:_LONGEST_SHOWN]


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)[:40]
    if isinstance(value, str):
        return f"the text {_shown(value)[:60]!r}"
    return "an array" if isinstance(value, list) else "an object"
