"""Errors of invalid request bodies: one message that names the worst mistake, whatever number of them pydantic finds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

from pydantic import BaseModel, ValidationError

from tinyvllm.errors import nearest
from tinyvllm.server.core.failures import Failure

_MAX_SHOWN = 120  # characters of a client's text in a message
_MAX_ERRORS = 100  # that pydantic lists: each takes microseconds
_MAX_OTHERS = 3  # further fields that a message names
_TOO_LONG = ("too_long", "string_too_long")


@cache
def field_names(model: type[BaseModel]) -> dict[str, None]:
    """The names of a body's fields in JSON, in order."""
    return {field.alias or name: None for name, field in model.model_fields.items()}


def unknown_field(name: str, hint: str, also: str = "") -> Failure:
    text = f"unknown field {_shown(name)}{hint}; start the server with --lenient to ignore unknown fields{also}"
    return Failure(400, text, param=_shown(name), code="unknown_parameter")


def validation_failure(model: type[BaseModel], error: ValidationError, data: dict[str, Any]) -> Failure:
    """The most helpful error: an unknown field first, then the deepest one (of a union's branches, the one that nearly matched)."""
    errors = _errors(model, error, data)
    worst = min(errors, key=lambda e: (not _is_unknown_type(e), e["type"] != "extra_forbidden", -len(e["loc"])))
    kind = worst["type"]
    param = _path(worst["loc"], data, missing=kind == "missing")
    if kind == "extra_forbidden":
        hint = nearest(param, model.model_fields) if len(worst["loc"]) == 1 else ""
        return unknown_field(param, hint, _other_errors(worst, errors, data))
    if kind == "missing":
        text = f"missing field {param}{_other_errors(worst, errors, data)}"
        return Failure(400, text, param=param, code="missing_required_parameter")
    if not param:  # an error of the whole body: our validators put the field's name into the error's type
        return Failure(400, worst["msg"], param=kind if kind in model.model_fields else None, code="invalid_value")
    if kind in _TOO_LONG:
        return _too_long(param, worst, data)
    same_field = [e["msg"] for e in errors if _path(e["loc"], data) == param]
    expected = " or ".join(dict.fromkeys(_decapitalized(_in_json_terms(text).removeprefix("Input ")) for text in same_field))
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    got = type_name(_walk(worst["loc"], data)[1])
    return Failure(400, f"{param}: {expected}, got {got}{_other_errors(worst, errors, data)}", param=param, code=code)


def _too_long(param: str, error: Mapping[str, Any], data: dict[str, Any]) -> Failure:
    value = _walk(error["loc"], data)[1]
    unit, length = ("characters" if isinstance(value, str) else "entries"), len(value)
    text = f"{param}: must have at most {error['ctx']['max_length']} {unit}, got {length}"
    return Failure(400, text, param=param, code="too_long")


def type_name(value: Any) -> str:
    """A JSON value for a message: scalars themselves, shortened; the type of containers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)[:40]
    if isinstance(value, str):
        return f"the text {_shown(value)[:60]!r}"
    return "an array" if isinstance(value, list) else "an object"


def _errors(model: type[BaseModel], error: ValidationError, data: dict[str, Any]) -> list[Any]:
    """The errors. If an object has thousands of unknown names, only its first names are checked again."""
    if error.error_count() > _MAX_ERRORS:
        try:
            model.model_validate(_shortened(data))
        except ValidationError as shorter:
            error = shorter
    return list(error.errors(include_url=False, include_input=False))


def _shortened(data: Any) -> Any:
    """The data with only the first names of each object; that number is more than any model has fields."""
    if isinstance(data, dict):
        return {name: _shortened(value) for name, value in islice(data.items(), _MAX_ERRORS)}
    return [_shortened(value) for value in data] if isinstance(data, list) else data


def _other_errors(worst: Mapping[str, Any], errors: list[Any], data: dict[str, Any]) -> str:
    """The end of a message: further invalid fields, and the number of list entries that were not checked."""
    here = _path(worst["loc"], data, missing=True)
    inside = here.rpartition(".")[0] if _is_unknown_type(worst) else here
    paths = dict.fromkeys(_path(e["loc"], data, missing=e["type"] == "missing") for e in errors)
    others = [path for path in paths if path and not path.startswith(inside) and not here.startswith(path)]
    text = ""
    if others:
        text = "; also invalid: " + ", ".join(map(_shown, others[:_MAX_OTHERS])) + (" and more" if len(others) > _MAX_OTHERS else "")
    steps, _ = _walk(worst["loc"], data)
    for n, step in enumerate(steps):
        if isinstance(step, int) and (unchecked := len(_walk(steps[:n], data)[1]) - step - 1):
            entries = "1 further entry" if unchecked == 1 else f"{unchecked} further entries"
            return f"{text}; {entries} of {_path(steps[:n], data)} not checked"
    return text


def _is_unknown_type(error: Mapping[str, Any]) -> bool:
    """Whether an object has an unknown `type`: then errors in its other fields do not matter."""
    return bool(error["type"] == "literal_error" and error["loc"][-1] == "type")


def _in_json_terms(text: str) -> str:
    """A message of pydantic with JSON's terms instead of Python's."""
    text = re.sub(r"Input tag ('[^']*') found using \S+ does not match any of the expected tags:", r"type \1 is none of", text)
    return re.sub(r"a valid dictionary( or instance of \w+)?", "an object", text).replace("a valid list", "an array")


def _walk(loc: Sequence[Any], data: Any, missing: bool = False) -> tuple[list[int | str], Any]:
    """(the steps of a pydantic location that exist in the data, the value there). Other steps name union branches and types.

    missing: the last step is a field that the data lacks.
    """
    steps: list[int | str] = []
    for i, step in enumerate(loc):
        exists = isinstance(data, dict) and step in data
        if exists or (isinstance(data, list) and isinstance(step, int) and step < len(data)):
            steps.append(step)
            data = data[step]
        elif missing and i == len(loc) - 1:
            steps.append(step)
    return steps, data


def _path(loc: Sequence[int | str], data: Any, missing: bool = False) -> str:
    steps, _ = _walk(loc, data, missing)
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return text.removeprefix(".")


def _decapitalized(text: str) -> str:
    return text[:1].lower() + text[1:]


def _shown(text: str) -> str:
    """A name chosen by a client, escaped and shortened for a message or log line."""
    plain = text.encode("ascii", "backslashreplace").decode()
    return "".join(c if c.isprintable() else "?" for c in plain)[:_MAX_SHOWN]
