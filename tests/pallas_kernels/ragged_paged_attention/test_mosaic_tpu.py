"""Parity of the TPU kernels with a dense float64 oracle, in the interpreter: NaN everywhere that must not be read."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from fixtures.paged_attention_oracle import make_batch, relative_error
from fixtures.tpu_interpreter import attend

from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.ragged_paged_attention import mosaic_tpu_plan, mosaic_tpu_stream
from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import Numbers
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import make_plan

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(300)]

# A result is rounded once to the dtype of the queries: half a unit in the last place, 2^-9 for bfloat16. Stored 8-bit
# numbers are exact in bfloat16, so that quantized pools have the same bound; products add up in float32.
BOUND = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 1e-2, "float8_e4m3fn": 1e-2, "float8_e5m2": 1e-2}

MIXED = [(1, 17), (3, 3), (1, 1), (64, 64), (7, 300), (1, 517)]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    lengths: list[tuple[int, int]]
    K: int = 2
    G: int = 4
    D: int = 128
    page: int = 16
    dtype: str = "bfloat16"
    dma: str = "on_wait"
    block_tokens: int | None = 256
    query_tile: int | None = 32
    rest: dict = dataclasses.field(default_factory=dict)


# What the covering array of `test_mosaic_tpu_covering` leaves out.
CASES = [
    Case("decodes only", [(1, 1), (1, 15), (1, 16), (1, 17), (1, 517)], K=4, G=2),
    Case("default blocks", [(1, 2049), (130, 2049)], page=128, K=1, block_tokens=None, query_tile=None),
    Case("window over page starts", MIXED, dtype="float32", rest={"sliding_window": 50}),
    Case("window, soft cap and sinks", MIXED, rest={"with_sinks": True, "logit_soft_cap": 5.0, "sliding_window": 20}),
    Case("all of it in FP8", MIXED, K=3, G=2, D=64, dtype="float8_e4m3fn",
         rest={"scales": "static", "with_sinks": True, "logit_soft_cap": 5.0, "sliding_window": 100}),
    Case("int8, static scales", MIXED, dtype="int8", rest={"scales": "static"}),
    Case("pages of several tiles of scales", MIXED, dtype="float8_e5m2", page=384, block_tokens=None,
         rest={"scales": "token"}),
    Case("many empty rows", [(1, 40), (5, 40)], rest={"empty_rows": 5, "padding": 9}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_oracle(case: Case) -> None:
    batch = make_batch(
        case.lengths, K=case.K, G=case.G, D=case.D, page=case.page, dtype=case.dtype, seed=7, **case.rest
    )
    got = attend(batch, dma=case.dma, block_tokens=case.block_tokens, query_tile=case.query_tile)
    assert np.isfinite(got).all(), "padding rows must be finite too"
    assert relative_error(got[: len(batch.expected)], batch.expected) < BOUND[case.dtype]


def test_two_blocks_where_memory_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu_plan, "this_chip", lambda: mosaic_tpu_plan.Chip(128, 2**21))
    layout = KVLayout(1, 2, 128, 16, "float32", "token_major")
    assert make_plan(layout, num_heads=8, num_tokens=8, pages_per_seq=40).slots == 2
    batch = make_batch([(1, 517), (7, 300), (1, 3)], K=2, G=4, D=128, page=16, dtype="float32")
    got = attend(batch)
    assert relative_error(got[: len(batch.expected)], batch.expected) < BOUND["float32"]
    with pytest.raises(ValueError, match=r"needs 2 blocks of 512 tokens in VMEM, 2097152 bytes of a float32 pool"):
        make_plan(
            dataclasses.replace(layout, page_size=512), num_heads=8, num_tokens=8, pages_per_seq=4, block_tokens=512
        )


def test_a_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tests: with copies done early the numbers are right, and only the race detector can object."""
    monkeypatch.setattr(mosaic_tpu_stream.KVStream, "_wait", lambda *_: None)
    batch = make_batch([(1, 512)], K=2, G=4, D=128, page=128)
    with pytest.raises(Exception, match="RACE DETECTED"):
        attend(batch, dma="eager", block_tokens=256)


def test_a_wrong_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tests: keys masked as if they stood one position further on."""
    column = Numbers.token_of_column
    monkeypatch.setattr(Numbers, "token_of_column", lambda self, shape, axis: column(self, shape, axis) + 1)
    batch = make_batch([(1, 40), (5, 40)], K=2, G=4, D=128, page=16)
    got = attend(batch, block_tokens=256)
    assert not relative_error(got[: len(batch.expected)], batch.expected) < BOUND["bfloat16"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "head_dim of 64 or a multiple of 128, not 96"),
        ({"page_size": 8}, "page size of 16, 32, 64 or a multiple of 128, not 8"),
        ({"dtype": "float16"}, "not float16"),
        ({"order": "head_major"}, "token_major order, not head_major"),
        ({"num_kv_heads": 3}, "4 query heads cannot be grouped over 3"),
    ],
)
def test_what_it_cannot_do_is_an_error_with_the_numbers(change: dict, message: str) -> None:
    layout = dataclasses.replace(KVLayout(1, 2, 128, 16, "bfloat16", "token_major"), **change)
    with pytest.raises(ValueError, match=message):
        make_plan(layout, num_heads=4, num_tokens=8, pages_per_seq=4)


@pytest.mark.parametrize(
    ("dtype", "scales"), [("bfloat16", "none"), ("int8", "static"), ("int8", "token"), ("float8_e4m3fn", "token")]
)
def test_no_cache_byte_is_padding_at_head_dim_64(dtype: str, scales: Any) -> None:
    page, itemsize = 16, 2 if dtype == "bfloat16" else 1
    layout = KVLayout(1, 8, 64, page, dtype, "token_major", scales)
    assert layout.pages_shape(5)[-1] % 128 == 0
    assert layout.bytes_per_page == page * 2 * 8 * (64 * itemsize + (4 if scales == "token" else 0))


def test_scales_of_few_heads_fill_one_row() -> None:
    """A copy moves whole rows of 128 scales: 32 of one head's page of 16 tokens take as much as 128."""
    assert KVLayout(1, 1, 128, 16, "int8", "token_major", "token").scales_shape(5) == (1, 5, 1, 128)
    assert KVLayout(1, 1, 128, 64, "int8", "token_major", "token").scales_shape(5) == (1, 5, 1, 128)
    assert KVLayout(1, 8, 128, 16, "int8", "token_major", "token", shards=8).scales_shape(5) == (1, 5, 8, 128)
    assert KVLayout(1, 8, 128, 16, "int8", "token_major", "token").scales_shape(5) == (1, 5, 2, 128)
