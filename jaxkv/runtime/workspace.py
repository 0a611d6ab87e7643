"""An estimate of the memory that a step needs besides weights and pool."""

from __future__ import annotations

from jaxkv.core.sampling_params import MAX_LOGIT_BIAS
from jaxkv.models.config import ModelConfig
from jaxkv.runtime.step_batch import Buckets

_FLOAT = 4
_LOGITS_COPIES = 8
"""float32 [S, V] arrays that the sampler holds at once at its peak: raw, changed, scaled, order bits, noise and temporaries."""


def workspace_bytes(config: ModelConfig, buckets: Buckets, *, shards: int) -> int:
    """Bytes per device: activations of the widest step, logits and sampler, and the slot state. Rounded up, not measured."""
    T, S, V = buckets.tokens[-1], buckets.max_num_seqs, config.vocab_size
    widest = max(
        config.hidden_size * 4, (2 * config.intermediate_size + config.num_heads * config.head_dim * 3) // shards
    )
    activations = T * widest * _FLOAT * 2
    logits = S * V * _FLOAT * _LOGITS_COPIES
    slots = (S + 1) * (V * (_FLOAT + 1) + MAX_LOGIT_BIAS * 2 * _FLOAT)
    return activations + logits + slots
