"""The decode kernel stays under its own copies: static rooflines of the Llama-3-8B shape, against fixed bounds."""

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures.tpu_ahead_of_time import needs_libtpu

from pallas_kernels.inspection.tpu import Report, Shape, inspect_decode
from pallas_kernels.ragged_paged_attention import mosaic_tpu

TABLE = json.loads((Path(mosaic_tpu.__file__).parent / "tuning" / "tpu.json").read_text())
BOUNDS = {
    ("v5e", "bfloat16"): {16: 0.52, 32: 0.52, 128: 0.45},
    ("v5e", "8 bits"): {16: 1.0, 32: 1.0, 128: 0.9},
    ("v6e", "bfloat16"): {16: 0.95, 32: 0.95, 128: 0.95},
    ("v6e", "8 bits"): {16: 1.6, 32: 1.6, 128: 1.6},
}
"""Core cycles for each token over the cycles that its copies need, by chip, pool and page size."""


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = TABLE["rows"]
    return rows


def _least_bytes(dtype: str, scales: str | None, num_kv_heads: int, head_dim: int) -> int:
    """Of one token: its keys and values, and their scales."""
    itemsize = 2 if dtype == "bfloat16" else 1
    return 2 * num_kv_heads * (head_dim * itemsize + (4 if scales == "token" else 0))


def test_the_table_has_every_row() -> None:
    pools = [("bfloat16", None), *[(d, s) for d in ("float8_e4m3fn", "int8") for s in ("static", "token")]]
    expected = {(chip, *pool, page) for chip in ("v5e", "v6e") for pool in pools for page in (16, 32, 128)}
    assert {(row["chip"], row["dtype"], row["scales"], row["page"]) for row in _rows()} == expected


@pytest.mark.parametrize(
    "row", _rows(), ids=lambda row: "-".join(str(row[k]) for k in ("chip", "dtype", "scales", "page"))
)
def test_the_table_meets_its_bounds(row: dict[str, Any]) -> None:
    pool = "bfloat16" if row["dtype"] == "bfloat16" else "8 bits"
    assert row["ratio_with_item"] <= BOUNDS[row["chip"], pool][row["page"]]
    assert row["bytes_per_token"] == _least_bytes(row["dtype"], row["scales"], 8, 128)


def _inspect(shape: Shape) -> Report:
    report = inspect_decode(shape)
    least = _least_bytes(shape.dtype, shape.scales, shape.num_kv_heads, shape.head_dim)
    assert report.bytes_per_token == least, "no byte moves that is not a key, a value or a scale"
    assert abs(report.total_cycles / report.compiler_cycles - 1) < 0.12, "the scoreboard left the compiler's own count"
    return report


@pytest.mark.aot
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    "shape",
    [
        Shape("v5e", 128, "bfloat16"),
        Shape("v5e", 16, "float8_e4m3fn", "token"),
        Shape("v6e", 32, "int8", "token"),
    ],
    ids=str,
)
def test_the_table_is_of_this_kernel(shape: Shape) -> None:
    report = _inspect(shape)
    (row,) = [
        row
        for row in _rows()
        if (row["chip"], row["page"], row["dtype"], row["scales"])
        == (shape.chip, shape.page, shape.dtype, shape.scales)
    ]
    assert report.block_ratio == pytest.approx(row["ratio"], rel=0.05), (
        "rerun python -m pallas_kernels.inspection.tpu --save pallas_kernels/ragged_paged_attention/tuning/tpu.json"
    )
    assert report.block_tokens == row["block"]


@pytest.mark.aot
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(("dtype", "scales", "bound"), [("bfloat16", None, 1.0), ("int8", "token", 1.1)])
def test_head_dim_64_moves_no_padding(dtype: str, scales: str | None, bound: float) -> None:
    """The ratio of int8 there is 1.06: that of head_dim 128 is .5."""
    assert _inspect(Shape("v5e", 64, dtype, scales, head_dim=64)).ratio < bound
