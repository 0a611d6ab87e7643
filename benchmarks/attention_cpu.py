"""Attention of one layer on CPU, `cpu_native` against `reference`, at the shapes of the default model.

    python benchmarks/attention_cpu.py [--rounds 7] [--dtype bfloat16]

Each timing runs all layers of a stacked pool in one compiled scan, as the engine's step does, so that the pages come from memory
and not from a cache that one layer would fit. The backends take turns; the table shows each one's best round per layer.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.kv_layout import KVLayout, KVPages
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.ragged_paged_attention.api import Backend, prepare, ragged_paged_attention

HEADS, KV_HEADS, HEAD_DIM, PAGE = 9, 3, 64, 16
BACKENDS: tuple[Backend, ...] = ("reference", "cpu_native")


@dataclass(frozen=True)
class Load:
    """Sequences of one step: each has q_len new tokens and kv_len tokens in all."""

    name: str
    sequences: int
    q_len: int
    kv_len: int


LOADS = (
    Load("decode 8 x 192", 8, 1, 192),
    Load("decode 32 x 192", 32, 1, 192),
    Load("decode 32 x 1,024", 32, 1, 1024),
    Load("decode 1 x 8,192", 1, 1, 8192),
    Load("prefill 4 x 128", 4, 128, 128),
    Load("prefill 1 x 512 at context 1,024", 1, 512, 1024),
    Load("prefill 1 x 512 at context 4,096", 1, 512, 4096),
)


def make_step(load: Load, layers: int, dtype: str, backend: Backend) -> tuple[Callable[..., Array], tuple[Array, ...]]:
    """A compiled function that attends in all layers, and its arguments."""
    pages_each = -(-load.kv_len // PAGE)
    num_pages = load.sequences * pages_each + 1
    layout = KVLayout(layers, KV_HEADS, HEAD_DIM, PAGE, dtype)
    rng = np.random.default_rng(0)
    pages = jax.random.normal(jax.random.key(0), layout.pages_shape(num_pages), dtype)
    tokens = load.sequences * load.q_len
    q = jax.random.normal(jax.random.key(1), (tokens, HEADS, HEAD_DIM), jnp.bfloat16)
    table = jnp.asarray(rng.permutation(num_pages - 1).reshape(load.sequences, pages_each), jnp.int32)
    cu_q_lens = jnp.arange(load.sequences + 1, dtype=jnp.int32) * load.q_len
    kv_lens = jnp.full((load.sequences,), load.kv_len, jnp.int32)

    def step(q: Array, pages: Array, table: Array, cu_q_lens: Array, kv_lens: Array) -> Array:
        def one(q: Array, layer: Array) -> tuple[Array, None]:
            out = ragged_paged_attention(
                q,
                KVPages(pages),
                layer,
                table,
                cu_q_lens,
                kv_lens,
                jnp.int32(load.sequences),
                layout=layout,
                scale=HEAD_DIM**-0.5,
                backend=backend,
            )
            return out, None

        return jax.lax.scan(one, q, jnp.arange(layers))[0]

    return jax.jit(step), (q, pages, table, cu_q_lens, kv_lens)


def make_write(
    tokens: int, layers: int, dtype: str, backend: Backend
) -> tuple[Callable[..., Array], tuple[Array, ...]]:
    """A compiled function that writes `tokens` new keys and values into all layers of a pool that it is given for good."""
    num_pages = 1024
    layout = KVLayout(layers, KV_HEADS, HEAD_DIM, PAGE, dtype)
    pages = jnp.zeros(layout.pages_shape(num_pages), dtype)
    new = jax.random.normal(jax.random.key(1), (tokens, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    slots = jnp.asarray(np.random.default_rng(0).permutation(num_pages * PAGE)[:tokens], jnp.int32)

    def step(pages: Array, new: Array, slots: Array) -> Array:
        def one(kv: KVPages, layer: Array) -> tuple[KVPages, None]:
            return write_kv(kv, layer, new, new, slots // PAGE, slots % PAGE, layout=layout, backend=backend), None

        return jax.lax.scan(one, KVPages(pages), jnp.arange(layers))[0].pages

    return jax.jit(step, donate_argnums=0), (pages, new, slots)


def seconds(step: Callable[..., Array], arguments: tuple[Array, ...]) -> tuple[float, tuple[Array, ...]]:
    """Time of one run, and the arguments of the next: what a run donated is replaced by what it returned."""
    start = time.perf_counter()
    out = jax.block_until_ready(step(*arguments))
    elapsed = time.perf_counter() - start
    return elapsed, ((out, *arguments[1:]) if arguments[0].is_deleted() else arguments)


def compare(
    name: str, runs: dict[Backend, tuple[Callable[..., Array], tuple[Array, ...]]], layers: int, rounds: int
) -> None:
    best = dict.fromkeys(runs, float("inf"))
    for backend, (step, arguments) in runs.items():
        runs[backend] = (step, seconds(step, arguments)[1])  # compiles
    for _ in range(rounds):
        for backend, (step, arguments) in runs.items():
            elapsed, arguments = seconds(step, arguments)
            runs[backend] = (step, arguments)
            best[backend] = min(best[backend], elapsed / layers)
    reference, native = best["reference"] * 1e3, best["cpu_native"] * 1e3
    print(f"| {name} | {reference:.2f} | {native:.3f} | {reference / native:.1f}x |", flush=True)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each backend and load; the best counts")
    parser.add_argument("--layers", type=int, default=8, help="layers of the pool")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the KV pool")
    options = parser.parse_args()
    prepare("cpu_native")
    print(f"CPU {cpu_name()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}, JAX {jax.__version__}")
    print(
        f"{HEADS} query and {KV_HEADS} KV heads, head dim {HEAD_DIM}, page {PAGE}, {options.dtype} pool, {options.layers} layers;"
    )
    print(f"best of {options.rounds} interleaved rounds, milliseconds per layer\n")
    print("| | reference | cpu_native | ratio |\n|---|---|---|---|")
    for load in LOADS:
        runs = {backend: make_step(load, options.layers, options.dtype, backend) for backend in BACKENDS}
        compare(load.name, runs, options.layers, options.rounds)
    for tokens in (32, 512):
        writes = {backend: make_write(tokens, options.layers, options.dtype, backend) for backend in BACKENDS}
        compare(f"KV write {tokens} tokens", writes, options.layers, options.rounds)


if __name__ == "__main__":
    main()
