"""All matmuls of one step of the default model on CPU: bfloat16 weights against int8 weights.

    python benchmarks/matmul_cpu.py [--rounds 9] [--tokens 8 16 32]

The layers run in one compiled scan over stacked weights, as in the engine's step; the output matrix is timed by itself. The forms take
turns; the table shows each one's best round.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax import Array

from pallas_kernels.quantized_matmul.api import quantized_matmul
from pallas_kernels.quantized_matmul.weights import QuantizedWeight

LAYERS, HIDDEN, WIDE, VOCABULARY = 30, 576, 1536, 49152
SHAPES = {
    "qkv": (960, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (WIDE, HIDDEN),
    "up": (WIDE, HIDDEN),
    "down": (HIDDEN, WIDE),
}
FORMS = ("bfloat16", "int8")


def multiply(x: Array, weight: Array | QuantizedWeight) -> Array:
    if isinstance(weight, QuantizedWeight):
        return quantized_matmul(x, weight)
    return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=jnp.float32).astype(x.dtype)


def layers(x: Array, stacks: dict[str, Any]) -> Array:
    def layer(x: Array, weights: dict[str, Any]) -> tuple[Array, None]:
        mixed = multiply(multiply(x, weights["qkv"])[:, :HIDDEN], weights["o"])
        return multiply(multiply(mixed, weights["gate"]) * multiply(mixed, weights["up"]), weights["down"]), None

    return jax.lax.scan(layer, x, stacks)[0]


def make_weight(form: str, *shape: int) -> Array | QuantizedWeight:
    key = jax.random.key(0)
    if form == "bfloat16":
        return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(0.02)
    return QuantizedWeight(jax.random.randint(key, shape, -127, 128, jnp.int8), jnp.full(shape[:-1], 3e-4), kind="int8")


def seconds(step: Callable[..., Array], arguments: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step(*arguments))
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
    stacks = {form: {name: make_weight(form, LAYERS, *shape) for name, shape in SHAPES.items()} for form in FORMS}
    heads = {form: make_weight(form, VOCABULARY, HIDDEN) for form in FORMS}
    run_layers, run_head = jax.jit(layers), jax.jit(multiply)
    print("| tokens | layers bfloat16 | layers int8 | ratio | output bfloat16 | output int8 | ratio |")
    print("|---|---|---|---|---|---|---|")
    for tokens in options.tokens:
        x = jax.random.normal(jax.random.key(1), (tokens, HIDDEN), jnp.bfloat16)
        runs: dict[tuple[str, str], tuple[Callable[..., Array], tuple[Any, ...]]] = {}
        for form in FORMS:
            runs["layers", form] = (run_layers, (x, stacks[form]))
            runs["head", form] = (run_head, (x, heads[form]))
        best = dict.fromkeys(runs, float("inf"))
        for step in runs.values():
            seconds(*step)  # compiles
        for _ in range(options.rounds):
            for name, step in runs.items():
                best[name] = min(best[name], seconds(*step) * 1e3)
        cells = [f"{tokens}"]
        for part in ("layers", "head"):
            wide, narrow = (best[part, form] for form in FORMS)
            cells += [f"{wide:.1f}", f"{narrow:.1f}", f"{wide / narrow:.1f}x"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
