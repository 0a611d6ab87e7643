"""What is particular to the Hopper kernels, in the interpreter: planted races and wrong masks, what quantization costs, refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fixtures.attention_backends import attend_on_hopper, batch_for, compare
from fixtures.attention_cases import LAYER, Batch, Case, dense, relative_error
from fixtures.gpu_interpreter import gpu_interpreter
from fixtures.hopper_mistakes import give_tiles_back_unread
from fixtures.interpreters import MISUSED_BARRIER
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_gpu_decode, mosaic_gpu_prefill_call

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.timeout(300),
    # Rows that nobody reads may hold NaN.
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning"),
]


def hopper_batch(lens: tuple[tuple[int, int], ...], **settings: Any) -> Batch:
    case = Case("hopper", lens, **{"kv_heads": 1, "group": 4, "dtype": "bfloat16", "padding": 0, **settings})
    return batch_for("mosaic_gpu", case)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_quantization_costs_what_its_steps_cost(dtype: str) -> None:
    """Against attention over the numbers before quantization.

    Rounding errors are independent, so that relative to the output they add up to sqrt(a^2 + b^2): a of values, relative to the
    values; b of logits, scale * |q| * the error of a key's number, as weights change by the factor e^b.
    """
    batch = hopper_batch(((40, 150), (1, 300)), dtype=dtype)
    out = attend_on_hopper(batch)
    D = batch.q.shape[2]
    real = batch.owned[0][:2]  # pages that are full
    keys, values = ((batch.exact[LAYER, real, i], batch.stored.noise[LAYER, real, i]) for i in (0, 1))
    of_values = np.sqrt((values[1] ** 2).mean() / (values[0] ** 2).mean())
    q_norm = np.sqrt((np.asarray(batch.q, np.float64) ** 2).mean() * D)
    of_logits = D**-0.5 * q_norm * np.sqrt((keys[1] ** 2).mean())
    derived = np.hypot(of_values, of_logits)
    error = relative_error(out[: batch.tokens], dense(batch, held=batch.exact))
    assert derived / 2 < error < 1.5 * derived + batch.tolerance


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_queries_in_fp8_would_not_be_exact_enough(kv_dtype: str) -> None:
    """Why keys of FP8 pools are converted: queries rounded to e4m3, with a scale for each row, in otherwise exact attention."""
    batch = hopper_batch(((40, 150), (1, 300)), kv_heads=2, dtype=kv_dtype)
    q = np.asarray(batch.q, np.float64)
    scale = np.abs(q).max(axis=-1, keepdims=True) / 448
    rounded = (q / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    assert relative_error(dense(batch, q=rounded), batch.expected) > batch.tolerance


def test_writing_then_attending_touches_the_written_rows_alone() -> None:
    """As the engine's step does: keys and values of the new tokens, then attention, with the pool donated."""
    batch = hopper_batch(((3, 20), (1, 17)), dtype="int8")
    layout, before = batch.layout, [np.asarray(batch.kv.pages), np.asarray(batch.kv.scales)]
    _, P, _, K, page, D = before[0].shape
    at = [(batch.owned[s][p // page], p % page) for s, p in ((0, 17), (0, 18), (0, 19), (1, 16))]
    ids, offsets = np.array([*at, (P - 1, 0), (P - 1, 0)], np.int32).T
    T = len(ids)
    new = np.random.default_rng(0).standard_normal((2, T, K, D)).astype(np.float32)
    tables = (batch.page_table, batch.cu_q_lens, batch.kv_lens, batch.num_seqs)

    def step(kv: KVPages, q: jax.Array, new: jax.Array, ids: jax.Array, offsets: jax.Array, *rest: jax.Array) -> object:
        kv = write_kv(kv, layer, *new, ids, offsets, layout=layout, backend="mosaic_gpu")
        spec = mosaic_gpu.call_spec(layout, num_heads=q.shape[1], scale=D**-0.5)
        return kv, mosaic_gpu.attend(q, kv, layer, *rest, spec=spec, num_sms=1)

    layer = jnp.int32(LAYER)
    with gpu_interpreter():
        after, out = jax.jit(step, donate_argnums=0)(
            batch.kv, batch.q[:T], jnp.asarray(new), *map(jnp.asarray, (ids, offsets, *tables))
        )
        pages, scales, out = np.array(after.pages), np.array(after.scales), np.asarray(out)
    assert np.isfinite(out.astype(np.float32)).all()
    written = (LAYER, ids[:4], slice(None), slice(None), offsets[:4])
    assert (pages[written] != before[0][written]).any()
    for old, new_array in zip(before, (pages, scales), strict=True):
        new_array[written] = old[written]
        assert new_array.tobytes() == old.tobytes()


def test_a_planted_wrong_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first tile of a window is skipped one tile too late: the kernel then reads keys of the wrong positions."""
    monkeypatch.setattr(mosaic_gpu_decode, "first_visible_key", lambda _spec, position: jnp.maximum(position - 63, 0))
    assert not compare("mosaic_gpu", hopper_batch(((1, 200),), window=100), decode_only=True).is_right


def test_a_planted_wrong_causal_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query of a chunk sees one key too many."""
    rows_of = mosaic_gpu_prefill_call.Call.rows_of

    def one_later(call: object, item: object, wg: object) -> tuple[object, ...]:
        row, position, first_valid, tokens = rows_of(call, item, wg)
        return row, position + 1, first_valid, tokens

    monkeypatch.setattr(mosaic_gpu_prefill_call.Call, "rows_of", one_later)
    assert not compare("mosaic_gpu", hopper_batch(((20, 30),))).is_right


def test_a_tile_given_back_too_early_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    give_tiles_back_unread(monkeypatch)
    with pytest.raises(Exception, match="RACE DETECTED"):
        attend_on_hopper(hopper_batch(((20, 200),), group=1, head_dim=256), num_sms=1)


@pytest.mark.parametrize("queries", [1, 20])
def test_a_missing_commit_is_a_race(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What threads store to shared memory, `wgmma` may read only once they have committed it."""
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    with pytest.raises(Exception, match="RACE DETECTED"):
        attend_on_hopper(hopper_batch(((queries, 20),)), decode_only=queries == 1)


def test_a_missing_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers that do not wait for their tiles."""
    monkeypatch.setattr(mosaic_gpu_prefill_call.Ring, "wait", lambda self, t: self.at(t))
    with pytest.raises(Exception, match=MISUSED_BARRIER):
        attend_on_hopper(hopper_batch(((20, 20),)))


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
