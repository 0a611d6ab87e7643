"""Block sizes of the kernels, one JSON file per device kind, and the rule that finds the file of a device.

A file's name is the start of the device kinds that it is for, in lower case with underscores; the longest match counts:
`tpu_v5_lite.json` for "TPU v5 lite", `tpu.json` for every TPU without a file of its own. `about` says where the numbers come from.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jax

from pallas_kernels.quantized_matmul.weights import Kind


@dataclass(frozen=True, slots=True)
class Blocks:
    """A TPU block: tokens x outputs of the result, from `inputs` at a time.

    native_8bit: the matrix unit multiplies the stored dtype; else it is widened to bfloat16 in the kernel.
    """

    tokens: int
    outputs: int
    inputs: int
    native_8bit: bool = False


@dataclass(frozen=True, slots=True)
class Tiles:
    """A GPU tile: `outputs` columns of the result for each of `warpgroups` x 64 tokens, from `inputs` at a time.

    stages: tiles of operands in flight. blocks: inputs are split until the grid is about so large. max_tokens: the widest step
    that takes these tiles, None for any.
    """

    outputs: int
    inputs: int
    stages: int
    warpgroups: int
    blocks: int = 132
    max_tokens: int | None = None


def blocks_for(device_kind: str, kind: Kind) -> Blocks:
    """TPU blocks for a device kind, as JAX names it. Any other device runs an interpreter: it gets those of a plain TPU."""
    return Blocks(**_table(device_kind if device_kind.startswith("TPU") else "TPU")[kind])


def tiles_for(device_kind: str, kind: Kind, tokens: int) -> Tiles:
    """GPU tiles for a device kind and a step of `tokens` tokens. Any other device runs an interpreter, as above."""
    table = _table(device_kind if device_kind.startswith("NVIDIA") else "NVIDIA")
    choices = [Tiles(**entry) for entry in table[kind]]
    return next(tiles for tiles in choices if tiles.max_tokens is None or tokens <= tiles.max_tokens)


def current_device_kind() -> str:
    """The device that is traced for: that of the mesh in use, or else the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return str(abstract.device_kind if abstract is not None else jax.devices()[0].device_kind)


@functools.cache
def _table(device_kind: str) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9]+", "_", device_kind.lower())
    files = {entry.name.removesuffix(".json"): entry for entry in resources.files(__name__).iterdir()}
    matches = [stem for stem, entry in files.items() if entry.name.endswith(".json") and name.startswith(stem)]
    table: dict[str, Any] = json.loads(files[max(matches, key=len)].read_text())
    return table
