"""All matmuls of one step of the default model on CPU: bfloat16 and int8 weights, by XLA and by the native code.

    python benchmarks/matmul_cpu.py [--rounds 9] [--tokens 8 16 32]

The layers run in one compiled scan over stacked weights, as in the engine's step, where the native code has them packed; the output matrix
is timed by itself. The forms take turns; the table shows each one's best round.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
from jax import Array

from pallas_kernels.dense_matmul.api import Backend
from pallas_kernels.matmul import Weight, matmul
from pallas_kernels.packed_weight.weight import pack
from pallas_kernels.quantized_matmul.weights import QuantizedWeight

LAYERS, HIDDEN, WIDE, VOCABULARY = 30, 576, 1536, 49152
SHAPES = {
    "qkv": (960, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (WIDE, HIDDEN),
    "up": (WIDE, HIDDEN),
    "down": (HIDDEN, WIDE),
}
FORMS: tuple[tuple[str, Backend], ...] = tuple(
    (dtype, backend) for dtype in ("bfloat16", "int8") for backend in ("reference", "cpu_native")
)


def layers(x: Array, stacks: dict[str, Weight], backend: Backend) -> Array:
    def layer(x: Array, index: Array) -> tuple[Array, None]:
        def multiply(x: Array, name: str) -> Array:
            return matmul(x, stacks[name], index, backend=backend)

        mixed = multiply(multiply(x, "qkv")[:, :HIDDEN], "o")
        return multiply(multiply(mixed, "gate") * multiply(mixed, "up"), "down"), None

    return jax.lax.scan(layer, x, jnp.arange(LAYERS))[0]


def make_weight(dtype: str, *shape: int) -> Array | QuantizedWeight:
    key = jax.random.key(0)
    if dtype == "bfloat16":
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(0.02)
    values = jax.random.randint(key, shape, -127, 128, jnp.int8)
    return QuantizedWeight(values, jnp.full(shape[:-1], 3e-4), kind="int8", rotated=True)


def make_stack(dtype: str, backend: Backend, *shape: int) -> Weight:
    weight = make_weight(dtype, LAYERS, *shape)
    return pack(weight, (LAYERS, *shape)) if backend == "cpu_native" else weight


def seconds(step: Callable[[], Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each form; the best counts")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512])
    options = parser.parse_args()
    print(f"CPU {cpu_name()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    print(
        f"JAX {jax.__version__}, jaxlib {jaxlib.__version__}; best of {options.rounds} interleaved rounds, milliseconds"
    )
    print(f"{LAYERS} layers of {SHAPES}; output matrix {VOCABULARY} x {HIDDEN}\n")
    stacks = {form: {name: make_stack(*form, *shape) for name, shape in SHAPES.items()} for form in FORMS}
    heads = {dtype: make_weight(dtype, VOCABULARY, HIDDEN) for dtype, _ in FORMS}
    run_layers, run_head = jax.jit(layers, static_argnames="backend"), jax.jit(matmul, static_argnames="backend")
    names = [f"{dtype}, {'XLA' if backend == 'reference' else 'native'}" for dtype, backend in FORMS]
    print(
        f"| tokens | {' | '.join(f'layers {name}' for name in names)} | {' | '.join(f'output {name}' for name in names)} |"
    )
    print(f"|---|{'---|' * 2 * len(FORMS)}")
    for tokens in options.tokens:
        x = jax.random.normal(jax.random.key(1), (tokens, HIDDEN), jnp.bfloat16)
        runs: dict[tuple[str, str, Backend], Callable[[], Array]] = {}
        for dtype, backend in FORMS:
            runs["layers", dtype, backend] = partial(run_layers, x, stacks[dtype, backend], backend=backend)
            runs["head", dtype, backend] = partial(run_head, x, heads[dtype], backend=backend)
        best = dict.fromkeys(runs, float("inf"))
        for step in runs.values():
            seconds(step)  # compiles
        for _ in range(options.rounds):
            for name, step in runs.items():
                best[name] = min(best[name], seconds(step) * 1e3)
        cells = [f"{tokens}", *(f"{best[part, *form]:.1f}" for part in ("layers", "head") for form in FORMS)]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
