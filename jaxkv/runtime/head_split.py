"""Fits a model to a tensor-parallel size that its KV heads or its MLP do not divide by.

More devices than KV heads: each KV head is copied, and its query heads are dealt to the copies in whole groups. What still
does not divide is padded with heads of zeros, which change nothing in the output; so is the MLP's width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from jaxkv.core.errors import ConfigError
from jaxkv.models.config import ModelConfig
from jaxkv.models.params import Params
from pallas_kernels.quantized_matmul.rotation import BLOCK
from pallas_kernels.quantized_matmul.weights import QuantizedWeight


def split_heads(config: ModelConfig, shards: int) -> ModelConfig:
    """The configuration of the same model whose KV heads and MLP width divide by `shards`.

    Of the ways to copy and pad it takes the one with the fewest heads (of q, k and v) in all.
    Raises ConfigError when there are fewer query heads than devices.
    """
    K, G = config.num_kv_heads, config.group_size
    if shards > config.num_heads:
        raise ConfigError(
            f"tensor_parallel_size is {shards}, but the model has {config.num_heads} query heads: choose at most that many"
        )

    def padded(copies: int) -> int:
        return -(-K * copies // shards) * shards

    copies = min((c for c in range(1, G + 1) if G % c == 0), key=lambda c: padded(c) * (G // c + 2))
    heads = padded(copies)
    width = -(-config.intermediate_size // shards) * shards
    return dataclasses.replace(config, num_kv_heads=heads, num_heads=heads * (G // copies), intermediate_size=width)


def check_rotated(config: ModelConfig, target: ModelConfig) -> None:
    """Raises ConfigError where padding would move the end of the inputs that quantized weights are rotated in."""
    widths = {"hidden size of the MLP": (config.intermediate_size, target.intermediate_size)}
    widths["width of attention"] = (config.num_heads * config.head_dim, target.num_heads * target.head_dim)
    for name, (width, padded) in widths.items():
        if width % BLOCK and width // BLOCK != padded // BLOCK:
            raise ConfigError(
                f"int8 weights are rotated in blocks of {BLOCK}: the {name}, {width}, is no multiple of it, and cannot be padded to "
                f"{padded} for this tensor_parallel_size: choose another, or leave out the quantization"
            )


def split_params(config: ModelConfig, target: ModelConfig, params: Params) -> Params:
    """Rearranges a host tree of `config` into one of `target = split_heads(config, shards)`, in its place, leaf by leaf."""
    if config == target:
        return params
    layers = params["layers"]
    copies = config.group_size // target.group_size

    def split_qkv(array: np.ndarray) -> np.ndarray:
        return _pad(_copy_groups(array, copies), 1, target.num_kv_heads)

    def widen(array: np.ndarray) -> np.ndarray:
        return _pad(array, 2, target.intermediate_size)

    def split_o(array: np.ndarray) -> np.ndarray:
        L, E, K, G, D = array.shape
        return _pad(array.reshape(L, E, K * copies, G // copies, D), 2, target.num_kv_heads)

    layers["qkv"] = jax.tree.map(split_qkv, layers["qkv"])
    layers["gate_up"] = jax.tree.map(widen, layers["gate_up"])
    layers["o"] = _on_values(split_o, layers["o"])
    layers["down"] = _on_values(widen, layers["down"])
    return params


def _on_values(change: Callable[[np.ndarray], np.ndarray], weight: Any) -> Any:
    """Changes a weight along its inputs, which the scales of a quantized one do not have."""
    if isinstance(weight, QuantizedWeight):
        return dataclasses.replace(weight, values=cast(Any, change(cast(Any, weight.values))))
    return change(weight)


def _copy_groups(qkv: np.ndarray, copies: int) -> np.ndarray:
    """[L, K, G+2, D, ...] -> [L, K*copies, G/copies+2, D, ...]: queries dealt in order, key and value repeated."""
    L, K, rows, *rest = qkv.shape
    G = rows - 2
    queries = qkv[:, :, :G].reshape(L, K * copies, G // copies, *rest)
    kv = np.repeat(qkv[:, :, G:], copies, axis=1)
    return np.concatenate([queries, kv], axis=2)


def _pad(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    missing = size - array.shape[axis]
    if not missing:
        return array
    return np.pad(array, [(0, missing if a == axis else 0) for a in range(array.ndim)])
