"""Refuses text that has no UTF-8 form."""

from __future__ import annotations

from jaxkv.core.errors import RequestError


def check_encodable(text: str, where: str, param: str) -> None:
    """Raises RequestError for a lone surrogate: half of a character, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}: "
            "send both halves of the pair, or leave it out",
            param=param,
        ) from None
