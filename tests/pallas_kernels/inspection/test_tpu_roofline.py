"""Static rooflines of the Llama-3-8B shape, against fixed bounds: decodes stay under their own copies, prefills multiply."""

import json
from typing import Any

import pytest
from fixtures.tpu_ahead_of_time import needs_libtpu

from pallas_kernels.inspection.calls import Shape
from pallas_kernels.inspection.compile_call import inspect_call
from pallas_kernels.inspection.decode_table import CHIPS, SHAPES, TABLE, decode_kernel, row_of
from pallas_kernels.inspection.tpu_kernels import TPUKernel

ROWS: list[dict[str, Any]] = json.loads(TABLE.read_text())["rows"]
BOUNDS = {
    ("v5e", "bfloat16"): {16: 0.52, 32: 0.52, 128: 0.45},
    ("v5e", "8 bits"): {16: 1.0, 32: 1.0, 128: 0.9},
    ("v6e", "bfloat16"): {16: 0.95, 32: 0.95, 128: 0.95},
    ("v6e", "8 bits"): {16: 1.6, 32: 1.6, 128: 1.6},
}
"""Core cycles for each token over the cycles that its copies need, by chip, pool and page size."""


def _least_bytes(dtype: str, scales: str | None, num_kv_heads: int, head_dim: int) -> int:
    """Of one token: its keys and values, and their scales."""
    itemsize = 2 if dtype == "bfloat16" else 1
    return 2 * num_kv_heads * (head_dim * itemsize + (4 if scales == "token" else 0))


def test_the_table_has_every_row() -> None:
    expected = [(chip, shape.dtype, shape.page) for chip in CHIPS for shape in SHAPES]
    assert [(row["chip"], row["dtype"], row["page"]) for row in ROWS] == expected
    assert [row["scales"] == "static" for row in ROWS] == [shape.static_scales for _ in CHIPS for shape in SHAPES]


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: "-".join(str(row[k]) for k in ("chip", "dtype", "scales", "page"))
)
def test_the_table_meets_its_bounds(row: dict[str, Any]) -> None:
    pool = "bfloat16" if row["dtype"] == "bfloat16" else "8 bits"
    assert row["ratio_with_item"] <= BOUNDS[row["chip"], pool][row["page"]]
    assert row["bytes_per_token"] == _least_bytes(row["dtype"], row["scales"], 8, 128)


def _row(chip: str, shape: Shape) -> dict[str, Any]:
    """The row of a call, known to be well counted."""
    call, kernel = decode_kernel(chip, shape)
    row = row_of(call, kernel)
    least = _least_bytes(shape.dtype, row["scales"], shape.num_kv_heads, shape.head_dim)
    assert row["bytes_per_token"] == least, "no byte moves that is not a key, a value or a scale"
    assert kernel.cycles is not None
    assert abs(kernel.cycles / kernel.compiler_cycles - 1) < 0.12, "the scoreboard left the compiler's own count"
    return row


@pytest.mark.aot
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("chip", "dtype", "page"), [("v5e", "bfloat16", 128), ("v5e", "float8_e4m3fn", 16), ("v6e", "int8", 32)]
)
def test_the_table_is_of_this_kernel(chip: str, dtype: str, page: int) -> None:
    made = _row(chip, Shape(dtype=dtype, page=page))
    names = ("chip", "dtype", "scales", "page", "block")
    [row] = [row for row in ROWS if all(row[name] == made[name] for name in names)]
    assert made["ratio"] == pytest.approx(row["ratio"], rel=0.05), (
        "rerun python -m pallas_kernels.inspection.decode_table"
    )


@pytest.mark.aot
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 1.0), ("int8", 1.1)])
def test_head_dim_64_moves_no_padding(dtype: str, bound: float) -> None:
    """The ratio of int8 there is 1.06: that of head_dim 128 is .5."""
    assert _row("v5e", Shape(dtype=dtype, page=64, head_dim=64))["ratio"] < bound


@pytest.mark.aot
@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(("chip", "whole", "masked"), [("v5e", 0.77, 0.7), ("v6e", 0.6, 0.51)])
def test_prefills_keep_the_matrix_units_busy(chip: str, whole: float, masked: float) -> None:
    """In the loops over heads: where all queries see all tokens, and at the edges."""
    call = inspect_call(chip, "ragged_paged_attention", Shape(queries=512, seqs=4))
    [kernel] = [k for k in call.kernels if isinstance(k, TPUKernel) and k.name == "ragged_paged_attention_prefill"]
    shares = [each.share for each in kernel.products]
    assert len(shares) == 2
    assert shares[0] > whole
    assert shares[1] > masked
