"""The static rooflines of the TPU decode kernel that its block sizes were chosen by.

`python -m pallas_kernels.inspection.decode_table` compiles them anew and puts them in place of those in
`ragged_paged_attention/tuning/tpu.json`. Needs libtpu.
"""

from __future__ import annotations

import json
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from pallas_kernels.inspection.calls import Shape
from pallas_kernels.inspection.compile_call import Inspection, inspect_call
from pallas_kernels.inspection.tpu_kernels import TPUKernel
from pallas_kernels.kv_layout import QUANTIZED_DTYPES
from pallas_kernels.ragged_paged_attention import tuning

TABLE = Path(str(resources.files(tuning) / "tpu.json"))
CHIPS = ("v5e", "v6e")
SHAPES = [
    Shape(dtype=dtype, page=page, static_scales=static)
    for dtype in ("bfloat16", "float8_e4m3fn", "int8")
    for page in (16, 32, 128)
    for static in ((True, False) if dtype in QUANTIZED_DTYPES else (False,))
]


def decode_kernel(chip: str, shape: Shape) -> tuple[Inspection, TPUKernel]:
    """A call of ragged paged attention, and its decode kernel. Raises RuntimeError where it does not compile."""
    call = inspect_call(chip, "ragged_paged_attention", shape)
    if call.problem:
        raise RuntimeError(f"{shape} does not compile for {chip}: {call.problem}")
    [kernel] = [k for k in call.kernels if isinstance(k, TPUKernel) and k.name == "ragged_paged_attention_decode"]
    return call, kernel


def row_of(call: Inspection, kernel: TPUKernel) -> dict[str, Any]:
    """A row of the table: ratios are what `Roofline.ratio` says, with_item spreads what is spent around the loop over a sequence."""
    shape, block, steady = call.shape, call.block_tokens, kernel.steady
    if block is None or steady is None:
        raise ValueError(f"the schedule of {kernel.name} for {call.chip} has no steady loop that can be timed")
    return {
        "chip": call.chip,
        "dtype": shape.dtype,
        "scales": None if shape.dtype not in QUANTIZED_DTYPES else "static" if shape.static_scales else "token",
        "page": shape.page,
        "block": block,
        "ratio": round(steady.ratio(), 2),
        "ratio_with_item": round(steady.ratio(shape.context / block), 2),
        "bytes_per_token": round(steady.dma_bytes / block),
        "cycles_per_token": round(steady.cycles / block, 2),
        "vmem_mib": round(kernel.vmem_bytes / 2**20, 1),
        "spills": kernel.spills,
    }


def main() -> None:
    rows = []
    for chip in CHIPS:
        for shape in SHAPES:
            rows.append(json.dumps(row_of(*decode_kernel(chip, shape))))
            print(rows[-1], flush=True)
    versions = {name: metadata.version(name) for name in ("jax", "libtpu")}
    text = json.dumps(json.loads(TABLE.read_text()) | {"versions": versions, "rows": None}, indent=2)
    lines = ",\n".join(f"    {row}" for row in rows)
    TABLE.write_text(text.replace('"rows": null', f'"rows": [\n{lines}\n  ]') + "\n")


if __name__ == "__main__":
    main()
