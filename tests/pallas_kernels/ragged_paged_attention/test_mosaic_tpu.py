"""Parity of the TPU kernels with a dense float64 oracle, in the interpreter: NaN everywhere that must not be read."""

import dataclasses

import numpy as np
import pytest
from fixtures.paged_attention_oracle import make_batch, relative_error
from fixtures.tpu_interpreter import attend

from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.ragged_paged_attention import mosaic_tpu_stream
from pallas_kernels.ragged_paged_attention.mosaic_tpu_numbers import Numbers
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import make_plan

pytestmark = [pytest.mark.interpret, pytest.mark.timeout(300)]

# A result is rounded once to the dtype of the queries: half a unit in the last place, 2^-9 for bfloat16. Stored 8-bit
# numbers are exact in bfloat16, so that quantized pools have the same bound; products add up in float32.
BOUND = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 1e-2, "float8_e4m3fn": 1e-2, "float8_e5m2": 1e-2}

MIXED = [(1, 17), (3, 3), (1, 1), (64, 64), (7, 300), (1, 517)]
DECODES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 517)]


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


CASES = [
    Case("mixed float32", MIXED, dtype="float32"),
    Case("mixed bfloat16, copies early", MIXED, dma="eager"),
    Case("decodes only", DECODES, K=4, G=2),
    Case(
        "one long context, default blocks", [(1, 2049), (130, 2049)], page=128, K=1, block_tokens=None, query_tile=None
    ),
    Case("page boundaries 64", [(1, 63), (1, 64), (1, 65), (130, 257), (3, 64)], page=64),
    Case("page boundaries 128, float32", [(1, 127), (1, 128), (1, 129), (7, 129)], page=128, dtype="float32"),
    Case("group of 1", MIXED, K=4, G=1),
    Case("group of 2, 3 heads", MIXED, K=3, G=2, D=64),
    Case("group of 7", MIXED, K=2, G=7, page=32),
    Case("group of 8", MIXED, K=1, G=8),
    Case("group of 16", DECODES, K=1, G=16),
    Case("head_dim 64, float32", MIXED, D=64, dtype="float32"),
    Case("head_dim 256", MIXED, D=256, page=64, dma="eager"),
    Case("window 4", MIXED, rest={"sliding_window": 4}),
    Case("window 1024", [(1, 1500), (3, 1100), (64, 1030)], K=1, page=64, rest={"sliding_window": 1024}),
    Case("window over page starts, float32", MIXED, dtype="float32", rest={"sliding_window": 50}),
    Case("soft cap", MIXED, dtype="float32", rest={"logit_soft_cap": 2.0}),
    Case("sinks", MIXED, dtype="float32", rest={"with_sinks": True}),
    Case("window, soft cap and sinks", MIXED, rest={"with_sinks": True, "logit_soft_cap": 5.0, "sliding_window": 20}),
    Case("int8, static scales", MIXED, dtype="int8", rest={"scales": "static"}),
    Case("int8, token scales", MIXED, dtype="int8", page=128, rest={"scales": "token"}),
    Case("e4m3, static scales, head_dim 64", MIXED, dtype="float8_e4m3fn", D=64, rest={"scales": "static"}),
    Case("e4m3, token scales", MIXED, dtype="float8_e4m3fn", page=128, rest={"scales": "token"}),
    Case("e4m3, sinks and cap", MIXED, dtype="float8_e4m3fn", rest={"with_sinks": True, "logit_soft_cap": 5.0}),
    Case("e5m2, static scales", MIXED, dtype="float8_e5m2", rest={"scales": "static", "sliding_window": 100}),
    Case("e5m2, token scales", DECODES, dtype="float8_e5m2", page=128, rest={"scales": "token"}),
    Case("many empty rows", [(1, 40), (5, 40)], rest={"empty_rows": 5, "padding": 9}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_the_oracle(case: Case) -> None:
    batch = make_batch(
        case.lengths, K=case.K, G=case.G, D=case.D, page=case.page, dtype=case.dtype, seed=7, **case.rest
    )
    got = attend(batch, dma=case.dma, block_tokens=case.block_tokens, query_tile=case.query_tile)
    assert np.isfinite(got).all(), "padding rows must be finite too"
    assert relative_error(got[: len(batch.expected)], batch.expected) < BOUND[case.dtype]


@pytest.mark.parametrize("seed", range(3))
def test_random_ragged_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    page = int(rng.choice([16, 64, 128]))
    q_lens = rng.choice([1, 1, 3, 7, 64, 130], size=6)
    kv_lens = q_lens + rng.choice([0, 1, page - 1, page, page + 1, 517], size=6)
    lengths = list(zip(q_lens.tolist(), kv_lens.tolist(), strict=True))
    batch = make_batch(lengths, K=2, G=int(rng.choice([1, 2, 4])), D=int(rng.choice([64, 128])), page=page, seed=seed)
    got = attend(batch, dma="eager" if seed % 2 else "on_wait")
    assert relative_error(got[: len(batch.expected)], batch.expected) < BOUND["bfloat16"]


def test_a_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tests: with copies done early the numbers are right, and only the race detector can object."""
    monkeypatch.setattr(mosaic_tpu_stream.KVStream, "_wait", lambda *_: None)
    batch = make_batch([(1, 512)], K=2, G=4, D=128, page=128)
    with pytest.raises(Exception, match=r"[Rr]ace"):
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


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_no_cache_byte_is_padding_at_head_dim_64(dtype: str) -> None:
    layout = KVLayout(2, 3, 64, 16, dtype, "token_major", "none" if dtype == "bfloat16" else "static")
    shape = layout.pages_shape(5)
    assert shape[-1] % 128 == 0
    assert np.prod(shape) * np.dtype(dtype if dtype == "int8" else f"V{1 if '8' in dtype[:6] else 2}").itemsize == (
        5 * layout.bytes_per_page
    )
