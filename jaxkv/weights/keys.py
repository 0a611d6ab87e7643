"""A model's configuration as flat keys, read with types and limits, remembering what was read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TypeVar

from jaxkv.core.errors import ModelLoadError

T = TypeVar("T")

_MAX_WHOLE = 2**31 - 1


class Keys:
    """Typed access to `values`. A key that is None counts as absent. Errors name the key, its value and `where`."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = {key: value for key, value in values.items() if value is not None}
        self._nulls = values.keys() - self._values.keys()
        self._read: set[str] = set()
        self.where = where

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def is_null(self, key: str) -> bool:
        """Whether the key is there and says None, which differs from absent where the default is something else."""
        return key in self._nulls

    def peek(self, key: str) -> object | None:
        """The raw value, marked as read; None if absent."""
        self._read.add(key)
        return self._values.get(key)

    def whole(self, key: str, *, minimum: int = 1) -> int:
        """A required whole number in [minimum, 2^31)."""
        value = self.peek(key)
        if value is None:
            raise ModelLoadError(f"{self.where} has no key {key!r}, which is needed")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_WHOLE:
            raise self.refuse(key, f"it must be a whole number of at least {minimum}")
        return value

    def whole_or(self, key: str, default: T, *, minimum: int = 1) -> int | T:
        return self.whole(key, minimum=minimum) if key in self else default

    def real_or(self, key: str, default: T, *, above: float = 0.0) -> float | T:
        """A finite number greater than `above`."""
        value = self.peek(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
            raise self.refuse(key, f"it must be a finite number above {above:g}")
        return float(value)

    def flag_or(self, key: str, default: T) -> bool | T:
        value = self.peek(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "it must be true or false")
        return value

    def text_or(self, key: str, default: T) -> str | T:
        value = self.peek(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(key, "it must be a string")
        return value

    def require(self, key: str, supported: object) -> None:
        """Refuses any value of `key` but the supported one; absent is fine."""
        value = self.peek(key)
        if value is not None and value != supported:
            raise self.refuse(key, f"only {supported!r} is supported")

    def refuse(self, key: str, why: str) -> ModelLoadError:
        value = repr(self._values.get(key))
        shown = value if len(value) <= 120 else value[:117] + "..."
        return ModelLoadError(f"{self.where}: {key} is {shown}: {why}")

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Refuses keys that were neither read nor known to be without effect on the numbers."""
        unread = sorted(self._values.keys() - self._read - set(harmless))
        if unread:
            raise self.refuse(unread[0], "this key is not known, and could change what the model computes")
