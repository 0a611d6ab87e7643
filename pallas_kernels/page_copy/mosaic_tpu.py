"""Page copy on TPU: pages move inside HBM, in all layers, without passing through the core."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

KERNEL_NAME = "page_copy"
IN_FLIGHT = 16


def copy_pages(
    pool: Array, sources: Int[Array, " N"], targets: Int[Array, " N"], count: Int[Array, ""], *, interpret: Any = False
) -> Array:
    """The pool [L, P, ...] with page targets[i] a copy of page sources[i], for i < count, in every layer.

    No target may be a source or occur twice. Works for pages and for token scales. In place when the pool is donated.
    """
    layers = pool.shape[0]

    def kernel(sources: Any, targets: Any, count: Any, _aliased: Any, pool: Any, sems: Any) -> None:
        total = count[0] * layers

        def copy(i: Any) -> Any:
            pair, layer = lax.div(i, layers), lax.rem(i, layers)
            sem = sems.at[lax.rem(i, IN_FLIGHT)]
            return pltpu.make_async_copy(pool.at[layer, sources[pair]], pool.at[layer, targets[pair]], sem)

        def step(i: Any, carry: None) -> None:  # noqa: ARG001
            @pl.when(i >= IN_FLIGHT)
            def _() -> None:
                copy(i - IN_FLIGHT).wait()

            copy(i).start()

        lax.fori_loop(0, total, step, None)
        lax.fori_loop(jnp.maximum(total - IN_FLIGHT, 0), total, lambda i, _: copy(i).wait(), None)

    any_space = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=[any_space],
            out_specs=any_space,
            scratch_shapes=[pltpu.SemaphoreType.DMA((IN_FLIGHT,))],
        ),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
        name=KERNEL_NAME,
    )
    copied: Array = call(sources, targets, jnp.asarray(count, jnp.int32).reshape(1), pool)
    return copied
