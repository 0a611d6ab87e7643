"""Buckets, and how chunks are laid onto a step's arrays."""

from __future__ import annotations

import numpy as np
import pytest

from jaxkv.runtime.step_batch import FROM_SLOT, Chunk, build_batch, make_buckets, no_flags


@pytest.mark.parametrize(
    ("batched", "seqs", "pages", "tokens", "widths"),
    [
        (64, 8, 16, (8, 16, 32, 64), (16,)),
        (512, 32, 128, (8, 16, 32, 64, 128, 256, 512), (128,)),
        (1, 1, 1, (8,), (1,)),
        (100, 8, 1300, (8, 16, 32, 64, 128), (1024, 1300)),
        (300, 8, 8192, (8, 16, 32, 64, 128, 256, 320), (1024, 8192)),
        (32, 32, 4, (8, 16, 32), (4,)),
    ],
)
def test_buckets(batched: int, seqs: int, pages: int, tokens: tuple[int, ...], widths: tuple[int, ...]) -> None:
    buckets = make_buckets(max_num_batched_tokens=batched, max_num_seqs=seqs, max_pages=pages)
    assert (buckets.tokens, buckets.widths) == (tokens, widths)
    assert buckets.fit(batched, pages)[0] >= batched
    assert all(T % 8 == 0 and (T % 32 == 0 or T < 32) for T in tokens)  # prompt_logprobs cuts rows in blocks of 32


def test_layout_of_a_mixed_step() -> None:
    buckets = make_buckets(max_num_batched_tokens=32, max_num_seqs=4, max_pages=8)
    decode = Chunk([FROM_SLOT], start=9, write_start=9, block_ids=[5, 1, 2], slot=3, samples=True)
    prefill = Chunk([70, 71, 72], start=2, write_start=2, block_ids=[7, 0], slot=1, samples=False, targets=[71, 72, 73])
    cached = Chunk([80], start=3, write_start=4, block_ids=[4], slot=0, samples=True)
    batch = build_batch([decode, prefill, cached], no_flags(), buckets, page_size=4, trash_page=99)
    assert batch.tokens.shape == (8,)
    assert batch.page_table.shape == (8, 8)  # no fewer logit rows than MIN_ROWS
    assert batch.tokens[:5].tolist() == [-1, 70, 71, 72, 80]
    assert batch.positions[:5].tolist() == [9, 2, 3, 4, 3]
    assert batch.token_seqs.tolist() == [0, 1, 1, 1, 2, 7, 7, 7]
    assert batch.write_pages.tolist() == [2, 7, 7, 0, 99, 99, 99, 99]  # the fully cached prompt writes nothing
    assert batch.write_offsets[:4].tolist() == [1, 2, 3, 0]
    assert batch.targets[1:4].tolist() == [71, 72, 73]
    assert batch.cu_q_lens.tolist() == [0, 1, 4, 5, 5, 5, 5, 5, 5]
    assert batch.kv_lens.tolist() == [10, 5, 4, 0, 0, 0, 0, 0]
    assert batch.slots.tolist() == [3, 1, 0, 4, 4, 4, 4, 4]
    assert batch.samples.tolist() == [True, False, True] + [False] * 5
    assert batch.num_seqs == np.int32(3)
    assert batch.page_table[0, :3].tolist() == [5, 1, 2]
