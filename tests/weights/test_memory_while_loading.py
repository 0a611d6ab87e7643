"""What loading takes at its peak: the weights as they are stored, and not much beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.tiny_engine import TINY, random_params

from jaxkv.runtime.mesh import build_mesh, put_params

# RssAnon counts what a process allocated, without the pages of mapped files. A process of its own starts from nothing.
LOAD = """
import json, sys, threading, time
import jax
from jaxkv.runtime.mesh import build_mesh, put_params
from jaxkv.weights.hub import resolve
from jaxkv.weights.load import load_model

def allocated():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def watch():
    while not done.is_set():
        seen.append(allocated())
        time.sleep(0.002)

source, mesh = resolve("smollm2-135m-instruct"), build_mesh(1)
jax.block_until_ready(jax.numpy.zeros(8))
done, before = threading.Event(), allocated()
seen = [before]
watcher = threading.Thread(target=watch)
watcher.start()
loaded = load_model(source, "bfloat16", sys.argv[1] if len(sys.argv) > 1 else None)
placed = put_params(mesh, loaded.config, loaded.params)
done.set()
watcher.join()
layer = sum(leaf.size // leaf.shape[0] * 4 for leaf in jax.tree.leaves(placed["layers"]) if leaf.dtype != "float32")
print(json.dumps([max(seen) - before, sum(leaf.nbytes for leaf in jax.tree.leaves(placed)), layer]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is counted by Linux' /proc/self/status")
@pytest.mark.parametrize("quantization", [[], ["int8"]], ids=["bfloat16", "int8"])
def test_at_most_half_more_than_the_weights_and_a_layer(quantization: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *quantization], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )  # fmt: skip
    peak, stored, layer = json.loads(done.stdout)
    assert stored > 100e6
    assert peak <= 1.5 * stored + layer


def test_placing_weights_empties_the_host_tree() -> None:
    params = random_params(TINY)
    put_params(build_mesh(1), TINY, params)
    assert params == {}
