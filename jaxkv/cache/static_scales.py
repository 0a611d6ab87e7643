"""Static scales of a quantized KV pool: one for the keys and one for the values of each layer and KV head, from a JSON file.

    {"kv_cache_dtype": "fp8_e4m3", "k_scales": [[0.1, ...], ...], "v_scales": [[0.1, ...], ...]}

Rows are layers, columns KV heads; a stored number times its scale is the key or value. They are data of the pool: another file
is never another program.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.core.errors import ConfigError


def read_static_scales(
    path: str | Path, *, kv_cache_dtype: str, num_layers: int, num_kv_heads: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The file's scales, float32 [L, 2, K]: [:, 0] of keys, [:, 1] of values.

    Raises ConfigError for a file that cannot be read, that was made for another KV dtype or model, or that has a scale which is
    absent, zero, negative or no finite number.
    """
    content = _read(Path(path))
    made_for = content["kv_cache_dtype"]
    if made_for != kv_cache_dtype:
        raise ConfigError(
            f"{path} holds scales for kv_cache_dtype {made_for!r}, but the pool is {kv_cache_dtype}: choose one or the other"
        )
    parts = [_checked(content[name], f"{path}: {name}", num_layers, num_kv_heads) for name in ("k_scales", "v_scales")]
    return np.stack(parts, axis=1)


def split_static_scales(
    scales: np.ndarray[Any, np.dtype[np.float32]], target_heads: int, copies: int
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The scales after KV heads were copied and padded for tensor parallelism; heads of padding get 1."""
    copied = np.repeat(scales, copies, axis=2)
    padding = target_heads - copied.shape[2]
    return np.pad(copied, ((0, 0), (0, 0), (0, padding)), constant_values=1.0)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the KV cache scales {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the KV cache scales {path} are not valid JSON: {error}") from error
    wanted = {"kv_cache_dtype", "k_scales", "v_scales"}
    if not isinstance(content, dict) or set(content) != wanted:
        found = sorted(content) if isinstance(content, dict) else f"a JSON {type(content).__name__}"
        raise ConfigError(f"{path} must be an object with exactly {', '.join(sorted(wanted))}: it has {found}")
    return content


def _checked(rows: Any, where: str, num_layers: int, num_kv_heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    if not isinstance(rows, list) or len(rows) != num_layers:
        found = f"{len(rows)} rows" if isinstance(rows, list) else f"a JSON {type(rows).__name__}"
        raise ConfigError(f"{where} must hold a row for each of the model's {num_layers} layers: it has {found}")
    for layer, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != num_kv_heads:
            found = f"{len(row)}" if isinstance(row, list) else f"{row!r}"
            raise ConfigError(
                f"{where} of layer {layer} must hold a number for each of {num_kv_heads} KV heads: it has {found}"
            )
        for head, value in enumerate(row):
            if isinstance(value, bool) or not isinstance(value, int | float) or not _storable(value):
                raise ConfigError(
                    f"{where} of layer {layer}, head {head} is {value!r}: a scale must be a finite number above 0 (in float32)"
                )
    return np.array(rows, np.float32)


def _storable(value: float) -> bool:
    """Whether value is a normal positive float32: a subnormal one may be read as zero."""
    limits = np.finfo(np.float32)
    return float(limits.tiny) <= value <= float(limits.max)
