"""The canonical parameter tree: one declaration that gives every weight's shape, logical axes and dtype.

Weights are [out, in]: each matmul contracts the last axis of its weight. The heads of a KV group stand together (its query heads,
then its key, then its value), so that sharding the group axis shards attention whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxkv.models.config import ModelConfig

Params = dict[str, Any]
"""Nested dict of arrays, in the shape of `declare_params`. A quantized weight is a QuantizedWeight whose scales lack the inputs."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """shape; axes: one logical axis name (or None) per dimension; inputs: how many of the last dimensions a matmul contracts.

    A norm has no inputs: it is kept in float32 whatever the model's dtype, and never quantized.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    inputs: int = 1

    @property
    def norm(self) -> bool:
        return self.inputs == 0


def declare_params(config: ModelConfig) -> dict[str, Any]:
    """The tree of ParamSpec of a decoder; `lm_head` is absent when the embedding is tied."""
    L, E, F, V = config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size
    K, G, D = config.num_kv_heads, config.group_size, config.head_dim
    tree: dict[str, Any] = {
        "embed": ParamSpec((V, E), ("vocab", None)),
        "final_norm": ParamSpec((E,), (None,), inputs=0),
        "layers": {
            "attn_norm": ParamSpec((L, E), (None, None), inputs=0),
            "qkv": ParamSpec((L, K, G + 2, D, E), (None, "kv_heads", None, None, None)),
            "o": ParamSpec((L, E, K, G, D), (None, None, "kv_heads", None, None), inputs=3),
            "mlp_norm": ParamSpec((L, E), (None, None), inputs=0),
            "gate_up": ParamSpec((L, 2, F, E), (None, None, "mlp", None)),
            "down": ParamSpec((L, E, F), (None, None, "mlp")),
        },
    }
    if not config.tie_embeddings:
        tree["lm_head"] = ParamSpec((V, E), ("vocab", None))
    return tree


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The layers' weights as stacks of matrices [..., out, in]: heads taken together."""
    L, E, F = config.num_layers, config.hidden_size, config.intermediate_size
    K, G, D = config.num_kv_heads, config.group_size, config.head_dim
    return {
        "qkv": (L, K * (G + 2) * D, E),
        "o": (L, E, K * G * D),
        "gate_up": (L, 2, F, E),
        "down": (L, E, F),
    }
