"""The native CPU backend: what it promises beyond what every backend does."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.attention_backends import attend_here
from fixtures.attention_cases import LAYER, Batch, Case, make_batch, relative_error
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention.api import check_supported, ragged_paged_attention

MIXED = ((1, 300), (70, 70), (1, 17), (33, 517), (1, 1), (5, 260))
NEIGHBOURLY = (
    *(Case(dtype, MIXED, group=3, dtype=dtype) for dtype in ("float32", "bfloat16", "int8")),
    *(Case(f"window-{w}", MIXED, group=4, window=w) for w in (5, 100)),
    Case("dim-80", MIXED, group=1, head_dim=80),
    Case("all-options", MIXED, group=7, page=4, window=300, soft_cap=5.0, sinks=True, dtype="int8", head_dim=128),
)


attend = functools.partial(attend_here, backend="cpu_native")


def only(batch: Batch, sequence: int, first: int, last: int) -> dict[str, Array]:
    """A step of one sequence alone, with its queries [first, last)."""
    row, queries = int(batch.cu_q_lens[sequence]), batch.case.lens[sequence][0]
    return {
        "q": batch.q[row + first : row + last],
        "page_table": batch.page_table[sequence : sequence + 1],
        "cu_q_lens": jnp.asarray([0, last - first], jnp.int32),
        "kv_lens": batch.kv_lens[sequence : sequence + 1] - (queries - last),
        "num_seqs": jnp.int32(1),
    }


def test_rows_of_padding_are_zero() -> None:
    batch = make_batch(Case("mixed", MIXED))
    assert not attend(batch)[batch.tokens :].any()


@pytest.mark.parametrize("case", NEIGHBOURLY, ids=lambda case: case.name)
def test_a_sequence_does_not_see_its_neighbours_or_its_chunks(case: Case) -> None:
    """To the bit, also where a chunk is one query, which is computed as a decode."""
    batch = make_batch(case)
    together = attend(batch)
    for s, (queries, _) in enumerate(case.lens):
        row = int(batch.cu_q_lens[s])
        for cuts in ((0, queries), (0, 1, queries), (0, queries // 2, queries - 1, queries), range(queries + 1)):
            pieces = [attend(batch, **only(batch, s, a, b)) for a, b in itertools.pairwise(sorted({*cuts}))]
            np.testing.assert_array_equal(np.concatenate(pieces), together[row : row + queries])


def test_pages_below_the_window_may_be_gone() -> None:
    """A sliding-window group gives back pages that no later query sees."""
    case = Case("window", ((1, 400), (3, 400)), window=50)
    batch = make_batch(case)
    gone = (400 - 3 - 50) // case.page
    table = batch.page_table.at[:, :gone].set(-1)
    np.testing.assert_array_equal(attend(batch, page_table=table), attend(batch))


def test_nan_in_a_sequence_reaches_its_own_rows_only() -> None:
    batch = make_batch(Case("mixed", MIXED, group=3))
    clean = attend(batch)
    page = int(batch.page_table[0, 3])
    poisoned = attend(batch, kv=KVPages(batch.kv.pages.at[LAYER, page, 1].set(jnp.nan)))
    assert np.isnan(poisoned[0]).all()
    np.testing.assert_array_equal(poisoned[1:], clean[1:])


def test_float32_queries_over_a_bfloat16_pool() -> None:
    batch = make_batch(Case("bf16", MIXED, dtype="bfloat16"))
    out = attend(batch, q=batch.q.astype(jnp.float32))
    assert relative_error(out[: batch.tokens], batch.expected) < 1e-5


def test_index_arrays_out_of_range_stay_inside_the_arrays() -> None:
    """Not part of the contract; a fault upstream must not become a crash."""
    batch = make_batch(Case("mixed", MIXED))
    out = attend(
        batch,
        cu_q_lens=batch.cu_q_lens * 1000 - 500,
        kv_lens=batch.kv_lens * 10_000_000,
        num_seqs=jnp.int32(1000),
        page_table=batch.page_table - 1_000_000,
    )
    assert out.shape == batch.q.shape


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_each_device_of_a_mesh_attends_to_its_own_heads(dtype: str) -> None:
    batch = make_batch(Case("mixed", MIXED, kv_heads=4, dtype=dtype))
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("tensor",))
    heads = PartitionSpec(None, "tensor")
    pool = PartitionSpec(None, None, None, "tensor")
    layout = dataclasses.replace(batch.case.layout, num_kv_heads=1)

    def local(q: Array, kv: KVPages) -> Array:
        return ragged_paged_attention(
            q,
            kv,
            jnp.int32(LAYER),
            batch.page_table,
            batch.cu_q_lens,
            batch.kv_lens,
            batch.num_seqs,
            layout=layout,
            scale=batch.case.head_dim**-0.5,
            backend="cpu_native",
        )

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(heads, pool), out_specs=heads, check_vma=False)
    np.testing.assert_array_equal(np.asarray(jax.jit(mapped)(batch.q, batch.kv)), attend(batch))


def test_what_it_cannot_read_is_refused() -> None:
    check_supported("cpu_native", KVLayout(1, 2, 64, 16, "int8", scales="token"), num_heads=4)
    with pytest.raises(ValueError, match=r"cpu_native.*float16"):
        check_supported("cpu_native", KVLayout(1, 2, 64, 16, "float16"), num_heads=4)
    with pytest.raises(ValueError, match="grouped"):
        check_supported("cpu_native", KVLayout(1, 2, 64, 16, "float32"), num_heads=3)
