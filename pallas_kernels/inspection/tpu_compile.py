"""Compiles one attention shape for a TPU that is not here: the child process of `pallas_kernels.inspection.tpu`."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import kv_orders_tpu
from pallas_kernels.absent_devices import absent_devices
from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.ragged_paged_attention import mosaic_tpu
from pallas_kernels.ragged_paged_attention.mosaic_tpu_plan import make_plan

LAYERS = 2


def main() -> None:
    shape = json.loads(sys.argv[1])
    K, D, page, seqs = shape["num_kv_heads"], shape["head_dim"], shape["page"], shape["seqs"]
    layout = KVLayout(LAYERS, K, D, page, shape["dtype"], "token_major", shape["scales"] or "none")
    pages_per_seq = shape["context"] // page
    num_pages = seqs * pages_per_seq
    mesh = Mesh(np.array(absent_devices(shape["chip"])), ("tensor",))

    def abstract(dims: tuple[int, ...], dtype: object = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P()))

    scales = None
    if shape["scales"] == "token":
        scales = abstract(kv_orders_tpu.token_scales_shape(LAYERS, num_pages, page, K), jnp.float32)
    elif shape["scales"] == "static":
        scales = abstract((LAYERS, 2, K), jnp.float32)
    q_dtype = jnp.float32 if shape["dtype"] == "float32" else jnp.bfloat16
    q = abstract((seqs, shape["num_heads"], D), q_dtype)
    kv = KVPages(abstract(layout.pages_shape(num_pages), jnp.dtype(shape["dtype"])), scales)
    tables = (abstract(()), abstract((seqs, pages_per_seq)), abstract((seqs + 1,)), abstract((seqs,)), abstract(()))
    with jax.set_mesh(mesh):
        plan = make_plan(
            layout,
            num_heads=shape["num_heads"],
            num_tokens=seqs,
            pages_per_seq=pages_per_seq,
            block_tokens=shape["block_tokens"],
        )

        def call(q: jax.Array, kv: KVPages, *tables: jax.Array) -> jax.Array:
            return mosaic_tpu.attend(q, kv, *tables, layout=layout, scale=D**-0.5, plan=plan)

        mapped = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        jax.jit(mapped).lower(q, kv, *tables).compile()
    print(json.dumps({"block_tokens": plan.block_tokens}))


if __name__ == "__main__":
    main()
