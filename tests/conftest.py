"""Settings of every test: strict JAX, eight virtual CPU devices, hypothesis without a clock."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import hypothesis
import jax
import numpy as np
import pytest
from fixtures.fast_interpreters import compiling_fast, give_numpy_to_callbacks
from fixtures.gpu_interpreter import reset_gpu_interpreter
from jax._src.pallas.mosaic.interpret import race_detection_state as races
from jax._src.pallas.mosaic_gpu.interpret import race_detection_state as gpu_races
from jax.experimental.pallas import tpu as pltpu

jax.config.update("jax_numpy_rank_promotion", "raise")
# Engines of the same shape are built many times: each shape is compiled once.
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _raise(message: str) -> None:
    raise RuntimeError(message)


# JAX 0.11 prints the races that its interpreters find, 0.12 raises them: here both raise.
races.print = gpu_races.print = _raise
give_numpy_to_callbacks()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--aot-all", action="store_true", help="compile the attention kernels for every combination of settings"
    )
    parser.addoption(
        "--engine-backend",
        choices=["mosaic_tpu", "mosaic_gpu"],
        help="run the tests of the engine on these kernels, interpreted, wherever they name no backend",
    )


@pytest.fixture(autouse=True)
def _interpreters_start_afresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a kernel leaves in an interpreter when it raises would be found by the next one."""
    np.random.seed(0)  # JAX's interpreter draws the clocks of copies from it
    with compiling_fast() if request.node.get_closest_marker("interpret") else contextlib.nullcontext():
        yield
    with contextlib.suppress(Exception):  # of a step that a failed test has left behind
        jax.effects_barrier()
    pltpu.reset_tpu_interpret_mode_state()
    reset_gpu_interpreter()


hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci")
