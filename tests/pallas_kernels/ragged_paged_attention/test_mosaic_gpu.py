"""The Hopper kernels in the interpreter, against a dense float64 oracle: numbers, races, barriers, memory that must not be read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.gpu_interpreter import gpu_interpreter
from oracle_dense import Batch, attend, random_batch, relative_error

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_gpu_decode, mosaic_gpu_prefill_call

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.timeout(300),
    # Rows that nobody reads may hold NaN.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]

BOUND = 1e-2
"""Of 16-bit arithmetic: probabilities and outputs have 8 bits at least. Pools are exact: the oracle reads what is stored."""


def run(
    batch: Batch, scales: str = "none", *, decode_only: bool = False, sinks: np.ndarray | None = None, **options: object
) -> np.ndarray:
    _, _, _, K, page, D = batch.pages.shape
    layout = KVLayout(batch.pages.shape[0], K, D, page, str(batch.pages.dtype), scales=scales)
    H = batch.q.shape[1]
    mosaic_gpu.check_supported(layout, num_heads=H)
    spec = mosaic_gpu.call_spec(layout, num_heads=H, scale=D**-0.5, has_sinks=sinks is not None, **options)

    def call(q: jax.Array, kv: KVPages, layer: jax.Array, *rest: jax.Array) -> jax.Array:
        *arrays, sinks = rest
        return mosaic_gpu.attend(q, kv, layer, *arrays, spec=spec, sinks=sinks, decode_only=decode_only, num_sms=2)

    kv = KVPages(jnp.asarray(batch.pages), None if batch.scales is None else jnp.asarray(batch.scales))
    arrays = (batch.page_table, batch.cu_q_lens, batch.kv_lens, np.int32(batch.num_seqs))
    with gpu_interpreter():
        out = jax.jit(call)(
            jnp.asarray(batch.q),
            kv,
            np.int32(batch.layer),
            *map(jnp.asarray, arrays),
            None if sinks is None else jnp.asarray(sinks),
        )
        return np.asarray(out)


def check(
    batch: Batch, scales: str = "none", *, decode_only: bool = False, with_sinks: bool = False, **options: object
) -> None:
    H, D = batch.q.shape[1:]
    sinks = np.random.default_rng(7).standard_normal(H).astype(np.float32) if with_sinks else None
    out = run(batch, scales, decode_only=decode_only, sinks=sinks, **options)
    expected = attend(batch, scale=D**-0.5, sinks=sinks, **options)
    for s in range(batch.num_seqs):
        rows = slice(batch.cu_q_lens[s], batch.cu_q_lens[s + 1])
        if rows.start < rows.stop:
            assert relative_error(out[rows], expected[rows]) < BOUND, f"sequence {s}"
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_decodes_at_page_borders(page_size: int) -> None:
    lens = [(1, n) for n in (1, page_size - 1, page_size, page_size + 1, 517)]
    check(random_batch(page_size, lens, page_size=page_size), decode_only=True)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (2, 128), (7, 64), (8, 256), (16, 64)])
def test_decode_groups_and_head_dims(group: int, head_dim: int) -> None:
    check(random_batch(1, [(1, 130), (1, 65)], group=group, head_dim=head_dim, page_size=64), decode_only=True)


def test_mixed_batch_with_empty_rows() -> None:
    check(random_batch(2, [(1, 70), (3, 3), (0, 40), (64, 64), (1, 1), (130, 517), (7, 129)]))


@pytest.mark.parametrize("group", [1, 7, 8])
def test_prefill_groups(group: int) -> None:
    check(random_batch(3, [(20, 20), (70, 150)], num_kv_heads=1, group=group))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_prefill_head_dims(head_dim: int) -> None:
    check(random_batch(4, [(5, 5), (40, 170)], num_kv_heads=1, head_dim=head_dim, page_size=32))


@pytest.mark.parametrize("window", [4, 100])
def test_window_cap_and_sinks(window: int) -> None:
    batch = random_batch(5, [(1, 300), (40, 300), (1, 3)], num_kv_heads=1)
    check(batch, sliding_window=window, logit_soft_cap=20.0, with_sinks=True)


@pytest.mark.parametrize("scales", ["token", "static"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_quantized_pools(dtype: str, scales: str) -> None:
    batch = random_batch(6, [(1, 130), (33, 150), (1, 17)], num_kv_heads=1, kv_dtype=dtype, scales=scales)
    assert batch.pages.dtype.itemsize == 1
    check(batch, scales)


def test_rows_of_other_sequences_are_untouched_by_partial_tiles() -> None:
    """The last tile of q moves back when it would pass the end: neighbours keep their own results."""
    check(random_batch(8, [(17, 17), (33, 90), (2, 200)], padding_rows=0, num_kv_heads=1))


def test_few_rows() -> None:
    check(random_batch(9, [(2, 33)], padding_rows=0, num_kv_heads=1, group=1))


def test_a_planted_wrong_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tile of a window is skipped one tile too late: the kernel then reads keys of the wrong positions."""
    monkeypatch.setattr(mosaic_gpu_decode, "first_visible_key", lambda _spec, position: jnp.maximum(position - 63, 0))
    batch = random_batch(10, [(1, 200)], num_kv_heads=1)
    expected = attend(batch, scale=64**-0.5, sliding_window=100)
    assert relative_error(run(batch, decode_only=True, sliding_window=100)[:1], expected[:1]) > BOUND


def test_a_planted_race_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers that do not wait for their tiles."""
    monkeypatch.setattr(mosaic_gpu_prefill_call.Ring, "wait", lambda self, t: self.at(t))
    with pytest.raises(Exception, match=r"RACE|barrier|observed|phase"):
        run(random_batch(11, [(20, 20)], num_kv_heads=1))


@pytest.mark.parametrize(("q_len", "kv_len"), [(64, 64), (130, 517), (2048, 2048), (7, 4096)])
@pytest.mark.parametrize("window", [None, 1024])
def test_no_tile_is_multiplied_that_no_query_sees(q_len: int, kv_len: int, window: int | None) -> None:
    layout = KVLayout(1, 8, 128, 64, "bfloat16")
    spec = mosaic_gpu.call_spec(layout, num_heads=32, scale=1.0, sliding_window=window)
    done, needed = mosaic_gpu.work_of_prefill(spec, 128, q_len, kv_len)
    assert done <= 1.1 * needed


@pytest.mark.parametrize(
    ("changes", "heads", "named"),
    [
        ({"head_dim": 96}, 8, "head_dim"),
        ({"page_size": 24}, 8, "pages"),
        ({"dtype": "float32"}, 8, "float32"),
        ({"num_kv_heads": 1}, 32, "32"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, object], heads: int, named: str) -> None:
    fields = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "bfloat16"} | changes
    with pytest.raises(ValueError, match=named):
        mosaic_gpu.check_supported(KVLayout(**fields), num_heads=heads)
