"""KV write on CPU in native code (`cpu_native.cc`): in place, quantizing on the way into an int8 pool."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_layout import KVPages
from pallas_kernels.native import library


def write(
    kv: KVPages,
    layer: Int[Array, ""],
    keys: Float[Array, "T K D"],
    values: Float[Array, "T K D"],
    pages: Int[Array, " T"],
    offsets: Int[Array, " T"],
) -> KVPages:
    """Contract: `pallas_kernels.kv_write.api`; keys and values are float32 or bfloat16. Raises NativeBuildError while tracing."""
    library.load()
    where = (pages.astype(jnp.int32), offsets.astype(jnp.int32))
    layer = jnp.asarray(layer, jnp.int32)
    if kv.scales is None:
        call = jax.ffi.ffi_call("jaxkv_kv_write", kv.pages, input_output_aliases={0: 0})
        return KVPages(pages=call(kv.pages, layer, keys, values, *where))
    both = jax.ffi.ffi_call("jaxkv_kv_write_scaled", (kv.pages, kv.scales), input_output_aliases={0: 0, 1: 1})
    new_pages, new_scales = both(kv.pages, kv.scales, layer, keys, values, *where)
    return KVPages(pages=new_pages, scales=new_scales)
