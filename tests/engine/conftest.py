"""One tiny engine for all tests that do not need special settings; it must end idle, balanced and without recompilation."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
from fixtures import tiny_engine as tiny_engine_module
from fixtures.interpreted import interpreted
from fixtures.tiny_engine import tiny_engine

from jaxkv import Engine


@pytest.fixture(scope="session", autouse=True)
def engine_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    backend = request.config.getoption("engine_backend")
    if backend is None:
        yield
        return
    with interpreted(backend), mock.patch.object(tiny_engine_module, "DEFAULT_BACKEND", backend):
        yield


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
