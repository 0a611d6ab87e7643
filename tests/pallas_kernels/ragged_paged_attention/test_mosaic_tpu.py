"""What is particular to the TPU kernels: their blocks, planted mistakes in them, what they refuse, and how they lay out a pool."""

import dataclasses
from typing import Any

import pytest
from fixtures.attention_backends import attend_on_tpu, batch_for, check, compare
from fixtures.attention_cases import Case

from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.ragged_paged_attention import mosaic_tpu_plan, mosaic_tpu_stream
from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import Numbers
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import make_plan

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(300)]

STRETCHES = ((64, 700), (130, 1100), (1, 600), (5, 256), (3, 257))
PLAIN = Case("plain", ((1, 40), (5, 40)), 2, 4, 128, dtype="bfloat16")


def test_two_blocks_where_memory_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_tpu_plan, "this_chip", lambda: mosaic_tpu_plan.Chip(128, 2**21))
    layout = KVLayout(1, 2, 128, 16, "float32", "token_major")
    assert make_plan(layout, num_heads=8, num_tokens=8, pages_per_seq=40).slots == 2
    check("mosaic_tpu", Case("float32", ((1, 517), (7, 300), (1, 3)), 2, 4, 128))
    with pytest.raises(ValueError, match=r"needs 2 blocks of 512 tokens in VMEM, 2097152 bytes of a float32 pool"):
        make_plan(
            dataclasses.replace(layout, page_size=512), num_heads=8, num_tokens=8, pages_per_seq=4, block_tokens=512
        )


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    "case",
    [
        Case("plain", STRETCHES, 2, 3),
        Case("window", STRETCHES, 2, 3, window=603, dtype="int8"),  # a tile at 970 sees from the start of a page on
        Case("large-page", ((16, 1020), (3, 600)), 1, 2, 128, 512, "bfloat16", window=300),
        Case("short-window", STRETCHES, 2, 3, 128, page=64, window=7, dtype="float8_e4m3fn", frees=True),
        Case("all-options", STRETCHES, 2, 1, 128, 128, "int8", window=600, soft_cap=20.0, sinks=True),
        Case("static", STRETCHES, 4, 2, 128, 32, "float8_e5m2", "static"),
    ],
    ids=lambda case: case.name,
)
def test_prefills_in_several_stretches_of_a_block(case: Case, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide calls have them: few heads and tokens at once."""
    most = min(heads, case.kv_heads)
    monkeypatch.setattr(mosaic_tpu_plan, "_at_once", lambda *_, tokens: mosaic_tpu_plan.AtOnce(most, tokens))
    check("mosaic_tpu", case)


@pytest.mark.parametrize(
    ("kv_heads", "rows", "block_tokens", "unmasked", "masked"),
    [
        (8, 512, 1024, (2, 512), (4, 256)),
        (32, 128, 256, (16, 256), (16, 256)),
        (2, 512, 1024, (2, 512), (2, 256)),
        (1, 512, 1024, (1, 512), (1, 256)),
        (3, 512, 1024, (1, 512), (3, 256)),
        (8, 16, 1024, (8, 512), (8, 256)),
        (1, 128, 768, (1, 256), (1, 256)),
        (4, 4096, 1024, (1, 256), (1, 256)),
    ],
)
def test_how_many_heads_and_tokens_are_folded_at_once(
    kv_heads: int, rows: int, block_tokens: int, unmasked: tuple[int, int], masked: tuple[int, int]
) -> None:
    """Whose numbers divide the KV heads', and the block's tokens."""
    for tokens, expected in ((mosaic_tpu_plan.WIDE, unmasked), (mosaic_tpu_plan.NARROW, masked)):
        assert mosaic_tpu_plan._at_once(kv_heads, 2**19 // rows, block_tokens, tokens) == expected


def test_a_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tests: with copies done early the numbers are right, and only the race detector can object."""
    monkeypatch.setattr(mosaic_tpu_stream.KVStream, "_wait", lambda *_: None)
    batch = batch_for("mosaic_tpu", dataclasses.replace(PLAIN, lens=((1, 512),), page=128))
    with pytest.raises(Exception, match="RACE DETECTED"):
        attend_on_tpu(batch, dma="eager", block_tokens=256)


def test_a_wrong_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tests: keys masked as if they stood one position further on."""
    column = Numbers.token_of_column
    monkeypatch.setattr(Numbers, "token_of_column", lambda self, shape, axis: column(self, shape, axis) + 1)
    assert not compare("mosaic_tpu", batch_for("mosaic_tpu", PLAIN), block_tokens=256).is_right


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
