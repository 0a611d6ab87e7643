"""The type of arrays that are made on the host and travel to the device with the call."""

from __future__ import annotations

from typing import Any

HostOrDevice = Any
"""numpy before the call, jax.Array inside it. The shape and dtype stand beside each field."""
