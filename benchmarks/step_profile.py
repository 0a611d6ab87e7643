"""Where the time of a step goes: the engine's prefill and decode steps under JAX's profiler, operation by operation.

    python benchmarks/step_profile.py [--quantization int8] [--sequences 32] [--out FILE]

Prints wall time, thread time (of all threads together) and the operations that take most of it, per step. An operation's name is that of
its XLA fusion: `Engine`'s compiled step, dumped with XLA_FLAGS=--xla_dump_to=DIR, says what is in it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData

from benchmarks.machine import conditions
from jaxkv import Engine, SamplingParams
from jaxkv.weights.catalog import DEFAULT_MODEL

PROMPT, OUTPUT, STEPS = 128, 64, 4
WAITS = ("ThunkExecutor", "SlinkyThreadPool", "while", "Thunk")
"""Events that span others, or wait for them."""


def profiled(engine: Engine, steps: int) -> dict[str, Any]:
    """Runs `steps` steps under the profiler. Times are milliseconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with jax.profiler.trace(folder):
            for _ in range(steps):
                engine.step()
        wall = time.perf_counter() - started
        (file,) = Path(folder).rglob("*.xplane.pb")
        operations = operation_times(ProfileData.from_file(str(file)))
    thread = sum(operations.values()) / steps
    return {
        "wall_ms": round(wall * 1e3 / steps, 2),
        "thread_ms": round(thread, 2),
        "operations_ms": {name: round(took / steps, 2) for name, took in operations.most_common(20)},
    }


def operation_times(profile: Any) -> Counter[str]:
    """Milliseconds of each operation on all threads that are not Python's."""
    times: Counter[str] = Counter()
    for plane in profile.planes:
        for line in plane.lines:
            if "python" in line.name.lower():
                continue
            for event in line.events:
                if not event.name.startswith(WAITS):
                    times[event.name] += event.duration_ns / 1e6
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    engine = Engine.from_pretrained(
        options.model, quantization=options.quantization, max_model_len=512, max_num_seqs=options.sequences
    )
    rng = np.random.default_rng(0)
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    for _ in range(options.sequences):
        engine.add_request(rng.integers(300, 30_000, PROMPT).tolist(), greedy)
    prefill_steps = options.sequences * PROMPT // (engine.config.max_num_batched_tokens or 512)
    first = min(STEPS, max(prefill_steps - 1, 1))
    report: dict[str, Any] = {
        "model": options.model,
        "quantization": options.quantization,
        "sequences": options.sequences,
        "conditions": conditions(),
        "prefill": profiled(engine, first),
    }
    for _ in range(prefill_steps + 8):
        engine.step()
    report["decode"] = profiled(engine, STEPS * 4)
    print(json.dumps(report, indent=2))
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    engine.close()


if __name__ == "__main__":
    main()
