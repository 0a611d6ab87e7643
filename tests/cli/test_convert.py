"""`jaxkv convert`: the directory is whole or not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from oracle.goldens import load_tiny_golden
from weights.gguf_writer import tiny_gguf

from jaxkv.cli.app import run
from jaxkv.text.tokenizer import Tokenizer
from jaxkv.weights.load import load_model
from jaxkv.weights.source import ModelSource

CHARACTERS = [chr(0x21 + i) for i in range(94)]


def gguf(path: Path, kind: Kind = Kind.F32, **more: Any) -> Path:
    """A file whose vocabulary can encode something."""
    tokens = CHARACTERS + [f"t{i}" for i in range(66)]
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["t 1"]}
    tiny_gguf(path, load_tiny_golden("default").path, kind, **keys, **more)
    return path


def test_a_gguf_file_becomes_a_directory_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ModelSource("gguf", gguf(tmp_path / "tiny.gguf", Kind.Q8_0), "tiny")
    target = tmp_path / "new" / "out"
    assert run(["convert", str(source.path), "--to", str(target), "--format", "hf"]) == 0
    assert capsys.readouterr().out == f"wrote {target}\n"
    before, after = load_model(source, "bfloat16"), load_model(ModelSource("hf_dir", target, "out"), "bfloat16")
    assert after.config == before.config
    np.testing.assert_array_equal(after.params["layers"]["qkv"], before.params["layers"]["qkv"])
    tokenizer = Tokenizer.from_hf_dir(target, extra_eos_ids=after.eos_ids)
    assert tokenizer.encode("Zt1") == [CHARACTERS.index(character) for character in "Zt1"]
    assert (tokenizer.eos_ids, tokenizer.chat_template) == ((2, 5), "{{ messages }}")
    assert run(["convert", str(target), "--to", str(tmp_path / "again")]) == 0
    for path in target.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name


def test_what_goes_wrong_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(gguf(tmp_path / "tiny.gguf"))
    target = str(tmp_path / "out")

    def complaint(*arguments: str, code: int) -> str:
        assert run(["convert", *arguments]) == code
        return capsys.readouterr().err

    assert "--format is 'gguf'" in complaint(source, "--to", target, "--format", "gguf", code=2)
    assert "no model 'smolm'" in complaint("smolm", "--to", target, code=1)
    assert "which exists" in complaint(source, "--to", str(tmp_path), code=2)
    assert "cannot write" in complaint(source, "--to", str(tmp_path / "tiny.gguf" / "out"), code=1)
    hole = {"blk.1.ffn_down.weight": np.full((64, 64), np.nan, np.float32)}
    bad = str(gguf(tmp_path / "bad.gguf", add=hole))
    assert "blk.1.ffn_down.weight holds NaN" in complaint(bad, "--to", target, code=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf", "tiny.gguf"]
