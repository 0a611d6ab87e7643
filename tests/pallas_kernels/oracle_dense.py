"""A dense float64 oracle of ragged paged attention in NumPy, and random ragged batches to feed it.

It shares nothing with the kernels: it gathers each sequence's keys and values by hand and forms whole score matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

QUANT_MAX = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@dataclass(frozen=True)
class Batch:
    """Inputs of one call as NumPy arrays (see the entry point for shapes).

    stored: what the pool's bytes decode to, float64. exact: what was to be stored. noise: the rms error of rounding each number
    of `exact` to the grid of the pool's dtype.
    """

    q: np.ndarray
    pages: np.ndarray
    scales: np.ndarray | None
    stored: np.ndarray
    exact: np.ndarray
    noise: np.ndarray
    layer: int
    page_table: np.ndarray
    cu_q_lens: np.ndarray
    kv_lens: np.ndarray
    num_seqs: int


def np_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def random_batch(
    seed: int,
    lens: list[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    group: int = 4,
    head_dim: int = 64,
    page_size: int = 16,
    kv_dtype: str = "bfloat16",
    q_dtype: str = "bfloat16",
    scales: str = "none",
    num_layers: int = 2,
    padding_rows: int = 3,
    padding_seqs: int = 2,
) -> Batch:
    """A batch of (q_len, kv_len) sequences in shuffled pages; every byte that must not be read is NaN (int8: the NaN
    is in the scale)."""
    rng = np.random.default_rng(seed)
    K, D, L = num_kv_heads, head_dim, num_layers
    counts = [-(-kv // page_size) for _, kv in lens]
    P, S = sum(counts) + 3, len(lens) + padding_seqs
    W = max([*counts, 1]) + 2
    q = rng.standard_normal((sum(n for n, _ in lens) + padding_rows, K * group, D)).astype(np_dtype(q_dtype))
    values = rng.standard_normal((L, P, 2, K, page_size, D)) * rng.uniform(0.5, 2.0, (L, P, 2, K, page_size, 1))
    used = np.zeros((P, page_size), bool)
    table = rng.choice(np.array([-1, 2**30, -(2**31), P - 1]), (S, W)).astype(np.int32)
    ids = rng.permutation(P)
    at = 0
    for s, (_, kv_len) in enumerate(lens):
        for j in range(counts[s]):
            table[s, j] = ids[at]
            used[ids[at], : min(page_size, kv_len - j * page_size)] = True
            at += 1
    mask = used[None, :, None, None, :, None]
    if scales == "none":
        values = np.where(mask, values, np.nan)
        pages, scale_array, expanded = values.astype(np_dtype(kv_dtype)), None, np.ones(1)
        stored = pages.astype(np.float64)
    else:
        if scales == "token":
            scale_array = (np.abs(values).max(-1) / QUANT_MAX[kv_dtype]).astype(np.float32)
            expanded = scale_array[..., None].astype(np.float64)
        else:
            scale_array = (np.abs(values).max((1, 4, 5)) / QUANT_MAX[kv_dtype]).astype(np.float32)
            expanded = scale_array[:, None, :, :, None, None].astype(np.float64)
        scaled = values / expanded
        scaled = np.rint(scaled) if kv_dtype == "int8" else scaled
        if kv_dtype == "int8":
            pages = np.where(mask, scaled, 127).astype(np.int8)
        else:
            pages = np.where(mask, scaled, np.nan).astype(np.float32).astype(np_dtype(kv_dtype))
        if scales == "token":
            scale_array = np.where(mask[..., 0], scale_array, np.nan).astype(np.float32)
        stored = pages.astype(np.float64) * expanded
    starts = np.concatenate([[0], np.cumsum([n for n, _ in lens])])
    cu = np.concatenate([starts, np.full(padding_seqs, starts[-1])]).astype(np.int32)
    kv_lens = np.array([n for _, n in lens] + [7] * padding_seqs, np.int32)
    noise = expanded * steps_of(values / expanded, np_dtype(kv_dtype)) / 12**0.5
    return Batch(q, pages, scale_array, stored, values, noise, int(rng.integers(L)), table, cu, kv_lens, len(lens))


def steps_of(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The distance of neighbours in `dtype` near x: errors of rounding are spread evenly over it."""
    if dtype == np.int8:
        return np.ones_like(x)
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), float(info.smallest_normal))))
    return 2.0 ** (exponent - info.nmant)


def attend(
    batch: Batch,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """The output [T, H, D] in float64; rows of padding are 0."""
    q = batch.q.astype(np.float64)
    _, _, _, K, page_size, _ = batch.pages.shape
    group = q.shape[1] // K
    out = np.zeros_like(q)
    for s in range(batch.num_seqs):
        begin, end = batch.cu_q_lens[s], batch.cu_q_lens[s + 1]
        kv_len, q_len = batch.kv_lens[s], end - begin
        if q_len == 0:
            continue
        ids = batch.page_table[s, : -(-kv_len // page_size)]
        rows = batch.stored[batch.layer][ids].transpose(1, 2, 0, 3, 4)
        rows = rows.reshape(2, K, -1, rows.shape[-1])[:, :, :kv_len]
        position = kv_len - q_len + np.arange(q_len)
        key_at = np.arange(kv_len)
        seen = key_at[None] <= position[:, None]
        if sliding_window is not None:
            seen &= key_at[None] > position[:, None] - sliding_window
        for h in range(q.shape[1]):
            logits = scale * q[begin:end, h] @ rows[0, h // group].T
            if logit_soft_cap is not None:
                logits = logit_soft_cap * np.tanh(logits / logit_soft_cap)
            logits = np.where(seen, logits, -np.inf)
            top = logits.max(-1, keepdims=True)
            if sinks is not None:
                top = np.maximum(top, sinks[h])
            weights = np.exp(logits - top)
            total = weights.sum(-1, keepdims=True)
            if sinks is not None:
                total = total + np.exp(sinks[h] - top)
            out[begin:end, h] = (weights / total) @ rows[1, h // group]
    return out


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm of what is expected; infinite when anything found is not finite."""
    found = found.astype(np.float64)
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))
