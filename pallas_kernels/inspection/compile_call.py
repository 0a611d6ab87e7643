"""Compiles one call for a chip that is not here: the child process of `pallas_kernels.inspect`.

Takes chip, op and shape as JSON; prints what XLA says of the memory, and for NVIDIA what ptxas says of each kernel, as JSON.
A TPU's kernels are read from the dump that the parent asks libtpu for.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.absent_devices import CHIPS, absent_devices, without_compilation_cache
from pallas_kernels.backends import Backend
from pallas_kernels.inspection.calls import OPS, Call, Shape
from pallas_kernels.inspection.nvidia import compile_for_h100


def main() -> None:
    try:
        print(json.dumps(_compile(sys.argv[1], sys.argv[2], Shape(**json.loads(sys.argv[3])))))
    except Exception as error:  # whatever the kernel's checks or the compiler raise is what was asked for
        message = str(error).strip().splitlines()
        sys.exit(f"{type(error).__name__}: {message[0] if message else ''}")


def _compile(chip: str, op: str, shape: Shape) -> dict[str, Any]:
    backend: Backend = "mosaic_gpu" if CHIPS[chip].platform == "gpu" else "mosaic_tpu"
    kernels: list[dict[str, Any]] = []
    if backend == "mosaic_gpu":
        call = OPS[op](shape, backend)
        compiled, reports = compile_for_h100(call.function, *call.args, donate=call.donate)
        kernels = [dataclasses.asdict(report) for report in reports]
    else:
        compiled, call = _compile_for_tpu(chip, op, shape)
    memory = compiled.memory_analysis()
    return {
        "flops": call.flops,
        "bytes": call.bytes,
        "products": call.products,
        "temporary_bytes": memory.temp_size_in_bytes,
        "kernels": kernels,
    }


def _compile_for_tpu(chip: str, op: str, shape: Shape) -> tuple[Any, Call]:
    mesh = Mesh(np.array(absent_devices(chip)), ("tensor",))
    whole = NamedSharding(mesh, PartitionSpec())
    with without_compilation_cache(), jax.set_mesh(mesh):
        call = OPS[op](shape, "mosaic_tpu")
        placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), call.args)
        mapped = jax.shard_map(
            call.function, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
        )
        return jax.jit(mapped, donate_argnums=call.donate).lower(*placed).compile(), call


if __name__ == "__main__":
    main()
