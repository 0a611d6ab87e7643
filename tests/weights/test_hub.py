"""From a model's name to its place on disk."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from oracle.goldens import load_tiny_golden

from jaxkv.core.errors import ModelLoadError
from jaxkv.weights import hf_hub
from jaxkv.weights.catalog import CATALOG, DEFAULT_MODEL
from jaxkv.weights.hub import resolve
from jaxkv.weights.source import ModelSource


def refusal(name: str, **options) -> str:
    with pytest.raises(ModelLoadError) as caught:
        resolve(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_directory(monkeypatch) -> None:
    path = load_tiny_golden("default").path
    assert resolve(str(path)) == ModelSource("hf_dir", path, str(path))
    monkeypatch.chdir(path.parent.parent)
    assert resolve("tiny/default") == ModelSource("hf_dir", Path("tiny/default"), "tiny/default")


def test_gguf_file(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "x.gguf").write_bytes(b"")
    assert resolve(str(tmp_path / "x.gguf")) == ModelSource("gguf", tmp_path / "x.gguf", str(tmp_path / "x.gguf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/x.gguf").path == tmp_path / "x.gguf"


def test_what_is_no_model(tmp_path: Path) -> None:
    assert "no config.json" in refusal(str(tmp_path))
    (tmp_path / "some.gguf").touch()
    assert "some.gguf: pass that file" in refusal(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    assert "not a .gguf" in refusal(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(
    "name",
    ["", "nothing", "x" * 5000, "~nobody/x", "./owner/name", "/owner/name", "a/b/c", "owner/name.gguf", "a b/c", "é/b"],
)
def test_names_that_cannot_be_a_model(name: str) -> None:
    message = refusal(name)
    assert f"no model {name!r}" in message
    assert DEFAULT_MODEL in message


def test_a_near_miss_is_named() -> None:
    assert f"Did you mean {DEFAULT_MODEL}?" in refusal("smollm2-135m")


def test_the_alias_wins_over_a_path_of_that_name(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / DEFAULT_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxkv.weights.hub.fetch_catalog_model", lambda entry, _: tmp_path / entry.file_name)
    assert resolve(DEFAULT_MODEL).path == tmp_path / CATALOG[DEFAULT_MODEL].file_name


def test_a_revision_is_for_hub_repositories_only() -> None:
    assert "revision 'v2'" in refusal(DEFAULT_MODEL, revision="v2")
    assert "revision 'v2'" in refusal(str(load_tiny_golden("default").path), revision="v2")


def test_hub_repository(tmp_path: Path, monkeypatch) -> None:
    asked = {}

    def snapshot_download(repo_id: str, **options) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(hf_hub, "snapshot_download", snapshot_download)
    source = resolve("owner/name-1.5B", revision="v2", cache_dir=tmp_path)
    assert source == ModelSource("hf_dir", tmp_path / "snapshot", "owner/name-1.5B")
    assert (asked["repo_id"], asked["revision"], asked["cache_dir"]) == ("owner/name-1.5B", "v2", tmp_path / "hub")
    resolve("owner/name")
    assert (asked["revision"], asked["cache_dir"]) == (None, None)


RESPONSE = httpx.Response(404, request=httpx.Request("GET", "http://localhost"))


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (LocalEntryNotFoundError("no\nnetwork"), "the hub cannot be reached"),
        (RepositoryNotFoundError("no", response=RESPONSE), "does not exist on the hub"),
        (GatedRepoError("no", response=RESPONSE), "is gated"),
        (RevisionNotFoundError("no", response=RESPONSE), "no revision main"),
        (OSError(28, "No space left on device"), "the disk is full"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (httpx.ReadTimeout("slow\nhub"), "slow"),
        (ValueError(""), "ValueError"),
    ],
)
def test_what_the_hub_may_answer(monkeypatch, error: Exception, named: str) -> None:
    def snapshot_download(*_args, **_options) -> str:
        raise error

    monkeypatch.setattr(hf_hub, "snapshot_download", snapshot_download)
    message = refusal("owner/name", revision="main")
    assert named in message
    assert "owner/name" in message
