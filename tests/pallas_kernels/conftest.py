"""Between the files of tests, compiled kernels are forgotten: a worker would hold gigabytes of them in the end."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_kernels() -> Iterator[None]:
    yield
    jax.clear_caches()
