"""The names of the package: all importable, and none costs JAX before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import jaxkv


@pytest.mark.parametrize("name", jaxkv.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(jaxkv, name) is not None


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        jaxkv.Motor  # noqa: B018


def test_importing_the_package_and_the_scheduler_does_not_import_jax() -> None:
    code = "import jaxkv, jaxkv.scheduling.scheduler, jaxkv.core.config, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
