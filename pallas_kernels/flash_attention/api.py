"""Flash attention: queries over dense keys and values of the same call, for prompts without a cache, scoring and drafts.

Sequences whose keys lie in the paged cache go through `pallas_kernels.ragged_paged_attention` instead.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import Backend, check_backend, check_traced_chip
from pallas_kernels.device_tables import current_device_kind
from pallas_kernels.flash_attention import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.flash_attention.tuning import blocks_for, tiles_for
from pallas_kernels.scoring import Scoring

MAX_GROUP = 16
"""Query heads of a KV head, at most, in the Mosaic kernels."""
HEAD_DIMS = (64, 128, 256)
_DTYPES = {"mosaic_tpu": mosaic_tpu.DTYPES, "mosaic_gpu": mosaic_gpu.DTYPES}


def check_supported(backend: str, *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: Any) -> None:
    """Raises ValueError that names what `backend` cannot do for heads of this kind.

    `reference` and `cpu_native` take any head_dim, group and floating dtype; the Mosaic kernels head_dim 64, 128 and 256, groups of
    1 to 16, and bfloat16 or float32 (`mosaic_tpu`), bfloat16 or float16 (`mosaic_gpu`).
    """
    known = check_backend(backend)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads cannot be grouped over {num_kv_heads} KV heads: one must divide the other"
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"attention of dtype {jnp.dtype(dtype).name} is not supported: it must be a floating dtype")
    if known not in _DTYPES:
        return
    if jnp.dtype(dtype).name not in _DTYPES[known]:
        raise ValueError(
            f"attention backend {known!r} takes {' or '.join(_DTYPES[known])}, not {jnp.dtype(dtype).name}: "
            "convert the arrays, or use the reference backend"
        )
    if head_dim not in HEAD_DIMS:
        raise ValueError(
            f"attention backend {known!r} takes head_dim 64, 128 or 256, not {head_dim}: use the reference backend"
        )
    if num_heads // num_kv_heads > MAX_GROUP:
        raise ValueError(
            f"attention backend {known!r} takes 1 to {MAX_GROUP} query heads per KV head, "
            f"not {num_heads} over {num_kv_heads}: use the reference backend"
        )


def flash_attention(
    q: Float[Array, "B Tq H D"],
    k: Float[Array, "B Tk K D"],
    v: Float[Array, "B Tk K D"],
    *,
    scale: float,
    causal: bool,
    q_lens: Int[Array, " B"] | None = None,
    kv_lens: Int[Array, " B"] | None = None,
    sliding_window: int | None = None,
    logit_soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    backend: Backend = "reference",
) -> Float[Array, "B Tq H D"]:
    """Attention of each sequence's queries over its keys, in q's dtype, with float32 softmax and sums.

    q, k, v: of one dtype; query heads h * H / K ... (h + 1) * H / K - 1 share KV head h.
    q_lens, kv_lens: how many queries and keys of each sequence are real, all of them by default; larger numbers count as all. Rows
      beyond are padding: they may hold anything, NaN included, and their output is zero.
    causal: the last query of a sequence sees its last key, the one before one key less, and so on. A query that sees no key, as
      when there are more queries than keys, gets zeros.
    sliding_window: keys that a query sees, itself included; needs `causal`. logit_soft_cap: cap * tanh(score / cap).
    sinks: one extra logit per head that takes part in the softmax with a value of zero.
    backend: `reference` is XLA, on any device; `cpu_native` is the same, as there is no native code for dense attention and XLA's
      matrix products serve CPUs well; `mosaic_tpu` and `mosaic_gpu` (Hopper) are kernels for these chips.

    Raises ValueError for shapes that do not fit each other, and for what the backend cannot do.
    """
    _check_shapes(q, k, v, q_lens, kv_lens, sinks)
    _check_options(causal, sliding_window, logit_soft_cap)
    if scale <= 0:
        raise ValueError(f"a scale of {scale} is not supported: it must be above 0")
    if backend == "mosaic_gpu":
        check_traced_chip("flash attention")
    (B, Tq, H, D), (Tk, K) = q.shape, k.shape[1:3]
    check_supported(backend, num_heads=H, num_kv_heads=K, head_dim=D, dtype=q.dtype)
    arrays = (q, k, v, _lens(q_lens, B, Tq), _lens(kv_lens, B, Tk), sinks)
    scoring = Scoring(scale, causal, sliding_window, logit_soft_cap)
    if q.size == 0 or k.size == 0:
        return jnp.zeros_like(q)
    if backend == "mosaic_tpu":
        blocks = blocks_for(current_device_kind(), D)
        return mosaic_tpu.attend(*arrays, scoring=scoring, blocks=blocks)
    if backend == "mosaic_gpu":
        tiles = tiles_for(current_device_kind(), D)
        return mosaic_gpu.attend(*arrays, scoring=scoring, tiles=tiles)
    return reference.attend(*arrays, scoring=scoring)


def _lens(given: Int[Array, " B"] | None, B: int, most: int) -> Int[Array, " B"]:
    return jnp.full(B, most, jnp.int32) if given is None else jnp.clip(given, 0, most).astype(jnp.int32)


def _check_shapes(q: Array, k: Array, v: Array, q_lens: Any, kv_lens: Any, sinks: Any) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q, k and v of shapes {q.shape}, {k.shape} and {v.shape} do not fit: they must be [B, Tq, H, D], "
            "[B, Tk, K, D] and [B, Tk, K, D]"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must be of one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    for name, array, length in (
        ("q_lens", q_lens, q.shape[0]),
        ("kv_lens", kv_lens, q.shape[0]),
        ("sinks", sinks, q.shape[2]),
    ):
        if array is not None and array.shape != (length,):
            raise ValueError(f"{name} of shape {array.shape} do not fit q of shape {q.shape}: they must be [{length}]")


def _check_options(causal: bool, sliding_window: int | None, logit_soft_cap: float | None) -> None:
    if sliding_window is not None and (sliding_window < 1 or not causal):
        raise ValueError(
            f"a sliding window of {sliding_window} keys with causal={causal} is not supported: it must be at least 1, and causal"
        )
    if logit_soft_cap is not None and logit_soft_cap <= 0:
        raise ValueError(f"a logit soft cap of {logit_soft_cap} is not supported: it must be above 0")
