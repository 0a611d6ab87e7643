"""Files of static KV scales: what is read, and that nothing which is no scale gets through."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxkv import ConfigError
from jaxkv.cache.static_scales import read_static_scales, split_static_scales

GOOD: dict[str, Any] = {
    "kv_cache_dtype": "fp8_e4m3",
    "k_scales": [[0.5, 1], [2.0, 4.0]],
    "v_scales": [[8.0, 16.0], [32.0, 64.0]],
}


def read(path: Path, text: str) -> Any:
    path.write_text(text, encoding="utf-8")
    return read_static_scales(path, kv_cache_dtype="fp8_e4m3", num_layers=2, num_kv_heads=2)


def test_keys_and_values_by_layer_and_head(tmp_path: Path) -> None:
    scales = read(tmp_path / "scales.json", json.dumps(GOOD))
    assert scales.dtype == np.float32
    np.testing.assert_array_equal(scales, [[[0.5, 1], [8, 16]], [[2, 4], [32, 64]]])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"k_scales": [[0.5, 0], [2.0, 4.0]]}, "k_scales of layer 0, head 1 is 0: a scale must be a finite number above 0"),
        ({"k_scales": [[0.5, 0.0], [2.0, 4.0]]}, "head 1 is 0.0"),
        ({"v_scales": [[8.0, 16.0], [-32.0, 64.0]]}, "v_scales of layer 1, head 0 is -32.0"),
        ({"v_scales": [[8.0, 16.0], [None, 64.0]]}, "layer 1, head 0 is None"),
        ({"v_scales": [[8.0, 16.0], [True, 64.0]]}, "is True"),
        ({"v_scales": [[8.0, 16.0], ["1", 64.0]]}, "is '1'"),
        ({"v_scales": [[8.0, 16.0], [float("nan"), 64.0]]}, "is nan"),
        ({"v_scales": [[8.0, 16.0], [float("inf"), 64.0]]}, "is inf"),
        ({"v_scales": [[8.0, 16.0], [1e-45, 64.0]]}, "is 1e-45"),
        ({"v_scales": [[8.0, 16.0], [1e39, 64.0]]}, r"is 1e\+39"),
        ({"v_scales": [[8.0, 16.0], [10**400, 64.0]]}, "is 1000"),
        ({"v_scales": [[8.0, 16.0], [32.0]]}, "layer 1 must hold a number for each of 2 KV heads: it has 1"),
        ({"v_scales": [[8.0, 16.0]]}, "a row for each of the model's 2 layers: it has 1 rows"),
        ({"k_scales": 3}, "it has a JSON int"),
        ({"k_scales": [3, 4]}, "layer 0 must hold a number for each of 2 KV heads: it has 3"),
        ({"kv_cache_dtype": "int8"}, "made for|holds scales for kv_cache_dtype 'int8', but the pool is fp8_e4m3"),
        ({"extra": 1}, "exactly k_scales, kv_cache_dtype, v_scales: it has"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(tmp_path / "scales.json", json.dumps(GOOD | change))


@pytest.mark.parametrize("missing", GOOD)
def test_an_absent_part_is_refused(tmp_path: Path, missing: str) -> None:
    with pytest.raises(ConfigError, match="must be an object with exactly"):
        read(tmp_path / "scales.json", json.dumps({name: value for name, value in GOOD.items() if name != missing}))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_no_object(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "scales.json"))):
        read(tmp_path / "scales.json", text)


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file"):
        read_static_scales(tmp_path / "none.json", kv_cache_dtype="int8", num_layers=1, num_kv_heads=1)


def test_copied_and_padded_heads() -> None:
    scales = np.array([[[2.0, 3.0], [4.0, 5.0]]], np.float32)
    np.testing.assert_array_equal(split_static_scales(scales, 6, 2), [[[2, 2, 3, 3, 1, 1], [4, 4, 5, 5, 1, 1]]])
