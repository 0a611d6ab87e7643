"""Tuned numbers of a kernel: one JSON file per device kind in a package, and the rule that finds the file of a device.

A file's name is the start of the device kinds that it is for, in lower case with underscores; the longest match counts:
`tpu_v5_lite.json` for "TPU v5 lite", `tpu.json` for every TPU without a file of its own. `about` says where the numbers come from.
"""

from __future__ import annotations

import functools
import json
import re
from importlib import resources
from typing import Any

import jax


def current_device_kind() -> str:
    """The device that is traced for: that of the mesh in use, or else the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return str(abstract.device_kind if abstract is not None else jax.devices()[0].device_kind)


@functools.cache
def table(package: str, device_kind: str) -> dict[str, Any]:
    """The numbers in `package` for a device kind, as JAX names it. Raises ValueError where no file is for it."""
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower())
    files = {entry.name.removesuffix(".json"): entry for entry in resources.files(package).iterdir()}
    matches = [stem for stem, entry in files.items() if entry.name.endswith(".json") and name.startswith(stem)]
    if not matches:
        raise ValueError(f"{package} has no numbers for the device kind {device_kind!r}")
    found: dict[str, Any] = json.loads(files[max(matches, key=len)].read_text())
    return found
