"""JSON files of a model directory, read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxkv.core.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelLoadError for an unreadable file, bad JSON, NaN, or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__}, an object is needed")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
