"""Checks the messages of a chat request and brings them into the form that chat templates take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxkv.core.errors import RequestError
from jaxkv.text.encodable import check_encodable

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Copies of the messages with their content as one string; text parts are joined by line ends.

    Raises RequestError (param "messages") that names the message at fault. Content may be absent (then "") only where
    an assistant message has tool_calls.
    """
    if not isinstance(messages, list | tuple):
        raise _error(f"messages is {_kind(messages)}: it must be a list of messages")
    if not messages:
        raise _error("messages is empty: a chat needs at least one message")
    return [_checked(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _checked(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _error(f"{where} is {_kind(message)}: it must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise _error(f"{where}.role is {role!r:.80}: it must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("tool_calls"):
        content = ""
    return {**message, "content": _text(content, f"{where}.content")}


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return _encodable(content, where)
    if not isinstance(content, list | tuple):
        raise _error(f"{where} is {_kind(content)}: it must be a string or a list of text parts")
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind != "text":
        found = _kind(part) if not isinstance(part, Mapping) else f"of type {kind!r}"
        raise _error(f'{where} is {found}: only {{"type": "text", "text": ...}} parts can be read')
    text = part.get("text")
    if not isinstance(text, str):
        raise _error(f"{where}.text is {_kind(text)}: it must be a string")
    return _encodable(text, where)


def _encodable(text: str, where: str) -> str:
    check_encodable(text, where, "messages")
    return text


def _kind(value: object) -> str:
    return "missing" if value is None else f"a value of type {type(value).__name__}"


def _error(message: str) -> RequestError:
    return RequestError(message, param="messages")
