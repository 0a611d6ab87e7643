"""What every backend of page copy must hold: whole pages with their scales, in every layer, bit for bit, and nothing else changes."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import pool_bits
from fixtures.interpreters import interpreter_of, on
from fixtures.pool_bits import random_pool
from fixtures.tpu_interpreter import DmaMode

from pallas_kernels.backends import BACKENDS, Backend, layout_for
from pallas_kernels.kv_layout import KVLayout, KVPages, KVScales
from pallas_kernels.page_copy.api import check_supported, copy_pages

NUM_PAGES = 24
TRASH = NUM_PAGES - 1
Pairs = tuple[tuple[int, int], ...]
PAIRS: Pairs = ((3, 0), (TRASH, TRASH), (5, 7), (3, 1), (0, TRASH), (TRASH, 9))
"""Two pages from one, padding, and a copy of the trash page."""
MANY: Pairs = tuple((source, source + 11) for source in range(11))
"""In two layers, more copies than are under way at once on a TPU."""


@dataclass(frozen=True)
class Case:
    dtype: str
    scales: KVScales = "none"
    K: int = 2
    D: int = 64
    page: int = 16
    pairs: Pairs = PAIRS
    layers: int = 2

    def __str__(self) -> str:
        real = sum(target != TRASH for _, target in self.pairs)
        return (
            f"{self.dtype}-{self.scales}-{self.layers}x{self.K}x{self.D}-page {self.page}-{real} of {len(self.pairs)}"
        )


CASES = (
    Case("float32", K=1, pairs=MANY, layers=3),
    Case("bfloat16"),
    Case("bfloat16", K=1, D=128, page=256),
    Case("bfloat16", pairs=((8, TRASH), (0, TRASH))),
    Case("bfloat16", pairs=((3, 0),)),
    Case("bfloat16", D=16, page=4, layers=3),
    Case("int8", "token", K=3),
    Case("int8", "token", page=128),
    Case("int8", "token", pairs=((TRASH, TRASH),)),
    Case("int8", "token", D=16, page=4, layers=3),
    Case("int8", "static", page=32, layers=3),
    Case("int8", "static", D=16, page=4, layers=3),
    Case("float8_e4m3fn", "static", D=256, page=64),
    Case("float8_e4m3fn", "token", K=1, page=64, pairs=MANY),
    Case("float8_e5m2", "token", K=1, page=256),
)


@dataclass(frozen=True)
class Copy:
    """NumPy arguments of `copy_pages`, and the pool that it must give."""

    backend: Backend
    layout: KVLayout
    kv: KVPages
    pairs: Pairs
    expected: KVPages


def make_copy(case: Case, backend: Backend) -> Copy:
    layout = layout_for(
        backend, num_layers=case.layers, num_kv_heads=case.K, head_dim=case.D, page_size=case.page, dtype=case.dtype,
        static_scales=case.scales == "static",
    )  # fmt: skip
    kv = random_pool(layout, NUM_PAGES, np.random.default_rng(1))
    expected = jax.tree.map(np.copy, kv)
    for source, target in case.pairs:
        if target == TRASH:
            continue
        expected.pages[:, target] = kv.pages[:, source]
        if case.scales == "token":
            expected.scales[:, target] = kv.scales[:, source]
    return Copy(backend, layout, kv, case.pairs, expected)


def wrong_parts(copy: Copy, dma: DmaMode = "on_wait") -> set[str]:
    """Runs a copy of a donated pool: which of its pages and scales are not, bit for bit, what they must be."""
    program = jax.jit(functools.partial(copy_pages, layout=copy.layout, backend=copy.backend), donate_argnums=0)
    sources, targets = np.array(copy.pairs, np.int32).T
    with interpreter_of(copy.backend, dma):
        found = program(*jax.tree.map(jnp.array, (copy.kv, sources, targets)))
        return pool_bits.wrong_parts(copy.backend, found, [copy.expected])


def _suite() -> list[Any]:
    modes: dict[Backend, tuple[DmaMode, ...]] = {"mosaic_tpu": ("on_wait", "eager")}
    return [
        on(backend, case, dma)
        for backend in BACKENDS
        for case in CASES
        # Too small for an accelerator's units of memory.
        if case.page >= 16 or not backend.startswith("mosaic")
        # Native code has no FP8.
        if backend != "cpu_native" or not case.dtype.startswith("float8")
        for dma in modes.get(backend, ("on_wait",))
    ]


@pytest.mark.parametrize(("backend", "case", "dma"), _suite())
def test_copies_what_numpy_copies(backend: Backend, case: Case, dma: DmaMode) -> None:
    assert not wrong_parts(make_copy(case, backend), dma)


@pytest.mark.parametrize("case", [Case("bfloat16"), Case("int8", "token"), Case("float8_e4m3fn", "token")], ids=str)
def test_xla_makes_nothing_of_the_size_of_the_pool(case: Case) -> None:
    copy = make_copy(case, "reference")
    program = jax.jit(functools.partial(copy_pages, layout=copy.layout, backend="reference"), donate_argnums=0)
    memory = program.lower(copy.kv, *np.array(copy.pairs, np.int32).T).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(copy.kv))
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 2  # a fourth is copied


SMALL = Case("int8", "token", K=1, pairs=((3, 0), (5, 7), (TRASH, TRASH)))
MISTAKES: dict[str, Pairs] = {
    "wrong source": ((4, 0), (5, 7), (TRASH, TRASH)),
    "wrong target": ((3, 1), (5, 7), (TRASH, TRASH)),
    "a page too few": ((3, 0), (TRASH, TRASH), (TRASH, TRASH)),
    "a page too many": ((3, 0), (5, 7), (1, 2)),
}


@pytest.mark.parametrize("backend", [on(backend) for backend in BACKENDS])
def test_planted_mistakes_are_noticed(backend: Backend) -> None:
    """A test of the test."""
    copy = make_copy(SMALL, backend)
    for mistake, pairs in MISTAKES.items():
        assert wrong_parts(dataclasses.replace(copy, pairs=pairs)) == {"pages", "scales"}, mistake
    no_scales = dataclasses.replace(copy.layout, scales="static")
    assert wrong_parts(dataclasses.replace(copy, layout=no_scales)) == {"scales"}


@pytest.mark.interpret
@pytest.mark.parametrize("backend", ["mosaic_gpu", "mosaic_tpu"])
def test_a_planted_race_is_caught(backend: Backend) -> None:
    """Pages that are targets and sources."""
    chain = tuple((page, page + 1) for page in range(5))
    with pytest.raises(Exception, match="RACE DETECTED"):
        wrong_parts(make_copy(dataclasses.replace(SMALL, pairs=chain), backend))


@pytest.mark.parametrize(
    ("backend", "layout", "message"),
    [
        ("mosaic_gpu", KVLayout(1, 1, 64, 192, "bfloat16"), "up to 128 tokens or a multiple of it, not 192"),
        ("mosaic_gpu", KVLayout(1, 1, 64, 16, "bfloat16", "token_major"), "head_major pools, not token_major"),
        ("mosaic_tpu", KVLayout(1, 1, 64, 16, "bfloat16"), "token_major pools, not head_major"),
    ],
)
def test_what_it_cannot_copy_is_an_error(backend: Backend, layout: KVLayout, message: str) -> None:
    ids = jnp.zeros(1, jnp.int32)
    pool = KVPages(jnp.zeros(layout.pages_shape(2), layout.dtype))
    with pytest.raises(ValueError, match=message):
        check_supported(backend, layout)
    with pytest.raises(ValueError, match=message):
        copy_pages(pool, ids, ids, layout=layout, backend=backend)


def test_ids_come_in_pairs() -> None:
    layout = KVLayout(1, 1, 64, 16, "bfloat16")
    pool = KVPages(jnp.zeros(layout.pages_shape(2), layout.dtype))
    with pytest.raises(ValueError, match="pairs of ids"):
        copy_pages(pool, jnp.zeros(2, jnp.int32), jnp.zeros(3, jnp.int32), layout=layout)
