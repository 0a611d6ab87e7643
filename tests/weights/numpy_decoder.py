"""A dense float32 decoder in numpy over the canonical tree. Written for tests; shares no code with jaxkv.models."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxkv.models.config import ModelConfig, RopeConfig


def log_probabilities(config: ModelConfig, params: dict[str, Any], ids: np.ndarray) -> np.ndarray:
    """ids [S] -> log-probabilities [S, V]; row i is the distribution after ids[: i + 1]."""
    x = single(params["embed"][ids])
    positions = np.arange(len(ids))
    visible = positions[None, :] <= positions[:, None]
    if config.sliding_window is not None:
        visible &= positions[:, None] - positions[None, :] < config.sliding_window
    layers = params["layers"]
    for i in range(config.num_layers):
        x = x + attention(config, {name: array[i] for name, array in layers.items()}, x, positions, visible)
        h = rms_norm(x, layers["mlp_norm"][i], config.rms_norm_eps)
        gate, up = (h @ single(layers["gate_up"][i, part]).T for part in (0, 1))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ single(layers["down"][i]).T
    x = rms_norm(x, params["final_norm"], config.rms_norm_eps)
    logits = x @ single(params.get("lm_head", params["embed"])).T
    logits = logits - logits.max(-1, keepdims=True)
    result: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return result


def attention(
    config: ModelConfig, layer: dict[str, np.ndarray], x: np.ndarray, positions: np.ndarray, visible: np.ndarray
) -> np.ndarray:
    h = rms_norm(x, layer["attn_norm"], config.rms_norm_eps)
    out = np.zeros_like(x)
    for group in range(config.num_kv_heads):
        heads = [h @ single(weight).T for weight in layer["qkv"][group]]
        *queries, key, value = heads
        key = rotate(key, positions, config.rope)
        for g, query in enumerate(queries):
            scores = rotate(query, positions, config.rope) @ key.T / math.sqrt(config.head_dim)
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = weights / weights.sum(-1, keepdims=True) @ value
            out += mixed @ single(layer["o"][:, group, g]).T
    return out


def single(array: np.ndarray) -> np.ndarray:
    """As float32, without a copy where it is."""
    return array.astype(np.float32, copy=False)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    result: np.ndarray = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return result


def rotate(x: np.ndarray, positions: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Complex multiplication of (first half + i second half) by the turning angle of each frequency."""
    half = x.shape[-1] // 2
    speeds, scale = speeds_of(rope, half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * positions[:, None] * speeds) * scale
    return np.concatenate([turned.real, turned.imag], -1).astype(np.float32)


def speeds_of(rope: RopeConfig, half: int) -> tuple[np.ndarray, float]:
    """Radians per position of each pair, and the factor on the rotated vector."""
    base = np.array([rope.theta ** (-i / half) for i in range(half)])
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    if rope.kind == "llama3":
        assert rope.original_max_position is not None
        turns = base * rope.original_max_position / (2 * math.pi)
        kept = np.interp(turns, [rope.low_freq_factor, rope.high_freq_factor], [0.0, 1.0])
        return base * (kept + (1 - kept) / rope.factor), 1.0
    if rope.kind == "yarn":
        assert rope.original_max_position is not None

        def pair_that_turns(times: float) -> float:
            return half * math.log(rope.original_max_position / (times * 2 * math.pi), rope.theta)

        first, last = math.floor(pair_that_turns(rope.beta_fast)), math.ceil(pair_that_turns(rope.beta_slow))
        stretched = np.interp(np.arange(half), [max(first, 0), min(last, 2 * half - 1)], [0.0, 1.0])
        return base * (1 - stretched + stretched / rope.factor), 0.1 * math.log(rope.factor) + 1.0
    return base, 1.0
