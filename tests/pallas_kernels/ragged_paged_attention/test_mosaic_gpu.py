"""The Hopper kernels in the interpreter, against a dense float64 oracle: numbers, races, barriers, memory that must not be read."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixtures.gpu_interpreter import gpu_interpreter
from hopper_attention import BOUND, check, run
from jax.experimental.pallas import mosaic_gpu as plgpu
from oracle_dense import attend, random_batch, relative_error

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_gpu_decode, mosaic_gpu_prefill_call

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.timeout(300),
    # Rows that nobody reads may hold NaN.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]


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


@pytest.mark.parametrize(("dtype", "scales"), [("float8_e4m3fn", "static"), ("float8_e5m2", "token")])
def test_quantized_pools(dtype: str, scales: str) -> None:
    """Those that the covering array leaves out."""
    batch = random_batch(6, [(1, 130), (33, 150), (1, 17)], num_kv_heads=1, kv_dtype=dtype, scales=scales)
    assert batch.pages.dtype.itemsize == 1
    check(batch, scales)


def test_long_contexts_at_head_dim_256() -> None:
    """Seven query heads for a KV head, pages of 128, a window that begins inside a page."""
    lens = [(1, 2049), (130, 1300), (3, 3)]
    check(random_batch(13, lens, num_kv_heads=1, group=7, head_dim=256, page_size=128), sliding_window=1024)


@pytest.mark.parametrize(("window", "scales"), [(4, "static"), (1024, "token")])
def test_long_quantized_contexts(window: int, scales: str) -> None:
    batch = random_batch(14, [(130, 2049), (1, 2049), (7, 7)], num_kv_heads=1, kv_dtype="int8", scales=scales)
    check(batch, scales, sliding_window=window)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_quantization_costs_what_its_steps_cost(dtype: str) -> None:
    """Against attention over the numbers before quantization.

    Rounding errors are independent, so that relative to the output they add up to sqrt(a^2 + b^2): a of values, relative to the
    values; b of logits, scale * |q| * the error of a key's number, as weights change by the factor e^b.
    """
    batch = random_batch(15, [(40, 150), (1, 300)], num_kv_heads=1, kv_dtype=dtype, scales="token")
    out = run(batch, "token")
    D = batch.q.shape[2]
    real = batch.page_table[0, :2]  # pages that are full
    keys, values = ((batch.exact[batch.layer, real, i], batch.noise[batch.layer, real, i]) for i in (0, 1))
    of_values = np.sqrt((values[1] ** 2).mean() / (values[0] ** 2).mean())
    q_norm = np.sqrt((batch.q.astype(np.float64) ** 2).mean() * D)
    of_logits = D**-0.5 * q_norm * np.sqrt((keys[1] ** 2).mean())
    derived = np.hypot(of_values, of_logits)
    used = slice(0, batch.cu_q_lens[2])
    exact = attend(dataclasses.replace(batch, stored=batch.exact), scale=D**-0.5)[used]
    error = relative_error(out[used], exact)
    assert derived / 2 < error < 1.5 * derived + BOUND


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_queries_in_fp8_would_not_be_exact_enough(kv_dtype: str) -> None:
    """Why keys of FP8 pools are converted: queries rounded to e4m3, with a scale for each row, in otherwise exact attention."""
    batch = random_batch(17, [(40, 150), (1, 300)], kv_dtype=kv_dtype, scales="token", padding_rows=0)
    q = batch.q.astype(np.float64)
    scale = np.abs(q).max(axis=-1, keepdims=True) / 448
    rounded = (q / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    D = q.shape[2]
    exact = attend(batch, scale=D**-0.5)
    assert relative_error(attend(dataclasses.replace(batch, q=rounded), scale=D**-0.5), exact) > BOUND


def test_writing_then_attending_touches_the_written_rows_alone() -> None:
    """As the engine's step does: keys and values of the new tokens, then attention, with the pool donated."""
    batch = random_batch(16, [(3, 20), (1, 17)], num_kv_heads=1, kv_dtype="int8", scales="token")
    L, P, _, K, page, D = batch.pages.shape
    layout = KVLayout(L, K, D, page, "int8", scales="token")
    at = [(batch.page_table[s, p // page], p % page) for s, p in ((0, 17), (0, 18), (0, 19), (1, 16))]
    ids, offsets = np.array([*at, (P - 1, 0), (P - 1, 0)], np.int32).T
    T = len(ids)
    new = np.random.default_rng(0).standard_normal((2, T, K, D)).astype(np.float32)
    kv = KVPages(jnp.asarray(batch.pages), jnp.asarray(batch.scales))
    tables = (batch.page_table, batch.cu_q_lens, batch.kv_lens, np.int32(batch.num_seqs))

    def step(kv: KVPages, q: jax.Array, new: jax.Array, ids: jax.Array, offsets: jax.Array, *rest: jax.Array) -> object:
        kv = write_kv(kv, layer, *new, ids, offsets, layout=layout, backend="mosaic_gpu")
        spec = mosaic_gpu.call_spec(layout, num_heads=q.shape[1], scale=D**-0.5)
        return kv, mosaic_gpu.attend(q, kv, layer, *rest, spec=spec, num_sms=1)

    layer = jnp.int32(batch.layer)
    with gpu_interpreter():
        after, out = jax.jit(step, donate_argnums=0)(
            kv, jnp.asarray(batch.q[:T]), jnp.asarray(new), *map(jnp.asarray, (ids, offsets, *tables))
        )
        pages, scales, out = np.array(after.pages), np.array(after.scales), np.asarray(out)
    assert np.isfinite(out.astype(np.float32)).all()
    assert (
        pages[batch.layer, ids[:4], :, :, offsets[:4]] != batch.pages[batch.layer, ids[:4], :, :, offsets[:4]]
    ).any()
    for before, changed in ((batch.pages, pages), (batch.scales, scales)):
        changed[batch.layer, ids[:4], :, :, offsets[:4]] = before[batch.layer, ids[:4], :, :, offsets[:4]]
        assert changed.tobytes() == before.tobytes()


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


def test_a_planted_wrong_causal_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query of a chunk sees one key too many."""
    rows_of = mosaic_gpu_prefill_call.Call.rows_of

    def one_later(call: object, item: object, wg: object) -> tuple[object, ...]:
        row, position, first_valid, tokens = rows_of(call, item, wg)
        return row, position + 1, first_valid, tokens

    monkeypatch.setattr(mosaic_gpu_prefill_call.Call, "rows_of", one_later)
    batch = random_batch(18, [(20, 30)], num_kv_heads=1, padding_rows=0)
    assert relative_error(run(batch), attend(batch, scale=64**-0.5)) > BOUND


def test_a_tile_given_back_too_early_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers let the producer fill a tile's place before they read the tile: every barrier has its arrivals and its waits."""
    ring = mosaic_gpu_prefill_call.Ring
    wait, release = ring.wait, ring.release

    def wait_and_release(self: mosaic_gpu_prefill_call.Ring, t: jax.Array) -> object:
        tile = wait(self, t)
        release(self, t)
        return tile

    monkeypatch.setattr(ring, "wait", wait_and_release)
    monkeypatch.setattr(ring, "release", lambda *_: None)
    with pytest.raises(Exception, match="RACE DETECTED"):
        run(random_batch(11, [(20, 200)], num_kv_heads=1, group=1, head_dim=256), num_sms=1)


@pytest.mark.parametrize("queries", [1, 20])
def test_a_missing_commit_is_a_race(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What threads store to shared memory, `wgmma` may read only once they have committed it."""
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    with pytest.raises(Exception, match="RACE DETECTED"):
        run(random_batch(11, [(queries, 20)], num_kv_heads=1), decode_only=queries == 1)


def test_a_missing_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers that do not wait for their tiles."""
    monkeypatch.setattr(mosaic_gpu_prefill_call.Ring, "wait", lambda self, t: self.at(t))
    with pytest.raises(Exception, match=r"RACE|barrier|observed|phase"):
        run(random_batch(11, [(20, 20)], num_kv_heads=1))


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
