"""Write and attend on interpreted TPU kernels: the error is the one that rounding to 8 bits explains, and nothing else changes."""

import ml_dtypes
import numpy as np
import pytest
from fixtures.tpu_interpreter import watching
from jax import numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(300)]

K, G, D = 2, 4, 128
LENGTHS = [(1, 65), (7, 130), (1, 16)]
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
MANTISSA_BITS = {"float8_e4m3fn": 3, "float8_e5m2": 2}
SMALLEST_NORMAL = {"float8_e4m3fn": 2.0**-6, "float8_e5m2": 2.0**-14}


def _rounding_variance(x: np.ndarray, dtype: str) -> np.ndarray:
    """Of x [..., D] when stored with one scale for its last axis: an error spread evenly over the step between two stored numbers."""
    scale = np.abs(x).max(-1, keepdims=True) / LARGEST[dtype]
    if dtype == "int8":
        step = np.ones_like(x)
    else:
        magnitude = np.maximum(np.abs(x / scale), SMALLEST_NORMAL[dtype])
        step = 2.0 ** (np.floor(np.log2(magnitude)) - MANTISSA_BITS[dtype])
        # No subnormal numbers are stored: below the smallest normal one, the step is as large as that.
        step = np.where(np.abs(x / scale) < SMALLEST_NORMAL[dtype], SMALLEST_NORMAL[dtype], step)
    return (scale * step) ** 2 / 12


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> tuple[np.ndarray, float]:
    """q [H, D] over k, v [t, K, D]: exact outputs, and the expected square of the norm of their error.

    An output moves with the values, by each one's weight, and with the weights, by what a score's error does to them.
    """
    queries = q.reshape(K, G, D)
    scores = np.einsum("kgd,tkd->kgt", queries, k) * D**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("kgt,tkd->kgd", weights, v)
    of_scores = np.einsum("kgd,tkd->kgt", queries**2, _rounding_variance(k, dtype)) / D
    away = ((v.transpose(1, 0, 2)[:, None] - out[:, :, None]) ** 2).sum(-1)
    of_values = _rounding_variance(v, dtype).sum(-1).T[:, None]
    return out.reshape(K * G, D), float((weights**2 * (of_values + of_scores * away)).sum())


@pytest.mark.parametrize(("dtype", "page"), [("int8", 16), ("float8_e4m3fn", 64), ("float8_e5m2", 32)])
def test_written_and_attended(dtype: str, page: int) -> None:
    rng = np.random.default_rng(5)
    layout = KVLayout(2, K, D, page, dtype, "token_major", "token")
    counts = [-(-kv // page) for _, kv in LENGTHS]
    num_pages = sum(counts) + 4
    ids = rng.permutation(num_pages - 1)
    table = np.full((len(LENGTHS), max(counts) + 1), -1, np.int32)
    page_of, offset_of, starts = [], [], np.concatenate([[0], np.cumsum(counts)])
    for s, (_, kv) in enumerate(LENGTHS):
        table[s, : counts[s]] = ids[starts[s] : starts[s + 1]]
        page_of += [table[s, at // page] for at in range(kv)]
        offset_of += [at % page for at in range(kv)]
    tokens = len(page_of)
    keys, values, q = (
        rng.standard_normal((n, heads, D)).astype(ml_dtypes.bfloat16)
        for n, heads in ((tokens, K), (tokens, K), (sum(q for q, _ in LENGTHS), K * G))
    )
    pages = rng.integers(0, 256, layout.pages_shape(num_pages), np.uint8).view(getattr(ml_dtypes, dtype, dtype))
    before = KVPages(jnp.asarray(pages), jnp.full(layout.scales_shape(num_pages), jnp.nan, jnp.float32))
    cu = np.concatenate([[0], np.cumsum([n for n, _ in LENGTHS])]).astype(np.int32)
    kv_lens = np.array([n for _, n in LENGTHS], np.int32)
    with pltpu.force_tpu_interpret_mode(watching()):
        after = write_kv(
            before, jnp.int32(1), jnp.asarray(keys), jnp.asarray(values), jnp.asarray(page_of, jnp.int32),
            jnp.asarray(offset_of, jnp.int32), layout=layout, backend="mosaic_tpu",
        )  # fmt: skip
        got = ragged_paged_attention(
            jnp.asarray(q), after, jnp.int32(1), jnp.asarray(table), jnp.asarray(cu), jnp.asarray(kv_lens),
            jnp.int32(len(LENGTHS)), layout=layout, scale=D**-0.5, backend="mosaic_tpu",
        )  # fmt: skip

    expected, variance, first = [], 0.0, 0
    for n, kv in LENGTHS:
        for i in range(n):
            seen = slice(first, first + kv - n + i + 1)
            parts = [array[seen].astype(np.float64) for array in (keys, values)]
            out, more = _attention(q[len(expected)].astype(np.float64), *parts, dtype)
            expected.append(out)
            variance += more
        first += kv
    error = np.linalg.norm(np.asarray(got, np.float64) - np.stack(expected))
    assert 0.75 < error / np.sqrt(variance) < 1.25

    # Every page but those of the batch, in every layer, and the rows beyond each context.
    free = np.setdiff1d(np.arange(num_pages), ids[: sum(counts)])
    for old, new in ((before.pages, after.pages), (before.scales, after.scales)):
        bits = [np.asarray(array).view(np.uint8) for array in (old, new)]
        assert np.array_equal(bits[0][0], bits[1][0])
        assert np.array_equal(bits[0][1, free], bits[1][1, free])
    for s, (_, kv) in enumerate(LENGTHS):
        last, used = table[s, counts[s] - 1], (kv - 1) % page + 1
        tails = [np.asarray(pool.pages)[1, last, used:].view(np.uint8) for pool in (before, after)]
        assert np.array_equal(*tails)
    scales = np.asarray(after.scales)[1]
    written = (np.isfinite(scales) & (scales != 0)).sum()  # lanes beside a written token's that no head has become zero
    assert written == tokens * K * 2, "one scale for each key and each value"
