"""The goldens against the live reference, where its environment has been built (`make oracle`)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from oracle.goldens import HERE, TINY_NAMES, load_goldens, load_tiny_golden

from jaxkv.weights.catalog import DEFAULT_MODEL
from jaxkv.weights.hub import resolve

LIVE = ("english", "spanish", "chat_turns", "single_token")
"""The cases that are asked again, of many: each takes the reference a minute of two cores."""
ORACLE = HERE.parents[1] / ".venv-oracle" / "bin" / "python"


def test_goldens_are_whole() -> None:
    cases = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
    goldens = load_goldens()
    assert [golden.name for golden in goldens] == [case["name"] for case in cases]
    for golden in goldens:
        assert len(golden.output_ids) == len(golden.margins) == 48
        assert len(golden.prompt_logprobs) == len(golden.prompt_ids)
    assert sum(golden.sure_length == 48 for golden in goldens) >= 12
    assert sorted(path.name for path in (HERE / "tiny").iterdir() if path.is_dir()) == list(TINY_NAMES)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with goldens made now."""
    if not ORACLE.exists():
        pytest.skip("the reference environment is not built: make oracle")
    out = tmp_path_factory.mktemp("live")
    gguf = resolve(DEFAULT_MODEL).path
    command = [str(ORACLE), str(HERE / "make_goldens.py"), "--gguf", str(gguf), "--out", str(out), "--only", *LIVE]
    subprocess.run(command, check=True, capture_output=True)
    return out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_reference_still_says_the_same(live: Path) -> None:
    """Up to what another thread count changes: sums in another order, and ties that fall the other way."""
    committed = [golden for golden in load_goldens() if golden.name in LIVE]
    assert len(committed) == len(LIVE)
    for old, new in zip(committed, load_goldens(live), strict=True):
        assert (old.name, old.text, old.prompt_ids) == (new.name, new.text, new.prompt_ids)
        np.testing.assert_allclose(floats(old.prompt_logprobs[1:]), floats(new.prompt_logprobs[1:]), atol=1e-3)
        sure = old.sure_length
        assert old.output_ids[:sure] == new.output_ids[:sure]
        np.testing.assert_allclose(old.margins[:sure], new.margins[:sure], atol=1e-2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TINY_NAMES)
def test_the_reference_still_says_the_same_of_tiny_models(live: Path, name: str) -> None:
    old, new = load_tiny_golden(name), load_tiny_golden(name, live)
    np.testing.assert_array_equal(old.ids, new.ids)
    np.testing.assert_allclose(old.logprobs, new.logprobs, atol=1e-4)
    assert old.output_ids[: old.sure_length].tolist() == new.output_ids[: old.sure_length].tolist()


def floats(values: list[float | None]) -> np.ndarray:
    return np.array(values, np.float64)
