"""One tiny engine for all tests that do not need special settings; it must end idle, balanced and without recompilation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fixtures import tiny_engine as tiny_engine_module
from fixtures.interpreted import interpreted
from fixtures.tiny_engine import tiny_engine

from jaxkv import Engine
from jaxkv.engine import backend_choice
from pallas_kernels.backends import Backend, layout_for
from pallas_kernels.ragged_paged_attention.api import check_supported


@pytest.fixture(scope="session", autouse=True)
def engine_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """With --engine-backend, it is what `auto` means to every engine."""
    backend = request.config.getoption("engine_backend")
    if backend is None:
        yield
        return
    with (
        interpreted(backend),
        mock.patch.object(tiny_engine_module, "AUTO", backend),
        mock.patch.object(backend_choice, "best_for", return_value=(backend, "--engine-backend")),
    ):
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --engine-backend, skips what the backend itself says it cannot do."""
    backend = config.getoption("engine_backend")
    here = Path(__file__).parent
    for item in (item for item in items if backend and here in item.path.parents):
        item.add_marker(pytest.mark.timeout(3600))
        for need in (need for mark in item.iter_markers("needs") for need in mark.args):
            if reason := why_not(backend, need):
                item.add_marker(pytest.mark.skip(reason=reason))


def why_not(backend: Backend, need: str) -> str | None:
    """Why the backend cannot give what a test needs, in its own words; None if it can."""
    if need == "native code":
        return f"this is about cpu_native, not {backend}"
    fields = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "bfloat16"}
    try:
        check_supported(backend, layout_for(backend, **{**fields, **NEEDS[need]}), num_heads=4)
    except ValueError as error:
        return str(error)
    return None


NEEDS: dict[str, dict[str, Any]] = {"float32 pages": {"dtype": "float32"}, "small heads": {"head_dim": 16}}
"""By the name that tests give it: what of a pool's layout a test is about, beyond what every backend takes."""


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[Engine]:
    engine = tiny_engine(num_blocks=32)
    yield engine
    assert engine.stats().recompilations == 0
    engine.close()


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    for request_id in list(shared_engine.unfinished):
        shared_engine.abort(request_id)
    shared_engine.step()
    shared_engine.check()
