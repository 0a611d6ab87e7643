"""Field types that need more than a plain annotation: many forms, or lists so long that checking must stop early."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_TOKEN_ID = 2**31 - 1
FAULT = "fault"
"""Type of the validation errors whose message needs no addition."""
MAX_PROMPTS = 2048
"""Most prompts in one request."""
MAX_STOPS = 64
"""Most stop strings of one request."""


def fault(message: str) -> PydanticCustomError:
    # The message goes in as data: braces in it must not be read as a format.
    return PydanticCustomError(FAULT, "{message}", {"message": message})


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TOKEN_ID


def _token_ids(values: list[Any], where: str) -> None:
    # One plain loop that stops at the first fault: a 10 MB list of wrong items must not become millions of errors.
    for index, value in enumerate(values):
        if not _is_token_id(value):
            raise fault(f"item {index}{where} must be a token id, a whole number from 0 to {MAX_TOKEN_ID}")


def _prompt(value: Any) -> Any:
    if isinstance(value, str):
        if not value:
            raise fault("the prompt is empty")
        return value
    if not isinstance(value, list):
        raise fault("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    if not value:
        raise fault("the prompt is empty")
    first = value[0]
    if isinstance(first, int) and not isinstance(first, bool):
        _token_ids(value, "")
        return value
    if len(value) > MAX_PROMPTS:
        raise fault(f"holds {len(value)} prompts, at most {MAX_PROMPTS} are allowed in one request")
    for index, item in enumerate(value):
        if type(item) is not type(first) or not isinstance(item, str | list):
            raise fault(
                f"item {index} must be of one kind with the others: all strings, all token ids, or all lists of ids"
            )
        if not item:
            raise fault(f"the prompt at {index} is empty")
        if isinstance(item, list):
            _token_ids(item, f" of prompt {index}")
    return value


def _stop(value: Any) -> Any:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise fault("must be a non-empty string or a list of such")
    if len(items) > MAX_STOPS:
        raise fault(f"holds {len(items)} strings, at most {MAX_STOPS} are allowed")
    return items


def _logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        raise fault("must be an object that maps token ids to numbers")
    bias: dict[int, float] = {}
    for key, addend in value.items():
        if not (
            isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID
        ):
            raise fault(f"the key {str(key)[:60]!r} must be a token id, a whole number from 0 to {MAX_TOKEN_ID}")
        if type(addend) not in (int, float) or not -100 <= addend <= 100:
            raise fault(f"the value of {key} must be a number from -100 to 100")
        bias[int(key)] = float(addend)
    return bias


def _content(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fault("must be a string or a list of text parts")
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise fault(
                f'part {index} must be {{"type": "text", "text": string}}; other kinds of parts are not supported'
            )
    return value


def _token_id_list(value: Any) -> Any:
    if not isinstance(value, list):
        raise fault("must be a list of token ids")
    _token_ids(value, "")
    return value


_TOKEN_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MAX_TOKEN_ID}
_TOKEN_IDS_SCHEMA = {"type": "array", "items": _TOKEN_ID_SCHEMA, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}

Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
                _TOKEN_IDS_SCHEMA,
                {"type": "array", "items": _TOKEN_IDS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]
TokenIds = Annotated[
    list[int], PlainValidator(_token_id_list), WithJsonSchema({"type": "array", "items": _TOKEN_ID_SCHEMA})
]
Stop = Annotated[
    list[str],
    PlainValidator(_stop),
    WithJsonSchema({"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "maxItems": MAX_STOPS}]}),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
Content = Annotated[
    str | list[dict[str, Any]] | None,
    PlainValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]
