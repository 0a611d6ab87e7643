"""The static shape of a decoder: everything about a model that is not a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and the scaling of its frequencies.

    kind: default; linear (positions divided by factor); llama3 (Llama 3.1's band-wise scaling); yarn (Peng et al. 2023).
    original_max_position: context of pre-training, needed by llama3 and yarn.
    attention_factor: yarn's factor on cos and sin; None = 0.1 ln(factor) + 1.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder. Hashable, so that it is a static argument of the jitted step.

    head_dim: of q, k and v; num_heads is a multiple of num_kv_heads (GQA group = num_heads // num_kv_heads).
    sliding_window: keys that a query sees, itself included; None = all.
    tie_embeddings: the output projection is the embedding table.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    sliding_window: int | None = None
    tie_embeddings: bool = False

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads
