"""A real tiny engine behind a real socket, for the whole session."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import httpx
import pytest
from fixtures.live_server import live_server
from fixtures.tiny_engine import TINY, tiny_engine

from jaxkv.engine.async_engine import AsyncEngine


@pytest.fixture(scope="session")
def engine() -> AsyncEngine:
    """Context of 256 bytes, four sequences at once, 512 bytes of KV pages."""
    model = dataclasses.replace(TINY, max_position=256)
    return AsyncEngine(tiny_engine(model=model, num_blocks=128, max_num_seqs=8, max_model_len=256))


@pytest.fixture(scope="session")
def base_url(engine: AsyncEngine) -> Iterator[str]:
    with live_server(engine) as url:
        yield url
    engine.shutdown()


@pytest.fixture
def client(base_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=60) as client:
        yield client
