"""Copies of whole pages inside the pool, between steps: for sequences that go on from one page in different ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Int

from jaxkv.cache.pool import KVPool, pool_shardings, pool_specs
from jaxkv.runtime.mesh import replicated
from jaxkv.runtime.step import StepSpec
from pallas_kernels.kv_layout import KVPages
from pallas_kernels.page_copy.api import copy_pages

PAIRS = 8
"""Pages that one call copies: those of more are copied by more calls, so that there is one program."""

CopyFn = Callable[[KVPool, Int[np.ndarray, " PAIRS"], Int[np.ndarray, " PAIRS"]], KVPool]


def make_page_copy(spec: StepSpec) -> CopyFn:
    """Jits `copy_pages` for a mesh, each device copying its own KV heads; the pool is donated and changed in place."""
    heads_here = spec.layout.num_kv_heads // spec.mesh.shape["tensor"]
    layout = dataclasses.replace(spec.layout, num_kv_heads=heads_here, shards=1)
    pages, nowhere, everywhere = pool_specs(spec.layout), PartitionSpec(), replicated(spec.mesh)

    def local(kv: KVPages, sources: Array, targets: Array) -> KVPages:
        return copy_pages(kv, sources, targets, layout=layout, backend=spec.backend)

    mapped = jax.shard_map(local, mesh=spec.mesh, in_specs=(pages, nowhere, nowhere), out_specs=pages, check_vma=False)
    pool = pool_shardings(spec.mesh, spec.layout)
    return jax.jit(
        lambda pool, sources, targets: tuple(mapped(group, sources, targets) for group in pool),
        donate_argnums=0,
        in_shardings=(pool, everywhere, everywhere),
        out_shardings=pool,
    )


def padded_pairs(
    pairs: list[tuple[int, int]], trash_page: int
) -> tuple[Int[np.ndarray, " PAIRS"], Int[np.ndarray, " PAIRS"]]:
    """Sources and targets of at most PAIRS copies; those of padding are the trash page."""
    ids = np.full((2, PAIRS), trash_page, np.int32)
    ids[:, : len(pairs)] = np.asarray(pairs, np.int32).reshape(-1, 2).T
    return ids[0], ids[1]
