"""The step compiled from shapes alone: for devices that need not be here, with weights that nobody has to hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.models.params import ParamSpec, declare_params
from jaxkv.runtime.slot_state import empty_state
from jaxkv.runtime.step import StepSpec, make_step
from jaxkv.runtime.step_batch import Buckets, empty_batch, no_flags
from pallas_kernels.kv_layout import KVPages
from pallas_kernels.quantized_matmul.weights import QuantizedWeight


def compile_step(spec: StepSpec, buckets: Buckets, *, tokens: int, pages: int, num_blocks: int) -> jax.stages.Compiled:
    """The step of `tokens` rows and page tables of `pages` columns, for the devices of spec.mesh and a pool of num_blocks pages.

    `compiled.memory_analysis()` says what it needs on one device. Raises what the compiler raises, for example where that
    does not fit.
    """
    S, vocab = buckets.sequences(tokens), spec.model.vocab_size
    batch = empty_batch(tokens, pages, S, no_flags(), trash_page=num_blocks, padding_slot=buckets.max_num_seqs)
    state = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, empty_state(buckets.max_num_seqs + 1, vocab)))
    layout = spec.layout
    scales = layout.scales_shape(num_blocks + 1)
    pool = KVPages(
        jax.ShapeDtypeStruct(layout.pages_shape(num_blocks + 1), layout.pages_dtype),  # type: ignore[arg-type]
        None if scales is None else jax.ShapeDtypeStruct(scales, jnp.float32),  # type: ignore[arg-type]
    )
    with jax.set_mesh(spec.mesh):
        step: Any = make_step(spec)
        compiled: jax.stages.Compiled = step.lower(abstract_params(spec), (pool,), state, batch).compile()
    return compiled


def abstract_params(spec: StepSpec) -> dict[str, Any]:
    """The parameter tree of spec.model as shapes and dtypes."""

    def leaf(param: ParamSpec) -> Any:
        if param.norm:
            return jax.ShapeDtypeStruct(param.shape, jnp.float32)
        if not spec.quantized:
            return jax.ShapeDtypeStruct(param.shape, jnp.dtype(spec.dtype))
        values: Any = jax.ShapeDtypeStruct(param.shape, jnp.int8)
        scales: Any = jax.ShapeDtypeStruct(param.shape[: len(param.shape) - param.inputs], jnp.float32)
        return QuantizedWeight(values, scales, kind="int8", rotated=True)

    tree: dict[str, Any] = jax.tree.map(
        leaf, declare_params(spec.model), is_leaf=lambda entry: isinstance(entry, ParamSpec)
    )
    return tree
