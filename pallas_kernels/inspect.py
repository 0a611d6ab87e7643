"""Compiles a kernel for a chip that is not here and says what the compiler made of it:

    python -m pallas_kernels.inspect --chip v5e h100 --op ragged_paged_attention --dtype bfloat16 int8

Needs `pip install 'jaxkv[aot]'`, no chip and no driver. Per call: its FLOPs, its bytes, and the time that these need at least on that
chip. Per TPU kernel: VMEM, spills, and of its steady loop the bundles, cycles with stalls, bytes copied, and the static roofline; and of
each stretch of code that multiplies its cycles, and the share of them in which the matrix units do.
Per NVIDIA kernel: registers, spills, shared memory, and how often it multiplies by wgmma, copies by TMA, and touches local memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Sequence

from pallas_kernels.absent_devices import CHIPS
from pallas_kernels.inspection.calls import OPS, Shape
from pallas_kernels.inspection.compile_call import Inspection, inspect_call
from pallas_kernels.inspection.nvidia import KernelReport
from pallas_kernels.inspection.tpu_kernels import TPUKernel
from pallas_kernels.kv_layout import QUANTIZED_DTYPES

_POOL = ("dtype", "page", "static_scales", "num_kv_heads", "head_dim", "seqs")
READS: dict[str, tuple[str, ...]] = {
    "ragged_paged_attention": (*_POOL, "num_heads", "context", "queries"),
    "flash_attention": ("dtype", "num_heads", "num_kv_heads", "head_dim", "seqs", "context"),
    "kv_write": (*_POOL, "num_heads", "tokens"),
    "page_copy": (*_POOL, "num_heads", "tokens"),
    "quantized_matmul": ("kind", "tokens", "outputs", "inputs"),
}
"""The fields of a shape that an op depends on."""


def describe(inspection: Inspection) -> str:
    """A few lines: the call, then a row for each kernel."""
    shape, defaults = dataclasses.asdict(inspection.shape), dataclasses.asdict(Shape())
    kinds = ("dtype", "kind")
    shown = [name for name in READS[inspection.op] if name in kinds or shape[name] != defaults[name]]
    title = " ".join([inspection.chip, inspection.op, *(f"{name}={shape[name]}" for name in shown)])
    if inspection.problem:
        return f"{title}\n  does not compile: {inspection.problem}"
    floor, bound = inspection.floor()
    head = (
        f"{title}\n  compiled; {inspection.flops:.3g} FLOPs, {inspection.bytes:.3g} bytes, at least "
        f"{floor:.1f} us (by its {bound}); {inspection.temporary_bytes / 2**20:.1f} MiB of temporaries"
    )
    rows = [_tpu_row(kernel) if isinstance(kernel, TPUKernel) else _nvidia_row(kernel) for kernel in inspection.kernels]
    return "\n".join([head, *_table(rows)])


def _tpu_row(kernel: TPUKernel) -> dict[str, str]:
    steady = kernel.steady
    return {
        "kernel": kernel.name,
        "VMEM MiB": f"{kernel.vmem_bytes / 2**20:.1f}",
        "spills": str(kernel.spills),
        "bundles": str(kernel.bundles),
        "loop bundles": "-" if steady is None else str(steady.bundles),
        "loop cycles": "-" if steady is None else str(steady.cycles),
        "loop bytes": "-" if steady is None else str(steady.dma_bytes),
        "cycles / bytes' cycles": "-" if steady is None else f"{steady.ratio():.2f}",
        "cycles of products": " ".join(str(each.cycles) for each in kernel.products) or "-",
        "matrix units busy": " ".join(f"{each.share:.2f}" for each in kernel.products) or "-",
    }


def _nvidia_row(kernel: KernelReport) -> dict[str, str]:
    return {
        "kernel": kernel.name,
        "registers": str(kernel.registers),
        "spill bytes": str(kernel.spill_bytes),
        "stack bytes": str(kernel.stack_bytes),
        "shared bytes": str(kernel.shared_bytes),
        "wgmma": str(kernel.wgmma),
        "TMA": str(kernel.tensor_copies),
        "local memory": str(kernel.local_instructions),
    }


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    if not rows:
        return ["  no kernels of its own: XLA does it all"]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [{name: name for name in rows[0]}, *rows]
    return ["  " + "  ".join(line[name].rjust(width) for name, width in widths.items()) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", nargs="+", choices=sorted(CHIPS), default=["v5e", "v6e", "h100"])
    parser.add_argument("--op", nargs="+", choices=sorted(OPS), default=["ragged_paged_attention"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], help="of the KV pool, or of dense arrays")
    parser.add_argument("--page", nargs="+", type=int, default=[None], help="tokens; the backend's own by default")
    parser.add_argument(
        "--static-scales", action="store_true", help="of a quantized pool: per layer and head, not per token"
    )
    for field in dataclasses.fields(Shape):
        if field.name not in ("dtype", "page", "static_scales"):
            kind = type(field.default)
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    options = vars(parser.parse_args())
    chips, ops, dtypes, pages = (options.pop(name) for name in ("chip", "op", "dtype", "page"))
    static = options.pop("static_scales")
    failed = False
    done = set()
    for chip, op, dtype, page in itertools.product(chips, ops, dtypes, pages):
        dtype, page = (dtype if "dtype" in READS[op] else Shape.dtype), (page if "page" in READS[op] else None)
        if (chip, op, dtype, page) in done:
            continue
        done.add((chip, op, dtype, page))
        shape = Shape(dtype=dtype, page=page, static_scales=static and dtype in QUANTIZED_DTYPES, **options)
        try:
            inspection = inspect_call(chip, op, shape)
        except RuntimeError as error:
            sys.exit(str(error))
        failed |= inspection.problem is not None
        print(describe(inspection), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
