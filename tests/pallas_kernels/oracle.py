"""Attention over a paged cache, dense, in float64 and plain NumPy: shares no code with what it checks."""

import dataclasses

import ml_dtypes
import numpy as np

NAN_BYTE = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}
"""A NaN of each 8-bit float; int8 has none, its poison is the largest number."""


@dataclasses.dataclass
class Batch:
    """One call of the op with a pool in token_major order, and what it should return.

    stored: keys and values as stored numbers, [sum of kv_len, 2, K, D] per sequence, already multiplied by nothing.
    """

    q: np.ndarray
    pages: np.ndarray
    scales: np.ndarray | None
    layer: int
    page_table: np.ndarray
    cu_q_lens: np.ndarray
    kv_lens: np.ndarray
    num_seqs: int
    expected: np.ndarray  # [real tokens, H, D] float64
    options: dict


def _poison(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype.name in NAN_BYTE:
        return np.full(shape, NAN_BYTE[dtype.name], np.uint8).view(dtype)
    if dtype == np.int8:
        return np.full(shape, 127, np.int8)
    return np.full(shape, np.nan, dtype)


def _to_storage(x: np.ndarray, dtype: np.dtype, steps: float) -> np.ndarray:
    """x (about standard normal) as stored numbers that use the range of the dtype; `steps` is stored per unit of x."""
    if dtype == np.int8:
        return np.clip(np.round(x * steps), -127, 127).astype(np.int8)
    if dtype.name in NAN_BYTE:
        stored = (x * steps).astype(dtype)
        normal = np.abs(stored.astype(np.float64)) >= float(ml_dtypes.finfo(dtype).smallest_normal)
        return np.where(normal, stored, np.zeros((), dtype))
    return x.astype(dtype)


def make_batch(
    lengths: list[tuple[int, int]],
    *,
    K: int,
    G: int,
    D: int,
    page: int,
    dtype: str = "bfloat16",
    scales: str | None = None,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    with_sinks: bool = False,
    padding: int = 3,
    empty_rows: int = 1,
    layers: int = 2,
    seed: int = 0,
) -> Batch:
    """A ragged batch of (q_len, kv_len) sequences. Whatever must not be read is NaN, -1 or huge."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    q_kind = np.dtype(np.float32) if dtype == "float32" else np.dtype(ml_dtypes.bfloat16)
    H, S = K * G, len(lengths) + empty_rows
    layer = layers - 1
    pages_of = [-(-kv // page) for _, kv in lengths]
    W = max(pages_of) + 1
    P = sum(pages_of) + 3
    pages = _poison((layers, P, page, K, 2, D), kind)
    free = list(rng.permutation(P))
    page_table = np.where(rng.random((S, W)) < 0.5, -1, np.iinfo(np.int32).max).astype(np.int32)
    scale_values = None
    if scales == "static":
        scale_values = (rng.uniform(0.5, 2.0, (layers, 2, K)) / 40).astype(np.float32)
    elif scales == "token":
        scale_values = np.full((layers, P, K, 2, page), np.nan, np.float32)
    q_lens = [q for q, _ in lengths]
    cu = np.concatenate([[0], np.cumsum(q_lens), np.full(empty_rows, sum(q_lens))]).astype(np.int32)
    q = rng.standard_normal((sum(q_lens) + padding, H, D)).astype(q_kind)
    sinks = rng.standard_normal(H).astype(np.float32) if with_sinks else None
    scale = D**-0.5
    expected = np.zeros((sum(q_lens), H, D))
    for s, (q_len, kv_len) in enumerate(lengths):
        steps = 40.0 if kind.itemsize == 1 else 1.0
        stored = _to_storage(rng.standard_normal((kv_len, K, 2, D)), kind, steps)
        real = stored.astype(np.float64)
        if scales == "static":
            real = real * scale_values[layer].T[None, :, :, None]
        elif scales == "token":
            token = (rng.uniform(0.5, 2.0, (kv_len, K, 2)) / 40).astype(np.float32)
            real = real * token[..., None]
        first_seen = 0 if sliding_window is None else max(kv_len - q_len - sliding_window + 1, 0)
        for j in range(pages_of[s]):
            if (j + 1) * page <= first_seen:
                continue  # an old page of a window layer, freed: its entry stays garbage
            pid = free.pop()
            page_table[s, j] = pid
            rows = stored[j * page : (j + 1) * page]
            pages[layer, pid, : len(rows)] = rows
            if scales == "token":
                scale_values[layer, pid, :, :, : len(rows)] = np.moveaxis(token[j * page : (j + 1) * page], 0, -1)
        for i in range(q_len):
            at = kv_len - q_len + i
            lo = 0 if sliding_window is None else max(at - sliding_window + 1, 0)
            queries = q[cu[s] + i].astype(np.float64).reshape(K, G, D)
            dots = np.einsum("kgd,tkd->kgt", queries, real[lo : at + 1, :, 0]) * scale
            if logit_soft_cap is not None:
                dots = logit_soft_cap * np.tanh(dots / logit_soft_cap)
            extra = np.full((K, G, 1), -np.inf) if sinks is None else sinks.astype(np.float64).reshape(K, G, 1)
            top = np.maximum(dots.max(-1, keepdims=True), extra)
            weights = np.exp(dots - top)
            total = weights.sum(-1, keepdims=True) + np.exp(extra - top)
            expected[cu[s] + i] = np.einsum("kgt,tkd->kgd", weights / total, real[lo : at + 1, :, 1]).reshape(H, D)
    pages = pages.reshape(layers, P, page, K * 2 * D)
    if scales == "token":
        scale_values = scale_values.reshape(layers, P, 2 * K, page)
        if kind.name in NAN_BYTE:  # even tokens of each 128, then odd ones
            groups = scale_values.reshape(layers, P, 2 * K, page // 128, 64, 2)
            scale_values = np.moveaxis(groups, -1, -2).reshape(layers, P, 2 * K, page)
    kv_lens = np.array([kv for _, kv in lengths] + [0] * empty_rows, np.int32)
    options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "logit_soft_cap": logit_soft_cap,
        "sinks": sinks,
    }
    return Batch(q, pages, scale_values, layer, page_table, cu, kv_lens, len(lengths), expected, options)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    got = np.asarray(got, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
